"""Prometheus families of a syphon: of `peeklock syphon`, and of one that a broker runs.

`docs/operations.md` explains each.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_COUNTERS: Final = {  # key of the snapshot: name, help
    "moved": ("moved_messages", "Messages that the primary has taken; one that is sent again counts again."),
    "moved_bytes": ("moved_bytes", "Encoded size of the moved messages."),
    "completed": ("completed_messages", "Messages that were moved and have left the backlog."),
    "deferrals": ("deferrals", "Messages set aside because their destination takes none for now."),
    "released": (
        "released_messages",
        "Messages given back to the backlog, because the primary went away or at the end.",
    ),
    "polls": ("polls", "Waits of 15 minutes for a message that found none, which Service Bus bills as operations."),
    "lease_renewals": ("lease_renewals", "Renewals of leases of backlog queues."),
    "leases_lost": ("leases_lost", "Leases of backlog queues that were lost."),
    "probes": ("primary_probes", "Attempts to reach the primary."),
    "losses": ("primary_losses", "Times that the primary went away."),
}
_OF_QUEUES: Final = {  # key of a queue's part of the snapshot: name, help
    "backlog": ("backlog_messages", "Messages in a backlog queue when they were last counted, each 10 s."),
    "deferred": ("deferred_messages", "Messages of a backlog queue that are set aside, of those in the backlog."),
    "is_leased": ("lease_held", "1 while this syphon has the lease of the backlog queue."),
}


def inner_families(snapshot: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Yield the metrics of the syphon that a broker runs; `snapshot` is None if it has not answered."""
    up = "1 if the syphon that the broker runs answered this scrape, else 0."
    yield GaugeMetricFamily("peeklock_syphon_up", up, value=snapshot is not None)
    if snapshot is not None:
        text = "Times the syphon was restarted since the broker was started."
        yield CounterMetricFamily("peeklock_syphon_restarts", text, value=snapshot["restarts"])
        yield from families(snapshot)


def families(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    """`snapshot` is that of `broker.pairing.syphon.service`."""
    for key, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"peeklock_syphon_{name}", text, value=snapshot[key])
    dead = CounterMetricFamily(
        "peeklock_syphon_deadletter_message",
        "Messages of the backlog that were dead-lettered there.",
        labels=["reason"],
    )
    for reason, count in sorted(snapshot["dead_lettered"].items()):
        dead.add_metric([reason], count)
    yield dead
    up = "1 while the syphon reaches the primary, else 0."
    yield GaugeMetricFamily("peeklock_syphon_primary_up", up, value=snapshot["is_primary_up"])
    for key, (name, text) in _OF_QUEUES.items():
        family = GaugeMetricFamily(f"peeklock_syphon_{name}", text, labels=["queue"])
        for queue, values in sorted(snapshot["queues"].items()):
            if values[key] is not None:
                family.add_metric([queue], values[key])
        yield family
