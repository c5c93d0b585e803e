"""A broker whose partitions are in the gateway's process: how it starts, stops, fails, and what operators see.

What clients see otherwise is in test_both_forms.py; disks that fail and damaged partitions are with those of workers.
"""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

import psutil
import pytest

from bench.processes import command_of
from broker.settings.config import Settings
from tests.brokers import Broker, BrokerFailed
from tests.end_to_end.health import elsewhere, is_ready, logged, metrics, serves
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    CLOSE,
    DISPOSITION,
    TRANSFER,
    Closed,
    RawPeer,
    body_of,
    error_of,
    message,
)
from tests.patience import PATIENCE_S, eventually

QUEUES = ("orders", elsewhere("orders"))  # on two partitions
CONFIG = "partitions = 2\n" + "".join(f'[[queues]]\nname = "{name}"\n' for name in ("witness", *QUEUES))
FAULTY_PROCESS = Path(__file__).with_name("faulty_process")


def send(broker: Broker, *bodies: bytes, queue: str = "orders") -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(queue)
        for body in bodies:
            peer.transfer(message(body), handle)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


def take(broker: Broker, queue: str = "orders", silent_s: float = 1.0) -> list[bytes]:
    """Complete all there is."""
    found = []
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(queue, credit=100_000)
        with suppress(TimeoutError):
            while True:
                delivery = peer.expect(TRANSFER, silent_s)
                peer.settle(delivery.fields[1])
                found.append(body_of(delivery.payload))
        peer.close()
    return found


def modules(broker: Broker) -> list[str]:
    return sorted(part for each in broker.processes() for part in command_of(each) if part.startswith("broker."))


def test_what_runs_without_a_setting_is_what_the_machine_asks_for(tmp_path):
    with Broker(tmp_path, CONFIG, workers=None) as broker:
        separate = ["broker.gateway", *["broker.worker"] * min(2, Settings().worker_count)]
        expected = ["broker.one_process"] if Settings().is_one_process else separate
        assert modules(broker) == ["broker.cli", *expected]
        serves(broker.amqp_port)


@pytest.mark.parametrize(
    ("in_file", "expected"), [(0, ["broker.one_process"]), (1, ["broker.gateway", "broker.worker"])]
)
def test_interpreters_that_were_started_for_the_other_form_are_ended(tmp_path, in_file, expected):
    """The number is in the file, which is not read before they are started."""
    broker = Broker(tmp_path, CONFIG, workers=None)
    broker.config_file.write_text(f"workers = {in_file}\n{CONFIG}")
    with broker:
        assert modules(broker) == ["broker.cli", *expected]


def test_metrics_show_the_process_once(tmp_path):
    with Broker(tmp_path, CONFIG, workers=0) as broker:
        shown = metrics(broker)
        names = {label for name, *labels in shown for label in labels if name.startswith("peeklock_process_")}
        assert names == {"gateway", "checkpointer-0"}
        assert shown["peeklock_worker_up", "0"] == 1


def test_sigterm_under_load_ends_clients_politely_and_loses_nothing(tmp_path):
    """Of each client, what was accepted is there, and nothing twice; each reads why it was closed."""
    accepted: dict[int, int] = {}
    loaded = Event()

    def client(number: int) -> str:
        with RawPeer.connect(broker.amqp_port) as peer:
            handle = peer.attach_sender(QUEUES[number % 2])
            sent = 0
            try:
                while True:
                    for _ in range(20):
                        peer.transfer(message(b"%d %d" % (number, sent)), handle)
                        sent += 1
                    while accepted.get(number, 0) < sent:
                        answer = peer.expect(DISPOSITION)
                        assert answer.fields[4].descriptor == ACCEPTED
                        last = answer.fields[2] if answer.fields[2] is not None else answer.fields[1]
                        accepted[number] = last + 1
                    if sent > 200:
                        loaded.set()
            except (Closed, OSError):
                pass
            return error_of(next(frame for frame in [*peer._kept, *peer.wait_closed()] if frame.code == CLOSE))[0]

    with Broker(tmp_path, CONFIG, workers=0) as broker, ThreadPoolExecutor(8) as threads:
        clients = [threads.submit(client, number) for number in range(8)]
        assert loaded.wait(PATIENCE_S)
        began = time.monotonic()
        broker.stop()
        assert time.monotonic() - began < 5
        assert {each.result() for each in clients} == {"amqp:connection:forced"}
        broker.start()
        found = [*take(broker, QUEUES[0]), *take(broker, QUEUES[1])]
    assert len(found) == len(set(found))
    promised = {b"%d %d" % (number, each) for number, count in accepted.items() for each in range(count)}
    assert promised <= set(found)
    assert len(promised) > 1000


def test_a_killed_process_is_started_again_and_keeps_what_was_accepted(tmp_path):
    with Broker(tmp_path, CONFIG, workers=0) as broker:
        for number in range(3):
            send(broker, b"%d" % number)
            killed = broker.worker()
            killed.kill()
            killed.wait(PATIENCE_S)
            eventually(lambda: is_ready(broker), "it serves")
        assert metrics(broker)["peeklock_worker_restarts_total", "0"] == 3
        assert take(broker) == [b"0", b"1", b"2"]


def test_a_process_that_is_stopped_is_replaced(tmp_path):
    with Broker(tmp_path, "worker_stall_timeout_ms = 3000\n" + CONFIG, workers=0) as broker:
        send(broker, b"kept")
        stalled = broker.worker()
        stalled.suspend()
        stalled.wait(PATIENCE_S)
        assert logged(broker, "process stalled")
        eventually(lambda: is_ready(broker), "it serves")
        assert take(broker) == [b"kept"]


@pytest.mark.parametrize("flag", ["amqp_port", "ops_port"])
def test_a_port_in_use_is_one_message_and_the_exit_code_of_a_wrong_setting(tmp_path, flag):
    broker = Broker(tmp_path, CONFIG, workers=0)
    with socket.create_server(("127.0.0.1", getattr(broker, flag))), pytest.raises(BrokerFailed) as failed:
        broker.start()
    setting = flag.replace("_", ".")
    assert f"peeklock: cannot start: cannot listen on 127.0.0.1 port {getattr(broker, flag)}" in str(failed.value)
    assert setting in str(failed.value)
    assert "Traceback" not in str(failed.value)
    broker.start()
    broker.stop()


def test_over_changes_of_the_number_of_workers_everything_stays(tmp_path):
    """Also when what one form has logged must be brought into the stores by the start of another."""
    broker = Broker(tmp_path, CONFIG, workers=0)
    sent: dict[str, list[bytes]] = {queue: [] for queue in QUEUES}
    try:
        for round_, (workers, ends) in enumerate(
            [(0, broker.kill), (2, broker.kill), (0, broker.stop), (2, broker.stop), (1, broker.kill), (0, broker.stop)]
        ):
            broker.workers = workers
            broker.start()
            for queue, bodies in sent.items():
                bodies.append(b"%d in %s" % (round_, queue.encode()))
                send(broker, bodies[-1], queue=queue)
            ends()
        broker.start()
        assert {queue: take(broker, queue) for queue in QUEUES} == sent
        broker.stop()
    finally:
        broker.kill()


@pytest.fixture
def faulty(tmp_path):
    """The broker, and the file that makes it fail."""
    fault = tmp_path / "fault"
    prefix = ("env", f"PYTHONPATH={FAULTY_PROCESS}", f"FAULT={fault}")
    with Broker(tmp_path / "broker", CONFIG, prefix=prefix, workers=0) as broker:
        yield broker, fault


def test_a_mistake_in_handling_answers_connects_again_and_loses_nothing(faulty):
    broker, fault = faulty
    process = broker.worker()
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("orders")
        peer.transfer(message(b"before"), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        fault.write_text("answers")
        peer.transfer(message(b"in doubt"), handle)
        assert error_of(peer.expect(DISPOSITION))[0] == "com.microsoft:timeout"
        eventually(lambda: logged(broker, "worker connected again"), "it is connected again")
        peer.transfer(message(b"after"), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    assert logged(broker, "the worker's answers could not be handled; connecting again")
    assert take(broker) == [b"before", b"in doubt", b"after"], "only the answer was lost"
    assert broker.worker() == process


def test_a_mistake_in_a_turn_ends_the_process_without_an_answer(faulty):
    broker, fault = faulty
    process = broker.worker()
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("orders")
        peer.transfer(message(b"before"), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        fault.write_text("turn")
        with suppress(OSError):  # it may have ended in another turn
            peer.transfer(message(b"never accepted"), handle)
        with pytest.raises(Closed):
            peer.expect(DISPOSITION, PATIENCE_S)
    process.wait(PATIENCE_S)
    assert logged(broker, "unforeseen failure; the process ends without a commit")
    eventually(lambda: is_ready(broker), "it serves")
    send(broker, b"after")
    assert [body for body in take(broker) if body != b"never accepted"] == [b"before", b"after"]


def test_a_second_signal_means_now(tmp_path):
    broker = Broker(tmp_path, CONFIG, workers=0)
    broker.start()
    broker.gateway().suspend()  # cannot end by itself
    children = broker.processes()[1:]
    os.kill(broker.pid, signal.SIGTERM)
    eventually(lambda: logged(broker, '"stopping"'), "that it stops")
    os.kill(broker.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(children, timeout=5.0)
    assert not alive
    broker.kill()
