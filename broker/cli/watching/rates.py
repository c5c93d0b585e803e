"""What `peeklock top` shows: the counts of entities now, and rates between two samples. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from protocol.client.requests import QueueCounts


class Traffic(NamedTuple):
    """Messages that came in and went out since the broker's processes started."""

    incoming: int
    outgoing: int


@dataclass(frozen=True, slots=True)
class Sample:
    """`at_s` is on a clock that only goes forward. The mappings are by entity; `traffic` is None if nobody knows it."""

    at_s: float
    counts: Mapping[str, QueueCounts]
    traffic: Mapping[str, Traffic] | None


class Row(NamedTuple):
    """Rates are messages per second; `change` is that of the messages that are there, dead-lettered ones included."""

    name: str
    incoming: float | None
    outgoing: float | None
    change: float
    active: int
    locked: int
    scheduled: int
    dead_lettered: int
    size_bytes: int


def rows(before: Sample, now: Sample) -> list[Row]:
    """Return the entities that are there now, the busiest first, then those with the most messages."""
    seconds = max(now.at_s - before.at_s, 1e-3)
    found = []
    for name, of in now.counts.items():
        incoming = outgoing = None
        if now.traffic is not None and before.traffic is not None:
            late, early = now.traffic.get(name, _NONE), before.traffic.get(name, _NONE)
            # Counters begin at zero when a process restarts.
            incoming = max(0, late.incoming - early.incoming) / seconds
            outgoing = max(0, late.outgoing - early.outgoing) / seconds
        known = before.counts.get(name)
        change = 0.0 if known is None else (_messages(of) - _messages(known)) / seconds
        found.append(
            Row(name, incoming, outgoing, change, of.active, of.locked, of.scheduled, of.dead_lettered, of.size_bytes)
        )
    return sorted(found, key=lambda row: (-_work(row), -(row.active + row.dead_lettered), row.name))


_NONE = Traffic(0, 0)


def _messages(of: QueueCounts) -> int:
    return of.active + of.scheduled + of.dead_lettered + of.transfer + of.transfer_dead_lettered


def _work(row: Row) -> float:
    if row.incoming is None or row.outgoing is None:
        return abs(row.change)
    return row.incoming + row.outgoing
