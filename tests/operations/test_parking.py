"""Partitions that kill their worker are parked; whatever is asked of them then is refused, and nothing else happens."""

from pathlib import Path

import pytest

from broker import requests
from broker.errors import PartitionParked
from broker.partition.settings import PartitionSettings
from broker.settings.config import ConfigurationError
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
        "request": lambda: parked.request(QUEUE, requests.Counts(), 0),
        "probe": lambda: parked.request(0, requests.Probe(), 0),
        "transact": lambda: parked.transact("t", True, [SendOperation(QUEUE, False, [[MESSAGE]])], 0),
        "request in a transaction": lambda: parked.request_in("t", True, QUEUE, requests.Schedule([MESSAGE]), 0),
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
    parked.advance(0)
    assert not parked.pump(0).deliveries
    assert parked.next_timer_ms() is None
    assert parked.gauges() == {"parked": 1}
    assert not parked.commit()


def test_messages_to_put_back_are_refused_so_that_the_gateway_keeps_them(parked: ParkedPartition) -> None:
    with pytest.raises(PartitionParked):
        parked.restore(QUEUE, [], 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_partition_is_parked_by_its_second_crash_in_an_hour(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "touched"
    parking = Parking(path, clock)

    def crashed() -> bool:
        return parking.crashed(has_served=False)

    assert not crashed(), "there is no file yet"
    touching = TouchedPartition(path)
    assert not crashed(), "it has touched none"
    assert parking.parked == ()
    touching.set(5)
    assert crashed()
    touching.set(7)
    crashed()
    assert parking.parked == ()
    touching.set(5)
    clock.now += WITHIN_SECONDS + 1
    crashed()
    assert parking.parked == ()
    clock.now += WITHIN_SECONDS - 1
    crashed()
    assert list(parking.parked) == [5]
    touching.set(7)
    for _ in range(2):
        crashed()
    assert list(parking.parked) == [5, 7]
    assert not crashed(), "it was not opened"


def test_the_home_is_parked_only_once_the_broker_has_served(tmp_path: Path) -> None:
    parking = Parking(tmp_path / "touched")
    TouchedPartition(tmp_path / "touched").set(0)
    assert parking.crashed(has_served=False)
    with pytest.raises(ConfigurationError, match="partition 0 is damaged"):
        parking.crashed(has_served=False)
    assert parking.crashed(has_served=True)
    assert parking.parked == (0,)
