"""Journal files: appended, rolled, read by offset, cut off where they are torn, and deleted when they are old."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.journal.batches import stream
from storage.journal.files import JournalDamaged, JournalFull, OutOfRetention, PartitionJournal, Reached
from storage.journal.frames import HEAD_BYTES, CorruptJournal, Made, decode, decode_head, encode, message_of
from storage.journal.schema import SCHEMA
from tests.examples import examples
from tests.journal.journaled import plain_record, plain_rows, read
from tests.own_disk import own_disk_or_skip

STORE, LOG = b"store-id", b"log-id----------"
ROLL_BYTES = 100_000


class Journal(PartitionJournal):
    def __init__(self, directory: Path, noted: Reached | None = None) -> None:
        super().__init__(directory, roll_bytes=ROLL_BYTES, roll_seconds=100.0, noted=noted)
        if self.made is None:
            self.begin_epoch(1.0)

    def add(self, count: int, size: int = 10, now_s: float = 1.0, entity: str = "orders") -> None:
        first = self.end
        self.append(
            plain_rows(first, count, size, entity), first, first + count - 1, Made(STORE, LOG, first + count), now_s
        )


def offsets(journal: PartitionJournal, first: int, end: int, max_bytes: int = 1 << 30) -> list[int]:
    found, following = read(journal, first, end, max_bytes)
    assert not found or following == found[-1]["journalOffset"] + 1
    assert all(
        row["record"] == plain_record(row["journalOffset"], len(row["record"].partition(b":")[2])) for row in found
    )
    return [row["journalOffset"] for row in found]


@pytest.fixture
def journal(tmp_path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "2")
    yield journal
    journal.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60), st.sampled_from([0, 10, 2000])), st.sampled_from(["sync", "open", "drop", "old"])
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=examples(40))
@given(STEPS, st.data())
def test_every_row_that_was_synced_is_read_once(steps, data):
    with TemporaryDirectory() as name:
        journal, now_s = Journal(Path(name)), 1.0
        for step in steps:
            if isinstance(step, tuple):
                journal.add(*step, now_s=now_s)
            elif step == "sync":
                journal.sync(now_s)
            elif step == "old":
                now_s += 101
            elif step == "drop" and journal.oldest() is not None:
                journal.drop_oldest()
            elif step == "open":
                journal.sync(now_s)
                journal.close()
                before = journal.low, journal.stable, journal.epoch, journal.made, journal.stable_ms
                journal = Journal(Path(name))
                assert journal.damage == []
                if before[3] is not None:
                    assert before == (journal.low, journal.stable, journal.epoch, journal.made, journal.stable_ms)
        journal.sync(now_s)
        low, stable = journal.low, journal.stable
        assert stable == journal.end
        assert offsets(journal, low, stable) == [*range(low, stable)]
        first = data.draw(st.integers(low, stable))
        end = data.draw(st.integers(first, stable + 5))
        assert offsets(journal, first, end) == [*range(first, min(end, stable))]
        found, at = [], first
        while at < min(end, stable):
            some = offsets(journal, at, end, data.draw(st.integers(0, 5000)))
            assert some, "progress"
            found += some
            at = some[-1] + 1
        assert found == [*range(first, min(end, stable))]
        for outside in (low - 1, stable + 1):
            with pytest.raises(OutOfRetention, match=f"from {low} to below {stable}"):
                journal.read(outside, outside + 1, 1)
        journal.close()


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("is_dropped", [True, False])
def test_the_time_of_the_last_row_is_known_after_a_restart(journal, rows, is_dropped):
    journal.add(rows)
    journal.sync(1.0)
    before = journal.stable_ms
    assert before == (2 if rows else None)
    assert journal.retire(1000.0, 1000.0) is bool(rows)
    journal.add(0, now_s=2000.0)
    journal.sync(2000.0)
    while is_dropped and journal.oldest() is not None:
        journal.drop_oldest()
    journal.close()
    again = Journal(journal.directory)
    assert again.stable_ms == before
    again.close()


def test_files_without_rows_are_written_on_and_never_begun_twice(journal):
    """They would have one name, and the older of two would be dropped with the rows of the newer."""
    journal.add(3)
    journal.sync(1.0)
    assert journal.retire(1000.0, 1000.0)
    assert not journal.retire(2000.0, 2000.0), "nothing in it has to go"
    journal.add(4, now_s=3000.0)
    journal.sync(3000.0)
    while journal.oldest() is not None:
        journal.drop_oldest()
    assert offsets(journal, 3, 7) == [3, 4, 5, 6]
    assert journal.retire(4000.0, 4000.0)


def test_names_sizes_and_times(journal):
    for _ in range(4):
        journal.add(60, 2000)
        journal.sync(7.0)
    names = sorted(path.name for path in journal.directory.iterdir())
    assert [name.split("-")[0] for name in names] == [journal.epoch.hex()] * len(names)
    assert names[0].endswith("-00000000000000000000.journal")
    assert len(names) >= 2
    assert sum(path.stat().st_size for path in journal.directory.iterdir()) == journal.bytes
    assert (journal.low_ms, journal.stable_ms) == (0, 239)
    journal.drop_oldest()
    assert journal.low > 0
    assert journal.low_ms == journal.low


def test_what_is_not_synced_is_not_read(journal):
    journal.add(5)
    assert (journal.stable, journal.end) == (0, 5)
    assert offsets(journal, 0, 10) == []


@pytest.mark.parametrize("cut", [1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, -1])
def test_a_torn_end_is_cut_off(journal, cut):
    journal.add(5)
    journal.sync(1.0)
    [path] = journal.directory.iterdir()
    whole = path.stat().st_size
    journal.add(7)
    journal.sync(1.0)
    os.truncate(path, whole + cut if cut > 0 else path.stat().st_size - 1)
    again = Journal(journal.directory)
    assert (again.stable, again.made, path.stat().st_size, again.damage) == (5, Made(STORE, LOG, 5), whole, [])
    again.add(3)
    again.sync(1.0)
    assert offsets(again, 0, 8) == [*range(8)]
    again.close()


def test_a_torn_first_frame_leaves_the_files_before_it(journal):
    journal.add(200, 2000)
    journal.sync(1.0)
    journal.add(5, now_s=102.0)
    journal.sync(102.0)
    newest = max(journal.directory.iterdir())
    os.truncate(newest, 10)
    again = Journal(journal.directory)
    assert again.stable == 200
    assert not newest.exists()
    again.close()


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("lose", ["end", "all", "file", "directory"])
def test_rows_that_are_noted_and_gone_are_named_and_their_offsets_not_used_again(journal, lose, files):
    for number in range(files):
        for _ in range(3):
            journal.add(10, now_s=1.0 + 101 * number)
            journal.sync(1.0 + 101 * number)
    noted = journal.reached
    assert noted == Reached(journal.epoch, 30 * files, Made(STORE, LOG, 30 * files))
    journal.close()
    newest = max(journal.directory.iterdir())
    left = 30 * (files - 1)
    if lose == "end":
        os.truncate(newest, frames_of(newest)[1])
        left += 10
    elif lose == "all":
        os.truncate(newest, 0)
    elif lose == "file":
        newest.unlink()
    else:
        shutil.rmtree(journal.directory)
        left = 0
    again = Journal(journal.directory, noted)
    [damage] = again.damage
    assert (damage.first, damage.end) == (left, noted.offset)
    assert str(damage.path).startswith(str(journal.directory))
    assert (again.epoch, again.stable, again.made) == noted
    again.add(5, now_s=1000.0)
    again.sync(1000.0)
    for _ in range(2):
        if left:
            rows, following = read(again, 0, again.stable)
            assert [row["journalOffset"] for row in rows if row["op"] == "enqueued"] == [
                *range(left),
                *range(noted.offset, noted.offset + 5),
            ]
            [gap] = [row for row in rows if row["op"] == "truncated"]
            assert gap["journalOffset"] == noted.offset - 1
            assert following == again.stable == noted.offset + 5
        else:
            with pytest.raises(OutOfRetention):
                read(again, 0, again.stable)
            assert offsets(again, noted.offset, again.stable) == [*range(noted.offset, noted.offset + 5)]
        again.close()
        again = Journal(journal.directory, again.reached)
        assert again.damage == []
    again.close()


def test_what_is_noted_may_be_older_than_what_is_there(journal):
    noted = []
    for _ in range(3):
        journal.add(10)
        journal.sync(1.0)
        noted.append(journal.reached)
    journal.close()
    for each in noted:
        again = Journal(journal.directory, each)
        assert again.damage == []
        assert again.reached == noted[-1]
        again.close()
    again = Journal(journal.directory)
    again.begin_epoch(1e9)
    assert again.reached is None
    again.add(1)
    again.sync(1.0)
    again.close()
    assert Journal(journal.directory, noted[-1]).damage == []


def frames_of(path: Path) -> list[int]:
    found, data = [0], path.read_bytes()
    while found[-1] < len(data):
        found.append(found[-1] + HEAD_BYTES + decode_head(data[found[-1] :]).length)
    return found[:-1]


@pytest.mark.parametrize("into", [0, 20, 30, HEAD_BYTES - 1, HEAD_BYTES + 100])
@pytest.mark.parametrize("which", [0, 2, 4])
@pytest.mark.parametrize("is_opened_again", [True, False])
def test_a_flipped_bit_is_a_gap_that_is_told(journal, into, which, is_opened_again):
    for _ in range(5):
        journal.add(10)
        journal.sync(1.0)
    [path] = journal.directory.iterdir()
    at = frames_of(path)[which]
    with path.open("r+b") as file:
        file.seek(at + into)
        [byte] = file.read(1)
        file.seek(at + into)
        file.write(bytes((byte ^ 16,)))
    if is_opened_again:
        if which == 4 and into < HEAD_BYTES - 1:
            return  # nothing tells that the last frame was ever whole
        journal.close()
        journal = Journal(journal.directory)
        [damage] = journal.damage
        assert (damage.path, damage.byte, damage.first, damage.end) == (path, at, which * 10, which * 10 + 10)
        assert str(path) in str(damage)
        assert f"byte {at}" in str(damage)
        assert journal.stable == 50
    found, following = read(journal, 0, 50)
    assert following == 50
    gone = range(which * 10, which * 10 + 10)
    assert [row["journalOffset"] for row in found] == [
        each for each in range(50) if each not in gone or each == gone[-1]
    ]
    [gap] = [row for row in found if row["op"] == "truncated"]
    assert gap["journalOffset"] == gone[-1]
    assert f"{path}: byte {at}" in gap["description"]
    some, _ = read(journal, gone[3], gone[6])
    assert [(row["op"], row["journalOffset"]) for row in some] == [("truncated", gone[5])]
    journal.add(5)
    journal.sync(1.0)
    assert [row["journalOffset"] for row in read(journal, 50, 60)[0]] == [*range(50, 55)]
    journal.close()


def test_a_missing_file_is_a_gap(journal):
    for _ in range(6):
        journal.add(60, 2000)
        journal.sync(1.0)
    second = sorted(journal.directory.iterdir())[1]
    third = sorted(journal.directory.iterdir())[2]
    second.unlink()
    first, end = (int(path.stem.split("-")[1]) for path in (second, third))
    journal.close()
    again = Journal(journal.directory)
    found, _ = read(again, 0, 360)
    assert [row["journalOffset"] for row in found] == [*range(first), end - 1, *range(end, 360)]
    assert found[first]["op"] == "truncated"
    again.close()


def test_entities_and_bodies_may_be_left_out(journal):
    journal.add(3, entity="Orders/a")
    journal.add(3, entity="other")
    batch = pa.RecordBatch.from_pylist(
        [{"partition": 2, "journalOffset": 6, "eventTime": 0, "op": "truncated"}], SCHEMA
    )
    journal.append(batch, 0, 0, Made(STORE, LOG, 7), 1.0)
    journal.add(200, 2000)
    journal.sync(1.0)
    found, following = read(journal, 1, 207, entity="orders/*", records=False)
    assert following == 207
    assert [row["journalOffset"] for row in found] == [1, 2, 6]
    assert "record" not in found[0]
    assert len(read(journal, 0, 207, records=False)[0]) == len(read(journal, 0, 207)[0]) == 207
    assert [row["journalOffset"] for row in read(journal, 0, 207, entity="OTHER")[0]] == [3, 4, 5, 6]


def test_small_batches_are_joined_and_large_ones_passed_on(journal):
    for _ in range(50):
        journal.add(2)
    journal.add(100, 2000)
    journal.sync(1.0)
    data = b"".join(stream(2, journal.read(0, 200, 1 << 30), None, records=True, time_ms=0))
    assert [batch.num_rows for batch in pa.ipc.open_stream(data)] == [100, 100]


def test_what_is_passed_on_is_what_was_read_and_no_copy(journal):
    journal.add(100, 2000)
    journal.sync(1.0)
    with contextlib.closing(journal.read(0, 100, 1 << 30)) as reading:
        [piece] = reading.pieces
        passed_on = message_of(piece.payload())
    assert isinstance(passed_on.obj, bytes)
    assert len(passed_on.obj) == HEAD_BYTES + piece.head.length


def test_an_epoch_of_its_own_for_another_store(journal):
    journal.add(5)
    journal.sync(1.0)
    before = journal.epoch
    journal.begin_epoch(0.0)  # the clock was set back
    assert journal.epoch > before
    journal.append(plain_rows(0, 2), 0, 1, Made(b"other-st", LOG, 9), 1.0)
    journal.sync(1.0)
    assert (journal.low, journal.stable) == (0, 2)
    assert offsets(journal, 0, 9) == [0, 1]
    journal.close()
    again = Journal(journal.directory)
    assert (again.epoch, again.made, again.stable) == (journal.epoch, Made(b"other-st", LOG, 9), 2)
    again.drop_oldest()
    assert offsets(again, 0, 9) == [0, 1]
    assert again.oldest() is None
    again.close()


def test_an_old_file_that_is_the_newest_can_be_retired(journal):
    journal.add(5)
    journal.sync(1.0)
    assert not journal.retire(1.0, 200.0)
    assert journal.retire(50.0, 200.0)
    journal.drop_oldest()
    assert (journal.low, journal.stable, journal.low_ms) == (5, 5, None)
    assert not journal.retire(500.0, 600.0)
    journal.close()
    again = Journal(journal.directory)
    assert (again.low, again.stable, again.made) == (5, 5, Made(STORE, LOG, 5))
    again.add(2)
    again.sync(600.0)
    assert offsets(again, 5, 9) == [5, 6]
    again.close()


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(journal):
    journal.add(200, 2000)
    journal.sync(1.0)
    journal.add(5, now_s=200.0)
    journal.sync(200.0)
    reading = journal.read(0, 100, 1 << 30)
    journal.drop_oldest()
    table = pa.ipc.open_stream(b"".join(stream(2, reading, None, records=True, time_ms=0))).read_all()
    assert table.num_rows == 100
    with pytest.raises(OutOfRetention):
        journal.read(0, 100, 1)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(os.urandom(4096))


def add_until_full(journal: Journal) -> None:
    noise = pa.array([os.urandom(2000)] * 100)
    while True:
        batch = plain_rows(journal.end, 100).set_column(SCHEMA.get_field_index("record"), SCHEMA.field("record"), noise)
        journal.append(batch, 0, 1, Made(STORE, LOG, 99), 1.0)
        journal.sync(1.0)


@pytest.mark.parametrize("kept", [50, 0])
def test_a_full_disk_loses_nothing_that_was_synced(tmp_path, kept):
    with own_disk_or_skip(tmp_path) as disk:
        journal = Journal(disk.seen / "2")
        journal.add(kept, 500)
        journal.sync(1.0)
        fill(disk.seen / "filler")
        with pytest.raises(JournalFull):
            add_until_full(journal)
        stable = journal.stable
        assert offsets(journal, 0, kept) == [*range(kept)]
        (disk.seen / "filler").unlink()
        journal.add(10)
        journal.sync(1.0)
        assert [row["journalOffset"] for row in read(journal, stable, stable + 10)[0]] == [*range(stable, stable + 10)]
        journal.close()
        again = Journal(disk.seen / "2")
        assert (again.stable, again.damage) == (stable + 10, [])
        again.close()


@given(st.binary(max_size=400))
def test_any_bytes_are_a_frame_or_a_typed_error(data):
    with contextlib.suppress(CorruptJournal):
        decode_head(data)
    with TemporaryDirectory() as name:
        path = Path(name) / f"{bytes(8).hex()}-{0:020}.journal"
        path.write_bytes(data)
        journal = PartitionJournal(Path(name))
        assert all(isinstance(each, JournalDamaged) for each in journal.damage)
        journal.close()


@pytest.mark.parametrize("sizes", [[], [0], [1 << 20], [*range(0, 3000, 7)], [5 << 20] * 3])
def test_rows_that_cannot_be_compressed_have_room(sizes):
    rows = plain_rows(0, len(sizes), 1, "orders")
    place = SCHEMA.get_field_index("record")
    batch = rows.set_column(place, SCHEMA.field(place), pa.array([os.urandom(size) for size in sizes], pa.binary()))
    _, payload = encode(batch, 0, 0, 0, Made(STORE, LOG, 1))
    assert decode(payload.to_pybytes()).equals(batch)
