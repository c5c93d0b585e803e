"""Commands leave for a worker in frames of any size at any time, and answers come so: order and meaning stay."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import runs, wire
from broker.gateway import worker_socket
from broker.gateway.router import EARLY_BYTES, OUTPUT_HIGH_BYTES, TURNS_AT_ONCE, Router, WorkerConnection
from broker.gateway.worker_socket import SocketConnection
from broker.metrics import GatewayMetrics
from broker.wire import Op, Outcome, Send, Settle
from protocol.engine.proton.native import native
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, message
from tests.examples import examples
from tests.gateway.in_process import Client, started_gateway, without_runs

CHANNEL, QUEUE = 1, 8
MORE_AT_ONCE = TURNS_AT_ONCE - (native is not None)  # in one turn, the gateway has said that it takes runs
REJECTED = 0x25


class Reader:
    """The worker's end of a real socket, which takes few bytes at a time. It reads when it is told to."""

    def __init__(self) -> None:
        self.socket, self.gateways = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.gateways.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        self.socket.setblocking(False)
        self.data = b""

    async def connect(self, router: Router) -> WorkerConnection:
        [worker] = router.workers
        assert isinstance(worker, SocketConnection)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=self.gateways)
        body = msgpack.packb([[Op.HELLO, wire.VERSION, [0]]])
        self.socket.sendall(len(body).to_bytes(4, "big") + body)
        await worker.connected.wait()
        await self.read_all(worker)
        self.data = b""  # what the gateway says of itself
        return worker

    def read(self, size: int) -> int:
        try:
            data = self.socket.recv(size)
        except BlockingIOError:
            return 0
        self.data += data
        return len(data)

    async def read_all(self, worker: WorkerConnection) -> None:
        silent = 0
        while silent < 20:
            silent = 0 if self.read(1 << 20) else silent + 1
            await asyncio.sleep(0)

    def frames(self) -> Iterator[tuple[int, list[Any]]]:
        """Size and commands of each."""
        at = 0
        while at < len(self.data):
            end = at + 4 + int.from_bytes(self.data[at : at + 4], "big")
            assert end <= len(self.data)
            yield end - at, wire.unpack(self.data[at + 4 : end])
            at = end


STEPS = st.lists(
    st.one_of(
        st.sampled_from((0, 100, 5_000, 70_000, 300_000)),  # a send of so many bytes
        st.just("settle"),
        st.just("end of the turn"),
        st.just("loop"),
        st.tuples(st.just("read"), st.sampled_from((1, 1_000, 100_000))),
    ),
    max_size=60,
)


@settings(max_examples=examples(60))
@given(
    STEPS,
    st.sampled_from((1, 4_000, EARLY_BYTES, 1 << 30)),
    st.sampled_from((asyncio.new_event_loop, uvloop.new_event_loop)),
)
def test_the_worker_sees_the_same_commands_however_the_output_is_cut(steps, early_bytes, loop):
    expected: list[Any] = []

    async def run() -> list[tuple[int, list[Any]]]:
        router, reader = Router(["worker"], 1, GatewayMetrics(), lambda message: None, SocketConnection), Reader()
        worker = await reader.connect(router)
        for number, step in enumerate(steps):
            match step:
                case int():
                    worker.post(wire.send(0, CHANNEL, QUEUE, [[number, bytes(step), None, None]]))
                    expected.append((number, step))
                case "settle":
                    token = number.to_bytes(16, "big")
                    worker.settle(0, QUEUE, Outcome.ACCEPTED, CHANNEL, (token,))
                    expected.append(token)
                case "end of the turn":
                    router.end_turn()
                    router.in_turn = True
                case "loop":
                    router.end_turn()
                    await asyncio.sleep(0)
                case (_, size):
                    reader.read(size)
        router.end_turn()
        await reader.read_all(worker)
        reader.socket.close()
        await worker._lost.wait()
        return list(reader.frames())

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=loop) as runner:
        patch.setattr(worker_socket, "EARLY_BYTES", early_bytes)
        frames = runner.run(run())
    seen: list[Any] = []
    for _, commands in frames:
        for command in commands:
            match command:
                case Send():
                    ((number, body, _, _),) = command.messages
                    seen.append((number, len(body)))
                case Settle():
                    assert list(command.channels) == [CHANNEL, runs.count_of(command.tokens)]
                    seen += runs.tokens_of(command.tokens)
    assert seen == expected
    for size, commands in frames:
        last = len(msgpack.packb(commands[-1]))
        assert size - last <= early_bytes + 9, "a frame that is large enough took another command"


def test_what_is_posted_by_a_timer_leaves_as_well():
    async def run() -> int:
        router, reader = Router(["worker"], 1, GatewayMetrics(), lambda message: None, SocketConnection), Reader()
        worker = await reader.connect(router)
        worker.post(wire.grant(0, CHANNEL, 1))
        worker.post(wire.grant(0, CHANNEL, 2))
        await reader.read_all(worker)
        reader.socket.close()
        await worker._lost.wait()
        return sum(len(commands) for _, commands in reader.frames())

    assert uvloop.run(run()) == 2


def test_the_commands_of_several_turns_in_a_round_leave_together_and_those_of_a_single_one_at_once():
    async def run() -> list[int]:
        router, reader = Router(["worker"], 1, GatewayMetrics(), lambda message: None, SocketConnection), Reader()
        worker = await reader.connect(router)
        left_at_once = []
        for turns in (*[1] * MORE_AT_ONCE, 3, 3, 1, 1):
            for _ in range(turns):
                router.in_turn = True
                worker.post(wire.grant(0, CHANNEL, 1))
                router.end_turn()
            left_at_once.append(reader.read(1 << 20) > 0)
            await asyncio.sleep(0)
            reader.read(1 << 20)
        # A round of one turn is seen only when it has ended, so its commands are the last ones to wait.
        assert left_at_once == [True] * MORE_AT_ONCE + [False, False, False, True]
        reader.socket.close()
        await worker._lost.wait()
        return [len(commands) for _, commands in reader.frames()]

    assert uvloop.run(run()) == [1] * MORE_AT_ONCE + [3, 3, 1, 1]


def test_a_worker_that_does_not_read_is_behind_until_it_has_read():
    async def run() -> None:
        router, reader = Router(["worker"], 1, GatewayMetrics(), lambda message: None, SocketConnection), Reader()
        caught_up = asyncio.Event()
        router.on_caught_up = caught_up.set
        worker = await reader.connect(router)
        posted = 0
        while not router.behind:
            router.in_turn = True
            worker.post(wire.send(0, CHANNEL, QUEUE, [[b"", bytes(EARLY_BYTES), None, None]]))
            router.end_turn()
            posted += EARLY_BYTES
            assert posted < 2 * OUTPUT_HIGH_BYTES
        assert posted > OUTPUT_HIGH_BYTES
        assert not caught_up.is_set()
        while not caught_up.is_set():
            reader.read(1 << 20)
            await asyncio.sleep(0)
        assert not router.behind
        reader.socket.close()
        await worker._lost.wait()

    uvloop.run(run())


def test_a_broken_socket_is_told_to_the_transport_and_ends_nothing_else():
    async def run() -> None:
        router, reader = Router(["worker"], 1, GatewayMetrics(), lambda message: None, SocketConnection), Reader()
        worker = await reader.connect(router)
        reader.socket.close()
        assert worker.post(wire.send(0, CHANNEL, QUEUE, [[b"", bytes(2 * EARLY_BYTES), None, None]]))
        await worker._lost.wait()
        assert not worker.post(wire.grant(0, CHANNEL, 1))

    uvloop.run(run())


# -- answers

ANSWERS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.booleans()), max_size=30)


@settings(max_examples=examples(60))
@given(ANSWERS, st.lists(st.integers(1, 60), max_size=60), st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_answers_go_to_their_deliveries_however_they_come(answers, cuts, per_frame):
    async def run(directory: Path) -> None:
        gateway, worker = started_gateway(directory)
        clients = [Client(gateway), Client(gateway)]
        channels, sent, told, expected = [], [], [], []
        for client in clients:
            client.connect()
            handle = client.attach(sender=True, address="orders")
            (link,) = client.connection.engine.links.values()
            channels.append(link.context._only.number)
            count = sum(deliveries for number, deliveries, _ in answers if clients[number] is client)
            sent.append([client.transfer(handle, message(b"x" * 9_000)) for _ in range(count)])
            client.frames()
            told.append({})
            expected.append({})
        messages: list[list[Any]] = []
        for number, deliveries, accepted in answers:
            rest = [] if accepted else ["QuotaExceeded", "full"]
            messages.append([Op.SENT if accepted else Op.REFUSED, channels[number], deliveries, *rest])
            for _ in range(deliveries):
                expected[number][sent[number].pop(0)] = ACCEPTED if accepted else REJECTED
        data, at, turn = b"", 0, 0
        while at < len(messages):
            size = per_frame[turn % len(per_frame)]
            body = msgpack.packb(messages[at : at + size])
            data += len(body).to_bytes(4, "big") + body
            at, turn = at + size, turn + 1
        for cut in [*cuts, len(data)]:
            if data[:cut]:
                worker.transport.feed(data[:cut])
            data = data[cut:]
        for client, outcomes in zip(clients, told, strict=True):
            for frame in client.frames():
                if frame.code == DISPOSITION:
                    _, first, last, settled, state = frame.fields[:5]
                    assert settled
                    for delivery in range(first, (first if last is None else last) + 1):
                        assert delivery not in outcomes
                        outcomes[delivery] = int(state.descriptor)
        assert told == expected

    with TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


def test_a_window_of_messages_leaves_in_several_frames_and_is_answered_in_several_dispositions(tmp_path):
    async def run() -> tuple[int, list[tuple[int, int]]]:
        gateway, worker = started_gateway(tmp_path)
        client = Client(gateway)
        client.connect()
        handle = client.attach(sender=True, address="orders")
        client.frames()
        read, client.transport.ended = bytearray(), False
        client.transport.feed, feed = read.__iadd__, client.transport.feed  # type: ignore[assignment]
        for _ in range(250):  # in one read of the gateway's
            client.transfer(handle, message(b"x" * 1024))
        feed(bytes(read))
        for _ in range(50):  # it may be done in several steps
            await asyncio.sleep(0)
        written, frames = bytes(worker.transport.written), 0
        sends: list[Send] = []
        while written:
            end = 4 + int.from_bytes(written[:4], "big")
            unpacked = [without_runs(each) for each in wire.unpack(written[4:end])]
            found = [each for each in unpacked if isinstance(each, Send)]
            sends += found
            written, frames = written[end:], frames + bool(found)
        for send in sends:
            worker.say([Op.SENT, send.channel, len(send.messages)])
        told = [frame.fields for frame in client.frames() if frame.code == DISPOSITION]
        return frames, [(first, first if last is None else last) for _, first, last, *_ in told]

    frames, dispositions = asyncio.run(run())
    assert frames >= 4
    assert len(dispositions) == frames
    assert [first for first, _ in dispositions] == [0, *(last + 1 for _, last in dispositions[:-1])]
    assert dispositions[-1][1] == 249
