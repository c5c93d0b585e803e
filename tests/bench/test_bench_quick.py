"""The whole bench, tiny and without peers, against the real broker: it keeps working."""

import json

import pytest

from bench import load, run
from bench.plan import Plan
from bench.rows import BEFORE, GROUPS, PEEKLOCK, PIPELINE, rows
from bench.servers import ROOT
from broker.settings.placement import is_one_process
from tests.caller import REQUIRE_INTEROP


@pytest.fixture(scope="module", autouse=True)
def load_tool():
    try:
        load.build()
    except load.LoadToolMissing as missing:
        pytest.fail(str(missing)) if REQUIRE_INTEROP else pytest.skip(str(missing))


def test_a_quick_bench_fills_every_row(tmp_path, capsys):
    result = tmp_path / "bench.json"
    # By test_instruction_budget.py, because it takes long, and by test_bench_pipeline.py, which needs Spark.
    measured_elsewhere = {"instructions", *PIPELINE}
    groups = ",".join(group for group in GROUPS if group not in measured_elsewhere)
    assert run.main(["--quick", "--peers", "none", "--rows", groups, "--json", str(result)]) == 0, capsys.readouterr()
    made = json.loads(result.read_text())
    figures = {row["key"]: row["figures"] for row in made["rows"]}
    assert set(figures) == {row.key for row in rows(Plan.tiny()) if row.group not in measured_elsewhere}
    assert all(list(of) == [PEEKLOCK] for of in figures.values())
    assert all(of[PEEKLOCK]["median"] > 0 for key, of in figures.items() if "-p" in key or key.endswith("1x1"))
    assert all(row["targets"] for row in made["rows"] if row["key"] in ("unpipelined-p50", "start"))
    assert "open loop, 2,000/s: send to receive, p99" in capsys.readouterr().out


def test_another_checkout_is_measured_in_the_same_rounds_with_the_cost_of_each_process(tmp_path, capsys):
    result = tmp_path / "bench.json"
    cells = ["--rows", "throughput,openloop", "--shapes", "1x1", "--rates", "half", "--rounds", "2", "--modes", "recv"]
    options = ["--quick", "--peers", "none", "--before", str(ROOT), "--seconds", "0.5", "--json", str(result)]
    assert run.main([*options, *cells]) == 0, capsys.readouterr()
    made = json.loads(result.read_text())
    received = {row["key"]: row for row in made["rows"]}["recv-1024-1x1"]
    assert [len(received["figures"][server]["values"]) for server in (PEEKLOCK, BEFORE)] == [2, 2]
    assert received["ratios"][BEFORE] > 0
    assert not [row["key"] for row in made["rows"] if row["key"].startswith(("send-", "both-", "saturation-"))]
    costs = {cost["cell"]: cost["by_server"] for cost in made["costs"] if cost["kind"] == "cpu"}
    assert set(costs) == {"recv-1024-1x1", "openloop-half"}
    serving = {"one_process"} if is_one_process(None, 1) else {"gateway", "worker"}
    for by_role in costs["recv-1024-1x1"].values():
        assert {"supervisor", "client", *serving} <= set(by_role)
        assert all(by_role[role] > 0 for role in serving)
    assert "÷ before" in capsys.readouterr().out
