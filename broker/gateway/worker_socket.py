"""A gateway's connection to a worker that is a process of its own: frames of messages each way, over a unix socket."""

import asyncio
import os
import socket
import struct
from typing import cast

import msgpack

from broker import large_frames, wire
from broker.gateway.router import EARLY_BYTES, OUTPUT_HIGH_BYTES, RECONNECT_SECONDS, Router, WorkerConnection
from broker.unix_socket import SEND_BUFFER_BYTES
from broker.wire import Beat, Command, Followed, Join, Message, RunBytes, SendRun, TakesRuns
from storage.heap import room_for

REFUSED_SECONDS = 2.0  # between two looks at a worker that cannot be used
KEPT_BUFFER_BYTES = 1 << 20  # a packer whose buffer has grown larger is not used again
INPUT_BYTES = 1 << 20  # of the buffer for what comes; a larger frame has one of its own, which its runs are parts of

_ARRAY_32 = 0xDD  # msgpack's: four bytes of count follow
_frame_head = struct.Struct(">IBI").pack  # length of the rest, and the begin of the array


class SocketConnection(WorkerConnection, asyncio.BufferedProtocol):
    """A frame has the commands of a turn, or is large."""

    reconnect_seconds = RECONNECT_SECONDS

    def __init__(self, path: str, router: Router) -> None:
        super().__init__(path, router)
        self._packer = msgpack.Packer(autoreset=False)
        self._packed: list[Command | Join | Followed | TakesRuns | Beat] = []  # the commands that the packer holds
        # What has come and was not taken is input[begin:end].
        self._input = self._usual_input = memoryview(bytearray(INPUT_BYTES))
        self._input_begin = self._input_end = 0
        self._descriptor = -1  # of the socket; -1 if only the transport can write to it

    async def keep_connected(self) -> None:
        while True:
            try:
                await self._connect()
            except OSError as error:
                self._cannot_connect(error)
                await asyncio.sleep(self.reconnect_seconds)
            else:
                await self._stay_connected()
                if self.problem:
                    await asyncio.sleep(REFUSED_SECONDS)

    async def _connect(self) -> None:
        """Connect to the worker's socket. Raises OSError."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, self.name)

    def _cannot_connect(self, error: OSError) -> None:
        """On this machine the supervisor knows better."""

    def _end(self) -> None:
        self._transport.abort()

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        self._transport.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)
        self._lost.clear()
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        is_plain = connection is not None and transport.get_extra_info("ssl_object") is None
        self._descriptor = connection.fileno() if is_plain else -1

    def pause_writing(self) -> None:
        self.fall_behind()

    def resume_writing(self) -> None:
        self.catch_up()

    def connection_lost(self, error: Exception | None) -> None:
        self._keep_input(INPUT_BYTES, memoryview(b""))
        self._descriptor = -1
        self._packer = msgpack.Packer(autoreset=False)
        self._packed = []
        self.lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._input[self._input_end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the frames that are whole now: copies of them, but for the runs of large ones."""
        self._input_end += nbytes
        view, at, end = self._input, self._input_begin, self._input_end
        unpack = wire.unpack if view is self._usual_input else large_frames.unpack
        messages: list[Message] = []
        size = 0
        while end - at >= 4:
            size = 4 + int.from_bytes(view[at : at + 4], "big")
            if size > end - at:
                break
            messages += unpack(view[at + 4 : at + size])
            at += size
            size = 0
        self._input_begin = at
        if at == end and view is self._usual_input:
            self._input_begin = self._input_end = 0
        elif at == end or at + size > len(view) or end == len(view):
            self._keep_input(max(INPUT_BYTES, size), view[at:end])
        self.take(messages)  # also without messages, it is a sign of life

    def _keep_input(self, size: int, rest: memoryview) -> None:
        """Go on with the usual buffer, or with one for a frame of this size."""
        buffer = self._usual_input if size == INPUT_BYTES else room_for(size)
        buffer[: len(rest)] = rest
        self._input, self._input_begin, self._input_end = buffer, 0, len(rest)

    # -- commands

    def _put(self, command: Command | Join | Followed | TakesRuns | Beat) -> None:
        run = command.run if isinstance(command, SendRun) and len(command.run) > EARLY_BYTES else b""
        try:
            if isinstance(command, SendRun) and run:
                wire.pack_up_to_run(self._packer, command)
            else:
                self._packer.pack(command)
        except Exception:
            # One client made this command, but the packer has thrown away commands of other clients, too.
            self._packer = msgpack.Packer(autoreset=False)
            for packed in self._packed:
                self._packer.pack(packed)
            raise
        self._packed.append(command)
        if run or len(self._packer.getbuffer()) > EARLY_BYTES:
            self._send(run)
        elif not self._is_due:
            self._become_due()

    def _send(self, run: RunBytes = b"") -> None:
        """`run` is that of the last command, whose packed bytes end before it."""
        if not self._packed:
            return
        transport, packer = self._transport, self._packer
        body = packer.getbuffer()
        parts: list[bytes | memoryview] = [b"", body]
        size = len(body)
        if run:
            parts += (wire.run_head(run), run)
            size += len(parts[2]) + len(run)
        parts[0] = head = _frame_head(5 + size, _ARRAY_32, len(self._packed))
        size += len(head)
        self._packed = []
        sent = self._write_now(parts)
        if sent == size and len(body) <= KEPT_BUFFER_BYTES:
            body.release()
            packer.reset()
            return
        # The packer's buffer goes to the transport without a copy, and the next frame gets a new packer.
        self._packer = msgpack.Packer(autoreset=False)
        for part in parts:
            if sent < len(part):
                transport.write(memoryview(part)[sent:])
                sent = 0
            else:
                sent -= len(part)

    def _write_now(self, parts: list[bytes | memoryview]) -> int:
        """Write a frame without waiting for the event loop; returns the bytes that were taken.

        The loop writes when it has handled all that can be read. A frame that is not behind others leaves now.
        """
        sent = 0
        if self._descriptor >= 0 and not self._transport.get_write_buffer_size():
            try:
                sent = os.writev(self._descriptor, parts)
            except OSError:  # it takes nothing now, or it is broken, which the transport will find out
                sent = 0
        return sent
