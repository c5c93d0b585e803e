"""A process of a broker whose namespace is the secondary of a pairing: it brings the backlog to the primary.

It is a client of its own broker like any other, by the root key. So it costs the gateways no more than another client,
and whatever happens to it, the others do not notice. It says that it is ready before it has connected anywhere: a
broker serves also while its syphon cannot work.
"""

import asyncio
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from broker.administration.address import Address, parse_http_address
from broker.child import Instructions, announce_ready
from broker.gateway.reports import report_at
from broker.gateway.running import keep_beating, serve_beside
from broker.keys import ROOT_KEY_NAME, SECURITY_FILE, read_security
from broker.logging import get_logger
from broker.metrics import process_usage
from broker.pairing.namespaces import Namespace
from broker.pairing.options import InvalidPairing
from broker.pairing.syphon.beside import Beside
from broker.pairing.syphon.counters import Counters
from broker.pairing.syphon.options import SyphonOptions
from broker.pairing.syphon.service import Service, snapshot
from broker.ports_file import Ports, running_ports
from broker.settings.config import ConfigurationError, Settings

log = get_logger("syphon")

LOOK_SECONDS: Final = 0.1  # between two looks whether the broker serves


class InnerSyphon:
    """The syphon that the broker runs. It also answers the operations endpoint (`broker.gateway.reports.Reporter`)."""

    def __init__(self, instructions: Instructions, beat: Callable[[], None]) -> None:
        """`beat` is a sign of life to the supervisor. Raises ConfigurationError."""
        self._settings: Settings = instructions.settings
        self._restarts = instructions.restarts
        self._socket = instructions.syphon_socket
        self._beat = beat
        self._is_stopping = False
        self._woken = asyncio.Event()  # this process is to end, or keys have changed
        syphon = self._settings.syphon
        assert syphon.primary is not None
        try:
            self._options = SyphonOptions(syphon.backlog_queues, syphon.rate)
            trust = ssl.create_default_context(cafile=syphon.ca)
        except (InvalidPairing, OSError) as error:
            raise ConfigurationError(f"syphon: {error}") from error
        http = None if syphon.primary_http is None else parse_http_address(syphon.primary_http)
        self._primary = Namespace(syphon.primary, http=http, trust=trust)
        self._syphon: Beside | None = None

    # -- what is reported

    def problem(self) -> str:
        return "" if self._syphon is None else self._syphon.problem()

    def snapshot(self) -> dict[str, Any]:
        own = snapshot(Counters(), is_primary_up=False) if self._syphon is None else self._syphon.snapshot()
        return {**own, "restarts": self._restarts, **process_usage()}

    def accept_failed(self, error: OSError) -> None:
        log.warning("no connection can be accepted", reason=error.strerror or str(error))

    # -- the work

    async def run(self) -> None:
        """Serve until SIGTERM. Raises ConfigurationError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor decides
        loop.add_signal_handler(signal.SIGHUP, self._woken.set)
        await serve_beside(self._serve(), [keep_beating(self._beat)])

    def _stop(self) -> None:
        self._is_stopping = True
        self._woken.set()

    async def _serve(self) -> None:
        try:
            reports = report_at(self._socket, self)
        except OSError as error:
            raise ConfigurationError(f"{self._socket} cannot be made in data_dir: {error.strerror or error}") from error
        announce_ready()
        ports = await self._ports()
        while ports is not None and not self._is_stopping:
            self._woken.clear()
            await self._drain(self._own(ports))
        reports.close()

    async def _ports(self) -> Ports | None:
        """Return the ports of the broker as soon as it serves; None if this process is to end before."""
        while not self._is_stopping:
            if (ports := running_ports(self._settings.data_dir)) is not None:
                return ports
            await asyncio.sleep(LOOK_SECONDS)
        return None

    async def _drain(self, secondary: Namespace) -> None:
        """Drain the backlog until this process is to end, or keys have changed."""
        name = self._settings.syphon.primary_name
        self._syphon = Beside(lambda: Service(self._primary, secondary, name, self._options))
        draining = asyncio.create_task(self._syphon.run())
        try:
            await self._woken.wait()
            self._syphon.stop()
            await draining
        finally:
            draining.cancel()

    def _own(self, ports: Ports) -> Namespace:
        """The namespace of this broker."""
        settings = self._settings
        security = read_security(Path(SECURITY_FILE)) or settings.security  # with the keys that SIGHUP has brought
        key = security.root_key
        assert key is not None
        trust = ssl.create_default_context(cafile=settings.tls.certificate)
        trust.check_hostname = False  # the certificate need not be for the loopback address
        port, is_tls = (ports.amqp_port, False) if ports.amqp_port is not None else (ports.amqps_port, True)
        assert port is not None
        text = own_address(settings.amqp.host, port, key, tls=is_tls)
        return Namespace(text, http=_http(settings, ports), trust=trust)


def own_address(host: str, port: int, key: str, *, tls: bool) -> str:
    """The connection string of this broker, by the address at which it listens.

    The name localhost would not do: another broker may have this port at another loopback address, and be the primary.
    """
    host = _reached(host)
    host = f"[{host}]" if ":" in host else host
    text = f"Endpoint=sb://{host}:{port};SharedAccessKeyName={ROOT_KEY_NAME};SharedAccessKey={key};"
    return text if tls else text + "UseDevelopmentEmulator=true;"


def _reached(host: str) -> str:
    """Where this machine reaches what listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _http(settings: Settings, ports: Ports) -> Address:
    host = _reached(settings.http.host)
    if ports.http_port is not None:
        return Address("http", host, ports.http_port)
    assert ports.https_port is not None
    return Address("https", host, ports.https_port)
