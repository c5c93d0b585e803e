"""Brings what workers have logged into the journal: again and again, a batch of frames becomes rows of each partition.

A batch is done in this order, so that a kill at any time loses and doubles nothing:

1. The rows are appended to the files of their partitions, and synced. Each batch of rows says up to which turn of which
   log it was made.
2. Then the position in the log is written, up to which the worker need not keep its frames.

What follows the position in the log is read again after a restart, and each partition leaves out the turns that it has.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from broker.journal.consumers import Consumers, Progress
from broker.journal.properties import DECODING
from broker.journal.state import read_ends, read_names, write_ends, write_names
from broker.logging import get_logger
from broker.repeated_warning import RepeatedWarning
from storage.data_dir import JOURNAL
from storage.durable import free_disk_bytes, sync_directory
from storage.journal.files import ROLL_BYTES, JournalFull, Oldest, PartitionJournal, Reached
from storage.journal.frames import Made
from storage.journal.queues import Modes, Queues
from storage.journal.rows import Rows
from storage.liveness import SILENT, Signs
from storage.log.follower import durable_lsn, position_path, read_position, write_position
from storage.log.frames import CorruptFrame, Frame, skim_turn
from storage.log.recovery import logs
from storage.log.tail import LogTail, Overtaken, Position
from storage.store import StoreError, Table

BATCH_BYTES: Final = 8 << 20  # of frames, about
BATCH_SECONDS: Final = 0.1  # between the begins of two batches, unless one was full
LOOK_SECONDS: Final = 1.0  # between two looks for logs, and tries on a full disk
POSITION_SECONDS: Final = 1.0  # between two positions that are written: two syncs each
RETENTION_SECONDS: Final = 30.0  # between two looks for old files

log = get_logger("journal")


@dataclass(slots=True)
class Counters:
    """What this process has counted since it was started."""

    rows: int = 0
    read_bytes: int = 0  # of payloads of frames that became rows
    dropped_files: int = 0
    dropped_unread_files: int = 0  # of them: those that a consumer for whom files are kept had not read
    gaps: int = 0  # rows `truncated` that were written
    unfounded: int = 0
    is_full: bool = False
    last_ms: dict[int, int] = field(default_factory=dict)  # by worker: the time of the last turn that was read
    behind: dict[int, int] = field(default_factory=dict)  # by worker: turns that are logged and not journaled


class Retention(NamedTuple):
    """Files are deleted when they are older than `seconds`, or when all take more than `size`, in bytes; those that
    consumers need only when all take more than `held_size`, or when the disk has no room."""

    seconds: float
    size: int
    held_size: int
    spare_disk_bytes: int = 0  # files are deleted while less of the disk is free


class Follower:
    """All logs and all journals of a data directory. One thread calls all methods but `journals`."""

    def __init__(
        self,
        directory: Path,
        workers: int,
        modes: Modes,
        retention: Retention,
        consumers: Consumers,
        *,
        clock: Callable[[], float] = time.time,
        signs: Signs = SILENT,
    ) -> None:
        """`workers` are those that run; logs of others are read first, to their ends. Nothing is opened yet. `signs` of
        life are given while it makes progress, and while it waits for something to do.
        """
        self._directory = directory
        self._workers = workers
        self._modes = modes
        self._retention = retention
        self._consumers = consumers
        self._roll_bytes = min(ROLL_BYTES, retention.size // 8)
        self._clock = clock
        self._signs = signs
        self.counters = Counters()
        self._journals: dict[int, PartitionJournal] = {}
        self._queues = Queues(modes, {})
        self._tails: dict[int, LogTail] = {}
        self._gaps: dict[int, str] = {}  # by worker: why its next rows come after a gap
        self._ends: dict[int, Reached] = {}  # by partition: what was noted last
        self._unsettled: dict[int, Position] = {}  # by worker: what is journaled, and was not written as its position
        self._journaled: dict[int, int] = {}  # by worker: the last turn whose rows can be read
        self._settled_at = 0.0
        self._older_are_busy = False  # logs of workers that do not run any more are not read to their ends
        self._unjournaled: set[int] = set()  # partitions that were told to have changed while nothing was journaled
        self._last_ms = 0  # the time of the turn that was read last
        self._retained_at = 0.0
        self._looked_at = float("-inf")
        self._lost = RepeatedWarning("a log cannot be read")

    @property
    def journals(self) -> Mapping[int, PartitionJournal]:
        """The journals by partition. Any thread may ask."""
        return dict(self._journals)

    def logged(self) -> dict[int, int]:
        """The last turn that each worker has on disk, and so the last that anybody has seen. Any thread may ask."""
        return {worker: durable_lsn(self._directory, worker) for worker in range(self._workers)}

    def has(self, turns: Mapping[int, int]) -> bool:
        """Whether the rows of these turns, by worker, can be read. Of any thread."""
        return all(self._journaled.get(worker, 0) >= lsn for worker, lsn in turns.items())

    def open(self) -> None:
        """Open the journals that are there, or were, and cut off what is torn. Raises OSError."""
        top = self._directory / JOURNAL
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._signs.waiting_for_disk():
            sync_directory(self._directory)
        self._ends = read_ends(self._directory)
        there = {int(path.name) for path in top.iterdir() if path.name.isdecimal() and path.is_dir()}
        for partition in sorted(there | self._ends.keys()):
            with self._signs.waiting_for_disk():
                self._journal(partition)
        self._queues = Queues(self._modes, read_names(self._directory))

    def close(self) -> None:
        """Save the progress of the consumers, and close all files. Raises OSError."""
        self._consumers.save()
        for tail in self._tails.values():
            tail.close()
        for journal in self._journals.values():
            journal.close()

    def run(self, stopping: threading.Event) -> None:
        """Follow until `stopping` is set, and then to the ends of all logs. Raises OSError, StoreError."""
        while not stopping.is_set():
            began = time.monotonic()
            is_busy = self.cycle()
            if not is_busy:
                wait = LOOK_SECONDS if self.counters.is_full else BATCH_SECONDS
                stopping.wait(max(0.0, began + wait - time.monotonic()))
        while self.cycle():
            pass
        self.settle()

    def cycle(self) -> bool:
        """One batch of each log. True if there may be more at once."""
        self._look_for_logs()
        with self._signs.waiting_for_disk():
            self._retain()
            self._leave_room()
        is_busy = False
        for worker, tail in self._tails.items():
            if worker < self._workers and self._older_are_busy:
                break
            try:
                is_busy |= self._follow(worker, tail)
                if self.counters.is_full:
                    self.counters.is_full = False
                    log.warning("the journal goes on: the disk has room again")
            except StoreError as error:
                self._lost.happened(str(error))
            except OSError as error:
                if error.errno not in (ENOSPC, EDQUOT):
                    raise
                return self._is_full(worker, tail, error)
            if worker >= self._workers:
                self._older_are_busy = is_busy
        return is_busy

    def settle(self) -> None:
        """Write up to where each log was journaled. Names and rows are durable by now. Raises OSError."""
        self._settled_at = time.monotonic()
        self._note_ends()
        while self._unsettled:
            worker, position = self._unsettled.popitem()
            with self._signs.waiting_for_disk():
                write_position(position_path(self._directory, worker), position)

    def _note_ends(self) -> None:
        """Write the ends before positions are written: after that, the rows cannot be made from the log again.

        Raises OSError.
        """
        ends = {partition: each for partition, journal in self._journals.items() if (each := journal.reached)}
        if ends == self._ends:
            return
        try:
            with self._signs.waiting_for_disk():
                write_ends(self._directory, ends)
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise
        else:
            self._ends = ends

    def _is_full(self, worker: int, tail: LogTail, error: OSError) -> bool:
        """Make room, or wait. True if there may be room now."""
        tail.close()
        self._unsettled.pop(worker, None)
        # From the position on it is read again; partitions leave out what they have.
        self._gaps.pop(worker, None)
        self._tails[worker] = LogTail(tail.directory, read_position(position_path(self._directory, worker)))
        if self._drop_oldest("the disk is full"):
            return True
        if not self.counters.is_full:
            self.counters.is_full = True
            log.error("the disk is full: nothing is journaled, and the logs wait", reason=str(error))
        return False

    # -- logs

    def _look_for_logs(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        for worker, directory in logs(self._directory):
            if worker not in self._tails:
                self._tails[worker] = LogTail(directory, read_position(position_path(self._directory, worker)))
        # The log of a worker that is no more is older than the one that took its partitions over.
        self._tails = dict(sorted(self._tails.items(), key=lambda each: (each[0] < self._workers, each[0])))

    def _follow(self, worker: int, tail: LogTail) -> bool:
        """One batch of one log. True if it was a full one. Raises JournalFull, OSError, StoreError."""
        up_to = durable_lsn(self._directory, worker) if worker < self._workers else None
        if worker in self._gaps:
            self._tell_gap(worker, tail)
        before = tail.position
        frames = tail.read(up_to, BATCH_BYTES)
        size = 0
        try:
            first = next(frames, None)
        except Overtaken as error:
            after = tail.skip()
            if before is not None and after == before.lsn and self._same(tail.position, before):
                self._lost.happened(str(error))  # nothing can be read behind it yet
                return False
            log.error("the journal has a gap", worker=worker, reason=str(error), next_turn=after + 1)
            self._gaps[worker] = str(error)
            return True
        if first is not None:
            assert tail.position is not None
            size = self._journal_frames(worker, chain((first,), frames), tail.position.log_id)
            self.counters.last_ms[worker] = self._last_ms
        position = tail.position
        if position is not None:
            self.counters.behind[worker] = max(0, (up_to or 0) - position.lsn)
        if position is None or position == before:
            if position is not None:
                self._journaled[worker] = position.lsn
            return False
        self._journaled[worker] = position.lsn
        self._unsettled[worker] = position
        if time.monotonic() - self._settled_at >= POSITION_SECONDS:
            self.settle()
        self.counters.read_bytes += size
        return size >= BATCH_BYTES

    @staticmethod
    def _same(one: Position | None, other: Position | None) -> bool:
        return one is not None and other is not None and one.log_id[:8] == other.log_id[:8]

    def _tell_gap(self, worker: int, tail: LogTail) -> None:
        """Write in each journal that may lack rows of this log that it has a gap before those that follow."""
        self.settle()
        position, before = tail.position, read_position(position_path(self._directory, worker))
        assert position is not None
        now_ms = int(self._clock() * 1000)
        for partition, journal in self._journals.items():
            made = journal.made
            of_log = made is not None and (before is None or made.log_id[:8] == before.log_id[:8])
            if made is None or not of_log or (made.log_id == position.log_id and made.lsn >= position.lsn):
                continue
            rows = Rows(partition, self._queues, DECODING)
            rows.truncate(now_ms, self._gaps[worker])
            self._append(journal, rows, Made(made.store_id, position.log_id, position.lsn))
            self.counters.gaps += 1
        self._unsettled[worker] = position
        self.settle()
        del self._gaps[worker]

    # -- rows

    def _journal_frames(self, worker: int, frames: Iterator[Frame], log_id: bytes) -> int:
        """Append the rows of these frames and sync them; the bytes of their payloads. Raises JournalFull,
        OSError."""
        had: list[Frame] = []
        try:
            self._append_all(_kept_in(had, frames), log_id, strict=True)
        except (CorruptFrame, ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
            log.error("events cannot be read; the others of the batch are", worker=worker, reason=repr(error))
            had += frames
            for frame in had:
                self._append_all([frame], log_id, strict=False)
        if self._queues.changed:
            with self._signs.waiting_for_disk():
                write_names(self._directory, self._queues.names)
            self._queues.changed = False
        return sum(len(frame.payload) for frame in had)

    def _append_all(self, frames: Iterable[Frame], log_id: bytes, *, strict: bool) -> None:
        """Append the rows of frames. Without `strict`, an unreadable one is a gap of the partitions it may be about."""
        batch = _Batch(self, log_id)
        lsn = 0
        try:
            for frame in frames:
                self._signs.beat()
                lsn = frame.lsn
                time_ms, changes, events, payload = skim_turn(frame.payload)
                self._last_ms = time_ms
                batch.add(lsn, time_ms, changes, events, payload)
            made = batch.made()
        except (CorruptFrame, ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
            if strict:
                raise
            made = self._unreadable(lsn, log_id, error)
        for journal, store_id, rows, record_batch in made:
            if journal.made is None or journal.made.store_id != store_id:
                journal.begin_epoch(self._clock())
            self._append(journal, rows, Made(store_id, log_id, lsn), record_batch)

    def _unreadable(self, lsn: int, log_id: bytes, error: Exception) -> list[tuple[PartitionJournal, bytes, Rows, Any]]:
        found = []
        for partition, journal in self._journals.items():
            if journal.made is not None and journal.made.log_id == log_id and journal.made.lsn < lsn:
                rows = Rows(partition, self._queues, DECODING)
                rows.truncate(int(self._clock() * 1000), f"the events of turn {lsn} cannot be read: {error!r}")
                found.append((journal, journal.made.store_id, rows, None))
                self.counters.gaps += 1
        return found

    def _append(self, journal: PartitionJournal, rows: Rows, made: Made, batch: Any = None) -> None:
        times = rows.times_ms
        if batch is None:
            batch = rows.batch(journal.end)
        with self._signs.waiting_for_disk():
            journal.append(batch, min(times), max(times), made, self._clock())
            # One partition after the other: what is synced is left out when frames are read again after a failure.
            journal.sync(self._clock())
        self.counters.rows += len(rows)

    def _journal(self, partition: int) -> PartitionJournal:
        found = self._journals.get(partition)
        if found is None:
            if type(partition) is not int or not 0 <= partition < 1 << 31:
                raise ValueError(f"{partition!r} is no partition")
            path = self._directory / JOURNAL / str(partition)
            found = PartitionJournal(path, roll_bytes=self._roll_bytes, noted=self._ends.get(partition))
            for damage in found.damage:
                log.error("a journal file is damaged", partition=partition, reason=str(damage))
            self._journals[partition] = found
        return found

    # -- retention

    def _retain(self) -> None:
        """Delete old files. Raises OSError."""
        now_s = self._clock()
        if abs(now_s - self._retained_at) < RETENTION_SECONDS:
            return
        self._retained_at = now_s
        before_s = now_s - self._retention.seconds
        for partition, journal in self._journals.items():
            with suppress(JournalFull):  # what is old goes as soon as there is room for its successor
                journal.retire(before_s, now_s)
            while (oldest := journal.oldest()) is not None and oldest.changed_s < before_s:
                if self._is_needed(partition, oldest):
                    break
                self._drop(partition, "older than journal.retention_hours")
        while self._size() > self._retention.size:
            if not self._drop_oldest("journal.retention_bytes is reached", spares_needed=True):
                break
        while self._size() > self._retention.held_size:
            if not self._drop_oldest("journal.held_bytes is reached"):
                break
        self._consumers.save()

    def _leave_room(self) -> None:
        """Messages need the room of a disk that is almost full. Raises OSError."""
        while free_disk_bytes(self._directory) < self._retention.spare_disk_bytes:
            if not self._drop_oldest("the disk is almost full"):
                return

    def _size(self) -> int:
        return sum(journal.bytes for journal in self._journals.values())

    def _is_needed(self, partition: int, oldest: Oldest) -> bool:
        return self._consumers.is_needed(partition, Progress(oldest.next_epoch, oldest.next_offset))

    def _drop_oldest(self, reason: str, *, spares_needed: bool = False) -> bool:
        """Delete the oldest file of all partitions. False if there are none but those that are written, or needed."""
        candidates = [
            (oldest.changed_s, partition)
            for partition, journal in self._journals.items()
            if (oldest := journal.oldest()) is not None and not (spares_needed and self._is_needed(partition, oldest))
        ]
        if not candidates:
            return False
        self._drop(min(candidates)[1], reason)
        return True

    def _drop(self, partition: int, reason: str) -> None:
        journal = self._journals[partition]
        oldest = journal.oldest()
        is_needed = oldest is not None and self._is_needed(partition, oldest)
        path = journal.drop_oldest()
        self.counters.dropped_files += 1
        if is_needed:
            self.counters.dropped_unread_files += 1
            log.error("journal file deleted that a consumer had not read", file=str(path), reason=reason)
        else:
            log.warning("journal file deleted", file=str(path), reason=reason)


class _Batch:
    """The rows of some frames of one log, by partition and store."""

    def __init__(self, follower: Follower, log_id: bytes) -> None:
        self._follower = follower
        self._log_id = log_id
        self._rows: dict[tuple[int, bytes], Rows] = {}

    def add(self, lsn: int, time_ms: int, changes: Any, events: Any, payload: bytes | memoryview | None) -> None:
        """Add the rows of a turn, as `Rows.add` does, for all partitions."""
        follower = self._follower
        by_partition = dict(changes)
        for partition, store_id, hints in events:
            operations = by_partition.pop(partition, ())
            follower._unjournaled.discard(partition)
            journal = follower._journal(partition)
            if not self._is_new(journal, lsn):
                follower._queues.hear_all(hints)  # the process may have been killed before it had written them
                continue
            key = partition, store_id
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = Rows(partition, follower._queues, DECODING)
            rows.add(time_ms, operations, hints, payload)
        for partition, operations in by_partition.items():
            self._unjournaled(partition, lsn, time_ms, operations)

    def _is_new(self, journal: PartitionJournal, lsn: int) -> bool:
        made = journal.made
        return made is None or made.log_id != self._log_id or made.lsn < lsn

    def _unjournaled(self, partition: int, lsn: int, time_ms: int, operations: Any) -> None:
        """A worker that does not journal has changed queues."""
        follower = self._follower
        journal = follower._journals.get(partition)
        if partition in follower._unjournaled or journal is None or journal.made is None:
            return
        if not self._is_new(journal, lsn) or not any(table == Table.QUEUE for _, table, _ in operations):
            return
        follower._unjournaled.add(partition)
        key = partition, journal.made.store_id
        rows = self._rows.setdefault(key, Rows(partition, follower._queues, DECODING))
        rows.truncate(time_ms, f"from turn {lsn} on, messages came and went without a journal")
        follower.counters.gaps += 1

    def made(self) -> list[tuple[PartitionJournal, bytes, Rows, Any]]:
        """Return the rows to append. If a partition has rows of two stores, the later ones begin an epoch."""
        found = []
        for (partition, store_id), rows in self._rows.items():
            self._follower.counters.unfounded += rows.unfounded
            if not len(rows):
                continue
            journal = self._follower._journal(partition)
            is_same = journal.made is not None and journal.made.store_id == store_id
            found.append((journal, store_id, rows, rows.batch(journal.end if is_same else 0)))
        return found


def _kept_in(had: list[Frame], frames: Iterable[Frame]) -> Iterator[Frame]:
    for frame in frames:
        had.append(frame)
        yield frame
