"""Signs of life between machines: who is silent, who was silent itself, and beats between the frames of a worker."""

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgpack
import pytest
import trustme

from broker import wire
from broker.cluster.silence import Patience, Silence
from broker.wire import Op
from broker.worker.heartbeats import Heartbeats
from broker.worker.peer import Peer

PATIENCE = Patience(silence_ms=10_000, stall_ms=30_000)


# --- another side that is silent --------------------------------------------------------------------------------------


def test_a_side_is_gone_when_nothing_has_come_for_the_time():
    silence = Silence(PATIENCE)
    silence.beats = True
    for _ in range(3):
        assert [silence.look(heard=False) for _ in range(9)] == [False] * 9
        assert not silence.look(heard=True)
    assert [silence.look(heard=False) for _ in range(10)] == [False] * 9 + [True]


def test_a_side_that_has_not_begun_to_beat_may_wait_for_its_disk():
    silence = Silence(PATIENCE)
    assert [silence.look(heard=False) for _ in range(40)] == [False] * 39 + [True]


# --- a worker that was silent itself ----------------------------------------------------------------------------------


class Beaten:
    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1


class Scene:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.heartbeats = Heartbeats(PATIENCE, lambda: self.now_s)
        self.peer = Beaten()
        self.heartbeats.add(cast(Any, self.peer))

    def second(self, *, turns: bool) -> bool | None:
        """What the turn is told, if there is one."""
        self.now_s += 1
        self.heartbeats.beat()
        return self.heartbeats.turned() if turns else None


def test_a_worker_that_waits_for_its_disk_beats_as_long_as_its_supervisor_waits():
    scene = Scene()
    assert scene.second(turns=True) is False
    for _ in range(100):
        scene.second(turns=False)
    assert scene.peer.beats == 1 + PATIENCE.stall_ms // 1000


def test_a_worker_that_waited_for_its_disk_was_not_silent():
    scene = Scene()
    for _ in range(29):
        scene.second(turns=False)
    assert scene.second(turns=True) is False


def test_a_worker_that_hung_for_so_long_that_it_was_silent_is_told_once():
    scene = Scene()
    for _ in range(40):
        scene.second(turns=False)
    assert scene.second(turns=True) is True
    assert scene.second(turns=True) is False


@pytest.mark.parametrize("thread_is_first", [False, True])
@pytest.mark.parametrize(("stood_s", "was_silent"), [(9, False), (10, True), (100, True)])
def test_a_process_that_stood_still_is_told_before_it_takes_anything(thread_is_first, stood_s, was_silent):
    scene = Scene()
    scene.second(turns=True)
    scene.now_s += stood_s
    if thread_is_first:
        scene.heartbeats.beat()
    assert scene.heartbeats.turned() is was_silent
    scene.heartbeats.beat()
    assert scene.second(turns=True) is False


def test_who_has_left_is_not_beaten_to():
    scene = Scene()
    scene.heartbeats.discard(cast(Any, scene.peer))
    scene.second(turns=True)
    assert scene.peer.beats == 0


# --- beats between frames ---------------------------------------------------------------------------------------------

BUFFER_BYTES = 4096


@contextmanager
def connected(tls: bool) -> Iterator[tuple[Peer, socket.socket]]:
    """A worker's peer, and the other end, which blocks."""
    here, there = socket.socketpair()
    if not tls:
        with here, there:
            yield Peer(here), there
        return
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    shaking = threading.Thread(target=lambda: found.append(client.wrap_socket(there, server_hostname="localhost")))
    found: list[ssl.SSLSocket] = []
    shaking.start()
    with server.wrap_socket(here, server_side=True) as ours:
        shaking.join()
        with found[0]:
            yield Peer(ours), found[0]


def read_all(end: socket.socket, until: int) -> tuple[list[wire.Message], int]:
    """Messages up to the one of this channel, and the number of beats among them."""
    data, messages, beats = bytearray(), [], 0
    while True:
        data += end.recv(777)
        while len(data) >= 4 and len(data) >= (size := 4 + struct.unpack_from(">I", data)[0]):
            for message in wire.unpack(bytes(data[4:size])):
                if message.op == Op.BEAT:
                    beats += 1
                else:
                    messages.append(message)
                    if message[1] == until:
                        return messages, beats
            del data[:size]


@pytest.mark.parametrize("tls", [False, True])
def test_beats_of_a_thread_come_between_frames(tls):
    with connected(tls) as (peer, end):
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        found: list[tuple[list[wire.Message], int]] = []
        last = 2000
        reading = threading.Thread(target=lambda: found.append(read_all(end, last)))
        reading.start()
        ends = threading.Event()

        def beat() -> None:
            while not ends.is_set():
                peer.beat()

        beating = threading.Thread(target=beat)
        beating.start()
        sizes = (1, 10_000, 300, 60_000)
        for number in range(1, last + 1):
            peer.answers.append(wire.drained(number, number))
            if number % 50 == 0:
                peer.answers.append(wire.deliver_run(number, 0, b"t", 1, 0, 1, bytes(sizes[number // 50 % 4])))
            peer.hold_answers()
            peer.release()
            assert peer.write()
        while peer.output or peer.has_begun_beat:
            assert peer.write()
        reading.join()
        ends.set()
        beating.join()
        [(messages, beats)] = found
        assert [each[1] for each in messages if each.op == Op.DRAINED] == [*range(1, last + 1)]
        assert beats > 0


@pytest.mark.parametrize("tls", [False, True])
def test_who_does_not_read_is_not_beaten_to_for_ever(tls):
    with connected(tls) as (peer, end):
        for _ in range(200_000):
            peer.beat()
            if peer.has_begun_beat:
                break
        peer.answers.append(wire.drained(7, 7))
        peer.hold_answers()
        peer.release()
        assert peer.write()
        messages: list[wire.Message] = []
        reading = threading.Thread(target=lambda: messages.extend(read_all(end, 7)[0]))
        reading.start()
        while peer.output:
            assert peer.write()
        reading.join()
        assert messages == [wire.drained(7, 7)]


def test_a_peer_that_is_closed_is_not_beaten_to():
    with connected(tls=False) as (peer, _):
        peer.close()
        peer.beat()
        assert not peer.has_begun_beat


def test_a_peer_that_does_not_read_is_gone_and_one_that_reads_slowly_is_not():
    """What waits for a gateway that is behind says whether it lives: it is not read then."""
    with connected(tls=False) as (peer, end):
        peer.be_watched(PATIENCE)
        assert peer.silence is not None
        peer.silence.beats = True
        packed = msgpack.packb([[Op.BEAT]])
        end.sendall(struct.pack(">I", len(packed)) + packed)
        assert peer.read() == [wire.beat()]
        for _ in range(5):
            peer.answers.append(wire.deliver_run(1, 0, b"t", 1, 0, 1, bytes(16 << 20)))
        peer.hold_answers()
        peer.release()
        assert peer.write()
        assert peer.is_behind
        for _ in range(30):
            assert peer.is_behind
            assert not peer.is_silent()
            left = 1 << 18
            while left:
                left -= len(end.recv(left))
            assert peer.write()
        assert [peer.is_silent() for _ in range(11)] == [False] * 10 + [True]
