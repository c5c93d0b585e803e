"""What a long connection, or many short ones, leave in memory: nothing."""

import gc

import pytest

from protocol.codec import Described, Symbol, UInt, ULong
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BEGIN,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    REJECTED,
    TRANSFER,
    message,
    outcome,
    performative,
    source,
    target,
)
from tests.fuzz.engine_cases import Server, resident_bytes
from tests.fuzz.mutations import session

OPENED = b"".join(session("orders")[:3])
ROUNDS = 2000
MOST_BYTES_A_ROUND = 200  # a link or a delivery takes more


def attach(handle: int, *, sender: bool = True, address: str | None = "orders", channel: int = 0) -> bytes:
    termini = (source("here"), target(address)) if sender else (source(address), target("here"))
    fields = [f"link-{handle}", UInt(handle), not sender, None, None, *termini, None, None, UInt(0)]
    return performative(channel, ATTACH, fields)


def detach(handle: int, closed: bool = True) -> bytes:
    return performative(0, DETACH, [UInt(handle), closed])


def begin(channel: int) -> bytes:
    return performative(channel, BEGIN, [None, UInt(0), UInt(1000), UInt(1000)])


def transfer(number: int, payload: bytes, settled: bool = False) -> bytes:
    tag = number.to_bytes(8, "big")
    return performative(0, TRANSFER, [UInt(0), UInt(number), tag, UInt(0), settled, False], payload)


def receive(number: int, state: Described) -> bytes:
    """Credit for one more, and the outcome of the one before."""
    flow = performative(0, FLOW, [UInt(number), UInt(9), UInt(0), UInt(9), UInt(0), UInt(number), UInt(1)])
    settle = performative(0, DISPOSITION, [True, UInt(number - 1), None, False, state]) if number else b""
    return flow + settle


ERROR = Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), "text", {"DeadLetterReason": "why"}])
ROUND = {
    "links": (b"", lambda _: attach(0) + detach(0)),
    "links that are not closed": (b"", lambda _: attach(0, sender=False) + detach(0, closed=False)),
    "links with other names": (b"", lambda number: attach(number) + detach(number)),
    "refused links": (b"", lambda number: attach(number, address=None) + detach(number)),
    "sessions": (b"", lambda _: begin(1) + performative(1, END, [])),
    "sessions with links": (b"", lambda _: begin(1) + attach(0, channel=1) + performative(1, END, [])),
    "messages": (attach(0), lambda number: transfer(number, message(b"body"))),
    "settled messages": (attach(0), lambda number: transfer(number, message(b"body"), settled=True)),
    "rejected messages": (attach(0), lambda number: transfer(number, b"nonsense")),
    "accepted deliveries": (attach(0, sender=False), lambda number: receive(number, outcome(ACCEPTED))),
    "rejected deliveries": (attach(0, sender=False), lambda number: receive(number, outcome(REJECTED, ERROR))),
}


@pytest.mark.parametrize(("before", "round_"), ROUND.values(), ids=ROUND)
def test_a_connection_keeps_nothing_of_what_has_ended(before, round_):
    server = Server()
    server.engine.push(OPENED + before)
    server.engine.pull()

    def say(numbers: range) -> int:
        for number in numbers:
            server.engine.push(round_(number))
            server.engine.pull()
        gc.collect()
        return resident_bytes()

    before_rounds = say(range(ROUNDS))
    for begin_at in range(ROUNDS, 4 * ROUNDS, ROUNDS):  # what leaks does so each time; the test's process may grow once
        after_rounds = say(range(begin_at, begin_at + ROUNDS))
        grown, before_rounds = after_rounds - before_rounds, after_rounds
        if grown < ROUNDS * MOST_BYTES_A_ROUND:
            break
    assert grown < ROUNDS * MOST_BYTES_A_ROUND
    server.engine.free()


def test_a_connection_that_has_ended_gives_everything_back():
    whole = b"".join(session("orders"))

    def connect(count: int) -> int:
        for _ in range(count):
            server = Server()
            server.engine.push(whole)
            server.engine.pull()
            server.engine.free()
        gc.collect()
        return resident_bytes()

    connect(300)
    grown = -connect(300) + connect(1000)
    assert grown < 1000 * 1000  # 1 KB each; one that is kept takes 8
