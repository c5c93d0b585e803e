"""Prometheus families of a sidecar. `docs/operations.md` explains each."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.pairing.counters import Counters

_PAIRING: Final = {  # field of Counters: name, help
    "sent_to_primary": ("messages_sent_to_primary", "Deliveries of senders that the primary has accepted."),
    "sent_to_backlog": ("messages_sent_to_backlog", "Deliveries of senders that the backlog has accepted."),
    "failures": ("send_failures", "Failed sends that count towards a failover."),
    "failovers": ("failovers", "Times that an entity has failed over."),
    "failbacks": ("failbacks", "Times that an entity was back."),
    "pings": ("pings", "Pings sent to entities that have failed over, which Service Bus bills as operations."),
    "backlog_queues_pulled": ("backlog_queues_pulled", "Times that a backlog queue was pulled from rotation."),
}
assert _PAIRING.keys() == {each.name for each in fields(Counters)}
_COUNTERS: Final = {
    "connections_opened": "Connections of clients.",
    "connections_refused": "Connections of clients that were closed at once because of a limit.",
    "accept_failures": "Times that a connection could not be accepted.",
}
_GAUGES: Final = {
    "connections": ("active_connections", "Connections of clients open now."),
    "answered_here": ("connections_without_primary", "Those of them that were opened while the primary was away."),
    "held_bytes": ("held_bytes", "Bytes of messages that wait for the primary or for the backlog."),
    "is_away": ("primary_away", "1 if the last attempt to connect to the primary has failed, else 0."),
    "has_backlog": ("backlog_ready", "1 if the backlog queues were found or made, else 0."),
}


def families(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics for a sidecar's `Sidecar.snapshot`."""
    for field, (name, text) in _PAIRING.items():
        yield CounterMetricFamily(f"peeklock_pair_{name}", text, value=getattr(snapshot["counters"], field))
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"peeklock_pair_{name}", text, value=snapshot[name])
    for field, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"peeklock_pair_{name}", text, value=int(snapshot[field]))
    text = "1 for the state that an entity is in which is not healthy."
    states = GaugeMetricFamily("peeklock_pair_entity_state", text, labels=["entity", "state"])
    for entity, state in sorted(snapshot["entities"].items()):
        states.add_metric([entity, str(state)], 1)
    yield states
    text = "0 if the queue was pulled, else 1."
    queues = GaugeMetricFamily("peeklock_pair_backlog_queue_in_rotation", text, labels=["queue"])
    for queue, is_in in snapshot["queues"].items():
        queues.add_metric([queue], int(is_in))
    yield queues
