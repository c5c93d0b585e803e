"""Runs a syphon as a process of its own: signals end it, and people and Prometheus see how it fares."""

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from broker.child import collect_rarely
from broker.cli.pairing.operations import Operations, end_by_signals, serve_operations
from broker.cli.progress import Bar, progress
from broker.logging import configure_logging
from broker.pairing.syphon.service import Service
from broker.settings.log import Log, LogLevel

if TYPE_CHECKING:
    from broker.exposition import Families

SHOW_SECONDS = 0.1


def drain(service: Service, what: str, log_level: LogLevel, ops_host: str, ops_port: int | None) -> None:
    """Run it until a signal, or its own end. `what` is the title of the progress bar.

    Raises InvalidPairing. Ends the command if the operations endpoint cannot listen.
    """
    with progress(what) as bar:
        configure_logging(Log(level=log_level), sys.stderr)  # above the bar, which has taken its place
        collect_rarely()
        uvloop.run(_drain(service, bar, ops_host, ops_port))


async def _drain(service: Service, bar: Bar, ops_host: str, ops_port: int | None) -> None:
    end_by_signals(service.stop)
    async with AsyncExitStack() as stack:
        await serve_operations(
            stack, Operations("syphon", service.unready, lambda: _families(service)), ops_host, ops_port
        )
        telling = asyncio.create_task(_show(service, bar) if bar.is_shown else service.keep_telling())
        stack.callback(telling.cancel)
        await service.run()


def _families(service: Service) -> "Families":
    from broker.syphon_exposition import families

    return families(service.snapshot())


async def _show(service: Service, bar: Bar) -> None:
    """Keep the bar up to date, until this is cancelled."""
    done = total = 0
    backlog: int | None = None
    while True:
        counters = service.counters
        done_before, done = done, counters.completed + counters.dead_lettered.total()
        bar.advance(done - done_before)
        if counters.backlog not in (None, backlog):  # counted anew, which is done from time to time
            backlog = counters.backlog
            total_before, total = total, done + (backlog or 0)
            bar.expect(total - total_before)
        await asyncio.sleep(SHOW_SECONDS)
