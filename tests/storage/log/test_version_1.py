"""A log whose segments do not say their size, as version 1 wrote it: it is read, and goes on in segments that do."""

import zipfile
from pathlib import Path

import pytest

from storage.log.frames import decode_header
from storage.log.reading import LogDamaged, LogOnDisk
from storage.log.recovery import log_directory
from storage.log.segments import segment_path
from storage.log.tables import LogPosition, write_position
from storage.log.tail import LogTail
from storage.store import Table
from tests.logged_turns import open_local
from tests.logs import attached_tables, crash, open_log, open_tables

# Three turns of two partitions, each in a segment of its own; none of them is in the tables.
SEGMENTS = Path(__file__).with_name("version_1.zip")
LOG_ID = bytes.fromhex("c4bb86c3d1c427103c344c4189eb2f1e")
STORED = {(number % 2, b"turn %d" % number): b"value %d" % number * number * 100 for number in (1, 2, 3)}
LSNS = [1, 3, 5]


@pytest.fixture
def directory(tmp_path):
    """A data directory whose two stores are attached to the log, as when its worker was killed."""
    log = open_log(tmp_path, (0, 1))
    log.close()
    for path in log_directory(tmp_path, 0).iterdir():
        path.unlink()
    with zipfile.ZipFile(SEGMENTS) as archive:
        archive.extractall(log_directory(tmp_path, 0))
    with attached_tables(tmp_path, (0, 1)) as tables:
        for store in tables.values():
            write_position(store, LogPosition(LOG_ID, 0, 0))
            store.commit()
    return tmp_path


def found_in(stores):
    return {
        (partition, key): value
        for partition, store in stores.items()
        for key, value in store.scan(Table.MESSAGES, b"turn", b"turn\xff", 100)
    }


def test_its_turns_are_read(directory):
    log = LogOnDisk(log_directory(directory, 0), 0)
    assert all(segment.header is not None and segment.header.size_bytes == 0 for segment in log.segments)
    assert [frame.lsn for frame in log.turns(0)] == LSNS
    for partition in (0, 1):
        with open_tables(directory, partition) as store:
            found = found_in({partition: store})
        assert found == {place: value for place, value in STORED.items() if place[0] == partition}


def test_a_worker_goes_on_behind_it_and_says_sizes(monkeypatch, directory):
    added = {}
    for life in range(3):
        log = open_local(monkeypatch, directory, (0, 1))
        assert found_in({number: store.tables for number, store in log.stores.items()}) == STORED
        for number in range(5):
            item = b"%d/%d" % (life, number), bytes(10_000)
            log.stores[1].put(Table.QUEUE, *item)
            log.commit()
            added[item[0]] = item[1]
        newest = log._writer._used[-1].file.path
        header = decode_header(newest.read_bytes())
        assert header.size_bytes == newest.stat().st_size > 0
        assert header.log_id == LOG_ID
        crash(log)
    with open_tables(directory, 0) as first, open_tables(directory, 1) as second:
        assert found_in({0: first, 1: second}) == STORED
        assert dict(second.scan(Table.QUEUE, b"", b"\xff", 100)) == added


def test_a_follower_reads_it_and_what_follows(monkeypatch, directory):
    tail = LogTail(log_directory(directory, 0), None)
    assert [frame.lsn for frame in tail.read(None, 1 << 20)] == LSNS
    log = open_local(monkeypatch, directory, (0, 1))
    log.stores[0].put(Table.META, b"key", b"value")
    log.commit()
    assert [frame.lsn for frame in tail.read(log.lsn, 1 << 20)] == [log.lsn]
    tail.close()
    crash(log)


def test_damage_of_it_is_named_as_before(directory):
    path = segment_path(log_directory(directory, 0), 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    with pytest.raises(LogDamaged, match="turn 3 is damaged or missing"):
        open_tables(directory, 0)
    path.unlink()
    with pytest.raises(LogDamaged, match="segment-1: is missing"):
        open_tables(directory, 0)
