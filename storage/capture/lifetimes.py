"""Which rows still matter: those of messages that have not ended. Pure.

Most messages of a capture have ended long before the cut, and nothing of them is left but the numbers (`survey`). They
are found by looking at each message's rows together: one row that enters its queue first, one that leaves it last.
A message that goes on to another queue of its partition has a row there, which comes before the one that leaves and
may not have the record. So the rows of such a message matter as long as those of the next one do.

Rows come in pieces, in the order of their offsets. What is left of a piece is looked at again with the next pieces, so
memory is that of the messages that are in their queues at a time.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from storage.capture.columns import ENTERS, LEAVES, coded, is_one_of, one
from storage.capture.survey import MOVED
from storage.journal.events import ELSEWHERE, Op, name_of

COLUMNS: Final = (
    "partition", "journalOffset", "eventTime", "op", "entity", "subQueue", "sequenceNumber", "deliveryCount", "reason",
    "originEntity", "originSubQueue", "originSequenceNumber", "sessionId", "enqueuedTime",
)  # fmt: skip
STATES: Final = ("stateSet", "stateCleared")
# Operations that change nothing that is stored, or are about no message.
_IDLE: Final = ("delivered", "released", "takenOver", "truncated", "duplicate", "ping")
_LOW_BITS: Final = 40  # of a sequence number; the others are looked up together with the queue
_LOW: Final = (1 << _LOW_BITS) - 1
_LEFT: Final = 1 << 20  # weights, so that one sum counts all three kinds
_OTHER: Final = 1 << 40
_PIECE_ROWS: Final = 1 << 18


_GOES_ON: Final = frozenset(
    map(name_of, (Op.DEAD_LETTERED, Op.ACTIVATED, Op.FORWARDED, Op.PUBLISHED))
)  # a message of another queue, with the same record


class Kind(IntEnum):
    CHANGES = 0
    ENTERS = 1
    ENDS = 2
    GOES_ON = 3
    PERHAPS_LEAVES = 4  # for another partition, which may not have it at the cut


_WEIGHTS: Final = {
    Kind.CHANGES: 0,
    Kind.ENTERS: 1,
    Kind.ENDS: _LEFT,
    Kind.GOES_ON: _LEFT,
    Kind.PERHAPS_LEAVES: _OTHER,
}


def matters(rows: pa.Table) -> pa.Array:
    """Whether a row can matter at all: it enters, leaves or changes a message or a session, or stages a body."""
    op, entity, number = (one(rows.column(name)) for name in ("op", "entity", "sequenceNumber"))
    of_message = pc.and_(pc.is_valid(number), pc.invert(is_one_of(op, _IDLE)))
    return pc.or_(
        pc.and_(pc.is_valid(entity), pc.or_(of_message, is_one_of(op, STATES))),
        is_one_of(op, ["staged"]),
    )


class Message(NamedTuple):
    """One in one queue; it has another number in each queue that it goes to."""

    partition: int
    entity: str  # in lower case
    sub_queue: str
    number: int


class Kept(NamedTuple):
    """`ids` of the rows that matter, ascending. `unwanted`: messages that were not asked for, of which some rows
    matter because others were made of them."""

    ids: pa.Array
    unwanted: list[Message]


class Lifetimes:
    """Give it rows that `matters`, then ask which are left.

    `wants`: whether an entity's messages are wanted, by its path in lower case. `since_us`: messages that were enqueued
    before are not wanted, microseconds since 1970.
    """

    def __init__(self, wants: Callable[[str], bool] = lambda entity: True, since_us: int | None = None) -> None:
        self._wants = wants
        self._since_us = since_us
        # By partition, path, sub-queue and the high bits of the number: a code.
        self._queues: dict[tuple[int, str, str, int], int] = {}
        self._held, self._waiting = _MOVES.empty_table(), [_MOVES.empty_table()]
        self._held_states, self._waiting_states = _SESSIONS.empty_table(), [_SESSIONS.empty_table()]
        self._staged: list[pa.Array] = []  # ids
        self._waiting_rows = 0

    def add(self, rows: pa.Table, ids: pa.Array) -> None:
        """More rows, with COLUMNS. Those of one message, or of one session, come in the order of their offsets, and
        ids ascend with them."""
        if not len(rows):
            return
        rows = rows.append_column("id", ids.cast(pa.int64()))
        op = one(rows.column("op"))
        is_state, is_staged = is_one_of(op, STATES), is_one_of(op, ["staged"])
        if pc.any(is_state).as_py():
            names = ["partition", "entity", "subQueue", "sessionId", "id"]
            self._waiting_states.append(rows.filter(is_state).select(names).cast(_SESSIONS))
        if pc.any(is_staged).as_py():
            self._staged.append(one(rows.filter(is_staged).column("id")))
        self._waiting.append(self._moves(rows.filter(pc.invert(pc.or_(is_state, is_staged)))))
        self._waiting_rows += len(rows)

    def forget(self) -> None:
        """Forget what has ended, if enough has come to make that worth while. All rows up to some offset have come."""
        if self._waiting_rows >= max(_PIECE_ROWS, len(self._held) + len(self._held_states)):
            self._merge(Kind.ENDS, Kind.GOES_ON)

    def kept_of_piece(self) -> pa.Array:
        """The ids of rows that may matter, ascending, as far as that can be told if rows in between are missing."""
        self._merge(Kind.ENDS)
        return self._ids()

    def kept(self) -> Kept:
        """What matters when all rows have come."""
        self._merge(Kind.ENDS, Kind.GOES_ON)
        unwanted = self._unwanted(self._held)
        self._held = _without(self._held, unwanted)
        of_others = pc.unique(self._held.column("key").filter(pc.is_in(self._held.column("key"), unwanted)))
        return Kept(self._ids(), [*self._named(of_others.to_pylist())])

    def _ids(self) -> pa.Array:
        ids = pa.concat_arrays([one(self._held.column("id")), one(self._held_states.column("id")), *self._staged])
        return ids.take(pc.sort_indices(ids))

    def _merge(self, *ends: Kind) -> None:
        moves = pa.concat_tables([self._held, *self._waiting]).combine_chunks()
        self._held = _without(moves, _ended(moves, ends))
        self._held_states = _last(pa.concat_tables([self._held_states, *self._waiting_states]))
        self._waiting, self._waiting_states, self._waiting_rows = [], [], 0

    def _moves(self, rows: pa.Table) -> pa.Table:
        op = one(rows.column("op"))
        op = op if isinstance(op, pa.DictionaryArray) else op.dictionary_encode()
        kind = pa.array([_kind(each) for each in op.dictionary.to_pylist()], pa.int8()).take(op.indices)
        perhaps = pc.and_(is_one_of(op, LEAVES), is_one_of(one(rows.column("reason")), [ELSEWHERE]))
        kind = pc.if_else(perhaps, pa.scalar(int(Kind.PERHAPS_LEAVES), pa.int8()), kind)
        enters = pc.equal(kind, int(Kind.ENTERS))
        made = pc.and_(enters, pc.invert(is_one_of(one(rows.column("reason")), [MOVED])))
        origin = [one(rows.column(name)) for name in ("originEntity", "originSubQueue", "originSequenceNumber")]
        made = pc.fill_null(pc.and_(made, pc.greater_equal(origin[2], 0)), False)
        origin_key = pa.nulls(len(rows), pa.int64())
        if pc.any(made).as_py():
            partition = one(rows.column("partition"))
            keys = self._keys(*(each.filter(made) for each in (partition, *origin)))
            origin_key = pc.replace_with_mask(origin_key, made, keys)
        late = pa.repeat(pa.scalar(True), len(rows))
        if self._since_us is not None:
            enqueued = one(rows.column("enqueuedTime")).cast(pa.int64())
            is_scheduled = is_one_of(op, ["scheduled"])
            at = pc.if_else(is_scheduled, one(rows.column("eventTime")).cast(pa.int64()), enqueued)
            late = pc.or_(pc.invert(enters), pc.fill_null(pc.greater_equal(at, self._since_us), True))
        of_message = ("partition", "entity", "subQueue", "sequenceNumber")
        key = self._keys(*(one(rows.column(name)) for name in of_message))
        return pa.table([one(rows.column("id")), key, kind, origin_key, late], schema=_MOVES)

    def _keys(self, partition: pa.Array, entity: pa.Array, sub_queue: pa.Array, number: pa.Array) -> pa.Array:
        """One number for each message."""
        code, names = coded([partition, entity, sub_queue, pc.shift_right(number, _LOW_BITS)])
        codes = [
            self._queues.setdefault((where, of.lower(), part or "", high), len(self._queues))
            for where, of, part, high in names
        ]
        queue = pa.array(codes, pa.int64()).take(code)
        return pc.bit_wise_or(pc.shift_left(queue, _LOW_BITS), pc.bit_wise_and(number, _LOW))

    def _named(self, keys: Iterable[int]) -> Iterable[Message]:
        names = {code: name for name, code in self._queues.items()}
        for key in keys:
            partition, entity, sub_queue, high = names[key >> _LOW_BITS]
            yield Message(partition, entity, sub_queue, high << _LOW_BITS | key & _LOW)

    def _unwanted(self, moves: pa.Table) -> pa.Array:
        codes = [code for (_, entity, _, _), code in self._queues.items() if not self._wants(entity)]
        is_unwanted = pc.or_(
            pc.is_in(pc.shift_right(moves.column("key"), _LOW_BITS), pa.array(codes, pa.int64())),
            pc.invert(moves.column("late")),
        )
        return one(pc.unique(moves.column("key").filter(is_unwanted)))


_MOVES: Final = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("key", pa.int64()),
        pa.field("kind", pa.int8()),
        pa.field("origin", pa.int64()),  # the key of the message that it was made of
        pa.field("late", pa.bool_()),  # whether it was enqueued in the time that is wanted
    ]
)
_SESSIONS: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("entity", pa.string()),
        ("subQueue", pa.string()),
        ("sessionId", pa.string()),
        ("id", pa.int64()),
    ]
)


def _kind(op: str) -> Kind:
    if op in _GOES_ON:
        return Kind.GOES_ON
    return Kind.ENTERS if op in ENTERS else Kind.ENDS if op in LEAVES else Kind.CHANGES


def _ended(moves: pa.Table, ends: Iterable[Kind]) -> pa.Array:
    """The keys of messages that entered once, before all else, and left once by one of `ends`, after all else."""
    kind = one(moves.column("kind"))
    weight = pa.array([_WEIGHTS[each] for each in Kind], pa.int64()).take(kind)
    wanted = pa.table([moves.column("key"), kind, weight], ["key", "kind", "weight"])
    measures = [("weight", "sum"), ("kind", "first"), ("kind", "last")]
    found = wanted.group_by("key", use_threads=False).aggregate(measures)
    is_ended = pc.and_(
        pc.equal(found.column("weight_sum"), 1 + _LEFT),
        pc.and_(
            pc.equal(found.column("kind_first"), int(Kind.ENTERS)),
            pc.is_in(found.column("kind_last"), pa.array([int(each) for each in ends], pa.int8())),
        ),
    )
    return one(found.column("key").filter(is_ended))


def _last(states: pa.Table) -> pa.Table:
    """Return the last row of each session."""
    by = [name for name in _SESSIONS.names if name != "id"]
    found = states.group_by(by, use_threads=False).aggregate([("id", "max")])
    return found.rename_columns({"id_max": "id"}).select(_SESSIONS.names)


def _without(moves: pa.Table, ended: pa.Array) -> pa.Table:
    """Return the moves without the messages of these keys, but with those from which others were made that are left."""
    made = moves.filter(pc.is_valid(moves.column("origin"))).select(["key", "origin"])
    while len(made) and len(ended):
        left = made.filter(pc.invert(pc.is_in(made.column("key"), ended)))
        needed = pc.is_in(ended, one(left.column("origin")))
        if not pc.any(needed).as_py():
            break
        ended = ended.filter(pc.invert(needed))
    return moves.filter(pc.invert(pc.is_in(moves.column("key"), ended)))
