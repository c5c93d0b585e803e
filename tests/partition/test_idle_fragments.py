"""AutoDeleteOnIdle of a partitioned entity, on one of its partitions: it says that nobody used its fragment, and when
it has agreed to the deletion it refuses uses until it hears the decision.
"""

from contextlib import suppress

import pytest

from broker import requests
from broker.errors import BrokerError, EntityNotFound, ServerBusy
from broker.namespace.entities import TopicDescription
from storage.records import idle_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import ENTITY, MAIN, Driver, define, describe, message
from tests.partition.forwarding_driver import Partitions, transfer, via
from tests.partition.idle_driver import DAY_MS, INTERVAL_MS, STEP_MS, USES, is_there, opened
from tests.partition.topic_driver import TOPIC_ENTITY, A, B, TopicDriver

FRAGMENTS = (2, 5)  # the driver's partition is 5
# A receiver that is open gets nothing.
NOT_REFUSED = ("closing a receiver", "a change of its properties", "what is refused", "a receive")
REFUSED = {name: use for name, use in USES.items() if name not in NOT_REFUSED}


def fragment(**properties) -> Driver:
    queue = Driver()
    queue.description = describe(**{"auto_delete_on_idle_ms": INTERVAL_MS, "lock_duration_ms": 300_000, **properties})
    define(queue.store, ENTITY, queue.description, FRAGMENTS)
    queue.partition.put_entity(ENTITY, queue.description, queue.now_ms, partitions=FRAGMENTS)
    queue.partition.commit()
    return queue


@pytest.fixture
def queue() -> Driver:
    return fragment()


def agree(driver: Driver, entity_id: int = ENTITY) -> bool:
    agrees = driver.partition.agree(entity_id, driver.now_ms)
    driver.partition.commit()
    return agrees


def keep(driver: Driver, entity_id: int = ENTITY) -> None:
    driver.partition.keep(entity_id, driver.now_ms)
    driver.partition.commit()


def agreed(driver: Driver) -> Driver:
    driver.wait(INTERVAL_MS)
    assert agree(driver)
    return driver


def says_after(driver: Driver, ms: int, entity_id: int = ENTITY) -> None:
    assert driver.partition.take_unused() == []
    driver.wait(ms - 1)
    assert driver.partition.take_unused() == []
    driver.wait(1)
    assert driver.partition.take_unused() == [entity_id]


def test_it_says_that_it_is_unused_and_goes_on(queue):
    says_after(queue, INTERVAL_MS)
    assert not queue.partition.take_auto_deleted()
    queue.send("a")
    assert queue.bodies() == ["a"]
    says_after(queue, INTERVAL_MS)
    says_after(queue, STEP_MS)  # the home may not have heard it


def test_one_that_lives_elsewhere_says_nothing():
    queue = Driver()
    description = describe(auto_delete_on_idle_ms=INTERVAL_MS)
    queue.partition.put_entity(ENTITY, description, queue.now_ms, partitions=(2, 3))
    queue.wait(3 * INTERVAL_MS)
    assert queue.partition.take_unused() == []
    assert not queue.partition.agree(ENTITY, queue.now_ms)
    assert queue.partition.commit() is False


def test_it_writes_nothing_for_as_long_as_nobody_asks(queue):
    queue.wait(INTERVAL_MS)
    commits = 0
    while queue.now_ms < 10 * INTERVAL_MS:
        due_ms = queue.partition.next_timer_ms()
        if due_ms is None or due_ms > queue.now_ms + 10 * STEP_MS:
            break
        queue.now_ms = due_ms
        queue.partition.advance(due_ms)
        commits += queue.partition.commit()
    assert commits == 0


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_one_that_was_used_since_it_said_so_does_not_agree(queue, use):
    opened(queue)
    queue.wait(INTERVAL_MS)
    assert queue.partition.take_unused() == [ENTITY]
    with suppress(BrokerError):  # some locks have ended
        use(queue)
    assert not agree(queue)
    queue.wait(INTERVAL_MS - 1)
    assert not agree(queue)


@pytest.mark.parametrize(
    "keeps",
    [
        lambda queue: (queue.open(), queue.grant(1), queue.pump()),
        lambda queue: (queue.open(), queue.partition.watch("r")),
        lambda queue: queue.send(message("later", scheduled_ms=queue.now_ms + DAY_MS)),
    ],
    ids=["credit here", "credit elsewhere", "a scheduled message"],
)
def test_what_uses_it_all_the_time_keeps_it_from_agreeing(queue, keeps):
    keeps(queue)
    queue.wait(2 * INTERVAL_MS)
    assert queue.partition.take_unused() == []
    assert not agree(queue)


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED.keys())
def test_one_that_has_agreed_refuses_uses_until_it_hears_that_it_stays(queue, use, restarts):
    opened(queue)
    queue.wait(INTERVAL_MS)
    before = queue.held()
    queue.wait(INTERVAL_MS)
    assert agree(queue)
    for _ in range(restarts):
        queue.restart()
    with pytest.raises(ServerBusy):
        use(queue)
    queue.wait(DAY_MS)
    with pytest.raises(ServerBusy):
        use(queue)
    assert not queue.partition.has_changed
    keep(queue)
    after = queue.held()
    assert sum(after) == sum(before)
    queue.send("new")
    assert "new" in queue.bodies()


def test_an_agreement_that_was_not_committed_is_none(queue):
    queue.wait(INTERVAL_MS)
    assert queue.partition.agree(ENTITY, queue.now_ms)
    queue.store.abort()
    queue.restart()
    queue.send("a")
    assert queue.bodies() == ["a"]


def test_a_use_that_was_refused_is_one(queue):
    agreed(queue).partition.take_unused()
    with pytest.raises(ServerBusy):
        queue.peek()
    keep(queue)
    assert queue.store.get(Table.META, idle_key(ENTITY)) is None
    says_after(queue, INTERVAL_MS)


def test_the_time_in_which_it_refuses_uses_does_not_count(queue):
    queue.wait(INTERVAL_MS - STEP_MS)
    queue.wait(STEP_MS)
    assert agree(queue)
    queue.partition.take_unused()
    queue.wait(3 * STEP_MS)
    assert queue.partition.take_unused() == []
    keep(queue)
    queue.wait(STEP_MS)
    assert queue.partition.take_unused() == [ENTITY]


def test_it_stays_when_the_home_has_no_agreement_of_it_and_says_again_that_it_is_unused(queue):
    agreed(queue)
    queue.restart()
    assert queue.partition.take_unused() == []
    queue.partition.keep_all(queue.now_ms)
    queue.wait(0)
    assert queue.partition.take_unused() == [ENTITY]
    queue.send("a")
    queue.restart()
    queue.partition.keep_all(queue.now_ms)
    says_after(queue, INTERVAL_MS)


def test_when_it_is_deleted_nothing_is_left(queue):
    queue.send("a")
    agreed(queue)
    queue.restart()
    queue.partition.delete_entities([ENTITY], queue.now_ms)
    queue.wait(1000)
    assert queue.store.get(Table.META, idle_key(ENTITY)) is None
    assert not is_there(queue)
    with pytest.raises(EntityNotFound):
        queue.send("b")
    assert not agree(queue)
    assert queue.store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 10) == []
    assert problems(queue.store) == []


def test_a_change_keeps_it(queue):
    agreed(queue)
    queue.partition.put_entity(ENTITY, queue.description, queue.now_ms, partitions=FRAGMENTS)
    queue.partition.commit()
    queue.send("a")
    queue.restart()
    queue.send("b")


@pytest.mark.parametrize("stays", [keep, lambda queue: queue.partition.keep_all(queue.now_ms)], ids=["told", "all"])
@pytest.mark.parametrize("drain", [False, True])
def test_what_a_receiver_is_granted_meanwhile_is_handed_out_afterwards(queue, stays, drain):
    queue.send("a")
    queue.open()
    agreed(queue)
    queue.partition.grant("r", 1)
    if drain:
        queue.partition.drain("r", 2)
    pumped = queue.partition.pump(queue.now_ms)
    assert (pumped.deliveries, pumped.drained, pumped.more) == ([], [], False)
    stays(queue)
    pumped = queue.partition.pump(queue.now_ms)
    assert [len(items) // 5 for _, _, items in pumped.deliveries] == [1]
    assert pumped.drained == ([("r", 1)] if drain else [])


# -- topics


def fragments_of_topic(*subscriptions: int, of: int = 0) -> TopicDriver:
    """With the interval for the topic, or for the subscription `of`."""
    driver = TopicDriver()
    topic = TopicDescription(name="News", auto_delete_on_idle_ms=None if of else INTERVAL_MS)
    driver.partition.put_entity(TOPIC_ENTITY, topic, driver.now_ms, partitions=FRAGMENTS)
    for queue_id in subscriptions:
        driver.subscribe(queue_id, auto_delete_on_idle_ms=INTERVAL_MS if queue_id == of else None)
    return driver


def test_a_topic_that_has_agreed_refuses_uses_of_its_subscriptions():
    driver = fragments_of_topic(A, B)
    driver.publish("m")
    driver.wait(INTERVAL_MS)
    assert driver.partition.take_unused() == [TOPIC_ENTITY]
    assert agree(driver, TOPIC_ENTITY)
    for use in (lambda: driver.peek(A), lambda: driver.publish("n"), lambda: driver.receive(1, "r", B)):
        with pytest.raises(ServerBusy):
            use()
    keep(driver, TOPIC_ENTITY)
    driver.publish("n")
    assert driver.texts(A) == ["m", "n"]


def test_a_subscription_that_has_agreed_still_gets_what_is_published():
    driver = fragments_of_topic(A, B, of=A)
    driver.wait(INTERVAL_MS)
    assert driver.partition.take_unused() == [A >> 3]
    assert agree(driver, A >> 3)
    driver.publish("m")
    assert driver.texts(B) == ["m"]
    with pytest.raises(ServerBusy):
        driver.peek(A)
    keep(driver, A >> 3)
    assert driver.texts(A) == ["m"]


def test_a_receiver_at_a_subscription_goes_on_when_its_topic_stays():
    driver = fragments_of_topic(A)
    driver.publish("m")
    driver.open("r", A)
    driver.wait(INTERVAL_MS)
    assert agree(driver, TOPIC_ENTITY)
    driver.grant(1)
    assert driver.pump() == {}
    keep(driver, TOPIC_ENTITY)
    assert [d.body for d in driver.pump()["r"]] != []


# -- forwarding


@pytest.mark.parametrize("at", [0, 1])
def test_a_message_forwarded_to_one_that_has_agreed_waits(at):
    """From the partition of the fragment, and from another one."""
    net = Partitions(2)
    target = net.fragments("target", (0, 1), auto_delete_on_idle_ms=INTERVAL_MS)
    source = net.queue("source", at, forward_to="target")
    through = net.queue("through", at)
    for _ in range(10):
        net.wait(STEP_MS)
    fragment_of_key = net.partitions[1]
    assert fragment_of_key.agree(target >> 3, net.now_ms)
    fragment_of_key.commit()
    net.send(source, *[message(f"m{at}", partition_key=str(at)) for at in range(10)])
    net.send(transfer(through), *[via("target", message(f"t{at}", partition_key=str(at))) for at in range(10)])
    waiting = 0
    for _ in range(50):
        for (start, end), known in list(net.connections.items()):
            for connection in known:
                while connection.commands:
                    net.deliver(start, end, connection)
                while connection.answers:
                    net.answer(start, connection)
        net.wait(100)
        waiting = fragment_of_key.request(0, requests.Counts([target]), net.now_ms)[target][0]
    assert waiting == 0
    fragment_of_key.keep(target >> 3, net.now_ms)
    net.run()
    bodies = [delivery.body.decode() for number in (0, 1) for delivery in net.peek(target, number)]
    assert sorted(bodies) == sorted([f"{kind}{at}" for kind in "mt" for at in range(10)])
    assert len(net.peek(target, 1)) > 0


def test_a_session_of_one_that_has_agreed_is_not_given_out():
    queue = fragment(requires_session=True)
    queue.send(message("a", session_id="s"))
    agreed(queue)
    with pytest.raises(ServerBusy):
        queue.partition.open_receiver("r", MAIN, False, queue.now_ms, [None, 1000])
    keep(queue)
    queue.partition.open_receiver("r", MAIN, False, queue.now_ms, [None, 1000])
    assert [accepted[1] for accepted in queue.partition.pump(queue.now_ms).accepted] == ["s"]
