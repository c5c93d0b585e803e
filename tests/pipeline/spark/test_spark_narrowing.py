"""What a query does not want is not read: columns, offsets, times, entities and kinds of events. No Java."""

import json
from datetime import UTC, datetime, timedelta

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.types import StructType

from protocol.client.messages import Message
from pyspark_peeklock.conditions import NO_CONDITIONS
from pyspark_peeklock.counting import count_rows
from pyspark_peeklock.errors import InvalidOption
from pyspark_peeklock.journal import FilteringJournalReader, JournalReader, JournalStreamReader
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.journal_offsets import TriggerDelay, places, position, rows_between
from pyspark_peeklock.options import Access, JournalOptions, Options
from pyspark_peeklock.parts import OffsetRange
from pyspark_peeklock.rows import SCHEMA
from storage.capture.place import Place
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.pipeline.spark.faulty_journal import (
    EPOCH,
    T0,
    Journal,
    JournalServer,
    Partition,
    message_of,
    record_of,
    rows,
)

START = datetime.fromtimestamp(T0 / 1_000_000, UTC)
ENTITIES = ("orders", "Invoices", "a*[b]?")


@pytest.fixture
def journal():
    tables = [rows(0, 50 * at, 50, entity, message_of) for at, entity in enumerate(ENTITIES)]
    return Journal({0: Partition(pa.concat_tables(tables)), 2: Partition(rows(2, 0, 100))})


@pytest.fixture
def server(journal):
    with JournalServer(journal) as server:
        yield server


@pytest.fixture
def options(server, tmp_path):
    path = tmp_path / "secret"
    path.write_text("Endpoint=sb://localhost;SharedAccessKeyName=n;SharedAccessKey=k;UseDevelopmentEmulator=true")
    return {"connectionStringFile": str(path), "httpEndpoint": server.url, "retryTimeoutSeconds": "2"}


@pytest.fixture
def reader(options):
    def make(*conditions, kind=FilteringJournalReader, schema=SCHEMA, **more):
        texts = {**options, **{name: str(value) for name, value in more.items()}}
        made = kind(JournalOptions.of(Options(texts), is_stream=kind is JournalStreamReader), schema)
        if conditions:
            left = list(made.pushFilters(list(conditions)))
            assert left == [each for each in conditions if each.attribute == TIME], "Spark looks at times again"
        return made

    return make


def batches(reader):
    return [batch for task in reader.partitions() for batch in reader.read(task)]


def keys(reader):
    return sorted((row["partition"], row["journalOffset"]) for batch in batches(reader) for row in batch.to_pylist())


def grid(*ranges):
    return [(partition, offset) for partition, first, end in ranges for offset in range(first, end)]


def at(seconds):
    return START + timedelta(seconds=seconds)


# --- conditions -------------------------------------------------------------------------------------------------------

OFFSET, TIME, ENTITY, OP, PARTITION = ("journalOffset",), ("eventTime",), ("entity",), ("op",), ("partition",)
COMPARISONS = {
    EqualTo: lambda value, other: value == other,
    GreaterThan: lambda value, other: value > other,
    GreaterThanOrEqual: lambda value, other: value >= other,
    LessThan: lambda value, other: value < other,
    LessThanOrEqual: lambda value, other: value <= other,
}


@given(st.lists(st.tuples(st.sampled_from(list(COMPARISONS)), st.integers(-2, 12), st.booleans()), max_size=5))
def test_bounds_of_offsets_and_times_are_exact(conditions):
    found = NO_CONDITIONS
    for kind, value, is_time in conditions:
        further = found.and_also(kind(TIME, at(value)) if is_time else kind(OFFSET, value))
        assert further is not None
        found = further
    for offset in range(11):
        by_offset = all(COMPARISONS[kind](offset, value) for kind, value, is_time in conditions if not is_time)
        assert by_offset == (found.first <= offset < found.end)
        by_time = all(COMPARISONS[kind](at(offset), at(value)) for kind, value, is_time in conditions if is_time)
        since, until = found.since or at(-9), found.until or at(99)
        assert by_time == (since <= at(offset) < until)


def test_conditions_that_are_not_met_here_stay_with_spark():
    for each in (
        IsNotNull(OP),
        Not(EqualTo(OP, "enqueued")),
        EqualNullSafe(OP, None),
        EqualTo(("messageId",), "1"),
        EqualTo(OFFSET, "1"),
        EqualTo(OFFSET, None),
        EqualTo(TIME, None),
        GreaterThan(OP, "a"),
        EqualTo(OP, None),
        In(PARTITION, ("0",)),
        LessThanOrEqual(TIME, datetime.max.replace(tzinfo=UTC)),
    ):
        assert NO_CONDITIONS.and_also(each) is None


def test_offsets_and_partitions_narrow_what_is_asked_for(reader, journal):
    assert keys(reader(GreaterThan(OFFSET, 89), LessThan(OFFSET, 95))) == grid((0, 90, 95), (2, 90, 95))
    assert keys(reader(EqualTo(PARTITION, 2), GreaterThanOrEqual(OFFSET, 99))) == grid((2, 99, 100))
    assert keys(reader(In(PARTITION, (0, 7, None)), In(PARTITION, (0, 2)), EqualTo(OFFSET, 149))) == grid((0, 149, 150))
    assert {request[1:3] for request in journal.requests} == {(90, 95), (99, 100), (149, 150)}
    for nothing in (EqualTo(PARTITION, 1), GreaterThan(OFFSET, 10_000), LessThan(OFFSET, 0)):
        assert keys(reader(nothing)) == []
    assert keys(reader(GreaterThan(OFFSET, 89), endingOffsets='{"0": 92, "2": 40}')) == grid((0, 90, 92))


def test_times_narrow_what_is_asked_for(reader, journal):
    found = keys(reader(GreaterThan(TIME, at(96)), LessThanOrEqual(TIME, at(98))))
    assert found == grid((0, 97, 99), (2, 97, 99))
    assert keys(reader(EqualTo(TIME, at(149).replace(tzinfo=None)))) == grid((0, 149, 150))
    assert keys(reader(GreaterThan(TIME, at(1000)))) == []


def test_of_entities_and_events_only_the_wanted_rows_come(reader, journal):
    assert keys(reader(EqualTo(ENTITY, "Invoices"))) == grid((0, 50, 100))
    assert {query["entity"] for *_, query in journal.requests} == {"Invoices"}
    assert keys(reader(EqualTo(ENTITY, "INVOICES"))) == [], "Spark compares to the letter"
    assert keys(reader(EqualTo(ENTITY, "a*[b]?"))) == grid((0, 100, 150))
    journal.requests.clear()
    assert keys(reader(In(ENTITY, ("orders", "a*[b]?", None)), EqualTo(PARTITION, 0))) == grid(
        (0, 0, 50), (0, 100, 150)
    )
    assert not any("entity" in query for *_, query in journal.requests)
    assert keys(reader(EqualTo(ENTITY, "Invoices"), entity="inv*")) == grid((0, 50, 100))
    assert keys(reader(EqualTo(OP, "completed"))) == []
    narrow = reader(EqualTo(OP, "enqueued"), In(ENTITY, ("orders",)), schema=StructType([SCHEMA["sequenceNumber"]]))
    assert sum(batch.num_rows for batch in batches(narrow)) == 150
    assert {tuple(batch.schema.names) for batch in batches(narrow)} == {("sequenceNumber",)}


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_that_are_not_wanted_are_not_even_decompressed(options, journal):
    client = JournalClient(Endpoint(Access(options["connectionStringFile"], None), options["httpEndpoint"], 2))
    whole = OffsetRange(0, EPOCH, 0, 150)
    found = list(client.batches(whole, entity=None, records=False, columns={"entity", "namespace"}))
    assert {tuple(batch.schema.names) for batch in found} == {
        ("journalOffset", "op", "entity", "reason", "description")
    }
    assert sum(batch.num_rows for batch in found) == 150
    journal.faults += ["cut", "cut between", "slow"]
    again = list(client.batches(whole, entity=None, records=True, columns={"record"}))
    assert [offset for batch in again for offset in batch.column("journalOffset").to_pylist()] == list(range(150))
    client.close()


@pytest.mark.parametrize("names", [["body"], ["op", "entity"], ["epoch"], ["replyTo", "bodySize"], SCHEMA.fieldNames()])
def test_a_schema_has_the_rows_of_the_whole_one(reader, journal, tmp_path, names):
    folder = tmp_path / "captured"
    with CaptureWriter(Place.of(str(folder)), "ns", CaptureOptions()) as writer:
        for batch in journal.partitions[0].table.slice(0, 120).to_batches():
            writer.add(0, EPOCH, batch)
        writer.roll()
    whole = pa.Table.from_batches(batches(reader(kind=JournalReader))).select(names)
    journal.partitions[0].low = 80
    schema = StructType([SCHEMA[name] for name in names])
    found = pa.Table.from_batches(batches(reader(kind=JournalReader, schema=schema, capturePath=folder)))
    assert found.to_pylist() == whole.to_pylist()


def test_a_row_in_the_place_of_damaged_ones_has_its_columns(reader, journal):
    row = {"partition": 2, "journalOffset": 59, "eventTime": 0, "op": "truncated", "reason": "damaged"}
    table = journal.partitions[2].table
    gap = pa.Table.from_pylist([dict.fromkeys(table.schema.names) | row | {"description": "why"}], table.schema)
    journal.partitions[2].table = pa.concat_tables([table.slice(0, 50), gap, table.slice(60)])
    schema = StructType([SCHEMA[name] for name in ("journalOffset", "op", "amqpMessage", "body")])
    lenient = {"schema": schema, "kind": JournalReader, "failOnDataLoss": "false", "includeAmqpMessage": "true"}
    for entity in ({}, {"entity": "*"}):
        found = pa.Table.from_batches(batches(reader(**lenient, **entity, startingOffsets='{"0": 150}')))
        assert found["journalOffset"].to_pylist() == [*range(50), *range(59, 100)]
        assert found["op"].to_pylist().count("truncated") == 1


def test_small_batches_are_joined(reader, journal):
    journal.batch_rows = 7
    assert [batch.num_rows for batch in batches(reader())] == [150, 100]


def test_large_batches_are_not_copied_into_larger_ones(reader, journal):
    record = record_of(Message.of(bytes(12 << 10)))
    journal.partitions = {0: Partition(rows(0, 0, 250, record=lambda _: record))}
    assert [batch.num_rows for batch in batches(reader())] == [100, 100, 50]


def test_batches_are_decompressed_by_the_thread_that_reads_them(reader, monkeypatch):
    options, opened = [], pa.ipc.open_stream
    monkeypatch.setattr(
        pa.ipc, "open_stream", lambda *given, **more: options.append(more["options"]) or opened(*given, **more)
    )
    batches(reader())
    assert [each.use_threads for each in options] == [False, False]


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_range_of_times(reader):
    plain = {"kind": JournalReader}
    assert keys(reader(**plain, startingTimestamp=T0 // 1000 + 90_000, endingTimestamp=T0 // 1000 + 92_000)) == grid(
        (0, 90, 92), (2, 90, 92)
    )
    texts = {
        "startingOffsetsByTimestamp": json.dumps({"0": at(148).isoformat()}),
        "endingOffsetsByTimestamp": json.dumps({"2": T0 // 1000 + 1}),
    }
    assert keys(reader(**plain, **texts)) == grid((0, 148, 150), (2, 0, 1))
    with pytest.raises(InvalidOption, match="option 'endingOffsetsByTimestamp': there is no partition 1; there are"):
        reader(**plain, endingOffsetsByTimestamp='{"1": 0}').partitions()


def test_rows_are_counted(options, journal):
    assert count_rows(options) == 250
    assert count_rows({**options, "startingOffsets": '{"0": 140}', "includeBody": False}) == 110
    assert journal.requests == [], "without a row"
    assert count_rows({**options, "entity": "inv*"}) == 50
    with pytest.raises(InvalidOption, match="'maxMessagesPerTrigger' is for streams"):
        count_rows({**options, "maxMessagesPerTrigger": 5})


def test_a_stream_waits_for_enough_rows_but_not_for_too_long(reader, journal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pyspark_peeklock.journal.time.monotonic", lambda: now[0])
    stream = reader(kind=JournalStreamReader, minOffsetsPerTrigger=20, maxTriggerDelay="30s")
    start = position([(0, EPOCH, 150), (2, EPOCH, 95)])
    limit = stream.getDefaultReadLimit()
    first = stream.latestOffset(start, limit)
    assert places(first) == {0: (EPOCH, 150), 2: (EPOCH, 100)}, "the first does not wait"
    journal.partitions[2].table = rows(2, 0, 110)
    assert stream.latestOffset(first, limit) == first
    now[0] += 29
    assert stream.latestOffset(first, limit) == first
    now[0] += 1
    late = stream.latestOffset(first, limit)
    assert rows_between(first, late) == 10
    journal.partitions[2].table = rows(2, 0, 130)
    assert rows_between(late, stream.latestOffset(late, limit)) == 20
    journal.partitions[2].table = rows(2, 0, 131)
    stream.prepareForTriggerAvailableNow()
    assert rows_between(late, stream.latestOffset(late, limit)) == 21
    stream.stop()


def test_without_rows_there_is_no_batch_to_count_the_delay_from():
    delay = TriggerDelay(10, 30.0)
    assert delay.is_over(0, 0.0)
    assert delay.is_over(1, 1.0)
    assert not delay.is_over(9, 30.9)
    assert delay.is_over(9, 31.0)


def test_a_stream_tells_how_far_it_is_behind(reader, journal):
    stream = reader(kind=JournalStreamReader, maxOffsetsPerTrigger=30)
    start = position([(0, EPOCH, 0), (2, EPOCH, 0)])
    read = places(stream.latestOffset(start, stream.getDefaultReadLimit()))
    told = stream.reportLatestOffset()
    assert places(told) == {0: (EPOCH, 150), 2: (EPOCH, 100)}
    for number, end in ((0, 150), (2, 100)):
        behind = end - read[number][1]
        lag = told[str(number)]
        assert (lag["offsetsBehindLatest"], lag["estimatedBytesBehindLatest"]) == (behind, 100 * behind)
    stream.stop()
