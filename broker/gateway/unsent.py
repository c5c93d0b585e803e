"""Finds which deliveries never left this host when a connection ends.

A message that the client cannot have seen is no failed delivery. For a client that does not read, the socket's buffers
hold megabytes, so written output may still be unsent. The kernel tells how many bytes it has sent (tcp_info of tcp(7)).
Output is kept until the kernel is asked, for a tick at most, and takes no memory beyond what waits for the socket
anyway.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from protocol.engine.links import Link
from protocol.engine.proton.outgoing import transfers_from

# Output kept before the kernel is asked what it has sent; asking costs a system call.
KEPT_BYTES = 1 << 20

# tcpi_bytes_sent and tcpi_bytes_retrans of struct tcp_info, Linux 4.19 and later
_SENT_AT = 200
_sent = struct.Struct("=QQ").unpack_from
_TCP_INFO_BYTES = _SENT_AT + 16


class UnsentOutput:
    """The end of one connection's output. Positions count bytes since the connection began.

    Messages that were received and deleted are retained too, because the partition does not have them any more.
    `kept_bytes` is the size of the output that is kept.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._has_deliveries = False
        self._outputs: deque[bytes | memoryview] = deque()
        self.kept_bytes = 0
        self._position = 0  # position of the next output
        self._retained: deque[tuple[int, Link, list[Any]]] = deque()  # position after the delivery, link, entry items
        self._unwritten: list[tuple[Link, list[Any]]] = []  # entries whose output has not come yet

    def add(self, output: bytes | memoryview) -> None:
        """Whole frames are about to be written."""
        if not self._has_deliveries:
            self._position += len(output)
            return
        self._outputs.append(output)
        self.kept_bytes += len(output)
        self._position += len(output)
        if self._unwritten:
            waiting = []
            for link, entries in self._unwritten:
                if not link.closed and link.queued:
                    waiting.append((link, entries))  # they wait for the session's window
                else:
                    self._retained.append((self._position, link, entries))
            self._unwritten = waiting
        if self.kept_bytes > KEPT_BYTES:
            self.trim()

    def add_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Add an output, as `add` does, in at least one piece, each of which has whole frames."""
        *others, last = pieces
        for piece in others:
            if self._has_deliveries:
                self._outputs.append(piece)
                self.kept_bytes += len(piece)
            self._position += len(piece)
        self.add(last)

    def skip(self, count: int) -> None:
        """Count so many bytes without frames that are about to be written."""
        self._position += count

    def expect_deliveries(self) -> None:
        """Note that from now on output may have deliveries that count."""
        self._has_deliveries = True

    def retain(self, link: Link, entries: list[Any]) -> None:
        """Keep these entry items (`broker.wire`), which were given to the engine."""
        self._unwritten.append((link, entries))

    def retained(self, link: Link) -> list[Any]:
        """Entry items of the link's last deliveries: at least those that have not left."""
        kept = [entries for _, owner, entries in self._retained if owner is link]
        kept += [entries for owner, entries in self._unwritten if owner is link]
        return [item for entries in kept for item in entries]

    def __bool__(self) -> bool:
        return bool(self._outputs or self._retained)

    def trim(self) -> int:
        """Drop output that the kernel has sent. Returns how many bytes of the remaining output it has sent, too."""
        sent = self._sent_to()
        while self._outputs and self._position - self.kept_bytes + len(self._outputs[0]) <= sent:
            self.kept_bytes -= len(self._outputs.popleft())
        while self._retained:
            position, _, _ = self._retained[0]
            if position > sent:
                break
            self._retained.popleft()
        return max(0, sent - (self._position - self.kept_bytes))

    def forget(self) -> None:
        """The connection has ended, and nobody asks any more."""
        del self._transport
        self._outputs.clear()
        self._retained.clear()
        self._unwritten.clear()

    def deliveries(self) -> dict[tuple[int, int], int]:
        """The number of deliveries without a sent byte, by channel and handle of our end of their links."""
        start = self.trim()
        return transfers_from(self._outputs, start)

    def _sent_to(self) -> int:
        """The position up to which output was sent, never too low; the end of the output if the kernel does not tell.

        With TLS more bytes are sent than are written here, so some output that never left counts as sent.
        """
        connection = self._transport.get_extra_info("socket")
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            sent, again = _sent(info, _SENT_AT)
        except (AttributeError, OSError, struct.error):
            return self._position
        # 0 means that the kernel does not count, because something is sent on every connection that has links.
        return min(sent - again, self._position) if sent else self._position
