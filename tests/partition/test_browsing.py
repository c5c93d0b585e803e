"""Browsing: messages shown step by step and left where they are, and browsers that wait for more."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import requests
from broker.errors import BrokerError, EntityDisabled, EntityNotFound, InvalidArgument, NotAllowed
from broker.partition.messages.browsing import BROWSE_STEP
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import Place
from tests.partition.driver import DEAD, MAIN, START_MS, Delivery, Driver, deliveries, message
from tests.partition.forwarding_driver import Partitions
from tests.partition.session_driver import SessionDriver
from tests.partition.test_unreadable_records import damage_body, damage_entry

MUCH = 1 << 20


def step(
    queue: Driver, start: int = 0, count: int = 1000, *, most: int = MUCH, session: str | None = None, of: int = MAIN
) -> tuple[list[Delivery], int, bool]:
    items, next_number, is_end = queue.request("browse", start, count, most, session, queue=of)
    return deliveries(items), next_number, is_end


def browse(queue: Driver, **options: Any) -> list[Delivery]:
    """All of it, however many steps it takes."""
    found: list[Delivery] = []
    start, is_end = 0, False
    while not is_end:
        before = start
        shown, start, is_end = step(queue, start, **options)
        assert is_end or start > before
        found += shown
    return found


def told(queue: Driver) -> list[Any]:
    available: list[Any] = []
    more = True
    while more:
        pumped = queue.partition.pump(queue.now_ms)
        queue.partition.commit()
        available += pumped.available
        more = pumped.more
    queue.partition.check()
    return available


def closed(queue: Driver) -> dict[Any, type[BrokerError]]:
    pumped = queue.partition.pump(queue.now_ms)
    queue.partition.commit()
    queue.partition.check()
    return {browser: type(error) for browser, error in pumped.closed}


def await_more(queue: Driver, browser: Any, number: int, of: int = MAIN) -> None:
    queue.partition.await_more(browser, of, number, queue.now_ms)
    queue.partition.commit()


@given(
    st.lists(st.sampled_from(["available", "locked", "deferred", "scheduled", "unreadable"]), max_size=12),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([1, 100, MUCH]),
)
def test_every_message_is_shown_once_and_in_order_and_nothing_changes(kinds, count, at_once, most):
    queue = Driver(settings=PartitionSettings(step=at_once))
    for number, kind in enumerate(kinds, 1):
        scheduled = {"scheduled_ms": START_MS + 60_000} if kind == "scheduled" else {}
        queue.send(message(f"{number}", **scheduled))
        if kind == "unreadable":
            damage_body(queue, number)
    numbers = [number for number, kind in enumerate(kinds, 1) if kind in ("locked", "deferred")]
    if numbers:
        queue.request("receive-deferred", numbers, False, True)
        held = {ref[0]: token for token, (ref, *_) in queue.partition._core.queue(MAIN).locks.held.items()}
        for number, kind in enumerate(kinds, 1):
            if kind == "deferred":
                queue.partition.settle(MAIN, [held[number]], Outcome.DEFERRED, None, queue.now_ms)
        queue.partition.commit()
    before = queue.counts()
    places = {"available": Place.AVAILABLE, "locked": Place.AVAILABLE}
    places |= {"deferred": Place.DEFERRED, "scheduled": Place.SCHEDULED}
    for _ in range(2):
        shown = browse(queue, count=count, most=most)
        assert [(each.number, each.place) for each in shown] == [
            (number, places[kind]) for number, kind in enumerate(kinds, 1) if kind in places
        ]
        assert all(each.delivery_count == (each.place == Place.DEFERRED) for each in shown)
    left = queue.counts()
    assert left[1:3] == before[1:3]
    assert left[4] == before[4]
    assert left[0] == before[0] - kinds.count("unreadable")
    queue.partition.check()


def test_a_step_is_bounded_in_number_and_in_bytes():
    queue = Driver()
    queue.send(*["x" * 100] * 600)
    shown, start, is_end = step(queue)
    assert (len(shown), start, is_end) == (BROWSE_STEP, BROWSE_STEP + 1, False)
    shown, start, is_end = step(queue, start, most=1000)
    assert len(shown) == 7
    assert not is_end
    assert start == BROWSE_STEP + 8
    assert len(browse(queue)) == 600
    assert step(queue, 601) == ([], 601, True)


def test_unreadable_entries_are_set_aside_and_end_nothing():
    queue = Driver(settings=PartitionSettings(step=2))
    queue.send("a", "b", "c", "d", "e")
    for number in (1, 2, 4):
        damage_entry(queue, number)
    assert [each.body for each in browse(queue)] == [b"c", b"e"]
    assert queue.counts()[0] == 2


def test_a_session_or_all_of_them():
    queue = SessionDriver()
    for at in range(5):
        queue.put("a", f"a{at}")
        queue.put("b", f"b{at}")
    queue.accept("r", "a")
    queue.grant(2)
    queue.turn()
    assert len(browse(queue, count=3)) == 10
    assert [each.body for each in browse(queue, count=2, session="b")] == [b"b0", b"b1", b"b2", b"b3", b"b4"]
    assert len(browse(queue, session="a")) == 5
    assert browse(queue, session="c") == []


@pytest.mark.parametrize("arguments", [(0, 0), (0, -1), (-1, 1), (1 << 63, 1)])
def test_odd_numbers_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        step(Driver(), *arguments)


def test_a_plain_queue_has_no_sessions():
    with pytest.raises(NotAllowed):
        step(Driver(), session="a")


def test_where_nobody_receives_nobody_browses():
    queue = Driver()
    queue.change(status="ReceiveDisabled")
    with pytest.raises(EntityDisabled):
        step(queue)
    with pytest.raises(EntityDisabled):
        await_more(queue, "b", 1)
    with pytest.raises(EntityNotFound):
        await_more(queue, "b", 1, of=99 << 3)
    queue.partition.check()


# -- waiting


def test_a_browser_is_told_once_when_there_are_more():
    queue = Driver()
    queue.send("a")
    await_more(queue, "b", 2)
    await_more(queue, "c", 3)
    assert told(queue) == []
    queue.send("b")
    assert told(queue) == ["b"]
    queue.send("c")
    assert told(queue) == ["c"]
    queue.send("d")
    assert told(queue) == []


def test_a_browser_that_asks_late_is_told_at_once():
    queue = Driver()
    queue.send("a", "b")
    await_more(queue, "b", 2)
    assert told(queue) == ["b"]


@pytest.mark.parametrize("how", ["scheduled", "dead-lettered", "run"])
def test_a_browser_is_told_of_whatever_comes(how):
    queue = Driver()
    of = DEAD if how == "dead-lettered" else MAIN
    await_more(queue, "b", 1, of)
    assert told(queue) == []
    if how == "scheduled":
        queue.send(message("s", scheduled_ms=START_MS + 60_000))
    elif how == "run":
        queue.send(*"abc")
    else:
        queue.send("a")
        queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    assert told(queue) == ["b"]
    assert len(browse(queue, of=of)) == {"run": 3}.get(how, 1)


def test_a_browser_that_is_gone_is_not_told():
    queue = Driver()
    await_more(queue, "b", 1)
    await_more(queue, "c", 1)
    await_more(queue, "c", 1)  # asks again
    queue.close("b")
    queue.close("b")
    queue.send("a")
    assert told(queue) == ["c"]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda queue: queue.partition.delete_entity(1, queue.now_ms), EntityNotFound),
        (lambda queue: queue.change(status="ReceiveDisabled"), EntityDisabled),
        (lambda queue: queue.change(forward_to="queue-2"), NotAllowed),
    ],
)
def test_a_browser_is_told_when_nobody_can_receive_any_more(end, error):
    queue = Driver()
    queue.add_queue(2)
    await_more(queue, "b", 1)
    assert told(queue) == []
    end(queue)
    assert closed(queue) == {"b": error}
    queue.close("b")


def test_a_fragment_begins_with_its_first_number():
    net = Partitions(2)
    queue = net.queue("spread", 1)
    assert net.partitions[1].request(queue, requests.Browse(0, 1, MUCH, None), net.now_ms)[2]
