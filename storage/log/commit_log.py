"""The worker's side of its log: one frame and one sync for each turn, and the checkpoints.

When a segment's worth of turns was logged, or the oldest of them is some seconds old, the stores freeze their young
changes, and the checkpointer writes the net effect of these turns to the tables. When it is done, the stores drop what
was frozen, and segments whose frames are all in the tables are free.

While the checkpointer is behind, further segments are made, and commits wait for it the longer the more of the allowed
size is used. If a commit has waited in vain, the stores accept no further messages until a checkpoint is done. Settling
goes on.

A partition whose tables have no room for a checkpoint accepts nothing, and its changes stay frozen until a later one
finds room (`shortage`). Those of the others go on to their tables. But the log keeps all frames since, so the others
accept nothing either once it is as long as it may be. The same holds for tables that have no room when the log is
replayed: so a worker can start on a full disk.
"""

import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from storage.durable import free_disk_bytes
from storage.liveness import SILENT, STALL_SECONDS, Signs
from storage.lmdb_store import PAGE_BYTES, ROOM_BYTES, LmdbStore, store_error
from storage.log.changes import Layer
from storage.log.checkpoint_state import NEXT, Event, State
from storage.log.checkpointing import Checkpointer, Done, Ended, Prepared
from storage.log.follower import Follower
from storage.log.frames import LOG_ID_BYTES, TablesState, decode_turn
from storage.log.logged_store import YOUNG_FACTOR, LoggedStore
from storage.log.reading import LogDamaged, LogEnd, LogOnDisk
from storage.log.recovery import Behind, bring_up, put_aside
from storage.log.segments import segment_numbers
from storage.log.shortage import Shortage
from storage.log.tables import LogPosition, position, write_net_effect, write_position
from storage.log.writer import LogWriter, NoSegment, make_log
from storage.records import STORE_ID_KEY, CorruptRecord, decode_document
from storage.store import StoreDamaged, StoreError, StoreFull, Table

MIB = 1 << 20
SEGMENT_BYTES = 8 * MIB
LOG_BYTES = 64 * MIB
ENDS_MAX = 10  # ends of the checkpointer without a checkpoint, after which the worker ends, too
CHANGED_KEYS = 32_768  # with so many young changes, too, a checkpoint begins
LOOKS = 8  # during a segment's worth of young changes their keys are counted so often
OLDEST_SECONDS = 2.0  # young changes that are older are checkpointed, however few they are
LONGEST_WAIT_SECONDS = 5.0  # of one commit for the checkpointer; after that nobody waits until a checkpoint is done
SLOWEST_BYTES_PER_SECOND = 32 * MIB  # of frames, when the log is almost as long as it may be
_DUE, _UNDER_WAY, _STUCK = State.DUE, State.UNDER_WAY, State.STUCK  # to look up a member takes as long as a call


class LogLimits(NamedTuple):
    """Bytes of a segment, and of what the tables do not have yet: with more than these, a commit waits for a
    checkpoint, and if it has waited in vain, no messages are accepted."""

    segment_bytes: int = SEGMENT_BYTES
    log_bytes: int = LOG_BYTES

    @classmethod
    def of(cls, log_bytes: int, map_size_bytes: int) -> "LogLimits":
        """Small segments for small stores: until a checkpoint, nobody knows how much room the young changes leave."""
        most = min(log_bytes // 8, map_size_bytes // 16)
        return cls(min(SEGMENT_BYTES, max(MIB, most // MIB * MIB)), log_bytes)


DEFAULT_LIMITS = LogLimits()


class LogUsage(NamedTuple):
    young_bytes: int  # of frames that are not in the tables, and of what they left unused of their segments
    log_bytes: int  # see LogLimits
    kept_bytes: int  # of segments that only the journal needs
    lost_segments: int  # used again before the journal had read them, since the worker was started
    segments: int
    disk_bytes: int  # of all segments
    checkpoints: int  # done since the worker was started
    waited_seconds: float  # of commits, for the checkpointer
    checkpointer_starts: int
    checkpointer_pid: int | None


class CommitLog:
    """The log of one worker, and the stores of its partitions.

    After a StoreError the log and its stores must not be used any more: a failed sync is never tried again.
    """

    def __init__(
        self,
        directory: Path,
        worker: int,
        tables: Mapping[int, LmdbStore],
        *,
        map_size_bytes: int,
        limits: LogLimits = DEFAULT_LIMITS,
        largest_record_bytes: int = MIB,
        works_on: Callable[[int], None] = lambda partition: None,
        follower: Follower | None = None,
        signs: Signs = SILENT,
        stall_seconds: float = STALL_SECONDS,
        on_stall: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Make the log if it is missing, replay it, and attach the tables, which are open with `attached=True`.

        With a `follower`, the stores take hints for the journal. `works_on` is called with the partition whose tables
        are about to be changed, or could not be. `signs` of life are given while the log is replayed, and while the
        checkpointer is waited for. If that gives none for `stall_seconds`, it is killed, and `on_stall` is called with
        the seconds. Raises StoreError, StoreDamaged.
        """
        self._directory = directory
        self._worker = worker
        self._limits = limits
        self._works_on = works_on
        self._follower = follower
        self._signs = signs
        self._stall_seconds = stall_seconds
        self._store_ids: dict[int, bytes] = {}  # with a follower: by partition
        self._hints_are_due = False  # they are logged, even if nothing has changed
        self._young_bytes = 0  # that the log became longer by since the last checkpoint began
        self._look_at_bytes = limits.segment_bytes // LOOKS  # with so many, see whether a checkpoint is due
        # By partition: bytes of the log with what is frozen. It is longer where an earlier checkpoint found no room.
        self._frozen_bytes = dict.fromkeys(tables, 0)
        self.state = State.NONE
        self._asked: list[int] = []  # the partitions whose tables are to change in the checkpoint that is being made
        self._shortages: dict[int, Shortage] = {}  # of partitions whose tables had no room for their last checkpoint
        self._has_no_spare = False  # the disk has no room for a further segment, and one is missing
        self._begun = 0  # segments, when that was looked at
        # By partition, as of the last checkpoint: see `LmdbStore.tail_bytes`, `LmdbStore.adjacent_bytes`.
        self._tail_bytes: dict[int, int] = {}
        self._adjacent_bytes: dict[int, int] = {}
        self._changed: list[LoggedStore] = []  # with staged changes
        self._wants_report = False  # messages were refused for want of adjacent pages
        self._ends = 0  # how often the checkpointer ended since a checkpoint was done
        self._checkpointed_at = 0.0  # when the last checkpoint was done
        self._poll: select.epoll | None = None
        self._polled: int | None = None
        self.waited_seconds = 0.0  # of commits, for the checkpointer
        self.checkpoints = 0
        self._tables = dict(tables)
        self.behind: dict[int, Behind] = {}  # partitions whose tables had no room when the log was replayed
        self.torn = ""  # what was found behind the last turn of a log that was needed: see `LogEnd`
        self.put_aside = ""  # what was wrong with a log that was found and not needed
        try:
            self._writer = self._open()
        except OSError as error:
            raise store_error(directory.parent.parent, "the log cannot be opened", error) from error
        self._frozen_lsn = self._writer.lsn  # of the last frame in a checkpoint that was made or is being made
        self._look_for_segments()
        self._follow()
        self._look_at_tables()
        self.stores = {
            partition: LoggedStore(partition, store, self, self.behind[partition].layer)
            if partition in self.behind
            else LoggedStore(partition, store, self)
            for partition, store in tables.items()
        }
        for partition, behind in self.behind.items():
            self._frozen_bytes[partition] = behind.log_bytes
            self._lacks_room(partition, behind.problem)
        if follower is not None:
            for partition, logged in self.stores.items():
                logged.hints = []
                self._store_ids[partition] = _store_id(tables[partition])
        paths = {partition: store.path for partition, store in tables.items()}
        self.checkpointer = Checkpointer(
            paths, self._log_id, worker, map_size_bytes, largest_record_bytes, stall_seconds, on_stall, signs
        )

    # -- opening

    def _open(self) -> LogWriter:
        directory = self._directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for partial in directory.glob("*.partial"):  # of a process that ended meanwhile
            partial.unlink()
        end = self._replay()
        if end is None:
            self._log_id = os.urandom(LOG_ID_BYTES)
            with self._signs.waiting_for_disk():
                make_log(directory, self._limits.segment_bytes)
        lsn = 0 if end is None else end.lsn
        tables = TablesState(lsn, dict.fromkeys(self._tables, lsn))
        for partition, behind in self.behind.items():
            at = position(self._tables[partition])
            assert at is not None
            tables.positions[partition] = at.lsn
            tables = tables._replace(lsn=min(tables.lsn, behind.lsn))
        followed_lsn = None if self._follower is None else self._follower.position(self._log_id)
        with self._signs.waiting_for_disk():
            writer = LogWriter(
                directory, self._worker, self._log_id, self._limits.segment_bytes, tables, end, followed_lsn
            )
        # The log exists before any store refers to it.
        for store in self._tables.values():
            if position(store) is None:
                write_position(store, LogPosition(self._log_id, self._worker, lsn))
                store.commit()
        return writer

    def _replay(self) -> LogEnd | None:
        """Bring the tables up to date from the log; None if there is no log, which is all right for new tables."""
        is_needed = any(position(store) is not None for store in self._tables.values())
        if not segment_numbers(self._directory) and not is_needed:
            return None
        try:
            log = LogOnDisk(self._directory, self._worker, self._signs)
            self._log_id = log.log_id
            end, self.behind = bring_up(log, self._tables, leave=False, works_on=self._works_on)
            self.torn = end.torn if is_needed else ""  # whoever has brought up the tables has told it
            followed_lsn = 0 if self._follower is None else self._follower.position(log.log_id)
            if followed_lsn <= end.lsn:
                return end
            # Other turns would get the numbers of those that the journal has, which would leave them out.
            why = f"{self._directory}: ends with turn {end.lsn}, but the journal has turns up to {followed_lsn}"
            for behind in self.behind.values():
                raise StoreFull(f"{why}, and the log is needed until there is room: {behind.problem}")
            self._put_aside(why)
        except LogDamaged as error:
            if is_needed:
                raise
            # All tables have their latest changes, as after a clean stop, or the log was never begun.
            self._put_aside(str(error))
        return None

    def _put_aside(self, why: str) -> None:
        """Begin another log. The tables have all that is in this one."""
        for store in self._tables.values():
            if position(store) is not None:
                write_position(store, None)
                store.commit()
        self.put_aside = f"{why}; it is now {put_aside(self._directory)}"
        self._directory.mkdir(mode=0o700)

    # -- commits

    def commit(self, time_ms: int = 0) -> bool:
        """Log what the stores have staged, in one frame, and sync it. False if nothing was staged.

        Raises StoreError, StoreDamaged.
        """
        self.end_commit()
        if not self.begin_commit(time_ms):
            return False
        self.end_commit()
        return True

    def begin_commit(self, time_ms: int) -> bool:
        """Begin to do what `commit` does, without waiting for the disk: it is done when `is_committing` is false.

        The stores may stage more meanwhile, which waits for the next commit. The one before must be done.
        Raises StoreError, StoreDamaged.
        """
        if not self._changed and not self._hints_are_due:
            return False
        assert not self._writer.is_writing
        changes = [(store.partition, store.take_staged()) for store in self._changed]
        hints = self._take_hints(changes)
        try:
            try:
                size_bytes = self._writer.begin_turn(time_ms, changes, hints)
            except NoSegment:  # the disk is full, but a checkpoint frees segments
                self._writer.take_kept()
                while self.is_checkpointing and not self._writer.has_free and self.checkpointer.is_running:
                    self.hear()
                size_bytes = self._writer.begin_turn(time_ms, changes, hints)
        except OSError as error:
            self._failed("commit", error)
        if self._writer.begun != self._begun:
            self._look_for_segments()
        self._changed.clear()  # not before: a checkpoint that is done meanwhile begins none of what is not in the log
        self._young_bytes += size_bytes
        self._tell_durable()
        if self.is_checkpointing:
            self._wait(size_bytes)
        elif self._young_bytes >= self._look_at_bytes:
            self._checkpoint_if_due()
        if self.state is _DUE:  # it begins between two commits
            self.end_commit()
        return True

    @property
    def together_bytes(self) -> int:
        """A commit of so many bytes takes no further turns: a frame that is larger than a segment needs new blocks."""
        return self._limits.segment_bytes // 2

    @property
    def is_committing(self) -> bool:
        """A commit was begun and is not on disk yet."""
        return self._writer.is_writing

    def end_commit(self, wait: bool = True) -> None:
        """Wait until the commit that was begun is done, or only see whether it is. Raises StoreError."""
        try:
            self._writer.end_turn(wait)
        except OSError as error:
            self._failed("commit", error)
        self._tell_durable()
        if self.state is _DUE:
            self._checkpoint_soon()

    # -- the process that follows the log

    def _take_hints(self, changes: list[Any]) -> list[Any]:
        """The hints of each partition that has some, or has changed: the partition, the id of its store, and they."""
        self._hints_are_due = False
        if self._follower is None:
            return []
        changed = {partition for partition, _ in changes}
        return [
            (partition, self._store_ids[partition], store.take_hints())
            for partition, store in self.stores.items()
            if store.hints or partition in changed
        ]

    @property
    def lost_segments(self) -> int:
        """The number of segments that were used again before the follower had read them."""
        return self._writer.lost_segments

    def _tell_durable(self) -> None:
        if self._follower is not None and not self._writer.is_writing:
            self._follower.durable.set(self._writer.lsn)

    def _follow(self) -> None:
        """See how far the follower is. If it is too far behind, it loses the oldest segments."""
        if self._follower is None:
            return
        self._tell_durable()
        self._writer.followed_lsn = self._follower.position(self._log_id)
        self._writer.release()
        while self._writer.kept_bytes > self._follower.backlog_bytes:
            self._writer.take_kept()
        while self._writer.kept_bytes and self._follower.takes_room():
            self._writer.take_kept()
            self._writer.release()

    def changed(self, store: LoggedStore) -> None:
        """The store has staged its first change of this turn."""
        self._changed.append(store)

    def unchanged(self, store: LoggedStore) -> None:
        """The store has dropped what it had staged."""
        self._changed.remove(store)

    def _failed(self, doing: str, error: OSError) -> NoReturn:
        self._writer.failure = error
        raise store_error(self._directory, doing, error) from error

    # -- checkpoints

    @property
    def is_checkpointing(self) -> bool:
        """A checkpoint was begun and is not done yet."""
        return self.state >= _UNDER_WAY

    def _step(self, event: Event) -> None:
        self.state = NEXT[self.state][event]

    def watch(self, poll: select.epoll) -> None:
        """Let `poll` wait for commits and the checkpointer: `serve` is to be called for their descriptors."""
        self._poll = poll
        if self._writer.descriptor is not None:
            poll.register(self._writer.descriptor, select.EPOLLIN | select.EPOLLET)
        self._look()

    def _look(self) -> None:
        """Register the checkpointer's descriptor, which is another one after each of its starts."""
        descriptor = self.checkpointer.descriptor
        if self._poll is None or descriptor == self._polled:
            return
        if self._polled is not None:
            with suppress(OSError):  # it is closed, or has been used for something else since
                self._poll.unregister(self._polled)
        if descriptor is not None:
            self._poll.register(descriptor, select.EPOLLIN)
        self._polled = descriptor

    def serve(self, descriptor: int) -> bool:
        """See whether the commit is done, or hear the checkpointer, if this is a descriptor of theirs.

        Raises StoreError, StoreDamaged.
        """
        if descriptor == self._writer.descriptor:
            self.end_commit(wait=False)
            return True
        if descriptor != self._polled:
            return False
        if self.checkpointer.has_answered():  # a turn that came between this event and its service may have heard it
            self.hear()
        return True

    def beat(self) -> None:
        """To be called each second: start the checkpointer if it has ended, kill it if it hangs, and begin a checkpoint
        that is due."""
        self._follow()
        self.checkpointer.look()
        self._hints_are_due = any(store.hints for store in self.stores.values())
        if not self.checkpointer.is_running:
            self._writer.not_prepared()
            self.checkpointer.start()
            if self.is_checkpointing:
                self._request()
        if self.checkpointer.is_running:
            if self._writer.wants_segment:
                self.checkpointer.prepare(self._writer.next_path(), self._limits.segment_bytes)
            elif self._writer.wants_spare:
                self.checkpointer.prepare(self._writer.spare_path(), self._limits.segment_bytes)
        if not self._young_bytes and not self.is_checkpointing:
            self.checkpointer.release_memory()
        is_old = self._young_bytes > 0 and time.monotonic() - self._checkpointed_at >= OLDEST_SECONDS
        if not self.is_checkpointing and (is_old or self._wants_report or any(map(self._may_fit, self._shortages))):
            self._checkpoint_soon()
        self._look()

    def _checkpoint_soon(self) -> None:
        if self.is_committing or self._changed:
            self._step(Event.WANTED)
        else:
            self.begin_checkpoint()

    def _checkpoint_if_due(self) -> None:
        """Begin a checkpoint of a segment's worth of young changes, or of very many small ones.

        A scan reads past all keys that were deleted since the last checkpoint began.
        """
        changed_keys = sum(store.changed_keys() for store in self.stores.values())
        if self._young_bytes >= self._limits.segment_bytes or changed_keys >= CHANGED_KEYS:
            self._checkpoint_soon()
        else:
            self._look_at_bytes = self._young_bytes + self._limits.segment_bytes // LOOKS

    def begin_checkpoint(self) -> None:
        """Let the checkpointer write to the tables what is young, and what an earlier checkpoint found no room for.

        All of that is in the log and on disk, and no checkpoint is being made.
        """
        assert not self._changed
        assert not self.is_committing
        assert not self.is_checkpointing
        self._asked = [partition for partition in self.stores if self._may_fit(partition)]
        if not self._asked:
            self._step(Event.FUTILE)
            self._look_at_bytes = self._young_bytes + self._limits.segment_bytes // LOOKS
            return
        for partition, shortage in self._shortages.items():
            shortage.changed_keys += self.stores[partition].changed_keys()
        for partition, store in self.stores.items():
            store.freeze()
            self._frozen_bytes[partition] += self._young_bytes
        self._young_bytes = 0
        self._look_at_bytes = self._limits.segment_bytes // LOOKS
        self._frozen_lsn = self._writer.lsn
        self._step(Event.BEGUN)
        self.checkpointer.start()
        self._request()

    def _may_fit(self, partition: int) -> bool:
        """False while the next checkpoint of its tables would most probably find no room again."""
        shortage = self._shortages.get(partition)
        if shortage is None:
            return True
        store = self.stores[partition]
        room_bytes = store.tables.room_bytes()
        return shortage.is_due(time.monotonic(), room_bytes, store.changed_keys(), self._has_no_spare)

    def _request(self) -> None:
        layers = {}
        for partition in self._asked:
            layer = self.stores[partition].frozen_layer
            if layer:
                layers[partition] = layer
        try:
            self.checkpointer.checkpoint(layers, self._frozen_lsn, self._writer.tables.positions)
        except OSError as error:
            self._failed("checkpoint", error)
        self._look()

    def hear(self) -> None:
        """Wait for the checkpointer's answers and take them. Raises StoreError, StoreDamaged."""
        try:
            answers = self.checkpointer.answers()
        except StoreError:
            if self.checkpointer.works_on is not None:
                self._works_on(self.checkpointer.works_on)
            raise
        for answer in answers:
            match answer:
                case Done():
                    self._done(answer)
                case Prepared():
                    self._prepared(answer)
                case Ended(how):
                    self._ends += 1  # `beat` starts it again
                    if self._ends == ENDS_MAX:
                        raise StoreError(f"{self._directory}: the checkpointer ended {ENDS_MAX} times: {how}")
        self._look()

    def _prepared(self, prepared: Prepared) -> None:
        """Use the segment. If it was not made, `beat` lets it be made again."""
        if prepared.problem is not None and not self._writer.has_free:
            self._writer.take_kept()
        if prepared.problem is None:
            self._writer.prepared()
        else:
            self._writer.not_prepared()
        self._look_for_segments()
        self._has_no_spare |= prepared.problem is not None and not self._writer.has_free

    def _look_for_segments(self) -> None:
        self._begun = self._writer.begun
        self._has_no_spare = (
            not self._writer.has_spares and free_disk_bytes(self._directory) < self._limits.segment_bytes
        )

    def _done(self, done: Done) -> None:
        assert done.lsn == self._frozen_lsn
        now_s = time.monotonic()
        problems = {full.partition: full.problem for full in done.full}
        for partition in self._asked:
            store = self.stores[partition]
            problem = problems.get(partition)
            if problem is None:
                store.thaw()
                self._frozen_bytes[partition] = 0
                self._shortages.pop(partition, None)
            else:
                store.tables_changed()
                self._lacks_room(partition, problem)
        lsn = self._writer.tables.lsn if self._shortages else done.lsn
        self._writer.tables = TablesState(lsn, done.positions)
        self._adjacent_bytes = done.adjacent_bytes
        self._step(Event.DONE)
        self._wants_report = False
        self._ends = 0
        self._checkpointed_at = now_s
        self.checkpoints += not done.full
        self._look_at_tables()
        self._writer.release()
        self._follow()
        self._look_for_segments()
        self._checkpoint_if_due()

    def _lacks_room(self, partition: int, problem: str) -> None:
        """What is frozen of it found no room in its tables."""
        shortage = self._shortages.setdefault(partition, Shortage())
        room_bytes = self._tables[partition].room_bytes()
        shortage.failed(problem, time.monotonic(), room_bytes, self._frozen_bytes[partition])

    def _look_at_tables(self) -> None:
        self._tail_bytes = {partition: store.tail_bytes() for partition, store in self._tables.items()}

    def _wait(self, size_bytes: int) -> None:
        """After a frame of this size, wait for the checkpointer if the log is long: the longer it is, the longer.

        So turns that write much become as slow as the checkpointer, before the log is as long as it may be.
        """
        segment_bytes, log_bytes = self._limits
        excess = self.young_bytes() - 3 * segment_bytes
        if excess <= 0 or self.state is _STUCK or self._shortages or self.checkpointer.descriptor is None:
            return  # nothing becomes shorter by waiting, or nobody would answer
        full = excess / max(1, log_bytes - 3 * segment_bytes)
        longest = min(LONGEST_WAIT_SECONDS, self._stall_seconds / 3)  # this process is watched, too, while it waits
        seconds = longest if full >= 1 else full * size_bytes / SLOWEST_BYTES_PER_SECOND
        began = time.monotonic()
        until = began + min(seconds, longest)
        while self.is_checkpointing and (left := until - time.monotonic()) > 0:
            if self.checkpointer.has_answered(left):
                self.hear()
                if self.checkpointer.descriptor is None:
                    break
        waited = time.monotonic() - began
        if waited >= longest and self.is_checkpointing:
            self._step(Event.WAITED_IN_VAIN)
        self.waited_seconds += waited

    # -- what the stores ask

    @property
    def lsn(self) -> int:
        """That of the last turn."""
        return self._writer.lsn

    def young_bytes(self) -> int:
        """Bytes of frames that are not in the tables, and of what they left unused of their segments."""
        return self._young_bytes + max(self._frozen_bytes.values(), default=0)

    def unwritten_bytes(self, partition: int) -> int:
        """Bytes of frames that the tables of this partition lack; the frames may have changes of others, too."""
        return self._young_bytes + self._frozen_bytes[partition]

    def shortage(self, partition: int) -> str | None:
        """Why nothing of this partition is accepted now."""
        shortage = self._shortages.get(partition)
        if shortage is not None:
            return f"its store has no room: {shortage.problem}"
        if self._has_no_spare:
            return "the disk has no room for the log"
        if (self._shortages or self.state is _STUCK) and self.young_bytes() > self._limits.log_bytes:
            full = ", ".join(map(str, self._shortages))
            why = (
                f"partitions without room keep it from being shortened: {full}"
                if full
                else "the checkpointer is behind"
            )
            return f"the log has store.log_bytes: {why}"
        return None

    def accepts(self, partition: int, added_bytes: int, pages: int) -> bool:
        """True if records of `added_bytes` in all and this number of other pages can be stored.

        What is young will need room in the tables, too, and adjacent pages if it is large.
        """
        if (self._shortages or self.state is _STUCK or self._has_no_spare) and self.shortage(partition) is not None:
            return False
        unwritten_bytes = self._young_bytes + self._frozen_bytes[partition]
        needed = YOUNG_FACTOR * (unwritten_bytes + added_bytes) + pages * PAGE_BYTES
        if self._tail_bytes[partition] - needed > ROOM_BYTES:
            return True
        if self._adjacent_bytes.get(partition, 0) >= needed:
            return True
        self._wants_report = True
        return False

    def usage(self) -> LogUsage:
        """For metrics."""
        sizes = self._writer.sizes()
        return LogUsage(
            young_bytes=self.young_bytes(),
            log_bytes=self._limits.log_bytes,
            kept_bytes=self._writer.kept_bytes,
            lost_segments=self._writer.lost_segments,
            segments=len(sizes),
            disk_bytes=sum(sizes),
            checkpoints=self.checkpoints,
            waited_seconds=self.waited_seconds,
            checkpointer_starts=self.checkpointer.starts,
            checkpointer_pid=self.checkpointer.pid,
        )

    def read_again(self, partition: int) -> Layer:
        """What the partition's turns since the last checkpoint began have changed. Raises StoreError."""
        self.end_commit()
        layer = Layer()
        for frame in LogOnDisk(self._directory, self._worker).turns(self._frozen_lsn):
            _, changes, _ = decode_turn(frame.payload)
            for number, operations in changes:
                if number == partition:
                    layer.apply(operations)
        return layer

    def check(self) -> None:
        """Assert the invariants of the log and its stores between two calls, unless a write has failed.

        This takes time in proportion to what is young.
        """
        writer = self._writer
        if writer.failure is not None:
            return
        writer.check()
        stores = self.stores
        assert self._shortages.keys() <= stores.keys()
        staged = [store for store in stores.values() if store.dirty]
        assert len(self._changed) == len(staged), "a store is listed twice, or is not listed"
        assert all(store in self._changed for store in staged)
        frozen = {partition for partition, store in stores.items() if store.is_frozen}
        if self.is_checkpointing:
            assert frozen == stores.keys()
            assert self._asked, "a checkpoint of nothing is being made"
        else:
            assert frozen == self._shortages.keys()
        assert all(count >= 0 if partition in frozen else not count for partition, count in self._frozen_bytes.items())
        assert self._frozen_lsn <= writer.lsn
        committed = [store for store in stores.values() if not store.dirty]
        assert self._young_bytes or not any(store.changed_keys() for store in committed), "young changes do not count"

    # -- the end

    def close(self) -> None:
        """Bring the tables up to date, detach them, and close all. Nothing is staged. Raises StoreError.

        Those without room stay attached: the next process replays the log.
        """
        self.end_commit()
        while self.is_checkpointing and self.checkpointer.is_running:
            self.hear()
        self.checkpointer.close()
        for store in self.stores.values():
            store.freeze()
            with suppress(StoreFull):
                write_net_effect(store.tables, store.frozen_layer.net_effect())
                write_position(store.tables, None)
                store.tables.commit()
        self.close_files()

    def close_files(self) -> None:
        """Without `close`, the next process replays the log."""
        for store in self.stores.values():
            store.tables.close()
        self._writer.close()


def _store_id(tables: LmdbStore) -> bytes:
    """The id by which the journal knows the store of these tables. Raises StoreDamaged if it cannot be read."""
    try:
        found: bytes = decode_document(tables.get(Table.META, STORE_ID_KEY) or b"")
    except CorruptRecord as error:
        raise StoreDamaged(f"{tables.path}: META {STORE_ID_KEY.decode()}: {error}") from error
    return found
