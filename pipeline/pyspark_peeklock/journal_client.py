"""Reads the journal over HTTP: its partitions, and ranges of its rows as Arrow batches.

A range is read to its end: an answer that is cut off, or that the endpoint ended early, goes on behind the last row
that came, until nothing has come for `retry_timeout_s`. Rows are counted by their offsets: none is missing or twice.
"""

import html
import http.client
import io
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protocol.client.connection_string import SharedAccessKey, SharedAccessSignature
from protocol.client.sockets import end_when_silent
from protocol.nodes import sas_tokens
from pyspark_peeklock.errors import (
    AnotherEpoch,
    InvalidOption,
    JournalDamaged,
    JournalRefused,
    JournalUnreachable,
    OutOfRetention,
)
from pyspark_peeklock.journal_offsets import PartitionState, states_of, told_of
from pyspark_peeklock.options import Access
from pyspark_peeklock.parts import OffsetRange

LOCAL_HTTP_PORT: Final = 5300
TOKEN_SECONDS: Final = 3600.0
SILENCE_S: Final = 60.0  # an endpoint that sends nothing for so long is away
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 16 << 20  # of an answer that is JSON
MAX_SCHEMA_BYTES: Final = 1 << 20
_MESSAGE_BEGINS: Final = b"\xff\xff\xff\xff"  # of Arrow's streams; then four bytes of length
_NEEDED: Final = frozenset({"journalOffset", "op", "reason", "description"})  # to know what is missing or damaged
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of Arrow's streams: without it an answer was cut off
_HOST: Final = re.compile(r"[^\s\x00-\x20\x7f]+")
_DETAIL: Final = re.compile(r"<Detail>(?:SubCode=\d+\. )?(.*?)(?: TrackingId:.*)?</Detail>", re.DOTALL)
_FINAL: Final = frozenset({400, 401, 403, 404, 405, 410})

log = logging.getLogger("pyspark_peeklock")


class _Cut(Exception):
    """An answer ended before its end, or its rows are not those that were asked for."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the journal is; `url` is empty for the usual place beside the AMQP endpoint."""

    access: Access
    url: str
    retry_timeout_s: float

    def connect(self) -> tuple[http.client.HTTPConnection, dict[str, str]]:
        """A connection that is not open yet, and the headers of its requests. Raises InvalidOption."""
        target = self.access.connection_string()
        scheme, host, port = ("https", target.host, 443) if target.tls else ("http", target.host, LOCAL_HTTP_PORT)
        if self.url:
            scheme, host, port = parsed_url(self.url)
        headers = {}
        credentials = target.credentials
        if isinstance(credentials, SharedAccessSignature):
            headers["Authorization"] = credentials.token
        elif isinstance(credentials, SharedAccessKey):
            expires_s = ceil(time.time() + TOKEN_SECONDS)
            resource = f"https://{target.host}/"
            token = sas_tokens.generate(resource, credentials.name, credentials.key, expires_s)
            headers["Authorization"] = token
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=SILENCE_S, context=self.access.trust()), headers
        self.access.trust_of(tls=False)
        return http.client.HTTPConnection(host, port, timeout=SILENCE_S), headers


def parsed_url(url: str) -> tuple[str, str, int]:
    """Scheme, host and port. Raises InvalidOption."""
    if "@" in url:
        raise InvalidOption("option 'httpEndpoint' has no credentials: those of the connection string are used")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as a connection does
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if (
        not host
        or not _HOST.fullmatch(host)
        or port == 0
        or parts.scheme not in ("http", "https")
        or parts.path not in ("", "/")
        or parts.query
        or parts.fragment
    ):
        raise InvalidOption(f"option 'httpEndpoint' is no address such as http://localhost:5300: {url[:100]!r}")
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80)


class JournalClient:
    """One connection, which is made anew when it is lost. Not for several threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection: http.client.HTTPConnection | None = None
        self._headers: dict[str, str] = {}
        self._until = 0.0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def states(self, *, current: bool = False) -> tuple[str, dict[int, PartitionState]]:
        """The namespace and its partitions; `current`: with all that the broker has confirmed by now.

        Raises JournalRefused, JournalUnreachable or InvalidOption.
        """
        return states_of(self._overview("/$journal?current=1" if current else "/$journal"))

    def told(self, consumer: str) -> dict[tuple[int, str], int]:
        """Return before which offset the consumer has all, by partition and epoch. Raises as `states`."""
        return told_of(self._overview("/$journal"), consumer)

    def _overview(self, path: str) -> Any:
        """Ask until an overview comes. Raises JournalRefused, JournalUnreachable or InvalidOption."""
        patience = _Patience(self._endpoint.retry_timeout_s)
        while True:
            try:
                return _json(self._get(path))
            except (OSError, http.client.HTTPException, _Cut) as error:
                self.close()
                patience.wait(error, "GET /$journal")

    def tell(self, consumer: str, read: Mapping[int, tuple[str, int]]) -> None:
        """Say that all before these places, epoch and offset by partition, was read: the journal may drop it.

        What is not told now is told with the next places: it only keeps more until then.
        """
        told = [
            {"partition": partition, "epoch": epoch, "offset": offset} for partition, (epoch, offset) in read.items()
        ]
        try:
            self._get(f"/$journal/consumers/{consumer}", told=json.dumps({"partitions": told}).encode()).read()
        except (OSError, http.client.HTTPException, _Cut, JournalRefused) as error:
            self.close()
            log.warning("peeklock journal: consumer %s: %s", consumer, error)

    def batches(
        self, wanted: OffsetRange, *, entity: str | None, records: bool, columns: Collection[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of this range, of entities that fit the pattern; in order, each once. Of the journal's columns it
        has at least these: others, if they are not all, are not even decompressed.

        Raises OutOfRetention, AnotherEpoch, JournalDamaged, JournalRefused, JournalUnreachable or InvalidOption. The
        first three have `first`: what was wanted before it has come.
        """
        at = wanted.first
        patience = _Patience(self._endpoint.retry_timeout_s)
        while (asked := at) < wanted.end:
            query = {"epoch": wanted.epoch, "from": at, "to": wanted.end, "records": int(records)}
            if entity is not None:
                query["entity"] = entity
            try:
                answer = self._get(f"/$journal/{wanted.partition}?{urlencode(query, quote_via=quote)}", wanted, at)
                following = _next_offset(answer, at, wanted.end)
                body = _Body(answer)
                stream = pa.ipc.open_stream(body, options=body.options(columns))
                for whole in stream:
                    batch, damaged = _until_damage(whole)
                    if batch.num_rows:
                        behind = _behind(batch, at, following, is_whole=entity is None)
                        yield batch
                        at = behind
                        patience.renew()
                    if damaged is not None:
                        self._fail_for(damaged, wanted, at, is_whole=entity is None)
                body.finish()
                if entity is None and at != following:
                    raise _Cut(f"the rows end at offset {at}, and the answer should end at {following}")
                at = max(at, following)
                if at > asked:
                    patience.renew()
                else:
                    patience.wait(None, f"partition {wanted.partition} from offset {at}")
            except (OSError, http.client.HTTPException, pa.ArrowInvalid, _Cut) as error:
                self.close()
                patience.wait(error, f"partition {wanted.partition} from offset {at}")
            except OutOfRetention as error:
                # An endpoint that has just started may not have read all of its files yet.
                if at < error.low or patience.is_over:
                    raise
                patience.wait(None, f"partition {wanted.partition} from offset {at}")

    def _fail_for(self, damaged: pa.RecordBatch, wanted: OffsetRange, at: int, *, is_whole: bool) -> None:
        """Raise JournalDamaged, or _Cut if the rows can be read after all; `damaged` is the row in their place."""
        self.close()
        row = damaged.select(["journalOffset", "description"]).to_pylist()[0]
        if row["journalOffset"] is None or not at <= row["journalOffset"] < wanted.end:
            raise JournalRefused(f"a row for damaged ones has offset {row['journalOffset']}, not from {at} on")
        end = row["journalOffset"] + 1
        if is_whole:
            raise JournalDamaged(wanted.partition, at, end, damaged, str(row["description"]))
        # With a pattern nobody knows which rows would have come before: ask for all.
        for _ in self.batches(OffsetRange(wanted.partition, wanted.epoch, at, end), entity=None, records=False):
            pass
        raise _Cut(f"the rows before offset {end} could not be read, and now they can")

    def _get(
        self, path: str, wanted: OffsetRange | None = None, at: int = 0, told: bytes | None = None
    ) -> http.client.HTTPResponse:
        """The answer of status 200, whose body is to be read. Raises what its status says."""
        if time.monotonic() > self._until:
            self.close()  # its token ends
        if self._connection is None:
            self._connection, self._headers = self._endpoint.connect()
            self._until = time.monotonic() + TOKEN_SECONDS / 2
        if self._connection.sock is None:
            self._connection.connect()
            end_when_silent(self._connection.sock)
        method = "GET" if told is None else "PUT"
        self._connection.request(method, path, body=told, headers=self._headers)
        answer = self._connection.getresponse()
        if answer.status == 200:
            return answer
        said = answer.read(MAX_ANSWER_BYTES)
        self.close()
        details = _details(said)
        if wanted is not None and answer.status == 416:
            raise OutOfRetention(wanted.partition, at, _int(details.get("low")), _int(details.get("stable")))
        if wanted is not None and answer.status == 409:
            raise AnotherEpoch(wanted.partition, wanted.epoch, str(details.get("epoch"))[:64], at)
        reason = str(details.get("error") or _detail(said.decode(errors="replace")))[:300].strip()
        text = f"{method} {path.partition('?')[0]}: {answer.status} {answer.reason}{': ' if reason else ''}{reason}"
        if answer.status in _FINAL:
            raise JournalRefused(text)
        raise _Cut(text)


class _Patience:
    """Pauses between attempts, which get longer; the time counts from the last success."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        self._since = self._clock()
        self._pause_s = FIRST_PAUSE_S

    @property
    def is_over(self) -> bool:
        return self._clock() - self._since > self._timeout_s

    def wait(self, error: Exception | None, what: str) -> None:
        """Pause before the next try. Raises JournalUnreachable when there was no success for too long."""
        if self.is_over:
            text = f"{what}: nothing has come for {self._timeout_s:.0f} s (retryTimeoutSeconds)"
            raise JournalUnreachable(f"{text}; the last error: {error or 'an answer without rows'}") from error
        log.warning("peeklock journal: %s: %s; trying again", what, error or "an answer without rows")
        time.sleep(min(self._pause_s, self._timeout_s))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class _Body(io.RawIOBase):
    """The body of an answer as a file, which notices whether Arrow's stream came to its end."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        super().__init__()
        self._answer = answer
        self._tail = b""
        self._front = b""  # was read, and is to be read again

    def readable(self) -> bool:
        return True

    def options(self, columns: Collection[str] | None) -> pa.ipc.IpcReadOptions:
        """Return options that leave out all columns but these, and those needed here. Raises _Cut, pa.ArrowInvalid."""
        if columns is None:
            return pa.ipc.IpcReadOptions(use_threads=False)
        head = self.read(8)
        length = int.from_bytes(head[4:], "little")
        if len(head) < 8 or head[:4] != _MESSAGE_BEGINS or length > MAX_SCHEMA_BYTES:
            raise _Cut("the answer is no stream of Arrow's, or was cut off")
        self._front = head + self.read(length)
        names = pa.ipc.read_schema(pa.py_buffer(self._front)).names
        wanted = [index for index, name in enumerate(names) if name in columns or name in _NEEDED]
        return pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)

    def read(self, size: int | None = -1) -> bytes:
        if self._front:
            octets = self._front if size is None or size < 0 else self._front[:size]
            self._front = self._front[len(octets) :]
            if size is not None and 0 <= size == len(octets):
                return octets
            return octets + self.read(size if size is None or size < 0 else size - len(octets))
        octets = self._answer.read(None if size is None or size < 0 else size)
        if octets:
            self._tail = octets[-8:] if len(octets) >= 8 else (self._tail + octets)[-8:]
        return octets

    def finish(self) -> None:
        """Read the rest. Raises _Cut if the stream was cut off, also between batches: that alone looks like an end."""
        self.read()
        if self._tail != _END_OF_STREAM:
            raise _Cut("the answer was cut off")


def _until_damage(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """What is before the first row that stands for damaged ones, and this row."""
    op, reason = (batch.schema.get_field_index(name) for name in ("op", "reason"))
    if op < 0 or reason < 0 or batch.column(reason).null_count == batch.num_rows:
        return batch, None
    is_damage = pc.and_(pc.equal(batch.column(op), "truncated"), pc.equal(batch.column(reason), "damaged"))
    at = pc.index(is_damage, True).as_py()
    return (batch, None) if at < 0 else (batch.slice(0, at), batch.slice(at, 1))


def _behind(batch: pa.RecordBatch, at: int, following: int, *, is_whole: bool) -> int:
    """The offset behind a batch of an answer from `at` to `following`. Raises _Cut if it cannot be one."""
    index = batch.schema.get_field_index("journalOffset")
    if index < 0 or batch.column(index).null_count or not pa.types.is_int64(batch.column(index).type):
        raise JournalRefused("the answer has no column journalOffset of 64-bit numbers")
    offsets = batch.column(index).to_numpy(zero_copy_only=False)
    steps = np.diff(offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    if first < at or last >= following or (len(steps) and int(steps.min()) < 1):
        raise _Cut(f"rows of offsets {first} to {last}, out of order or not from {at} to {following}")
    if is_whole and (first != at or last - first + 1 != len(offsets)):
        raise _Cut(f"rows are missing between offsets {at} and {last}")
    return last + 1


def _next_offset(answer: http.client.HTTPResponse, at: int, end: int) -> int:
    value = answer.getheader("X-Peeklock-Next-Offset", "")
    if not (value.isascii() and value.isdigit()) or not at <= int(value[:20]) <= end:
        raise JournalRefused(f"the answer has X-Peeklock-Next-Offset {value[:50]!r}, not from {at} to {end}")
    return int(value)


def _json(answer: http.client.HTTPResponse) -> Any:
    said = answer.read(MAX_ANSWER_BYTES + 1)
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        if answer.length:  # bytes that have not come
            raise _Cut("the answer was cut off") from None
        raise JournalRefused("the answer to GET /$journal is no JSON") from None


def _details(said: bytes) -> dict[str, Any]:
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _detail(text: str) -> str:
    """Return what an error of the service, which is XML, says for users; any other text stays whole."""
    found = _DETAIL.search(text)
    return text if found is None else html.unescape(found[1])


def _int(value: Any) -> int:
    return value if type(value) is int else -1
