"""What workers log comes into the journal once, whenever the journal's process is killed."""

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.journal import following
from broker.journal.consumers import Consumers, Progress
from broker.journal.following import Follower, Retention
from storage.journal.queues import Mode, Modes
from storage.log.follower import Follower as LogFollower
from storage.log.follower import position_path, read_position
from storage.store import Table
from tests.examples import examples
from tests.journal.journaled import SMALL, Worker, journaled, wanted
from tests.journal.turns_of_messages import STORE
from tests.logs import checkpoint, crash, open_log
from tests.own_disk import own_disk_or_skip

GIB = 1 << 30


def follower(
    directory: Path,
    workers: int = 1,
    mode: Mode = Mode.BODIES,
    modes=None,
    *,
    seconds: float = 1e9,
    size: int = 16 * GIB,
    held_size: int = 64 * GIB,
    held_for: tuple[str, ...] = (),
    spare: int = 0,
    **options,
) -> Follower:
    retention = Retention(seconds, size, held_size, spare)
    made = Follower(directory, workers, Modes(mode, modes or {}), retention, Consumers(directory, held_for), **options)
    made.open()
    return made


def drain(made: Follower) -> None:
    made._looked_at = float("-inf")
    ending = threading.Event()
    ending.set()
    made.run(ending)


@pytest.fixture
def worker(tmp_path):
    worker = Worker(tmp_path, 0, 1, (0, 2))
    yield worker
    worker.stop()


def test_rows_come_once_and_the_position_follows(worker, tmp_path):
    made = follower(tmp_path)
    for round in range(3):
        for _ in range(10):
            worker.turn()
        drain(made)
        for partition in (0, 2):
            assert journaled(tmp_path, partition) == wanted(worker.payloads, partition)
        position = read_position(position_path(tmp_path, 0))
        assert (position.lsn, position.log_id) == (worker.log.lsn, worker.log._log_id[:8])
        if round == 1:
            made.close()
            made = follower(tmp_path)
    assert made.counters.gaps == made.counters.unfounded == 0
    assert made.counters.behind == {0: 0}
    made.close()


@pytest.mark.parametrize("lose", ["end", "directory"])
def test_journal_files_that_are_gone_are_told_and_their_offsets_not_used_again(worker, tmp_path, lose, capsys):
    made = follower(tmp_path)
    for _ in range(20):
        worker.turn(sends=1)
        drain(made)
    ends = {partition: made.journals[partition].stable for partition in (0, 2)}
    made.close()
    [path] = (tmp_path / "journal" / "2").iterdir()
    if lose == "end":
        os.truncate(path, 5000)
    else:
        shutil.rmtree(path.parent)
    made = follower(tmp_path)
    assert "a journal file is damaged" in capsys.readouterr().out
    assert [len(made.journals[partition].damage) for partition in (0, 2)] == [0, 1]
    assert {partition: made.journals[partition].stable for partition in (0, 2)} == ends
    for _ in range(5):
        worker.turn(sends=1)
    drain(made)
    assert made.journals[2].stable > ends[2]
    made.close()
    made = follower(tmp_path)
    assert not any(each.damage for each in made.journals.values())
    made.close()


@pytest.mark.parametrize("was_killed", [True, False])
def test_turns_behind_an_older_copy_of_stores_and_log_are_not_left_out(tmp_path, was_killed):
    """They have numbers that the journal has already."""
    worker = Worker(tmp_path, 0, 1, (0, 2))
    for _ in range(3):
        worker.turn(sends=1)
    worker.stop() if was_killed else worker.log.close()
    older = [tmp_path / name for name in ("partitions", "logs")]
    for path in older:
        shutil.copytree(path, tmp_path / "older" / path.name)
    log = open_log(tmp_path, (0, 2), follower=followed_by_journal(tmp_path))
    for number in range(10):
        log.stores[0].put(Table.META, b"later", b"%d" % number)
        log.commit()
    made = follower(tmp_path)
    drain(made)
    assert read_position(position_path(tmp_path, 0)).lsn == log.lsn
    made.close()
    crash(log)
    for path in older:
        shutil.rmtree(path)
        (tmp_path / "older" / path.name).rename(path)
    log = open_log(tmp_path, (0, 2), follower=followed_by_journal(tmp_path))
    assert "but the journal has turns up to" in log.put_aside
    assert log.stores[0].get(Table.META, b"later") is None
    log.stores[0].put(Table.META, b"again", b"value")
    log.commit()
    made = follower(tmp_path)
    drain(made)
    position = read_position(position_path(tmp_path, 0))
    assert (position.log_id, position.lsn) == (log._log_id[:8], log.lsn)
    assert made.counters.gaps > 0
    made.close()
    crash(log)
    log = open_log(tmp_path, (0, 2), follower=followed_by_journal(tmp_path))
    assert not log.put_aside
    assert log.stores[0].get(Table.META, b"again") == b"value"
    crash(log)


def followed_by_journal(directory: Path) -> LogFollower:
    (directory / "run").mkdir(exist_ok=True)
    (directory / "journal").mkdir(exist_ok=True)
    return LogFollower(directory, 0, GIB)


def test_nothing_beyond_what_is_published(worker, tmp_path):
    worker.turn(sends=1)
    lsn = worker.log.lsn
    worker.publish = lambda: None
    worker.turn(sends=1)
    made = follower(tmp_path)
    drain(made)
    assert read_position(position_path(tmp_path, 0)).lsn == lsn
    made.close()


class Killed(BaseException):
    pass


@settings(max_examples=examples(15))
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=8), st.booleans())
def test_a_kill_at_any_write_loses_and_doubles_nothing(rounds, is_half_written):
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        worker = Worker(directory, 0, 1, (0, 2))
        left = [-1]

        def stopping(real, is_write):
            def call(*arguments):
                left[0] -= 1
                if left[0] == 0:
                    if is_write and is_half_written:
                        descriptor, data, at = arguments
                        real(descriptor, data[: len(data) // 2], at)
                    raise Killed
                return real(*arguments)

            return call

        real_pwrite, real_rename = os.pwrite, Path.rename
        patch.setattr("storage.journal.files.os.pwrite", stopping(real_pwrite, True))
        for each in ("fdatasync", "fsync"):
            patch.setattr(os, each, stopping(getattr(os, each), False))
        patch.setattr(Path, "rename", stopping(real_rename, False))
        for turns, stop in rounds:
            for _ in range(turns):
                left[0] = -1
                worker.turn()
            left[0] = -1
            made = follower(directory)
            left[0] = stop or -1
            with suppress(Killed):
                drain(made)
            left[0] = -1
            made.close()
        made = follower(directory)
        drain(made)
        made.close()
        worker.stop()
        for partition in (0, 2):
            assert journaled(directory, partition) == wanted(worker.payloads, partition)


def test_a_journal_that_was_too_slow_says_that_it_has_a_gap(tmp_path):
    worker = Worker(tmp_path, 0, 1, (0, 2), SMALL)
    made = follower(tmp_path)
    worker.turn(sends=2)
    drain(made)
    before = {partition: len(journaled(tmp_path, partition)) for partition in (0, 2)}
    for _ in range(8):
        for _ in range(10):
            worker.turn(sends=2, size=9000)
        checkpoint(worker.log)
    drain(made)
    assert made.counters.gaps == 2
    for partition in (0, 2):
        rows = journaled(tmp_path, partition)
        gap = rows[before[partition]]
        assert (gap["op"], gap["journalOffset"]) == ("truncated", before[partition])
        assert "used again" in gap["description"] or "are gone" in gap["description"]
        assert rows[-1]["op"] != "truncated"
    made.close()
    made = follower(tmp_path)
    drain(made)
    assert made.counters.rows == 0
    made.close()
    worker.stop()


def test_changes_without_events_are_a_gap_that_is_told_once(worker, tmp_path):
    made = follower(tmp_path)
    for events in (True, False, False, True):
        worker.turn(sends=1, events=events)
        drain(made)
    ops = [row["op"] for row in journaled(tmp_path, 0) if row["op"] in ("enqueued", "truncated")]
    assert ops == ["enqueued", "truncated", "enqueued"]
    made.close()


def test_without_a_journal_nothing_is_made_of_changes_without_events(worker, tmp_path):
    worker.turn(sends=1, events=False)
    made = follower(tmp_path)
    drain(made)
    assert made.journals == {}
    made.close()


def test_another_store_is_another_epoch_also_within_a_batch(worker, tmp_path):
    made = follower(tmp_path)
    worker.turn(sends=1)
    worker.turn(sends=1)
    worker.turn(sends=3, store_id=b"another-")
    drain(made)
    journal = made.journals[0]
    assert (journal.made.store_id, journal.low) == (b"another-", 0)
    assert [row["op"] for row in journaled(tmp_path, 0)].count("enqueued") == 3
    epoch = journal.epoch
    worker.turn(sends=1, store_id=b"another-")
    drain(made)
    assert made.journals[0].epoch == epoch
    made.close()


def test_events_that_cannot_be_read_are_a_gap_and_the_others_are_not(worker, tmp_path):
    made = follower(tmp_path)
    worker.turn(sends=1)
    drain(made)
    worker.turn(sends=1)
    worker.turn(sends=1, events=[[0, STORE, [[1, 999]]]])
    worker.turn(sends=1)
    drain(made)
    ops = [row["op"] for row in journaled(tmp_path, 0) if row["op"] in ("enqueued", "truncated")]
    assert ops == ["enqueued", "enqueued", "truncated", "enqueued"]
    assert ["truncated" in [row["op"] for row in journaled(tmp_path, 2)]] == [True]
    made.close()


def test_entities_that_are_off_take_no_offsets(worker, tmp_path):
    for _ in range(5):
        worker.turn()
    made = follower(tmp_path, modes={"orders": Mode.OFF})
    drain(made)
    assert [journal.stable for journal in made.journals.values()] == [0, 0]
    assert read_position(position_path(tmp_path, 0)).lsn == worker.log.lsn
    made.close()


def test_names_are_known_after_a_restart(worker, tmp_path):
    made = follower(tmp_path)
    worker.turn(sends=1)
    drain(made)
    made.close()
    made = follower(tmp_path)
    worker.turn(sends=1)
    drain(made)
    made.close()
    assert {row["entity"] for row in journaled(tmp_path, 0)} == {"orders"}


def test_the_log_of_a_worker_that_is_no_more_is_read_first_and_to_its_end(tmp_path):
    before = Worker(tmp_path, 1, 2, (0,))
    for _ in range(4):
        before.turn(sends=1)
    (tmp_path / "run" / "worker-1.lsn").unlink()
    rows = wanted(before.payloads, 0)
    before.log.close()
    after = Worker(tmp_path, 0, 3, (0,))
    after._next = before._next
    after.turn(sends=2)
    made = follower(tmp_path)
    drain(made)
    found = journaled(tmp_path, 0)
    assert found[: len(rows)] == rows
    assert len(found) > len(rows)
    made.close()
    after.stop()


def test_old_files_go_and_the_newest_of_a_quiet_partition_too(worker, tmp_path, monkeypatch):
    now = [1000.0]
    made = follower(tmp_path, seconds=3600.0, clock=lambda: now[0])
    worker.turn(sends=2)
    drain(made)
    assert made.journals[0].low == 0
    now[0] += 3700
    drain(made)
    journal = made.journals[0]
    assert journal.low == journal.stable > 0
    worker.turn(sends=1)
    drain(made)
    assert journaled(tmp_path, 0)[0]["journalOffset"] == journal.low
    made.close()


def test_the_oldest_files_go_when_all_are_too_large(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "RETENTION_SECONDS", 0.0)
    made = follower(tmp_path, size=200_000)
    for _ in range(40):
        worker.turn(sends=2, size=9000)
        drain(made)
    drain(made)
    assert sum(journal.bytes for journal in made.journals.values()) <= 200_000
    assert made.counters.dropped_files > 0
    for partition, journal in made.journals.items():
        rows = journaled(tmp_path, partition)
        assert [row["journalOffset"] for row in rows] == [*range(journal.low, journal.stable)]
        assert journal.low > 0
    made.close()


def told(made: Follower, partition: int, share: float) -> dict[int, Progress]:
    """As a consumer tells that has read this share of what is there."""
    journal = made.journals[partition]
    return {partition: Progress(journal.epoch, int(journal.stable * share))}


def test_what_a_consumer_has_not_read_is_kept_beyond_retention(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "RETENTION_SECONDS", 0.0)
    now = [1000.0]

    def grown(**options) -> Follower:
        made = follower(tmp_path, seconds=3600.0, size=200_000, clock=lambda: now[0], **options)
        for _ in range(40):
            worker.turn(sends=2, size=9000)
            drain(made)
        now[0] += 7200
        drain(made)
        return made

    made = grown(held_for=("capture", "audit"))
    assert {journal.low for journal in made.journals.values()} == {0}, "neither has read anything"
    consumers = made._consumers
    consumers.tell("someone", told(made, 0, 1.0))
    consumers.tell("capture", told(made, 0, 1.0))
    drain(made)
    assert made.journals[0].low == 0, "audit has read nothing"
    consumers.tell("audit", told(made, 0, 0.5))
    drain(made)
    read = made.journals[0].stable // 2
    assert 0 < made.journals[0].low <= read
    assert made.journals[2].low == 0, "of the other partition nothing was read"
    kept = made.journals[0].low
    made.close()

    made = follower(tmp_path, seconds=3600.0, size=200_000, clock=lambda: now[0], held_for=("capture", "audit"))
    drain(made)
    assert made.journals[0].low == kept, "how far they are is known after a restart"
    assert made._consumers.all()["audit"] == told(made, 0, 0.5)
    made._consumers.tell("audit", told(made, 0, 0.1))
    assert made._consumers.all()["audit"] == told(made, 0, 0.5), "nobody goes back"
    for partition in (0, 2):
        for name in ("capture", "audit"):
            made._consumers.tell(name, told(made, partition, 1.0))
    drain(made)
    assert sum(journal.bytes for journal in made.journals.values()) <= 200_000
    assert made.counters.dropped_unread_files == 0
    made.close()


def test_what_is_kept_for_a_consumer_has_a_limit(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "RETENTION_SECONDS", 0.0)
    made = follower(tmp_path, size=200_000, held_size=400_000, held_for=("capture",))
    for _ in range(80):
        worker.turn(sends=2, size=9000)
        drain(made)
    drain(made)
    assert 300_000 < sum(journal.bytes for journal in made.journals.values()) <= 400_000
    assert made.counters.dropped_unread_files == made.counters.dropped_files > 0
    made._consumers.forget("capture")
    assert "capture" in made._consumers.all(), "files are kept for it whether it has told something or not"
    made.close()


def test_on_a_full_disk_what_consumers_tell_waits(tmp_path):
    with own_disk_or_skip(tmp_path) as disk:
        (disk.seen / "journal").mkdir()
        consumers = Consumers(disk.seen, ["capture"])
        disk.fill()
        consumers.tell("capture", {0: Progress(b"12345678", 7)})
        consumers.save()
        assert Consumers(disk.seen, []).all() == {}
        disk.empty()
        consumers.save()
        assert Consumers(disk.seen, []).all() == {"capture": {0: Progress(b"12345678", 7)}}


def test_a_file_of_consumers_that_cannot_be_read_keeps_more(tmp_path):
    (tmp_path / "journal").mkdir()
    for content in (b"", b"\xc1", b"\x01", b"\x81\xa1a\x05", b"\x81\xa1a\x81\x00\x91\x01", os.urandom(100)):
        (tmp_path / "journal" / "consumers").write_bytes(content)
        found = Consumers(tmp_path, ["a"])
        assert found.all() == {"a": {}}
        assert found.is_needed(0, Progress(b"12345678", 1))


def test_when_the_disk_is_almost_full_old_files_go_whoever_needs_them_but_no_newest_one(tmp_path):
    with own_disk_or_skip(tmp_path) as disk:
        data = disk.seen / "data"
        data.mkdir()
        worker = Worker(data, 0, 1, (0, 2))
        made = follower(data, size=8 << 20, held_for=("capture",), spare=1 << 20)
        while min(journal.bytes for journal in made.journals.values()) < 6 << 20 if made.journals else True:
            worker.turn(sends=10, size=9000)
            drain(made)
        assert {journal.low for journal in made.journals.values()} == {0}, "there is room, and capture has read nothing"
        disk.fill()
        made.cycle()
        assert disk.free_bytes() >= 1 << 20, "messages have room again"
        files = [len(journal._files) for journal in made.journals.values()]
        assert min(files) >= 1
        assert sum(files) > 2, "it drops no more than it must"
        assert made.counters.dropped_unread_files == made.counters.dropped_files > 0
        disk.fill()
        for _ in range(20):
            disk.fill()
            made.cycle()
        assert {len(journal._files) for journal in made.journals.values()} == {1}
        made.close()
        worker.stop()


def test_on_a_full_disk_old_files_go_first_then_the_log_waits_and_nothing_is_lost(tmp_path):
    with own_disk_or_skip(tmp_path) as disk:
        (tmp_path / "data").mkdir()
        worker = Worker(tmp_path / "data", 0, 1, (0, 2))
        (tmp_path / "data" / "journal").symlink_to(disk.seen)
        made = follower(tmp_path / "data", size=8 << 20)
        for _ in range(20):
            worker.turn(sends=10, size=9000)
            drain(made)
        assert min(journal.low for journal in made.journals.values()) == 0
        disk.fill()
        stable = made.journals[0].stable
        for _ in range(20):
            worker.turn(sends=10, size=9000)
            drain(made)
        assert made.counters.dropped_files > 0
        assert made.journals[0].stable > stable, "old files made room"
        while not made.counters.is_full:
            disk.fill()
            worker.turn(sends=10, size=9000)
            drain(made)
        low = {partition: journal.low for partition, journal in made.journals.items()}
        worker.turn(sends=10, size=9000)
        drain(made)
        assert made.counters.is_full
        disk.empty()
        drain(made)
        assert not made.counters.is_full
        made.close()
        for partition in (0, 2):
            assert journaled(tmp_path / "data", partition) == wanted(worker.payloads, partition)[low[partition] :]
        worker.stop()
