"""Requests that came while many are being done: done later, and no burden when their link has ended."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from broker.gateway.links.intake import OVERRUN
from broker.gateway.nodes import request_links
from broker.gateway.nodes.request_links import REQUESTS_AT_ONCE, RequestLink


class Requests(RequestLink):
    """Answers when it is told to."""

    def __init__(self) -> None:
        link = SimpleNamespace(credit=0, closed=False, grant=lambda credit: None)
        self.host = SimpleNamespace(
            overrun=set(), active=OrderedDict(), flush=lambda: None, response_link=lambda *_: None
        )
        address = SimpleNamespace(node="$management", resource="q")
        super().__init__(self.host, link, address)  # type: ignore[arg-type] # as much of them as it uses
        self.answers: list[Any] = []

    def handle(self, request: Any, answer: Any) -> None:
        self.answers.append(answer)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(request_links, "parse_request", lambda payload: SimpleNamespace(reply_to=None))
    monkeypatch.setattr(request_links, "transaction_of", lambda delivery: None)
    monkeypatch.setattr(request_links, "forget", lambda delivery: None)
    return Requests()


def ask(requests: Requests, count: int) -> None:
    for _ in range(count):
        requests.on_message(None, b"", False, True, 0)


def test_a_link_does_so_many_requests_at_once_and_no_more(requests: Requests) -> None:
    ask(requests, REQUESTS_AT_ONCE + 3)
    assert len(requests.answers) == REQUESTS_AT_ONCE
    requests.answers[0](b"")
    assert len(requests.answers) == REQUESTS_AT_ONCE + 1
    for answer in requests.answers[1:3]:
        answer(b"")
    assert len(requests.answers) == REQUESTS_AT_ONCE + 3


def test_postponed_requests_of_a_link_that_ended_are_not_waited_for(requests: Requests) -> None:
    ask(requests, (OVERRUN + 1) * REQUESTS_AT_ONCE)
    requests.post()
    assert requests.is_overrun
    assert requests in requests.host.overrun
    requests.on_detach()
    assert not requests.is_overrun
