"""The links of one connection: how many may be bound, to what, and for how long."""

from collections.abc import Callable, Mapping
from typing import Any

from broker.errors import BrokerError, NotAllowed, QuotaExceeded
from broker.gateway.binding import Bound, Destination, bind, destination_of
from broker.gateway.conditions import condition_of
from broker.gateway.crossing import Crossing
from broker.gateway.host import Host
from broker.gateway.links.browsers import Browser
from broker.gateway.links.entity_link import EntityLink
from broker.gateway.links.receivers import ClientReceiver
from broker.gateway.links.senders import ClientSender
from broker.gateway.nodes.request_links import RequestLink, ResponseLink
from protocol import conditions, error_texts
from protocol.addresses import Node
from protocol.engine.links import Link, Session
from protocol.errors import ProtocolError
from protocol.nodes.sas_tokens import ExpiredToken

# The node; the kind of what a request names, and that: an address, a name, or nothing; and the session of the request,
# None for links of any session.
Reply = tuple[tuple[Node, str], str, str | None, Session | None]

# A client needs two links to put a token; some clients attach new ones before the old ones are detached.
MAX_LINKS_WITHOUT_RIGHTS = 20


def replies_to(response: ResponseLink) -> list[Reply]:
    """What may say that a response goes to this link."""
    node, link = response.node, response.link
    named = [("address", response.address), ("name", link.name)]
    return [(node, *each, session) for session in (link.session, None) for each in named] + [
        (node, "session", None, link.session)
    ]


def _is_of_claims(bound: Bound) -> bool:
    return isinstance(bound, RequestLink | ResponseLink) and bound.node[0] is Node.CBS


def _too_many(where: str, count: int, setting: str) -> str:
    return f"The {where} has {count} links, as many as it may have (setting {setting})."


class BoundLinks:
    """`links` are all links of the connection; those that are not bound were refused, or are about to be detached."""

    def __init__(self, host: Host, links: Mapping[Any, Link]) -> None:
        self._host = host
        self._links = links
        self._count = 0
        self._claims = {True: 0, False: 0}  # links to $cbs, by whether we send on them
        self._responses: dict[ResponseLink, None] = {}
        self._by_reply_to: dict[Reply, dict[ResponseLink, None]] = {}  # the oldest first

    def attach(self, link: Link) -> None:
        """Bind the link to the entity or node that the client asks for, or refuse it with the reason."""
        host = self._host
        tracker = "NoSystemTracker"
        crossing = Crossing.of(link, host.pinning)
        try:
            self._require_room(link)
            destination = destination_of(host, link)
            self._require_single(link, destination)
            if destination is not None and destination.entity is not None:
                tracker = destination.entity.tracker(host.gateway.namespace.name)
                crossing.admit(link, destination.entity)
            bound = bind(host, link, destination)
        except (BrokerError, ProtocolError) as error:
            self._refuse(link, error, tracker)
            return
        link.context = bound
        if isinstance(bound, ResponseLink):
            self._responses[bound] = None
            for reply in replies_to(bound):
                self._by_reply_to.setdefault(reply, {})[bound] = None
        self._claims[link.is_sender] += _is_of_claims(bound)
        self._add(link, 1)

    def bind_made(self, link: Link, bind: Callable[[], Bound]) -> None:
        """The node of the link, for which another object stands in, is there. Bind it by this, or refuse it."""
        host = self._host
        host.active.pop(link.context, None)
        try:
            bound = bind()
        except (BrokerError, ProtocolError) as error:
            self._refuse(link, error)
            self.unbind(link)
            return
        link.context = bound
        if link.is_sender:
            bound.on_flow()  # the client may have given credit meanwhile

    def _refuse(self, link: Link, error: Exception, tracker: str = "NoSystemTracker") -> None:
        condition = condition_of(error)
        self._host.gateway.metrics.errors[condition] += 1
        link.refuse(condition, self._host.tracked(str(error), tracker))

    def _require_room(self, link: Link) -> None:
        """Check that the limits leave room for one more link. Raises QuotaExceeded."""
        amqp = self._host.gateway.settings.amqp
        if self._host.rights.is_empty and self._count >= MAX_LINKS_WITHOUT_RIGHTS:
            raise QuotaExceeded(f"A connection without a token may have at most {MAX_LINKS_WITHOUT_RIGHTS} links.")
        if (count := len(link.session.links) - 1) >= amqp.max_links_per_session:
            raise QuotaExceeded(_too_many("session", count, "amqp.max_links_per_session"))
        if self._count >= amqp.max_links_per_connection:
            raise QuotaExceeded(_too_many("connection", self._count, "amqp.max_links_per_connection"))

    def _require_single(self, link: Link, destination: Destination | None) -> None:
        """A connection may have one pair of links to $cbs at a time, as in the cloud. Raises NotAllowed.

        When Go gets this error, it closes its connection and opens a new one.
        """
        if destination is None or destination.address.node is not Node.CBS:
            return
        if self._claims[link.is_sender]:
            raise NotAllowed(error_texts.cbs_link_exists(self._host.client_name))

    def unbind(self, link: Link, broken: bool = False, unsent: int = 0) -> None:
        """The link is gone. `broken`: it went with its connection, which was lost.

        `unsent`: the number of its last deliveries that the client cannot have received.
        """
        bound: Bound | None = link.context
        if bound is None:
            return
        crossing: Crossing | None = link.session.context
        if crossing is not None:
            crossing.leave(link)
        link.context = None
        self._host.holding.end(link)
        self._claims[link.is_sender] -= _is_of_claims(bound)
        self._add(link, -1)
        if isinstance(bound, ClientReceiver):
            bound.on_detach(broken, unsent)
        else:
            bound.on_detach()
        if isinstance(bound, ResponseLink):
            del self._responses[bound]
            for reply in replies_to(bound):
                links = self._by_reply_to[reply]
                del links[bound]
                if not links:
                    del self._by_reply_to[reply]
        self._host.active.pop(bound, None)
        self._host.blocked.discard(bound)
        self._host.shut.discard(bound)

    def unbind_all(self, broken: bool, unsent: Mapping[Link, int]) -> None:
        """The connection is gone. `unsent`: see `unbind`."""
        for link in list(self._links.values()):
            link.closed = True
            try:
                self.unbind(link, broken, unsent.get(link, 0))
            except Exception as error:
                self._host.fail(error)

    def let_go(self) -> None:
        """The connection is gone, and its links are unbound."""
        self._links = {}
        del self._host

    def end(self, link: Link, condition: str, description: str) -> None:
        """Detach the link from our side, when the client has the answers to what it has asked for on it."""

        def end() -> None:
            link.detach(condition, description)
            self.unbind(link)

        bound: Bound | None = link.context
        if isinstance(bound, ClientSender | ClientReceiver):
            bound.wind_up(end)
        else:
            end()

    def detach_all(self, condition: str, description: str) -> None:
        for link in list(self._links.values()):
            if not link.closed:
                link.detach(condition, self._host.tracked(description))
                self.unbind(link)

    def detach_uncovered(self, now_s: float, reason: str | None = None) -> None:
        """Detach links to entities that no right covers at `now_s` any more; by default a token's end is the reason."""
        host = self._host
        for link in list(self._links.values()):
            bound = link.context
            if not isinstance(bound, EntityLink) or bound.is_ending:
                continue
            path = next((path for path in bound.paths if not host.rights.allows(path, bound.right, now_s)), None)
            if path is not None:
                text = reason or str(ExpiredToken(host.rights.expired_s(path, bound.right, now_s)))
                host.gateway.metrics.errors[conditions.UNAUTHORIZED_ACCESS] += 1
                self.end(link, conditions.UNAUTHORIZED_ACCESS, host.tracked(text, bound.tracker))

    def ask_again(self) -> None:
        """The client has stopped reading, or reads again: its links grant the partitions less, or more."""
        for link in self._links.values():
            if isinstance(link.context, ClientReceiver | Browser):
                link.context.ask()

    def respond(self) -> None:
        """Send responses that waited."""
        for response in self._responses:
            response.on_flow()

    def response_link(self, node: tuple[Node, str], reply_to: str | None, request: Link) -> ResponseLink | None:
        """The link for the response to a request on this link (amqp.md 2.1).

        If links of several sessions have the name that the request gives, it is the one on the session of the request.
        """
        of_session = (node, "session", None, request.session)
        replies: list[Reply] = [of_session]
        if reply_to is not None:
            named = [("address", reply_to), ("name", reply_to)]
            replies = [(node, *each, session) for session in (request.session, None) for each in named] + [of_session]
        for reply in replies:
            if found := self._by_reply_to.get(reply):
                return next(iter(found))
        return None

    def _add(self, link: Link, change: int) -> None:
        self._count += change
        if link.is_sender:
            self._host.gateway.metrics.receivers += change
        else:
            self._host.gateway.metrics.senders += change
