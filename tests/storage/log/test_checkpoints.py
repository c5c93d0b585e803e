"""What a checkpointer process is given, in pieces, and the memory that this takes."""

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.log.changes import Layer, Operation
from storage.log.checkpointing import KEPT_BYTES, PIECE_ITEMS
from storage.log.commit_log import LogLimits
from storage.store import Table
from tests.logs import attached_tables, checkpoint, crash, open_log
from tests.patience import eventually

MIB = 1 << 20
PARTITIONS = (0, 1)
EVERYTHING = (b"\0", b"\xff" * 9, 100_000)
LARGE = LogLimits(segment_bytes=64 * MIB, log_bytes=256 * MIB)  # nothing but a test begins a checkpoint

keys = st.binary(min_size=1, max_size=2)
items = st.lists(st.tuples(keys, st.binary(max_size=3)), max_size=9, unique_by=lambda item: item[0])
operations = st.lists(
    st.one_of(
        st.tuples(st.just(Operation.PUT), st.sampled_from(Table), items),
        st.tuples(st.just(Operation.DELETE), st.sampled_from(Table), st.lists(keys, max_size=9)),
    ),
    max_size=12,
)


def in_order(effect):
    """Keys are deleted in any order: a piece joins those of small operations behind those of large ones."""
    table, deleted, changed, fresh = effect
    return table, sorted(deleted), changed, fresh


@given(operations, st.lists(st.tuples(st.sampled_from(Table), items), max_size=3), st.integers(1, 10))
@example([(Operation.DELETE, Table.META, [b"a"]), (Operation.DELETE, Table.META, [b"b", b"b"])], [], 8)
def test_pieces_are_parts_of_the_net_effect(operations, inserted, most):
    layer = Layer()
    for table, new in inserted:
        there = layer.tables[table].fresh
        layer.apply([(Operation.INSERT, table, [item for item in new if item[0] not in there])])
    layer.apply(operations)
    joined = []
    for table, deleted, changed, fresh in layer.pieces(most):
        assert deleted or changed or fresh
        assert len(fresh) <= most
        if not joined or joined[-1][0] != table:
            joined.append((table, [], [], []))
        for whole, part in zip(joined[-1][1:], (deleted, changed, fresh), strict=True):
            whole += part
    assert list(map(in_order, joined)) == list(map(in_order, layer.net_effect()))
    assert [table for table, *_ in joined] == sorted({table for table, *_ in joined})


def key(number):
    return number.to_bytes(4, "big")


def contents(directory):
    with attached_tables(directory, PARTITIONS) as tables:
        return {
            (partition, table): dict(store.scan(table, *EVERYTHING))
            for partition, store in tables.items()
            for table in (Table.MESSAGES, Table.QUEUE)
        }


@pytest.mark.parametrize("count", [1, PIECE_ITEMS - 1, PIECE_ITEMS, PIECE_ITEMS + 1, 10 * PIECE_ITEMS + 3])
def test_a_checkpoint_in_pieces_is_in_the_tables_of_all_partitions(tmp_path, count):
    log = open_log(tmp_path, PARTITIONS, limits=LARGE)
    log.beat()
    expected = {}
    for partition, store in log.stores.items():
        bodies = [(key(number), bytes([partition]) * (number % 7 * 1000)) for number in range(1, count + 1)]
        entries = [(key(count - number), b"%d" % partition) for number in range(count)]
        store.append(Table.MESSAGES, bodies)
        store.insert_many(Table.QUEUE, entries)
        expected[partition, Table.MESSAGES], expected[partition, Table.QUEUE] = dict(bodies), dict(entries)
    log.commit()
    checkpoint(log)
    for partition, store in log.stores.items():
        gone = [key(number) for number in range(1, count + 1, 2)]
        store.delete_many(Table.MESSAGES, gone)
        store.put_many(Table.QUEUE, [(each, b"changed") for each in gone])
        for each in gone:
            del expected[partition, Table.MESSAGES][each]
            expected[partition, Table.QUEUE][each] = b"changed"
    log.commit()
    checkpoint(log)
    crash(log)
    assert contents(tmp_path) == expected


def test_the_shared_memory_is_used_again_and_given_back(tmp_path):
    log = open_log(tmp_path, PARTITIONS, limits=LARGE)
    log.beat()

    def memory():
        return os.fstat(log.checkpointer._memory).st_size

    def write(first, count, size):
        log.stores[0].append(Table.MESSAGES, [(key(first + each), b"v" * size) for each in range(count)])
        log.commit()
        checkpoint(log)

    write(1, 100, 10_000)
    used = memory()
    assert used > MIB // 2
    write(101, 100, 1000)
    assert memory() == used
    write(201, 40, MIB)
    assert memory() == KEPT_BYTES
    log.beat()
    assert memory() == 0
    write(241, 100, 1000)
    log.stores[0].append(Table.MESSAGES, [(key(341), b"v")])
    log.commit()
    log.beat()
    assert memory() > 0, "a checkpoint is due soon, which needs it again"
    crash(log)


def test_the_checkpointer_does_not_take_the_processor_from_its_worker(tmp_path):
    log = open_log(tmp_path, PARTITIONS)
    log.beat()
    pid = log.checkpointer.pid
    assert pid is not None
    eventually(lambda: os.sched_getscheduler(pid) == os.SCHED_BATCH, "it is for batches")
    crash(log)
