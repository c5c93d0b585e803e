"""Receiving active messages by their sequence numbers, as deferred ones are received."""

from typing import Any

import pytest

from broker import requests
from broker.errors import (
    EntityDisabled,
    LockLost,
    MessageNotFound,
    NotAllowed,
    OutOfRange,
    ServerBusy,
    SessionLockLost,
)
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome, SettleOperation
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from storage.quarantine import quarantined
from storage.queue_ids import Part
from storage.records import Place, message_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Delivery, Driver, deliveries, message
from tests.partition.forwarding_driver import Partitions
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import A, B, TopicDriver


def by_number(queue: Driver, *numbers: int, delete: bool = False, at: int = MAIN) -> list[Delivery]:
    until_ms, items, active = queue.request("receive-deferred", numbers, delete, True, queue=at)
    found = deliveries(items)
    assert until_ms == (0 if delete else queue.now_ms + queue.description.lock_duration_ms)
    assert set(active) <= {each.number for each in found}
    return found


def bodies(found: list[Delivery]) -> list[bytes]:
    return [each.body for each in found]


def window_of(queue: Driver, at: int = MAIN) -> Any:
    return queue.partition._core.queues[at].window


def test_the_named_messages_are_locked_and_no_receiver_gets_them(queue):
    queue.send("a", "b", message("c", ttl_ms=9000), "d")
    found = by_number(queue, 3, 2, 3)
    assert bodies(found) == [b"c", b"b"]
    assert queue.held() == [4, 0, 0, 2]
    assert bodies(queue.receive(9)) == [b"a", b"d"]
    assert queue.settle(Outcome.ACCEPTED, *found) == [None, None]
    assert queue.bodies() == ["a", "d"]
    assert queue.store.last_key(Table.DUE) is None
    assert problems(queue.store) == []


def test_the_answer_tells_which_of_them_are_active(queue):
    queue.send("a", "b", "c")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    _, items, active = queue.request("receive-deferred", [3, 1], False, True)
    assert [each.number for each in deliveries(items)] == [3, 1]
    assert active == [3]
    assert queue.held() == [2, 1, 0, 2]


def test_without_being_asked_for_they_are_not_found(queue):
    queue.send("a")
    for args in ([], [False]):
        with pytest.raises(MessageNotFound, match="no unlocked deferred message with the sequence number 1"):
            queue.request("receive-deferred", [1], False, *args)


@pytest.mark.parametrize("receives", [True, False])
def test_they_are_received_and_deleted(queue, receives):
    queue.send("a", message("b", ttl_ms=9000), "c")
    if receives:
        queue.settle(Outcome.RELEASED, *queue.receive(3))
    assert bodies(by_number(queue, 2, 3, delete=True)) == [b"b", b"c"]
    assert queue.counts() == [1, 0, 0, 41, 0]
    assert window_of(queue).numbers() <= {1}
    assert bodies(queue.receive(9)) == [b"a"]
    assert queue.store.last_key(Table.DUE) is None
    queue.restart()
    assert queue.bodies() == ["a"]


def test_one_dead_letter_is_received_by_its_number():
    queue = Driver()
    queue.send(message("a", ttl_ms=100), "b", message("c", ttl_ms=100))
    queue.settle(Outcome.DEAD_LETTERED, *queue.receive(3))
    queue.wait(1000)
    [found] = by_number(queue, 3, at=DEAD)
    assert found.body == b"c"
    queue.settle(Outcome.ACCEPTED, found, queue=DEAD)
    assert queue.bodies() == []
    assert [each.body for each in queue.peek(DEAD)] == [b"a", b"b"]


# -- back in its place


@pytest.mark.parametrize("outcome", [Outcome.ABANDONED, Outcome.RELEASED, None])
@pytest.mark.parametrize("window", [2, 100])
@pytest.mark.parametrize("fetched", [0, 1, 6])
def test_it_is_back_in_its_place(outcome, window, fetched):
    """Whether it was in memory already or not; by an outcome, or because the lock ends."""
    queue = Driver(settings=PartitionSettings(window=window))
    queue.send(*"abcdef")
    queue.settle(Outcome.RELEASED, *queue.receive(fetched))
    found = by_number(queue, 5, 2)
    queue.partition.check()
    if outcome is None:
        queue.wait(LOCK_MS)
    else:
        queue.settle(outcome, *found)
    queue.partition.check()
    again = queue.receive(9)
    assert bodies(again) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    failed = outcome is not Outcome.RELEASED
    assert [each.delivery_count for each in again] == [0, failed, 0, 0, failed, 0]


def test_those_that_were_put_back_before_can_be_had_and_go_back_again():
    queue = Driver(settings=PartitionSettings(window=2))
    queue.send(*"abcd")
    received = queue.receive(4)
    queue.settle(Outcome.ABANDONED, *received[1:])
    for properties in (None, {"p": "1"}):
        [found] = by_number(queue, 3)
        assert queue.settle(Outcome.ABANDONED, found, properties=properties) == [None]
        queue.partition.check()
    again = queue.receive(9)
    assert [(each.body, each.delivery_count) for each in again] == [(b"b", 1), (b"c", 3), (b"d", 1)]


def test_the_last_failed_delivery_dead_letters_it(queue):
    queue.change(max_delivery_count=1)
    queue.send("a", "b")
    queue.settle(Outcome.ABANDONED, *by_number(queue, 2))
    assert queue.bodies() == ["a"]
    assert [each.body for each in queue.peek(DEAD)] == [b"b"]


@pytest.mark.parametrize(("outcome", "held"), [(Outcome.DEFERRED, [1, 1, 0, 0]), (Outcome.DEAD_LETTERED, [1, 0, 0, 0])])
def test_it_goes_where_another_outcome_sends_it(queue, outcome, held):
    queue.send("a", message("b", ttl_ms=9000))
    queue.settle(outcome, *by_number(queue, 2))
    assert queue.held() == held
    assert problems(queue.store) == []


def test_it_can_be_abandoned_with_a_delay():
    queue = Driver(settings=PartitionSettings(abandon_delays=True))
    queue.send("a", "b", "c")
    queue.settle(Outcome.ABANDONED, *by_number(queue, 2), properties={DELAY: encode(Long(1000))})
    assert bodies(queue.receive(1)) == [b"a"]
    assert queue.held() == [2, 0, 1, 1]
    queue.wait(1000)
    assert bodies(queue.receive(9)) == [b"b", b"c"]


def test_a_receiver_that_waits_gets_it_when_it_is_back(queue):
    queue.send("a")
    [found] = by_number(queue, 1)
    queue.open()
    queue.grant(1)
    assert queue.pump() == {}
    queue.settle(Outcome.RELEASED, found)
    assert bodies(queue.pump()["r"]) == [b"a"]


def test_a_receiver_that_watches_is_told_when_it_is_back(queue):
    queue.send("a")
    [found] = by_number(queue, 1)
    queue.open()
    queue.partition.watch("r")
    assert queue.partition.pump(queue.now_ms).available == []
    queue.settle(Outcome.RELEASED, found)
    assert queue.partition.pump(queue.now_ms).available == ["r"]


def test_a_receiver_that_was_told_of_it_finds_nothing(queue):
    queue.send("a")
    queue.open()
    queue.partition.watch("r")
    assert queue.partition.pump(queue.now_ms).available == ["r"]
    [found] = by_number(queue, 1)
    queue.grant(1)
    assert queue.pump() == {}
    queue.settle(Outcome.RELEASED, found)
    assert bodies(queue.pump()["r"]) == [b"a"]


# -- all or none


@pytest.mark.parametrize("delete", [True, False])
def test_all_of_them_or_none(queue, delete):
    queue.send("a", "b", "c", message("s", scheduled_ms=START_MS + 9000))
    [locked] = queue.receive(1)
    for other in (locked.number, 4, 5, 77, 0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -1):
        with pytest.raises(MessageNotFound, match=f"deferred or active message with the sequence number {other}"):
            by_number(queue, 2, other, 3, delete=delete)
    assert queue.held() == [3, 0, 1, 1]
    assert bodies(queue.receive(9)) == [b"b", b"c"]


def test_who_has_it_by_number_has_it_alone(queue):
    queue.send("a")
    [found] = by_number(queue, 1)
    with pytest.raises(MessageNotFound):
        by_number(queue, 1)
    queue.now_ms += LOCK_MS
    [lost] = queue.settle(Outcome.ACCEPTED, found)
    assert isinstance(lost, LockLost)
    queue.wait(0)
    assert by_number(queue, 1)[0].delivery_count == 1


def test_an_expired_one_expires_and_nothing_is_received(queue):
    queue.change(dead_lettering_on_message_expiration=True)
    queue.send("a", message("b", ttl_ms=100), "c")
    queue.settle(Outcome.RELEASED, *queue.receive(3))
    queue.now_ms += 100
    with pytest.raises(MessageNotFound):
        by_number(queue, 1, 2)
    assert queue.bodies() == ["a", "c"]
    assert [each.body for each in queue.peek(DEAD)] == [b"b"]
    assert bodies(queue.receive(9)) == [b"a", b"c"]
    queue.partition.check()
    assert problems(queue.store) == []


def test_it_does_not_expire_while_it_is_locked(queue):
    queue.send("a", message("b", ttl_ms=LOCK_MS))
    [found] = by_number(queue, 2)
    queue.request("renew-locks", [found.token])
    queue.wait(LOCK_MS - 1)
    queue.request("renew-locks", [found.token])
    queue.wait(1000)
    assert queue.bodies() == ["a", "b"]
    queue.settle(Outcome.RELEASED, found)
    assert queue.bodies() == ["a"]


def test_one_that_cannot_be_read_is_set_aside(queue):
    queue.send("a", "b")
    queue.store.delete(Table.MESSAGES, message_key(2))
    with pytest.raises(MessageNotFound):
        by_number(queue, 2)
    assert [table for table, _, _ in quarantined(queue.store)] == [Table.QUEUE]
    assert bodies(queue.receive(9)) == [b"a"]


def test_there_are_the_same_limits_as_for_deferred_ones():
    queue = Driver(settings=PartitionSettings(request_items=3, request_bytes=100))
    queue.send("a", "b", "c", "d", "x" * 80, "x" * 200)
    with pytest.raises(OutOfRange, match="sequence-numbers"):
        by_number(queue, 1, 2, 3, 4)
    with pytest.raises(OutOfRange, match="100 bytes"):
        by_number(queue, 1, 5)
    assert queue.held() == [6, 0, 0, 0]
    assert len(by_number(queue, 6)) == 1


def test_a_purge_and_a_batch_leave_them(queue):
    queue.send("a", "b", "c")
    by_number(queue, 2)
    assert queue.request("delete-batch", 10, START_MS + 1) == 2
    assert queue.request("purge") == 0
    assert queue.bodies() == ["b"]


def test_locks_end_with_the_process(queue):
    queue.send("a", "b")
    by_number(queue, 2)
    queue.restart()
    assert queue.held() == [2, 0, 0, 0]
    assert bodies(queue.receive(9)) == [b"a", b"b"]


def test_what_is_settled_before_its_turn_takes_no_memory_for_long():
    """There is no receiver to whom its turn would come."""
    queue = Driver(settings=PartitionSettings(window=10))
    queue.send(*[str(number) for number in range(200)])
    kept = by_number(queue, 1, 2, 3)
    for number in range(4, 150):
        queue.settle(Outcome.ACCEPTED, *by_number(queue, number))
        assert len(window_of(queue).skip) <= 10 + 4
    queue.settle(Outcome.RELEASED, *kept)
    assert [each.number for each in queue.receive(200)] == [1, 2, 3, *range(150, 201)]


def test_in_a_transaction_it_is_settled_with_the_commit(queue):
    queue.send("a", "b")
    [found] = by_number(queue, 2)
    settle = SettleOperation(MAIN, False, [found.token], Outcome.ACCEPTED, None)
    assert queue.partition.transact("t", True, [settle], queue.now_ms) == [None]
    queue.partition.discharge("t", True, queue.now_ms)
    queue.partition.commit()
    assert queue.bodies() == ["a"]


# -- where nothing is received


def test_of_an_entity_that_cannot_be_received_from(queue):
    queue.send("a")
    queue.change(status="ReceiveDisabled")
    with pytest.raises(EntityDisabled):
        by_number(queue, 1)
    queue.change(status="Active", forward_to="elsewhere")
    with pytest.raises(NotAllowed, match="forward"):
        by_number(queue, 1)


def test_while_another_partition_may_have_taken_it_over():
    net = Partitions(2)
    source, _ = net.queue("source", 0, forward_to="target"), net.queue("target", 1)
    net.send(source, "a")
    net.lose(0, 1)
    net.queue("source", 0)
    with pytest.raises(ServerBusy):
        net.partitions[0].request(source, requests.ReceiveDeferred([1], False, True), net.now_ms)
    with pytest.raises(MessageNotFound):
        net.partitions[0].request(source, requests.ReceiveDeferred([1], False), net.now_ms)


def test_a_message_on_its_way_to_another_partition_is_locked():
    net = Partitions(2)
    source, _ = net.queue("source", 0, forward_to="target"), net.queue("target", 1)
    net.send(source, "a")
    net.queue("source", 0)
    with pytest.raises(MessageNotFound):
        net.partitions[0].request(source, requests.ReceiveDeferred([1], False, True), net.now_ms)


def test_from_a_transfer_queue_nothing_is_received(queue):
    with pytest.raises(NotAllowed):
        by_number(queue, 1, at=MAIN | Part.TRANSFER)


def test_of_a_copy_of_a_subscription():
    topic = TopicDriver(A, B)
    topic.publish("a", "b")
    [found] = by_number(topic, 2, at=A)
    topic.settle(Outcome.ACCEPTED, found, queue=A)
    by_number(topic, 2, delete=True, at=B)
    assert (topic.texts(A), topic.texts(B)) == (["a"], ["a"])
    assert topic.message_count() == 1
    assert problems(topic.store) == []


# -- sessions


def of_session(queue: SessionDriver, session: str, *numbers: int, delete: bool = False) -> list[Delivery]:
    _, items, _ = queue.of_session("receive-session-deferred", session, numbers, delete, True)
    return deliveries(items)


def test_of_a_session_for_who_holds_its_lock():
    queue = SessionDriver()
    queue.put("s", "a", "b", "c", "d")
    queue.put("t", "e")
    with pytest.raises(SessionLockLost):
        of_session(queue, "s", 3)
    queue.accept(session="s")
    found = of_session(queue, "s", 3, 2)
    assert bodies(found) == [b"c", b"b"]
    with pytest.raises(MessageNotFound):
        of_session(queue, "s", 4, 5)
    assert queue.bodies_for("r") == ["a", "d"]
    queue.settle(Outcome.ABANDONED, *found)
    assert queue.bodies_for("r") == ["b", "c"]
    with pytest.raises(NotAllowed):
        by_number(queue, 4)


@pytest.mark.parametrize("window", [1, 128])
def test_of_a_session_they_are_back_in_their_places_when_its_lock_ends(window):
    queue = SessionDriver(settings=PartitionSettings(session_window=window))
    queue.put("s", *"abcdef")
    queue.accept()
    queue.receive(1)
    of_session(queue, "s", 5, 3)
    of_session(queue, "s", 2, delete=True)
    queue.partition.check()
    queue.close()
    queue.accept("other")
    assert queue.bodies_for("other") == ["a", "c", "d", "e", "f"]
    assert problems(queue.store) == []


def test_what_is_settled_before_its_turn_in_a_session_takes_no_memory_for_long():
    queue = SessionDriver(settings=PartitionSettings(window=10, session_window=10))
    queue.put("s", *[str(number) for number in range(100)])
    queue.accept()
    for number in range(2, 90):
        queue.settle(Outcome.ACCEPTED, *of_session(queue, "s", number))
        session = queue.partition._core.receivers["r"].session
        assert session is not None
        assert len(session.window.skip) <= 10 + 1
    assert queue.bodies_for("r") == ["0", *[str(number) for number in range(89, 100)]]


def test_a_place_that_is_none_of_these_is_not_received_from(queue):
    """Not even while it is due: who takes it by its old number would take it before it is enqueued."""
    queue.send(message("s", scheduled_ms=START_MS + 10))
    queue.now_ms += 10
    with pytest.raises(MessageNotFound):
        by_number(queue, 1)
    queue.wait(0)
    assert [(each.token, each.number) for each in queue.peek()] == [(Place.AVAILABLE, 2)]
    assert bodies(by_number(queue, 2)) == [b"s"]
