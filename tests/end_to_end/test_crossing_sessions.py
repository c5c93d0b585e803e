"""What a session may use whose first link is a coordinator's: .NET's and Java's cross-entity transactions.

Where entities lie makes no difference, so each test that could tell runs with entities of one partition and of several.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest

from broker.catalog.catalog import home_partition
from protocol import conditions
from protocol.codec import Array, Described, Symbol, Timestamp, UInt, ULong
from protocol.lock_tokens import uuid_of
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    TRANSFER,
    Frame,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import Coordinator, answer_of, within
from tests.pairing.conftest import set_status

PARTITIONS = 4  # on two workers: 0 and 2, 1 and 3
_NAMES = [f"queue-{number}" for number in range(60)]
_BY_HOME = {home: [name for name in _NAMES if home_partition(name, PARTITIONS) == home] for home in range(PARTITIONS)}
HERE, BESIDE = _BY_HOME[0][:2]
NEAR, FAR, FARTHER = (_BY_HOME[home][0] for home in (2, 1, 3))
OTHERS = [BESIDE, NEAR, FAR, FARTHER]
CONFIG = (
    f"partitions = {PARTITIONS}\n"
    + "".join(f'[[queues]]\nname = "{name}"\nlock_duration_ms = 60000\n' for name in (HERE, *OTHERS))
    + """
[[queues]]
name = "shut"

[[queues]]
name = "in-sessions"
requires_session = true

[[queues]]
name = "also-in-sessions"
requires_session = true

[[queues]]
name = "parted"
enable_partitioning = true

[[queues]]
name = "parted-too"
enable_partitioning = true

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "one"

  [[topics.subscriptions]]
  name = "two"
"""
)
FILTER = Symbol("com.microsoft:session-filter")
AZURE = {Symbol("user-agent"): "azsdk-net-Messaging.ServiceBus/7.21.0 (.NET 10.0.0; Linux)"}
ANOTHER = "Local transactions cannot span multiple top-level entities such as queue or topic."
WITHOUT = "Local transactions cannot span multiple entities or partitions."


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("crossing-sessions"), CONFIG, workers=2) as broker:
        yield broker


class Client(RawPeer):
    """One session, whose first link is a coordinator's that never declares; the second one does, as .NET has it."""

    def __init__(self, port: int, **options: Any) -> None:
        super().__init__(port, **options)
        self.control: Coordinator | None = None

    def cross(self) -> None:
        Coordinator(self)

    def declare(self) -> bytes:
        if self.control is None:
            self.control = Coordinator(self)
        return self.control.declare()

    def commit(self, transaction: bytes, fail: bool = False) -> str:
        assert self.control is not None
        return self.control.discharge(transaction, fail)

    def post(self, handle: int, text: bytes, transaction: bytes | None = None, **named: Any) -> str:
        """The answer to a message, as `answer_of` has it."""
        state = None if transaction is None else within(transaction)
        self.transfer(message(text, **named), handle, state=state)
        return answer_of(self.expect(DISPOSITION))

    def complete(self, frame: Frame, transaction: bytes) -> str:
        self.settle(frame.fields[1], state=within(transaction, outcome(ACCEPTED)))
        return answer_of(self.expect(DISPOSITION))

    def take(self, handle: int) -> Frame:
        self.flow(handle, 1)
        return self.expect(TRANSFER)

    def complete_by_token(self, frame: Frame) -> None:
        tokens = Array(UUID, (uuid_of(bytes(frame.fields[2])),))
        body = {"disposition-status": "completed", "lock-tokens": tokens}
        assert Node(self, f"{HERE}/$management").ask("com.microsoft:update-disposition", body).status == 200

    def ask_session(self, queue: str, wait_ms: int) -> int:
        filters = {FILTER: Described(ULong(0x137000000C), None)}
        properties = {Symbol("com.microsoft:timeout"): UInt(wait_ms)}
        return self.attach(sender=False, source_=source(queue, filters=filters), properties=properties)


@pytest.fixture
def azure(broker: Broker) -> Iterator[Client]:
    with Client.connect(broker.amqp_port, properties=AZURE) as client:
        client.cross()
        yield client


@pytest.fixture
def another(broker: Broker) -> Iterator[Client]:
    """A client that is none of Azure's SDKs, such as Qpid JMS with a transacted session."""
    with Client.connect(broker.amqp_port) as client:
        client.cross()
        yield client


def filled(broker: Broker, queue: str, *texts: bytes, **named: Any) -> None:
    with Client.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender(queue)
        for text in texts:
            assert peer.post(sender, text, **named) == "accepted"


def bodies(broker: Broker, queue: str, count: int, within_s: float = 0.2) -> list[bytes]:
    """What is there, which is deleted; `count` are waited for."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(queue, credit=count + 1, settled=True)
        found = [body_of(peer.expect(TRANSFER).payload) for _ in range(count)]
        peer.nothing_more(TRANSFER, within_s)
        return found


def refused(peer: RawPeer) -> None:
    condition, text = peer.refusal()
    assert condition == conditions.NOT_ALLOWED
    assert text.startswith(f"{ANOTHER} TrackingId:")


def attached(peer: RawPeer) -> None:
    frame = peer.expect(ATTACH)
    assert None not in frame.fields[5:7], peer.expect(DETACH)


# -- which entity the session is pinned to


PINS: dict[str, Callable[[Client], object]] = {
    "a sender": lambda client: client.attach_sender(HERE),
    "a receiver": lambda client: client.attach_receiver(HERE),
    "a pair to its node": lambda client: Node(client, f"{HERE}/$management"),
}


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("other", [BESIDE, FAR])
def test_the_first_entity_is_the_only_one_that_is_received_from(azure, pin, other):
    PINS[pin](azure)
    for address in (other, f"{other}/$management", f"{other}/$DeadLetterQueue"):
        azure.attach(sender=False, address=address)
        refused(azure)
    azure.ask_session("in-sessions", 0)
    refused(azure)
    azure.attach_sender(other)  # the session goes on, pinned as before
    azure.attach_sender(f"{other}/$management")
    azure.attach_receiver(HERE)
    azure.attach_receiver(f"{HERE}/$DeadLetterQueue")
    azure.attach_receiver(HERE.upper())
    Node(azure, f"{HERE}/$management")


@pytest.mark.parametrize("first", ["news", "news/Subscriptions/one", "news/Subscriptions/two/$DeadLetterQueue"])
def test_a_topic_and_its_subscriptions_are_one_entity(azure, first):
    if first == "news":
        azure.attach_sender("news")
    else:
        azure.attach_receiver(first)
    azure.attach_sender("news")
    azure.attach_receiver("news/Subscriptions/two")
    azure.attach_receiver("news/Subscriptions/one/$DeadLetterQueue")
    azure.attach(sender=False, address=HERE)
    refused(azure)


def test_an_attach_that_is_refused_pins_nothing(azure):
    for address in ("there is no such entity", "in-sessions"):
        azure.attach(sender=False, address=address)
        azure.refusal()
    azure.attach_receiver(HERE)


def test_it_is_pinned_while_a_session_is_waited_for_and_not_if_there_is_none(azure):
    azure.ask_session("in-sessions", 1500)
    azure.attach(sender=False, address=HERE)
    refused(azure)
    assert azure.refusal()[0] == conditions.TIMEOUT
    azure.attach_receiver(HERE)


def test_a_session_that_is_given_pins_beyond_the_end_of_its_link(azure, broker):
    filled(broker, "in-sessions", b"x", properties=[None] * 10 + ["s"])
    handle = azure.ask_session("in-sessions", 1000)
    attached(azure)
    azure.detach(handle)
    azure.expect(DETACH)
    azure.attach(sender=False, address=HERE)
    refused(azure)
    with Client.connect(broker.amqp_port) as peer:
        Node(peer, "in-sessions/$management").ask("peeklock:purge", {})


@pytest.mark.parametrize("first", [True, False])
def test_the_pin_stays_when_its_link_is_gone(azure, first):
    handle = azure.attach_receiver(HERE) if first else azure.attach_sender(HERE)
    azure.detach(handle)
    azure.expect(DETACH)
    azure.attach(sender=False, address=BESIDE)
    refused(azure)


def test_another_session_of_the_connection_is_free(azure):
    azure.attach_receiver(HERE)
    azure.begin(1)
    azure.attach_receiver(FAR, channel=1)
    azure.attach_receiver(BESIDE, channel=1)


def test_a_session_whose_first_link_is_another_is_not_pinned(broker):
    with Client.connect(broker.amqp_port, properties=AZURE) as client:
        client.detach(client.attach_sender(HERE))
        client.expect(DETACH)
        client.cross()
        for name in (HERE, BESIDE, FAR):
            client.attach_receiver(name)


def test_links_to_cbs_pin_nothing_and_are_not_refused(azure):
    Node(azure, "$cbs")
    azure.attach_receiver(HERE)


def test_of_a_client_that_is_no_sdk_of_azure_only_receivers_pin_and_only_while_they_are_there(another):
    for name in (FAR, BESIDE):
        another.attach_sender(name)
    handle = another.attach_receiver(HERE)
    another.attach(sender=False, address=FAR)
    refused(another)
    another.detach(handle)
    another.expect(DETACH)
    another.attach_receiver(FAR)


# -- transactions


def in_one_transaction(client: Client, broker: Broker, order: str) -> None:
    """`order`: when the message is completed (c), and some are sent to others (s) and to the entity itself (h)."""
    filled(broker, HERE, b"in", b"in")
    receiver = client.attach_receiver(HERE)
    senders = [client.attach_sender(name) for name in OTHERS]
    itself = client.attach_sender(HERE)
    client.flow(receiver, 2)
    frames = [client.expect(TRANSFER) for _ in range(2)]
    for fails, frame in zip((True, False), frames, strict=True):
        transaction = client.declare()
        for step in order:
            if step == "c":
                assert client.complete(frame, transaction) == "in the transaction"
            elif step == "h":
                assert client.post(itself, b"again", transaction) == "in the transaction"
            else:
                for sender in senders:
                    assert client.post(sender, b"out", transaction) == "in the transaction"
        for name in OTHERS:
            assert bodies(broker, name, 0, 0.05) == []
        assert client.commit(transaction, fail=fails) == "accepted"
    for name in OTHERS:
        assert bodies(broker, name, 1) == [b"out"]
    assert bodies(broker, HERE, 1) == [b"again"]
    client.complete_by_token(frames[0])  # the lock was kept


@pytest.mark.parametrize("order", ["csh", "shc", "hcs"])
def test_receiving_from_one_and_sending_to_others_is_one_transaction(azure, broker, order):
    in_one_transaction(azure, broker, order)


def test_so_it_is_for_a_client_that_is_no_sdk_of_azure(another, broker):
    in_one_transaction(another, broker, "shc")


@pytest.mark.parametrize("first", [BESIDE, FAR, "news"])
def test_what_is_sent_alone_goes_through_the_entity_that_pins_too(azure, broker, first):
    """A session that is pinned by a sender, which has sent nothing."""
    azure.attach_sender(HERE)
    sender = azure.attach_sender(first)
    transaction = azure.declare()
    assert azure.post(sender, b"x", transaction) == "in the transaction"
    assert azure.commit(transaction) == "accepted"
    queue = "news/Subscriptions/one" if first == "news" else first
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(queue, credit=1, settled=True)
        payload = peer.expect(TRANSFER).payload
    assert body_of(payload) == b"x"
    assert b"x-opt-enqueue-sequence-number" in payload
    if first == "news":
        assert bodies(broker, "news/Subscriptions/two", 1) == [b"x"]


def test_through_a_subscription_and_through_a_topic(broker):
    for first in ("news/Subscriptions/one", "news"):
        with Client.connect(broker.amqp_port, properties=AZURE) as client:
            client.cross()
            client.attach_sender(first) if first == "news" else client.attach_receiver(first)
            sender, itself = client.attach_sender(FAR), client.attach_sender("news")
            transaction = client.declare()
            assert client.post(sender, b"far", transaction) == "in the transaction"
            assert client.post(itself, b"news", transaction) == "in the transaction"
            assert client.commit(transaction) == "accepted"
        assert bodies(broker, FAR, 1) == [b"far"]
        for name in ("one", "two"):
            assert bodies(broker, f"news/Subscriptions/{name}", 1) == [b"news"]


def test_two_subscriptions_are_settled_in_one_transaction(azure, broker):
    filled(broker, "news", b"x")
    receivers = [azure.attach_receiver(f"news/Subscriptions/{name}") for name in ("one", "two")]
    frames = [azure.take(each) for each in receivers]
    sender = azure.attach_sender(FAR)
    transaction = azure.declare()
    for frame in frames:
        assert azure.complete(frame, transaction) == "in the transaction"
    assert azure.post(sender, b"out", transaction) == "in the transaction"
    assert azure.commit(transaction) == "accepted"
    assert bodies(broker, FAR, 1) == [b"out"]
    for name in ("one", "two"):
        assert bodies(broker, f"news/Subscriptions/{name}", 0) == []


def test_outside_of_transactions_it_sends_directly(azure, broker):
    azure.attach_receiver(HERE)
    sender = azure.attach_sender(FAR)
    assert azure.post(sender, b"x") == "accepted"
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(FAR, credit=1, settled=True)
        assert b"x-opt-enqueue-sequence-number" not in peer.expect(TRANSFER).payload


def test_what_its_destination_refuses_by_then_is_a_dead_letter_of_the_entity_that_pins(azure, broker):
    azure.attach_receiver(HERE)
    sender = azure.attach_sender("shut")
    transaction = azure.declare()
    assert azure.post(sender, b"x", transaction) == "in the transaction"
    asyncio.run(set_status(broker, "shut", "SendDisabled"))
    assert azure.commit(transaction) == "accepted"
    assert bodies(broker, f"{HERE}/$Transfer/$DeadLetterQueue", 1) == [b"x"]


@pytest.mark.parametrize("which", ["named by the key", "without a key", "of the received message"])
def test_a_partitioned_entity_pins_with_all_its_fragments(azure, broker, which):
    receiver, sender = azure.attach_receiver("parted"), azure.attach_sender(FAR)
    both = azure.attach_sender("parted-too")
    key = {"annotations": {Symbol("x-opt-partition-key"): "k"}}
    via = {"annotations": {Symbol("x-opt-via-partition-key"): "k", Symbol("x-opt-partition-key"): "another"}}
    filled(broker, "parted", b"in", **key)
    frame = azure.take(receiver)
    transaction = azure.declare()
    if which == "of the received message":
        assert azure.complete(frame, transaction) == "in the transaction"
    named = via if which == "named by the key" else {}
    assert azure.post(both, b"out", transaction, **named) == "in the transaction"
    assert azure.post(sender, b"out", transaction, **named) == "in the transaction"
    if which == "named by the key":
        assert azure.complete(frame, transaction) == "in the transaction"
    assert azure.commit(transaction) == "accepted"
    for name in (FAR, "parted-too"):
        assert bodies(broker, name, 1) == [b"out"]
    if which == "without a key":
        azure.settle(frame.fields[1])
        azure.expect(DISPOSITION)


def test_the_key_of_another_fragment_is_refused(azure, broker):
    """Keys are many, so some are of another fragment than the transaction's."""
    azure.attach_receiver("parted")
    sender = azure.attach_sender(FAR)
    transaction = azure.declare()
    answers = [
        azure.post(sender, b"x", transaction, annotations={Symbol("x-opt-via-partition-key"): f"key-{number}"})
        for number in range(40)
    ]
    assert set(answers) == {"in the transaction", conditions.NOT_ALLOWED}
    azure.commit(transaction, fail=True)


def test_a_request_of_another_entity_is_no_part_of_it(azure, broker):
    """Its answer goes to another session of the connection, which is free."""
    azure.attach_receiver(HERE)
    azure.begin(1)
    node = Node(azure, f"{FAR}/$management", responses_on=1)
    transaction = azure.declare()
    sender = azure.attach_sender(HERE)
    assert azure.post(sender, b"x", transaction) == "in the transaction"
    at = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(int((time.time() + 3600) * 1000))}
    node.say(
        "com.microsoft:schedule-message",
        {"messages": [{"message-id": "m", "message": message(b"later", annotations=at)}]},
        state=within(transaction),
    )
    response = node.response()
    assert (response.status, response.condition) == (400, conditions.NOT_ALLOWED)
    assert response.description.startswith(ANOTHER)
    azure.commit(transaction, fail=True)


def test_messages_scheduled_by_sending_go_through_as_well(azure, broker):
    azure.attach_receiver(HERE)
    sender = azure.attach_sender(FAR)
    transaction = azure.declare()
    at = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(int((time.time() + 1) * 1000))}
    assert azure.post(sender, b"later", transaction, annotations=at) == "in the transaction"
    assert azure.commit(transaction) == "accepted"
    assert bodies(broker, FAR, 1) == [b"later"]


# -- without it


@pytest.mark.parametrize("properties", [None, AZURE])
@pytest.mark.parametrize("other", [BESIDE, FAR])
def test_a_transaction_of_another_session_is_on_one_entity_wherever_others_lie(broker, properties, other):
    filled(broker, HERE, b"in")
    filled(broker, other, b"in")
    with Client.connect(broker.amqp_port, properties=properties) as client:
        here, there = client.attach_receiver(HERE), client.attach_receiver(other)
        frame, second = client.take(here), client.take(there)
        sender = client.attach_sender(other)
        transaction = client.declare()
        assert client.complete(frame, transaction) == "in the transaction"
        client.transfer(message(b"x"), sender, state=within(transaction))
        condition, text = error_of(client.expect(DISPOSITION))
        assert condition == conditions.NOT_ALLOWED
        assert text.startswith(WITHOUT)
        assert "EnableCrossEntityTransactions" in text
        assert "com.microsoft:transfer-destination-address" in text
        client.settle(second.fields[1], state=within(transaction, outcome(ACCEPTED)))
        assert error_of(client.expect(DISPOSITION))[1].startswith(WITHOUT)
        client.commit(transaction, fail=True)
    for name in (HERE, other):
        assert bodies(broker, name, 1) == [b"in"]


def test_a_topic_and_its_subscriptions_take_part_together_without_it(broker):
    filled(broker, "news", b"x")
    with Client.connect(broker.amqp_port) as client:
        frames = [client.take(client.attach_receiver(f"news/Subscriptions/{name}")) for name in ("one", "two")]
        sender = client.attach_sender("news")
        transaction = client.declare()
        for frame in frames:
            assert client.complete(frame, transaction) == "in the transaction"
        assert client.post(sender, b"y", transaction) == "in the transaction"
        assert client.commit(transaction) == "accepted"
    for name in ("one", "two"):
        assert bodies(broker, f"news/Subscriptions/{name}", 1) == [b"y"]


def test_a_coordinator_that_is_alone_on_its_session_crosses_nothing(broker):
    """So it is where Java's SDK has the option off: each entity has a session of its own."""
    with Client.connect(broker.amqp_port, properties=AZURE) as client:
        client.control = Coordinator(client)
        client.begin(1)
        senders = [client.attach_sender(name, channel=1) for name in (HERE, BESIDE)]
        transaction = client.declare()
        for sender, answer in zip(senders, ("in the transaction", conditions.NOT_ALLOWED), strict=True):
            client.transfer(message(b"x"), sender, state=within(transaction), channel=1)
            assert answer_of(client.expect(DISPOSITION)) == answer
        client.commit(transaction, fail=True)
