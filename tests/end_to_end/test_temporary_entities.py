"""Temporary queues and subscriptions that are not durable, while the processes die that know of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.brokers import Broker
from tests.end_to_end.raw_peer import ATTACH, DETACH, Closed, RawPeer, error_of, message
from tests.end_to_end.test_jms import bodies, make, names, send, subscribe, temporary
from tests.patience import eventually

CONFIG = """
partitions = 4
gateways = 2

[[topics]]
name = "news"
"""
TEMPORARY = ("temporary-", "news/Subscriptions/")
PEERS = 12  # the kernel distributes connections over the gateways: all of them to one, once in 2,000 times


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path, CONFIG, workers=2) as broker:
        yield broker


def left(broker: Broker) -> list[str]:
    return [name for prefix in TEMPORARY for name in names(broker, prefix)]


def is_lost(peer: RawPeer) -> bool:
    """The broker has closed the connection, or reset it."""
    try:
        peer.attach(sender=True, address="old news")
        peer.refusal()
    except (Closed, OSError):
        return True
    return False


def test_what_a_killed_gateway_held_is_deleted_and_nothing_else(broker: Broker) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer.connect(broker.amqp_port)) for _ in range(PEERS)]
        queues = {}
        for number, peer in enumerate(peers):
            subscribe(peer, "news", f"qpid-jms:receiver:{number}:news")
            queues[make(peer)[1]] = peer
        assert len(left(broker)) == 2 * PEERS
        broker.gateways()[0].kill()
        kept = {address: peer for address, peer in queues.items() if not is_lost(peer)}
        assert 0 < len(kept) < PEERS
        eventually(lambda: len(left(broker)) == 2 * len(kept), "those of the other gateway are left")
        assert set(names(broker, "temporary-")) == set(kept)
        for address, peer in kept.items():
            send(peer, address, message(b"reply"))
            assert bodies(peer, peer.attach_receiver(address, credit=1)) == [b"reply"]


def wait_until_made(peer: RawPeer) -> None:
    """After a worker was killed, until all are back."""

    def made() -> bool:
        peer.attach(sender=True, target_=temporary("queue"))
        is_made = peer.expect(ATTACH).fields[6] is not None
        if not is_made:
            peer.expect(DETACH)
        return is_made

    eventually(made, "the home takes changes again")


def test_temporary_entities_end_with_the_home_and_their_links_are_told(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        _, address = make(peer)
        receiver = peer.attach_receiver(address)
        broker.worker_processes()[0].kill()
        detached = [peer.expect(DETACH) for _ in range(2)]
        assert {error_of(each)[0] for each in detached} == {"amqp:not-found"}
        assert receiver in [each.fields[0] for each in detached]
        eventually(lambda: not left(broker), "nothing is left")

        wait_until_made(peer)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_temporary_entity_is_there_after_a_start(broker: Broker, end: str) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        wait_until_made(peer)
        addresses = [make(peer)[1], make(peer, "topic")[1]]
        subscribe(peer, "news", "qpid-jms:receiver:1:news")
        subscribe(peer, "news", "kept", durable=True)
        send(peer, addresses[0], message(b"reply"))
        broker.stop() if end == "stop" else broker.kill()
    broker.start()
    assert left(broker) == ["news/Subscriptions/kept$raw-peer$D"]
