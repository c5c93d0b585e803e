"""The text of `/metrics`: Prometheus families made from the counters of gateway and workers.

Names are those of Azure Monitor for Service Bus in snake case, with `peeklock_` before and Prometheus's suffixes
after; metrics that Service Bus does not have are named in the same style. `docs/operations.md` explains each. This
module is imported at the first scrape, because the Prometheus library takes memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from broker import journal_exposition, syphon_exposition
from broker.child import gateway_process
from broker.metrics import EndpointMetrics, Scene
from broker.wire import Outcome
from storage.queue_ids import entity_of, part_of

CONTENT_TYPE = CONTENT_TYPE_LATEST
Families = Iterator[Metric]

ENTITY_COUNTERS = {  # key of an entity's part of the snapshot: help
    "incoming_requests": "Operations that clients asked of the entity.",
    "successful_requests": "Operations that succeeded.",
    "server_errors": "Operations that failed for a reason inside the broker.",
    "user_errors": "Operations refused because of what the client asked, lost locks included.",
    "throttled_requests": "Operations refused for now; a retry helps.",
    "incoming_messages": "Messages accepted; each of a batch counts.",
    "outgoing_messages": "Messages put on the wire, redeliveries included.",
    "incoming_bytes": "Encoded size of the messages accepted.",
    "outgoing_bytes": "Encoded size of the messages put on the wire.",
}

SETTLED = {  # outcome: name, help
    Outcome.ACCEPTED: ("complete_message", "Messages completed."),
    Outcome.ABANDONED: ("abandon_message", "Messages abandoned by their receiver."),
    Outcome.DEFERRED: ("defer_message", "Messages deferred."),
    Outcome.DEAD_LETTERED: ("deadletter_message", "Messages dead-lettered by their receiver."),
    Outcome.RELEASED: ("release_message", "Messages released, which is no failed delivery."),
}

GATEWAY_COUNTERS = {  # key of a gateway's snapshot: name, help
    "restarts": ("gateway_restarts", "Times the gateway was restarted since the broker was started."),
    "connections_opened": ("connections_opened", "Connections accepted."),
    "connections_closed": ("connections_closed", "Connections that ended."),
    "connections_refused": ("connections_refused", "Connections closed at once because of a limit."),
    "connections_ended_for_memory": (
        "connections_ended_for_memory",
        "Connections closed because all together took as much memory as they may.",
    ),
    "accept_failures": (
        "accept_failures",
        "Times that a connection could not be accepted, usually because no file descriptor was left.",
    ),
    "connection_failures": ("connection_failures", "Failures inside the gateway that ended a connection."),
    "authentication_failures": (
        "authentication_failures",
        "Failed SASL exchanges, refused CBS tokens, HTTP requests without the right.",
    ),
    "lost_settlements": ("lost_settlements", "Settlements that came after their lock was lost."),
    "bytes_in": ("connection_incoming_bytes", "AMQP bytes read from clients."),
    "bytes_out": ("connection_outgoing_bytes", "AMQP bytes written to clients."),
    "tls_reload_failures": ("tls_reload_failures", "Times that SIGHUP found certificates that cannot be used."),
    "worker_connects": ("worker_connects", "Connections made from the gateway to workers."),
    "worker_stalls": ("worker_stalls", "Times that operations were refused as busy, because a worker did not answer."),
}

GATEWAY_GAUGES = {
    "tls_handshakes": "Connections in their TLS handshake now, which are not among the active ones.",
    "tls_certificate_expires_seconds": "When the certificate of the TLS ports ends, Unix time; 0 without TLS.",
    "sessions": "AMQP sessions open now.",
    "connections_held_bytes": "Memory that the connections take now, by an estimate.",
}

GATEWAY_HISTOGRAMS = {
    "send_latency": ("server_send_latency_seconds", "Time from a send's last byte to its disposition."),
    "delivery_latency": (
        "delivery_latency_seconds",
        "Time from a message's enqueueing to its hand-over to the wire.",
    ),
}

WORKER_COUNTERS = {  # key of a worker's snapshot: name, help
    "restarts": ("worker_restarts", "Times the worker was restarted since the broker was started."),
    "turns": ("worker_turns", "Turns of the worker's loop."),
    "commits": ("worker_commits", "Commits of all the worker's partitions together, each with one sync of its log."),
    "internal_errors": (
        "worker_internal_errors",
        "Commands that failed by the broker's mistake and changed nothing.",
    ),
}

WORKER_HISTOGRAMS = {
    "turn_seconds": ("worker_turn_seconds", "Duration of a turn that committed: apply, hand out, commit."),
    "fsync_seconds": (
        "worker_fsync_seconds",
        "Duration of one commit: the log's write and sync, and waits for the checkpointer.",
    ),
    "messages_per_commit": ("worker_messages_per_commit", "Sends and settlements that shared one commit."),
}

LOG = {  # attribute of LogUsage: type, name, help
    "young_bytes": (GaugeMetricFamily, "log_young_bytes", "Bytes of the log with what the stores do not have yet."),
    "log_bytes": (GaugeMetricFamily, "log_limit_bytes", "Young bytes beyond which sends are refused."),
    "kept_bytes": (GaugeMetricFamily, "log_kept_bytes", "Bytes of files of the log that only the journal needs."),
    "lost_segments": (
        CounterMetricFamily,
        "log_lost_segments",
        "Files of the log that were used again before the journal had read them.",
    ),
    "segments": (GaugeMetricFamily, "log_segments", "Files of the log."),
    "disk_bytes": (GaugeMetricFamily, "log_disk_bytes", "Bytes of the files of the log."),
    "checkpoints": (CounterMetricFamily, "log_checkpoints", "Times that the stores were brought up to date."),
    "waited_seconds": (CounterMetricFamily, "log_waited_seconds", "Time that commits waited for the checkpointer."),
    "checkpointer_starts": (CounterMetricFamily, "checkpointer_starts", "Starts of the worker's checkpointer."),
}

PARTITION = {  # key of a partition's part of the snapshot: type, name, help
    "used_bytes": (GaugeMetricFamily, "store_used_bytes", "Bytes of the partition's store in use."),
    "capacity_bytes": (GaugeMetricFamily, "store_capacity_bytes", "Bytes the partition's store may grow to."),
    "locks": (GaugeMetricFamily, "locks", "Messages locked now."),
    "receivers": (GaugeMetricFamily, "receivers", "Receivers open on the partition now."),
    "quarantined": (GaugeMetricFamily, "quarantined_records", "Corrupt records set aside, see `peeklock verify`."),
    "parked": (GaugeMetricFamily, "partition_parked", "1 if the partition is out of service: its store is damaged."),
    "refuses_sends": (GaugeMetricFamily, "partition_refuses_sends", "1 if messages find no room in the store, else 0."),
    "expired": (CounterMetricFamily, "expired_messages", "Messages whose time to live ended."),
    "dead_lettered": (CounterMetricFamily, "broker_deadletter_message", "Messages the broker itself dead-lettered."),
    "locks_expired": (CounterMetricFamily, "expired_locks", "Locks that ran out before a settlement."),
    "rules_failed": (CounterMetricFamily, "failed_rules", "Filters and actions of rules that failed on a message."),
    "duplicates": (CounterMetricFamily, "duplicate_messages", "Messages dropped because their id was seen before."),
    "transactions": (GaugeMetricFamily, "transactions", "Transactions that have work and have not ended."),
    "committed": (CounterMetricFamily, "committed_transactions", "Transactions whose work was done."),
    "rolled_back": (CounterMetricFamily, "rolled_back_transactions", "Transactions of whose work nothing was done."),
    "auto_deleted": (CounterMetricFamily, "auto_deleted_entities", "Entities deleted because nobody used them."),
    "forwarded": (CounterMetricFamily, "forwarded_messages", "Messages that entities forwarded to another."),
}

ENTITY_GAUGES = {
    "messages": "Messages in the entity in any state, its dead-letter queues included.",
    "active_messages": "Messages available or locked, and those deferred.",
    "deadlettered_messages": "Messages in the dead-letter queue.",
    "transfer_messages": "Messages that wait to be moved to another entity.",
    "transfer_deadlettered_messages": "Messages that could not be forwarded, in the transfer dead-letter queue.",
    "scheduled_messages": "Messages that wait for their scheduled time.",
    "deferred_messages": "Messages deferred, of the active ones.",
    "locked_messages": "Messages locked, of the active ones.",
    "size_bytes": "Bytes of the messages of the entity, its dead-letter queues included.",
}

OTHER_PARTS = {1: "deadlettered_messages", 2: "transfer_deadlettered_messages", 3: "transfer_messages"}


def render(found: Families) -> Iterator[bytes]:
    """The exposition text in the format of CONTENT_TYPE, one family at a time.

    With thousands of entities all families take so long that clients would notice; the caller serves clients in
    between.
    """
    for family in found:
        yield generate_latest(_One(family))


class _One(Collector):
    """A registry of one family, as `generate_latest` requires it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def families(scene: Scene) -> Families:
    """All that a broker shows."""
    yield from _build(scene.version)
    yield from _endpoint(scene.endpoint)
    yield from _up(scene.gateways, "gateway")
    gateways = _present(scene.gateways)
    yield from _gateways(gateways)
    yield from _entity_counters(gateways)
    yield from _entity_gauges(scene)
    yield from _up(scene.workers, "worker")
    yield from _workers(_present(scene.workers))
    for syphon in scene.syphons.values():
        yield from syphon_exposition.inner_families(syphon)
    for journal in scene.journals.values():
        yield from journal_exposition.families(journal)
    yield from _usage(_processes(scene))


def companion_families(process: str, version: str, endpoint: EndpointMetrics, usage: Mapping[str, float]) -> Families:
    """What any process shows that stands beside brokers; `usage` is that of `process_usage`."""
    yield from _build(version)
    yield from _endpoint(endpoint)
    yield from _usage([(process, usage)])


def _build(version: str) -> Families:
    build = GaugeMetricFamily("peeklock_build_info", "Always 1; the label tells the version.", labels=["version"])
    build.add_metric([version], 1)
    yield build


Present = Sequence[tuple[str, Mapping[str, Any]]]
"""The number of each that has answered, as a label, and its snapshot."""

Named = Mapping[str, tuple[str, str]]
"""Key of a snapshot: name of the family, help."""


def _present(snapshots: Mapping[int, Mapping[str, Any] | None]) -> Present:
    return [(str(number), snapshot) for number, snapshot in sorted(snapshots.items()) if snapshot is not None]


def _up(snapshots: Mapping[int, Mapping[str, Any] | None], label: str) -> Families:
    text = f"1 if the {label} answered this scrape, else 0."
    up = GaugeMetricFamily(f"peeklock_{label}_up", text, labels=[label])
    for number, snapshot in sorted(snapshots.items()):
        up.add_metric([str(number)], snapshot is not None)
    yield up


def _endpoint(endpoint: EndpointMetrics) -> Families:
    text = "Connections to the operations endpoint that made room for newer ones."
    yield CounterMetricFamily("peeklock_operations_connections_dropped", text, value=endpoint.connections_dropped)
    text = "Times that a connection to the operations endpoint could not be accepted."
    yield CounterMetricFamily("peeklock_operations_accept_failures", text, value=endpoint.accept_failures)


def _counters(present: Present, label: str, wanted: Named) -> Families:
    for key, (name, text) in wanted.items():
        counter = CounterMetricFamily(f"peeklock_{name}", text, labels=[label])
        for number, snapshot in present:
            counter.add_metric([number], snapshot[key])
        yield counter


def _histograms(present: Present, label: str, wanted: Named) -> Families:
    for key, (name, text) in wanted.items():
        histogram = HistogramMetricFamily(f"peeklock_{name}", text, labels=[label])
        for number, snapshot in present:
            _add_histogram(histogram, [number], snapshot[key])
        yield histogram


def _gateways(gateways: Present) -> Families:
    yield from _counters(gateways, "gateway", GATEWAY_COUNTERS)
    active = GaugeMetricFamily("peeklock_active_connections", "Connections open now.", labels=["gateway"])
    links = GaugeMetricFamily(
        "peeklock_links", "Links open now, by what the client does on them.", labels=["gateway", "role"]
    )
    requests = CounterMetricFamily(
        "peeklock_http_requests", "HTTP requests answered.", labels=["gateway", "route", "status"]
    )
    errors = CounterMetricFamily(
        "peeklock_errors", "Errors sent to clients, by condition.", labels=["gateway", "condition"]
    )
    for label, snapshot in gateways:
        active.add_metric([label], snapshot["connections_opened"] - snapshot["connections_closed"])
        links.add_metric([label, "sender"], snapshot["senders"])
        links.add_metric([label, "receiver"], snapshot["receivers"])
        for condition, count in sorted(snapshot["errors"].items()):
            errors.add_metric([label, condition], count)
        for answered, count in sorted(snapshot["http_requests"].items()):
            requests.add_metric([label, *answered.split()], count)
    yield from (active, links, errors, requests)
    for key, text in GATEWAY_GAUGES.items():
        gauge = GaugeMetricFamily(f"peeklock_{key}", text, labels=["gateway"])
        for label, snapshot in gateways:
            gauge.add_metric([label], snapshot[key])
        yield gauge
    yield from _histograms(gateways, "gateway", GATEWAY_HISTOGRAMS)


def _entity_counters(gateways: Present) -> Families:
    by_name = [(label, sorted(snapshot["entities"].items())) for label, snapshot in gateways]
    for key, text in ENTITY_COUNTERS.items():
        family = CounterMetricFamily(f"peeklock_{key}", text, labels=["gateway", "entity"])
        for label, entities in by_name:
            for name, entity in entities:
                family.add_metric([label, name], entity[key])
        yield family
    for outcome, (metric, text) in SETTLED.items():
        family = CounterMetricFamily(f"peeklock_{metric}", text, labels=["gateway", "entity"])
        for label, entities in by_name:
            for name, entity in entities:
                family.add_metric([label, name], entity["settled"][outcome])
        yield family


def _entity_gauges(scene: Scene) -> Families:
    totals = {name: dict.fromkeys(ENTITY_GAUGES, 0) for name in scene.entities.values()}
    for by_queue in scene.counts:
        for queue, (available, deferred, scheduled, size, locked) in by_queue.items():
            name = scene.entities.get(entity_of(queue))
            if name is None:
                continue  # it was deleted meanwhile
            total = totals[name]
            total["messages"] += available + deferred + scheduled
            total["size_bytes"] += size
            other = OTHER_PARTS.get(part_of(queue))
            if other is not None:
                total[other] += available + deferred + scheduled
            else:
                waits = "transfer_messages" if entity_of(queue) in scene.forwarding else "active_messages"
                total[waits] += available
                total["active_messages"] += deferred
                total["scheduled_messages"] += scheduled
                total["deferred_messages"] += deferred
                total["locked_messages"] += locked
    for gauge, text in ENTITY_GAUGES.items():
        family = GaugeMetricFamily(f"peeklock_{gauge}", text, labels=["entity"])
        for name, total in sorted(totals.items()):
            family.add_metric([name], total[gauge])
        yield family


def _workers(present: Present) -> Families:
    yield from _counters(present, "worker", WORKER_COUNTERS)
    yield from _histograms(present, "worker", WORKER_HISTOGRAMS)
    for key, (kind, name, text) in LOG.items():
        family = kind(f"peeklock_{name}", text, labels=["worker"])
        for worker_label, snapshot in present:
            family.add_metric([worker_label], snapshot["log"][key])
        yield family
    for key, (kind, name, text) in PARTITION.items():
        family = kind(f"peeklock_{name}", text, labels=["partition"])
        for _, snapshot in present:
            for partition, values in snapshot["partitions"].items():
                if key in values:
                    family.add_metric([str(partition)], values[key])
        yield family


def _processes(scene: Scene) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The processes of a broker by name, and what each uses."""
    for number, snapshot in _present(scene.gateways):
        yield gateway_process(int(number)), snapshot
    if scene.observer is not None:
        yield "observer", scene.observer
    for _, snapshot in _present(scene.syphons):
        yield "syphon", snapshot
    for _, snapshot in _present(scene.journals):
        yield "journal", snapshot
    for worker, snapshot in _present(scene.workers):
        if not scene.is_one_process:
            yield f"worker-{worker}", snapshot
        if snapshot["checkpointer"] is not None:
            yield f"checkpointer-{worker}", snapshot["checkpointer"]


def _usage(processes: Iterable[tuple[str, Mapping[str, Any]]]) -> Families:
    resident = GaugeMetricFamily(
        "peeklock_process_resident_memory_bytes", "Resident memory of a process of the broker.", labels=["process"]
    )
    cpu = CounterMetricFamily("peeklock_process_cpu_seconds", "CPU time a process has used.", labels=["process"])
    for process, used in processes:
        resident.add_metric([process], used["resident_bytes"])
        cpu.add_metric([process], used["cpu_seconds"])
    yield resident
    yield cpu


def _add_histogram(family: HistogramMetricFamily, labels: list[str], snapshot: Sequence[Any]) -> None:
    bounds, counts, total = snapshot
    buckets: list[tuple[str, float]] = []
    cumulative = 0
    for bound, count in zip([*map(repr, bounds), "+Inf"], counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    family.add_metric(labels, buckets, sum_value=total)
