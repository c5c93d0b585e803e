"""Message records of a partition: their ids, and reading many of them."""

from storage.records import CorruptRecord, check_message, message_key, unpack_message_key
from storage.store import Store, Table

FRESH_BYTES_MAX = 16 << 20


class Bodies:
    """Records are never changed, so what was just written can be handed out without reading it back.

    `fresh` are records written in this turn to queues that somebody waits on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        last = store.last_key(Table.MESSAGES)
        # An id may be used again after a restart if the message that had it is gone: no entry refers to it then.
        self.next_id: int = unpack_message_key(last)[0] + 1 if last else 1
        self._fresh: dict[int, bytes] = {}
        self._fresh_bytes = 0

    def append(self, records: list[bytes], keep: bool) -> None:
        """Stage records under the ids from `next_id` on. `keep`: they will probably be read in this turn."""
        first = self.next_id
        self.next_id = end = first + len(records)
        self._store.append(Table.MESSAGES, list(zip(map(message_key, range(first, end)), records, strict=True)))
        if keep and self._fresh_bytes < FRESH_BYTES_MAX:
            self._fresh.update(zip(range(first, end), records, strict=True))
            self._fresh_bytes += sum(map(len, records))

    def turn_ended(self) -> None:
        if self._fresh:
            self._fresh.clear()
            self._fresh_bytes = 0

    def read(self, ids: list[int]) -> list[bytes | None]:
        """The records, verified; None in place of one that is missing or corrupt."""
        fresh = self._fresh
        if fresh and (ids[0] in fresh or ids[-1] in fresh):
            return [fresh.get(message_id) or self.read_one(message_id) for message_id in ids]
        first, count = ids[0], len(ids)
        # Messages that came one after the other lie one after the other: one scan is several times faster than gets.
        if count > 1 and ids == list(range(first, first + count)):
            items = self._store.scan(Table.MESSAGES, message_key(first), message_key(first + count), count)
            if len(items) == count:
                try:
                    for _, record in items:
                        check_message(record)
                except CorruptRecord:
                    pass
                else:
                    return [record for _, record in items]
        return [self.read_one(message_id) for message_id in ids]

    def read_one(self, message_id: int) -> bytes | None:
        record = self._store.get(Table.MESSAGES, message_key(message_id))
        try:
            if record is not None:
                check_message(record)
        except CorruptRecord:
            return None
        return record

    def size(self, message_id: int) -> int | None:
        """Bytes of a record, which is not verified; None if it is missing."""
        record = self._store.get(Table.MESSAGES, message_key(message_id))
        return None if record is None else len(record)
