"""Message ids of one entity, driven as a partition drives them; their clock stands until a test moves it."""

import random
from typing import Generic, cast

from typing_extensions import TypeVar

from storage.memory import MemoryStore
from storage.records import NEVER, decode_manifest
from storage.seen_ids import SeenIds
from storage.seen_runs import SeenLimits, SeenMemory
from storage.store import Table

ENTITY = 7
TABLES = (Table.DUPLICATE_LOG, Table.DUPLICATE_RUNS, Table.DUPLICATE_CHUNKS, Table.DUPLICATE_FILTERS)
SMALL = SeenLimits(run_ids=4, fan_out=2, chunk_ids=2, step_ids=3)

StoreClass = TypeVar("StoreClass", bound=MemoryStore, covariant=True, default=MemoryStore)


def digests(count: int, seed: int = 1) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(16) for _ in range(count)]


class Ids(Generic[StoreClass]):
    """Ids of one entity, that know the time and go on from what the store holds."""

    def __init__(self, limits: SeenLimits = SMALL, store: StoreClass | None = None) -> None:
        self.store = store or cast(StoreClass, MemoryStore())
        self.limits = limits
        self.now_ms = 1000
        self.number = 0
        self.start()

    def start(self) -> None:
        self.memory = SeenMemory(self.limits)
        self.ids = SeenIds(self.store, self.memory, ENTITY, self.now_ms)

    def find(self, *sought: bytes) -> dict[bytes, int]:
        return self.ids.find([*sought], self.now_ms)

    def add(self, *new: bytes, window_ms: int = 1000) -> list[int]:
        numbers = range(self.number + 1, self.number + len(new) + 1)
        self.number += len(new)
        self.ids.add([*new], numbers, self.now_ms + window_ms)
        return [*numbers]

    def step(self, room_bytes: int = NEVER) -> int:
        return self.ids.step(self.now_ms, room_bytes)

    def work(self, room_bytes: int = NEVER) -> int:
        """All that is to be done now; returns when more is."""
        while (due_ms := self.step(room_bytes)) <= self.now_ms:
            pass
        return due_ms

    def records(self, table: Table) -> list[tuple[bytes, bytes]]:
        return self.store.scan(table, b"\0", b"\xff" * 32, 1 << 20)

    def levels(self) -> list[int]:
        """Of the complete runs."""
        manifests = [decode_manifest(value) for _, value in self.records(Table.DUPLICATE_RUNS)]
        return sorted(manifest.level for manifest in manifests if manifest.complete)
