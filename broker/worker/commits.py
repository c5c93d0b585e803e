"""One commit after the other, and what leaves when each is done.

While the disk writes a large commit, the worker applies one more turn, which goes into the next commit. So the worker,
the disk and the gateways work at once, and commits grow with the load. Answers leave in the order of their turns, after
the commit of their turn and all earlier ones, also those of turns that only read.
"""

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from broker.metrics import WorkerMetrics

T = TypeVar("T")


class TurnLog(Protocol):
    """What makes turns durable: see `storage.log.commit_log.CommitLog`."""

    @property
    def is_committing(self) -> bool: ...

    def begin_commit(self, time_ms: int) -> bool: ...

    def end_commit(self, wait: bool = True) -> None: ...


class Commits(Generic[T]):
    """`hold` returns what the turns since its last call want to send; `release` lets it leave."""

    def __init__(
        self, log: TurnLog, metrics: WorkerMetrics, hold: Callable[[], T], release: Callable[[T], None]
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._hold = hold
        self._release = release
        self._under_way: tuple[T, float, float, int] | None = None  # held, when turn and commit began, messages
        self.applied: tuple[float, int, int] | None = None  # the turn that waits for it, as arguments of `end_turn`

    @property
    def must_wait(self) -> bool:
        """A turn waits for the commit of the one before. Until the disk has done that, `go_on` waits for it."""
        return self.applied is not None and self._log.is_committing

    def end_turn(self, began: float, messages: int, now_ms: int) -> None:
        """A turn was applied, with so many messages, which began at `began` of time.monotonic. Commit it.

        Before the next turn, `go_on` is to be called. Raises StoreError.
        """
        if self._under_way is not None:
            self._log.end_commit(wait=False)
            if self._log.is_committing:
                self.applied = began, messages, now_ms
                return
            self._end()
        self._begin(began, messages, now_ms)

    def go_on(self) -> None:
        """Begin the commit of the turn that waits (`applied`), if one does. Raises StoreError."""
        if self.applied is not None:
            applied, self.applied = self.applied, None
            self._end()
            self._begin(*applied)

    def finish(self) -> None:
        """Wait until all turns are committed, and let leave what waits for that. Raises StoreError."""
        self.go_on()
        self._end()

    def _end(self) -> None:
        """Wait for the commit that is under way, and let leave what waits for it."""
        if self._under_way is not None:
            self._log.end_commit()
            held, turn_began, began, messages = self._under_way
            self._under_way = None
            committed = time.monotonic()
            self._release(held)
            self._count(turn_began, began, committed, messages)

    def _begin(self, turn_began: float, messages: int, now_ms: int) -> None:
        began = time.monotonic()
        has_changes = self._log.begin_commit(now_ms)
        if self._log.is_committing:
            self._under_way = self._hold(), turn_began, began, messages  # answers are packed while the disk writes
            return
        committed = time.monotonic()
        self._release(self._hold())
        if has_changes:
            self._count(turn_began, began, committed, messages)

    def _count(self, turn_began: float, began: float, committed: float, messages: int) -> None:
        """Called when the answers have left, because clients wait for them."""
        metrics = self._metrics
        metrics.commits += 1
        metrics.fsync_seconds.observe(committed - began)
        metrics.turn_seconds.observe(committed - turn_began)
        if messages:
            metrics.messages_per_commit.observe(messages)
