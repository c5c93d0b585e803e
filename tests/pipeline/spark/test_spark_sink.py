"""The sink against a real broker: what arrives, what is refused, and what happens when Spark or the broker fails."""

import datetime
import re
import threading
import time

import pytest
from pyspark.sql import functions as f
from taking import peek_count, take_all

from tests.brokers import Broker


def write(frame, secret, **options):
    writer = frame.write.format("peeklock").mode("append").option("connectionStringFile", str(secret))
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def test_all_columns_arrive(spark, broker, secret):
    due = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    frame = spark.createDataFrame(
        [
            (b"one", "1", "s", "subject", "to", "reply", "c", "text/plain", {"a": "b", "ü": "🐰"}, due, 60_000),
            (b"", "2", None, None, None, None, None, None, None, None, None),
        ],
        "body binary, messageId string, partitionKey string, subject string, to string, replyTo string, "
        "correlationId string, contentType string, applicationProperties map<string,string>, scheduledTime timestamp, "
        "timeToLiveMs bigint",
    )
    write(frame.coalesce(1), secret, entity="plain")
    first, second = take_all(broker, "plain", 2)
    assert (first.content(), first.message_id, first.subject, first.to) == (b"one", "1", "subject", "to")
    assert (first.reply_to, first.correlation_id, first.content_type) == ("reply", "c", "text/plain")
    assert first.application_properties == {"a": "b", "ü": "🐰"}
    assert first.annotations["x-opt-partition-key"] == "s"
    assert first.annotations["x-opt-scheduled-enqueue-time"] == due.timestamp() * 1000
    assert first.ttl_ms == 60_000
    assert (second.content(), second.message_id, second.subject, second.ttl_ms) == (b"", "2", None, None)
    assert second.application_properties == {}
    assert "x-opt-partition-key" not in second.annotations


def test_many_rows_arrive_once_and_in_their_order(spark, broker, secret):
    frame = spark.range(0, 25_000, numPartitions=2).select(
        f.col("id").cast("string").alias("body"),
        f.col("id").cast("string").alias("messageId"),
        f.spark_partition_id().cast("string").alias("subject"),
    )
    write(frame, secret, entity="plain")
    found = take_all(broker, "plain", 25_000)
    assert sorted(int(each.content()) for each in found) == list(range(25_000))
    for task in ("0", "1"):
        numbers = [int(each.content()) for each in found if each.subject == task]
        assert numbers == sorted(numbers)


def test_sessions_arrive_in_their_session(spark, broker, secret):
    frame = spark.range(6).select(
        f.lit("x").alias("body"), f.col("id").cast("string").alias("messageId"), (f.col("id") % 2).alias("sessionId")
    )
    write(frame.withColumn("sessionId", f.col("sessionId").cast("string")), secret, entity="talks")
    assert peek_count(broker, "talks") == 6


def test_a_column_chooses_the_entity(spark, broker, secret):
    frame = spark.createDataFrame(
        [("a", "1", "other"), ("b", "2", None), ("c", "3", "other")], "body string, messageId string, entity string"
    )
    write(frame.coalesce(1), secret, entity="plain")
    assert [each.content() for each in take_all(broker, "other", 2)] == [b"a", b"c"]
    assert [each.content() for each in take_all(broker, "plain", 1)] == [b"b"]


def test_what_is_written_again_is_dropped_by_its_position(spark, broker, secret):
    frame = spark.createDataFrame(
        [("ns", "from", 0, "e1", n // 2, f"{n}") for n in range(10)],
        "namespace string, entity string, partition int, epoch string, journalOffset bigint, body string",
    ).coalesce(1)
    write(frame, secret, entity="once")
    write(frame, secret, entity="once")
    found = take_all(broker, "once", 10)
    assert [each.content() for each in found] == [b"%d" % n for n in range(10)]
    assert [each.message_id for each in found[:3]] == ["ns/from/0@e1/0#0", "ns/from/0@e1/0#1", "ns/from/0@e1/1#0"]


def test_a_position_in_the_query_makes_ids_only_if_it_is_asked_for(spark, broker, secret):
    frame = spark.range(5, numPartitions=1).select(f.col("id").cast("string").alias("body"))
    with pytest.raises(Exception, match="idFromPosition=queryId/batch/partition/row"):
        write(frame, secret, entity="plain")
    write(frame, secret, entity="plain", idFromPosition="queryId/batch/partition/row")
    ids = [each.message_id.split("/") for each in take_all(broker, "plain", 5)]
    assert [each[1:] for each in ids] == [["0", "0", str(row)] for row in range(5)]


FINE = {"timeToLiveMs": "1L", "applicationProperties": "map('a', 'b')"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("cast(null as string) as body, '1' as messageId", "row 2 of this task: column 'body' is null"),
        ("'x' as body, cast(null as string) as messageId", "row 2 of this task: column 'messageId' is null"),
        ("'x' as body, repeat('ü', 129) as messageId", "column 'messageId' has more than 128 characters"),
        ("'x' as body, '1' as messageId, 'ü' as contentType", "column 'contentType' is not of ASCII"),
        ("'x' as body, '1' as messageId, 0L as timeToLiveMs", "column 'timeToLiveMs' is not from 1"),
        ("'x' as body, cast(unhex('80') as string) as messageId", "column 'messageId' is not of valid UTF-8"),
        ("'x' as body, '1' as messageId, map('a', repeat('x', 40000)) as applicationProperties", "more than 32768"),
        ("'x' as body, '1' as messageId, 's' as sessionId, 'k' as partitionKey", "'partitionKey' differs"),
        ("repeat('x', 2000) as body, '1' as messageId", "row 2 of this task: column 'body' makes a message of 2"),
    ],
)
def test_a_row_that_does_not_fit_is_named(spark, broker, secret, columns, message):
    names = re.findall(r" as (\w+)(?:,|$)", columns)
    fine = ", ".join(f"{FINE.get(name, repr('k'))} as {name}" for name in names)
    frame = spark.sql(" union all ".join([f"select {fine}"] * 2 + [f"select {columns}"]))
    with pytest.raises(Exception, match=message):
        write(frame.coalesce(1), secret, entity="small")
    take_all(broker, "small")


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("'x' as messageId", {}, "column 'body' is missing"),
        ("1 as body, 'x' as messageId", {}, "column 'body' must be binary or string, not int"),
        ("'x' as body, 'x' as mesageId", {}, "did you mean 'messageId'"),
        ("'x' as body, 'x' as messageId, map('a', 1) as applicationProperties", {}, "map<string,string>"),
        ("'x' as body, 'x' as messageId", {"entity": ""}, "where to"),
        ("'x' as body, 'x' as messageId", {"connectionString": "Endpoint=sb://x"}, "credentials are no option values"),
        ("'x' as body, 'x' as messageId", {"connectionStringFile": "/no/such"}, "/no/such: No such file"),
        ("'x' as body, 'x' as messageId", {"maxInFlights": "3"}, "did you mean 'maxInFlight'"),
        ("'x' as body, 'x' as messageId", {"maxInFlight": "0"}, "'maxInFlight' may be a whole number from 1"),
        ("'x' as body, 'x' as messageId", {"entity": "nowhere"}, "nowhere"),
    ],
)
def test_a_query_that_cannot_work_is_refused(spark, broker, secret, columns, options, message):
    with pytest.raises(Exception, match=message):
        write(spark.sql(f"select {columns}"), secret, **{"entity": "plain", **options})
    assert take_all(broker, "plain") == []


def test_a_wrong_key_is_refused_and_not_shown(spark, broker, tmp_path):
    path = tmp_path / "secret"
    path.write_text(broker.connection_string_for("RootManageSharedAccessKey", "wrong-key"))
    with pytest.raises(Exception, match="'plain'") as caught:
        write(spark.sql("select 'x' as body, 'x' as messageId"), path, entity="plain")
    assert "wrong-key" not in str(caught.value)


def stream(spark, secret, directory, **options):
    source = spark.readStream.schema("body string, messageId string").json(str(directory / "in"))
    writer = source.writeStream.format("peeklock").option("connectionStringFile", str(secret))
    for name, value in options.items():
        writer = writer.option(name, value)
    return writer.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True).start()


def test_a_stream_is_written(spark, broker, secret, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.json").write_text(f'{{"body": "{number}", "messageId": "{number}"}}\n')
    query = stream(spark, secret, tmp_path, entity="once")
    query.awaitTermination()
    found = take_all(broker, "once", 3)
    assert sorted(each.content() for each in found) == [b"0", b"1", b"2"]


def test_a_batch_of_a_stream_that_runs_again_has_the_same_ids(spark, broker, secret, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"body": "0"}\n{"body": "1"}\n')
    options = {"entity": "once", "idFromPosition": "queryId/batch/partition/row"}
    stream(spark, secret, tmp_path, **options).awaitTermination()
    first = take_all(broker, "once", 2)
    [commit] = [each for each in (tmp_path / "checkpoint" / "commits").iterdir() if each.name == "0"]
    commit.unlink()  # as if the driver had died before it
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
    stream(spark, secret, tmp_path, **options).awaitTermination()
    assert len({each.message_id for each in first}) == 2
    assert take_all(broker, "once") == []  # duplicate detection has dropped them


def test_the_broker_may_be_killed_and_come_back(spark, tmp_path):
    config = '[[queues]]\nname = "once"\nrequires_duplicate_detection = true\n'
    with Broker(tmp_path, config) as broker:
        path = tmp_path / "secret"
        path.write_text(broker.connection_string)

        there = []

        def fail() -> None:
            while peek_count(broker, "once") < 2000:
                time.sleep(0.01)
            there.append(peek_count(broker, "once"))
            broker.kill()
            broker.start()

        failing = threading.Thread(target=fail)
        failing.start()
        numbers = spark.range(0, 60_000, numPartitions=2)
        frame = numbers.select(f.repeat(f.lit("x"), 512).alias("body"), f.col("id").cast("string").alias("messageId"))
        write(frame, path, entity="once", batchBytes=32_768)
        failing.join()
        assert there[0] < 60_000, "the broker was killed when all was sent"
        found = take_all(broker, "once", 60_000)
    assert sorted(int(each.message_id) for each in found) == list(range(60_000))


def test_a_broker_that_stays_away_is_named(spark, tmp_path):
    path = tmp_path / "secret"
    path.write_text("Endpoint=sb://localhost:9;UseDevelopmentEmulator=true")
    with pytest.raises(Exception, match=r"accepted nothing for .* s .sendTimeoutSeconds.*Connection refused"):
        write(spark.sql("select 'x' as body, 'x' as messageId"), path, entity="plain", sendTimeoutSeconds=1)
