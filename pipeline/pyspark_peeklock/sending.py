"""Sends the rows of one task: many transfers in flight, and again after the broker was away.

Transfers are sent in order. If one fails for a reason that passes (the connection is lost, the broker is busy), all
outcomes are awaited, and those that failed are sent again in their order. What the broker had accepted without our
knowing comes twice, with the same ids. So duplicate detection drops it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from protocol import conditions
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import (
    AuthenticationFailed,
    ClientError,
    LinkDetached,
    MessageRefused,
)
from protocol.client.links import Sender
from protocol.errors import ProtocolError
from pyspark_peeklock.bad_rows import message_of, place_of
from pyspark_peeklock.encoding import CHUNK_BYTES, Payload, Unfit, payloads, sections, too_large, unfit
from pyspark_peeklock.errors import SendFailed, UnfitRow
from pyspark_peeklock.identity import Identities
from pyspark_peeklock.logs import let_speak
from pyspark_peeklock.options import SinkOptions

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
LOGGED_BAD_ROWS: Final = 10  # of a task; all are counted
# A repetition does not change these.
_FINAL: Final = frozenset(
    {
        conditions.NOT_FOUND,
        conditions.UNAUTHORIZED_ACCESS,
        conditions.NOT_ALLOWED,
        conditions.NOT_IMPLEMENTED,
        conditions.INVALID_FIELD,
        conditions.DECODE_ERROR,
    }
)
_PASSING: Final = frozenset({conditions.SERVER_BUSY, conditions.TIMEOUT, conditions.INTERNAL_ERROR})


log = logging.getLogger("pyspark_peeklock")


@dataclass(slots=True)
class Counts:
    """What the broker has accepted of a task: messages, transfers and bytes on the wire, and repeated transfers.

    `bad` rows made no message. Those that are in the queue for them count as messages, too.
    """

    messages: int = 0
    transfers: int = 0
    bytes: int = 0
    repeated: int = 0
    bad: int = 0


@dataclass(slots=True)
class _Parcel:
    """A transfer whose outcome is not known; the numbers of its first and last row are for errors."""

    address: str
    payload: Payload
    first_row: int
    last_row: int
    outcome: asyncio.Future[None]


async def send_rows(batches: Iterator[dict[str, pa.Array]], options: SinkOptions, identities: Identities) -> Counts:
    """Send all rows; returns when the broker has accepted them. The columns are those of `encoding`, and `entity`.

    Raises UnfitRow, SendFailed, InvalidOption. Rows that were accepted before stay sent.
    """
    outbox = _Outbox(options)
    row = 0
    try:
        # Reading waits for Spark; acceptances come in meanwhile.
        while (columns := await asyncio.to_thread(next, batches, None)) is not None:
            rows = len(_content(columns))
            if "amqpMessage" not in columns:
                columns["messageId"] = identities.of(columns, rows, row)
            for address, part, numbers in _by_address(columns, row, options.entity):
                if not address.strip("/"):
                    why = "targetEntity", "is null or empty, and there is no option 'entity'"
                    await _take_bad(outbox, options, part, numbers, dict.fromkeys(range(len(numbers)), why))
                    continue
                bad = unfit(part)
                await _take_bad(outbox, options, part, numbers, bad)
                part, numbers = _without(part, numbers, bad)
                if not len(numbers):
                    continue
                array = sections(part)
                bad = too_large(array, await outbox.max_message_bytes(address))
                await _take_bad(outbox, options, part, numbers, bad)
                if bad:
                    _, numbers = _without(part, numbers, bad)
                    array = array.filter(pa.array([row not in bad for row in range(len(array))]))
                for payload in payloads(array, await outbox.batch_bytes(address)):
                    await outbox.put(address, payload, int(numbers[payload.first]), int(numbers[payload.end - 1]))
            row += rows
        await outbox.empty()
    finally:
        await outbox.close()
    return outbox.counts


async def _take_bad(
    outbox: "_Outbox", options: SinkOptions, part: dict[str, pa.Array], numbers: Any, bad: dict[int, Unfit]
) -> None:
    """Do with rows that make no message what option `onBadRow` says. Raises UnfitRow, SendFailed."""
    for row, why in bad.items():
        error = UnfitRow(int(numbers[row]), *why, place_of(part, row))
        if options.on_bad_row == "fail":
            raise error
        if not outbox.counts.bad:
            let_speak(log)
        outbox.counts.bad += 1
        if outbox.counts.bad <= LOGGED_BAD_ROWS:
            log.warning("peeklock sink: bad row: %s", error)
        if options.on_bad_row == "queue":
            most = await outbox.max_message_bytes(options.bad_row_entity)
            message = message_of(part, row, int(numbers[row]), why, most)
            payload = Payload(row, row + 1, message, False)
            await outbox.put(options.bad_row_entity, payload, int(numbers[row]), int(numbers[row]))


def _without(part: dict[str, pa.Array], numbers: Any, bad: dict[int, Unfit]) -> tuple[dict[str, pa.Array], Any]:
    """The other rows, and their numbers."""
    if not bad:
        return part, numbers
    left = np.delete(np.arange(len(_content(part))), list(bad))
    return {name: column.take(pa.array(left)) for name, column in part.items()}, numbers[left]


def _by_address(columns: dict[str, pa.Array], row: int, entity: str) -> Iterator[tuple[str, dict[str, pa.Array], Any]]:
    """The rows of each entity in their order, in parts that may be encoded at once; with their numbers in the task.

    The address is empty for rows that name no entity.
    """
    numbers = np.arange(row, row + len(_content(columns)))
    targets = columns.get("targetEntity")
    if targets is None:
        yield from ((entity, part, numbers[first:]) for first, part in _chunks(columns))
        return
    coded = targets.fill_null(entity).dictionary_encode()
    for code, address in enumerate(coded.dictionary.to_pylist()):
        at = np.flatnonzero(coded.indices.to_numpy(zero_copy_only=False) == code)
        of_one = {name: column.take(pa.array(at)) for name, column in columns.items()}
        yield from ((address, part, numbers[at[first:]]) for first, part in _chunks(of_one))


def _content(columns: dict[str, pa.Array]) -> pa.Array:
    whole = columns.get("amqpMessage")
    return columns["body"] if whole is None else whole


def _chunks(columns: dict[str, pa.Array]) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    content = _content(columns)
    rows = len(content)
    most = max(1, min(rows, CHUNK_BYTES * rows // max(1, content.nbytes)))
    for first in range(0, rows, most):
        yield first, {name: column.slice(first, most) for name, column in columns.items()}


class _Outbox:
    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._connection: Connection | None = None
        self._senders: dict[str, Sender] = {}
        self._waiting: deque[_Parcel] = deque()
        self._progress_at = time.monotonic()
        self._pause_s = FIRST_PAUSE_S
        self.counts = Counts()

    async def max_message_bytes(self, address: str) -> int:
        if not self._waiting:
            self._progress_at = time.monotonic()  # it was Spark that took its time
        return (await self._patiently(address)).link.remote_max_message_bytes

    async def batch_bytes(self, address: str) -> int:
        most = (await self._patiently(address)).link.remote_max_message_bytes
        return min(self._options.batch_bytes, most) if most else self._options.batch_bytes

    async def put(self, address: str, payload: Payload, first_row: int, last_row: int) -> None:
        while len(self._waiting) >= self._options.max_in_flight:
            await self._settle_first()
        parcel = _Parcel(address, payload, first_row, last_row, asyncio.get_running_loop().create_future())
        self._waiting.append(parcel)
        self._post(parcel, await self._patiently(address))

    async def empty(self) -> None:
        while self._waiting:
            await self._settle_first()

    async def close(self) -> None:
        for parcel in self._waiting:
            if not parcel.outcome.cancel() and not parcel.outcome.cancelled():
                parcel.outcome.exception()  # else the event loop reports that nobody asked for it
        if self._connection is not None:
            await self._connection.close()

    def _post(self, parcel: _Parcel, sender: Sender) -> None:
        try:
            parcel.outcome = sender.enqueue(parcel.payload.content, is_batch=parcel.payload.is_batch)
        except ClientError as error:
            parcel.outcome = asyncio.get_running_loop().create_future()
            parcel.outcome.set_exception(error)

    async def _settle_first(self) -> None:
        outcome = self._waiting[0].outcome
        done, _ = await asyncio.wait([outcome], timeout=self._patience_s)
        if not done:
            self._check_patience(TimeoutError("no answer"))
        elif (error := outcome.exception()) is None:
            self._accepted(self._waiting.popleft())
        else:
            await self._again(error)

    def _accepted(self, parcel: _Parcel) -> None:
        self._progress_at = time.monotonic()
        self._pause_s = FIRST_PAUSE_S
        self.counts.messages += parcel.payload.end - parcel.payload.first
        self.counts.transfers += 1
        self.counts.bytes += len(parcel.payload.content)

    async def _again(self, error: BaseException) -> None:
        """Send what has failed again, in its order, after a pause."""
        while (await asyncio.wait([each.outcome for each in self._waiting], timeout=self._patience_s))[1]:
            self._check_patience(TimeoutError("no answer"))
        parcels, self._waiting = self._waiting, deque()
        for parcel in parcels:
            if parcel.outcome.exception() is None:
                self._accepted(parcel)
            else:
                self._waiting.append(parcel)
        for parcel in self._waiting:
            reason = parcel.outcome.exception()
            if reason is not None and not _passes(reason):
                self._fail(reason, parcel)
        self._check_patience(error)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        for parcel in self._waiting:
            self.counts.repeated += 1
            self._post(parcel, await self._patiently(parcel.address))

    async def _patiently(self, address: str) -> Sender:
        """The sender to this entity, attached anew if it has ended. Raises SendFailed if that takes too long."""
        while True:
            sender = self._senders.get(address)
            if sender is not None and not sender.closed:
                return sender
            try:
                self._senders[address] = await self._attached(address)
            except (ClientError, TimeoutError) as error:
                if not _passes(error):
                    self._fail(error, None, address)
                self._check_patience(error)
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            except (ProtocolError, UnicodeError) as error:  # the address is none
                self._fail(error, None, address)

    async def _attached(self, address: str) -> Sender:
        if self._connection is None or self._connection.closed:
            target = self._options.access.connection_string()
            trust = self._options.access.trust_of(tls=target.tls)
            timeout_s = min(30.0, self._options.send_timeout_s)
            self._connection = await connect_to(target, tls=trust, timeout_s=timeout_s)
            self._senders.clear()
        return await self._connection.sender(address, max_in_flight=self._options.max_in_flight)

    @property
    def _patience_s(self) -> float:
        """How long we may still wait for an acceptance; below 0 if it is too late."""
        return self._progress_at + self._options.send_timeout_s - time.monotonic()

    def _check_patience(self, error: BaseException) -> None:
        if self._patience_s <= 0:
            waited_s = time.monotonic() - self._progress_at
            what = f"the broker has accepted nothing for {waited_s:.0f} s (sendTimeoutSeconds), {self._known()}"
            raise SendFailed(f"{what}; the last error: {error}") from error

    def _known(self) -> str:
        open_rows = sum(parcel.payload.end - parcel.payload.first for parcel in self._waiting)
        return f"{self.counts.messages} rows of this task are sent, and of {open_rows} that is not known"

    def _fail(self, error: BaseException, parcel: _Parcel | None, address: str = "") -> NoReturn:
        if parcel is None:
            raise SendFailed(f"'{address[:300]}': {error}; {self._known()}") from error
        what = f"rows {parcel.first_row} to {parcel.last_row} of this task were refused by '{parcel.address}': {error}"
        raise SendFailed(f"{what}; {self._known()}") from error


def _passes(error: Any) -> bool:
    """True if the same may succeed later."""
    if isinstance(error, AuthenticationFailed):
        return False
    if isinstance(error, MessageRefused):
        return error.condition in _PASSING
    return not (isinstance(error, LinkDetached) and error.condition in _FINAL)
