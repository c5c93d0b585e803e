"""One commit after the other, and what leaves when each is done.

While the disk writes a large commit, the worker applies further turns, which go into the next commit together. So the
worker, the disk and the gateways work at once, and commits grow with the load, and with the time that the disk takes.
Answers leave in the order of their turns, after the commit of their turn and all earlier ones, also those of turns that
only read.
"""

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from broker.metrics import WorkerMetrics

T = TypeVar("T")

# A commit takes no further turn when it has so many: the checkpointer's syncs make some writes of the log take several
# times as long as others, but more turns bring nothing.
TURNS_TOGETHER = 4


class _Applied(NamedTuple):
    """Turns that wait for the commit before theirs."""

    began: float  # the first of them
    messages: int
    came_bytes: int
    now_ms: int  # of the last of them
    turns: int


class TurnLog(Protocol):
    """What makes turns durable: see `storage.log.commit_log.CommitLog`."""

    @property
    def together_bytes(self) -> int: ...

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
        self._applied: _Applied | None = None

    @property
    def must_wait(self) -> bool:
        """No further turn goes into the next commit, and the disk is not done with this one: `go_on` waits for it."""
        return self._has_enough and self._log.is_committing

    @property
    def _has_enough(self) -> bool:
        applied = self._applied
        return applied is not None and (
            applied.turns >= TURNS_TOGETHER or applied.came_bytes >= self._log.together_bytes
        )

    def end_turn(self, began: float, messages: int, came_bytes: int, now_ms: int) -> None:
        """A turn was applied, which began at `began` of time.monotonic. Commit it, with those that wait.

        So many messages and bytes have come for it. Before the next turn, `go_on` is to be called. Raises StoreError.
        """
        applied = self._applied
        if applied is None:
            applied = _Applied(began, messages, came_bytes, now_ms, 1)
        else:
            began, turns = applied.began, applied.turns + 1
            applied = _Applied(began, applied.messages + messages, applied.came_bytes + came_bytes, now_ms, turns)
        self._applied = applied
        self._begin_if_free()

    def go_on(self) -> None:
        """Begin the commit of the turns that wait, or let one more join them. Raises StoreError."""
        if self._applied is not None:
            if self._has_enough:
                self._end()
            self._begin_if_free()

    def _begin_if_free(self) -> None:
        """Begin the commit of the turns that wait, if none is under way."""
        if self._under_way is not None:
            self._log.end_commit(wait=False)
            if self._log.is_committing:
                return
            self._end()
        applied, self._applied = self._applied, None
        if applied is not None:
            self._begin(applied.began, applied.messages, applied.now_ms)

    def finish(self) -> None:
        """Wait until all turns are committed, and let leave what waits for that. Raises StoreError."""
        self._end()
        self._begin_if_free()
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
