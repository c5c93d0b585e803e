"""The journal as batches and as streams, from a server with faults."""

import json
import shutil

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")
from pyspark.sql import functions as f

from tests.patience import eventually
from tests.pipeline.spark.faulty_journal import EPOCH, T0, Journal, JournalServer, Partition, message_of, rows
from tests.pipeline.spark.taking import take_all


@pytest.fixture
def journal():
    return Journal({0: Partition(rows(0, 0, 250, record=message_of)), 2: Partition(rows(2, 0, 100))})


@pytest.fixture
def server(journal):
    with JournalServer(journal) as server:
        yield server


@pytest.fixture
def read(spark, server, secret):
    """A batch query with these options."""

    def load(**options):
        return with_options(spark.read, server, secret, mode="journal", **options).load()

    return load


def with_options(reader, server, secret, **options):
    reader = reader.format("peeklock").option("connectionStringFile", str(secret)).option("httpEndpoint", server.url)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader


def keys(frame):
    return sorted((row.partition, row.journalOffset) for row in frame.select("partition", "journalOffset").collect())


def grid(**ends):
    return [(int(name[1:]), offset) for name, (first, end) in ends.items() for offset in range(first, end)]


def test_a_batch_has_all_rows_and_columns(read):
    frame = read()
    assert keys(frame) == grid(p0=(0, 250), p2=(0, 100))
    first = frame.where("partition = 0 and journalOffset = 7").first()
    assert (first.namespace, first.epoch, first.op, first.entity) == ("ns", EPOCH, "enqueued", "orders")
    assert (bytes(first.body), first.applicationProperties, first.replyTo) == (b"body 7", {"n": "7"}, "r")
    assert (first.messageId, first.sequenceNumber, first.eventTime.year) == ("0-7", 7, 2023)
    assert (first.record, first.lockedUntil) == (None, None)
    other = frame.where("partition = 2 and journalOffset = 7").first()
    assert (other.body, other.applicationProperties) == (None, None)


def test_offsets_choose_rows(read):
    chosen = read(startingOffsets='{"0": 240}', endingOffsets='{"2": 5}')
    assert keys(chosen) == grid(p0=(240, 250), p2=(0, 5))
    assert keys(read(startingOffsets="latest")) == []
    assert keys(read(startingTimestamp=T0 // 1000 + 90_500)) == grid(p0=(91, 250), p2=(91, 100))
    assert keys(read(startingTimestamp="2023-11-14T22:13:20.000001Z", endingOffsets='{"0": 3, "2": 1}')) == [
        (0, 1),
        (0, 2),
    ]


def test_bodies_are_asked_for_only_if_they_are_wanted(spark, server, secret, journal, read):
    read(includeBody="false").where("journalOffset < 0").collect()
    with_options(spark.read, server, secret, mode="journal").schema("op string").load().collect()
    assert {query["records"] for *_, query in journal.requests} == {"0"}
    found = read(includeRecord="true").where("partition = 0 and journalOffset = 1").first()
    assert bytes(found.record).endswith(b"body 1")


def test_parts_and_patterns(read, journal):
    assert read(minPartitions=8).rdd.getNumPartitions() in (8, 9)
    assert keys(read(minPartitions=8)) == grid(p0=(0, 250), p2=(0, 100))
    journal.partitions[2].table = pa.concat_tables([rows(2, 0, 50), rows(2, 50, 50, "invoices")])
    assert keys(read(entity="inv*")) == grid(p2=(50, 100))


def test_conditions_are_met_before_rows_come_to_spark(spark, read, journal):
    journal.partitions[2].table = pa.concat_tables([rows(2, 0, 50), rows(2, 50, 50, "invoices")])
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(filterPushdown="true")
        journal.requests.clear()
        chosen = frame.where("entity = 'invoices' and op in ('enqueued', 'completed') and journalOffset >= 60")
        chosen = chosen.where("eventTime < timestamp'2023-11-14 22:14:50Z' and messageId <> '2-70'")
        assert keys(chosen) == [(2, offset) for offset in range(60, 90) if offset != 70]
        asked = {request[:3] for request in journal.requests if request[2] - request[1] > 1}
        assert asked == {(0, 60, 90), (2, 60, 90)}, "but for the search of the time"
        assert {query.get("entity") for *_, query in journal.requests if query["from"] == "60"} == {"invoices"}
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_faults_on_the_way_lose_nothing(read, journal):
    journal.faults += ["cut", 503, "cut between", "slow", 500]
    assert keys(read()) == grid(p0=(0, 250), p2=(0, 100))
    assert journal.faults == []


def test_what_is_lost_fails_the_query_or_is_skipped(read, journal):
    journal.partitions[0].low = 100
    given = '{"0": 40, "2": 90}'
    with pytest.raises(Exception, match="partition 0: the query needs offset 40, and the journal has 100 to 250"):
        read(startingOffsets=given).collect()
    assert keys(read(startingOffsets=given, failOnDataLoss="false")) == grid(p0=(100, 250), p2=(90, 100))


def test_offsets_behind_the_end_are_refused(read):
    for option in ("startingOffsets", "endingOffsets"):
        with pytest.raises(Exception, match=f"option '{option}': partition 0 ends at offset 250, and 251 is behind it"):
            read(**{option: '{"0": 251}'}).collect()
    assert keys(read(startingOffsets='{"0": 250, "2": 100}')) == []


def test_options_that_make_no_sense_are_refused(read):
    with pytest.raises(Exception, match=r"there is no partition 1; there are .0, 2."):
        read(startingOffsets='{"1": 5}').collect()


@pytest.fixture
def stream(spark, server, secret, tmp_path):
    """A stream into Parquet files with these options, with the checkpoint of the test."""

    def start(trigger=None, **options):
        source = with_options(spark.readStream, server, secret, **options).load()
        writer = source.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(**(trigger or {"availableNow": True})).start()

    return start


def written(spark, tmp_path):
    return keys(spark.read.parquet(str(tmp_path / "out")))


def finished(query):
    query.awaitTermination()
    return [each for each in query.recentProgress if each.numInputRows]


def test_available_now_reads_what_there_is_in_limited_batches(spark, stream, journal, tmp_path):
    batches = finished(stream(startingOffsets="earliest", maxMessagesPerTrigger=140))
    assert [each.numInputRows for each in batches] == [140, 140, 70]
    assert written(spark, tmp_path) == grid(p0=(0, 250), p2=(0, 100))
    end = json.loads(batches[-1].sources[0].endOffset)
    assert end == {"0": {"epoch": EPOCH, "offset": 250}, "2": {"epoch": EPOCH, "offset": 100}}
    journal.partitions[2].table = rows(2, 0, 130)
    journal.partitions[5] = Partition(rows(5, 0, 20), low=10)  # a new one begins at its first offset
    finished(stream(startingOffsets="earliest", maxBytesPerTrigger=2000))
    assert written(spark, tmp_path) == grid(p0=(0, 250), p2=(0, 130), p5=(10, 20))


def test_a_standing_stream_reads_what_comes_and_shows_its_lag(spark, stream, journal, tmp_path):
    query = stream({"processingTime": "0 seconds"}, maxMessagesPerTrigger=10)
    try:
        eventually(lambda: query.lastProgress is not None, "progress")
        assert query.lastProgress.numInputRows == 0  # by default a stream begins at the end
        journal.partitions[0].table = rows(0, 0, 280)
        eventually(lambda: json.loads(query.lastProgress.sources[0].endOffset)["0"]["offset"] == 280, "all is read")
        last = [each for each in query.recentProgress if each.numInputRows]
        assert [each.numInputRows for each in last] == [10, 10, 10]
        assert json.loads(last[0].sources[0].latestOffset)["0"]["offset"] == 280
    finally:
        query.stop()
    assert written(spark, tmp_path) == grid(p0=(250, 280))


def test_a_batch_that_was_not_finished_is_read_again(spark, stream, journal, tmp_path):
    finished(stream(startingOffsets="earliest"))
    commit = tmp_path / "checkpoint" / "commits" / "0"
    commit.unlink()  # as if the driver had died before it
    commit.with_name(".0.crc").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "out")  # else the file sink knows that it has the batch
    journal.partitions[0].table = rows(0, 0, 260)
    journal.requests.clear()
    finished(stream(startingOffsets="earliest"))
    assert {(0, 0, 250), (2, 0, 100), (0, 250, 260)} <= {request[:3] for request in journal.requests}
    assert written(spark, tmp_path) == grid(p0=(0, 260), p2=(0, 100))


def test_a_stream_behind_the_end_is_refused(stream, journal):
    with pytest.raises(Exception, match="option 'startingOffsets': partition 2 ends at offset 100, and 101 is behind"):
        finished(stream(startingOffsets='{"2": 101}'))


def test_a_checkpoint_behind_the_end_is_refused(stream, journal):
    """Else the stream would wait, and then pass by what the journal has written under these offsets meanwhile."""
    finished(stream(startingOffsets="earliest"))
    journal.partitions[0].table = rows(0, 0, 240)
    with pytest.raises(Exception, match="partition 0: the checkpoint has offset 250, and the journal ends at 240"):
        finished(stream())


def test_a_restored_store_ends_the_stream_or_begins_anew(spark, stream, journal, tmp_path):
    finished(stream(startingOffsets="earliest"))
    journal.partitions[0] = Partition(rows(0, 0, 3), epoch="ff")
    with pytest.raises(Exception, match=f"offsets of epoch {EPOCH}, and the journal now has epoch ff"):
        finished(stream())
    [batch] = finished(stream(failOnDataLoss="false"))
    assert batch.numInputRows == 3
    assert json.loads(batch.sources[0].endOffset)["0"] == {"epoch": "ff", "offset": 3}


def test_a_stream_of_rows_becomes_messages_with_ids_of_their_positions(spark, server, secret, broker, tmp_path):
    """From the journal into the sink, twice: what comes again is dropped."""

    def copy(checkpoint):
        source = with_options(spark.readStream, server, secret, startingOffsets="earliest").load()
        rows = source.where("body is not null").withColumn("copy", f.explode(f.array(f.lit(0), f.lit(1))))
        rows = rows.drop("messageId", "copy")
        writer = rows.writeStream.format("peeklock").option("connectionStringFile", str(secret))
        writer = writer.option("entity", "once").option("checkpointLocation", str(tmp_path / checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    copy("first")
    found = take_all(broker, "once", 500)
    assert sorted(each.content() for each in found) == sorted(b"body %d" % (n // 2) for n in range(500))
    assert {each.message_id for each in found} == {f"ns/orders/0@{EPOCH}/{n}#{k}" for n in range(250) for k in (0, 1)}
    copy("second")
    assert take_all(broker, "once") == []


def test_a_stream_of_whole_messages(spark, server, secret, broker, tmp_path):
    """They keep their types; the row without one goes to the queue for such rows, and the stream goes on."""
    source = with_options(spark.readStream, server, secret, startingOffsets="earliest", includeAmqpMessage="true")
    rows = source.load().where("partition = 0 and journalOffset < 5 or partition = 2 and journalOffset = 7")
    writer = rows.select("AMQPMessage", "partition", "journalOffset").writeStream.format("peeklock")
    given = {"entity": "plain", "sendAmqpMessage": "true", "onBadRow": "queue", "badRowEntity": "other"}
    writer = writer.options(connectionStringFile=str(secret), checkpointLocation=str(tmp_path / "checkpoint"), **given)
    writer.trigger(availableNow=True).start().awaitTermination()
    found = take_all(broker, "plain", 5)
    assert sorted(each.content() for each in found) == [b"body %d" % n for n in range(5)]
    assert {each.application_properties["n"] for each in found} == set(range(5))
    [bad] = take_all(broker, "other", 1)
    assert (bad.application_properties["partition"], bad.application_properties["journalOffset"]) == (2, 7)


def test_of_two_streams_with_one_checkpoint_one_ends_and_nothing_is_doubled(spark, stream, journal, tmp_path):
    first = stream({"processingTime": "0 seconds"}, startingOffsets="earliest", maxMessagesPerTrigger=50)
    eventually(lambda: any(each.numInputRows for each in first.recentProgress), "the first batch")
    second = stream({"processingTime": "0 seconds"}, startingOffsets="earliest", maxMessagesPerTrigger=50)
    try:
        first.awaitTermination(30)
        eventually(lambda: second.recentProgress, "progress")
        assert not first.isActive, "the newer one goes on, where the older one was"
        eventually(
            lambda: json.loads(second.recentProgress[-1].sources[0].endOffset)["0"]["offset"] == 250, "all is read"
        )
        spark.conf.set("spark.sql.streaming.stopActiveRunOnRestart", "false")
        with pytest.raises(Exception, match=str(second.id)):
            stream(startingOffsets="earliest")
        assert second.isActive
    finally:
        spark.conf.unset("spark.sql.streaming.stopActiveRunOnRestart")
        second.stop()
    assert written(spark, tmp_path) == grid(p0=(0, 250), p2=(0, 100))


def test_a_stream_cannot_browse(spark, server, secret):
    source = with_options(spark.readStream, server, secret, mode="browse", entity="plain").load()
    with pytest.raises(Exception, match="mode=browse is for batch queries"):
        source.writeStream.format("noop").start().awaitTermination()
