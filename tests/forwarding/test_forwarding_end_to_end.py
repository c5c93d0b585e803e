"""Forwarding of a real broker with two workers, as a client meets it."""

import time

import pytest

from protocol.client.connection import Connection
from protocol.client.errors import LinkDetached
from protocol.client.messages import Message
from protocol.codec import Timestamp
from storage.maintenance import verify
from tests.brokers import Broker
from tests.clients import received, run, send
from tests.patience import PATIENCE_S

PARTITIONS = 4
CONFIG = f"""
partitions = {PARTITIONS}

[[queues]]
name = "orders"
forward_to = "checked"

[[queues]]
name = "checked"
forward_to = "billing"

[[queues]]
name = "billing"

[[queues]]
name = "failing"
max_delivery_count = 1
forward_dead_lettered_messages_to = "failures"

[[queues]]
name = "failures"

[[queues]]
name = "to-closed"
forward_to = "closed"

[[queues]]
name = "closed"
status = "SendDisabled"

[[queues]]
name = "to-topic"
forward_to = "news"

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

  [[topics.subscriptions]]
  name = "red"
  forward_to = "reds"

  [[topics.subscriptions.rules]]
  name = "red"
  filter = {{ kind = "sql", expression = "colour = 'red'" }}
  action = {{ expression = "SET seen = 'yes'" }}

[[queues]]
name = "reds"

[[queues]]
name = "round"
forward_to = "trip"

[[queues]]
name = "trip"
forward_to = "round"
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("forwarding"), CONFIG, workers=2) as broker:
        yield broker
    assert verify(broker.data_dir).ok


def test_messages_pass_a_chain_of_queues_over_both_workers(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "orders", *[Message.of(b"%d" % at) for at in range(3000)])
        found = await received(connection, "billing", 3000)
        assert [each.content() for each in found] == [b"%d" % at for at in range(3000)]
        numbers = [each.annotations["x-opt-enqueue-sequence-number"] for each in found]
        assert numbers == [*range(numbers[0], numbers[0] + 3000)]
        first = found[0].sequence_number
        assert first is not None
        assert [each.sequence_number for each in found] == [*range(first, first + 3000)]
        counts = await connection.counts()
        assert (counts["orders"].active, counts["checked"].active, counts["billing"].active) == (0, 0, 0)

    run(broker, test)


def test_a_receiver_that_waits_at_the_end_gets_each_at_once(broker):
    async def test(connection: Connection) -> None:
        async with await connection.receiver("billing") as receiver, await connection.sender("orders") as sender:
            for at in range(20):
                began = time.monotonic()
                await sender.send(Message.of(b"%d" % at).encode())
                message = await receiver.receive(PATIENCE_S)
                assert message is not None
                assert message.message().content() == b"%d" % at
                assert time.monotonic() - began < 2
                await receiver.accept(message)

    run(broker, test)


@pytest.mark.parametrize("address", ["orders", "Checked", "failing/$DeadLetterQueue", "news/Subscriptions/red"])
def test_a_receiver_on_an_entity_that_forwards_is_refused(broker, address):
    async def test(connection: Connection) -> None:
        with pytest.raises(LinkDetached, match="auto-forwarding") as refused:
            await connection.receiver(address)
        assert refused.value.condition == "amqp:not-allowed"

    run(broker, test)


def test_dead_lettered_messages_are_forwarded_with_their_reason_and_source(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "failing", Message.of(b"x"))
        async with await connection.receiver("failing") as receiver:
            message = await receiver.receive(PATIENCE_S)
            assert message is not None
            await receiver.modify(message)
        [found] = await received(connection, "failures", 1)
        assert found.application_properties["DeadLetterReason"] == "MaxDeliveryCountExceeded"
        assert found.annotations["x-opt-deadletter-source"] == "failing"
        assert (found.delivery_count or 0) == 0

    run(broker, test)


def test_messages_that_cannot_be_forwarded_go_to_the_transfer_dead_letter_queue(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "to-closed", Message.of(b"1"), Message.of(b"2"))
        async with await connection.receiver("To-Closed/$Transfer/$DeadLetterQueue") as receiver:
            message = await receiver.receive(PATIENCE_S)
            assert message is not None
            found = message.message()
            assert found.content() == b"1"
            assert found.application_properties["DeadLetterReason"] == "EntityDisabled"
            assert "'closed'" in found.application_properties["DeadLetterErrorDescription"]
            assert found.annotations["x-opt-deadletter-source"] == "to-closed"
            await receiver.accept(message)
        management = await connection.management("to-closed")
        counts = await management.counts()
        assert (counts.active, counts.dead_lettered, counts.transfer_dead_lettered) == (0, 0, 1)
        peeked = await (await connection.management("to-closed/$transfer/$deadletterqueue")).peek()
        assert [Message.decode(each).content() for each in peeked] == [b"2"]

    run(broker, test)
    _, metrics = broker.get("/metrics")
    assert 'peeklock_transfer_deadlettered_messages{entity="to-closed"} 1.0' in metrics
    assert 'peeklock_deadlettered_messages{entity="to-closed"} 0.0' in metrics


@pytest.mark.parametrize("entity", ["news", "news/Subscriptions/red", "billing"])
def test_every_entity_has_a_transfer_dead_letter_queue(broker, entity):
    assert run(broker, lambda connection: received(connection, f"{entity}/$Transfer/$DeadLetterQueue", 0)) == []


def test_nobody_sends_to_a_transfer_dead_letter_queue(broker):
    async def test(connection: Connection) -> None:
        with pytest.raises(LinkDetached, match="cannot be sent to a dead-letter queue") as refused:
            await connection.sender("orders/$Transfer/$DeadLetterQueue")
        assert refused.value.condition == "amqp:not-allowed"

    run(broker, test)


def test_a_queue_forwards_to_a_topic_and_a_subscription_to_a_queue(broker):
    async def test(connection: Connection) -> None:
        messages = [
            Message.of(colour.encode(), application_properties={"colour": colour}) for colour in ("red", "blue")
        ]
        await send(connection, "to-topic", *messages)
        [red] = await received(connection, "reds", 1)
        assert red.content() == b"red"
        assert red.application_properties["seen"] == "yes"
        found = await received(connection, "news/Subscriptions/all", 2)
        assert [each.content() for each in found] == [b"red", b"blue"]

    run(broker, test)


def test_a_cycle_ends_after_four_hops(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "round", Message.of(b"x"))
        [found] = await received(connection, "round/$Transfer/$DeadLetterQueue", 1)
        assert found.application_properties["DeadLetterReason"] == "MaxTransferHopCountExceeded"

    run(broker, test)


def test_a_queue_that_forwards_keeps_what_is_scheduled_until_it_is_due(broker):
    async def test(connection: Connection) -> None:
        due_ms = int(time.time() * 1000) + 700
        management = await connection.management("orders")
        annotations = {"x-opt-scheduled-enqueue-time": Timestamp(due_ms)}
        await management.schedule([Message.of(b"later", message_id="1", annotations=annotations)])
        assert (await management.counts()).scheduled == 1
        [found] = await received(connection, "billing", 1)
        assert found.content() == b"later"
        assert time.time() * 1000 >= due_ms

    run(broker, test)


def test_forwarding_goes_on_after_a_restart_and_new_settings_hold(tmp_path):
    queues = "".join(f'[[queues]]\nname = "{name}"\n' for name in ("billing", "third", "orders"))
    config = f"partitions = {PARTITIONS}\n{queues}"
    with Broker(tmp_path, config, workers=2) as broker:
        run(broker, lambda connection: send(connection, "orders", Message.of(b"1"), Message.of(b"2")))
        broker.stop()
        broker.config_file.write_text(config + 'forward_to = "billing"\n')
        broker.start()
        found = run(broker, lambda connection: received(connection, "billing", 2))
        assert [each.content() for each in found] == [b"1", b"2"]
        broker.stop()
        broker.config_file.write_text(config + 'forward_to = "third"\n')
        broker.start()
        run(broker, lambda connection: send(connection, "orders", Message.of(b"3")))
        [third] = run(broker, lambda connection: received(connection, "third", 1))
        assert third.content() == b"3"
        broker.stop()
        assert verify(broker.data_dir).ok
