"""Commands on stores with damaged pages, as an operator runs them: `peeklock verify` has findings, none is killed."""

import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from storage.data_dir import Description, partition_path
from storage.durable import write_file
from storage.lmdb_store import DATA_FILE
from storage.records import Counts, Place, message_key, queue_key
from storage.store import Table
from tests.damaged_stores import damage, lone_branch
from tests.patience import PATIENCE_S
from tests.storage.partition_contents import QUEUE_ID, add_message, open_store, put_counts

PAGE = 4096
LEAF = 0x02


def make_store(directory: Path, partition_id: int = 0) -> Path:
    """The file of a partition that has many pages in use, and free ones."""
    path = partition_path(directory, partition_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_store(path, partition_id=partition_id) as store:
        sizes = {}
        for number in range(1, 401):
            sizes[number] = add_message(store, number, b"x" * 300)
        store.commit()
        for number in range(2, 400, 3):
            del sizes[number]
            store.delete(Table.MESSAGES, message_key(number))
            store.delete(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, number))
        put_counts(store, Counts(401, available=len(sizes), size_bytes=sum(sizes.values())))
        store.commit()
    return path / DATA_FILE


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    """Of the one partition of a data directory at tmp_path."""
    write_file(tmp_path / "peeklock.json", Description(1).to_json())
    return make_store(tmp_path)


def verify(directory: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "broker.cli", "verify", "--data-dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout


def leaves(data: bytes | bytearray) -> list[int]:
    return [
        at // PAGE for at in range(0, len(data), PAGE) if struct.unpack_from("<QHH", data, at) == (at // PAGE, 0, LEAF)
    ]


def test_a_sound_store_has_no_findings(tmp_path: Path, store_file: Path) -> None:
    assert verify(tmp_path)[0] == 0


def test_a_page_of_zeros_kills_no_verification(tmp_path: Path, store_file: Path) -> None:
    data = store_file.read_bytes()
    codes = []
    for number in leaves(data)[-8:]:
        damaged = bytearray(data)
        damaged[number * PAGE : (number + 1) * PAGE] = bytes(PAGE)
        store_file.write_bytes(damaged)
        codes.append(verify(tmp_path)[0])
    assert set(codes) <= {0, 1}  # 0: a page that is free
    assert 1 in codes


def test_a_page_in_the_place_of_another_is_found(tmp_path: Path, store_file: Path) -> None:
    """Each leaf in turn, in the store of a partition of its own."""
    swaps = list(pairwise(leaves(store_file.read_bytes())))
    for partition_id, (one, other) in enumerate(swaps):
        file = make_store(tmp_path, partition_id) if partition_id else store_file
        data = bytearray(file.read_bytes())
        data[other * PAGE : (other + 1) * PAGE] = data[one * PAGE : (one + 1) * PAGE]
        file.write_bytes(data)
    write_file(tmp_path / "peeklock.json", Description(len(swaps)).to_json())
    code, output = verify(tmp_path)
    assert code == 1
    found = 0
    for partition_id, (one, other) in enumerate(swaps):
        said = [line for line in output.splitlines() if f"{partition_path(tmp_path, partition_id)}/" in line]
        if any(f"page {other} " in line for line in said):
            found += 1
            assert any(f"page {other} is one that was written for page {one}" in line for line in said)
    assert found > len(swaps) // 3  # others are free


def test_a_page_that_is_free_and_in_use_is_found(tmp_path: Path, store_file: Path) -> None:
    """The next commit would write over it."""
    data = bytearray(store_file.read_bytes())
    roots = [struct.unpack_from("<Q", data, page * PAGE + 144)[0] for page in (0, 1)]
    free = struct.unpack_from("<Q", data, roots.index(max(roots)) * PAGE + 80)[0] * PAGE
    (node,) = struct.unpack_from("<H", data, free + 16)
    at = free + node + 8 + 8 + 8  # behind the node's header, its key and the number of pages
    in_use = next(number for number in leaves(data) if number != struct.unpack_from("<Q", data, at)[0])
    struct.pack_into("<Q", data, at, in_use)
    store_file.write_bytes(data)
    assert verify(tmp_path)[0] == 1


def peeklock(*arguments: str) -> tuple[int, str]:
    """Run a command: its exit code, and what it says on standard error."""
    command = [sys.executable, "-m", "broker.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stderr


def test_a_backup_of_a_damaged_store_fails_with_a_message_and_leaves_nothing(tmp_path: Path, store_file: Path) -> None:
    damage(store_file, "META", lone_branch)
    code, text = peeklock("backup", str(tmp_path / "backup"), "--data-dir", str(tmp_path))
    assert code == 1
    assert f"peeklock: {store_file.parent}" in text
    assert not (tmp_path / "backup").exists()
    assert not (tmp_path / "backup.partial").exists()


def test_a_check_of_the_configuration_tells_of_a_damaged_store(tmp_path: Path, store_file: Path) -> None:
    damage(store_file, "META", lone_branch)
    config = tmp_path / "peeklock.toml"
    config.write_text(f"partitions = 1\ndata_dir = '{tmp_path}'\n")
    code, text = peeklock("config", "check", "--config", str(config))
    assert code == 1
    assert f"peeklock: {store_file.parent}" in text
