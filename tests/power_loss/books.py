"""What was acknowledged to clients, and what must therefore be found after a loss of power.

A client marks each operation before it asks for it, and again when it was answered. An operation adds messages to
places (or removes them), and sets values. A place is a queue as `found.py` names it. A message has a key, which its
body begins with; the rest of the body follows from the key.

- What was acknowledged is so.
- What was asked for and not answered is so or not, wholly or not at all.
- A message is in its place once, with the bytes that were sent. Nothing else is in any place.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEY_BYTES = 16
Unit = tuple[str, str]  # place, key

IDS = "ids"  # the queue with duplicate detection; a message's id is its key
# A relayed message is in the source or in the target. It has left the source when the target's mark says so.
SOURCE, TARGET, RELAY = "relay", "relayed", "relay or relayed"
SCHEDULED = ":scheduled"
SOON = "soon-"  # keys of messages that are scheduled for a time within the run begin so


def body_of(key: str, size: int) -> bytes:
    """`size` is at least KEY_BYTES."""
    head = key.encode().ljust(KEY_BYTES)
    assert len(head) == KEY_BYTES, key
    seed = hashlib.sha256(head + size.to_bytes(4, "big")).digest()
    return head + size.to_bytes(4, "big") + (seed * (size // len(seed) + 1))[: size - KEY_BYTES - 4]


def key_of(body: bytes) -> str | None:
    """None if no client sent this body."""
    key = body[:KEY_BYTES].decode(errors="replace").rstrip()
    try:
        return key if body == body_of(key, len(body)) else None
    except AssertionError:
        return None


@dataclass
class Operation:
    adds: list[Unit]
    removes: list[Unit]
    values: dict[str, Any]

    def forget(self, later: "Operation") -> None:
        """What a later operation was done to is no longer in doubt."""
        touched = {*later.adds, *later.removes}
        self.adds = [unit for unit in self.adds if unit not in touched]
        self.removes = [unit for unit in self.removes if unit not in touched]
        self.values = {name: value for name, value in self.values.items() if name not in later.values}


@dataclass
class Found:
    """What a directory holds: each message's place and key, and values by name. `faults` are for people to read."""

    units: Counter[Unit] = field(default_factory=Counter)
    values: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    is_copy: bool = (
        False  # of a backup: its stores have no marks, so that messages are forwarded again that were before
    )


class Books:
    def __init__(self) -> None:
        self._there: set[Unit] = set()
        self._values: dict[str, Any] = {}
        self._open: dict[int, Operation] = {}  # under way: marked and not answered
        self._doubtful: list[Operation] = []  # will never be answered
        self.acknowledged = 0
        self.ids: list[str] = []  # the keys that the queue with duplicate detection has accepted

    def tell(self, mark: dict[str, Any]) -> None:
        """A mark: {"begin": number, "adds", "removes", "values"}, {"done": number}, or {"doubtful": number}.

        In doubt is what will never be answered, because the connection or the broker is gone.
        """
        if "begin" in mark:
            adds = [tuple(each) for each in mark["adds"]]
            removes = [tuple(each) for each in mark["removes"]]
            self._open[mark["begin"]] = Operation(adds, removes, mark["values"])
        elif "doubtful" in mark:
            self._doubtful.append(self._open.pop(mark["doubtful"]))
        elif "done" in mark:
            done = self._open.pop(mark["done"])
            self._there.difference_update(done.removes)
            self._there.update(done.adds)
            self._values.update(done.values)
            self.acknowledged += 1
            for each in self._doubtful:
                each.forget(done)
            self._doubtful = [each for each in self._doubtful if each.adds or each.removes or each.values]
            self.ids += [key for place, key in done.adds if place == IDS]

    def __len__(self) -> int:
        """Messages that must be there."""
        return len(self._there - self._undecided())

    def _undecided(self) -> set[Unit]:
        return {unit for each in [*self._open.values(), *self._doubtful] for unit in [*each.adds, *each.removes]}

    def breaches(self, found: Found) -> list[str]:
        breaches = list(found.faults)
        units = self._as_expected(found)
        undecided = self._undecided()
        for unit in self._there - undecided:
            if unit not in units:
                breaches.append(f"missing: {unit} was acknowledged")
        for unit, count in units.items():
            if count > 1:
                breaches.append(f"twice: {unit} is there {count} times")
            if unit not in self._there and unit not in undecided:
                breaches.append(f"there: {unit} was removed, refused or never sent")
        for operation in self._open.values():
            breaches += _parted(operation, units)
        return breaches + self._wrong_values(found.values)

    def _as_expected(self, found: Found) -> Counter[Unit]:
        units: Counter[Unit] = Counter()
        for (place, key), count in found.units.items():
            if place in (SOURCE, TARGET):
                taken_over = (TARGET, key) in found.units or (RELAY, key) not in self._there
                if not (place == SOURCE and found.is_copy and taken_over):
                    units[RELAY, key] += count
                continue
            if place.endswith(SCHEDULED) and key.startswith(SOON):
                place = place.removesuffix(SCHEDULED)
            units[place, key] += count
        return units

    def _wrong_values(self, found: dict[str, Any]) -> list[str]:
        possible = {name: [value] for name, value in self._values.items()}
        for operation in [*self._open.values(), *self._doubtful]:
            for name, value in operation.values.items():
                if name in possible:  # else it may have any value that it was made with
                    possible[name].append(value)
        return [
            f"value: {name} is {found.get(name)!r}, which is none of {values!r}"
            for name, values in possible.items()
            if found.get(name) not in values
        ]


def _parted(operation: Operation, units: Counter[Unit]) -> list[str]:
    """An operation that was not answered, and was done in part."""
    done = {unit in units for unit in operation.adds if unit not in operation.removes}
    done |= {unit not in units for unit in operation.removes if unit not in operation.adds}
    return [f"in part: {operation} is neither done nor not done"] if len(done) > 1 else []
