"""The nodes for requests while the primary is away, without links of a real connection."""

from types import SimpleNamespace
from typing import Any

import pytest

from broker.pairing.sidecar import nodes
from broker.pairing.sidecar.nodes import RequestNode


def a_link(session: int, *, is_sender: bool, target: str | None = None) -> Any:
    sent: list[bytes] = []
    return SimpleNamespace(
        session=session,
        is_sender=is_sender,
        name=f"link-{session}-{is_sender}",
        target_address=target,
        credit=10,
        closed=False,
        drain=False,
        accept=lambda *_: None,
        grant=lambda credit: None,
        send=lambda tag, payload, *_: sent.append(payload),
        sent=sent,
    )


@pytest.mark.parametrize("reply_to", ["answers", "unknown"])
def test_an_answer_goes_to_the_session_that_asked(monkeypatch: pytest.MonkeyPatch, reply_to: str) -> None:
    monkeypatch.setattr(nodes, "parse", lambda payload: SimpleNamespace(reply_to=reply_to))
    monkeypatch.setattr(nodes, "forget", lambda delivery: None)
    node = RequestNode(lambda request: b"answer")
    receivers = [a_link(session, is_sender=True, target="answers") for session in range(3)]
    senders = [a_link(session, is_sender=False) for session in range(4)]
    for link in (*receivers, *senders):
        node.attach(link)
    delivery: Any = None
    for asking, answered in ((1, 1), (0, 0), (2, 2), (3, 2)):  # the last session has no link for answers
        node.on_message(senders[asking], delivery, b"", True)
        assert [len(link.sent) for link in receivers] == [int(session == answered) for session in range(3)]
        receivers[answered].sent.clear()
