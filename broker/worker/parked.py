"""A partition that is out of service because its store killed the worker. The worker's other partitions are served."""

from collections.abc import Hashable
from typing import NoReturn

from broker.errors import PartitionParked
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from storage.memory import MemoryStore


class ParkedPartition(Partition):
    """Refuses every command with PartitionParked. Its store on disk is not opened; it has an empty one in memory."""

    def __init__(self, partition_id: int, settings: PartitionSettings) -> None:
        self.store = MemoryStore()
        super().__init__(partition_id, self.store, now_ms=0, incarnation=bytes(6), settings=settings)

    def _begin(self, queue_id: int, now_ms: int) -> NoReturn:
        raise PartitionParked(
            f"Partition {self.id}, which this entity lives on, is out of service: its store is damaged. "
            "The operator can look into it with `peeklock verify` and restore a backup."
        )

    def discharge(self, transaction: Hashable, commit: bool, now_ms: int) -> None:
        if commit:
            self._begin(0, now_ms)

    def look_at_room(self) -> None:
        """Does nothing: the store in memory is as large as it likes."""

    def gauges(self) -> dict[str, int]:
        return {"parked": 1}
