"""The worker's side of its checkpointer: starts the process, starts it again when it ended, and hears it."""

import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from protocol.extension import extension
from storage.apart import CRASH_SIGNALS
from storage.liveness import LOOK_SECONDS, SHARED_BYTES, SharedSigns, Signs, Silence, is_stopped
from storage.log.changes import Layer, packable
from storage.log.checkpointer import READ_BYTES, Answer, Full, Request
from storage.packed_parts import packed_parts
from storage.store import StoreDamaged, StoreError

# The net effect is packed in pieces of so many new items, so that the memory for that is small and stays in the caches.
PIECE_ITEMS = 64
KEPT_BYTES = 16 << 20  # of the shared memory; what was used once costs less to use again

_PACKAGES = Path(__file__).resolve().parent.parent.parent  # where this program's packages are


class Done(NamedTuple):
    """A checkpoint was made: all tables have all turns up to `lsn`, but for those of the partitions that are `full`.

    For the rest see `Checkpointed`.
    """

    lsn: int
    positions: dict[int, int]
    adjacent_bytes: dict[int, int]
    full: list[Full]


class Prepared(NamedTuple):
    path: str
    problem: str | None


class Ended(NamedTuple):
    """The process ended, and its requests were not done. `how` says why."""

    how: str


class Checkpointer:
    """A process, or none. `descriptor` is readable when it has answered or ended; None while there is no process.

    While it has something to do, it gives signs of life in memory that is shared with it. If there was none for
    `stall_seconds`, `look` kills it.
    """

    def __init__(
        self,
        paths: Mapping[int, Path],
        log_id: bytes,
        worker: int,
        map_size_bytes: int,
        largest_record_bytes: int,
        stall_seconds: float,
        on_stall: Callable[[float], None],
        signs: Signs,
    ) -> None:
        """`on_stall` is called with the seconds of a silence that was too long. `signs` are those of this process, for
        who watches it while it waits for an answer.
        """
        absolute = {partition: str(path.absolute()) for partition, path in paths.items()}
        self._opening = [Request.OPEN, absolute, log_id, worker, map_size_bytes, largest_record_bytes, os.getpid()]
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._unpacker = msgpack.Unpacker()
        self._memory = os.memfd_create("checkpoint", os.MFD_CLOEXEC)  # shared with the process
        os.ftruncate(self._memory, KEPT_BYTES)
        self._mapped = mmap.mmap(self._memory, KEPT_BYTES)  # its first bytes
        self._shared = os.memfd_create("checkpointer-signs", os.MFD_CLOEXEC)
        os.ftruncate(self._shared, SHARED_BYTES)
        self._its_signs = SharedSigns(self._shared)
        self._silence = Silence(stall_seconds)
        self._on_stall = on_stall
        self._signs = signs
        self._asked = 0  # requests without an answer
        self.works_on: int | None = None  # the partition whose tables it works on, or worked on when it ended
        self.starts = 0

    @property
    def descriptor(self) -> int | None:
        return None if self._connection is None else self._connection.fileno()

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if there is none. If that is not possible now, there is still none."""
        if self._process is not None:
            return
        self.works_on = None
        self._asked = 0
        self._its_signs.clear()
        path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "storage.log.checkpointer", str(self._memory), str(self._shared)],
                    stdin=theirs.fileno(),
                    pass_fds=[self._memory, self._shared],
                    env={**os.environ, "PYTHONPATH": path},
                )
            except OSError:
                ours.close()
                return
        self.starts += 1
        self._connection = ours
        self._unpacker = msgpack.Unpacker(strict_map_key=False)
        self._send(self._opening)

    def checkpoint(self, layers: Mapping[int, Layer], up_to_lsn: int, positions: Mapping[int, int]) -> None:
        """Write the net effects of these layers, by partition.

        Answered by Done or Ended; not at all if there is no process. Raises OSError.
        """
        if self._connection is None:
            return
        if os.fstat(self._memory).st_size < KEPT_BYTES:
            os.ftruncate(self._memory, KEPT_BYTES)  # what is mapped must be there
        sizes = []
        begin = 0
        for partition, layer in layers.items():
            for piece in layer.pieces(PIECE_ITEMS):
                end = self._put((partition, piece), begin)
                sizes.append(end - begin)
                begin = end
        self._ask([Request.CHECKPOINT, sizes, up_to_lsn, positions])

    def _put(self, value: Any, at: int) -> int:
        """Pack a value into the shared memory; returns the offset behind it. Raises OSError."""
        if extension is not None and at < KEPT_BYTES:
            end: int | None = extension.pack_into(value, self._mapped, at)
            if end is not None:
                return end
        for part in packed_parts(value, packable):
            view = memoryview(part)
            while len(view):
                written = os.pwrite(self._memory, view, at)
                view, at = view[written:], at + written
        return at

    def release_memory(self, kept_bytes: int = 0) -> None:
        """Give back what the last checkpoints needed beyond so many bytes. No checkpoint is being made."""
        if os.fstat(self._memory).st_size > kept_bytes:
            os.ftruncate(self._memory, kept_bytes)

    def prepare(self, path: Path, size_bytes: int) -> None:
        """Answered by Prepared or Ended; not at all if there is no process. Raises OSError."""
        self._ask([Request.PREPARE, str(path), size_bytes])

    def _ask(self, request: list[Any]) -> None:
        """Send a request that has an answer."""
        if not self._asked:
            self._silence.heard(time.monotonic())
        self._asked += 1
        self._send(request)

    def _send(self, request: list[Any]) -> None:
        if self._connection is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and `answers` will say so
                self._connection.sendall(msgpack.packb(request))

    def look(self) -> None:
        """Kill the process if it hangs; `answers` will say that it has ended. Call this every LOOK_SECONDS."""
        if self._process is None or not self._asked:
            return
        now = time.monotonic()
        if self._its_signs.take():
            self._silence.heard(now, self._its_signs.waits_for_disk)
        if self._silence.is_too_long(now, partial(is_stopped, self._process.pid)):
            self._on_stall(self._silence.seconds)
            self._silence.heard(now)
            self._process.kill()

    def has_answered(self, within_seconds: float = 0.0) -> bool:
        """True as soon as `answers` need not wait; False after so many seconds, or if there is no process."""
        if self._connection is None:
            return False
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(within_seconds * 1000))

    def answers(self) -> list[Done | Prepared | Ended]:
        """Wait for answers, and see that the process does not hang meanwhile.

        Raises StoreDamaged, StoreError: the process cannot do its work.
        """
        found: list[Done | Prepared | Ended] = []
        if self._connection is None:
            return found
        while not self.has_answered(LOOK_SECONDS):
            self._signs.beat()
            self.look()
        try:
            data = self._connection.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            return [self._ended()]
        self._unpacker.feed(data)
        for kind, *fields in self._unpacker:
            match kind:
                case Answer.WORKS_ON:
                    [self.works_on] = fields
                case Answer.DONE:
                    self._answered()
                    self.works_on = None
                    self.release_memory(KEPT_BYTES)
                    lsn, positions, adjacent_bytes, full = fields
                    found.append(Done(lsn, positions, adjacent_bytes, [Full(*each) for each in full]))
                case Answer.PREPARED:
                    self._answered()
                    found.append(Prepared(*fields))
                case Answer.DAMAGED:
                    raise StoreDamaged(fields[0])
                case _:
                    raise StoreError(fields[0])
        return found

    def _answered(self) -> None:
        self._asked -= 1
        self._silence.heard(time.monotonic())

    def _ended(self) -> Ended:
        """Wait until the process has ended, and say how. Raises StoreDamaged if it died of what it read."""
        assert self._process is not None
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        code = self._process.wait()
        self._process = None
        if -code in CRASH_SIGNALS and self.works_on is not None:
            raise StoreDamaged(f"the checkpointer died of signal {-code}")
        return Ended(f"signal {-code}" if code < 0 else f"exit code {code}")

    def close(self) -> None:
        """Let the process end, and wait until it has. It has nothing to do that matters; if it hangs, it is killed."""
        if self._process is not None:
            assert self._connection is not None
            self._connection.close()
            self._connection = None
            try:
                self._process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._mapped.close()
        os.close(self._memory)
        self._its_signs.close()
        os.close(self._shared)
