"""Receivers that have their credit on another partition, and are told when there are messages here."""

from collections.abc import Hashable

from broker.wire import Outcome
from tests.partition.driver import DEAD, LOCK_MS, Driver, message


def watched(queue: Driver, *receivers: str) -> None:
    for receiver in receivers:
        queue.open(receiver)
        queue.partition.watch(receiver)


def told(queue: Driver) -> list[Hashable]:
    """Who is told at the end of this turn; nobody has credit."""
    pumped = queue.partition.pump(queue.now_ms)
    queue.partition.commit()
    assert not pumped.deliveries
    return list(pumped.available)


def test_nobody_is_told_of_nothing(queue):
    watched(queue, "a")
    assert told(queue) == []


def test_a_watching_receiver_is_told_once(queue):
    watched(queue, "a")
    queue.send("x", "y")
    assert told(queue) == ["a"]
    queue.send("z")
    assert told(queue) == []


def test_a_receiver_that_does_not_watch_is_not_told(queue):
    queue.open("a")
    queue.send("x")
    assert told(queue) == []


def test_messages_that_were_there_before_are_told(queue):
    queue.send("x")
    watched(queue, "a")
    assert told(queue) == ["a"]


def test_as_many_are_told_as_there_are_messages_the_first_first(queue):
    watched(queue, "a", "b", "c", "d")
    queue.send("x", "y")
    assert told(queue) == ["a", "b"]
    queue.send("z")
    assert told(queue) == ["c"]


def test_who_has_credit_gets_the_message_and_nobody_is_told(queue):
    watched(queue, "a")
    queue.open("b")
    queue.grant(1, "b")
    queue.send("x")
    assert [d.body for d in queue.pump()["b"]] == [b"x"]
    queue.send("y")
    assert told(queue) == ["a"]


def test_a_grant_is_an_answer_and_the_receiver_watches_again_when_it_is_used_up(queue):
    watched(queue, "a")
    queue.send("x", "y", "z")
    assert told(queue) == ["a"]
    queue.grant(1, "a")
    pumped = queue.partition.pump(queue.now_ms)
    assert len(pumped.deliveries) == 1
    assert pumped.available == ["a"], "there are more"
    queue.partition.commit()
    queue.grant(5, "a")
    assert len(queue.pump()["a"]) == 2
    queue.send("v")
    assert len(queue.pump()["a"]) == 1, "it has credit"


def test_a_grant_of_nothing_watches_again(queue):
    watched(queue, "a")
    queue.send("x")
    assert told(queue) == ["a"]
    queue.partition.grant("a", 0)
    assert told(queue) == ["a"]


def test_who_passes_lets_another_be_told_and_is_not_told_again(queue):
    watched(queue, "a", "b")
    queue.send("x")
    assert told(queue) == ["a"]
    queue.partition.passes("a")
    assert told(queue) == ["b"]
    queue.partition.passes("b")
    assert told(queue) == []
    queue.send("y")
    assert told(queue) == []
    queue.partition.grant("b", 0)
    assert told(queue) == ["b"]


def test_who_is_closed_lets_another_be_told(queue):
    watched(queue, "a", "b")
    queue.send("x")
    assert told(queue) == ["a"]
    queue.close("a")
    queue.send("y")
    assert told(queue) == ["b"]


def test_after_a_drain_the_receiver_watches(queue):
    watched(queue, "a")
    queue.partition.drain("a", 3)
    assert queue.partition.pump(queue.now_ms).drained == [("a", 0)]
    queue.send("x")
    assert told(queue) == ["a"]


def test_what_comes_back_is_told(queue):
    watched(queue, "a")
    queue.send("x")
    delivery = queue.receive_one("other")
    assert told(queue) == []
    queue.settle(Outcome.ABANDONED, delivery)
    assert told(queue) == ["a"]
    again = queue.receive_one("other")
    queue.partition.grant("a", 0)
    assert told(queue) == []
    queue.wait(LOCK_MS)
    assert told(queue) == ["a"]
    assert again.number == delivery.number


def test_a_scheduled_message_that_is_due_is_told(queue):
    watched(queue, "a")
    queue.send(message("x", scheduled_ms=queue.now_ms + 1000))
    assert told(queue) == []
    queue.wait(1000)
    assert told(queue) == ["a"]


def test_who_watches_pulls_so_expired_messages_are_dead_lettered():
    queue = Driver(dead_lettering_on_message_expiration=True)
    queue.send(message("x", ttl_ms=1000))
    queue.wait(2000)
    assert queue.held(DEAD) == [0, 0, 0, 0]
    watched(queue, "a")
    queue.pump()
    queue.wait(1)
    assert queue.held(DEAD) == [1, 0, 0, 0]


def test_commands_for_receivers_that_are_gone_do_nothing(queue):
    queue.partition.watch("a")
    queue.partition.passes("a")
    queue.send("x")
    assert told(queue) == []
