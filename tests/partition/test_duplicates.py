"""Duplicate detection: what comes again within the window is accepted and dropped, and nothing else is."""

from typing import Any

import pytest

from broker.errors import QuotaExceeded
from broker.partition.messages.duplicates import PAUSE_MS
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from protocol.codec import ULong, encode
from storage.quarantine import quarantine_key
from storage.records import decode_rows, entity_key
from storage.seen_ids import PURGE_EVERY_MS
from storage.seen_runs import SeenLimits
from storage.store import Table
from tests.partition.driver import DEAD, ENTITY, MAIN, Driver, message
from tests.partition.topic_driver import TOPIC, A, B, TopicDriver

WINDOW_MS = 20_000


def named(message_id: Any, body: str = "m", key: str | None = None, **extra: Any) -> list[Any]:
    if key is not None:
        extra["partition_key"] = key
    return message(body, message_id=encode(message_id), **extra)


@pytest.fixture
def queue():
    return Driver(requires_duplicate_detection=True, duplicate_detection_history_time_window_ms=WINDOW_MS)


def duplicates(queue: Driver, of: int = MAIN) -> int:
    return queue.partition.tallies()[of]["duplicates"]


def stored(queue: Driver) -> tuple[int, int]:
    """Ids in the log, and in runs."""
    log = queue.store.scan(Table.DUPLICATE_LOG, b"\0", b"\xff" * 32, 10_000)
    chunks = queue.store.scan(Table.DUPLICATE_CHUNKS, b"\0", b"\xff" * 32, 10_000)
    return sum(len(decode_rows(value)) for _, value in log), sum(len(decode_rows(value)) for _, value in chunks)


def test_a_message_with_a_known_id_is_accepted_and_dropped(queue):
    queue.send(named("1", "first"))
    queue.send(named("1", "second"), named("2", "third"))
    assert queue.bodies() == ["first", "third"]
    assert duplicates(queue) == 1


def test_within_one_batch_the_first_counts(queue):
    queue.send(named("1", "a"), named("2", "b"), named("1", "c"), named("2", "d"))
    assert queue.bodies() == ["a", "b"]
    assert [delivery.number for delivery in queue.peek()] == [1, 2]
    assert duplicates(queue) == 2


def test_messages_without_id_are_never_duplicates(queue):
    queue.send("a", "a", message("a", partition_key="k"))
    assert len(queue.bodies()) == 3
    assert stored(queue) == (0, 0)


def test_the_id_of_a_deleted_message_is_still_known(queue):
    queue.send(named("1"))
    queue.settle(Outcome.ACCEPTED, queue.receive_one())
    queue.send(named("1"))
    assert queue.held() == [0, 0, 0, 0]


def test_a_dead_lettered_message_is_still_known(queue):
    queue.send(named("1"))
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    queue.send(named("1"))
    assert (queue.held(), queue.held(DEAD)) == ([0, 0, 0, 0], [1, 0, 0, 0])


def test_a_scheduled_message_is_known_from_the_time_it_was_sent(queue):
    later = {"scheduled_ms": queue.now_ms + 1000}
    [number] = queue.request("schedule", [named("1", "a", **later)])
    assert queue.request("schedule", [named("1", "b", **later)]) == [number]
    queue.send(named("1", "c"))
    queue.wait(1000)
    assert queue.bodies() == ["a"]


def test_one_that_was_cancelled_is_still_known(queue):
    [number] = queue.request("schedule", [named("1", scheduled_ms=queue.now_ms + 1000)])
    queue.request("cancel-scheduled", [number])
    queue.send(named("1"))
    assert queue.held() == [0, 0, 0, 0]


@pytest.mark.parametrize(("after_ms", "kept"), [(WINDOW_MS - 1, 1), (WINDOW_MS, 2), (WINDOW_MS + PURGE_EVERY_MS, 2)])
def test_the_window_ends_to_the_millisecond(queue, after_ms, kept):
    queue.send(named("1"))
    queue.wait(after_ms)
    queue.send(named("1"))
    assert len(queue.bodies()) == kept


def test_a_duplicate_does_not_lengthen_the_window(queue):
    queue.send(named("1"))
    queue.wait(WINDOW_MS - 1)
    queue.send(named("1"))
    queue.wait(1)
    queue.send(named("1"))
    assert len(queue.bodies()) == 2


def test_it_is_known_after_a_restart(queue):
    queue.send(named("1"))
    queue.wait(WINDOW_MS - 1)
    queue.restart()
    queue.send(named("1"))
    assert len(queue.bodies()) == 1
    queue.wait(1 + PURGE_EVERY_MS)
    assert stored(queue) == (0, 0)


def test_the_id_of_an_uncommitted_message_is_not_known(queue):
    queue.partition.send(MAIN, [named("1")], queue.now_ms)
    queue.store.abort()
    queue.restart()
    queue.send(named("1"))
    assert len(queue.bodies()) == 1


def test_the_id_of_a_refused_message_is_not_known(queue):
    queue.change(max_size_mb=1)
    with pytest.raises(QuotaExceeded):
        queue.send(named("1", "x" * (1 << 20)))
    queue.send(named("1"))
    assert len(queue.bodies()) == 1


def test_the_partition_key_is_a_part_of_the_id(queue):
    queue.send(named("1", "a"), named("1", "b", key="k"), named("1", "c", key="l"), named("1", "d", key="k"))
    assert queue.bodies() == ["a", "b", "c"]


@pytest.mark.parametrize("other", [ULong(7), "7", b"7"])
def test_ids_with_the_same_text_have_the_same_digest(queue, other):
    queue.send(named("7"), named(other))
    assert len(queue.bodies()) == 1


def test_an_id_in_the_long_form_is_the_same(queue):
    queue.send(named("7"), message("m", message_id=b"\xb1\x00\x00\x00\x017"))
    assert len(queue.bodies()) == 1


RESTED_MS = 20 * PAUSE_MS  # enough for what is done beside no send


def test_ids_go_step_by_step_once_their_window_has_ended():
    queue = Driver(
        settings=PartitionSettings(seen_ids=SeenLimits(run_ids=8, fan_out=2, chunk_ids=2, step_ids=2)),
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window_ms=WINDOW_MS,
    )
    for number in range(10):
        queue.send(named(f"a{number}"), named(f"b{number}"))
        queue.wait(RESTED_MS)
    assert stored(queue) == (4, 16)
    queue.wait(WINDOW_MS - 10 * RESTED_MS)
    assert stored(queue) == (4, 16)
    queue.now_ms += 10 * RESTED_MS + PURGE_EVERY_MS
    queue.partition.advance(queue.now_ms)
    queue.partition.commit()
    assert 0 < sum(stored(queue)) < 20
    queue.wait(RESTED_MS)
    assert stored(queue) == (0, 0)
    assert queue.partition.next_timer_ms() is None


def test_an_id_that_came_again_after_its_window_is_kept_for_a_new_one(queue):
    queue.send(named("1"))
    queue.wait(WINDOW_MS)
    queue.send(named("1"))
    assert stored(queue) == (2, 0)
    queue.wait(PURGE_EVERY_MS)
    assert stored(queue) == (1, 0)
    queue.send(named("1"))
    assert len(queue.bodies()) == 2


def test_without_it_nothing_is_kept():
    queue = Driver()
    queue.send(named("1"), named("1"))
    assert len(queue.bodies()) == 2
    assert stored(queue) == (0, 0)


def test_an_unreadable_id_does_not_lose_a_message(queue):
    queue.send(named("1"))
    [(key, value)] = queue.store.scan(Table.DUPLICATE_LOG, b"\0", b"\xff" * 32, 10)
    queue.store.put(Table.DUPLICATE_LOG, key, value[:-1] + b"?")
    queue.store.commit()
    queue.restart()
    queue.send(named("1"))
    assert len(queue.bodies()) == 2
    queue.send(named("1"))
    assert len(queue.bodies()) == 2
    assert queue.store.get(Table.QUARANTINE, quarantine_key(Table.DUPLICATE_LOG, key)) is not None


def test_deleting_the_entity_frees_its_ids(queue):
    for number in range(5):
        queue.send(named(str(number)))
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    queue.store.delete(Table.ENTITIES, entity_key(ENTITY))
    queue.partition.commit()
    queue.wait(PURGE_EVERY_MS)
    assert stored(queue) == (0, 0)


def test_at_a_topic_a_duplicate_goes_to_no_subscription():
    topic = TopicDriver(A, B, requires_duplicate_detection=True, duplicate_detection_history_time_window_ms=WINDOW_MS)
    topic.send(named("1", "a"), named("1", "b"), queue=TOPIC)
    topic.send(named("1", "c"), named("2", "d", scheduled_ms=topic.now_ms + 100), queue=TOPIC)
    topic.send(named("2", "e"), queue=TOPIC)
    topic.wait(100)
    assert topic.bodies(A) == topic.bodies(B) == ["a", "d"]
    assert duplicates(topic, TOPIC) == 3
    topic.restart()
    topic.send(named("2", "f"), queue=TOPIC)
    assert topic.bodies(A) == ["a", "d"]


def test_at_a_topic_one_that_no_subscription_took_is_known():
    topic = TopicDriver(requires_duplicate_detection=True, duplicate_detection_history_time_window_ms=WINDOW_MS)
    topic.send(named("1"), queue=TOPIC)
    topic.send(named("1"), queue=TOPIC)
    assert duplicates(topic, TOPIC) == 1
