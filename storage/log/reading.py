"""The log as found on disk: the chain of its frames through all segments, up to the end.

A frame is written only after all frames before it are on disk. So what is no valid frame ends the log, unless a valid
frame of a later LSN follows somewhere: then a frame was damaged, and turns may be lost that were answered. A file that
is shorter than it was made may have lost frames with its end.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from storage.durable import sync_directory, write_again
from storage.liveness import SILENT, Signs
from storage.log.frames import (
    BLOCK_BYTES,
    FRAME_HEAD_BYTES,
    CorruptFrame,
    Frame,
    FrameCodec,
    Kind,
    Next,
    SegmentHeader,
    TablesState,
    UnknownLogFormat,
    decode_header,
    decode_next,
    frame_bytes,
    header_bytes,
    padded,
)
from storage.log.segments import segment_numbers, segment_path
from storage.store import StoreDamaged, StoreError

READ_BYTES = 1 << 18  # between two signs of life


class LogDamaged(StoreDamaged):
    """Frames that were written and synced are missing or unreadable."""


class Segment(NamedTuple):
    """A segment as found; `header` is None if it never was a segment of a log, or its header is damaged."""

    number: int
    path: Path
    data: bytes
    header: SegmentHeader | None
    why: str  # why there is no header


class LogEnd(NamedTuple):
    """Where the log ends: after the frame `lsn`, at the byte `at` of segment `number`.

    `is_begun`: that segment has its header; else the one before only names it. `torn` says what is at the end, if it
    was a frame: one that was not written to its end, or is damaged. `before`: earlier segments whose frames are still
    there, in their order, with the LSN of the last frame in each. `size_bytes`: so much of the segment's file must be
    there; 0 if that is not known.
    """

    lsn: int
    number: int
    at: int
    is_begun: bool
    size_bytes: int
    torn: str
    before: tuple[tuple[int, int], ...]


class LogOnDisk:
    """The log in `directory`, of `worker`, as it is now. Nothing is changed, and the worker may go on writing.

    Raises StoreError if it cannot be read, LogDamaged if it is the log of another worker or has no valid segment. While
    the worker writes, LogDamaged may also say that what was to be read was used again meanwhile. `signs` of life are
    given while it is read.
    """

    def __init__(self, directory: Path, worker: int, signs: Signs = SILENT) -> None:
        self.directory = directory
        self._signs = signs
        try:
            self.segments = _read_segments(directory, signs)
        except UnknownLogFormat as error:
            raise StoreError(f"{directory}: {error}; nothing was changed") from error
        except FileNotFoundError:
            raise LogDamaged(f"{directory}: the log is missing") from None
        except OSError as error:
            raise StoreError(f"{directory}: the log cannot be read: {error}") from error
        self._known = sorted((each for each in self.segments if each.header is not None), key=_first_lsn)
        if not self._known:
            raise LogDamaged(f"{directory}: no segment of a log is here: {_reasons(self.segments)}")
        newest = self._known[-1].header
        assert newest is not None
        for segment in self._known:
            found = segment.header
            assert found is not None
            if found.worker != worker:
                raise LogDamaged(f"{segment.path}: is a segment of worker {found.worker}, not of worker {worker}")
            if found.log_id != newest.log_id:
                raise LogDamaged(f"{segment.path}: is a segment of another log than {self._known[-1].path.name}")
        for before, segment in pairwise(self._known):
            if _first_lsn(before) == _first_lsn(segment):
                raise LogDamaged(
                    f"{segment.path}: begins with turn {_first_lsn(segment)}, as {before.path.name} does; one is a copy"
                )
        self.log_id = newest.log_id
        self._codec = FrameCodec(newest.log_id)
        self.tables = self._newest_tables()
        self.end: LogEnd | None = None  # once `turns` has come to it
        self._last: list[tuple[Segment, int, int]] = []  # then also: what was written last, from and to which byte

    @property
    def newest_lsn(self) -> int:
        """The LSN before the first frame of the segment that was begun last."""
        return _first_lsn(self._known[-1]) - 1

    def turns(self, after_lsn: int) -> Iterator[Frame]:
        """The turns with higher LSNs, in order, up to the end of the log. Raises LogDamaged, StoreError."""
        start = None
        for segment in self._known:
            if _first_lsn(segment) <= after_lsn + 1:
                start = segment
        if start is None:
            first = _first_lsn(self._known[0])
            raise LogDamaged(f"{self.directory}: the turns from {after_lsn + 1} to {first - 1} are missing")
        segment, lsn = start, _first_lsn(start) - 1
        named: Next | None = None  # what names the segment
        header: list[tuple[Segment, int, int]] = []
        last: list[tuple[Segment, int, int]] = []
        while True:
            following, first_lsn = None, lsn + 1
            is_begun = segment.header is not None and segment.header.first_lsn == first_lsn
            size_bytes = _size_bytes(segment, named, is_begun)
            frames = _Frames(segment, self._codec, lsn + 1)
            if is_begun:
                header = [(segment, 0, header_bytes(segment.data))]
            for frame in frames:
                self._signs.beat()
                lsn = frame.lsn
                last = [(segment, frames.end, frames.end + frame_bytes(frame))]
                if frame.kind == Kind.NEXT:
                    following = decode_next(frame.payload)
                elif lsn > after_lsn:
                    yield frame
            if following is None:
                break
            segment, named = self._following(following.number, segment, lsn), following
        self._refuse_later(lsn)
        if lsn < after_lsn:
            raise LogDamaged(f"{self.directory}: ends with turn {lsn}, but the tables have turns up to {after_lsn}")
        before = self._before(segment.number, lsn)
        torn = _torn(segment, self._codec, frames.end, lsn + 1)
        self._last = header + last
        self.end = LogEnd(lsn, segment.number, frames.end, is_begun, size_bytes, torn, before)

    def _before(self, number: int, lsn: int) -> tuple[tuple[int, int], ...]:
        firsts = [*map(_first_lsn, self._known), lsn + 1]
        lasts = [following - 1 for following in firsts[1:]]
        return tuple(
            (each.number, last) for each, last in zip(self._known, lasts, strict=True) if each.number != number
        )

    def sync(self) -> None:
        """Make durable what `turns` has found. Raises StoreError.

        The writer may have been killed before its last sync, or that may have failed. Each write was synced before the
        next began, so nobody but the last can be in doubt.
        """
        try:
            for segment in self.segments:
                pieces = [(start, segment.data[start:end]) for each, start, end in self._last if each is segment]
                with self._signs.waiting_for_disk():
                    write_again(segment.path, pieces)
            with self._signs.waiting_for_disk():
                sync_directory(self.directory)
        except OSError as error:
            raise StoreError(f"{self.directory}: the log cannot be synced: {error}") from error

    def _newest_tables(self) -> TablesState:
        """Return the tables as of the last segment that was begun, or was about to be begun."""
        newest = self._known[-1]
        assert newest.header is not None
        tables = newest.header.tables
        for frame in _Frames(newest, self._codec, newest.header.first_lsn):
            if frame.kind == Kind.NEXT:
                tables = decode_next(frame.payload).tables
        return tables

    def _following(self, number: int, before: Segment, lsn: int) -> Segment:
        for segment in self.segments:
            if segment.number == number:
                return segment
        missing = segment_path(self.directory, number)
        raise LogDamaged(f"{missing}: is missing; by {before.path.name} it has the turns after {lsn}")

    def _refuse_later(self, lsn: int) -> None:
        """Raise LogDamaged if any segment has a valid frame with a higher LSN, or was begun after one."""
        for segment in self._known:
            if _first_lsn(segment) > lsn + 1:
                raise LogDamaged(
                    f"{segment.path}: begins with turn {_first_lsn(segment)}, but turn {lsn + 1} is damaged or missing"
                )
        for segment in self.segments:
            self._signs.beat()
            at, later = _later_frame(segment.data, self._codec, lsn)
            if later:
                raise LogDamaged(
                    f"{segment.path}: turn {later} at byte {at} is whole, but turn {lsn + 1} is damaged or missing"
                )


class _Frames:
    """The frames of one segment that are in order from `next_lsn` on."""

    def __init__(self, segment: Segment, codec: FrameCodec, next_lsn: int) -> None:
        self._segment = segment
        self._codec = codec
        self._next_lsn = next_lsn
        self.end = 0  # the offset behind the last of them

    def __iter__(self) -> Iterator[Frame]:
        data = memoryview(self._segment.data)
        at = header_bytes(self._segment.data) if self._segment.header is not None else BLOCK_BYTES
        while True:
            self.end = at
            if at >= len(data):
                return
            try:
                frame = self._codec.read(data[at:])
            except CorruptFrame:
                return
            if frame.lsn != self._next_lsn:
                return  # of an earlier use of the segment, or of a later one, which `_refuse_later` finds
            yield frame
            self._next_lsn += 1
            at += padded(FRAME_HEAD_BYTES + len(frame.payload))


def _size_bytes(segment: Segment, named: Next | None, is_begun: bool) -> int:
    """The size that the segment's file was made with; 0 if nobody says it. Raises LogDamaged if it is shorter now."""
    said = segment.header if is_begun else named
    size_bytes = 0 if said is None else said.size_bytes
    if len(segment.data) < size_bytes:
        raise LogDamaged(
            f"{segment.path}: truncated: {len(segment.data)} bytes of {size_bytes}; turns after it may be lost"
        )
    return size_bytes


def _torn(segment: Segment, codec: FrameCodec, at: int, lsn: int) -> str:
    """What is at this byte, if it was the frame `lsn`, and not what an earlier use of the segment has left.

    Each use ends with a frame, or the file was made shorter since. So if there is neither a frame behind what is not
    zeros, nor something at the end of the file, that was written last.
    """
    rest = memoryview(segment.data)[at:]
    try:
        codec.read(rest)
        return ""  # of an earlier use
    except CorruptFrame as error:
        why = str(error)
    if not codec.resembles(rest, lsn):
        if any(rest[-BLOCK_BYTES:]) or bytes(rest) == bytes(len(rest)):
            return ""
        if any(codec.lsn_at(rest[block:]) for block in range(BLOCK_BYTES, len(rest), BLOCK_BYTES)):
            return ""
    return (
        f"{segment.path}: byte {at}: turn {lsn} is torn or damaged: {why}. A write that was under way, and that nobody "
        "was answered, leaves this; so does damage to the last turn"
    )


def _later_frame(content: bytes, codec: FrameCodec, lsn: int) -> tuple[int, int]:
    """Offset and LSN of a valid frame with a higher LSN in the segment; (0, 0) if it has none."""
    data = memoryview(content)
    for at in range(BLOCK_BYTES, len(data), BLOCK_BYTES):
        found = codec.lsn_at(data[at : at + FRAME_HEAD_BYTES])
        if found > lsn:
            try:
                codec.read(data[at:])
            except CorruptFrame:
                continue
            return at, found
    return 0, 0


def _read_segments(directory: Path, signs: Signs) -> list[Segment]:
    """All segments, by number. The one that is being written is read last, so that if it names the next one, that one
    seems not to be begun: else frames in it would seem to follow a gap. Raises OSError, UnknownLogFormat."""

    def first_lsn(number: int) -> int:
        with segment_path(directory, number).open("rb") as file:
            header = _segment(directory, number, file.read(1 << 16)).header
        return header.first_lsn if header is not None else 0

    found = [
        _segment(directory, number, _read(segment_path(directory, number), signs))
        for number in sorted(segment_numbers(directory), key=first_lsn)
    ]
    return sorted(found)


def _read(path: Path, signs: Signs) -> bytes:
    pieces = []
    with path.open("rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            pieces.append(piece)
            signs.beat()
    return b"".join(pieces)


def _segment(directory: Path, number: int, data: bytes) -> Segment:
    path = segment_path(directory, number)
    try:
        return Segment(number, path, data, decode_header(data), "")
    except CorruptFrame as error:
        return Segment(number, path, data, None, str(error) if any(data[:BLOCK_BYTES]) else "it was never used")


def _first_lsn(segment: Segment) -> int:
    assert segment.header is not None
    return segment.header.first_lsn


def _reasons(segments: list[Segment]) -> str:
    return "; ".join(f"{segment.path.name}: {segment.why}" for segment in segments) or "the directory is empty"
