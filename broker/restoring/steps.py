"""The steps of a restore as functions of one unit, to be called by any process."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from broker.restoring.definitions import Definitions, entities_of
from broker.restoring.duplicates import Windows
from storage.capture.manifest import DataFile
from storage.capture.place import Place
from storage.capture.rebuilding import Rebuilder, Rebuilt
from storage.capture.sifting import Sieve, Tell, Work, choose, chosen, fetch, ids_of, look_at, seen_in, unwanted_of
from storage.capture.survey import Look, Survey
from storage.data_dir import PARTITIONS, partition_path
from storage.lmdb_store import DATA_FILE, LmdbStore
from storage.maintenance import MaintenanceError, verify_partition

PIECE_BYTES: Final = 64 << 20  # of records that are in memory at once


class WronglyRebuilt(MaintenanceError):
    """What was written did not pass `verify`: a fault of this program, or of the disk."""


class Files(NamedTuple):
    """All files of a capture, oldest hour first."""

    ledger: list[DataFile]
    messages: list[DataFile]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in (*self.ledger, *self.messages))

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in (*self.ledger, *self.messages))


@dataclass(frozen=True)
class Steps:
    """The steps before the last one. `folder` is that of the work."""

    url: str
    sieve: Sieve
    folder: Path

    def look_at(self, tell: Tell, file: DataFile, overlaps: bool) -> None:
        """See `storage.capture.sifting`, as for the next two."""
        look_at(Place.of(self.url), file, self.sieve, Work(self.folder), tell, overlaps=overlaps)

    def choose(self, tell: Tell, partition: int, ledger: Sequence[DataFile]) -> int:
        return choose(partition, ledger, self.sieve, Work(self.folder))

    def fetch(self, tell: Tell, file: DataFile, partitions: Sequence[int]) -> None:
        fetch(Place.of(self.url), file, self.sieve, partitions, Work(self.folder), tell)

    def seen(self, ledger: Sequence[DataFile]) -> Look:
        """What all files of the ledger say together, when all were looked at."""
        found = Look()
        for file in ledger:
            found.add(seen_in(file, Work(self.folder)))
        return found


@dataclass(frozen=True)
class Rebuilding:
    """The last step. `folder` is that of the work; stores are made in its folder PARTITIONS."""

    sieve: Sieve
    surveyed: Survey
    definitions: Definitions
    files: Files
    map_size_bytes: int
    now_ms: int
    folder: Path

    def begin(self) -> None:
        (self.folder / PARTITIONS).mkdir(mode=0o700, exist_ok=True)

    def partition(self, tell: Tell, partition: int) -> tuple[int, Rebuilt, int]:
        """Make and verify its store. The number is that of the ids for duplicate detection in it.

        Raises WronglyRebuilt, StoreError, OSError.
        """
        work, unit, store_path = Work(self.folder), f"rebuilt-{partition}", partition_path(self.folder, partition)
        if (known := work.noted(unit)) is not None:
            return partition, Rebuilt.from_document(known["rebuilt"]), known["ids"]
        shutil.rmtree(store_path, ignore_errors=True)  # of a process that was killed
        with LmdbStore(store_path, partition_id=partition, map_size_bytes=self.map_size_bytes, create=True) as store:
            self.definitions.write(store)
            rebuilt = self._messages(tell, partition, store, work)
            ids = self._ids(partition, store, work)
            store.commit()
        self._verify(partition)
        (store_path / DATA_FILE).chmod(0o600)
        work.note(unit, {"rebuilt": rebuilt.document(), "ids": ids})
        return partition, rebuilt, ids

    def _messages(self, tell: Tell, partition: int, store: LmdbStore, work: Work) -> Rebuilt:
        rebuilder = Rebuilder(store, partition, entities_of(self.definitions.entities), self.surveyed)
        if partition not in self.sieve.epochs:
            return rebuilder.finish()
        for rows in chosen(partition, self.files.messages, work, PIECE_BYTES):
            rebuilder.add(rows)
            tell(len(rows))
        return rebuilder.finish(unwanted_of(partition, work))

    def _ids(self, partition: int, store: LmdbStore, work: Work) -> int:
        """Restore the seen ids, also from other partitions: entities that are here now may have been there."""
        windows = Windows(self.definitions.entities, {partition: store}, self.now_ms)
        if self.sieve.ids_us is not None:
            for other, epoch in sorted(self.sieve.epochs.items()):
                for rows in ids_of(other, self.files.ledger, epoch, work):
                    windows.add(other, rows)
        return windows.ids

    def _verify(self, partition: int) -> None:
        report = verify_partition(self.folder, partition)
        if not report.ok:
            raise WronglyRebuilt(
                f"partition {partition}: {report.problems.total()} problems in what was written, the first of them: "
                f"{report.findings[0].text}"
            )
