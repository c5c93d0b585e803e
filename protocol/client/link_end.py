"""The common part of a client's links, and the interface through which they use their connection.

Everything that waits is woken when the link or its connection ends, with the reason.
"""

import asyncio
from typing import Protocol, Self

from protocol.client.errors import ClientError, LinkClosed
from protocol.engine.deliveries import Delivery
from protocol.engine.engine import Engine
from protocol.engine.links import Link


class LinkConnection(Protocol):
    """A client's connection, to its links."""

    engine: Engine
    timeout_s: float

    @property
    def is_congested(self) -> bool:
        """More waits to be written than should."""

    def flush(self) -> None: ...

    def flush_soon(self, message_bytes: int = 0) -> None:
        """Write with what else comes in this turn of the loop; `message_bytes` are new."""


class LinkEnd:
    """What all links of a client have in common. `link` is there once it is attached."""

    link: Link

    def __init__(self, connection: LinkConnection, address: str) -> None:
        self.connection = connection
        self.address = address
        self.error: ClientError | None = None  # why the link ended
        self.attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.detached = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self.error is not None

    async def close(self) -> None:
        """Detach, and wait for the peer's answer. What waits on the link ends with LinkClosed."""
        if self.error is None:
            self.prepare_close()
            self.link.detach()
            self.connection.flush()
            self.fail(LinkClosed("", f"the link to {self.address} was closed"))
        async with asyncio.timeout(self.connection.timeout_s):
            await self.detached.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def check(self) -> None:
        """Raises why the link ended, if it has."""
        if self.error is not None:
            raise self.error.again()

    # -- what the connection tells

    def on_attached(self) -> None:
        if not self.attached.done():
            self.attached.set_result(None)

    def on_detached(self, error: ClientError) -> None:
        """The link is gone, and with it all its deliveries."""
        self.fail(error)
        self.detached.set()

    def fail(self, error: ClientError) -> None:
        """Wake all who wait; of the errors of a link the first one counts."""
        if self.error is not None:
            return
        self.error = error
        if not self.attached.done():
            self.attached.set_exception(error.again())
        self.wake(error)

    def wake(self, error: ClientError) -> None:
        raise NotImplementedError

    def prepare_close(self) -> None:
        """Say what is to be said before the link is closed from our side."""

    def on_flow(self) -> None: ...

    def on_resumed(self) -> None:
        """The connection is not congested any more."""

    def on_message(self, delivery: Delivery, payload: bytes, settled: bool) -> None:
        raise AssertionError("nothing is received on this link")

    def on_aborted(self) -> None:
        """The peer gave up a delivery that it had begun, and that has used credit."""

    def on_outcome(self, delivery: Delivery, tag: bytes, state: int, settled: bool) -> None:
        raise AssertionError("no outcomes on this link")
