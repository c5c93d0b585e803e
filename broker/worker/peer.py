"""One connection of a worker to a gateway or another worker: frames in, frames out (broker.wire).

Between machines it is TLS. Then the handshake is a part of the first reads and writes.
"""

import select
import socket
import ssl
import struct
import threading
from collections import deque
from itertools import islice

import msgpack

from broker import large_frames, wire
from broker.cluster.silence import Patience, Silence, let_beats_decide
from broker.unix_socket import SEND_BUFFER_BYTES
from broker.wire import DeliverRun, Message
from storage.heap import room_for

READ_BYTES = 1 << 20
# One turn reads at most this much from one connection, so that other connections are served, its messages stay in the
# processor's cache, and the next turn is applied while the disk writes this one.
TURN_BYTES = 1 << 20
# The worker stops reading from a gateway that has this much unread, until the gateway has caught up.
OUTPUT_HIGH_BYTES = 64 << 20
# A larger frame is put together in a buffer of its own, which its runs are parts of. Nobody sends one that is larger
# than the second; it would have to come before it has so much memory.
LARGE_BYTES, LARGEST_BYTES = READ_BYTES, 1 << 30
COPIED_BYTES = 16 << 10  # up to this, a copy of a frame costs less than what avoids it
_frame_head = struct.Struct(">I").pack
_frame_length = struct.Struct(">I").unpack_from
_BEATS: bytes = msgpack.packb([wire.beat()])
_BEAT_FRAME = _frame_head(len(_BEATS)) + _BEATS


class Peer:
    """`answers` are the messages for the next frame. The socket is made non-blocking.

    All is for the worker's own thread, but for `beat`.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.socket = connection
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self.problem = ""  # why TLS failed
        self.waits_to_read = False  # its handshake needs an answer before anything can be written
        self.answers: list[Message] = []
        self.is_behind = False  # it has more unread than OUTPUT_HIGH_BYTES
        self._input = bytearray()  # the begin of a frame
        self._large = memoryview(b"")  # a buffer for the large frame that has begun; empty if none has
        self._large_bytes = 0  # of it that have come
        self._reads_otherwise = self._tls is not None  # than whole frames from a plain socket
        self.came_bytes = 0  # with the last `read`
        self._held: list[bytes | memoryview] = []  # packed answers that wait for their commit
        self.output: deque[bytes | memoryview] = deque()  # what the socket has not taken yet
        self._output_bytes = 0
        self._packer = msgpack.Packer(autoreset=False)
        self.awaited = select.EPOLLIN
        self.silence: Silence | None = None  # of a peer that beats
        self._is_heard = False  # since the last `is_silent`
        self._lock = threading.Lock()  # held while the socket is written, closed, or read by way of TLS
        self._begun_beat = b""  # the rest of a beat that the socket did not take whole

    def read(self) -> list[Message] | None:
        """Whole messages that have arrived; None when the other side is gone."""
        if self._reads_otherwise:
            return self._read_large() if self._tls is None else self._read_tls(self._tls)
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
            self._is_heard = True
            length = len(data)
            taken += length
            if not self._input and length >= 4 and _frame_length(data)[0] == length - 4:  # the usual case: one, whole
                messages += wire.unpack(data[4:] if length <= COPIED_BYTES else memoryview(data)[4:])
            else:
                messages += self._take_frames(data)
            if length < READ_BYTES or len(self._large):
                break
        self.came_bytes = taken
        return messages

    def _take_frames(self, data: bytes | bytearray | memoryview) -> list[Message]:
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
                if len(kept) == 4 and LARGE_BYTES < (size := 4 + _frame_length(kept)[0]) <= LARGEST_BYTES:
                    self._input = bytearray()
                    self._begin_large(size, kept)
                    return self._go_on_with_large(view[at:])
            if self._missing() > 0:
                return messages
            messages += wire.unpack(memoryview(kept)[4:])
            self._input = bytearray()
        while end - at >= 4:
            stop = at + 4 + _frame_length(view, at)[0]
            if stop > end:
                if LARGE_BYTES < stop - at <= LARGEST_BYTES:
                    self._begin_large(stop - at, view[at:])
                    return messages
                break
            messages += wire.unpack(view[at + 4 : stop])
            at = stop
        self._input += view[at:]
        return messages

    def _missing(self) -> int:
        """The bytes that are missing of the frame that has begun, or of its length."""
        kept = self._input
        return (4 + _frame_length(kept)[0] if len(kept) >= 4 else 4) - len(kept)

    def _begin_large(self, size: int, begin: bytearray | memoryview) -> None:
        """A frame of this size has begun."""
        self._large, self._large_bytes = room_for(size), 0
        self._reads_otherwise = True
        self._add_to_large(memoryview(begin))

    def _add_to_large(self, data: memoryview) -> int:
        """Add what of `data` belongs to the frame; returns its size."""
        end = min(len(self._large), self._large_bytes + len(data))
        added = end - self._large_bytes
        self._large[self._large_bytes : end] = data[:added]
        self._large_bytes = end
        return added

    def _go_on_with_large(self, data: memoryview) -> list[Message]:
        """Take frames as `_take_frames` does, while the large frame is not whole."""
        added = self._add_to_large(data)
        if self._large_bytes < len(self._large):
            return []
        return self._take_large() + self._take_frames(data[added:])

    def _take_large(self) -> list[Message]:
        """The messages of the frame, which is whole."""
        frame, self._large = self._large[4:], memoryview(b"")
        self._reads_otherwise = self._tls is not None
        return large_frames.unpack(frame)

    def _read_large(self) -> list[Message] | None:
        """Read from a plain socket what has arrived of the large frame, right to its place. Returns as `read` does."""
        begun = self._large_bytes
        while (missing := len(self._large) - self._large_bytes) and self._large_bytes - begun < TURN_BYTES:
            try:
                count = self.socket.recv_into(self._large[self._large_bytes :], min(missing, READ_BYTES))
            except BlockingIOError:
                break
            except OSError:
                return None
            if not count:
                return None
            self._is_heard = True
            self._large_bytes += count
        self.came_bytes = self._large_bytes - begun
        return [] if missing else self._take_large()

    def _read_tls(self, connection: ssl.SSLSocket) -> list[Message] | None:
        """Read by way of TLS. Returns as `read` does."""
        came = self._decrypted(connection)
        if came is None:
            return None
        self.came_bytes = len(came)
        return self._go_on_with_large(memoryview(came)) if len(self._large) else self._take_frames(came)

    def _decrypted(self, connection: ssl.SSLSocket) -> bytearray | None:
        """What has arrived; None when the other side is gone. What is decrypted already must be taken, because no event
        tells of it.
        """
        came = bytearray()
        while len(came) < TURN_BYTES or connection.pending():
            try:
                with self._lock:
                    data = connection.recv(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break  # a handshake is far smaller than the socket's buffer, so it never waits to write
            except OSError as error:
                self.problem = error.strerror or str(error)
                return None
            if not data:
                return None
            self._is_heard = True
            came += data
        return came

    def hold_answers(self) -> None:
        """Pack the answers; they leave after `release`."""
        if not self.answers:
            return
        packer = self._packer
        packer.pack_array_header(len(self.answers))
        parts: list[bytes | memoryview] = []
        length = 0
        for message in self.answers:
            if isinstance(message, DeliverRun) and len(message.run) > COPIED_BYTES:
                wire.pack_up_to_run(packer, message)
                head, run = packer.bytes() + wire.run_head(message.run), message.run
                parts += (head, run) if isinstance(run, bytes | memoryview) else (head, *run.parts())
                packer.reset()
                length += len(head) + len(run)
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
            if length > LARGE_BYTES:
                self._packer = msgpack.Packer(autoreset=False)  # it would keep as much memory
        self._output_bytes += 4 + length
        self.is_behind = self._output_bytes > OUTPUT_HIGH_BYTES

    def release(self) -> None:
        """Let `write` write the answers that were held."""
        self.output += self._held
        self._held.clear()

    def write(self) -> bool:
        """Write what the socket takes; False when the other side is gone."""
        self.waits_to_read = False
        if not self.output and not self._begun_beat:
            return True
        with self._lock:
            return self._write()

    def _write(self) -> bool:
        output = self.output
        if self._begun_beat:
            output.appendleft(self._begun_beat)
            self._output_bytes += len(self._begun_beat)
            self._begun_beat = b""
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
            if self.is_behind:
                self._is_heard = True  # it is not read, but it reads
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

    def close(self) -> None:
        with self._lock:
            self.socket.close()

    @property
    def waits_to_write(self) -> bool:
        """There is output, and an event tells when the socket takes it."""
        return bool(self.output) and not self.waits_to_read

    def await_events(self, poll: select.epoll, events: int) -> None:
        """From now on `poll`, which reported EPOLLIN when the socket was registered, reports these."""
        if events != self.awaited:
            self.awaited = events
            poll.modify(self.socket, events)

    # -- signs of life, between machines

    def be_watched(self, patience: Patience) -> None:
        """From now on the peer is beaten to, and `is_silent` tells if it is gone."""
        self.silence = Silence(patience)
        self._patience = patience

    def on_beat(self) -> None:
        """The peer has beaten."""
        if self.silence is not None and not self.silence.beats:
            self.silence.beats = True
            let_beats_decide(self.socket, self._patience)

    def is_silent(self) -> bool:
        """To be asked each `BEAT_SECONDS`. True: the peer has been silent for so long that it is gone."""
        is_heard, self._is_heard = self._is_heard, False
        return self.silence is not None and self.silence.look(is_heard)

    @property
    def has_begun_beat(self) -> bool:
        """`write` has to end it."""
        return bool(self._begun_beat)

    def beat(self) -> None:
        """Write a sign of life, unless output waits already: then the peer does not read, or hears that.

        This is for another thread than all else.
        """
        with self._lock:
            if self.output or self._begun_beat:
                return
            try:
                sent = self.socket.send(_BEAT_FRAME)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                sent = 0  # TLS has it, and wants to be asked for the same again
            except OSError:  # it takes nothing now, or is closed, which `read` and `write` find out
                return
            self._begun_beat = _BEAT_FRAME[sent:]
