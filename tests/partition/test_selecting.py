"""Receivers with selectors: they get what they select, and what they do not select stays for others."""

from typing import Any

import pytest

from broker.errors import InvalidFilter, NotImplementedByBroker
from broker.partition.messages.selecting import LOOK_STEP
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import Field
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Delivery, Driver
from tests.partition.selective_driver import Selective, color_of, colored
from tests.partition.session_driver import SessionDriver
from tests.partition.test_turn_work import MeteredStore
from tests.partition.test_unreadable_records import damage_body, damage_entry

RED, BLUE = "color = 'red'", "color = 'blue'"
COLORS = ("red", "blue", "green")


@pytest.fixture
def queue() -> Selective:
    return Selective()


def colors(received: list[Delivery]) -> list[str]:
    return [color_of(each) for each in received]


def numbers(received: list[Delivery]) -> list[int]:
    return [each.number for each in received]


def test_a_receiver_gets_what_it_selects_and_the_rest_stays(queue):
    queue.send(*[colored(color) for color in COLORS * 3])
    queue.open_selective("r", RED)
    queue.grant(10)
    found, _, _, _ = queue.turns()
    assert numbers(found["r"]) == [1, 4, 7]
    assert colors(found["r"]) == ["red"] * 3
    assert queue.held() == [9, 0, 0, 3]
    assert all(each.delivery_count == 0 for each in queue.peek())
    queue.open("plain")
    queue.grant(10, "plain")
    found, _, _, _ = queue.turns()
    assert numbers(found["plain"]) == [2, 3, 5, 6, 8, 9]
    assert all(each.delivery_count == 0 for each in found["plain"])


def test_messages_that_come_later_are_looked_at(queue):
    queue.open_selective("r", RED)
    queue.grant(10)
    assert queue.turns()[0] == {}
    for color in COLORS:
        queue.send(colored(color))
    queue.send(*[colored(color) for color in COLORS])
    assert numbers(queue.turns()[0]["r"]) == [1, 4]


def test_credit_is_kept_to_the_message(queue):
    queue.send(*[colored("red") for _ in range(5)])
    queue.open_selective("r", RED)
    queue.grant(2)
    assert numbers(queue.turns()[0]["r"]) == [1, 2]
    queue.grant(2)
    assert numbers(queue.turns()[0]["r"]) == [3, 4]
    queue.grant(0)
    assert queue.turns()[0] == {}


def test_receivers_of_one_selector_share_what_it_selects(queue):
    queue.open_selective("a", RED)
    queue.open_selective("b", RED)
    queue.open_selective("c", BLUE)
    for receiver in "abc":
        queue.grant(10, receiver)
    queue.send(*[colored(color) for color in COLORS * 4])
    found, _, _, _ = queue.turns()
    assert sorted(numbers(found["a"] + found["b"])) == [1, 4, 7, 10]
    assert len(found["a"]) == len(found["b"]) == 2
    assert numbers(found["c"]) == [2, 5, 8, 11]
    assert len(queue.partition._core.queue(MAIN).selections) == 2
    for receiver in "abc":
        queue.close(receiver)
    main = queue.partition._core.queue(MAIN)
    assert (main.selections, [*main.turns]) == ({}, [])


@pytest.mark.parametrize("at_once", [1, 6])
def test_plain_receivers_and_those_with_selectors_take_turns(queue, at_once):
    """Nobody starves who selects, nor who does not, as long as there is something for both."""
    queue.open_selective("r", "color IS NOT NULL")
    queue.open("plain")
    for receiver in ("r", "plain"):
        queue.grant(1000, receiver)
    got: dict[str, int] = {"r": 0, "plain": 0}
    for _ in range(40):
        queue.send(*[colored("red") for _ in range(at_once)])
        for receiver, received in queue.turns()[0].items():
            got[receiver] += len(received)
    assert got["r"] == got["plain"] == 20 * at_once


@pytest.mark.parametrize("how", ["abandoned", "released", "lock ended", "connection lost", "unsent"])
def test_what_comes_back_is_looked_at_again(queue, how):
    queue.open("plain")
    queue.send(*[colored(color) for color in COLORS])
    held = queue.receive(3, "plain")
    queue.open_selective("r", RED)
    queue.grant(5)
    assert queue.turns()[0] == {}, "all are locked"
    match how:
        case "abandoned":
            queue.settle(Outcome.ABANDONED, *held)
        case "released":
            queue.settle(Outcome.RELEASED, *held)
        case "lock ended":
            queue.wait(LOCK_MS)
        case "connection lost":
            queue.close("plain", broken=True)
        case "unsent":
            queue.close("plain", unsent_from=held[0].token)
    found, _, _, _ = queue.turns()
    assert [(each.number, each.delivery_count) for each in found["r"]] == [(1, int(how not in ("released", "unsent")))]


def test_its_own_come_back_to_it(queue):
    queue.send(*[colored(color) for color in COLORS * 2])
    queue.open_selective("r", RED)
    queue.grant(10)
    first, second = queue.turns()[0]["r"]
    queue.settle(Outcome.ABANDONED, second)
    queue.settle(Outcome.ABANDONED, first)
    assert [(each.number, each.delivery_count) for each in queue.turns()[0]["r"]] == [(1, 1), (4, 1)]


def test_what_was_set_meanwhile_counts(queue):
    queue.open("plain")
    queue.send(colored("blue"), colored("red"))
    queue.open_selective("r", RED)
    held = queue.receive(2, "plain")
    queue.grant(10)
    assert queue.turns()[0] == {}
    queue.settle(Outcome.ABANDONED, held[0], properties={"color": "red"})
    queue.settle(Outcome.ABANDONED, held[1], properties={"color": "blue"})
    assert numbers(queue.turns()[0]["r"]) == [1]


def test_so_many_come_back_that_not_each_is_remembered():
    queue = Selective(settings=PartitionSettings(window=4))
    queue.send(*[colored(color) for color in COLORS * 10])
    queue.open_selective("r", RED)
    queue.open("plain")
    held = queue.receive(30, "plain")
    queue.grant(20)
    assert queue.turns()[0] == {}
    queue.settle(Outcome.RELEASED, *held)
    assert sorted(numbers(queue.turns()[0]["r"])) == list(range(1, 31, 3))


def test_scheduled_messages_are_looked_at_when_they_are_due(queue):
    queue.open_selective("r", RED)
    queue.grant(10)
    queue.send(*[colored(color, scheduled_ms=START_MS + 1000) for color in COLORS])
    assert queue.turns()[0] == {}
    queue.wait(1000)
    assert colors(queue.turns()[0]["r"]) == ["red"]
    assert queue.held() == [3, 0, 0, 1]


def test_messages_that_were_abandoned_with_a_delay_are_looked_at_when_they_are_back():
    queue = Selective(settings=PartitionSettings(abandon_delays=True))
    queue.send(*[colored(color) for color in COLORS])
    queue.open_selective("r", RED)
    queue.grant(10)
    [held] = queue.turns()[0]["r"]
    queue.settle(Outcome.ABANDONED, held, properties={"peeklock:delay-ms": 5000})
    assert queue.turns()[0] == {}
    queue.wait(5000)
    assert numbers(queue.turns()[0]["r"]) == [1]


def test_receive_and_delete(queue):
    queue.send(*[colored(color) for color in COLORS * 2])
    queue.open_selective("r", RED, receive_and_delete=True)
    queue.grant(10)
    received = queue.turns()[0]["r"]
    assert numbers(received) == [1, 4]
    assert queue.held() == [4, 0, 0, 0]
    items = [item for each in received for item in (each.token, each.number, each.delivery_count, each.record, None)]
    queue.partition.restore(MAIN, items, queue.now_ms)  # they were never sent
    queue.partition.commit()
    assert numbers(queue.turns()[0]["r"]) == [1, 4]


def test_dead_letters_are_selected_by_their_reason(queue):
    queue.send(*[colored(color) for color in COLORS])
    for each in queue.receive(3):
        queue.settle(Outcome.DEAD_LETTERED, each, properties={"DeadLetterReason": color_of(each)})
    queue.open_selective("d", "DeadLetterReason IN ('blue', 'green')", DEAD)
    queue.grant(10, "d")
    assert colors(queue.turns()[0]["d"]) == ["blue", "green"]


def test_expired_and_unreadable_ones_are_none(queue):
    queue.send(*[colored("red", ttl_ms=1000) for _ in range(2)], *[colored(color) for color in COLORS * 3])
    damage_body(queue, 3)
    damage_entry(queue, 6)
    queue.now_ms += 1001  # and its timer has not fired yet
    queue.open_selective("r", RED)
    queue.grant(10)
    assert numbers(queue.turns()[0]["r"]) == [9]
    assert queue.held() == [7, 0, 0, 1]
    assert queue.partition.tallies()[MAIN]["expired"] == 2


def test_an_unreadable_message_that_is_locked_is_left_to_its_receiver(queue):
    queue.open("plain")
    queue.send(colored("red"), colored("red"))
    held = queue.receive(1, "plain")
    damage_entry(queue, 1)
    queue.open_selective("r", RED)
    queue.grant(10)
    assert numbers(queue.turns()[0]["r"]) == [2]
    assert queue.settle(Outcome.ACCEPTED, *held) == [None]
    assert queue.held() == [1, 0, 0, 1]


def test_a_drain_ends_when_all_was_looked_at(queue):
    queue.send(*[colored("blue") for _ in range(LOOK_STEP * 3)], colored("red"))
    queue.open_selective("r", RED)
    queue.drain(5, "r")
    found, drained, _, turns = queue.turns()
    assert numbers(found["r"]) == [LOOK_STEP * 3 + 1]
    assert drained == ["r"]
    assert turns >= 4
    queue.drain(5, "r")
    assert queue.turns()[:2] == ({}, ["r"])


def test_a_plain_drain_does_not_wait_for_a_search(queue):
    queue.send(*[colored("blue") for _ in range(LOOK_STEP * 5)])
    queue.open("plain")
    queue.open_selective("r", RED)
    queue.grant(1)
    queue.drain(1, "plain")
    found, drained, _, more = queue.turn()
    if "plain" not in drained:  # whose turn it is
        found, drained, _, more = queue.turn()
    assert len(found["plain"]) == 1
    assert drained == ["plain"]
    assert more, "the search goes on"


def test_a_drain_without_credit_does_not_wait_for_the_search_of_others(queue):
    queue.send(*[colored("blue") for _ in range(LOOK_STEP * 5)])
    for receiver in ("r", "other"):
        queue.open_selective(receiver, RED)
    queue.grant(1, "other")
    queue.drain(0, "r")
    _, drained, _, more = queue.turn()
    assert drained == ["r"]
    assert more
    assert queue.turns()[1] == []


def test_a_fragment_tells_only_of_what_is_selected(queue):
    queue.open_selective("r", RED)
    queue.partition.watch("r")
    queue.send(*[colored("blue") for _ in range(LOOK_STEP + 1)])
    assert queue.turns()[2] == []
    queue.send(colored("red"), colored("red"))
    assert queue.turns()[2] == ["r"]
    assert queue.held()[3] == 0
    queue.grant(1)
    found, _, told, _ = queue.turns()
    assert (len(found["r"]), told) == (1, ["r"]), "it is told of the second"
    queue.send(colored("red"))
    assert queue.turns()[2] == [], "it has not answered"
    queue.partition.passes("r")
    assert queue.turns()[2] == [], "it wants to hear no more"
    queue.partition.grant("r", 1)
    assert queue.turns()[2] == ["r"]


def test_who_is_told_and_goes_leaves_it_to_the_next(queue):
    for receiver in "ab":
        queue.open_selective(receiver, RED)
        queue.partition.watch(receiver)
    queue.send(colored("red"))
    assert queue.turns()[2] == ["a"]
    queue.close("a")
    assert queue.turns()[2] == ["b"]


def test_a_plain_receiver_that_is_told_and_goes_leaves_it_to_the_next(queue):
    for receiver in "ab":
        queue.open(receiver)
        queue.partition.watch(receiver)
    queue.send(colored("red"))
    assert queue.turns()[2] == ["a"]
    queue.close("a")
    assert queue.turns()[2] == ["b"]


@pytest.mark.parametrize(
    ("selector", "error"),
    [("color =", InvalidFilter), ("", InvalidFilter), ("JMSReplyTo = 'x'", NotImplementedByBroker)],
)
def test_what_is_no_selector_is_refused(queue, selector, error):
    with pytest.raises(error):
        queue.open_selective("r", selector)
    queue.partition.check()
    with pytest.raises(error):
        queue.request("browse", 0, 10, 1000, None, selector)


def test_browsing_with_a_selector_looks_at_a_step_at_a_time(queue):
    queue.send(*[colored("blue") for _ in range(LOOK_STEP * 2)], *[colored(color) for color in COLORS * 2])
    found: list[int] = []
    start, is_end, steps = 0, False, 0
    while not is_end:
        items, start, is_end = queue.request("browse", start, 1, 1000, None, RED)
        found += items[1::5]
        steps += 1
    assert found == [LOOK_STEP * 2 + 1, LOOK_STEP * 2 + 4]
    assert 3 <= steps <= 6


# -- what it costs


def test_a_search_through_a_long_queue_is_done_in_steps_and_once():
    store = MeteredStore()
    queue = Selective(store)
    count = 5000
    queue.send(*[colored("blue") for _ in range(count)])
    store.forget()
    queue.open_selective("r", RED)
    queue.grant(10)
    _, _, _, turns = queue.turns()
    assert turns >= count // LOOK_STEP
    assert store.most_records <= 3 * LOOK_STEP
    store.forget()
    for _ in range(20):  # now it only looks at what comes
        queue.send(colored("green"))
        queue.turns()
        queue.send(colored("red"))
        queue.settle(Outcome.ACCEPTED, *queue.turns()[0]["r"])
        queue.grant(1)
        queue.turns()
    assert store.most_records <= 20


def test_others_are_served_while_a_search_goes_on(queue):
    queue.send(*[colored("blue") for _ in range(LOOK_STEP * 10)])
    queue.open_selective("r", RED)
    queue.grant(1)
    other = queue.add_queue(2)
    queue.open("plain")
    queue.open("other", other)
    for receiver in ("plain", "other"):
        queue.grant(100, receiver)
    queue.send("there", queue=other)
    found: dict[str, int] = {}
    more, turns = True, 0
    while more and turns < 3:
        given, _, _, more = queue.turn()
        for receiver, received in given.items():
            found[receiver] = found.get(receiver, 0) + len(received)
        turns += 1
    assert more, "the search goes on"
    assert found == {"plain": 100, "other": 1}


def test_large_messages_end_a_step():
    queue = Selective()
    for _ in range(8):
        queue.send(colored("blue", body="x" * 400_000))
    queue.send(colored("red"))
    queue.open_selective("r", RED)
    queue.grant(1)
    found, _, _, turns = queue.turns()
    assert numbers(found["r"]) == [9]
    assert turns >= 3


def test_locked_messages_that_were_selected_out_of_turn_cost_no_memory_when_they_are_gone():
    queue = Selective(settings=PartitionSettings(window=8))
    queue.open_selective("r", RED)
    queue.grant(1000)
    main = queue.partition._core.queue(MAIN)
    for _ in range(60):
        queue.send(colored("blue"), colored("red"))
        queue.settle(Outcome.ACCEPTED, *queue.turns()[0]["r"])
    assert len(main.window.skip) <= 10
    queue.open("plain")
    queue.grant(100, "plain")
    assert len(queue.turns()[0]["plain"]) == 60


# -- sessions


class InSessions(SessionDriver):
    def accept_selective(self, receiver: Any, session: str, selector: str, receive_and_delete: bool = False) -> None:
        self.partition.open_receiver(receiver, MAIN, receive_and_delete, self.now_ms, [session, 0], selector)
        self._limits[receiver] = 0
        accepted, _ = self.turn()
        assert accepted[receiver][0] == session


def put(queue: Driver, session: str, *given: str) -> None:
    queue.send(*[colored(color, session_id=session) for color in given])


@pytest.mark.parametrize("receive_and_delete", [False, True])
def test_in_a_session_the_rest_stays_for_who_has_the_session_next(receive_and_delete):
    queue = InSessions()
    put(queue, "s", *COLORS * 2)
    put(queue, "other", *COLORS)
    queue.accept_selective("r", "s", RED, receive_and_delete)
    queue.grant(10)
    assert numbers(queue.pump()["r"]) == [1, 4]
    put(queue, "s", "blue", "red")
    assert numbers(queue.pump()["r"]) == [11]
    queue.close("r")
    queue.accept("n", "s")
    queue.grant(10, "n")
    rest = [2, 3, 5, 6, 10]
    expected = rest if receive_and_delete else sorted([1, 4, 11, *rest])
    received = queue.pump()["n"]
    assert numbers(received) == expected
    assert all(each.delivery_count == 0 for each in received)


def test_in_a_session_what_comes_back_is_looked_at_again():
    queue = InSessions(settings=PartitionSettings(session_window=2))
    put(queue, "s", *COLORS * 4)
    queue.accept_selective("r", "s", RED)
    queue.grant(20)
    received = queue.pump()["r"]
    assert numbers(received) == [1, 4, 7, 10]
    queue.settle(Outcome.ABANDONED, *received)
    assert [(each.number, each.delivery_count) for each in queue.pump()["r"]] == [(1, 1), (4, 1), (7, 1), (10, 1)]
    assert queue.counts()[4] == 4


def test_in_a_session_a_drain_ends_when_all_was_looked_at():
    queue = InSessions(settings=PartitionSettings(session_window=2, turn_work=20))
    put(queue, "s", *["blue"] * 50, "red")
    queue.accept_selective("r", "s", RED)
    queue.partition.drain("r", 5)
    drained: list[Any] = []
    found: list[int] = []
    more = True
    turns = 0
    while more:
        pumped = queue.partition.pump(queue.now_ms)
        queue.partition.commit()
        drained += pumped.drained
        found += [each for _, _, items in pumped.deliveries for each in [items[1]]]
        more = pumped.more
        turns += 1
    assert (found, drained) == ([51], [("r", 1)])
    assert turns > 3


def test_overlays_of_sessions_are_no_properties():
    queue = InSessions()
    put(queue, "s", "red")
    queue.accept_selective("r", "s", RED)
    queue.grant(1)
    [received] = queue.pump()["r"]
    assert Field.PROPERTIES not in received.overlay
