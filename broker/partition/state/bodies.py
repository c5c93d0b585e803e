"""The message records of a partition: assigns their ids, stores them, and reads many at once."""

from collections import deque
from typing import Any

from protocol.extension import extension
from storage.records import (
    NEVER,
    STAGED_PREFIX,
    CorruptRecord,
    Field,
    Overlay,
    check_message,
    encode_document,
    message_key,
    staged_key,
    unpack_message_key,
)
from storage.store import Store, Table

FRESH_BYTES_MAX = 16 << 20
_MESSAGES = Table.MESSAGES
# A key of an incoming message's `extra` besides those of `wire.Extra`: the id of its record, if that is staged.
STAGED = 0


class Bodies:
    """Records are never changed, so a record that was just written can be handed out without reading it.

    `fresh` are records that were written in this turn to queues with waiting receivers; `fresh_bytes` are theirs.

    A record may be staged: stored before any entry refers to it, so that the commit with the entries need not write it.
    META lists staged records. Records that are staged when the partition starts belong to no transaction any more.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        last = store.last_key(Table.MESSAGES)
        # After a restart the id of a deleted message may be used again, because no entry refers to it any more.
        self.next_id: int = unpack_message_key(last)[0] + 1 if last else 1
        self._fresh: dict[int, bytes] = {}
        self.fresh_bytes = 0
        self.staged: set[int] = set()  # message ids
        listed = store.scan(Table.META, STAGED_PREFIX, STAGED_PREFIX + b"\xff" * 9, 1 << 32)
        self._dropped: deque[int] = deque(int.from_bytes(key.removeprefix(STAGED_PREFIX), "big") for key, _ in listed)

    def append(self, records: list[bytes], keep: bool) -> None:
        """Stage records under the ids from `next_id` on. `keep`: they will probably be read in this turn."""
        self.append_items([(message_key(number), record) for number, record in enumerate(records, self.next_id)], keep)

    def append_items(self, items: list[tuple[bytes, bytes]], keep: bool) -> None:
        """Stage records as `append` does, with the keys of these ids."""
        first = self.next_id
        self.next_id = end = first + len(items)
        self._store.append_rows(first, items)
        if keep and self.fresh_bytes < FRESH_BYTES_MAX:
            records = [record for _, record in items]
            self._fresh.update(zip(range(first, end), records, strict=True))
            self.fresh_bytes += sum(map(len, records))

    def stage(self, record: bytes) -> int:
        """Store a record before its entries; returns the message id."""
        message_id = self.next_id
        self.append([record], keep=False)
        self._store.put(Table.META, staged_key(message_id), encode_document(None))
        self.staged.add(message_id)
        return message_id

    def adopt(self, message_ids: list[int]) -> None:
        """Take these records off the list of staged ones, because entries refer to them now."""
        self.staged.difference_update(message_ids)
        self._store.delete_many(Table.META, map(staged_key, message_ids))

    def drop(self, message_ids: list[int]) -> None:
        """Let `free_some` delete those of these records that are still staged."""
        self._dropped.extend([message_id for message_id in message_ids if message_id in self.staged])
        self.staged.difference_update(message_ids)

    def free_some(self, count: int) -> int:
        """Delete up to `count` records that were dropped, or were staged at the start. Returns their number."""
        freed = [self._dropped.popleft() for _ in range(min(count, len(self._dropped)))]
        if freed:
            self._store.delete_many(Table.MESSAGES, map(message_key, freed))
            self._store.delete_many(Table.META, map(staged_key, freed))
        return len(freed)

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def turn_ended(self) -> None:
        if self._fresh:
            self._fresh.clear()
            self.fresh_bytes = 0

    def read(self, ids: list[int]) -> list[bytes | None]:
        """The verified records; None in place of a missing or corrupt one."""
        fresh = self._fresh
        if len(ids) == 1:
            return [fresh.get(ids[0]) or self.read_one(ids[0])]
        if fresh and (ids[0] in fresh or ids[-1] in fresh):
            return [fresh.get(message_id) or self.read_one(message_id) for message_id in ids]
        records = self._read_adjacent(ids) or self._store.get_many(_MESSAGES, list(map(message_key, ids)))
        if extension is not None:
            return records if extension.are_whole(records) else list(map(_checked, records))
        try:
            for record in records:
                if record is not None:
                    check_message(record)
        except CorruptRecord:
            return list(map(_checked, records))
        return records

    def _read_adjacent(self, ids: list[int]) -> list[bytes | None] | None:
        """Read records as `get_many` does, for consecutive ids; None if they are not, or the store does not have them
        together.
        """
        if not ids:
            return None
        first, last = ids[0], ids[-1]
        if last - first + 1 != len(ids) or ids != [*range(first, last + 1)]:
            return None
        return self._store.get_adjacent(_MESSAGES, message_key(first), message_key(last), len(ids))

    def read_one(self, message_id: int) -> bytes | None:
        return _checked(self._store.get(_MESSAGES, message_key(message_id)))

    def size(self, message_id: int) -> int | None:
        """The size of a record in bytes, without a check of the record; None if it is missing."""
        record = self._store.get(Table.MESSAGES, message_key(message_id))
        return None if record is None else len(record)


def _checked(record: bytes | None) -> bytes | None:
    """None in place of a corrupt record."""
    try:
        if record is not None:
            check_message(record)
    except CorruptRecord:
        return None
    return record


def staged_id(extra: dict[int, Any] | None) -> int:
    """The message id of an incoming message's staged record; 0 if it is not staged."""
    return extra.get(STAGED, 0) if extra else 0


def with_times(overlay: Overlay | None, enqueued_ms: int, expires_ms: int) -> Overlay:
    """The overlay with the times that a staged record lacks: when it is enqueued, and when it expires."""
    overlay = {**(overlay or {}), Field.ENQUEUED_MS: enqueued_ms}
    if expires_ms != NEVER:
        overlay[Field.EXPIRES_MS] = expires_ms
    return overlay
