"""A record of counts that cannot be read is made again from what is stored, with all that it counts."""

import pytest

from broker.partition.state.recount import NUMBER_GAP
from broker.wire import Outcome
from storage.queue_ids import Part
from storage.records import Counts, decode_counts, entity_key
from storage.store import Store, Table
from tests.partition.accounts import problems
from tests.partition.driver import DEAD, MAIN, Driver, message
from tests.partition.forwarding_driver import via
from tests.partition.topic_driver import TOPIC, A, B, TopicDriver, event


def counts_of(store: Store) -> dict[int, Counts]:
    items = store.scan(Table.COUNTS, b"\0", b"\xff" * 5, 100)
    return {int.from_bytes(key, "big"): decode_counts(value) for key, value in items}


def assert_counted_anew(driver: Driver, queue_id: int) -> None:
    before = counts_of(driver.store)
    assert before[queue_id].size_bytes > 0
    driver.store.put(Table.COUNTS, entity_key(queue_id), b"nonsense")
    driver.store.commit()
    driver.restart()
    assert driver.request("counts", queue_id)[queue_id][:4] == list(before[queue_id][1:])
    after = counts_of(driver.store)
    assert after.pop(queue_id).next_sequence_number >= before[queue_id].next_sequence_number
    assert after == {key: counts for key, counts in before.items() if key != queue_id}
    assert problems(driver.store) == []


@pytest.mark.parametrize("queue_id", [MAIN, DEAD, MAIN | Part.TRANSFER])
def test_of_a_queue(queue_id):
    queue = Driver()
    queue.send("a", "bb", "ccc", "dddd", message("scheduled", scheduled_ms=queue.now_ms + 60_000))
    a, b = queue.receive(2)
    queue.settle(Outcome.DEAD_LETTERED, a)
    queue.settle(Outcome.DEFERRED, b)
    queue.close()
    queue.partition.send(MAIN | Part.TRANSFER, [via("nowhere", message("later", scheduled_ms=queue.now_ms + 1))], 0)
    queue.partition.commit()
    assert_counted_anew(queue, queue_id)


@pytest.mark.parametrize("queue_id", [TOPIC, A, A | Part.DEAD_LETTER, B])
def test_of_a_topic_with_a_subscription_that_has_states(queue_id):
    driver = TopicDriver(B)
    driver.subscribe(A, requires_session=True)
    for at in range(4):
        driver.publish(event(f"m{at}", system={10: "s"}))
    driver.publish(event("scheduled", scheduled_ms=driver.now_ms + 60_000))
    driver.partition.open_receiver("r", A, False, driver.now_ms, ["s", 0])
    driver.partition.grant("r", 1)
    [(_, _, items)] = driver.partition.pump(driver.now_ms).deliveries
    driver.partition.settle(A, [items[0]], Outcome.DEAD_LETTERED, None, driver.now_ms)
    driver.request("set-session-state", "r", "s", b"state", queue=A)
    driver.settle(Outcome.ACCEPTED, driver.receive_one("b", B), queue=B)
    driver.close("b")
    assert_counted_anew(driver, queue_id)


def test_the_next_number_is_one_that_was_never_given():
    queue = Driver()
    queue.send("a", "b")
    queue.settle(Outcome.ACCEPTED, *queue.receive(2))
    queue.store.put(Table.COUNTS, entity_key(MAIN), b"nonsense")
    queue.store.commit()
    queue.restart()
    queue.send("c")
    assert queue.peek()[0].number == NUMBER_GAP
