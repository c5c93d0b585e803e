"""A store that counts what one turn does to a queue: entries read ahead, and messages that leave their place."""

from broker.partition.settings import PartitionSettings
from storage.memory import MemoryStore
from storage.records import message_key
from storage.store import Table


class CountingStore(MemoryStore):
    """Counts from one commit, or `begin`, to the next; `most_read` and `most_moved` are the most of any."""

    entries_read = moved = most_read = most_moved = 0

    def begin(self) -> None:
        self.most_read, self.most_moved = max(self.most_read, self.entries_read), max(self.most_moved, self.moved)
        self.entries_read = self.moved = 0

    def check(self, settings: PartitionSettings, delivered: int) -> None:
        """Assert that no more has left its place, in one pump that delivered so many, than the settings allow.

        A pump has three parts: forwarding, offering sessions, handing out.
        """
        assert self.moved <= delivered + 3 * (settings.turn_work + settings.step)

    def commit(self) -> None:
        super().commit()
        self.begin()

    def scan(
        self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        found = super().scan(table, start, end, limit, reverse)
        if table == Table.QUEUE:
            self.entries_read += len(found)
        return found

    def delete(self, table: Table, key: bytes) -> None:
        self.moved += table == Table.QUEUE
        super().delete(table, key)

    def damage_body(self, message_id: int) -> None:
        key = message_key(message_id)
        value = self.get(Table.MESSAGES, key)
        assert value is not None
        self.put(Table.MESSAGES, key, value[:-1] + bytes([value[-1] ^ 1]))
        super().commit()
