"""A partition as it was at one commit, young changes included, while its worker may go on."""

from collections.abc import Iterator
from contextlib import suppress
from heapq import merge
from pathlib import Path
from typing import Self

from storage.lmdb_store import DATA_FILE, LmdbStore, TablesSnapshot
from storage.log.changes import Layer
from storage.log.reading import LogDamaged, LogOnDisk
from storage.log.recovery import Young, log_of_partition
from storage.log.tables import decode_position, write_net_effect
from storage.records import LOG_POSITION_KEY
from storage.store import StoreDamaged, Table

ATTEMPTS = 20  # a worker that writes as fast as it can uses segments again some times a second


class Snapshot:
    """See TablesSnapshot. Raises StoreError, UnknownFormat, LogDamaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for _ in range(ATTEMPTS - 1):
            # While the worker writes, its log may have moved on before it is read.
            with suppress(LogDamaged):
                self._open()
                return
        self._open()

    def _open(self) -> None:
        self._tables = tables = TablesSnapshot(self.path)
        try:
            self.partition_id = tables.partition_id
            self._young, self.torn = _young(tables)  # see `LogEnd`
        except BaseException:
            tables.close()
            raise

    def items(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        """All items in key order. Raises StoreError if pages of the file are invalid."""
        young = self._young.tables[table]
        if not young:
            yield from self._tables.items(table)
            return
        changed = sorted({**young.changed, **young.fresh}.items())
        older = (item for item in self._tables.items(table) if item[0] not in young.changed)
        for key, value in merge(older, changed, key=_key):
            if value is not None:
                yield key, value

    def get(self, table: Table, key: bytes) -> bytes | None:
        young = self._young.tables[table]
        if key in young.fresh or key in young.changed:
            return young.value(key)
        return self._tables.get(table, key)

    def copy(self, target: Path) -> None:
        """Write it, compacted, into the empty directory `target`. Not yet synced to disk.

        The copy still names the log, which has no changes for it any more: see `renew_store_id`.
        """
        self._tables.copy(target)
        if self._young:
            size = (target / DATA_FILE).stat().st_size
            with LmdbStore(
                target, partition_id=self.partition_id, map_size_bytes=size, create=False, attached=True
            ) as store:
                write_net_effect(store, self._young.net_effect())
                store.commit()

    def close(self) -> None:
        self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(item: tuple[bytes, bytes | None]) -> bytes:
    return item[0]


def _young(tables: TablesSnapshot) -> tuple[Layer, str]:
    """What the partition's log has, and its tables have not; and what is torn at its end."""
    value = tables.get(Table.META, LOG_POSITION_KEY)
    if value is None:
        return Layer(), ""
    try:
        at = decode_position(value)
    except StoreDamaged as error:
        raise StoreDamaged(f"{tables.path}: {error}") from error
    log = LogOnDisk(log_of_partition(tables.path, at), at.worker)
    partition = tables.partition_id
    young = Young(log, {partition: at}, {partition: tables.path})
    return young.layers[partition], young.end.torn
