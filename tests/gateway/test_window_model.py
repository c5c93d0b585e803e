"""Receivers of a gateway without sockets, whose clients open and close windows and credit, or do not read.

Their partitions are simple ones, whose turns and answers come whenever the test likes. Whatever the order: the gateway
keeps no delivery that it cannot write, nothing overtakes, and in the end everything has come once.
"""

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import runs
from broker.gateway.links.receivers import GIVEN_UP_S
from broker.wire import ENTRY, Op, Outcome
from protocol.codec import UByte, UInt, UShort
from storage.records import NEVER, encode_message
from tests.caller import VARIABLES
from tests.end_to_end.raw_peer import ATTACH, BEGIN, FLOW, OPEN, TRANSFER, Frame, message, source, target
from tests.examples import examples
from tests.gateway.in_process import Client, Worker, gateway_with_workers

EXAMPLES = int(VARIABLES.get("PEEKLOCK_MODEL_EXAMPLES", examples(60)))
FRAME_BYTES = 600
MANY = 1 << 20


class SmallFrames(Client):
    """A client to which a message of 1,000 bytes takes two transfers, or three."""

    def __init__(self, gateway: Any) -> None:
        super().__init__(gateway)
        self.links: list[Receiver] = []
        self.window = 0
        self.came = 0  # transfers

    def say(self, code: int, *fields: Any, payload: bytes = b"", header: bool = False) -> None:
        if code == OPEN:
            fields = ("client", "localhost", UInt(FRAME_BYTES), UShort(100))
        elif code == BEGIN:
            fields = (None, UInt(0), UInt(0), UInt(1000), UInt(1000))
        super().say(code, *fields, payload=payload, header=header)

    def open_window(self, transfers: int) -> list[UInt]:
        self.window = transfers
        return [UInt(self.came), UInt(transfers), UInt(0), UInt(1000)]

    def read(self) -> None:
        """Take what was written, and see that it is what was allowed."""
        for frame in self.frames():
            if frame.code == TRANSFER:
                self.came += 1
                self.window -= 1
                assert self.window >= 0, "the window is kept"
                self.links[frame.fields[0]].take(frame)
            elif frame.code == FLOW and len(frame.fields) > 4 and frame.fields[4] is not None:
                self.links[frame.fields[4]].told(frame)
            else:
                assert frame.code == ATTACH


class Receiver:
    def __init__(self, client: SmallFrames, deletes: bool) -> None:
        self.client = client
        self.deletes = deletes
        self.handle = client.next_handle
        client.next_handle += 1
        client.links.append(self)
        modes = (UByte(1), UByte(0)) if deletes else (UByte(0), UByte(1))
        client.say(ATTACH, f"link-{self.handle}", UInt(self.handle), True, *modes, source("orders"), target("here"))
        self.count = self.credit = 0
        self.drains = False
        self.tags: list[bytes] = []  # of deliveries that have begun
        self.is_open = False  # the last one is not complete

    def flow(self, credit: int, window: int, drain: bool) -> None:
        assert not self.drains
        self.credit, self.drains = credit, drain
        fields = (*self.client.open_window(window), UInt(self.handle), UInt(self.count), UInt(credit), None, drain)
        self.client.say(FLOW, *fields)

    def take(self, transfer: Frame) -> None:
        if not self.is_open:
            self.tags.append(bytes(transfer.fields[2]))
        self.is_open = len(transfer.fields) > 5 and bool(transfer.fields[5])
        if not self.is_open:
            self.count += 1
            self.credit -= 1
            assert self.credit >= 0, "the credit is kept"

    def told(self, flow: Frame) -> None:
        _, _, _, _, _, count, credit, _, drain, *_ = flow.fields
        assert drain
        assert self.drains
        assert credit == 0
        assert count == self.count + self.credit
        self.count, self.credit, self.drains = count, 0, False


class Partition:
    """It hands out the messages of one queue in the order of their numbers."""

    locked_until_ms = 1 << 50

    def __init__(self, number: int, worker: Worker) -> None:
        self.number = number
        self.worker = worker
        self.commands: deque[list[Any]] = deque()
        self.answers: deque[list[Any]] = deque()  # on their way to the gateway
        self.there: list[int] = []
        self.sizes: dict[int, int] = {}
        self.out: dict[bytes, int] = {}  # by token: what was handed out and is not back
        self.receivers: dict[int, dict[str, Any]] = {}
        self._tokens = 0

    async def hear(self) -> None:
        self.commands += await self.worker.commands()

    def send(self, size: int) -> None:
        number = (self.number << 48) + len(self.sizes) + 1
        self.sizes[number] = size
        self.there.append(number)

    def turn(self, at_once: int) -> None:
        """Do some commands, and hand out what they allow."""
        draining = []
        for _ in range(min(at_once, len(self.commands))):
            op, _, channel, *arguments = self.commands.popleft()
            if op == Op.OPEN_RECEIVER:
                receiver = {"deletes": arguments[1], "limit": 0, "delivered": 0, "watches": False, "is_watcher": False}
                self.receivers[channel] = receiver
            elif op in (Op.GRANT, Op.DRAIN):
                self.receivers[channel]["limit"] = arguments[0]
                self.receivers[channel]["watches"] = self.receivers[channel]["is_watcher"]
                if op == Op.DRAIN:
                    draining.append(channel)
            elif op == Op.SETTLE:
                outcome, told, tokens, _ = arguments
                assert (outcome, told[0]) == (Outcome.RELEASED, 0)
                self._put_back(tokens)
            elif op == Op.RESTORE:
                self._put_back(arguments[0][0::ENTRY])
            elif op == Op.REQUEST:
                number, (name, _, [entries]) = channel, arguments
                assert name == "restore"
                self._put_back(entries[0::ENTRY])
                self.answers.append([Op.REPLY, number, None])
            elif op == Op.WATCH:
                self.receivers[channel]["watches"] = self.receivers[channel]["is_watcher"] = True
            else:
                assert op == Op.PASS
        for channel, receiver in self.receivers.items():
            wanted = max(0, receiver["limit"] - receiver["delivered"])
            taken, self.there = self.there[:wanted], self.there[wanted:]
            if taken:
                self._deliver(channel, receiver, taken)
            if channel in draining:
                receiver["limit"] = receiver["delivered"]
                self.answers.append([Op.DRAINED, channel, receiver["delivered"]])
            elif self.there and receiver["watches"]:
                receiver["watches"] = False
                self.answers.append([Op.AVAILABLE, channel])

    def _deliver(self, channel: int, receiver: dict[str, Any], taken: list[int]) -> None:
        receiver["delivered"] += len(taken)
        entries: list[Any] = []
        for number in taken:
            self._tokens += 1
            token = self.number.to_bytes(2, "big") + b"incarn" + self._tokens.to_bytes(8, "big")
            self.out[token] = number
            body = message(b"%d " % number + bytes(self.sizes[number]))
            entries += (token, number, 0, encode_message(1, NEVER, bytes(16), body), None)
        parts = None if receiver["deletes"] else runs.parts_of(entries)
        for part in parts or [entries]:
            op, content = (Op.DELIVER_RUN, part) if isinstance(part, tuple) else (Op.DELIVER, [part])
            self.answers.append([op, channel, 0 if receiver["deletes"] else self.locked_until_ms, *content])

    def _put_back(self, tokens: list[bytes]) -> None:
        self.there = sorted([*self.there, *(self.out.pop(token) for token in runs.tokens_of(tokens))])

    def answer(self, count: int) -> None:
        """So many answers arrive together."""
        answers = [self.answers.popleft() for _ in range(min(count, len(self.answers)))]
        if answers:
            self.worker.say(*answers)

    def on_their_way(self) -> set[bytes]:
        """What the gateway does not have yet."""
        tokens: set[bytes] = set()
        for answer in self.answers:
            if answer[0] == Op.DELIVER:
                tokens |= {*answer[3][0::ENTRY]}
            elif answer[0] == Op.DELIVER_RUN:
                tokens |= {runs.token_ahead(answer[3], ahead) for ahead in range(answer[6])}
        return tokens

    def coming_back(self) -> set[bytes]:
        """What the gateway has given back, and is not there yet."""
        tokens: list[bytes] = []
        for command in self.commands:
            if command[0] == Op.SETTLE:
                tokens += runs.tokens_of(command[5])
            elif command[0] == Op.RESTORE:
                tokens += command[3][0::ENTRY]
            elif command[0] == Op.REQUEST:
                tokens += command[5][0][0::ENTRY]
        return {*tokens}


class Scene:
    def __init__(self, partitions: int, links: list[bool]) -> None:
        self.gateway, workers = gateway_with_workers(Path("/nowhere"), partitions)
        self.partitions = [Partition(number, worker) for number, worker in enumerate(workers)]
        self.client = SmallFrames(self.gateway)
        self.client.connect()
        self.links = [Receiver(self.client, deletes) for deletes in links]
        self.client.frames()
        self.is_stalled = False

    async def do(self, step: tuple[Any, ...]) -> None:
        name, *arguments = step
        await getattr(self, name)(*arguments)
        for partition in self.partitions:
            await partition.hear()
        self.check()

    async def send(self, where: int, count: int, size: int) -> None:
        for _ in range(count):
            self.partitions[where % len(self.partitions)].send(size)

    async def turn(self, where: int, at_once: int) -> None:
        self.partitions[where % len(self.partitions)].turn(at_once)

    async def answer(self, where: int, count: int) -> None:
        self.partitions[where % len(self.partitions)].answer(count)

    async def flow(self, which: int, credit: int, window: int, drain: bool) -> None:
        link = self.links[which % len(self.links)]
        if not link.drains and not link.is_open:
            link.flow(credit, window, drain)

    async def window(self, transfers: int) -> None:
        self.client.say(FLOW, *self.client.open_window(transfers))

    async def stall(self, stalls: bool) -> None:
        if stalls is not self.is_stalled:
            self.is_stalled = stalls
            connection = self.client.connection
            connection.pause_writing() if stalls else connection.resume_writing()

    async def pause(self) -> None:
        """What was put off for a moment is done."""
        await asyncio.sleep(0.03)

    def check(self) -> None:
        """The gateway has what it has written, and nothing else."""
        self.client.read()
        assert not self.client.has_ended
        begun = {tag for link in self.links for tag in link.tags}
        for partition in self.partitions:
            kept = partition.out.keys() - partition.on_their_way() - partition.coming_back()
            assert kept <= begun, "the gateway keeps what it cannot write"
        for link in self.links:
            for partition in self.partitions:
                prefix = partition.number.to_bytes(2, "big")
                numbers = [partition.out[tag] for tag in link.tags if tag[:2] == prefix]
                assert numbers == sorted(numbers) or len(self.links) > 1, "nothing overtakes"

    async def settle(self) -> None:
        """Let everything be done that is under way."""
        for _ in range(200):
            for where in range(len(self.partitions)):
                await self.do(("turn", where, 100))
                await self.do(("answer", where, 100))
            if not any(partition.answers or partition.commands for partition in self.partitions):
                return
            await asyncio.sleep(0.001)
        raise AssertionError("there is no end")

    async def settle_all(self) -> None:
        """Also what was put off, as often as that puts off more: a fragment recalls idle credit after a moment."""
        before = -1
        while (done := sum(len(link.tags) for link in self.links)) > before:
            before = done
            await self.settle()
            await self.do(("pause",))
        await self.settle()

    async def end(self) -> None:
        await self.do(("stall", False))
        await self.settle()
        assert not any(link.drains and not link.is_open for link in self.links), "a drain waits for no window"
        await self.do(("window", MANY))
        await self.settle_all()
        assert not any(link.is_open or link.drains for link in self.links)
        if any(link.credit for link in self.links):
            assert not any(partition.there for partition in self.partitions), "a flow of the session is enough"
        for which in range(len(self.links)):
            await self.do(("flow", which, MANY, MANY, False))
        await self.settle()
        begun = [tag for link in self.links for tag in link.tags]
        sent = sorted(number for partition in self.partitions for number in partition.sizes)
        assert sorted(part.out[tag] for tag in begun for part in self.partitions if tag in part.out) == sent


WHERE, FEW = st.integers(0, 2), st.integers(0, 6)
STEPS = st.one_of(
    st.tuples(st.just("send"), WHERE, st.integers(1, 6), st.sampled_from([1, 1, 1000])),
    st.tuples(st.just("turn"), WHERE, st.integers(1, 9)),
    st.tuples(st.just("turn"), WHERE, st.just(100)),
    st.tuples(st.just("answer"), WHERE, st.integers(1, 3)),
    st.tuples(st.just("answer"), WHERE, st.just(100)),
    st.tuples(st.just("flow"), WHERE, st.integers(0, 12), FEW, st.sampled_from([False, False, True])),
    st.tuples(st.just("window"), FEW),
    st.tuples(st.just("stall"), st.booleans()),
)
LINKS = st.lists(st.booleans(), min_size=1, max_size=3)


def run(partitions: int, links: list[bool], steps: list[tuple[Any, ...]]) -> None:
    async def story() -> None:
        scene = Scene(partitions, links)
        for step in steps:
            await scene.do(step)
        await scene.end()

    asyncio.run(story())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from([1, 1, 2]), LINKS, st.lists(STEPS, min_size=5, max_size=60))
def test_a_gateway_keeps_nothing_that_it_cannot_write(partitions: int, links: list[bool], steps: list[Any]) -> None:
    run(partitions, links, [("send", 0, 5, 1), ("send", 1, 5, 1000), *steps])


@pytest.mark.parametrize("closed", [("window", 0), ("stall", True), ("flow", 0, 0, 9, False)], ids=lambda step: step[0])
@pytest.mark.parametrize(
    "opened", [("window", 9), ("stall", False), ("flow", 0, 9, 9, False)], ids=lambda step: step[0]
)
@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_is_on_its_way_does_not_overtake_what_has_gone_back(partitions, deletes, closed, opened):
    if "stall" in (closed[0], opened[0]) and closed[0] != opened[0]:
        pytest.skip("another reason")
    handed_out = [("send", 0, 2, 1), ("turn", 0, 100), ("send", 0, 2, 1), ("turn", 0, 100)]
    steps = [("flow", 0, 9, 9, False), *handed_out, closed, ("answer", 0, 1), opened, ("answer", 0, 1)]
    run(partitions, [deletes], steps)


async def test_a_delivery_that_never_goes_on_is_given_up_before_its_lock_ends(monkeypatch):
    """Its message has not reached the client, so it must not count as delivered."""
    scene = Scene(1, [False])
    for number in range(2):
        lock_ms = int(1000 * (time.time() + GIVEN_UP_S)) + 200
        monkeypatch.setattr(Partition, "locked_until_ms", lock_ms)
        for step in (
            ("send", 0, 1, 1000),
            ("flow", 0, 9, 1, False),
            ("turn", 0, 1),
            ("turn", 0, 100),
            ("answer", 0, 9),
        ):
            await scene.do(step)
        [token] = scene.partitions[0].out if not number else list(scene.partitions[0].out)[1:]
        assert scene.links[0].is_open
        if not number:  # this one goes on in time
            await scene.do(("window", MANY))
            assert not scene.links[0].is_open
        else:
            while token in scene.partitions[0].out:
                await asyncio.sleep(0.01)
                await scene.partitions[0].hear()
                scene.partitions[0].turn(9)
            assert time.time() * 1000 <= lock_ms
            assert len(scene.partitions[0].out) == 1
