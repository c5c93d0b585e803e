"""A broker is killed, and its log damaged: what needs that log is out of service, and the rest is served."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from storage.log.frames import BLOCK_BYTES
from storage.log.recovery import log_directory
from storage.log.segments import segment_numbers, segment_path
from tests.brokers import Broker, BrokerFailed
from tests.end_to_end.health import elsewhere, metrics, send_numbers
from tests.end_to_end.raw_peer import DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message

CONFIG = """
partitions = 2
[[queues]]
name = "orders"
[[queues]]
name = "{other}"
"""
OTHER = elsewhere("orders")


def received(broker: Broker, queue: str, count: int) -> list[bytes]:
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(queue, credit=count)
        return [body_of(peer.expect(TRANSFER).payload) for _ in range(count)]


def flip_first_frame(directory: Path) -> None:
    with segment_path(directory, 0).open("r+b") as file:
        file.seek(BLOCK_BYTES + 60)
        [byte] = file.read(1)
        file.seek(BLOCK_BYTES + 60)
        file.write(bytes([byte ^ 1]))


def lose_segments(directory: Path) -> None:
    for number in segment_numbers(directory):
        segment_path(directory, number).unlink()


DAMAGES = [flip_first_frame, lose_segments]


@pytest.mark.parametrize("damage", DAMAGES)
def test_partitions_that_need_a_damaged_log_are_parked_and_the_others_are_served(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    assert home_partition("orders", 2) == 1
    with Broker(tmp_path, CONFIG.format(other=OTHER), workers=2) as broker:
        for queue in ("orders", OTHER):
            send_numbers(broker, queue, 3)
        broker.kill()
        damage(log_directory(broker.data_dir, 1))
        for _ in range(2):  # it stays so
            broker.start()
            status, body = broker.get("/readyz")
            assert status == 200
            [partition] = json.loads(body)["parked"]
            assert partition == "1"
            assert metrics(broker)["peeklock_partition_parked", "1"] == 1
            assert "logs/1" in broker.log_file.read_text()
            with RawPeer.connect(broker.amqp_port) as peer:
                handle = peer.attach_sender("orders")
                peer.transfer(message(b"refused"), handle)
                condition, text = error_of(peer.expect(DISPOSITION))
                assert condition == "amqp:internal-error"
                assert "Partition 1" in text
            assert received(broker, OTHER, 3) == [b"number %d" % number for number in range(3)]
            broker.stop()


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_the_log_of_the_home_the_broker_does_not_start_and_names_it(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Broker(tmp_path, CONFIG.format(other=OTHER), workers=2) as broker:
        send_numbers(broker, OTHER, 3)
        broker.kill()
        directory = log_directory(broker.data_dir, 0)
        damage(directory)
        before = {path: path.read_bytes() for path in directory.iterdir()}
        with pytest.raises(BrokerFailed) as failed:
            broker.start()
        assert str(directory) in str(failed.value)
        assert {path: path.read_bytes() for path in directory.iterdir()} == before
