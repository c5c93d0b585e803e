"""Compaction: the small files of an hour that is over become few, and files that nobody needs any more are removed.

The files that were replaced stay for `keep_seconds`, so that readers who still have an older manifest find them.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from itertools import islice

from storage.capture import files
from storage.capture.errors import DamagedFile
from storage.capture.manifest import DataFile, Kind, State, TableName
from storage.capture.place import PARTIAL
from storage.capture.tables import merged
from storage.capture.writing import CaptureOptions, CaptureWriter

HOUR_SECONDS = 3600


def mergeable(
    state: State, options: CaptureOptions, now_ms: int, left: Container[str] = ()
) -> Iterator[list[DataFile]]:
    """Files to be merged into one, each list of one table and hour, in the order in which they were captured. Pure.

    Files whose paths are in `left` are left as they are.
    """
    by_hour: dict[tuple[TableName, int], list[DataFile]] = defaultdict(list)
    for file in state.files.values():
        over_ms = ((file.hour + 1) * HOUR_SECONDS + options.compact_after_seconds) * 1000
        if file.path not in left and over_ms <= now_ms:
            by_hour[file.table, file.hour].append(file)
    for key in sorted(by_hour):
        yield from _runs(sorted(by_hour[key], key=lambda file: (file.captured_ms, file.path)), options)


def _runs(found: list[DataFile], options: CaptureOptions) -> Iterator[list[DataFile]]:
    """Runs of at least two neighbours that fit into one file together. Neighbours, so that offsets stay together."""
    run: list[DataFile] = []
    for file in [*found, None]:
        fits = file is not None and (
            sum(each.bytes for each in run) + file.bytes <= options.file_bytes
            and sum(each.memory_bytes for each in run) + file.memory_bytes <= options.memory_bytes
        )
        if not fits:
            if len(run) > 1:
                yield run
            run = []
        if file is not None:
            run.append(file)


def compact(writer: CaptureWriter, damaged: dict[str, DamagedFile], most: int = 8) -> int:
    """Merge what can be merged, in so many steps at most. Returns how many files were replaced.

    Files that turn out to be damaged are left as they are and come into `damaged`, by their paths; files that are in it
    already are not looked at. Raises Superseded, OSError.
    """
    replaced = 0
    for run in islice(mergeable(writer.state, writer.options, writer.clock_ms(), damaged), most):
        try:
            _merge(writer, run)
            replaced += len(run)
        except DamagedFile as error:
            at_fault = [file for file in run if writer.place.uri(file.path) == error.path]
            damaged.update({file.path: error for file in at_fault or run})
        writer.chain.renew_when_due()
    return replaced


def _merge(writer: CaptureWriter, run: list[DataFile]) -> None:
    part = merged(run[0].table, run[0].hour, (files.read_all(writer.place, file) for file in run))
    file = files.write(writer.place, part, run[0].captured_ms)
    _check(file, run, writer)
    new = {
        "files": (file,),
        "removed": tuple(each.path for each in run),
        "next": tuple(writer.state.next.values()),
    }
    writer.append(writer.state.following(Kind.COMPACTED, writer.clock_ms()).model_copy(update=new))


def _check(file: DataFile, run: Iterable[DataFile], writer: CaptureWriter) -> None:
    """Check that the new file has what the manifest says that the old ones have. Raises DamagedFile."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for each in run:
        for found in each.ranges:
            counts[found.position] += found.rows
    if counts != {found.position: found.rows for found in file.ranges}:
        raise DamagedFile(writer.place.uri(file.path), "has other rows than the files that it was made of")


def clean(writer: CaptureWriter) -> int:
    """Remove files that no reader needs. Returns how many. Raises Superseded, OSError, DamagedManifest."""
    before_ms = writer.clock_ms() - round(writer.options.keep_seconds * 1000)
    state = writer.state
    state.forget(before_ms)
    writer.chain.tidy(before_ms)
    kept = state.files.keys() | state.removed.keys()
    found = [stored for table in TableName for stored in writer.place.files(f"table={table}")]
    removed = 0
    for stored in found:
        is_ours = stored.path.endswith((".parquet", f".parquet{PARTIAL}"))
        if is_ours and stored.path not in kept and stored.modified_s * 1000 < before_ms:
            with suppress(FileNotFoundError):
                writer.place.delete(stored.path)
                removed += 1
    return removed
