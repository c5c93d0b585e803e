"""Hints for the journal: why messages enter and leave queues. `storage.journal.events` lists them.

The journal itself is made elsewhere, of the worker's log: the changes there show what enters and leaves. A partition
whose store takes no hints says nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from broker.partition.state.locks import Held, ref_of
from broker.partition.state.window import Ref
from protocol.extension import extension
from storage.journal.events import RUN_MAX, Hint, Op
from storage.records import Place
from storage.store import Store

# Here, because to look up a member of an enum takes as long as a call.
_NAMED, _DONE, _MOVED, _ENTERED, _BARE, _TAKEN_OVER, _STAGED, _STATES, _DONE_RUN = map(int, Hint)
_DELIVERED = int(Op.DELIVERED)


def _split(refs: list[Ref]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sequence numbers and delivery counts."""
    if extension is not None:
        found: tuple[tuple[int, ...], tuple[int, ...]] = extension.split(refs)
        return found
    return tuple([number for number, _, _, _ in refs]), tuple([count for _, _, count, _ in refs])


def _run_of(refs: list[Ref]) -> tuple[int, int] | None:
    """The first number and each one's delivery count; None if the refs are no run."""
    if extension is not None:
        found: tuple[int, int] | None = extension.run_of_refs(refs)
        return found
    numbers, counts = _split(refs)
    is_run = numbers == tuple(range(numbers[0], numbers[0] + len(refs))) and len({*counts}) == 1
    return (numbers[0], counts[0]) if is_run else None


class Journal:
    """Hints of one partition; each turn's go into the log with its changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_on = store.hints is not None
        self._named: set[int] = set()  # entity ids

    def _hint(self, *fields: Any) -> None:
        assert self._store.hints is not None
        self._store.hints.append(fields)

    def named(self, entity_id: int, path: str) -> None:
        """To be called before anything else happens to an entity."""
        if self.is_on and entity_id not in self._named:
            self._named.add(entity_id)
            self._hint(_NAMED, entity_id, path)

    def forget(self, entity_id: int) -> None:
        """The entity is deleted."""
        self._named.discard(entity_id)

    def delivered(self, queue_id: int, refs: Iterable[Ref], now_ms: int) -> None:
        if self.is_on and (found := [*refs]):
            self._done(_DELIVERED, queue_id, found, None, now_ms)

    def done(self, op: Op, queue_id: int, messages: Sequence[Held], reason: str | None = None) -> None:
        """These leave their queue by `op`, or `op` happened to them."""
        if self.is_on and messages:
            self._done(int(op), queue_id, [*map(ref_of, messages)], reason, None)

    def _done(self, op: int, queue_id: int, refs: list[Ref], reason: str | None, at_ms: int | None) -> None:
        run = _run_of(refs) if len(refs) <= RUN_MAX else None
        if run is None:
            self._hint(_DONE, op, queue_id, *_split(refs), reason, at_ms)
        else:
            first, count = run
            self._hint(_DONE_RUN, op, queue_id, first, len(refs), count, reason, at_ms)

    def gone(self, op: Op, queue_id: int, numbers: Sequence[int], reason: str | None = None) -> None:
        """Note what `done` notes, for messages of which only the numbers are known."""
        if self.is_on and numbers:
            self._hint(_DONE, int(op), queue_id, list(numbers), None, reason, None)

    def changed(self, queue_id: int, number: int, count: int, place: Place) -> None:
        """An entry that is moved here with its queue is at this place now."""
        if self.is_on:
            self._hint(_DONE, int(Op.CHANGED), queue_id, [number], [count], place.name.lower(), None)

    def moved(
        self, op: Op, queue_id: int, refs: Sequence[Ref], to_queue_id: int, first: int, reason: str | None = None
    ) -> None:
        """These leave their queue by `op`, and enter another under the numbers from `first` on."""
        if self.is_on and refs:
            self._hint(_MOVED, int(op), queue_id, *_split([*refs]), to_queue_id, first, reason)

    def entered(
        self,
        queue_id: int,
        numbers: Sequence[int],
        reason: str,
        origin: int | None,
        origin_numbers: Sequence[int | None] | None = None,
    ) -> None:
        """These come from elsewhere: from the queue `origin`, where they had `origin_numbers`, if that is known."""
        if self.is_on and numbers:
            there = None if origin_numbers is None else list(origin_numbers)
            self._hint(_ENTERED, queue_id, list(numbers), reason, origin, there)

    def taken_over(self, queue_id: int, up_to: int) -> None:
        """From the queue of another partition, up to this number."""
        if self.is_on:
            self._hint(_TAKEN_OVER, queue_id, up_to)

    def staged(self, queue_id: int, message_id: int) -> None:
        """A record, for an entry that this queue may get in a later turn."""
        if self.is_on:
            self._hint(_STAGED, queue_id, message_id)

    def states(self, queue_id: int, reason: str) -> None:
        """States of this queue's sessions are set or cleared, and not by a client."""
        if self.is_on:
            self._hint(_STATES, queue_id, reason)

    def bare(
        self,
        op: Op,
        queue_id: int,
        message_ids: Sequence[bytes | None],
        copies: Sequence[int] | None = None,
        origin: int | None = None,
        origin_numbers: Sequence[int] | None = None,
    ) -> None:
        """These were accepted, and are not stored in this queue. The origin is as for `entered`."""
        if self.is_on and message_ids:
            counts = None if copies is None else list(copies)
            there = None if origin_numbers is None else list(origin_numbers)
            self._hint(_BARE, int(op), queue_id, list(message_ids), counts, origin, there)
