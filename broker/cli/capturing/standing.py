"""Runs a capture as a process of its own: signals end it, and people and Prometheus see how it fares."""

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from broker.capture.service import CaptureService
from broker.cli.pairing.operations import Operations, end_by_signals, serve_operations
from broker.cli.progress import Bar, progress
from broker.logging import configure_logging
from broker.settings.log import Log, LogLevel

if TYPE_CHECKING:
    from broker.exposition import Families

SHOW_SECONDS = 0.2


def stand(service: CaptureService, log_level: LogLevel, ops_host: str, ops_port: int | None) -> None:
    """Run it until a signal, or its own end.

    Raises CaptureError, OSError. Ends the command if the operations endpoint cannot listen.
    """
    with progress("capturing rows") as bar:
        configure_logging(Log(level=log_level), sys.stderr)  # above the bar, which has taken its place
        asyncio.run(_stand(service, bar, ops_host, ops_port))


async def _stand(service: CaptureService, bar: Bar, ops_host: str, ops_port: int | None) -> None:
    end_by_signals(service.stop)
    async with AsyncExitStack() as stack:
        await serve_operations(
            stack, Operations("capture", service.unready, lambda: _families(service)), ops_host, ops_port
        )
        if bar.is_shown:
            showing = asyncio.create_task(_show(service, bar))
            stack.callback(showing.cancel)
        await asyncio.to_thread(service.run)


def _families(service: CaptureService) -> "Families":
    from broker.capture_exposition import families

    return families(service.snapshot())


async def _show(service: CaptureService, bar: Bar) -> None:
    """Keep the bar up to date, until this is cancelled."""
    done = total = 0
    while True:
        counters = service.counters
        done_before, done = done, counters.rows
        total_before, total = total, counters.rows + counters.lag_rows
        bar.advance(done - done_before)
        bar.expect(total - total_before)
        await asyncio.sleep(SHOW_SECONDS)
