"""Completes messages by their sequence numbers, of any Service Bus: those that are named, and no others.

Peeklock locks an active message by its number. Others do so only for deferred ones: there all messages before the last
one are locked, and those that are not meant are released, which does not count as a delivery.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple
from uuid import UUID

from broker.cli.progress import Bar
from broker.cli.taking.selection import Wish
from broker.cli.taking.taken import Taken
from broker.cli.taking.work import Taking
from protocol import conditions
from protocol.client.browsing import fragment_of
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import (
    ClientError,
    ConnectionLost,
    RequestFailed,
    SettlementRefused,
)
from protocol.client.links import Received, Receiver
from protocol.client.messages import Message
from protocol.client.requests import Management
from protocol.symbols import ENQUEUED_TIME
from pyspark_peeklock.options import Access

MAX_MESSAGES: Final = 250  # in one request
MAX_BYTES: Final = 4 << 20  # of the messages in one answer; servers refuse more than 16 MiB
TRIED: Final = 8  # messages by which it is found out whether the server locks active ones by their numbers
CONNECT_S: Final = 30.0
PAUSE_S: Final = 0.5
# Not an internal error: it may be of one message alone, which halving finds.
_PASSING: Final = frozenset({conditions.SERVER_BUSY, conditions.TIMEOUT})


class Wanted(NamedTuple):
    """A message to complete, active or deferred. `enqueued_ms` tells it from another one under the same number."""

    number: int
    enqueued_ms: int
    bytes: int
    is_active: bool = True


class Outcome(NamedTuple):
    """Sequence numbers. `gone`: not there any more, because the answer to their completion was lost, or because
    another receiver has settled them. `left`: still there, mostly locked by another receiver.
    """

    completed: list[int]
    gone: list[int]
    left: list[int]


def complete(access: Access, address: str, wanted: Sequence[Wanted], patience_s: float) -> Outcome:
    """Complete these messages of a queue, subscription or dead-letter queue without sessions.

    A lost connection is made again, and what is refused as busy, or whose lock ended with its worker, is tried again,
    for `patience_s` without one that is completed. Raises ClientError, TimeoutError.
    """
    return asyncio.run(_Completing(access, address, wanted).run(patience_s))


class _Completing:
    def __init__(self, access: Access, address: str, wanted: Sequence[Wanted]) -> None:
        self._access = access
        self._address = address
        self._open = {each.number: each for each in sorted(wanted)}
        self._completed: list[int] = []
        self._unlocked: set[int] = set()  # their locks ended before they were completed, the last time
        self._is_by_number: bool | None = None  # not known yet

    async def run(self, patience_s: float) -> Outcome:
        since_s, before = time.monotonic(), 0
        while True:
            found: Outcome | ClientError | TimeoutError
            try:
                found = await self._once()
                if self._unlocked.isdisjoint(found.left):
                    return found
            except (ClientError, TimeoutError) as error:
                if not _passes(error):
                    raise
                found = error
            if len(self._completed) > before:
                since_s, before = time.monotonic(), len(self._completed)
            if time.monotonic() - since_s >= patience_s:
                if isinstance(found, Outcome):
                    return found
                raise found
            await asyncio.sleep(PAUSE_S)

    async def _once(self) -> Outcome:
        self._unlocked.clear()
        target = self._access.connection_string()
        trust = self._access.trust() if target.tls else None
        async with await connect_to(target, tls=trust, timeout_s=CONNECT_S) as connection:
            management = await connection.management(self._address)
            if self._is_by_number is None:
                first = [each.number for each in self._open.values() if each.is_active][:TRIED]
                for number in first:
                    await self._take(management, [number])
                self._is_by_number = any(number not in self._open for number in first)
            for numbers in self._parts():
                await self._take(management, numbers)
            if not self._is_by_number and any(each.is_active for each in self._open.values()):
                await self._walk(connection)
            there = [number for number in self._open if await self._is_there(management, number)]
        gone = sorted(self._open.keys() - set(there))
        return Outcome(sorted(self._completed), gone, there)

    def _parts(self) -> Iterator[list[int]]:
        """Numbers for one request each: of one partition, so that a refusal leaves nothing locked elsewhere."""
        wanted = [each for each in self._open.values() if self._is_by_number or not each.is_active]
        for _, part in groupby(wanted, lambda each: fragment_of(each.number)):
            numbers: list[int] = []
            size = 0
            for each in part:
                if numbers and (len(numbers) == MAX_MESSAGES or size + each.bytes > MAX_BYTES):
                    yield numbers
                    numbers, size = [], 0
                numbers.append(each.number)
                size += each.bytes
            yield numbers

    async def _take(self, management: Management, numbers: list[int]) -> None:
        """Lock and complete these; halve what is refused, until it is known which cannot be had."""
        try:
            locked = await management.receive_deferred(numbers, active=True)
        except RequestFailed as error:
            if error.condition == conditions.UNAUTHORIZED_ACCESS or _passes(error):
                raise
            if len(numbers) > 1:
                half = len(numbers) // 2
                await self._take(management, numbers[:half])
                await self._take(management, numbers[half:])
            return
        meant: dict[int, UUID] = {}
        others = []
        for token, encoded in locked:
            message = Message.decode(encoded)
            if self._means(message):
                meant[message.sequence_number or 0] = token
            else:
                others.append(token)
        if meant:
            try:
                await management.complete(list(meant.values()))
            except RequestFailed as error:
                if _passes(error):
                    raise
                self._unlocked.update(meant)
            else:
                self._done(meant)
        if others:
            await management.abandon(others)

    async def _walk(self, connection: Connection) -> None:
        async def settle(receiver: Receiver, received: Received, message: Message) -> None:
            number = message.sequence_number or 0
            try:
                await receiver.accept(received)
            except SettlementRefused:
                self._unlocked.add(number)
            else:
                self._done([number])

        taken = Taken()
        await Taking(connection, self._address, Wish(condition=self._means), taken, Bar(), settle).run()
        if isinstance(taken.failure, ClientError | TimeoutError):
            raise taken.failure

    def _means(self, message: Message) -> bool:
        wanted = self._open.get(message.sequence_number or 0)
        return wanted is not None and message.annotations.get(ENQUEUED_TIME) == wanted.enqueued_ms

    def _done(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._open[number]
            self._completed.append(number)

    async def _is_there(self, management: Management, number: int) -> bool:
        found = await management.peek(1, number, omit_body=True)
        return bool(found) and Message.decode(found[0]).sequence_number == number


def _passes(error: ClientError | TimeoutError) -> bool:
    """Another try may help: the broker or a worker of it is away or starts, or its answer was lost."""
    return isinstance(error, ConnectionLost | TimeoutError) or error.condition in _PASSING
