"""A worker that does not turn, of two: who does not need it is served, and it is replaced after a time."""

import time

import pytest

from broker.catalog.catalog import home_partition
from protocol.codec import Int, Long
from tests.brokers import Broker
from tests.end_to_end.health import elsewhere, logged, serves, worker_of
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message
from tests.end_to_end.raw_requests import Node
from tests.patience import PATIENCE_S, eventually

STALL_MS = 3000
OTHER = elsewhere("witness")
CONFIG = f"""
partitions = 2
worker_stall_timeout_ms = {STALL_MS}

[[queues]]
name = "witness"

[[queues]]
name = "{OTHER}"
"""
# More than a gateway keeps for one worker, with what the socket takes.
PEERS, SENDS, BODY_BYTES = 4, 200, 60_000
BUSY, UNKNOWN = "com.microsoft:server-busy", "com.microsoft:timeout"


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path, CONFIG, workers=2) as broker:
        yield broker
        for process in broker.processes():
            process.resume()
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def test_a_stalled_worker_stops_only_those_who_use_it_and_is_replaced(broker):
    stalled = worker_of(broker, home_partition(OTHER, 2))
    senders = [RawPeer.connect(broker.amqp_port) for _ in range(PEERS)]
    handles = [peer.attach_sender(OTHER) for peer in senders]
    idle = RawPeer.connect(broker.amqp_port)
    receiver = idle.attach_receiver("witness", credit=100)
    stalled.suspend()
    began = time.monotonic()
    for peer, handle in zip(senders, handles, strict=True):
        peer.socket.settimeout(0.2)
        try:
            for _ in range(SENDS):
                peer.transfer(message(bytes(BODY_BYTES)), handle)
        except TimeoutError:
            pass  # it is not read from, as it should be
    # Others are served, those who were there before and those who come now.
    for _ in range(3):
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.transfer(message(b"served"), peer.attach_sender("witness"))
            assert peer.expect(DISPOSITION, 2).fields[4].descriptor == ACCEPTED
        delivery = idle.expect(TRANSFER, 2)
        assert body_of(delivery.payload) == b"served"
        idle.settle(delivery.fields[1])
        assert idle.expect(DISPOSITION, 2).fields[4].descriptor == ACCEPTED
    assert receiver == 0
    assert stalled.is_running()
    # It is replaced, and what it left is answered.
    eventually(lambda: logged(broker, "process stalled"), "noticed")
    assert time.monotonic() - began > STALL_MS / 1000 - 1.5
    stalled.wait(PATIENCE_S)
    for peer in senders:
        # What came while the worker was known to be stalled was refused; what it had got may have been done.
        while (condition := error_of(peer.expect(DISPOSITION, PATIENCE_S))[0]) == BUSY:
            pass
        assert condition == UNKNOWN
        peer.socket.close()
    idle.socket.close()
    eventually(lambda: is_served(broker, OTHER), "the queue is served again")
    serves(broker.amqp_port)


def test_sends_and_requests_to_a_stalled_worker_are_refused_as_busy_after_a_third_of_the_time(tmp_path):
    with Broker(tmp_path, CONFIG.replace(f"= {STALL_MS}", "= 12000"), workers=2) as broker:
        stalled = worker_of(broker, home_partition(OTHER, 2))
        with RawPeer.connect(broker.amqp_port) as peer, RawPeer.connect(broker.amqp_port) as asking:
            handle = peer.attach_sender(OTHER)
            node = Node(asking, f"{OTHER}/$management")
            stalled.suspend()
            began = time.monotonic()
            peer.transfer(message(b"nobody knows"), handle)
            eventually(lambda: logged(broker, "worker does not answer"), "it is known")
            assert time.monotonic() - began < 8
            for _ in range(3):
                peer.transfer(message(b"refused"), handle)
                assert error_of(peer.expect(DISPOSITION, 2))[0] == BUSY
            assert (
                node.ask(
                    "com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(1)}
                ).status
                == 503
            )
            stalled.resume()
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED  # the first, after all
            eventually(lambda: sent(peer, handle), "it takes messages again")


def sent(peer: RawPeer, handle: int) -> bool:
    peer.transfer(message(b"again"), handle)
    return bool(peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED)


def is_served(broker: Broker, queue: str) -> bool:
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"again"), peer.attach_sender(queue))
        return bool(peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED)


def test_workers_with_nothing_to_do_are_left_alone(broker):
    before = [each.pid for each in broker.processes()]
    time.sleep(STALL_MS / 1000 + 1.5)
    assert [each.pid for each in broker.processes()] == before


def test_a_broker_that_was_stopped_as_a_whole_replaces_nothing(broker):
    """As by SIGSTOP to all of it, or a machine that sleeps."""
    processes = broker.processes()
    for each in processes:
        each.suspend()
    time.sleep(STALL_MS / 1000 + 1)
    for each in processes:
        each.resume()
    serves(broker.amqp_port)
    time.sleep(1.5)  # nor is any replaced later
    assert [each.pid for each in broker.processes()] == [each.pid for each in processes]
