"""Workers with their sockets in one process: a test gives each its turns, sets the time, and kills them in a commit."""

import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from broker.catalog.catalog import reconcile
from broker.namespace.entities import Description
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.touched_partition import TouchedPartition
from broker.wire import Op
from broker.worker.clock import Clock
from broker.worker.dialling import UnixDialler
from broker.worker.listening import UnixListener
from broker.worker.neighbours import REDIAL_CLUSTER_MS
from broker.worker.parked import ParkedPartition
from broker.worker.worker import Worker
from storage.log.commit_log import LogUsage
from storage.memory import MemoryStore


def frame(*messages: Any) -> bytes:
    """As gateways and workers write it (`broker.wire`)."""
    body = msgpack.packb(messages)
    return len(body).to_bytes(4, "big") + body


class Killed(Exception):
    """The worker was killed between the commits of two of its partitions."""


class SetClock(Clock):
    """Shows the time that the test has set."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms, now_ms)

    def read(self, wall_ms: int, monotonic_ms: int) -> int:
        return self.now_ms


class Turns:
    """In place of the log: commits one store after the other."""

    is_committing = False

    lost_segments = 0
    together_bytes = 4 << 20

    def __init__(self, stores: Sequence[MemoryStore]) -> None:
        self._stores = stores
        self.kill_after: int | None = None  # so many commits

    def begin_commit(self, time_ms: int) -> bool:
        dirty = any(store.dirty for store in self._stores)
        for at, store in enumerate(self._stores):
            if at == self.kill_after:
                raise Killed
            store.commit()
        if self.kill_after is not None:
            raise Killed
        return dirty

    def end_commit(self, wait: bool = True) -> None: ...

    def usage(self) -> LogUsage:
        raise AssertionError("nobody asks for metrics")

    def watch(self, poll: Any) -> None: ...

    def serve(self, descriptor: int) -> bool:
        return False

    def beat(self) -> None: ...


class Workers:
    """Partition p of `partitions` is on worker p % count. `after_turn` is called when a worker has made a turn."""

    def __init__(
        self,
        entities: Sequence[Description],
        partitions: int,
        count: int,
        now_ms: int,
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.now_ms = now_ms
        self.count = count
        self.stores = [MemoryStore() for _ in range(partitions)]
        reconcile(self.stores, entities, now_ms)
        self.partitions: dict[int, Partition] = {}  # of workers that run
        self._after_turn = after_turn
        self._starts = 0
        self._folder = Path(tempfile.mkdtemp(prefix="w-"))
        self._sockets = [str(self._folder / str(number)) for number in range(count)]
        self._running: dict[int, tuple[Worker, SetClock, Turns, UnixListener]] = {}
        for number in range(count):
            self.start(number)

    def close(self) -> None:
        for number in self.running:
            self.kill(number)
        shutil.rmtree(self._folder)

    @property
    def running(self) -> list[int]:
        return list(self._running)

    def numbers(self, worker: int) -> range:
        return range(worker, len(self.stores), self.count)

    def start(self, number: int, parked: Sequence[int] = ()) -> None:
        """Does nothing if it runs."""
        if number in self._running:
            return
        self._starts += 1
        settings = PartitionSettings()
        stores: dict[int, Any] = {}
        for each in self.numbers(number):
            self.stores[each].abort()
            stores[each] = self.stores[each]
            if each in parked:
                self.partitions[each] = found = ParkedPartition(each, settings)
                stores[each] = found.store
                continue
            self.partitions[each] = Partition(
                each,
                self.stores[each],
                now_ms=self.now_ms,
                incarnation=self._starts.to_bytes(6, "big"),
                settings=settings,
            )
        listener, dialler = UnixListener(self._sockets[number]), UnixDialler(self._sockets)
        clock, turns = SetClock(self.now_ms), Turns(list(stores.values()))
        own = {each: self.partitions[each] for each in stores}
        worker = Worker(
            number, 0, own, stores, listener, lambda _: dialler, len(self.stores), clock, TouchedPartition(), turns
        )
        self._running[number] = worker, clock, turns, listener
        worker.begin()

    def kill(self, number: int) -> None:
        """Nothing that it has not written yet is seen any more."""
        worker, _, _, listener = self._running.pop(number)
        links = worker._neighbours._links.values()
        listener.close()
        for peer in (*worker._peers.values(), *links):
            peer.socket.close()
        worker._poll.close()
        for each in self.numbers(number):
            self.stores[each].abort()
            del self.partitions[each]

    def turn(self, number: int, kill_after: int | None = None) -> bool:
        """False if the worker was killed, after so many commits of its partitions."""
        worker, clock, turns, _ = self._running[number]
        clock.now_ms = self.now_ms
        turns.kill_after = kill_after
        worker._beat_at = 0.0
        try:
            worker.wait_seconds()
            worker.turn(worker.poll())
        except Killed:
            self.kill(number)
            return False
        finally:
            self._after_turn()
        return True

    def touch(self, partition: int) -> None:
        """A test has given the partition a command."""
        self._running[partition % self.count][0]._touch(self.partitions[partition])

    def settle(self, rounds: int = 6) -> None:
        """All workers that run hear everything that was said."""
        for _ in range(rounds):
            for number in self.running:
                self.turn(number)

    def connect(self) -> None:
        """All workers that run follow the home, if that runs."""
        self.settle()
        self.now_ms += REDIAL_CLUSTER_MS  # of a connection on which writing failed; others are dialled sooner
        self.settle()

    def client(self, number: int) -> socket.socket:
        """A connection to a worker, as a gateway has it."""
        client = socket.socket(socket.AF_UNIX)
        client.connect(self._sockets[number])
        return client

    def ask(self, *change: Any) -> Any:
        """Change the catalog as a client; returns the reply, or None if there is none."""
        with self.client(0) as client:
            client.sendall(frame([Op.REQUEST, 0, 7, "change-catalog", 0, list(change)]))
            self.settle()
            client.setblocking(False)
            try:
                data = client.recv(1 << 20)
            except BlockingIOError:
                return None
        while data:
            end = 4 + int.from_bytes(data[:4], "big")
            for message in msgpack.unpackb(data[4:end], strict_map_key=False):
                if message[0] in (Op.REPLY, Op.FAILED):
                    return message
            data = data[end:]
        return None
