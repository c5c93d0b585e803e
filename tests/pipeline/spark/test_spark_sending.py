"""How a task sends, without Spark: a real broker that is stopped, killed or full."""

import asyncio
import re
import signal
import threading
import time

import pytest

pytest.importorskip("pyspark")
import pyarrow as pa

from pyspark_peeklock.errors import SendFailed, UnfitRow
from pyspark_peeklock.identity import Identities
from pyspark_peeklock.options import Options, SinkOptions
from pyspark_peeklock.sending import send_rows
from tests.brokers import Broker
from tests.patience import eventually
from tests.pipeline.spark.taking import take_all

ENTITIES = """
[[queues]]
name = "once"
requires_duplicate_detection = true

[[queues]]
name = "full"
max_size_mb = 1
"""


@pytest.fixture
def own_broker(tmp_path):
    with Broker(tmp_path, ENTITIES) as broker:
        (tmp_path / "secret").write_text(broker.connection_string)
        yield broker


def send(tmp_path, batches, **options):
    given = Options({"connectionStringFile": str(tmp_path / "secret"), "entity": "once", **options})
    return asyncio.run(send_rows(iter(batches), SinkOptions.of(given), Identities(None)))


def batch(first, count, size=100):
    body = pa.array([b"x" * size] * count)
    return {"body": body, "messageId": pa.array([str(first + number) for number in range(count)])}


def test_a_broker_that_is_killed_twice_gets_every_row_once(own_broker, tmp_path):
    killed = []

    def batches():
        for number in range(40):
            if number in (10, 25):
                threading.Thread(target=lambda: (own_broker.kill(), killed.append(1), own_broker.start())).start()
            yield batch(number * 100, 100)

    counts = send(tmp_path, batches(), batchBytes="2048", maxInFlight="8")
    eventually(lambda: len(killed) == 2 and own_broker.running, "it is started again")
    assert counts.messages == 4000
    found = take_all(own_broker, "once", 4000)
    assert sorted(int(each.message_id) for each in found) == list(range(4000))


def test_a_broker_that_answers_nothing_is_named_in_time(own_broker, tmp_path):
    def batches():
        yield batch(0, 10)
        for process in own_broker.processes():
            process.send_signal(signal.SIGSTOP)
        yield batch(10, 1000)

    begun = time.monotonic()
    try:
        with pytest.raises(SendFailed, match=r"accepted nothing for . s") as caught:
            send(tmp_path, batches(), sendTimeoutSeconds="2")
    finally:
        for process in own_broker.processes():
            process.send_signal(signal.SIGCONT)
    assert time.monotonic() - begun < 40  # by default it is named after a minute
    sent, unknown = re.findall(r"(\d+) rows of this task are sent, and of (\d+)", str(caught.value))[0]
    assert (int(sent), int(sent) + int(unknown)) in ((0, 1010), (10, 1010))  # it may be stopped before its first answer


def test_a_full_queue_is_an_error_that_names_the_rows(own_broker, tmp_path):
    with pytest.raises(SendFailed, match=r"rows \d+ to \d+ of this task were refused by 'full'"):
        send(tmp_path, [batch(0, 300, 10_000)], entity="full")
    found = take_all(own_broker, "full")
    assert [int(each.message_id) for each in found] == list(range(len(found)))
    assert 0 < len(found) < 300


def test_rows_before_one_that_does_not_fit_in_an_earlier_batch_stay_sent(own_broker, tmp_path):
    broken = batch(10, 3) | {"timeToLiveMs": pa.array([1, 1, 0])}
    with pytest.raises(UnfitRow, match="row 12 of this task: column 'timeToLiveMs'"):
        send(tmp_path, [batch(0, 10), broken])
    assert len(take_all(own_broker, "once")) in (0, 10)
