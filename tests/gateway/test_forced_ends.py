"""Links that the broker ends: what clients ask for before is answered, and what they ask for later has no effect."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.catalog.catalog import Definition
from broker.gateway.rights import Rights
from broker.gateway.transactions import Transaction
from broker.namespace.entities import QueueDescription
from broker.runs import run_of
from broker.wire import Op, Outcome
from protocol.codec import Symbol, UByte, UInt
from protocol.engine.deliveries import TRANSACTIONAL
from storage.records import NEVER, encode_message
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    FLOW,
    REJECTED,
    RELEASED,
    TRANSFER,
    error_of,
    message,
    outcome,
    source,
    target,
)
from tests.gateway.in_process import QUEUE_ID, Client, Worker, gateway_with_workers

FILTER = Symbol("com.microsoft:session-filter")
LATER_MS = 2_000_000_000_000
RECORD = encode_message(1, NEVER, bytes(16), message(b"m"))
ENDS = {
    "disabled": "com.microsoft:entity-disabled",
    "deleted": "amqp:not-found",
    "deleted here": "amqp:not-found",
    "rights": "amqp:unauthorized-access",
}


class Scene:
    """`in_runs`: deliveries come as a run, which the extension takes if it is there."""

    in_runs = False

    def __init__(self, partitions: int = 1) -> None:
        self.gateway, self.workers = gateway_with_workers(Path("/nowhere"), partitions)
        self.client = Client(self.gateway)
        self.client.connect()

    @property
    def bound(self) -> Any:
        [link] = self.client.connection.engine.links.values()
        return link.context

    def receives(self, messages: int = 4) -> None:
        """A client that has so many messages, of the last worker's partition."""
        self.client.attach(sender=False, address="orders", credit=100)
        self.channel = self.bound._channels[-1]
        entries: list[Any] = []
        for number in range(messages):
            entries += (self.token(number), number + 1, 0, RECORD, None)
        if self.in_runs:
            run = [self.token(0), 1, 0, messages, run_of([RECORD] * messages)]
            self.worker.say([Op.DELIVER_RUN, self.channel.number, LATER_MS, *run])
        else:
            self.worker.say([Op.DELIVER, self.channel.number, LATER_MS, entries])
        self.ids = [frame.fields[1] for frame in self.client.frames() if frame.code == TRANSFER]
        assert len(self.ids) == messages

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

    def token(self, number: int) -> bytes:
        return (len(self.workers) - 1).to_bytes(2, "big") + b"incarn" + (number + 1).to_bytes(8, "big")

    def settle(self, number: int, code: int = ACCEPTED, *, settled: bool = False) -> None:
        self.client.say(DISPOSITION, True, UInt(self.ids[number]), None, settled, outcome(code))

    async def settled(self) -> list[Any]:
        """Outcomes and tokens that the workers have got since the last call."""
        found: list[Any] = []
        for worker in self.workers:
            for command in await worker.commands():
                if command[0] == Op.SETTLE:
                    found += [(command[3], token) for token in command[5]]
        return found

    def end(self, how: str) -> None:
        connection = self.client.connection
        if how == "disabled":
            for worker, channel in zip(self.workers, self.bound._channels, strict=True):
                worker.say([Op.CLOSED, channel.number, "EntityDisabled", "it is disabled"])
        elif how == "deleted":
            self.workers[0].say([Op.DELETED, 2, [QUEUE_ID >> 3]])
        elif how == "deleted here":
            for worker, channel in zip(self.workers, self.bound._channels, strict=True):
                worker.say([Op.CLOSED, channel.number, "EntityNotFound", "it is gone"])
        else:
            connection.rights = Rights(everything=False)
            connection._links.detach_uncovered(0.0)
            connection.flush()

    def told(self) -> list[Any]:
        """What came since the last call: codes of outcomes with the numbers of deliveries; conditions of detaches."""
        found: list[Any] = []
        for frame in self.client.frames():
            if frame.code == DISPOSITION and len(frame.fields) > 4:
                first, last = frame.fields[1], frame.fields[2]
                for each in range(first, (first if last is None else last) + 1):
                    found.append((int(frame.fields[4].descriptor), self.ids.index(each)))
            elif frame.code == DETACH:
                found.append(error_of(frame)[0])
        return found


@pytest.fixture(params=[False, True], ids=["entries", "runs"], autouse=True)
def in_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "in_runs", request.param)


@pytest.fixture(params=[1, 2], ids=["plain", "partitioned"])
def partitions(request: pytest.FixtureRequest) -> int:
    return int(request.param)


CONDITIONS = [pytest.param(how, condition, id=how) for how, condition in ENDS.items()]


@pytest.mark.parametrize(("how", "condition"), CONDITIONS)
async def test_an_outcome_that_came_before_is_answered_before_the_link_ends(partitions, how, condition):
    scene = Scene(partitions)
    scene.receives()
    scene.settle(0)
    scene.settle(1, RELEASED)
    assert await scene.settled() == [(Outcome.ACCEPTED, scene.token(0)), (Outcome.RELEASED, scene.token(1))]
    scene.end(how)
    assert scene.told() == []
    scene.worker.say([Op.SETTLED, [scene.channel.number, 1]])
    assert scene.told() == [(ACCEPTED, 0)]
    scene.worker.say([Op.UNSETTLED, scene.channel.number, 1, "LockLost", "it was too late"])
    assert scene.told() == [(REJECTED, 1), condition]


@pytest.mark.parametrize(("how", "condition"), CONDITIONS)
async def test_outcomes_of_the_same_read_are_answered_too(partitions, how, condition):
    """They have gathered, and the partition does not have them yet."""
    scene = Scene(partitions)
    scene.receives()
    connection = scene.client.connection
    flush, connection.flush = connection.flush, lambda: None
    scene.settle(0)
    connection.flush = flush
    scene.end(how)
    assert await scene.settled() == [(Outcome.ACCEPTED, scene.token(0))]
    assert scene.told() == []
    scene.worker.say([Op.SETTLED, [scene.channel.number, 1]])
    assert scene.told() == [(ACCEPTED, 0), condition]


@pytest.mark.parametrize("code", [ACCEPTED, RELEASED])
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(("how", "condition"), CONDITIONS)
async def test_an_outcome_that_comes_later_has_no_effect(partitions, how, condition, settled, code):
    """The lock goes on, and the client may settle by its token."""
    scene = Scene(partitions)
    scene.receives()
    scene.end(how)
    assert scene.told() == [condition]
    scene.settle(0, code, settled=settled)
    assert await scene.settled() == []
    assert scene.told() == []
    assert not scene.client.has_ended


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(("how", "condition"), CONDITIONS)
async def test_while_the_link_waits_for_answers_it_takes_no_outcomes_and_no_deliveries(
    partitions, how, condition, settled
):
    scene = Scene(partitions)
    scene.receives()
    scene.settle(0)
    await scene.settled()
    scene.end(how)
    scene.end(how)
    scene.settle(1, settled=settled)
    scene.settle(2, RELEASED, settled=settled)
    token = scene.token(9)
    scene.worker.say([Op.DELIVER, scene.channel.number, LATER_MS, [token, 9, 0, RECORD, None]])
    assert await scene.settled() == [(Outcome.RELEASED, token)], "it was not sent"
    scene.worker.say([Op.SETTLED, [scene.channel.number, 1]])
    assert scene.told() == [(ACCEPTED, 0), condition]
    scene.settle(3)
    assert await scene.settled() == []


@pytest.mark.parametrize(("how", "condition"), CONDITIONS)
async def test_an_outcome_that_a_dead_worker_had_is_unknown(partitions, how, condition):
    scene = Scene(partitions)
    scene.receives()
    scene.settle(0)
    await scene.settled()
    scene.end(how)
    scene.worker.lose()
    assert scene.told() == [(REJECTED, 0), condition]


async def test_a_worker_that_hangs_holds_no_end_up(partitions):
    scene = Scene(partitions)
    scene.receives()
    scene.settle(0)
    await scene.settled()
    scene.end("rights")
    scene.gateway.router.busy_seconds = 1
    scene.worker.connection._awaits = True
    scene.worker.connection._look()
    assert scene.told() == [(REJECTED, 0), ENDS["rights"]]


@pytest.mark.parametrize("how", ["detaches", "leaves"])
async def test_a_client_that_goes_meanwhile_is_told_nothing_more(partitions, how):
    scene = Scene(partitions)
    scene.receives()
    scene.settle(0)
    await scene.settled()
    scene.end("rights")
    if how == "detaches":
        scene.client.say(DETACH, UInt(0), True)
        assert scene.told() == [""]
    else:
        scene.client.transport.abort()
        await asyncio.sleep(0)
    scene.worker.say([Op.SETTLED, [scene.channel.number, 1]])
    assert scene.told() == []


async def test_sends_that_came_before_are_answered_and_later_ones_are_not_stored(partitions):
    scene = Scene(partitions)
    handle = scene.client.attach(sender=True, address="orders")
    scene.client.frames()
    for worker in scene.workers:
        await worker.commands()
    scene.ids = [scene.client.transfer(handle, message(b"before"))]
    [(worker, command)] = await sends(scene)
    scene.end("rights")
    scene.client.transfer(handle, message(b"later"))
    assert await sends(scene) == []
    assert scene.told() == []
    worker.say([Op.SENT, command[2], 1])
    assert scene.told() == [(ACCEPTED, 0), ENDS["rights"]]
    scene.client.transfer(handle, message(b"too late"))
    assert await sends(scene) == []
    assert not scene.client.has_ended


async def sends(scene: Scene) -> list[tuple[Worker, list[Any]]]:
    found = [(worker, command) for worker in scene.workers for command in await worker.commands()]
    return [(worker, command) for worker, command in found if command[0] == Op.SEND]


async def test_a_link_that_owes_nothing_ends_at_once(partitions):
    scene = Scene(partitions)
    scene.client.attach(sender=False, address="orders", credit=100)
    scene.client.frames()
    scene.end("rights")
    assert scene.told() == [ENDS["rights"]]


@pytest.mark.parametrize(("how", "condition"), CONDITIONS)
async def test_outcomes_in_a_transaction_are_answered_before_the_link_ends(partitions, how, condition):
    scene = Scene(partitions)
    scene.receives()
    connection = scene.client.connection
    coordinator: Any = SimpleNamespace(crosses_entities=lambda link: False)
    transaction = Transaction(connection.transactions.new_id(), connection, scene.gateway.router, coordinator)
    connection.transactions.add(transaction)
    state = outcome(TRANSACTIONAL, transaction.id, outcome(ACCEPTED))
    scene.client.say(DISPOSITION, True, UInt(scene.ids[0]), UInt(scene.ids[1]), False, state)
    asked = [each for each in await scene.worker.commands() if each[0] == Op.REQUEST]
    assert [each[3] for each in asked] == ["transact"] * len(asked)
    assert asked
    scene.end(how)
    for request in asked:
        assert scene.told() == []
        scene.worker.say([Op.REPLY, request[2], [None] * len(request[5][2])])
    *told, end = scene.told()
    assert (told, end) == ([(TRANSACTIONAL, 0), (TRANSACTIONAL, 1)], condition)


async def test_outcomes_in_a_session_are_answered_before_its_loss_is_told(in_runs):
    scene = Scene()
    description = QueueDescription(name="orders", requires_session=True)
    document = Definition(QUEUE_ID >> 3, description, 0, 0, (0,)).document()
    scene.worker.say([Op.CHANGED, 2, [["put", document, None]]])
    client = scene.client
    modes = UByte(0), UByte(1)
    client.say(ATTACH, "s", UInt(0), True, *modes, source("orders", filters={FILTER: "s"}), target("here"))
    scene.channel = scene.bound._channels[0]
    scene.worker.say([Op.OPENED, scene.channel.number, "s", LATER_MS])
    client.say(FLOW, UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(0), UInt(0), UInt(100))
    run = [scene.token(0), 1, 0, 2, run_of([RECORD] * 2)]
    scene.worker.say([Op.DELIVER_RUN, scene.channel.number, LATER_MS, *run])
    scene.ids = [frame.fields[1] for frame in client.frames() if frame.code == TRANSFER]
    scene.settle(0)
    assert await scene.settled() == [(Outcome.ACCEPTED, scene.token(0))]
    scene.worker.say([Op.CLOSED, scene.channel.number, "SessionLockLost", "it is lost"])
    scene.settle(1)
    assert await scene.settled() == []
    scene.worker.say([Op.UNSETTLED, scene.channel.number, 1, "SessionLockLost", "it is lost"])
    assert scene.told() == [(REJECTED, 0), "com.microsoft:session-lock-lost"]
