"""The links of a client: a sender that awaits outcomes, and a receiver that settles."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self
from uuid import UUID

from protocol import conditions
from protocol.client.errors import (
    ClientError,
    LinkClosed,
    MessageRefused,
    MessageReturned,
    SettlementRefused,
)
from protocol.client.link_end import LinkConnection, LinkEnd
from protocol.client.messages import Message
from protocol.codec import Described, Symbol, ULong
from protocol.engine.deliveries import (
    ACCEPTED,
    MODIFIED,
    REJECTED,
    RELEASED,
    TRANSACTIONAL,
    Delivery,
    describe_in,
    describe_modified,
    describe_rejected,
    forget,
    is_settled,
    rejection,
    settle,
    tag_of,
)
from protocol.lock_tokens import uuid_of
from protocol.symbols import DEAD_LETTER_ERROR_DESCRIPTION, DEAD_LETTER_REASON


def _nothing() -> None: ...


def _fail(future: "asyncio.Future[Any]", error: ClientError) -> None:
    if not future.done():
        future.set_exception(error.again())


class Sender(LinkEnd):
    """A link on which we send. Messages are AMQP messages as encoded; `protocol.client.messages` makes them."""

    def __init__(self, connection: LinkConnection, address: str, max_in_flight: int) -> None:
        super().__init__(connection, address)
        self._max_in_flight = max_in_flight
        self._count = 0
        self._in_flight: dict[bytes, asyncio.Future[None]] = {}
        self._waiting: deque[_Waiting] = deque()

    @property
    def in_flight(self) -> int:
        """The number of sent messages whose outcome is not known yet."""
        return len(self._in_flight)

    async def send(self, message: bytes, transaction: bytes | None = None, *, is_batch: bool = False) -> None:
        """Send, and wait until the peer has accepted; with `transaction`, as a part of it.

        A batch is what `protocol.message.batches` makes: Service Bus accepts all of its messages or none.

        Raises MessageRefused or MessageReturned; LinkDetached or ConnectionLost if the outcome will never be known.
        """
        await (await self.post(message, transaction, is_batch=is_batch))

    async def post(
        self, message: bytes, transaction: bytes | None = None, *, is_batch: bool = False
    ) -> "asyncio.Future[None]":
        """Send as soon as there is room, without waiting for the outcome, which the future gets.

        For pipelining. If the future is dropped, only the event loop's log reports a failure.
        """
        self.check()
        if not self._waiting and self._has_room:
            return self._transmit(message, transaction, is_batch)
        handed: asyncio.Future[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(message, transaction, is_batch, handed, None))
        try:
            return await handed
        finally:
            del handed  # its error has this call, which must not have it

    def enqueue(self, message: bytes, *, is_batch: bool = False) -> "asyncio.Future[None]":
        """Send as soon as there is room; the future gets the outcome.

        Unlike with `post`, the caller must bound what waits for room. Raises the reason if the link ended.
        """
        self.check()
        if not self._waiting and self._has_room:
            return self._transmit(message, None, is_batch)
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(message, None, is_batch, None, outcome))
        return outcome

    async def send_all(
        self, messages: Iterable[bytes] | AsyncIterable[bytes], on_accepted: Callable[[], None] | None = None
    ) -> int:
        """Send pipelined and wait for all outcomes; returns the number of messages, all of which were accepted.

        After the first failure nothing more is sent. It is raised when all outcomes are known. `on_accepted` is called
        for each message that the peer has accepted, also if others fail.
        """
        count = 0
        failure: BaseException | None = None
        pending: set[asyncio.Future[None]] = set()

        def follow(outcome: asyncio.Future[None]) -> None:
            pending.add(outcome)
            outcome.add_done_callback(done)

        def done(outcome: asyncio.Future[None]) -> None:
            nonlocal failure
            pending.discard(outcome)
            error = outcome.exception()  # asked of each one, or the event loop reports those that nobody asked for
            failure = failure or error
            if error is None and on_accepted is not None:
                on_accepted()

        async for message in _each(messages):
            if failure is not None:
                break
            try:
                follow(await self.post(message))
            except ClientError as error:
                failure = failure or error
                break
            count += 1
        if pending:
            await asyncio.wait(pending)
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # it has this call, which must not have it
        return count

    @property
    def _has_room(self) -> bool:
        return self.link.credit > 0 and len(self._in_flight) < self._max_in_flight and not self.connection.is_congested

    def _transmit(
        self,
        message: bytes,
        transaction: bytes | None,
        is_batch: bool,
        outcome: "asyncio.Future[None] | None" = None,
    ) -> "asyncio.Future[None]":
        self._count += 1
        tag = self._count.to_bytes(8, "big")
        outcome = self._in_flight[tag] = outcome or asyncio.get_running_loop().create_future()
        if is_batch:
            self.link.send_batch(tag, message, False, transaction)
        else:
            self.link.send(tag, message, b"", 0, False, transaction)
        self.connection.flush_soon(len(message))
        return outcome

    def _pump(self) -> None:
        while self._waiting and self._has_room:
            message, transaction, is_batch, handed, outcome = self._waiting.popleft()
            if handed is None:
                self._transmit(message, transaction, is_batch, outcome)
            elif not handed.done():
                handed.set_result(self._transmit(message, transaction, is_batch))

    def on_flow(self) -> None:
        if self.link.drain:
            self.link.drained()
        self._pump()

    def on_resumed(self) -> None:
        self._pump()

    def on_outcome(self, delivery: Delivery, tag: bytes, state: int, settled: bool) -> None:
        outcome = self._in_flight.pop(tag, None)  # none: the link was closed from our side meanwhile
        if outcome is not None and not outcome.done():
            if state in (ACCEPTED, TRANSACTIONAL):
                outcome.set_result(None)
            elif state == REJECTED:
                condition, description, _ = rejection(delivery)
                outcome.set_exception(MessageRefused(condition, description or "the peer rejected the message"))
            else:
                outcome.set_exception(MessageReturned("", _RETURNED.get(state, "the peer settled without an outcome")))
        forget(delivery)
        self._pump()

    def wake(self, error: ClientError) -> None:
        in_flight, self._in_flight = self._in_flight, {}
        for outcome in in_flight.values():
            _fail(outcome, error)
        while self._waiting:
            waiting = self._waiting.popleft()
            future: asyncio.Future[Any] | None = waiting.handed or waiting.outcome
            assert future is not None
            _fail(future, error)


class _Waiting(NamedTuple):
    """A message that waits for room. Then `handed` gets the future of its outcome; without it there is `outcome`."""

    message: bytes
    transaction: bytes | None
    is_batch: bool
    handed: "asyncio.Future[asyncio.Future[None]] | None"
    outcome: "asyncio.Future[None] | None"


_RETURNED = {RELEASED: "the peer released the message", MODIFIED: "the peer returned the message as modified"}


async def _each(messages: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(messages, AsyncIterable):
        async for message in messages:
            yield message
    else:
        for message in messages:
            yield message


class Received:
    """A received message. `payload` is the encoded AMQP message; `settled` is True after an outcome was sent."""

    __slots__ = ("_delivery", "payload", "tag")

    def __init__(self, payload: bytes, tag: bytes, delivery: Delivery | None) -> None:
        self.payload = payload
        self.tag = tag
        self._delivery = delivery

    @property
    def settled(self) -> bool:
        return self._delivery is None

    @property
    def lock_token(self) -> UUID:
        """The token of the lock for $management. Raises ValueError if the peer is no Service Bus."""
        return uuid_of(self.tag)

    def message(self) -> Message:
        """Decode the message. Raises DecodeError or LimitExceeded."""
        return Message.decode(self.payload)

    def take_delivery(self) -> Delivery:
        """The engine's delivery, which can be settled once. Raises ValueError."""
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            raise ValueError("the message is settled already")
        return delivery


class _Together:
    """Messages that are settled together, with a state that has no fields. `left` have no answer yet."""

    __slots__ = ("future", "left", "refused", "state")

    def __init__(self, state: int, future: "asyncio.Future[list[Received]]") -> None:
        self.state = state
        self.future = future
        self.left = 0
        self.refused: list[Received] = []

    def answered(self, received: Received, state: int) -> None:
        if state not in (0, self.state):  # without a state, ours holds
            self.refused.append(received)
        self.left -= 1
        if not self.left and not self.future.done():
            self.future.set_result(self.refused)


class Receiver(LinkEnd):
    """A link on which we receive, with peek-lock or receive-and-delete.

    Up to `credit` messages may be on their way or wait here to be taken; with a credit of 0 only those that `grant` and
    `fetch` allow. `accept`, `release`, `modify` and `reject` return a future that is done when the peer has
    confirmed: await it at once, or settle many and await all. It fails with SettlementRefused.
    """

    def __init__(self, connection: LinkConnection, address: str, credit: int, receive_and_delete: bool) -> None:
        super().__init__(connection, address)
        self.receive_and_delete = receive_and_delete
        self._window = credit
        self._buffer: deque[Received] = deque()
        self._changed = asyncio.Event()
        self._on_change: Callable[[], None] = _nothing
        self._answers: dict[Delivery, tuple[int, asyncio.Future[None]]] = {}
        self._together: dict[Delivery, tuple[_Together, Received]] = {}
        self._settles_second = False

    # -- receiving

    async def receive(self, timeout_s: float | None = None) -> Received | None:
        """The next message; None if none came in `timeout_s`. Raises the reason if the link ended."""
        if not self._buffer and not await self._wait(lambda: bool(self._buffer), timeout_s):
            return None
        received = self._buffer.popleft()
        self._refill()
        return received

    def take_all(self) -> list[Received]:
        """All messages that have come, perhaps none. Raises the reason if the link ended."""
        if not self._buffer:
            self.check()
            return []
        taken = [*self._buffer]
        self._buffer.clear()
        self._refill()
        return taken

    def watch(self, changed: Callable[[], None]) -> None:
        """Have this called whenever a message has come, the credit was changed, or the link has ended."""
        self._on_change = changed

    async def fetch(self, count: int, timeout_s: float = 0.0) -> list[Received]:
        """Up to `count` messages: waits up to `timeout_s` for the first, then takes all that the peer has.

        Ends the credit window: no messages come between two fetches.
        """
        self.check()
        self._window = 0
        missing = count - len(self._buffer) - self.link.credit
        if missing > 0:
            self.grant(missing)
        if timeout_s > 0:
            await self._wait(lambda: bool(self._buffer), timeout_s)
        if len(self._buffer) < count:
            await self.drain()
        return [self._buffer.popleft() for _ in range(min(count, len(self._buffer)))]

    async def drain(self) -> None:
        """Let the peer send messages for its credit and give back the rest; ends the credit window.

        The messages can then be received without waiting. Raises TimeoutError, or the reason if the link ended.
        """
        self.check()
        self._window = 0
        if self.link.credit > 0:
            self.link.ask_drain()
            self.connection.flush()
            if not await self._wait(lambda: self.error is None and self.link.credit <= 0, self.connection.timeout_s):
                raise TimeoutError(f"{self.address} does not answer a drain")

    def grant(self, credit: int) -> None:
        """Let the peer send `credit` more messages, besides the credit window."""
        self.check()
        self.link.grant(credit)
        self.connection.flush_soon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        """Ends when we close the link. Raises the reason if it ended otherwise."""
        try:
            received = await self.receive()
        except LinkClosed:
            raise StopAsyncIteration from None
        assert received is not None
        return received

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `is_so()`; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    self.check()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _pulse(self) -> None:
        """Wake all tasks that wait, so that they check again."""
        self._changed.set()
        self._changed.clear()
        self._on_change()

    def _refill(self) -> None:
        # In halves of the window, so that flow frames stay few.
        if self._window and self.error is None:
            free = self._window - self.link.credit - len(self._buffer)
            if 2 * free >= self._window:
                self.link.grant(free)
                self.connection.flush_soon()

    # -- settling

    def accept(self, received: Received, transaction: bytes | None = None) -> "asyncio.Future[None]":
        """Complete the message; with `transaction`, when that is committed.

        Raises ValueError if the message is settled, or the reason if the link ended.
        """
        if transaction is None:
            return self._settle(received, ACCEPTED)

        def describe(delivery: Delivery) -> None:
            describe_in(transaction, delivery, Described(ULong(ACCEPTED), []))

        return self._settle(received, TRANSACTIONAL, describe)

    def release(self, received: Received) -> "asyncio.Future[None]":
        """Give the message back, which does not count as a failed delivery. Raises as `accept` does."""
        return self._settle(received, RELEASED)

    def modify(
        self,
        received: Received,
        *,
        undeliverable_here: bool = False,
        properties: Mapping[str, Any] | None = None,
    ) -> "asyncio.Future[None]":
        """Abandon the message: it comes again with one more delivery. With `undeliverable_here` it is deferred.

        `properties` are set on the message. Raises as `accept` does.
        """
        annotations = {Symbol(name): value for name, value in (properties or {}).items()}

        def describe(delivery: Delivery) -> None:
            describe_modified(delivery, True, undeliverable_here, annotations)

        return self._settle(received, MODIFIED, describe)

    def reject(
        self,
        received: Received,
        reason: str | None = None,
        description: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> "asyncio.Future[None]":
        """Dead-letter, with a reason and a description that can be read on the message, and properties set on it.

        Raises as `accept` does.
        """
        info = {Symbol(name): value for name, value in (properties or {}).items()}
        if reason is not None:
            info[Symbol(DEAD_LETTER_REASON)] = reason
        if description is not None:
            info[Symbol(DEAD_LETTER_ERROR_DESCRIPTION)] = description

        def describe(delivery: Delivery) -> None:
            describe_rejected(delivery, conditions.DEAD_LETTER, description or "", info)

        return self._settle(received, REJECTED, describe)

    def accept_all(self, received: Sequence[Received]) -> "asyncio.Future[list[Received]]":
        """Complete these messages; the future gets those that the peer has not completed, mostly without a lock.

        Raises as `accept` does; the future fails with the reason if the link ends.
        """
        return self._settle_all(received, ACCEPTED)

    def release_all(self, received: Sequence[Received]) -> "asyncio.Future[list[Received]]":
        """Give these messages back, as `release` does; the future is that of `accept_all`."""
        return self._settle_all(received, RELEASED)

    def defer_all(self, received: Sequence[Received]) -> "asyncio.Future[list[Received]]":
        """Defer these messages, which does not count as a failed delivery; the future is that of `accept_all`."""
        return self._settle_all(received, MODIFIED)

    def _settle_all(self, received: Sequence[Received], state: int) -> "asyncio.Future[list[Received]]":
        self.check()
        together = _Together(state, asyncio.get_running_loop().create_future())
        offer, link, answers = self.connection.engine.offer, self.link, self._together
        for each in received:
            delivery = each.take_delivery()
            if state == MODIFIED:
                describe_modified(delivery, False, True, {})
            if is_settled(delivery):
                forget(delivery)
                together.refused.append(each)
            elif self._settles_second:
                offer(link, delivery, state)
                answers[delivery] = (together, each)
                together.left += 1
            else:
                settle(delivery, state)
        if not together.left:
            together.future.set_result(together.refused)
        self.connection.flush_soon()
        return together.future

    def _settle(
        self, received: Received, state: int, describe: Callable[[Delivery], None] | None = None
    ) -> "asyncio.Future[None]":
        self.check()
        delivery = received.take_delivery()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if is_settled(delivery):
            forget(delivery)
            answer.set_exception(SettlementRefused("", "the peer has settled the message itself"))
            return answer
        if describe is not None:
            describe(delivery)
        if self._settles_second:
            self.connection.engine.offer(self.link, delivery, state)
            self._answers[delivery] = state, answer
        else:
            settle(delivery, state)
            answer.set_result(None)
        self.connection.flush_soon()
        return answer

    # -- called by the connection

    def on_attached(self) -> None:
        self._settles_second = self.link.settles_second
        self._refill()
        super().on_attached()

    def on_message(self, delivery: Delivery, payload: bytes, settled: bool) -> None:
        tag = tag_of(delivery)
        if self.error is not None and not settled:
            return  # too late: the lock ends with the link
        if settled:
            forget(delivery)
        self._buffer.append(Received(payload, tag, None if settled else delivery))
        self._pulse()

    def on_aborted(self) -> None:
        self._refill()
        self._pulse()

    def on_flow(self) -> None:
        self._pulse()

    def on_outcome(self, delivery: Delivery, tag: bytes, state: int, settled: bool) -> None:
        several = self._together.pop(delivery, None)
        if several is not None:
            together, received = several
            together.answered(received, state)
            forget(delivery)
            return
        told, answer = self._answers.pop(delivery, (0, None))  # none: the link was closed from our side meanwhile
        condition, description, _ = rejection(delivery) if state == REJECTED else ("", "", {})
        if answer is not None and not answer.done():
            # If the peer settles without a state, ours holds. An error is a refusal, even if we sent `rejected`.
            if state == 0 or (state == told and not condition):
                answer.set_result(None)
            else:
                answer.set_exception(SettlementRefused(condition, description or "the peer has another outcome"))
        forget(delivery)

    def on_detached(self, error: ClientError) -> None:
        super().on_detached(error)
        self._on_change = _nothing  # which may refer to this receiver

    def wake(self, error: ClientError) -> None:
        """Drop locked messages, which are of no use any more; received and deleted ones can still be taken."""
        self._buffer = deque(received for received in self._buffer if received.settled)
        answers, self._answers = self._answers, {}
        for _, answer in answers.values():
            _fail(answer, error)
        several, self._together = self._together, {}
        for together in {together for together, _ in several.values()}:
            _fail(together.future, error)
        self._pulse()

    def prepare_close(self) -> None:
        """Give messages that were not taken back at once, for other receivers."""
        while self._buffer and not self._buffer[0].settled:
            settle(self._buffer.popleft().take_delivery(), RELEASED)
