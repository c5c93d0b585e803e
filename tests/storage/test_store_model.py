"""All stores do the same under any sequence of operations, commits, aborts, checkpoints, crashes and restarts."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.log.commit_log import LogLimits
from storage.memory import MemoryStore
from storage.records import Place, message_key, queue_key, unpack_queue_key
from storage.store import Store, Table
from tests.logs import checkpoint, crash, log_of, open_logged_store
from tests.models import model_settings
from tests.storage.entered import entries
from tests.storage.entered import keys as keys_of
from tests.storage.partition_contents import open_store

tables = st.sampled_from([Table.MESSAGES, Table.QUEUE])
keys = st.one_of(
    st.integers(1, 40).map(lambda number: number.to_bytes(2, "big")),
    st.builds(queue_key, st.integers(0, 3), st.just(Place.AVAILABLE), st.integers(0, 6)),
)
values = st.sampled_from([b"", b"small", b"x" * 1000, b"y" * 9000])
items = st.lists(st.tuples(keys, values), max_size=20)

SMALL = LogLimits(segment_bytes=40_000, log_bytes=1_000_000)  # so that frames often need the next segment


class AllStores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.memory = MemoryStore()
        self.disk = open_store(self.directory / "tables")
        self.logged = open_logged_store(self.directory / "logged", SMALL)

    @property
    def others(self) -> tuple[Store, ...]:
        return self.disk, self.logged

    def teardown(self) -> None:
        self.disk.close()
        self.logged.close()
        shutil.rmtree(self.directory)

    @rule(table=tables, key=keys, value=values)
    def put(self, table: Table, key: bytes, value: bytes) -> None:
        for store in (self.memory, *self.others):
            store.put(table, key, value)

    @rule(table=tables, items=items)
    def put_many(self, table: Table, items: list[tuple[bytes, bytes]]) -> None:
        for store in (self.memory, *self.others):
            store.put_many(table, items)

    @rule(table=tables, items=items)
    def insert_many(self, table: Table, items: list[tuple[bytes, bytes]]) -> None:
        new = list({key: value for key, value in items if self.memory.get(table, key) is None}.items())
        for store in (self.memory, *self.others):
            store.insert_many(table, new)

    @rule(queues=st.lists(st.integers(0, 3), max_size=3, unique=True), values=st.lists(values, max_size=5))
    def insert_entries(self, queues: list[int], values: list[bytes]) -> None:
        firsts = []
        for queue_id in queues:
            start, end = (queue_key(each, Place.AVAILABLE, 0) for each in (queue_id, queue_id + 1))
            last = self.memory.scan(Table.QUEUE, start, end, 1, reverse=True)
            firsts.append((queue_id, unpack_queue_key(last[0][0])[2] + 1 if last else 0))
        for store in (self.memory, *self.others):
            store.insert_entries(entries(values, firsts))

    @rule(values=st.lists(values, max_size=5), ahead=st.sampled_from([0, 0, 3]))
    def append_rows(self, values: list[bytes], ahead: int) -> None:
        last = self.memory.last_key(Table.MESSAGES) or b""
        first = (int.from_bytes(last, "big") if len(last) == 8 else 1 << 60) + 1 + ahead
        rows = [(message_key(first + place), value) for place, value in enumerate(values)]
        if last >= message_key(first):
            return
        for store in (self.memory, *self.others):
            store.append_rows(first, rows)

    @rule(first=st.integers(1, 12), count=st.integers(1, 8))
    def get_rows(self, first: int, count: int) -> None:
        keys = [message_key((1 << 60) + first + ahead) for ahead in range(count)]
        expected = self.memory.get_many(Table.MESSAGES, keys)
        for store in self.others:
            assert store.get_many(Table.MESSAGES, keys) == expected
            assert [store.get(Table.MESSAGES, key) for key in keys] == expected

    @rule(first=st.integers(1, 12), count=st.integers(1, 8))
    def delete_rows(self, first: int, count: int) -> None:
        for store in (self.memory, *self.others):
            store.delete_keys(Table.MESSAGES, keys_of(b"", [((1 << 60) + first, count)]))

    @rule(
        queue_id=st.integers(0, 3),
        ranges=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), max_size=3),
    )
    def delete_keys(self, queue_id: int, ranges: list[tuple[int, int]]) -> None:
        prefix = queue_key(queue_id, Place.AVAILABLE, 0)[:-8]
        for store in (self.memory, *self.others):
            store.delete_keys(Table.QUEUE, keys_of(prefix, ranges))

    @rule(table=tables, values=st.lists(values, max_size=5))
    def append(self, table: Table, values: list[bytes]) -> None:
        last = self.memory.last_key(table) or b"\0"
        after = int.from_bytes(last[:2], "big") + 1  # above keys of queues and records, too
        new = [((after + place).to_bytes(2, "big"), value) for place, value in enumerate(values)]
        for store in (self.memory, *self.others):
            store.append(table, new)

    @rule(table=tables, key=keys)
    def delete(self, table: Table, key: bytes) -> None:
        for store in (self.memory, *self.others):
            store.delete(table, key)

    @rule(table=tables, keys=st.lists(keys, max_size=20))
    def delete_many(self, table: Table, keys: list[bytes]) -> None:
        for store in (self.memory, *self.others):
            store.delete_many(table, keys)

    @rule(table=tables, start=keys, end=keys, limit=st.integers(0, 20), reverse=st.booleans())
    def scan(self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool) -> None:
        expected = self.memory.scan(table, start, end, limit, reverse)
        for store in self.others:
            assert store.scan(table, start, end, limit, reverse) == expected

    @rule(table=tables, keys=st.lists(keys, max_size=10))
    def get(self, table: Table, keys: list[bytes]) -> None:
        expected = self.memory.get_many(table, keys)
        for store in self.others:
            assert [store.get(table, key) for key in keys] == expected
            assert store.get_many(table, keys) == expected

    @rule()
    def commit(self) -> None:
        for store in (self.memory, *self.others):
            store.commit()

    @rule()
    def abort(self) -> None:
        for store in (self.memory, *self.others):
            store.abort()

    @rule()
    def restart(self) -> None:
        self.memory.abort()
        self.disk.close()
        self.disk = open_store(self.directory / "tables", create=False)
        self.logged.close()
        self.logged = open_logged_store(self.directory / "logged", SMALL)

    @rule()
    def crash(self) -> None:
        self.memory.abort()
        self.disk.abort()
        crash(log_of(self.logged))
        self.logged = open_logged_store(self.directory / "logged", SMALL)

    @rule(wait=st.booleans())
    def checkpoint(self, wait: bool) -> None:
        for store in (self.memory, *self.others):
            store.commit()
        log = log_of(self.logged)
        if wait:
            checkpoint(log)
        elif not log.is_checkpointing:
            log.begin_checkpoint()

    @invariant()
    def same(self) -> None:
        log_of(self.logged).check()
        for table in (Table.MESSAGES, Table.QUEUE):
            everything = (table, b"\0", b"\xff" * 3, 10_000)
            expected = self.memory.scan(*everything)
            for store in self.others:
                assert store.scan(*everything) == expected
                assert store.last_key(table) == self.memory.last_key(table)
                assert store.record_count(table) == len(expected)
        for store in self.others:
            assert store.dirty == self.memory.dirty


AllStores.TestCase.settings = model_settings(examples=25, steps=25)
test_all_stores_do_the_same = AllStores.TestCase
