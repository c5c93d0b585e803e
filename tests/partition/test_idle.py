"""AutoDeleteOnIdle: what counts as a use, when an entity goes, and what a restart makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import requests
from broker.errors import EntityNotFound, TransactionRollback
from broker.partition.due import DUE_PER_TURN
from broker.partition.state.idleness import STEPS
from broker.wire import Outcome, SendOperation, SettleOperation
from storage.records import entity_key, idle_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import DEAD, ENTITY, LOCK_MS, MAIN, START_MS, Driver, define, describe, message
from tests.partition.forwarding_driver import Partitions, transfer, via
from tests.partition.hinted_store import HintedStore
from tests.partition.idle_driver import DAY_MS, INTERVAL_MS, STEP_MS, USES, is_there, opened
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC, TOPIC_ENTITY, A, B, TopicDriver, event
from tests.partition.topic_driver import rule as rule_document


@pytest.fixture
def queue() -> Driver:
    return Driver(auto_delete_on_idle_ms=INTERVAL_MS, lock_duration_ms=300_000)


def assert_goes_after(driver: Driver, ms: int, queue_id: int = MAIN) -> None:
    driver.wait(ms - 1)
    assert is_there(driver, queue_id)
    driver.wait(1)
    assert not is_there(driver, queue_id)


def test_an_entity_that_nobody_used_for_its_interval_is_deleted(queue):
    queue.send("a")
    queue.receive_one()
    queue.close()
    assert_goes_after(queue, INTERVAL_MS)
    with pytest.raises(EntityNotFound):
        queue.send("b")
    assert queue.partition.take_auto_deleted() == {ENTITY: "orders"}
    assert queue.partition.take_auto_deleted() == {}
    assert queue.partition.gauges()["auto_deleted"] == 1


def test_without_an_interval_nothing_goes():
    queue = Driver()
    queue.send("a")
    queue.wait(1000 * DAY_MS)
    assert queue.bodies() == ["a"]


def test_what_it_held_is_freed(queue):
    queue.send("a", message("b", ttl_ms=DAY_MS))
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    queue.close()
    queue.wait(INTERVAL_MS + 1000)
    for table in (Table.MESSAGES, Table.QUEUE, Table.DUE, Table.COUNTS):
        assert queue.store.scan(table, b"\0", b"\xff" * 32, 10) == []
    assert queue.store.get(Table.META, idle_key(ENTITY)) is None
    assert problems(queue.store) == []


def test_its_receivers_are_told_that_it_is_not_there(queue):
    queue.open("w")
    queue.open("d", DEAD)
    queue.wait(INTERVAL_MS)
    closed = dict(queue.partition.pump(queue.now_ms).closed)
    assert closed.keys() == {"w", "d"}
    for error in closed.values():
        assert isinstance(error, EntityNotFound)
        assert "The messaging entity 'orders' could not be found" in str(error)  # a client looks for it (amqp.md 2.4)


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_use_keeps_it_for_another_interval(queue, use):
    opened(queue)
    queue.wait(250_000)
    use(queue)
    assert_goes_after(queue, INTERVAL_MS)


def test_work_of_the_broker_itself_is_no_use(queue):
    queue.change(max_delivery_count=1, dead_lettering_on_message_expiration=True, lock_duration_ms=5000)
    queue.open()
    queue.send("a", message("b", ttl_ms=100_000))
    queue.receive(1)
    queue.partition.request(0, requests.Counts(), queue.now_ms)
    assert_goes_after(queue, INTERVAL_MS)


def test_a_receiver_with_credit_uses_it_until_the_credit_is_gone(queue):
    queue.open()
    queue.grant(1)
    queue.pump()
    queue.wait(DAY_MS + 1000)
    queue.partition.grant("r", 0)
    queue.pump()
    assert_goes_after(queue, INTERVAL_MS)


def test_a_receiver_with_credit_uses_it_until_it_is_closed(queue):
    queue.open("d", DEAD)
    queue.grant(1, "d")
    queue.pump()
    queue.wait(DAY_MS + 1000)
    queue.close("d")
    assert_goes_after(queue, INTERVAL_MS)


def test_a_receiver_without_credit_is_no_use(queue):
    queue.open()
    assert_goes_after(queue, INTERVAL_MS)


def test_a_receiver_that_waits_for_a_session_uses_it():
    queue = SessionDriver(auto_delete_on_idle_ms=INTERVAL_MS)
    queue.ask("r", None, wait_ms=DAY_MS)
    queue.turn()
    queue.wait(DAY_MS - 1000)
    assert is_there(queue)
    queue.wait(1000)
    assert_goes_after(queue, INTERVAL_MS)


def test_a_receiver_that_loses_its_session_used_it_until_then():
    queue = SessionDriver(auto_delete_on_idle_ms=INTERVAL_MS, lock_duration_ms=LOCK_MS - 5000)
    queue.put("s", "a")
    queue.ask("r", "s")
    queue.grant(5)
    queue.turn()
    queue.wait(LOCK_MS - 5000)
    queue.turn()
    assert queue.closed.keys() == {"r"}
    assert_goes_after(queue, INTERVAL_MS)


def test_a_scheduled_message_keeps_it_until_it_is_available(queue):
    queue.send(message("later", scheduled_ms=queue.now_ms + DAY_MS))
    queue.wait(DAY_MS)
    assert queue.partition.request(0, requests.Counts([MAIN]), queue.now_ms)[MAIN][:3] == [1, 0, 0]
    assert_goes_after(queue, INTERVAL_MS)


def test_a_scheduled_message_keeps_it_after_a_restart(queue):
    queue.send(message("later", scheduled_ms=queue.now_ms + DAY_MS))
    queue.restart()
    queue.wait(DAY_MS)
    assert is_there(queue)


def test_nothing_is_written_about_an_entity_in_use(queue):
    commits = 0
    for _ in range(100):
        queue.wait(STEP_MS - 1000)
        queue.peek()
        queue.wait(1000)
        commits += queue.partition.commit()
    assert commits == 0
    assert queue.store.get(Table.META, idle_key(ENTITY)) is None


# -- topics


def test_a_topic_goes_with_its_subscriptions():
    driver = TopicDriver(A, B, auto_delete_on_idle_ms=INTERVAL_MS)
    driver.publish("m")
    assert_goes_after(driver, INTERVAL_MS, TOPIC)
    assert not is_there(driver, A)
    assert driver.partition.take_auto_deleted() == {
        A >> 3: "news/Subscriptions/a",
        B >> 3: "news/Subscriptions/b",
        TOPIC_ENTITY: "News",
    }
    driver.wait(1000)
    assert driver.message_count() == 0
    assert problems(driver.store) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda driver: driver.publish("n"),
        lambda driver: driver.receive(1, "r", A),
        lambda driver: driver.peek(A | 1),
        lambda driver: driver.request("add-rule", rule_document("red", sql="color = 'red'"), queue=A),
        lambda driver: driver.subscribe(A, max_delivery_count=3),
        lambda driver: driver.subscribe(B),
    ],
    ids=["send", "receive", "browse", "rule", "change of a subscription", "new subscription"],
)
def test_a_use_of_a_topic_or_a_subscription_keeps_the_topic(use):
    driver = TopicDriver(A, auto_delete_on_idle_ms=INTERVAL_MS)
    driver.publish("m")
    driver.wait(250_000)
    use(driver)
    assert_goes_after(driver, INTERVAL_MS, TOPIC)


def test_a_receiver_at_a_subscription_keeps_the_topic():
    driver = TopicDriver(A, B, auto_delete_on_idle_ms=INTERVAL_MS)
    driver.open("r", B)
    driver.grant(1)
    driver.pump()
    driver.wait(DAY_MS)
    assert is_there(driver, TOPIC)


def test_a_scheduled_message_keeps_the_topic():
    driver = TopicDriver(A, auto_delete_on_idle_ms=INTERVAL_MS)
    driver.publish(event("later", scheduled_ms=driver.now_ms + DAY_MS))
    driver.wait(DAY_MS)
    assert_goes_after(driver, INTERVAL_MS, TOPIC)


def test_a_published_message_is_no_use_of_a_subscription():
    driver = TopicDriver(B)
    driver.subscribe(A, auto_delete_on_idle_ms=INTERVAL_MS)
    for _ in range(3):
        driver.publish("m")
        driver.wait(99_000)
    driver.publish("last")
    assert_goes_after(driver, 3_000, A)
    driver.wait(1000)
    driver.publish("after")
    assert driver.texts(B) == ["m", "m", "m", "last", "after"]
    assert driver.references() == {}
    assert problems(driver.store) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda driver: driver.receive(1, "r", A),
        lambda driver: driver.peek(A),
        lambda driver: driver.request("remove-rule", "$Default", queue=A),
    ],
    ids=["receive", "browse", "rule"],
)
def test_a_use_of_a_subscription_keeps_it(use):
    driver = TopicDriver(B)
    driver.subscribe(A, auto_delete_on_idle_ms=INTERVAL_MS)
    driver.wait(250_000)
    use(driver)
    assert_goes_after(driver, INTERVAL_MS, A)


# -- forwarding


@pytest.mark.parametrize("partition", [0, 1])
def test_a_message_forwarded_to_an_entity_is_a_use(partition):
    net = Partitions(2)
    target = net.queue("target", partition, auto_delete_on_idle_ms=INTERVAL_MS)
    source = net.queue("source", 0, forward_to="target", auto_delete_on_idle_ms=INTERVAL_MS)
    for at in range(8):
        net.send(source, f"m{at}")
        net.run()
        for _ in range(9):
            net.wait(STEP_MS)
    assert net.counts(target)[0] == 8
    for _ in range(2):
        net.wait(STEP_MS)
    assert not net.partitions[partition].request(0, requests.Counts([target]), net.now_ms)


def test_messages_sent_through_an_entity_keep_it_until_they_arrive():
    net = Partitions(2)
    through = net.queue("through", 0, auto_delete_on_idle_ms=INTERVAL_MS)
    target = net.queue("target", 1)
    net.send(transfer(through), via("target", "m"))
    for _ in range(3 * STEPS):  # the target's partition does not answer
        net.wait(STEP_MS)
    net.run()
    assert net.bodies(target) == ["m"]
    for _ in range(STEPS - 1):
        net.wait(STEP_MS)
    assert net.counts(through)[0] == 0
    for _ in range(2):
        net.wait(STEP_MS)
    assert not net.partitions[0].request(0, requests.Counts([through]), net.now_ms)


@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("kind", ["queue", "subscription"])
def test_a_message_that_goes_on_is_a_use_of_what_it_leaves(kind, partition):
    net = Partitions(2)
    net.queue("target", partition)
    of = {"auto_delete_on_idle_ms": INTERVAL_MS}
    if kind == "subscription":
        into = net.topic("news", 0)
        source = net.subscription("news", "s", forward_to="target", **of)
    else:
        into = source = net.queue("source", 0, forward_to="target", **of)
    for _ in range(3):
        net.send(into, event("m") if kind == "subscription" else "m")
        net.run()
        for _ in range(9):
            net.wait(STEP_MS)
    assert net.partitions[0].request(0, requests.Counts([source]), net.now_ms)
    for _ in range(2):
        net.wait(STEP_MS)
    assert not net.partitions[0].request(0, requests.Counts([source]), net.now_ms)


def test_an_entity_whose_messages_wait_to_go_on_is_in_use():
    net = Partitions(2)
    target = net.queue("target", 1)
    source = net.queue("source", 0, forward_to="target", auto_delete_on_idle_ms=INTERVAL_MS)
    net.send(source, "m")
    for _ in range(3 * STEPS):  # the target's partition does not answer
        net.wait(STEP_MS)
    net.run()
    assert net.bodies(target) == ["m"]
    for _ in range(STEPS + 1):
        net.wait(STEP_MS)
    assert not net.partitions[0].request(0, requests.Counts([source]), net.now_ms)


# -- changes


def test_an_interval_may_be_set_and_changed_and_taken_off():
    queue = Driver()
    queue.wait(DAY_MS)
    queue.change(auto_delete_on_idle_ms=2 * INTERVAL_MS)
    queue.wait(2 * INTERVAL_MS - 1000)
    queue.change(auto_delete_on_idle_ms=None)
    queue.wait(DAY_MS)
    queue.change(auto_delete_on_idle_ms=INTERVAL_MS)
    assert_goes_after(queue, INTERVAL_MS)


def test_a_topic_that_gets_an_interval_is_kept_by_the_subscriptions_it_has():
    driver = TopicDriver(A)
    driver.put_topic(auto_delete_on_idle_ms=INTERVAL_MS)
    driver.wait(250_000)
    driver.peek(A)
    assert_goes_after(driver, INTERVAL_MS, TOPIC)


# -- time that is not served


def test_a_machine_that_slept_deletes_nothing_at_once(queue):
    queue.wait(100_000)
    queue.now_ms += DAY_MS
    queue.wait(0)
    queue.wait(INTERVAL_MS - 100_000 - 2 * STEP_MS - 1000)
    assert is_there(queue)
    queue.wait(2 * STEP_MS)
    assert not is_there(queue)


def test_a_clock_set_back_does_not_keep_it(queue):
    queue.wait(100_000)
    queue.now_ms -= DAY_MS
    queue.peek()
    queue.wait(DAY_MS + INTERVAL_MS)
    assert not is_there(queue)


def test_the_time_that_a_broker_is_down_is_no_idleness(queue):
    queue.wait(INTERVAL_MS - 1)
    queue.now_ms += DAY_MS
    queue.restart()
    queue.partition.advance(queue.now_ms)
    assert is_there(queue)
    queue.wait(2 * STEP_MS)
    assert not is_there(queue)


def test_restarts_delay_the_deletion_of_an_idle_entity_but_not_for_ever(queue):
    for _ in range(20):
        queue.wait(3 * STEP_MS)
        queue.restart()
    assert not is_there(queue)


def test_a_use_is_known_after_a_crash(queue):
    queue.wait(INTERVAL_MS - 1000)
    queue.send("a")
    queue.restart()
    assert_goes_after(queue, INTERVAL_MS)


def test_a_use_that_was_not_committed_is_none(queue):
    queue.wait(INTERVAL_MS - 1000)
    queue.partition.send(MAIN, [message("a")], queue.now_ms)
    queue.store.abort()
    queue.restart()
    queue.wait(2 * STEP_MS)
    assert not is_there(queue)


def test_an_unreadable_record_of_idleness_begins_it_anew(queue):
    queue.wait(INTERVAL_MS - 1000)
    queue.store.put(Table.META, idle_key(ENTITY), b"nonsense")
    queue.store.commit()
    queue.restart()
    assert_goes_after(queue, INTERVAL_MS)
    assert queue.partition.gauges()["quarantined"] == 1


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["use", "use", "restart", "down", "nothing"]),
            st.sampled_from([1, 999, 15_000, STEP_MS - 1, STEP_MS, 70_000, 200_000, INTERVAL_MS - 1]),
        ),
        max_size=12,
    )
)
def test_it_is_never_deleted_early_and_not_much_too_late(steps):
    queue = Driver(auto_delete_on_idle_ms=INTERVAL_MS)
    idle_ms = restarts = 0
    for step, ms in steps:
        if step == "use":
            if not is_there(queue):
                break
            queue.peek()
            idle_ms = restarts = 0
        elif step in ("restart", "down"):
            queue.now_ms += DAY_MS if step == "down" else 0
            queue.restart()
            restarts += 1
        before = idle_ms
        while idle_ms < before + ms and is_there(queue):
            queue.wait(1000)
            idle_ms += 1000
    while is_there(queue):
        queue.wait(1000)
        idle_ms += 1000
    # Each second is looked at, and it goes on whole ones.
    assert INTERVAL_MS <= idle_ms <= INTERVAL_MS + 1000 + restarts * 2 * STEP_MS


# -- until the catalog knows


def test_it_stays_deleted_after_a_restart_while_the_catalog_still_has_it(queue):
    queue.send("a")
    queue.wait(INTERVAL_MS)
    for _ in range(2):
        assert [*queue.partition.auto_deleted] == [ENTITY]
        with pytest.raises(EntityNotFound):
            queue.send("b")
        with pytest.raises(EntityNotFound, match="'orders' could not be found"):
            queue.change(max_delivery_count=3)
        queue.wait(1000)
        queue.restart()
    assert queue.partition.take_auto_deleted() == {}


def test_nothing_is_left_of_it_when_the_catalog_has_it_no_more(queue):
    queue.send("a")
    queue.wait(INTERVAL_MS + 1000)
    before = queue.store.scan(Table.META, b"\0", b"\xff" * 64, 100)
    queue.store.delete(Table.ENTITIES, entity_key(ENTITY))
    queue.partition.delete_entities([ENTITY], queue.now_ms)
    queue.partition.commit()
    assert [*queue.partition.auto_deleted] == []
    assert len(queue.store.scan(Table.META, b"\0", b"\xff" * 64, 100)) == len(before) - 1
    queue.restart()
    assert [*queue.partition.auto_deleted] == []


def test_a_deletion_that_the_home_decides_reaches_what_lives_here_and_what_does_not():
    driver = TopicDriver(A, B)
    driver.publish("m")
    wanted = driver.partition.with_subscriptions([ENTITY, TOPIC_ENTITY, 99])
    assert wanted == [ENTITY, A >> 3, B >> 3, TOPIC_ENTITY, 99]
    driver.partition.delete_entities(wanted, driver.now_ms)
    driver.partition.commit()
    assert not is_there(driver)
    assert not is_there(driver, TOPIC)
    driver.wait(1000)
    assert driver.message_count() == 0


def test_a_transaction_that_sent_to_what_is_deleted_is_rolled_back():
    queue = Driver(auto_delete_on_idle_ms=INTERVAL_MS)
    queue.partition.transact("t", True, [SendOperation(MAIN, False, [[message("t")]])], queue.now_ms)
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    with pytest.raises(TransactionRollback):
        queue.partition.discharge("t", True, queue.now_ms)


@pytest.mark.parametrize("name", ["send", "settle"])
def test_the_commit_of_a_transaction_is_a_use(queue, name):
    opened(queue)
    operation = (
        SendOperation(MAIN, False, [[message("t")]])
        if name == "send"
        else SettleOperation(MAIN, False, [queue.delivery.token], Outcome.ACCEPTED)
    )
    queue.partition.transact("t", True, [operation], queue.now_ms)
    queue.wait(119_000)
    queue.partition.discharge("t", True, queue.now_ms)
    assert_goes_after(queue, INTERVAL_MS)


def test_many_that_go_at_once_go_over_several_turns():
    store = HintedStore()
    for entity_id in range(10, 10 + 2 * DUE_PER_TURN):
        define(
            store, entity_id, describe(auto_delete_on_idle_ms=INTERVAL_MS).model_copy(update={"name": f"q{entity_id}"})
        )
    queue = Driver(store)
    end_ms = START_MS + INTERVAL_MS
    deleted = []
    while (due_ms := queue.partition.next_timer_ms()) is not None:
        queue.partition.advance(due_ms)
        queue.partition.commit()
        deleted.append(len(queue.partition.take_auto_deleted()))
        assert due_ms <= end_ms
    assert max(deleted) == DUE_PER_TURN
    assert sum(deleted) == 2 * DUE_PER_TURN


def test_hundreds_of_them_are_looked_at_in_few_turns():
    store = HintedStore()
    queue = Driver(store)
    description = queue.description.model_copy(update={"auto_delete_on_idle_ms": INTERVAL_MS})
    for entity_id in range(10, 300):
        named = description.model_copy(update={"name": f"q{entity_id}"})
        define(store, entity_id, named)
        queue.now_ms = START_MS + entity_id  # they are not all of the same moment
        queue.partition.put_entity(entity_id, named, queue.now_ms)
    turns = 0
    while queue.now_ms < START_MS + INTERVAL_MS - LOCK_MS:
        due_ms = queue.partition.next_timer_ms()
        assert due_ms is not None
        queue.now_ms = max(queue.now_ms, due_ms)
        queue.partition.advance(queue.now_ms)
        queue.partition.commit()
        turns += 1
    assert turns <= 2 * STEPS
