"""Puts messages back that were received and deleted, and never sent: until their partition has them again.

The partition has deleted them, so nobody has them but this process. Their entity may be moved meanwhile, or its worker
may be away or die before it answers: then they are put back where the entity lives by then. They are lost only if this
process dies before.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from broker import wire
from broker.errors import BrokerError, OutcomeUnknown
from broker.gateway.namespace import Entity
from broker.gateway.router import Router
from broker.logging import get_logger
from broker.wire import ENTRY

AGAIN_S = 0.1  # after the first refusal; the pause doubles
AGAIN_MAX_S = 5.0

log = get_logger("gateway")


class Returning:
    """`count` is the number of messages that are on their way back; `none` is set while there are none."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.count = 0
        self.none = asyncio.Event()
        self.none.set()

    def put_back(self, entity: Entity, queue: int, partition: int, entries: Sequence[Any]) -> None:
        """Entry items (`broker.wire`) of one queue of the entity, which came from this partition."""
        step = wire.ITEMS_AT_ONCE * ENTRY
        for begin in range(0, len(entries), step):
            part = entries[begin : begin + step]
            self.count += len(part) // ENTRY
            self.none.clear()
            self._ask(_Part(entity, queue, partition, part))

    def _ask(self, part: "_Part") -> None:
        if part.mark is None:
            part.partition = part.entity.current(part.partition)
            part.mark = self._router.marks(part.partition).begin(1)

        def answered(_: Any, error: BrokerError | None) -> None:
            part.is_unknown = isinstance(error, OutcomeUnknown)
            if error is None:
                self._end_mark(part)
                self.count -= len(part.entries) // ENTRY
                if not self.count:
                    self.none.set()
            else:
                self._ask_again(part, f"{type(error).__name__}: {error}")

        worker = self._router.worker(part.partition)
        if not worker.restore(part.partition, part.queue, part.entries, part.mark, answered):
            self._ask_again(part, "its worker is not connected")

    def _ask_again(self, part: "_Part", reason: str) -> None:
        if not part.is_unknown:
            self._end_mark(part)
        if part.pause_s == AGAIN_S:
            log.info("messages are put back later", entity=part.entity.name, reason=reason)
        asyncio.get_running_loop().call_later(part.pause_s, self._ask, part)
        part.pause_s = min(2 * part.pause_s, AGAIN_MAX_S)

    def _end_mark(self, part: "_Part") -> None:
        assert part.mark is not None
        self._router.marks(part.partition).end(part.mark, 1)
        part.mark = None


class _Part:
    """Messages that are put back together. Without a mark, no partition has them.

    With one, `partition` is being asked; or it was, and `is_unknown`: it may have them, and nobody else can say so.
    """

    __slots__ = ("entity", "entries", "is_unknown", "mark", "partition", "pause_s", "queue")

    def __init__(self, entity: Entity, queue: int, partition: int, entries: Sequence[Any]) -> None:
        self.entity = entity
        self.queue = queue
        self.partition = partition
        self.entries = entries
        self.mark: int | None = None
        self.is_unknown = False
        self.pause_s = AGAIN_S
