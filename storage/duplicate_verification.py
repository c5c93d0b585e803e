"""Verifies a partition's tables of duplicate detection: each stored id is found and counted."""

from collections.abc import Container

from storage.findings import PartitionReport, Problem
from storage.log.snapshot import Snapshot
from storage.records import (
    DIGEST_BYTES,
    CorruptRecord,
    RunManifest,
    check_rows,
    decode_manifest,
    decode_rows,
    decode_seen,
    filter_key,
    run_key,
    unpack_filter_key,
    unpack_run_key,
)
from storage.seen_runs import PIECE_BYTES, all_pass
from storage.store import Table

_KEY_BYTES = {
    Table.DUPLICATE_LOG: 12,
    Table.DUPLICATE_RUNS: 8,
    Table.DUPLICATE_CHUNKS: 8 + DIGEST_BYTES,
    Table.DUPLICATE_FILTERS: 12,
}


class _Run:
    def __init__(self, key: bytes, manifest: RunManifest) -> None:
        self.key = key
        self.manifest = manifest
        self.ids = 0
        self.last_row = b""


class DuplicateVerification:
    """First add the entities with duplicate detection and the quarantined records, then call `check`."""

    def __init__(self, report: PartitionReport) -> None:
        self._report = report
        self._entities: set[int] = set()
        self._chunks_set_aside: set[bytes] = set()  # keys of the runs of quarantined chunks
        self._filters_set_aside: set[bytes] = set()
        self._runs: dict[bytes, _Run | None] = {}  # None: its manifest cannot be read
        self._filter_of: tuple[_Run, bytes] | None = None  # the run whose chunks are being read

    def add_entity(self, entity_id: int) -> None:
        self._entities.add(entity_id)

    def add_set_aside(self, table: int, key: bytes) -> None:
        if table == Table.DUPLICATE_CHUNKS:
            self._chunks_set_aside.add(key[:8])
        elif table == Table.DUPLICATE_FILTERS:
            self._filters_set_aside.add(key[:8])

    def check(self, snapshot: Snapshot, deleted: Container[int]) -> None:
        """`deleted`: entities whose records are being deleted, first the chunks of a run and then its manifest."""
        checks = {
            Table.DUPLICATE_RUNS: self._manifest,
            Table.DUPLICATE_LOG: self._log,
            Table.DUPLICATE_FILTERS: self._piece,
            Table.DUPLICATE_CHUNKS: self._chunk,
        }
        for table, check in checks.items():
            for key, value in snapshot.items(table):
                self._report.records[table] += 1
                if len(key) != _KEY_BYTES[table]:
                    self._report.add(Problem.MALFORMED_KEY, table, key, f"{table.name}: key {key.hex()}")
                    continue
                entity_id = int.from_bytes(key[:4], "big")
                if entity_id in deleted:
                    continue
                if entity_id not in self._entities:
                    self._wrong(table, key, "has message ids, and no duplicate detection")
                    continue
                try:
                    check(snapshot, key, value)
                except CorruptRecord as error:
                    self._report.add(Problem.CORRUPT_RECORD, table, key, str(error))
                    self.add_set_aside(table, key)  # we do not know what it holds
        for run in self._runs.values():
            if run is None or not run.manifest.complete or run.key in self._chunks_set_aside:
                continue
            if run.ids != run.manifest.ids:
                self._wrong(Table.DUPLICATE_RUNS, run.key, f"there are {run.ids} message ids, not {run.manifest.ids}")

    def _manifest(self, snapshot: Snapshot, key: bytes, value: bytes) -> None:
        self._runs[key] = None
        self._runs[key] = _Run(key, decode_manifest(value))

    def _log(self, snapshot: Snapshot, key: bytes, value: bytes) -> None:
        if len({decode_seen(row).end_ms for row in decode_rows(value)}) > 1:
            self._wrong(Table.DUPLICATE_LOG, key, "message ids of one send have windows of different ends")

    def _chunk(self, snapshot: Snapshot, key: bytes, value: bytes) -> None:
        rows = decode_rows(value)
        table, run = Table.DUPLICATE_CHUNKS, self._runs.get(key[:8])
        if run is None:
            if key[:8] not in self._runs:
                self._wrong(table, key, "message ids of no run")
            return
        if rows[0][:DIGEST_BYTES] != key[8:] or rows != sorted(rows) or rows[0] < run.last_row:
            self._wrong(table, key, "message ids that are not in order")
        run.last_row = rows[-1]
        run.ids += len(rows)
        manifest = run.manifest
        if not manifest.complete:
            return
        ends_ms = [decode_seen(row).end_ms for row in rows]
        if min(ends_ms) < manifest.earliest_end_ms or max(ends_ms) > manifest.latest_end_ms:
            self._wrong(table, key, "windows that end earlier or later than those of the run")
        if self._filter_of is None or self._filter_of[0] is not run:
            self._filter_of = run, self._filter(snapshot, run)
        bits = self._filter_of[1]
        if bits and not all_pass(bits, rows):
            self._wrong(table, key, "message ids that are not in the run's filter")

    def _filter(self, snapshot: Snapshot, run: _Run) -> bytes:
        """The filter of the run; empty if it has none that can be read."""
        if run.key in self._filters_set_aside:
            return b""
        entity_id, number = unpack_run_key(run.key)
        pieces = [
            snapshot.get(Table.DUPLICATE_FILTERS, filter_key(entity_id, number, piece)) or b""
            for piece in range(-(-run.manifest.filter_bytes // PIECE_BYTES))
        ]
        bits = b"".join(piece[8:] for piece in pieces)
        if len(bits) == run.manifest.filter_bytes:
            return bits
        self._wrong(Table.DUPLICATE_RUNS, run.key, f"its filter has {len(bits)} bytes")
        return b""

    def _piece(self, snapshot: Snapshot, key: bytes, value: bytes) -> None:
        check_rows(value)
        entity_id, number, piece = unpack_filter_key(key)
        run_of = run_key(entity_id, number)
        run = self._runs.get(run_of)
        if run_of not in self._runs:
            self._wrong(Table.DUPLICATE_FILTERS, key, "a filter of no run")
        elif run is not None and run.manifest.complete and piece * PIECE_BYTES >= run.manifest.filter_bytes:
            self._wrong(Table.DUPLICATE_FILTERS, key, "a piece that the run's filter does not have")

    def _wrong(self, table: Table, key: bytes, what: str) -> None:
        entity_id = int.from_bytes(key[:4], "big")
        run = f", run {int.from_bytes(key[4:8], 'big')}" if table != Table.DUPLICATE_LOG else ""
        self._report.add(Problem.WRONG_DUPLICATE, table, key, f"entity {entity_id}{run}: {what}")
