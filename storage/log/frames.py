"""The bytes of the log: a segment is a header and frames, each of which begins at a multiple of BLOCK_BYTES.

    header  magic 8 | checksum 8 | length 4 | msgpack [version, log id, worker, first LSN, tables, size]
    frame   magic 4 | kind 4 | LSN 8 | length 8 | checksum 8 | payload

Numbers are big-endian. A log sequence number (LSN) is one above that of the frame before, through all segments of a log
and all restarts; the first is 1. The checksum is xxh3 of the payload, with a seed made of the log's id, the LSN and the
kind. So no frame of another log is taken for one of this log, and nobody who does not know the id can put a frame into
a message. Frames left from an earlier use of the same segment have lower LSNs.

The size in a header is that of its file: what is shorter has lost its end, and maybe frames with it. The file has this
size before a header, or the frame that names it, says so. Version 1 did not say it.

The payload of a turn is msgpack [time, changes, hints]: milliseconds since 1970; [partition, operations] for each
partition that changed (see `changes`); and, where the log is followed, [partition, store id, hints for the journal] for
each that changed or has hints (see `storage.journal.events`). `tables` is [LSN, positions], see `TablesState`.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
from xxhash import xxh3_64, xxh3_64_intdigest

from protocol.extension import extension
from storage.log.changes import Operation, packable
from storage.packed_parts import APART_BYTES, packed_parts

VERSION = 2
_KNOWN_VERSIONS = (1, VERSION)
BLOCK_BYTES = 4096  # a multiple of what O_DIRECT needs on any disk
LOG_ID_BYTES = 16
BUFFER_BYTES = 8 << 20  # more than turns take that are committed together; a larger frame costs more for its bytes

_SEGMENT_MAGIC = b"PeekLog\n"
_FRAME_MAGIC = b"TurN"
_segment_head = struct.Struct(">8sQI")
_frame_head = struct.Struct(">4sIQQQ")
FRAME_HEAD_BYTES = _frame_head.size


class Kind(IntEnum):
    TURN = 1
    NEXT = 2  # the last frame of its segment; payload: msgpack [number of the next segment, its tables, its size]


class CorruptFrame(Exception):
    """The bytes are no valid header or frame of this log."""


class UnknownLogFormat(Exception):
    """The segment was written in a version of the log that this program does not know."""


class TablesState(NamedTuple):
    """What the log knew of the partitions' tables at some time: they have all turns up to `lsn`, whose frames may be
    gone since. `positions`: for each partition the LSN that its tables say, which is lower if they had no changes."""

    lsn: int
    positions: dict[int, int]


class SegmentHeader(NamedTuple):
    """`tables`: as of when the segment was begun. `size_bytes`: its file has no fewer; 0 if that is not known."""

    log_id: bytes
    worker: int
    first_lsn: int
    tables: TablesState
    size_bytes: int = 0


class Next(NamedTuple):
    """What the header of the segment `number` says, which may be torn."""

    number: int
    tables: TablesState
    size_bytes: int = 0


class Frame(NamedTuple):
    kind: Kind
    lsn: int
    payload: bytes | memoryview


def frame_bytes(frame: Frame) -> int:
    """Its size on disk, without padding."""
    return FRAME_HEAD_BYTES + len(frame.payload)


def padded(size_bytes: int) -> int:
    """The size in whole blocks."""
    return (size_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def encode_header(header: SegmentHeader) -> bytes:
    """One block, or more if there are very many partitions."""
    body: bytes = msgpack.packb([VERSION, *header])
    head = _segment_head.pack(_SEGMENT_MAGIC, xxh3_64_intdigest(body), len(body))
    return (head + body).ljust(padded(len(head) + len(body)), b"\0")


def header_bytes(data: bytes) -> int:
    """The size of the header at the start of `data`; BLOCK_BYTES if there is none."""
    if len(data) < _segment_head.size:
        return BLOCK_BYTES
    magic, _, length = _segment_head.unpack_from(data)
    return padded(_segment_head.size + length) if magic == _SEGMENT_MAGIC and length < 1 << 20 else BLOCK_BYTES


def decode_header(data: bytes) -> SegmentHeader:
    """Decode the header of a segment. Raises CorruptFrame, UnknownLogFormat."""
    if len(data) < _segment_head.size:
        raise CorruptFrame("the segment is shorter than its header")
    magic, checksum, length = _segment_head.unpack_from(data)
    body = data[_segment_head.size : _segment_head.size + length]
    if magic != _SEGMENT_MAGIC or len(body) != length or xxh3_64_intdigest(body) != checksum:
        raise CorruptFrame("the header of the segment does not match its checksum")
    version, *fields = msgpack.unpackb(body, strict_map_key=False)
    if version not in _KNOWN_VERSIONS:
        raise UnknownLogFormat(f"log format {version!r} found, {VERSION} supported")
    log_id, worker, first_lsn, tables, *size = fields  # version 1 had no size
    return SegmentHeader(log_id, worker, first_lsn, TablesState(*tables), *size)


def encode_next(following: Next) -> bytes:
    """The payload of a frame NEXT."""
    payload: bytes = msgpack.packb(following)
    return payload


def decode_next(payload: bytes | memoryview) -> Next:
    number, tables, *size = msgpack.unpackb(payload, strict_map_key=False)
    return Next(number, TablesState(*tables), *size)


def _packer() -> Any:
    return msgpack.Packer(autoreset=False, buf_size=BUFFER_BYTES, default=packable)


class FrameCodec:
    """Makes and reads the frames of one log."""

    def __init__(self, log_id: bytes) -> None:
        self._seed = int.from_bytes(log_id[:8], "big")
        self._packer = _packer()
        self._packed_bytes = 0

    def pack_turn(
        self, time_ms: int, changes: list[Any], hints: Sequence[Any], buffer: memoryview | None = None
    ) -> memoryview | None:
        """The payload of a turn. It must be released before the next is packed.

        If it is in `buffer`, there is room for the frame's head before it. None if it is for `large_turn`, which then
        costs less.
        """
        if extension is not None and buffer is not None:
            end = extension.pack_into((time_ms, changes, hints), buffer, FRAME_HEAD_BYTES)
            return None if end is None else buffer[FRAME_HEAD_BYTES:end]
        if extension is None and _has_large(changes):
            return None
        if self._packed_bytes > BUFFER_BYTES:  # a packer keeps the memory of its largest payload
            self._packer = _packer()
        packer = self._packer
        packer.reset()
        packer.pack((time_ms, changes, hints))
        payload: memoryview = packer.getbuffer()
        self._packed_bytes = len(payload)
        return payload

    def large_turn(self, time_ms: int, changes: list[Any], hints: Sequence[Any]) -> list[bytes]:
        """The payload of a turn in parts, of which its large values are some: they are not copied."""
        return packed_parts((time_ms, changes, hints), packable)

    def head(self, kind: int, lsn: int, payload: bytes | memoryview) -> bytes:
        """What stands in front of the payload."""
        checksum = xxh3_64_intdigest(payload, self._seed + lsn * _ODD + kind & _MASK)
        return _frame_head.pack(_FRAME_MAGIC, kind, lsn, len(payload), checksum)

    def head_of_parts(self, kind: int, lsn: int, parts: Sequence[bytes]) -> bytes:
        """Return the head of a frame, as `head` does, for a payload in parts."""
        checksum = xxh3_64(seed=self._seed + lsn * _ODD + kind & _MASK)
        for part in parts:
            checksum.update(part)
        return _frame_head.pack(_FRAME_MAGIC, kind, lsn, sum(map(len, parts)), checksum.intdigest())

    def read(self, data: memoryview) -> Frame:
        """The frame at the start of `data`. Raises CorruptFrame."""
        if len(data) < FRAME_HEAD_BYTES:
            raise CorruptFrame("no room for a frame")
        magic, kind, lsn, length, checksum = _frame_head.unpack_from(data)
        if magic != _FRAME_MAGIC:
            raise CorruptFrame("no frame begins here")
        payload = data[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + length]
        if len(payload) != length or checksum != xxh3_64_intdigest(payload, self._seed + lsn * _ODD + kind & _MASK):
            raise CorruptFrame(f"the frame does not match its checksum (LSN {lsn} if that is right)")
        if kind not in _KINDS:
            raise CorruptFrame(f"unknown kind of frame {kind}")
        return Frame(Kind(kind), lsn, payload)

    def lsn_at(self, data: memoryview) -> int:
        """The LSN of what looks like a frame at the start of `data`; 0 if nothing does."""
        if len(data) < FRAME_HEAD_BYTES or data[:4] != _FRAME_MAGIC:
            return 0
        lsn: int = _frame_head.unpack_from(data)[2]
        return lsn

    def resembles(self, data: bytes | memoryview, lsn: int) -> bool:
        """What begins there is a frame with this LSN, or was meant to be: one of the fields before its length may be
        wrong."""
        if len(data) < FRAME_HEAD_BYTES:
            return False
        magic, kind, found, _, _ = _frame_head.unpack_from(data)
        return [magic == _FRAME_MAGIC, kind in _KINDS, found == lsn].count(True) >= 2

    def size_at(self, data: memoryview) -> int:
        """The bytes of what looks like a frame at the start of `data`, without padding; 0 if nothing does."""
        if len(data) < FRAME_HEAD_BYTES or data[:4] != _FRAME_MAGIC:
            return 0
        length: int = _frame_head.unpack_from(data)[3]
        return FRAME_HEAD_BYTES + length

    def kind_at(self, data: memoryview) -> int:
        """The kind of the frame at the start of `data`, which `lsn_at` has found."""
        kind: int = _frame_head.unpack_from(data)[1]
        return kind


_KINDS = frozenset(Kind)
_ODD = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def _has_large(changes: list[Any]) -> bool:
    """True if a value is one that `packed_parts` does not copy."""
    return any(
        kind != Operation.DELETE and any(len(value) >= APART_BYTES for _, value in items)
        for _, operations in changes
        for kind, _, items in operations
    )


def decode_turn(payload: bytes | memoryview) -> tuple[int, list[Any], list[Any]]:
    """Time in ms, changes by partition, hints by partition. Raises CorruptFrame."""
    try:
        time_ms, changes, hints = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
    except Exception as error:
        raise CorruptFrame(f"the turn cannot be read: {error!r}") from error
    return time_ms, changes, hints


Place = tuple[int, int]  # the start and the end of a value in a payload


def skim_turn(payload: bytes | memoryview) -> tuple[int, list[Any], list[Any], bytes | memoryview | None]:
    """Decode a turn, as `decode_turn` does, but return the payload, too, if items are only places in it.

    `unpack_items` reads such items. That is faster if few of them are needed. Raises CorruptFrame.
    """
    skimmed = None if extension is None else extension.skim(payload)
    if skimmed is None:
        return *decode_turn(payload), None
    time_ms, changes, hints = skimmed
    return time_ms, changes, unpack_items(payload, hints), payload


def unpack_items(payload: bytes | memoryview, place: Place) -> Any:
    """The value there. Raises CorruptFrame."""
    start, end = place
    try:
        return msgpack.unpackb(memoryview(payload)[start:end], use_list=False, strict_map_key=False)
    except Exception as error:
        raise CorruptFrame(f"the turn cannot be read: {error!r}") from error
