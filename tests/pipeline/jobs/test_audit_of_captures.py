"""The audit knows from the manifest what a capture should have, and no job reads a file that is damaged."""

import json
import re
import shutil
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.capture.chain import load
from storage.capture.manifest import Entry, TableName, encode
from storage.capture.place import Place
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.journal.schema import SCHEMA
from storage.records import encode_message
from tests.pipeline import ledgers
from tests.pipeline.ledgers import PRESENT, History

pytest.importorskip("pyspark")

from pipeline.jobs import audit, dead_letters, latency, usage
from pipeline.jobs.auditing import offsets
from pipeline.jobs.captured import DamagedLedger, Manifest
from pipeline.jobs.ledger import Source, normalized

EPOCH, RESTORED = "00000000000000a1", "00000000000000b2"
ID = "0123456789abcdef" * 2


class Captured:
    """Rows of a history in a folder, as a capture writes them: each `add` is a roll."""

    def __init__(self, folder):
        self.folder = folder
        self._next = {}

    def add(self, rows, *, epoch=EPOCH, lost=()):
        """The rows in their order. `lost`: offsets that the capture has skipped, of partition 0."""
        with CaptureWriter(Place.of(str(self.folder)), "shop", CaptureOptions(), namespace_id=ID) as writer:
            for partition in sorted({row["partition"] for row in rows}):
                for row in (row for row in rows if row["partition"] == partition):
                    offset = row["journalOffset"]
                    if (partition, offset) in lost:
                        writer.skip(partition, epoch, offset, offset + 1)
                    else:
                        writer.add(partition, epoch, pa.RecordBatch.from_pylist([row], SCHEMA))
            writer.roll()

    def rewrite(self, change):
        """The newest entry that has files, with other content and a checksum that fits to it; it becomes the last."""
        entries = sorted(path for path in (self.folder / "manifest").iterdir() if path.name[0] == "0")
        content = json.loads(entries[-1].read_text())["content"]
        change(content)
        entries[-1].write_bytes(encode(Entry.model_validate(content)).text)

    def file(self, table="ledger"):
        state = load(Place.of(str(self.folder)))
        return self.folder / next(path for path, file in sorted(state.files.items()) if file.table == table)


@pytest.fixture
def captured(tmp_path):
    return Captured(tmp_path / "captured")


def sent(count=6, ended=3, partitions=1):
    """Of the messages, the first are sent and completed, the others wait."""
    history = History(partitions=partitions)
    places = [history.send(f"queue{number % partitions}") for number in range(count)]
    for place in places[:ended]:
        history.end(place)
    return history


def run(captured, tmp_path, *more, name="out"):
    return audit.main(["--ledger", str(captured.folder), "--output", str(tmp_path / name), *more])


def problems(tmp_path, name="out"):
    return [
        (row["kind"], row["partition"], row["fromOffset"], row["toOffset"])
        for row in pq.read_table(tmp_path / name / "problems").to_pylist()
    ]


ALL = ("--fail-on-faults", "--fail-on-gaps", "--fail-on-undecided")


def test_a_sound_capture_is_accounted_for_and_its_broker_is_named(spark, captured, tmp_path, capsys):
    captured.add(sent().rows)
    assert run(captured, tmp_path, "--whole", *ALL) == 0
    said = capsys.readouterr()
    assert said.out == "All 6 messages are accounted for. The broker was not asked.\n"
    assert f"{captured.folder}: a capture of the namespace 'shop', id {ID}; the newest entry of its" in said.err
    assert problems(tmp_path) == []
    assert ID in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("job", [audit, dead_letters, latency, usage])
def test_no_job_reads_a_damaged_file(spark, captured, tmp_path, capsys, job):
    """A flipped bit is often one that Parquet does not see."""
    captured.add(sent().rows)
    path = captured.file()
    whole = path.read_bytes()
    arguments = ["--ledger", str(captured.folder), "--output", str(tmp_path / "out")]
    flipped = []
    for at in range(15):
        content = bytearray(whole)
        content[at * (len(whole) - 1) // 14] ^= 1 << at % 8
        flipped.append(bytes(content))
    for content in (*flipped, b"", whole[:-1], None):
        path.unlink() if content is None else path.write_bytes(content)
        assert job.main(arguments) == 3
        assert f"peeklock: {path}: " in capsys.readouterr().err
        path.write_bytes(whole)
    entry = max(each for each in (captured.folder / "manifest").iterdir() if each.name[0] == "0")
    entry.write_bytes(entry.read_bytes().replace(b"captured", b"compacted"))
    assert job.main(arguments) == 3
    assert entry.name in capsys.readouterr().err


def test_on_a_cluster_executors_look_at_the_files(spark, captured, monkeypatch):
    captured.add(sent().rows)
    manifest, path = Manifest.at(str(captured.folder)), captured.file()
    assert manifest is not None
    monkeypatch.setattr(spark.sparkContext, "master", "spark://elsewhere:7077")
    assert manifest.uris(spark, manifest.files(TableName.LEDGER)) == [str(path)]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedLedger, match=re.escape(f"{path}: has ")):
        manifest.uris(spark, manifest.files(TableName.LEDGER))


def test_a_ledger_without_a_manifest_is_read_and_told(spark, captured, tmp_path, capsys):
    captured.add(sent().rows)
    shutil.rmtree(captured.folder / "manifest")
    assert run(captured, tmp_path, "--whole") == 0
    assert f"{captured.folder}: no manifest, so that nobody can say" in capsys.readouterr().err
    assert "no manifest" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("lost", "gap"),
    [
        (range(3), (0, 3)),  # a head: messages that end were never seen
        (range(2, 5), (2, 5)),
        (range(7, 9), (7, 9)),  # a tail
        (range(9), (0, 9)),  # a whole partition
    ],
)
def test_what_was_lost_is_a_gap_at_its_offsets_and_nobody_is_accused(spark, captured, tmp_path, capsys, lost, gap):
    history = sent()
    other = History(partitions=2)
    other.partition_of["beside"] = 1
    other.end(other.send("beside"))
    captured.add([*history.rows, *other.rows], lost={(0, offset) for offset in lost})
    ledgers.write(tmp_path / "present", [*history.snapshot(), *other.snapshot()], PRESENT)
    compared = ("--whole", "--present", str(tmp_path / "present"))
    assert run(captured, tmp_path, *compared, "--fail-on-faults") == 0
    said = capsys.readouterr().out
    assert said.startswith("No faults in ")
    assert f"The ledger has a gap of {len(lost)} rows: what happened there is not known" in said
    assert said.endswith("It was compared with a snapshot; the broker was not asked.\n")
    assert problems(tmp_path) == [("gap", 0, *gap)]
    [problem] = pq.read_table(tmp_path / "out" / "problems").to_pylist()
    assert problem["description"] == "lost before it was captured, as the manifest says"
    assert run(captured, tmp_path, *compared, "--fail-on-gaps") == 1


def test_rows_that_the_manifest_has_and_the_files_have_not_are_a_gap(spark, captured, tmp_path):
    captured.add(sent().rows)
    captured.rewrite(lambda content: content["next"][0].update(offset=12))
    assert run(captured, tmp_path, "--whole", "--fail-on-gaps") == 1
    assert problems(tmp_path) == [("gap", 0, 9, 12)]
    [problem] = pq.read_table(tmp_path / "out" / "problems").to_pylist()
    assert problem["description"] == "rows that the manifest says were captured"


def test_messages_that_a_gap_hides_fail_where_that_is_asked(spark, captured, tmp_path, capsys):
    history = sent()
    captured.add(history.rows, lost={(0, 1)})  # the second message enters, and later ends
    assert run(captured, tmp_path, "--whole", "--fail-on-faults") == 0
    assert "; 1 could not be decided. The ledger has a gap of 1 row:" in capsys.readouterr().out
    assert run(captured, tmp_path, "--whole", "--fail-on-undecided") == 1


def test_an_epoch_that_the_manifest_has_is_a_restore_and_another_is_a_fault(spark, captured, tmp_path, capsys):
    first, second = sent(), sent(count=2, ended=1)
    captured.add(first.rows)
    later = timedelta(days=1)
    captured.add([row | {"eventTime": row["eventTime"] + later} for row in second.rows], epoch=RESTORED)
    assert run(captured, tmp_path, "--fail-on-faults", "--fail-on-gaps") == 0
    assert problems(tmp_path) == []
    captured.rewrite(lambda content: content.update(next=[each for each in content["next"] if each["epoch"] == EPOCH]))
    capsys.readouterr()
    assert run(captured, tmp_path, "--fail-on-faults") == 1
    assert capsys.readouterr().out.startswith("3 faults in 6 messages: rows that were not captured 3.")
    assert problems(tmp_path) == [("foreign", 0, 0, 3)]


def test_a_missing_epoch_is_a_gap_and_the_order_is_that_of_the_manifest(spark, captured, tmp_path):
    first, second = sent(), sent(count=3, ended=1)
    captured.add(first.rows)
    captured.add(second.rows, epoch=RESTORED, lost={(0, offset) for offset in range(4)})
    ledgers.write(tmp_path / "present", second.snapshot(), PRESENT)
    given = ("--present", str(tmp_path / "present"), "--whole", "--fail-on-faults")
    assert run(captured, tmp_path, *given) == 0
    assert problems(tmp_path) == [("gap", 0, 0, 4)]
    logs = pq.read_table(tmp_path / "out" / "offsets").to_pylist()
    assert [(log["epoch"], log["generation"], log["end"]) for log in logs] == [(EPOCH, 1, 9), (RESTORED, 0, 4)]


def test_times_that_go_back_are_told(spark, captured, tmp_path, capsys):
    rows = sent().rows
    rows[4] = rows[4] | {"eventTime": rows[4]["eventTime"] - timedelta(seconds=90)}
    captured.add(rows)
    assert run(captured, tmp_path, "--whole", *ALL) == 0
    assert "Times go back in a row." in capsys.readouterr().out
    assert problems(tmp_path) == [("backward", 0, 4, 5)]
    [problem] = pq.read_table(tmp_path / "out" / "problems").to_pylist()
    assert problem["description"] == "times that go back by up to 89 s"
    assert run(captured, tmp_path, "--whole", "--skew", "100") == 0
    assert problems(tmp_path) == []


def test_times_that_go_back_far_behind(spark, captured, tmp_path):
    history = History(partitions=1)
    for _ in range(200):
        history.send("orders")
    rows = [
        row | {"eventTime": row["eventTime"] - timedelta(hours=1)} if row["journalOffset"] >= 150 else row
        for row in history.rows
    ]
    captured.add(rows)
    assert run(captured, tmp_path, "--whole", *ALL) == 0
    assert problems(tmp_path) == [("backward", 0, 150, 200)]


def test_times_that_go_forward_are_not_looked_at_twice(spark, tmp_path, monkeypatch):
    """Spark leaves out a join with nothing, and the ledger that it would read for it."""
    ledgers.write(tmp_path / "ledger", sent().rows)
    asked, backward = [], offsets._backward
    monkeypatch.setattr(offsets, "_backward", lambda *given: asked.append(backward(*given)) or asked[-1])
    offsets.offsets_of(normalized(Source.at(str(tmp_path / "ledger")).rows(spark)))
    [found] = asked
    plan = found._jdf.queryExecution().optimizedPlan().toString()
    assert "LocalRelation <empty>" in plan
    assert "Relation [" not in plan


def test_bodies_are_compared_with_what_was_enqueued(spark, captured, tmp_path, capsys):
    rows = sent().rows
    records = [encode_message(0, 0, bytes(16), f"body {number}".encode()) for number in range(len(rows))]
    for row, record in zip(rows, records, strict=True):
        if row["op"] == "enqueued":
            row["record"] = record
    rows[2]["record"] = records[2][:-1] + b"x"
    captured.add(rows)
    assert run(captured, tmp_path, "--whole", *ALL) == 0
    assert not (tmp_path / "out" / "bodies").exists()
    capsys.readouterr()
    assert run(captured, tmp_path, "--whole", "--bodies", "--fail-on-faults") == 1
    assert capsys.readouterr().out.startswith("1 fault in 6 messages: damaged bodies 1.")
    [damaged] = pq.read_table(tmp_path / "out" / "bodies").to_pylist()
    assert (damaged["entity"], damaged["sequenceNumber"], damaged["journalOffset"]) == ("queue0", 3, 2)


def test_a_series_tells_each_gap_once(spark, captured, tmp_path, capsys):
    history = sent()
    captured.add(history.rows, lost={(0, 8)})
    assert run(captured, tmp_path, "--series", "--fail-on-gaps", name="series") == 1
    before = len(history.rows)
    history.send("queue0")
    captured.add(history.rows[before:])
    [first] = (tmp_path / "series").iterdir()
    first.rename(first.with_name("20260101T000000Z"))
    assert run(captured, tmp_path, "--series", *ALL, name="series") == 0
    newest = max((tmp_path / "series").iterdir())
    assert pq.read_table(newest / "problems").num_rows == 0
    # Entries are gone, which an audit of all cannot see.
    newest.rename(newest.with_name("20260102T000000Z"))
    for path in sorted(path for path in (captured.folder / "manifest").iterdir() if path.name[0] == "0")[-2:]:
        path.unlink()
    capsys.readouterr()
    assert run(captured, tmp_path, "--series", name="series") == 3
    assert "its newest entries are gone" in capsys.readouterr().err


def test_a_series_may_begin_after_a_restore(spark, captured, tmp_path, capsys):
    first, second = sent(), sent(count=2, ended=1)
    later = timedelta(days=1)

    def captured_later(rows):
        captured.add([row | {"eventTime": row["eventTime"] + later} for row in rows], epoch=RESTORED)

    captured.add(first.rows)
    captured_later(second.rows)
    assert run(captured, tmp_path, "--series", "--fail-on-faults", "--fail-on-gaps", name="series") == 0
    [folder] = (tmp_path / "series").iterdir()
    for day in (1, 2):
        folder.rename(folder.with_name(f"2026010{day}T000000Z"))
        before = len(second.rows)
        second.end(second.send("queue0"))
        captured_later(second.rows[before:])
        capsys.readouterr()
        assert run(captured, tmp_path, "--series", *ALL, name="series") == 0
        assert capsys.readouterr().out.startswith("All 2 messages are accounted for")
        folder = max((tmp_path / "series").iterdir())
        logs = pq.read_table(folder / "offsets").to_pylist()
        assert [(log["epoch"], log["generation"], log["end"], log["rows"]) for log in logs] == [
            (EPOCH, 1, len(first.rows), 0),
            (RESTORED, 0, len(second.rows), 2),
        ]


def test_what_a_manifest_says_of_itself(captured, tmp_path):
    captured.add(sent().rows)
    manifest = Manifest.at(str(captured.folder))
    written_s = manifest.state.written_ms / 1000
    assert manifest.described(written_s + 180).endswith("the newest entry of its manifest is 3 minutes old")
    assert manifest.described(written_s + 60).endswith("is 1 minute old")
    assert Source.at(str(tmp_path / "nothing")).manifest is None
    assert (Source.at(str(captured.folder)).has("ledger"), Source.at(str(captured.folder)).has("messages")) == (
        True,
        False,
    )
