"""Answers requests for rows of the journal, on a unix socket: a gateway passes them on when it has checked the rights.

    GET /$journal[?current=0|1]              which offsets there are, as JSON
    GET /$journal/{partition}?epoch=&from=&to=[&entity=][&owner=][&records=0|1][&maxBytes=]
                                             rows, as a stream of Arrow's IPC
    PUT, DELETE /$journal/consumers/{name}   how far a consumer is, as JSON

Errors are JSON with `error`; the gateway makes its own form of 400 and 404.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from broker.http.connections import HttpServer
from broker.journal.consumers import MAX_CONSUMERS, Consumers, Progress, TooManyConsumers
from broker.journal_requests import CONSUMERS, MAX_OFFSET, PATH, Consumer, NoPartition, Overview, Range, WrongRequest
from broker.logging import get_logger
from storage.journal.batches import stream
from storage.journal.entities import Wanted
from storage.journal.files import OutOfRetention, PartitionJournal

ARROW: Final = "application/vnd.apache.arrow.stream"
NEXT_OFFSET: Final = "X-Peeklock-Next-Offset"
CURRENT_SECONDS: Final = 20.0  # that a question may wait for what was logged before it
CURRENT_POLL_SECONDS: Final = 0.02
MAX_READERS: Final = 32  # at once
PIECE_BYTES: Final = 256 << 10  # that are written at once: of more, what the socket does not take is copied

log = get_logger("journal")


class _Refused(Exception):
    def __init__(self, status: int, error: str, **fields: Any) -> None:
        super().__init__(error)
        self.status, self.document = status, {"error": error, **fields}


class Serving:
    def __init__(
        self,
        namespace: str,
        journals: Callable[[], Mapping[int, PartitionJournal]],
        consumers: Consumers,
        logged: Callable[[], Mapping[int, int]],
        has: Callable[[Mapping[int, int]], bool],
    ) -> None:
        """`journals` by partition, as of now. `logged` and `has`: those of the Follower."""
        self._namespace = namespace
        self._journals = journals
        self._consumers = consumers
        self._logged, self._has = logged, has
        self.readers = 0

    def server(self) -> web.Server:
        return HttpServer(self._handle, access_log=None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            query = request.query.items()
            if request.path == PATH:
                if Overview.read(query).is_current:
                    await self._become_current()
                return web.json_response(self._overview())
            if request.path.startswith(CONSUMERS):
                return await self._consumer(request, Consumer.read(request.path.removeprefix(CONSUMERS)).name)
            return await self._rows(request, Range.read(request.path.removeprefix(f"{PATH}/"), query))
        except WrongRequest as error:
            return web.json_response({"error": error.text}, status=error.status)
        except _Refused as error:
            return web.json_response(error.document, status=error.status)
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            log.exception("the journal cannot be read")
            return web.json_response({"error": f"the journal cannot be read: {error.strerror}"}, status=500)

    async def _become_current(self) -> None:
        """Wait until all that the workers have confirmed by now can be read. Raises _Refused."""
        turns = self._logged()
        deadline = time.monotonic() + CURRENT_SECONDS
        while not self._has(turns):
            if time.monotonic() > deadline:
                raise _Refused(503, f"the journal is more than {CURRENT_SECONDS:.0f} s behind; try again")
            await asyncio.sleep(CURRENT_POLL_SECONDS)

    def _overview(self) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "partitions": [
                {
                    "partition": partition,
                    "epoch": journal.epoch.hex(),
                    "low": journal.low,
                    "stable": journal.stable,
                    "lowTime": _iso(journal.low_ms),
                    "stableTime": _iso(journal.stable_ms),
                    "bytes": journal.bytes,
                }
                for partition, journal in sorted(self._journals().items())
                if journal.epoch
            ],
            "consumers": [
                {
                    "name": name,
                    "behind": self.rows_behind(progress),
                    "partitions": [
                        {"partition": partition, "epoch": each.epoch.hex(), "offset": each.offset}
                        for partition, each in sorted(progress.items())
                    ],
                }
                for name, progress in self._consumers.all().items()
            ],
        }

    def rows_behind(self, progress: Mapping[int, Progress]) -> int:
        """Rows of the present epochs that a consumer has not read."""
        return sum(rows for _, rows in self._behind(progress))

    def bytes_behind(self, progress: Mapping[int, Progress]) -> int:
        """What these rows take on disk, if they are of the mean size of all that are kept."""
        return sum(
            rows * journal.bytes // (journal.stable - journal.low) for journal, rows in self._behind(progress) if rows
        )

    def _behind(self, progress: Mapping[int, Progress]) -> Iterator[tuple[PartitionJournal, int]]:
        for partition, journal in self._journals().items():
            told = progress.get(partition)
            read = told.offset if told is not None and told.epoch == journal.epoch else 0
            yield journal, max(0, journal.stable - max(read, journal.low))

    async def _consumer(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        """Take the progress of a consumer, or forget the consumer. Raises _Refused."""
        if request.method == "DELETE":
            if not self._consumers.forget(name):
                raise _Refused(404, f"there is no consumer {name!r}")
            return web.json_response({})
        progress = self._progress(await request.read())
        try:
            self._consumers.tell(name, progress)
        except TooManyConsumers:
            raise _Refused(400, f"there are {MAX_CONSUMERS} consumers already; delete one") from None
        return web.json_response({})

    def _progress(self, text: bytes) -> dict[int, Progress]:
        """Read the progress of a consumer, by partition. Raises _Refused."""
        try:
            told = {
                each["partition"]: Progress(bytes.fromhex(each["epoch"]), each["offset"])
                for each in json.loads(text)["partitions"]
            }
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _Refused(400, "a consumer tells {'partitions': [{'partition': , 'epoch': , 'offset': }]}") from None
        journals = self._journals()
        for partition, (epoch, offset) in told.items():
            journal = journals.get(partition) if type(partition) is int else None
            if journal is None:
                raise _Refused(400, f"there is no journal of a partition {str(partition)[:20]!r}")
            if type(offset) is not int or not 0 <= offset <= MAX_OFFSET:
                raise _Refused(400, f"'offset' of partition {partition} must be a number from 0 to {MAX_OFFSET}")
            if epoch > journal.epoch or (epoch == journal.epoch and offset > journal.stable):
                raise _Refused(
                    400, f"partition {partition} has no row before offset {offset} of epoch {epoch.hex()[:16]} yet"
                )
        return told

    async def _rows(self, request: web.BaseRequest, asked: Range) -> web.StreamResponse:
        """Stream the rows of a range. Raises WrongRequest, _Refused, OSError."""
        journal = self._journals().get(asked.partition)
        if journal is None or not journal.epoch:
            raise NoPartition(asked.partition)
        if asked.epoch != journal.epoch.hex():
            raise _Refused(409, "another epoch", epoch=journal.epoch.hex())
        if self.readers >= MAX_READERS:
            raise _Refused(503, f"{MAX_READERS} readers are served already; try again")
        self.readers += 1
        try:
            return await self._send(request, journal, asked)
        finally:
            self.readers -= 1

    async def _send(self, request: web.BaseRequest, journal: PartitionJournal, asked: Range) -> web.StreamResponse:
        try:
            reading = await asyncio.to_thread(journal.read, asked.first, asked.end, asked.max_bytes)
        except OutOfRetention as error:
            raise _Refused(416, "out of retention", low=error.low, stable=error.stable) from None
        wanted = None if asked.pattern is None and asked.owner is None else Wanted(asked.pattern, asked.owner)
        pieces = stream(asked.partition, reading, wanted, records=asked.has_records, time_ms=int(time.time() * 1000))
        loop, next_piece = asyncio.get_running_loop(), None
        try:
            headers = {"Content-Type": ARROW, NEXT_OFFSET: str(reading.next_offset)}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            while True:
                next_piece = loop.run_in_executor(None, _next, pieces)
                piece = await asyncio.shield(next_piece)
                if piece is None:
                    break
                view = memoryview(piece)
                for at in range(0, len(view), PIECE_BYTES):
                    await response.write(view[at : at + PIECE_BYTES])
            await response.write_eof()
            return response
        finally:
            if next_piece is None or next_piece.done():
                _end(pieces, reading)
            else:  # the client has gone meanwhile
                next_piece.add_done_callback(lambda _: _end(pieces, reading))


def _next(pieces: Iterator[Any]) -> Any:
    return next(pieces, None)


def _end(pieces: Any, reading: Any) -> None:
    pieces.close()
    reading.close()  # if nothing was taken of the pieces


def _iso(time_ms: int | None) -> str | None:
    if time_ms is None:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
