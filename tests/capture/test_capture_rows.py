"""Rows go into files and come out again, whatever is in them: against a dict of rows."""

import shutil
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.capture.compaction import compact
from storage.capture.errors import DamagedFile, ForeignRows, NotCaptured
from storage.capture.place import Place
from storage.capture.reading import Captured
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.journal.schema import SCHEMA
from tests.capture.checks import captured_rows
from tests.capture.synthetic_rows import EPOCH, batch
from tests.examples import examples

NAMESPACE = "sämple"
LATEST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
HUGE = (1 << 63) - 1

times = st.one_of(
    st.sampled_from([datetime(1970, 1, 1, tzinfo=UTC), LATEST]),
    st.datetimes(datetime(2026, 1, 31, 22), datetime(2026, 2, 1, 2), timezones=st.just(UTC)),
)
texts = st.one_of(
    st.none(),
    st.sampled_from(["", "orders", "a/subscriptions/b", "\x00", "😀", "\uffff", "x" * 3000]),
    st.text(max_size=4),
)
numbers = st.one_of(st.none(), st.sampled_from([0, 1, HUGE, -HUGE - 1]))
rows = st.fixed_dictionaries(
    {
        "eventTime": times,
        "op": st.sampled_from(["enqueued", "completed", ""]),
        "entity": texts,
        "subQueue": texts,
        "sequenceNumber": numbers,
        "messageId": texts,
        "sessionId": texts,
        "enqueuedTime": st.one_of(st.none(), times),
        "bodySize": numbers,
        "description": texts,
        "copies": st.one_of(st.none(), st.integers(-(1 << 31), (1 << 31) - 1)),
        "record": st.one_of(st.none(), st.binary(max_size=5), st.just(b"\x00" * 70_000)),
        "overlay": st.one_of(st.none(), st.binary(max_size=5)),
    }
)
# What is done: rows of a partition, perhaps written out after them.
steps = st.lists(st.tuples(st.integers(0, 2), st.lists(rows, min_size=1, max_size=6), st.booleans()), max_size=8)


def of_rows(partition: int, first: int, given: list[dict[str, object]]) -> pa.RecordBatch:
    full = [
        {**dict.fromkeys(SCHEMA.names), "partition": partition, "journalOffset": first + at, **row}
        for at, row in enumerate(given)
    ]
    return pa.RecordBatch.from_pylist(full, SCHEMA)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=steps, start=st.sampled_from([0, 7, HUGE - 100]), data=st.data())
def test_what_was_added_is_read_again(tmp_path_factory, steps, start, data):
    folder = tmp_path_factory.mktemp("capture")
    place = Place.of(str(folder))
    wanted: dict[int, list[dict[str, object]]] = defaultdict(list)
    options = CaptureOptions(compact_after_seconds=0)
    with CaptureWriter(place, NAMESPACE, options) as writer:
        for partition, given_rows, is_written in steps:
            added = of_rows(partition, start + len(wanted[partition]), given_rows)
            writer.add(partition, EPOCH, added)
            wanted[partition] += added.to_pylist()
            if is_written:
                writer.roll()
        writer.roll()
        check_all(folder, wanted, start, data)
        damaged: dict[str, DamagedFile] = {}
        compact(writer, damaged, most=100)
        assert not damaged
    check_all(folder, wanted, start, data)
    shutil.rmtree(folder)


def check_all(folder: Path, wanted: dict[int, list[dict[str, object]]], start: int, data) -> None:
    by_other_reader = captured_rows(folder)
    assert by_other_reader == {
        (partition, EPOCH): [{"namespace": NAMESPACE, "epoch": EPOCH, **row} for row in found]
        for partition, found in wanted.items()
    }
    found = Captured(Place.of(str(folder)))
    for partition, expected in wanted.items():
        first = data.draw(st.integers(0, len(expected)))
        end = data.draw(st.integers(first, len(expected)))
        with_records = list(found.batches(partition, EPOCH, start + first, start + end))
        assert all(each.schema.equals(SCHEMA) for each in with_records)
        assert [row for each in with_records for row in each.to_pylist()] == expected[first:end]
        without = found.batches(partition, EPOCH, start + first, start + end, records=False)
        assert [row for each in without for row in each.to_pylist()] == [
            {**row, "record": None, "overlay": None} for row in expected[first:end]
        ]


def column(name: str, values: list[object]) -> pa.RecordBatch:
    """Rows of which one column is another."""
    made = batch(0, 5, 5 + len(values))
    columns = [pa.array(values, each.type) if each.name == name else made.column(each.name) for each in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@pytest.mark.parametrize(
    ("foreign", "text"),
    [
        (batch(0, 6, 9), "expected the offsets 5 to 7, got others, from 6 to 8"),
        (batch(0, 4, 9), "expected the offsets 5 to 9, got others, from 4 to 8"),
        (batch(1, 5, 9), "got rows of another partition"),
        (column("journalOffset", [5, 7, 6]), "expected the offsets 5 to 7"),
        (column("journalOffset", [5, 6, 6]), "expected the offsets 5 to 7"),
        (column("journalOffset", [5, None, 7]), "journalOffset is null"),
        (column("partition", [0, None, 0]), "partition is null"),
        (column("op", ["a", None, "b"]), "op is null"),
        (column("eventTime", [0, -1, 0]), "eventTime is not within 1970 to 9999"),
        (column("eventTime", [HUGE] * 3), "eventTime is not within 1970 to 9999"),
        (batch(0, 5, 9).drop_columns(["copies"]), "the columns are not those of the journal: .*copies"),
        (batch(0, 5, 9).rename_columns(["Partition", *SCHEMA.names[1:]]), "the columns are not those of the journal"),
        (batch(0, 5, 9).select(SCHEMA.names[::-1]), "the columns are not those of the journal: their order"),
    ],
)
def test_rows_that_are_not_the_next_ones_are_refused(tmp_path, foreign, text):
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions()) as writer:
        writer.add(0, EPOCH, batch(0, 0, 5))
        with pytest.raises(ForeignRows, match=text):
            writer.add(0, EPOCH, foreign)
        writer.add(0, EPOCH, batch(0, 5, 9))  # none of the others was taken
        writer.roll()
    assert [row["journalOffset"] for row in captured_rows(tmp_path)[0, EPOCH]] == list(range(9))


@pytest.mark.parametrize("first", [None, -1])
def test_a_first_offset_that_is_none_is_refused(tmp_path, first):
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions()) as writer:
        with pytest.raises(ForeignRows, match="journalOffset is"):
            writer.add(0, EPOCH, column("journalOffset", [first, 1, 2]))
        assert writer.next_offset(0, EPOCH) is None


def test_no_rows_are_no_files(tmp_path):
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions()) as writer:
        writer.add(0, EPOCH, batch(0, 0, 0))
        assert not writer.is_due()
        assert writer.roll() == ()
    assert captured_rows(tmp_path) == {}


def test_a_roll_is_due_by_time_or_by_size(tmp_path):
    now = [1000.0]
    options = CaptureOptions(file_bytes=200_000, memory_bytes=300_000, roll_seconds=60)
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, options, monotonic=lambda: now[0]) as writer:
        assert not writer.is_due()
        writer.add(0, EPOCH, batch(0, 0, 3))
        now[0] += 59.9
        assert not writer.is_due()
        now[0] += 0.1
        assert writer.is_due()
        writer.roll()
        assert not writer.is_due()
        first = 3
        while not writer.is_due():
            writer.add(0, EPOCH, batch(0, first, first + 30, rows_per_second=1000, body_bytes=1000))
            first += 30
        [_, messages] = writer.roll()
        assert 180_000 < messages.bytes < 230_000


def test_quiet_entities_and_partitions_share_files(tmp_path):
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions()) as writer:
        for partition in range(16):
            writer.add(partition, EPOCH, batch(partition, 0, 12, body_bytes=10))
        assert len(writer.roll()) == 2


def test_offsets_of_two_epochs_are_kept_apart(tmp_path):
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions(compact_after_seconds=0)) as writer:
        for epoch, first in ((EPOCH, 0), ("00000000000000b2", 2)):
            writer.add(0, epoch, batch(0, first, first + 6))
            writer.roll()
        assert compact(writer, {}) == 2
    found = Captured(Place.of(str(tmp_path)))
    assert [tuple(each) for each in found.ranges()] == [(0, EPOCH, 0, 6), (0, "00000000000000b2", 2, 8)]
    for epoch, first in ((EPOCH, 0), ("00000000000000b2", 2)):
        rows = pa.Table.from_batches(found.batches(0, epoch, first, first + 6))
        assert rows.equals(pa.Table.from_batches([batch(0, first, first + 6)]))


@pytest.mark.parametrize(
    ("partition", "epoch", "first", "end"),
    [(0, EPOCH, 0, 10), (0, EPOCH, 9, 10), (0, EPOCH, 0, 1), (1, EPOCH, 3, 4), (0, "0" * 16, 3, 4), (0, EPOCH, -1, 4)],
)
def test_rows_that_are_not_there_are_named(tmp_path, partition, epoch, first, end):
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions()) as writer:
        writer.add(0, EPOCH, batch(0, 3, 9))
        writer.roll()
    found = Captured(Place.of(str(tmp_path)))
    with pytest.raises(NotCaptured) as caught:
        next(found.batches(partition, epoch, first, end))
    assert (caught.value.partition, caught.value.epoch, caught.value.first) == (partition, epoch, first)
    assert list(found.batches(partition, epoch, first, first)) == []


def test_an_empty_folder_has_nothing(tmp_path):
    found = Captured(Place.of(str(tmp_path / "none")))
    assert found.ranges() == []
    assert found.files() == []
    assert found.uris() == []
    assert found.namespace is None


def test_a_clock_that_is_set_back_mixes_the_hours_of_offsets(tmp_path):
    """Files of two hours then have offsets that lie between each other's."""
    hours = [datetime(2026, 1, 31, 22, tzinfo=UTC) + timedelta(hours=each) for each in (0, 1, 0, 1, 2, 0)]
    with CaptureWriter(Place.of(str(tmp_path)), NAMESPACE, CaptureOptions()) as writer:
        writer.add(0, EPOCH, of_rows(0, 0, [{"eventTime": each, "op": "completed"} for each in hours]))
        assert len(writer.roll()) == 3
    found = Captured(Place.of(str(tmp_path)))
    assert [row["eventTime"] for each in found.batches(0, EPOCH, 1, 6) for row in each.to_pylist()] == hours[1:]
