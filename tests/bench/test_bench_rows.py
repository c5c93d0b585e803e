"""The table's verdicts: a target is on a median or on a ratio of medians."""

import pytest

from bench.rows import GROUPS, ROWS, Target, judge, verdicts
from bench.run import arguments, cells, number, plan

BY_KEY = {row.key: row for row in ROWS}


def test_a_ratio_is_of_medians_and_not_of_best_runs():
    verdict = judge(BY_KEY["send-1024"], [100.0, 180.0, 1000.0], [90.0, 100.0, 500.0])
    assert verdict.ratio == pytest.approx(1.8)
    assert verdict.met is True
    assert verdict.ours_range == (100.0, 1000.0)


def test_a_ratio_just_below_its_bound_fails():
    assert judge(BY_KEY["send-1024"], [179.9], [100.0]).met is False


def test_without_a_peer_a_ratio_is_not_judged_and_an_absolute_bound_is():
    assert judge(BY_KEY["send-1024"], [1e9], []).met is None
    assert judge(BY_KEY["openloop-p99"], [2.4], []).met is True
    assert judge(BY_KEY["openloop-p99"], [2.6], []).met is False


def test_a_row_without_a_target_has_no_verdict():
    verdict = judge(BY_KEY["openloop-p99"], [1.0], [])
    assert cells(verdict)[-1] == "[green]pass[/]"
    assert cells(judge(BY_KEY["idle-rss"], [1.0], []))[-1] == ""


def test_only_measured_rows_are_listed_in_the_order_of_the_table():
    samples = {("A", "start"): [1.0], ("A", "send-1024"): [2.0], ("B", "send-1024"): [1.0], ("B", "recv-1024"): [1.0]}
    listed = verdicts(samples, "A", "B")
    assert [verdict.row.key for verdict in listed] == ["send-1024", "start"]
    assert [verdict.ratio for verdict in listed] == [2.0, None]


def test_the_targets_are_those_promised():
    def bound(key: str) -> str:
        return str(BY_KEY[key].target)

    assert [bound(f"{mode}-1024") for mode in ("send", "recv", "both")] == ["≥ 1.8 x", "≥ 2.2 x", "≥ 2 x"]
    assert {bound(f"{mode}-100") for mode in ("send", "recv", "both")} == {"≥ 2 x"}
    assert {bound(f"{mode}-10240") for mode in ("send", "recv", "both")} == {"≥ 1.3 x"}
    assert bound("unpipelined-p50") == "≤ 0.5"
    assert (bound("openloop-p50"), bound("openloop-p99")) == ("≤ 1", "≤ 2.5")
    assert (bound("start"), bound("idle-used"), bound("connection-used")) == ("≤ 1.5", "≤ 200", "≤ 60")
    assert (bound("backlog-used"), bound("backlog-restart")) == ("≤ 150", "≤ 2")
    assert (bound("accept-p50"), bound("sessions-used"), bound("sessions-share")) == ("≤ 2", "≤ 200", "≥ 0.6")
    assert (bound("duplicates-share"), bound("duplicates-used"), bound("transactions")) == ("≥ 0.7", "≤ 100", "≥ 1500")


def test_every_row_belongs_to_a_group_that_can_be_selected():
    assert {row.group for row in ROWS} == set(GROUPS)
    assert len(BY_KEY) == len(ROWS)


def test_options_change_only_what_they_name():
    full = plan(arguments([]))
    assert (full.runs, full.seconds, full.backlog, full.connections) == (3, 5.0, 1_000_000, 5000)
    assert plan(arguments(["--runs", "1"])).seconds == full.seconds
    assert plan(arguments(["--quick", "--seconds", "1"])).seconds == 1


def test_an_unknown_group_of_rows_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        arguments(["--rows", "throughput,speed"])
    assert "speed" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "text"), [(45678.9, "45,679"), (45.67, "45.7"), (0.456, "0.46"), (-250.0, "-250")])
def test_figures_are_printed_with_the_digits_they_are_worth(value, text):
    assert number(value) == text


def test_a_target_reads_as_it_is_checked():
    assert str(Target(1.8, of_ratio=True, at_least=True)) == "≥ 1.8 x"
    assert str(Target(2.5)) == "≤ 2.5"
