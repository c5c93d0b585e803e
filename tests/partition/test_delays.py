"""Abandoning with a delay: the message waits as a scheduled one does, and comes back to its place."""

from typing import Any

import pytest

from broker import requests
from broker.errors import InvalidArgument, LockLost, MessageNotFound, NotAllowed, OutOfRange, TransactionRollback
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome, SettleOperation
from protocol.bounds import MAX_DELAY_MS
from protocol.codec import (
    Byte,
    Char,
    Decimal32,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    encode,
)
from protocol.symbols import DELAY
from storage.quarantine import quarantined
from storage.records import Field, Place, encode_document, message_key, overtaken_key, queue_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Driver, define, message
from tests.partition.forwarding_driver import Partitions
from tests.partition.idle_driver import DAY_MS, INTERVAL_MS, is_there
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC, A, B, TopicDriver

SETTINGS = PartitionSettings(abandon_delays=True)
OFF = PartitionSettings()


def after(delay: Any, **others: Any) -> dict[str, Any]:
    return {DELAY: encode(delay), **others}


@pytest.fixture
def queue() -> Driver:
    return Driver(settings=SETTINGS)


def abandon(queue: Driver, delay: Any = 1000, count: int = 1, at: int = MAIN, **others: Any) -> None:
    received = queue.receive(count, at, at)
    assert (
        queue.settle(Outcome.ABANDONED, *received, properties=after(Long(delay), **others), queue=at) == [None] * count
    )


def test_it_is_back_in_its_place_when_the_delay_is_over(queue):
    queue.send("a", "b", "c")
    abandon(queue, 1000, kept="yes")
    assert [(each.token, each.number) for each in queue.peek()] == [(Place.SCHEDULED, 1), (0, 2), (0, 3)]
    assert queue.held() == [2, 0, 1, 0]
    assert [each.body for each in queue.receive(1)] == [b"b"]
    queue.wait(999)
    assert queue.held() == [2, 0, 1, 1]
    queue.wait(1)
    assert queue.held() == [3, 0, 0, 1]
    again, last = queue.receive(5)
    assert (again.body, again.number, again.delivery_count, again.properties) == (b"a", 1, 1, {"kept": "yes"})
    assert set(again.overlay) == {Field.PROPERTIES}
    assert last.body == b"c"
    assert problems(queue.store) == []


NUMBERS = [
    *[kind(50) for kind in (UByte, UShort, UInt, ULong, Byte, Short, Int, Long)],
    50,
    50.0,
    Float(50),
]


@pytest.mark.parametrize("delay", NUMBERS, ids=lambda delay: type(delay).__name__)
def test_a_delay_is_any_number_that_is_whole(queue, delay):
    queue.send("a")
    assert queue.settle(Outcome.ABANDONED, queue.receive_one(), properties=after(delay)) == [None]
    queue.wait(49)
    assert queue.held() == [0, 0, 1, 0]
    queue.wait(1)
    assert queue.receive_one().properties == {}


def test_a_delay_of_zero_is_none(queue):
    queue.send("a")
    abandon(queue, 0)
    assert queue.receive_one().properties == {}


def test_the_longest_delay(queue):
    queue.send("a")
    abandon(queue, MAX_DELAY_MS)
    queue.wait(MAX_DELAY_MS - 1)
    assert queue.held() == [0, 0, 1, 0]
    queue.wait(1)
    assert queue.held() == [1, 0, 0, 0]


BEYOND = [-1, -0.5 * 2, MAX_DELAY_MS + 1, float(MAX_DELAY_MS + 1), 2**63 - 1, -(2**63), ULong(2**64 - 1), 1e308, -1e308]
NO_NUMBERS = [
    None,
    True,
    False,
    "50",
    "",
    Symbol("50"),
    Char("5"),
    b"50",
    0.5,
    float("nan"),
    float("inf"),
    float("-inf"),
    Float(0.5),
    Timestamp(50),
    Decimal32(bytes(4)),
    Decimal128(bytes(16)),
    [50],
    {"ms": 50},
    Described(Symbol("com.microsoft:timespan"), 500_000),
]


@pytest.mark.parametrize(
    ("delay", "error"),
    [*[(delay, OutOfRange) for delay in BEYOND], *[(delay, InvalidArgument) for delay in NO_NUMBERS]],
    ids=repr,
)
def test_another_delay_is_refused_and_the_lock_stays(queue, delay, error):
    queue.send("a")
    delivery = queue.receive_one()
    [refused] = queue.settle(Outcome.ABANDONED, delivery, properties=after(delay))
    assert type(refused) is error
    assert DELAY in str(refused)
    assert str(MAX_DELAY_MS) in str(refused)
    with pytest.raises(error):
        queue.request("settle", [delivery.token], Outcome.ABANDONED, after(delay))
    assert queue.held() == [1, 0, 0, 1]
    assert queue.settle(Outcome.ACCEPTED, delivery) == [None]


@pytest.mark.parametrize("outcome", [Outcome.DEFERRED, Outcome.DEAD_LETTERED])
def test_a_delay_is_for_what_is_abandoned(queue, outcome):
    queue.send("a")
    delivery = queue.receive_one()
    [refused] = queue.settle(outcome, delivery, properties=after(50))
    assert isinstance(refused, NotAllowed)
    assert queue.held() == [1, 0, 0, 1]


def test_a_deferred_message_takes_no_delay(queue):
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    _, (token, *_) = queue.request("receive-deferred", [1], False)
    with pytest.raises(NotAllowed, match="stays deferred"):
        queue.request("settle", [token], Outcome.ABANDONED, after(50))
    assert queue.held() == [0, 1, 0, 1]
    queue.request("settle", [token], Outcome.ABANDONED, None)
    assert queue.held() == [0, 1, 0, 0]


@pytest.mark.parametrize("delay", [50, "x"])
@pytest.mark.parametrize("outcome", [Outcome.ABANDONED, Outcome.DEFERRED, Outcome.DEAD_LETTERED])
def test_where_delays_are_off_it_is_a_property_like_others(delay, outcome):
    queue = Driver(settings=OFF)
    queue.send("a")
    assert queue.settle(outcome, queue.receive_one(), properties=after(delay)) == [None]
    [found] = queue.peek() + queue.peek(DEAD)
    assert found.properties == after(delay)
    assert queue.held()[2] == 0


def test_the_delay_does_not_count_for_the_size_of_properties():
    queue = Driver(settings=PartitionSettings(abandon_delays=True, properties_bytes=10))
    queue.send("a")
    abandon(queue, 50, count=1, p="123456789")
    assert queue.held() == [0, 0, 1, 0]


def test_it_waits_through_a_restart(queue):
    queue.send("a", "b")
    abandon(queue, LOCK_MS)
    queue.wait(LOCK_MS // 2)
    queue.restart()
    assert queue.held() == [1, 0, 1, 0]
    queue.wait(LOCK_MS // 2)
    assert [each.body for each in queue.receive(5)] == [b"a", b"b"]
    queue.restart(OFF)
    assert queue.bodies() == ["a", "b"]


def test_it_is_back_also_when_delays_were_switched_off_meanwhile(queue):
    queue.send("a")
    abandon(queue, 1000)
    queue.restart(OFF)
    queue.wait(1000)
    assert queue.receive_one().number == 1


def test_the_last_delivery_dead_letters_at_once(queue):
    queue.change(max_delivery_count=2)
    queue.send("a")
    abandon(queue, 10)
    queue.wait(10)
    abandon(queue, 10)
    assert queue.held() == [0, 0, 0, 0]
    [dead] = queue.peek(DEAD)
    assert dead.properties["DeadLetterReason"] == "MaxDeliveryCountExceeded"
    assert DELAY not in dead.properties


def test_a_dead_letter_waits_too_and_counts_nothing(queue):
    queue.send(message("a", ttl_ms=500), "b")
    queue.settle(Outcome.DEAD_LETTERED, *queue.receive(2))
    abandon(queue, 1000, at=DEAD)
    assert queue.held(DEAD) == [1, 0, 1, 0]
    queue.wait(1000)
    again, _ = queue.receive(2, DEAD, DEAD)
    assert (again.body, again.delivery_count) == (b"a", 0)
    assert problems(queue.store) == []


def test_a_dead_letter_that_was_scheduled_and_had_a_time_to_live_has_none_when_it_is_back(queue):
    queue.send(message("a", ttl_ms=500, scheduled_ms=START_MS + 10))
    queue.wait(10)
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    abandon(queue, 1000, at=DEAD)
    queue.wait(1000)
    assert problems(queue.store) == []
    assert queue.receive_one("again", DEAD).body == b"a"


# -- time to live


def test_its_time_to_live_goes_on(queue):
    queue.send(message("a", ttl_ms=3000))
    abandon(queue, 1000)
    queue.wait(2999)
    assert queue.held() == [1, 0, 0, 0]
    queue.wait(1)
    assert queue.held() == [0, 0, 0, 0]
    assert problems(queue.store) == []


def test_it_expires_when_it_would_have_during_its_delay(queue):
    queue.send(message("a", ttl_ms=3000))
    abandon(queue, 5000)
    queue.wait(2999)
    assert queue.held() == [0, 0, 1, 0]
    queue.wait(1)
    assert queue.held() == [0, 0, 0, 0]
    assert queue.partition.tallies()[MAIN]["expired"] == 1
    assert problems(queue.store) == []


def test_it_expires_to_the_dead_letter_queue_when_somebody_receives(queue):
    queue.change(dead_lettering_on_message_expiration=True)
    queue.send(message("a", ttl_ms=3000))
    abandon(queue, 5000)
    queue.wait(6000)
    assert queue.held() == [1, 0, 0, 0]
    assert queue.receive(1) == []
    queue.wait(1)
    assert queue.held() == [0, 0, 0, 0]
    assert queue.peek(DEAD)[0].properties["DeadLetterReason"] == "TTLExpiredException"


def test_what_has_expired_under_its_lock_waits_no_more(queue):
    queue.send(message("a", ttl_ms=1000))
    delivery = queue.receive_one()
    queue.now_ms += 1000
    queue.settle(Outcome.ABANDONED, delivery, properties=after(50))
    assert queue.held() == [0, 0, 0, 0]


def test_that_of_a_scheduled_message_counts_from_its_time(queue):
    queue.send(message("a", ttl_ms=3000, scheduled_ms=START_MS + 100))
    queue.wait(100)
    abandon(queue, 1000)
    queue.wait(1000)
    again = queue.receive_one()
    assert again.number == 2
    assert again.overlay[Field.ENQUEUED_MS] == START_MS + 100
    assert again.overlay[Field.EXPIRES_MS] == START_MS + 3100
    queue.settle(Outcome.RELEASED, again)
    queue.wait(1999)
    assert queue.held() == [1, 0, 0, 0]
    queue.wait(1)
    assert queue.held() == [0, 0, 0, 0]


# -- what is done to it meanwhile


def test_its_id_is_known_meanwhile_and_afterwards():
    queue = Driver(settings=SETTINGS, requires_duplicate_detection=True)
    queue.send(message("a", message_id=encode("1")))
    abandon(queue, 1000)
    queue.send(message("again", message_id=encode("1")))
    queue.wait(1000)
    assert queue.bodies() == ["a"]


def test_it_cannot_be_cancelled(queue):
    queue.send("a")
    abandon(queue, 1000)
    [scheduled] = queue.request("schedule", [message("s", scheduled_ms=START_MS + 1000)])
    with pytest.raises(MessageNotFound, match="abandoned with a delay"):
        queue.request("cancel-scheduled", [scheduled, 1])
    assert queue.held() == [0, 0, 2, 0]
    queue.request("cancel-scheduled", [scheduled])
    queue.wait(1000)
    assert queue.bodies() == ["a"]


def test_it_is_purged_as_a_scheduled_message(queue):
    queue.send(message("a", ttl_ms=5000), message("b", scheduled_ms=START_MS + 9000), "c")
    abandon(queue, 1000)
    assert queue.request("purge", [Place.AVAILABLE, Place.DEFERRED]) == 1
    assert queue.request("purge", [Place.SCHEDULED]) == 2
    assert queue.counts() == [0, 0, 0, 0, 0]
    assert queue.store.last_key(Table.DUE) is None
    assert problems(queue.store) == []


def test_it_is_no_message_that_a_batch_deletes(queue):
    queue.send("a", "b")
    abandon(queue, 1000)
    assert queue.request("delete-batch", 10, START_MS + 1) == 1
    assert queue.bodies() == ["a"]


def test_its_lock_is_gone(queue):
    queue.send("a")
    delivery = queue.receive_one()
    queue.settle(Outcome.ABANDONED, delivery, properties=after(1000))
    [lost] = queue.settle(Outcome.ACCEPTED, delivery)
    assert isinstance(lost, LockLost)


def test_one_behind_the_end_of_the_window_is_back_in_its_place():
    queue = Driver(settings=PartitionSettings(abandon_delays=True, window=2))
    queue.send(*"abcdef")
    received = queue.receive(6)
    queue.settle(Outcome.ABANDONED, *received[2:], properties=after(1000))
    queue.settle(Outcome.RELEASED, *received[:2])
    queue.wait(1000)
    queue.partition.check()
    assert [each.body for each in queue.receive(6)] == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_many_are_back_over_several_turns():
    queue = Driver(settings=PartitionSettings(abandon_delays=True, step=3, turn_work=10))
    queue.send(*[message(str(number), ttl_ms=9000) for number in range(50)])
    abandon(queue, 1000, count=50)
    queue.now_ms += 1000
    queue.partition.advance(queue.now_ms)
    queue.partition.commit()
    assert 0 < queue.held()[0] < 50
    queue.wait(0)
    assert [each.body for each in queue.receive(50)] == [b"%d" % number for number in range(50)]
    assert problems(queue.store) == []


@pytest.mark.parametrize("table", [Table.QUEUE, Table.MESSAGES])
def test_one_that_cannot_be_read_is_set_aside(queue, table):
    queue.send("a", "b")
    abandon(queue, 1000, count=2)
    key = queue_key(MAIN, Place.SCHEDULED, 1) if table == Table.QUEUE else message_key(1)
    value = queue.store.get(table, key)
    queue.store.put(table, key, value[:-1] + bytes([value[-1] ^ 1]))
    queue.wait(1000)
    assert [each.body for each in queue.receive(5)] == [b"b"]
    assert queue.held() == [1, 0, 0, 1]
    assert Table.QUEUE in [found for found, _, _ in quarantined(queue.store)]


def test_its_number_on_a_fragment_says_the_partition(queue):
    queue.partition.put_entity(1, queue.description, queue.now_ms, partitions=(2, 5))
    queue.send("a", "b")
    number = queue.peek()[0].number
    abandon(queue, 1000)
    queue.wait(1000)
    again = queue.receive_one()
    assert (again.body, again.number) == (b"a", number)
    assert number >> 48 == 5


# -- transactions


def test_in_a_transaction_the_delay_begins_with_its_commit(queue):
    queue.send("a", "b")
    delivery = queue.receive_one()
    settle = SettleOperation(MAIN, False, [delivery.token], Outcome.ABANDONED, after(1000, p="1"))
    assert queue.partition.transact("t", True, [settle], queue.now_ms) == [None]
    queue.wait(600)
    queue.partition.discharge("t", True, queue.now_ms)
    queue.partition.commit()
    assert queue.held() == [1, 0, 1, 0]
    queue.wait(999)
    assert queue.held() == [1, 0, 1, 0]
    queue.wait(1)
    assert queue.receive_one().properties == {"p": "1"}


def test_a_transaction_that_is_rolled_back_delays_nothing(queue):
    queue.send("a")
    delivery = queue.receive_one()
    queue.partition.request_in(
        "t", True, MAIN, requests.Settle([delivery.token], Outcome.ABANDONED, after(1000)), START_MS
    )
    queue.partition.discharge("t", False, queue.now_ms)
    assert queue.held() == [1, 0, 0, 1]
    assert queue.settle(Outcome.ACCEPTED, delivery) == [None]


def test_a_transaction_takes_no_delay_that_is_none(queue):
    queue.send("a")
    delivery = queue.receive_one()
    settle = SettleOperation(MAIN, True, [delivery.token], Outcome.ABANDONED, after(-1))
    [[[name, text]]] = queue.partition.transact("t", True, [settle], queue.now_ms)
    assert (name, DELAY in text) == ("OutOfRange", True)
    with pytest.raises(TransactionRollback):
        queue.partition.discharge("t", True, queue.now_ms)
    assert queue.held() == [1, 0, 0, 1]


# -- sessions


@pytest.fixture
def sessions() -> SessionDriver:
    return SessionDriver(settings=SETTINGS)


def test_of_a_session_what_is_behind_it_is_delivered_meanwhile(sessions):
    sessions.put("s", "a", "b", "c")
    sessions.accept()
    sessions.settle(Outcome.ABANDONED, sessions.receive_one(), properties=after(1000))
    assert sessions.bodies_for("r", 1) == ["b"]
    assert sessions.listed() == [(0, "s", 2), (0, "s", 3), (2, "s", 1)]
    sessions.wait(1000)
    assert sessions.bodies_for("r") == ["a", "c"]
    assert problems(sessions.store) == []


def test_a_session_is_to_be_had_again_when_its_message_is_back(sessions):
    sessions.put("s", "a")
    sessions.put("t", "b")
    sessions.accept()
    sessions.settle(Outcome.ABANDONED, sessions.receive_one(), properties=after(1000))
    sessions.close()
    assert sessions.offered() == ["t"]
    sessions.ask("waits")
    assert sessions.turn() == ({"waits": ("t", sessions.now_ms + LOCK_MS)}, {})
    sessions.ask("waits longer")
    sessions.wait(1000)
    accepted, _ = sessions.turn()
    assert accepted.keys() == {"waits longer"}
    assert sessions.bodies_for("waits longer") == ["a"]


def test_it_is_peeked_as_one_of_its_session(sessions):
    sessions.put("s", "a", "b")
    sessions.put("t", "c")
    sessions.accept(session="s")
    sessions.settle(Outcome.ABANDONED, sessions.receive_one(), properties=after(1000))
    items = sessions.request("peek-session", "s", 0, 10, 1000)
    assert items[0::5] == [Place.SCHEDULED, Place.AVAILABLE]


def test_after_a_restart_the_session_comes_after_those_that_were_available(sessions):
    for session in "stu":
        sessions.put(session, session)
    sessions.accept(session="s")
    sessions.settle(Outcome.ABANDONED, sessions.receive_one(), properties=after(1000))
    sessions.restart()
    sessions.wait(1000)
    assert sessions.offered() == ["t", "u", "s"]


def test_after_a_restart_a_session_keeps_the_place_that_its_other_messages_have(sessions):
    """It was available before its first message is back, though nobody has asked for a session yet."""
    sessions.put("s", "s1")
    sessions.put("t", "t1")
    sessions.put("s", "s2")
    sessions.put("u", "u1")
    sessions.accept(session="s")
    sessions.settle(Outcome.ABANDONED, sessions.receive_one(), properties=after(1000))
    sessions.restart()
    sessions.wait(1000)
    assert sessions.offered() == ["t", "s", "u"]


# -- subscriptions


def test_a_copy_waits_and_others_do_not():
    topic = TopicDriver(A, B, settings=SETTINGS)
    topic.publish("a", "b")
    abandon(topic, 1000, at=A)
    assert topic.held(A) == [1, 0, 1, 0]
    assert topic.held(B) == [2, 0, 0, 0]
    assert topic.references() == {1: 2, 2: 2}
    received = topic.receive(2, "b", B)
    topic.settle(Outcome.ACCEPTED, *received, queue=B)
    assert topic.references() == {}
    topic.wait(1000)
    first, second = topic.receive(2, "again", A)
    assert (first.number, first.delivery_count, second.number) == (1, 1, 2)
    topic.settle(Outcome.ACCEPTED, first, second, queue=A)
    assert topic.message_count() == 0
    assert topic.counts(TOPIC)[3] == 0
    assert problems(topic.store) == []


# -- forwarding


LATER_MS = 60_000  # `Partitions.run` takes some seconds, for what is tried again


def forwarding(count: int = 3) -> tuple[Partitions, int, int]:
    """Two partitions, a queue on each; of the messages of the first, the first is delayed for a second."""
    net = Partitions(2, SETTINGS)
    source, target = net.queue("source", 0), net.queue("target", 1)
    net.send(source, *[message(f"m{number}", ttl_ms=DAY_MS) for number in range(1, count + 1)])
    [delivery] = net.receive(source, 1, receive_and_delete=False)
    settled = net.partitions[0].settle(source, [delivery.token], Outcome.ABANDONED, after(LATER_MS), net.now_ms)
    assert settled == [None]
    net.turn(0)
    return net, source, target


def test_it_is_forwarded_when_it_is_back():
    net, source, target = forwarding()
    net.queue("source", 0, forward_to="target")
    net.run()
    net.wait(LATER_MS)
    net.run()
    assert net.bodies(target) == ["m2", "m3", "m1"]
    assert net.peek(source) == []
    assert net.peek(target)[2].overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 1


@pytest.mark.parametrize("crash_before", [True, False])
def test_after_a_restart_it_is_not_taken_for_one_that_was_forwarded(crash_before):
    net, source, target = forwarding()
    net.queue("source", 0, forward_to="target")
    net.run()
    if crash_before:
        net.crash(0)
    net.wait(LATER_MS)
    if not crash_before:
        net.crash(0)
    net.run()
    assert net.bodies(target) == ["m2", "m3", "m1"]
    assert net.peek(source) == []


def test_a_queue_may_begin_to_forward_while_its_partition_is_down():
    net, source, target = forwarding()
    forwards = net.entities["source"].description.model_copy(update={"forward_to": "target"})
    define(net.stores[0], source >> 3, forwards, (0,))
    net.stores[0].commit()
    net.crash(0)
    net.run()
    net.wait(LATER_MS)
    net.run()
    assert net.bodies(target) == ["m2", "m3", "m1"]


def test_a_queue_that_has_forwarded_and_will_again_loses_nothing():
    """Its number would be below the mark of the destination."""
    net, source, target = forwarding()
    net.queue("source", 0, forward_to="target")
    net.run()
    net.queue("source", 0)
    net.run()
    net.crash(0)
    net.wait(LATER_MS)
    assert net.bodies(source) == ["m1"]
    net.queue("source", 0, forward_to="target")
    net.run()
    assert net.bodies(target) == ["m2", "m3", "m1"]


def test_a_queue_that_is_moved_and_moved_back_loses_nothing():
    net, source, target = forwarding()
    net.queue("source", 0, forward_to="target")
    net.run()
    net.queue("source", 0)
    for to in (1, 0):
        net.begin_move("source", to)
        net.freeze("source")
        net.finish_move("source", to)
        net.run()
    net.wait(LATER_MS)
    assert net.bodies(source) == ["m1"]
    net.queue("source", 0, forward_to="target")
    net.run()
    assert net.bodies(target) == ["m2", "m3", "m1"]


def test_a_queue_that_has_forwarded_in_the_past_gives_it_its_place_again():
    net, source, _ = forwarding()
    net.queue("source", 0, forward_to="target")
    net.run()
    net.queue("source", 0)
    net.wait(LATER_MS)
    net.run()
    net.send(source, "m4")
    deliveries = net.receive(source, 2, receive_and_delete=False)
    for each, delay_ms in zip(deliveries, (LATER_MS, 500), strict=True):
        net.partitions[0].settle(source, [each.token], Outcome.ABANDONED, after(delay_ms), net.now_ms)
    net.wait(LATER_MS)
    assert net.bodies(source) == ["m1", "m4"]
    assert [each.number for each in net.peek(source)] == [each.number for each in deliveries]


def test_an_unreadable_record_of_what_was_forwarded_gives_it_a_new_number(queue):
    queue.send("a", "b")
    abandon(queue, 1000)
    queue.store.put(Table.META, overtaken_key(MAIN), encode_document(5)[:-1] + b"\7")
    queue.wait(1000)
    assert [(each.body, each.number) for each in queue.receive(2)] == [(b"b", 2), (b"a", 3)]


# -- AutoDeleteOnIdle


@pytest.mark.parametrize("at", [MAIN, DEAD])
@pytest.mark.parametrize("restarts", [True, False])
def test_it_keeps_its_entity(at, restarts):
    queue = Driver(settings=SETTINGS, auto_delete_on_idle_ms=INTERVAL_MS)
    queue.send("a")
    if at == DEAD:
        queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
        queue.close()
    abandon(queue, DAY_MS, at=at)
    queue.close(at)
    if restarts:
        queue.restart()
    queue.wait(DAY_MS - 1)
    assert is_there(queue)
    queue.wait(INTERVAL_MS)
    assert is_there(queue)
    queue.wait(1 + INTERVAL_MS // 5)
    assert not is_there(queue)


@pytest.mark.parametrize("restarts", [True, False])
def test_at_a_subscription_it_keeps_the_topic(restarts):
    topic = TopicDriver(A, settings=SETTINGS, auto_delete_on_idle_ms=INTERVAL_MS)
    topic.publish("a")
    abandon(topic, DAY_MS, at=A)
    topic.close(A)
    if restarts:
        topic.restart()
    topic.wait(DAY_MS - 1)
    assert is_there(topic, TOPIC)
    topic.wait(2 * INTERVAL_MS)
    assert not is_there(topic, TOPIC)
