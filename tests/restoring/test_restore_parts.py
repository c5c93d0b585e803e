"""A part of a capture is restored: entities, or a time."""

from typing import Any

import msgpack
import pytest

from broker.namespace.entities import QueueDescription, SubscriptionDescription, TopicDescription
from storage.lmdb_store import LmdbStore
from storage.maintenance import verify
from storage.records import Field, Place
from storage.store import Table
from tests.capture.synthetic_rows import BEGIN
from tests.restoring.test_restore_command import restore
from tests.restoring.written import Written, at, define

ALL = (b"", b"\xff" * 16, 1 << 20)
ENTITIES = (
    QueueDescription(name="orders", forward_dead_lettered_messages_to="Mistakes"),
    QueueDescription(name="mistakes"),
    TopicDescription(name="prices"),
    SubscriptionDescription(topic="prices", name="red"),
    QueueDescription(name="talks", requires_session=True),
)


def shown(told: str) -> list[str]:
    """What it says of messages."""
    return [line.strip() for line in told.splitlines() if line.startswith("  ")]


def captured(tmp_path, written: Written) -> None:
    written.write(tmp_path / "captured")
    define(tmp_path / "captured", *ENTITIES)


def everything() -> Written:
    written = Written()
    for number in range(1, 4):
        written.sent(number)
        written.sent(number, entity="Mistakes")
        written.sent(number, entity="prices/subscriptions/red")
    written.row("stateSet", entity="talks", subQueue="active", sessionId="a", record=b"state")
    written.row("completed", 2)
    return written


def test_only_these_entities_with_what_belongs_to_them(tmp_path):
    captured(tmp_path, everything())
    told = restore(tmp_path, "--entity", "Prices", "--entity", "talks")
    assert shown(told) == ["prices/subscriptions/red, active: 3"]
    assert "definitions of 3 entities" in told
    assert "1 state of a session and" in told
    assert verify(tmp_path / "data").ok
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        assert len(store.scan(Table.ENTITIES, *ALL)) == 3
        assert len(store.scan(Table.QUEUE, *ALL)) == 3


def test_states_of_sessions_of_other_entities_are_left_out(tmp_path):
    captured(tmp_path, everything())
    told = restore(tmp_path, "--entity", "mistakes")
    assert shown(told) == ["mistakes, active: 3"]
    assert "0 states of sessions" in told


def test_an_entity_that_is_not_there_or_forwards_to_one_that_was_not_asked_for(tmp_path):
    captured(tmp_path, everything())
    assert "has no queue or topic 'order'" in restore(tmp_path, "--entity", "order", code=1)
    assert "has no queue or topic 'prices/subscriptions/red'" in restore(
        tmp_path, "--entity", "prices/subscriptions/red", code=1
    )
    assert "orders forwards to Mistakes: restore that with --entity, too" in restore(
        tmp_path, "--entity", "orders", code=1
    )
    assert not (tmp_path / "data").exists()
    assert shown(restore(tmp_path, "--entity", "orders", "--entity", "mistakes")) == [
        "mistakes, active: 3",
        "orders, active: 2",
    ]


def test_what_is_missing_of_other_entities_does_not_matter(tmp_path):
    written = everything()
    written.sent(9, entity="lost")
    written.row("completed", 77, entity="talks")
    captured(tmp_path, written)
    assert "lost (active): the 8 messages" in restore(tmp_path, code=1)
    restore(tmp_path, "--entity", "mistakes")


def test_the_record_of_a_message_that_came_from_an_entity_that_was_not_asked_for(tmp_path):
    """The row of the message that was forwarded has the record, the one of the message that was asked for has not."""
    written = Written()
    written.sent(1)
    written.sent(2)
    origin: dict[str, Any] = {"originEntity": "orders", "originSubQueue": "active"}
    for number, rest in ((1, []), (2, ["completed"])):
        written.row(
            "enqueued", number, entity="mistakes", reason="forwarded", originSequenceNumber=number,
            enqueuedTime=at(written.second), **origin,
        )  # fmt: skip
        written.row("forwarded", number)
        for op in rest:
            written.row(op, number, entity="mistakes")
    captured(tmp_path, written)
    told = restore(tmp_path, "--entity", "mistakes")
    assert shown(told) == ["mistakes, active: 1"]
    assert verify(tmp_path / "data").ok


def test_a_message_that_had_not_left_for_one_that_was_asked_for_is_not_restored_where_it_was(tmp_path):
    written = Written()
    written.sent(1)
    written.row(
        "enqueued", 1, entity="mistakes", reason="forwarded", originSequenceNumber=1, originEntity="orders",
        originSubQueue="active",
    )  # fmt: skip
    captured(tmp_path, written)
    assert shown(restore(tmp_path, "--entity", "mistakes")) == ["mistakes, active: 1"]


def timed() -> Written:
    """Of each second a message, with the time at which it was enqueued."""
    written = Written()
    for number in range(1, 7):
        written.sent(number, enqueuedTime=at(written.second))
    written.row("completed", 2)
    written.row("abandoned", 3, deliveryCount=1)
    written.row("completed", 5)
    return written


@pytest.mark.parametrize(
    ("since", "until", "numbers"),
    [(0, 9, [1, 3, 4, 6]), (2, 9, [3, 4, 6]), (1, 3, [2, 3, 4]), (2, 6, [3, 4, 5, 6]), (5, 5, [6]), (4, 9, [6])],
)
def test_messages_enqueued_between_two_times_that_had_not_ended_at_the_later_one(tmp_path, since, until, numbers):
    captured(tmp_path, timed())
    told = restore(tmp_path, "--since", at(since).isoformat(), "--until", at(until).isoformat())
    assert shown(told) == [f"orders, active: {len(numbers)}"]
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        assert [int.from_bytes(key[-8:], "big") for key, _ in store.scan(Table.QUEUE, *ALL)] == numbers


def test_a_scheduled_message_counts_when_it_was_sent_and_a_dead_letter_when_it_was_enqueued_first(tmp_path):
    written = Written()
    for number, second in ((1, 0), (2, 1)):
        assert written.second == second
        values: dict[str, Any] = {"enqueuedTime": at(1000), "scheduledTime": at(1000)}
        written.sent(number, entity="mistakes", **values)
        written.rows[0][-1]["op"] = "scheduled"
    written.sent(1, enqueuedTime=at(2))
    written.row(
        "enqueued", 1, subQueue="deadletter", reason="deadlettered", originEntity="orders", originSubQueue="active",
        originSequenceNumber=1, enqueuedTime=at(2), overlay=msgpack.packb({Field.PROPERTIES: {}}),
    )  # fmt: skip
    written.row("deadlettered", 1, reason="bad")
    captured(tmp_path, written)
    assert shown(restore(tmp_path, "--since", at(1).isoformat())) == ["mistakes, scheduled: 1", "orders, deadletter: 1"]
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        places = [key[4] for key, _ in store.scan(Table.QUEUE, *ALL)]
        assert Place.SCHEDULED in places
    (tmp_path / "data").rename(tmp_path / "before")
    assert shown(restore(tmp_path, "--since", at(3).isoformat())) == []


def test_what_is_missing_before_the_time_does_not_matter(tmp_path):
    written = timed()
    for row in written.rows[0]:
        row["sequenceNumber"] += 5
    written.write(tmp_path / "captured", first=1)
    define(tmp_path / "captured", *ENTITIES)
    error = restore(tmp_path, code=1)
    assert "the 6 messages with numbers below 7 were there before" in error
    assert "the offsets 0 to 0 are not captured" in error
    assert "the 6 messages" in restore(tmp_path, "--since", BEGIN.isoformat(), code=1)
    restore(tmp_path, "--since", at(1).isoformat())


def test_a_time_that_is_later_than_the_end_is_wrong_use(tmp_path):
    captured(tmp_path, timed())
    options = ("--since", at(3).isoformat(), "--until", at(2).isoformat())
    assert "is later than --until" in restore(tmp_path, *options, code=2)
    assert "no time with a time zone" in restore(tmp_path, "--since", "yesterday", code=2)
