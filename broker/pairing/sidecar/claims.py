"""The $cbs node while the primary is away: tokens are taken that are known to be good (amqp.md 2)."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from broker.pairing.sidecar.credentials import Credentials
from broker.pairing.sidecar.trust import Trust, Unverifiable
from protocol.codec import Int
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, settle
from protocol.engine.links import Link
from protocol.errors import ProtocolError
from protocol.nodes import cbs
from protocol.nodes.request_message import Request, encode_response, parse, text

REQUEST_CREDIT: Final = 100
MAX_WAITING: Final = 200
MAX_REQUEST_BYTES: Final = 64 << 10
UNAVAILABLE: Final = 503


class ClaimsNode:
    """The links of one connection to $cbs. Answers go to the receiver that a request names, or to the last one."""

    def __init__(self, trust: Trust, credentials: Credentials) -> None:
        self._trust = trust
        self._credentials = credentials
        self._answers: list[ClaimsAnswers] = []

    def attach(self, link: Link) -> None:
        if link.is_sender:
            answers = link.context = ClaimsAnswers(link, self._answers.remove)
            self._answers.append(answers)
            link.accept()
        else:
            link.context = self
            link.accept(MAX_REQUEST_BYTES, REQUEST_CREDIT)

    def on_message(self, link: Link, delivery: Delivery, payload: bytes, settled: bool) -> None:
        if settled:
            forget(delivery)
        else:
            settle(delivery, ACCEPTED)
        link.grant(REQUEST_CREDIT - link.credit)
        try:
            request = parse(payload)
        except ProtocolError:
            return  # there is nobody to answer to
        answer = self._answer(request)
        named = [each for each in self._answers if request.reply_to in (each.link.target_address, each.link.name)]
        for receiver in (named or self._answers)[-1:]:
            receiver.respond(answer)

    def _answer(self, request: Request) -> bytes:
        audience, token = text(request.properties.get("name")), text(request.body)
        try:
            if text(request.properties.get("operation")) != "put-token" or not audience or token is None:
                put = cbs.parse_put_token(request)  # says what is wrong with it
                audience, token = put.audience, put.token
            self._trust.check_token(audience, token, time.time())
        except Unverifiable as error:
            properties = {"status-code": Int(UNAVAILABLE), "status-description": str(error)}
            return encode_response(request, properties, None)
        except ProtocolError as error:
            return cbs.encode_refused(request, error)
        self._credentials.has_token(audience, token)
        return cbs.encode_accepted(request)


class ClaimsAnswers:
    """A client's receiver on $cbs: sends settled responses, when there is credit."""

    def __init__(self, link: Link, gone: "Callable[[ClaimsAnswers], None]") -> None:
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
