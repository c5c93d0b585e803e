"""Writes frames to the segments of a log, one after the other, and keeps account of the segments.

Segments whose frames are all in the tables are free and are used again. The frame that names the next segment is on
disk before anything in that segment is overwritten, and it says what the segment's header says. The turn that comes
first in a segment waits for both. If it is large, the process does not.

A segment's file has its size before anything says so, and no frame goes beyond. A turn that is larger than a segment
gets one of its own, which is made longer before.

On a full disk, where no messages are accepted, the spare segment is for what settles some: it is used when no other one
is free.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from storage.durable import sync_directory
from storage.log.aio import OneWrite
from storage.log.frames import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    FrameCodec,
    Kind,
    Next,
    SegmentHeader,
    TablesState,
    encode_header,
    encode_next,
    padded,
)
from storage.log.reading import LogEnd
from storage.log.segments import SPARE_NAME, SegmentFile, prepare, segment_numbers, segment_path

FREE_SEGMENTS = 2  # kept for use again; more are deleted
FOLLOWED_FREE_SEGMENTS = 24  # while a follower is a second behind: a segment that is made anew makes turns wait
# Before a smaller turn, the two small writes that begin a segment are waited for: three writes that are not, one after
# the other, take longer, and there is less to do meanwhile.
LARGE_TURN_BYTES = 1 << 20
_BESIDE_BYTES = 2 * BLOCK_BYTES  # a turn's head and padding, and the frame that names the next segment
_SPARE = -1  # in place of a segment's number
_TURN = Kind.TURN  # to look up a member of an enum takes as long as a call


class _Segment:
    def __init__(self, number: int, file: SegmentFile) -> None:
        self.number = number
        self.file = file
        self.last_lsn = 0  # of the last frame in it
        self.size_bytes = 0  # as its header says
        self.at = 0  # where the next frame goes


class NoSegment(OSError):
    """No segment is free, and the disk takes no further one. Nothing was written."""


class LogWriter:
    """The segments of a log in `directory`. All methods that write raise OSError.

    `lsn` is that of the last frame. `tables` is what is known of the partitions' tables; the caller sets it.
    """

    def __init__(
        self,
        directory: Path,
        worker: int,
        log_id: bytes,
        segment_bytes: int,
        tables: TablesState,
        end: LogEnd | None,
        followed_lsn: int | None = None,
    ) -> None:
        """Go on behind `end`, or with the first segment of a new log, which `make_log` has made.

        `followed_lsn`: see the attribute.
        """
        self._directory = directory
        self._worker = worker
        self._log_id = log_id
        self._segment_bytes = segment_bytes
        self._codec = FrameCodec(log_id)
        self._one_write = OneWrite(BUFFER_BYTES)
        self._used: list[_Segment] = []  # those with frames that are not in the tables; the last is the current one
        self._free = [
            _Segment(number, SegmentFile(segment_path(directory, number), self._one_write))
            for number in segment_numbers(directory)
        ]
        self._kept: list[_Segment] = []  # those of them that only the follower needs
        # The tables have all turns up to these, by the header of the newest segment, and by the newest that is on disk.
        self._headers_lsn = self._known_lsn = 0
        self.begun = 0  # segments, since this was made
        self._preparing: int | None = None  # the number of the segment that somebody else makes
        self._spare_path = directory / SPARE_NAME
        self.has_spare = self._spare_path.exists()
        # A write that failed was the last one: what comes behind it would make damage of what was only torn. The caller
        # sets it.
        self.failure: OSError | None = None
        self.is_writing = False  # the last turn may not be on disk yet
        self._writing: SegmentFile | None = None  # the one that is written to now
        self._waiting: deque[tuple[SegmentFile, memoryview, int]] = deque()  # blocks, and where they go after that
        self.lsn = tables.lsn if end is None else end.lsn
        self.tables = tables
        # Another process follows the log and needs the frames above this; None if nobody does. The caller sets it.
        self.followed_lsn = followed_lsn
        self.kept_bytes = 0  # of segments that only the follower needs
        self.lost_segments = 0  # used again before the follower had read them
        if end is None:
            first = self._free.pop()
            first.file.extend(segment_bytes)
            self._begin(first, segment_bytes)
            return
        needed_lsn = tables.lsn if followed_lsn is None else min(tables.lsn, followed_lsn)
        for number, last_lsn in end.before:
            if last_lsn > needed_lsn:
                kept = self._take_free(number)
                kept.last_lsn = last_lsn
                kept.at = segment_bytes
                self._used.append(kept)
        last = self._take_free(end.number)
        if end.is_begun:
            last.at = end.at
            last.last_lsn = end.lsn
            last.size_bytes = last.file.size_bytes()
            self._used.append(last)
            with suppress(NoSegment):  # then in this one, which may have room
                self._continue_in_next()
        else:
            # What names it says a size, which may be that of a large turn. It is never shorter.
            size_bytes = max(segment_bytes, end.size_bytes)
            last.file.extend(size_bytes)
            self._begin(last, size_bytes)
        self.release()

    def _take_free(self, number: int) -> _Segment:
        [found] = [segment for segment in self._free if segment.number == number]
        self._free.remove(found)
        return found

    def begin_turn(self, time_ms: int, changes: list[Any], hints: Sequence[Any] = ()) -> int:
        """Begin to write and sync the frame of a turn; see `FrameCodec.pack_turn`. Returns the bytes that it takes,
        with what stays unused of a segment because this turn did not fit into it.

        The turn before must be on disk.
        """
        if self.failure is not None:
            raise self.failure
        buffer = self._one_write.view
        payload = self._codec.pack_turn(time_ms, changes, hints, buffer)
        if payload is None:
            return self._begin_large_turn(self._codec.large_turn(time_ms, changes, hints))
        with payload:
            current = self._used[-1]
            unused = 0
            is_filled = payload.obj is buffer.obj
            if current.at + len(payload) + _BESIDE_BYTES > current.size_bytes:
                is_large = is_filled and len(payload) >= LARGE_TURN_BYTES and current.file.is_asynchronous
                unused = self._make_room(len(payload), is_waited_for=not is_large)
                current = self._used[-1]
            at = current.at
            frame = self._frame(_TURN, payload)
            self._writing = current.file
            if self._waiting:
                data = current.file.fill(buffer, frame[:1], padded(len(frame[0]) + len(payload)))
                self._waiting.append((current.file, data, at))
                current.at += len(data)
                self._start_next()
            else:
                current.at = current.file.begin(at, frame, is_filled)
            self.is_writing = self._writing.is_writing
            return unused + current.at - at

    def _begin_large_turn(self, parts: list[bytes]) -> int:
        """Do what `begin_turn` does with a payload in parts. More than BUFFER_BYTES are on disk when this returns."""
        size_bytes = sum(map(len, parts))
        unused = 0
        if self._used[-1].at + size_bytes + _BESIDE_BYTES > self._used[-1].size_bytes:
            unused = self._make_room(size_bytes)
        current = self._used[-1]
        at = current.at
        self.lsn = current.last_lsn = lsn = self.lsn + 1
        self._writing = current.file
        current.at = current.file.begin(at, (self._codec.head_of_parts(_TURN, lsn, parts), *parts))
        self.is_writing = self._writing.is_writing
        return unused + current.at - at

    def _make_room(self, payload_bytes: int, is_waited_for: bool = True) -> int:
        """Continue in a segment with room for a turn of so many bytes. Returns what stays unused of the one before."""
        before = self._used[-1]
        self._continue_in_next(payload_bytes, is_waited_for)
        return max(0, before.size_bytes - before.at)

    def _start_next(self) -> None:
        """Write the blocks that wait, up to the first that need not be waited for."""
        while self._waiting:
            self._writing, data, at = self._waiting.popleft()
            self._writing.start(data, at)
            if self._writing.is_writing:
                return

    def end_turn(self, wait: bool) -> None:
        """`wait` until the last turn is on disk, or only see whether it is: then nothing `is_writing`."""
        if self.failure is not None:
            raise self.failure
        while self._writing is not None and self._writing.end(wait):
            if not self._waiting:
                self._writing = None
                break
            self._start_next()
        self.is_writing = self._writing is not None
        if not self.is_writing:
            self._known_lsn = self._headers_lsn

    @property
    def descriptor(self) -> int | None:
        """It is signalled (see `OneWrite`) when `end_turn` is to be called; None if `begin_turn` waits itself."""
        return self._one_write.descriptor

    def _frame(self, kind: Kind, payload: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        """The parts of the next frame."""
        self.lsn = self._used[-1].last_lsn = lsn = self.lsn + 1
        return self._codec.head(kind, lsn, payload), payload

    def _continue_in_next(self, payload_bytes: int = 0, is_waited_for: bool = True) -> None:
        """Go on in a segment that has room for a turn of so many bytes.

        If it is not waited for, what is to be written waits, with the turn that comes next.
        """
        large_bytes = padded(len(self._header(self._segment_bytes)) + payload_bytes + BLOCK_BYTES) + _BESIDE_BYTES
        size_bytes = max(self._segment_bytes, large_bytes)
        if not self._free:
            self._add_segment()
        segment = self._free.pop(0)
        segment.file.truncate(size_bytes)
        segment.file.extend(size_bytes)
        current = self._used[-1]
        # A block, for which there is always room.
        frame = self._frame(Kind.NEXT, encode_next(Next(segment.number, self.tables, size_bytes)))
        current.at = self._write(current.file, current.at, frame, is_waited_for)
        self._begin(segment, size_bytes, is_waited_for)

    def _header(self, size_bytes: int) -> bytes:
        return encode_header(SegmentHeader(self._log_id, self._worker, self.lsn + 1, self.tables, size_bytes))

    def _begin(self, segment: _Segment, size_bytes: int, is_waited_for: bool = True) -> None:
        """Make a free segment, whose file has this size, the current one."""
        segment.at = self._write(segment.file, 0, (self._header(size_bytes),), is_waited_for)
        segment.size_bytes = size_bytes
        segment.last_lsn = self.lsn
        self.begun += 1
        self._headers_lsn = self.tables.lsn
        if is_waited_for:
            self._known_lsn = self._headers_lsn
        self._used.append(segment)

    def _write(self, file: SegmentFile, at: int, parts: Sequence[bytes | memoryview], is_waited_for: bool) -> int:
        if is_waited_for:
            return file.write(at, parts)
        used = sum(len(data) for _, data, _ in self._waiting)  # all of them are in the spare buffer
        data = file.fill(self._one_write.spare[used:], parts, padded(sum(map(len, parts))))
        self._waiting.append((file, data, at))
        return at + len(data)

    def _add_segment(self) -> None:
        """Make a segment whose blocks are there but were not written in advance, so that its first use is slower."""
        number = self._new_number()
        path = segment_path(self._directory, number)
        try:
            file = SegmentFile(path, self._one_write)
            try:
                file.extend(self._segment_bytes)
                file.allocate(self._segment_bytes)
                sync_directory(self._directory)
            except OSError:
                file.close()
                path.unlink()
                raise
        except OSError as error:
            file = self._use_spare(path, error)
        self._free.append(_Segment(number, file))

    def _use_spare(self, path: Path, problem: OSError) -> SegmentFile:
        """Use the spare segment as the one at this path. Raises NoSegment."""
        if not self.has_spare:
            raise NoSegment(problem.errno, problem.strerror) from problem
        try:
            self._spare_path.rename(path)
            self.has_spare = False
            sync_directory(self._directory)
            return SegmentFile(path, self._one_write)
        except OSError as error:
            raise NoSegment(error.errno, error.strerror) from error

    def _new_number(self) -> int:
        numbers = [segment.number for segment in (*self._used, *self._free)]
        return max(*numbers, -1 if self._preparing is None else self._preparing) + 1

    # -- segments that are made in advance

    @property
    def wants_segment(self) -> bool:
        """True if none is free, and none is being made."""
        return not self._free and self._preparing is None

    @property
    def wants_spare(self) -> bool:
        return not self.has_spare and self._preparing is None

    def next_path(self) -> Path:
        """The path at which the next segment is being made from now on, until `prepared` or `not_prepared`."""
        self._preparing = self._new_number()
        return segment_path(self._directory, self._preparing)

    def spare_path(self) -> Path:
        """The path at which the spare segment is being made from now on, until `prepared` or `not_prepared`."""
        self._preparing = _SPARE
        return self._spare_path

    def prepared(self) -> None:
        """Use the segment that was made. If it cannot be opened now, another one will be wanted."""
        number, self._preparing = self._preparing, None
        assert number is not None
        if number == _SPARE:
            self.has_spare = True
            return
        with suppress(OSError):
            self._free.append(_Segment(number, SegmentFile(segment_path(self._directory, number), self._one_write)))

    def not_prepared(self) -> None:
        self._preparing = None

    # -- segments that are not needed any more

    def release(self) -> None:
        """Free the segments whose frames are all in the tables, if a reader of the log on disk can know that.

        The tables of a partition without changes keep their position. Then only the newest header says that nothing
        is missing.
        """
        lsn = max(self._known_lsn, min(self.tables.positions.values(), default=0))
        followed_lsn = lsn if self.followed_lsn is None else self.followed_lsn
        while len(self._used) > 1 and self._used[0].last_lsn <= min(lsn, followed_lsn):
            self._free.append(self._used.pop(0))
        self._kept = [segment for segment in self._used[:-1] if segment.last_lsn <= lsn]
        self.kept_bytes = sum(segment.file.size_bytes() for segment in self._kept)
        most = FREE_SEGMENTS if self.followed_lsn is None else FOLLOWED_FREE_SEGMENTS
        if self.wants_spare and len(self._free) > 1:
            self._spare(self._free.pop())
        while len(self._free) > most:
            segment = self._free.pop()
            segment.file.close()
            with suppress(OSError):  # it stays, as a free one for the next start
                segment.file.path.unlink()

    def _spare(self, segment: _Segment) -> None:
        """Set a free segment aside."""
        try:
            segment.file.truncate(self._segment_bytes)
            segment.file.path.rename(self._spare_path)
        except OSError:  # it stays, as a free one for the next start
            pass
        else:
            self.has_spare = True
        segment.file.close()

    def take_kept(self) -> bool:
        """Free the oldest segment that only the follower needs, and which it loses. False if there is none."""
        if not self._kept:
            return False
        taken = self._kept.pop(0)
        self._used.remove(taken)
        self._free.append(taken)
        self.kept_bytes -= taken.file.size_bytes()
        self.lost_segments += 1
        return True

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def has_spares(self) -> bool:
        """A segment is free, and one is kept for a full disk."""
        return self.has_free and self.has_spare

    def sizes(self) -> list[int]:
        """The bytes of each segment on disk, and of the spare one."""
        spare = [self._segment_bytes] * self.has_spare
        return [segment.file.size_bytes() for segment in (*self._used, *self._free)] + spare

    def check(self) -> None:
        """Assert the invariants of the account of segments between two calls, unless a write has failed."""
        if self.failure is not None:
            return
        numbers = [segment.number for segment in (*self._used, *self._free)]
        assert len(set(numbers)) == len(numbers), "a segment is used twice, or is free and used"
        assert self._preparing not in numbers, "a segment is used while it is being made"
        assert all(a.last_lsn <= b.last_lsn for a, b in pairwise(self._used))
        current = self._used[-1]
        assert current.last_lsn == self.lsn
        assert current.at + BLOCK_BYTES <= current.size_bytes, "there is no room for the name of the next segment"
        assert current.size_bytes <= current.file.size_bytes(), "the header says more than the file has"
        assert all(segment in self._used[:-1] for segment in self._kept)
        assert self.kept_bytes == sum(segment.file.size_bytes() for segment in self._kept)
        assert self._known_lsn <= self._headers_lsn <= self.tables.lsn <= self.lsn
        assert max(self.tables.positions.values(), default=0) <= self.lsn, "tables have a turn that the log has not"
        assert self.is_writing or not self._waiting
        assert self._writing is not None or not self.is_writing
        assert self._spare_path.exists() or not self.has_spare

    def close(self) -> None:
        self._one_write.close()
        for segment in (*self._used, *self._free):
            segment.file.close()


def make_log(directory: Path, segment_bytes: int) -> None:
    """Make the first segment of a log, and the names of its directory and that of all logs durable. Raises OSError."""
    prepare(segment_path(directory, 0), segment_bytes)
    for parent in (directory.parent, directory.parent.parent):
        sync_directory(parent)
