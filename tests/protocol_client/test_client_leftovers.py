"""Of a client's connection that has ended nothing lives on, whoever waited, without Python's search for cycles."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from protocol.client.connection import Connection, connect
from protocol.client.connection_string import Anonymous, Credentials, Plain, SharedAccessKey
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkDetached
from protocol.client.messages import Message, value_section
from protocol.engine.deliveries import reject
from tests.leftovers import Leftovers
from tests.patience import PATIENCE_S, until
from tests.protocol_client.scripted_peer import ScriptedPeer

BODY = Message.of(b"x" * 1000).encode()
LARGE = Message.of(b"x" * 200_000).encode()
KEY = SharedAccessKey("name", "key")


class Scene:
    """A client of a peer, and what waits on it."""

    def __init__(self, peer: ScriptedPeer, connection: Connection) -> None:
        self.peer, self.connection = peer, connection
        self.waiting: list[asyncio.Future[Any]] = []
        self.held: list[Any] = []  # until the connection has ended

    @property
    def transport(self) -> asyncio.Transport:
        """The peer's."""
        assert self.peer.side is not None
        assert self.peer.side.transport is not None
        return self.peer.side.transport

    async def wait(self, *several: Coroutine[Any, Any, Any]) -> None:
        """Begin to wait for these, as far as they get."""
        self.waiting += [asyncio.create_task(each) for each in several]
        await self.turns()

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def be_mute(self) -> None:
        """The peer answers nothing from now on."""
        self.peer.on_message = lambda link, delivery: None
        self.peer.on_outcome = lambda link, delivery, state: None
        self.peer.on_flow = lambda link: None
        self.peer.on_attach = lambda link: None


State = Callable[[Scene], Awaitable[None]]
End = Callable[[Scene], Awaitable[None]]


# -- what is under way


async def nothing(scene: Scene) -> None: ...


async def idle_links(scene: Scene) -> None:
    await scene.connection.sender("there")
    await scene.connection.receiver("here")
    await scene.connection.management("there")
    await scene.connection.coordinator()


async def answered_work(scene: Scene) -> None:
    sender = await scene.connection.sender("there")
    await sender.send(BODY)
    assert await sender.send_all([BODY] * 3) == 3
    receiver = await scene.connection.receiver("here")
    scene.peer.send("here", BODY)
    received = await receiver.receive()
    assert received is not None
    await receiver.accept(received)


async def sends_without_outcome(scene: Scene) -> None:
    scene.be_mute()
    scene.peer.on_attach = lambda link: link.accept(0, 5)
    sender = await scene.connection.sender("there")
    scene.waiting += [sender.enqueue(BODY), await sender.post(BODY)]
    await scene.wait(sender.send(BODY), sender.send(BODY))


async def sends_without_room(scene: Scene) -> None:
    scene.be_mute()
    scene.peer.on_attach = lambda link: link.accept(0, 2)
    sender = await scene.connection.sender("there")
    await scene.wait(*(sender.send(BODY) for _ in range(4)))
    scene.waiting.append(sender.enqueue(BODY))
    await scene.wait(sender.post(BODY))


async def many_sends(scene: Scene) -> None:
    scene.be_mute()
    scene.peer.on_attach = lambda link: link.accept(0, 2)
    sender = await scene.connection.sender("there")
    await scene.wait(sender.send_all([BODY] * 5), sender.send_all([BODY] * 2))


async def refused_sends(scene: Scene) -> None:
    scene.peer.on_message = lambda link, delivery: reject(delivery, "amqp:not-allowed", "no")
    sender = await scene.connection.sender("there")
    scene.waiting += [asyncio.create_task(sender.send(BODY)), asyncio.create_task(sender.send_all([BODY] * 3))]
    await asyncio.wait(scene.waiting)


async def receivers_that_wait(scene: Scene) -> None:
    receiver = await scene.connection.receiver("here")

    async def all_() -> None:
        async for _ in receiver:
            pass

    await scene.wait(receiver.receive(), receiver.receive(100), all_())


async def a_fetch(scene: Scene) -> None:
    scene.be_mute()
    scene.peer.on_attach = lambda link: link.accept()
    receiver = await scene.connection.receiver("here", credit=0)
    await scene.wait(receiver.fetch(10), receiver.fetch(10, 100))


async def a_watched_receiver(scene: Scene) -> None:
    receiver = await scene.connection.receiver("here")
    changes: list[bool] = []
    receiver.watch(lambda: changes.append(receiver.closed))
    scene.peer.send("here", BODY)
    await scene.turns()


async def messages(scene: Scene) -> None:
    """Some are not taken, one is not settled."""
    receiver = await scene.connection.receiver("here")
    for number in range(4):
        scene.peer.send("here", BODY, bytes((number,)) * 16, settled=number == 3)
    scene.held.append(await receiver.receive())


async def unfinished_messages(scene: Scene) -> None:
    await scene.connection.receiver("here")
    scene.peer.link("here").send(b"t" * 16, LARGE, b"", 0, False)
    scene.transport.write(scene.peer.engine.pull()[:100_000])  # one frame, and a part of the next
    await asyncio.sleep(0.05)  # the client reads what there is


async def settlements_without_answer(scene: Scene) -> None:
    receiver = await scene.connection.receiver("here")
    scene.peer.on_outcome = lambda link, delivery, state: None
    for number in range(6):
        scene.peer.send("here", BODY, bytes((number,)) * 16)
    await until(lambda: len(receiver._buffer) == 6)
    first, second, third, fourth, *rest = receiver.take_all()
    scene.waiting += [receiver.accept(first), receiver.reject(second, "r"), receiver.modify(third)]
    scene.waiting += [receiver.accept(fourth, b"t"), receiver.accept_all(rest)]
    await scene.turns()


async def requests(scene: Scene) -> None:
    management = await scene.connection.management("there")
    await scene.wait(management.peek(), management.purge())
    scene.be_mute()
    await scene.wait(management.peek(), scene.connection.counts())


async def a_request_that_came_too_late(scene: Scene) -> None:
    management = await scene.connection.management("there")
    with pytest.raises(TimeoutError):
        await management.request("nothing", timeout_s=0.01)


async def links_that_attach(scene: Scene) -> None:
    scene.be_mute()
    connection = scene.connection
    await scene.wait(connection.sender("a"), connection.receiver("b"), connection.management("c"))
    await scene.wait(connection.coordinator(), connection.accept_next_session("d", 10), connection.sender("e"))


async def refused_links(scene: Scene) -> None:
    scene.peer.on_attach = lambda link: link.refuse("amqp:not-found", "no")
    for _ in range(2):
        with pytest.raises(LinkDetached):
            await scene.connection.sender("nowhere")
        with pytest.raises(LinkDetached):
            await scene.connection.management("nowhere")


async def a_session_that_was_not_given(scene: Scene) -> None:
    with pytest.raises(LinkDetached):
        await scene.connection.accept_session("here", "s")


async def transactions(scene: Scene) -> None:
    scene.peer.on_message = lambda link, delivery: None
    coordinator = await scene.connection.coordinator()
    await scene.wait(coordinator.declare(), coordinator.commit(b"t"))


async def cancelled_tasks(scene: Scene) -> None:
    await receivers_that_wait(scene)
    await requests(scene)
    await links_that_attach(scene)
    for each in scene.waiting:
        each.cancel()
    await scene.turns()


async def links_that_were_closed(scene: Scene) -> None:
    await sends_without_outcome(scene)
    scene.peer.on_attach = lambda link: link.accept()
    async with await scene.connection.receiver("here"):
        pass
    await scene.turns()


async def links_that_the_peer_ended(scene: Scene) -> None:
    await receivers_that_wait(scene)
    await sends_without_outcome(scene)
    for link in scene.peer.links:
        link.detach("amqp:internal-error", "enough")
    scene.peer.flush()
    await scene.turns()


async def sessions_that_the_peer_ended(scene: Scene) -> None:
    await receivers_that_wait(scene)
    await sends_without_outcome(scene)
    for session in scene.peer.engine.sessions.values():
        session.end("amqp:internal-error", "enough")
    scene.peer.flush()
    await scene.turns()


async def tokens(scene: Scene) -> None:
    """One is put, and one not yet."""
    await scene.connection.sender("there")
    scene.peer.on_message = lambda link, delivery: None
    await scene.wait(scene.connection.sender("here"), scene.connection.receiver("here"))


async def a_peer_that_does_not_read(scene: Scene) -> None:
    sender = await scene.connection.sender("there", max_in_flight=100)
    scene.transport.pause_reading()
    await scene.wait(*(sender.send(LARGE) for _ in range(100)))


STATES: list[State] = [
    nothing,
    idle_links,
    answered_work,
    sends_without_outcome,
    sends_without_room,
    many_sends,
    refused_sends,
    receivers_that_wait,
    a_fetch,
    a_watched_receiver,
    messages,
    unfinished_messages,
    settlements_without_answer,
    requests,
    a_request_that_came_too_late,
    links_that_attach,
    refused_links,
    a_session_that_was_not_given,
    transactions,
    cancelled_tasks,
    links_that_were_closed,
    links_that_the_peer_ended,
    sessions_that_the_peer_ended,
    tokens,
    a_peer_that_does_not_read,
]


# -- how it ends


async def closed(scene: Scene) -> None:
    await scene.connection.close()


async def aborted(scene: Scene) -> None:
    scene.connection.abort()


async def lost(scene: Scene) -> None:
    scene.transport.abort()


async def ended_by_the_peer(scene: Scene) -> None:
    scene.peer.engine.close("amqp:internal-error", "enough")
    scene.peer.flush()


async def ended_by_nonsense(scene: Scene) -> None:
    scene.transport.write(b"nonsense" * 10)


ENDS: list[End] = [closed, aborted, lost, ended_by_the_peer, ended_by_nonsense]


def answer_tokens(peer: ScriptedPeer) -> None:
    """The peer takes all tokens that are put."""
    told = peer.on_message

    def on_message(link: Any, delivery: Any) -> None:
        told(link, delivery)
        if link.address == "$cbs":
            request = Message.decode(peer.messages[-1])
            answer = Message(value_section(None), correlation_id=request.message_id)
            answer.application_properties["status-code"] = 202
            peer.link("$cbs").send(b"answer", answer.encode(), b"", 0, True)

    peer.on_message = on_message


def parts_of(connection: Connection) -> list[Any]:
    """What the connection consists of and can be watched."""
    tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    links = [link.context for link in connection.engine.links.values()]
    return [connection, connection.engine, connection.opened, *links, *(end.attached for end in links), *tasks]


def check(end: Callable[[Leftovers | None], Coroutine[Any, Any, None]], run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await end(None)  # what is made once is made
            with Leftovers("protocol", "_asyncio") as leftovers:
                await end(leftovers)
                for _ in range(5):
                    await asyncio.sleep(0)

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("state", STATES, ids=[state.__name__ for state in STATES])
def test_nothing_of_a_connection_lives_on(state: State, run: Callable[..., Any]) -> None:
    credentials: Credentials = KEY if state is tokens else Anonymous()

    async def end_one(leftovers: Leftovers | None, end: End) -> None:
        async with ScriptedPeer() as peer:
            if state is tokens:
                answer_tokens(peer)
            scene = Scene(peer, await peer.connect(credentials))
            await state(scene)
            if leftovers is not None:
                leftovers.ended(*parts_of(scene.connection), *scene.waiting)
            await end(scene)
            async with asyncio.timeout(PATIENCE_S):
                await scene.connection.wait_closed()
                await asyncio.gather(*scene.waiting, return_exceptions=True)

    async def end_all(leftovers: Leftovers | None) -> None:
        for end in ENDS:
            await end_one(leftovers, end)

    check(end_all, run)


async def mute_server(peer: ScriptedPeer) -> Connection:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    try:
        return await connect("127.0.0.1", server.sockets[0].getsockname()[1], timeout_s=0.05)
    finally:
        server.close()


async def nobody(peer: ScriptedPeer) -> Connection:
    peer.server.close()
    return await peer.connect()


async def wrong_password(peer: ScriptedPeer) -> Connection:
    return await peer.connect(Plain("user", "wrong"))


async def no_answer_to_the_open(peer: ScriptedPeer) -> Connection:
    peer.silent = True
    return await peer.connect(timeout_s=0.05)


async def cancelled(peer: ScriptedPeer) -> Connection:
    peer.silent = True
    task = asyncio.create_task(peer.connect())
    await until(lambda: peer.side)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise ConnectionLost("", "cancelled") from None


async def refused_token(peer: ScriptedPeer) -> Connection:
    connection = await peer.connect(KEY, timeout_s=0.05)
    try:
        await connection.sender("there")
    finally:
        await connection.close()
    return connection


BEGINNINGS = [mute_server, nobody, wrong_password, no_answer_to_the_open, cancelled, refused_token]


@pytest.mark.parametrize("begin", BEGINNINGS, ids=[begin.__name__ for begin in BEGINNINGS])
def test_nothing_of_a_connection_that_was_refused_lives_on(
    begin: Callable[[ScriptedPeer], Awaitable[Connection]],
) -> None:
    async def end_one(leftovers: Leftovers | None) -> None:
        async with ScriptedPeer() as peer:
            with suppress(AuthenticationFailed, ConnectionLost, TimeoutError, ClientError):
                await begin(peer)
                raise AssertionError("it was not refused")

    check(end_one, asyncio.run)
