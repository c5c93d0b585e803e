"""The journal of a broker over HTTP, as a source of rows for a capture.

It is synchronous: Arrow reads record batches from the answer as they come, and there is nothing else to do meanwhile.
"""

import http.client
import io
import json
import re
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlencode

import pyarrow as pa

from broker.administration.address import Address
from protocol.client.connection_string import Credentials, SharedAccessKey, SharedAccessSignature
from protocol.client.sockets import end_when_silent
from protocol.nodes.sas_tokens import generate
from storage.capture.errors import DamagedRows, OutOfRetention, SourceFailed, SourceRefused
from storage.capture.source import Extent, Extents, Told
from storage.capture.tables import until_damage

PATH: Final = "/$journal"
ENTITIES_PATH: Final = f"{PATH}/entities"
NEXT_OFFSET: Final = "X-Peeklock-Next-Offset"
ROWS_TYPE: Final = "application/vnd.apache.arrow.stream"
ANSWER_SECONDS: Final = 30.0  # for a connection, and for each part of an answer
TOKEN_SECONDS: Final = 3600
ANSWER_BYTES: Final = 16 << 20  # of rows, in one answer; a single row may have more
READ_BYTES: Final = 256 << 10
MAX_DOCUMENT_BYTES: Final = 4 << 20  # of an answer in JSON
MAX_DEFINITIONS_BYTES: Final = 256 << 20
_EPOCH: Final = re.compile(r"[0-9a-f]{16}")
_NAMESPACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_MAX_OFFSET: Final = (1 << 63) - 1


class HttpJournal:
    """A `storage.capture.source.RowSource`. It has one connection, which `close` ends and which is made when needed."""

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        trust: ssl.SSLContext,
        consumer: str,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`consumer` is the name by which it tells the broker what it has."""
        self._consumer = consumer
        self._address = address
        self._credentials = credentials
        self._clock = clock
        if address.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=answer_seconds, context=trust
            )
        else:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=answer_seconds)

    def close(self) -> None:
        self._connection.close()

    def extents(self) -> Extents:
        """Ask which rows the journal has. Raises SourceFailed, SourceRefused."""
        with self._asked(PATH) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            return self._extents(self._document(answer))

    def told(self) -> Told:
        """How far the broker was told that rows are captured, by this consumer. Raises SourceFailed, SourceRefused."""
        with self._asked(PATH) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            document = self._document(answer)
        known = self._extents(document)
        try:
            offsets = {
                (self._offset(each["partition"]), self._epoch(each["epoch"])): self._offset(each["offset"])
                for consumer in document.get("consumers", ())
                if consumer["name"] == self._consumer
                for each in consumer["partitions"]
            }
        except (KeyError, TypeError) as error:
            raise self._failed(f"the answer describes no consumers: {error!r}") from None
        return Told(known.namespace, known.namespace_id, offsets)

    def definitions(self) -> dict[str, Any] | None:
        """Ask for the definitions of all entities and rules; None if the broker's version does not tell them.

        Raises SourceFailed, SourceRefused.
        """
        with self._asked(ENTITIES_PATH) as answer:
            if answer.status in (400, 404):
                answer.read()
                return None
            if answer.status != 200:
                raise self._refusal(answer)
            document = self._document(answer, MAX_DEFINITIONS_BYTES)
        if not isinstance(document, dict) or not isinstance(document.get("entities"), list):
            raise self._failed("the answer describes no entities")
        return document

    def rows(self, partition: int, epoch: str, first: int, end: int) -> Generator[pa.RecordBatch, None, None]:
        """Rows of the offsets first <= offset < end.

        Raises SourceFailed, SourceRefused, OutOfRetention, DamagedRows.
        """
        while first < end:
            query = {"epoch": epoch, "from": first, "to": end, "records": 1, "maxBytes": ANSWER_BYTES}
            with self._asked(f"{PATH}/{partition}?{urlencode(query)}") as answer:
                if answer.status != 200:
                    raise self._refusal(answer, partition, epoch, first)
                after = self._offset(answer.getheader(NEXT_OFFSET))
                if not first <= after <= end:
                    raise self._failed(f"{NEXT_OFFSET} is {after}, which is not within {first} to {end}")
                at = first
                for whole in self._batches(answer):
                    batch, damage = until_damage(whole)
                    at += len(batch)
                    yield batch
                    if damage is not None:
                        last, what = damage["journalOffset"], damage["description"]
                        if last is None or not at <= last < after:
                            raise self._failed(f"partition {partition}: damaged rows end at {last}, and begin at {at}")
                        raise DamagedRows(partition, epoch, at, last + 1, what)
            if at != after:
                raise self._failed(f"partition {partition}: the answer ended before offset {after}, at {at}")
            if at == first:
                return
            first = at

    def tell(self, captured: Sequence[Extent]) -> None:
        """Tell the broker up to which offsets rows are captured. Raises SourceFailed, SourceRefused."""
        told = [{"partition": each.partition, "epoch": each.epoch, "offset": each.stable} for each in captured]
        document = json.dumps({"partitions": told}).encode()
        with self._asked(f"{PATH}/consumers/{self._consumer}", document) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            answer.read(MAX_DOCUMENT_BYTES)

    def _batches(self, answer: http.client.HTTPResponse) -> Iterator[pa.RecordBatch]:
        try:
            with pa.ipc.open_stream(pa.PythonFile(io.BufferedReader(answer, READ_BYTES), mode="r")) as reader:
                yield from reader
        except pa.ArrowException as error:
            raise self._failed(f"the answer is no Arrow stream: {error}") from None

    @contextmanager
    def _asked(self, target: str, told: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET, or to a PUT of what is told. If it is not read to its end, the connection is closed."""
        headers = {"Accept": f"application/json, {ROWS_TYPE}"}
        if token := self._token():
            headers["Authorization"] = token
        complete = False
        try:
            answer = self._answer(target, told, headers)
            yield answer
            answer.read(1)  # behind the Arrow stream nothing is left but the end of the answer
            complete = answer.isclosed()
        except ssl.SSLCertVerificationError as error:
            raise SourceRefused(f"cannot connect to {self._address.url}: {error.verify_message}") from error
        except TimeoutError as error:
            raise self._failed("no answer in time") from error
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from error
        except http.client.HTTPException as error:
            raise self._failed(f"the answer was cut off: {error!r}") from error
        finally:
            if not complete:
                self._connection.close()

    def _answer(self, target: str, told: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Asks again on a new connection, if the broker has closed the old one since the last answer."""
        is_new = self._connection.sock is None
        method = "GET" if told is None else "PUT"
        try:
            return self._request(method, target, told, headers)
        except (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
            self._connection.close()
            if is_new:
                raise
            return self._request(method, target, told, headers)

    def _request(
        self, method: str, target: str, told: bytes | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        if self._connection.sock is None:
            self._connection.connect()
            end_when_silent(self._connection.sock)
        self._connection.request(method, target, body=told, headers=headers)
        return self._connection.getresponse()

    def _token(self) -> str:
        match self._credentials:
            case SharedAccessKey(name, key):
                return generate(f"{self._address.url}/", name, key, int(self._clock()) + TOKEN_SECONDS)
            case SharedAccessSignature(token):
                return token
        return ""

    def _document(self, answer: http.client.HTTPResponse, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
        text = answer.read(max_bytes)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._failed("the answer is no JSON") from None

    def _extents(self, document: Any) -> Extents:
        try:
            partitions = [
                Extent(
                    self._offset(each["partition"]),
                    self._epoch(each["epoch"]),
                    self._offset(each["low"]),
                    self._offset(each["stable"]),
                )
                for each in document["partitions"]
            ]
            namespace, namespace_id = document["namespace"], document.get("namespaceId")
        except (KeyError, TypeError, AttributeError) as error:
            raise self._failed(f"the answer describes no journal: {error!r}") from None
        if not isinstance(namespace, str) or any(each.low > each.stable for each in partitions):
            raise self._failed("the answer describes no journal")
        if namespace_id is not None and not (isinstance(namespace_id, str) and _NAMESPACE_ID.fullmatch(namespace_id)):
            raise self._failed(f"{namespace_id!r} is no id of a namespace")
        return Extents(namespace, partitions, namespace_id)

    def _offset(self, value: Any) -> int:
        """Check an offset, which may be the text of a header. Raises SourceFailed."""
        if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value, re.ASCII):
            value = int(value)
        if type(value) is not int or not 0 <= value <= _MAX_OFFSET:
            raise self._failed(f"{value!r} is no offset")
        return value

    def _epoch(self, value: Any) -> str:
        if not isinstance(value, str) or not _EPOCH.fullmatch(value):
            raise self._failed(f"{value!r} is no epoch")
        return value

    def _refusal(
        self, answer: http.client.HTTPResponse, partition: int = -1, epoch: str = "", first: int = 0
    ) -> Exception:
        text = answer.read(MAX_DOCUMENT_BYTES)
        told = "".join(each if each.isprintable() else " " for each in text[:500].decode(errors="replace"))
        url = self._address.url
        match answer.status:
            case 416 if partition >= 0:
                low = self._low(text)
                if first < low:
                    return OutOfRetention(partition, epoch, first, low)
                return self._failed(f"partition {partition} has no offset {first}: {told}")
            case 401 | 403:
                return SourceRefused(f"{url} refuses the journal (status {answer.status}): {told}")
            case 404 if partition < 0:
                return SourceRefused(f"{url} has no journal; is its setting journal.mode off? {told}")
            case 400:
                return SourceRefused(f"{url} does not understand the request: {told}")
        return self._failed(f"status {answer.status}: {told}")

    def _low(self, text: bytes) -> int:
        try:
            return self._offset(json.loads(text)["low"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._failed("the answer of status 416 has no low") from None

    def _failed(self, text: str) -> SourceFailed:
        return SourceFailed(f"{self._address.url}: {text}")
