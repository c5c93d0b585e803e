"""Requests of a raw peer to the nodes $cbs and $management."""

import time
from typing import Any, NamedTuple
from uuid import UUID

from protocol.codec import Described, ULong, decode, encode
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import TRANSFER, RawPeer
from tests.patience import PATIENCE_S


class Response(NamedTuple):
    properties: dict[str, Any]
    body: Any

    @property
    def status(self) -> int:
        return int(self.properties.get("status-code") or self.properties["statusCode"])

    @property
    def description(self) -> str:
        return str(self.properties.get("status-description", self.properties.get("statusDescription")))

    @property
    def condition(self) -> str:
        return str(self.properties.get("errorCondition"))


_STATUS = {"status-code", "statusCode"}


def _response_in(payload: bytes) -> Response:
    properties: dict[str, Any] = {}
    body = None
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        if section.descriptor == 0x74:
            properties = dict(section.value)
        elif section.descriptor == 0x77:
            body = section.value
    return Response(properties, body)


class Node:
    """A pair of links to one node. Requests are numbered; their responses come in any order."""

    def __init__(self, peer: RawPeer, address: str, credit: int = 100, *, responses_on: int = 0) -> None:
        """`responses_on`: the channel of the session that has the link for responses."""
        self._peer = peer
        self._number = 0
        self._reply_to = [None, None, None, "here"] if responses_on else []
        self.receiver = peer.attach_receiver(address, credit, channel=responses_on)
        self.sender = peer.attach_sender(address)

    def say(self, operation: Any, body: Any = None, *, state: Any = None, **properties: Any) -> None:
        """Send a request; names of properties are given with _ for -. `state` is the transfer's."""
        self._number += 1
        named = {name.replace("_", "-"): value for name, value in properties.items()}
        request = b"".join(
            encode(Described(ULong(code), section))
            for code, section in (
                (0x73, [UUID(int=self._number), *self._reply_to]),
                (0x74, {"operation": operation, **named}),
                (0x77, body),
            )
        )
        self._peer.transfer_in_parts(request, self.sender, settled=True, state=state)

    def response(self, timeout_s: float = PATIENCE_S) -> Response:
        """The next response. Messages that come before it, late, on other links, are kept for those who expect them."""
        messages = []
        while True:
            frame = self._peer.expect(TRANSFER, timeout_s)
            payload = frame.payload
            while len(frame.fields) > 5 and frame.fields[5]:  # more of it comes
                frame = self._peer.expect(TRANSFER, timeout_s)
                payload += frame.payload
            response = _response_in(payload)
            if response.properties.keys() & _STATUS:
                self._peer.keep(messages)
                return response
            messages.append(frame._replace(payload=payload))

    def ask(self, operation: Any, body: Any = None, **properties: Any) -> Response:
        self.say(operation, body, **properties)
        return self.response()


def token_for(path: str, *, key_name: str = KEY_NAME, key: str = KEY, valid_s: int = 3600) -> str:
    return generate(f"sb://localhost/{path}", key_name, key, int(time.time()) + valid_s)


def put_token(node: Node, path: str, token: Any, origin: str = "sb://localhost/") -> Response:
    return node.ask("put-token", token, type="servicebus.windows.net:sastoken", name=f"{origin}{path}")
