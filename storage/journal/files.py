"""The journal files of one partition: rows are appended to the newest, and read by offset from all.

    <directory>/<epoch, 16 hex digits>-<first offset, 20 digits>.journal

An epoch is a row of offsets without gaps. It ends when the store of the partition is another one (of a restored copy),
because the offsets of the other one go on from what was copied. Its first four bytes are the time of its beginning in
seconds, so that names sort; the others are random.

One thread appends, syncs and deletes; others may read meanwhile. A reader sees only what is synced.
"""

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from storage.durable import sync_directory, write_again
from storage.journal.frames import (
    HEAD_BYTES,
    MAGIC,
    CorruptJournal,
    Head,
    Made,
    check,
    decode_head,
    encode,
    made_of,
)
from storage.journal.schema import SCHEMA

EPOCH_BYTES: Final = 8
ROLL_BYTES: Final = 64 << 20
ROLL_SECONDS: Final = 3600.0
SUFFIX: Final = ".journal"
KEPT_INDEXES: Final = 8  # of files that were read last
_NO_TIME_MS: Final = -(1 << 63)  # of the last row, in a frame without rows: there was none


class JournalFull(OSError):
    """The disk takes no more. What was appended since the last sync is gone."""


class OutOfRetention(Exception):
    """The first offset is below the oldest row that is kept, or above what is readable."""

    def __init__(self, low: int, stable: int) -> None:
        super().__init__(f"the rows from {low} to below {stable} can be read")
        self.low, self.stable = low, stable


class JournalDamaged(Exception):
    """The rows from `first` to below `end` cannot be read: at this byte of this file is no valid frame."""

    def __init__(self, path: Path, byte: int, first: int, end: int, why: str) -> None:
        super().__init__(f"{path}: byte {byte}: the rows from {first} to {end - 1} cannot be read: {why}")
        self.path, self.byte, self.first, self.end = path, byte, first, end


class Reached(NamedTuple):
    """How far a journal is synced: there were rows up to below `offset`, of what `made` says."""

    epoch: bytes
    offset: int
    made: Made


@dataclass(slots=True)
class _File:
    path: Path
    epoch: bytes
    first_offset: int
    size: int  # bytes that are synced
    changed_s: float  # when it was last written, seconds since 1970
    low_ms: int | None = None  # the earliest time of its first frame, once somebody has asked
    first_at: int = 0


@dataclass(slots=True)
class _Index:
    """Where the frames of a file are, as far as it was looked through."""

    end: int = 0  # the place behind the last
    firsts: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    places: "array[int]" = field(default_factory=lambda: array("q"))
    behind: "array[int]" = field(default_factory=lambda: array("q"))  # the places behind them

    def add(self, head: Head) -> None:
        """The next frame."""
        self.firsts.append(head.first_offset)
        self.ends.append(head.end_offset)
        self.places.append(self.end)
        self.end += HEAD_BYTES + head.length
        self.behind.append(self.end)

    def drop_last(self) -> None:
        for each in (self.firsts, self.ends, self.places, self.behind):
            each.pop()


class Piece(NamedTuple):
    """A frame to read: its place, and which of its rows."""

    descriptor: int
    path: Path
    at: int
    head: Head
    first: int
    end: int

    @property
    def is_whole(self) -> bool:
        return (self.first, self.end) == (self.head.first_offset, self.head.end_offset)

    def payload(self) -> memoryview:
        """Read and check the payload. Raises JournalDamaged, OSError."""
        data = os.pread(self.descriptor, HEAD_BYTES + self.head.length, self.at)
        payload = memoryview(data)[HEAD_BYTES:]
        try:
            check(data, payload)
        except CorruptJournal as error:
            raise JournalDamaged(self.path, self.at, self.first, self.end, str(error)) from None
        return payload


class Oldest(NamedTuple):
    """The oldest file: when it was last written, in seconds since 1970, and where the next one begins."""

    changed_s: float
    next_epoch: bytes
    next_offset: int


class Reading:
    """Frames that were found; their rows end before `next_offset`. To be closed."""

    def __init__(self, pieces: list[Piece | JournalDamaged], descriptors: list[int], next_offset: int) -> None:
        self.pieces = pieces
        self.next_offset = next_offset
        self._descriptors = descriptors

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class PartitionJournal:
    """The journal of one partition. Opening it raises OSError, and so do all methods that write or read."""

    def __init__(
        self,
        directory: Path,
        *,
        roll_bytes: int = ROLL_BYTES,
        roll_seconds: float = ROLL_SECONDS,
        noted: Reached | None = None,
    ) -> None:
        """Make the directory if it is missing, and cut off what is torn at the end of the newest file.

        `noted`: what `reached` was at some time before. If less is there, the rest is lost, which is damage.
        """
        self.directory = directory
        self._roll_bytes, self._roll_seconds = roll_bytes, roll_seconds
        self._lock = threading.Lock()
        self._indexes_lock = threading.Lock()  # another one: to look through a file takes some time
        self._indexes: dict[Path, _Index] = {}
        self._descriptor: int | None = None  # of the newest file, once something was appended
        self._is_unsynced = False
        self._is_new = False  # the name of the newest file is not synced
        self.damage: list[JournalDamaged] = []  # that was found at the opening
        self.made: Made | None = None  # of the last row; None: there is no journal yet
        self.epoch = b""
        self.stable = 0  # the offset behind the last synced row
        self.stable_ms: int | None = None
        self.end = 0  # the offset behind the last row
        self._written = 0  # bytes of the newest file
        self._written_ms: int | None = None
        self._written_made: Made | None = None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(directory.parent)
        self._files = sorted(_found(directory), key=lambda each: (each.epoch, each.first_offset))
        self._open_newest()
        if noted is not None:
            self._go_on_behind(noted)

    # -- opening

    def _open_newest(self) -> None:
        while self._files:
            newest = self._files[-1]
            found = _Scan(newest)
            self.damage += found.damage
            if found.end < newest.size:
                os.truncate(newest.path, found.end)
                newest.size = found.end
            if found.made is not None:
                self.made = self._written_made = found.made
                self.epoch, self.end, self.stable = newest.epoch, found.end_offset, found.end_offset
                self.stable_ms = self._written_ms = found.max_ms
                self._written = newest.size
                # Its last writer may have been killed before the sync, or that may have failed: each frame was synced
                # before the next was written.
                write_again(newest.path, [(found.last_at, _content(newest.path, found.last_at, found.end))])
                sync_directory(self.directory)
                return
            newest.path.unlink()
            self._files.pop()

    def _go_on_behind(self, noted: Reached) -> None:
        """Offsets that somebody may have read are not used again, and their rows are named as lost."""
        if (noted.epoch, noted.offset) <= (self.epoch, self.end):
            return
        first = self.end if noted.epoch == self.epoch else 0
        path = self._files[-1].path if self._files and noted.epoch == self.epoch else self.directory
        self.damage.append(
            JournalDamaged(path, self._written, first, noted.offset, "their end, or their file, is gone")
        )
        self.epoch, self.end, self.stable = noted.epoch, noted.offset, noted.offset
        self.made = self._written_made = noted.made

    @property
    def reached(self) -> Reached | None:
        """None if there is nothing in this epoch. To be noted elsewhere, for the next opening."""
        with self._lock:
            return None if self.made is None else Reached(self.epoch, self.stable, self.made)

    # -- appending: by one thread

    def begin_epoch(self, now_s: float) -> None:
        """Begin to count offsets anew. All is synced; the epoch is there with its first row."""
        assert not self._is_unsynced
        with self._lock:
            self._close_newest()
            seconds = max(int(now_s), int.from_bytes(self.epoch[:4], "big") + 1)
            self.epoch = seconds.to_bytes(4, "big") + os.urandom(EPOCH_BYTES - 4)
            self.end = self.stable = 0
            self.stable_ms = self._written_ms = None
            self.made = self._written_made = None

    def append(self, batch: pa.RecordBatch, min_ms: int, max_ms: int, made: Made, now_s: float) -> None:
        """Add rows whose offsets begin with `end`; they are there after `sync`. Raises JournalFull.

        A frame without rows carries the time of the last row, so that `stable_ms` is the same after a restart.
        """
        if not batch.num_rows:
            max_ms = _NO_TIME_MS if self._written_ms is None else self._written_ms
        head, payload = encode(batch, self.end, min_ms, max_ms, made)
        try:
            if self._descriptor is None or self._is_to_roll(now_s):
                self._roll(now_s)
            assert self._descriptor is not None
            at = self._written
            for part in (head, payload):
                view = memoryview(part)
                while len(view):
                    done = os.pwrite(self._descriptor, view, at)
                    view, at = view[done:], at + done
        except OSError as error:
            self._failed(error)
            raise
        self._written, self._is_unsynced = at, True
        self.end += batch.num_rows
        self._written_made = made
        if batch.num_rows:
            self._written_ms = max_ms

    def sync(self, now_s: float) -> None:
        """Make what was appended durable, and readable. Raises JournalFull, and other OSErrors, after which nothing
        may be appended."""
        if not self._is_unsynced:
            return
        assert self._descriptor is not None
        try:
            os.fdatasync(self._descriptor)
            if self._is_new:
                sync_directory(self.directory)
                self._is_new = False
        except OSError as error:
            self._failed(error)
            raise
        with self._lock:
            newest = self._files[-1]
            newest.size, newest.changed_s = self._written, now_s
            self.stable, self.stable_ms, self.made = self.end, self._written_ms, self._written_made
        self._is_unsynced = False

    def _is_to_roll(self, now_s: float) -> bool:
        newest = self._files[-1]
        if newest.first_offset == self.end:  # it has no rows: another one would have its name
            return False
        is_old = now_s - newest.first_at >= self._roll_seconds
        return newest.size > 0 and newest.size == self._written and (self._written >= self._roll_bytes or is_old)

    def _roll(self, now_s: float, *, anew: bool = False) -> None:
        """Go on in a new file, or in the newest after a start, if it is neither large nor old."""
        newest = self._files[-1] if self._files and self._files[-1].epoch == self.epoch else None
        if newest is not None and not anew and not self._is_to_roll(now_s):
            self._descriptor = os.open(newest.path, os.O_WRONLY | os.O_CLOEXEC)
            return
        path = self.directory / f"{self.epoch.hex()}-{self.end:020}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with self._lock:
            self._close_newest()
            self._descriptor, self._is_new, self._written = descriptor, True, 0
            self._files.append(_File(path, self.epoch, self.end, 0, now_s, first_at=int(now_s)))

    def _close_newest(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _failed(self, error: OSError) -> None:
        """Go back to what is synced, as far as that is possible. Raises JournalFull if the disk is full."""
        self.end, self._written_ms, self._written_made = self.stable, self.stable_ms, self.made
        self._is_unsynced = False
        if self._descriptor is not None:
            newest = self._files[-1]
            with suppress(OSError):
                os.ftruncate(self._descriptor, newest.size)
            self._written = newest.size
            if not newest.size:
                with self._lock:
                    self._close_newest()
                    self._files.pop()
                    self._written = self._files[-1].size if self._files else 0
                with suppress(OSError):
                    newest.path.unlink()
        if error.errno in (ENOSPC, EDQUOT):
            raise JournalFull(error.errno, error.strerror, str(self.directory)) from error

    def close(self) -> None:
        with self._lock:
            self._close_newest()

    # -- retention

    def oldest(self) -> Oldest | None:
        """None if there is no file but the newest."""
        with self._lock:
            if len(self._files) < 2:
                return None
            oldest, behind = self._files[:2]
            return Oldest(oldest.changed_s, behind.epoch, behind.first_offset)

    def drop_oldest(self) -> Path:
        """Delete the oldest file, which is not the newest."""
        with self._lock:
            oldest = self._files.pop(0)
        with self._indexes_lock:
            self._indexes.pop(oldest.path, None)
        oldest.path.unlink()
        return oldest.path

    def retire(self, before_s: float, now_s: float) -> bool:
        """If even the newest file was last written before that time, begin another one, so that it can be dropped."""
        newest = self._files[-1] if self._files else None
        if self.made is None or newest is None or newest.first_offset == self.stable or newest.changed_s >= before_s:
            return False
        self._roll(now_s, anew=True)
        now_ms = int(now_s * 1000)
        self.append(pa.RecordBatch.from_pylist([], SCHEMA), now_ms, now_ms, self.made, now_s)
        self.sync(now_s)
        return True

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(each.size for each in self._files)

    # -- reading: by any thread

    @property
    def low(self) -> int:
        """The first offset that is kept."""
        with self._lock:
            return next((each.first_offset for each in self._files if each.epoch == self.epoch), self.stable)

    @property
    def low_ms(self) -> int | None:
        """The earliest time of the first rows that are kept. None if there are none."""
        with self._lock:
            oldest = next((each for each in self._files if each.epoch == self.epoch and each.size), None)
        if oldest is None or self.stable == oldest.first_offset:
            return None
        if oldest.low_ms is None:
            try:
                with oldest.path.open("rb") as file:
                    oldest.low_ms = decode_head(file.read(HEAD_BYTES)).min_ms
            except (FileNotFoundError, CorruptJournal):
                return None
        return oldest.low_ms

    def read(self, first: int, end: int, max_bytes: int) -> Reading:
        """Find the rows from `first` to below `end`; less if their frames have more than `max_bytes`, but one frame.

        Raises OutOfRetention.
        """
        low = self.low
        with self._lock:
            stable = self.stable
            files = [
                (each, each.size)
                for each, following in zip_longest(self._files, self._files[1:])
                if each.epoch == self.epoch and (following is None or following.first_offset > first)
            ]
        if not low <= first <= stable:
            raise OutOfRetention(low, stable)
        end = min(end, stable)
        pieces: list[Piece | JournalDamaged] = []
        descriptors: list[int] = []
        reading = Reading(pieces, descriptors, first)
        try:
            self._find(reading, descriptors, files, end, max_bytes)
        except FileNotFoundError:
            reading.close()
            raise OutOfRetention(self.low, self.stable) from None
        except BaseException:
            reading.close()
            raise
        return reading

    def _find(
        self, reading: Reading, descriptors: list[int], files: list[tuple[_File, int]], end: int, max_bytes: int
    ) -> None:
        taken, bad_at, path = 0, 0, self.directory
        for file, size in files:
            if path == self.directory:
                path = file.path
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            descriptors.append(descriptor)
            index = self._index(file, descriptor, size)
            start = bisect_right(index.ends, reading.next_offset)
            for place in range(start, len(index.firsts)):
                if reading.next_offset >= end or (reading.pieces and taken >= max_bytes):
                    return
                first, behind, at = index.firsts[place], index.ends[place], index.places[place]
                if first == behind:
                    continue
                if first > reading.next_offset:  # the frames between, here or at the end of the file before
                    if place:
                        path, bad_at = file.path, index.behind[place - 1]
                    self._missing(reading, path, bad_at, min(first, end))
                    if reading.next_offset >= end:
                        return
                head = decode_head(os.pread(descriptor, HEAD_BYTES, at))
                rows = max(first, reading.next_offset), min(behind, end)
                reading.pieces.append(Piece(descriptor, file.path, at, head, *rows))
                reading.next_offset = min(behind, end)
                taken += head.length
            path, bad_at = file.path, index.behind[-1] if index.behind else 0
        if reading.next_offset < end:
            self._missing(reading, path, bad_at, end)

    def _missing(self, reading: Reading, path: Path, at: int, end: int) -> None:
        reading.pieces.append(
            JournalDamaged(path, at, reading.next_offset, end, "they are in no valid frame behind it")
        )
        reading.next_offset = end

    def _index(self, file: _File, descriptor: int, size: int) -> _Index:
        with self._indexes_lock:
            index = self._indexes.pop(file.path, None) or _Index()
            self._indexes[file.path] = index
            while len(self._indexes) > KEPT_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            is_checked = False
            while index.end < size:
                try:
                    head = decode_head(os.pread(descriptor, HEAD_BYTES, index.end))
                    if head.first_offset != (index.ends[-1] if index.ends else file.first_offset) and not is_checked:
                        raise CorruptJournal("other offsets than those that follow")
                except CorruptJournal:
                    # What the frame before says of its length and its rows may be wrong as well.
                    at = index.end
                    if index.places and _next_frame(descriptor, index.places[-1], size) != index.places[-1]:
                        at = index.places[-1] + 1
                        index.drop_last()
                    index.end, is_checked = _next_frame(descriptor, at, size) or size, True
                    continue
                index.add(head)
                is_checked = False
            return index


class _Scan:
    """All frames of a file, checked."""

    def __init__(self, file: _File) -> None:
        self.made: Made | None = None
        self.end_offset = file.first_offset
        self.max_ms: int | None = None
        self.damage: list[JournalDamaged] = []
        self.end = 0  # behind the last frame; what follows is torn
        self.last_at = 0  # where the last frame begins
        with file.path.open("rb") as opened:
            descriptor, at = opened.fileno(), 0
            while at < file.size:
                try:
                    head_bytes = os.pread(descriptor, HEAD_BYTES, at)
                    head = decode_head(head_bytes)
                    payload = os.pread(descriptor, min(head.length, file.size - at), at + HEAD_BYTES)
                    check(head_bytes, payload)
                    self.made = made_of(payload)
                except CorruptJournal as error:
                    following = _next_frame(descriptor, at + 1, file.size)
                    if following is None and not self._seems_whole(descriptor, at, file.size):
                        return  # torn
                    begin, place = self._behind(descriptor, at, following)
                    self.damage.append(JournalDamaged(file.path, at, self.end_offset, begin, str(error)))
                    self.end_offset, self.end = begin, place
                    at = place
                    continue
                self.end_offset = head.end_offset
                if head.max_ms != _NO_TIME_MS:
                    self.max_ms = head.max_ms
                self.last_at = at
                at += HEAD_BYTES + head.length
                self.end = at

    def _seems_whole(self, descriptor: int, at: int, size: int) -> bool:
        """Decide if the last frame was written whole: then its offsets may have been read, and are not used again."""
        try:
            head = decode_head(os.pread(descriptor, HEAD_BYTES, at))
        except CorruptJournal:
            return False
        return head.first_offset == self.end_offset and at + HEAD_BYTES + head.length == size and head.rows < 1 << 32

    def _behind(self, descriptor: int, at: int, following: int | None) -> tuple[int, int]:
        """The offset behind damaged frames, and the place."""
        head = decode_head(os.pread(descriptor, HEAD_BYTES, at if following is None else following))
        if following is None:
            return head.end_offset, at + HEAD_BYTES + head.length
        return head.first_offset, following


def _content(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _next_frame(descriptor: int, at: int, size: int) -> int | None:
    """The place of the next valid frame from there on."""
    data = os.pread(descriptor, size - at, at)
    place = data.find(MAGIC)
    while place >= 0:
        try:
            head = decode_head(data[place : place + HEAD_BYTES])
            check(data[place : place + HEAD_BYTES], memoryview(data)[place + HEAD_BYTES :][: head.length])
        except CorruptJournal:
            place = data.find(MAGIC, place + 1)
        else:
            return at + place
    return None


def _found(directory: Path) -> Iterator[_File]:
    for path in directory.iterdir():
        epoch, _, first = path.name.removesuffix(SUFFIX).partition("-")
        if path.suffix != SUFFIX or len(epoch) != 2 * EPOCH_BYTES or not first.isdecimal():
            continue
        try:
            status = path.stat()
            yield _File(
                path,
                bytes.fromhex(epoch),
                int(first),
                status.st_size,
                status.st_mtime,
                first_at=int(status.st_mtime),
            )
        except (FileNotFoundError, ValueError):
            continue
