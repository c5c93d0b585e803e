"""Jobs as programs: what they write, their exit codes, and their pages."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from tests.patience import PATIENCE_S
from tests.pipeline import ledgers
from tests.pipeline.ledgers import PRESENT, History
from tests.pipeline.pages import HOSTILE, Page

pytest.importorskip("pyspark")

from bench.pipeline import large_capture
from pipeline.jobs import JOBS, TELLS, audit, auditing, dead_letters, latency, ledger, running, usage
from pipeline.jobs.report import shown

ROOT = Path(__file__).parents[3]


def faulty_history():
    history = History(partitions=1)
    history.end(history.send("orders"))
    lost = history.send(HOSTILE, "lost-1")
    for _ in range(3):
        history.dead_letter(history.send("orders"), HOSTILE, description=HOSTILE)
    del history.present[lost]
    return history


def faulty(tmp_path):
    """A ledger with a lost message, and what is present."""
    history = faulty_history()
    ledgers.write(tmp_path / "ledger", history.rows)
    ledgers.write(tmp_path / "present", history.snapshot(), PRESENT)
    return ["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "out")]


def page_of(path):
    return Page((path / "report.html").read_text())


def test_the_audit_writes_tables_and_a_page_and_fails_on_faults(spark, tmp_path, capsys):
    arguments = [*faulty(tmp_path), "--present", str(tmp_path / "present"), "--whole"]
    assert audit.main(arguments) == 0
    assert audit.main([*arguments, "--fail-on-faults"]) == 1
    said = capsys.readouterr()
    asked = "It was compared with a snapshot; the broker was not asked."
    assert said.out.splitlines()[0] == f"1 fault in 8 messages: lost 1. {asked}"
    assert re.search(r"judging: \d+\.\d s", said.err)
    faults = pq.read_table(tmp_path / "out" / "faults").to_pylist()
    assert [(row["verdict"], row["entity"], row["sequenceNumber"]) for row in faults] == [("lost", HOSTILE, 1)]
    tables = {"verdicts", "faults", "moves", "ids", "offsets", "problems", "open", "report.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == tables
    page = page_of(tmp_path / "out")
    assert "script" not in page.tags
    assert page.loaded == []
    assert page.tags.count("svg") == 2
    assert "lost-1" in page.text
    assert shown(HOSTILE) in page.text
    assert "\x00" not in page.text


def test_the_page_of_an_audit_with_more_faults_than_python_holds_has_the_first_ones(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_LOCAL", 3)
    monkeypatch.setattr(auditing.page, "SHOWN_ROWS", 4)
    history = History(partitions=1)
    for number in range(6):
        for queue in ("bills", "orders"):
            del history.present[history.send(queue, f"{queue}-{number}")]
    ledgers.write(tmp_path / "ledger", history.rows)
    ledgers.write(tmp_path / "present", history.snapshot(), PRESENT)
    given = ["--ledger", str(tmp_path / "ledger"), "--present", str(tmp_path / "present"), "--whole"]
    assert audit.main([*given, "--output", str(tmp_path / "out")]) == 0
    assert len(pq.read_table(tmp_path / "out" / "faults")) == 12
    text = re.sub(r"\s+", " ", page_of(tmp_path / "out").text)
    assert "12 faults in 12 messages: lost 12." in text
    assert "The first 4 of 12" in text
    assert [number for number in range(6) if f"bills-{number}" in text] == [0, 1, 2, 3]
    assert "orders-" not in text


@pytest.mark.parametrize("job", [audit, dead_letters])
def test_times_on_pages_are_utc_wherever_the_job_runs(spark, tmp_path, monkeypatch, job):
    history = History(partitions=1)
    history.dead_letter(history.send("orders"))
    rows = history.rows
    rows[-1]["journalOffset"] += 3  # a gap
    hours = {row["eventTime"].strftime("%Y-%m-%d %H:") for row in rows}
    ledgers.write(tmp_path / "ledger", rows)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert job.main(["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "out")]) == 0
    finally:
        monkeypatch.undo()
        time.tzset()
    found = re.findall(r"\d{4}-\d\d-\d\d \d\d:", page_of(tmp_path / "out").text)
    assert found
    assert set(found) == hours


def test_shuffles_of_a_large_ledger_have_more_partitions(spark, tmp_path, monkeypatch):
    name = "spark.sql.shuffle.partitions"
    [file] = ledgers.write(tmp_path / "ledger", faulty_history().rows).iterdir()
    before = spark.conf.get(name)
    try:
        monkeypatch.setattr(ledger, "_PARTITION_BYTES", file.stat().st_size // 7)
        assert ledger.read(spark, str(tmp_path / "ledger")).count() > 0
        assert spark.conf.get(name) == "7"
        monkeypatch.setattr(ledger, "_PARTITION_BYTES", file.stat().st_size // 3)
        ledger.read(spark, str(tmp_path / "ledger"))
        assert spark.conf.get(name) == "7"
        spark.conf.unset(name)  # as spark-submit leaves it
        ledger.read(spark, str(tmp_path / "ledger"))
        assert spark.conf.get(name) == "200"
    finally:
        spark.conf.set(name, before)


def test_a_ledger_is_not_taken_for_small_because_its_files_are(spark, tmp_path):
    """Else Spark sends all messages of a small file to all tasks."""
    large_capture.write(tmp_path / "captured", 20_000, body_bytes=64)
    rows = ledger.read(spark, str(tmp_path / "captured"))
    place = ["partition", "entity", "sequenceNumber"]
    joined = rows.filter("op = 'delivered'").join(rows.filter("op = 'enqueued'"), place)
    files = [path.stat().st_size for path in tmp_path.rglob("table=ledger/**/*.parquet")]
    assert sum(files) < int(spark.conf.get("spark.sql.autoBroadcastJoinThreshold").removesuffix("b"))
    plan = joined._jdf.queryExecution().executedPlan().toString()
    assert "Join" in plan
    assert "BroadcastExchange" not in plan


def test_a_costly_table_is_computed_once_however_large_it_is(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_LOCAL", 3)

    def told(batches):
        for batch in batches:
            with (tmp_path / "batches").open("a") as file:
                file.write("x")
            yield batch

    for rows in (2, 10):
        table = ledger.kept(spark.range(rows, numPartitions=1).mapInArrow(told, "id bigint"), is_costly=True)
        assert [row.id for row in table.collect()] == list(range(rows))
    assert (tmp_path / "batches").read_text() == "xx"


@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_tables_are_written_in_place_of_older_ones(spark, tmp_path, place):
    here = spark.createDataFrame(pa.table({"each": [1, 2]}))
    there = spark.range(3).withColumnRenamed("id", "each")
    for few, many in ((here, there), (there, here), (here, there), (here, here)):
        running.write_tables(place.format(tmp_path), {"few": few, "many": many})
        for table, name in ((few, "few"), (many, "many")):
            found = pq.read_table(tmp_path / name)["each"].to_pylist()
            assert sorted(found) == [row.each for row in table.collect()]


@pytest.mark.parametrize("job", [dead_letters, latency, usage])
def test_the_other_jobs_write_theirs(spark, tmp_path, capsys, job):
    assert job.main(faulty(tmp_path)) == 0
    page = page_of(tmp_path / "out")
    assert page.tags.count("svg") >= 1
    assert "script" not in page.tags
    assert page.loaded == []
    assert capsys.readouterr().out.strip() in page.text


@pytest.mark.parametrize("job", [audit, dead_letters, latency, usage])
def test_an_empty_ledger_makes_a_page_too(spark, tmp_path, capsys, job):
    ledgers.write(tmp_path / "ledger", [])
    assert job.main(["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "out")]) == 0
    assert page_of(tmp_path / "out").text


def test_a_ledger_that_is_none_is_refused_in_one_line(spark, tmp_path, capsys):
    arguments = ["--output", str(tmp_path / "out"), "--ledger"]
    assert audit.main([*arguments, str(tmp_path / "nowhere")]) == 2
    ledgers.write(tmp_path / "other", [], PRESENT)
    assert audit.main([*arguments, str(tmp_path / "other")]) == 2
    torn = ledgers.write(tmp_path / "torn", History().rows) / "part-0.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert audit.main([*arguments, str(tmp_path / "torn")]) in (2, 3)
    messages = [line for line in capsys.readouterr().err.splitlines() if line.startswith("peeklock: ")]
    assert len(messages) == 3
    assert "nowhere" in messages[0]
    assert "no column partition" in messages[1]
    assert "torn" in messages[2]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--cut", "{"],
        ["--cut", '{"0": -1}'],
        ["--cut", '{"0": true}'],
        ["--cut", "[1]"],
        ["--cut", "@/nowhere"],
        ["--grace", "-1"],
        ["--present-covers", "x"],
        ["--consumer", "x"],
    ],
)
def test_wrong_options_are_wrong_use(tmp_path, capsys, wrong):
    with pytest.raises(SystemExit) as end:
        audit.main(["--ledger", "x", "--output", str(tmp_path), *wrong])
    assert end.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_jobs_run_by_the_command_and_as_a_file(spark, tmp_path):
    """In processes of their own, as users start them."""
    arguments = faulty(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "pipeline")])}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "pipeline" / "jobs" / "usage.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
        cwd=tmp_path,
    )
    assert (ran.returncode, ran.stdout) == (0, "5 operations: 5 sends and 0 receives.\n"), ran.stderr


def test_the_command_names_its_jobs():
    run = CliRunner().invoke(app, ["jobs", "list"])
    assert [line.split()[0] for line in run.output.splitlines()] == list(JOBS) == list(TELLS)
    run = CliRunner().invoke(app, ["jobs", "run", "adit"])
    assert run.exit_code == 2
    assert "there is no job 'adit'; there are audit, dead-letters, latency, usage" in run.output
    run = CliRunner().invoke(app, ["jobs", "run", "audit", "--help"])
    assert (run.exit_code, "--fail-on-faults" in run.output) == (0, True)


def test_without_java_a_job_says_so_in_one_line(tmp_path):
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "broker.cli",
            "jobs",
            "run",
            "audit",
            "--ledger",
            "x",
            "--output",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "pipeline")])},
    )
    assert ran.returncode == 3
    [line] = [line for line in ran.stderr.splitlines() if not line.startswith("starting Spark")]
    assert line.startswith("peeklock: Spark needs Java")


@pytest.mark.parametrize("job", [latency, usage])
def test_pages_draw_each_of_several_namespaces(spark, tmp_path, job):
    histories = [History(partitions=1, namespace=name) for name in ("east", "west")]
    for history in histories:
        place = history.send("orders")
        history.use(place)
        history.end(place)
    ledgers.write(tmp_path / "ledger", [row for history in histories for row in history.rows])
    assert job.main(["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "out")]) == 0
    text = page_of(tmp_path / "out").text
    assert "orders (east)" in text
    assert "orders (west)" in text
