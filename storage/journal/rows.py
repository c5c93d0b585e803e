"""The rows of the journal that a frame of a worker's log stands for.

Which messages enter and leave queues is read from the changes of the tables, so that none can be forgotten; the hints
of the frame (`events`) only say why; so are the states of sessions. Each other row is about one message in one queue.
Rows of a batch are kept as runs with the same values in most columns; the other columns are in `columns`.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import msgpack
import pyarrow as pa

from protocol.extension import extension
from storage.journal.columns import NO_PROPERTIES, NativeColumns, Properties, new_columns, taken
from storage.journal.events import LEAVING, RUN_MAX, Hint, Op, name_of
from storage.journal.leaving import Leaving
from storage.journal.queues import Mode, Queue, Queues
from storage.journal.schema import SCHEMA, UNEXPLAINED
from storage.log.changes import Operation
from storage.log.frames import unpack_items
from storage.records import (
    ENTRY_BYTES,
    NEVER,
    STAGED_PREFIX,
    STATE_AT,
    CorruptRecord,
    Field,
    Place,
    unpack_session_key,
)
from storage.store import Table

_DESCRIPTION: Final = "DeadLetterErrorDescription"
_NAMES: Final = {int(op): name_of(op) for op in Op}
_LEAVING: Final = frozenset(map(int, LEAVING))
_CHANGING: Final = frozenset(map(int, (Op.ABANDONED, Op.DEFERRED, Op.LOCK_EXPIRED, Op.LOCK_LOST, Op.CHANGED)))
_LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999, the latest time that readers can show
_FIRST_MS: Final = -62_135_596_800_000
_iter_queue_keys: Final = Struct(">IBQ").iter_unpack
_times_of_record: Final = Struct(">8xqq").unpack_from
_entry_parts: Final = Struct(">4s8sI").unpack_from  # checksum, key of the message, delivery count
_SCHEDULED: Final = int(Place.SCHEDULED)


class Decoding(NamedTuple):
    """What the caller knows of the encoding of messages.

    `properties`: of a stored record. `text`: of one encoded AMQP value. Neither raises an exception.
    """

    properties: Callable[[bytes], tuple[str | None, str | None, str | None, str | None, str | None, str | None]]
    text: Callable[[bytes], str]


class _Origin(NamedTuple):
    reason: str | None
    queue_id: int | None
    number: int | None


class Rows:
    """The rows of one partition that are in one batch."""

    def __init__(self, partition: int, queues: Queues, decoding: Decoding) -> None:
        self._partition = partition
        self._queues = queues
        self._properties, self._text = decoding
        self._run_of = array("i")  # each row's
        self._columns = new_columns()
        # Of each run: event time, op, reason, description, and of the queue and the origin each entity, entity id and
        # sub-queue.
        self._runs: list[tuple[Any, ...]] = []
        self.unfounded = 0  # hints that a message has left which did not

    def __len__(self) -> int:
        return len(self._run_of)

    @property
    def times_ms(self) -> list[int]:
        """Return the times of the runs; at least one if there are rows."""
        return [run[0] // 1000 for run in self._runs]

    # -- what a frame says

    def add(
        self,
        time_ms: int,
        operations: Sequence[tuple[int, int, Any]],
        hints: Sequence[Any],
        payload: bytes | memoryview | None = None,
    ) -> None:
        """Add the rows of one frame, from what it says of this partition. Raises what malformed events raise; then
        these rows must not be used.

        With a payload, the items of the operations are places in it, as `storage.log.frames.skim_turn` gives them.
        """
        self._queues.hear_all(hints)
        found = None
        if payload is not None:
            found = self._add_usual(time_ms, operations, hints, payload)
            if found is None:
                operations = _unpacked(operations, payload)
        if found is None:
            found = self._add_changes(time_ms, operations, hints)
        entries = dict(found.entered)
        changed = _overlays_of(found.put)
        leaving = found.leaving
        for hint in hints:
            kind = hint[0]
            if kind == Hint.DONE:
                self._done(time_ms, hint, leaving, changed)
            elif kind == Hint.DONE_RUN:
                self._done_run(time_ms, hint, leaving, changed)
            elif kind == Hint.MOVED:
                self._moved(time_ms, hint, leaving, entries)
            elif kind == Hint.BARE:
                self._bare(time_ms, hint)
            elif kind == Hint.TAKEN_OVER:
                self._taken_over(time_ms, hint)
            elif kind == Hint.STAGED:
                self._staged(time_ms, hint, found.records)
        if found.states:
            why = {hint[1]: hint[2] for hint in hints if hint[0] == Hint.STATES}
            for key, state in found.states:
                self._state(time_ms, key, state, why)
        for queue_id, unexplained in leaving.left():
            self._run(time_ms, _NAMES[Op.PURGED], self._queues.at(queue_id), UNEXPLAINED, unexplained, None)

    def _add_usual(
        self,
        time_ms: int,
        operations: Sequence[tuple[int, int, Any]],
        hints: Sequence[Any],
        payload: bytes | memoryview,
    ) -> "_Changes | None":
        """What `_add_changes` does, if new messages enter queues, others leave them, and nothing else changes; else
        None, and nothing."""
        columns = self._columns
        if not isinstance(columns, NativeColumns) or any(hint[0] in _OF_RECORDS for hint in hints):
            return None
        entries: list[Any] = []
        records: list[Any] = []
        left: list[Any] = []
        for kind, table, items in operations:
            if table == Table.MESSAGES and kind != Operation.DELETE:
                records.append(items)
            elif table == Table.SESSION_STATES or (table == Table.QUEUE and kind == Operation.PUT):
                return None
            elif table == Table.QUEUE:
                (left if kind == Operation.DELETE else entries).append(items)
        leaving = Leaving()
        highest_left: dict[int, int] = {}
        if left:
            runs = extension.numbers_of(payload, left)
            if runs is None:
                return None
            for queue_id, first, count in runs:
                leaving.add(queue_id, range(first, first + count))
                highest_left[queue_id] = max(highest_left.get(queue_id, 0), first + count - 1)
        if not entries:
            return _Changes(leaving)
        runs = extension.entries_of(payload, entries)
        if runs is None or any(lowest <= highest_left.get(queue_id, -1) for queue_id, _, lowest in runs):
            return None  # a message may have come and gone
        queues = [self._queues.at(queue_id) for queue_id, _, _ in runs]
        shown = [
            (count, queue.mode is not Mode.OFF, queue.mode is Mode.BODIES)
            for (_, count, _), queue in zip(runs, queues, strict=True)
        ]
        if not columns.enter(payload, entries, records, shown, self._properties):
            return None
        for (count, is_shown, _), queue in zip(shown, queues, strict=True):
            if is_shown:
                self._begin_run(time_ms, _NAMES[Op.ENQUEUED], queue, None, count)
        return _Changes(leaving)

    def _add_changes(
        self, time_ms: int, operations: Iterable[tuple[int, int, Any]], hints: Sequence[Any]
    ) -> "_Changes":
        """Add the rows of messages that enter queues."""
        entered: list[tuple[bytes, bytes]] = []
        left: list[bytes] = []
        put: list[tuple[bytes, bytes]] = []
        records: dict[bytes, bytes] = {}
        states: list[tuple[bytes, bytes | None]] = []
        adopted: set[bytes] = set()  # keys of records that were staged, and belong to entries from now on
        for kind, table, items in operations:
            if table == Table.QUEUE:
                if kind == Operation.INSERT:
                    entered += items
                elif kind == Operation.DELETE:
                    left += items
                else:
                    put += items
            elif table == Table.MESSAGES and kind != Operation.DELETE:
                records.update(items)
            elif table == Table.SESSION_STATES:
                states += [(key, None) for key in items] if kind == Operation.DELETE else items
            elif table == Table.META and kind == Operation.DELETE:
                adopted.update([key[len(STAGED_PREFIX) :] for key in items if key.startswith(STAGED_PREFIX)])
        origins = _origins_of(hints)
        if (left and (entered or put)) or (put and origins):
            entered, left = _net(operations, origins)
        if entered:
            self._enter(time_ms, entered, records, origins, adopted)
        numbers_left: dict[int, list[int]] = {}
        for queue_id, _, number in _iter_queue_keys(b"".join(left)):
            numbers_left.setdefault(queue_id, []).append(number)
        leaving = Leaving()
        for queue_id, numbers in numbers_left.items():
            leaving.add(queue_id, numbers)
        return _Changes(leaving, entered, put, records, states)

    def truncate(self, time_ms: int, why: str) -> None:
        """Add the row that says that there is a gap before it."""
        self._runs.append((_us(time_ms) or 0, _NAMES[Op.TRUNCATED], None, why, *_NOWHERE, *_NOWHERE))
        self._run_of.append(len(self._runs) - 1)
        self._columns.end_rows([None], None)

    def _enter(
        self,
        time_ms: int,
        entered: Sequence[tuple[bytes, bytes]],
        records: Mapping[bytes, bytes],
        origins: Mapping[int, Mapping[int, _Origin]],
        adopted: Collection[bytes],
    ) -> None:
        properties_of = self._properties
        run: tuple[Any, ...] | None = None
        mode = Mode.OFF
        numbers: list[int] = []
        counts: list[int] = []
        keys = _iter_queue_keys(b"".join([key for key, _ in entered]))
        there: Mapping[int, _Origin] = {}
        origin: _Origin | None = None
        properties: tuple[str | None, ...]
        for (queue_id, place, number), (_, value) in zip(keys, entered, strict=True):
            if origins:
                origin = origins.get(queue_id, there).get(number)
            reason, origin_id = (None, None) if origin is None else origin[:2]
            if run is None or (queue_id, place == _SCHEDULED, reason, origin_id) != run:
                if numbers:
                    self._enter_run(time_ms, run, numbers, counts)
                run, numbers, counts = (queue_id, place == _SCHEDULED, reason, origin_id), [], []
                mode = self._queues.at(queue_id).mode
            if mode is Mode.OFF:
                continue
            _, message_key, count = _entry_parts(value)
            numbers.append(number)
            counts.append(count)
            record = records.get(message_key)
            overlay = None
            if record is None:
                size, enqueued_ms, expires_ms, properties = None, None, NEVER, NO_PROPERTIES
            else:
                enqueued_ms, expires_ms = _times_of_record(record)
                size, properties = len(record), properties_of(record)
            if len(value) > ENTRY_BYTES:
                overlay = value[ENTRY_BYTES:]
                enqueued_ms, expires_ms, properties = self._overlaid(overlay, enqueued_ms, expires_ms, properties)
            enqueued_us = None if enqueued_ms is None else _us(enqueued_ms)
            scheduled_us = enqueued_us if place == _SCHEDULED else None
            expires_us = None if expires_ms == NEVER else _us(expires_ms)
            number_there = None if origin is None else origin.number
            if record is None and message_key in adopted:
                number_there = -int.from_bytes(message_key, "big")
            if mode is not Mode.BODIES:
                record = overlay = None
            self._columns.append(
                properties, enqueued_us, scheduled_us, expires_us, size, number_there, None, record, overlay
            )
        if numbers:
            self._enter_run(time_ms, run, numbers, counts)

    def _enter_run(self, time_ms: int, run: tuple[Any, ...] | None, numbers: list[int], counts: list[int]) -> None:
        """Enter a run of messages that were just appended."""
        assert run is not None
        queue_id, is_scheduled, reason, origin_id = run
        op = _NAMES[Op.SCHEDULED if is_scheduled else Op.ENQUEUED]
        origin = None if origin_id is None else self._queues.at(origin_id)
        self._run(time_ms, op, self._queues.at(queue_id), reason, numbers, counts, origin=origin)

    def _overlaid(
        self, overlay: bytes, enqueued_ms: int | None, expires_ms: int, properties: Any
    ) -> tuple[int | None, int, Any]:
        """What the entry says instead of the record, as far as it does."""
        fields = msgpack.unpackb(overlay, strict_map_key=False)
        enqueued_ms = fields.get(Field.ENQUEUED_MS, enqueued_ms)
        expires_ms = fields.get(Field.EXPIRES_MS, expires_ms)
        message_id, session_id, *others = properties
        return enqueued_ms, expires_ms, (message_id, session_id or fields.get(Field.SESSION), *others)

    def _done(
        self, time_ms: int, hint: Sequence[Any], leaving: Leaving, changed: Mapping[tuple[int, int], bytes]
    ) -> None:
        _, op, queue_id, numbers, counts, reason, at_ms = hint
        at = time_ms if at_ms is None else at_ms
        if changed and op in _CHANGING:
            self._changed(at, op, queue_id, numbers, counts, reason, changed)
        else:
            self._explain(at, op, queue_id, numbers, counts, reason, leaving)

    def _done_run(
        self, time_ms: int, hint: Sequence[Any], leaving: Leaving, changed: Mapping[tuple[int, int], bytes]
    ) -> None:
        _, op, queue_id, first, messages, count, reason, at_ms = hint
        if not 0 < messages <= RUN_MAX:
            raise ValueError(f"a run of {messages} messages; one has 1 to {RUN_MAX}")
        numbers = range(first, first + messages)
        if (changed and op in _CHANGING) or (op in _LEAVING and not leaving.take_next(queue_id, numbers)):
            self._done(time_ms, (None, op, queue_id, [*numbers], [count] * messages, reason, at_ms), leaving, changed)
            return
        queue = self._queues.at(queue_id)
        if queue.mode is not Mode.OFF:
            self._begin_run(time_ms if at_ms is None else at_ms, _NAMES[op], queue, reason, messages)
            self._columns.end_run(first, messages, count)

    def _explain(
        self,
        time_ms: int,
        op: int,
        queue_id: int,
        numbers: Sequence[int],
        counts: Sequence[int] | None,
        reason: str | None,
        leaving: Leaving,
        description: str | None = None,
    ) -> None:
        if op in _LEAVING:
            kept = leaving.take(queue_id, numbers)
            if len(kept) != len(numbers):
                self.unfounded += len(numbers) - len(kept)
                counts = counts and [counts[index] for index in kept]
                numbers = [numbers[index] for index in kept]
        if numbers:
            self._run(time_ms, _NAMES[op], self._queues.at(queue_id), reason, numbers, counts, description=description)

    def _changed(
        self,
        time_ms: int,
        op: int,
        queue_id: int,
        numbers: Sequence[int],
        counts: Sequence[int] | None,
        reason: str | None,
        changed: Mapping[tuple[int, int], bytes],
    ) -> None:
        """Add rows of messages that stay, some of which have another overlay since."""
        queue = self._queues.at(queue_id)
        if queue.mode is Mode.BODIES:
            for number in numbers:
                overlay = changed.get((queue_id, number))
                self._columns.append(NO_PROPERTIES, None, None, None, None, None, None, None, overlay)
        self._run(time_ms, _NAMES[op], queue, reason, numbers, counts)

    def _taken_over(self, time_ms: int, hint: Sequence[Any]) -> None:
        _, queue_id, number = hint
        origin = self._queues.at(queue_id)
        if origin.mode is Mode.OFF:
            return
        self._columns.append(NO_PROPERTIES, None, None, None, None, number, None, None, None)
        # It is the other queue's row, so that who may not read of that does not get it.
        self._runs.append((_us(time_ms) or 0, _NAMES[Op.TAKEN_OVER], None, None, *origin[:3], *origin[:3]))
        self._run_of.append(len(self._runs) - 1)
        self._columns.end_rows([None], None)

    def _staged(self, time_ms: int, hint: Sequence[Any], records: Mapping[bytes, bytes]) -> None:
        _, queue_id, message_id = hint
        queue, record = self._queues.at(queue_id), records.get(message_id.to_bytes(8, "big"))
        if queue.mode is not Mode.BODIES or record is None:
            return
        self._columns.append(NO_PROPERTIES, None, None, None, len(record), -message_id, None, record, None)
        self._run(time_ms, _NAMES[Op.STAGED], queue, None, [None], None)

    def _state(self, time_ms: int, key: bytes, value: bytes | None, why: Mapping[int, str]) -> None:
        """`why`: by queue. Raises ValueError for a malformed key."""
        try:
            queue_id, session_id = unpack_session_key(key)
        except CorruptRecord as error:
            raise ValueError(str(error)) from None
        queue = self._queues.at(queue_id)
        if queue.mode is Mode.OFF:
            return
        properties = Properties(session_id=session_id.decode())
        size, state = (None, None) if value is None else (len(value) - STATE_AT, value[STATE_AT:])
        record = state if queue.mode is Mode.BODIES else None
        self._columns.append(properties, None, None, None, size, None, None, record, None)
        op = Op.STATE_CLEARED if value is None else Op.STATE_SET
        self._run(time_ms, _NAMES[op], queue, why.get(queue_id), [None], None)

    def _moved(
        self,
        time_ms: int,
        hint: Sequence[Any],
        leaving: Leaving,
        entries: Mapping[bytes, bytes],
    ) -> None:
        """`entries` are those that have entered a queue, by key."""
        _, op, queue_id, numbers, counts, to_queue_id, first, reason = hint
        if op == Op.PUBLISHED and not leaving.has_any(queue_id, numbers):
            return  # the copies of a further subscription; the first has told that it left
        if op != Op.DEAD_LETTERED:
            self._explain(time_ms, op, queue_id, numbers, counts, None, leaving)
            return
        for place, number in enumerate(numbers):
            key = (to_queue_id << 72 | first + place).to_bytes(13, "big")
            description = self._description(entries.get(key))
            self._explain(
                time_ms, op, queue_id, [number], counts and [counts[place]], reason, leaving, description=description
            )

    def _description(self, entry: bytes | None) -> str | None:
        if entry is None or len(entry) <= ENTRY_BYTES:
            return None
        fields = msgpack.unpackb(entry[ENTRY_BYTES:], strict_map_key=False)
        found = fields.get(Field.PROPERTIES, {}).get(_DESCRIPTION)
        return self._text(found) if isinstance(found, bytes) else found

    def _bare(self, time_ms: int, hint: Sequence[Any]) -> None:
        _, op, queue_id, ids, copies, origin_id, there = hint
        queue = self._queues.at(queue_id)
        if queue.mode is Mode.OFF:
            return
        for place, each in enumerate(ids):
            number = copies[place] if isinstance(copies, list | tuple) else copies
            text = self._text(each) if isinstance(each, bytes) else each
            properties = (text, *NO_PROPERTIES[1:])
            number_there = None if there is None else there[place]
            self._columns.append(properties, None, None, None, None, number_there, number, None, None)
        if ids:
            origin = None if origin_id is None else self._queues.at(origin_id)
            self._run(time_ms, _NAMES[op], queue, None, [None] * len(ids), None, origin=origin)

    def _run(
        self,
        time_ms: int,
        op: str,
        queue: Queue,
        reason: str | None,
        numbers: Sequence[int | None],
        counts: Sequence[int] | None,
        *,
        description: str | None = None,
        origin: Queue | None = None,
    ) -> None:
        """Rows that differ in their numbers alone, and in their messages if these were just appended."""
        if queue.mode is Mode.OFF:
            return
        self._begin_run(time_ms, op, queue, reason, len(numbers), description, origin)
        self._columns.end_rows(numbers, counts)

    def _begin_run(
        self,
        time_ms: int,
        op: str,
        queue: Queue,
        reason: str | None,
        rows: int,
        description: str | None = None,
        origin: Queue | None = None,
    ) -> None:
        """What the rows have in common."""
        time_us = _us(time_ms)
        if time_us is None:
            raise ValueError(f"the time {time_ms} ms is beyond the calendar")
        self._run_of.extend(array("i", (len(self._runs),)) * rows)
        came_from = _NOWHERE if origin is None else origin[:3]
        self._runs.append((time_us, op, reason, description, *queue[:3], *came_from))

    # -- the batch

    def batch(self, first_offset: int) -> pa.RecordBatch:
        """All rows, as of SCHEMA. Raises ValueError, TypeError, OverflowError if an event had a value out of range."""
        rows = len(self._run_of)
        if not rows:
            return pa.RecordBatch.from_pylist([], SCHEMA)
        runs = pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(self._run_of)])
        found = {
            name: taken(values, SCHEMA.field(name).type, runs)
            for name, values in zip(_RUN_COLUMNS, zip(*self._runs, strict=True), strict=True)
        }
        found |= self._columns.arrays()
        found["partition"] = pa.repeat(pa.scalar(self._partition, pa.int32()), rows)
        found["journalOffset"] = pa.arange(first_offset, first_offset + rows)
        return pa.RecordBatch.from_arrays([found[name] for name in SCHEMA.names], schema=SCHEMA)


_NOWHERE: Final = (None, None, None)  # no entity, entity id and sub-queue
_RUN_COLUMNS: Final = (
    "eventTime", "op", "reason", "description",
    "entity", "entityId", "subQueue", "originEntity", "originEntityId", "originSubQueue",
)  # fmt: skip
_OF_RECORDS: Final = frozenset(map(int, (Hint.MOVED, Hint.ENTERED, Hint.STAGED)))


class _Changes(NamedTuple):
    """What hints may say something about."""

    leaving: Leaving
    entered: Sequence[tuple[bytes, bytes]] = ()
    put: Sequence[tuple[bytes, bytes]] = ()
    records: Mapping[bytes, bytes] = {}  # by key, of messages that were stored
    states: Sequence[tuple[bytes, bytes | None]] = ()  # of sessions


def _unpacked(operations: Iterable[tuple[int, int, Any]], payload: bytes | memoryview) -> list[tuple[int, int, Any]]:
    """The operations with their items in place of the places of these."""
    return [(kind, table, unpack_items(payload, place)) for kind, table, place in operations]


def _origins_of(hints: Sequence[Any]) -> dict[int, dict[int, _Origin]]:
    """Return from where messages come, by queue and number."""
    origins: dict[int, dict[int, _Origin]] = {}
    for hint in hints:
        kind = hint[0]
        if kind == Hint.MOVED:
            _, op, queue_id, numbers, _, to_queue_id, first, _ = hint
            reason, there = _NAMES[op], origins.setdefault(to_queue_id, {})
            for at, number in enumerate(numbers, first):
                there[at] = _Origin(reason, queue_id, number)
        elif kind == Hint.ENTERED:
            _, queue_id, numbers, reason, origin_id, numbers_there = hint
            there = origins.setdefault(queue_id, {})
            if numbers_there is None:
                there.update(dict.fromkeys(numbers, _Origin(reason, origin_id, None)))
            else:
                for at, number in zip(numbers, numbers_there, strict=True):
                    there[at] = _Origin(reason, origin_id, number)
    return origins


def _overlays_of(put: Iterable[tuple[bytes, bytes]]) -> dict[tuple[int, int], bytes]:
    """Return the overlays of entries that were put, by queue and number."""
    return {
        (int.from_bytes(key[:4], "big"), int.from_bytes(key[5:], "big")): value[ENTRY_BYTES:]
        for key, value in put
        if len(value) > ENTRY_BYTES
    }


def _us(time_ms: int) -> int | None:
    """Microseconds; None for what is beyond the calendar."""
    return time_ms * 1000 if _FIRST_MS <= time_ms <= _LAST_MS else None


def _net(
    operations: Iterable[tuple[int, int, Any]], origins: Mapping[int, Mapping[int, _Origin]]
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """The items that enter a queue, and the keys of messages that leave one, where a message may do both, or may only
    change its place. A PUT brings a message if `origins` has it."""

    class Found:
        __slots__ = ("item", "key", "places", "was_there")

        def __init__(self) -> None:
            self.was_there = False
            self.item: tuple[bytes, bytes] | None = None  # with which it entered, if it was not there
            self.places: set[int] = set()  # at which it came
            self.key = b""

    found: dict[bytes, Found] = {}
    for kind, table, items in operations:
        if table != Table.QUEUE:
            continue
        for item in items:
            key = item if kind == Operation.DELETE else item[0]
            one = found.setdefault(key[:4] + key[5:], Found())
            one.key = key
            if kind == Operation.DELETE:
                if key[4] in one.places:
                    one.places.discard(key[4])
                else:
                    one.was_there = True
                continue
            brings = kind == Operation.INSERT or (
                int.from_bytes(key[5:], "big") in origins.get(int.from_bytes(key[:4], "big"), {})
            )
            if one.item is None:
                if brings:
                    one.item = item
                else:
                    one.was_there = True
            one.places.add(key[4])
    entered, left = [], []
    for one in found.values():
        enters = one.item is not None and not one.was_there
        if enters:
            assert one.item is not None
            entered.append(one.item)
        if not one.places and (enters or one.was_there):
            left.append(one.key)
    return entered, left
