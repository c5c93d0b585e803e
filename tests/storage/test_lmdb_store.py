"""What the store on disk promises beyond Store: it outlives its process, and refuses what it should not open."""

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import lmdb
import pytest

from storage.lmdb_store import (
    DATA_FILE,
    RESERVED_BYTES,
    LmdbStore,
    StoreInUse,
    StoreMissing,
    TablesSnapshot,
    UnknownFormat,
    WrongPartition,
    store_error,
)
from storage.records import (
    FORMAT_VERSION,
    FORMAT_VERSION_KEY,
    CorruptRecord,
    check_message,
    encode_document,
    message_key,
)
from storage.store import StoreDamaged, StoreError, StoreFull, Table
from tests.storage.partition_contents import add_message, open_store, said, start

END = b"\xff" * 16
MEBIBYTE = 1 << 20


def state(path: Path) -> tuple[bytes, int]:
    """All bytes of the data file, and when it was last written."""
    return (path / DATA_FILE).read_bytes(), (path / DATA_FILE).stat().st_mtime_ns


def message_ids(store: LmdbStore) -> list[int]:
    return [int.from_bytes(key, "big") for key, _ in store.scan(Table.MESSAGES, b"\0", END, 1_000_000)]


def append(store: LmdbStore, first: int, count: int, body: bytes = bytes(1000)) -> None:
    store.append(Table.MESSAGES, [(message_key(number), body) for number in range(first, first + count)])


# ---- durability


def test_committed_records_are_there_after_reopening_and_nothing_else(tmp_path: Path) -> None:
    with open_store(tmp_path / "0") as store:
        append(store, 1, 3)
        store.commit()
        append(store, 4, 3)
    with open_store(tmp_path / "0", create=False) as store:
        assert message_ids(store) == [1, 2, 3]


COMMIT_IN_A_LOOP = """
import sys
from pathlib import Path
from partition_contents import open_store
from storage.records import message_key
from storage.store import Table

store = open_store(Path(sys.argv[1]))
for batch in range(1_000_000):
    store.append(Table.MESSAGES, [(message_key(batch * 10 + place + 1), bytes(1000)) for place in range(10)])
    store.put(Table.META, b"batches", str(batch + 1).encode())
    store.commit()
    print(batch + 1, flush=True)
"""


@pytest.mark.parametrize("batches", [1, 7, 60])
def test_a_killed_process_leaves_every_commit_it_reported_whole(tmp_path: Path, batches: int) -> None:
    with start(COMMIT_IN_A_LOOP, tmp_path / "0") as process:
        for _ in range(batches):
            said(process)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines() if process.stdout else []
    reported = int(rest[-1]) if rest else batches
    with open_store(tmp_path / "0", create=False) as store:
        there = int(store.get(Table.META, b"batches") or b"0")
        assert there in (reported, reported + 1)
        assert message_ids(store) == list(range(1, there * 10 + 1))


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_store(tmp_path / "0").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "0").stat().st_mode) == 0o700
    for file in (tmp_path / "0").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


# ---- refusing to open


def test_an_unknown_format_is_refused_and_the_file_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with open_store(path) as store:
        store.put(Table.META, FORMAT_VERSION_KEY, encode_document(FORMAT_VERSION + 1))
        store.commit()
    before = state(path)
    with pytest.raises(UnknownFormat, match=f"format version {FORMAT_VERSION + 1} found, {FORMAT_VERSION} supported"):
        open_store(path)
    assert state(path) == before


def test_a_store_of_someone_else_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    before = state(path)
    with pytest.raises(UnknownFormat, match="format version None found"):
        open_store(path)
    assert state(path) == before


def test_another_partitions_store_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "0"
    open_store(path, partition_id=3).close()
    before = state(path)
    with pytest.raises(WrongPartition, match="holds partition 3, not 0"):
        open_store(path)
    assert state(path) == before


def test_a_format_version_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "0") as store:
        store.put(Table.META, FORMAT_VERSION_KEY, b"nonsense")
        store.commit()
    with pytest.raises(StoreError, match="format-version: document: checksum mismatch"):
        open_store(tmp_path / "0")


def test_a_truncated_file_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with open_store(path) as store:
        append(store, 1, 100)
        store.commit()
    os.truncate(path / DATA_FILE, (path / DATA_FILE).stat().st_size - 4096)
    before = state(path)
    with pytest.raises(StoreError, match="truncated"):
        open_store(path)
    assert state(path) == before


@pytest.mark.parametrize("content", [b"not a database", os.urandom(10_000)])
def test_a_file_of_nonsense_is_refused_and_left_untouched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "0"
    path.mkdir()
    (path / DATA_FILE).write_bytes(content)
    before = state(path)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(path)
    assert state(path) == before


def test_a_missing_store_is_made_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match="No such file"):
        open_store(tmp_path / "0", create=False)
    assert not (tmp_path / "0").exists()
    (tmp_path / "1").mkdir()
    with pytest.raises(StoreMissing, match=r"data\.mdb: No such file.*: no store here"):
        open_store(tmp_path / "1", create=False)
    assert not (tmp_path / "1" / DATA_FILE).exists()
    (tmp_path / "1" / DATA_FILE).touch()
    with pytest.raises(StoreMissing, match=r"data\.mdb: is empty: no store here"):
        open_store(tmp_path / "1", create=False)
    assert (tmp_path / "1" / DATA_FILE).stat().st_size == 0


def test_a_creation_that_was_interrupted_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / DATA_FILE).touch()
    lmdb.open(str(tmp_path / "no-commit")).close()
    for name in ("empty", "no-commit"):
        with open_store(tmp_path / name) as store:
            append(store, 1, 1)
            store.commit()
            assert message_ids(store) == [1]


HOLD = """
import sys
from pathlib import Path
from partition_contents import open_store
store = open_store(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_store_open_in_another_process_is_refused_until_that_ends(tmp_path: Path) -> None:
    with start(HOLD, tmp_path / "0") as process:
        assert said(process) == "open"
        with pytest.raises(StoreInUse, match=f"held by process {process.pid}"):
            open_store(tmp_path / "0")
        process.kill()
    open_store(tmp_path / "0").close()


# ---- no room


def test_a_full_map_keeps_nothing_of_the_commit_and_all_before(tmp_path: Path) -> None:
    with open_store(tmp_path / "0", map_size_bytes=MEBIBYTE) as store:
        append(store, 1, 300)
        store.commit()
        with pytest.raises(StoreFull, match="MAP_FULL"):
            append(store, 301, 2000)
        assert not store.dirty
        assert message_ids(store) == list(range(1, 301))
        append(store, 301, 1)
        store.commit()
    with open_store(tmp_path / "0", map_size_bytes=MEBIBYTE, create=False) as store:
        assert message_ids(store) == list(range(1, 302))


def fill_to(store: LmdbStore, share: float) -> int:
    """Commit messages until that share of the capacity is used; returns how many."""
    count = 0
    while store.used_bytes() < share * store.capacity_bytes():
        add_message(store, count + 1, bytes(1000))
        store.commit()
        count += 1
    return count


def test_below_a_watermark_everything_can_still_be_settled(tmp_path: Path) -> None:
    with open_store(tmp_path / "0", map_size_bytes=MEBIBYTE) as store:
        empty_bytes = store.used_bytes()
        count = fill_to(store, 0.9)
        assert count > 100
        for number in range(1, count + 1):
            store.delete(Table.MESSAGES, message_key(number))
            store.commit()
        assert message_ids(store) == []
        assert store.used_bytes() < empty_bytes + 100_000  # the queue entries


def test_at_a_full_map_without_watermark_not_even_deletes_fit(tmp_path: Path) -> None:
    """Why there is a watermark: a page is copied before something in it is deleted."""
    with open_store(tmp_path / "0", map_size_bytes=MEBIBYTE) as store:
        with pytest.raises(StoreFull):
            fill_to(store, 1.1)
        keys = [key for key, _ in store.scan(Table.MESSAGES, b"\0", END, 1_000)]
        with pytest.raises(StoreFull):
            store.delete_many(Table.MESSAGES, keys[::3])


READ = """
import sys
from pathlib import Path
from storage.lmdb_store import TablesSnapshot
snapshot = TablesSnapshot(Path(sys.argv[1]))
print("reading", flush=True)
sys.stdin.read()
"""


def test_pages_that_a_foreign_reader_pins_count_as_used_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with open_store(path, map_size_bytes=4 * MEBIBYTE) as store:
        append(store, 1, 10)
        store.commit()
        idle_bytes = store.used_bytes()
        with start(READ, path) as process:
            assert said(process) == "reading"
            turn = 0
            while store.used_bytes() < 0.8 * store.capacity_bytes():
                turn += 1
                store.put(Table.MESSAGES, message_key(1), bytes(4096 * 10 + turn))
                store.commit()
            assert turn > 10
            for number in range(2, 11):  # there is still room to settle
                store.delete(Table.MESSAGES, message_key(number))
                store.commit()
            process.kill()
        assert store.used_bytes() < idle_bytes + 100_000


FILL_A_DISK = """
import sys
from pathlib import Path
from partition_contents import open_store
from storage.records import message_key
from storage.store import StoreFull, Table

store = open_store(Path(sys.argv[1]))
number = 0
try:
    while True:
        store.append(Table.MESSAGES, [(message_key(number + place), bytes(1000)) for place in range(1, 51)])
        store.commit()
        number += 50
except StoreFull:
    print("full", store.last_key(Table.MESSAGES) == message_key(number), store.used_bytes() < store.capacity_bytes())
for settled in range(1, number + 1):
    store.delete(Table.MESSAGES, message_key(settled))
    store.commit()
print("settled", number > 100)
"""

OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OWN_MOUNTS, "true"], stderr=subprocess.DEVNULL).returncode != 0,
    reason="needs a user namespace to mount a small disk in",
)
def test_on_a_full_disk_nothing_of_the_commit_is_kept_and_the_rest_can_be_settled(tmp_path: Path) -> None:
    mount = ("sh", "-c", 'mount -t tmpfs -o size=3m tmpfs "$1" && shift && exec "$@"', "sh", str(tmp_path))
    with start(FILL_A_DISK, tmp_path / "0", prefix=(*OWN_MOUNTS, *mount)) as process:
        assert said(process) == "full True True"
        assert said(process) == "settled True"


LIMITED = """
import resource, sys
from pathlib import Path
from partition_contents import open_store
from storage.records import message_key
from storage.store import StoreError, Table

store = open_store(Path(sys.argv[1]))
store.append(Table.MESSAGES, [(message_key(1), b"kept")])
store.commit()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    store.append(Table.MESSAGES, [(message_key(2), bytes(1_000_000))])
    store.commit()
except StoreError as error:
    print(type(error).__name__, error)
try:
    store.put(Table.MESSAGES, message_key(3), b"small")
    store.commit()
except StoreError as error:
    print(type(error).__name__, error)
"""


def test_disk_space_is_set_aside_once_behind_the_last_page_and_used_later(tmp_path: Path) -> None:
    file = tmp_path / "0" / DATA_FILE
    with open_store(tmp_path / "0") as store:
        for first in (1, 5001):
            append(store, first, 5000)
            store.commit()
            pages_bytes = store._mapped_bytes - store.tail_bytes()
            for _ in range(2):
                store.reserve()
                allocated = file.stat().st_blocks * 512
                assert pages_bytes + RESERVED_BYTES <= allocated < pages_bytes + RESERVED_BYTES + MEBIBYTE
        assert message_ids(store) == list(range(1, 10_001))
    with open_store(tmp_path / "0", create=False) as store:
        assert message_ids(store) == list(range(1, 10_001))


def test_after_a_failed_write_the_store_is_closed_and_what_was_committed_is_safe(tmp_path: Path) -> None:
    with start(LIMITED, tmp_path / "0") as process:
        first, second = said(process), said(process)
    assert first.startswith(f"StoreError {tmp_path / '0'}: commit: ")
    assert re.match("StoreError .* closed", second)
    with open_store(tmp_path / "0", create=False) as store:
        assert message_ids(store) == [1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (lmdb.MapFullError("mdb_put"), StoreFull),
        (lmdb.DiskError("mdb_txn_commit"), StoreFull),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), StoreFull),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), StoreFull),
        (OSError(errno.EIO, os.strerror(errno.EIO)), StoreError),
        (lmdb.CorruptedError("mdb_get"), StoreDamaged),
        (lmdb.PageNotFoundError("mdb_get"), StoreDamaged),
    ],
)
def test_only_a_lack_of_room_is_store_full(error: Exception, tmp_path: Path, kind: type[StoreError]) -> None:
    found = store_error(tmp_path, "commit", error)
    assert type(found) is kind
    assert str(found).startswith(f"{tmp_path}: commit: ")


# ---- reading


def test_a_changed_byte_on_disk_is_found_when_the_message_is_read(tmp_path: Path) -> None:
    with open_store(tmp_path / "0") as store:
        add_message(store, 1, b"a body to be damaged")
        add_message(store, 2, b"a sound body")
        store.commit()
    damage(tmp_path / "0" / DATA_FILE, b"a body to be damaged")
    with open_store(tmp_path / "0", create=False) as store:
        sound, damaged = (store.get(Table.MESSAGES, message_key(number)) for number in (2, 1))
    assert sound is not None
    assert damaged is not None
    check_message(sound)
    with pytest.raises(CorruptRecord):
        check_message(damaged)


def damage(file: Path, content: bytes) -> None:
    """Flip a bit in the middle of each copy of `content` in the file."""
    changed = content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
    before = file.read_bytes()
    assert content in before
    file.write_bytes(before.replace(content, changed))


def test_a_snapshot_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with start(COMMIT_IN_A_LOOP, path) as process:
        said(process)
        with TablesSnapshot(path) as snapshot:
            assert snapshot.partition_id == 0
            before = [key for key, _ in snapshot.items(Table.MESSAGES)]
            for _ in range(5):
                said(process)
            assert [key for key, _ in snapshot.items(Table.MESSAGES)] == before
            assert int(snapshot.get(Table.META, b"batches") or b"0") * 10 == len(before)
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux counts and releases mapped pages so")
def test_released_pages_leave_the_resident_set_and_can_be_read_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "0") as store:
        append(store, 1, 20_000)
        store.commit()
        assert len(message_ids(store)) == 20_000
        before_bytes = resident_file_bytes()
        store.release_pages()
        assert before_bytes - resident_file_bytes() > 15 * MEBIBYTE
        assert store.get(Table.MESSAGES, message_key(1)) == bytes(1000)
    store.release_pages()  # closed: there is nothing left to release


def resident_file_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile")
