"""Message ids that were seen: found until their windows end, whatever becomes of where they are."""

import pytest

from storage.memory import MemoryStore
from storage.records import (
    NEVER,
    CorruptRecord,
    chunk_key,
    decode_manifest,
    decode_rows,
    decode_seen,
    encode_manifest,
    encode_rows,
    encode_seen,
    find_seen,
    run_key,
)
from storage.seen_ids import LONGEST_WINDOW_MS, PURGE_EVERY_MS, SeenIds, free_ids
from storage.seen_runs import SeenLimits, SeenMemory, filter_bytes_for
from storage.store import Table
from tests.storage.partition_contents import start
from tests.storage.seen_ids_driver import ENTITY, SMALL, TABLES, Ids, digests

OTHER = 8


# -- how they are kept


def test_recent_ids_become_runs_and_runs_become_larger_ones():
    ids = Ids()
    many = digests(64)
    for at in range(0, 64, 4):
        ids.add(*many[at : at + 4])
        ids.work()
    assert ids.levels() == [4]
    assert ids.records(Table.DUPLICATE_LOG) == []
    assert len(ids.records(Table.DUPLICATE_CHUNKS)) == 32
    assert ids.find(*many) == {digest: number for number, digest in enumerate(many, 1)}
    assert ids.find(*digests(64, 5)) == {}


def test_each_digest_of_those_that_begin_alike_is_found():
    ids = Ids()
    many = [bytes(8) + digest[8:] for digest in digests(50)]
    for at in range(0, 40, 5):
        ids.add(*many[at : at + 5])
        ids.work()
    assert ids.find(*many) == {digest: number for number, digest in enumerate(many[:40], 1)}


def test_all_recent_ids_are_known_after_a_restart():
    """More than are read at once."""
    ids = Ids(SeenLimits(run_ids=1000, fan_out=2, chunk_ids=2, step_ids=3))
    many = digests(200)
    for each in many:
        ids.add(each)
    assert ids.records(Table.DUPLICATE_RUNS) == []
    ids.start()
    assert ids.find(*many) == {digest: number for number, digest in enumerate(many, 1)}


def test_an_id_that_came_again_is_found_under_its_new_number():
    ids = Ids()
    first = digests(4)
    ids.add(*first, window_ms=10)
    ids.work()
    ids.now_ms += 10
    assert ids.find(*first) == {}
    again = ids.add(*first)
    ids.work()
    assert ids.find(*first) == dict(zip(first, again, strict=True))


def test_ids_are_merged_without_those_whose_windows_have_ended():
    ids = Ids()
    ended, known = digests(4, 1), digests(4, 2)
    ids.add(ended[0], ended[1], known[0], window_ms=10)
    ids.add(known[1], window_ms=10_000)
    ids.work()
    ids.now_ms += 10
    ids.add(*known[2:], *ended[2:])
    ids.work()
    assert ids.levels() == [1]
    assert sum(len(decode_rows(value)) for _, value in ids.records(Table.DUPLICATE_CHUNKS)) == 5


def test_a_run_goes_unread_when_its_last_window_has_ended():
    ids = Ids()
    ids.add(*digests(3), window_ms=10)
    ids.add(*digests(1, 2), window_ms=1000)
    ids.work()
    for key, _ in ids.records(Table.DUPLICATE_CHUNKS):
        ids.store.put(Table.DUPLICATE_CHUNKS, key, b"?")
    ids.now_ms += 999
    assert ids.work() == ids.now_ms + 1 + PURGE_EVERY_MS
    assert ids.levels() == [0]
    ids.now_ms += 1
    assert ids.work() == NEVER
    assert not any(ids.records(table) for table in (*TABLES, Table.QUARANTINE))


def test_ids_of_few_sends_are_deleted_when_their_window_has_ended():
    ids = Ids()
    first, second = digests(2)
    ids.add(first, window_ms=10)
    ids.add(second, window_ms=11)
    assert ids.work() == ids.now_ms + 10 + PURGE_EVERY_MS
    ids.now_ms += 10
    assert ids.work() == ids.now_ms + 1 + PURGE_EVERY_MS
    assert len(ids.records(Table.DUPLICATE_LOG)) == 1
    assert ids.memory.recent_ids == 1
    assert ids.find(first, second) == {second: 2}


class CountingStore(MemoryStore):
    """Counts records read and written."""

    count = 0

    def scan(self, *arguments, **options):
        items = super().scan(*arguments, **options)
        self.count += len(items)
        return items

    def put(self, table, key, value):
        self.count += 1
        super().put(table, key, value)

    def delete(self, table, key):
        self.count += 1
        return super().delete(table, key)


def test_a_run_has_the_ends_of_windows_and_of_the_log_that_it_was_made_of():
    ids = Ids()
    for seed, window_ms in enumerate((1000, 10, 500, 20)):
        ids.add(*digests(4, seed), window_ms=window_ms)
        ids.work()
    [manifest] = [decode_manifest(value) for _, value in ids.records(Table.DUPLICATE_RUNS)]
    assert (manifest.level, manifest.earliest_end_ms, manifest.latest_end_ms, manifest.log_end) == (2, 1010, 2000, 9)
    ids.now_ms += 999
    assert len(ids.find(*digests(4, 0))) == 4
    ids.add(*digests(4, 9), window_ms=10)
    ids.work()
    manifest = decode_manifest(ids.records(Table.DUPLICATE_RUNS)[-1][1])
    assert (manifest.earliest_end_ms, manifest.latest_end_ms) == (ids.now_ms + 10, ids.now_ms + 10)


def test_work_is_done_in_steps():
    ids = Ids(SeenLimits(run_ids=1000, fan_out=4, chunk_ids=1, step_ids=100), CountingStore())
    steps = []

    def work():
        due_ms = 0
        while due_ms <= ids.now_ms:
            before = ids.store.count
            due_ms = ids.step()
            steps.append(ids.store.count - before)

    for seed in range(4):
        ids.add(*digests(1000, seed), window_ms=10)
        work()
    assert ids.levels() == [1]
    ids.now_ms += 10
    work()
    assert not any(ids.records(table) for table in TABLES)
    # An id is read and written, or read and deleted; and a step may end with what it had begun.
    assert max(steps) < 2 * (100 + 100)
    assert len(steps) > 100


def test_a_step_does_more_where_more_comes_in():
    ids = Ids(SeenLimits(run_ids=100, fan_out=4, chunk_ids=10, step_ids=1))
    for seed in range(100):
        ids.add(*digests(50, seed))
        ids.step()
        assert ids.memory.recent_ids <= 300
    assert len(ids.ids._runs) <= 12


def test_jobs_are_finished_even_if_only_one_more_id_came_in():
    ids = Ids(SeenLimits(run_ids=1000, step_ids=300))
    ids.add(*digests(1000))
    ids.step()
    ids.add(*digests(1, seed=2))
    steps = 0
    while ids.step() <= ids.now_ms:
        steps += 1
        assert steps < 20
    assert ids.levels() == [0]


def test_beside_sends_as_much_is_done_as_they_bring():
    store = CountingStore()
    ids = Ids(SeenLimits(run_ids=1000, fan_out=4, chunk_ids=1, step_ids=500), store)
    counts = []
    for seed in range(6000):
        ids.add(*digests(1, seed))
        before = store.count
        if ids.ids.is_busy:
            ids.step()
        counts.append(store.count - before)
    # Three levels at most, and each id is read and written, or read and deleted, for each of these.
    assert sum(counts) < 2 * (3 + 2) * len(counts)
    assert max(counts) < 2 * (500 + 500)
    assert ids.memory.recent_ids < 2000
    assert len(ids.ids._runs) <= 5


def test_all_ids_added_at_once_are_kept_in_records_of_a_page():
    ids = Ids(SeenLimits())
    many = digests(1000)
    ids.add(*many)
    log = ids.records(Table.DUPLICATE_LOG)
    assert [len(decode_rows(value)) for _, value in log] == [127] * 7 + [111]
    assert max(len(value) for _, value in log) <= 4096 - 16
    ids.start()
    assert ids.find(*many) == {digest: number for number, digest in enumerate(many, 1)}


# -- stops and full stores


def test_a_run_that_was_not_complete_is_made_anew():
    ids = Ids()
    many = digests(4)
    ids.add(*many)
    ids.step()
    assert ids.levels() == []
    assert len(ids.records(Table.DUPLICATE_RUNS)) == 1
    ids.start()
    assert ids.find(*many) == {digest: number for number, digest in enumerate(many, 1)}
    ids.work()
    assert ids.levels() == [0]
    assert len(ids.records(Table.DUPLICATE_RUNS)) == 1
    assert len(ids.records(Table.DUPLICATE_CHUNKS)) == 2


def test_in_a_full_store_ids_go_but_no_run_is_made():
    ids = Ids()
    first, second = digests(4, 1), digests(4, 2)
    ids.add(*first, window_ms=10)
    ids.work()
    ids.now_ms += 10
    ids.add(*second)
    assert ids.work(room_bytes=0) == ids.now_ms + PURGE_EVERY_MS
    assert ids.levels() == []
    assert ids.records(Table.DUPLICATE_CHUNKS) == []
    assert ids.find(*first, *second) == {digest: number for number, digest in enumerate(second, 5)}
    ids.work()
    assert ids.levels() == [0]


def test_a_merge_begins_if_there_is_room_for_its_result():
    ids = Ids()
    for seed in range(2):
        ids.add(*digests(4, seed))
        ids.work(room_bytes=300)
    assert ids.levels() == [0, 0]
    ids.work(room_bytes=400)
    assert ids.levels() == [1]


# -- memory


def test_with_many_recent_ids_of_all_entities_runs_are_smaller():
    memory, store = SeenMemory(SeenLimits(run_ids=100, recent_ids=200)), MemoryStore()
    entities = [SeenIds(store, memory, number, 0) for number in range(20)]
    for turn in range(50):
        for number, ids in enumerate(entities):
            sought = digests(2, 100 * number + turn)
            assert ids.find(sought, 0) == {}
            ids.add(sought, [turn, turn], 1000)
            while ids.is_busy:
                ids.step(0, NEVER)
            assert memory.recent_ids <= 2 * 200
    for number, ids in enumerate(entities):
        sought = [digest for turn in range(50) for digest in digests(2, 100 * number + turn)]
        assert len(ids.find(sought, 0)) == 100
        ids.close()
    assert (memory.recent_ids, memory.filter_bytes, memory.entities) == (0, 0, 0)


def test_filters_have_a_limit_and_what_has_none_is_found():
    ids = Ids(SeenLimits(run_ids=4, fan_out=100, chunk_ids=2, filter_bytes=3 * filter_bytes_for(4)))
    many = digests(40)
    for at in range(0, 40, 4):
        ids.add(*many[at : at + 4])
        ids.work()
    assert ids.memory.filter_bytes == ids.limits.filter_bytes
    for _ in range(2):
        assert len(ids.find(*many, *digests(10, 2))) == 40
        ids.start()
    assert ids.find(*many)
    assert 0 < ids.memory.filter_bytes <= ids.limits.filter_bytes


A_MILLION = """
import os, sys
import psutil
from pathlib import Path
from storage.lmdb_store import LmdbStore
from storage.seen_ids import SeenIds
from storage.seen_runs import SeenLimits, SeenMemory

with LmdbStore(Path(sys.argv[1]), partition_id=0, map_size_bytes=1 << 30, create=True) as store:
    ids = SeenIds(store, SeenMemory(SeenLimits()), 1, 0)
    before = psutil.Process().memory_info()
    for number in range(0, 1_000_000, 500):
        new = [os.urandom(16) for _ in range(500)]
        assert not ids.find(new, 0)
        ids.add(new, range(number, number + 500), 1000)
        if ids.is_busy:
            ids.step(0, 1 << 30)
        if number % 20_000 == 0:
            store.commit()
    after = psutil.Process().memory_info()
    print(after.rss - after.shared - before.rss + before.shared)
"""


def test_a_million_ids_take_little_memory(tmp_path):
    """Of this process; what it maps of the store is the kernel's."""
    output, _ = start(A_MILLION, tmp_path / "store").communicate()
    assert 1_000_000 < int(output) < 50_000_000


def test_a_filter_excludes_almost_all_digests_that_are_not_in_it():
    ids = Ids(SeenLimits(run_ids=10_000), CountingStore())
    ids.add(*digests(10_000))
    ids.work()
    ids.find(digests(1, 2)[0])
    for _ in range(2):
        ids.store.count = 0
        assert ids.find(*digests(10_000, 2)) == {}
        assert ids.store.count < 200
        ids.start()  # it is read from the store
        ids.find(digests(1, 2)[0])


def test_giving_memory_back_includes_that_of_jobs():
    ids = Ids()
    for seed in range(4):
        ids.add(*digests(4, seed))
        ids.step()
    assert ids.ids.is_busy
    ids.ids.close()
    assert (ids.memory.recent_ids, ids.memory.filter_bytes, ids.memory.entities) == (0, 0, 0)


# -- what cannot be read


def damage(ids: Ids, table: Table, at: int = 0) -> bytes:
    key, value = ids.records(table)[at]
    ids.store.put(table, key, value[:-1] + bytes([value[-1] ^ 1]))
    return key


def set_aside(ids: Ids) -> list[bytes]:
    return [key for key, _ in ids.records(Table.QUARANTINE)]


def test_an_unreadable_row_of_the_log_is_set_aside_and_its_ids_are_new():
    ids = Ids()
    first, second = digests(2)
    ids.add(first)
    ids.add(second)
    key = damage(ids, Table.DUPLICATE_LOG)
    ids.start()
    assert ids.find(first, second) == {second: 2}
    assert set_aside(ids) == [bytes([Table.DUPLICATE_LOG]) + key]
    ids.add(first)
    ids.start()
    assert ids.find(first, second) == {first: 3, second: 2}


def test_an_unreadable_row_of_the_log_does_not_stay_when_windows_end():
    ids = Ids()
    ids.add(*digests(1))
    ids.add(*digests(1, 2))
    damage(ids, Table.DUPLICATE_LOG)
    ids.start()
    ids.now_ms += 1000 + PURGE_EVERY_MS
    ids.work()
    assert ids.records(Table.DUPLICATE_LOG) == []
    assert len(set_aside(ids)) == 1


def test_an_unreadable_chunk_is_set_aside_and_its_ids_are_new():
    ids = Ids()
    many = sorted(digests(6))
    ids.add(*many)
    ids.work()
    key = damage(ids, Table.DUPLICATE_CHUNKS, 1)
    assert key == chunk_key(ENTITY, 1, many[2])
    assert ids.find(*many) == {many[0]: 1, many[1]: 2, many[4]: 5, many[5]: 6}
    assert set_aside(ids) == [bytes([Table.DUPLICATE_CHUNKS]) + key]
    ids.add(many[2], many[3])
    assert len(ids.find(*many)) == 6


def test_an_unreadable_chunk_is_left_out_of_a_merge():
    ids = Ids()
    first, second = sorted(digests(4, 1)), sorted(digests(4, 2))
    ids.add(*first)
    ids.work()
    damage(ids, Table.DUPLICATE_CHUNKS)
    ids.add(*second)
    ids.work()
    assert ids.levels() == [1]
    assert set(ids.find(*first, *second)) == {*first[2:], *second}
    assert len(set_aside(ids)) == 1


def test_an_unreadable_manifest_is_set_aside_and_made_anew():
    ids = Ids(SeenLimits(run_ids=4, fan_out=3, chunk_ids=2))
    first, second, third = digests(4, 1), digests(4, 2), digests(4, 3)
    ids.add(*first)
    ids.work()
    ids.add(*second)
    ids.work()
    key = damage(ids, Table.DUPLICATE_RUNS, 1)
    ids.start()
    assert len(ids.find(*first, *second)) == 8
    assert set_aside(ids) == [bytes([Table.DUPLICATE_RUNS]) + key]
    ids.start()
    assert len(ids.find(*first, *second)) == 8
    ids.add(*third)
    ids.work()
    assert ids.levels() == [1]
    assert len(ids.find(*first, *second, *third)) == 12
    ids.now_ms += LONGEST_WINDOW_MS
    ids.work()
    assert not any(ids.records(table) for table in TABLES)


def test_an_unreadable_manifest_of_a_run_without_ids_is_freed():
    ids = Ids()
    ids.store.put(Table.DUPLICATE_RUNS, run_key(ENTITY, 3), b"?")
    ids.start()
    ids.work()
    assert ids.records(Table.DUPLICATE_RUNS) == []


@pytest.mark.parametrize("gone", [True, False])
def test_without_a_filter_that_can_be_read_ids_are_found(gone):
    ids = Ids()
    many = digests(4)
    ids.add(*many)
    ids.work()
    key = damage(ids, Table.DUPLICATE_FILTERS)
    if gone:
        ids.store.delete(Table.DUPLICATE_FILTERS, key)
    ids.start()
    assert len(ids.find(*many, *digests(4, 2))) == 4
    assert ids.memory.filter_bytes == 0
    assert set_aside(ids) == ([] if gone else [bytes([Table.DUPLICATE_FILTERS]) + key])


# -- entities


def test_entities_do_not_see_each_others_ids():
    store = MemoryStore()
    ids, memory = Ids(store=store), SeenMemory(SMALL)
    other = SeenIds(store, memory, OTHER, 0)
    many = digests(40)
    ids.add(*many[:20])
    ids.work()
    other.add(many[20:], range(20), 5000)
    while other.is_busy:
        other.step(0, NEVER)
    assert set(ids.find(*many)) == set(many[:20])
    assert set(other.find(many, 0)) == set(many[20:])


def test_of_a_deleted_entity_all_is_freed_some_at_a_time():
    store = MemoryStore()
    ids = Ids(store=store)
    other = SeenIds(store, SeenMemory(SMALL), OTHER, 0)
    other.add(digests(2), [1, 2], 5000)
    ids.add(*digests(9))
    ids.work()
    ids.add(*digests(3, 2))
    left = sum(len(ids.records(table)) for table in TABLES)
    while free_ids(store, ENTITY, 2):
        now = sum(len(ids.records(table)) for table in TABLES)
        assert left - 2 <= now < left
        left = now
    assert left == 1
    assert len(other.find(digests(2), 0)) == 2


# -- records


def test_rows_are_in_the_order_of_digests_and_ends():
    first, second = digests(2)
    rows = [encode_seen(first, end_ms, 1) for end_ms in (0, 5, 255, 256, 1 << 60)]
    assert rows == sorted(rows)
    assert decode_seen(rows[3]) == (256, 1)
    assert find_seen(encode_rows(rows), first) == (1 << 60, 1)
    assert find_seen(encode_rows(rows), second) is None


def test_values_that_are_damaged_are_not_read():
    value = encode_rows([encode_seen(digest, 5, 7) for digest in digests(3)])
    manifest = decode_manifest(encode_manifest(decode_manifest(manifest_of_a_run())))
    assert manifest.complete
    for damaged in (b"", value[:-1], value[:-1] + b"?", value[:8], encode_rows([])):
        with pytest.raises(CorruptRecord):
            decode_rows(damaged)
        with pytest.raises(CorruptRecord):
            find_seen(damaged, digests(1)[0])
    for damaged in (b"", manifest_of_a_run()[:-1], manifest_of_a_run()[:-1] + b"?"):
        with pytest.raises(CorruptRecord):
            decode_manifest(damaged)


def manifest_of_a_run() -> bytes:
    ids = Ids()
    ids.add(*digests(4))
    ids.work()
    [(_, value)] = ids.records(Table.DUPLICATE_RUNS)
    return value
