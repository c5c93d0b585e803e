"""Nodes that answer requests: links for requests, and links for responses.

A client opens a pair of links to the node. A response goes to the link that the request's reply-to names, or else to
the node's response link on the session of the request (amqp.md 2.1); never to another connection.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from broker import requests
from broker.errors import BrokerError, MessageTooLarge, ServerBusy
from broker.gateway.host import Host
from broker.gateway.links.intake import OVERRUN, Intake
from broker.gateway.namespace import Entity
from broker.gateway.router import Reply
from broker.gateway.transactions import Transaction
from protocol import error_texts
from protocol.addresses import Address
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, settle, settle_in, transaction_of
from protocol.engine.links import Link
from protocol.errors import ProtocolError
from protocol.nodes.request_message import HEAD_BYTES, Request, parse_head
from protocol.nodes.request_message import parse as parse_request

# As much as other senders have by default. SDKs renew the locks of all messages that came together at once, each with
# a request, and JavaScript's gives a lock up when there is no credit for its request.
REQUEST_CREDIT = 1000
REQUESTS_AT_ONCE = 100  # of one link; others wait until these are answered
# Responses that may wait for credit: their number on one link, and their bytes on all links of a connection. A client
# that sends requests and does not read loses the oldest responses. One response alone may have more bytes, since it may
# have a message of the largest size.
MAX_WAITING_RESPONSES = 1000
MAX_WAITING_BYTES = 8 << 20

Answer = Callable[[bytes], None]


class ResponseLink:
    """A client's receiver on a node of an entity or the namespace.

    It sends settled responses when there is credit and room in the window of the session; their bytes are counted as
    long as they wait.
    """

    def __init__(self, connection: Host, link: Link, address: Address, entity: Entity | None) -> None:
        self.connection = connection
        self.link = link
        self.entity = entity
        self.node = (address.node, address.resource)
        self.address = link.target_address  # the client's name for it
        self._waiting: deque[bytes] = deque()
        self._count = 0

    def respond(self, response: bytes) -> None:
        self._waiting.append(response)
        self.connection.waiting_bytes += len(response)
        self.on_flow()
        while self._waiting and (
            len(self._waiting) > MAX_WAITING_RESPONSES
            or MAX_WAITING_BYTES < self.connection.waiting_bytes > len(self._waiting[-1])
        ):
            self._next()

    def on_flow(self) -> None:
        link = self.link
        while self._waiting and not link.closed and link.credit > 0 and not self.connection.is_stalled:
            if link.session.room <= 0:
                (self.connection.blocked if link.session.window else self.connection.shut).add(self)
                break
            self._count += 1
            response = self._next()
            link.send(self._count.to_bytes(16, "big"), response, b"", 0, True)
        if link.drain and not link.closed:
            link.drained()

    def post(self) -> None:
        self.on_flow()

    def on_detach(self, broken: bool = False) -> None:
        while self._waiting:
            self._next()

    def _next(self) -> bytes:
        response = self._waiting.popleft()
        self.connection.waiting_bytes -= len(response)
        return response


class RequestLink(Intake):
    """A client's sender to a node."""

    window = REQUEST_CREDIT

    def __init__(self, connection: Host, link: Link, address: Address) -> None:
        self.connection = connection
        self.link = link
        link.head_bytes = HEAD_BYTES
        self.node = (address.node, address.resource)
        self._begun = 0  # requests that are not answered yet
        self._postponed: deque[tuple[Request, bool]] = deque()  # others, not begun; whether their answers may be large
        self.transaction: Transaction | None = None  # the transaction of the request that is being handled

    @property
    def waiting(self) -> int:
        return self._begun + len(self._postponed)

    @property
    def is_overrun(self) -> bool:
        return self.waiting > OVERRUN * REQUESTS_AT_ONCE  # requests may be large

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        try:
            request = parse_request(payload)
        except ProtocolError as error:
            self.refuse(delivery, settled, error)
            return
        transaction_id = transaction_of(delivery)
        if transaction_id is not None:
            try:
                self.transaction = self.connection.transactions.find(transaction_id)
            except BrokerError as error:
                self.refuse(delivery, settled, error)
                if settled:
                    self._begun += 1
                    self.fail(request, error, partial(self._respond, request, False))
                return
        if settled:
            forget(delivery)
        elif transaction_id is None:
            self.link.begin_outcomes()
            settle(delivery, ACCEPTED)
        else:
            settle_in(transaction_id, delivery, ACCEPTED)
        is_large = self.is_large(request)
        try:
            # No transaction has requests with large answers, so these wait even if they name one.
            if (transaction_id is None or is_large) and (self._postponed or not self._may_begin(is_large)):
                self._postponed.append((request, is_large))
            else:
                self._do(request, is_large)
        finally:
            self.transaction = None

    def on_oversized(self, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        text = error_texts.message_too_large(0, size_bytes, self.max_request_bytes())
        self._answer_unread(delivery, settled, MessageTooLarge(text))

    def on_crowded(self, delivery: Delivery, settled: bool) -> None:
        self._answer_unread(delivery, settled, ServerBusy(error_texts.UNFINISHED_TOO_MUCH))

    def _answer_unread(self, delivery: Delivery, settled: bool, error: BrokerError) -> None:
        """Clients wait for an answer to their request, and not for the outcome of its delivery."""
        try:
            request = parse_head(self.link.head)
        except ProtocolError:
            self.refuse(delivery, settled, error)
            return
        self.connection.transactions.fail(transaction_of(delivery), error)
        if settled:
            forget(delivery)
        else:
            self.link.begin_outcomes()
            settle(delivery, ACCEPTED)
        self._begun += 1
        self.fail(request, error, partial(self._respond, request, False))

    def on_detach(self) -> None:
        self._postponed.clear()  # else the connection would wait for them
        self.connection.gateway.router.refuse_waiting(self)
        self.connection.large_answers.forget(self)

    def is_large(self, request: Request) -> bool:
        """Whether the answer may be large."""
        return False

    def begin_postponed(self) -> None:
        postponed = self._postponed
        while postponed and self._may_begin(postponed[0][1]):
            self._do(*postponed.popleft())

    def _may_begin(self, is_large: bool) -> bool:
        """Whether there is room for one more request; if so, it must begin."""
        if self._begun >= REQUESTS_AT_ONCE:
            return False
        return not is_large or self.connection.large_answers.begin(self, self.connection.is_stalled)

    def _do(self, request: Request, is_large: bool) -> None:
        self._begun += 1
        answer = partial(self._respond, request, is_large)
        try:
            self.handle(request, answer)
        except (BrokerError, ProtocolError) as error:
            self.fail(request, error, answer)

    def handle(self, request: Request, answer: Answer) -> None:
        """Do the request, now or later. If this raises a BrokerError or ProtocolError, that is the answer."""
        raise NotImplementedError

    def request_partition(self, partition: int, queue: int, asked: requests.Request, reply: Reply) -> None:
        """Ask a partition, as `Router.request` does, for the client of this link."""
        self.connection.gateway.router.request(partition, queue, asked, reply, self.connection, asker=self)

    def fail(self, request: Request, error: Exception, answer: Answer) -> None:
        """Answer a request that cannot be done."""
        raise NotImplementedError

    def max_request_bytes(self) -> int:
        """What the errors of requests that are too large say."""
        return self.link.max_message_bytes

    def max_response_bytes(self) -> int:
        return self.connection.gateway.settings.amqp.max_message_size_bytes

    def _respond(self, request: Request, is_large: bool, response: bytes) -> None:
        self._begun -= 1
        if is_large:
            self.connection.large_answers.end()
        self.connection.active[self] = None
        link = self.connection.response_link(self.node, request.reply_to, self.link)
        if link is not None:
            link.respond(response)
        self.connection.large_answers.go_on(self)
        self.connection.flush()
