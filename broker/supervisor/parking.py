"""Decides which partitions of a worker are out of service because their stores are damaged."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from broker.catalog.catalog import HOME
from broker.logging import get_logger
from broker.settings.config import ConfigurationError
from broker.touched_partition import touched_partition

CRASHES = 2  # at the same partition within this time; a single one may have any cause
WITHIN_SECONDS = 3600.0

log = get_logger("supervisor")


def home_is_damaged(reason: str) -> str:
    """The message of a start that ends because of it."""
    return (
        f"the store of partition {HOME} is damaged, which holds the catalog of all entities: {reason}. The files were "
        "left as they are. Look into them with: peeklock verify, and restore a backup with: peeklock restore"
    )


class Parking:
    """`touched` is the worker's file of `broker.touched_partition`. Partitions stay parked until the broker ends."""

    def __init__(self, touched: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._touched = touched
        self._clock = clock
        self._crashes: dict[int, list[float]] = defaultdict(list)
        self.parked: tuple[int, ...] = ()

    def crashed(self, has_served: bool) -> bool:
        """The worker was killed by data that it read. False if that is not known to be a partition's store.

        `has_served`: the broker was ready before. Without its home it cannot become ready: raises ConfigurationError.
        """
        partition = touched_partition(self._touched)
        if partition is None or partition in self.parked:
            return False
        now = self._clock()
        recent = [at for at in self._crashes[partition] if now - at < WITHIN_SECONDS]
        self._crashes[partition] = [*recent, now]
        if len(self._crashes[partition]) >= CRASHES:
            if partition == HOME and not has_served:
                raise ConfigurationError(home_is_damaged("reading it has ended the worker again and again"))
            self.park(partition, "reading it has ended the worker again and again")
        return True

    def park(self, partition: int, reason: str) -> None:
        """Start the worker without this partition from now on; `reason` tells the damage of its store."""
        self.parked = (*self.parked, partition)
        log.error(
            "partition parked: its store is damaged; run `peeklock verify`, restore a backup with `peeklock restore`, "
            "and start again",
            partition=partition,
            reason=reason,
        )
