"""Writes to the socket of one client, and keeps the end of the output until it has left (`unsent`)."""

import asyncio

from broker.gateway.unsent import UnsentOutput


class Output:
    """All that is written to one transport. `unsent` is the end of it."""

    __slots__ = ("_transport", "unsent")

    def __init__(self, transport: asyncio.WriteTransport, unsent: UnsentOutput) -> None:
        self._transport = transport
        self.unsent = unsent

    def write(self, output: bytes | list[memoryview]) -> int:
        """Write whole frames of the engine, and return their size.

        A list of pieces is emptied, so that what the client has read of it takes no memory any more.
        """
        if not isinstance(output, list):
            self.unsent.add(output)
            self._transport.write(output)
            return len(output)
        self.unsent.add_pieces(output)
        size = 0
        while output:
            piece = output.pop(0)
            size += len(piece)
            self._transport.write(piece)
        return size

    def write_other(self, data: bytes) -> None:
        """Write what is not of the engine: it has no deliveries."""
        self.unsent.skip(len(data))
        self._transport.write(data)

    def waiting_bytes(self) -> int:
        """How much waits for the socket; 0 if the transport does not tell."""
        try:
            return self._transport.get_write_buffer_size()
        except (AttributeError, NotImplementedError):
            return 0

    def held_bytes(self) -> int:
        """An estimate of the memory that the output takes: what waits is kept in `unsent`, too."""
        return max(self.waiting_bytes(), self.unsent.kept_bytes)
