"""Damage at every kind of place of a store's file: `verify` lives, and finds it or it does no harm."""

import os
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.apart import ProcessDied, apart
from storage.data_dir import Description, partition_path
from storage.durable import write_file
from storage.findings import Problem
from storage.lmdb_store import DATA_FILE
from storage.log.snapshot import Snapshot
from storage.maintenance import Report, verify
from storage.pages import check_pages
from storage.records import Counts, Place, message_key, queue_key
from storage.store import Table
from tests.storage.partition_contents import QUEUE_ID, add_message, open_store, put_counts

PAGE = 4096
META, BRANCH, LEAF, OVERFLOW = 0x08, 0x01, 0x02, 0x04


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store with trees of several levels, large values, and free pages."""
    path = tmp_path_factory.mktemp("sound")
    with open_store(path / "0") as store:
        sizes = {}
        for number in range(1, 901):
            sizes[number] = add_message(store, number, bytes([number % 251]) * (number * 37 % 9000))
            if number % 100 == 0:
                store.commit()
        for number in range(5, 900, 3):
            del sizes[number]
            store.delete(Table.MESSAGES, message_key(number))
            store.delete(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, number))
            if number % 50 == 0:
                store.commit()
        put_counts(store, Counts(901, available=len(sizes), size_bytes=sum(sizes.values())))
        store.commit()
    return (path / "0" / DATA_FILE).read_bytes()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    partition_path(tmp_path, 0).mkdir(parents=True)
    write_file(tmp_path / "peeklock.json", Description(1).to_json())
    return tmp_path


def put(directory: Path, data: bytes | bytearray) -> Path:
    file = partition_path(directory, 0) / DATA_FILE
    file.write_bytes(data)
    return file


def pages(data: bytes, kind: int) -> list[int]:
    """Numbers of the pages that say they are of this kind; of several pages of one value the first."""
    found = []
    at = 0
    while at < len(data):
        number, _, flags, lower, upper = struct.unpack_from("<QHHHH", data, at)
        if number == at // PAGE and flags == kind:
            found.append(number)
        # The pages that follow a large value's first have no header.
        at += PAGE * ((lower | upper << 16) if number == at // PAGE and flags == OVERFLOW else 1)
    return found


def problems(directory: Path) -> Report:
    report = verify(directory)
    assert len(report.partitions) == 1
    return report


def read_all(path: Path) -> list[list[tuple[bytes, bytes]]]:
    with Snapshot(path) as snapshot:
        return [list(snapshot.items(table)) for table in Table]


def test_a_sound_file_has_no_findings(directory: Path, sound: bytes) -> None:
    file = put(directory, sound)
    assert all(pages(sound, kind) for kind in (META, BRANCH, LEAF, OVERFLOW))
    assert check_pages(file) == []
    assert problems(directory).ok


def in_use(sound: bytes, kind: int, file: Path) -> list[int]:
    """Pages of this kind which are found when they are gone: free ones, still written, are not."""
    used = []
    with file.open("r+b", buffering=0) as opened:
        for number in pages(sound, kind):
            opened.seek(number * PAGE)
            opened.write(b"\xff" * 8)
            if check_pages(file):
                used.append(number)
            opened.seek(number * PAGE)
            opened.write(sound[number * PAGE : number * PAGE + 8])
    return used


def page_number(data: bytearray, at: int) -> None:
    data[at] ^= 1


def flags(data: bytearray, at: int) -> None:
    data[at + 10] ^= 0x20


def end_of_pointers(data: bytearray, at: int) -> None:
    data[at + 12 : at + 14] = b"\xff\xff"


def first_pointer(data: bytearray, at: int) -> None:
    data[at + 16 : at + 18] = b"\xff\x0f"


def zeros(data: bytearray, at: int) -> None:
    data[at : at + PAGE] = bytes(PAGE)


@pytest.mark.parametrize("damage", [page_number, flags, end_of_pointers, first_pointer, zeros])
@pytest.mark.parametrize("kind", [BRANCH, LEAF])
def test_a_page_that_makes_no_sense_is_found(
    directory: Path, sound: bytes, kind: int, damage: Callable[[bytearray, int], None]
) -> None:
    file = put(directory, sound)
    for number in random.Random(kind).sample(in_use(sound, kind, file), 2):
        data = bytearray(sound)
        damage(data, number * PAGE)
        put(directory, data)
        report = problems(directory)
        assert report.partitions[0].problems[Problem.DAMAGED_PAGES], f"page {number}"
        [*texts] = (finding.text for finding in report.partitions[0].findings)
        assert any(f"page {number}" in text for text in texts) or damage is first_pointer


def test_the_table_of_a_damaged_page_is_named(directory: Path, sound: bytes) -> None:
    file = put(directory, sound)
    key = queue_key(QUEUE_ID, Place.AVAILABLE, 301)
    [at] = [at for at in in_use(sound, LEAF, file) if key in sound[at * PAGE : (at + 1) * PAGE]]
    data = bytearray(sound)
    zeros(data, at * PAGE)
    put(directory, data)
    found = problems(directory).partitions[0].findings
    assert [each.table for each in found if each.problem is Problem.DAMAGED_PAGES] == [Table.QUEUE]


def test_a_page_written_to_the_place_of_another_is_found(directory: Path, sound: bytes) -> None:
    """Each is whole by itself, so that only its number, or its records' places, show it."""
    leaves = in_use(sound, LEAF, put(directory, sound))
    chosen = random.Random(7)
    for _ in range(10):
        one, other = chosen.sample(leaves, 2)
        data = bytearray(sound)
        data[other * PAGE : (other + 1) * PAGE] = sound[one * PAGE : (one + 1) * PAGE]
        put(directory, data)
        assert problems(directory).partitions[0].problems[Problem.DAMAGED_PAGES], f"{one} at {other}"


def test_a_lost_write_is_found(directory: Path, tmp_path: Path) -> None:
    """A page is what it was when it was last used: its number is right, and it is of another time."""
    with open_store(tmp_path / "store") as store:
        for number in range(1, 60):
            add_message(store, number, b"x" * 3000)
        put_counts(store, Counts(60, available=59, size_bytes=59 * 3040))
        store.commit()
        before = (tmp_path / "store" / DATA_FILE).read_bytes()
        for number in range(1, 30):
            store.delete(Table.MESSAGES, message_key(number))
            store.delete(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, number))
            store.commit()
        put_counts(store, Counts(60, available=30, size_bytes=30 * 3040))
        store.commit()
    after = (tmp_path / "store" / DATA_FILE).read_bytes()
    file = put(directory, after)
    assert problems(directory).ok
    again = [number for number in in_use(after, LEAF, file) if number in pages(before, LEAF)]
    changed = [n for n in again if before[n * PAGE : (n + 1) * PAGE] != after[n * PAGE : (n + 1) * PAGE]]
    assert changed
    for number in changed:
        data = bytearray(after)
        data[number * PAGE : (number + 1) * PAGE] = before[number * PAGE : (number + 1) * PAGE]
        put(directory, data)
        assert not problems(directory).ok, f"page {number}"


@pytest.mark.parametrize("at", [16, 20, 16 + 24, 16 + 24 + 40, 16 + 24 + 48 + 40, 16 + 24 + 96, 16 + 24 + 104])
def test_a_damaged_root_is_found(directory: Path, sound: bytes, at: int) -> None:
    """Magic, version, page size, roots of both trees, last page, transaction: of the root that counts."""
    transactions = [struct.unpack_from("<Q", sound, page * PAGE + 16 + 24 + 104)[0] for page in (0, 1)]
    latest = transactions.index(max(transactions))
    data = bytearray(sound)
    data[latest * PAGE + at] ^= 0x41
    put(directory, data)
    assert not problems(directory).ok


def test_damage_to_the_list_of_free_pages_is_found(directory: Path, sound: bytes) -> None:
    transactions = [struct.unpack_from("<Q", sound, page * PAGE + 16 + 24 + 104)[0] for page in (0, 1)]
    latest = transactions.index(max(transactions))
    root = struct.unpack_from("<Q", sound, latest * PAGE + 16 + 24 + 40)[0]
    lower = struct.unpack_from("<H", sound, root * PAGE + 12)[0]
    nodes = struct.unpack_from(f"<{(lower - 16) // 2}H", sound, root * PAGE + 16)
    assert nodes
    for node in nodes:
        low, _, _, key_bytes = struct.unpack_from("<HHHH", sound, root * PAGE + node)
        for at in (0, low - 8):  # how many there are, and the last of them
            data = bytearray(sound)
            data[root * PAGE + node + 8 + key_bytes + at] ^= 0x01
            put(directory, data)
            assert problems(directory).partitions[0].problems[Problem.DAMAGED_PAGES]


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_bit_is_found_or_changes_nothing(directory: Path, sound: bytes, seed: int) -> None:
    chosen = random.Random(seed)
    expected = read_all(put(directory, sound).parent)
    used = len(sound)
    for _ in range(12):
        data = bytearray(sound)
        at = chosen.randrange(used)
        data[at] ^= 1 << chosen.randrange(8)
        file = put(directory, data)
        if problems(directory).ok:
            assert apart(read_all, file.parent) == expected, f"byte {at}"


def test_a_process_that_dies_is_told_of() -> None:
    with pytest.raises(ProcessDied, match="SIGABRT"):
        apart(os_abort)
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 // 0)
    assert apart(lambda: 5) == 5


def os_abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()
