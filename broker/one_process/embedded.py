"""A worker whose turns are made by a gateway's event loop, and the connection between the two, which is in memory.

The worker is the same as in a process of its own. Commands and answers are packed as for a socket, so that neither side
has an object of the other. A turn never runs inside of the gateway's own work: commands wait for the loop's next round,
and then those of all clients are in one turn.
"""

import asyncio
import select
import socket
from collections import deque

from broker import wire
from broker.gateway.router import OUTPUT_HIGH_BYTES, RECONNECT_SECONDS, Router, WorkerConnection
from broker.logging import get_logger
from broker.wire import Message
from broker.worker.peer import TURN_BYTES
from broker.worker.worker import Caller, Worker

log = get_logger("gateway")

FRAME_LENGTH_BYTES = 4
RESUME_BYTES = OUTPUT_HIGH_BYTES // 4  # as in transports of asyncio


class LocalCaller(Caller):
    """The gateway, for the worker. Its sockets have no data: the worker knows a caller by one, and sees it closed."""

    def __init__(self, gateway: asyncio.Protocol) -> None:
        """`gateway` gets the worker's frames, at the end of a turn."""
        self._gateways_end, workers_end = socket.socketpair()
        super().__init__(workers_end)
        self._gateway = gateway
        self.event = (workers_end.fileno(), select.EPOLLIN)  # what epoll would say of a socket with commands
        self.frames: deque[bytes] = deque()  # packed commands for the next turns
        self._frame_bytes = 0
        self._is_full = False  # the gateway was told to wait

    def put(self, commands: bytes) -> None:
        """`commands` are a frame without its length."""
        self.frames.append(commands)
        self._frame_bytes += len(commands)
        if self._frame_bytes > OUTPUT_HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._gateway.pause_writing()

    def hang_up(self) -> None:
        """The worker sees it when it has taken all commands. It may be done twice."""
        self._gateways_end.close()

    def read(self) -> list[Message] | None:
        if not self.frames:
            return super().read()
        messages: list[Message] = []
        taken = 0
        while self.frames and taken < TURN_BYTES:
            frame = self.frames.popleft()
            taken += len(frame)
            messages += wire.unpack(frame)
        self._frame_bytes -= taken
        if self._is_full and self._frame_bytes <= RESUME_BYTES:
            self._is_full = False
            asyncio.get_running_loop().call_soon(self._gateway.resume_writing)
        return messages

    def write(self) -> bool:
        frames = self.take_output()
        if self._gateways_end.fileno() < 0:
            return True  # nobody waits for them
        try:
            self._gateway.data_received(frames)
        except Exception as error:
            log.error("the worker's answers could not be handled; connecting again", exc_info=error)
            self.hang_up()  # answers that still wait for a commit are not for the next connection
            self.frames.clear()  # as the worker closes its end, it reads no more
            self._gateway.connection_lost(error)
            return False
        return True


class LocalConnection(WorkerConnection):
    """The worker, for the gateway."""

    def __init__(self, path: str, router: Router, embedded: "EmbeddedWorker") -> None:
        super().__init__(path, router)
        self._embedded = embedded
        self._caller: LocalCaller | None = None

    async def keep_connected(self) -> None:
        while True:
            self._caller = caller = LocalCaller(self)
            try:
                self.connection_made(_Transport())
                self._embedded.admit(caller)
                await self._stay_connected()
            finally:
                caller.hang_up()
            await asyncio.sleep(RECONNECT_SECONDS)

    def _write_now(self, transport: asyncio.Transport, head: bytes, body: memoryview) -> int:
        assert self._caller is not None
        self._caller.put(b"".join((head[FRAME_LENGTH_BYTES:], body)))
        self._embedded.turn_soon()
        return len(head) + len(body)


class _Transport(asyncio.Transport):
    """Takes nothing: what is written goes to `LocalConnection._write_now`."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


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
        self._turn([])

    def _look(self) -> None:
        self._turn(self._worker.poll())

    def _turn(self, events: list[tuple[int, int]]) -> None:
        if self.failed.done():
            return
        caller = self._caller
        if caller is not None and caller.frames:
            events.append(caller.event)
        try:
            self._worker.turn(events)
            wait = self._worker.wait_seconds()
            if wait <= 0 or (caller is not None and caller.frames):
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
                if caller.frames:
                    events.append(caller.event)
                self._worker.turn(events)
        self._worker.end()
