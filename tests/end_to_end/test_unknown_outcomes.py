"""What a worker that died may have done: the client hears that nobody knows, and never that it was not done.

`com.microsoft:timeout` is what SDKs document as "may or may not have been done", and ask again after (amqp.md 12.2).
"""

from uuid import UUID

import psutil
import pytest

from protocol.codec import Array, Described, ULong
from protocol.lock_tokens import uuid_of
from tests.brokers import Broker
from tests.end_to_end.health import logged
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    TRANSFER,
    RawPeer,
    error_of,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import DISCHARGE, Coordinator, answer_of, within
from tests.patience import PATIENCE_S, eventually

UNKNOWN = "com.microsoft:timeout"
LOCK_LOST = "com.microsoft:message-lock-lost"
SESSION_LOCK_LOST = "com.microsoft:session-lock-lost"
CONFIG = """
[[queues]]
name = "orders"

[[queues]]
name = "sessions"
requires_session = true
"""


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path, CONFIG, workers=1) as broker:
        yield broker
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


@pytest.fixture
def peer(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def receive(peer: RawPeer, sender: int) -> tuple[int, bytes]:
    """A message of its own, locked: delivery id and tag."""
    peer.transfer(message(b"m"), sender)
    peer.expect(DISPOSITION)
    delivery = peer.expect(TRANSFER)
    return delivery.fields[1], delivery.fields[2]


def stopped(broker: Broker) -> psutil.Process:
    """The worker, which takes no more commands: they wait in its socket."""
    worker = broker.worker()
    worker.suspend()
    return worker


def killed(broker: Broker, peer: RawPeer, worker: psutil.Process) -> None:
    peer.wait_until_read()
    worker.kill()
    worker.wait(PATIENCE_S)
    eventually(lambda: logged(broker, "worker connection lost"), "the gateway knows")


def answered(peer: RawPeer) -> str:
    return answer_of(peer.expect(DISPOSITION, PATIENCE_S))


def completing(token: bytes) -> dict[str, object]:
    return {"disposition-status": "completed", "lock-tokens": Array(UUID, (uuid_of(token),))}


def test_sends_settlements_and_requests_that_a_dead_worker_did_not_answer_may_have_been_done(broker, peer):
    sender, node = peer.attach_sender("orders"), Node(peer, "orders/$management")
    peer.attach_receiver("orders", credit=2)
    by_link, by_token = receive(peer, sender), receive(peer, sender)
    worker = stopped(broker)
    peer.transfer(message(b"late"), sender)
    peer.settle(by_link[0])
    node.say("com.microsoft:update-disposition", completing(by_token[1]))
    killed(broker, peer, worker)
    assert [answered(peer), answered(peer)] == [UNKNOWN, UNKNOWN]
    response = node.response()
    assert (response.status, response.condition) == (408, UNKNOWN)
    # Who asks again learns that the lock is gone: the message is either done or free.
    eventually(lambda: broker.get("/readyz")[0] == 200, "ready")
    with RawPeer.connect(broker.amqp_port) as again:
        response = Node(again, "orders/$management").ask("com.microsoft:update-disposition", completing(by_token[1]))
    assert (response.status, response.condition) == (410, LOCK_LOST)


def test_settlements_of_a_session_may_have_been_done_though_its_lock_is_gone(broker, peer):
    sender = peer.attach_sender("sessions")
    peer.transfer(message(b"m", properties=[None] * 10 + ["a"]), sender)
    peer.expect(DISPOSITION)
    filters = {"com.microsoft:session-filter": Described(ULong(0x137000000C), "a")}
    receiver = peer.attach(sender=False, source_=source("sessions", filters=filters))
    peer.expect(ATTACH)
    peer.flow(receiver, 1)
    delivery = peer.expect(TRANSFER)
    worker = stopped(broker)
    peer.settle(delivery.fields[1])
    killed(broker, peer, worker)
    assert answered(peer) == UNKNOWN
    assert error_of(peer.expect(DETACH, PATIENCE_S))[0] == SESSION_LOCK_LOST


def test_a_commit_that_a_dead_worker_did_not_answer_may_have_been_done(broker, peer):
    coordinator, sender = Coordinator(peer), peer.attach_sender("orders")
    transaction = coordinator.declare()
    peer.transfer(message(b"m"), sender, state=within(transaction))
    assert answered(peer) == "in the transaction"
    worker = stopped(broker)
    coordinator.say(DISCHARGE, transaction, False)
    killed(broker, peer, worker)
    assert answered(peer) == UNKNOWN
    # Nobody knows it any more; to say that it was rolled back might be wrong.
    assert coordinator.discharge(transaction) == "amqp:transaction:unknown-id"


@pytest.mark.parametrize("is_down", [False, True])
def test_a_rollback_is_done_when_the_worker_dies(broker, peer, is_down):
    coordinator, sender = Coordinator(peer), peer.attach_sender("orders")
    transaction = coordinator.declare()
    peer.transfer(message(b"m"), sender, state=within(transaction))
    assert answered(peer) == "in the transaction"
    worker = stopped(broker)
    if is_down:
        killed(broker, peer, worker)
    coordinator.say(DISCHARGE, transaction, True)
    if not is_down:
        killed(broker, peer, worker)
    assert answered(peer) == "accepted"


def test_a_commit_that_was_never_sent_is_rolled_back(broker, peer):
    coordinator, sender = Coordinator(peer), peer.attach_sender("orders")
    transaction = coordinator.declare()
    peer.transfer(message(b"m"), sender, state=within(transaction))
    assert answered(peer) == "in the transaction"
    killed(broker, peer, stopped(broker))
    assert coordinator.discharge(transaction) == "amqp:transaction:rollback"


def test_commands_that_were_never_sent_to_a_worker_were_not_done(broker, peer):
    sender = peer.attach_sender("orders")
    peer.attach_receiver("orders", credit=1)
    delivery_id, _ = receive(peer, sender)
    killed(broker, peer, stopped(broker))
    peer.transfer(message(b"late"), sender)
    peer.settle(delivery_id, state=outcome(ACCEPTED))
    answers = {answered(peer), answered(peer)}
    assert answers <= {"com.microsoft:server-busy", "accepted", LOCK_LOST}  # as quickly as the worker is back
