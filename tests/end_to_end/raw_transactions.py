"""Transactions as raw peers say them (AMQP 1.0, 4; amqp.md 10)."""

from typing import Any

from protocol.codec import Described, ULong, encode
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DISPOSITION,
    FLOW,
    Frame,
    RawPeer,
    coordinator,
    error_of,
)

DECLARE, DISCHARGE = 0x31, 0x32
DECLARED, TRANSACTIONAL = 0x33, 0x34


def within(transaction: bytes, state: Described | None = None) -> Described:
    """The transactional-state; of an outcome it is made with that outcome."""
    return Described(ULong(TRANSACTIONAL), [transaction, state])


def answer_of(frame: Frame) -> str:
    """What a disposition answers: the condition of an error, or the name of the state."""
    state = frame.fields[4]
    names = {ACCEPTED: "accepted", DECLARED: "declared", TRANSACTIONAL: "in the transaction"}
    return names.get(state.descriptor) or error_of(frame)[0]


class Coordinator:
    """A link to the coordinator."""

    def __init__(self, peer: RawPeer) -> None:
        self._peer = peer
        self.handle = peer.attach(sender=True, target_=coordinator())
        peer.expect(ATTACH)
        peer.expect(FLOW)

    def say(self, kind: int, *fields: Any, settled: bool = False) -> None:
        body = Described(ULong(0x77), Described(ULong(kind), list(fields)))
        self._peer.transfer(encode(body), self.handle, settled=settled)

    def declare(self) -> bytes:
        self.say(DECLARE, None)
        state = self._peer.expect(DISPOSITION).fields[4]
        assert state.descriptor == DECLARED, state
        return bytes(state.value[0])

    def discharge(self, transaction: bytes, fail: bool = False) -> str:
        """The answer, as `answer_of` has it."""
        self.say(DISCHARGE, transaction, fail)
        return answer_of(self._peer.expect(DISPOSITION))
