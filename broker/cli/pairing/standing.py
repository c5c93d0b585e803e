"""Runs a sidecar as a process of its own: signals end it, and Prometheus sees how it fares."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from broker.child import collect_rarely
from broker.cli.pairing.operations import Operations, end_by_signals, serve_operations
from broker.gateway.limits.descriptors import raise_limit
from broker.logging import configure_logging, get_logger
from broker.pairing.sidecar.service import Setup, Sidecar
from broker.settings.config import ConfigurationError
from broker.settings.log import Log, LogLevel

if TYPE_CHECKING:
    from broker.exposition import Families
    from broker.tls import ServerTls

log = get_logger("sidecar")


def stand(setup: Setup, log_level: LogLevel, ops_host: str, ops_port: int | None) -> None:
    """Run it until SIGTERM or SIGINT.

    Raises InvalidPairing; OSError if it cannot listen. Ends the command if the operations endpoint cannot.
    """
    configure_logging(Log(level=log_level), sys.stderr)
    raise_limit()
    uvloop.run(_stand(setup, ops_host, ops_port))


async def _stand(setup: Setup, ops_host: str, ops_port: int | None) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    end_by_signals(stopping.set)
    if setup.tls is not None:
        loop.add_signal_handler(signal.SIGHUP, _load, setup.tls)
    sidecar = Sidecar(setup)
    async with AsyncExitStack() as stack:
        await serve_operations(
            stack, Operations("sidecar", sidecar.unready, lambda: _families(sidecar)), ops_host, ops_port
        )
        await sidecar.start()
        log.info("sidecar is ready", host=setup.host, port=sidecar.port, primary=sidecar.primary_name)
        collect_rarely()
        await sidecar.run(stopping)


def _load(tls: "ServerTls") -> None:
    try:
        tls.load()
        log.info("certificate loaded")
    except ConfigurationError as error:
        log.error("certificate not loaded; the old one stays", reason=str(error))


def _families(sidecar: Sidecar) -> "Families":
    from broker import sidecar_exposition, syphon_exposition

    snapshot = sidecar.snapshot()
    yield from sidecar_exposition.families(snapshot)
    if snapshot["syphon"] is not None:
        yield from syphon_exposition.families(snapshot["syphon"])
