"""The sink against a real broker: what arrives, what is refused, and what happens when Spark or the broker fails."""

import datetime

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import functions as f

from protocol.client.messages import Message
from protocol.codec import UInt, ULong
from tests.pipeline.spark.taking import peek_count, take_all


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
    frame = spark.range(0, 12_000, numPartitions=2).select(
        f.col("id").cast("string").alias("body"),
        f.col("id").cast("string").alias("messageId"),
        f.spark_partition_id().cast("string").alias("subject"),
    )
    write(frame, secret, entity="plain")
    found = take_all(broker, "plain", 12_000)
    assert sorted(int(each.content()) for each in found) == list(range(12_000))
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


def test_whole_messages_are_sent_as_they_are(spark, broker, secret):
    typed = Message.of(b"one", message_id=ULong(7), application_properties={"n": UInt(5)})
    messages = [typed.encode(), Message.of(b"two", message_id="2").encode()]
    frame = spark.createDataFrame([(each,) for each in messages], "amqpMessage binary").coalesce(1)
    write(frame, secret, entity="plain", sendAmqpMessage="true")
    first, second = take_all(broker, "plain", 2)
    assert (first.content(), first.message_id, second.content()) == (b"one", 7, b"two")
    assert type(first.application_properties["n"]) is UInt
    with pytest.raises(Exception, match="column 'body' would not be sent: drop it"):
        write(frame.withColumn("body", f.lit("x")), secret, entity="plain", sendAmqpMessage="true")
    with pytest.raises(Exception, match="a column 'amqpMessage' must have the encoded messages as binary"):
        write(spark.sql("select 'x' as body"), secret, entity="plain", sendAmqpMessage="true")
    nulls = frame.select(f.lit(None).cast("binary").alias("amqpMessage"))
    with pytest.raises(Exception, match="row 0 of this task: column 'amqpMessage' is null"):
        write(nulls, secret, entity="plain", sendAmqpMessage="true")


def test_a_position_in_the_query_makes_ids_only_if_it_is_asked_for(spark, broker, secret):
    frame = spark.range(5, numPartitions=1).select(f.col("id").cast("string").alias("body"))
    with pytest.raises(Exception, match="idFromPosition=queryId/batch/partition/row"):
        write(frame, secret, entity="plain")
    write(frame, secret, entity="plain", idFromPosition="queryId/batch/partition/row")
    ids = [each.message_id.split("/") for each in take_all(broker, "plain", 5)]
    assert [each[1:] for each in ids] == [["0", "0", str(row)] for row in range(5)]


def test_a_row_that_does_not_fit_is_named(spark, broker, secret):
    frame = spark.sql("select 'x' as body, '1' as messageId union all select repeat('x', 2000), '2'").coalesce(1)
    with pytest.raises(Exception, match=r"row 1 of this task: column 'body' makes a message of 20.* takes 1024"):
        write(frame, secret, entity="small")
    by_entity = spark.createDataFrame(
        [("1", "plain", "ok"), ("2", "other", None), ("3", "plain", "é")],
        "messageId string, entity string, contentType string",
    )
    frame = by_entity.withColumn("body", f.lit("x")).coalesce(1)
    with pytest.raises(Exception, match="row 2 of this task: column 'contentType' is not of ASCII"):
        write(frame, secret)
    for queue in ("small", "plain", "other"):
        take_all(broker, queue)


def test_a_query_that_cannot_work_is_refused(spark, broker, secret):
    frame = spark.sql("select 'x' as body, 'x' as mesageId")
    with pytest.raises(Exception, match="the sink has no column 'mesageId'; did you mean 'messageId'"):
        write(frame, secret, entity="plain")
    with pytest.raises(Exception, match="nowhere"):
        write(frame.withColumnRenamed("mesageId", "messageId"), secret, entity="nowhere")
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


def test_a_broker_that_stays_away_is_named(spark, tmp_path):
    path = tmp_path / "secret"
    path.write_text("Endpoint=sb://localhost:9;UseDevelopmentEmulator=true")
    with pytest.raises(Exception, match=r"accepted nothing for .* s .sendTimeoutSeconds.*Connection refused"):
        write(spark.sql("select 'x' as body, 'x' as messageId"), path, entity="plain", sendTimeoutSeconds=1)
