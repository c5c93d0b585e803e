"""The interfaces through which a bound link uses its connection and the gateway.

A connection binds links to entities and nodes, so it knows their classes; they know it only as it is described here.
"""

from collections.abc import Callable
from typing import Protocol

from broker.errors import BrokerError
from broker.gateway.message_ids import MessageIds
from broker.gateway.namespace import Namespace
from broker.gateway.rights import Rights
from broker.gateway.router import Router
from broker.gateway.transactions import Transactions
from broker.gateway.turn import Gathering, Turn
from broker.gateway.unsent import UnsentOutput
from broker.keys import Keyring
from broker.metrics import GatewayMetrics
from broker.settings.config import Settings
from protocol.addresses import Node
from protocol.engine.deliveries import Delivery
from protocol.engine.links import Link
from protocol.nodes.sas_tokens import Claim


class Shared(Protocol):
    """The part of the gateway that all connections share."""

    settings: Settings
    metrics: GatewayMetrics
    keyring: Keyring
    namespace: Namespace
    router: Router
    new_message_id: MessageIds


class Overrunning(Protocol):
    """A link whose client may have sent more than its credit allows."""

    @property
    def is_overrun(self) -> bool: ...


class SessionHolder(Protocol):
    """A link that has the lock of a session; `channel` is what the partition knows it by."""

    link: Link
    channel: int


class Responder(Protocol):
    def respond(self, response: bytes) -> None: ...


class Host(Turn, Protocol):
    """A connection, to the links on it.

    `is_stalled`: the client does not read. `waiting_bytes` are those of responses that wait for credit. `overrun` are
    links because of which the client may have to wait; `blocked` are posted when the client has read on; `unsent` is
    the end of the output; `sessions` have who holds them, by queue id and session id. `client_name` is what the client
    calls its end: the container id of its open.
    """

    client_name: str

    is_stalled: bool
    waiting_bytes: int
    overrun: set[Overrunning]
    blocked: set[Gathering]
    unsent: UnsentOutput
    sessions: dict[tuple[int, str], SessionHolder]
    transactions: Transactions
    rights: Rights

    @property
    def gateway(self) -> Shared: ...

    def post_gathered(self) -> None:
        """Let the links send to the partitions what they have gathered, so that what comes next comes after it."""

    def reject(self, delivery: Delivery, condition: str, text: str, tracker: str = "NoSystemTracker") -> None: ...

    def detach(self, link: Link, error: BrokerError, tracker: str = "NoSystemTracker") -> None: ...

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it then, if the connection is still there."""

    def tracked(self, text: str, tracker: str = "NoSystemTracker") -> str:
        """The text with what identifies this occurrence."""

    def response_link(self, node: tuple[Node, str], reply_to: str | None, request: Link) -> Responder | None:
        """Where the response to a request on this link goes (amqp.md 2.1)."""

    def put_claim(self, claim: Claim, now_s: float) -> None:
        """Take a token that was verified at `now_s`: its rights hold until it expires."""
