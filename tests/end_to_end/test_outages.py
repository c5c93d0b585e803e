"""Processes that die, stop or end while clients are at work: what these are told, and what they have afterwards."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from uuid import UUID

import pytest

from broker.catalog.catalog import home_partition
from protocol.codec import Array, Int, Long, decode
from protocol.lock_tokens import uuid_of
from tests.brokers import Broker, running
from tests.end_to_end.health import logged, metrics, process_ids, serves
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    CLOSE,
    DETACH,
    DISPOSITION,
    TRANSFER,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node
from tests.patience import PATIENCE_S, eventually

BUSY = "com.microsoft:server-busy"
UNKNOWN = "com.microsoft:timeout"
LOCK_LOST = "com.microsoft:message-lock-lost"
CONFIG = "partitions = 2\n" + "".join(f'[[queues]]\nname = "{name}"\n' for name in ("witness", "orders"))


@pytest.fixture
def start(tmp_path):
    return lambda config=CONFIG, **options: running(Broker(tmp_path, config, **options))


@pytest.fixture
def broker(start):
    with start(workers=1) as broker:
        yield broker


def delivery_count(payload: bytes) -> int:
    header, _ = decode(payload)
    return int(header.value[4]) if len(header.value) > 4 and header.value[4] else 0


def kill_worker(broker: Broker) -> None:
    worker = broker.worker()
    worker.kill()
    worker.wait(PATIENCE_S)


def in_background(call: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=run, daemon=True).start()
    return done


def is_ready(broker: Broker) -> bool:
    try:
        return broker.get("/readyz")[0] == 200
    except OSError:
        return False


def test_operations_that_a_killed_worker_left_are_answered_and_links_work_on(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        for number in range(3):
            peer.transfer(message(b"%d" % number), sender)
            assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)
        peer.attach_receiver("orders", credit=10)
        locked = [peer.expect(TRANSFER) for _ in range(3)]
        broker.worker().suspend()
        unanswered = [peer.transfer(message(b"late"), sender) for _ in range(5)]
        peer.settle(locked[0].fields[1])
        peer.wait_until_read()
        kill_worker(broker)

        answers = {}
        while len(answers) < 6:
            answer = peer.expect(DISPOSITION, PATIENCE_S)
            for delivery_id in range(answer.fields[1], (answer.fields[2] or answer.fields[1]) + 1):
                answers[answer.fields[0], delivery_id] = error_of(answer)[0]
        assert answers == {**{(True, each): UNKNOWN for each in unanswered}, (False, locked[0].fields[1]): UNKNOWN}

        # The same links, as if nothing had been: the locks are gone, so all three messages come again.
        again = [peer.expect(TRANSFER, PATIENCE_S) for _ in range(3)]
        assert sorted(body_of(each.payload) for each in again) == [b"0", b"1", b"2"]
        peer.settle(locked[1].fields[1])
        assert error_of(peer.expect(DISPOSITION))[0] == LOCK_LOST
        peer.settle(again[0].fields[1], again[-1].fields[1])
        assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)
        peer.transfer(message(b"after"), sender)
        assert body_of(peer.expect(TRANSFER).payload) == b"after"
        peer.nothing_more(DETACH, 0)
    eventually(lambda: is_ready(broker), "ready")
    serves(broker.amqp_port)


def test_while_a_worker_is_down_what_begins_waits_and_what_is_lost_is_told_at_once(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        node = Node(peer, "orders/$management")
        peer.transfer(message(b"locked"), sender)
        peer.expect(DISPOSITION)
        peer.attach_receiver("orders", credit=1)
        locked = peer.expect(TRANSFER)
        kill_worker(broker)
        eventually(lambda: logged(broker, "worker connection lost"), "the gateway knows")
        peer.settle(locked.fields[1])
        assert error_of(peer.expect(DISPOSITION))[0] == LOCK_LOST
        peer.transfer(message(b"waits"), sender)
        answer = peer.expect(DISPOSITION, PATIENCE_S)
        # On a busy machine the restart may take longer than anything waits.
        assert answer.fields[4] == outcome(ACCEPTED) or error_of(answer)[0] == BUSY
        body = {"from-sequence-number": Long(0), "message-count": Int(1)}
        response = node.ask("com.microsoft:peek-message", body)
        assert (response.status, response.condition) == (503, BUSY) or response.status == 200
        peer.attach_receiver("orders", name="attached meanwhile", credit=1)
        assert body_of(peer.expect(TRANSFER, PATIENCE_S).payload) == b"locked"


def test_the_other_partitions_do_not_notice(start):
    names = {home_partition(name, 2): name for name in map("queue-{}".format, range(20))}
    config = "partitions = 2\n" + "".join(f'[[queues]]\nname = "{name}"\n' for name in (*names.values(), "witness"))
    with start(config, workers=2) as broker:
        workers = broker.worker_processes()
        assert len(workers) == len(names) == 2
        for worker in workers:
            worker.suspend()
            assert sum(is_served(broker, name) for name in names.values()) == 1
            worker.resume()
        assert all(is_served(broker, name) for name in names.values())
        serves(broker.amqp_port)


def is_served(broker: Broker, queue: str) -> bool:
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"probe"), peer.attach_sender(queue))
        try:
            peer.expect(DISPOSITION, 0.5)
        except TimeoutError:
            return False
        return True


def test_a_killed_gateway_drops_its_locks_and_counts_the_deliveries(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"held"), peer.attach_sender("orders"))
        peer.expect(DISPOSITION)
        peer.attach_receiver("orders", credit=1)
        held = peer.expect(TRANSFER)
        assert delivery_count(held.payload) == 0
        gateway = broker.gateway()
        gateway.kill()
        gateway.wait(PATIENCE_S)
        assert peer.wait_closed() == []
    eventually(lambda: is_ready(broker), "ready")
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("orders", credit=1)
        again = peer.expect(TRANSFER)
        assert body_of(again.payload) == b"held"
        assert delivery_count(again.payload) == 1
        node = Node(peer, "orders/$management")
        lost = node.ask("com.microsoft:renew-lock", {"lock-tokens": Array(UUID, (uuid_of(held.fields[2]),))})
        assert lost.status == 410
    serves(broker.amqp_port)


@pytest.mark.parametrize("dies", [Broker.worker, Broker.gateway])
def test_a_process_may_die_again_and_again(broker, dies):
    for _ in range(3):
        victim = dies(broker)
        victim.kill()
        victim.wait(PATIENCE_S)
        eventually(lambda: is_ready(broker), "ready")
    serves(broker.amqp_port)


def test_sigterm_detaches_links_and_closes_connections_with_the_reason(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        peer.transfer(message(b"kept"), sender)
        peer.expect(DISPOSITION)
        peer.attach_receiver("orders", credit=1)
        peer.expect(TRANSFER)
        idle = RawPeer(broker.amqp_port)  # without so much as a header
        stopped = in_background(broker.stop)
        detached = [peer.expect(DETACH), peer.expect(DETACH)]
        assert {error_of(each)[0] for each in detached} == {"amqp:connection:forced"}
        assert error_of(peer.expect(CLOSE))[0] == "amqp:connection:forced"
        assert idle.wait_closed() == []
        idle.socket.close()
    stopped.result()
    broker.start()
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("orders", credit=1)
        kept = peer.expect(TRANSFER)
        assert body_of(kept.payload) == b"kept"
        assert delivery_count(kept.payload) == 0  # the broker's own end is no failure of the client's


def test_a_client_that_is_sending_reads_why_it_was_closed(broker):
    """A reset would have thrown that away."""
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        stopped = in_background(broker.stop)
        with suppress(OSError):
            while not stopped.done():
                peer.transfer(message(bytes(1000)), sender)
        closed = [frame for frame in peer.wait_closed() if frame.code == CLOSE]
        assert error_of(closed[0])[0] == "amqp:connection:forced"
    stopped.result()


def test_connections_and_links_of_the_dead_are_not_counted(broker):
    peers = [RawPeer.connect(broker.amqp_port) for _ in range(20)]
    for peer in peers:
        peer.attach_sender("orders")
        peer.attach_receiver("orders", credit=1)
    assert metrics(broker)["peeklock_active_connections",] == 20
    for peer in peers[::2]:
        peer.socket.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SO_LINGER 0: a reset
    for peer in peers:
        peer.socket.close()
    eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "none left")
    names = [name for name in metrics(broker) if "links" in name[0] or "sessions" in name[0]]
    assert {metrics(broker)[name] for name in names} == {0.0}
    assert process_ids(broker)
