"""The message ids that one entity has accepted and whose windows have not ended, by digest; a log-structured store.

    DUPLICATE_LOG     what each send added, written with it and in order: cheap. In memory it is a dict, `recent`.
    DUPLICATE_RUNS    when many are in the log, they are cut off and become a run, sorted: see `storage.seen_runs`.
                      Several runs of one level become one of the next, without the ids whose windows have ended.

A random place of the store is read only for ids that a run's filter does not exclude, and none is written. Cutting,
merging and freeing are jobs, done in steps beside other work. What a job makes is looked into when it is complete, in
the same commit in which what it was made of is no longer. A job that a stop interrupts begins anew, what it has made is
freed. A run whose last window has ended is freed without a look at its ids.

An id may be in several places, accepted again after its window had ended. Times do not go backwards, so that at most
one of its windows has not ended.
"""

from collections.abc import Generator, Sequence

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

# So long after its end an id may stay: else an entity with little to do would write to disk for each by itself.
PURGE_EVERY_MS = 1000
# What can be set of an entity.
LONGEST_WINDOW_MS = 7 * 24 * 3600 * 1000
_STORED_BYTES = 48  # by an id in a run, at most
_PAGE = 64  # records read at once

# Jobs, the most urgent first. Others are merges, by the level of what they merge.
_FREE = -2
_CUT = -1

Job = Generator[int, None, None]  # yields about how many ids it has worked on since it last did


class SeenIds:
    """Nothing but what runs there are is read before an id is looked for."""

    def __init__(self, store: Store, memory: SeenMemory, entity_id: int, now_ms: int) -> None:
        self._store = store
        self._memory = memory
        self._limits = memory.limits
        self._entity_id = entity_id
        self._now_ms = now_ms
        self._recent: dict[bytes, bytes] = {}  # digest -> row; those in the log
        self._cut_off: dict[bytes, bytes] = {}  # as `recent`; those that a run is being made of
        self._earliest_ms, self._latest_ms = NEVER, 0  # ends of windows in `recent`
        self._log_is_read = False
        self._next_row = 0  # of the log, once it is read
        self._next_run = 1
        self._log_start = 0  # rows of the log below are in runs
        self._log_freed = 0  # rows of the log below have been deleted
        self._log_ends_ms = self._first_end_ms()  # no row of the log can go before
        self._runs: list[Run] = []  # the newest first
        self._unneeded: list[int] = []  # runs that are to be freed
        self._jobs: dict[int, Job] = {}
        self._added = 0  # ids since the last step, while there was something to do
        self._owed = 0  # ids to be worked on beside sends; below 0 after a job's step that was longer
        self._read_manifests()

    # -- what is known

    def find(self, digests: Sequence[bytes], now_ms: int) -> dict[bytes, int]:
        """Those whose windows have not ended, with the sequence numbers of their messages."""
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

    def add(self, digests: Sequence[bytes], numbers: Sequence[int], end_ms: int) -> None:
        """Of messages that are accepted; `find` did not find them. `end_ms`: of their window."""
        if not self._log_is_read:
            self._read_log()
        rows = [encode_seen(digest, end_ms, number) for digest, number in zip(digests, numbers, strict=True)]
        size, items = self._limits.chunk_ids, []
        for at in range(0, len(rows), size):
            items.append((log_key(self._entity_id, self._next_row), encode_rows(rows[at : at + size])))
            self._next_row += 1
        self._store.put_many(Table.DUPLICATE_LOG, items)
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
        """`recent` is to become a run. With too many in all, those with not less than others have to begin."""
        count, memory = len(self._recent), self._memory
        return count >= self._limits.run_ids or (
            memory.recent_ids > self._limits.recent_ids and count * memory.entities >= memory.recent_ids
        )

    # -- work in steps

    @property
    def is_busy(self) -> bool:
        """`step` is to be called in this turn."""
        return bool(self._jobs) or self._is_full

    def step(self, now_ms: int, room_bytes: int) -> int:
        """Do a step of what is to be done, to be called once after the start. Returns when the next is, perhaps NEVER.

        Without room in the store nothing is done that takes more of it, and no merge begins that takes more than that.
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
        """Each id that comes in is worked on when it is cut off, and once for each level that it gets to.

        Beside sends a little more than that is done, so that what is to be done never grows, and is spread over them.
        Where none come, steps are as long as they may be.
        """
        added, self._added = self._added, 0
        if added:
            levels = max((run.manifest.level for run in self._runs), default=0)
            self._owed += (levels + 3) * added
        else:
            self._owed = self._limits.step_ids

    def _plan(self, room_bytes: int) -> None:
        """Begin what can be begun."""
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
        """Make a run of what is in the log so far."""
        assert not self._cut_off
        self._cut_off, self._recent = self._recent, {}
        earliest_ms, latest_ms, log_end = self._earliest_ms, self._latest_ms, self._next_row
        self._earliest_ms, self._latest_ms = NEVER, 0
        buckets: list[list[bytes]] = [[] for _ in range(256)]
        for row in self._cut_off.values():
            buckets[row[0]].append(row)
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
        """Delete what is not needed any more."""
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
        """The log's first rows go if their windows have ended: some of them. Returns the number of ids."""
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

    # -- what the store holds

    def _log_range(self) -> tuple[bytes, bytes]:
        return log_key(self._entity_id, 0), entity_key(self._entity_id + 1)

    def _first_end_ms(self) -> int:
        """When the log's first row can go."""
        for _, value in self._store.scan(Table.DUPLICATE_LOG, *self._log_range(), 1):
            try:
                return decode_seen(decode_rows(value)[0]).end_ms
            except CorruptRecord:
                return 0  # to be found there, and set aside
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
        """Of a run whose manifest cannot be read. What it holds is so even if it was not complete, or not any more."""
        quarantine(self._store, Table.DUPLICATE_RUNS, key)
        reader = RunReader(self._store, self._entity_id, number, _PAGE)
        ids = sum(len(rows) for rows in merged([reader]))
        manifest = RunManifest(ids > 0, 0, ids, 0, self._now_ms + LONGEST_WINDOW_MS, 0, 0)
        self._store.put(Table.DUPLICATE_RUNS, key, encode_manifest(manifest))
        return manifest

    def _read_log(self) -> None:
        """Into `recent`."""
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
                    # To drop what may be new would be to lose it.
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
        """Give its memory back."""
        for job in self._jobs.values():
            job.close()
        for run in self._runs:
            run.release()
        self._memory.recent_ids -= len(self._recent) + len(self._cut_off)
        self._memory.entities -= self._log_is_read


def has_ids(store: Store, entity_id: int) -> bool:
    start, end = entity_key(entity_id), entity_key(entity_id + 1)
    return any(store.scan(table, start, end, 1) for table in (Table.DUPLICATE_LOG, Table.DUPLICATE_RUNS))


def free_ids(store: Store, entity_id: int, records: int) -> bool:
    """Delete about so many records of an entity that is deleted; False if there are no more."""
    start, end = entity_key(entity_id), entity_key(entity_id + 1)
    tables = (Table.DUPLICATE_LOG, Table.DUPLICATE_CHUNKS, Table.DUPLICATE_FILTERS, Table.DUPLICATE_RUNS)
    for table in tables:
        if items := store.scan(table, start, end, records):
            store.delete_many(table, [key for key, _ in items])
            return True
    return False
