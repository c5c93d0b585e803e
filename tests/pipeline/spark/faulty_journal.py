"""A small HTTP server of the journal, which serves rows as the broker does, and fails as a test says."""

import datetime
import fnmatch
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from protocol.client.messages import Message
from protocol.message.intake import take_apart
from storage.journal.schema import SCHEMA
from storage.records import NEVER, encode_message

TIME = pa.timestamp("us", "UTC")
EPOCH = "0123456789abcdef"
SECOND = 1_000_000
T0 = 1_700_000_000 * SECOND  # microseconds since 1970


def record_of(message):
    layout, body, _, _ = take_apart(message.encode())
    return encode_message(T0 // 1000, NEVER, layout, body)


def rows(partition, first, count, entity="orders", record=None):
    """Rows with offsets from `first` on, one for each second; `record` makes their records of their offsets."""
    offsets = list(range(first, first + count))
    columns = {
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), count),
        "journalOffset": pa.array(offsets, pa.int64()),
        "eventTime": pa.array([T0 + offset * SECOND for offset in offsets], pa.int64()).cast(TIME),
        "op": pa.repeat("enqueued", count),
        "entity": pa.repeat(entity, count),
        "subQueue": pa.repeat("active", count),
        "sequenceNumber": pa.array(offsets, pa.int64()),
        "messageId": pa.array([f"{partition}-{offset}" for offset in offsets]),
    }
    if record is not None:
        columns["record"] = pa.array([record(offset) for offset in offsets], pa.binary())
    arrays = [columns.get(each.name, pa.nulls(count, each.type)) for each in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def message_of(offset):
    return record_of(Message.of(b"body %d" % offset, reply_to="r", application_properties={"n": offset}))


@dataclass
class Partition:
    """Offsets `low` to the end of `table` are kept; the table begins at offset 0, and may lack rows."""

    table: pa.Table
    epoch: str = EPOCH
    low: int = 0

    @property
    def stable(self):
        return pc.max(self.table["journalOffset"]).as_py() + 1 if self.table.num_rows else 0


@dataclass
class Journal:
    """What the server serves. Each of `faults` is of one answer to a range: a status, or what is done to its bytes."""

    partitions: dict = field(default_factory=dict)
    faults: list = field(default_factory=list)
    max_rows: int = 1 << 40
    batch_rows: int = 100
    token: str = "SharedAccessSignature "
    refusal: dict | bytes = field(default_factory=lambda: {"error": "no token"})  # of others
    requests: list = field(default_factory=list)


class JournalServer:
    def __init__(self, journal):
        self.journal = journal

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                answer(self, journal)

            def log_message(self, *arguments): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def answer(handler, journal):
    url = urlsplit(handler.path)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    if not handler.headers.get("Authorization", "").startswith(journal.token):
        return say(handler, 401, journal.refusal)
    if url.path == "/$journal":
        return say(handler, 200, {"namespace": "ns", "partitions": [*map(state_of, journal.partitions.items())]})
    number = int(unquote(url.path).removeprefix("/$journal/"))
    partition = journal.partitions.get(number)
    first, end = int(query["from"]), int(query["to"])
    journal.requests.append((number, first, end, query))
    if partition is None:
        return say(handler, 404, {"error": "no such partition"})
    fault = journal.faults.pop(0) if journal.faults else None
    if isinstance(fault, int):
        return say(handler, fault, {"error": "as the test says"})
    if query["epoch"] != partition.epoch:
        return say(handler, 409, {"error": "another epoch", "epoch": partition.epoch})
    if not partition.low <= first <= partition.stable:
        details = {"error": "out of retention", "low": partition.low, "stable": partition.stable}
        return say(handler, 416, details)
    end = min(end, first + journal.max_rows, partition.stable)
    offsets = partition.table["journalOffset"]
    table = partition.table.filter(pc.and_(pc.greater_equal(offsets, first), pc.less(offsets, end)))
    if "entity" in query:
        pattern = query["entity"].lower()
        fits = [each is None or fnmatch.fnmatchcase(each.lower(), pattern) for each in table["entity"].to_pylist()]
        table = table.filter(pa.array(fits, pa.bool_()))
    if query["records"] == "0":
        for name in ("record", "overlay"):
            index = SCHEMA.get_field_index(name)
            table = table.set_column(index, SCHEMA.field(name), pa.nulls(table.num_rows, pa.binary()))
    send(handler, stream_of(table, journal.batch_rows), end, fault)


def stream_of(table, batch_rows):
    """The parts of an Arrow stream: its schema, each batch, its end."""
    parts, sink = [], pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        marks = [sink.tell()]
        for batch in table.to_batches(batch_rows):
            writer.write_batch(batch)
            marks.append(sink.tell())
    whole = sink.getvalue().to_pybytes()
    marks = [0, *marks, len(whole)]
    parts = [whole[begin:end] for begin, end in pairwise(marks)]
    return [part for part in parts if part]


def send(handler, parts, following, fault):
    """`fault` is None; "cut", in the middle; "cut between", behind a batch; "slow", or "length", without chunks."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/vnd.apache.arrow.stream")
    handler.send_header("X-Peeklock-Next-Offset", str(following))
    if fault == "length":
        handler.send_header("Content-Length", str(sum(map(len, parts))))
    elif fault == "cut between":
        handler.send_header("Connection", "close")  # nothing says where its body ends
    else:
        handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    if fault == "cut":
        parts = [*parts[:-2], parts[-2][: len(parts[-2]) // 2]]
    for part in parts[:-2] if fault == "cut between" else parts:
        handler.wfile.write(part if fault in ("length", "cut between") else b"%x\r\n%b\r\n" % (len(part), part))
        if fault == "slow":
            time.sleep(0.2)
    if fault in ("cut", "cut between"):
        handler.close_connection = True
    elif fault != "length":
        handler.wfile.write(b"0\r\n\r\n")


def state_of(item):
    number, partition = item
    return {
        "partition": number,
        "epoch": partition.epoch,
        "low": partition.low,
        "stable": partition.stable,
        "lowTime": time_of(partition.low),
        "stableTime": time_of(partition.stable - 1),
        "bytes": 100 * (partition.stable - partition.low),
    }


def time_of(offset):
    return datetime.datetime.fromtimestamp(T0 / SECOND + max(0, offset), datetime.UTC).isoformat()


def say(handler, status, details):
    said = details if isinstance(details, bytes) else json.dumps(details).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(said)))
    handler.end_headers()
    handler.wfile.write(said)
