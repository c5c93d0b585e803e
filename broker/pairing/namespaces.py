"""Where the two namespaces of a pairing are, and the primary's name."""

import ssl
from typing import Final

from broker.administration.address import Address, usual_address
from broker.administration.client import ANSWER_SECONDS, HttpClient
from broker.pairing.backlog import check_name, namespace_name
from broker.pairing.endpoint import Endpoint
from broker.pairing.options import InvalidPairing
from protocol.client.connection_string import ConnectionString

# For each answer of the primary's management API, which is only asked what it is: a frozen one accepts connections.
PRIMARY_SECONDS: Final = 5.0


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


def name_of(primary: Namespace, secondary: Namespace, primary_name: str | None) -> str:
    """The primary's name in the paths of the backlog queues. Raises InvalidPairing, also if both are one address."""
    name = check_name(primary_name or namespace_name(primary.target.host))
    if (primary.target.host.lower(), primary.target.port) == (secondary.target.host.lower(), secondary.target.port):
        raise InvalidPairing("the secondary is the primary: both connection strings have the same host and port")
    return name
