"""What a disposition says holds for each delivery of its range, however the links of one session take turns.

.NET has all links of a client on one session if its transactions cross entities, and takes an answer to a declare for
the answer to a send if a range covers both.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    DISPOSITION,
    REJECTED,
    RELEASED,
    TRANSFER,
    Frame,
    RawPeer,
    message,
    outcome,
)
from tests.end_to_end.raw_transactions import DECLARE, DECLARED, DISCHARGE, TRANSACTIONAL, Coordinator, within
from tests.end_to_end.test_transactions_in_one_write import one_write

QUEUES = ("one", "two")
CONFIG = "partitions = 2\n" + "".join(f'[[queues]]\nname = "{name}"\n' for name in QUEUES)
UNKNOWN = b"0123456789abcdef"
ROUNDS = 12
CREDIT = 50  # as a coordinator grants, at least


@pytest.fixture(scope="module", params=["with the extension", "without"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "without":
            patch.setenv("PEEKLOCK_PURE", "1")
        with Broker(tmp_path_factory.mktemp("one-session"), CONFIG) as broker:
            yield broker


class Awaited(NamedTuple):
    """The only answer that a delivery may get: the link, the code of the state, and for one in a transaction its id."""

    link: int
    code: int
    transaction: bytes | None = None
    outcome: int | None = None


class Open(NamedTuple):
    transaction: bytes
    queue: int


class Session:
    def __init__(self, peer: RawPeer, chance: random.Random) -> None:
        self.peer = peer
        self.chance = chance
        self.senders = [peer.attach_sender(name) for name in QUEUES]
        self.control = [Coordinator(peer), Coordinator(peer)]
        self.receivers = [peer.attach_receiver(name) for name in QUEUES]
        self.awaited: dict[int, Awaited] = {}  # by the number of the delivery
        self.settled: dict[int, Awaited] = {}  # of the broker's deliveries
        self.got: list[tuple[int, Frame]] = []  # messages that were received, by the number of their queue
        self.received = [0, 0]  # on each receiver
        self.open: list[Open] = []
        self.declared = 0

    # -- what is said

    def declare(self) -> None:
        control = self.chance.choice(self.control)
        self._await(control.handle, DECLARED)
        control.say(DECLARE, None)

    def discharge(self) -> None:
        if not self.open:
            return
        ended = self.open.pop(self.chance.randrange(len(self.open)))
        control = self.chance.choice(self.control)
        self._await(control.handle, ACCEPTED)
        control.say(DISCHARGE, ended.transaction, self.chance.random() < 0.3)

    def send(self) -> None:
        queue = self.chance.randrange(2)
        self._await(self.senders[queue], ACCEPTED)
        self.peer.transfer(message(b"x"), self.senders[queue])

    def send_in(self) -> None:
        if not self.open:
            return
        transaction, queue = self.chance.choice(self.open)
        self._await(self.senders[queue], TRANSACTIONAL, transaction, ACCEPTED)
        self.peer.transfer(message(b"y"), self.senders[queue], state=within(transaction))

    def send_in_unknown(self) -> None:
        self._await(handle := self.chance.choice(self.senders), REJECTED)
        self.peer.transfer(message(b"z"), handle, state=within(UNKNOWN))

    def settle(self) -> None:
        if self.got:
            queue, frame = self.got.pop()
            code = self.chance.choice([ACCEPTED, RELEASED])
            self.settled[frame.fields[1]] = Awaited(self.receivers[queue], code)
            self.peer.settle(frame.fields[1], state=outcome(code))

    def settle_in(self) -> None:
        if not self.got or not (fitting := [each for each in self.open if each.queue == self.got[-1][0]]):
            return
        queue, frame = self.got.pop()
        transaction, _ = self.chance.choice(fitting)
        self.settled[frame.fields[1]] = Awaited(self.receivers[queue], TRANSACTIONAL, transaction, ACCEPTED)
        self.peer.settle(frame.fields[1], state=within(transaction, outcome(ACCEPTED)))

    def _await(self, link: int, code: int, transaction: bytes | None = None, within_it: int | None = None) -> None:
        self.awaited[self.peer.next_delivery_id] = Awaited(link, code, transaction, within_it)

    # -- what is answered

    def take(self) -> None:
        """All answers that are due, each checked against all that it is said of."""
        while self.awaited or self.settled:
            frame = self.peer.expect(DISPOSITION)
            role, first, last, settled, state = frame.fields[:5]
            last = first if last is None else last
            due = self.awaited if role else self.settled
            assert settled
            answered = {due.pop(number) for number in range(first, last + 1)}  # each is due, so each is answered once
            assert len(answered) == 1, (first, last, answered)
            [awaited] = answered
            assert state.descriptor == awaited.code, (state, awaited)
            if awaited.code == TRANSACTIONAL:
                assert (state.value[0], state.value[1].descriptor) == (awaited.transaction, awaited.outcome)
            elif awaited.code == DECLARED:
                assert first == last, "two transactions of one id"
                self.open.append(Open(bytes(state.value[0]), self.chance.randrange(2)))
                self.declared += 1

    def receive(self) -> None:
        for queue, handle in enumerate(self.receivers):
            self.peer.transfer(message(b"in"), self.senders[queue])
            self.peer.expect(DISPOSITION)
            self._receive(queue, handle)

    def _receive(self, queue: int, handle: int) -> None:
        self.peer.flow(handle, 1, delivery_count=self.received[queue])
        self.received[queue] += 1
        self.got.append((queue, self.peer.expect(TRANSFER)))


ACTIONS: list[Any] = [
    *[Session.declare] * 4,
    *[Session.send] * 4,
    *[Session.send_in] * 8,
    Session.send_in_unknown,
    *[Session.discharge] * 2,
    *[Session.settle] * 2,
    *[Session.settle_in] * 3,
]


@pytest.mark.parametrize("seed", range(6))
def test_no_range_covers_a_delivery_of_another_link_or_outcome(broker, seed):
    """All of a round comes in one write, so the answers gather as far as they may."""
    with RawPeer.connect(broker.amqp_port) as peer:
        session = Session(peer, random.Random(seed))
        for _ in range(ROUNDS):
            for _ in range(3):
                session.receive()
            with one_write(peer):
                for action in session.chance.choices(ACTIONS, k=session.chance.randrange(1, CREDIT)):
                    action(session)
            session.take()
        assert session.declared > ROUNDS
        peer.nothing_more(DISPOSITION)


def test_declares_between_sends_have_answers_of_their_own(broker):
    """The usual case of .NET: many threads, each with a transaction of its own."""
    with RawPeer.connect(broker.amqp_port) as peer:
        session = Session(peer, random.Random(0))
        with one_write(peer):
            for _ in range(20):
                session.declare()
                session.send()
        session.take()
        assert session.declared == 20
        with one_write(peer):
            for _ in range(20):
                session.send_in()
                session.declare()
        session.take()
        assert session.declared == 40
