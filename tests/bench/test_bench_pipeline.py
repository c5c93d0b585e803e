"""The rows of the pipeline, tiny, against the real broker and the real Spark: each measurement works and is judged."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")  # the group `bench` has it

from bench import load, run
from bench.load import LoadFailed
from bench.measure import fresh
from bench.page import TITLES, cost_group
from bench.pipeline import auditing, brokers, rows_read
from bench.pipeline.brokers import PeeklockWithJournal
from bench.plan import MODES, Plan
from bench.recording import Recorder
from bench.rows import GROUPS, ON_SPARK, PEEKLOCK, PIPELINE, cell_labels, judge, rows
from tests.caller import REQUIRE_INTEROP
from tests.pipeline.session import spark

__all__ = ["spark"]

ROWS = [row for row in rows(Plan()) if row.group in PIPELINE]
JUDGED = [row for row in ROWS if row.targets]


def is_difference(key):
    """Of the CPU time of two processes: of few rows it may be less than nothing."""
    return key.startswith("capture-") and key not in ("capture-floor", "capture-broker")


@pytest.fixture(scope="module")
def tools():
    try:
        return load.build()
    except load.LoadToolMissing as missing:
        pytest.fail(str(missing)) if REQUIRE_INTEROP else pytest.skip(str(missing))


@pytest.fixture
def measured(tools, tmp_path, capsys):
    """Measures a group; returns its rows and the costs of its cells."""

    def measure(group):
        result = tmp_path / "bench.json"
        options = ["--quick", "--peers", "none", "--rows", group, "--json", str(result)]
        assert run.main(options) == 0, capsys.readouterr()
        made = json.loads(result.read_text())
        found = {row["key"]: row["figures"][PEEKLOCK]["median"] for row in made["rows"]}
        assert set(found) == {row.key for row in ROWS if row.group == group}
        assert all(value > 0 for key, value in found.items() if not ("-waiting-" in key or is_difference(key)))
        for row in made["rows"]:
            for target in row["targets"]:
                sign, bound = target["text"].split()
                value = found[row["key"]]
                assert target["met"] is (value >= float(bound) if sign == "≥" else value <= float(bound))
        return found, {cost["cell"]: cost["by_server"][PEEKLOCK] for cost in made["costs"]}

    return measure


@pytest.fixture
def interpreted(spark):
    """A session that does not compile plans: of few rows that takes longer than to run them."""
    settings = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
    }
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


def test_each_journal_is_measured_beside_none_and_has_a_process_that_costs(measured):
    found, costs = measured("journal")
    for mode in MODES:
        assert "journal" not in costs[f"journal-off-{mode}"]
        for kind in ("events", "bodies"):
            assert costs[f"journal-{kind}-{mode}"]["journal"] > 0
            share = found[f"journal-{kind}-{mode}"] / found[f"journal-off-{mode}"]
            assert found[f"journal-{kind}-share-{mode}"] == pytest.approx(share)
            assert 0 <= found[f"journal-{kind}-waiting-{mode}"] <= 1
            assert found[f"journal-{kind}-whole-{mode}"] < found[f"journal-{kind}-{mode}"]


def test_a_capture_is_measured_beside_a_plain_write_of_its_rows(measured):
    found, _ = measured("capture")
    assert found["capture-message"] == pytest.approx(3 * found["capture-row"])
    assert found["capture-processors"] == pytest.approx(found["capture-message"] * 40_000 / 1e6)
    assert found["capture-of-floor"] == pytest.approx(found["capture-message"] / found["capture-floor"])


def test_reads_are_measured_beside_sources_of_spark(spark, measured):
    found, costs = measured("spark-reads")
    for ours, theirs in (("stream", "stream-rate"), ("batch", "batch-range"), ("captured", "captured-files")):
        assert found[f"spark-{ours}-share"] == pytest.approx(found[f"spark-{ours}"] / found[f"spark-{theirs}"])
        assert costs[f"spark-{ours}"]["client"] > 0
    assert costs["spark-stream"]["journal"] > costs["spark-stream-rate"]["journal"]


def test_rows_that_spark_reads_are_measured_by_clock_and_cpu(spark, tools):
    found = rows_read.measured(2000, turns=1, warm_up=0)
    assert {rows for rows, _ in found.values()} == {0, 2000}
    for _, [cost] in found.values():
        assert cost.cpu == pytest.approx(cost.java + cost.python + cost.broker)
        assert cost.elapsed > 0
        assert cost.cpu > 0
    shown = rows_read.table(found)
    assert [*shown.columns[0].cells] == [*found]
    assert [*shown.columns[-1].cells][[*found].index(rows_read.RANGE)] == "1.00"


def test_micro_batches_are_measured_beside_sources_of_spark(spark, measured):
    found, _ = measured("spark-latency")
    for name in ("journal", "files"):
        assert found[f"spark-latency-{name}-event"] > found[f"spark-latency-{name}"] / 2
    assert found["spark-latency-of-rate"] == pytest.approx(found["spark-latency-journal"] / found["spark-latency-rate"])


def test_the_sink_is_measured_beside_files(spark, measured):
    found, costs = measured("spark-sink")
    for kind in ("sink", "sink-ids"):
        assert found[f"spark-{kind}-share"] == pytest.approx(found[f"spark-{kind}"] / found["spark-sink-files"])
        assert costs[f"spark-{kind}"]["worker"] > costs["spark-sink-files"]["worker"]


def test_the_audit_is_measured_beside_a_count_and_must_find_the_planted_faults(
    interpreted, measured, monkeypatch, tools
):
    # The start of a session, and code for plans over few rows, take longer than all else.
    monkeypatch.setattr(
        auditing, "_in_own_session", lambda work, directory: auditing.measure(interpreted, work, directory)
    )
    found, _ = measured("audit")
    assert found["audit-ratio-cpu"] == pytest.approx(found["audit-audit-cpu"] / found["audit-count-cpu"])
    monkeypatch.setattr(auditing, "_in_own_session", lambda work, directory: {"seconds": 1.0, "cpu_s": 1.0})
    monkeypatch.setattr(auditing, "_faults", lambda folder: {"lost": {("shop-00", 1)}})
    with fresh(PeeklockWithJournal) as server, pytest.raises(LoadFailed, match="other faults"):
        auditing.audit(Recorder(plan=Plan.tiny(), tools=tools), server)


def test_a_journal_that_does_not_catch_up_is_a_failure_and_no_figure(monkeypatch):
    monkeypatch.setattr(brokers, "CATCH_UP_S", 0.1)
    with fresh(PeeklockWithJournal) as server:
        server.start()
        assert server.wait_until_journaled(0) < 10
        with pytest.raises(LoadFailed, match="the journal has 0 of 7 rows"):
            server.wait_until_journaled(7)


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: row.key)
def test_a_verdict_turns_at_its_target(row):
    [target] = row.targets
    beyond = -1e-6 if target.at_least else 1e-6
    assert not judge(row, {PEEKLOCK: [target.bound]}).failed
    assert judge(row, {PEEKLOCK: [target.bound + beyond]}).failed


def test_the_targets_of_the_pipeline_are_those_promised():
    bounds = {row.key: str(row.targets[0]) for row in JUDGED}
    assert {key: bound for key, bound in bounds.items() if not key.startswith("journal-")} == {
        "capture-processors": "≤ 0.5",
        "spark-stream": "≥ 60000",
        "spark-batch": "≥ 60000",
        "spark-captured": "≥ 300000",
        "spark-latency-journal": "≤ 500",
        "spark-sink": "≥ 15000",
        "spark-sink-ids": "≥ 15000",
        "audit-audit": "≤ 30",
    }
    for mode in MODES:
        assert bounds[f"journal-events-share-{mode}"] == "≥ 0.85"
        assert bounds[f"journal-bodies-share-{mode}"] == "≥ 0.75"
        assert bounds[f"journal-bodies-waiting-{mode}"] == bounds[f"journal-events-waiting-{mode}"] == "≤ 0.1"


def test_one_word_asks_for_all_rows_of_the_pipeline():
    assert run.arguments(["--rows", "idle,pipeline"]).rows == ["idle", *PIPELINE]
    assert set(ON_SPARK) < set(PIPELINE)


def test_the_page_has_a_title_for_each_group_and_finds_the_group_of_each_cost():
    assert set(TITLES) == set(GROUPS)
    plan = replace(Plan.tiny(), rates=("half",))
    groups = {cell: cost_group(cell) for cell in cell_labels(plan)}
    of_rows = {row.key: row.group for row in rows(plan)}
    assert groups["journal-bodies-recv"] == "journal"
    assert all(
        of_rows[cell] == group for cell, group in groups.items() if cell.startswith("spark-") and "latency" not in cell
    )
