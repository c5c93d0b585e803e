"""Runs of seen message ids: immutable, sorted by digest, made once and freed as a whole.

A run consists of chunks of sorted rows in DUPLICATE_CHUNKS, each under its first digest. So only the last chunk that
does not begin above a digest may have it. A manifest in DUPLICATE_RUNS describes the run. It is written first and
deleted last; `complete` is set while all chunks are there.

Most ids that are looked up are in no run. A filter, which is in memory and stored with the run, excludes most of these
without reading the store: for each id in the run, two bits of one byte of the filter are set. About 1 in 100 of the ids
that are not in the run passes the filter.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter

from protocol.extension import extension
from storage.quarantine import quarantine
from storage.records import (
    DIGEST_BYTES,
    SEEN_BYTES,
    CorruptRecord,
    RunManifest,
    Seen,
    check_rows,
    chunk_key,
    decode_rows,
    encode_manifest,
    encode_rows,
    filter_key,
    find_seen,
    run_key,
)
from storage.store import Store, Table

FILTER_BYTES_PER_ID = 3  # at least; at most twice as many
FILTER_BYTES_MIN = 32
PIECE_BYTES = 4064  # of a filter in one record, which takes a page of the store with its checksum
_PIECES_AT_ONCE = 64
_PAIRS = [1 << a | 1 << b for a, b in combinations(range(8), 2)]
_MASKS = (_PAIRS * 2)[:32]  # two bits of a byte, for five bits of a digest
_NEXT = b"\0"  # appended to a key it makes the next possible key


@dataclass(frozen=True)
class SeenLimits:
    run_ids: int = 65_536  # the number of recent ids of an entity that become a run
    fan_out: int = 4  # the number of runs that are merged into one
    chunk_ids: int = 127  # in one record, which takes a page with its checksum; so any free page will do
    step_ids: int = 2048  # of an entity, worked on in one turn; more if more come in
    recent_ids: int = 262_144  # of all entities, 190 bytes of memory each; above this they make smaller runs
    filter_bytes: int = 64 << 20  # of all entities; runs without room have no filter in memory


class SeenMemory:
    """Counts the memory that the ids of all entities of a partition take."""

    def __init__(self, limits: SeenLimits) -> None:
        self.limits = limits
        self.entities = 0  # the number of entities with recent ids in memory
        self.recent_ids = 0
        self.filter_bytes = 0

    def room_for_filter(self, size: int) -> bytearray | None:
        if self.filter_bytes + size > self.limits.filter_bytes:
            return None
        self.filter_bytes += size
        return bytearray(size)

    def give_back(self, bits: bytearray | None) -> None:
        if bits is not None:
            self.filter_bytes -= len(bits)


class Probes:
    """Digests to look up, and their places in filters."""

    def __init__(self, digests: list[bytes]) -> None:
        self.digests = digests
        if extension is not None:
            return
        self._words = _words(b"".join(digests), DIGEST_BYTES)
        masks = _MASKS
        self._masks = int.from_bytes(bytes([masks[word & 31] for word in self._words]) + b"\0")
        self._read: dict[int, Callable[[bytearray], tuple[int, ...]]] = {}  # by shift, which depends on the size

    def passing(self, bits: bytearray, shift: int) -> list[bytes]:
        """The digests that the filter does not exclude.

        Without the extension all are compared at once, as one large number with a byte for each. The byte behind them
        passes, to end the search.
        """
        if extension is not None:
            found: list[bytes] = extension.passing(self.digests, bits, shift)
            return found
        read, count = self._read.get(shift), len(self.digests)
        if read is None:
            read = self._read[shift] = itemgetter(*[word >> shift for word in self._words], 0)
        lacking = (int.from_bytes(bytes(read(bits))) & self._masks ^ self._masks).to_bytes(count + 1)
        passing = []
        at = lacking.find(0)
        while at < count:
            passing.append(self.digests[at])
            at = lacking.find(0, at + 1)
        return passing


def _words(rows: bytes, row_bytes: int) -> list[int]:
    """The first eight bytes of each row, as a number. Its low bits choose the bits of a byte, its high bits the byte.

    So sorted rows access a filter in order, which is several times as fast as random access.
    """
    words = array("Q", rows)[:: row_bytes // 8]
    if sys.byteorder == "little":
        words.byteswap()
    return words.tolist()


def _shift(filter_bytes: int) -> int:
    return 65 - filter_bytes.bit_length()


def filter_bytes_for(ids: int) -> int:
    """The size of a filter for so many ids, a power of two."""
    return max(FILTER_BYTES_MIN, 1 << (ids * FILTER_BYTES_PER_ID - 1).bit_length())


def add_to_filter(bits: bytearray, rows: list[bytes]) -> None:
    shift, masks = _shift(len(bits)), _MASKS
    if extension is not None:
        extension.add_to_filter(bits, shift, rows)
        return
    for word in _words(b"".join(rows), SEEN_BYTES):
        bits[word >> shift] |= masks[word & 31]


def all_pass(bits: bytes, rows: Sequence[bytes]) -> bool:
    """True if the filter excludes none of the rows."""
    shift, masks = _shift(len(bits)), _MASKS
    return all(
        bits[word >> shift] & masks[word & 31] == masks[word & 31] for word in _words(b"".join(rows), SEEN_BYTES)
    )


class Run:
    """A complete run. `merging`: it is being merged into another."""

    def __init__(self, store: Store, memory: SeenMemory, entity_id: int, number: int, manifest: RunManifest) -> None:
        self.number = number
        self.manifest = manifest
        self.merging = False
        self._store = store
        self._memory = memory
        self._entity_id = entity_id
        self._shift = _shift(manifest.filter_bytes)
        self._bits: bytearray | None = None
        self._unread = manifest.filter_bytes > 0

    def find(self, sought: Probes) -> list[tuple[bytes, Seen]]:
        """The digests that are in the run, even if their windows have ended."""
        if self._unread:
            self._read_filter()
        digests = sought.digests if self._bits is None else sought.passing(self._bits, self._shift)
        found = ((digest, self._look(digest)) for digest in digests)
        return [(digest, seen) for digest, seen in found if seen is not None]

    def _look(self, digest: bytes) -> Seen | None:
        start, last = run_key(self._entity_id, self.number), chunk_key(self._entity_id, self.number, digest)
        for key, value in self._store.scan(Table.DUPLICATE_CHUNKS, start, last + _NEXT, 1, reverse=True):
            try:
                return find_seen(value, digest)
            except CorruptRecord:
                # To drop messages that may be new would be to lose them.
                quarantine(self._store, Table.DUPLICATE_CHUNKS, key)
        return None

    def _read_filter(self) -> None:
        """Read the filter. If there is no room for it now, or it is unreadable, the run has no filter."""
        self._unread = False
        bits = self._memory.room_for_filter(self.manifest.filter_bytes)
        if bits is None:
            return
        for piece, at in enumerate(range(0, len(bits), PIECE_BYTES)):
            key, size = filter_key(self._entity_id, self.number, piece), min(PIECE_BYTES, len(bits) - at)
            value = self._store.get(Table.DUPLICATE_FILTERS, key) or b""
            try:
                check_rows(value)
                if len(value) != 8 + size:
                    raise CorruptRecord("filter of seen message ids: a piece of another length")
            except CorruptRecord:
                quarantine(self._store, Table.DUPLICATE_FILTERS, key)
                self._memory.give_back(bits)
                return
            bits[at : at + size] = value[8:]
        self._bits = bits

    def take_filter(self, bits: bytearray | None) -> None:
        """Take the filter that was made with the run."""
        self._bits, self._unread = bits, False

    def release(self) -> None:
        """Give its memory back."""
        self._memory.give_back(self._bits)
        self._bits, self._unread = None, False

    def retire(self) -> None:
        """Note that the run is only to be freed from now on."""
        self.release()
        manifest = encode_manifest(self.manifest._replace(complete=False))
        self._store.put(Table.DUPLICATE_RUNS, run_key(self._entity_id, self.number), manifest)


class RunReader:
    """Reads the rows of a run in order. `rows` were read and not taken yet; they are empty at the end."""

    def __init__(self, store: Store, entity_id: int, number: int, chunks_at_once: int) -> None:
        self._store = store
        self._next = run_key(entity_id, number)
        self._end = run_key(entity_id, number + 1)
        self._chunks_at_once = chunks_at_once
        self.rows: list[bytes] = []
        self.at_end = False

    def read(self) -> None:
        """Read some rows into `rows`, if any are left."""
        while not self.rows and not self.at_end:
            items = self._store.scan(Table.DUPLICATE_CHUNKS, self._next, self._end, self._chunks_at_once)
            for key, value in items:
                try:
                    self.rows += decode_rows(value)
                except CorruptRecord:
                    quarantine(self._store, Table.DUPLICATE_CHUNKS, key)
                self._next = key + _NEXT
            self.at_end = len(items) < self._chunks_at_once

    def take(self, last: bytes | None) -> list[bytes]:
        """Take the rows that were read, or those up to `last`."""
        count = len(self.rows) if last is None else bisect_right(self.rows, last)
        taken, self.rows = self.rows[:count], self.rows[count:]
        return taken


def merged(readers: Sequence[RunReader]) -> Iterator[list[bytes]]:
    """All rows in order, some at a time."""
    while True:
        for reader in readers:
            reader.read()
        # Rows that a reader has not read yet are above the last row that it has read.
        last = min((reader.rows[-1] for reader in readers if not reader.at_end), default=None)
        rows = [row for reader in readers for row in reader.take(last)]
        if not rows:
            return
        rows.sort()
        yield rows


class RunWriter:
    """A run that is being made, of at most `ids_max` ids."""

    def __init__(self, store: Store, memory: SeenMemory, entity_id: int, number: int, ids_max: int) -> None:
        self._store = store
        self._memory = memory
        self._entity_id = entity_id
        self._number = number
        self._ids = 0
        self._rest: list[bytes] = []  # fewer rows than a chunk has
        self._bits = memory.room_for_filter(filter_bytes_for(ids_max))
        self._put_manifest(RunManifest(False, 0, 0, 0, 0, 0, 0))

    def add(self, rows: list[bytes]) -> None:
        """Add sorted rows, none of them below those added before."""
        self._ids += len(rows)
        if self._bits is not None:
            add_to_filter(self._bits, rows)
        rows, size = self._rest + rows, self._memory.limits.chunk_ids
        whole = len(rows) - len(rows) % size
        self._put_chunks([rows[at : at + size] for at in range(0, whole, size)])
        self._rest = rows[whole:]

    def finish(
        self, level: int, earliest_end_ms: int, latest_end_ms: int, log_end: int
    ) -> Generator[int, None, Run | None]:
        """Write the remaining rows step by step. Returns the complete run, or None if it has no ids."""
        bits, entity_id, number = self._bits or b"", self._entity_id, self._number
        if not self._ids:
            self._store.delete(Table.DUPLICATE_RUNS, run_key(entity_id, number))
            return None
        if self._rest:
            self._put_chunks([self._rest])
        for piece, at in enumerate(range(0, len(bits), PIECE_BYTES)):
            value = encode_rows((bits[at : at + PIECE_BYTES],))
            self._store.put(Table.DUPLICATE_FILTERS, filter_key(entity_id, number, piece), value)
            if piece % _PIECES_AT_ONCE == _PIECES_AT_ONCE - 1:
                yield _PIECES_AT_ONCE
        manifest = RunManifest(True, level, self._ids, earliest_end_ms, latest_end_ms, log_end, len(bits))
        self._put_manifest(manifest)
        run = Run(self._store, self._memory, entity_id, number, manifest)
        run.take_filter(self._bits)
        self._bits = None
        return run

    def release(self) -> None:
        """Release the filter's memory. The next start frees what was written of an incomplete run."""
        self._memory.give_back(self._bits)
        self._bits = None

    def _put_chunks(self, chunks: list[list[bytes]]) -> None:
        entity_id, number = self._entity_id, self._number
        items = [(chunk_key(entity_id, number, rows[0][:DIGEST_BYTES]), encode_rows(rows)) for rows in chunks]
        self._store.insert_many(Table.DUPLICATE_CHUNKS, items)

    def _put_manifest(self, manifest: RunManifest) -> None:
        key = run_key(self._entity_id, self._number)
        self._store.put(Table.DUPLICATE_RUNS, key, encode_manifest(manifest))


def free_run(store: Store, entity_id: int, number: int, records_at_once: int) -> Iterator[int]:
    """Delete the run step by step, its manifest last."""
    start, end = run_key(entity_id, number), run_key(entity_id, number + 1)
    for table in (Table.DUPLICATE_CHUNKS, Table.DUPLICATE_FILTERS):
        while items := store.scan(table, start, end, records_at_once):
            store.delete_many(table, [key for key, _ in items])
            yield len(items)
    store.delete(Table.DUPLICATE_RUNS, start)
