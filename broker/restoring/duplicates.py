"""The windows of duplicate detection, as far as captured rows tell them.

A row that brings a message tells its id and partition key. Of a topic's messages the copies in its subscriptions tell
them, so the ids of messages that no subscription took are not known.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from broker.catalog.catalog import Definition
from broker.namespace.entities import SubscriptionDescription
from broker.partition.messages.duplicates import digest
from storage.capture.survey import to_ms
from storage.seen_ids import SeenIds
from storage.seen_runs import SeenLimits, SeenMemory
from storage.store import Store

_COLUMNS: Final = [
    "eventTime", "entity", "sequenceNumber", "messageId", "sessionId", "partitionKey", "reason", "originEntity",
]  # fmt: skip
_ROOM_BYTES: Final = 1 << 40  # whether there is room, the store says


class _Window(NamedTuple):
    entity_id: int
    ms: int
    partitions: tuple[int, ...]


class Windows:
    """The windows of all entities. `stores` are by partition; they get what `add` finds."""

    def __init__(self, entities: Iterable[Definition], stores: Mapping[int, Store], now_ms: int) -> None:
        """Windows that have ended by `now_ms` are left out."""
        self._stores = stores
        self._now_ms = now_ms
        self._windows: dict[str, _Window] = {}
        for each in entities:
            of = each.description
            if not isinstance(of, SubscriptionDescription) and of.requires_duplicate_detection:
                window_ms = of.duplicate_detection_history_time_window_ms
                self._windows[of.path.lower()] = _Window(each.entity_id, window_ms, each.partitions)
        self._longest_ms = max((each.ms for each in self._windows.values()), default=0)
        self._memory = {partition: SeenMemory(SeenLimits()) for partition in stores}
        self._seen: dict[tuple[int, int], SeenIds] = {}  # by partition and entity id
        self.ids = 0

    @property
    def longest_ms(self) -> int:
        """0 if there is none."""
        return self._longest_ms

    def add(self, partition: int, batch: pa.RecordBatch) -> None:
        """Rows of this partition that are before the cut. Raises StoreError."""
        windows = {path: each for path, each in self._windows.items() if self._where(partition, each) in self._stores}
        since = pa.scalar((self._now_ms - self._longest_ms) * 1000, pa.int64())
        if not windows or not pc.any(pc.greater(batch.column("eventTime").cast(pa.int64()), since)).as_py():
            return
        wanted = pc.and_(
            pc.is_in(batch.column("op"), pa.array(["enqueued", "scheduled"])), pc.is_valid(batch.column("messageId"))
        )
        is_of_one = pc.or_(
            _is_one_of(batch.column("entity"), windows), _is_one_of(batch.column("originEntity"), windows)
        )
        wanted = pc.and_(wanted, is_of_one)
        found: dict[tuple[str, int], dict[bytes, int]] = defaultdict(dict)  # by entity and end: digests, their numbers
        for row in batch.filter(wanted).select(_COLUMNS).to_pylist():
            path, number = self._sent_to(row)
            window = windows.get(path)
            if window is None:
                continue
            end_ms = to_ms(row["eventTime"]) + window.ms
            if end_ms > self._now_ms:
                key = row["partitionKey"]
                if key is None and len(window.partitions) > 1:
                    key = row["sessionId"]
                found[path, end_ms].setdefault(digest(row["messageId"].encode(errors="replace"), key), number)
        for (path, end_ms), numbers in found.items():
            self._keep(partition, windows[path], end_ms, numbers)

    @staticmethod
    def _where(partition: int, window: _Window) -> int:
        """The partition that has the ids of messages that this one has got."""
        return partition if partition in window.partitions else window.partitions[0]  # it was moved since

    @staticmethod
    def _sent_to(row: Mapping[str, Any]) -> tuple[str, int]:
        """The entity that accepted the message, and its number there; 0 if it is not known."""
        if row["reason"] in (None, "forwarded"):
            return row["entity"].lower(), row["sequenceNumber"]
        if row["reason"] == "published":
            return row["originEntity"].lower(), 0
        return "", 0

    def _keep(self, partition: int, window: _Window, end_ms: int, numbers: Mapping[bytes, int]) -> None:
        partition = self._where(partition, window)
        seen = self._seen.get((partition, window.entity_id))
        if seen is None:
            seen = SeenIds(self._stores[partition], self._memory[partition], window.entity_id, self._now_ms)
            self._seen[partition, window.entity_id] = seen
        known = seen.find([*numbers], self._now_ms)
        new = {each: number for each, number in numbers.items() if each not in known}
        if new:
            seen.add([*new], [*new.values()], end_ms)
            self.ids += len(new)
        while seen.is_busy:
            seen.step(self._now_ms, _ROOM_BYTES)


def _is_one_of(names: pa.Array, paths: Container[str]) -> pa.Array:
    """Whether each name is one of these paths, which are in lower case; null is none of them."""
    return pc.is_in(
        names, pa.array([each for each in pc.unique(names).to_pylist() if each and each.lower() in paths], pa.string())
    )
