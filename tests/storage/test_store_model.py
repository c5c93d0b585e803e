"""All stores do the same under any sequence of operations, commits, aborts, checkpoints, crashes and restarts."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from partition_contents import open_store

from storage.log.commit_log import LogLimits
from storage.memory import MemoryStore
from storage.store import Store, Table
from tests.logs import checkpoint, crash, log_of, open_logged_store
from tests.models import model_settings

tables = st.sampled_from([Table.MESSAGES, Table.QUEUE])
keys = st.integers(1, 40).map(lambda number: number.to_bytes(2, "big"))
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

    @rule(table=tables, values=st.lists(values, max_size=5))
    def append(self, table: Table, values: list[bytes]) -> None:
        after = int.from_bytes(self.memory.last_key(table) or b"\0", "big") + 1
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
