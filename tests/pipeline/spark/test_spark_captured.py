"""The journal's rows from a capture first and then from the journal, whatever happens to both meanwhile. No Java."""

import logging
import os
import subprocess
import sys
import time

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark_peeklock.errors import (
    AnotherEpoch,
    CaptureFailed,
    InvalidOption,
    JournalDamaged,
    JournalUnreachable,
    OutOfRetention,
)
from pyspark_peeklock.journal import JournalReader, JournalStreamReader
from pyspark_peeklock.journal_offsets import places, position
from pyspark_peeklock.options import JournalOptions, Options
from pyspark_peeklock.rows import SCHEMA
from storage.capture.compaction import clean, compact
from storage.capture.place import Place
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.patience import PATIENCE_S
from tests.pipeline.spark.faulty_journal import EPOCH, T0, Journal, JournalServer, Partition, message_of, rows

TIDY = CaptureOptions(compact_after_seconds=0, keep_seconds=0)
ROWS = 250


@pytest.fixture
def journal():
    tables = [rows(0, 0, 125, record=message_of), rows(0, 125, 125, "invoices", record=message_of)]
    return Journal({0: Partition(pa.concat_tables(tables)), 2: Partition(rows(2, 0, 100))})


@pytest.fixture
def server(journal):
    with JournalServer(journal) as server:
        yield server


@pytest.fixture
def capture(journal, tmp_path):
    """Captures rows of the journal up to an offset, in files of at most 40 rows."""
    folder = tmp_path / "captured"

    def until(end, partition=0, first=None, epoch=EPOCH, namespace="ns"):
        with CaptureWriter(Place.of(str(folder)), namespace, TIDY) as writer:
            at = writer.next_offset(partition, epoch) or 0
            if first is not None:
                writer.skip(partition, epoch, at, first)
                at = first
            table = journal.partitions[partition].table
            while at < end:
                behind = min(end, at + 40)
                for batch in table.slice(at, behind - at).to_batches():
                    writer.add(partition, epoch, batch)
                writer.roll()
                at = behind
        return folder

    return until


@pytest.fixture
def reader(server, tmp_path):
    """The reader of a batch with these options, as Spark makes it."""
    path = tmp_path / "secret"
    path.write_text("Endpoint=sb://localhost;SharedAccessKeyName=n;SharedAccessKey=k;UseDevelopmentEmulator=true")

    def make(kind=JournalReader, **options):
        given = {"connectionStringFile": path, "httpEndpoint": server.url, "retryTimeoutSeconds": 2, **options}
        given = {"capturePath": tmp_path / "captured", **given}
        texts = {name: str(value) for name, value in given.items() if value is not None}
        return kind(JournalOptions.of(Options(texts), is_stream=kind is JournalStreamReader), SCHEMA)

    return make


def read(reader, planned=None):
    """All rows in their order."""
    tasks = reader.partitions() if planned is None else planned
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def keys(found):
    return [(row["partition"], row["journalOffset"]) for row in found]


def grid(*ranges):
    return [(partition, offset) for partition, first, end in ranges for offset in range(first, end)]


def test_captured_files_come_first_and_the_live_tail_after(journal, capture, reader):
    capture(150)
    whole = read(reader(capturePath=None))
    journal.partitions[0].low = 100
    journal.requests.clear()
    found = read(reader())
    assert keys(found) == grid((0, 0, 250), (2, 0, 100))
    assert found == whole, "rows of the capture are those of the journal, bodies and all"
    assert {request[1] for request in journal.requests if request[0] == 0} == {100}
    sources = [(each.part.source.value, each.part.offsets.first) for each in reader().partitions()]
    assert sources == [("capture", 0), ("journal", 100), ("journal", 0)]


def test_without_bodies_and_of_one_entity(journal, capture, reader):
    capture(200)
    journal.partitions[0].low = 150
    found = read(reader(entity="INV*", includeBody="false"))
    assert keys(found) == grid((0, 125, 250))
    assert {row["body"] for row in found} == {None}
    assert {query["records"] for *_, query in journal.requests} == {"0"}


def test_many_captured_rows_are_many_tasks(journal, capture, reader, monkeypatch):
    monkeypatch.setattr("pyspark_peeklock.journal.CAPTURED_TASK_ROWS", 50)
    capture(200)
    journal.partitions[0].low = 200
    planned = [each.part.offsets for each in reader().partitions() if each.part.offsets.partition == 0]
    assert [each.first for each in planned] == [0, 80, 160, 200], "files begin at 0, 40, 80, 120 and 160"
    assert keys(read(reader(minPartitions=9))) == grid((0, 0, 250), (2, 0, 100))


def test_what_is_nowhere_fails_the_query_or_is_counted(journal, capture, reader, caplog):
    capture(50)
    capture(90, first=60)
    journal.partitions[0].low = 100
    with pytest.raises(OutOfRetention, match="partition 0: the query needs offset 50, and the journal has 100 to 250"):
        reader().partitions()
    with caplog.at_level(logging.WARNING):
        found = read(reader(failOnDataLoss="false"))
    assert keys(found) == grid((0, 0, 50), (0, 60, 90), (0, 100, 250), (2, 0, 100))
    losses = [record.getMessage() for record in caplog.records if "data loss" in record.getMessage()]
    assert [text.partition(": partition")[0] for text in losses] == ["peeklock journal: data loss: rows=10"] * 2


def test_what_falls_out_of_retention_after_planning_is_captured(journal, capture, reader):
    capture(20)
    planned = reader().partitions()
    assert [each.part.source.value for each in planned] == ["journal", "journal"]
    capture(180)
    journal.partitions[0].low = 170
    assert keys(read(reader(), planned)) == grid((0, 0, 250), (2, 0, 100))


def test_what_falls_out_of_retention_while_it_is_read_is_captured(journal, capture, reader):
    capture(240)
    journal.max_rows = 30  # of an answer

    class Retiring(list):
        def append(self, request):
            journal.partitions[0].low = min(230, 60 * len(self))
            super().append(request)

    journal.requests = Retiring()
    assert keys(read(reader(entity=None))) == grid((0, 0, 250), (2, 0, 100))
    assert journal.partitions[0].low == 230


def test_without_a_capture_a_race_with_retention_is_an_error_or_is_counted(journal, reader, caplog):
    planned = reader(capturePath=None).partitions()
    journal.partitions[0].low = 100
    with pytest.raises(OutOfRetention, match="needs offset 0, and the journal has 100 to 250"):
        read(reader(capturePath=None), planned)
    with caplog.at_level(logging.WARNING):
        found = read(reader(capturePath=None, failOnDataLoss="false"), planned)
    assert keys(found) == grid((0, 100, 250), (2, 0, 100))
    assert "rows=100:" in caplog.text


def test_files_that_are_merged_and_removed_meanwhile_are_found_again(journal, capture, reader, tmp_path, monkeypatch):
    monkeypatch.setattr("pyspark_peeklock.journal.JOINED_ROWS", 1)
    folder = capture(250)
    journal.partitions[0].low = 250
    planned = reader().partitions()
    batches = reader().read(planned[0])
    found = next(batches).to_pylist()
    assert len(found) == 40
    time.sleep(0.01)  # what is older than now may be merged
    with CaptureWriter(Place.of(str(folder)), "ns", TIDY) as writer:
        assert compact(writer, {}) > 2
        time.sleep(0.01)  # and removed
        assert clean(writer) > 2, "no file of the plan is there any more"
    found += [row for batch in batches for row in batch.to_pylist()]
    assert keys(found) == grid((0, 0, 250))
    assert len({row["body"] for row in found}) == 250


def files_of(folder, table):
    return sorted((folder / f"table={table}").rglob("*.parquet"))


@pytest.mark.parametrize("table", ["ledger", "messages"])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "bytes, not"),
        (lambda path: path.write_bytes(b"\x00" * path.stat().st_size), "cannot be read"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_torn_file_is_named_and_nothing_of_it_is_believed(journal, capture, reader, table, spoil, text):
    folder = capture(200)
    journal.partitions[0].low = 200
    torn = files_of(folder, table)[-1]
    spoil(torn)
    for fails in ("true", "false"):  # it can be mended, so it is no loss
        with pytest.raises(CaptureFailed, match=text) as caught:
            read(reader(failOnDataLoss=fails))
        assert str(torn) in str(caught.value)


def test_a_damaged_manifest_is_named(journal, capture, reader):
    folder = capture(100)
    journal.partitions[0].low = 50
    for entry in (folder / "manifest").glob("0*.json"):
        entry.write_bytes(entry.read_bytes().replace(b"ns", b"nz"))
    with pytest.raises(CaptureFailed, match=r"\.json: the checksum does not match"):
        reader().partitions()


def test_captures_that_cannot_be_this_journals_are_refused(journal, capture, reader, tmp_path):
    for low in (0, 50):  # also where nothing of it is needed yet
        journal.partitions[0].low = low
        with pytest.raises(InvalidOption, match=r"option 'capturePath': .* has no capture"):
            reader(startingOffsets="latest").partitions()
    capture(100, namespace="other")
    with pytest.raises(InvalidOption, match="has the rows of namespace 'other', not 'ns'"):
        reader().partitions()
    with pytest.raises(InvalidOption, match="option 'capturePath': 'nothing://x' is no URL of a folder"):
        reader(capturePath="nothing://x").partitions()
    with pytest.raises(InvalidOption, match="'capturePath': credentials are no option values") as caught:
        reader(capturePath="s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(caught.value)


def test_a_time_is_found_in_the_capture(journal, capture, reader):
    capture(150)
    journal.partitions[0].low = 100
    for offset in (0, 1, 39, 40, 99, 100, 101, 249):
        found = read(reader(startingTimestamp=T0 // 1000 + 1000 * offset))
        assert keys(found) == grid((0, offset, 250), (2, min(offset, 100), 100))
    assert keys(read(reader(startingTimestamp=T0 // 1000 + 98_500)))[0] == (0, 99)


def test_what_was_captured_of_a_replaced_store_is_read_before_the_new_one(journal, capture, reader, caplog):
    capture(250)
    start = position([(0, EPOCH, 200)])
    journal.partitions = {0: Partition(rows(0, 0, 30), epoch="ff", low=10)}
    capture(20, epoch="ff")
    stream = reader(JournalStreamReader)
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert places(end) == {0: ("ff", 30)}
    with pytest.raises(AnotherEpoch, match=f"offsets of epoch {EPOCH}, and the journal now has epoch ff"):
        stream.partitions(start, end)
    stream.stop()
    stream = reader(JournalStreamReader, failOnDataLoss="false")
    found = [(row["epoch"], row["journalOffset"]) for row in read(stream, stream.partitions(start, end))]
    stream.stop()
    assert found == [(EPOCH, offset) for offset in range(200, 250)] + [("ff", offset) for offset in range(30)]


def test_a_stream_is_limited_by_captured_rows_too(journal, capture, reader):
    capture(200)
    journal.partitions[0].low = 190
    stream = reader(JournalStreamReader, startingOffsets="earliest", maxMessagesPerTrigger=60)
    at, found, batches = stream.initialOffset(), [], 0
    assert places(at)[0] == (EPOCH, 0)
    while (following := stream.latestOffset(at, stream.getDefaultReadLimit())) != at:
        got = [
            row for task in stream.partitions(at, following) for each in stream.read(task) for row in each.to_pylist()
        ]
        assert len(got) <= 60
        found += got
        at, batches = following, batches + 1
    stream.stop()
    assert sorted(keys(found)) == grid((0, 0, 250), (2, 0, 100))
    assert [key for key in keys(found) if key[0] == 0] == grid((0, 0, 250))
    assert batches == 6


def damage(journal, first, end):
    """As the endpoint says it: a row in the place of the last that cannot be read."""
    table = journal.partitions[0].table
    row = dict.fromkeys(table.schema.names) | {
        "partition": 0,
        "journalOffset": end - 1,
        "eventTime": 0,
        "op": "truncated",
        "reason": "damaged",
        "description": f"file: byte 7: the rows from {first} to {end - 1} cannot be read: the checksum",
    }
    pieces = [table.slice(0, first), pa.Table.from_pylist([row], table.schema), table.slice(end)]
    journal.partitions[0].table = pa.concat_tables(pieces)


@pytest.mark.parametrize("entity", [None, "*", "ORD*"])
def test_rows_that_the_journal_cannot_read_come_from_the_capture_or_are_lost(journal, capture, reader, caplog, entity):
    """With a pattern, rows of other entities are before the damage: the error has its first offset all the same."""
    capture(150)
    damage(journal, 135, 145)
    last = 125 if entity == "ORD*" else 250
    assert keys(read(reader(entity=entity))) == grid((0, 0, last), (2, 0, 100))
    with pytest.raises(JournalDamaged, match="the journal cannot read the offsets 135 to 144: file: byte 7"):
        read(reader(entity=entity, capturePath=None))
    with caplog.at_level(logging.WARNING):
        found = read(reader(entity=entity, capturePath=None, failOnDataLoss="false"))
    assert keys(found) == grid((0, 0, min(135, last)), (0, 144, 145), (0, 145, last), (2, 0, 100))
    assert [row["op"] for row in found if row["journalOffset"] == 144] == ["truncated"]
    assert "rows=10:" in caplog.text


def test_of_rows_that_cannot_be_read_each_offset_comes_once(journal, capture, reader, caplog):
    capture(100)
    capture(120, first=108)
    damage(journal, 100, 110)
    with caplog.at_level(logging.WARNING):
        found = read(reader(failOnDataLoss="false"))
    assert keys(found) == grid((0, 0, 100), (0, 108, 250), (2, 0, 100))
    assert "rows=8:" in caplog.text


def test_the_endpoint_may_be_away_for_what_is_captured(journal, capture, reader, server):
    capture(200)
    journal.partitions[0].low = 200
    [captured, *live] = reader().partitions()
    journal.token = "none"
    server.close()
    assert keys(read(reader(), [captured])) == grid((0, 0, 200))
    with pytest.raises(JournalUnreachable):
        read(reader(retryTimeoutSeconds=1), live)


def test_without_a_capture_nothing_of_captures_is_loaded():
    code = "import sys, pyspark_peeklock.journal as j; assert not [m for m in sys.modules if m.startswith('storage')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
