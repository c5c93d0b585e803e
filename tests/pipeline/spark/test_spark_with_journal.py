"""The journal of a real broker, read by Spark, also while the broker is killed."""

import json
import time
import urllib.request

import pytest
import structlog

pytest.importorskip("pyspark")
from pyspark.sql import functions as f
from typer.testing import CliRunner

from broker.cli.all_commands import app
from protocol.nodes.sas_tokens import generate
from storage.capture.place import Place
from storage.capture.reading import Captured
from tests.brokers import KEY, KEY_NAME, Broker
from tests.patience import eventually

CONFIG = """
[[queues]]
name = "orders"
requires_duplicate_detection = true
[[queues]]
name = "copies"
requires_duplicate_detection = true
[journal]
mode = "bodies"
hold_for = ["capture"]
"""


@pytest.fixture
def journaled(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        (tmp_path / "secret").write_text(broker.connection_string)
        yield broker
    structlog.reset_defaults()  # a command has set it up to a stream that is closed now


@pytest.fixture
def read(spark, journaled, tmp_path):
    def load(reader, **options):
        reader = reader.format("peeklock").option("connectionStringFile", str(tmp_path / "secret"))
        reader = reader.option("httpEndpoint", f"http://localhost:{journaled.http_port}").option("mode", "journal")
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load()

    return load


def command(broker, *arguments):
    result = CliRunner().invoke(app, [*arguments, "--connection-string", broker.connection_string])
    assert result.exit_code == 0, result.output
    return result.stdout


def send(broker, count, body="hello"):
    command(broker, "send", "orders", "--body", body, "--count", str(count))


def test_what_happened_is_in_the_journal(spark, journaled, read):
    send(journaled, 30)
    command(journaled, "receive", "orders", "--count", "10")
    command(journaled, "dead-letter", "orders", "--count", "5")
    command(journaled, "purge", "orders", "--yes")
    eventually(lambda: read(spark.read).where("op = 'purged'").count() == 15, "all is told")
    frame = read(spark.read, entity="orders").where("subQueue = 'active'")
    assert {row.op: row["count"] for row in frame.groupBy("op").count().collect()} == {
        "enqueued": 30,
        "delivered": 15,
        "completed": 10,
        "deadlettered": 5,
        "purged": 15,
    }
    bodies = (
        frame.where("op = 'enqueued'").select(f.col("body").cast("string"), "messageId", "sequenceNumber").collect()
    )
    assert {row.body for row in bodies} == {"hello"}
    assert len({row.messageId for row in bodies}) == 30
    assert sorted(row.sequenceNumber for row in bodies) == list(range(1, 31))
    assert read(spark.read).where("subQueue = 'deadletter' and op = 'enqueued'").count() == 5
    assert read(spark.read, entity="nothing*").count() == 0


def test_a_stream_copies_each_message_once_though_the_broker_is_killed(spark, journaled, read, tmp_path):
    """From the journal of one queue into another; ids are made of the positions, so what comes twice is dropped."""
    send(journaled, 500, "one")
    stream = read(
        spark.readStream, entity="orders", startingOffsets="earliest", maxMessagesPerTrigger=200, consumerName="copier"
    )
    copied = stream.where("op = 'enqueued' and entity = 'orders'").drop("messageId")
    query = (
        copied.writeStream.format("peeklock")
        .option("connectionStringFile", str(tmp_path / "secret"))
        .option("entity", "copies")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        eventually(lambda: any(each["numInputRows"] for each in query.recentProgress), "the first batch")
        journaled.kill()
        journaled.start()
        send(journaled, 500, "two")
        eventually(lambda: count(journaled, "copies") >= 1000, "all are copied")
        time.sleep(1.0)  # nothing may come twice meanwhile
        assert count(journaled, "copies") == 1000
        assert query.isActive
        # Each batch is told when the next one has begun, and only rows of the queue that is read make one.
        send(journaled, 1)
        eventually(lambda: any(each["name"] == "copier" for each in overview(journaled)["consumers"]), "it is told")
        [copier] = [each for each in overview(journaled)["consumers"] if each["name"] == "copier"]
        assert sum(each["offset"] for each in copier["partitions"]) > 0
    finally:
        query.stop()


def count(broker, queue):
    lines = [line.split() for line in command(broker, "queues").splitlines()]
    return next(int(line[1]) for line in lines if line[0] == queue)


def test_the_capture_of_a_broker_has_the_rows_of_its_journal(spark, journaled, read, tmp_path):
    folder = tmp_path / "captured"
    for received in (50, 100, 150):
        send(journaled, 100)
        command(journaled, "receive", "orders", "--count", "50")
        eventually(lambda wanted=received: read(spark.read).where("op = 'completed'").count() == wanted, "all is told")
        command(
            journaled, "capture", str(folder), "--once", "--http-endpoint", f"http://localhost:{journaled.http_port}"
        )
        if received == 100:
            journaled.kill()
            journaled.start()
    columns = ("partition", "journalOffset", "op", "sequenceNumber")
    rows = {tuple(row) for row in read(spark.read).select(*columns).collect()}
    files = Captured(Place.of(str(folder))).uris()
    found = spark.read.parquet(*files).select(*columns).collect()
    assert len(found) == len(rows) == 300 + 2 * 150
    assert {tuple(row) for row in found} == rows
    [consumer] = overview(journaled)["consumers"]
    assert (consumer["name"], consumer["behind"]) == ("capture", 0), "the capture has told the broker what it has"


def overview(broker):
    url = f"http://localhost:{broker.http_port}/$journal"
    token = generate(url, KEY_NAME, KEY, int(time.time()) + 60)
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": token})) as answer:
        return json.load(answer)
