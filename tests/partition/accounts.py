"""Whether what a partition says it holds is what its store holds: counts by state, and bytes, of every queue.

The reckoning is that of `peeklock verify` (`storage.verification`), which counts everything anew from the messages and
entries that are stored. It shares no code with the bookkeeping of the state machine.
"""

from broker import requests
from broker.partition.partition import Partition
from storage.records import Counts, decode_counts
from storage.store import Store, Table
from storage.verification import verify_snapshot


class _Contents:
    """A store in memory as `verify` reads one."""

    def __init__(self, store: Store) -> None:
        self.partition_id = 0
        self._store = store

    def items(self, table: Table) -> list[tuple[bytes, bytes]]:
        return self._store.scan(table, b"", b"\xff" * 512, 1 << 30)

    def get(self, table: Table, key: bytes) -> bytes | None:
        return self._store.get(table, key)


def problems(store: Store) -> list[str]:
    """What `peeklock verify` would say of it."""
    assert not store.dirty
    report = verify_snapshot(_Contents(store))  # type: ignore[arg-type]
    return [finding.text for finding in report.findings]


def assert_counted_rightly(partition: Partition, store: Store, now_ms: int) -> None:
    """All is committed, and nothing is set aside. What the request `counts` says is stored, and the truth.

    What is in memory is as its modules say.
    """
    partition.check()
    assert problems(store) == []
    stored = {int.from_bytes(key, "big"): decode_counts(value) for key, value in _Contents(store).items(Table.COUNTS)}
    said = partition.request(0, requests.Counts(), now_ms)
    for queue_id, (available, deferred, scheduled, size_bytes, locked) in said.items():
        counts = stored.get(queue_id, Counts())
        assert (available, deferred, scheduled, size_bytes) == counts[1:]
        assert 0 <= locked <= available + deferred
