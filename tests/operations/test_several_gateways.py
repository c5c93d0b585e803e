"""Several gateways on one port: a client has one of them, and an operator sees them all."""

import time
from contextlib import ExitStack

import psutil
import pytest

from tests.brokers import Broker
from tests.end_to_end.health import eventually, is_ready, logged, serves
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, Closed, RawPeer, message

STALL_MS = 3000
CONFIG = f"""
gateways = 2
gateway_stall_timeout_ms = {STALL_MS}

[[queues]]
name = "witness"

[[queues]]
name = "orders"
"""
PATIENCE_S = 20.0


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path, CONFIG, workers=1) as broker:
        yield broker
        for process in broker.processes():
            process.resume()
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def gateway_of(broker: Broker, peer: RawPeer) -> psutil.Process:
    """The one that serves this client."""
    own = peer.socket.getsockname()
    return next(
        each for each in broker.gateways() if any(connection.raddr == own for connection in each.net_connections("tcp"))
    )


def clients_of_both(broker: Broker, stack: ExitStack) -> dict[psutil.Process, RawPeer]:
    """A client of each gateway; the system decides which it gets."""
    found: dict[psutil.Process, RawPeer] = {}
    while len(found) < 2:
        peer = stack.enter_context(RawPeer.connect(broker.amqp_port))
        found.setdefault(gateway_of(broker, peer), peer)
    return found


def sends(peer: RawPeer, handle: int) -> None:
    peer.transfer(message(b"m"), handle)
    assert peer.expect(DISPOSITION, 2).fields[4].descriptor == ACCEPTED


def test_a_gateway_that_hangs_is_replaced_while_the_clients_of_the_other_go_on(broker):
    with ExitStack() as stack:
        (hung, waiting), (sound, served) = clients_of_both(broker, stack).items()
        handle = served.attach_sender("orders")
        hung.suspend()
        began = time.monotonic()
        while hung.is_running():
            assert time.monotonic() < began + PATIENCE_S
            sends(served, handle)
            time.sleep(0.05)
        assert time.monotonic() - began > STALL_MS / 1000 - 1.5
        assert logged(broker, "process stalled")
        with pytest.raises(Closed):
            waiting.expect(DISPOSITION, 2)
        eventually(lambda: len(broker.gateways()) == 2, "another was started")
        sends(served, handle)
        assert sound.is_running()
    eventually(lambda: is_ready(broker), "ready again")
    for _ in range(8):  # whichever of the two
        serves(broker.amqp_port)


def test_gateways_with_nothing_to_do_are_left_alone(broker):
    before = [each.pid for each in broker.processes()]
    time.sleep(STALL_MS / 1000 + 1.5)
    assert [each.pid for each in broker.processes()] == before
