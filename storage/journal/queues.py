"""The queues that rows are about: their names, and what of them is journaled."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from storage.journal.entities import fits
from storage.journal.events import Hint
from storage.journal.schema import SUB_QUEUES
from storage.queue_ids import entity_of, part_of


class Mode(StrEnum):
    OFF = "off"
    EVENTS = "events"
    BODIES = "bodies"


class Modes:
    """What is journaled of which entity: by the first pattern that fits its path, whatever the case."""

    def __init__(self, mode: Mode, modes: Mapping[str, Mode]) -> None:
        """`modes` by patterns (`storage.journal.entities`)."""
        self._mode = mode
        self._modes = [(fits(pattern), each) for pattern, each in modes.items()]

    def of(self, path: str) -> Mode:
        return next((mode for is_of, mode in self._modes if is_of(path)), self._mode)


class Queue(NamedTuple):
    entity: str
    entity_id: int
    sub_queue: str
    mode: Mode


class Queues:
    """The names of all queues that were heard of, by entity id."""

    def __init__(self, modes: Modes, names: Mapping[int, str]) -> None:
        self._modes = modes
        self.names = dict(names)
        self.changed = False  # since the caller has set this to False: a name that `names` did not have
        self._known: dict[int, Queue] = {}

    def hear(self, entity_id: int, path: str) -> None:
        if self.names.get(entity_id) != path:
            self.names[entity_id] = path
            self.changed = True
            self._known.clear()

    def hear_all(self, hints: Iterable[Any]) -> None:
        """Take the names among the hints of a frame."""
        for hint in hints:
            if hint[0] == Hint.NAMED:
                _, entity_id, path = hint
                self.hear(entity_id, path)

    def at(self, queue_id: int) -> Queue:
        found = self._known.get(queue_id)
        if found is None:
            entity_id, part = entity_of(queue_id), part_of(queue_id)
            path = self.names.get(entity_id, f"#{entity_id}")  # no entity has such a name
            sub_queue = SUB_QUEUES.get(part, f"part{part}")  # type: ignore[call-overload]  # an int is as good
            found = self._known[queue_id] = Queue(path, entity_id, sub_queue, self._modes.of(path))
        return found
