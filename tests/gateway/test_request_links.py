"""Requests that wait, while many others or large answers are under way, and no burden when their link has ended."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from broker.gateway.answer_room import ANSWER_BYTES_AT_ONCE, AnswerRoom
from broker.gateway.links.intake import OVERRUN
from broker.gateway.nodes import request_links
from broker.gateway.nodes.request_links import REQUESTS_AT_ONCE, RequestLink

ROOM = ANSWER_BYTES_AT_ONCE


def a_connection() -> Any:
    return SimpleNamespace(
        overrun=set(),
        active=OrderedDict(),
        flush=lambda: None,
        response_link=lambda *_: None,
        answer_room=AnswerRoom(),
        is_stalled=False,
    )


class Requests(RequestLink):
    """Answers when it is told to, or at once. A request is as many bytes of answer as its payload says."""

    def __init__(self, host: Any, *, at_once: bool = False) -> None:
        link = SimpleNamespace(credit=0, closed=False, grant=lambda credit: None)
        self.host = host
        address = SimpleNamespace(node="$management", resource="q")
        super().__init__(self.host, link, address)  # type: ignore[arg-type] # as much of them as it uses
        self.at_once = at_once
        self.answers: list[Any] = []

    def answer_bytes(self, request: Any) -> int:
        return int(request.size_bytes)

    def handle(self, request: Any, answer: Any) -> None:
        self.answers.append(answer)
        if self.at_once:
            answer(b"")


@pytest.fixture(autouse=True)
def requests_without_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(payload: bytes) -> Any:
        return SimpleNamespace(reply_to=None, size_bytes=int.from_bytes(payload, "big"))

    monkeypatch.setattr(request_links, "parse_request", parsed)
    monkeypatch.setattr(request_links, "transaction_of", lambda delivery: None)
    monkeypatch.setattr(request_links, "forget", lambda delivery: None)


@pytest.fixture
def requests() -> Requests:
    return Requests(a_connection())


def ask(requests: Requests, count: int, size_bytes: int = 0) -> None:
    for _ in range(count):
        requests.on_message(None, size_bytes.to_bytes(8, "big"), False, True, 0)


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


def test_requests_with_large_answers_wait_for_room(requests: Requests) -> None:
    ask(requests, 4, ROOM // 3 + 1)
    assert len(requests.answers) == 2
    assert requests.waiting == 4
    requests.answers[1](b"")
    assert len(requests.answers) == 3
    requests.answers[0](b"")
    assert len(requests.answers) == 4
    for answer in requests.answers[2:]:
        answer(b"")
    assert requests.waiting == 0


def test_one_request_is_done_however_large_its_answer_may_be(requests: Requests) -> None:
    ask(requests, 2, 2 * ROOM)
    assert len(requests.answers) == 1
    requests.answers[0](b"")
    assert len(requests.answers) == 2


def test_requests_of_a_link_are_begun_in_their_order(requests: Requests) -> None:
    ask(requests, 1, ROOM)
    ask(requests, 1, 1)
    ask(requests, 1)
    assert len(requests.answers) == 1
    requests.answers[0](b"")
    assert len(requests.answers) == 3


def test_links_of_a_connection_get_room_in_turn() -> None:
    host = a_connection()
    first, second, third, short = (Requests(host) for _ in range(4))
    ask(first, 2, 2 * ROOM // 3)
    ask(second, 1, 3 * ROOM // 4)
    ask(third, 5, 1)  # there would be room, but then the others might wait without end
    ask(short, 3)
    assert [len(each.answers) for each in (first, second, third, short)] == [1, 0, 0, 3]
    first.answers[0](b"")
    assert [len(each.answers) for each in (first, second, third)] == [2, 0, 0]
    first.answers[1](b"")
    assert [len(each.answers) for each in (first, second, third)] == [2, 1, 5]


def test_a_client_that_does_not_read_gets_no_large_answers() -> None:
    host = a_connection()
    large, short = Requests(host), Requests(host)
    host.is_stalled = True
    ask(large, 3, ROOM // 8)
    ask(short, 3)
    assert (len(large.answers), len(short.answers)) == (0, 3)
    host.answer_room.go_on()
    assert large.answers == []
    host.is_stalled = False
    host.answer_room.go_on()
    assert len(large.answers) == 3


def test_a_link_that_ended_while_it_waits_is_in_nobodys_way() -> None:
    host = a_connection()
    busy, ended, other = (Requests(host) for _ in range(3))
    ask(busy, 1, ROOM)
    ask(ended, 1, ROOM // 8)
    ask(other, 1, ROOM // 8)
    ended.on_detach()
    busy.answers[0](b"")
    assert (len(ended.answers), len(other.answers)) == (0, 1)


def test_any_number_of_waiting_requests_may_be_answered_at_once() -> None:
    host = a_connection()
    busy, others = Requests(host), [Requests(host, at_once=True) for _ in range(3)]
    ask(busy, 1, ROOM)
    for each in others:
        ask(each, 2000, ROOM // 8)
    busy.answers[0](b"")
    assert [len(each.answers) for each in others] == [2000] * 3
    assert not host.answer_room.waiting
