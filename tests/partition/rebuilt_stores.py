"""Stores that are rebuilt from the rows that a journal has of what happened in other stores."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.compute as pc

from broker.catalog.catalog import definitions
from broker.journal.properties import DECODING
from broker.restoring.definitions import entities_of
from storage.capture.columns import one
from storage.capture.lifetimes import Lifetimes, matters
from storage.capture.reading import CapturedRange
from storage.capture.rebuilding import Rebuilder, Rebuilt
from storage.capture.survey import Cut, Look, family_of, look, survey
from storage.journal.queues import Mode, Modes, Queues
from storage.journal.rows import Rows
from storage.memory import MemoryStore
from storage.queue_ids import Part, entity_of, part_of
from storage.records import (
    CorruptRecord,
    Counts,
    check_message,
    decode_counts,
    decode_entry,
    decode_state,
    entity_key,
    message_key,
    unpack_queue_key,
)
from storage.store import Store, Table
from tests.partition.accounts import problems
from tests.partition.hinted_store import HintedStore
from tests.partition.turns import CountingStore

EPOCH = "00000000000000aa"
BEGIN = datetime(2100, 1, 1, tzinfo=UTC)  # later than all clocks of tests
ALL = (b"", b"\xff" * 512, 1 << 30)
FILE_ROWS, GROUP_ROWS = 17, 7


def time_of(turn: int) -> datetime:
    return BEGIN + timedelta(milliseconds=turn)


class RecordedStore(HintedStore, CountingStore):
    """Both, for models that take either."""


class CapturedInMemory:
    """The rows of some stores, by partition."""

    def __init__(self, stores: Mapping[int, HintedStore]) -> None:
        self.rows: dict[int, pa.RecordBatch] = {}
        for partition, store in stores.items():
            queues = Queues(Modes(Mode.BODIES, {}), {})
            rows = Rows(partition, queues, DECODING)
            for turn, said in store.turns:
                time_ms = round(time_of(turn).timestamp() * 1000)
                rows.add(time_ms, *msgpack.unpackb(said, use_list=False, strict_map_key=False))
            if len(rows):
                self.rows[partition] = _with_paths(_in_order_of_turns(rows.batch(0)), paths_of(stores.values()))

    def cuts(self, until: datetime | None) -> dict[int, Cut]:
        found = {}
        for partition, rows in self.rows.items():
            times = rows.column("eventTime").to_pylist()
            end = len(times) if until is None else sum(each <= until for each in times)
            if end:
                whole = CapturedRange(partition, EPOCH, 0, len(times))
                found[partition] = Cut(partition, EPOCH, [whole], end, times[0])
        return found

    def files(self, partition: int, end: int) -> Iterator[list[pa.Table]]:
        """The rows before `end` in small files, each of them sorted as in a capture, in groups."""
        for first in range(0, end, FILE_ROWS):
            rows = pa.Table.from_batches([self.rows[partition].slice(first, min(FILE_ROWS, end - first))])
            rows = rows.sort_by([("entity", "ascending"), ("journalOffset", "ascending")])
            yield [rows.slice(at, GROUP_ROWS) for at in range(0, len(rows), GROUP_ROWS)]

    def seen(self, cuts: Mapping[int, Cut]) -> Look:
        found = Look()
        for partition, cut in cuts.items():
            for group in chain.from_iterable(self.files(partition, len(self.rows[partition]))):
                found.add(look(group, one(pc.less(group.column("journalOffset"), cut.end))))
        return Look.from_document(json.loads(json.dumps(found.document())))

    def chosen(self, partition: int, end: int) -> pa.Table:
        """The rows before `end` that matter."""
        lives = Lifetimes()
        for file in self.files(partition, end):
            for group in file:
                mattering = group.filter(matters(group))
                of_group = Lifetimes()
                of_group.add(mattering, pa.array(range(len(mattering)), pa.int64()))
                mattering = mattering.take(of_group.kept_of_piece())
                lives.add(mattering, one(mattering.column("journalOffset")))
            lives.forget()
        return pa.Table.from_batches([self.rows[partition]]).take(lives.kept().ids)


def paths_of(stores: Iterable[HintedStore]) -> dict[str, str]:
    """By ids as texts, which the rows of these stores have instead of names: some tests have two of one name. Those of
    subscriptions have the topic's, too, because they live where it does."""
    entities = [each for store in stores for each in definitions(store)]
    topics = {each.description.path.lower(): each.entity_id for each in entities if each.description.kind == "topic"}
    paths = {}
    for each in entities:
        owner = topics.get(each.description.path.lower().partition("/subscriptions/")[0])
        is_of_topic = each.description.kind == "subscription" and owner is not None
        paths[str(each.entity_id)] = f"{owner}/subscriptions/{each.entity_id}" if is_of_topic else str(each.entity_id)
    return paths


def _with_paths(rows: pa.RecordBatch, paths: Mapping[str, str]) -> pa.RecordBatch:
    for name in ("entity", "originEntity"):
        place = rows.schema.get_field_index(name)
        found = [None if each is None else paths.get(each, each) for each in rows.column(place).to_pylist()]
        rows = rows.set_column(place, rows.schema.field(place), pa.array(found, pa.string()))
    return rows


def _in_order_of_turns(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of hand-outs have the partition's own time, which is another one than that of turns here."""
    times = rows.column("eventTime").to_pylist()
    latest = BEGIN
    for at, time in enumerate(times):
        times[at] = latest = max(latest, time)
    place = rows.schema.get_field_index("eventTime")
    return rows.set_column(place, rows.schema.field(place), pa.array(times, rows.schema.field(place).type))


def rebuilt(
    stores: Mapping[int, HintedStore], until: datetime | None = None
) -> tuple[dict[int, MemoryStore], dict[int, Rebuilt]]:
    captured = CapturedInMemory(stores)
    cuts = captured.cuts(until)
    surveyed, paths = survey(cuts, captured.seen(cuts)), paths_of(stores.values())
    made, found = {}, {}
    for partition, store in stores.items():
        target = MemoryStore()
        entities = definitions(store)
        for key, value in store.scan(Table.ENTITIES, *ALL):
            target.put(Table.ENTITIES, key, value)
        topics = [each for each in entities if each.description.kind == "topic"]
        by_id = {}
        for each in entities:
            made_of = entities_of([*topics, each])[each.description.path.lower()]
            if len(each.partitions) < 2:
                home = surveyed.homes.get(family_of(paths[str(each.entity_id)]), (*each.partitions, partition)[0])
                made_of = made_of._replace(partitions=(home,))
            by_id[paths[str(each.entity_id)]] = made_of
        rebuilder = Rebuilder(target, partition, by_id, surveyed)
        if partition in cuts:
            rows = captured.chosen(partition, cuts[partition].end)
            for at in range(0, len(rows), GROUP_ROWS):
                rebuilder.add(rows.slice(at, GROUP_ROWS))
        found[partition] = rebuilder.finish()
        target.commit()
        assert problems(target) == [], problems(target)
        made[partition] = target
    return made, found


def entries_of(store: Store) -> dict[tuple[int, int, int], tuple[int, Any, bytes | None]]:
    """By queue id, place and number: delivery count, overlay, and the record unless it is damaged."""
    found = {}
    for key, value in store.scan(Table.QUEUE, *ALL):
        entry = decode_entry(value)
        record = store.get(Table.MESSAGES, message_key(entry.message_id))
        try:
            check_message(record or b"")
        except CorruptRecord:
            record = None
        found[unpack_queue_key(key)] = (entry.delivery_count, entry.overlay or {}, record)
    return found


def states_of(store: Store) -> dict[bytes, bytes]:
    """Of sessions, by key, unless they are damaged; those of deleted entities are left out."""
    found = {}
    for key, value in store.scan(Table.SESSION_STATES, *ALL):
        with suppress(CorruptRecord):
            if is_defined(store, int.from_bytes(key[:4], "big")):
                found[key] = decode_state(value)
    return found


def counts_of(store: Store) -> dict[int, Counts]:
    return {int.from_bytes(key, "big"): decode_counts(value) for key, value in store.scan(Table.COUNTS, *ALL)}


def is_defined(store: Store, queue_id: int) -> bool:
    """Else its entity is being deleted."""
    return store.get(Table.ENTITIES, entity_key(entity_of(queue_id))) is not None


def timers_of(store: Store) -> set[bytes]:
    return {key for key, _ in store.scan(Table.DUE, *ALL)}


def assert_equal(original: Store, store: Store) -> None:
    """What is there. Numbers go on above all that were given out."""
    wanted = {key: each for key, each in entries_of(original).items() if is_defined(original, key[0])}
    found = entries_of(store)
    assert found.keys() == wanted.keys()
    for key, (count, overlay, record) in wanted.items():
        assert found[key][:2] == (count, overlay), key
        if record is not None:
            assert found[key][2] == record
    assert states_of(store) == states_of(original)
    timers = {key for key in timers_of(original) if is_defined(original, int.from_bytes(key[:4], "big"))}
    assert timers_of(store) == timers
    of_store = counts_of(store)
    for queue_id, counts in counts_of(original).items():
        if not is_defined(original, queue_id):
            continue
        there = of_store.get(queue_id, Counts())
        assert there[1:4] == counts[1:4]
        if part_of(queue_id) in set(Part):
            assert there.next_sequence_number >= max(
                (number + 1 for each, _, number in wanted if each == queue_id), default=1
            )
