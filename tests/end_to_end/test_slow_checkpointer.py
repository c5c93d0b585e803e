"""A checkpointer that runs for a small part of the time, under load: what clients and operators see."""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress

from tests.brokers import Broker
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, message
from tests.patience import eventually

LOG_BYTES, SEGMENT_BYTES = 8 << 20, 1 << 20
CONFIG = f"""
partitions = 1
[amqp]
max_message_size_bytes = 1048576
[store]
log_bytes = {LOG_BYTES}
[[queues]]
name = "orders"
"""
GROUP, BODY_BYTES = 20, 20_000
STOPPED_S, RUNS_S = 0.4, 0.02
PHASE_S = 4.0
LONGEST_WAIT_S = 5.0  # see storage.log.commit_log: with this, a commit would have waited in vain


class Load:
    """A sender of messages with rising numbers, and a receiver that completes what it gets, each in a thread."""

    def __init__(self, port: int) -> None:
        self.accepted, self.settled = 0, 0
        self.received: list[int] = []
        self.slowest_s = 0.0
        self.failed: list[BaseException] = []
        self._port = port
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._guarded, args=[each]) for each in (self._send, self._settle)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work) -> None:
        try:
            with RawPeer.connect(self._port) as peer:
                work(peer)
        except BaseException as error:
            self.failed.append(error)

    def _send(self, peer: RawPeer) -> None:
        handle = peer.attach_sender("orders")
        while not self._ends.is_set():
            began = time.monotonic()
            for number in range(self.accepted, self.accepted + GROUP):
                peer.transfer(message(b"%d " % number + bytes(BODY_BYTES)), handle)
            accepted(peer, GROUP)
            self.accepted += GROUP
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _settle(self, peer: RawPeer) -> None:
        peer.attach_receiver("orders", credit=1_000_000)
        while not self._ends.is_set():
            with suppress(TimeoutError):
                delivery = peer.expect(TRANSFER, 0.5)
                self.received.append(number_of(delivery.payload))
                peer.settle(delivery.fields[1])
                accepted(peer, 1)
                self.settled += 1


def accepted(peer: RawPeer, count: int) -> None:
    """So many deliveries are answered, all with accepted."""
    while count > 0:
        answer = peer.expect(DISPOSITION, 2 * LONGEST_WAIT_S)
        assert answer.fields[4].descriptor == ACCEPTED, answer
        count -= (answer.fields[2] or answer.fields[1]) - answer.fields[1] + 1
    assert count == 0


def number_of(payload: bytes) -> int:
    return int(body_of(payload).split(b" ")[0])


@contextmanager
def slow(pid: int):
    """The process runs for a small part of the time."""
    ends = threading.Event()

    def throttle() -> None:
        while not ends.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNS_S)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_a_slow_checkpointer_slows_sends_and_the_log_stays_bounded(tmp_path):
    most = {"peeklock_log_young_bytes": 0.0, "peeklock_log_disk_bytes": 0.0, "memory": 0.0}

    def waited_s(broker: Broker) -> float:
        return metrics(broker)["peeklock_log_waited_seconds_total", "0"]

    def share_waited(broker: Broker) -> float:
        """The part of a phase in which commits waited for the checkpointer; the log is watched meanwhile.

        Rates would say less: they also fall when other processes take the machine.
        """
        worker = broker.worker()
        began, before = time.monotonic(), waited_s(broker)
        while (passed := time.monotonic() - began) < PHASE_S:
            found = {name: value for (name, *_), value in metrics(broker).items()}
            found["memory"] = worker.memory_info().rss
            for name, value in most.items():
                most[name] = max(value, found[name])
            time.sleep(0.1)
        return (waited_s(broker) - before) / passed

    with Broker(tmp_path, CONFIG, workers=1) as broker:
        load = Load(broker.amqp_port)
        load.start()
        try:
            share_waited(broker)
            memory, most["memory"] = most["memory"], 0.0
            checkpointer, before = broker.checkpointer().pid, load.accepted
            with slow(checkpointer):
                slowed = share_waited(broker)
            assert load.accepted > before
            assert slowed > 0.1
            eventually(lambda: share_waited(broker) < slowed / 2, "less waiting")
        finally:
            load.stop()
        assert not load.failed, (load.failed, broker.log())
        assert load.slowest_s < LONGEST_WAIT_S
        assert most["peeklock_log_young_bytes"] <= LOG_BYTES + SEGMENT_BYTES
        assert most["peeklock_log_disk_bytes"] <= LOG_BYTES + 3 * SEGMENT_BYTES
        assert most["memory"] - memory < 4 * LOG_BYTES
        assert broker.checkpointer().pid == checkpointer
        broker.kill()
        broker.start()
        left = load.accepted - load.settled
        assert load.received[: load.settled] == list(range(load.settled))
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach_receiver("orders", credit=left)
            for number in range(load.settled, load.accepted):
                assert number_of(peer.expect(TRANSFER).payload) == number
            peer.nothing_more(TRANSFER)
