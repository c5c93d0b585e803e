"""Whatever fails in the gateway while it serves one client ends at most that client's connection."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import UUID

import pytest

from broker.gateway import connection
from broker.gateway.gateway import Gateway
from broker.gateway.links.channel import LinkChannel
from broker.namespace.entities import Right
from broker.wire import Op, Outcome
from protocol import conditions
from protocol.codec import Described, UInt, ULong, encode
from protocol.engine.links import Link
from storage.records import NEVER, encode_message
from tests.end_to_end.raw_peer import ACCEPTED, CLOSE, DISPOSITION, FLOW, TRANSFER, message, outcome
from tests.gateway.in_process import QUEUE_ID, Client, Worker, started_gateway

RECEIVER, SENDER, RESPONSES, REQUESTS = range(4)
RECORD = encode_message(1, NEVER, bytes(16), message(b"body"))


class Foreseen(Exception):
    """By nobody but the tests."""


def fail(*_: object, **__: object) -> NoReturn:
    raise Foreseen


class Scene:
    """Two clients of one gateway and one worker, each with a sender, a receiver and requests. One of them fails."""

    directory: Path
    logged: list[tuple[str, BaseException | None]]  # with tracebacks: event, exception
    gateway: Gateway
    worker: Worker
    victim: Client
    other: Client

    def begin(self) -> None:
        """In the test's loop."""
        self.gateway, self.worker = started_gateway(self.directory)
        self.victim = Client(self.gateway)
        self.other = Client(self.gateway)
        for client in (self.victim, self.other):
            client.connect()
            client.attach(sender=False, address="orders", credit=10)
            client.attach(sender=True, address="orders")
            client.attach(sender=False, address="orders/$management", credit=10)
            client.attach(sender=True, address="orders/$management")
            client.frames()

    def link(self, handle: int, client: Client | None = None) -> Link:
        links = (client or self.victim).connection.engine.links.values()
        return next(link for link in links if link.name == f"link-{handle}")

    def bound(self, handle: int, client: Client | None = None) -> Any:
        return self.link(handle, client).context

    def channel(self, handle: int, client: Client | None = None) -> int:
        return int(channel_of(self.bound(handle, client)).number)

    def to_both(self, op: Op, handle: int, *rest: Any) -> None:
        """One frame with the same for both clients, the victim first."""
        self.worker.say(*[[op, self.channel(handle, client), *rest] for client in (self.victim, self.other)])

    def deliver(self, token: bytes = b"t" * 16) -> None:
        self.to_both(Op.DELIVER, RECEIVER, 1, [token, 1, 0, RECORD, None])

    def settle(self) -> None:
        """Both clients complete what they have received."""
        for client in (self.victim, self.other):
            client.say(DISPOSITION, True, UInt(0), None, False, outcome(ACCEPTED))

    async def request(self, operation: str, body: Any) -> int:
        """The victim asks; the number of the request to the worker."""
        request = encode(Described(ULong(0x74), {"operation": f"com.microsoft:{operation}"}))
        self.victim.transfer(REQUESTS, request + encode(Described(ULong(0x77), body)), settled=True)
        [number] = [command[2] for command in await self.worker.commands() if command[0] == Op.REQUEST]
        return int(number)

    async def expect_contained(self, failures: int = 1, victim_ends: bool = True) -> None:
        """The victim is gone, the failure is counted; the other client and the way to the worker are as before."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert self.victim.has_ended is victim_ends
        assert self.gateway.metrics.connection_failures == failures
        assert [event for event, _ in self.logged].count("connection failed") == failures
        assert all(error is not None for _, error in self.logged)
        assert not self.worker.transport.ended
        assert not self.other.has_ended
        assert self.other.connection in self.gateway.connections
        self.other.frames()
        number = self.other.transfer(SENDER, message(b"still there"))
        sends = [command for command in await self.worker.commands() if command[0] == Op.SEND]
        assert self.channel(SENDER, self.other) in [command[2] for command in sends]
        self.worker.say([Op.SENT, self.channel(SENDER, self.other), 1])
        [answer] = [frame for frame in self.other.frames() if frame.code == DISPOSITION]
        assert answer.fields[1] == number
        self.worker.say([Op.DELIVER, self.channel(RECEIVER, self.other), 1, [b"l" * 16, 2, 0, RECORD, None]])
        assert [frame.code for frame in self.other.frames()] == [TRANSFER]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    scene.directory, scene.logged = tmp_path, []
    log = SimpleNamespace(
        info=lambda event, **fields: None,
        exception=lambda event, **fields: scene.logged.append((event, sys.exception())),
    )
    monkeypatch.setattr(connection, "log", log)
    return scene


def channel_of(bound: Any) -> Any:
    assert isinstance(bound._only, LinkChannel)
    return bound._only


def patched(scene: Scene, handle: int, method: str) -> None:
    """The method of the link's channel, if it has such a one, or of the link fails."""
    bound = scene.bound(handle)
    channel = channel_of(bound)
    setattr(channel if hasattr(channel, method) else bound, method, fail)


ANSWERS: dict[str, Callable[[Scene], None]] = {
    "on_sent": lambda scene: scene.to_both(Op.SENT, SENDER, 1),
    "on_sent, refused": lambda scene: scene.to_both(Op.REFUSED, SENDER, 1, "QuotaExceeded", "full"),
    "on_deliver": lambda scene: scene.deliver(),
    "on_settled": lambda scene: scene.worker.say(
        [Op.SETTLED, [scene.channel(RECEIVER), 1, scene.channel(RECEIVER, scene.other), 1]]
    ),
    "on_settled, refused": lambda scene: scene.to_both(Op.UNSETTLED, RECEIVER, 1, "LockLost", "too late"),
    "on_opened": lambda scene: scene.to_both(Op.OPENED, RECEIVER, "", 0),
    "on_drained": lambda scene: scene.to_both(Op.DRAINED, RECEIVER, 0),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_of_the_worker(scene: Scene, answer: str) -> None:
    scene.begin()
    handle = SENDER if "sent" in answer else RECEIVER
    for client in (scene.victim, scene.other):
        client.transfer(SENDER, message(b"sent"))
    scene.deliver()
    scene.settle()
    method = answer.partition(",")[0]
    if method != "on_sent":
        scene.to_both(Op.SENT, SENDER, 1)
    if method != "on_settled":
        scene.worker.say([Op.SETTLED, [scene.channel(RECEIVER), 1, scene.channel(RECEIVER, scene.other), 1]])
    await scene.worker.commands()
    patched(scene, handle, method)
    ANSWERS[answer](scene)
    await scene.expect_contained()


async def test_the_end_of_a_receiver(scene: Scene) -> None:
    scene.begin()
    patched(scene, RECEIVER, "on_closed")
    scene.worker.say([Op.CLOSED, scene.channel(RECEIVER), "NotAllowed", "forwards now"])
    await scene.expect_contained()


@pytest.mark.parametrize(
    ("operation", "body", "result"),
    [
        ("peek-message", {"from-sequence-number": 0, "message-count": 1}, [1, 2]),
        ("renew-lock", {"lock-tokens": [UUID(int=1)]}, "nonsense"),
        ("renew-session-lock", {"session-id": "s"}, "nonsense"),
        ("receive-by-sequence-number", {"sequence-numbers": [1], "receiver-settle-mode": UInt(1)}, None),
    ],
)
async def test_an_answer_to_a_request_that_makes_no_sense(scene: Scene, operation, body, result) -> None:
    scene.begin()
    number = await scene.request(operation, body)
    scene.worker.say([Op.REPLY, number, result])
    await scene.expect_contained()


async def test_a_request_that_finds_nothing_is_answered(scene: Scene) -> None:
    """An error of ours that is found only in the answer of the partition."""
    scene.begin()
    body = {"sequence-numbers": [1], "receiver-settle-mode": UInt(1)}
    number = await scene.request("receive-by-sequence-number", body)
    scene.worker.say([Op.REPLY, number, [0, []]])
    [answer] = [frame for frame in scene.victim.frames() if frame.code == TRANSFER]
    assert conditions.MESSAGE_NOT_FOUND.encode() in answer.payload
    await scene.expect_contained(failures=0, victim_ends=False)


@pytest.mark.parametrize("method", ["on_worker_lost", "on_worker_back"])
async def test_the_loss_and_the_return_of_the_worker(scene: Scene, method: str) -> None:
    scene.begin()
    patched(scene, SENDER, method)
    scene.worker.lose()
    scene.worker = Worker(scene.worker.connection)
    await scene.expect_contained()


async def test_a_request_that_is_lost_with_the_worker(scene: Scene) -> None:
    scene.begin()
    await scene.request("set-session-state", {"session-id": "s", "session-state": b"state"})
    scene.bound(REQUESTS).fail = fail
    scene.worker.lose()
    scene.worker = Worker(scene.worker.connection)
    await scene.expect_contained()


async def test_what_is_written_at_the_end_of_a_frame(scene: Scene) -> None:
    scene.begin()
    scene.victim.connection.engine.pull_pieces = fail
    scene.deliver()
    await scene.expect_contained(failures=2)  # nor can it say so


async def test_what_a_link_posts_at_the_end_of_a_frame(scene: Scene) -> None:
    scene.begin()
    scene.victim.transfer(SENDER, message(b"sent"))
    scene.bound(SENDER).window *= 2  # so that the answer is followed by credit
    patched(scene, SENDER, "post")
    scene.worker.say([Op.SENT, scene.channel(SENDER), 1])
    await scene.expect_contained()


async def test_a_heartbeat(scene: Scene) -> None:
    scene.begin()
    scene.victim.connection.engine.tick = fail
    for each in list(scene.gateway.connections):
        each.tick(1)
    await scene.expect_contained()


async def test_reading_on_when_the_worker_has_caught_up(scene: Scene) -> None:
    scene.begin()
    scene.worker.connection.pause_writing()
    scene.victim.transfer(SENDER, message(b"one more"))
    assert scene.victim.transport.is_reading_paused
    assert not scene.other.transport.is_reading_paused
    scene.victim.transport.resume_reading = fail
    scene.worker.connection.resume_writing()
    await scene.expect_contained()


async def test_only_who_waits_for_the_worker_is_looked_at_when_it_has_caught_up(scene: Scene) -> None:
    scene.begin()
    scene.worker.connection.pause_writing()
    scene.victim.transfer(SENDER, message(b"one more"))
    assert scene.gateway.waiting == {scene.victim.connection}
    scene.other.connection.regulate = fail
    scene.worker.connection.resume_writing()
    assert not scene.victim.transport.is_reading_paused
    assert not scene.gateway.waiting


async def test_a_connection_that_ends_while_it_waits_for_the_worker(scene: Scene) -> None:
    scene.begin()
    scene.worker.connection.pause_writing()
    scene.victim.transfer(SENDER, message(b"one more"))
    scene.victim.connection.connection_lost(None)
    assert not scene.gateway.waiting
    scene.worker.connection.resume_writing()
    assert scene.gateway.metrics.connection_failures == 0


async def test_the_deletion_of_an_entity(scene: Scene) -> None:
    scene.begin()
    scene.victim.connection.detach = fail
    scene.worker.say([Op.DELETED, 2, [QUEUE_ID >> 3]])
    await asyncio.sleep(0)
    assert scene.victim.has_ended
    assert scene.gateway.metrics.connection_failures == 1
    assert not scene.worker.transport.ended
    assert not scene.other.has_ended
    assert not any(link.context for link in scene.other.connection.engine.links.values())


async def test_the_gateways_end(scene: Scene) -> None:
    scene.begin()
    scene.victim.connection.engine.close = fail
    for each in list(scene.gateway.connections):
        each.shut_down()
    await asyncio.sleep(0)
    assert scene.victim.transport.ended
    assert scene.other.has_ended


async def test_a_right_that_ends(scene: Scene) -> None:
    scene.begin()
    victim = scene.victim.connection
    victim.rights.grant("elsewhere", {Right.SEND}, None, time.time() + 0.01)
    victim._watch_expiry(time.time())
    victim._links.detach_uncovered = fail
    await asyncio.sleep(0.05)  # it ends
    await scene.expect_contained()


async def test_a_deadline(scene: Scene) -> None:
    scene.begin()
    victim = scene.victim.connection
    victim._set_deadline(1, "too late")
    victim.tracked = fail
    await asyncio.sleep(0.05)  # it is too late
    await scene.expect_contained()


@pytest.mark.parametrize("method", ["on_message", "on_flow"])
async def test_what_a_client_says(scene: Scene, method: str) -> None:
    scene.begin()
    patched(scene, SENDER if method == "on_message" else RECEIVER, method)
    if method == "on_message":
        header = encode(Described(ULong(0x70), [None, None, None, True]))  # so that Python takes it
        scene.victim.transfer(SENDER, header + message(b"body"))
    else:
        numbers = (UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(RECEIVER), UInt(0), UInt(20))
        scene.victim.say(FLOW, *numbers)
    await scene.expect_contained()


async def test_a_client_that_does_not_read(scene: Scene) -> None:
    scene.begin()
    victim = scene.victim.connection
    victim._links.ask_again = fail
    victim.pause_writing()
    await scene.expect_contained(victim_ends=False)
    victim.resume_writing()
    await scene.expect_contained(failures=2)


async def test_the_end_of_a_connection(scene: Scene) -> None:
    """One link that fails then keeps none of the others."""
    scene.begin()
    channel = scene.channel(RECEIVER)
    patched(scene, SENDER, "on_detach")
    scene.victim.transport.abort()
    await asyncio.sleep(0)
    closed = [command[2] for command in await scene.worker.commands() if command[0] == Op.CLOSE_RECEIVER]
    assert closed == [channel]
    assert scene.victim.connection not in scene.gateway.connections
    await scene.expect_contained()


async def test_messages_to_be_received_and_deleted_go_back(scene: Scene) -> None:
    """Neither it nor what comes behind it ever reached the client."""
    scene.begin()
    client = scene.victim
    client.attach(sender=False, address="orders", credit=10)
    bound = scene.bound(4)
    bound.receives_and_deletes = True
    entries = [b"a" * 16, 1, 0, RECORD, None, b"b" * 16, 2, 0, b"broken", None, b"c" * 16, 3, 0, RECORD, None]
    await scene.worker.commands()
    scene.worker.say([Op.DELIVER, channel_of(bound).number, 1, entries])
    restored = [command[3] for command in await scene.worker.commands() if command[0] == Op.RESTORE]
    assert [item for items in restored for item in items] == entries[5:]
    await scene.expect_contained()


async def test_a_message_that_cannot_be_delivered_counts_as_failed(scene: Scene) -> None:
    """Or it would end every connection that it is handed out to."""
    scene.begin()
    entries = [b"a" * 16, 1, 0, RECORD, None, b"b" * 16, 2, 0, b"broken", None, b"c" * 16, 3, 0, RECORD, None]
    await scene.worker.commands()
    scene.worker.say([Op.DELIVER, scene.channel(RECEIVER), 1, entries])
    settled = [command[3:6] for command in await scene.worker.commands() if command[0] == Op.SETTLE]
    assert settled == [
        [Outcome.ABANDONED, [0, 1], [b"b" * 16]],
        [Outcome.RELEASED, [0, 1], [b"c" * 16]],
    ]
    await scene.expect_contained()


async def test_a_command_that_cannot_be_packed(scene: Scene) -> None:
    """What the other client has sent in the same turn of the loop reaches the worker all the same."""
    scene.begin()
    await scene.worker.commands()
    scene.other.transfer(SENDER, message(b"before"))
    bound = scene.bound(RECEIVER)
    bound.on_flow = lambda: channel_of(bound).worker.post((Op.GRANT, 0, channel_of(bound).number, 2**64))
    scene.victim.say(FLOW, UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(RECEIVER), UInt(0), UInt(20))
    scene.other.transfer(SENDER, message(b"after"))
    sends = [command for command in await scene.worker.commands() if command[0] == Op.SEND]
    assert [command[2] for command in sends] == [scene.channel(SENDER, scene.other)] * 2
    scene.worker.say([Op.SENT, scene.channel(SENDER, scene.other), 2])
    await scene.expect_contained()


async def test_the_client_is_told_that_the_broker_failed(scene: Scene) -> None:
    scene.begin()
    patched(scene, SENDER, "on_sent")
    scene.victim.frames()
    scene.worker.say([Op.SENT, scene.channel(SENDER), 1])
    [closed] = [frame for frame in scene.victim.frames() if frame.code == CLOSE]
    assert closed.fields[0].value[0] == conditions.INTERNAL_ERROR


async def test_a_gateway_whose_own_task_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor starts another; one without heartbeats, or without a worker for good, would serve nobody."""
    gateway, _ = started_gateway(tmp_path)
    gateway.router.workers[0].connected.clear()

    async def no_ops() -> dict[str, int]:
        return {}

    monkeypatch.setattr(gateway, "_start_operations", no_ops)

    async def keep_connected() -> None:
        raise Foreseen

    monkeypatch.setattr(gateway.router.workers[0], "keep_connected", keep_connected)
    with pytest.raises(Foreseen):
        await gateway.run()
