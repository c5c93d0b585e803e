"""The books of a ledger of paired namespaces: what was accepted and where, and what the primary had in the end. Pure.

An accepted message must be in the primary once. One that was not accepted may be there once. Within a session, messages
that took the same way keep the order in which they were sent: those that the primary accepted, and those that a backlog
queue accepted. (Between these two there is no order, as in the cloud: the primary takes new messages before the syphon
has brought the old ones. If nobody knows the ways, there are no more runs in order than ways.) Messages that may be in
the primary although their answer was lost are left out of that.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Key(NamedTuple):
    """Of a message. `group` is an entity, or a session of one; `sender` and `number` are unique in it."""

    entity: str
    group: str
    sender: int
    number: int


class Way(NamedTuple):
    """`queue` accepted it; empty if that is not known, as through a sidecar."""

    queue: str
    is_in_backlog: bool
    is_repeated: bool


class Books:
    def __init__(self) -> None:
        self.sent: set[Key] = set()
        self.accepted: dict[Key, Way] = {}
        self.found: list[Key] = []
        self.pings_seen = 0

    def breaches(self, ordered: Iterable[str], unknown_ways: int = 1) -> list[str]:
        """What must not be so, in words. `ordered` are the entities whose groups keep their order.

        `unknown_ways`: how many ways messages without a known queue may have taken.
        """
        counts = Counter(self.found)
        found = [f"lost: {key}" for key in self.accepted if not counts[key]]
        found += [f"{count} times: {key}" for key, count in counts.items() if count > 1]
        found += [f"never sent: {key}" for key in counts if key not in self.sent]
        if self.pings_seen:
            found.append(f"{self.pings_seen} pings were delivered")
        return found + self._disorder(set(ordered)) + self._too_many_runs(set(ordered), unknown_ways)

    def _too_many_runs(self, ordered: set[str], ways: int) -> list[str]:
        """Groups whose messages without a known way cannot have come in order by so many."""
        lines: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for key in self.found:
            way = self.accepted.get(key)
            if key.entity in ordered and way is not None and not way.queue and not way.is_repeated:
                lines[key.entity, key.group, key.sender].append(key.number)
        found = []
        for line, numbers in lines.items():
            ends: list[int] = []  # the last numbers of the fewest runs, which rise
            for number in numbers:
                at = bisect_left(ends, number) - 1
                if at >= 0:
                    ends[at] = number
                else:
                    ends.insert(0, number)
            if len(ends) > ways:
                found.append(f"{len(ends)} runs in order, and {ways} ways: {line}")
        return found

    def _disorder(self, ordered: set[str]) -> list[str]:
        last: dict[tuple[str, str, int, str], Key] = {}
        found = []
        for key in self.found:
            way = self.accepted.get(key)
            if key.entity not in ordered or way is None or way.is_repeated or not way.queue:
                continue
            line = (key.entity, key.group, key.sender, way.queue)
            before = last.get(line)
            if before is not None and before.number > key.number:
                found.append(f"after {before.number}: {key} by {way.queue}")
            last[line] = key
        return found

    def summary(self) -> str:
        by_backlog = sum(way.is_in_backlog for way in self.accepted.values())
        repeated = sum(way.is_repeated for way in self.accepted.values())
        by_entity: dict[str, int] = defaultdict(int)
        for key in self.accepted:
            by_entity[key.entity] += 1
        return (
            f"sent {len(self.sent):,}, accepted {len(self.accepted):,} ({dict(by_entity)}), of these by the backlog "
            f"{by_backlog:,}, after an attempt without answer {repeated:,}; found in the primary {len(self.found):,}"
        )
