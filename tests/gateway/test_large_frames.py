"""Runs of large frames between processes are parts of the frame, and everything is as without that."""

import itertools
import socket
from typing import Any
from unittest.mock import Mock, patch

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import large_frames, runs, wire
from broker.gateway import worker_socket
from broker.gateway.worker_socket import SocketConnection
from broker.worker import peer as peers
from broker.worker.peer import Peer
from tests.examples import examples

LARGE_RUN_BYTES, LOOK_BYTES = 300, 64  # in place of a megabyte, and of 64 KiB
BUFFER_BYTES = 500

run_sizes = st.sampled_from([0, 20, LARGE_RUN_BYTES - 1, LARGE_RUN_BYTES, 700, 5000])
runs_of_bytes = st.builds(
    lambda size, first: bytes((first + at) % 251 for at in range(size)), run_sizes, st.integers(0, 250)
)
messages = st.one_of(
    st.builds(lambda run: wire.send_run(0, 1, 2, 1, run), runs_of_bytes),
    st.builds(lambda run: wire.deliver_run(1, 5000, bytes(16), 7, 0, 1, run), runs_of_bytes),
    st.builds(lambda count: wire.sent(1, count), st.integers(0, 99)),
    st.builds(lambda body: wire.send(0, 1, 2, [[b"layout", body, None, {3: "key"}]]), runs_of_bytes),
    st.builds(lambda run: wire.reply(4, run), runs_of_bytes),  # large, but no run
    st.just((9999, b"of a later version")),
)


def packed(frame: list[Any]) -> bytes:
    """As both sides pack it: with runs behind a head of five bytes."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(len(frame))
    parts = []
    for message in frame:
        if isinstance(message, wire.SendRun | wire.DeliverRun):
            wire.pack_up_to_run(packer, message)
            parts += [packer.bytes(), wire.run_head(message.run), message.run]
            packer.reset()
        else:
            packer.pack(message)
    return b"".join((*parts, packer.bytes()))


def framed(frame: list[Any]) -> bytes:
    data = packed(frame)
    return len(data).to_bytes(4, "big") + data


def small_sizes():
    return (
        patch.object(wire, "LARGE_RUN_BYTES", LARGE_RUN_BYTES),
        patch.object(large_frames, "_LOOK_BYTES", LOOK_BYTES),
        patch.object(worker_socket, "INPUT_BYTES", BUFFER_BYTES),
        patch.object(peers, "LARGE_BYTES", BUFFER_BYTES),
    )


def as_they_are(frame: list[Any]) -> list[Any]:
    return [message for message in frame if message[0] != 9999]


@given(st.lists(messages, max_size=6))
@settings(max_examples=examples(300))
def test_a_large_frame_has_the_same_messages(frame):
    data = packed(frame)
    runs_size, look, _, _ = small_sizes()
    with runs_size, look:
        found = large_frames.unpack(memoryview(data))
    assert found == wire.unpack(data)
    assert [type(each) for each in found] == [type(each) for each in wire.unpack(data)]


def test_large_runs_are_views_of_the_frame_and_small_ones_are_not():
    large = bytes(wire.LARGE_RUN_BYTES)
    frame = [wire.sent(1, 2), wire.send_run(0, 1, 2, 1, b"small"), wire.send_run(0, 1, 2, 1, large), wire.sent(3, 4)]
    data = memoryview(packed(frame))
    _, small, found, last = large_frames.unpack(data)
    assert isinstance(found.run, memoryview)
    assert found.run.obj is data.obj
    assert bytes(found.run) == large
    assert isinstance(small.run, bytes)
    assert last == wire.sent(3, 4)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_no_run_keeps_more_than_four_times_its_size_in_memory(count):
    frame = [wire.deliver_run(at, 5000, bytes(16), 7, 0, 1, bytes(wire.LARGE_RUN_BYTES)) for at in range(count)]
    found = large_frames.unpack(memoryview(packed(frame)))
    assert found == frame
    assert {type(each.run) for each in found} == {memoryview if count < 4 else bytes}


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_a_large_frame_that_ends_too_early_is_refused_as_a_small_one_is(cut):
    data = packed([wire.send_run(0, 1, 2, 1, bytes(wire.LARGE_RUN_BYTES))])[:-cut]
    with pytest.raises(ValueError, match="incomplete"):
        wire.unpack(data)
    with pytest.raises(ValueError, match="incomplete"):
        large_frames.unpack(memoryview(data))


class Connection(SocketConnection):
    def __init__(self) -> None:
        super().__init__("worker", Mock())
        self.taken: list[Any] = []

    def take(self, messages: Any) -> None:
        self.taken += messages


frames_and_cuts = (
    st.lists(st.lists(messages, max_size=4), max_size=5),
    st.lists(st.integers(1, 2000) | st.integers(1, 5)),
)


@given(*frames_and_cuts)
@settings(max_examples=examples(300))
def test_a_gateway_takes_frames_however_they_are_cut(frames, cuts):
    """And what it has taken stays as it is, whatever comes behind it."""
    data = b"".join(map(framed, frames))
    first, second, third, _ = small_sizes()
    with first, second, third:
        connection = Connection()
        sizes = itertools.chain(cuts, itertools.repeat(len(data) or 1))
        while data:
            buffer = connection.get_buffer(-1)
            size = min(next(sizes), len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            connection.buffer_updated(size)
        assert len(connection.get_buffer(-1)) == BUFFER_BYTES
    assert connection.taken == [message for frame in frames for message in as_they_are(frame)]


@given(*frames_and_cuts)
@settings(max_examples=examples(300))
def test_a_worker_takes_frames_however_they_are_cut(frames, cuts):
    data = b"".join(map(framed, frames))
    here, there = socket.socketpair()
    with here, there, small_sizes()[0], small_sizes()[1], small_sizes()[3]:
        peer = Peer(there)
        found: list[Any] = []
        came = 0
        sizes = itertools.chain(cuts, itertools.repeat(20_000))
        while data:
            sent = here.send(data[: next(sizes)])
            data = data[sent:]
            while sent:
                read = peer.read()
                assert read is not None
                found += read
                assert 0 < peer.came_bytes <= sent
                sent -= peer.came_bytes
                came += peer.came_bytes
        assert peer.read() == []
        assert found == [message for frame in frames for message in as_they_are(frame)]
        here.close()
        assert peer.read() is None


def test_a_worker_whose_peer_ends_within_a_large_frame_sees_that():
    here, there = socket.socketpair()
    with here, there:
        peer = Peer(there)
        here.sendall((peers.LARGE_BYTES + 1).to_bytes(4, "big") + bytes(100))
        assert peer.read() == []
        here.sendall(bytes(50))
        assert (peer.read(), peer.came_bytes) == ([], 50)
        here.close()
        assert peer.read() is None


def test_a_large_delivery_leaves_in_parts_of_which_its_records_are_some():
    """It is not put together before the socket takes it, and the gateway gets the same bytes as of one that is."""
    records = [bytes([number]) * (wire.LARGE_RUN_BYTES // 2) for number in range(3)]
    entries = list(
        itertools.chain.from_iterable(
            (bytes(15) + bytes([at]), 7 + at, 0, record, None) for at, record in enumerate(records)
        )
    )
    [part] = runs.parts_of(entries) or ()
    token, number, delivery_count, count, run = part
    assert (token, number, delivery_count, count) == (bytes(16), 7, 0, 3)
    assert isinstance(run, wire.RunOfRecords)
    assert all(any(each is record for each in run.parts()) for record in records)
    assert bytes(run) == runs.run_of(records)
    assert len(run) == len(bytes(run))
    assert runs.entries_of(run, token, number, delivery_count) == entries

    here, there = socket.socketpair()
    with here, there:
        peer = Peer(there)
        for each in (run, bytes(run)):
            peer.answers += [wire.sent(1, 1), wire.deliver_run(1, 5000, token, number, 0, 3, each), wire.sent(2, 2)]
            peer.hold_answers()
        peer.release()
        written = b"".join(peer.output)
    half = len(written) // 2
    assert written[:half] == written[half:]


def test_small_deliveries_are_put_together():
    [part] = runs.parts_of([bytes(16), 7, 0, bytes(wire.LARGE_RUN_BYTES - runs.SIZE_BYTES), None]) or ()
    assert isinstance(part[-1], bytes)


@pytest.mark.parametrize("made", [memoryview, lambda run: memoryview(bytearray(run)), bytes])
def test_records_of_a_view_are_as_those_of_bytes(made):
    records = [b"first" * 20, b"", b"second" * 30]
    run = made(runs.run_of(records))
    found = runs.records_of(run)
    assert found == records
    assert all(isinstance(record, bytes) for record in found)
    assert runs.sizes_of(run) == [len(record) for record in records]
    assert runs.offset_of(run, 2) == 2 * runs.SIZE_BYTES + len(records[0])
