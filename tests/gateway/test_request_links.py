"""Requests that wait, while many others or large answers are under way, and no burden when their link has ended."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from broker.gateway.limits.large_answers import AT_ONCE, LargeAnswers
from broker.gateway.links.intake import OVERRUN
from broker.gateway.nodes import request_links
from broker.gateway.nodes.request_links import REQUESTS_AT_ONCE, RequestLink


def a_connection() -> Any:
    return SimpleNamespace(
        overrun=set(),
        active=OrderedDict(),
        flush=lambda: None,
        response_link=lambda *_: None,
        large_answers=LargeAnswers(),
        is_stalled=False,
        gateway=SimpleNamespace(router=SimpleNamespace(refuse_waiting=lambda link: None)),
    )


class Requests(RequestLink):
    """Answers when it is told to, or at once. The payload says whether an answer is large."""

    def __init__(self, host: Any, *, at_once: bool = False) -> None:
        link = SimpleNamespace(credit=0, closed=False, grant=lambda credit: None)
        self.host = host
        address = SimpleNamespace(node="$management", resource="q")
        super().__init__(self.host, link, address)  # type: ignore[arg-type] # as much of them as it uses
        self.at_once = at_once
        self.answers: list[Any] = []

    def is_large(self, request: Any) -> bool:
        return bool(request.is_large)

    def handle(self, request: Any, answer: Any) -> None:
        self.answers.append(answer)
        if self.at_once:
            answer(b"")


@pytest.fixture(autouse=True)
def requests_without_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(payload: bytes) -> Any:
        return SimpleNamespace(reply_to=None, is_large=payload == b"large")

    monkeypatch.setattr(request_links, "parse_request", parsed)
    monkeypatch.setattr(request_links, "transaction_of", lambda delivery: None)
    monkeypatch.setattr(request_links, "forget", lambda delivery: None)


@pytest.fixture
def requests() -> Requests:
    return Requests(a_connection())


def ask(requests: Requests, count: int, *, large: bool = False) -> None:
    for _ in range(count):
        requests.on_message(None, b"large" if large else b"", False, True, 0)


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


def begun(*links: Requests) -> list[int]:
    return [len(each.answers) for each in links]


def test_requests_with_large_answers_wait_for_room(requests: Requests) -> None:
    ask(requests, AT_ONCE + 2, large=True)
    assert begun(requests) == [AT_ONCE]
    assert requests.waiting == AT_ONCE + 2
    requests.answers[1](b"")
    assert begun(requests) == [AT_ONCE + 1]
    requests.answers[0](b"")
    assert begun(requests) == [AT_ONCE + 2]
    for answer in requests.answers[2:]:
        answer(b"")
    assert requests.waiting == 0


def test_requests_of_a_link_are_begun_in_their_order(requests: Requests) -> None:
    ask(requests, AT_ONCE, large=True)
    ask(requests, 1, large=True)
    ask(requests, 1)
    assert begun(requests) == [AT_ONCE]
    requests.answers[0](b"")
    assert begun(requests) == [AT_ONCE + 2]


def test_links_of_a_connection_get_room_in_turn() -> None:
    host = a_connection()
    first, second, third, short = (Requests(host) for _ in range(4))
    ask(first, AT_ONCE + 2, large=True)
    ask(second, 2, large=True)
    ask(third, 1, large=True)
    ask(short, 3)
    assert begun(first, second, third, short) == [AT_ONCE, 0, 0, 3]
    for at, expected in enumerate([[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1]]):
        first.answers[at](b"")
        assert begun(first, second, third) == [AT_ONCE + expected[0], *expected[1:]]


def test_a_client_that_does_not_read_gets_no_large_answers() -> None:
    host = a_connection()
    large, short = Requests(host), Requests(host)
    host.is_stalled = True
    ask(large, 3, large=True)
    ask(short, 3)
    assert begun(large, short) == [0, 3]
    host.large_answers.go_on()
    assert begun(large) == [0]
    host.is_stalled = False
    host.large_answers.go_on()
    assert begun(large) == [3]


def test_a_link_that_ended_while_it_waits_is_in_nobodys_way() -> None:
    host = a_connection()
    busy, ended, other = (Requests(host) for _ in range(3))
    ask(busy, AT_ONCE, large=True)
    ask(ended, 1, large=True)
    ask(other, 1, large=True)
    ended.on_detach()
    busy.answers[0](b"")
    assert begun(ended, other) == [0, 1]


def test_any_number_of_waiting_requests_may_be_answered_at_once() -> None:
    host = a_connection()
    busy, others = Requests(host), [Requests(host, at_once=True) for _ in range(3)]
    ask(busy, AT_ONCE, large=True)
    for each in others:
        ask(each, 2000, large=True)
    busy.answers[0](b"")
    assert begun(*others) == [2000] * 3
    assert [each.waiting for each in others] == [0] * 3


def test_a_large_answer_is_no_part_of_a_transaction(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(requests, AT_ONCE, large=True)
    monkeypatch.setattr(request_links, "transaction_of", lambda delivery: b"t")
    requests.host.transactions = SimpleNamespace(find=lambda transaction_id: "t")
    ask(requests, 1, large=True)
    assert begun(requests) == [AT_ONCE]
    assert requests.transaction is None
    ask(requests, 1)
    assert begun(requests) == [AT_ONCE + 1]
