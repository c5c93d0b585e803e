"""Files of a capture: compaction, removal of what nobody needs, and damage."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.capture import files
from storage.capture.chain import load
from storage.capture.compaction import clean, compact, mergeable
from storage.capture.errors import DamagedFile
from storage.capture.manifest import DataFile, State, TableName
from storage.capture.place import Place
from storage.capture.reading import Captured
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.capture.checks import captured_rows
from tests.capture.synthetic_rows import BEGIN, EPOCH, batch
from tests.examples import examples

NAMESPACE = "sample"
AT_ONCE = CaptureOptions(compact_after_seconds=0)


def write(folder: Path, rolls: int, options: CaptureOptions = AT_ONCE, rows: int = 30) -> CaptureWriter:
    writer = CaptureWriter(Place.of(str(folder)), NAMESPACE, options)
    for roll in range(rolls):
        for partition in range(2):
            writer.add(partition, EPOCH, batch(partition, roll * rows, (roll + 1) * rows, body_bytes=100))
        writer.roll()
    return writer


def read(found: Captured, partition: int, end: int) -> pa.Table:
    return pa.Table.from_batches(found.batches(partition, EPOCH, 0, end))


def test_small_files_of_an_hour_become_one_and_readers_with_an_old_manifest_go_on(tmp_path):
    with write(tmp_path, 5) as writer:
        reader = Captured(writer.place)
        before = captured_rows(tmp_path)
        assert len(reader.files()) == 5
        assert compact(writer, {}) == 10
        clean(writer)
    assert captured_rows(tmp_path) == before
    old = read(reader, 1, 150)
    assert len(reader.files()) == 5
    reader.refresh()
    assert len(reader.files()) == len(reader.files(TableName.MESSAGES)) == 1
    assert read(reader, 1, 150).equals(old)


def test_bodies_are_in_memory_of_one_file_at_a_time(tmp_path, monkeypatch):
    """A merged file without bodies has the rows of many files with bodies, which together may be larger than memory."""
    options = CaptureOptions(compact_after_seconds=0, file_bytes=150_000)
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, options) as writer:
        for first in range(0, 120, 30):
            writer.add(0, EPOCH, batch(0, first, first + 30, body_bytes=10_000))
            writer.roll()
        compact(writer, {})
        found = Captured(writer.place)
    assert (len(found.files()), len(found.files(TableName.MESSAGES))) == (1, 4)
    read_range, with_bodies = files.read_range, []

    def noted(place, file, *arguments):
        with_bodies.extend([file.path] if file.table is TableName.MESSAGES else [])
        return read_range(place, file, *arguments)

    monkeypatch.setattr(files, "read_range", noted)
    offsets = []
    for count, rows in enumerate(found.batches(0, EPOCH, 0, 120), 1):
        assert len(with_bodies) == count
        offsets += rows.column("journalOffset").to_pylist()
    assert offsets == list(range(120))
    assert len({*with_bodies}) == 4


def test_replaced_files_go_after_their_time_and_files_of_a_killed_capture_as_well(tmp_path):
    now_ms = [time.time_ns() // 1_000_000]
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, AT_ONCE, clock_ms=lambda: now_ms[0]) as writer:
        for first in (0, 30):
            writer.add(0, EPOCH, batch(0, first, first + 30))
            writer.roll()
        folder = (tmp_path / next(iter(writer.state.files))).parent
        for name in ("0123456789abcdef.parquet", "fedcba9876543210.parquet.partial", "notes.txt"):
            (folder / name).write_bytes(b"x")
        assert compact(writer, {}) == 2
        now_ms[0] += 86_000_000
        assert clean(writer) == 0
        assert len(list(folder.iterdir())) == 6
        now_ms[0] += 1_000_000
        assert clean(writer) == 4
        assert len(list(folder.iterdir())) == 2  # the merged file, and what is none of ours
        assert not writer.state.removed
    assert len(captured_rows(tmp_path)[0, EPOCH]) == 60


def test_files_that_were_replaced_just_now_stay_however_old_they_are(tmp_path):
    with write(tmp_path, 2, CaptureOptions(compact_after_seconds=0, keep_seconds=100)) as writer:
        old = time.time() - 1000
        for path in writer.state.files:
            os.utime(tmp_path / path, (old, old))
        reader = Captured(writer.place)
        assert compact(writer, {}) == 4
        assert clean(writer) == 0
        assert len(read(reader, 0, 60)) == 60


def file(number: int, *, hour: int = 0, size: int = 10, memory: int = 10) -> DataFile:
    path = f"table=ledger/date=1970-01-01/hour=00/{number}.parquet"
    return DataFile(
        path=path, table=TableName.LEDGER, hour=hour, bytes=size, memory_bytes=memory, rows=1, checksum="",
        captured_ms=number, ranges=(),
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(1, 150)), max_size=30),
    st.integers(0, 5 * 3600),
)
def test_what_is_merged_fits_together_and_is_of_one_hour_that_is_over(found, now_s):
    options = CaptureOptions(file_bytes=100, memory_bytes=100, compact_after_seconds=600)
    files = [file(n, hour=hour, size=size, memory=memory) for n, (hour, size, memory) in enumerate(found)]

    state = State(NAMESPACE)
    state.files = {each.path: each for each in files}
    runs = list(mergeable(state, options, now_s * 1000))
    merged = [each.path for run in runs for each in run]
    assert len(merged) == len(set(merged))
    for run in runs:
        assert len(run) > 1
        assert len({each.hour for each in run}) == 1
        assert (run[0].hour + 1) * 3600 + 600 <= now_s
        assert sum(each.bytes for each in run) <= 100
        assert sum(each.memory_bytes for each in run) <= 100
        assert [each.captured_ms for each in run] == sorted(each.captured_ms for each in run)


def test_the_hour_that_is_not_over_is_left_alone(tmp_path):
    begin_ms = int(BEGIN.timestamp() * 1000)
    with write(tmp_path, 2) as writer:
        state = writer.state
        assert not list(mergeable(state, CaptureOptions(), begin_ms + (60 + 899) * 1000))
        assert list(mergeable(state, CaptureOptions(), begin_ms + (60 + 900) * 1000))


def spoiled(tmp_path: Path, table: TableName = TableName.LEDGER) -> tuple[Place, Path]:
    """A capture of three rolls, and a file of the second."""
    with write(tmp_path, 3) as writer:
        second = [each for each in writer.state.files.values() if each.overlaps((0, EPOCH), 30, 60)]
    [path] = [each.path for each in second if each.table is table]
    return Place.of(str(tmp_path)), tmp_path / path


def other_columns(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def other_rows(path: Path) -> None:
    rows = pq.ParquetFile(path).read()
    pq.write_table(rows.slice(0, len(rows) - 1), path)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 0), "has 0 bytes, not"),
        (lambda path: os.truncate(path, 100), "has 100 bytes, not"),
        (other_columns, "bytes, not"),
        (other_rows, "bytes, not"),
    ],
)
def test_damaged_files_are_named_and_the_rest_is_readable(tmp_path, spoil, text):
    place, path = spoiled(tmp_path)
    spoil(path)
    found = Captured(place)
    with pytest.raises(DamagedFile, match=text) as caught:
        read(found, 0, 90)
    assert caught.value.path == str(path)
    assert len(list(found.batches(0, EPOCH, 0, 30))) == 1
    assert len(list(found.batches(0, EPOCH, 60, 90))) == 1


@pytest.mark.parametrize("write_other", [other_columns, other_rows])
def test_a_foreign_file_of_the_same_size_is_named(tmp_path, write_other):
    place, path = spoiled(tmp_path)
    size = path.stat().st_size
    write_other(path)
    content = path.read_bytes()
    if len(content) < size:  # Parquet is read from its end: what is before the first bytes does not matter
        path.write_bytes(b"\0" * (size - len(content)) + content)
    else:
        path.write_bytes(content[-size:])
    with pytest.raises(DamagedFile) as caught:
        read(Captured(place), 0, 90)
    assert caught.value.path == str(path)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_flipped_bit_is_named_or_changes_nothing(tmp_path_factory, data):
    place, path = spoiled(tmp_path_factory.mktemp("flipped"), data.draw(st.sampled_from(TableName)))
    found = Captured(place)
    whole = read(found, 0, 90)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        assert read(found, 0, 90).equals(whole)
    except DamagedFile as error:
        assert str(path) in str(error)  # noqa: PT017
    damaged: dict[str, DamagedFile] = {}
    with CaptureWriter(place, NAMESPACE, AT_ONCE) as writer:
        compact(writer, damaged)
    assert [str(place.local / each) for each in damaged] == [str(path)], "compaction reads the checksum of all of it"


def test_a_name_of_a_column_that_is_no_text_is_named(tmp_path):
    place, path = spoiled(tmp_path)
    content = path.read_bytes()
    assert b"journalOffset" in content
    path.write_bytes(content.replace(b"journalOffset", b"\xf3ournalOffset"))
    with pytest.raises(DamagedFile) as caught:
        read(Captured(place), 0, 90)
    assert caught.value.path == str(path)


def test_compaction_leaves_damaged_files_and_merges_the_others(tmp_path):
    place, path = spoiled(tmp_path)
    os.truncate(path, 50)
    damaged: dict[str, DamagedFile] = {}
    with CaptureWriter(place, NAMESPACE, AT_ONCE) as writer:
        while compact(writer, damaged):
            pass
        assert [str(place.local / each) for each in damaged] == [str(path)]
        assert path.exists()
        assert len(Captured(place).files()) == 2
        assert not compact(writer, damaged)


def test_a_full_disk_captures_nothing_and_breaks_nothing(tmp_path):
    with write(tmp_path, 1):
        pass
    before = captured_rows(tmp_path)

    class FullPlace(Place):
        def writing(self, path):
            if path.startswith("table="):
                raise OSError(28, "No space left on device")
            return super().writing(path)

    full = FullPlace(Place.of(str(tmp_path))._file_system, str(tmp_path), str(tmp_path))
    with CaptureWriter(full, NAMESPACE, AT_ONCE) as writer:
        writer.add(0, EPOCH, batch(0, 30, 60))
        with pytest.raises(OSError, match="No space left"):
            writer.roll()
    assert captured_rows(tmp_path) == before
    assert load(full).next[0, EPOCH].offset == 30


def test_file_names_are_of_the_hour_of_their_rows(tmp_path):
    with write(tmp_path, 1) as writer:
        for each in writer.state.files.values():
            assert datetime.fromtimestamp(each.hour * 3600, UTC).strftime("date=%Y-%m-%d/hour=%H") in each.path
        assert {each.hour for each in writer.state.files.values()} == {int(BEGIN.timestamp()) // 3600}


def test_row_groups_have_statistics_of_all_columns_but_the_bodies(tmp_path):
    with write(tmp_path, 1) as writer:
        [path] = [tmp_path / each.path for each in writer.state.files.values() if each.table is TableName.MESSAGES]
    metadata = pq.ParquetFile(path).metadata
    group = metadata.row_group(0)
    columns = [group.column(at) for at in range(metadata.num_columns)]
    assert {each.path_in_schema for each in columns if not each.is_stats_set} == {"record", "overlay"}
    assert {each.compression for each in columns} == {"ZSTD"}
    assert [each.column_index for each in group.sorting_columns] == [
        metadata.schema.names.index(name) for name in ("entity", "partition", "epoch", "journalOffset")
    ]
