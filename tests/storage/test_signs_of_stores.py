"""Opening, reading and writing stores and logs gives signs of life in small steps, and finds what it finds without."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.liveness import Signs
from storage.lmdb_store import AT_ONCE, LmdbStore
from storage.log.commit_log import LogLimits
from storage.log.recovery import detach
from storage.log.segments import segment_numbers
from storage.store import StoreError, Table
from tests.logs import attached_tables, crash, open_log

COUNT = 40 * AT_ONCE
LIMITS = LogLimits(4 << 20, 16 << 20)  # no checkpoint is due


class Heard(Signs):
    """Counts signs, and those that tell of the disk."""

    def __init__(self) -> None:
        self.beats = self.disk = 0

    def _tell(self, waits_for_disk: bool) -> None:
        self.beats += 1
        self.disk += waits_for_disk


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.fixture
def signs():
    return Heard()


@pytest.fixture
def store(tmp_path, signs):
    with LmdbStore(tmp_path / "0", partition_id=0, map_size_bytes=1 << 26, create=True, signs=signs) as store:
        yield store


def test_writes_give_signs_in_steps(store, signs):
    items = [(key(number), bytes(100)) for number in range(COUNT)]
    before = signs.beats
    store.append(Table.MESSAGES, items)
    assert signs.beats - before >= COUNT / AT_ONCE
    before = signs.beats
    store.put_many(Table.MESSAGES, items)
    assert signs.beats - before >= COUNT / AT_ONCE
    before, disk = signs.beats, signs.disk
    store.commit()
    assert signs.disk == disk + 1
    store.delete_many(Table.MESSAGES, map(key, range(COUNT)))
    assert signs.beats - before >= COUNT / AT_ONCE
    assert store.record_count(Table.MESSAGES) == 0
    with pytest.raises(StoreError, match="not in order"):
        store.append(Table.MESSAGES, [*items, items[0]])


def test_reads_give_signs_only_while_that_is_wanted(store, signs):
    store.append(Table.QUEUE, [(key(number), b"") for number in range(COUNT)])
    store.commit()

    def read():
        assert store.get(Table.QUEUE, key(1)) == b""
        assert store.last_key(Table.QUEUE) == key(COUNT - 1)
        return store.scan(Table.QUEUE, b"", b"\xff" * 9, 1 << 32)

    before = signs.beats
    usual = read()
    assert signs.beats == before
    with store.giving_signs():
        assert read() == usual
    assert signs.beats - before >= COUNT / AT_ONCE
    before = signs.beats
    assert read() == usual
    assert signs.beats == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sets(st.integers(0, 400)),
    st.integers(0, 400),
    st.integers(0, 400),
    st.one_of(st.integers(0, 5), st.integers(0, 300), st.just(1 << 32)),
    st.booleans(),
)
def test_scans_in_steps_find_what_scans_find(store, numbers, start, end, limit, reverse):
    store.delete_many(Table.DUE, [each for each, _ in store.scan(Table.DUE, b"", b"\xff" * 9, 1 << 32)])
    store.put_many(Table.DUE, [(key(number), b"v") for number in numbers])
    arguments = Table.DUE, key(start), key(end), limit, reverse
    usual = store.scan(*arguments)
    with store.giving_signs():
        assert store.scan(*arguments) == usual


def test_the_recovery_of_a_log_gives_signs_in_steps(tmp_path, signs):
    log = open_log(tmp_path, (0, 1), limits=LIMITS)
    for number in range(300):
        for store in log.stores.values():
            store.put(Table.MESSAGES, key(number), bytes(3000))
        log.commit()
    segments = len(segment_numbers(log._directory))
    crash(log)
    again = open_log(tmp_path, (0, 1), limits=LIMITS, signs=signs)
    assert signs.beats > 300 + segments * 2
    assert signs.disk > segments
    again.stores[0].put(Table.MESSAGES, key(0), b"")
    again.commit()
    crash(again)
    before, disk = signs.beats, signs.disk
    with attached_tables(tmp_path, (0, 1)) as tables:
        detach(tables, lambda _: None, signs)
    assert signs.beats - before > segments
    assert signs.disk - disk > segments
