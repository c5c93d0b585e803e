"""`verify` looks at the pages of one commit, whatever the store's owner writes meanwhile."""

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from storage import lmdb_store, pages
from storage.lmdb_store import LmdbStore, check_store_pages
from storage.pages import PageFinding, _Check, _Root, check_pages
from storage.store import Table
from tests.patience import PATIENCE_S

RECORDS = 2000

Write = Callable[[int], None]


def own(path: Path, orders: Connection) -> None:
    """In a process of its own, as LMDB wants it: so many commits as are ordered, each with every record anew."""
    store = LmdbStore(path, partition_id=0, map_size_bytes=1 << 26, create=True)
    turn = 0
    while count := orders.recv():
        for _ in range(count):
            turn += 1
            for number in range(RECORDS):
                store.put(Table.MESSAGES, number.to_bytes(8, "big"), b"x" * (50 + 37 * turn))
            store.commit()
        orders.send(None)
    store.close()


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    ours, theirs = get_context("fork").Pipe()
    owner = get_context("fork").Process(target=own, args=(tmp_path, theirs))
    owner.start()

    def write(count: int) -> None:
        if count:
            ours.send(count)
            assert ours.poll(PATIENCE_S)
            ours.recv()

    write(3)
    yield write
    ours.send(0)
    owner.join(PATIENCE_S)
    assert owner.exitcode == 0


def test_pages_that_the_owner_has_freed_since_are_no_damage(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(_Check):
        def _root(self, transaction: int | None) -> _Root:
            root = super()._root(transaction)
            write(5)
            return root

    monkeypatch.setattr(pages, "_Check", Busy)
    assert check_store_pages(tmp_path) == []


def test_a_commit_whose_root_was_written_over_is_not_damage(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((2, 3, 1))  # commits between the beginning of the transaction and the look at its root

    def busy(file: Path, transaction: int | None) -> list[PageFinding]:
        write(next(counts))
        return check_pages(file, transaction)

    monkeypatch.setattr(lmdb_store, "check_pages", busy)
    assert check_store_pages(tmp_path) == []
