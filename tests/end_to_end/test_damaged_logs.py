"""A broker is killed, and its log damaged: what needs that log is out of service, and the rest is served."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from broker.cli import commands
from storage.log.frames import BLOCK_BYTES, FrameCodec, padded
from storage.log.reading import LogOnDisk, Segment
from storage.log.recovery import log_directory
from storage.log.segments import segment_numbers, segment_path
from tests.brokers import Broker, BrokerFailed
from tests.end_to_end.health import elsewhere, metrics, send_numbers
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


def truncate_newest_segment(directory: Path) -> None:
    """Behind the first of its turns, as if nothing had followed."""
    segment = max(LogOnDisk(directory, int(directory.name)).segments, key=first_lsn)
    codec = FrameCodec(LogOnDisk(directory, int(directory.name)).log_id)
    os.truncate(segment.path, BLOCK_BYTES + padded(codec.size_at(memoryview(segment.data)[BLOCK_BYTES:])))


def first_lsn(segment: Segment) -> int:
    return 0 if segment.header is None else segment.header.first_lsn


DAMAGES = [flip_first_frame, lose_segments, truncate_newest_segment]


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


TORN = "the log ends with a turn that is torn or damaged"


def damage_last_turn(directory: Path) -> str:
    """Returns the name of its file."""
    log = LogOnDisk(directory, int(directory.name))
    [*_, last] = log.turns(log.tables.lsn)
    codec = FrameCodec(log.log_id)
    for segment in log.segments:
        data = memoryview(segment.data)
        for at in range(BLOCK_BYTES, len(data), BLOCK_BYTES):
            if codec.lsn_at(data[at:]) == last.lsn:
                with segment.path.open("r+b") as file:
                    file.seek(at + 45)
                    file.write(bytes([data[at + 45] ^ 1]))
                return segment.path.name
    raise AssertionError("there is no such turn")


def warnings(broker: Broker, event: str) -> list[str]:
    lines = broker.log_file.read_text().splitlines()
    return [line for line in lines if event in line and '"warning"' in line]


def test_a_last_turn_that_is_torn_or_damaged_is_a_warning_and_verify_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Broker(tmp_path, CONFIG.format(other=OTHER), workers=1) as broker:
        send_numbers(broker, "orders", 3)
        broker.kill()
        name = damage_last_turn(log_directory(broker.data_dir, 0))
        assert verify(broker, capsys) == (0, 1)
        broker.start()
        [warning] = warnings(broker, TORN)
        assert name in warning
        assert len(received(broker, "orders", 2)) == 2
        assert verify(broker, capsys) == (0, 0), "what is being written is not torn"
        # A worker that is started again alone tells it, too.
        worker, [checkpointer] = broker.worker(), broker.running_as("storage.log.checkpointer")
        checkpointer.suspend()  # so that the tables do not have the last turn
        send_numbers(broker, "orders", 1)
        worker.suspend()
        damage_last_turn(log_directory(broker.data_dir, 0))
        worker.kill()
        checkpointer.kill()
        eventually(lambda: len(warnings(broker, TORN)) == 2, "it is told")
        broker.stop()
        broker.start()
        assert len(warnings(broker, TORN)) == 2


def verify(broker: Broker, capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """The exit code, and how many notes there are."""
    with pytest.raises(SystemExit) as ended:
        commands.app(["verify", str(broker.data_dir)])
    said = capsys.readouterr().out
    assert said.endswith(f"{broker.data_dir}: ok\n")
    return int(ended.value.code or 0), len([line for line in said.splitlines() if "is torn or damaged" in line])
