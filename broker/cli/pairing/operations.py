"""The operations endpoint of a command that stands beside brokers, and the signals that end it."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.cli.ending import fail
from broker.http.companion import start_companion_ops
from broker.logging import get_logger

if TYPE_CHECKING:
    from broker.exposition import Families


@dataclass(frozen=True, slots=True)
class Operations:
    """A `broker.http.companion.Companion`. `name` is that of the process in metrics and of its logger."""

    name: str
    unready: Callable[[], str | None]
    families: "Callable[[], Families]"


def end_by_signals(stop: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def serve_operations(stack: AsyncExitStack, operations: Operations, host: str, port: int | None) -> None:
    """Serve them until the stack is closed; not at all without a port. Ends the command if it cannot listen."""
    if port is None:
        return
    try:
        server = await start_companion_ops(operations, host, port)
    except OSError as error:
        fail(f"--ops-port: cannot listen on {host} port {port}: {error.strerror or error}")
    stack.push_async_callback(server.close)
    get_logger(operations.name).info("operations endpoint listens", host=host, port=server.port)
