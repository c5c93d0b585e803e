"""The side of a move that an entity leaves: its rows, while clients go on using it.

Everything that the store has of the entity is read once, in the order of the keys. Meanwhile the keys that change are
noted, and what they have then is sent, too, before anything else is read. So the other side has the entity as it is
here, but for the keys that are noted. In the end the entity is frozen: it refuses all uses, so the last noted keys can
be sent, and nothing changes any more.

A row is [table, key, value, or None if there is none; and of an entry, the bytes of its message record, or None].
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from broker.partition.state.core import PARTS, Core
from storage.queue_ids import queue_id_of
from storage.records import entity_key, entry_or_none, forwarded_key, message_key, overtaken_key
from storage.store import Table

Row = list[int | bytes | None]

_OF_QUEUES = (Table.QUEUE, Table.DUE, Table.COUNTS, Table.SESSION_ENTRIES, Table.SESSIONS, Table.SESSION_STATES)
OF_ENTITIES = (
    Table.RULES,
    Table.DUPLICATE_LOG,
    Table.DUPLICATE_RUNS,
    Table.DUPLICATE_CHUNKS,
    Table.DUPLICATE_FILTERS,
)
PAGE = 64  # rows that are scanned at once; bodies are read one after the other, as far as there is room for them
NOTED_MAX = 500_000  # keys


class Departure:
    """The rows of an entity and its subscriptions."""

    def __init__(self, core: Core, token: bytes, entity_ids: Sequence[int]) -> None:
        self.token = token
        self.entity_ids = entity_ids
        self._core = core
        queues = [queue_id_of(entity_id, part) for entity_id in entity_ids for part in PARTS]
        of_queues = frozenset(map(entity_key, queues))
        of_entities = frozenset(map(entity_key, entity_ids))
        self._prefixes = dict.fromkeys(_OF_QUEUES, of_queues) | dict.fromkeys(OF_ENTITIES, of_entities)
        self._of_meta = frozenset((*map(forwarded_key, queues), *map(overtaken_key, queues)))
        # Keys in the order of their last changes, so that an entry is sent before its timer, even if both have changed
        # before. A dict would look at all that were taken to find the first one.
        self._noted: OrderedDict[tuple[Table, bytes], None] = OrderedDict()
        self.is_overrun = False  # more has changed than can be noted, so the move cannot go on
        self._unread = self._ranges(queues)
        self._range = next(self._unread, None)

    def _ranges(self, queues: Sequence[int]) -> Iterator[tuple[Table, bytes, bytes]]:
        """All rows, in an order in which entries come before their timers."""
        for table in _OF_QUEUES:
            for queue_id in queues:
                yield table, entity_key(queue_id), entity_key(queue_id + 1)
        for table in OF_ENTITIES:
            for entity_id in self.entity_ids:
                yield table, entity_key(entity_id), entity_key(entity_id + 1)
        for key in sorted(self._of_meta):
            yield Table.META, key, key + b"\0"

    def note(self, table: Table, keys: Iterable[bytes]) -> None:
        """These keys were written or deleted; see `Store.noting`."""
        if self.is_overrun:
            return
        if table is Table.META:
            changed = [key for key in keys if key in self._of_meta]
        else:
            prefixes = self._prefixes.get(table, ())
            changed = [key for key in keys if key[:4] in prefixes]
        for key in changed:
            self._noted[table, key] = None
            self._noted.move_to_end((table, key))
        if len(self._noted) > NOTED_MAX:
            self.is_overrun = True
            self._noted.clear()

    @property
    def noted(self) -> int:
        """The number of keys that are to be sent again."""
        return len(self._noted)

    @property
    def is_read(self) -> bool:
        """Everything was read once."""
        return self._range is None

    def rows(self, limit_bytes: int, limit: int) -> list[Row]:
        """The next rows: so many at most, and no more when they have so many bytes."""
        found: list[Row] = []
        size_bytes = 0
        for row in self._next():
            found.append(row)
            size_bytes += sum(len(part) for part in row if isinstance(part, bytes))
            if len(found) >= limit or size_bytes >= limit_bytes:
                break
        self._core.turn.work += len(found)
        return found

    def _next(self) -> Iterator[Row]:
        """Each row as it is asked for. What nobody asks for stays noted, or unread."""
        store = self._core.store
        while self._noted:
            (table, key), _ = self._noted.popitem(last=False)
            yield self._row(table, key, store.get(table, key))
        while self._range is not None:
            table, start, end = self._range
            items = store.scan(table, start, end, PAGE)
            for key, value in items:
                self._range = table, key + b"\0", end
                yield self._row(table, key, value)
            if len(items) < PAGE:
                self._range = next(self._unread, None)

    def _row(self, table: Table, key: bytes, value: bytes | None) -> Row:
        entry = entry_or_none(value) if table is Table.QUEUE else None
        if entry is None:  # of another table, deleted, or unreadable: the other side quarantines it when it reads it
            return [table, key, value, None]
        return [table, key, value, self._core.store.get(Table.MESSAGES, message_key(entry.message_id))]
