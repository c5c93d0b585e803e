"""Machines of a namespace that stand still: nothing ends their connections, and their kernels acknowledge all the same.

`tests/partitioned/failure_table.py` has the operations of all kinds of entities while a worker's machine is frozen.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker.gateway.router import LOOK_SECONDS
from broker.wire import Op
from tests.cluster.machines import HOST, Certificates, Cluster, Machine
from tests.cluster.under_way import (
    ANSWERED_S,
    CONFIG,
    HEARTBEATS,
    HOME_QUEUE,
    LATE_S,
    PARTITIONS,
    QUEUE,
    SILENCE_S,
    SILENT,
    SOURCE,
    TARGET,
    answers_while,
    http,
    outcome_of,
    sends,
    unknown,
)
from tests.end_to_end.health import logged
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message
from tests.end_to_end.test_catalog_at_run_time import receive, send
from tests.patience import eventually
from tests.shims import NoCompiler, make_shim


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("frozen")
    certificates = Certificates(directory / "certificates")
    with Cluster(directory, CONFIG, gateways=2, certificates=certificates, cluster=HEARTBEATS) as cluster:
        yield cluster
    for machine in cluster.machines:
        assert "Traceback" not in machine.log_file.read_text(), machine.log()


@pytest.fixture
def gateway(cluster: Cluster) -> Machine:
    """All is well, and its queues are empty."""
    eventually(lambda: all(each.get("/readyz")[0] == 200 for each in cluster.machines), "all are ready")
    return cluster.gateways[0]


@pytest.mark.parametrize(("frozen", "queue"), [(0, HOME_QUEUE), (1, QUEUE)])
def test_what_is_under_way_is_answered_in_time_and_never_done_later(cluster, gateway, frozen, queue):
    answers = answers_while(cluster.workers[frozen].frozen(), gateway, queue, f"made-while-{frozen}-is-frozen")
    # The home has committed the change before it lost the other worker; of a lost home nobody knows.
    assert answers == unknown(put={0: 504, 1: 201}[frozen])


def test_messages_without_a_key_go_elsewhere_when_their_machine_is_silent(cluster, gateway):
    """They do not wait for it to be back, as for a worker that is started anew."""
    count = 3 * PARTITIONS
    with RawPeer.connect(gateway.amqp_port) as peer:
        handle = peer.attach_sender("wide")
        with cluster.workers[1].frozen():
            began = time.monotonic()
            for number in range(count):
                peer.transfer(message(b"%d" % number), handle)
                peer.wait_until_read()  # what is read at once goes to one fragment
            for _ in range(count):
                answer = peer.expect(DISPOSITION, ANSWERED_S + LATE_S)
                assert answer.fields[4].descriptor == ACCEPTED, error_of(answer)
                assert answer.fields[2] in (None, answer.fields[1])
            assert SILENCE_S - LOOK_SECONDS < time.monotonic() - began < ANSWERED_S + LATE_S
        eventually(lambda: gateway.get("/readyz")[0] == 200, "it goes on")
        assert receive(peer, "wide", count) == sorted(b"%d" % number for number in range(count))


def test_locks_of_a_frozen_gateway_end(cluster, gateway):
    other = cluster.gateways[1]
    with RawPeer.connect(gateway.amqp_port) as holder, RawPeer.connect(other.amqp_port) as waiting:
        send(waiting, QUEUE, b"m")
        holder.attach_receiver(QUEUE, credit=1)
        first = holder.expect(TRANSFER)
        with gateway.frozen():
            began = time.monotonic()
            waiting.attach_receiver(QUEUE, credit=1)
            again = waiting.expect(TRANSFER, ANSWERED_S + LATE_S)
            assert time.monotonic() - began > SILENCE_S - 2 * LOOK_SECONDS
            assert body_of(again.payload) == b"m"
            waiting.settle(again.fields[1])
            assert outcome_of(waiting) == ""
        holder.settle(first.fields[1])
        assert outcome_of(holder) != ""
        eventually(lambda: gateway.get("/readyz")[0] == 200, "it goes on")
        send(holder, QUEUE, b"it serves again")
        assert receive(waiting, QUEUE, 1) == [b"it serves again"]


def test_messages_that_are_forwarded_to_a_frozen_worker_arrive_once(cluster, gateway):
    with RawPeer.connect(gateway.amqp_port) as peer:
        sender = sends(peer, SOURCE, b"1")
        source = cluster.of(2)
        noticed = source.log().count(SILENT)
        with cluster.of(3).frozen():
            assert sender() == ""
            eventually(lambda: source.log().count(SILENT) > noticed, "it is noticed")
            send(peer, SOURCE, b"2")
        assert receive(peer, TARGET, 2) == [b"1", b"2"]
        send(peer, SOURCE, b"3")
        assert receive(peer, TARGET, 1) == [b"3"]


# --- a slow disk is no silence ----------------------------------------------------------------------------------------

SYNC_S = SILENCE_S + 3
MANY, BYTES = 400, 60_000  # more than the sockets' buffers take


def test_a_worker_that_waits_for_its_disk_longer_than_silence_lasts_is_waited_for(tmp_path: Path) -> None:
    control = tmp_path / "slow"
    try:
        shim = make_shim(Path(__file__).parents[1] / "partitioned" / "slow_disk.c", tmp_path)
    except NoCompiler as error:
        pytest.skip(str(error))
    with Cluster(tmp_path, CONFIG, gateways=1, cluster=HEARTBEATS) as cluster:
        worker, [gateway] = cluster.of(1), cluster.gateways
        worker.prefix = ("env", f"LD_PRELOAD={shim}", f"SLOW_DISK={control}")
        worker.restart()
        eventually(lambda: gateway.get("/readyz")[0] == 200, "it is back")
        with RawPeer.connect(gateway.amqp_port) as peer:
            handle = peer.attach_sender(QUEUE)
            control.with_suffix(".new").write_text(f"{SYNC_S * 1e6:.0f} {worker.worker().pid}")
            control.with_suffix(".new").rename(control)
            began = time.monotonic()
            peer.transfer(message(b"it begins a sync"), handle)
            time.sleep(2)  # the sync has begun, and takes longer
            control.unlink()
            for _ in range(1, MANY):
                peer.transfer(message(bytes(BYTES)), handle)
            settled = 0
            while settled < MANY:
                answer = peer.expect(DISPOSITION)
                assert answer.fields[4].descriptor == ACCEPTED, error_of(answer)
                settled = (answer.fields[2] or answer.fields[1]) + 1
            assert time.monotonic() - began > SILENCE_S + 2
        for machine in cluster.machines:
            assert not logged(machine, "sign of life|stood still"), machine.log()
        assert gateway.log().count("worker connection lost") == 1, "when it was started anew"


# --- the journal ------------------------------------------------------------------------------------------------------


def test_who_reads_the_journal_of_a_frozen_machine_is_told(tmp_path: Path) -> None:
    config = f'{CONFIG}\n[journal]\nmode = "events"\n'
    with Cluster(tmp_path, config, gateways=1, cluster=HEARTBEATS, has_journals=True) as cluster:
        [gateway] = cluster.gateways
        assert http(gateway, "GET", "/$journal?current=1") == 200
        with cluster.of(1).frozen():
            began = time.monotonic()
            assert http(gateway, "GET", "/$journal?current=1") == 503
            assert time.monotonic() - began < ANSWERED_S + LATE_S
        eventually(lambda: http(gateway, "GET", "/$journal?current=1") == 200, "it goes on")
        assert "Traceback" not in gateway.log_file.read_text(), gateway.log()


# --- processes of the version before ----------------------------------------------------------------------------------


class OldGateway:
    """One that does not know of beats, by TCP."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._input = bytearray()

    def __enter__(self) -> "OldGateway":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def say(self, *messages: list[Any]) -> None:
        frame = msgpack.packb(messages)
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)

    def hears(self, seconds: float) -> list[int]:
        """The kinds of messages that come in this time. Raises ConnectionError if the worker ends the connection."""
        until, found = time.monotonic() + seconds, []
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                break
            if not data:
                raise ConnectionResetError(found)
            self._input += data
            while len(self._input) >= 4 and len(self._input) >= (end := 4 + int.from_bytes(self._input[:4], "big")):
                found += [each[0] for each in msgpack.unpackb(self._input[4:end], strict_map_key=False)]
                del self._input[:end]
        return found


def test_a_gateway_of_the_version_before_is_not_beaten_to_and_may_be_silent(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG, gateways=1, cluster=HEARTBEATS) as cluster:
        address = cluster.addresses[1]
        assert address.startswith(HOST)
        with OldGateway(address) as old, OldGateway(address) as new:
            assert old.hears(0.5)[0] == Op.HELLO
            new.say([Op.BEAT])
            new.say([Op.BEAT])
            assert new.hears(2.5).count(Op.BEAT) >= 2
            with pytest.raises(ConnectionResetError):
                new.hears(ANSWERED_S + LATE_S)
            old.say([Op.REQUEST, 1, 7, "counts", 0, []])
            heard = old.hears(0.5)
            assert Op.FAILED in heard or Op.REPLY in heard
            assert Op.BEAT not in heard
