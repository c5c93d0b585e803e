"""The captured files of a ledger: which count, and whether they are what the manifest says, before they are read."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import SparkSession

from storage.capture import files
from storage.capture.chain import load
from storage.capture.errors import CaptureError, DamagedFile, InvalidPlace
from storage.capture.inventory import Expected, inventory
from storage.capture.manifest import DataFile, State, TableName
from storage.capture.place import Place
from storage.wording import plural

THREADS: Final = 8  # files that the driver reads at once, where it is the only machine


class NoCapture(Exception):
    """The path is none of a capture's files, or of files that cannot be reached. The text is for users."""


class DamagedLedger(Exception):
    """A file of a ledger is missing or damaged; the text names it."""


class Manifest(NamedTuple):
    """What a capture's manifest said when this was made."""

    url: str
    place: Place
    state: State

    @classmethod
    def at(cls, path: str) -> "Manifest | None":
        """None if there is none. Raises NoCapture, DamagedLedger."""
        url = path if "://" in path else str(Path(path).absolute())
        try:
            place = Place.of(url)
            state = load(place)
        except InvalidPlace as error:
            raise NoCapture(str(error)) from error
        except (CaptureError, OSError) as error:
            raise DamagedLedger(f"{path}: {error}") from error
        return None if state is None else cls(url, place, state)

    @property
    def expected(self) -> list[Expected]:
        return inventory(self.state)

    def described(self, now_s: float | None = None) -> str:
        """The namespace, its id, and how old the newest entry is."""
        state = self.state
        told = f"a capture of the namespace {state.namespace!r}, id {state.namespace_id or 'not known'}"
        if not state.written_ms:
            return told
        minutes = round(max(0.0, (time.time() if now_s is None else now_s) - state.written_ms / 1000) / 60)
        return f"{told}; the newest entry of its manifest is {minutes:,} {plural(minutes, 'minute')} old"

    def files(self, table: TableName, behind: Mapping[tuple[int, str], int] | None = None) -> list[DataFile]:
        """Return the files of a table that count, oldest hour first.

        `behind`: without those that have no rows behind these offsets, by partition and epoch; but for one, so that
        there are columns.
        """
        found = [file for file in self.state.files.values() if file.table is table]
        found.sort(key=lambda file: (file.hour, file.path))
        if behind is None:
            return found
        return [file for file in found if _has_rows_behind(file, behind)] or found[-1:]

    def uris(self, spark: SparkSession, wanted: Sequence[DataFile]) -> list[str]:
        """Check that these files are whole, and return where Spark finds them. Raises DamagedLedger."""
        check = partial(_damage, self.url)
        if damage := next((each for each in _on_all(spark, check, wanted) if each is not None), None):
            raise DamagedLedger(damage)
        # Hadoop, whose file systems Spark uses, calls some of them by other names than pyarrow.
        return [re.sub("^s3:", "s3a:", self.place.uri(file.path)) for file in wanted]


def _on_all(
    spark: SparkSession, check: Callable[[DataFile], str | None], wanted: Sequence[DataFile]
) -> Sequence[str | None]:
    """Check files on a cluster by its executors: the driver alone would read all that they read together."""
    context = spark.sparkContext
    if context.master.startswith("local"):
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(check, wanted))
    tasks = max(1, min(len(wanted), context.defaultParallelism))
    return list(context.parallelize(wanted, tasks).map(check).collect())


def _damage(url: str, file: DataFile) -> str | None:
    """Say how the file is damaged; None if it is whole. Raises OSError."""
    try:
        files.require_whole(Place.of(url), file)
    except DamagedFile as error:
        return str(error)
    return None


def _has_rows_behind(file: DataFile, ends: Mapping[tuple[int, str], int]) -> bool:
    return any(each.last >= ends.get(each.position, 0) for each in file.ranges)
