"""Topics: fan-out, shared bodies, scheduled messages, limits, and entities that change or go while they are used."""

import pytest

from broker.errors import (
    EntityDisabled,
    EntityNotFound,
    LockLost,
    MessageNotFound,
    NotAllowed,
    QuotaExceeded,
    ServerBusy,
)
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.lmdb_store import LmdbStore
from storage.records import COPY_BYTES, MESSAGE_HEADER_BYTES, Field, Place, entity_key, message_key, rule_key
from storage.store import StoreError, Table
from tests.partition.driver import LOCK_MS, MAIN, START_MS, Driver, message
from tests.partition.topic_driver import (
    NAMES,
    TOPIC,
    TOPIC_ENTITY,
    A,
    B,
    C,
    TopicDriver,
    assert_shared_rightly,
    event,
    rule,
)

MIB = 1 << 20
SUBSCRIPTIONS = {TOPIC_ENTITY: {A >> 3, B >> 3, C >> 3}}


@pytest.fixture
def topic() -> TopicDriver:
    return TopicDriver(A, B)


def assert_sound(topic):
    assert_shared_rightly(topic.store, SUBSCRIPTIONS)


# ---- fan-out


def test_each_subscription_gets_each_message_under_its_own_number(topic):
    topic.publish("first")
    topic.subscribe(C)
    topic.publish("second", "third")
    assert [(d.number, d.delivery_count) for d in topic.receive(9, "a", A)] == [(1, 0), (2, 0), (3, 0)]
    assert [(d.number, topic.texts(C)[0]) for d in topic.receive(1, "c", C)] == [(1, "second")]
    assert topic.texts(B) == ["first", "second", "third"]


def test_a_message_is_stored_once_and_freed_with_its_last_copy(topic):
    topic.publish("m")
    assert (topic.message_count(), topic.references()) == (1, {1: 2})
    topic.settle(Outcome.ACCEPTED, topic.receive_one("a", A), queue=A)
    assert (topic.message_count(), topic.references()) == (1, {})
    assert_sound(topic)
    topic.settle(Outcome.ACCEPTED, topic.receive_one("b", B), queue=B)
    assert topic.message_count() == 0
    assert topic.counts(TOPIC) == topic.counts(A) == topic.counts(B) == [0, 0, 0, 0, 0]


def test_the_last_copies_go_in_any_order_and_in_one_batch(topic):
    topic.subscribe(C)
    topic.publish(*"mnopqrstu")
    received = {queue_id: topic.receive(9, queue_id, queue_id) for queue_id in (A, B, C)}
    topic.settle(Outcome.ACCEPTED, *received[A][::2], queue=A)
    topic.settle(Outcome.ACCEPTED, *received[B], queue=B)
    assert_sound(topic)
    topic.settle(Outcome.ACCEPTED, *received[C][1:], queue=C)
    topic.settle(Outcome.ACCEPTED, *received[A][1::2], queue=A)
    assert_sound(topic)
    assert topic.texts(C) == ["m"]
    assert (topic.message_count(), topic.references()) == (1, {})


def test_without_a_matching_subscription_a_message_is_accepted_and_dropped():
    topic = TopicDriver()
    topic.publish("nobody")
    topic.subscribe(A, rule("none", kind="false"))
    topic.subscribe(B, no_rules=True)
    topic.publish("nobody")
    assert (topic.message_count(), topic.counts(TOPIC)) == (0, [0, 0, 0, 0, 0])
    tally = topic.partition.tallies()[TOPIC]
    assert (tally["incoming"], tally["unmatched"]) == (2, 2)


def test_published_messages_are_there_after_a_restart(topic):
    topic.publish("a", "b")
    topic.settle(Outcome.ACCEPTED, topic.receive_one("a", A), queue=A)
    topic.restart()
    assert (topic.texts(A), topic.texts(B)) == (["b"], ["a", "b"])
    topic.publish("c")
    assert [d.number for d in topic.receive(9, "b", B)] == [1, 2, 3]
    assert_sound(topic)


def test_waiting_receivers_of_all_subscriptions_are_served_in_the_turn_of_the_send(topic):
    for queue_id in (A, B):
        topic.open(queue_id, queue_id)
        topic.grant(5, queue_id)
    topic.publish("x", "y")
    assert {queue_id: len(received) for queue_id, received in topic.pump().items()} == {A: 2, B: 2}


def test_a_send_to_a_topic_is_done_whole_or_not_at_all():
    topic = TopicDriver(A, max_size_mb=1)
    with pytest.raises(QuotaExceeded):
        topic.publish(event(bytes(600_000)), event(bytes(600_000)))
    assert (topic.message_count(), topic.texts(A)) == (0, [])


def test_a_ping_is_swallowed_by_a_topic(topic):
    layout, body, ttl_ms, extra = event(system={6: "application/vnd.ms-servicebus-ping"})
    topic.publish([layout, body, ttl_ms, extra], "m")
    assert topic.texts(A) == ["m"]
    assert topic.partition.tallies()[TOPIC]["pings"] == 1


# ---- what a subscription does with its copies is its own affair


def test_a_copy_is_dead_lettered_in_its_own_subscription(topic):
    topic.publish("m")
    topic.settle(Outcome.DEAD_LETTERED, topic.receive_one("a", A), properties={"DeadLetterReason": "bad"}, queue=A)
    [dead] = topic.peek(A | 1)
    assert dead.overlay[Field.DEAD_LETTER_SOURCE] == "news/Subscriptions/a"
    assert (topic.held(B), topic.held(B | 1)) == ([1, 0, 0, 0], [0, 0, 0, 0])
    assert_sound(topic)
    topic.settle(Outcome.ACCEPTED, topic.receive_one("dead", A | 1), queue=A | 1)
    assert topic.texts(B) == ["m"]
    assert_sound(topic)


def test_deferring_abandoning_and_deleting_leave_the_other_copies_alone(topic):
    topic.publish(*"klmn")
    k, l_, m, _ = topic.receive(4, "a", A)
    topic.settle(Outcome.DEFERRED, k, queue=A)
    topic.settle(Outcome.ABANDONED, l_, properties={"p": "1"}, queue=A)
    topic.settle(Outcome.RELEASED, m, queue=A)
    assert topic.request("delete-batch", 1, START_MS + 1, queue=A) == 1
    while topic.request("purge", queue=A):
        pass
    assert (topic.texts(A), topic.texts(B)) == (["n"], list("klmn"))
    assert [d.overlay for d in topic.receive(4, "b", B)] == [{}] * 4
    assert_sound(topic)


def test_receiving_and_deleting_takes_one_copy_and_restoring_brings_it_back(topic):
    topic.publish("m")
    topic.open("a", A, receive_and_delete=True)
    topic.partition.grant("a", 1)
    [(_, _, items)] = topic.partition.pump(topic.now_ms).deliveries
    topic.partition.commit()
    assert (topic.references(), topic.held(B)) == ({}, [1, 0, 0, 0])
    topic.partition.restore(A, items, topic.now_ms)
    topic.partition.commit()
    assert (topic.texts(A), topic.texts(B)) == (["m"], ["m"])
    assert_sound(topic)


def test_the_shortest_time_to_live_holds():
    topic = TopicDriver(A, default_message_time_to_live_ms=60_000)
    topic.subscribe(B, default_message_time_to_live_ms=2_000)
    topic.subscribe(C, default_message_time_to_live_ms=90_000)
    topic.publish(event("short", ttl_ms=1_000), event("long", ttl_ms=80_000), "default")
    expiries = [d.overlay.get(Field.EXPIRES_MS) for d in topic.peek(B)]
    assert expiries == [None, START_MS + 2_000, START_MS + 2_000]
    topic.wait(1_000)
    assert [topic.texts(queue_id) for queue_id in (A, B, C)] == [["long", "default"]] * 3
    topic.wait(1_000)
    assert [topic.texts(queue_id) for queue_id in (A, B, C)] == [["long", "default"], [], ["long", "default"]]
    assert_sound(topic)
    topic.wait(58_000)
    assert topic.message_count() == 0
    assert topic.store.last_key(Table.DUE) is None


def test_expired_copies_are_dead_lettered_where_the_subscription_asks_for_it(topic):
    topic.subscribe(B, dead_lettering_on_message_expiration=True)
    topic.publish(event("m", ttl_ms=100))
    topic.wait(100)
    topic.receive(1, "b", B)
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B), topic.texts(B | 1)) == ([], [], [], ["m"])
    assert topic.peek(B | 1)[0].properties["DeadLetterReason"] == "TTLExpiredException"
    assert_sound(topic)


# ---- scheduled messages wait at the topic


def test_a_scheduled_message_waits_at_the_topic_and_is_published_when_it_is_due(topic):
    topic.publish("now")
    [number] = topic.request("schedule", [event("later", scheduled_ms=START_MS + 100)], queue=TOPIC)
    assert number == 2
    assert (topic.held(TOPIC), topic.texts(A)) == ([0, 0, 1, 0], ["now"])
    topic.subscribe(C)
    assert_sound(topic)
    topic.wait(99)
    assert topic.texts(C) == []
    topic.wait(1)
    assert topic.held(TOPIC) == [0, 0, 0, 0]
    for queue_id in (A, B, C):
        shown = topic.peek(queue_id)[-1]
        assert shown.overlay == {Field.ENQUEUED_MS: START_MS + 100, Field.ENQUEUE_SEQUENCE_NUMBER: 2}
    assert (topic.message_count(), topic.references()) == (2, {1: 2, 2: 3})
    assert_sound(topic)


def test_the_time_to_live_of_a_scheduled_message_counts_from_its_publishing(topic):
    topic.subscribe(B, default_message_time_to_live_ms=1_000)
    topic.publish(event("m", ttl_ms=5_000, scheduled_ms=START_MS + 100))
    topic.now_ms += 150  # late
    topic.wait(0)
    assert [topic.peek(queue_id)[0].overlay[Field.EXPIRES_MS] for queue_id in (A, B)] == [
        START_MS + 5_150,
        START_MS + 1_150,
    ]
    topic.wait(5_000)
    assert topic.message_count() == 0


def test_a_scheduled_message_that_nobody_wants_when_it_is_due_is_dropped():
    topic = TopicDriver()
    topic.subscribe(A, rule("red", sql="color = 'red'"))
    topic.publish(*[event(body, scheduled_ms=START_MS + 100, color=body) for body in ("red", "blue")])
    topic.wait(100)
    assert (topic.texts(A), topic.message_count()) == (["red"], 1)
    assert_sound(topic)


def test_scheduled_messages_are_cancelled_at_the_topic(topic):
    numbers = topic.request("schedule", [event(b, scheduled_ms=START_MS + 100) for b in "xy"], queue=TOPIC)
    topic.request("cancel-scheduled", numbers[:1], queue=TOPIC)
    with pytest.raises(MessageNotFound):
        topic.request("cancel-scheduled", numbers[:1], queue=TOPIC)
    topic.wait(100)
    assert topic.texts(A) == ["y"]
    with pytest.raises(MessageNotFound):
        topic.request("cancel-scheduled", numbers[1:], queue=TOPIC)
    assert_sound(topic)


def turn(topic: TopicDriver) -> None:
    topic.partition.advance(topic.now_ms)
    topic.partition.commit()


def test_scheduled_messages_are_published_in_bounded_steps_in_the_order_of_their_times():
    topic = TopicDriver(A, settings=PartitionSettings(step=2))
    topic.publish(*[event(body, scheduled_ms=START_MS + 100 - at) for at, body in enumerate("edcba")])
    topic.now_ms += 100
    turn(topic)
    turn(topic)
    assert topic.texts(A) == ["a", "b"]
    topic.wait(0)
    assert topic.texts(A) == list("abcde")


def test_many_bytes_are_published_in_several_steps():
    topic = TopicDriver(A, settings=PartitionSettings(step_bytes=2_000))
    topic.publish(*[event(bytes(1_500), scheduled_ms=START_MS + 100) for _ in range(5)])
    topic.now_ms += 100
    turn(topic)
    turn(topic)
    assert topic.held(A)[0] == 2
    topic.wait(0)
    assert topic.held(A)[0] == 5


def test_scheduled_messages_wait_over_a_restart(topic):
    topic.publish(event("m", scheduled_ms=START_MS + 100))
    topic.restart()
    topic.wait(100)
    assert topic.texts(A) == ["m"]


# ---- what is not offered


def test_peek_shows_the_scheduled_messages_of_a_topic_until_they_are_due(topic):
    topic.publish("now", event("later", scheduled_ms=START_MS + 100))
    [shown] = topic.peek(TOPIC)
    assert (shown.number, shown.place, shown.body.endswith(b"later")) == (2, Place.SCHEDULED, True)
    topic.wait(100)
    assert topic.peek(TOPIC) == []


def test_nothing_is_received_from_a_topic_and_nothing_sent_to_a_subscription(topic):
    with pytest.raises(NotAllowed):
        topic.open("t", TOPIC)
    browse, purge, receive = ("browse", (0, 1, 1, None)), ("purge", ()), ("receive-deferred", ([1], False))
    for name, args in (browse, purge, receive, ("peek-session", ("s", 0, 1, 1))):
        with pytest.raises(NotAllowed):
            topic.request(name, *args, queue=TOPIC)
    for queue_id in (A, A | 1):
        with pytest.raises(NotAllowed):
            topic.send("m", queue=queue_id)
    with pytest.raises(NotAllowed):
        topic.request("schedule", [event()], queue=A)
    with pytest.raises(EntityNotFound):
        topic.open("t", TOPIC | 1)


@pytest.mark.parametrize("status", ["Disabled", "SendDisabled"])
def test_no_publishing_to_a_disabled_topic(topic, status):
    topic.publish(event("scheduled", scheduled_ms=START_MS + 100))
    topic.put_topic(status=status)
    with pytest.raises(EntityDisabled):
        topic.publish("m")
    topic.wait(100)
    assert topic.texts(A) == ["scheduled"]  # it was accepted before
    assert len(topic.receive(1, "a", A)) == 1


@pytest.mark.parametrize("status", ["Disabled", "ReceiveDisabled"])
def test_a_disabled_subscription_collects_messages_and_gives_none(topic, status):
    topic.open("a", A)
    topic.subscribe(A, status=status)
    assert [type(error) for _, error in topic.partition.pump(topic.now_ms).closed] == [EntityDisabled]
    topic.publish("m")
    with pytest.raises(EntityDisabled):
        topic.open("again", A)
    topic.subscribe(A, status="Active")
    assert len(topic.receive(1, "later", A)) == 1


# ---- limits


def test_the_size_of_a_topic_counts_each_body_once_and_each_copy_a_little(topic):
    topic.publish(event(bytes(1000)))
    body = event(bytes(1000))[1]
    assert topic.counts(TOPIC)[3] == len(body) + MESSAGE_HEADER_BYTES + 2 * COPY_BYTES
    assert topic.counts(A)[3] == len(body) + MESSAGE_HEADER_BYTES


def test_a_full_topic_refuses_messages_until_a_body_goes_with_its_last_copy():
    topic = TopicDriver(A, B, max_size_mb=1)
    topic.publish(event(bytes(900_000)))
    for queue_id in (A, B):
        with pytest.raises(QuotaExceeded):
            topic.publish(event(bytes(200_000)))
        topic.settle(Outcome.DEAD_LETTERED, topic.receive_one(queue_id, queue_id), queue=queue_id)
        with pytest.raises(QuotaExceeded):
            topic.publish(event(bytes(200_000)))
        dead = topic.receive_one(f"dead {queue_id}", queue_id | 1)
        topic.settle(Outcome.ACCEPTED, dead, queue=queue_id | 1)
    topic.publish(event(bytes(200_000)))
    assert_sound(topic)


def test_above_the_watermark_publishing_is_refused(topic):
    full = TopicDriver(A, settings=PartitionSettings(min_free_bytes=1 << 60))
    with pytest.raises(QuotaExceeded):
        full.publish("m")


# ---- entities come, change and go


def test_a_deleted_subscription_closes_its_receivers_and_leaves_the_others_their_messages(topic):
    topic.publish(*"abcde")
    received = topic.receive(2, "a", A)
    topic.open("dead", A | 1)
    topic.settle(Outcome.DEAD_LETTERED, received[0], queue=A)
    topic.grant(1, "a")
    topic.unsubscribe(A)
    pumped = topic.partition.pump(topic.now_ms)
    assert {receiver: type(error) for receiver, error in pumped.closed} == {"a": EntityNotFound, "dead": EntityNotFound}
    assert not pumped.deliveries
    assert isinstance(topic.settle(Outcome.ACCEPTED, received[1], queue=A)[0], EntityNotFound)
    topic.publish("f")
    topic.wait(0)
    assert topic.texts(B) == list("abcdef")
    assert topic.references() == {}
    assert topic.store.scan(Table.RULES, entity_key(A >> 3), entity_key((A >> 3) + 1), 9) == []
    assert_sound(topic)


def test_a_subscription_is_freed_step_by_step_also_over_a_restart():
    topic = TopicDriver(A, B, settings=PartitionSettings(step=2))
    topic.publish(*"abcde", event("f", ttl_ms=10**6))
    topic.settle(Outcome.ACCEPTED, *topic.receive(1, "b", B), queue=B)
    topic.unsubscribe(A)
    topic.partition.advance(topic.now_ms)
    topic.partition.commit()
    assert_sound(topic)
    with pytest.raises(ServerBusy):
        topic.subscribe(A)
    topic.restart()
    topic.wait(0)
    assert_sound(topic)
    topic.settle(Outcome.ACCEPTED, *topic.receive(9, "b", B), queue=B)
    assert (topic.message_count(), topic.counts(TOPIC)[3]) == (0, 0)
    topic.subscribe(A)
    topic.publish("new")
    assert topic.texts(A) == ["new"]


def test_a_deleted_topic_takes_its_subscriptions_and_scheduled_messages_along(topic):
    topic.publish("a", event("s", scheduled_ms=START_MS + 10**6))
    topic.open("b", B)
    topic.receive(1, "a", A)
    topic.partition.delete_entity(TOPIC_ENTITY, topic.now_ms)
    for entity_id in (TOPIC_ENTITY, A >> 3, B >> 3):
        topic.store.delete(Table.ENTITIES, entity_key(entity_id))
    topic.partition.commit()
    assert {receiver for receiver, _ in topic.partition.pump(topic.now_ms).closed} == {"a", "b"}
    for use in (lambda: topic.publish("x"), lambda: topic.peek(A), lambda: topic.unsubscribe(B)):
        with pytest.raises(EntityNotFound):
            use()
    topic.restart()
    topic.wait(LOCK_MS)
    for table in (Table.MESSAGES, Table.QUEUE, Table.DUE, Table.REFS, Table.RULES, Table.COUNTS):
        assert topic.store.last_key(table) is None


def test_a_topic_of_the_same_name_is_another_topic(topic):
    topic.publish("old")
    topic.partition.delete_entity(TOPIC_ENTITY, topic.now_ms)
    topic.wait(0)
    topic.put_topic()
    topic.subscribe(A)
    topic.publish("new")
    assert topic.texts(A) == ["new"]
    with pytest.raises(EntityNotFound):
        topic.peek(B)


def test_a_subscription_without_its_topic_is_refused(topic):
    queue = Driver()
    with pytest.raises(EntityNotFound):
        TopicDriver.subscribe(queue, A)  # type: ignore[arg-type]
    assert queue.partition.tallies().keys() <= {8}
    topic.store.delete(Table.ENTITIES, entity_key(TOPIC_ENTITY))
    with pytest.raises(StoreError, match=NAMES[A]):
        topic.restart()


def test_a_lock_of_a_copy_is_lost_by_a_change_of_its_subscription_only(topic):
    topic.publish("m")
    a, b = topic.receive_one("a", A), topic.receive_one("b", B)
    topic.subscribe(A, lock_duration_ms=5_000)
    assert isinstance(topic.settle(Outcome.ACCEPTED, a, queue=A)[0], LockLost)
    assert topic.settle(Outcome.ACCEPTED, b, queue=B) == [None]


# ---- records that cannot be read


def damage(topic, table, key):
    value = bytearray(topic.store.get(table, key))
    value[-1] ^= 1
    topic.store.put(table, key, bytes(value))
    topic.store.commit()


def test_a_corrupt_shared_body_is_set_aside_for_each_subscription_as_it_comes_upon_it(topic):
    topic.publish("bad", "good")
    locked = topic.receive_one("b", B)
    damage(topic, Table.MESSAGES, message_key(1))
    assert len(topic.receive(5, "a", A)) == 1
    assert topic.counts(A)[:4] == [1, 0, 0, topic.counts(A)[3]]
    assert topic.settle(Outcome.RELEASED, locked, queue=B) == [None]
    assert len(topic.receive(5, "b", B)) == 1
    assert topic.references() == {2: 2}
    for queue_id in (A, B):
        assert topic.request("counts", queue_id)[queue_id][3] == len(topic.store.get(Table.MESSAGES, message_key(2)))
    assert_sound(topic)


def test_a_body_set_aside_elsewhere_can_still_be_settled(topic):
    topic.publish("bad")
    locked = topic.receive_one("b", B)
    damage(topic, Table.MESSAGES, message_key(1))
    topic.receive(1, "a", A)
    assert topic.settle(Outcome.ACCEPTED, locked, queue=B) == [None]
    assert topic.counts(TOPIC) == topic.counts(A) == topic.counts(B) == [0, 0, 0, 0, 0]
    assert topic.references() == {}


def test_corrupt_references_are_counted_anew(topic):
    topic.subscribe(C)
    topic.publish("m", "n")
    damage(topic, Table.REFS, message_key(1))
    topic.settle(Outcome.ACCEPTED, topic.receive_one("a", A), queue=A)
    assert topic.references() == {1: 2, 2: 3}
    topic.settle(Outcome.ACCEPTED, topic.receive_one("b", B), queue=B)
    topic.settle(Outcome.ACCEPTED, topic.receive_one("c", C), queue=C)
    assert topic.message_count() == 1
    assert_sound(topic)


def test_corrupt_counts_of_a_topic_are_counted_anew(topic):
    topic.publish("m", "n", event("s", scheduled_ms=START_MS + 10**6))
    topic.settle(Outcome.ACCEPTED, topic.receive_one("a", A), queue=A)
    before = topic.counts(TOPIC)
    damage(topic, Table.COUNTS, entity_key(TOPIC))
    topic.restart()
    assert topic.counts(TOPIC) == before
    topic.publish("o")
    assert_sound(topic)


def test_a_scheduled_message_that_cannot_be_read_keeps_the_others_from_nothing(topic):
    topic.publish(*[event(body, scheduled_ms=START_MS + 100) for body in "xyz"])
    damage(topic, Table.MESSAGES, message_key(2))
    topic.wait(100)
    assert topic.texts(A) == ["x", "z"]
    assert topic.held(TOPIC) == [0, 0, 0, 0]
    assert_sound(topic)


def test_a_rule_that_cannot_be_read_fails_on_each_message_and_loses_none(topic):
    damage(topic, Table.RULES, rule_key(A >> 3, "$Default"))
    topic.restart()
    topic.publish("m")
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B)) == ([], ["m"], ["m"])
    assert topic.peek(A | 1)[0].properties["DeadLetterReason"] == "FilterException"
    topic.restart()
    assert topic.request("enumerate-rules", 0, 9, queue=A) == []
    topic.request("remove-rule", "$Default", queue=A)
    topic.request("add-rule", rule("all"), queue=A)
    topic.publish("n")
    assert topic.texts(A) == ["n"]
    assert_sound(topic)


# ---- what it costs


def test_a_topic_whose_subscriptions_take_everything_never_looks_at_properties(topic):
    topic.send(message("layout and bytes make no sense"), queue=TOPIC)
    assert [d.body for d in topic.peek(A)] == [b"layout and bytes make no sense"]
    assert topic.held(A | 1) == [0, 0, 0, 0]


def test_ten_subscriptions_store_little_more_than_one_copy(tmp_path):
    count, body = 2_000, bytes(1024)

    def used_bytes(path, queue_id, *subscriptions):
        with LmdbStore(path, partition_id=5, map_size_bytes=1 << 28, create=True) as store:
            topic = TopicDriver(store=store)
            for at in subscriptions:
                NAMES.setdefault(at << 3, f"s{at}")
                topic.subscribe(at << 3)
            before = store.used_bytes()
            for _ in range(count // 250):
                topic.send(*[message(body)] * 250, queue=queue_id)
            return (store.used_bytes() - before) / count

    one_copy = used_bytes(tmp_path / "queue", MAIN)
    assert used_bytes(tmp_path / "topic", TOPIC, *range(20, 30)) <= 1.3 * one_copy + 10 * 150
