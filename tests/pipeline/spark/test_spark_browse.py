"""Browsing queues of a real broker."""

import asyncio
import datetime

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import functions as f
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, IsNotNull, LessThan, LessThanOrEqual

from protocol.client.connection import connect_to
from protocol.client.messages import Message, value_section
from protocol.codec import Timestamp, ULong
from pyspark_peeklock.browse import NumberRange, number_bounds, split
from tests.patience import PATIENCE_S
from tests.pipeline.spark.taking import take_all

FAR = 4_102_444_800_000  # 2100


def browse(spark, secret, entity, schema=None, **options):
    reader = spark.read.format("peeklock").option("connectionStringFile", str(secret)).option("entity", entity)
    for name, value in options.items():
        reader = reader.option(name, value)
    return (reader.schema(schema) if schema else reader).load()


def send(broker, address, *messages):
    async def work():
        async with await connect_to(broker.connection_string) as connection:
            sender = await connection.sender(address)
            await sender.send_all(each.encode() for each in messages)

    asyncio.run(work())


def test_an_empty_queue_has_no_rows(spark, broker, secret):
    assert browse(spark, secret, "plain").collect() == []


def test_all_that_a_message_says_is_there_and_stays_there(spark, broker, secret):
    messages = [
        Message.of(
            b"\x00\xff",
            message_id="1",
            subject="s",
            reply_to="r",
            correlation_id="c",
            content_type="t",
            ttl_ms=3_600_000,
            annotations={"x-opt-partition-key": "k"},
            application_properties={"text": "ü", "number": 5, "truth": True, "none": None, "bytes": b"\x01"},
        ),
        Message(value_section("text"), message_id=ULong(7)),
        Message(value_section({"a": 1}), annotations={"x-opt-scheduled-enqueue-time": Timestamp(FAR)}),
    ]
    send(broker, "plain", *messages)
    try:
        first, second, third = browse(spark, secret, "plain").orderBy("sequenceNumber").collect()
        browse(spark, secret, "plain").collect()
    finally:
        assert len(take_all(broker, "plain", 2)) == 2
    assert (first.namespace, first.entity, first.subQueue, first.partition) == ("localhost", "plain", "active", 0)
    assert (bytes(first.body), first.bodySize, first.state, first.deliveryCount) == (b"\x00\xff", 2, "active", 0)
    assert (first.messageId, first.subject, first.replyTo) == ("1", "s", "r")
    assert (first.correlationId, first.contentType, first.partitionKey) == ("c", "t", "k")
    properties = {"text": "ü", "number": "5", "truth": "true", "none": None, "bytes": "01"}
    assert first.applicationProperties == properties
    assert first.expiresAt - first.enqueuedTime == datetime.timedelta(hours=1)
    assert (first.op, first.journalOffset, first.amqpMessage) == (None, None, None)
    assert (bytes(second.body), second.messageId, second.applicationProperties) == (b"text", "7", {})
    assert (third.state, third.body, third.scheduledTime.year) == ("scheduled", None, 2100)


def test_a_schema_chooses_columns(spark, broker, secret):
    send(broker, "other", Message.of(b"1", message_id="a"))
    found = browse(spark, secret, "other", "messageId string, body binary", includeBody="false").collect()
    assert [each.asDict() for each in found] == [{"messageId": "a", "body": None}]
    [row] = browse(spark, secret, "other", "amqpMessage binary", includeAmqpMessage="true").collect()
    assert Message.decode(bytes(row.amqpMessage)).content() == b"1"
    take_all(broker, "other", 1)
    with pytest.raises(Exception, match="column 'body' is binary, not string"):
        browse(spark, secret, "other", "body string").collect()
    with pytest.raises(Exception, match="there is no column 'bdy'"):
        browse(spark, secret, "other", "bdy binary").collect()


def test_a_dead_letter_queue_has_its_reasons(spark, broker, secret):
    async def dead_letter():
        async with await connect_to(broker.connection_string) as connection:
            receiver = await connection.receiver("failing", credit=1)
            received = await receiver.receive(PATIENCE_S)
            assert received is not None
            await receiver.reject(received, "Why", "because")

    send(broker, "failing", Message.of(b"1"))
    asyncio.run(dead_letter())
    [row] = browse(spark, secret, "failing", subQueue="deadletter").collect()
    assert (row.subQueue, row.deadLetterReason, row.deadLetterDescription) == ("deadletter", "Why", "because")
    take_all(broker, "failing/$deadletterqueue", 1)


def test_a_subscription_is_browsed(spark, broker, secret):
    send(broker, "news", Message.of(b"1"), Message.of(b"2"))
    found = browse(spark, secret, "news/subscriptions/all").orderBy("sequenceNumber").collect()
    assert [bytes(each.body) for each in found] == [b"1", b"2"]
    take_all(broker, "news/subscriptions/all", 2)


def test_partitions_are_read_by_a_task_each_and_split_on_demand(spark, broker, secret):
    send(broker, "spread", *(Message.of(b"x" * 1000, message_id=str(n), group_id=None) for n in range(2000)))
    try:
        frame = browse(spark, secret, "spread")
        assert frame.rdd.getNumPartitions() == 2
        found = frame.select("messageId", "partition", f.spark_partition_id().alias("task")).collect()
        assert sorted(int(each.messageId) for each in found) == list(range(2000))
        assert len({(each.partition, each.task) for each in found}) == 2
        more = browse(spark, secret, "spread", minPartitions="7")
        assert more.rdd.getNumPartitions() in (7, 8)
        assert sorted(int(each.messageId) for each in more.select("messageId").collect()) == list(range(2000))
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        try:
            whole = browse(spark, secret, "spread", filterPushdown="true")
            pushed = whole.where("partition = 1")
            assert pushed.rdd.getNumPartitions() == 1
            assert pushed.count() == sum(each.partition == 1 for each in found)
            numbers = sorted(each.sequenceNumber for each in frame.select("sequenceNumber").collect())
            assert whole.where(f"sequenceNumber > {numbers[5]} and messageId is not null").count() == 1994
        finally:
            spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    finally:
        take_all(broker, "spread", 2000)


def test_an_entity_that_is_not_there_is_named(spark, broker, secret):
    with pytest.raises(Exception, match="nowhere"):
        browse(spark, secret, "nowhere").collect()
    with pytest.raises(Exception, match="option 'subQueue' may be active or deadletter"):
        browse(spark, secret, "plain", subQueue="dead").collect()


@pytest.mark.parametrize("least", [1, 2, 3, 10, 1000])
def test_split_ranges_cover_the_same_numbers(least):
    ranges = [NumberRange(5, 5), NumberRange(1 << 48, (1 << 48) + 99), NumberRange((1 << 63) - 3, (1 << 63) - 1)]
    parts = split(ranges, least)
    numbers = [number for each in parts for number in range(each.first, each.last + 1)]
    assert numbers == [number for each in ranges for number in range(each.first, each.last + 1)]
    assert len(parts) >= min(least, 104)


def test_conditions_on_numbers_are_bounds():
    number, partition, top = ("sequenceNumber",), ("partition",), (1 << 63) - 1
    assert number_bounds(EqualTo(number, 5)) == (5, 5)
    assert number_bounds(GreaterThan(number, 5)) == (6, top)
    assert number_bounds(GreaterThanOrEqual(number, 5)) == (5, top)
    assert number_bounds(LessThan(number, 5)) == (0, 4)
    assert number_bounds(LessThanOrEqual(number, 5)) == (0, 5)
    assert number_bounds(EqualTo(partition, 1)) == (1 << 48, (2 << 48) - 1)
    assert number_bounds(GreaterThan(partition, 0)) == (1 << 48, top)
    assert number_bounds(EqualTo(("messageId",), 5)) is None
    assert number_bounds(IsNotNull(number)) is None
