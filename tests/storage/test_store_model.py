"""Both stores do the same under any sequence of operations, commits, aborts and restarts."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from partition_contents import open_store

from storage.memory import MemoryStore
from storage.store import Table
from tests.models import model_settings

tables = st.sampled_from([Table.MESSAGES, Table.QUEUE])
keys = st.integers(1, 40).map(lambda number: number.to_bytes(2, "big"))
values = st.sampled_from([b"", b"small", b"x" * 1000, b"y" * 9000])
items = st.lists(st.tuples(keys, values), max_size=20)


class TwoStores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.memory = MemoryStore()
        self.disk = open_store(self.directory / "0")

    def teardown(self) -> None:
        self.disk.close()
        shutil.rmtree(self.directory)

    @rule(table=tables, key=keys, value=values)
    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self.memory.put(table, key, value)
        self.disk.put(table, key, value)

    @rule(table=tables, items=items)
    def put_many(self, table: Table, items: list[tuple[bytes, bytes]]) -> None:
        self.memory.put_many(table, items)
        self.disk.put_many(table, items)

    @rule(table=tables, values=st.lists(values, max_size=5))
    def append(self, table: Table, values: list[bytes]) -> None:
        after = int.from_bytes(self.memory.last_key(table) or b"\0", "big") + 1
        new = [((after + place).to_bytes(2, "big"), value) for place, value in enumerate(values)]
        self.memory.append(table, new)
        self.disk.append(table, new)

    @rule(table=tables, key=keys)
    def delete(self, table: Table, key: bytes) -> None:
        assert self.disk.delete(table, key) == self.memory.delete(table, key)

    @rule(table=tables, keys=st.lists(keys, max_size=20))
    def delete_many(self, table: Table, keys: list[bytes]) -> None:
        assert self.disk.delete_many(table, keys) == self.memory.delete_many(table, keys)

    @rule(table=tables, start=keys, end=keys, limit=st.integers(0, 20), reverse=st.booleans())
    def scan(self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool) -> None:
        assert self.disk.scan(table, start, end, limit, reverse) == self.memory.scan(table, start, end, limit, reverse)

    @rule(table=tables, key=keys)
    def get(self, table: Table, key: bytes) -> None:
        assert self.disk.get(table, key) == self.memory.get(table, key)

    @rule()
    def commit(self) -> None:
        self.memory.commit()
        self.disk.commit()

    @rule()
    def abort(self) -> None:
        self.memory.abort()
        self.disk.abort()

    @rule()
    def restart(self) -> None:
        self.memory.abort()
        self.disk.close()
        self.disk = open_store(self.directory / "0", create=False)

    @invariant()
    def same(self) -> None:
        for table in (Table.MESSAGES, Table.QUEUE):
            everything = (table, b"\0", b"\xff" * 3, 10_000)
            assert self.disk.scan(*everything) == self.memory.scan(*everything)
            assert self.disk.last_key(table) == self.memory.last_key(table)
        assert self.disk.dirty == self.memory.dirty


TwoStores.TestCase.settings = model_settings(examples=25, steps=25)
test_both_stores_do_the_same = TwoStores.TestCase
