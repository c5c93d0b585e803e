"""The room of a store is measured rarely, and still never overrated near its watermark."""

from pathlib import Path

import pytest

from broker.errors import QuotaExceeded
from broker.partition.settings import PartitionSettings
from broker.partition.state.room import QUIET_LOOKS
from broker.wire import Outcome
from storage.lmdb_store import LmdbStore
from storage.memory import MemoryStore
from tests.partition.driver import Driver, message

MAP_BYTES = 256 << 20
SETTINGS = PartitionSettings(store_watermark=0.6)


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.measured = 0
        self.capacity = 1 << 40
        self.reason: str | None = None

    def shortage(self) -> str | None:
        return self.reason

    def capacity_bytes(self, spare_bytes: int = 0) -> int:
        return self.capacity - spare_bytes

    def used_bytes(self) -> int:
        self.measured += 1
        return super().used_bytes()


def test_turns_far_from_the_watermark_measure_nothing() -> None:
    store = CountingStore()
    driver = Driver(store)
    for _ in range(200):
        driver.send("m")
        driver.settle(Outcome.ACCEPTED, *driver.receive(1))
    assert store.measured == 1


def test_turns_near_the_watermark_measure_each_time() -> None:
    store = CountingStore()
    store.capacity = 100 << 20
    driver = Driver(store, PartitionSettings(store_watermark=0.5))
    before = store.measured
    for _ in range(10):
        driver.send("m")
    assert store.measured == before + 10


def test_a_store_is_short_of_room_while_it_refuses_and_a_little_longer() -> None:
    store = CountingStore()
    driver = Driver(store)
    partition = driver.partition

    def looks(count: int) -> list[str | None]:
        found = []
        for _ in range(count):
            partition.look_at_room()
            found.append(partition.shortage)
        return found

    assert looks(1) == [None]
    store.capacity = 10
    assert looks(2) == ["the store is nearly full"] * 2
    assert partition.gauges()["refuses_sends"] == 1
    store.capacity = 1 << 40
    assert looks(1) == [None], "nothing was refused meanwhile"
    store.capacity = 10
    partition.look_at_room()
    with pytest.raises(QuotaExceeded):
        driver.send("m")
    store.capacity = 1 << 40
    assert looks(QUIET_LOOKS + 2) == ["the store is nearly full"] * QUIET_LOOKS + [None] * 2
    assert partition.gauges()["refuses_sends"] == 0


def test_a_store_that_takes_nothing_says_why() -> None:
    """Whatever it measures: the disk of its tables may be full, or that of its log."""
    store = CountingStore()
    driver = Driver(store)
    driver.send("m")
    store.reason = "the log is full"
    driver.partition.look_at_room()
    assert driver.partition.shortage == "the log is full"
    assert driver.partition.gauges()["refuses_sends"] == 1
    with pytest.raises(QuotaExceeded):
        driver.send("m")
    driver.settle(Outcome.ACCEPTED, *driver.receive(1))
    store.reason = None
    for _ in range(QUIET_LOOKS + 1):
        driver.partition.look_at_room()
    assert driver.partition.shortage is None
    driver.send("m")


def test_what_others_write_to_the_disk_is_seen_when_the_worker_asks_for_it() -> None:
    store = CountingStore()
    driver = Driver(store)
    driver.send("m")
    store.capacity = 10
    driver.send("m")
    driver.partition.look_at_room()
    with pytest.raises(QuotaExceeded):
        driver.send("m")


def accepted(path: Path, size: int, measures_each_turn: bool) -> int:
    """How many messages of this size a store takes, in turns of ten, until it is above its watermark."""
    store = LmdbStore(path, partition_id=5, map_size_bytes=MAP_BYTES, create=True)
    try:
        driver = Driver(store, SETTINGS)
        for count in range(0, MAP_BYTES // size, 10):
            if measures_each_turn:
                driver.partition.look_at_room()
            try:
                driver.send(*[message(bytes(size))] * 10)
            except QuotaExceeded:
                return count
        raise AssertionError("never full")
    finally:
        store.close()


@pytest.mark.parametrize("size", [3_000, 100_000])
def test_sends_are_refused_at_the_watermark(tmp_path: Path, size: int) -> None:
    assert accepted(tmp_path / "a", size, False) == accepted(tmp_path / "b", size, True) > 0
