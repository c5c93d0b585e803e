"""One connection of a worker to a gateway or another worker: frames in, frames out (broker.wire).

Between machines it is TLS. Then the handshake is a part of the first reads and writes.
"""

import select
import socket
import ssl
import struct
from collections import deque
from itertools import islice

import msgpack

from broker import wire
from broker.unix_socket import SEND_BUFFER_BYTES
from broker.wire import DeliverRun, Message

READ_BYTES = 1 << 20
# One turn reads at most this much from one connection, so that other connections are served, its messages stay in the
# processor's cache, and the next turn is applied while the disk writes this one.
TURN_BYTES = 1 << 20
# The worker stops reading from a gateway that has this much unread, until the gateway has caught up.
OUTPUT_HIGH_BYTES = 64 << 20
COPIED_BYTES = 16 << 10  # up to this, a copy of a frame costs less than what avoids it
_frame_head = struct.Struct(">I").pack
_frame_length = struct.Struct(">I").unpack_from


class Peer:
    """`answers` are the messages for the next frame. The socket is made non-blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.socket = connection
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self.problem = ""  # why TLS failed
        self.waits_to_read = False  # its handshake needs an answer before anything can be written
        self.answers: list[Message] = []
        self.is_behind = False  # it has more unread than OUTPUT_HIGH_BYTES
        self._input = bytearray()
        self.came_bytes = 0  # with the last `read`
        self._held: list[bytes | memoryview] = []  # packed answers that wait for their commit
        self.output: deque[bytes | memoryview] = deque()  # what the socket has not taken yet
        self._output_bytes = 0
        self._packer = msgpack.Packer(autoreset=False)
        self.awaited = select.EPOLLIN

    def read(self) -> list[Message] | None:
        """Whole messages that have arrived; None when the other side is gone."""
        if self._tls is not None:
            came = self._read_tls(self._tls)
            if came is None:
                return None
            self.came_bytes = len(came)
            return self._take_frames(came)
        messages: list[Message] = []
        taken = 0
        while taken < TURN_BYTES:
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return None
            if not data:
                return None
            length = len(data)
            taken += length
            if not self._input and length >= 4 and _frame_length(data)[0] == length - 4:  # the usual case: one, whole
                messages += wire.unpack(data[4:] if length <= COPIED_BYTES else memoryview(data)[4:])
            else:
                messages += self._take_frames(data)
            if length < READ_BYTES:
                break
        self.came_bytes = taken
        return messages

    def _take_frames(self, data: bytes | bytearray) -> list[Message]:
        """The messages of those that are whole now; the rest is kept."""
        messages: list[Message] = []
        view = memoryview(data)
        at, end = 0, len(data)
        if self._input:
            # Only the frame that began before is put together: copying all that came costs more than taking it apart.
            kept = self._input
            while at < end and (missing := self._missing()) > 0:
                kept += view[at : at + missing]
                at = min(end, at + missing)
            if self._missing() > 0:
                return messages
            messages += wire.unpack(memoryview(kept)[4:])
            self._input = bytearray()
        while end - at >= 4:
            stop = at + 4 + _frame_length(view, at)[0]
            if stop > end:
                break
            messages += wire.unpack(view[at + 4 : stop])
            at = stop
        self._input += view[at:]
        return messages

    def _missing(self) -> int:
        """The bytes that are missing of the frame that has begun, or of its length."""
        kept = self._input
        return (4 + _frame_length(kept)[0] if len(kept) >= 4 else 4) - len(kept)

    def _read_tls(self, connection: ssl.SSLSocket) -> bytearray | None:
        """What has arrived; None when the other side is gone. What is decrypted already must be taken, because no event
        tells of it.
        """
        came = bytearray()
        while len(came) < TURN_BYTES or connection.pending():
            try:
                data = connection.recv(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break  # a handshake is far smaller than the socket's buffer, so it never waits to write
            except OSError as error:
                self.problem = error.strerror or str(error)
                return None
            if not data:
                return None
            came += data
        return came

    def hold_answers(self) -> None:
        """Pack the answers; they leave after `release`."""
        if not self.answers:
            return
        packer = self._packer
        packer.pack_array_header(len(self.answers))
        parts: list[bytes] = []
        length = 0
        for message in self.answers:
            if isinstance(message, DeliverRun) and len(message.run) > COPIED_BYTES:
                wire.pack_up_to_run(packer, message)
                parts += (packer.bytes() + wire.run_head(message.run), message.run)
                packer.reset()
                length += len(parts[-2]) + len(message.run)
            else:
                packer.pack(message)
        rest = packer.bytes()
        packer.reset()
        self.answers = []
        length += len(rest)
        if parts:
            self._held += (_frame_head(length), *parts)
            if rest:
                self._held.append(rest)
        elif length <= COPIED_BYTES:
            self._held.append(_frame_head(length) + rest)
        else:
            self._held += (_frame_head(length), rest)
        self._output_bytes += 4 + length
        self.is_behind = self._output_bytes > OUTPUT_HIGH_BYTES

    def release(self) -> None:
        """Let `write` write the answers that were held."""
        self.output += self._held
        self._held.clear()

    def write(self) -> bool:
        """Write what the socket takes; False when the other side is gone."""
        output = self.output
        self.waits_to_read = False
        while output:
            try:
                if len(output) == 1 or self._tls is not None:
                    sent = self.socket.send(output[0])
                else:
                    sent = self.socket.sendmsg(list(islice(output, 16)))
            except ssl.SSLWantReadError:
                self.waits_to_read = True
                return True
            except (BlockingIOError, ssl.SSLWantWriteError):
                return True
            except OSError as error:
                self.problem = error.strerror or str(error)
                return False
            self._output_bytes -= sent
            self.is_behind = self._output_bytes > OUTPUT_HIGH_BYTES
            while sent:
                first = output[0]
                if sent >= len(first):
                    sent -= len(first)
                    output.popleft()
                else:
                    output[0] = memoryview(first)[sent:]
                    sent = 0
        return True

    @property
    def waits_to_write(self) -> bool:
        """There is output, and an event tells when the socket takes it."""
        return bool(self.output) and not self.waits_to_read

    def await_events(self, poll: select.epoll, events: int) -> None:
        """From now on `poll`, which reported EPOLLIN when the socket was registered, reports these."""
        if events != self.awaited:
            self.awaited = events
            poll.modify(self.socket, events)
