"""The nodes for requests while the primary is away: $cbs takes tokens that are known to be good, $management refuses.

Some SDKs attach the management node of an entity before they send to it, so its links are there (amqp.md 2).
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from broker.pairing.sidecar.credentials import Credentials
from broker.pairing.sidecar.trust import Trust, Unverifiable
from protocol import conditions
from protocol.codec import Int
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, settle
from protocol.engine.links import Link
from protocol.errors import ProtocolError
from protocol.nodes import cbs, management
from protocol.nodes.request_message import HEAD_BYTES, Request, encode_response, parse, parse_head, text

REQUEST_CREDIT: Final = 100
MAX_WAITING: Final = 200
MAX_REQUEST_BYTES: Final = 64 << 10
UNAVAILABLE: Final = 503
AWAY: Final = "The primary namespace is away; only sends are taken meanwhile. Please try again."


class RequestNode:
    """A client's links to a node. Answers go to the receiver that a request names, or to the last one."""

    def __init__(self, answer: Callable[[Request], bytes]) -> None:
        self._answer = answer
        self._receivers: list[Responses] = []

    def attach(self, link: Link) -> None:
        if link.is_sender:
            responses = link.context = Responses(link, self._receivers.remove)
            self._receivers.append(responses)
            link.accept()
        else:
            link.context = self
            link.head_bytes = HEAD_BYTES
            link.accept(MAX_REQUEST_BYTES, REQUEST_CREDIT)

    def forget_all(self) -> None:
        """The connection is gone."""
        self._receivers.clear()

    def on_message(self, link: Link, delivery: Delivery, payload: bytes, settled: bool) -> None:
        self._on_request(link, delivery, lambda: parse(payload), settled)

    def on_refused(self, link: Link, delivery: Delivery, settled: bool) -> None:
        """A request that is too large, or for which there is no room. It is answered as if it had no body."""
        self._on_request(link, delivery, lambda: parse_head(link.head), settled)

    def _on_request(self, link: Link, delivery: Delivery, read: Callable[[], Request], settled: bool) -> None:
        if settled:
            forget(delivery)
        else:
            settle(delivery, ACCEPTED)
        link.grant(REQUEST_CREDIT - link.credit)
        try:
            request = read()
        except ProtocolError:
            return  # there is nobody to answer to
        answer = self._answer(request)
        named = [each for each in self._receivers if request.reply_to in (each.link.target_address, each.link.name)]
        receivers = named or self._receivers
        of_session = [each for each in receivers if each.link.session is link.session]
        for receiver in (of_session or receivers)[-1:]:
            receiver.respond(answer)


def claims_node(trust: Trust, credentials: Credentials) -> RequestNode:
    def answer(request: Request) -> bytes:
        audience, token = text(request.properties.get("name")), text(request.body)
        try:
            if text(request.properties.get("operation")) != "put-token" or not audience or token is None:
                put = cbs.parse_put_token(request)  # says what is wrong with it
                audience, token = put.audience, put.token
            trust.check_token(audience, token, time.time())
        except Unverifiable as error:
            properties = {"status-code": Int(UNAVAILABLE), "status-description": str(error)}
            return encode_response(request, properties, None)
        except ProtocolError as error:
            return cbs.encode_refused(request, error)
        credentials.has_token(audience, token)
        return cbs.encode_accepted(request)

    return RequestNode(answer)


def management_node() -> RequestNode:
    return RequestNode(lambda request: management.encode_failure(request, conditions.TIMEOUT, AWAY))


class Responses:
    """A client's receiver: sends settled responses, when there is credit."""

    def __init__(self, link: Link, gone: "Callable[[Responses], None]") -> None:
        self.link = link
        self._gone = gone
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._count = 0

    def respond(self, response: bytes) -> None:
        self._waiting.append(response)
        self.on_flow()

    def on_flow(self) -> None:
        link = self.link
        while self._waiting and not link.closed and link.credit > 0:
            self._count += 1
            link.send(self._count.to_bytes(16, "big"), self._waiting.popleft(), b"", 0, True)
        if link.drain and not link.closed:
            link.drained()

    def on_detached(self) -> None:
        self._gone(self)
