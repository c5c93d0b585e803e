"""Requests that the sidecar answers itself, of which it could not take all."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from broker.pairing.sidecar import nodes
from broker.pairing.sidecar.nodes import REQUEST_CREDIT, management_node
from protocol.codec import Described, ULong, decode, encode
from protocol.nodes.request_message import HEAD_BYTES


@pytest.fixture(autouse=True)
def deliveries_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "forget", lambda delivery: None)


def ask(head: bytes) -> list[bytes]:
    """The answers to a request of which there is only the head."""
    node, answers = management_node(), []
    session = object()
    mine = SimpleNamespace(target_address="me", name="link", session=session)
    end: Any = SimpleNamespace(link=mine, respond=answers.append)
    node._receivers.append(end)
    link: Any = SimpleNamespace(head=head, session=session, credit=REQUEST_CREDIT, grant=lambda credit: None)
    delivery: Any = None
    node.on_refused(link, delivery, settled=True)
    return answers


def test_a_request_that_is_too_large_is_answered_as_others_are() -> None:
    sections = ((0x73, [UUID(int=7), None, None, None, "me"]), (0x74, {"operation": "x"}), (0x77, bytes(100_000)))
    request = b"".join(encode(Described(ULong(code), value)) for code, value in sections)
    [answer] = ask(request[:HEAD_BYTES])
    section, _ = decode(answer)
    assert section.value[5] == UUID(int=7)


@pytest.mark.parametrize("head", [b"", b"\x00\x53\x77\xb0\x00\x01\x00\x00", b"nonsense"])
def test_what_has_no_properties_is_not_answered(head: bytes) -> None:
    assert ask(head) == []
