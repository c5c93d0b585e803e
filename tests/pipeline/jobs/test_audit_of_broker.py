"""The audit compares a ledger with what is in the queues of a broker, while messages come and go."""

import asyncio
import random
import subprocess
import sys
import threading

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from pipeline.jobs import audit, running
from tests.brokers import REPOSITORY, Broker
from tests.patience import eventually
from tests.pipeline import ledgers, planting
from tests.pipeline.ledgers import History
from tests.pipeline.planting import Ledger
from tests.pipeline.traffic import CONFIG, Traffic

SIZE = 12


@pytest.fixture(autouse=True)
def session(spark, monkeypatch):
    monkeypatch.setattr(running, "session", lambda name: spark)


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path, CONFIG, workers=2) as broker:
        (tmp_path / "secret").write_text(broker.connection_string)
        yield broker


def capture(broker, tmp_path):
    command = [sys.executable, "-m", "broker.cli", "capture", str(tmp_path / "ledger"), "--once"]
    command += ["--http-endpoint", f"http://localhost:{broker.http_port}"]
    command += ["--connection-string", broker.connection_string]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)


def options(broker, tmp_path, name):
    found = ["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / name), "--whole", "--fail-on-faults"]
    found += ["--connection-string-file", str(tmp_path / "secret")]
    return [*found, "--http-endpoint", f"http://localhost:{broker.http_port}"]


def audited(broker, tmp_path, name, *more, code=0):
    """The verdicts: how many messages have which."""
    assert audit.main([*options(broker, tmp_path, name), *more]) == code
    found = {}
    for row in pq.read_table(tmp_path / name / "verdicts").to_pylist():
        found[row["verdict"]] = found.get(row["verdict"], 0) + row["messages"]
    return found


class Busy(threading.Thread):
    """Traffic that goes on until this is left."""

    def __init__(self, broker):
        super().__init__()
        self.traffic = Traffic(broker, 3, SIZE)
        self._ending = threading.Event()

    def run(self):
        while not self._ending.is_set():
            asyncio.run(self.traffic.run(1))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self.join()


def test_while_messages_come_and_go_all_are_judged_and_none_is_a_fault(broker, tmp_path):
    with Busy(broker) as busy:
        eventually(lambda: busy.traffic.done > 2 * len(busy.traffic.parts()), "some was sent")
        capture(broker, tmp_path)
        sent = busy.traffic.sent
        found = audited(broker, tmp_path, "audit")
        assert set(found) == {"ok"}
        assert busy.traffic.sent > sent  # there was something to leave out, and to put back
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "Compared with what is in the queues</dt><dd>yes" in page
    assert "<td>news</td>" not in page.partition("Queues that cannot be browsed")[2]  # of a topic, what is scheduled


async def some(traffic):
    await traffic.run(2)
    await traffic.leave_some()


def test_what_is_lost_is_named_though_others_come_and_go(broker, tmp_path):
    asyncio.run(some(Traffic(broker, 5, SIZE)))
    capture(broker, tmp_path)
    broker.stop()
    planted = planting.plant_in_stores(broker.data_dir, Ledger(str(tmp_path / "ledger")), random.Random(5))
    broker.start()
    with Busy(broker):
        found = audited(broker, tmp_path, "audit", code=running.FAULTS_FOUND)
        assert found["lost"] == sum(fault.verdict == "lost" for fault in planted) > 0
        named = {
            (row["verdict"], f"{row['entity']} ({row['subQueue']})", row["sequenceNumber"])
            for row in pq.read_table(tmp_path / "audit" / "faults").to_pylist()
        }
        wanted = {(fault.verdict, fault.queue, fault.number) for fault in planted if fault.queue}
        assert {(verdict, queue.lower(), number) for verdict, queue, number in named} == {
            (verdict, queue.lower(), number) for verdict, queue, number in wanted
        }


@pytest.mark.parametrize(
    ("namespace", "epoch", "told"),
    [
        ("shop", "00", "the ledger has no rows of the namespace peeklock, which the broker is; it has shop"),
        ("peeklock", "00", "the ledger ends in the epoch 00 of partition 0, and the broker's journal is in "),
    ],
)
def test_a_ledger_of_another_broker_or_from_before_a_restore_is_refused(
    broker, tmp_path, capsys, namespace, epoch, told
):
    asyncio.run(Traffic(broker, 5, 1).leave_some())
    history = History(namespace=namespace, partitions=1)
    history.send("orders")
    ledgers.write(tmp_path / "ledger", [row | {"epoch": epoch} for row in history.rows])
    assert audit.main(options(broker, tmp_path, "audit")) == running.WRONG_USE
    assert told in capsys.readouterr().err


def test_a_broker_that_is_away_and_a_file_that_is_missing_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(audit, "PATIENCE_S", 1.0)
    history = History(partitions=1)
    history.send("orders")
    ledgers.write(tmp_path / "ledger", history.rows)
    arguments = ["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "audit")]
    arguments += ["--connection-string-file", str(tmp_path / "secret"), "--http-endpoint", "http://localhost:1"]
    assert audit.main(arguments) == running.WRONG_USE
    assert "secret" in capsys.readouterr().err
    (tmp_path / "secret").write_text("Endpoint=sb://localhost;SharedAccessKeyName=a;SharedAccessKey=b")
    assert audit.main(arguments) == running.NOT_DONE
    assert "nothing has come for 1 s" in capsys.readouterr().err
