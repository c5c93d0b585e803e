"""Counters of gateway and workers: plain numbers, cheap enough for the hot path.

Only one thread of each process records, so there are no locks. Nothing here imports the exposition format, which
`broker.exposition` makes when somebody asks for it. Counters only grow; a process that is restarted begins at zero, as
Prometheus expects. Times are seconds, sizes bytes.
"""

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

# Upper bounds, each included in its bucket. One fsync is about 0.3 ms on an SSD and 10 ms on a hard disk.
WORK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# A message may wait in a backlog between its arrival and its delivery, so the bounds reach to a day.
DELIVERY_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0, 3600.0, 86400.0)
GROUP_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)

# Kept open: a process that has used up its descriptors can still be measured.
_STATM = os.open("/proc/self/statm", os.O_RDONLY)


class Histogram:
    """Counts of observations by upper bound."""

    __slots__ = ("_above", "_at", "_bounds", "_counts", "_here", "_up_to", "sum")

    def __init__(self, bounds: Sequence[float] = WORK_SECONDS) -> None:
        self._bounds = tuple(bounds)
        # One item more than there are bounds, for values above the last; not cumulative, and without `_here`.
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0
        # The last value's index in `_counts`, its limits, and how often it was met since: the next value is often
        # between them, too, and this is done several times in each turn.
        self._at = 0
        self._above, self._up_to = -inf, self._bounds[0]
        self._here = 0

    def observe(self, value: float) -> None:
        if not self._above < value <= self._up_to:
            self._move(value)
        self._here += 1
        self.sum += value

    def observe_many(self, value: float, count: int) -> None:
        """Count `value`, `count` times."""
        if not self._above < value <= self._up_to:
            self._move(value)
        self._here += count
        self.sum += value * count

    def _move(self, value: float) -> None:
        bounds = self._bounds
        self._counts[self._at] += self._here
        self._here = 0
        at = self._at = bisect_left(bounds, value)
        self._above = bounds[at - 1] if at else -inf
        self._up_to = bounds[at] if at < len(bounds) else inf

    def snapshot(self) -> list[Any]:
        """[bounds, counts, sum], as plain lists and numbers that msgpack can carry."""
        counts = list(self._counts)
        counts[self._at] += self._here
        return [list(self._bounds), counts, self.sum]


class EntityMetrics:
    """What happened on one entity; the names are those of Service Bus's metrics.

    A request is one operation of a client: a transfer (a batch is one), a settlement, a management request. Answered
    requests are counted in exactly one of `successful_requests` and, by `failed`, the three kinds of error.
    """

    __slots__ = (
        "incoming_bytes",
        "incoming_messages",
        "incoming_requests",
        "outgoing_bytes",
        "outgoing_messages",
        "server_errors",
        "settled",
        "successful_requests",
        "throttled_requests",
        "user_errors",
    )

    def __init__(self) -> None:
        self.incoming_requests = 0
        self.successful_requests = 0
        self.server_errors = 0
        self.user_errors = 0
        self.throttled_requests = 0
        self.incoming_messages = 0  # a batch of n counts n
        self.outgoing_messages = 0
        self.incoming_bytes = 0  # encoded messages, as the client sent them
        self.outgoing_bytes = 0
        self.settled = [0] * 5  # messages whose settlement was confirmed, by `wire.Outcome`

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"settled": list(self.settled)}

    def failed(self, error: str, count: int = 1) -> None:
        """Count `count` requests that ended with this error, a class name of `broker.errors`."""
        if error in ("InternalError", "OutcomeUnknown"):
            self.server_errors += count
        elif error == "ServerBusy":
            self.throttled_requests += count
        else:
            self.user_errors += count


class GatewayMetrics:
    """One gateway's counters. Active connections are those opened less those closed."""

    __slots__ = (
        "accept_failures",
        "authentication_failures",
        "bytes_in",
        "bytes_out",
        "connection_failures",
        "connections_closed",
        "connections_ended_for_memory",
        "connections_held_bytes",
        "connections_opened",
        "connections_refused",
        "delivery_latency",
        "entities",
        "errors",
        "http_requests",
        "lost_settlements",
        "receivers",
        "send_latency",
        "senders",
        "sessions",
        "tls_certificate_expires_seconds",
        "tls_handshakes",
        "tls_reload_failures",
        "worker_connects",
        "worker_stalls",
    )

    def __init__(self) -> None:
        self.connections_opened = 0
        self.connections_closed = 0
        self.connections_refused = 0  # because of the limit
        self.connections_ended_for_memory = 0  # because of amqp.max_connections_bytes
        self.connections_held_bytes = 0  # by the estimate, now
        self.accept_failures = 0  # times that no file descriptor was left for a new connection, which waits
        self.tls_handshakes = 0  # in progress now
        self.tls_certificate_expires_seconds = 0.0  # Unix time; 0 without TLS
        self.tls_reload_failures = 0  # at SIGHUP
        self.connection_failures = 0  # unforeseen exceptions; each ends the connection on which it was raised
        self.sessions = 0  # AMQP sessions open now
        self.senders = 0  # links open now on which clients send
        self.receivers = 0  # links open now on which clients receive
        self.bytes_in = 0  # off the sockets, below TLS
        self.bytes_out = 0
        self.authentication_failures = 0  # SASL and CBS
        self.lost_settlements = 0  # deliveries whose settlement came after their lock had ended
        self.worker_connects = 0  # times a worker was connected to, the first time included
        self.worker_stalls = 0  # times a worker did not answer for so long that operations for it were refused
        self.errors: Counter[str] = Counter()  # errors sent to clients, by AMQP condition
        self.http_requests: Counter[str] = Counter()  # answered, by route and status
        self.send_latency = Histogram()  # a send's last byte to its disposition
        self.delivery_latency = Histogram(DELIVERY_SECONDS)  # enqueued to handed to the wire
        self.entities: dict[str, EntityMetrics] = {}

    def entity(self, name: str) -> EntityMetrics:
        """The recorder of an existing entity, by its name in the catalog (never by what a client asks for)."""
        entity = self.entities.get(name)
        if entity is None:
            entity = self.entities[name] = EntityMetrics()
        return entity

    def forget(self, name: str) -> None:
        """Drop a deleted entity's series."""
        self.entities.pop(name, None)

    def snapshot(self, restarts: int) -> dict[str, Any]:
        """All counters as plain values that msgpack can carry; `broker.exposition.render` takes them."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "restarts": restarts,
            "errors": dict(self.errors),
            "http_requests": dict(self.http_requests),
            "send_latency": self.send_latency.snapshot(),
            "delivery_latency": self.delivery_latency.snapshot(),
            "entities": {name: entity.snapshot() for name, entity in self.entities.items()},
            **process_usage(),
        }


class EndpointMetrics:
    """Counters of an operations endpoint itself."""

    __slots__ = ("accept_failures", "connections_dropped")

    def __init__(self) -> None:
        self.connections_dropped = 0  # the oldest, when there were too many
        self.accept_failures = 0  # as those of gateways


class WorkerMetrics:
    """One worker's counters.

    A turn is one round of the loop over all partitions of the worker. It makes one commit if anything changed.
    """

    __slots__ = ("commits", "fsync_seconds", "internal_errors", "messages_per_commit", "turn_seconds", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.commits = 0
        self.internal_errors = 0  # commands answered with an internal error because of a bug
        self.turn_seconds = Histogram()  # one turn with a commit: apply, hand out, commit
        self.fsync_seconds = Histogram()  # one commit: write and sync of the log, and the wait for the checkpointer
        self.messages_per_commit = Histogram(GROUP_SIZES)  # sends and settlements that shared one commit

    def snapshot(
        self, worker: int, restarts: int, partitions: Mapping[int, Mapping[str, int]], log: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The answer to the request `metrics`: a plain dict that `broker.exposition.render` takes.

        `partitions` maps each partition's id to the keys of `broker.exposition.PARTITION`; one left out is not shown.
        `log` has the fields of `storage.log.commit_log.LogUsage`.
        """
        pid = log["checkpointer_pid"]
        return {
            "worker": worker,
            "restarts": restarts,
            "turns": self.turns,
            "commits": self.commits,
            "internal_errors": self.internal_errors,
            "turn_seconds": self.turn_seconds.snapshot(),
            "fsync_seconds": self.fsync_seconds.snapshot(),
            "messages_per_commit": self.messages_per_commit.snapshot(),
            "partitions": {partition: dict(gauges) for partition, gauges in partitions.items()},
            "log": dict(log),
            "checkpointer": None if pid is None else usage_of(pid),
            **process_usage(),
        }


class Scene(NamedTuple):
    """Everything that one scrape shows.

    `gateways` and `workers` have each one's snapshot, None for one that did not answer. `counts` are the partitions'
    answers to the request `counts`: queue id -> [available, deferred, scheduled, bytes, locked]. `entities` are the
    names by entity id, and `forwarding` are the ids of the entities that forward their messages. `is_one_process`: the
    worker is in the gateway's process. `observer` is the usage of the process that shows this, if it is no gateway.
    `syphons` and `journals` are as `gateways`: none, or one.
    """

    gateways: Mapping[int, Mapping[str, Any] | None]
    workers: Mapping[int, Mapping[str, Any] | None]
    counts: Sequence[Mapping[int, Sequence[int]]]
    entities: Mapping[int, str]
    version: str
    endpoint: EndpointMetrics
    forwarding: Container[int] = ()
    is_one_process: bool = False
    observer: Mapping[str, Any] | None = None
    syphons: Mapping[int, Mapping[str, Any] | None] = {}
    journals: Mapping[int, Mapping[str, Any] | None] = {}


def usage_of(pid: int) -> dict[str, float] | None:
    """Measure a child of this process, as `process_usage` does; None if it has ended, or on a system without /proc."""
    try:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        # The name of the program, in parentheses, may have spaces.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return None
    user, system = map(int, after_name[11:13])
    return {
        "resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "cpu_seconds": (user + system) / os.sysconf("SC_CLK_TCK"),
    }


def process_usage() -> dict[str, float]:
    """This process's resident memory in bytes and the CPU time it has used in seconds."""
    resident_pages = int(os.pread(_STATM, 200, 0).split()[1])
    return {"resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"), "cpu_seconds": time.process_time()}
