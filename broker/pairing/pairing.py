"""Two namespaces paired: what is sent reaches the primary, or a backlog queue in the secondary while that is away.

    async with await Pairing.open(primary, secondary) as pairing:
        sender = pairing.sender("orders")
        await sender.send(Message.of(b"hello", message_id="1").encode())

Messages in the backlog reach the primary by a syphon, which runs elsewhere.
"""

import asyncio
import random
import ssl
from collections.abc import Iterable
from typing import Self

from broker.administration.address import Address, usual_address
from broker.administration.client import ANSWER_SECONDS, HttpClient
from broker.logging import get_logger
from broker.pairing.availability import Availability
from broker.pairing.backlog import Rotation, check_name, namespace_name
from broker.pairing.counters import Counters
from broker.pairing.endpoint import Endpoint
from broker.pairing.health import State
from broker.pairing.options import InvalidPairing, PairingOptions
from broker.pairing.pings import ping
from broker.pairing.provisioning import check_they_differ, create_missing
from broker.pairing.sending import PairedSender, Parts
from protocol.client.connection_string import ConnectionString

log = get_logger("pairing")

# For each answer of the primary's management API, which is only asked what it is: a frozen one accepts connections.
PRIMARY_SECONDS = 5.0
CLOSE_SECONDS = 5.0  # the other side of a pairing must be closed within this time (PN10)


class Namespace:
    """Where a namespace is: AMQP by its connection string, and the management API.

    `http` is by default the usual address of the host. `trust` are the authorities for TLS, by default the system's.
    """

    def __init__(
        self, connection_string: str, *, http: Address | None = None, trust: ssl.SSLContext | None = None
    ) -> None:
        self.target = ConnectionString.parse(connection_string)
        self.http = http or usual_address(self.target.host, self.target.tls)
        self.trust = trust

    def management(self, answer_seconds: float = ANSWER_SECONDS) -> HttpClient:
        trust = self.trust or ssl.create_default_context()
        return HttpClient(self.http, self.target.credentials, trust, answer_seconds)

    def endpoint(self, name: str) -> Endpoint:
        return Endpoint(name, self.target, self.trust)


class Pairing:
    """A pairing of two namespaces, with its senders; made by `open`."""

    def __init__(self, primary: Endpoint, secondary: Endpoint, queues: Iterable[str], options: PairingOptions) -> None:
        self.options = options
        self.primary = primary
        self.secondary = secondary
        self.queues = list(queues)
        self.counters = Counters()
        self.availability = Availability(options, self._ping, self.counters)
        self.rotation = Rotation(self.queues, options.ping_interval_ms, random.choice)
        self._parts = Parts(primary, secondary, self.availability, self.rotation, options, self.counters)
        self._watching = [asyncio.create_task(self._watch(primary, secondary))]
        self._watching.append(asyncio.create_task(self._watch(secondary, primary)))

    @classmethod
    async def open(
        cls,
        primary: Namespace,
        secondary: Namespace,
        options: PairingOptions | None = None,
        *,
        primary_name: str | None = None,
    ) -> Self:
        """Pair them, and create the backlog queues that are missing, which needs Manage on the secondary.

        The primary may be away. `primary_name` is for the paths of the queues; by default the first part of its host.
        Raises InvalidPairing.
        """
        options = options or PairingOptions()
        name = name_of(primary, secondary, primary_name)
        async with primary.management(PRIMARY_SECONDS) as one, secondary.management() as other:
            queues = await create_missing(other, name, options.backlog_queue_count)
            await check_they_differ(one, other)
        return cls(primary.endpoint("primary"), secondary.endpoint("secondary"), queues, options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def sender(self, path: str) -> PairedSender:
        """A sender to a queue or topic of the primary, which chooses a backlog queue of its own."""
        return PairedSender(self.availability.path(path), self._parts)

    def health(self, path: str) -> State:
        """How the sends to an entity fare."""
        return self.availability.path(path).health.state

    def mark_path_healthy(self, path: str) -> None:
        """End the failover of an entity by hand: the next send goes to the primary."""
        self.availability.mark_healthy(path)

    async def close(self) -> None:
        """Clear the pairing: no pings, no failovers, and both connections closed."""
        for task in self._watching:
            task.cancel()
        self.availability.close()
        await asyncio.gather(self.primary.close(), self.secondary.close())

    async def _ping(self, path: str) -> None:
        """Send a ping on a new connection, which all use if it succeeds (PN8)."""
        async with asyncio.timeout(self.options.attempt_timeout_ms / 1000):
            connection = await self.primary.connect()
            try:
                await ping(connection, path)
            except BaseException:
                connection.abort()
                raise
        self.primary.adopt(connection)

    async def _watch(self, ended: Endpoint, other: Endpoint) -> None:
        """When one side is closed or faults, the other must be closed soon; else it faults, too (PN10)."""
        await ended.closed.wait()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await other.closed.wait()
        except TimeoutError:
            text = f"the {ended.name} of the pairing has ended, and the {other.name} was not closed within 5 seconds"
            log.error("pairing faulted", reason=text)
            other.fault(text)


def name_of(primary: Namespace, secondary: Namespace, primary_name: str | None) -> str:
    """The primary's name in the paths of the backlog queues. Raises InvalidPairing, also if both are one address."""
    name = check_name(primary_name or namespace_name(primary.target.host))
    if (primary.target.host.lower(), primary.target.port) == (secondary.target.host.lower(), secondary.target.port):
        raise InvalidPairing("the secondary is the primary: both connection strings have the same host and port")
    return name
