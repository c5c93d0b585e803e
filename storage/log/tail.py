"""Follows the log of a worker that goes on writing: the frames behind a position, each read once.

A frame is read only when the worker has said that it is on disk: what is behind it may be torn, and may be written anew
after a crash. The worker uses segments again. So a reader that was too slow, or that finds the log replaced, is told so
(`Overtaken`); it may go on with the oldest frame that is still there, and must say that there is a gap.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from storage.log.frames import (
    BLOCK_BYTES,
    FRAME_HEAD_BYTES,
    CorruptFrame,
    Frame,
    FrameCodec,
    Kind,
    Next,
    SegmentHeader,
    UnknownLogFormat,
    decode_header,
    decode_next,
    frame_bytes,
    header_bytes,
    padded,
)
from storage.log.segments import segment_numbers, segment_path
from storage.store import StoreError

READ_BYTES = 64 << 10  # at once; then a longer frame as a whole
HEADER_BYTES = 1 << 16  # at the start of a segment; its header is at most about so long


class Position(NamedTuple):
    """All frames up to `lsn` were read. `log_id` is the whole id, or as much of its beginning as is known."""

    log_id: bytes
    lsn: int


class Overtaken(Exception):
    """The next frame cannot be read any more. The text says why."""


class _Open(NamedTuple):
    number: int
    descriptor: int
    first_lsn: int


class LogTail:
    """The log of one worker in `directory`. After Overtaken, `skip` goes on behind the gap.

    All methods raise StoreError if the files cannot be read, or are of an unknown version.
    """

    def __init__(self, directory: Path, after: Position | None) -> None:
        """Go on behind `after`, or with the oldest frame that is there. Nothing is read yet."""
        self.directory = directory
        self.position = after
        self._codec: FrameCodec | None = None
        self._segment: _Open | None = None
        self._at = 0  # the offset of the next frame in the segment
        self._following: Next | None = None  # the segment that continues the log, once the last frame of this was read

    def read(self, up_to_lsn: int | None, max_bytes: int) -> Iterator[Frame]:
        """The next turns up to that LSN, or all that are whole; no more after `max_bytes` of payloads.

        Each is read when it is asked for: it is in the processor's cache then. Payloads stay valid. Empty if there are
        none yet, or the log is not there. An error is only raised in place of the first: the position is that of the
        last that was given, and what is behind it fails again. Raises Overtaken if there is a gap.
        """
        size = 0
        try:
            if self._segment is None and not self._enter():
                return
            for frame in self._frames(up_to_lsn):
                size += len(frame.payload)
                yield frame
                if size >= max_bytes:
                    break
        except (Overtaken, UnknownLogFormat, OSError) as error:
            if size:
                return
            if isinstance(error, Overtaken):
                raise
            if isinstance(error, UnknownLogFormat):
                raise StoreError(f"{self.directory}: {error}") from error
            raise StoreError(f"{self.directory}: the log cannot be read: {error}") from error

    def skip(self) -> int:
        """Go on with the oldest frame behind the gap. Returns the LSN before it, or that of the position."""
        self.close()
        before, headers = self.position, self._headers()
        if before is None or not headers or not headers[-1][0].log_id.startswith(before.log_id):
            self.position = Position(headers[0][0].log_id, headers[0][0].first_lsn - 1) if headers else None
            return 0 if self.position is None else self.position.lsn
        for header, number in headers:
            if header.first_lsn > before.lsn + 1:
                self.position = Position(header.log_id, header.first_lsn - 1)
                break
            # The next frame may be damaged in this segment, and others follow it.
            if (later := self._whole_frame_behind(header, number, before.lsn)) is not None:
                self.position = Position(header.log_id, later - 1)
                break
        assert self.position is not None
        return self.position.lsn

    def close(self) -> None:
        if self._segment is not None:
            os.close(self._segment.descriptor)
        self._segment, self._following = None, None

    # -- frames

    def _frames(self, up_to_lsn: int | None) -> Iterator[Frame]:
        while True:
            if self._following is not None and not self._enter_following(up_to_lsn):
                return
            for frame in self._of_segment(up_to_lsn):
                assert self.position is not None
                self.position = Position(self.position.log_id, frame.lsn)
                self._at += padded(frame_bytes(frame))
                if frame.kind == Kind.NEXT:
                    self._following = decode_next(frame.payload)
                    break
                yield frame
            else:
                return

    def _of_segment(self, up_to_lsn: int | None) -> Iterator[Frame]:
        """Frames from `self._at` on, which moves with them."""
        assert self._codec is not None
        assert self._segment is not None
        assert self.position is not None
        data, begin = memoryview(b""), self._at
        read_again = False
        while up_to_lsn is None or self.position.lsn < up_to_lsn:
            rest = data[self._at - begin :]
            whole = self._codec.size_at(rest)
            if len(rest) < max(whole, FRAME_HEAD_BYTES):
                data = rest = self._bytes(READ_BYTES)
                if (whole := self._codec.size_at(data)) > len(data):
                    data = rest = self._bytes(whole)
                begin = self._at
            try:
                frame = self._codec.read(rest)
            except CorruptFrame as error:
                why = str(error)
            else:
                if frame.lsn == self.position.lsn + 1:
                    read_again = False
                    yield frame
                    continue
                why = f"turn {frame.lsn} is in the place of turn {self.position.lsn + 1}"
            if not read_again:  # what the page cache had may be older than what was written past it
                os.posix_fadvise(self._segment.descriptor, self._at, 0, os.POSIX_FADV_DONTNEED)
                data, read_again = memoryview(b""), True
                continue
            self._no_frame(up_to_lsn, why)
            return

    def _bytes(self, size: int) -> memoryview:
        """Read so many bytes from `self._at` on, or as many as there are."""
        assert self._segment is not None
        left = os.fstat(self._segment.descriptor).st_size - self._at
        return memoryview(os.pread(self._segment.descriptor, max(0, min(size, left)), self._at))

    def _no_frame(self, up_to_lsn: int | None, why: str) -> None:
        """There is no next frame in its place. Raises Overtaken if there never will be."""
        assert self._segment is not None
        assert self.position is not None
        path = segment_path(self.directory, self._segment.number)
        header = self._header(self._segment.number)
        if header is None or not header.log_id.startswith(self.position.log_id):
            raise Overtaken(f"{path}: the log was replaced after turn {self.position.lsn}")
        if header.first_lsn != self._segment.first_lsn:
            raise Overtaken(f"{path}: was used again before turn {self.position.lsn + 1} was read")
        if up_to_lsn is not None:
            raise Overtaken(f"{path}: byte {self._at}: turn {self.position.lsn + 1} cannot be read: {why}")
        self._refuse_short(path, header.size_bytes)

    def _refuse_short(self, path: Path, size_bytes: int) -> None:
        """Raise Overtaken if the end of the file is gone, and maybe frames with it."""
        assert self.position is not None
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            found = 0
        if found < size_bytes:
            raise Overtaken(
                f"{path}: truncated: {found} bytes of {size_bytes}; turns after {self.position.lsn} may be lost"
            )

    # -- segments

    def _enter(self) -> bool:
        """Find the segment with the next frame, and its place there. False if there is no log."""
        headers = self._headers()
        if not headers:
            return False
        newest, _ = headers[-1]
        if self.position is None:
            self.position = Position(newest.log_id, headers[0][0].first_lsn - 1)
        if not newest.log_id.startswith(self.position.log_id):
            raise Overtaken(f"{self.directory}: another log is here than the one with turn {self.position.lsn}")
        before = [each for each in headers if each[0].first_lsn <= self.position.lsn + 1]
        if not before:
            first = headers[0][0].first_lsn
            raise Overtaken(f"{self.directory}: the turns from {self.position.lsn + 1} to {first - 1} are gone")
        header, number = before[-1]
        wanted = self.position.lsn
        self._open(header, number)
        try:
            self.position = Position(header.log_id, header.first_lsn - 1)
            while self.position.lsn < wanted:
                if not self._pass_frame():
                    raise Overtaken(f"{segment_path(self.directory, number)}: turn {self.position.lsn + 1} is missing")
        except Overtaken:
            self.close()
            raise
        finally:
            self.position = Position(header.log_id, wanted)
        return True

    def _pass_frame(self) -> bool:
        """Pass one frame, of which only the head is read, unless it is the last of its segment."""
        assert self._codec is not None
        assert self._segment is not None
        assert self.position is not None
        head = memoryview(os.pread(self._segment.descriptor, FRAME_HEAD_BYTES, self._at))
        if self._codec.lsn_at(head) != self.position.lsn + 1:
            return False
        whole = self._codec.size_at(head)
        if self._codec.kind_at(head) == Kind.NEXT:
            try:
                frame = self._codec.read(self._bytes(whole))
            except CorruptFrame:
                return False
            self._following = decode_next(frame.payload)
        self._at += padded(whole)
        self.position = Position(self.position.log_id, self.position.lsn + 1)
        return True

    def _enter_following(self, up_to_lsn: int | None) -> bool:
        """False if the segment is not begun yet. Raises Overtaken."""
        assert self._following is not None
        assert self.position is not None
        number = self._following.number
        header = self._header(number)
        path = segment_path(self.directory, number)
        if header is not None and not header.log_id.startswith(self.position.log_id):
            raise Overtaken(f"{path}: the log was replaced after turn {self.position.lsn}")
        if header is not None and header.first_lsn > self.position.lsn + 1:
            raise Overtaken(f"{path}: was used again before turn {self.position.lsn + 1} was read")
        if header is None or header.first_lsn <= self.position.lsn:
            if up_to_lsn is not None and up_to_lsn > self.position.lsn:
                raise Overtaken(f"{path}: has no header, but should have turn {self.position.lsn + 1}")
            if up_to_lsn is None:
                self._refuse_short(path, self._following.size_bytes)
            return False
        self.close()
        self._open(header, number)
        return True

    def _open(self, header: SegmentHeader, number: int) -> None:
        descriptor = os.open(segment_path(self.directory, number), os.O_RDONLY | os.O_CLOEXEC)
        self._segment = _Open(number, descriptor, header.first_lsn)
        self._codec = FrameCodec(header.log_id)
        self._at = header_bytes(os.pread(descriptor, HEADER_BYTES, 0))

    def _header(self, number: int) -> SegmentHeader | None:
        """Return the header that the segment of this number has now; None if there is none."""
        try:
            with segment_path(self.directory, number).open("rb", buffering=0) as file:
                return decode_header(file.read(HEADER_BYTES))
        except (CorruptFrame, FileNotFoundError):
            return None

    def _headers(self) -> list[tuple[SegmentHeader, int]]:
        """Return the headers of the log that is here now, the oldest segment first, with their numbers."""
        try:
            numbers = segment_numbers(self.directory)
            found = [(header, number) for number in numbers if (header := self._header(number)) is not None]
        except FileNotFoundError:
            return []
        except UnknownLogFormat as error:
            raise StoreError(f"{self.directory}: {error}") from error
        except OSError as error:
            raise StoreError(f"{self.directory}: the log cannot be read: {error}") from error
        return sorted(found, key=lambda each: each[0].first_lsn)

    def _whole_frame_behind(self, header: SegmentHeader, number: int, lsn: int) -> int | None:
        """The LSN of the first whole frame of the segment above lsn + 1; None if there is none."""
        codec = FrameCodec(header.log_id)
        with segment_path(self.directory, number).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for at in range(BLOCK_BYTES, size, BLOCK_BYTES):
                head = memoryview(os.pread(file.fileno(), FRAME_HEAD_BYTES, at))
                if codec.lsn_at(head) > lsn + 1:
                    try:
                        length = min(codec.size_at(head), size - at)
                        return codec.read(memoryview(os.pread(file.fileno(), length, at))).lsn
                    except CorruptFrame:
                        continue
        return None
