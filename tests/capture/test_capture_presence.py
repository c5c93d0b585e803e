"""Replayed rows, against a model that moves messages between dicts and writes the rows down while it does."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.capture.place import Place
from storage.capture.presence import MessageKey, PlaceName, Replay, present_at, together
from storage.capture.reading import Captured
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.journal.schema import SCHEMA
from tests.capture.synthetic_rows import BEGIN, EPOCH

ENTITIES = {"orders": 0, "invoices": 0, "archive": 1}  # and their partitions


class Model:
    """Messages by queue. Each operation is a turn; what was there after it is kept."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], dict[int, dict[str, object]]] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        self.rows: dict[int, list[dict[str, object]]] = {0: [], 1: []}
        self.now = BEGIN
        self.history: list[tuple[datetime, set[tuple[object, ...]]]] = [(BEGIN - timedelta(hours=1), set())]
        self.bodies = 0

    def turn(self, operation: str, entity: str, sub_queue: str, choice: int) -> None:
        self.now += timedelta(milliseconds=1)
        queue = self.queues.setdefault((entity, sub_queue), {})
        if operation in ("enqueued", "scheduled"):
            self.bodies += 1
            place = "scheduled" if operation == "scheduled" else "available"
            record = b"body %d" % self.bodies
            self.enter(operation, entity, "active", {"place": place, "count": 0, "record": record}, record=record)
        elif queue:
            number = sorted(queue)[choice % len(queue)]
            getattr(self, operation)(entity, sub_queue, number, queue[number])
        now: set[tuple[object, ...]] = {
            (ENTITIES[entity], MessageKey(entity, part, number), each["place"], each["count"], each["record"])
            for (entity, part), found in self.queues.items()
            for number, each in found.items()
        }
        self.history.append((self.now, now))

    def row(self, op: str, entity: str, sub_queue: str, number: int | None, **more: object) -> None:
        rows = self.rows[ENTITIES[entity]]
        what = {"entity": entity, "subQueue": sub_queue, "sequenceNumber": number, "op": op, "eventTime": self.now}
        where = {"partition": ENTITIES[entity], "journalOffset": len(rows)}
        rows.append({**dict.fromkeys(SCHEMA.names), **where, **what, **more})

    def enter(self, op: str, entity: str, sub_queue: str, message: dict[str, object], **more: object) -> None:
        number = self.numbers[entity, sub_queue] = self.numbers.get((entity, sub_queue), 0) + 1
        self.queues.setdefault((entity, sub_queue), {})[number] = message
        self.row(op, entity, sub_queue, number, deliveryCount=message["count"], **more)

    def leave(self, op: str, entity: str, sub_queue: str, number: int) -> dict[str, object]:
        self.row(op, entity, sub_queue, number)
        return self.queues[entity, sub_queue].pop(number)

    def completed(self, entity, sub_queue, number, message) -> None:
        self.leave("completed", entity, sub_queue, number)

    def purged(self, entity, sub_queue, number, message) -> None:
        self.leave("purged", entity, sub_queue, number)

    def delivered(self, entity, sub_queue, number, message) -> None:
        self.row("delivered", entity, sub_queue, number, deliveryCount=message["count"])

    def abandoned(self, entity, sub_queue, number, message) -> None:
        message["count"] += 1
        self.row("abandoned", entity, sub_queue, number, deliveryCount=message["count"])

    def lockExpired(self, entity, sub_queue, number, message) -> None:  # noqa: N802
        self.row("lockExpired", entity, sub_queue, number)

    def deferred(self, entity, sub_queue, number, message) -> None:
        message["place"] = "deferred"
        self.row("deferred", entity, sub_queue, number)

    def returned(self, entity, sub_queue, number, message) -> None:
        message["place"] = "available"
        self.row("returned", entity, sub_queue, number)

    def deadlettered(self, entity, sub_queue, number, message) -> None:
        self.leave("deadlettered", entity, sub_queue, number)
        message = {**message, "place": "available"}
        self.enter("enqueued", entity, "deadletter", message, **origin(entity, sub_queue, number))

    def activated(self, entity, sub_queue, number, message) -> None:
        self.leave("activated", entity, sub_queue, number)
        message = {**message, "place": "available"}
        self.enter("enqueued", entity, "active", message, **origin(entity, sub_queue, number))

    def forwarded(self, entity, sub_queue, number, message) -> None:
        """To another partition: it is stored there first, a millisecond earlier."""
        message = {**message, "place": "available"}
        more = {"record": message["record"], "reason": "forwarded", **origin(entity, sub_queue, number)}
        if ENTITIES[entity] == 1:
            return
        self.enter("enqueued", "archive", "active", message, **more)
        self.now += timedelta(milliseconds=1)
        self.leave("forwarded", entity, sub_queue, number)


def origin(entity: str, sub_queue: str, number: int) -> dict[str, object]:
    return {"originEntity": entity, "originSubQueue": sub_queue, "originSequenceNumber": number}


OPERATIONS = (
    "enqueued", "scheduled", "completed", "purged", "delivered", "abandoned", "lockExpired", "deferred", "returned",
    "deadlettered", "activated", "forwarded",
)  # fmt: skip
turns = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS), st.sampled_from(list(ENTITIES)), st.sampled_from(["active", "deadletter"]),
        st.integers(0, 20),
    ),
    max_size=60,
)  # fmt: skip


def as_set(found) -> set[tuple[object, ...]]:
    return {
        (partition, each.key, each.place, each.delivery_count, each.record)
        for partition, messages in found.messages.items()
        for each in messages
    }


@settings(deadline=None, max_examples=200)
@given(turns=turns, data=st.data())
def test_what_is_replayed_is_what_was_there(turns, data):
    model = Model()
    for turn in turns:
        model.turn(*turn)
    time, expected = model.history[data.draw(st.integers(0, len(model.history) - 1))]
    replays = {}
    for partition, rows in model.rows.items():
        replay = replays[partition] = Replay(time)
        first = 0
        while first < len(rows):
            end = data.draw(st.integers(first + 1, len(rows)))
            replay.add(pa.RecordBatch.from_pylist(rows[first:end], SCHEMA))
            first = end
    found = together(replays)
    assert as_set(found) == expected
    assert found.unknown == 0


def test_between_its_two_rows_a_forwarded_message_is_at_its_destination_alone():
    model = Model()
    model.turn("enqueued", "orders", "active", 0)
    model.turn("forwarded", "orders", "active", 0)
    between = model.now - timedelta(milliseconds=1)
    replays = {partition: Replay(between) for partition in model.rows}
    for partition, rows in model.rows.items():
        replays[partition].add(pa.RecordBatch.from_pylist(rows, SCHEMA))
    assert MessageKey("orders", "active", 1) in replays[0].present
    [(where, key, *_)] = as_set(together(replays))
    assert (where, key) == (1, MessageKey("archive", "active", 1))


def test_captured_rows_are_replayed_and_what_is_missing_is_named(tmp_path):
    model = Model()
    for turn in range(40):
        model.turn("enqueued", "orders", "active", 0)
        if turn % 4 == 0:
            model.turn("deadlettered", "orders", "active", turn)
    time, expected = model.history[30]
    rows = model.rows[0]
    with CaptureWriter(Place.of(str(tmp_path)), "sample", CaptureOptions()) as writer:
        writer.add(0, EPOCH, pa.RecordBatch.from_pylist(rows, SCHEMA))
        writer.add(1, EPOCH, pa.RecordBatch.from_pylist([{**rows[7], "partition": 1}], SCHEMA))
        writer.roll()
    found = present_at(Captured(Place.of(str(tmp_path))), time)
    assert {each for each in as_set(found) if each[0] == 0} == expected
    assert [tuple(each) for each in found.missing] == [(1, EPOCH, 0, 7)]
    assert not present_at(Captured(Place.of(str(tmp_path))), datetime(2000, 1, 1, tzinfo=UTC)).messages


def test_rows_about_messages_that_nobody_saw_come_are_counted():
    model = Model()
    for _ in range(3):
        model.turn("enqueued", "orders", "active", 0)
    model.turn("completed", "orders", "active", 0)
    model.turn("deferred", "orders", "active", 1)
    replay = Replay(model.now)
    replay.add(pa.RecordBatch.from_pylist(model.rows[0][1:], SCHEMA))
    assert replay.unknown == 1
    assert [(each.key.sequence_number, each.place) for each in replay.present.values()] == [
        (2, PlaceName.AVAILABLE),
        (3, PlaceName.DEFERRED),
    ]
