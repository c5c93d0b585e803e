"""The common part of a client's links, and the interface through which they use their connection.

When the link or its connection ends, everything that waits on the link fails with the reason.
"""

import asyncio
from typing import Protocol, Self

from protocol.client.errors import ClientError, LinkClosed
from protocol.engine.deliveries import Delivery
from protocol.engine.engine import Engine
from protocol.engine.links import Link


class LinkConnection(Protocol):
    """A client's connection as its links see it."""

    engine: Engine
    timeout_s: float

    @property
    def is_congested(self) -> bool:
        """True if too much output waits to be written."""

    def flush(self) -> None: ...

    def flush_soon(self, message_bytes: int = 0) -> None:
        """Write with the other output of this turn of the loop; `message_bytes` were added."""


class LinkEnd:
    """The common part of all links of a client. `link` is set when it is attached."""

    link: Link

    def __init__(self, connection: LinkConnection, address: str) -> None:
        self.connection = connection
        self.address = address
        self.error: ClientError | None = None  # the reason why the link ended
        # False if it ended before. Not the error: the call that raises it has the link, so they would keep each other.
        self.attached: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.detached = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self.error is not None

    async def close(self) -> None:
        """Detach, and wait for the peer's answer. Calls that wait on the link fail with LinkClosed."""
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
        """Raise the reason why the link ended, if it has."""
        if self.error is not None:
            raise self.error.again()

    # -- called by the connection

    def on_attached(self) -> None:
        if not self.attached.done():
            self.attached.set_result(True)

    def on_detached(self, error: ClientError) -> None:
        """The link and all its deliveries are gone."""
        self.fail(error)
        self.detached.set()

    def fail(self, error: ClientError) -> None:
        """Wake all tasks that wait. The first error of a link counts."""
        if self.error is not None:
            return
        self.error = error
        if not self.attached.done():
            self.attached.set_result(False)
        self.wake(error)

    def wake(self, error: ClientError) -> None:
        raise NotImplementedError

    def prepare_close(self) -> None:
        """Do what must be done before we close the link."""

    def on_flow(self) -> None: ...

    def on_resumed(self) -> None:
        """The connection is not congested any more."""

    def on_message(self, delivery: Delivery, payload: bytes, settled: bool) -> None:
        raise AssertionError("nothing is received on this link")

    def on_aborted(self) -> None:
        """The peer aborted a delivery, which has used credit."""

    def on_outcome(self, delivery: Delivery, tag: bytes, state: int, settled: bool) -> None:
        raise AssertionError("no outcomes on this link")
