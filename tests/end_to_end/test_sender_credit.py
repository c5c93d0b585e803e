"""A client that sends never more than its credit is never left without, whatever becomes of its deliveries."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.codec import Described, UInt, ULong, encode
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DISPOSITION,
    FLOW,
    TRANSFER,
    RawPeer,
    batch,
    coordinator,
    message,
    performative,
)
from tests.end_to_end.raw_transactions import DECLARE, DECLARED, DISCHARGE, Coordinator, within

CONFIG = """
[amqp]
max_message_size_bytes = 1024

[[queues]]
name = "orders"

[[queues]]
name = "sessions"
requires_session = true

[[topics]]
name = "news"
"""
# More than the credit of any kind of link.
COUNT = 1500
MALFORMED = b"\x00\x53\x75\xff"
TOO_LARGE = message(bytes(5000))
UNKNOWN_TRANSACTION = b"never declared"
NODES = ("$cbs", "orders/$management", "$management")
ENTITIES = ("orders", "sessions", "news")
COORDINATOR = "coordinator"


@pytest.fixture(scope="module")
def credit_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("credit"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(credit_broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(credit_broker.amqp_port) as peer:
        yield peer


class Sender:
    """A link on which the peer keeps to its credit; what it says is written when that is used up, or at `flush`."""

    def __init__(self, peer: RawPeer, address: str) -> None:
        self._peer = peer
        self.address = address
        self._coordinator = Coordinator(peer) if address != COORDINATOR else None
        target = coordinator() if address == COORDINATOR else None
        self.handle = peer.attach(sender=True, address=address, target_=target)
        self._their_handle = peer.expect(ATTACH).fields[1]
        self._count = self._limit = 0
        self._said: list[bytes] = []
        self.transaction = self._coordinator.declare() if self._coordinator else b""

    def deliver(self, payload: bytes, *, settled: bool = False, aborted: bool = False, state: object = None) -> None:
        """One delivery, once there is credit for it; an aborted one takes two transfers."""
        if self._count >= self._limit:
            self._await_credit()
        self._count += 1
        number = self._peer.next_delivery_id
        self._peer.next_delivery_id += 1
        tag = number.to_bytes(8, "big")
        first = [UInt(self.handle), UInt(number), tag, UInt(0), settled, aborted, None, state]
        self._said.append(performative(0, TRANSFER, first, payload))
        if aborted:
            rest = [UInt(self.handle), None, None, None, settled, False, None, None, None, True]
            self._said.append(performative(0, TRANSFER, rest))

    def flush(self) -> None:
        said, self._said = self._said, []
        self._peer.send(b"".join(said))

    def _await_credit(self) -> None:
        self.flush()
        while self._count >= self._limit:
            fields = self._peer.expect(FLOW).fields
            if fields[4] == self._their_handle:
                self._limit = fields[5] + fields[6]
        self._peer.drop(DISPOSITION)

    def credit(self) -> int:
        """That of a link on which nothing was sent yet."""
        self._await_credit()
        return self._limit

    def limit_now(self) -> int:
        """As the broker says when it has read all that was said."""
        self._peer.flow(self.handle, delivery_count=self._count, echo=True)
        while True:
            fields = self._peer.expect(FLOW).fields
            if fields[4] == self._their_handle and fields[5] == self._count:
                self._limit = int(fields[5] + fields[6])
                return self._limit

    def answer(self, payload: bytes) -> int:
        """The state that a delivery with this payload is answered with."""
        self.deliver(payload)
        self.flush()
        number = self._peer.next_delivery_id - 1
        while True:
            fields = self._peer.expect(DISPOSITION).fields
            if fields[1] <= number <= (fields[2] or fields[1]):
                return int(fields[4].descriptor)


REQUEST = encode(Described(ULong(0x74), {"operation": "nothing that there is"})) + encode(Described(ULong(0x77), None))
DISCHARGE_UNKNOWN = encode(Described(ULong(0x77), Described(ULong(DISCHARGE), [UNKNOWN_TRANSACTION, False])))

WAYS: dict[str, Callable[[Sender], None]] = {
    "malformed": lambda sender: sender.deliver(MALFORMED),
    "malformed, settled": lambda sender: sender.deliver(MALFORMED, settled=True),
    "oversized": lambda sender: sender.deliver(TOO_LARGE),
    "oversized, settled": lambda sender: sender.deliver(TOO_LARGE, settled=True),
    "aborted": lambda sender: sender.deliver(message(b"half"), aborted=True),
    "aborted, settled": lambda sender: sender.deliver(message(b"half"), aborted=True, settled=True),
    "aborted, oversized": lambda sender: sender.deliver(TOO_LARGE, aborted=True),
}
IN_TRANSACTIONS: dict[str, Callable[[Sender], None]] = {
    "of an unknown transaction": lambda sender: sender.deliver(good(sender), state=within(UNKNOWN_TRANSACTION)),
    "of an unknown transaction, settled": lambda sender: sender.deliver(
        good(sender), state=within(UNKNOWN_TRANSACTION), settled=True
    ),
    "malformed, in a transaction": lambda sender: sender.deliver(MALFORMED, state=within(sender.transaction)),
    "malformed, in a transaction, settled": lambda sender: sender.deliver(
        MALFORMED, state=within(sender.transaction), settled=True
    ),
    "oversized, in a transaction": lambda sender: sender.deliver(TOO_LARGE, state=within(sender.transaction)),
    "aborted, in a transaction": lambda sender: sender.deliver(
        message(b"half"), state=within(sender.transaction), aborted=True
    ),
}
WITHOUT_A_SESSION: dict[str, Callable[[Sender], None]] = {
    "without a session": lambda sender: sender.deliver(message(b"body")),
    "without a session, settled": lambda sender: sender.deliver(message(b"body"), settled=True),
    "without a session, in a transaction": lambda sender: sender.deliver(
        message(b"body"), state=within(sender.transaction)
    ),
    "without a session, in a batch": lambda sender: sender.deliver(batch(message(b"body"))),
}
OF_COORDINATORS: dict[str, Callable[[Sender], None]] = {
    "a discharge of nothing": lambda sender: sender.deliver(DISCHARGE_UNKNOWN),
    "a discharge of nothing, settled": lambda sender: sender.deliver(DISCHARGE_UNKNOWN, settled=True),
    "a settled declare": lambda sender: sender.deliver(
        encode(Described(ULong(0x77), Described(ULong(DECLARE), [None]))), settled=True
    ),
}


def ways_on(address: str) -> dict[str, Callable[[Sender], None]]:
    if address == COORDINATOR:
        return WAYS | OF_COORDINATORS
    return WAYS | IN_TRANSACTIONS | (WITHOUT_A_SESSION if address == "sessions" else {})


def good(sender: Sender) -> bytes:
    return REQUEST if sender.address in NODES else message(b"body", properties=[None] * 10 + ["session"])


LINKS = (*ENTITIES, *NODES, COORDINATOR)
CASES = [(address, way) for address in LINKS for way in ways_on(address)]


def is_served(sender: Sender, address: str) -> bool:
    """One more delivery is answered as usual."""
    if address == COORDINATOR:
        return sender.answer(encode(Described(ULong(0x77), Described(ULong(DECLARE), [None])))) == DECLARED
    return sender.answer(good(sender)) == ACCEPTED


@pytest.mark.parametrize(("address", "way"), CASES)
def test_deliveries_that_fail_give_their_credit_back(peer: RawPeer, address: str, way: str) -> None:
    sender = Sender(peer, address)
    for _ in range(COUNT):
        ways_on(address)[way](sender)
    assert is_served(sender, address)


@pytest.mark.parametrize("address", LINKS)
def test_deliveries_that_fail_in_any_way_give_their_credit_back(peer: RawPeer, address: str) -> None:
    sender = Sender(peer, address)
    ways = [*ways_on(address).values()]
    chance = random.Random(4)
    for _ in range(COUNT):
        chance.choice(ways)(sender)
    assert is_served(sender, address)


@pytest.mark.parametrize("address", LINKS)
def test_deliveries_that_end_in_every_way_give_their_credit_back(peer: RawPeer, address: str) -> None:
    sender = Sender(peer, address)
    ways = [*ways_on(address).values(), lambda sender: is_served(sender, address)]
    chance = random.Random(4)
    for _ in range(COUNT):
        chance.choice(ways)(sender)
    assert is_served(sender, address)


@pytest.mark.parametrize("address", ["orders/$management", "$management", "$cbs"])
def test_many_requests_can_be_sent_at_once(peer: RawPeer, address: str) -> None:
    """JavaScript's SDK renews all locks that it got together in one moment, and gives up those without credit."""
    peer.attach(sender=True, address=address)
    peer.expect(ATTACH)
    assert peer.expect(FLOW).fields[6] == 1000


def test_what_waits_for_its_answer_has_its_credit(tmp_path: Path) -> None:
    """Credit is given back for what was refused at once, and not for what the worker has not answered."""
    with Broker(tmp_path, CONFIG, workers=1) as broker, RawPeer.connect(broker.amqp_port) as peer:
        sender = Sender(peer, "orders")
        credit = sender.credit()
        refused = credit // 2 + 1
        broker.worker().suspend()
        for _ in range(credit - refused):
            sender.deliver(message(b"body"))
        sender.flush()
        for _ in range(refused):
            sender.deliver(MALFORMED)
        sender.flush()
        assert sender.limit_now() == credit + refused
        broker.worker().resume()
        assert sender.answer(message(b"body")) == ACCEPTED
