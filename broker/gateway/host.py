"""The interfaces through which a bound link uses its connection and the gateway.

A connection binds links to entities and nodes, so it imports their classes. They know the connection only by these
interfaces.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

from broker.errors import BrokerError
from broker.gateway.holding import Holding
from broker.gateway.limits.large_answers import LargeAnswers
from broker.gateway.message_ids import MessageIds
from broker.gateway.namespace import Namespace
from broker.gateway.pinning import Pinning
from broker.gateway.returning import Returning
from broker.gateway.rights import Rights
from broker.gateway.router import Router
from broker.gateway.transactions import Transactions
from broker.gateway.turn import Gathering, Turn
from broker.gateway.unsent import UnsentOutput
from broker.keys import Keyring
from broker.metrics import GatewayMetrics
from broker.repeated_warning import RepeatedWarning
from broker.settings.config import Settings
from broker.wire import Outcome
from protocol.addresses import Node
from protocol.engine.deliveries import Delivery
from protocol.engine.links import Link
from protocol.host_names import HostNames
from protocol.nodes.sas_tokens import Claim


class Shared(Protocol):
    """The part of the gateway that all connections share."""

    settings: Settings
    metrics: GatewayMetrics
    keyring: Keyring
    host_names: HostNames  # of the broker
    namespace: Namespace
    router: Router
    returning: Returning
    denials: RepeatedWarning
    new_message_id: MessageIds
    holders: Iterator[int]  # numbers of links that hold temporary entities
    sender_turns: Iterator[int]  # senders to partitioned entities begin with each fragment in turn

    def go_on_with(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this for a client beside everything else."""


class Overrunning(Protocol):
    """A link whose client may have sent more than its credit allows."""

    @property
    def is_overrun(self) -> bool: ...


class SessionHolder(Protocol):
    """A link that has the lock of a session; the partition knows the link by `channel`."""

    link: Link
    is_exclusive: bool

    @property
    def channel(self) -> int: ...

    def has_settled(self, tokens: Sequence[bytes], outcome: Outcome) -> None:
        """The client has settled these messages by a request; some may be of other links."""


class Responder(Protocol):
    def respond(self, response: bytes) -> None: ...


class Host(Turn, Protocol):
    """A connection as its links see it.

    `is_stalled`: the client does not read. `waiting_bytes`: the size of responses that wait for credit.
    `large_answers`: the room for these. `overrun`: links that may have more than their credit, for which the client may
    have to wait. `blocked`: links to post after the next output. `shut`: links to post after the client's next flow.
    `unsent`: the end of the output. `sessions`: the holder of each session, by queue id and session id. `client_name`:
    the container id of the client's open. `holding`: the temporary entities that links hold. `pinning`: what pins its
    sessions to an entity.
    """

    client_name: str
    holding: Holding
    pinning: Pinning

    is_stalled: bool
    waiting_bytes: int
    large_answers: LargeAnswers
    overrun: set[Overrunning]
    blocked: set[Gathering]
    shut: set[Gathering]
    unsent: UnsentOutput
    sessions: dict[tuple[int, str], SessionHolder]
    transactions: Transactions
    rights: Rights

    @property
    def gateway(self) -> Shared: ...

    @property
    def client_properties(self) -> Mapping[Any, Any]:
        """The connection properties that the client sent in its open."""

    @property
    def output_room_bytes(self) -> int:
        """How much can be written before the client must read; never too low."""

    def post_gathered(self) -> None:
        """Let the links send what they have gathered to the partitions, so that later commands come after it."""

    def reject(self, delivery: Delivery, condition: str, text: str, tracker: str = "NoSystemTracker") -> None: ...

    def bind_made(self, link: Link, bind: Callable[[], Any]) -> None:
        """The node of the link is there: bind it, or refuse it with the error that this raises."""

    def detach(self, link: Link, error: BrokerError, tracker: str = "NoSystemTracker") -> None: ...

    def let_go(self, link: Link, error: BrokerError, tracker: str, delay_s: float) -> None:
        """The link has nothing to do any more, and is detached later, unless the client detaches it before."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` after the delay, if the connection still exists."""

    def tracked(self, text: str, tracker: str = "NoSystemTracker") -> str:
        """The text with the tracking id, tracker and time of this occurrence."""

    def response_link(self, node: tuple[Node, str], reply_to: str | None, request: Link) -> Responder | None:
        """The link for the response to a request on this link (amqp.md 2.1)."""

    def key_shown(self) -> None:
        """A token was signed with a key of the broker, and brings no right."""

    def put_claim(self, claim: Claim, now_s: float) -> None:
        """Take the rights of a token that was verified at `now_s`; they hold until it expires."""
