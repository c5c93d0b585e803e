"""A store that was made and is not there any more: its partition is parked, and nothing is put in its place."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from storage.data_dir import DESCRIPTION_FILE, partition_path
from storage.lmdb_store import DATA_FILE
from storage.maintenance import verify
from tests.brokers import Broker, BrokerFailed
from tests.end_to_end.health import elsewhere, is_ready, metrics, send_numbers
from tests.end_to_end.raw_peer import DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message
from tests.patience import eventually

CONFIG = """
partitions = 2
[[queues]]
name = "orders"
[[queues]]
name = "{other}"
"""
OTHER = elsewhere("orders")
assert home_partition("orders", 2) == 1


def lose_file(path: Path) -> None:
    (path / DATA_FILE).unlink()


def lose_directory(path: Path) -> None:
    shutil.rmtree(path)


def empty_file(path: Path) -> None:
    (path / DATA_FILE).write_bytes(b"")


@contextmanager
def broker_with_messages(directory: Path, workers: int) -> Iterator[Broker]:
    with Broker(directory, CONFIG.format(other=OTHER), workers=workers) as broker:
        for queue in ("orders", OTHER):
            send_numbers(broker, queue, 3)
        yield broker


def received(broker: Broker, queue: str) -> list[bytes]:
    """The first three messages, which stay in the queue."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(queue, credit=3)
        return [body_of(peer.expect(TRANSFER).payload) for _ in range(3)]


NUMBERS = [b"number %d" % number for number in range(3)]


def refusal(broker: Broker, queue: str) -> tuple[str, str]:
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(queue)
        peer.transfer(message(b"refused"), handle)
        return error_of(peer.expect(DISPOSITION))


def is_parked(broker: Broker) -> bool:
    status, body = broker.get("/readyz")
    return status == 200 and list(json.loads(body).get("parked", ())) == ["1"]


@pytest.mark.parametrize(
    ("lose", "workers", "was_killed"),
    [(lose_file, 1, False), (lose_file, 0, True), (lose_directory, 2, True), (empty_file, 1, True)],
)
def test_a_partition_whose_store_is_missing_is_parked_until_it_is_put_back(
    tmp_path: Path, lose: Callable[[Path], None], workers: int, was_killed: bool
) -> None:
    with broker_with_messages(tmp_path, workers) as broker:
        broker.kill() if was_killed else broker.stop()
        path = partition_path(broker.data_dir, 1)
        shutil.copytree(path, tmp_path / "kept")
        lose(path)
        assert [report.ok for report in verify(broker.data_dir).partitions] == [True, False]
        broker.start()
        assert is_parked(broker)
        assert metrics(broker)["peeklock_partition_parked", "1"] == 1
        condition, text = refusal(broker, "orders")
        assert condition == "amqp:internal-error"
        assert "Partition 1" in text
        assert received(broker, OTHER) == NUMBERS
        broker.stop()
        assert [report.ok for report in verify(broker.data_dir).partitions] == [True, False], "nothing took its place"
        log = broker.log_file.read_text()
        assert f"{path / DATA_FILE}: " in log
        assert 'remove 1 from \\"stores\\"' in log
        if path.exists():
            shutil.copy(tmp_path / "kept" / DATA_FILE, path)
        else:
            shutil.move(tmp_path / "kept", path)
        broker.start()  # also what was only in the log of its worker, which went on without it
        assert not is_parked(broker)
        assert received(broker, "orders") == NUMBERS
        broker.stop()
        assert not list((broker.data_dir / "logs").glob("*.partition-*"))


@pytest.mark.parametrize("lose", [lose_file, lose_directory])
def test_without_the_store_of_the_home_the_broker_does_not_start(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    with broker_with_messages(tmp_path, 1) as broker:
        broker.stop()
        path = partition_path(broker.data_dir, 0)
        shutil.copytree(path, tmp_path / "kept")
        lose(path)
        before = sorted(broker.data_dir.rglob("*.mdb"))
        with pytest.raises(BrokerFailed) as failed:
            broker.start()
        assert f"{path / DATA_FILE}: " in str(failed.value)
        assert "Put it back" in str(failed.value)
        assert sorted(broker.data_dir.rglob("*.mdb")) == before
        shutil.copytree(tmp_path / "kept", path, dirs_exist_ok=True)
        broker.start()
        for queue in ("orders", OTHER):
            assert received(broker, queue) == NUMBERS


def test_who_says_that_it_was_never_made_goes_on_with_an_empty_one_and_is_warned(tmp_path: Path) -> None:
    with broker_with_messages(tmp_path, 1) as broker:
        broker.kill()
        shutil.rmtree(partition_path(broker.data_dir, 1))
        broker.start()
        assert is_parked(broker)
        broker.stop()
        file = broker.data_dir / DESCRIPTION_FILE
        document = json.loads(file.read_text())
        assert document["stores"] == [0, 1]
        file.write_text(json.dumps({**document, "stores": [0]}))
        broker.start()
        assert not is_parked(broker)
        warnings = [line for line in broker.log_file.read_text().splitlines() if '"warning"' in line]
        assert [line for line in warnings if "a new, empty store was made" in line and '"partition": 1' in line]
        assert json.loads(file.read_text())["stores"] == [0, 1]
        send_numbers(broker, "orders", 3)
        assert received(broker, "orders") == NUMBERS
        assert received(broker, OTHER) == NUMBERS
        assert not list((broker.data_dir / "logs").glob("*.partition-*"))


def test_a_store_that_vanishes_while_its_broker_runs_parks_the_partition(tmp_path: Path) -> None:
    with broker_with_messages(tmp_path, 1) as broker:
        partition_path(broker.data_dir, 1).rename(tmp_path / "kept")
        broker.worker().kill()
        eventually(lambda: is_ready(broker) and is_parked(broker), "it is parked")
        assert received(broker, OTHER) == NUMBERS
        broker.stop()
        (tmp_path / "kept").rename(partition_path(broker.data_dir, 1))
        broker.start()
        assert received(broker, "orders") == NUMBERS
