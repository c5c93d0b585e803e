"""Partitions that kill their worker are parked; whatever is asked of them then is refused, and nothing else happens."""

from pathlib import Path

import pytest

from broker.errors import PartitionParked
from broker.partition.settings import PartitionSettings
from broker.supervisor.parking import WITHIN_SECONDS, Parking
from broker.touched_partition import TouchedPartition
from broker.wire import Outcome, SendOperation
from broker.worker.parked import ParkedPartition

QUEUE = 8
MESSAGE = [bytes(16), b"a", None, None]


@pytest.fixture
def parked() -> ParkedPartition:
    return ParkedPartition(3, PartitionSettings())


def test_every_command_is_refused(parked: ParkedPartition) -> None:
    commands = {
        "send": lambda: parked.send(QUEUE, [MESSAGE], 0),
        "receive": lambda: parked.open_receiver("x", QUEUE, False, 0),
        "settle": lambda: parked.settle(QUEUE, [bytes(16)], Outcome.ACCEPTED, None, 0),
        "request": lambda: parked.request("counts", QUEUE, [], 0),
        "probe": lambda: parked.request("probe", 0, [], 0),
        "transact": lambda: parked.transact("t", True, [SendOperation(QUEUE, False, [[MESSAGE]])], 0),
        "request in a transaction": lambda: parked.request_in("t", True, "schedule", QUEUE, [[MESSAGE]], 0),
        "commit": lambda: parked.discharge("t", True, 0),
    }
    for command in commands.values():
        with pytest.raises(PartitionParked, match="Partition 3"):
            command()
    assert not parked.has_changed
    assert not parked.commit()


def test_commands_without_an_answer_are_ignored(parked: ParkedPartition) -> None:
    parked.grant("x", 10)
    parked.drain("x", 10)
    parked.close_receiver("x", True, 0)
    parked.discharge("t", False, 0)
    parked.restore(QUEUE, [], 0)
    parked.advance(0)
    assert not parked.pump(0).deliveries
    assert parked.next_timer_ms() is None
    assert parked.gauges() == {"parked": 1}
    assert not parked.commit()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_partition_is_parked_by_its_second_crash_in_an_hour(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "touched"
    parking = Parking(path, clock)
    parking.crashed()  # before there was a file
    touching = TouchedPartition(path)
    parking.crashed()  # before it touched any
    assert parking.parked == ()
    touching.set(5)
    parking.crashed()
    touching.set(7)
    parking.crashed()
    assert parking.parked == ()
    touching.set(5)
    clock.now += WITHIN_SECONDS + 1
    parking.crashed()
    assert parking.parked == ()
    clock.now += WITHIN_SECONDS - 1
    parking.crashed()
    assert list(parking.parked) == [5]
    touching.set(7)
    for _ in range(2):
        parking.crashed()
    assert list(parking.parked) == [5, 7]
