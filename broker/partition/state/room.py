"""Computes the room that a partition's store has up to its watermark."""

from broker.partition.settings import PartitionSettings
from storage.store import Store

PAGE_BYTES = 4096
# This much of a store, but at most a part of it, stays free, because freeing space needs room until the commit.
RESERVE_BYTES = 16 << 20
RESERVE_PART = 4
# A changed record takes up to four pages, and its earlier pages are not free before the next turn but one.
WORK_BYTES = 8 * PAGE_BYTES
LEAST_WORK = 128  # the least work of a turn, even if the store is full
SURE_BYTES = 64 << 20
# A store near its watermark refuses some messages and takes others. It counts as short until so many looks after.
QUIET_LOOKS = 5


class Room:
    """Measures the store rarely, because that takes 80 us, as long as a whole small turn.

    Between two measurements it subtracts the most that the partition may have written. While less than SURE_BYTES are
    left, it measures in every turn.
    """

    __slots__ = (
        "_free_bytes",
        "_is_known",
        "_quiet_looks",
        "_refused",
        "_settings",
        "_store",
        "_taken_bytes",
        "_whole_bytes",
        "shortage",
    )

    def __init__(self, store: Store, settings: PartitionSettings) -> None:
        self._store = store
        self._settings = settings
        self._is_known = False
        self._free_bytes = 0  # bytes up to the watermark; negative above it
        self._whole_bytes = 0  # free bytes in the whole store
        self._taken_bytes = 0  # the most that records of this turn take
        self._refused = False  # since the last look
        self._quiet_looks = QUIET_LOOKS
        self.shortage: str | None = None  # what is short, if messages are refused for that, as of the last look

    def free_bytes(self) -> int:
        """The bytes that the store can take up to its watermark, as of the begin of this turn at the latest."""
        if not self._is_known:
            self._measure()
        return self._free_bytes

    def work_limit(self) -> int:
        """The number of records that a turn may change so that all find room."""
        if not self._is_known:
            self._measure()
        limit, most = self._whole_bytes // WORK_BYTES, self._settings.turn_work
        return most if limit >= most else min(most, max(LEAST_WORK, limit))

    def take(self, size_bytes: int) -> None:
        """Count records of this size that are stored in this turn."""
        self._taken_bytes += size_bytes

    def end_turn(self, work: int) -> None:
        """End the turn, in which `work` records were changed."""
        taken = self._taken_bytes + work * WORK_BYTES
        self._taken_bytes = 0
        self._free_bytes -= taken
        self._whole_bytes -= taken
        self._is_known = self._is_known and self._free_bytes > SURE_BYTES

    def refuse(self) -> None:
        """Messages were refused, because they found no room."""
        self._refused = True

    def look(self) -> None:
        """Measure anew, because others write to the disk, too. To be called each second."""
        is_disk = self._measure()
        self._quiet_looks = 0 if self._refused else self._quiet_looks + 1
        self._refused = False
        is_short = self._free_bytes < 0 or self._quiet_looks < QUIET_LOOKS
        nearly = ("the disk is nearly full" if is_disk else "the store is nearly full") if is_short else None
        self.shortage = self._store.shortage() or nearly

    def _measure(self) -> bool:
        """True if the disk leaves less room than the store's own limit does."""
        settings, capacity = self._settings, self._store.capacity_bytes
        whole, used = capacity(), self._store.used_bytes()
        reserve = min(RESERVE_BYTES, whole // RESERVE_PART)
        own, on_disk = min(int(settings.store_watermark * whole), whole - reserve), capacity(settings.min_free_bytes)
        limit = min(own, on_disk)
        self._free_bytes = limit - used if self._store.shortage() is None else min(-1, limit - used)
        self._whole_bytes = whole - used
        self._is_known = True
        return on_disk < own
