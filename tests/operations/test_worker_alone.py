"""One worker, without the rest of a broker: a command that fails by a mistake in the code, a clock that is set back, no
file descriptor.
"""

import errno
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import psutil
import pytest

from broker.wire import ENTRY, Op, Outcome
from broker.worker.dialling import UnixDialler
from broker.worker.neighbours import REDIAL_MS, Neighbours
from protocol.codec import Described, encode
from protocol.message.intake import take_apart
from storage.data_dir import partition_path
from storage.log.snapshot import Snapshot
from storage.records import decode_entry
from storage.store import Table
from tests.brokers import REPOSITORY
from tests.patience import PATIENCE_S, eventually

QUEUE = 1 << 3
WORKER = REPOSITORY / "tests" / "operations" / "children" / "worker_alone.py"


class Gateway:
    """One connection to a worker, as a gateway has one."""

    def __init__(self, path: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            if self._socket.connect_ex(path) == 0:
                break
            self.close()
            assert time.monotonic() < deadline, "the worker does not listen"
            time.sleep(0.02)
        self._socket.settimeout(PATIENCE_S)
        self._input = bytearray()
        self._messages: list[list[Any]] = []
        self.expect(Op.CATALOG)

    def close(self) -> None:
        self._socket.close()

    def say(self, *messages: list[Any]) -> None:
        frame = msgpack.packb(messages)
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)

    def expect(self, op: Op) -> list[Any]:
        """The next message of this kind; others before it are passed over."""
        while (message := self.next())[0] != op:
            pass
        return message

    def next(self) -> list[Any]:
        while not self._messages:
            data = self._socket.recv(1 << 20)
            assert data, "the worker has ended"
            self._input += data
            while len(self._input) >= 4 and len(self._input) >= (end := 4 + int.from_bytes(self._input[:4], "big")):
                self._messages += msgpack.unpackb(self._input[4:end], strict_map_key=False)
                del self._input[:end]
        return self._messages.pop(0)

    def ask(self, name: str, *arguments: Any) -> Any:
        self.say([Op.REQUEST, 0, 1, name, QUEUE, list(arguments)])
        return self.expect(Op.REPLY)[2]

    def has_ended(self) -> bool:
        with suppress(OSError):
            while self._socket.recv(1 << 20):
                pass
        return True

    def receive(self) -> bytes:
        """The token of a message that is locked on this connection."""
        self.say([Op.OPEN_RECEIVER, 0, 7, QUEUE, False, None], [Op.GRANT, 0, 7, 1])
        return bytes(self.expect(Op.DELIVER)[3][0])


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    @contextmanager
    def start() -> Iterator[tuple[subprocess.Popen[str], Callable[[], Gateway]]]:
        path = str(tmp_path / "s")
        command = [sys.executable, str(WORKER), str(tmp_path / "store"), path]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, stderr=log)
        gateways: list[Gateway] = []

        def dial() -> Gateway:
            gateways.append(Gateway(path))
            return gateways[-1]

        try:
            yield process, dial
        finally:
            for gateway in gateways:
                gateway.close()
            process.kill()
            process.wait()

    return start


def sent(ttl_ms: int | None = None) -> list[Any]:
    layout, body, _, extra = take_apart(encode(Described(0x75, b"m")))
    return [layout, body, ttl_ms, extra]


def test_a_command_that_fails_before_it_changed_anything_costs_nobody_a_lock(worker, tmp_path):
    with worker() as (process, dial):
        gateway, other = dial(), dial()
        gateway.say([Op.SEND, 0, 1, QUEUE, [sent()]])
        gateway.expect(Op.SENT)
        token = gateway.receive()
        other.say(
            [Op.SEND, 0, 1, QUEUE, [sent()]],  # in the same turn: done, whatever becomes of the next
            [Op.REQUEST, 0, 5, "peek", QUEUE, [0, 1, 1000]],
        )
        assert other.expect(Op.SENT) == [Op.SENT, 1, 1]
        number, request, error, text = other.expect(Op.FAILED)
        assert (number, request, error) == (Op.FAILED, 5, "InternalError")
        assert "mistake" not in text
        gateway.say([Op.SETTLE, 0, QUEUE, Outcome.ACCEPTED, [7, 1], [token], None])
        assert gateway.expect(Op.SETTLED) == [Op.SETTLED, [7, 1]]
        gateway.say([Op.REQUEST, 0, 6, "metrics", 0, []])
        assert gateway.expect(Op.REPLY)[2]["internal_errors"] == 1
        assert process.poll() is None
    log = (tmp_path / "log").read_text()
    assert "ValueError: a mistake in the code" in log


def test_a_command_that_fails_after_it_changed_something_ends_the_worker_without_a_commit(worker, tmp_path):
    with worker() as (process, dial):
        gateway, other = dial(), dial()
        gateway.say([Op.SEND, 0, 1, QUEUE, [sent()]])
        gateway.expect(Op.SENT)
        gateway.receive()
        other.say([Op.SEND, 0, 1, QUEUE, [sent()]], [Op.REQUEST, 0, 5, "purge", QUEUE, []])
        assert other.has_ended()
        assert process.wait(PATIENCE_S) == 1
    snapshot = Snapshot(partition_path(tmp_path / "store", 0))
    assert [decode_entry(value).delivery_count for _, value in snapshot.items(Table.QUEUE)] == [0]
    assert snapshot.get(Table.META, b"half done") is None
    snapshot.close()
    assert "ValueError: a mistake in the code" in (tmp_path / "log").read_text()
    with worker() as (_, dial):
        assert len(dial().receive()) == 16


def test_times_to_live_and_locks_end_though_the_clock_is_set_back_an_hour(worker, tmp_path):
    with worker() as (_, dial):
        gateway = dial()
        gateway.say([Op.SEND, 0, 1, QUEUE, [sent()]])
        gateway.expect(Op.SENT)
        (tmp_path / "back").touch()
        gateway.say([Op.SEND, 0, 1, QUEUE, [sent(ttl_ms=300)]])
        gateway.expect(Op.SENT)
        eventually(lambda: gateway.ask("counts", QUEUE)[QUEUE][0] != 2, "the message expires")
        begun = time.monotonic()
        gateway.say([Op.OPEN_RECEIVER, 0, 7, QUEUE, False, None], [Op.GRANT, 0, 7, 2])
        _, _, until_ms, [_, _, count, *_] = gateway.expect(Op.DELIVER)
        assert count == 0
        left_ms = until_ms - (time.time() - 3600) * 1000
        assert 0 < left_ms < 6000, "clients are told the end of a lock by the clock that they see"
        assert gateway.expect(Op.DELIVER)[3][2] == 1
        assert time.monotonic() - begun > 4.5


def test_a_turn_takes_so_much_of_what_a_gateway_sent_at_once(worker):
    """30,000 sends in one frame; a turn has 10,000 records at most, in a small store fewer."""
    with worker() as (_, dial):
        gateway = dial()
        before = gateway.ask("metrics")["commits"]
        gateway.say(*[[Op.SEND, 0, 1, QUEUE, [sent()]]] * 30_000)
        count = 0
        while count < 30_000:
            count += gateway.expect(Op.SENT)[2]
        assert gateway.ask("metrics")["commits"] - before >= 3


# --- no file descriptor is left ---------------------------------------------------------------------------------------


def test_a_worker_without_a_descriptor_serves_who_is_there_and_others_when_it_has_one(worker, tmp_path):
    with worker() as (process, dial):
        gateway = dial()
        measured = psutil.Process(process.pid)
        limit = measured.rlimit(psutil.RLIMIT_NOFILE)
        measured.rlimit(psutil.RLIMIT_NOFILE, (measured.num_fds(), limit[1]))
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(str(tmp_path / "s"))
            began, before = time.monotonic(), sum(measured.cpu_times()[:2])
            while time.monotonic() - began < 1:
                gateway.say([Op.SEND, 0, 1, QUEUE, [sent()]])
                gateway.expect(Op.SENT)
                time.sleep(0.1)
            assert sum(measured.cpu_times()[:2]) - before < 0.5
            measured.rlimit(psutil.RLIMIT_NOFILE, limit)
            late.settimeout(PATIENCE_S)
            assert late.recv(4)
        assert dial()
        assert process.poll() is None
    assert 0 < (tmp_path / "log").read_text().count("no connection can be accepted") < 3


def test_a_worker_without_a_descriptor_for_another_tries_again(monkeypatch):
    def no_socket(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("broker.worker.dialling.socket.socket", no_socket)
    told: list[tuple[list[int], int]] = []
    partition: Any = SimpleNamespace(unreachable=lambda there, now_ms: told.append(([*there], now_ms)))
    copies: Any = None
    dialler, partitions = UnixDialler(["a", "b"]), {1: partition, 3: partition}
    with select.epoll() as poll:
        neighbours = Neighbours(dialler, b"us", partitions, 4, poll, lambda _: None, copies)
        neighbours.dial_due(1000)
        assert neighbours.dial_ms == 1000 + REDIAL_MS
        forward: Any = SimpleNamespace(partition=2)
        neighbours.send([forward], [], 2000)
    assert told == [([0, 2], 2000)] * 2


def test_commands_are_read_between_the_deliveries_of_a_large_backlog(worker):
    """The worker stops reading from a gateway that has 64 MiB unread. When it goes on, it reads before it hands out."""
    count, at_once = 20, 2
    messages = [[sent()[0], bytes(16 << 20), None, None]] * at_once
    with worker() as (_, dial):
        gateway = dial()
        for _ in range(0, count, at_once):
            gateway.say([Op.SEND, 0, 1, QUEUE, messages])
            gateway.expect(Op.SENT)
        gateway.say([Op.OPEN_RECEIVER, 0, 7, QUEUE, True, None], [Op.GRANT, 0, 7, count])
        time.sleep(2)  # nothing is read: what is handed out piles up, as much as the worker allows
        gateway.say([Op.SEND, 0, 1, QUEUE, [sent()]])
        delivered = 0
        while (message := gateway.next())[0] != Op.SENT:
            delivered += len(message[3]) // ENTRY if message[0] == Op.DELIVER else 0
        assert delivered <= 5  # 64 MiB and what was begun


def test_nothing_is_stored_for_a_gateway_that_has_asked_over_another_connection_what_is(worker):
    """The rest of what it said over the connection before still waits for its turn, and would come twice."""
    count, sender = 30_000, b"a gateway"
    with worker() as (_, dial):
        before, again = dial(), dial()
        before.say([Op.MARK, 0, 1, sender, 0, count, 0], *[[Op.SEND, 0, 1, QUEUE, [sent()]]] * count)
        before.expect(Op.SENT)
        again.say([Op.REQUEST, 0, 1, "stored", 0, [sender]])
        stored = again.expect(Op.REPLY)[2]
        assert before.has_ended()
        available = again.ask("counts", QUEUE)[QUEUE][0]
        assert stored == [0, available]
        assert 0 < available < count
