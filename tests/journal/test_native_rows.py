"""The rows that the extension makes of the bytes of turns are those that Python makes of what is in them."""

from typing import Any
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.journal.properties import DECODING
from protocol.codec import Symbol
from protocol.extension import extension
from storage.journal import rows as journal_rows
from storage.journal.columns import NativeColumns, PlainColumns
from storage.journal.events import Hint, Op
from storage.journal.queues import Mode, Modes, Queues
from storage.journal.rows import Rows
from storage.journal.schema import SCHEMA
from storage.log.changes import Operation
from storage.log.frames import CorruptFrame, decode_turn, skim_turn
from storage.queue_ids import queue_id_of
from storage.records import NEVER, Field, Place, encode_state, session_key
from storage.store import Table
from tests.journal.turns_of_messages import (
    ACTIVE,
    DEAD,
    NAMED,
    ORDERS,
    STORE,
    deleted,
    done,
    done_run,
    entry,
    inserted,
    put,
    record,
    stored,
)

pytestmark = pytest.mark.skipif(extension is None, reason="the extension is not built, or is switched off")

COPY = queue_id_of(9)
EXPECTED = (CorruptFrame, ValueError, TypeError, LookupError, OverflowError, AttributeError)
TIMES = st.integers(-(1 << 63), NEVER) | st.just(NEVER) | st.integers(0, 1 << 42)
TEXTS = st.none() | st.text(max_size=3)
IDS = TEXTS | st.just("x" * 128) | st.binary(max_size=3) | st.uuids()
FIELDS = st.tuples(
    IDS, st.none() | st.binary(max_size=2), TEXTS, TEXTS | st.sampled_from(["x" * 255, "x" * 256]), TEXTS, IDS,
    st.sampled_from([None, Symbol("text/plain"), Symbol("")]), st.none(), st.none(), st.none(), TEXTS,
)  # fmt: skip
COUNTS = st.sampled_from([0, 1, (1 << 31) - 1])
QUEUE_IDS = st.sampled_from([ACTIVE, ACTIVE, ACTIVE, COPY, DEAD, queue_id_of(77)])


class Message:
    def __init__(self, draw: Any, are_usual: bool) -> None:
        self.queue_id = draw(QUEUE_IDS)
        fields = draw(FIELDS)[: draw(st.integers(0, 11))]
        annotations = draw(
            st.sampled_from(
                [
                    None,
                    None,
                    {"x-opt-partition-key": fields[10] if fields[10:] and fields[10] is not None else "key"},
                    {"x-opt-partition-key": None},
                    {"x-other": 1},
                ]
            )
        )
        self.times = draw(st.tuples(TIMES, TIMES))
        self.record = record(
            draw(st.binary(max_size=20)), *fields, annotations=annotations, enqueued_ms=self.times[0],
            expires_ms=self.times[1],
        )  # fmt: skip
        damage = draw(st.none() | st.tuples(st.integers(24, 200), st.integers(0, 255)))
        if damage is not None and damage[0] < len(self.record):
            at, byte = damage
            self.record = self.record[:at] + bytes((byte,)) + self.record[at + 1 :]
        self.count = draw(st.integers(0, 2**31 - 1))
        self.is_stored = are_usual or draw(st.booleans())
        unusual = [None, {Field.ENQUEUED_MS: 5}, {Field.SESSION: "s"}]
        self.overlay = None if are_usual else draw(st.sampled_from(unusual))
        self.place = Place.AVAILABLE if are_usual else draw(st.sampled_from(Place))


@st.composite
def turns(draw: Any) -> tuple[int, Any, Any]:
    are_usual = draw(st.booleans())
    first = draw(st.sampled_from([1, 5, (1 << 63) - 20, (1 << 64) - 20]) if not are_usual else st.just(5))
    messages = [Message(draw, are_usual) for _ in range(draw(st.integers(0, 8)))]
    records, entries = [], []
    for number, message in enumerate(messages, first):
        if message.is_stored:
            records.append((number, message.record))
        entries.append(entry(message.queue_id, number, number, message.place, message.count, message.overlay))
    cut = draw(st.integers(0, len(messages)))
    operations = [stored(*records), inserted(*entries[:cut]), inserted(*entries[cut:])]
    gone = draw(st.lists(st.tuples(QUEUE_IDS, st.integers(0, 12)), max_size=6, unique=True))
    operations += [deleted(queue_id, number) for queue_id, number in (sorted(gone) if draw(st.booleans()) else gone)]
    key = session_key(ACTIVE, b"s")
    others = [
        put(entry(ACTIVE, 3, 1, count=1, overlay={Field.ENQUEUED_MS: 5})),
        (Operation.PUT, Table.SESSION_STATES, ((key, encode_state(b"x")),)),
        (Operation.PUT, Table.META, ((b"key", b"value"),)),
        (Operation.DELETE, Table.MESSAGES, (b"12345678",)),
    ]
    operations += draw(st.lists(st.sampled_from(others[2:] if are_usual else others), max_size=2))
    hints: list[Any] = [NAMED]
    for queue_id in draw(st.lists(QUEUE_IDS, max_size=2)):
        numbers = draw(st.permutations([number for each, number in gone if each == queue_id]))
        hints.append(done(draw(st.sampled_from([Op.COMPLETED, Op.DELIVERED])), queue_id, *numbers))
    for queue_id in draw(st.lists(QUEUE_IDS, max_size=3)):
        op = draw(st.sampled_from([Op.COMPLETED, Op.DELIVERED, Op.ABANDONED]))
        hints.append(done_run(op, queue_id, draw(st.integers(0, 12)), draw(st.integers(1, 5)), draw(COUNTS)))
    bare = [Hint.BARE, Op.PING, ACTIVE, [b"\xa1\x01m", None], None, None, None]
    entered = [Hint.ENTERED, ACTIVE, [first], "moved", COPY, [4]]
    hints += draw(st.lists(st.sampled_from([bare] if are_usual else [bare, entered]), max_size=1))
    return 1_000, [(3, operations)], [(3, STORE, hints)]


def rows_of(payloads: list[bytes], mode: Mode, columns: Any, read: Any) -> Any:
    """The rows of these turns, and how many hints were unfounded; or the kind of the error."""
    with patch.object(journal_rows, "new_columns", columns):
        rows = Rows(3, Queues(Modes(mode, {"dead*": Mode.OFF}), {ORDERS: "orders", 9: "copy"}), DECODING)
    try:
        for payload in payloads:
            time_ms, changes, events, places_in = read(payload)
            for _, _, hints in events:
                rows.add(time_ms, dict(changes).get(3, ()), hints, places_in)
        batch = rows.batch(100)
    except EXPECTED as error:
        return type(error)
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    return batch.to_pylist(), rows.unfounded


def plainly(payload: bytes) -> Any:
    return *decode_turn(payload), None


@given(turns(), turns(), st.sampled_from(Mode))
def test_rows_are_alike(one, other, mode):
    payloads = [msgpack.packb(one), msgpack.packb(other)]
    made = rows_of(payloads, mode, NativeColumns, skim_turn)
    assert made == rows_of(payloads, mode, PlainColumns, plainly)
    assert made == rows_of(payloads, mode, NativeColumns, plainly)


def test_usual_messages_that_come_and_go_are_taken_from_the_bytes():
    made = record(b"body", "m-1", None, None, "subject")
    operations = [stored((7, made), (8, made)), inserted(entry(ACTIVE, 7, 7), entry(COPY, 8, 8)), deleted(ACTIVE, 5, 6)]
    payload = msgpack.packb((1, [(3, operations)], [(3, STORE, [NAMED, done(Op.COMPLETED, ACTIVE, 5, 6)])]))
    with (
        patch.object(Rows, "_add_changes", side_effect=AssertionError),
        patch.object(journal_rows, "unpack_items", side_effect=AssertionError),
    ):
        rows, unfounded = rows_of([payload], Mode.BODIES, NativeColumns, skim_turn)
    assert [(row["op"], row["sequenceNumber"], row["messageId"]) for row in rows] == [
        ("enqueued", 7, "m-1"), ("enqueued", 8, "m-1"), ("completed", 5, None), ("completed", 6, None)
    ]  # fmt: skip
    assert unfounded == 0


@given(turns(), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=3), st.integers(0, 3000))
@example((1, [(3, [])], []), [(0, 0xDD)], 1)
def test_damaged_bytes_are_no_more_than_an_error(turn, damage, end):
    payload = bytearray(msgpack.packb(turn))
    for at, byte in damage:
        payload[at % len(payload)] = byte
    for data in (bytes(payload), bytes(payload[:end])):
        rows_of([data], Mode.BODIES, NativeColumns, skim_turn)


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
@pytest.mark.parametrize("kind", [NativeColumns, PlainColumns])
def test_a_number_that_no_column_holds_is_an_error(value, kind):
    with pytest.raises(OverflowError):
        arrays_of(kind(), [value], None)


@pytest.mark.parametrize("count", [1 << 31, -(1 << 31) - 1])
@pytest.mark.parametrize("kind", [NativeColumns, PlainColumns])
def test_a_count_that_no_column_holds_is_an_error(count, kind):
    with pytest.raises((OverflowError, ValueError)):
        arrays_of(kind(), [1], [count])


def arrays_of(columns: Any, numbers: Any, counts: Any) -> Any:
    columns.end_rows(numbers, counts)
    return columns.arrays()


@given(turns(), st.sampled_from(Mode))
def test_a_run_is_as_its_messages_one_by_one(turn, mode):
    time_ms, changes, [(partition, store, hints)] = turn
    plain = []
    for hint in hints:
        if hint[0] == Hint.DONE_RUN:
            _, op, queue_id, first, messages, count, _, at_ms = hint
            hint = done(op, queue_id, *range(first, first + messages), counts=[count] * messages, at_ms=at_ms)
        plain.append(hint)
    payloads = [msgpack.packb((time_ms, changes, [(partition, store, each)])) for each in (hints, plain)]
    made = [rows_of([payload], mode, NativeColumns, skim_turn) for payload in payloads]
    assert made[0] == made[1]


@pytest.mark.parametrize("messages", [-1, 0, (1 << 16) + 1, 1 << 62, None, b"2"])
@pytest.mark.parametrize("read", [skim_turn, plainly])
def test_a_run_without_end_is_an_error(messages, read):
    payload = msgpack.packb((1, [(3, [])], [(3, STORE, [NAMED, done_run(Op.DELIVERED, ACTIVE, 1, messages)])]))
    assert rows_of([payload], Mode.EVENTS, NativeColumns, read) in EXPECTED


@pytest.mark.parametrize(("first", "count"), [(1 << 63, 0), ((1 << 63) - 1, 0), (1, 1 << 31), (1, -(1 << 63))])
@pytest.mark.parametrize("kind", [NativeColumns, PlainColumns])
def test_a_run_that_no_column_holds_is_an_error(first, count, kind):
    with pytest.raises((OverflowError, ValueError)):
        arrays_of_run(kind(), first, count)


def arrays_of_run(columns: Any, first: int, count: int) -> Any:
    columns.end_run(first, 2, count)
    return columns.arrays()
