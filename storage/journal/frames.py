"""The bytes of a journal file: frames one after the other, each with the rows of one batch.

    magic 4 | flags 4 | length 8 | first offset 8 | rows 8 | min time 8 | max time 8 | checksum 8 | payload

Numbers are big-endian; times are ms since 1970, the earliest and the latest of the rows. The checksum is xxh3 of the
payload, with that of the fields before it as the seed. The payload is a stream of Arrow's IPC with one record batch,
whose buffers are compressed if it is large. The metadata of its schema say of what the rows were made (`Made`). A frame
without rows only says that.
"""

import struct
from typing import Final, NamedTuple

import pyarrow as pa
from xxhash import xxh3_64_intdigest

from storage.journal.schema import BODY_COLUMNS, SCHEMA

MAGIC: Final = b"PjF1"
_fields = struct.Struct(">4sIQQQqq")
_head = struct.Struct(">4sIQQQqqQ")
HEAD_BYTES: Final = _head.size
MAX_PAYLOAD_BYTES: Final = 1 << 32  # more is no length
_COMPRESSED_BYTES: Final = 32 << 10  # a smaller batch is not compressed, which gains little
# Rows of events take 23 bytes instead of 174, at 0.1 us. Level 1 of zstd makes them 12 bytes, at 0.36 us, and takes
# 2 us for a body of 1 KiB that cannot be compressed.
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_PLAIN: Final = pa.ipc.IpcWriteOptions(use_threads=False)
_SPARE_BYTES: Final = 64 << 10  # for the schema, and what compression adds to each buffer
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream


class CorruptJournal(Exception):
    """The bytes are no valid frame of a journal."""


class Made(NamedTuple):
    """The rows of the partition with this `store_id` up to here are of the log with this id up to this LSN.

    Ids as they are in the log: 8 bytes of the store's, 16 of the log's.
    """

    store_id: bytes
    log_id: bytes
    lsn: int


class Head(NamedTuple):
    length: int  # bytes of the payload
    first_offset: int
    rows: int
    min_ms: int
    max_ms: int
    checksum: int

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.rows


def encode(batch: pa.RecordBatch, first_offset: int, min_ms: int, max_ms: int, made: Made) -> tuple[bytes, pa.Buffer]:
    """Head and payload of a frame."""
    metadata = {"store": made.store_id.hex(), "log": made.log_id.hex(), "lsn": str(made.lsn)}
    payload = _stream(batch, SCHEMA.with_metadata(metadata))
    fields = _fields.pack(MAGIC, 0, payload.size, first_offset, batch.num_rows, min_ms, max_ms)
    return fields + _checksum(fields, payload).to_bytes(8, "big"), payload


def decode_head(data: bytes) -> Head:
    """What seems to be the head of a frame. Raises CorruptJournal if nothing does."""
    if len(data) < HEAD_BYTES:
        raise CorruptJournal("no room for a frame")
    magic, flags, length, first_offset, rows, min_ms, max_ms, checksum = _head.unpack_from(data)
    if magic != MAGIC or flags or length > MAX_PAYLOAD_BYTES:
        raise CorruptJournal("no frame begins here")
    return Head(length, first_offset, rows, min_ms, max_ms, checksum)


def check(head: bytes, payload: bytes | memoryview) -> None:
    """Check the checksum of a frame. Raises CorruptJournal."""
    if _checksum(head[: _fields.size], payload) != int.from_bytes(head[_fields.size : HEAD_BYTES], "big"):
        raise CorruptJournal("the frame does not match its checksum")


def _checksum(fields: bytes, payload: bytes | memoryview | pa.Buffer) -> int:
    return xxh3_64_intdigest(payload, xxh3_64_intdigest(fields))


def decode(payload: bytes | memoryview, *, records: bool = True) -> pa.RecordBatch:
    """Decode a batch; without `records`, no columns with bodies, which are not decompressed. Raises CorruptJournal."""
    try:
        with pa.ipc.open_stream(payload, options=None if records else _WITHOUT_BODIES) as stream:
            return stream.read_next_batch()
    except (pa.ArrowException, StopIteration, OSError) as error:
        raise CorruptJournal(f"the rows cannot be read: {error}") from error


_WITHOUT_BODIES: Final = pa.ipc.IpcReadOptions(
    included_fields=[index for index, name in enumerate(SCHEMA.names) if name not in BODY_COLUMNS]
)


def made_of(payload: bytes) -> Made:
    """Read from which store, log and LSN the rows were made. Raises CorruptJournal."""
    try:
        with pa.ipc.open_stream(payload) as stream:
            metadata = stream.schema.metadata or {}
        store, log, lsn = (metadata[name] for name in (b"store", b"log", b"lsn"))
        return Made(bytes.fromhex(store.decode()), bytes.fromhex(log.decode()), int(lsn))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptJournal(f"what the rows were made of cannot be read: {error!r}") from error


def message_of(payload: bytes | memoryview) -> memoryview:
    """The message of the stream that has the batch, as it is: behind that of the schema. Raises CorruptJournal."""
    view = memoryview(payload)
    if payload[:4] != _END[:4] or payload[-len(_END) :] != _END:
        raise CorruptJournal("the rows are no stream")
    return view[8 + int.from_bytes(view[4:8], "little") : -len(_END)]


def stream_begin(schema: pa.Schema) -> bytes:
    """The beginning of a stream, to which messages (`message_of`, `message`) and `STREAM_END` are added."""
    found: bytes = schema.serialize().to_pybytes()
    return found


def message(batch: pa.RecordBatch) -> memoryview:
    return message_of(memoryview(_stream(batch, batch.schema)).cast("B"))  # pyarrow says that its bytes have signs


def _stream(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Buffer:
    options = _COMPRESSED if batch.nbytes >= _COMPRESSED_BYTES else _PLAIN
    size = pa.ipc.get_record_batch_size(batch)
    # In one piece: a stream that grows is copied again and again. What cannot be compressed grows by 1/255 at most.
    buffer = pa.allocate_buffer(size + size // 128 + _SPARE_BYTES)
    with pa.FixedSizeBufferWriter(buffer) as sink:
        with pa.ipc.new_stream(sink, schema, options=options) as stream:
            stream.write_batch(batch)
        return buffer.slice(0, sink.tell())


STREAM_END: Final = _END
