"""A journal over HTTP, as a broker serves it, with rows that are made up and faults on demand."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from protocol.nodes import sas_tokens
from protocol.nodes.sas_tokens import KeyRule, TokenError
from storage.journal.schema import SCHEMA
from tests.capture.synthetic_rows import EPOCH, batch

KEY_NAME, KEY = "reader", "secret"
BATCH_ROWS = 500


class Journal:
    """What is served. Tests change it while the server runs."""

    def __init__(self, *, partitions: int = 2, stable: int = 2000, body_bytes: int = 40) -> None:
        self.namespace = "sample"
        self.namespace_id: str | None = None  # as of an older broker
        self.epoch = EPOCH
        self.low = 0
        self.stable = [stable] * partitions
        self.body_bytes = body_bytes
        self.answer_rows = 1500  # of one answer, at most
        self.cut_after_bytes: int | None = None  # of the rows in an answer; the connection is closed then
        self.cuts_left = 0
        self.damaged: dict[int, range] = {}  # by partition, offsets that cannot be read
        self.claims_rows = 0  # so many more than an answer has are said to be in it
        self.answers: list[tuple[int, bytes]] = []  # given instead of the next ones: status, text
        self.requests: list[str] = []
        self.told: list[tuple[str, Any]] = []  # by consumers: path, document
        self.answer_to_told = 200
        self._made: dict[tuple[int, int], pa.RecordBatch] = {}

    def rows(self, partition: int, first: int, end: int) -> list[pa.RecordBatch]:
        found = []
        while first < end:
            begin = first // BATCH_ROWS * BATCH_ROWS
            made = self._made.get((partition, begin))
            if made is None:
                made = self._made[partition, begin] = batch(
                    partition, begin, begin + BATCH_ROWS, body_bytes=self.body_bytes
                )
            part = made.slice(first - begin, min(end, begin + BATCH_ROWS) - first)
            found.append(part)
            first += len(part)
        return found

    def readable(self, partition: int, first: int, end: int) -> list[pa.RecordBatch]:
        """As a broker gives them: a row in place of damaged ones, in one batch with those around it."""
        lost = range(max(self.damaged[partition].start, first), min(self.damaged[partition].stop, end))
        if not lost:
            return self.rows(partition, first, end)
        instead = {
            **{"partition": partition, "journalOffset": lost[-1], "eventTime": 0, "op": "truncated"},
            **{"reason": "damaged", "description": "file: byte 7: the checksum"},
        }
        parts = [*self.rows(partition, first, lost.start), pa.RecordBatch.from_pylist([instead], SCHEMA)]
        return [pa.concat_batches([*parts, *self.rows(partition, lost.stop, end)])]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    journal: Journal


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        journal = self.server.journal
        journal.requests.append(self.path)
        if journal.answers:
            status, text = journal.answers.pop(0)
            return self._answer(status, text)
        try:
            sas_tokens.verify(
                self.headers["Authorization"] or "",
                f"http://localhost:{self.server.server_port}/",
                lambda name, _: [KeyRule((KEY,), frozenset({"Listen"}))] if name == KEY_NAME else [],
                0,
            )
        except TokenError as error:
            return self._answer(401, json.dumps({"error": str(error)}).encode())
        url = urlsplit(self.path)
        if url.path == "/$journal":
            return self._answer(200, json.dumps(self._extents()).encode())
        if url.path == "/$journal/entities":  # as an older broker
            return self._answer(404, b"{}")
        return self._rows(int(url.path.removeprefix("/$journal/")), {k: v[0] for k, v in parse_qs(url.query).items()})

    def do_PUT(self) -> None:
        journal = self.server.journal
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        journal.told.append((self.path, told))
        self._answer(journal.answer_to_told, b"{}")

    def _extents(self) -> dict[str, object]:
        journal = self.server.journal
        partitions = [
            {
                **{"partition": number, "epoch": journal.epoch, "low": journal.low, "stable": stable},
                **{"lowTime": "2026-01-31T22:59:00Z", "stableTime": "2026-01-31T23:59:00Z", "bytes": 1},
            }
            for number, stable in enumerate(journal.stable)
        ]
        known = {} if journal.namespace_id is None else {"namespaceId": journal.namespace_id}
        newest = {path.rpartition("/")[2]: told["partitions"] for path, told in journal.told}
        consumers = [{"name": name, "behind": 0, "partitions": told} for name, told in newest.items()]
        return {"namespace": journal.namespace, "partitions": partitions, "consumers": consumers, **known}

    def _rows(self, partition: int, query: dict[str, str]) -> None:
        journal = self.server.journal
        first, end = int(query["from"]), int(query["to"])
        low, stable = journal.low, journal.stable[partition]
        if query["epoch"] != journal.epoch:
            return self._answer(409, json.dumps({"error": "another epoch", "epoch": journal.epoch}).encode())
        if not low <= first <= stable:
            return self._answer(416, json.dumps({"error": "out of retention", "low": low, "stable": stable}).encode())
        end = min(end, stable, first + journal.answer_rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as stream:
            serve = journal.readable if partition in journal.damaged else journal.rows
            for each in serve(partition, first, end):
                stream.write_batch(each)
        content = sink.getvalue().to_pybytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.apache.arrow.stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("X-Peeklock-Next-Offset", str(end + journal.claims_rows))
        self.end_headers()
        if journal.cut_after_bytes is not None and journal.cuts_left:
            journal.cuts_left -= 1
            part = content[: journal.cut_after_bytes]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.close_connection = True
            return
        for at in range(0, len(content), 65536):
            part = content[at : at + 65536]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class JournalServer:
    """Use it in `with`."""

    def __init__(self, journal: Journal) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.journal = journal
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def options(self) -> list[str]:
        """Of commands that are to read it."""
        text = f"Endpoint=sb://localhost;SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY}"
        return ["--connection-string", text, "--http-endpoint", f"http://localhost:{self.port}"]

    def __enter__(self) -> "JournalServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
