"""Connecting, authenticating, ending: whatever ends a connection wakes all who wait on it."""

import asyncio

import pytest

from protocol.client import connection as client
from protocol.client.connection import connect
from protocol.client.connection_string import Plain
from protocol.client.errors import AuthenticationFailed, ConnectionLost, LinkClosed, LinkDetached
from protocol.client.messages import Message
from tests.ports import free_ports

MESSAGE = Message.of(b"hello").encode()


async def test_plain_credentials_are_told(peer):
    async with peer, await peer.connect(Plain("user", "password")) as connection:
        assert not connection.closed


async def test_wrong_credentials_are_an_authentication_failure(peer):
    async with peer:
        with pytest.raises(AuthenticationFailed, match="refuses the credentials") as caught:
            await peer.connect(Plain("user", "wrong"))
        assert caught.value.condition == "amqp:unauthorized-access"


async def test_nobody_listening_is_a_lost_connection():
    (port,) = free_ports(1)
    with pytest.raises(ConnectionLost, match=f"port {port}"):
        await connect("127.0.0.1", port)


async def test_a_peer_that_speaks_something_else_is_a_lost_connection():
    async def greet(reader, writer):
        await reader.readexactly(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ConnectionLost, match="breaks the protocol"):
            await connect("127.0.0.1", server.sockets[0].getsockname()[1])


async def test_a_peer_that_says_nothing_is_given_up():
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ConnectionLost, match="within"):
            await connect("127.0.0.1", server.sockets[0].getsockname()[1], timeout_s=0.1)


async def test_close_is_told_to_the_peer(peer):
    async with peer:
        connection = await peer.connect()
        await connection.close()
        assert peer.closed == [("", "")]
        assert connection.closed
        assert isinstance(await connection.wait_closed(), LinkClosed)
        with pytest.raises(LinkClosed):
            await connection.sender("q")


async def test_close_does_not_wait_for_ever(peer, monkeypatch):
    monkeypatch.setattr(client, "CLOSE_SECONDS", 0.05)
    async with peer:
        connection = await peer.connect()
        peer.silent = True
        await connection.close()
        assert connection.closed


async def everybody_waiting(peer, connection):
    """One task for each way to wait on a connection that does not answer."""
    peer.on_message = lambda link, delivery: None
    peer.on_outcome = lambda link, delivery, state: None
    sender = await connection.sender("busy")
    receiver = await connection.receiver("q")
    peer.send("q", MESSAGE)
    received = await receiver.receive()
    peer.credit = 0
    stuck = await connection.sender("no credit")
    management = await connection.management("q")

    async def iterate():
        async for _ in receiver:
            raise AssertionError("nothing comes")

    peer.on_flow = lambda link: None
    drained = await connection.receiver("drained", credit=5)
    peer.on_attach = lambda link: None
    waiting = [
        asyncio.create_task(coroutine)
        for coroutine in (
            sender.send(MESSAGE),
            stuck.send(MESSAGE),
            stuck.send_all([MESSAGE, MESSAGE]),
            receiver.receive(),
            iterate(),
            drained.drain(),
            management.peek(),
            connection.sender("unanswered"),
        )
    ]
    waiting.append(asyncio.ensure_future(receiver.accept(received)))
    await asyncio.sleep(0.05)  # nobody may be done meanwhile
    assert not any(task.done() for task in waiting)
    return waiting


async def test_a_broken_connection_wakes_everybody(peer):
    async with peer:
        connection = await peer.connect()
        waiting = await everybody_waiting(peer, connection)
        peer.side.transport.abort()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLost] * len(waiting)
        assert len(set(map(id, results))) == len(waiting)
        assert connection.closed


async def test_the_peers_close_tells_its_reason_to_everybody(peer):
    async with peer:
        connection = await peer.connect()
        waiting = await everybody_waiting(peer, connection)
        peer.engine.close("amqp:connection:forced", "maintenance")
        peer.flush()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {(type(result), result.condition, result.description) for result in results} == {
            (ConnectionLost, "amqp:connection:forced", "maintenance")
        }


async def test_our_own_close_ends_iteration_and_wakes_the_others(peer):
    async with peer:
        connection = await peer.connect()
        waiting = await everybody_waiting(peer, connection)
        await connection.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        iteration = results.pop(4)
        assert iteration is None
        assert {type(result) for result in results} == {LinkClosed}


async def test_bytes_that_are_no_frames_end_the_connection(peer):
    async with peer:
        connection = await peer.connect()
        receiver = await connection.receiver("q")
        peer.side.transport.write(b"\x00\x00\x00\x01garbage")
        with pytest.raises(ConnectionLost, match="breaks the protocol"):
            await receiver.receive()


async def test_an_idle_connection_is_kept_by_heartbeats(peer):
    peer.idle_time_out_ms = 300
    async with peer, await peer.connect() as connection:
        for _ in range(15):  # longer than the peer would wait, which is twice that time
            await asyncio.sleep(0.05)
            peer.engine.tick(int(asyncio.get_running_loop().time() * 1000))
            peer.flush()
        assert not connection.closed


async def test_a_silent_peer_is_cut_off(peer):
    async with peer:
        connection = await peer.connect(idle_time_out_ms=50)
        receiver = await connection.receiver("q")
        with pytest.raises(ConnectionLost, match="timeout"):
            await receiver.receive()


async def test_a_link_that_the_peer_attaches_is_refused(peer):
    async with peer, await peer.connect() as connection:
        await connection.sender("q")
        session = peer.link("q").session
        theirs = peer.engine.attach(session, "theirs", sender=True, source="a", target="b")
        peer.flush()
        await connection.sender("later")
        assert theirs.closed


async def test_many_links_take_several_sessions(peer, monkeypatch):
    monkeypatch.setattr(client, "MAX_LINKS_PER_SESSION", 2)
    async with peer, await peer.connect() as connection:
        senders = [await connection.sender(f"q{number}") for number in range(5)]
        assert len({link.session for link in peer.links}) == 3
        await asyncio.gather(*(sender.close() for sender in senders))
        await connection.sender("again")
        assert len({link.session for link in peer.links}) == 3


async def test_a_session_that_the_peer_ends_tells_its_links_why(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.link("q").session.end("amqp:session:window-violation", "too much")
        peer.flush()
        with pytest.raises(LinkDetached, match="too much") as caught:
            await receiver.receive()
        assert caught.value.condition == "amqp:session:window-violation"
        await (await connection.sender("q")).send(MESSAGE)


async def test_a_request_that_cannot_be_sent_leaves_nothing_to_the_log_of_the_loop(peer):
    """Its answer fails, too, and nobody waits for that."""
    peer.on_message = lambda link, delivery: peer.side.transport.abort()
    async with peer, await peer.connect() as connection:
        management = await connection.management("q")
        with pytest.raises(ConnectionLost):
            await management.peek()
