"""A worker whose turns are made by a gateway's event loop, and the connection between the two, which is in memory.

The worker is the same as in a process of its own. Neither side has an object that the other may change: what is not
`broker.wire.is_shareable` is packed, as for a socket. A turn never runs inside of the gateway's own work: commands wait
for the loop's next round, and then those of all clients are in one turn.
"""

import asyncio
import select
import socket
from collections import deque

import msgpack

from broker import wire
from broker.gateway.router import RECONNECT_SECONDS, Router, WorkerConnection
from broker.logging import get_logger
from broker.wire import Beat, Command, Followed, Join, Message, Send, SendRun, TakesRuns
from broker.worker.peer import TURN_BYTES
from broker.worker.worker import Caller, Worker

log = get_logger("gateway")

# Bytes of commands that are kept for the next turn before the clients that send more have to wait for it. With many
# more, a turn would take all that clients have in flight, and nothing would be left to do while the disk writes it.
WAITING_BYTES = 256 << 10


class LocalCaller(Caller):
    """The gateway, for the worker. Its sockets have no data: the worker knows a caller by one, and sees it closed."""

    def __init__(self, gateway: WorkerConnection) -> None:
        """`gateway` gets the worker's answers, at the end of a turn."""
        self._gateways_end, workers_end = socket.socketpair()
        super().__init__(workers_end)
        self._gateway = gateway
        self.event = (workers_end.fileno(), select.EPOLLIN)  # what epoll would say of a socket with commands
        self.commands: deque[tuple[int, Message]] = deque()  # for the next turns, with their sizes in bytes
        self._command_bytes = 0
        self._is_full = False  # the gateway was told to wait
        self._kept: list[Message] = []  # answers that wait for their commit
        self._leaving: list[Message] = []  # answers for `write`

    def put(self, command: Command | Join | Followed | TakesRuns | Beat) -> None:
        """Keep a command for the next turn. The gateway is told to wait when there are more than WAITING_BYTES."""
        if not wire.is_shareable(command):
            size, taken = _copied(command)
        elif isinstance(command, Send):
            size, taken = sum([len(body) for _, body, _, _ in command.messages]), command
        elif isinstance(command, SendRun):
            size, taken = len(command.run), command
        else:
            size, taken = 0, command  # a few bytes for each message that the client was sent before
        self.commands.append((size, taken))
        self._command_bytes += size
        if self._command_bytes > WAITING_BYTES and not self._is_full:
            self._is_full = True
            self._gateway.fall_behind()

    def hang_up(self) -> None:
        """The worker sees it when it has taken all commands. It may be done twice."""
        self._gateways_end.close()

    def read(self) -> list[Message] | None:
        commands = self.commands
        if not commands:
            return super().read()
        messages: list[Message] = []
        taken = 0
        while commands and taken < TURN_BYTES:
            size, command = commands.popleft()
            taken += size
            messages.append(command)
        self._command_bytes -= taken
        self.came_bytes = taken
        if self._is_full and self._command_bytes <= WAITING_BYTES:
            self._is_full = False
            asyncio.get_running_loop().call_soon(self._gateway.catch_up)
        return messages

    def hold_answers(self) -> None:
        for answer in self.answers:
            self._kept.append(answer if wire.is_shareable(answer) else _copied(answer)[1])
        self.answers.clear()

    def release(self) -> None:
        self._leaving += self._kept
        self._kept.clear()

    def write(self) -> bool:
        answers, self._leaving = self._leaving, []
        if self._gateways_end.fileno() < 0:
            return True  # nobody waits for them
        try:
            self._gateway.take(answers)
        except Exception as error:
            log.error("the worker's answers could not be handled; connecting again", exc_info=error)
            self.hang_up()  # answers that still wait for a commit are not for the next connection
            self.commands.clear()  # as the worker closes its end, it reads no more
            self._gateway.lost()
            return False
        return True


def _copied(message: Message) -> tuple[int, Message]:
    """Its size in bytes, and the message as the other end of a socket would get it."""
    packed = msgpack.packb([message])
    [copy] = wire.unpack(packed)
    return len(packed), copy


class LocalConnection(WorkerConnection):
    """The worker, for the gateway."""

    outlives_worker = False

    def __init__(self, path: str, router: Router, embedded: "EmbeddedWorker") -> None:
        super().__init__(path, router)
        self._embedded = embedded
        self._caller = LocalCaller(self)

    async def keep_connected(self) -> None:
        while True:
            self._lost.clear()
            try:
                self._embedded.admit(self._caller)
                await self._stay_connected()
            finally:
                self._caller.hang_up()
            await asyncio.sleep(RECONNECT_SECONDS)
            self._caller = LocalCaller(self)

    def _end(self) -> None:
        self._caller.hang_up()

    def _put(self, command: Command | Join | Followed | TakesRuns | Beat) -> None:
        self._caller.put(command)
        if not self._is_due:
            self._become_due()

    def _send(self) -> None:
        self._embedded.turn_soon()


class EmbeddedWorker:
    """Makes the worker's turns in the loop: when there are commands or events, and at its timers.

    `failed` gets the exception of a turn that failed; after that there are no further turns.
    """

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self._worker = worker
        self._loop = loop
        self._caller: LocalCaller | None = None  # the last one
        self._is_due = False  # a turn will be made in the next round
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # if there is a timer; its handle does not always tell, as uvloop makes it
        self.failed: asyncio.Future[None] = loop.create_future()

    def connection(self, path: str, router: Router) -> LocalConnection:
        return LocalConnection(path, router, self)

    def begin(self) -> None:
        self._worker.begin()
        self._loop.add_reader(self._worker.descriptor, self._look)
        self.turn_soon()

    def admit(self, caller: LocalCaller) -> None:
        self._caller = caller
        self._worker.admit(caller)
        self.turn_soon()

    def turn_soon(self) -> None:
        """Make a turn in the loop's next round."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn_in_round)

    def _turn_in_round(self) -> None:
        self._is_due = False
        if not self._worker.must_wait:
            self._turn([])

    def _look(self) -> None:
        self._turn(self._worker.poll())

    def _turn(self, events: list[tuple[int, int]]) -> None:
        if self.failed.done():
            return
        caller = self._caller
        if caller is not None and caller.commands:
            events.append(caller.event)
        try:
            self._worker.turn(events)
            wait = self._worker.wait_seconds()
            if wait <= 0 or (caller is not None and caller.commands):
                self.turn_soon()
            else:
                self._wake_in(wait)
        except Exception as error:
            self._loop.remove_reader(self._worker.descriptor)
            self.failed.set_exception(error)

    def _wake_in(self, seconds: float) -> None:
        """A timer that rings too early costs less than to set one in each turn."""
        at = self._loop.time() + seconds
        if self._timer is not None:
            if self._rings_at <= at:
                return
            self._timer.cancel()
        self._rings_at = at
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._look()

    def finish(self) -> None:
        """Do what the gateway asked last, now that it has ended. Raises as a turn does."""
        caller = self._caller
        if caller is not None:
            caller.hang_up()
            while caller.socket.fileno() >= 0:  # the worker closes it when it has done all
                events = self._worker.poll()
                if caller.commands:
                    events.append(caller.event)
                self._worker.turn(events)
        self._worker.end()
