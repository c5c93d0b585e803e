"""Sending: outcomes as errors, pipelining within bounds, the end of a link."""

import asyncio

import pytest

from protocol.client.connection import OUTPUT_HIGH_BYTES
from protocol.client.errors import LinkClosed, LinkDetached, MessageRefused, MessageReturned
from protocol.client.messages import Message
from protocol.engine.deliveries import ACCEPTED, MODIFIED, RELEASED, forget, reject, settle
from tests.patience import until

MESSAGE = Message.of(b"hello").encode()


def numbered(count):
    return [Message.of(b"%d" % number).encode() for number in range(count)]


async def test_a_message_is_sent_and_its_acceptance_awaited(peer):
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        await sender.send(MESSAGE)
        assert peer.messages == [MESSAGE]
        assert sender.in_flight == 0


async def test_a_rejection_is_an_error_with_its_reason(peer):
    peer.on_message = lambda link, delivery: reject(delivery, "amqp:not-allowed", "not this")
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        with pytest.raises(MessageRefused, match="not this") as caught:
            await sender.send(MESSAGE)
        assert (caught.value.condition, caught.value.description) == ("amqp:not-allowed", "not this")
        peer.on_message = lambda link, delivery: settle(delivery, ACCEPTED)
        await sender.send(MESSAGE)


@pytest.mark.parametrize(("state", "text"), [(RELEASED, "released"), (MODIFIED, "modified"), (0, "without an outcome")])
async def test_a_message_neither_accepted_nor_rejected_was_returned(peer, state, text):
    def answer(link, delivery):
        if state:
            settle(delivery, state)
        else:
            forget(delivery)

    peer.on_message = answer
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        with pytest.raises(MessageReturned, match=text):
            await sender.send(MESSAGE)


async def test_a_refused_link_tells_why(peer):
    peer.on_attach = lambda link: link.refuse("amqp:not-found", "no such queue")
    async with peer, await peer.connect() as connection:
        with pytest.raises(LinkDetached, match="no such queue") as caught:
            await connection.sender("q")
        assert caught.value.condition == "amqp:not-found"


async def test_a_link_that_is_not_answered_is_given_up_and_detached(peer):
    peer.on_attach = lambda link: None
    async with peer, await peer.connect(timeout_s=0.1) as connection:
        with pytest.raises(TimeoutError, match="attach of a link to q"):
            await connection.sender("q")
        peer.links[0].accept()
        peer.flush()
        peer.on_attach = lambda link: link.accept(0, 1)
        await connection.sender("other")
        assert peer.detached == ["q"]


async def test_a_detach_tells_its_reason_to_all_sends(peer):
    peer.on_message = lambda link, delivery: None
    peer.credit = 2
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        sends = [asyncio.create_task(sender.send(message)) for message in numbered(4)]
        await until(lambda: sender.in_flight == 2)
        await asyncio.sleep(0.02)  # the others may not be sent
        assert sender.in_flight == 2
        peer.link("q").detach("com.microsoft:entity-disabled", "switched off")
        peer.flush()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert {(type(result), result.description) for result in results} == {(LinkDetached, "switched off")}
        with pytest.raises(LinkDetached, match="switched off"):
            await sender.send(MESSAGE)


async def test_closing_detaches_and_ends_what_waits(peer):
    peer.on_message = lambda link, delivery: None
    async with peer, await peer.connect() as connection:
        async with await connection.sender("q") as sender:
            outcome = await sender.post(MESSAGE)
        with pytest.raises(LinkClosed):
            await outcome
        assert peer.detached == ["q"]
        with pytest.raises(LinkClosed):
            await sender.send(MESSAGE)
        await sender.close()


async def test_sends_wait_for_credit_in_order(peer):
    peer.credit = 0
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        sends = [asyncio.create_task(sender.send(message)) for message in numbered(6)]
        for sent in (2, 4, 6):
            await asyncio.sleep(0.01)  # no more may be sent
            assert len(peer.messages) == sent - 2
            peer.link("q").grant(2)
            peer.flush()
            await asyncio.gather(*sends[:sent])
        assert peer.messages == numbered(6)


async def test_messages_in_flight_are_bounded(peer):
    held = []
    peer.on_message = lambda link, delivery: held.append(delivery)
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q", max_in_flight=3)
        sends = [asyncio.create_task(sender.send(message)) for message in numbered(7)]
        await until(lambda: len(peer.messages) == 3)
        await asyncio.sleep(0.02)  # the others may not be sent
        assert len(peer.messages) == sender.in_flight == 3
        for _ in range(7):
            await until(lambda: held)
            settle(held.pop(0), ACCEPTED)
            peer.flush()
        await asyncio.gather(*sends)
        assert peer.messages == numbered(7)


async def test_a_send_that_was_given_up_before_its_turn_is_not_sent(peer):
    peer.credit = 0
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        first, second = [asyncio.create_task(sender.send(message)) for message in numbered(2)]
        await asyncio.sleep(0)  # both wait
        first.cancel()
        await asyncio.wait([first])
        peer.link("q").grant(5)
        peer.flush()
        await second
        assert peer.messages == numbered(2)[1:]


async def test_outcomes_may_come_in_any_order(peer):
    held = []
    peer.on_message = lambda link, delivery: held.append(delivery)
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        outcomes = [await sender.post(message) for message in numbered(3)]
        await until(lambda: len(held) == 3)
        settle(held[2], ACCEPTED)
        reject(held[0], "amqp:not-allowed", "first")
        peer.flush()
        await outcomes[2]
        with pytest.raises(MessageRefused, match="first"):
            await outcomes[0]
        assert not outcomes[1].done()
        settle(held[1], ACCEPTED)
        peer.flush()
        await outcomes[1]


async def test_many_are_sent_pipelined_from_any_iterable(peer):
    async def generate():
        for message in numbered(50):
            yield message

    peer.credit = 1000
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q", max_in_flight=10)
        assert await sender.send_all(numbered(100)) == 100
        assert await sender.send_all(generate()) == 50
        assert await sender.send_all([]) == 0


async def test_the_first_failure_of_many_ends_the_sending(peer):
    def refuse_the_third(link, delivery):
        if len(peer.messages) == 3:
            reject(delivery, "amqp:resource-limit-exceeded", "full")
        else:
            settle(delivery, ACCEPTED)

    peer.on_message = refuse_the_third
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q", max_in_flight=1)
        with pytest.raises(MessageRefused, match="full"):
            await sender.send_all(numbered(100))
        assert len(peer.messages) <= 5
        assert sender.in_flight == 0


async def test_a_peer_that_does_not_read_makes_sends_wait(peer):
    """Otherwise memory would hold whatever is sent."""
    large = Message.of(bytes(1 << 20)).encode()
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        peer.side.transport.pause_reading()
        sends = [asyncio.create_task(sender.send(large)) for _ in range(50)]
        await until(lambda: connection.is_congested)
        await asyncio.sleep(0.05)  # the others may not be sent
        assert connection.is_congested
        assert sender.in_flight < 30
        peer.side.transport.resume_reading()
        await asyncio.gather(*sends)
        assert len(peer.messages) == 50


async def test_what_is_enqueued_is_sent_in_order_when_there_is_room(peer):
    peer.credit = 1
    peer.on_message = lambda link, delivery: None
    async with peer, await peer.connect() as connection:
        sender = await connection.sender("q")
        outcomes = [sender.enqueue(message) for message in numbered(3)]
        await until(lambda: peer.messages)
        assert peer.messages == numbered(1)
        peer.on_message = lambda link, delivery: settle(delivery, ACCEPTED)
        link = peer.link("q")
        link.grant(2)
        peer.flush()
        await outcomes[2]
        assert peer.messages == numbered(3)
        assert not outcomes[0].done()
        waiting = sender.enqueue(MESSAGE)
        await sender.close()
        for outcome in (outcomes[0], waiting):
            with pytest.raises(LinkClosed):
                await outcome
        with pytest.raises(LinkClosed):
            sender.enqueue(MESSAGE)


async def test_a_sender_goes_on_whoever_has_written_what_it_waited_for(peer):
    """Output is written at the end of a turn, and before that when input has come."""
    async with peer, await peer.connect() as connection:
        full, other = await connection.sender("full"), await connection.sender("other")
        outcomes = [full.enqueue(bytes(OUTPUT_HIGH_BYTES + 1)), other.enqueue(MESSAGE)]
        assert connection.is_congested
        assert other.in_flight == 0
        connection.flush()
        assert other.in_flight == 1
        await asyncio.gather(*outcomes)
