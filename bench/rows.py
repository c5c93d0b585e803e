"""The rows of the table, each with its unit and its target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A bound on our median (`ours`) or on our median over the peer's (`ratio`)."""

    bound: float
    of_ratio: bool = False
    at_least: bool = False

    def met(self, ours: float, ratio: float | None) -> bool | None:
        """True if the target is met; None if it needs a peer and there is none."""
        value = ratio if self.of_ratio else ours
        if value is None:
            return None
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bound:g}{' x' if self.of_ratio else ''}"


@dataclass(frozen=True)
class Row:
    """`group` is what --rows selects. `note` is printed beside the target."""

    key: str
    group: str
    label: str
    unit: str
    target: Target | None = None
    note: str = ""


def _at_least_x(factor: float) -> Target:
    return Target(factor, of_ratio=True, at_least=True)


SIZES = (KIB, 100, 10 * KIB)
SIZE_NAMES = {100: "100 B", KIB: "1 KiB", 10 * KIB: "10 KiB"}
MODE_NAMES = {"send": "send", "recv": "receive, lock and complete", "both": "send and receive at once"}
_RATIOS = {100: (2.0, 2.0, 2.0), KIB: (1.8, 2.2, 2.0), 10 * KIB: (1.3, 1.3, 1.3)}
_QUIET = {("send", KIB): "80,000/s if quiet", ("recv", KIB): "80,000/s if quiet", ("both", KIB): "45,000/s if quiet"}

GROUPS = (
    *("throughput", "confirmed", "unpipelined", "openloop", "idle", "connections", "backlog"),
    *("topics", "sessions", "duplicates", "transactions"),
)

ROWS = (
    *(
        Row(
            f"{mode}-{size}",
            "throughput",
            f"{SIZE_NAMES[size]}: {name}",
            "msg/s",
            _at_least_x(_RATIOS[size][place]),
            _QUIET.get((mode, size), ""),
        )
        for size in SIZES
        for place, (mode, name) in enumerate(MODE_NAMES.items())
    ),
    Row("confirmed-recv", "confirmed", "1 KiB: receive, completion confirmed (second)", "msg/s"),
    Row("confirmed-both", "confirmed", "1 KiB: both at once, completion confirmed (second)", "msg/s"),
    Row("unpipelined-p50", "unpipelined", "one send at a time, 1 KiB: p50", "ms", Target(0.5)),
    Row("unpipelined-p99", "unpipelined", "one send at a time, 1 KiB: p99", "ms"),
    Row("openloop-p50", "openloop", "2,000/s, send to receive: p50", "ms", Target(1.0)),
    Row("openloop-p99", "openloop", "2,000/s, send to receive: p99", "ms", Target(2.5)),
    Row("start", "idle", "start to ready, empty", "s", Target(1.5)),
    Row("idle-used", "idle", "idle, all processes: memory", "MB", Target(200)),
    Row("idle-anonymous", "idle", "  of it anonymous", "MB"),
    Row("idle-rss", "idle", "  as sum of RSS", "MB"),
    Row("connection-used", "connections", "an idle connection: memory", "KB", Target(60)),
    Row("connection-anonymous", "connections", "  of it anonymous", "KB"),
    Row("connection-rss", "connections", "  as growth of RSS", "KB"),
    Row("backlog-load", "backlog", "backlog, 1 KiB: load", "msg/s"),
    Row("backlog-used", "backlog", "backlog: growth of memory", "MB", Target(150)),
    Row("backlog-anonymous", "backlog", "  of it anonymous", "MB"),
    Row("backlog-cache", "backlog", "  not in it: mapped page cache of the store", "MB"),
    Row("backlog-rss", "backlog", "  as growth of RSS", "MB"),
    Row("backlog-restart", "backlog", "backlog: restart to first message", "s", Target(2.0)),
    Row("backlog-drain", "backlog", "backlog: drain after the restart", "msg/s"),
    Row("topic-10", "topics", "topic, 10 subscriptions: published", "msg/s", Target(8000, at_least=True)),
    Row("topic-10-bytes", "topics", "  stored, over 1.3 copies and 150 B each", "", Target(1.0)),
    Row("topic-1", "topics", "topic, 1 subscription with 1 correlation filter", "msg/s"),
    Row("topic-1000", "topics", "topic, 1,000 such, one of them matching", "msg/s"),
    Row("topic-1000-share", "topics", "  of the rate with one", "", Target(0.6, at_least=True)),
    Row("topic-sql", "topics", "topic, 100 SQL filters: published", "msg/s", Target(5000, at_least=True)),
    Row("forward-3", "topics", "forwarded through 3 queues, end to end", "msg/s", Target(15_000, at_least=True)),
    Row("sessions-used", "sessions", "sessions of 10 messages, 200 receivers: growth of memory", "MB", Target(200)),
    Row("accept-p50", "sessions", "  accept the next session, 400/s: p50", "ms", Target(2.0)),
    Row("accept-p99", "sessions", "  accept the next session, 400/s: p99", "ms"),
    Row("accept-rate", "sessions", "  accepted, emptied and closed, as fast as it goes", "session/s"),
    Row("sessions-plain", "sessions", "send and receive at once, plain queue", "msg/s"),
    Row("sessions-1000", "sessions", "the same messages, 1,000 active sessions", "msg/s"),
    Row("sessions-share", "sessions", "  of the plain queue's", "", Target(0.6, at_least=True)),
    Row("duplicates-plain", "duplicates", "send with message ids, plain queue", "msg/s"),
    Row("duplicates-send", "duplicates", "the same with duplicate detection", "msg/s"),
    Row("duplicates-share", "duplicates", "  of the plain queue's", "", Target(0.7, at_least=True)),
    Row("duplicates-used", "duplicates", "a window full of ids: growth of memory", "MB", Target(100)),
    Row("transactions", "transactions", "10 sends and 10 completions each", "commit/s", Target(1500, at_least=True)),
    Row("transactions-p50", "transactions", "  declare to discharged: p50", "ms"),
)


@dataclass(frozen=True)
class Verdict:
    """A row's figures: medians, `ratio` ours over the peer's, `met` None when there is nothing to judge."""

    row: Row
    ours: float
    ours_range: tuple[float, float]
    peer: float | None
    peer_range: tuple[float, float] | None
    ratio: float | None
    met: bool | None


def judge(row: Row, ours: Sequence[float], peer: Sequence[float]) -> Verdict:
    """`ours` has at least one value; `peer` may be empty."""
    mid = median(ours)
    other = median(peer) if peer else None
    ratio = mid / other if other else None
    met = row.target.met(mid, ratio) if row.target else None
    peer_range = (min(peer), max(peer)) if peer else None
    return Verdict(row, mid, (min(ours), max(ours)), other, peer_range, ratio, met)


Samples = Mapping[tuple[str, str], Sequence[float]]
"""(server name, row key) → one value per run."""


def verdicts(samples: Samples, ours: str, peer: str | None) -> list[Verdict]:
    """In the order of ROWS; rows that were not measured are left out."""
    result = []
    for row in ROWS:
        if mine := samples.get((ours, row.key)):
            theirs = samples.get((peer, row.key), ()) if peer else ()
            result.append(judge(row, mine, theirs))
    return result
