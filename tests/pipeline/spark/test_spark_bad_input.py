"""What a user or an operator can do wrong, and what a disk can: a clear error, and nothing lost or doubled."""

import asyncio
import logging
import random
from collections import Counter

import pytest
import structlog

pytest.importorskip("pyspark")
from pyspark.sql import functions as f
from typer.testing import CliRunner

from broker.cli.all_commands import app
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from pyspark_peeklock.errors import JournalDamaged, JournalRefused, OutOfRetention
from pyspark_peeklock.journal import JournalReader
from pyspark_peeklock.options import JournalOptions, Options
from pyspark_peeklock.rows import SCHEMA
from tests.brokers import Broker
from tests.patience import eventually

MIB = 1 << 20
BODY_BYTES = 64 << 10
CONFIG = """
partitions = 1
[[queues]]
name = "orders"
authorization_rules = [{key_name = "sends", primary_key = "s", rights = ["Send"]}]
[journal]
mode = "bodies"
retention_bytes = 67108864
"""


def send(broker, first, count):
    """Messages that no compression makes smaller; their ids are numbers."""
    chance = random.Random(first)

    async def work():
        async with await connect_to(broker.connection_string) as connection:
            sender = await connection.sender("orders")
            await sender.send_all(
                Message.of(chance.randbytes(BODY_BYTES), message_id=str(number)).encode()
                for number in range(first, first + count)
            )

    asyncio.run(work())


@pytest.fixture(scope="module")
def retired(tmp_path_factory):
    """A broker whose journal has dropped the oldest rows, of which there is a capture; and the file with its secret."""
    directory = tmp_path_factory.mktemp("retired")
    with Broker(directory, CONFIG) as broker:
        secret = directory / "secret"
        secret.write_text(broker.connection_string)
        send(broker, 0, 1150)
        eventually(
            lambda: [each.part.offsets.end for each in reader(broker, secret).partitions()] == [1150],
            "they are in the journal",
        )
        command = ["capture", str(directory / "captured"), "--once", "--connection-string", broker.connection_string]
        result = CliRunner().invoke(app, [*command, "--http-endpoint", f"http://localhost:{broker.http_port}"])
        structlog.reset_defaults()  # the command has set it up to a stream that is closed now
        assert result.exit_code == 0, result.output
        broker.restart()  # it looks for old files when it starts, and then every half minute
        send(broker, 1150, 50)
        eventually(lambda: reader(broker, secret).partitions()[-1].part.offsets.end == 1200, "they are in the journal")
        yield broker, secret


def options(broker, secret, **more):
    given = {"connectionStringFile": secret, "httpEndpoint": f"http://localhost:{broker.http_port}", **more}
    return {name: str(value) for name, value in given.items()}


def reader(broker, secret, **more):
    return JournalReader(JournalOptions.of(Options(options(broker, secret, **more)), is_stream=False), SCHEMA)


def offsets(found):
    return [
        offset
        for task in found.partitions()
        for batch in found.read(task)
        for offset in batch["journalOffset"].to_pylist()
    ]


def low_of(broker, secret):
    return reader(broker, secret).partitions()[0].part.offsets.first


def test_a_stream_from_the_earliest_offset_gets_all_rows_once_and_in_order(spark, retired, tmp_path):
    broker, secret = retired
    assert low_of(broker, secret) > 100
    more = {"capturePath": secret.with_name("captured"), "startingOffsets": "earliest", "maxMessagesPerTrigger": 500}
    source = spark.readStream.format("peeklock").options(**options(broker, secret, **more)).load()
    found = []

    def keep(frame, batch):
        rows = frame.select("journalOffset", "messageId", f.md5("body").alias("body"), "op").collect()
        found.append([tuple(row) for row in rows])

    query = source.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert [len(batch) for batch in found] == [500, 500, 200]
    rows = [row for batch in found for row in batch]
    assert [row[0] for row in rows] == list(range(1200))
    assert [int(row[1]) for row in rows] == list(range(1200))
    assert len({row[2] for row in rows}) == 1200
    assert Counter(row[3] for row in rows) == {"enqueued": 1200}


def test_without_a_capture_it_fails_or_counts_what_is_lost(retired, caplog):
    broker, secret = retired
    low = low_of(broker, secret)
    more = {"startingOffsets": '{"0": 7}'}
    with pytest.raises(OutOfRetention, match=f"needs offset 7, and the journal has {low} to 1200"):
        offsets(reader(broker, secret, **more))
    with caplog.at_level(logging.WARNING):
        found = offsets(reader(broker, secret, failOnDataLoss="false", **more))
    assert found == list(range(low, 1200))
    assert f"rows={low - 7}:" in caplog.text


def test_a_flipped_bit_is_named_and_the_capture_has_what_it_hides(retired, caplog):
    broker, secret = retired
    broker.restart()  # what is old goes now, and not with the damage
    broker.stop()
    [folder] = (broker.data_dir / "journal").glob("0")
    oldest = min(folder.glob("*.journal"))
    content = bytearray(oldest.read_bytes())
    content[len(content) // 2] ^= 1
    oldest.write_bytes(content)
    broker.start()
    low = low_of(broker, secret)
    with pytest.raises(JournalDamaged, match=f"the journal cannot read the offsets .*{oldest.name}: byte") as caught:
        offsets(reader(broker, secret))
    first, end = caught.value.first, caught.value.end
    assert low <= first < end < 1200
    assert offsets(reader(broker, secret, capturePath=secret.with_name("captured"))) == list(range(1200))
    with caplog.at_level(logging.WARNING):
        found = offsets(reader(broker, secret, failOnDataLoss="false"))
    assert found == [*range(low, first), *range(end - 1, 1200)], "a row in their place says what is lost"
    assert f"rows={end - first}:" in caplog.text


def test_keys_that_are_wrong_or_may_not_read_are_refused_and_not_shown(retired, tmp_path):
    broker, _ = retired
    path = tmp_path / "secret"
    for name, key, status in (("RootManageSharedAccessKey", "wrong-key", "401"), ("sends", "s", "40[13]")):
        path.write_text(broker.connection_string_for(name, key))
        with pytest.raises(JournalRefused, match=rf"GET /\$journal: {status}") as caught:
            reader(broker, path).partitions()
        assert "wrong-key" not in str(caught.value)
