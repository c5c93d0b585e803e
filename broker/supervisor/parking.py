"""Decides which partitions of a worker are out of service because their stores are damaged."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from broker.logging import get_logger
from broker.touched_partition import touched_partition

CRASHES = 2  # at the same partition within this time; a single one may have any cause
WITHIN_SECONDS = 3600.0

log = get_logger("supervisor")


class Parking:
    """`touched` is the worker's file of `broker.touched_partition`. Partitions stay parked until the broker ends."""

    def __init__(self, touched: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._touched = touched
        self._clock = clock
        self._crashes: dict[int, list[float]] = defaultdict(list)
        self.parked: tuple[int, ...] = ()

    def crashed(self) -> None:
        """The worker was killed by data that it read."""
        partition = touched_partition(self._touched)
        if partition is None or partition in self.parked:
            return
        now = self._clock()
        recent = [at for at in self._crashes[partition] if now - at < WITHIN_SECONDS]
        self._crashes[partition] = [*recent, now]
        if len(self._crashes[partition]) >= CRASHES:
            self.park(partition, "reading it has ended the worker again and again")

    def park(self, partition: int, reason: str) -> None:
        """Start the worker without this partition from now on; `reason` tells the damage of its store."""
        self.parked = (*self.parked, partition)
        log.error(
            "partition parked: its store is damaged; run `peeklock verify`, restore a backup with `peeklock restore`, "
            "and start again",
            partition=partition,
            reason=reason,
        )
