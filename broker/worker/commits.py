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

    def end_commit(self) -> None: ...


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

    def end_turn(self, began: float, messages: int, now_ms: int) -> None:
        """A turn was applied, with so many messages, which began at `began` of time.monotonic. Commit it.

        Raises StoreError.
        """
        if self._under_way is not None:
            self.finish()
        before = time.monotonic()
        has_changes = self._log.begin_commit(now_ms)
        if self._log.is_committing:
            self._under_way = self._hold(), began, before, messages  # answers are packed while the disk writes
            return
        if has_changes:
            self._committed(began, before, messages)
        self._release(self._hold())

    def finish(self) -> None:
        """Wait for the commit that is being made, and let leave what waits for it. Raises StoreError."""
        if self._under_way is not None:
            self._log.end_commit()
            held, turn_began, began, messages = self._under_way
            self._under_way = None
            self._committed(turn_began, began, messages)
            self._release(held)

    def _committed(self, turn_began: float, began: float, messages: int) -> None:
        metrics = self._metrics
        now = time.monotonic()
        metrics.commits += 1
        metrics.fsync_seconds.observe(now - began)
        metrics.turn_seconds.observe(now - turn_began)
        if messages:
            metrics.messages_per_commit.observe(messages)
