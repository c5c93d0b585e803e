"""One transaction that receives from one entity and sends to others, on other partitions and workers (amqp.md 10.4)."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from broker.catalog.catalog import home_partition
from protocol import conditions
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError, MessageRefused, SettlementRefused
from protocol.client.messages import Message
from protocol.client.requests import QueueCounts
from protocol.codec import Described, Symbol, UInt, ULong, encode
from storage.maintenance import verify
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    FLOW,
    TRANSFER,
    RawPeer,
    body_of,
    coordinator,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node, put_token, token_for
from tests.patience import PATIENCE_S, eventually

PARTITIONS = 4  # on two workers: 0 and 2, 1 and 3
NAMES = [f"queue-{number}" for number in range(24)]
HOMES = {name: home_partition(name, PARTITIONS) for name in NAMES}
HERE, BESIDE = [name for name in NAMES if HOMES[name] == 0][:2]
NEAR, FAR, FARTHER = [next(name for name in NAMES if HOMES[name] == home) for home in (2, 1, 3)]
CLOSED = next(f"closed-{number}" for number in range(24) if home_partition(f"closed-{number}", PARTITIONS) == 1)
OTHERS = [BESIDE, NEAR, FAR, FARTHER]
CONFIG = (
    f"partitions = {PARTITIONS}\n"
    + "".join(f'[[queues]]\nname = "{name}"\nlock_duration_ms = 60000\n' for name in (HERE, *OTHERS))
    + f"""
[[queues]]
name = "{CLOSED}"
status = "SendDisabled"

[[queues]]
name = "shut"
status = "Disabled"

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

[[security.authorization_rules]]
key_name = "sends"
primary_key = "key-that-sends"
rights = ["Send"]
"""
)
DESTINATION = Symbol("com.microsoft:transfer-destination-address")


@pytest.fixture(scope="module")
def crossing_broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("crossing"), CONFIG, workers=2) as broker:
        yield broker
    assert verify(broker.data_dir).ok


@asynccontextmanager
async def connected(broker: Broker) -> AsyncIterator[Connection]:
    async with asyncio.timeout(PATIENCE_S), await connect_to(broker.connection_string) as connection:
        yield connection


Story = Callable[[Connection], Awaitable[None]]


@pytest.fixture
def run(crossing_broker) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def told() -> None:
            async with connected(crossing_broker) as connection:
                await story(connection)

        asyncio.run(told())

    return run


async def arrived(broker: Broker, queue: str, count: int) -> list[str]:
    """Texts of what can be received and deleted; `count` are waited for."""
    async with connected(broker) as connection:
        receiver = await connection.receiver(queue, credit=0, receive_and_delete=True)
        found = []
        while len(found) < count:
            found += await receiver.fetch(count - len(found), PATIENCE_S)
        found += await receiver.fetch(10, 0.1)
        return [str(bytes(each.message().content()), "utf-8") for each in found]


def said(text: str) -> bytes:
    return Message.of(text.encode()).encode()


async def fill(broker: Broker, *texts: str) -> None:
    async with connected(broker) as connection:
        await (await connection.sender(HERE)).send_all([said(text) for text in texts])


# -- links of one session, the coordinator's first


@pytest.mark.parametrize("sends_first", [False, True])
def test_receiving_from_one_entity_and_sending_to_others_is_one_transaction(run, crossing_broker, sends_first):
    async def story(connection):
        await fill(crossing_broker, "old")
        coordinator = await connection.coordinator()
        receiver = await connection.receiver(HERE, credit=0)
        senders = [await connection.sender(name) for name in OTHERS]
        [old] = await receiver.fetch(1, PATIENCE_S)
        transaction = await coordinator.declare()
        if not sends_first:
            await receiver.accept(old, transaction)
        for sender in senders:
            await sender.send(said("1"), transaction)
            await sender.send(said("2"), transaction)
        if sends_first:
            await receiver.accept(old, transaction)
        for name in OTHERS:
            assert await arrived(crossing_broker, name, 0) == []
        await coordinator.commit(transaction)
        for name in OTHERS:
            assert await arrived(crossing_broker, name, 2) == ["1", "2"]
        assert await receiver.fetch(1, 0.1) == []

    run(story)


def test_rolled_back_nothing_was_sent_and_the_message_stays(run, crossing_broker):
    async def story(connection):
        await fill(crossing_broker, "old")
        coordinator = await connection.coordinator()
        receiver = await connection.receiver(HERE, credit=0)
        sender = await connection.sender(FAR)
        [old] = await receiver.fetch(1, PATIENCE_S)
        transaction = await coordinator.declare()
        await receiver.accept(old, transaction)
        await sender.send(said("new"), transaction)
        await coordinator.roll_back(transaction)
        assert await arrived(crossing_broker, FAR, 0) == []
        management = await connection.management(HERE)
        body = {"disposition-status": "completed", "lock-tokens": [old.lock_token]}
        await management.request("com.microsoft:update-disposition", body)

    run(story)


def test_without_a_receiver_the_first_that_is_sent_to_takes_it_for_the_others(run, crossing_broker):
    async def story(connection):
        coordinator = await connection.coordinator()
        senders = [await connection.sender(name) for name in (FAR, HERE)]
        transaction = await coordinator.declare()
        for sender in senders:
            await sender.send(said("m"), transaction)
        await coordinator.commit(transaction)
        assert [await arrived(crossing_broker, name, 1) for name in (FAR, HERE)] == [["m"], ["m"]]

    run(story)


@pytest.mark.parametrize("other", [BESIDE, FAR])
def test_messages_of_two_entities_cannot_be_settled_in_one_transaction(run, crossing_broker, other):
    async def story(connection):
        await fill(crossing_broker, "here")
        await (await connection.sender(other)).send(said("other"))
        async with connected(crossing_broker) as another:
            here, there = [await another.receiver(name, credit=0) for name in (HERE, other)]
            coordinator = await another.coordinator()
            [first], [second] = await here.fetch(1, PATIENCE_S), await there.fetch(1, PATIENCE_S)
            transaction = await coordinator.declare()
            await here.accept(first, transaction)
            with pytest.raises(SettlementRefused) as raised:
                await there.accept(second, transaction)
            assert raised.value.condition == conditions.NOT_ALLOWED
            await coordinator.commit(transaction)
            another.abort()
        assert await arrived(crossing_broker, other, 1) == ["other"]

    run(story)


def test_a_message_to_the_transactions_own_entity_goes_directly_and_one_to_others_does_not(run, crossing_broker):
    async def story(connection):
        await fill(crossing_broker, "here")
        coordinator = await connection.coordinator()
        receiver = await connection.receiver(HERE, credit=0)
        senders = [await connection.sender(name) for name in (HERE, BESIDE)]
        [received] = await receiver.fetch(1, PATIENCE_S)
        transaction = await coordinator.declare()
        await receiver.accept(received, transaction)
        for sender in senders:
            await sender.send(said("again"), transaction)
        await coordinator.commit(transaction)
        async with connected(crossing_broker) as another:
            for name, is_direct in ((HERE, True), (BESIDE, False)):
                reader = await another.receiver(name, credit=0)
                [again] = await reader.fetch(1, PATIENCE_S)
                assert ("x-opt-enqueue-sequence-number" not in again.message().annotations) is is_direct
                await reader.accept(again)

    run(story)


# -- a link that says where to


def attach_through(peer: RawPeer, address: str, destination: object) -> int:
    handle = peer.attach(sender=True, address=address, properties={DESTINATION: destination})
    attached = peer.expect(ATTACH)
    assert attached.fields[6] is not None, peer.expect(DETACH)
    assert attached.fields[13] == {DESTINATION: destination}
    peer.expect(FLOW)
    return handle


def ask(peer: RawPeer, handle: int, code: int, *fields: object) -> list[object]:
    """Of the coordinator; the fields of the outcome."""
    peer.transfer(encode(Described(ULong(0x77), Described(ULong(code), list(fields)))), handle)
    return peer.expect(DISPOSITION).fields[4].value


def transfer_in(peer: RawPeer, handle: int, transaction: object, payload: bytes) -> None:
    number = peer.next_delivery_id
    peer.next_delivery_id += 1
    fields = [UInt(handle), UInt(number), number.to_bytes(8, "big"), UInt(0), False, False, None]
    peer.say(TRANSFER, *fields, outcome(0x34, transaction), payload=payload)
    assert peer.expect(DISPOSITION).fields[4].descriptor == 0x34


@pytest.mark.parametrize("spelling", [FAR, FAR.upper(), f"amqps://localhost/{FAR}"])
def test_a_link_that_names_its_destination_sends_there_in_transactions_and_without(crossing_broker, spelling):
    with RawPeer.connect(crossing_broker.amqp_port) as peer:
        through = attach_through(peer, HERE, spelling)
        peer.transfer(message(b"1"), through)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        control = peer.attach_sender("", target_=coordinator())
        [transaction] = ask(peer, control, 0x31, None)
        direct = peer.attach_sender(HERE)
        transfer_in(peer, direct, transaction, message(b"here"))
        transfer_in(peer, through, transaction, message(b"2"))
        ask(peer, control, 0x32, transaction, False)
        receiver = peer.attach_receiver(FAR, credit=3, settled=True)
        got = [peer.expect(TRANSFER) for _ in range(2)]
        assert [body_of(each.payload) for each in got] == [b"1", b"2"]
        assert {each.fields[0] for each in got} == {receiver}
    assert asyncio.run(arrived(crossing_broker, HERE, 1)) == ["here"]


def test_through_a_subscription_to_a_topic(crossing_broker):
    with RawPeer.connect(crossing_broker.amqp_port) as peer:
        through = attach_through(peer, "news/Subscriptions/all", "news")
        peer.transfer(message(b"1"), through)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    assert asyncio.run(arrived(crossing_broker, "news/Subscriptions/all", 1)) == ["1"]


@pytest.mark.parametrize(
    ("through", "destination", "condition"),
    [
        (HERE, "missing", conditions.NOT_FOUND),
        ("missing", HERE, conditions.NOT_FOUND),
        (HERE, "news/Subscriptions/all", conditions.NOT_ALLOWED),
        (HERE, f"{FAR}/$DeadLetterQueue", conditions.NOT_ALLOWED),
        (HERE, f"{FAR}/$management", conditions.NOT_ALLOWED),
        (f"{HERE}/$DeadLetterQueue", FAR, conditions.NOT_ALLOWED),
        ("shut", FAR, conditions.ENTITY_DISABLED),
        (HERE, 7, conditions.ARGUMENT_ERROR),
        (HERE, "", conditions.ARGUMENT_ERROR),
    ],
)
def test_an_attach_that_makes_no_sense_is_refused(crossing_broker, through, destination, condition):
    with RawPeer.connect(crossing_broker.amqp_port) as peer:
        peer.attach(sender=True, address=through, properties={DESTINATION: destination})
        assert peer.refusal()[0] == condition


def test_both_entities_must_be_allowed_to_be_sent_to_as_long_as_the_link_is_there(crossing_broker):
    with RawPeer.anonymous(crossing_broker.amqp_port) as peer:
        node = Node(peer, "$cbs")
        for allowed, missing in ((HERE, FAR), (FAR, HERE)):
            assert put_token(node, allowed, token_for(allowed, valid_s=3)).status == 202
            if missing == FAR:
                peer.attach(sender=True, address=HERE, properties={DESTINATION: FAR})
                assert peer.refusal()[0] == conditions.UNAUTHORIZED_ACCESS
        assert put_token(node, HERE, token_for(HERE)).status == 202
        attach_through(peer, HERE, FAR)
        condition, description = error_of(peer.expect(DETACH))
        assert condition == conditions.UNAUTHORIZED_ACCESS
        assert "ExpiredToken: The token is expired." in description


def test_messages_that_a_disabled_destination_refuses_go_to_the_transfer_dead_letter_queue(crossing_broker):
    with RawPeer.connect(crossing_broker.amqp_port) as peer:
        handle = attach_through(peer, HERE, CLOSED)
        peer.transfer(message(b"refused"), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        address = f"{HERE}/$Transfer/$DeadLetterQueue"
        peer.attach_receiver(address, credit=1, settled=True)
        payload = peer.expect(TRANSFER).payload
        assert body_of(payload) == b"refused"
        assert b"EntityDisabled" in payload


# -- processes end


def test_messages_for_another_worker_are_counted_until_they_arrive(tmp_path):
    with Broker(tmp_path, CONFIG, workers=2) as broker:

        async def story() -> None:
            async with connected(broker) as connection:
                coordinator = await connection.coordinator()
                await connection.receiver(HERE, credit=0)
                sender = await connection.sender(FAR)
                far = broker.worker_processes()[HOMES[FAR] % 2]
                far.suspend()
                try:
                    transaction = await coordinator.declare()
                    await sender.send(said("m"), transaction)
                    await coordinator.commit(transaction)
                    management = await connection.management(HERE)
                    assert (await management.counts()).transfer == 1
                finally:
                    far.resume()
                assert await arrived(broker, FAR, 1) == ["m"]
                assert (await management.counts()).transfer == 0

        asyncio.run(story())


def test_over_kills_each_message_is_passed_on_once_or_stays(tmp_path):
    """Each transaction takes one message and sends two to each of four queues, while processes are killed."""
    chance = random.Random(7)
    with Broker(tmp_path, CONFIG, workers=2) as broker:
        names = [f"{number:04}" for number in range(1500)]
        asyncio.run(fill(broker, *names))
        committed: set[str] = set()

        async def work() -> None:
            async with connected(broker) as connection:
                coordinator = await connection.coordinator()
                receiver = await connection.receiver(HERE, credit=20)
                senders = [await connection.sender(name) for name in OTHERS]

                async def one() -> None:
                    received = await receiver.receive()
                    assert received is not None
                    name = str(bytes(received.message().content()), "utf-8")
                    transaction = await coordinator.declare()
                    sends = [await sender.post(said(name), transaction) for sender in senders for _ in range(2)]
                    results = await asyncio.gather(
                        receiver.accept(received, transaction), *sends, return_exceptions=True
                    )
                    with suppress(MessageRefused):
                        await coordinator.commit(transaction)
                        assert results == [None] * 9
                        committed.add(name)

                try:
                    while True:
                        await asyncio.gather(*[one() for _ in range(10)])
                finally:
                    connection.abort()  # its locks end with it

        for _ in range(8):

            async def until_killed() -> None:
                working = asyncio.create_task(work())
                await asyncio.sleep(0.2 + chance.random() / 4)  # at any point of a transaction
                chance.choice([*broker.worker_processes(), broker.gateway()]).kill()
                with suppress(ClientError, TimeoutError):
                    await asyncio.wait_for(working, 1)

            asyncio.run(until_killed())
            eventually(lambda: is_ready(broker), "ready")

        left = asyncio.run(drained(broker, HERE))
        assert asyncio.run(counts(broker, HERE)).size_bytes == 0, "what is locked would be missing"
        assert max(left.values(), default=0) <= 1
        passed = set(names) - set(left)
        assert committed <= passed
        for name in OTHERS:
            found = asyncio.run(drained(broker, name, 2 * len(passed)))
            assert found == Counter(dict.fromkeys(passed, 2))
    assert len(committed) > 30
    assert verify(broker.data_dir).ok


def is_ready(broker: Broker) -> bool:
    try:
        return broker.get("/readyz")[0] == 200
    except OSError:
        return False


async def counts(broker: Broker, queue: str) -> QueueCounts:
    async with connected(broker) as connection:
        return await (await connection.management(queue)).counts()


async def drained(broker: Broker, queue: str, count: int = 0) -> Counter[str]:
    """All that is in it; `count` are waited for."""
    async with connected(broker) as connection:
        receiver = await connection.receiver(queue, credit=0, receive_and_delete=True)
        found: Counter[str] = Counter()
        while got := await receiver.fetch(1000, 10 if found.total() < count else 0.3):
            found.update(str(bytes(each.message().content()), "utf-8") for each in got)
        return found
