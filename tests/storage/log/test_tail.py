"""The tail of a log: every frame once and in order, whatever the turns, segments and restarts are."""

import os
from errno import EIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.log.frames import BLOCK_BYTES, FRAME_HEAD_BYTES, Frame, TablesState, decode_turn
from storage.log.reading import LogOnDisk
from storage.log.recovery import put_aside
from storage.log.segments import segment_path
from storage.log.tail import READ_BYTES, LogTail, Overtaken, Position
from storage.log.writer import LogWriter, make_log
from storage.store import StoreError
from tests.examples import examples

LOG_ID = bytes(range(16))
SEGMENT_BYTES = 32 << 10


class Log:
    """A writer of which all frames are in the tables at once if it `frees`, so that segments are used again."""

    def __init__(self, directory: Path, log_id: bytes = LOG_ID, *, frees: bool = True) -> None:
        self.directory, self.log_id, self.frees = directory, log_id, frees
        directory.mkdir(parents=True)
        make_log(directory, SEGMENT_BYTES)
        self.turns = 0
        self.writer = self._writer(TablesState(0, {0: 0}), None)

    def _writer(self, tables, end):
        return LogWriter(self.directory, 0, self.log_id, SEGMENT_BYTES, tables, end)

    def turn(self, size: int) -> int:
        writer = self.writer
        self.turns += 1
        writer.begin_turn(self.turns, [(0, [(0, 1, [(b"k", b"v" * size)])])])
        writer.end_turn(wait=True)
        if self.frees:
            writer.tables = TablesState(writer.lsn, {0: writer.lsn})
            writer.release()
        return writer.lsn

    def restart(self) -> None:
        """As a worker that was killed: it replays the log and goes on behind its end. All other segments are free."""
        self.writer.close()
        log = LogOnDisk(self.directory, 0)
        # The tables know what they have, whatever the newest header says.
        for _ in log.turns(max(log.tables.lsn, self.writer.tables.lsn)):
            pass
        assert log.end is not None
        self.writer = self._writer(TablesState(log.end.lsn, {0: log.end.lsn}), log.end)

    def on_disk(self, after_lsn: int) -> list[Frame]:
        return list(LogOnDisk(self.directory, 0).turns(after_lsn))


@pytest.fixture
def log(tmp_path):
    log = Log(tmp_path / "logs" / "0")
    yield log
    log.writer.close()


def plain(frames):
    return [(frame.lsn, bytes(frame.payload)) for frame in frames]


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["read", "read some", "restart", "reopen"]),
        st.sampled_from([0, 1, 3000, BLOCK_BYTES - FRAME_HEAD_BYTES - 30, 4060, 20_000, 40_000, 300_000]),
    ),
    max_size=40,
)


@settings(max_examples=examples(40))
@given(STEPS, st.booleans())
def test_every_turn_is_read_once_and_in_order(steps, frees):
    with TemporaryDirectory() as directory:
        log = Log(Path(directory) / "logs" / "0", frees=False)
        tail, wanted, found = LogTail(log.directory, None), [], []
        durable, restarted = 0, False
        for step in steps:
            if isinstance(step, int):
                durable = log.turn(step)
                wanted.append(durable)
                continue
            if step == "restart":
                found += plain(tail.read(durable, 1 << 30))
                restarted = True
                log.restart()
                durable = log.writer.lsn
            elif step == "reopen":
                position = tail.position
                tail.close()
                tail = LogTail(log.directory, position and Position(position.log_id[:8], position.lsn))
            else:
                found += plain(tail.read(durable, 1 << 30 if step == "read" else 1))
            if frees and step == "read":  # what was read may go, and is used again
                log.writer.tables = TablesState(durable, {0: durable})
                log.writer.release()
        found += plain(tail.read(None, 1 << 30))
        assert [lsn for lsn, _ in found] == wanted
        assert [decode_turn(payload)[0] for _, payload in found] == [*range(1, log.turns + 1)]
        if not frees and not restarted:
            assert found == plain(log.on_disk(0))
        assert [*tail.read(durable, 1 << 30)] == []
        tail.close()
        log.writer.close()


def test_nothing_is_read_beyond_what_is_durable(log):
    log.frees = False
    for _ in range(20):
        log.turn(2000)
    tail = LogTail(log.directory, None)
    lsns = [frame.lsn for frame in tail.read(7, 1 << 20)]
    assert lsns[-1] <= 7
    assert [*tail.read(7, 1 << 20)] == []
    assert [frame.lsn for frame in tail.read(9, 1 << 20)] == [8, 9]


def test_a_tail_that_was_overtaken_says_so_and_goes_on_with_the_oldest_frame(log):
    tail = LogTail(log.directory, None)
    log.turn(10)
    assert [frame.lsn for frame in tail.read(1, 1 << 20)] == [1]
    for _ in range(100):
        log.turn(3000)
    with pytest.raises(Overtaken, match=r"used again|are gone"):
        [*tail.read(log.writer.lsn, 1 << 20)]
    before = tail.skip()
    assert before > 1
    lsns = [frame.lsn for frame in tail.read(log.writer.lsn, 1 << 30)]
    assert lsns == [frame.lsn for frame in log.on_disk(before)]
    assert lsns[0] == before + 1


def test_a_position_that_is_gone_is_overtaken(log):
    for _ in range(100):
        log.turn(3000)
    with pytest.raises(Overtaken, match="are gone"):
        [*LogTail(log.directory, Position(LOG_ID[:8], 3)).read(log.writer.lsn, 1 << 20)]


def test_another_log_in_its_place_is_noticed(log):
    log.turn(10)
    tail = LogTail(log.directory, None)
    [*tail.read(1, 1 << 20)]
    log.writer.close()
    put_aside(log.directory)
    other = Log(log.directory, bytes(16))
    other.turn(10)
    assert [*tail.read(1, 1 << 20)] == []  # by its LSN nothing is new
    other.turn(10)
    with pytest.raises(Overtaken, match="replaced"):
        [*tail.read(2, 1 << 20)]
    assert tail.skip() == 0
    assert [frame.lsn for frame in tail.read(2, 1 << 20)] == [1, 2]
    assert tail.position == Position(bytes(16), 2)
    with pytest.raises(Overtaken, match="another log"):
        [*LogTail(log.directory, Position(LOG_ID[:8], 1)).read(2, 1 << 20)]
    log.writer = other.writer


def test_a_damaged_frame_is_a_gap_and_the_next_ones_are_read(log):
    log.frees = False
    for _ in range(5):
        log.turn(10)
    path = segment_path(log.directory, 0)
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES * 3 + FRAME_HEAD_BYTES + 3)  # behind the header and two frames
        file.write(b"\xff\xfe")
    tail = LogTail(log.directory, None)
    assert [frame.lsn for frame in tail.read(5, 1 << 20)] == [1, 2]
    with pytest.raises(Overtaken, match=r"segment-0: byte 12288: turn 3 cannot be read"):
        [*tail.read(5, 1 << 20)]
    assert tail.skip() == 3
    assert [frame.lsn for frame in tail.read(5, 1 << 20)] == [4, 5]


def test_a_length_that_is_nonsense_takes_no_memory(log):
    log.frees = False
    log.turn(10)
    with segment_path(log.directory, 0).open("r+b") as file:
        file.seek(BLOCK_BYTES + 12)
        file.write((1 << 62).to_bytes(8, "big"))
    tail = LogTail(log.directory, None)
    with pytest.raises(Overtaken, match="cannot be read"):
        [*tail.read(1, 1 << 20)]
    assert tail.skip() == 0, "nothing can be read behind it yet"


def test_there_may_be_no_log_yet(tmp_path):
    tail = LogTail(tmp_path / "logs" / "0", None)
    assert [*tail.read(7, 1 << 20)] == []
    log = Log(tmp_path / "logs" / "0")
    log.turn(1)
    assert [frame.lsn for frame in tail.read(1, 1 << 20)] == [1]
    log.writer.close()


def test_it_reads_what_is_new_and_nothing_twice(log, monkeypatch):
    log.frees = False
    for _ in range(3):
        log.turn(20_000)
    tail = LogTail(log.directory, None)
    [*tail.read(log.writer.lsn, 1 << 30)]
    read, real = [], os.pread

    def counted(descriptor, size, offset):
        data = real(descriptor, size, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr("storage.log.tail.os.pread", counted)
    assert [*tail.read(log.writer.lsn, 1 << 30)] == []
    assert read == []
    log.turn(10)
    assert len([*tail.read(log.writer.lsn, 1 << 30)]) == 1
    assert sum(read) <= 3 * SEGMENT_BYTES, "the rest of this segment, and the next one with its header"


def test_an_error_of_the_disk_loses_no_turn(log, monkeypatch):
    log.frees = False
    lsns = [log.turn(READ_BYTES) for _ in range(3)]
    tail = LogTail(log.directory, None)
    is_broken, real = True, os.pread

    def pread(descriptor, size, offset):
        if is_broken and tail.position is not None and tail.position.lsn == lsns[0]:
            raise OSError(EIO, "broken")
        return real(descriptor, size, offset)

    monkeypatch.setattr("storage.log.tail.os.pread", pread)
    assert [frame.lsn for frame in tail.read(lsns[-1], 1 << 30)] == lsns[:1]
    with pytest.raises(StoreError, match="broken"):
        [*tail.read(lsns[-1], 1 << 30)]
    is_broken = False
    assert [frame.lsn for frame in tail.read(lsns[-1], 1 << 30)] == lsns[1:]


@pytest.mark.parametrize(
    ("is_following", "blocks", "turns"), [(False, 1, 0), (False, 2, 1), (True, 0, 4), (True, 1, 4), (True, 2, 5)]
)
def test_a_truncated_log_of_a_worker_that_does_not_run_is_a_gap_and_no_end(log, is_following, blocks, turns):
    log.frees = False
    lsns = [log.turn(3000) for _ in range(4)]
    if is_following:
        log.writer._continue_in_next()
        lsns.append(log.turn(3000))
    path = log.writer._used[-1].file.path
    os.truncate(path, blocks * BLOCK_BYTES)
    tail = LogTail(log.directory, None)
    if turns:
        assert [frame.lsn for frame in tail.read(None, 1 << 20)] == lsns[:turns]
    with pytest.raises(Overtaken, match=rf"{path.name}: truncated: {blocks * BLOCK_BYTES} bytes of {SEGMENT_BYTES}"):
        [*tail.read(None, 1 << 20)]
