"""A partition whose pages kill whoever reads them: it is parked, this is said, and the others are served."""

import json
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from storage.data_dir import partition_path
from storage.lmdb_store import DATA_FILE
from tests.brokers import Broker, BrokerFailed
from tests.damaged_stores import damage, lone_branch, zeros
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


def worker(broker: Broker) -> int | None:
    found = broker.worker_processes()
    return found[0].pid if found else None


def parked(broker: Broker) -> bool:
    return metrics(broker).get(("peeklock_partition_parked", "1")) == 1


@pytest.mark.parametrize("workers", [1, 0])
def test_a_partition_that_kills_its_worker_is_parked_and_the_others_are_served(tmp_path: Path, workers: int) -> None:
    assert home_partition("orders", 2) == 1, "the catalog is on the other partition"
    with Broker(tmp_path, CONFIG.format(other=OTHER), workers=workers) as broker:
        send_numbers(broker, "orders", 40, 500)
        send_numbers(broker, OTHER, 3, 500)
        broker.stop()
        damage(partition_path(broker.data_dir, 1) / DATA_FILE, "MESSAGES", zeros)
        broker.start()

        for _ in range(2):
            if parked(broker):
                break  # it killed its worker already when that was started
            before = broker.worker().pid
            with RawPeer.connect(broker.amqp_port) as peer:
                peer.attach_receiver("orders", credit=10)
                eventually(lambda before=before: worker(broker) not in (None, before), "the worker is started again")
            eventually(lambda: is_ready(broker), "it serves")

        assert parked(broker)
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach_receiver(OTHER, credit=10)
            assert [body_of(peer.expect(TRANSFER).payload)[:8] for _ in range(3)] == [
                b"number %d" % n for n in range(3)
            ]
        send_numbers(broker, OTHER, 2, 500)
        status, body = broker.get("/readyz")
        assert status == 200
        assert [*json.loads(body)["parked"]] == ["1"]
        assert "damaged" in json.loads(body)["parked"]["1"]
        assert "partition parked" in broker.log_file.read_text()
        with RawPeer.connect(broker.amqp_port) as peer:
            handle = peer.attach_sender("orders")
            peer.transfer(message(b"refused"), handle)
            condition, text = error_of(peer.expect(DISPOSITION))
            assert condition == "amqp:internal-error"
            assert "Partition 1" in text
            assert "out of service" in text


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_partition_that_is_damaged_at_the_start_is_parked_until_its_store_is_mended(
    tmp_path: Path, workers: int
) -> None:
    with Broker(tmp_path, CONFIG.format(other=OTHER), workers=workers) as broker:
        send_numbers(broker, "orders", 3, 500)
        send_numbers(broker, OTHER, 3, 500)
        broker.stop()
        file = partition_path(broker.data_dir, 1) / DATA_FILE
        sound = file.read_bytes()
        damaged = damage(file, "META", lone_branch)
        broker.start()

        status, body = broker.get("/readyz")
        assert status == 200
        assert [*json.loads(body)["parked"]] == ["1"]
        assert parked(broker)
        assert "partition parked" in broker.log_file.read_text()
        assert str(file.parent) in broker.log_file.read_text()
        with RawPeer.connect(broker.amqp_port) as peer:
            handle = peer.attach_sender("orders")
            peer.transfer(message(b"refused"), handle)
            condition, text = error_of(peer.expect(DISPOSITION))
            assert condition == "amqp:internal-error"
            assert "Partition 1" in text
            peer.attach_receiver(OTHER, credit=10)
            assert [body_of(peer.expect(TRANSFER).payload)[:8] for _ in range(3)] == [
                b"number %d" % n for n in range(3)
            ]
        broker.config_file.write_text(broker.config_file.read_text() + '[[queues]]\nname = "orders-2"\n')
        broker.restart()
        send_numbers(broker, OTHER, 2, 500)
        assert parked(broker)
        broker.stop()
        assert file.read_bytes() == damaged

        file.write_bytes(sound)  # as it was before the definitions changed
        broker.start()
        assert not parked(broker)
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach_receiver("orders", credit=10)
            assert [body_of(peer.expect(TRANSFER).payload)[:8] for _ in range(3)] == [
                b"number %d" % n for n in range(3)
            ]
        assert home_partition("orders-2", 2) == 1, "it was made while its partition was parked"
        send_numbers(broker, "orders-2", 1, 500)


def test_a_home_that_is_damaged_at_the_start_is_told_and_nothing_is_served(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG.format(other=OTHER)) as broker:
        broker.stop()
        file = partition_path(broker.data_dir, 0) / DATA_FILE
        damaged = damage(file, "META", lone_branch)
        with pytest.raises(BrokerFailed, match=r"peeklock: cannot start: .*partition 0"):
            broker.start()
        assert file.read_bytes() == damaged


def test_several_partitions_that_kill_their_worker_at_the_start_are_parked(tmp_path: Path) -> None:
    names = {home_partition(name, 4): name for name in map("queue-{}".format, range(99))}
    config = "partitions = 4\n" + "".join(f'[[queues]]\nname = "{name}"\n' for name in names.values())
    with Broker(tmp_path, config) as broker:
        for name in names.values():
            send_numbers(broker, name, 3, 500)
        broker.stop()
        for partition in (1, 3):
            damage(partition_path(broker.data_dir, partition) / DATA_FILE, "COUNTS", lone_branch)
        broker.start()
        status, body = broker.get("/readyz")
        assert status == 200
        assert [*json.loads(body)["parked"]] == ["1", "3"]
        send_numbers(broker, names[0], 1, 500)


def test_a_home_that_kills_its_worker_at_the_start_is_told_and_nothing_is_served(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG.format(other=OTHER)) as broker:
        send_numbers(broker, OTHER, 3, 500)
        broker.stop()
        damage(partition_path(broker.data_dir, 0) / DATA_FILE, "COUNTS", lone_branch)
        with pytest.raises(BrokerFailed, match=r"peeklock: cannot start: .*partition 0"):
            broker.start()
