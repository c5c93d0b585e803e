"""Whole messages from the journal into another queue, and rows that make no message. A real broker, no Java."""

import asyncio
import logging
import time

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import msgpack
from pyspark.sql.types import StructType

from protocol.client.connection import connect_to
from protocol.client.messages import Message, value_section
from protocol.codec import Float, Symbol, Timestamp, UInt, ULong
from protocol.message.intake import take_apart
from pyspark_peeklock import whole
from pyspark_peeklock.browse import BrowseReader
from pyspark_peeklock.errors import BrowseFailed, JournalRefused, SendFailed, UnfitRow
from pyspark_peeklock.identity import Identities
from pyspark_peeklock.journal import JournalReader
from pyspark_peeklock.options import BrowseOptions, JournalOptions, Options, SinkOptions
from pyspark_peeklock.rows import SCHEMA
from pyspark_peeklock.sending import send_rows
from storage import records as stored
from tests.brokers import Broker
from tests.patience import eventually
from tests.pipeline.spark.faulty_journal import record_of
from tests.pipeline.spark.taking import take_all

CONFIG = """
[[queues]]
name = "orders"
[[queues]]
name = "copies"
[[queues]]
name = "bad"
max_message_size_kb = 2
[journal]
mode = "bodies"
"""
TYPED = {
    "s": "text", "u": UInt(5), "l": ULong(1 << 63), "f": Float(0.5), "t": Timestamp(1_700_000_000_000), "b": b"\x00",
    "y": Symbol("symbol"), "n": None, "yes": True,
}  # fmt: skip
MESSAGES = [
    Message.of(
        b"one", message_id=ULong(7), user_id=b"me", to="there", subject="s", reply_to="r", correlation_id="c",
        content_type="text/plain", content_encoding="gzip", group_id="g", reply_to_group_id="rg", priority=9,
        ttl_ms=3_600_000, annotations={"x-mine": UInt(3), "x-opt-partition-key": "g"}, application_properties=TYPED,
    ),
    Message(value_section(42), message_id="number"),
    Message(value_section([1, "two"]), message_id="list"),
    Message.of(b"x" * 70_000, message_id="large"),
]  # fmt: skip
KEPT = (
    "priority", "ttl_ms", "message_id", "user_id", "to", "subject", "reply_to", "correlation_id", "content_type",
    "content_encoding", "group_id", "reply_to_group_id", "application_properties",
)  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    with Broker(directory, CONFIG) as broker:
        (directory / "secret").write_text(broker.connection_string)
        yield broker


def options(broker, **more):
    return Options({"connectionStringFile": str(broker.directory / "secret"), **more})


def send(broker, batches, **more):
    return asyncio.run(send_rows(iter(batches), SinkOptions.of(options(broker, **more)), Identities(None)))


def test_a_message_is_in_another_queue_as_it_was(broker):
    async def fill():
        async with await connect_to(broker.connection_string) as connection:
            await (await connection.sender("orders")).send_all(each.encode() for each in MESSAGES)

    asyncio.run(fill())
    names = ["amqpMessage", "partition", "journalOffset"]
    given = options(
        broker, httpEndpoint=f"http://localhost:{broker.http_port}", entity="orders", includeAmqpMessage="true"
    )
    reader = JournalReader(JournalOptions.of(given, is_stream=False), StructType([SCHEMA[name] for name in names]))

    def rows():
        return [
            dict(zip(names, batch.columns, strict=True)) for task in reader.partitions() for batch in reader.read(task)
        ]

    eventually(lambda: sum(len(each["amqpMessage"]) for each in rows()) == len(MESSAGES), "they are in the journal")
    counts = send(broker, rows(), entity="copies", sendAmqpMessage="true")
    assert (counts.messages, counts.bad) == (len(MESSAGES), 0)
    copies = {str(each.message_id): each for each in take_all(broker, "copies", len(MESSAGES))}
    for original in take_all(broker, "orders", len(MESSAGES)):
        copy = copies[str(original.message_id)]
        assert copy.body == original.body
        for name in KEPT:
            assert repr(getattr(copy, name)) == repr(getattr(original, name)), name
            assert type(getattr(copy, name)) is type(getattr(original, name)), name
        for name in ("x-mine", "x-opt-partition-key"):
            assert repr(copy.annotations.get(name)) == repr(original.annotations.get(name))
    first = copies["7"]
    assert [type(value) for value in first.application_properties.values()] == [type(each) for each in TYPED.values()]
    assert (first.priority, first.ttl_ms, first.annotations["x-mine"]) == (9, 3_600_000, 3)
    assert first.absolute_expiry_ms > time.time() * 1000
    assert copies["number"].content() == 42


BAD = {
    "messageId": pa.array(["1", "2", "3", "4", "5"]),
    "body": pa.array([b"one", None, b"three", b"x" * 3000, b"five"]),
    "contentType": pa.array(["\u00fc", None, None, "\u00fc", None]),
    "namespace": pa.array(["ns"] * 5),
    "entity": pa.array(["orders"] * 5),
    "partition": pa.array([3] * 5, pa.int32()),
    "journalOffset": pa.array([10, 11, 12, 13, 14]),
}


def test_a_row_that_does_not_fit_fails_its_task_and_is_named_with_its_place(broker):
    with pytest.raises(UnfitRow, match="row 0 of this task, partition 3, journalOffset 10: column 'contentType'"):
        send(broker, [dict(BAD)], entity="copies")
    assert take_all(broker, "copies") == []
    column = {"amqpMessage": pa.array([None], pa.binary()), "journalOffset": pa.array([17])}
    with pytest.raises(UnfitRow, match="row 0 of this task, journalOffset 17: column 'amqpMessage' is null"):
        send(broker, [column], entity="copies", sendAmqpMessage="true")


def test_rows_that_do_not_fit_are_left_out_and_counted(broker, caplog):
    with caplog.at_level(logging.WARNING):
        counts = send(broker, [dict(BAD), dict(BAD)], entity="copies", onBadRow="skip")
    assert (counts.messages, counts.bad) == (4, 6)
    assert sorted(each.content() for each in take_all(broker, "copies", 4)) == [b"five", b"five", b"three", b"three"]
    assert "bad row: row 1 of this task, partition 3, journalOffset 11: column 'body' is null" in caplog.text


def test_rows_that_do_not_fit_are_in_a_queue_of_their_own(broker):
    targets = {"targetEntity": pa.array(["copies", "copies", "copies", "copies", None])}
    counts = send(broker, [BAD | targets], onBadRow="queue", badRowEntity="bad")
    assert (counts.messages, counts.bad) == (1 + 4, 4)
    assert [each.content() for each in take_all(broker, "copies", 1)] == [b"three"]
    found = {each.application_properties["journalOffset"]: each for each in take_all(broker, "bad", 4)}
    assert [found[offset].content() for offset in (10, 11, 13, 14)] == [b"one", b"", b"", b"five"]
    properties = found[13].application_properties
    assert (properties["badRowColumn"], properties["badRowBodyBytes"]) == ("contentType", 3000)
    assert (properties["partition"], properties["namespace"]) == (3, "ns")
    assert "is not of ASCII" in properties["badRowReason"]
    assert found[14].application_properties["badRowColumn"] == "targetEntity"
    ids = {offset: each.message_id for offset, each in found.items()}
    assert len(set(ids.values())) == 4
    again = BAD | targets
    send(broker, [{name: column.slice(1) for name, column in again.items()}], onBadRow="queue", badRowEntity="bad")
    take_all(broker, "copies", 1)
    later = {each.application_properties["journalOffset"]: each.message_id for each in take_all(broker, "bad", 3)}
    assert later == {offset: ids[offset] for offset in (11, 13, 14)}, "duplicates can be detected by their ids"


@pytest.mark.parametrize("address", ["x" * 300, "a\tb"])
def test_an_address_that_is_none_is_named(broker, address):
    columns = {"messageId": pa.array(["1"]), "body": pa.array([b"x"])}
    with pytest.raises(SendFailed, match=f"'{address}': .*(260 characters|control characters).*; 0 rows of this task"):
        send(broker, [columns], entity=address)
    with pytest.raises(BrowseFailed, match=f"'{address}': .*(260 characters|control characters)"):
        BrowseReader(BrowseOptions.of(options(broker, entity=address)), SCHEMA).partitions()


def test_a_message_too_large_for_its_target_is_a_bad_row(broker):
    columns = {"messageId": pa.array(["1", "2"]), "body": pa.array([b"x" * 3000, b"small"])}
    counts = send(broker, [columns], entity="bad", onBadRow="skip")
    assert (counts.messages, counts.bad) == (1, 1)
    assert [each.content() for each in take_all(broker, "bad", 1)] == [b"small"]


# --- records ----------------------------------------------------------------------------------------------------------


def batch_of(rows):
    names = sorted(whole.NEEDED)
    kinds = {"record": pa.binary(), "overlay": pa.binary(), "sequenceNumber": pa.int64(), "deliveryCount": pa.int32()}
    return pa.RecordBatch.from_arrays([pa.array([row.get(name) for row in rows], kinds[name]) for name in names], names)


def test_fields_of_overlays_have_the_numbers_of_the_store():
    assert {each.name: each.value for each in whole.Field}.items() <= {
        each.name: each.value for each in stored.Field
    }.items()
    assert whole._NEVER == stored.NEVER


def test_changes_since_a_message_was_sent_are_in_it():
    record = record_of(Message.of(b"body", message_id="1", subject="old", application_properties={"a": 1, "b": "x"}))
    overlay = {
        stored.Field.ENQUEUED_MS: 5000,
        stored.Field.EXPIRES_MS: 65_000,
        stored.Field.PROPERTIES: {"b": None, "DeadLetterReason": "why"},
        stored.Field.SYSTEM: {3: b"\xa1\x03new"},
        stored.Field.DEAD_LETTER_SOURCE: "orders",
        stored.Field.HOPS: 2,
    }
    rows = [
        {"record": record, "overlay": msgpack.packb(overlay), "sequenceNumber": 9, "deliveryCount": 3},
        {"record": record},
        {"overlay": msgpack.packb(overlay)},
        {"record": b"state of a session"},
    ]
    changed, plain, without, state = whole.messages_of(batch_of(rows), [3]).to_pylist()
    message = Message.decode(changed)
    assert (message.subject, message.ttl_ms, message.delivery_count, message.sequence_number) == ("new", 60_000, 3, 9)
    assert message.application_properties == {"a": 1, "DeadLetterReason": "why"}
    assert message.annotations["x-opt-deadletter-source"] == "orders"
    assert Message.decode(plain).subject == "old"
    assert (without, state) == (None, None)
    with pytest.raises(JournalRefused, match="a stored record cannot be read"):
        whole.messages_of(batch_of([{"record": record[:30], "overlay": msgpack.packb({4: {"a": "b"}})}]))


def test_both_ways_make_the_same_message(monkeypatch):
    made = []
    for each in MESSAGES:
        layout, body, ttl_ms, _ = take_apart(each.encode())
        expires_ms = stored.NEVER if ttl_ms is None else 1000 + ttl_ms
        made.append(stored.encode_message(1000, expires_ms, layout, body))
    native = [whole.message_of(record, None, 5, 1) for record in made]
    monkeypatch.setattr(whole, "extension", None)
    assert [whole.message_of(record, None, 5, 1) for record in made] == native
    assert [Message.decode(each).ttl_ms for each in native] == [3_600_000, None, None, None]
