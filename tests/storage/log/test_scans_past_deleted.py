"""What a scan reads when very many keys were deleted since the last checkpoint, as after a queue was drained."""

from pathlib import Path

import pytest

from storage.log.commit_log import CHANGED_KEYS, CommitLog
from storage.log.logged_store import LoggedStore
from storage.store import Table
from tests.logs import checkpoint, crash, open_log

MANY = 20_000
END = b"\xff" * 9


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def drained(directory: Path, left: int) -> tuple[CommitLog, LoggedStore]:
    """A store whose tables have MANY keys, all but the last `left` of which were deleted since."""
    log = open_log(directory)
    store = log.stores[0]
    store.append(Table.QUEUE, [(key(number), b"entry") for number in range(MANY)])
    store.commit()
    checkpoint(log)
    store.delete_many(Table.QUEUE, [key(number) for number in range(MANY - left)])
    store.commit()
    return log, store


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("limit", [1, 500])
def test_a_scan_reads_each_deleted_key_once(tmp_path: Path, left: int, limit: int, monkeypatch) -> None:
    log, store = drained(tmp_path, left)
    read, scan = 0, store.tables.scan

    def counted(*args):
        nonlocal read
        found = scan(*args)
        read += len(found)
        return found

    monkeypatch.setattr(store.tables, "scan", counted)
    found = [number for number, _ in store.scan(Table.QUEUE, b"", END, limit)]
    assert found == [key(number) for number in range(MANY - left, MANY)][:limit]
    assert MANY - left <= read <= MANY
    crash(log)


def test_a_scan_finds_young_keys_between_pieces_and_backwards(tmp_path: Path) -> None:
    log, store = drained(tmp_path, 0)
    put = [key(number) + b"!" for number in (15, 16, 31, 4095, 4096, 9000, MANY)]
    store.put_many(Table.QUEUE, [(each, b"young") for each in put])
    assert store.scan(Table.QUEUE, b"", END, 100) == [(each, b"young") for each in put]
    assert store.scan(Table.QUEUE, b"", END, 5) == [(each, b"young") for each in put[:5]]
    assert store.scan(Table.QUEUE, b"", END, 100, True) == [(each, b"young") for each in reversed(put)]
    assert store.scan(Table.QUEUE, b"", END, 2, True) == [(each, b"young") for each in put[:-3:-1]]
    store.commit()
    crash(log)


def test_a_checkpoint_begins_after_many_small_changes(tmp_path: Path) -> None:
    """Their frames would fill a segment much later."""
    log = open_log(tmp_path)
    store, at = log.stores[0], 0
    while not log.is_checkpointing:
        assert at < 4 * CHANGED_KEYS
        store.put_many(Table.QUEUE, [(key(number), b"") for number in range(at, at + 1000)])
        store.commit()
        at += 1000
    assert at >= CHANGED_KEYS
    checkpoint(log)
    assert len(store.scan(Table.QUEUE, b"", END, 1 << 30)) == at
    crash(log)
