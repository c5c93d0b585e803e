"""The message ids that one entity has accepted and whose windows have not ended, by digest; a log-structured store.

    DUPLICATE_LOG     the ids of each send, appended in order, which is cheap. In memory they are a dict, `recent`.
    DUPLICATE_RUNS    when the log has many ids, they are cut off and become a sorted run: see `storage.seen_runs`.
                      Several runs of one level are merged into one of the next, without ids whose windows have ended.

Random places of the store are never written, and are read only for ids that a run's filter does not exclude. Cutting,
merging and freeing are jobs, which are done in steps beside other work. One commit makes the result of a job complete,
so that lookups search it, and ends the use of what it was made of. If the process stops before that, the job begins
again at the next start, and its incomplete result is freed. A run whose last window has ended is freed without reading
its ids.

An id may be in several places, if it was accepted again after its window had ended. Times do not go backwards, so at
most one of its windows has not ended.
"""

from collections.abc import Generator, Sequence

from protocol.extension import extension
from storage.quarantine import quarantine
from storage.records import (
    DIGEST_BYTES,
    NEVER,
    CorruptRecord,
    RunManifest,
    decode_manifest,
    decode_rows,
    decode_seen,
    encode_manifest,
    encode_rows,
    encode_seen,
    entity_key,
    log_key,
    run_key,
    unpack_log_key,
    unpack_run_key,
)
from storage.seen_runs import Probes, Run, RunReader, RunWriter, SeenMemory, free_run, merged
from storage.store import Store, Table

# Ids may stay this long after their windows have ended. Else an entity with little to do would write to disk for each
# id.
PURGE_EVERY_MS = 1000
# The longest window that an entity may have.
LONGEST_WINDOW_MS = 7 * 24 * 3600 * 1000
_STORED_BYTES = 48  # bytes of an id in a run, at most
_PAGE = 64  # records read at once

# Jobs, the most urgent first. The others are merges, by the level of the runs that they merge.
_FREE = -2
_CUT = -1

Job = Generator[int, None, None]  # yields the approximate number of ids that it has worked on since the last yield


class SeenIds:
    """The ids of one entity. Before the first lookup only the manifests of runs are read."""

    def __init__(self, store: Store, memory: SeenMemory, entity_id: int, now_ms: int) -> None:
        self._store = store
        self._memory = memory
        self._limits = memory.limits
        self._entity_id = entity_id
        self._now_ms = now_ms
        self._recent: dict[bytes, bytes] = {}  # digest -> row, for ids in the log
        self._cut_off: dict[bytes, bytes] = {}  # as `recent`, for ids that are being made a run
        self._earliest_ms, self._latest_ms = NEVER, 0  # ends of windows in `recent`
        self._log_is_read = False
        self._next_row = 0  # in the log, once the log is read
        self._next_run = 1
        self._log_start = 0  # rows of the log below this number are in runs
        self._log_freed = 0  # rows of the log below this number are deleted
        self._log_ends_ms = self._first_end_ms()  # no row of the log can be deleted before this time
        self._runs: list[Run] = []  # the newest first
        self._unneeded: list[int] = []  # runs to be freed
        self._jobs: dict[int, Job] = {}
        self._added = 0  # ids added since the last step, while there was work to do
        self._owed = 0  # ids to work on beside sends; below 0 after a longer step of a job
        self._read_manifests()

    # -- lookup

    def find(self, digests: list[bytes], now_ms: int) -> dict[bytes, int]:
        """The digests whose windows have not ended, with the sequence numbers of their messages."""
        if not self._log_is_read:
            self._read_log()
        found: dict[bytes, int] = {}
        for recent in (self._recent, self._cut_off):
            if not recent.keys().isdisjoint(digests):
                rows = [(digest, recent[digest]) for digest in digests if digest in recent]
                found.update(
                    (digest, seen.sequence_number) for digest, row in rows if (seen := decode_seen(row)).end_ms > now_ms
                )
        runs = [run for run in self._runs if run.manifest.latest_end_ms > now_ms]
        if runs:
            sought = Probes(digests)
            for run in runs:
                found.update(
                    (digest, seen.sequence_number) for digest, seen in run.find(sought) if seen.end_ms > now_ms
                )
        return found

    def add(self, digests: list[bytes], numbers: Sequence[int], end_ms: int) -> None:
        """Add the digests of accepted messages, which `find` did not find. `end_ms` is the end of their window."""
        if not self._log_is_read:
            self._read_log()
        if extension is not None and isinstance(numbers, range) and numbers.step == 1 and len(numbers) == len(digests):
            rows: list[bytes] = extension.seen_rows(digests, end_ms, numbers.start)
        else:
            rows = [encode_seen(digest, end_ms, number) for digest, number in zip(digests, numbers, strict=True)]
        size, items = self._limits.chunk_ids, []
        for at in range(0, len(rows), size):
            items.append((log_key(self._entity_id, self._next_row), encode_rows(rows[at : at + size])))
            self._next_row += 1
        self._store.insert_many(Table.DUPLICATE_LOG, items)
        self._remember(digests, rows)
        self._earliest_ms = min(self._earliest_ms, end_ms)
        self._latest_ms = max(self._latest_ms, end_ms)
        self._log_ends_ms = min(self._log_ends_ms, end_ms)
        if self._jobs:
            self._added += len(rows)

    def _remember(self, digests: Sequence[bytes], rows: list[bytes]) -> None:
        before = len(self._recent)
        self._recent.update(zip(digests, rows, strict=True))
        self._memory.recent_ids += len(self._recent) - before

    @property
    def _is_full(self) -> bool:
        """True if `recent` must become a run. If all entities together have too many, those above the average begin."""
        count, memory = len(self._recent), self._memory
        return count >= self._limits.run_ids or (
            memory.recent_ids > self._limits.recent_ids and count * memory.entities >= memory.recent_ids
        )

    # -- work in steps

    @property
    def is_busy(self) -> bool:
        """True if `step` must be called in this turn."""
        return bool(self._jobs) or self._is_full

    def step(self, now_ms: int, room_bytes: int) -> int:
        """Do a step of the jobs. Call it once after the start. Returns the time of the next step, which may be NEVER.

        Without room in the store only freeing is done. A merge begins only if the store has room for its result.
        """
        self._now_ms = now_ms
        self._owe()
        for run in [run for run in self._runs if run.manifest.latest_end_ms <= now_ms and not run.merging]:
            self._retire(run)
        self._plan(room_bytes)
        while (urgent := min((job for job in self._jobs if job == _FREE or room_bytes > 0), default=None)) is not None:
            if self._owed <= 0:
                return now_ms
            try:
                self._owed -= next(self._jobs[urgent])
            except StopIteration:
                del self._jobs[urgent]
                self._plan(room_bytes)
        self._owed = 0
        ends_ms = [run.manifest.latest_end_ms for run in self._runs if not run.merging]
        ends_ms += [self._log_ends_ms, now_ms if self._jobs else NEVER]
        return min(min(ends_ms) + PURGE_EVERY_MS, NEVER)

    def _owe(self) -> None:
        """Set how many ids this step works on. Each id is worked on when cut off, and once per level that it reaches.

        With sends, each step does a little more than the sends add, so the work never grows and is spread over them.
        Without sends, steps have their full length.
        """
        added, self._added = self._added, 0
        if added:
            levels = max((run.manifest.level for run in self._runs), default=0)
            self._owed += (levels + 3) * added
        else:
            self._owed = self._limits.step_ids

    def _plan(self, room_bytes: int) -> None:
        """Begin the jobs that can begin."""
        jobs = self._jobs
        unneeded = self._unneeded or self._log_freed < self._log_start or self._log_ends_ms <= self._now_ms
        if _FREE not in jobs and unneeded:
            jobs[_FREE] = self._free()
        if _CUT not in jobs and self._is_full:
            jobs[_CUT] = self._cut()
        for level in {run.manifest.level for run in self._runs} - jobs.keys():
            sources = [run for run in self._runs if run.manifest.level == level][-self._limits.fan_out :]
            ids = sum(run.manifest.ids for run in sources)
            if len(sources) == self._limits.fan_out and ids * _STORED_BYTES <= room_bytes:
                for run in sources:
                    run.merging = True
                jobs[level] = self._merge(sources, level + 1)

    def _cut(self) -> Job:
        """Make a run of the ids that are in the log now."""
        assert not self._cut_off
        self._cut_off, self._recent = self._recent, {}
        earliest_ms, latest_ms, log_end = self._earliest_ms, self._latest_ms, self._next_row
        self._earliest_ms, self._latest_ms = NEVER, 0
        buckets = _by_first_byte([*self._cut_off.values()])
        writer = self._writer(len(self._cut_off))
        try:
            yield self._limits.step_ids
            for rows in buckets:
                if rows:
                    rows.sort()
                    writer.add(rows)
                    yield len(rows)
            run = yield from writer.finish(0, earliest_ms, latest_ms, log_end)
        finally:
            writer.release()
        if run is not None:
            self._runs.insert(0, run)
        self._memory.recent_ids -= len(self._cut_off)
        self._cut_off = {}
        self._log_start = log_end

    def _merge(self, sources: list[Run], level: int) -> Job:
        manifests = [run.manifest for run in sources]
        now_ms = self._now_ms
        earliest_ms = min(manifest.earliest_end_ms for manifest in manifests)
        latest_ms = max(manifest.latest_end_ms for manifest in manifests)
        log_end = max(manifest.log_end for manifest in manifests)
        chunks_at_once = max(1, self._limits.step_ids // (len(sources) * self._limits.chunk_ids))
        readers = [RunReader(self._store, self._entity_id, run.number, chunks_at_once) for run in sources]
        writer = self._writer(sum(manifest.ids for manifest in manifests))
        try:
            for rows in merged(readers):
                taken = len(rows)
                if earliest_ms <= self._now_ms:
                    ended = self._now_ms.to_bytes(8, "big")
                    rows = [row for row in rows if row[DIGEST_BYTES : DIGEST_BYTES + 8] > ended]
                writer.add(rows)
                yield taken
            run = yield from writer.finish(level, max(earliest_ms, now_ms + 1), latest_ms, log_end)
        finally:
            writer.release()
        if run is not None:
            self._runs.insert(self._runs.index(sources[0]), run)
        for source in sources:
            self._retire(source)

    def _writer(self, ids_max: int) -> RunWriter:
        number = self._next_run
        self._next_run += 1
        return RunWriter(self._store, self._memory, self._entity_id, number, ids_max)

    def _retire(self, run: Run) -> None:
        run.retire()
        self._runs.remove(run)
        self._unneeded.append(run.number)

    def _free(self) -> Job:
        """Delete records that are not needed any more."""
        store, entity_id = self._store, self._entity_id
        while self._log_freed < (end := self._log_start):
            while items := store.scan(Table.DUPLICATE_LOG, log_key(entity_id, 0), log_key(entity_id, end), _PAGE):
                store.delete_many(Table.DUPLICATE_LOG, [key for key, _ in items])
                yield len(items)
            self._log_freed = end
        while self._log_ends_ms <= self._now_ms:
            yield self._end_log()
        while self._unneeded:
            yield from free_run(store, entity_id, self._unneeded[0], _PAGE)
            del self._unneeded[0]

    def _end_log(self) -> int:
        """Delete some of the log's first rows, if their windows have ended. Returns the number of ids."""
        recent, count, keys = self._recent, 0, []
        items = self._store.scan(Table.DUPLICATE_LOG, *self._log_range(), _PAGE)
        for key, value in items:
            try:
                rows = decode_rows(value)
            except CorruptRecord:
                quarantine(self._store, Table.DUPLICATE_LOG, key)
                continue
            end_ms = decode_seen(rows[0]).end_ms
            if end_ms > self._now_ms:
                self._log_ends_ms = end_ms
                break
            keys.append(key)
            count += len(rows)
            for row in rows:
                digest = row[:DIGEST_BYTES]
                if recent.get(digest) == row:
                    del recent[digest]
                    self._memory.recent_ids -= 1
        else:
            if len(items) < _PAGE:
                self._log_ends_ms = NEVER
        self._store.delete_many(Table.DUPLICATE_LOG, keys)
        return count

    # -- reading the store

    def _log_range(self) -> tuple[bytes, bytes]:
        return log_key(self._entity_id, 0), entity_key(self._entity_id + 1)

    def _first_end_ms(self) -> int:
        """The time when the log's first row can be deleted."""
        for _, value in self._store.scan(Table.DUPLICATE_LOG, *self._log_range(), 1):
            try:
                return decode_seen(decode_rows(value)[0]).end_ms
            except CorruptRecord:
                return 0  # unreadable: reading the log will find and quarantine it
        return NEVER

    def _read_manifests(self) -> None:
        start, end = run_key(self._entity_id, 0), entity_key(self._entity_id + 1)
        for key, value in self._store.scan(Table.DUPLICATE_RUNS, start, end, 1 << 32):
            _, number = unpack_run_key(key)
            try:
                manifest = decode_manifest(value)
            except CorruptRecord:
                manifest = self._manifest_anew(key, number)
            self._next_run = number + 1
            if not manifest.complete:
                self._unneeded.append(number)
                continue
            self._log_start = max(self._log_start, manifest.log_end)
            self._runs.insert(0, Run(self._store, self._memory, self._entity_id, number, manifest))

    def _manifest_anew(self, key: bytes, number: int) -> RunManifest:
        """A new manifest for a run whose manifest cannot be read. Its ids are valid even if the run was incomplete."""
        quarantine(self._store, Table.DUPLICATE_RUNS, key)
        reader = RunReader(self._store, self._entity_id, number, _PAGE)
        ids = sum(len(rows) for rows in merged([reader]))
        manifest = RunManifest(ids > 0, 0, ids, 0, self._now_ms + LONGEST_WINDOW_MS, 0, 0)
        self._store.put(Table.DUPLICATE_RUNS, key, encode_manifest(manifest))
        return manifest

    def _read_log(self) -> None:
        """Read the log into `recent`."""
        self._log_is_read = True
        self._memory.entities += 1
        self._next_row = max(self._log_start, 1)
        start, end = log_key(self._entity_id, self._log_start), self._log_range()[1]
        rows: list[bytes] = []
        while items := self._store.scan(Table.DUPLICATE_LOG, start, end, _PAGE):
            for key, value in items:
                try:
                    rows += decode_rows(value)
                except CorruptRecord:
                    # To drop messages that may be new would be to lose them.
                    quarantine(self._store, Table.DUPLICATE_LOG, key)
            last_key, _ = items[-1]
            _, last_row = unpack_log_key(last_key)
            self._next_row = last_row + 1
            start = log_key(self._entity_id, self._next_row)
        if rows:
            self._remember([row[:DIGEST_BYTES] for row in rows], rows)
            ends = [row[DIGEST_BYTES : DIGEST_BYTES + 8] for row in rows]
            self._earliest_ms = int.from_bytes(min(ends), "big")
            self._latest_ms = int.from_bytes(max(ends), "big")

    def close(self) -> None:
        """Release the memory of this entity's ids."""
        for job in self._jobs.values():
            job.close()
        for run in self._runs:
            run.release()
        self._memory.recent_ids -= len(self._recent) + len(self._cut_off)
        self._memory.entities -= self._log_is_read


def _by_first_byte(rows: list[bytes]) -> list[list[bytes]]:
    """Sort the rows into lists by their first byte."""
    if extension is not None:
        found: list[list[bytes]] = extension.by_first_byte(rows)
        return found
    buckets: list[list[bytes]] = [[] for _ in range(256)]
    for row in rows:
        buckets[row[0]].append(row)
    return buckets


def has_ids(store: Store, entity_id: int) -> bool:
    start, end = entity_key(entity_id), entity_key(entity_id + 1)
    return any(store.scan(table, start, end, 1) for table in (Table.DUPLICATE_LOG, Table.DUPLICATE_RUNS))


def free_ids(store: Store, entity_id: int, records: int) -> bool:
    """Delete about `records` records of a deleted entity; False if there are no more."""
    start, end = entity_key(entity_id), entity_key(entity_id + 1)
    tables = (Table.DUPLICATE_LOG, Table.DUPLICATE_CHUNKS, Table.DUPLICATE_FILTERS, Table.DUPLICATE_RUNS)
    for table in tables:
        if items := store.scan(table, start, end, records):
            store.delete_many(table, [key for key, _ in items])
            return True
    return False
