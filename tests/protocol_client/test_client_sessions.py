"""Receivers of sessions, with the real broker and with a peer that gives none."""

import asyncio

import pytest

from protocol.client.connection import connect_to
from protocol.client.errors import LinkDetached, RequestFailed
from protocol.client.messages import Message
from protocol.codec import Described, ULong
from protocol.engine.deliveries import ACCEPTED
from protocol.symbols import SESSION_FILTER
from tests.patience import until


async def send(connection, *messages):
    sender = await connection.sender("talks")
    await sender.send_all(Message.of(body, group_id=session_id).encode() for session_id, body in messages)


async def take(receiver):
    taken = await receiver.fetch(100)
    await asyncio.gather(*map(receiver.accept, taken))
    return [received.message().content() for received in taken]


async def test_sessions_by_name_and_in_turn(broker):
    async with await connect_to(broker.connection_string) as connection:
        await send(connection, ("a", b"1"), ("b", b"2"), ("", b"3"), ("a", b"4"))
        async with await connection.accept_session("talks", "b") as receiver:
            assert (receiver.session_id, await take(receiver)) == ("b", [b"2"])
        seen = {}
        while following := await connection.accept_next_session("talks", 0.1):
            seen[following.session_id] = await take(following)
            await following.close()
        assert seen == {"a": [b"1", b"4"], "": [b"3"]}
        async with await connection.accept_session("talks", "nothing in it") as receiver:
            assert await take(receiver) == []


async def test_a_session_is_held_by_one_receiver_and_given_back_with_its_messages(broker):
    async with (
        await connect_to(broker.connection_string) as connection,
        await connect_to(broker.connection_string) as other,
    ):
        await send(connection, ("held", b"1"))
        receiver = await connection.accept_session("talks", "held")
        assert len(await receiver.fetch(1)) == 1
        with pytest.raises(LinkDetached) as caught:
            await other.accept_session("talks", "held")
        assert caught.value.condition == "com.microsoft:session-cannot-be-locked"
        assert await other.accept_next_session("talks", 0.0) is None
        await receiver.close()
        async with await other.accept_session("talks", "held") as receiver:
            [received] = await receiver.fetch(1)
            assert received.message().delivery_count == 0
            await receiver.accept(received)


async def test_a_session_is_renewed_and_its_deferred_messages_are_dead_lettered(broker):
    async with await connect_to(broker.connection_string) as connection:
        await send(connection, ("deferred", b"1"), ("deferred", b"2"))
        management = await connection.management("talks")
        async with await connection.accept_session("talks", "deferred") as receiver:
            first, second = await receiver.fetch(2)
            await receiver.modify(first, undeliverable_here=True)
            await receiver.accept(second)
            until_ms = await management.renew_session_lock("deferred")
            await asyncio.sleep(0.01)  # so that it ends later
            assert await management.renew_session_lock("deferred") > until_ms
            [found] = await management.peek(10, session_id="deferred", omit_body=True)
            message = Message.decode(found)
            assert (message.group_id, message.content()) == ("deferred", b"")
            assert message.sequence_number is not None
            tokens = await management.lock_deferred([message.sequence_number], "deferred")
            await management.dead_letter(tokens, "r", None, "deferred")
        with pytest.raises(RequestFailed):
            await management.renew_session_lock("deferred")
        async with await connection.receiver("talks/$deadletterqueue", credit=0) as receiver:
            [received] = await receiver.fetch(5)
            assert received.message().content() == b"1"
            await receiver.accept(received)


async def test_an_entity_without_sessions_has_none(broker):
    async with await connect_to(broker.connection_string) as connection:
        with pytest.raises(LinkDetached, match="sessionful") as caught:
            await connection.accept_next_session("q", 0.1)
        assert caught.value.condition == "amqp:not-allowed"
        with pytest.raises(LinkDetached, match="requires sessions") as caught:
            await connection.receiver("talks")
        assert caught.value.condition == "amqp:not-allowed"


@pytest.mark.parametrize("as_go_has_it", [False, True])
async def test_the_peer_names_the_session(peer, as_go_has_it):
    name = Described(ULong(0x137000000C), "s") if as_go_has_it else "s"
    peer.on_attach = lambda link: link.accept(filters={SESSION_FILTER: name})
    async with peer, await peer.connect() as connection:
        receiver = await connection.accept_next_session("q", 1.0)
        assert receiver.session_id == "s"
        peer.send("q", Message.of(b"x").encode())
        await receiver.accept((await receiver.fetch(1))[0])
        assert peer.outcomes == [(ACCEPTED, False)]


async def test_a_peer_that_gives_no_session_is_told_so(peer):
    peer.on_attach = lambda link: link.accept(filters={})
    async with peer, await peer.connect() as connection:
        with pytest.raises(LinkDetached, match="no session of q"):
            await connection.accept_session("q", "s")
        await until(lambda: peer.detached == ["q"])


async def test_a_wait_that_is_given_up_ends_at_the_peer_too(peer):
    peer.on_attach = lambda link: None
    async with peer, await peer.connect() as connection:
        connection.timeout_s = 0.05
        with pytest.raises(TimeoutError, match="no answer to the attach"):
            await connection.accept_next_session("q", 0.05)
        await until(lambda: peer.detached == ["q"])
