"""A partition knows after the death of its worker which marked deliveries it has stored (`wire.Mark`)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import requests
from broker.partition.state.stored_marks import MARKS_PREFIX, SENDERS_MAX, StoredMarks
from broker.wire import ITEMS_AT_ONCE, Op
from storage.memory import MemoryStore
from storage.store import Table
from tests.partition.driver import MAIN, Driver, message, run
from tests.partition.in_a_worker import PARTITION, through_a_worker

CHANNEL, OTHER = 11, 12
SENDER = b"gateway1"


def mark(first: int, deliveries: int, below: int = 0, channel: int = CHANNEL) -> list[Any]:
    return [Op.MARK, PARTITION, channel, SENDER, first, deliveries, below]


def send(*messages: Any, channel: int = CHANNEL) -> list[Any]:
    return [Op.SEND, PARTITION, channel, MAIN, list(messages)]


def stored(queue: Driver) -> list[int]:
    """After a restart."""
    queue.partition.commit()
    queue.restart()
    found: list[int] = queue.partition.request(0, requests.Stored(SENDER), queue.now_ms)
    return found


def test_each_kind_of_send_is_noted(queue: Driver) -> None:
    messages = [message(b"%d" % number) for number in range(3)]
    through_a_worker(
        queue,
        mark(0, 3),
        send(*messages),
        mark(3, 3),
        [Op.SEND_RUN, PARTITION, CHANNEL, MAIN, 3, run(messages)],
        mark(6, 1),
        [Op.SEND_BATCH, PARTITION, CHANNEL, MAIN, messages],
        send(*messages),  # has no mark
        mark(7, 1),
        send(messages[0]),
    )
    assert stored(queue) == [0, 8]
    assert queue.counts()[0] == 13


def test_only_what_is_stored_is_noted() -> None:
    queue = Driver(requires_session=True)
    usual, without_session = message(b"m", session_id="s"), message(b"m")
    answers = through_a_worker(
        queue, mark(5, 4), send(usual, without_session, usual, usual), mark(9, 1), send(without_session)
    )
    assert [each.deliveries for each in answers if each.op == Op.REFUSED] == [1, 1]
    assert stored(queue) == [5, 6, 7, 9]


@pytest.mark.parametrize("is_run", [False, True])
def test_a_command_that_is_done_in_parts_has_its_marks(queue: Driver, is_run: bool) -> None:
    messages = [message(b"m")] * (2 * ITEMS_AT_ONCE + 3)
    count = len(messages)
    command = [Op.SEND_RUN, PARTITION, CHANNEL, MAIN, count, run(messages)] if is_run else send(*messages)
    through_a_worker(queue, mark(0, count), command, mark(count, 1), send(message(b"m")))
    assert stored(queue) == [0, count + 1]


def test_the_mark_of_a_command_that_did_not_come_is_nobodys(queue: Driver) -> None:
    through_a_worker(queue, mark(0, 2), send(message(b"m"), channel=OTHER), send(message(b"m")))
    assert stored(queue) == []


def test_nothing_is_known_of_a_sender_that_has_sent_nothing(queue: Driver) -> None:
    assert queue.partition.request(0, requests.Stored(b"another"), queue.now_ms) == []


def test_sends_without_marks_write_nothing(queue: Driver) -> None:
    before = queue.store.scan(Table.META, b"", b"\xff", 100)
    through_a_worker(queue, send(message(b"m")))
    assert queue.store.scan(Table.META, b"", b"\xff", 100) == before


COMMANDS = st.lists(st.tuples(st.integers(1, 2000), st.booleans(), st.integers(0, 5), st.booleans()), max_size=40)


@given(COMMANDS)
def test_numbers_are_known_exactly_up_to_what_nobody_asks_for(commands: list[tuple[int, bool, int, bool]]) -> None:
    """Commands of so many deliveries: whether they are stored, how many are without an answer, whether a turn ends."""
    store = MemoryStore()
    marks = StoredMarks(store)
    known: set[int] = set()
    begins, first, below = [0], 0, 0
    for count, is_stored, waiting, ends in commands:
        below = max(below, begins[-1 - min(waiting, len(begins) - 1)])
        if is_stored:
            marks.note(SENDER, first, count, below, now_ms=first)
            known |= set(range(first, first + count))
        first += count
        begins.append(first)
        if ends:
            marks.write()
            store.commit()
            marks = StoredMarks(store)
            marks.load()
        ranges = marks.of(SENDER)
        assert ranges == sorted(set(ranges)), "in order, and apart"
        found = {number for begin, end in zip(ranges[::2], ranges[1::2], strict=True) for number in range(begin, end)}
        assert {number for number in found if number >= below} == {number for number in known if number >= below}
        assert found <= known
        assert len(ranges) <= 2 * len([each for each in begins if each >= below]) + 2


def test_marks_of_the_gateways_that_were_seen_last_are_kept() -> None:
    store = MemoryStore()
    marks = StoredMarks(store)
    for number in range(SENDERS_MAX):
        marks.note(b"%08d" % number, 0, 1, 0, now_ms=SENDERS_MAX - number)  # a clock that was set back
        marks.write()
    marks.note(b"%08d" % 0, 1, 1, 0, now_ms=1000)
    marks.note(b"new", 0, 1, 0, now_ms=1001)
    marks.write()
    store.commit()
    assert marks.of(b"%08d" % 0) == [0, 2]
    assert marks.of(b"%08d" % 1) == []
    assert len(store.scan(Table.META, MARKS_PREFIX, MARKS_PREFIX + b"\xff" * 9, 1000)) == SENDERS_MAX
    marks = StoredMarks(store)
    marks.load()
    marks.note(b"newer", 0, 1, 0, now_ms=2000)
    assert marks.of(b"%08d" % 0) == [0, 2]
    assert marks.of(b"new") == [0, 1]


@pytest.mark.parametrize("value", [b"", b"\x00" * 20, b"\xff" * 9])
def test_a_row_that_cannot_be_read_is_no_row(value: bytes) -> None:
    store = MemoryStore()
    store.put(Table.META, MARKS_PREFIX + SENDER, value)
    marks = StoredMarks(store)
    marks.load()
    assert marks.of(SENDER) == []
