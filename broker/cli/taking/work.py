"""Takes those messages out of an entity that a command means, and gives them to it: for all commands that do that.

What is meant is found by browsing, which locks nothing. Then only as many messages are locked as lie before the last
one that is meant (see `held`). Sessions are accepted one after the other. What was meant and could not be had is said.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Final

from broker.cli.messages import counted, is_dead_letter
from broker.cli.progress import Bar
from broker.cli.taking.held import Held
from broker.cli.taking.selection import (
    ROUND,
    Choice,
    Chosen,
    Everything,
    Wish,
    choose,
    matching,
    numbered,
)
from broker.cli.taking.taken import Taken
from broker.printable import printable
from protocol import conditions
from protocol.client.browsing import fragment_of, last_numbers
from protocol.client.connection import Connection
from protocol.client.errors import ClientError, LinkDetached, RequestFailed
from protocol.client.links import Received, Receiver
from protocol.client.messages import Message
from protocol.client.requests import Management
from protocol.client.session_receiver import SessionReceiver
from storage import wording

BATCH: Final = 100  # messages received at once
# Messages handled at once; then as many as take about a second, because their locks are not renewed meanwhile.
FIRST_PACE: Final = 10
# For a message that is there, and does not come at once: longer than Peeklock lets receivers wait for a worker that
# starts again.
PATIENCE_SECONDS: Final = 4.0
FINISH_SECONDS: Final = 5.0  # for what has begun when the user interrupts
SHOWN_SESSIONS: Final = 5

Handle = Callable[[Receiver, Received, Message], Awaitable[None]]
HandleDeferred = Callable[[Management, int, str | None], Awaitable[None]]  # the number and the session
Meant = Sequence[tuple[Received, Message]]


class Taking:
    """One command's work on one entity.

    `handle` settles a message, or raises ClientError and leaves that to us. `handle_deferred` locks and settles one by
    its number; a wish without numbers does not need it. `done` is kept up to date, also for a work that is interrupted.
    """

    def __init__(
        self,
        connection: Connection,
        address: str,
        wish: Wish,
        done: Taken,
        bar: Bar,
        handle: Handle,
        handle_deferred: HandleDeferred | None = None,
    ) -> None:
        self._connection = connection
        self._address = address
        self._wish = wish
        self._done = done
        self._bar = bar
        self._handle = handle
        self._handle_deferred = handle_deferred
        self._pace = FIRST_PACE
        self._missing = 0  # chosen and not had, besides those in sessions of others
        self._is_stuck = False  # as many others are held as can be
        self._held_sessions: dict[str, int] = {}  # by others; with the number of messages that are meant

    async def run(self) -> None:
        """Handle the messages that are meant, the oldest first, session by session.

        Raises ClientError, TimeoutError and ProtocolError if nothing was done before; else `done` has the failure.
        """
        try:
            await self._run()
        except (ClientError, TimeoutError) as error:
            if not self._done.handled:
                raise
            self._done.failure = self._done.failure or error
        if self._done.failure is None and self._need != 0:
            self._done.left += self._leftovers()

    @property
    def _need(self) -> int | None:
        """Return how many more are to be handled; None for all that are meant."""
        return None if self._wish.count is None else self._wish.count - self._done.handled

    @property
    def _is_over(self) -> bool:
        return self._need == 0 or self._is_stuck or self._done.failure is not None

    async def _run(self) -> None:
        wish = self._wish
        self._management = management = await self._connection.management(self._address)
        receiver = await self._ordinary_receiver()
        if wish.numbers:
            found = numbered(management, self._address, wish.numbers, self._done.left)
        else:
            last = await last_numbers(management)
            if receiver is not None and wish.is_for_all:
                # Nothing needs to be looked for. What is left then is looked for as anything else.
                await self._walk(receiver, Everything(last))
            found = matching(management, self._address, wish, last)
        async with aclosing(found):
            while not self._is_over:
                most = None if self._need is None else max(self._need, ROUND)
                choices = await choose(found, most, by_session=receiver is None)
                if not choices:
                    return
                self._bar.expect(sum(map(len, choices.values())) if self._need is None else 0)
                for session_id, choice in choices.items():
                    if not self._is_over:
                        await self._take(receiver, session_id or "", choice)

    async def _ordinary_receiver(self) -> Receiver | None:
        """Return a receiver of all messages; None if the entity requires sessions, which must be accepted."""
        if self._wish.session is not None and not is_dead_letter(self._address):
            return None
        return await ordinary_receiver(self._connection, self._address)

    async def _take(self, receiver: Receiver | None, session_id: str, choice: Choice) -> None:
        """Handle what is chosen, of a session if there is no receiver of all."""
        before = self._done.handled
        if receiver is not None:
            await self._take_from(receiver, None, choice)
        elif (accepted := await self._accept(session_id)) is not None:
            async with accepted:
                await self._take_from(accepted, session_id, choice)
        else:
            self._held_sessions[session_id] = self._held_sessions.get(session_id, 0) + len(choice)
            return
        self._missing += len(choice) - (self._done.handled - before)

    async def _accept(self, session_id: str) -> SessionReceiver | None:
        """Accept a session; return None if another receiver has it."""
        if session_id in self._held_sessions:
            return None
        try:
            return await self._connection.accept_session(self._address, session_id)
        except LinkDetached as error:
            if error.condition == conditions.SESSION_CANNOT_BE_LOCKED:
                return None
            raise

    async def _take_from(self, receiver: Receiver, session_id: str | None, choice: Choice) -> None:
        for number in choice.deferred:
            assert self._handle_deferred is not None
            try:
                await self._handle_deferred(self._management, number, session_id)
            except RequestFailed as error:
                if error.condition not in (conditions.MESSAGE_NOT_FOUND, conditions.MESSAGE_LOCK_LOST):
                    raise
            else:
                self._done.handled += 1
                self._bar.advance()
        await self._walk(receiver, choice.active)

    async def _walk(self, receiver: Receiver, wanted: Everything | Chosen) -> None:
        """Receive, from the oldest message on, until all that is wanted was there, or nothing comes."""
        to_come = dict(wanted.last)
        is_looking = isinstance(wanted, Chosen)  # then it is known that there is something
        async with Held(receiver, self._management) as held:
            while to_come and not self._is_over:
                if held.room <= 0:
                    self._is_stuck = is_looking
                    return
                size = min(BATCH, held.room)
                if not is_looking and self._need is not None:
                    size = min(size, self._need)
                taken = await receiver.fetch(size)
                if not taken and is_looking:
                    taken = await receiver.fetch(size, PATIENCE_SECONDS)
                if not taken:
                    return
                meant = []
                for received in taken:
                    message = received.message()
                    number = message.sequence_number or 0
                    held.add(received)
                    if number in wanted:
                        meant.append((received, message))
                    fragment = fragment_of(number)
                    if number >= to_come.get(fragment, number + 1):
                        del to_come[fragment]
                await self._handle_all(receiver, held, meant[: self._need])

    async def _handle_all(self, receiver: Receiver, held: Held, meant: Meant) -> None:
        loop = asyncio.get_running_loop()
        while meant and not self._is_over:
            some, meant = meant[: self._pace], meant[self._pace :]
            await held.take([received for received, _ in some])
            started = loop.time()
            await finished(self._handle_some(receiver, held, some))
            seconds = loop.time() - started
            if seconds > 1:
                self._pace = max(1, self._pace // 2)
            elif seconds < 0.5:
                self._pace = min(BATCH, 2 * self._pace)

    async def _handle_some(self, receiver: Receiver, held: Held, some: Meant) -> None:
        outcomes = await asyncio.gather(*(self._handle(receiver, *each) for each in some), return_exceptions=True)
        for (received, _), outcome in zip(some, outcomes, strict=True):
            if outcome is None:
                self._done.handled += 1
                self._bar.advance()
            elif isinstance(outcome, ClientError | TimeoutError):
                self._done.failure = self._done.failure or outcome
                if not received.settled:
                    held.add(received)
            else:
                raise outcome

    def _leftovers(self) -> list[str]:
        texts = []
        if self._missing and self._is_stuck:
            texts.append(f"{counted(self._missing)} not reached behind {Held.MOST} others, the most that are locked")
        elif self._missing:
            texts.append(f"{counted(self._missing)} locked by other receivers, or gone")
        if self._held_sessions:
            names = [repr(printable(each)) for each in list(self._held_sessions)[:SHOWN_SESSIONS]]
            if len(self._held_sessions) > SHOWN_SESSIONS:
                names.append("...")
            what = wording.plural(len(self._held_sessions), "a session", f"{len(self._held_sessions)} sessions")
            messages = counted(sum(self._held_sessions.values()))
            texts.append(f"{messages} in {what} that other receivers hold: {', '.join(names)}")
        return texts


async def ordinary_receiver(connection: Connection, address: str) -> Receiver | None:
    """Return a receiver of all messages; None if the entity requires sessions, which must be accepted."""
    try:
        return await connection.receiver(address, credit=0)
    except LinkDetached as error:
        if error.condition == conditions.NOT_ALLOWED and "requires sessions" in error.description:
            return None
        raise


async def finished(work: Coroutine[None, None, None]) -> None:
    """Do the work to its end even if we are cancelled meanwhile, so that nothing is done by half."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=FINISH_SECONDS)
        raise
