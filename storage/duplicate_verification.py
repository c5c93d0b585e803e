"""Whether what a partition's tables say of duplicate detection is true: each id is listed under its window's end."""

from collections import Counter
from collections.abc import Container

from storage.findings import PartitionReport, Problem
from storage.lmdb_store import Snapshot
from storage.records import (
    DIGEST_BYTES,
    CorruptRecord,
    decode_digests,
    decode_seen,
    duplicate_key,
    entity_key,
    unpack_duplicate_end_key,
)
from storage.store import Table

_ID_KEY_BYTES = 4 + DIGEST_BYTES
_END_KEY_BYTES = 20


class DuplicateVerification:
    """Tell it the entities with duplicate detection and the records set aside, then `check`."""

    def __init__(self, report: PartitionReport) -> None:
        self._report = report
        self._entities: set[int] = set()
        self._ids_set_aside: set[bytes] = set()
        self._ends_set_aside = False
        self._ids: Counter[int] = Counter()  # by entity
        self._listed: Counter[int] = Counter()

    def add_entity(self, entity_id: int) -> None:
        self._entities.add(entity_id)

    def add_set_aside(self, table: int, key: bytes) -> None:
        if table == Table.DUPLICATES:
            self._ids_set_aside.add(key)
        elif table == Table.DUPLICATE_ENDS:
            self._ends_set_aside = True

    def check(self, snapshot: Snapshot, deleted: Container[int]) -> None:
        """`deleted`: entities whose records are being freed, ids after what lists them."""
        for key, value in snapshot.items(Table.DUPLICATES):
            self._id(key, value, deleted)
        for key, value in snapshot.items(Table.DUPLICATE_ENDS):
            self._ends(snapshot, key, value, deleted)
        if self._ends_set_aside:
            return
        for entity_id, ids in self._ids.items():
            if ids > self._listed[entity_id]:
                text = f"entity {entity_id}: {ids - self._listed[entity_id]} message ids are not listed by their end"
                self._report.add(Problem.WRONG_DUPLICATE, Table.DUPLICATES, entity_key(entity_id), text)

    def _id(self, key: bytes, value: bytes, deleted: Container[int]) -> None:
        report, entity_id = self._report, int.from_bytes(key[:4], "big")
        report.records[Table.DUPLICATES] += 1
        if len(key) != _ID_KEY_BYTES:
            report.add(Problem.MALFORMED_KEY, Table.DUPLICATES, key, f"DUPLICATES: key {key.hex()}")
            return
        try:
            decode_seen(value)
        except CorruptRecord as error:
            report.add(Problem.CORRUPT_RECORD, Table.DUPLICATES, key, str(error))
            return
        if entity_id in self._entities:
            self._ids[entity_id] += 1
        elif entity_id not in deleted:
            text = f"entity {entity_id}: has message ids, and no duplicate detection"
            report.add(Problem.WRONG_DUPLICATE, Table.DUPLICATES, key, text)

    def _ends(self, snapshot: Snapshot, key: bytes, value: bytes, deleted: Container[int]) -> None:
        report = self._report
        report.records[Table.DUPLICATE_ENDS] += 1
        if len(key) != _END_KEY_BYTES:
            report.add(Problem.MALFORMED_KEY, Table.DUPLICATE_ENDS, key, f"DUPLICATE_ENDS: key {key.hex()}")
            return
        entity_id, end_ms, number = unpack_duplicate_end_key(key)
        if entity_id in deleted:
            return
        try:
            digests = decode_digests(value)
        except CorruptRecord as error:
            self._ends_set_aside = True  # what it lists is not known
            report.add(Problem.CORRUPT_RECORD, Table.DUPLICATE_ENDS, key, str(error))
            return
        for digest in digests:
            id_key = duplicate_key(entity_id, digest)
            id_value = snapshot.get(Table.DUPLICATES, id_key)
            try:
                found_ms = None if id_value is None else decode_seen(id_value).end_ms
            except CorruptRecord:
                continue
            if found_ms == end_ms:
                self._listed[entity_id] += 1
            elif (found_ms is None or found_ms < end_ms) and id_key not in self._ids_set_aside:
                text = (
                    f"entity {entity_id}: a message id of the send at {number} should end at {end_ms}, not {found_ms}"
                )
                report.add(Problem.WRONG_DUPLICATE, Table.DUPLICATE_ENDS, key, text)
