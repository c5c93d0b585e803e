"""A log whose bytes are damaged: the turns before a torn end, or an error that names the place; never a gap."""

import random
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.durable import write_file
from storage.log.commit_log import LogLimits
from storage.log.frames import BLOCK_BYTES, FRAME_HEAD_BYTES, FrameCodec, Kind, decode_header, padded
from storage.log.reading import LogDamaged, LogOnDisk
from storage.log.recovery import log_directory
from storage.log.segments import segment_numbers, segment_path
from storage.log.writer import LogWriter
from storage.store import StoreError, Table
from tests.examples import examples
from tests.logged_turns import Turns, contents, open_local
from tests.logs import crash, open_tables

SEED = 24  # that makes three segments, with some turns in the last
SEED_OF_LARGE_TURN = 5  # its last segment is longer than others, for a turn


class Written:
    """A log of three segments, of which the tables have nothing, and its frames: (segment, offset, end, LSN, kind)."""

    def __init__(self, monkeypatch, directory, seed=SEED):
        self.data = directory
        self.directory = log_directory(directory, 0)
        log = open_local(monkeypatch, directory, (0,))
        self.turns = Turns((0,), seed)
        while len(log._writer._used) < 3:
            self.turns.turn(log.stores, log.commit)
        log.stores[0].put(Table.META, b"key", b"value" * 20)
        log.commit()
        self.lsn = log.lsn
        self.order = [segment.number for segment in log._writer._used]
        crash(log)
        self.whole = {number: self.path(number).read_bytes() for number in self.order}
        self.frames = []
        for number in self.order:
            content = memoryview(self.whole[number])
            codec = FrameCodec(decode_header(self.whole[number]).log_id)
            at = BLOCK_BYTES
            while at < len(content) and codec.lsn_at(content[at:]) > (self.frames[-1][3] if self.frames else 0):
                frame = codec.read(content[at:])
                end = at + FRAME_HEAD_BYTES + len(frame.payload)
                self.frames.append((number, at, end, frame.lsn, frame.kind))
                at = padded(end)

    def path(self, number):
        return segment_path(self.directory, number)

    def put(self, number, content):
        self.path(number).write_bytes(content)

    def flip(self, number, at, bit=0x40):
        content = bytearray(self.whole[number])
        content[at] ^= bit
        self.put(number, content)

    def mend(self):
        for number, content in self.whole.items():
            self.put(number, content)

    def read(self, after=0):
        """The LSNs of the turns that are found."""
        log = LogOnDisk(self.directory, 0)
        lsns = [frame.lsn for frame in log.turns(after)]
        assert log.end is not None
        self.torn = log.end.torn
        return lsns

    def turn_lsns(self, up_to):
        return [lsn for _, _, _, lsn, kind in self.frames if kind == Kind.TURN and lsn <= up_to]


@pytest.fixture
def written(monkeypatch, tmp_path):
    return Written(monkeypatch, tmp_path)


def bytes_of(start, end):
    """All bytes of the head of a frame, and some of its payload."""
    chance = random.Random(start)
    head = range(start, start + FRAME_HEAD_BYTES)
    return [*head, *sorted(chance.sample(range(head.stop, end), min(20, end - head.stop))), end - 1]


def test_a_log_that_is_whole_is_read(written):
    assert written.frames[-1][3] == written.lsn
    assert len(written.frames) >= 8
    assert [kind for *_, kind in written.frames].count(Kind.NEXT) == 2
    assert written.read() == written.turn_lsns(written.lsn)
    assert not written.torn


def test_a_last_frame_with_any_byte_flipped_ends_the_log_and_is_named(written):
    number, start, end, lsn, _ = written.frames[-1]
    for at in range(start, end):
        written.flip(number, at)
        assert written.read() == written.turn_lsns(lsn - 1), at
        assert f"segment-{number}: byte {start}: turn {lsn} is torn or damaged" in written.torn, at


def test_a_last_frame_of_any_length_ends_the_log_and_is_named(written):
    number, start, end, lsn, _ = written.frames[-1]
    whole = written.whole[number]
    for size in range(start, end):
        for fill in (b"\0", b"x"):
            content = whole[:size].ljust(padded(end), fill).ljust(len(whole), b"\0")
            written.put(number, content)
            assert written.read() == written.turn_lsns(lsn - 1), size
            assert bool(written.torn) == any(content[start:]), size


def test_a_last_frame_without_its_first_sectors_ends_the_log_and_is_named(written):
    number, start, _, lsn, _ = written.frames[-1]
    content = bytearray(written.whole[number])
    content[start : start + 100] = bytes(100)
    written.put(number, content)
    assert written.read() == written.turn_lsns(lsn - 1)
    assert f"turn {lsn} is torn or damaged" in written.torn


@pytest.mark.parametrize("seed", range(10))
def test_what_an_earlier_use_of_a_segment_has_left_is_not_taken_for_a_torn_turn(monkeypatch, tmp_path, seed):
    turns = Turns((0,), seed)
    for life in range(8):
        # No turn is larger than a segment. Where one was, and the file was made shorter since, nobody can tell.
        log = open_local(monkeypatch, tmp_path, (0,), limits=LogLimits(128 << 10, 1 << 20))
        assert not log.torn, life
        for _ in range(turns.chance.randint(1, 60)):
            turns.turn(log.stores, log.commit)
            if log.is_checkpointing:
                log.hear()
        crash(log)


def test_a_torn_turn_in_a_segment_that_was_used_before_is_named(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 1)
    while log.checkpoints < 5:
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            log.hear()
    while (current := log._writer._used[-1]).size_bytes - current.at < 20_000:
        turns.turn(log.stores, log.commit)
    start = current.at
    log.stores[0].put(Table.META, b"key", b"value" * 2000)
    log.commit()
    path, end = current.file.path, current.at
    crash(log)
    whole = path.read_bytes()
    for at in (start, start + 5, start + 8, start + 20, start + 30, end - 4000):
        content = bytearray(whole)
        content[at] ^= 1
        path.write_bytes(content)
        damaged = LogOnDisk(path.parent, 0)
        lsns = [frame.lsn for frame in damaged.turns(damaged.tables.lsn)]
        assert f"{path.name}: byte {start}: turn {max(lsns, default=damaged.tables.lsn) + 1}" in damaged.end.torn
    with open_tables(tmp_path, 0) as store:
        assert contents({0: store}) == turns.done


@pytest.mark.parametrize("seed", [SEED, SEED_OF_LARGE_TURN])
def test_a_segment_that_is_truncated_anywhere_is_named(monkeypatch, tmp_path, seed):
    """Also where all of its frames are still there: what was behind them is not known."""
    written = Written(monkeypatch, tmp_path, seed)
    chance = random.Random(seed)
    for number in written.order:
        whole = written.whole[number]
        bounds = {at for each, start, end, *_ in written.frames if each == number for at in (start, end, padded(end))}
        sizes = {0, 1, 20, BLOCK_BYTES, len(whole) - 1, *bounds, *chance.sample(range(len(whole)), 30)} - {len(whole)}
        for size in sizes:
            written.put(number, whole[:size])
            with pytest.raises(LogDamaged, match=rf"segment-{number}: truncated|the turns from 1 to \d+ are missing"):
                written.read()
        written.mend()
    assert written.read() == written.turn_lsns(written.lsn)


def test_a_log_of_one_segment_that_is_truncated_is_named(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    path = log._writer._used[-1].file.path
    log.stores[0].put(Table.META, b"key", b"value")
    log.commit()
    crash(log)
    whole = path.read_bytes()
    for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(LogDamaged, match=r"segment-0: (truncated|the segment is shorter|it was never|the header)"):
            open_tables(tmp_path, 0)
    path.write_bytes(whole)
    with open_tables(tmp_path, 0) as store:
        assert store.get(Table.META, b"key") == b"value"


def test_a_segment_that_was_named_and_not_begun_is_not_shorter_than_it_was_made(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 3)
    turns.turn(log.stores, log.commit)
    with monkeypatch.context() as patch:  # killed before the header is written
        patch.setattr(LogWriter, "_begin", lambda *_: None)
        log._writer._continue_in_next(100_000)
    named = max(log_directory(tmp_path, 0).iterdir())
    crash(log)
    whole = named.read_bytes()
    assert len(whole) > 100_000
    named.write_bytes(whole[:-1])
    with pytest.raises(LogDamaged, match=f"{named.name}: truncated: {len(whole) - 1} bytes of {len(whole)}"):
        open_tables(tmp_path, 0)
    named.write_bytes(whole)
    again = open_local(monkeypatch, tmp_path, (0,))  # and its header says what names it says
    assert len(named.read_bytes()) == len(whole)
    turns.turn(again.stores, again.commit)
    crash(again)
    with open_tables(tmp_path, 0) as store:
        assert contents({0: store}) == turns.done


def test_a_segment_of_another_usual_size_is_no_damage(monkeypatch, tmp_path):
    turns = Turns((0,), 8)
    for segment_bytes in (64 << 10, 32 << 10, 128 << 10, 48 << 10, 96 << 10):
        log = open_local(monkeypatch, tmp_path, (0,), limits=LogLimits(segment_bytes, 1 << 20))
        assert contents(log.stores) == turns.done
        for _ in range(20):
            turns.turn(log.stores, log.commit)
            if log.is_checkpointing:
                log.hear()
        crash(log)
    with open_tables(tmp_path, 0) as store:
        assert contents({0: store}) == turns.done


def test_a_flipped_byte_of_an_earlier_frame_is_named(written):
    for number, start, end, lsn, _ in written.frames[:-1]:
        for at in bytes_of(start, end):
            written.flip(number, at)
            with pytest.raises(LogDamaged, match=rf"segment-\d+: .* turn {lsn} is damaged or missing"):
                written.read()
        written.mend()


def test_a_flipped_byte_of_a_header_is_named_or_makes_no_difference(written):
    for place, number in enumerate(written.order):
        used = len(written.whole[number][:BLOCK_BYTES].rstrip(b"\0"))
        for at in range(used):
            written.flip(number, at)
            if place == 0:  # nothing says where the log begins
                with pytest.raises(LogDamaged, match=r"logs/0: the turns from 1 to \d+ are missing"):
                    written.read()
            else:  # the frame NEXT of the segment before says all that is in the header
                assert written.read() == written.turn_lsns(written.lsn)
        written.mend()


def test_a_frame_between_others_that_was_lost_is_named(written):
    for number, start, end, lsn, _ in written.frames[:-1]:
        content = bytearray(written.whole[number])
        content[start : padded(end)] = bytes(padded(end) - start)
        written.put(number, content)
        with pytest.raises(LogDamaged, match=f"turn {lsn} is damaged or missing"):
            written.read()
        written.mend()


def test_a_segment_that_is_needed_and_missing_is_named(written):
    for place, number in enumerate(written.order):
        written.path(number).unlink()
        problem = f"segment-{number}: is missing" if place else "the turns from 1 to .* are missing"
        with pytest.raises(LogDamaged, match=problem):
            written.read()
        written.mend()


def test_a_free_segment_that_is_missing_or_damaged_does_no_harm(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 7)
    while log.checkpoints < 3 or not log._writer._free:
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            log.hear()
    free = [segment.file.path for segment in log._writer._free]
    crash(log)
    for path in free:
        content = path.read_bytes()
        for damaged in (None, b"", b"x" * 5000, content[:BLOCK_BYTES] + bytes(5000)):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
            with open_tables(copy, 0) as store:
                assert contents({0: store}) == turns.done
            shutil.rmtree(copy)
            path.write_bytes(content)


def test_swapped_segments_are_named(written):
    first, second, _ = written.order
    written.put(first, written.whole[second])
    written.put(second, written.whole[first])
    with pytest.raises(LogDamaged, match=f"turn {written.frames[-1][3]} .* is whole|begins with turn|truncated"):
        written.read()


def test_a_copy_of_a_segment_in_the_place_of_another_is_named(written):
    first, second, third = written.order
    for one, other in ((first, second), (second, first), (second, third), (third, second)):
        written.put(one, written.whole[other])
        with pytest.raises(LogDamaged, match=r"segment-\d+: begins with turn \d+, as segment-\d+ does"):
            written.read()
        written.mend()


def test_segments_of_other_logs_are_named(monkeypatch, tmp_path, written):
    log = open_local(monkeypatch, tmp_path / "other", (0,))
    other = log._writer._used[-1].file.path
    crash(log)
    log = open_local(monkeypatch, tmp_path / "other", (1,), worker=1)
    of_worker = log._writer._used[-1].file.path
    crash(log)
    shutil.copy(other, written.path(77))
    with pytest.raises(LogDamaged, match=r"segment-\d+: is a segment of another log than segment-\d+"):
        LogOnDisk(written.directory, 0)
    shutil.copy(of_worker, written.path(77))
    with pytest.raises(LogDamaged, match="segment-77: is a segment of worker 1, not of worker 0"):
        LogOnDisk(written.directory, 0)


def test_a_whole_log_of_another_directory_is_named(monkeypatch, tmp_path, written):
    crash(open_local(monkeypatch, tmp_path / "other", (0,)))
    shutil.rmtree(written.directory)
    shutil.copytree(log_directory(tmp_path / "other", 0), written.directory)
    with pytest.raises(LogDamaged, match=r"is not the log that has the latest changes of .*partitions/0"):
        open_tables(tmp_path, 0)


def test_a_log_that_is_missing_is_named(tmp_path, written):
    shutil.rmtree(written.directory)
    with pytest.raises(LogDamaged, match="logs/0: the log is missing"):
        open_tables(tmp_path, 0)


def test_an_older_copy_of_the_tables_is_named(monkeypatch, tmp_path, written):
    partition = tmp_path / "partitions" / "0"
    shutil.copytree(partition, tmp_path / "older")
    for _ in range(2):  # so that the header of the newest segment knows that the tables have these turns
        log = open_local(monkeypatch, tmp_path, (0,))
        written.turns.turn(log.stores, log.commit)
        crash(log)
    shutil.rmtree(partition)
    shutil.copytree(tmp_path / "older", partition)
    with pytest.raises(LogDamaged, match=r"partitions/0: has the turns up to \d+, but .*it is an older copy"):
        open_tables(tmp_path, 0)


def test_an_older_copy_of_the_log_is_named(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0, 1))
    turns = Turns((0, 1), 1, frozenset({0}))
    directory = log_directory(tmp_path, 0)
    shutil.copytree(directory, tmp_path / "older")
    while turns.done == {place: {} for place in turns.done} or log.checkpoints < 2:
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            log.hear()
    crash(log)
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "older", directory)
    # Partition 0 alone could be there: it had few changes.
    with pytest.raises(LogDamaged, match=r"logs/0: ends with turn \d+, but"):
        open_local(monkeypatch, tmp_path, (0, 1))


def test_a_newer_format_is_refused_and_left_as_it_is(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("storage.log.frames.VERSION", 3)
        crash(open_local(monkeypatch, tmp_path, (0,)))
    before = {path: path.read_bytes() for path in log_directory(tmp_path, 0).iterdir()}
    for again in (lambda: open_local(monkeypatch, tmp_path, (0,)), lambda: open_tables(tmp_path, 0)):
        with pytest.raises(StoreError, match="log format 3 found, 2 supported; nothing was changed"):
            again()
    assert {path: path.read_bytes() for path in log_directory(tmp_path, 0).iterdir()} == before


@pytest.mark.parametrize("how", ["garbage", "empty", "cut", "other worker"])
def test_a_damaged_log_that_no_partition_needs_is_put_aside(monkeypatch, tmp_path, written, how):
    with open_tables(tmp_path, 0) as store:  # as after a clean stop
        assert contents({0: store}) == written.turns.done
    for number in segment_numbers(written.directory):
        path = written.path(number)
        if how == "garbage":
            write_file(path, b"garbage" * 1000)
        elif how == "empty":
            write_file(path, b"")
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:BLOCK_BYTES].ljust(2 * BLOCK_BYTES, b"\xff"))
    worker = 1 if how == "other worker" else 0
    if worker:
        written.directory.rename(log_directory(tmp_path, 1))
    log = open_local(monkeypatch, tmp_path, (0,), worker=worker)
    assert f"{worker}.damaged-1" in log.put_aside
    assert len(list((tmp_path / "logs" / f"{worker}.damaged-1").iterdir())) >= 3
    assert contents(log.stores) == written.turns.done
    written.turns.turn(log.stores, log.commit)
    crash(log)
    with open_tables(tmp_path, 0) as store:
        assert contents({0: store}) == written.turns.done


def test_a_damaged_log_that_one_of_the_partitions_needs_is_left(monkeypatch, tmp_path, written):
    before = written.path(written.order[0])
    written.flip(written.order[0], 20)
    with pytest.raises(LogDamaged):
        open_local(monkeypatch, tmp_path, (0, 1))
    assert before.exists()


hostile = st.sampled_from([b"", b"v", bytes(40_000), b"TurN" * 2000, b"PeekLog\n" * 600, b"\xff" * 9000])


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), hostile), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(0, 2**30),
    st.sampled_from([0, 1, 2**63 - 1]),
)
@settings(max_examples=examples(40))
def test_any_flipped_byte_of_any_log_is_named_or_at_its_end(turns, place, time_ms):
    with pytest.MonkeyPatch.context() as monkeypatch, _folder() as folder:
        log = open_local(monkeypatch, folder, (0,), limits=LogLimits(20_000, 1 << 20))
        model, states = {}, []
        for number, turn in enumerate(turns):
            items = [(bytes([key]), value + bytes([number])) for key, value in turn]
            log.stores[0].put_many(Table.MESSAGES, items)
            log.commit(time_ms)
            model.update(items)
            states.append(dict(model))
        crash(log)
        paths = [segment_path(log_directory(folder, 0), number) for number in segment_numbers(log_directory(folder, 0))]
        path = paths[place % len(paths)]
        content = bytearray(path.read_bytes())
        at = place % len(content)
        content[at] ^= 1 << place % 8
        path.write_bytes(content)
        with suppress(LogDamaged), open_tables(folder, 0) as store:
            found = dict(store.scan(Table.MESSAGES, b"\0", b"\xff", 100))
            assert found in ([{}, *states])[-2:]


@contextmanager
def _folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)
