"""The table's verdicts: a target is on a median or on a ratio of medians."""

import pytest

from bench.plan import KIB, PLAIN, Cell, Plan, Shape
from bench.rows import ARTEMIS, BEFORE, GROUPS, PEEKLOCK, RABBITMQ, Figure, Target, judge, rows, verdicts
from bench.run import arguments, command, plan
from bench.table import number

BY_KEY = {row.key: row for row in rows(Plan())}
SEND = BY_KEY["send-1024-1x1"]


def test_a_ratio_is_of_medians_and_not_of_best_rounds():
    verdict = judge(SEND, {PEEKLOCK: [100.0, 180.0, 1000.0], RABBITMQ: [90.0, 100.0, 500.0], BEFORE: [144.0]})
    assert verdict.ratios == {RABBITMQ: pytest.approx(1.8), BEFORE: pytest.approx(1.25)}
    assert [met for _, met in verdict.met] == [True, True]
    assert verdict.figures[PEEKLOCK] == Figure(180.0, 100.0, 1000.0)
    assert not verdict.failed


def test_a_ratio_just_below_its_bound_fails_whatever_the_others_are():
    verdict = judge(SEND, {PEEKLOCK: [179.9], RABBITMQ: [100.0], BEFORE: [100.0]})
    assert [met for _, met in verdict.met] == [False, True]
    assert verdict.failed


def test_without_the_server_that_it_names_a_ratio_is_not_judged_and_an_absolute_bound_is():
    assert [met for _, met in judge(SEND, {PEEKLOCK: [1e9], ARTEMIS: [1.0]}).met] == [None, None]
    p99 = BY_KEY["openloop-2000-end-p99"]
    assert [met for _, met in judge(p99, {PEEKLOCK: [2.4]}).met] == [True, None]
    assert [met for _, met in judge(p99, {PEEKLOCK: [2.6]}).met] == [False, None]


def test_a_row_that_only_another_server_has_is_shown_and_not_judged():
    verdict = judge(SEND, {PEEKLOCK: [], RABBITMQ: [5.0]})
    assert (verdict.ratios, verdict.met, verdict.failed) == ({}, (), False)
    assert list(verdict.figures) == [RABBITMQ]


def test_only_measured_rows_are_listed_in_the_order_of_the_table():
    samples = {PEEKLOCK: {"start": [1.0], "send-1024-1x1": [2.0]}, RABBITMQ: {"send-1024-1x1": [1.0], "unknown": [1.0]}}
    listed = verdicts(Plan(), samples)
    assert [verdict.row.key for verdict in listed] == ["send-1024-1x1", "start"]
    assert [verdict.ratios for verdict in listed] == [{RABBITMQ: 2.0}, {}]


def test_the_targets_are_those_promised():
    def bounds(key: str) -> list[str]:
        return [str(target) for target in BY_KEY[key].targets]

    assert bounds("send-1024-1x1") == ["≥ 1.8 x RabbitMQ quorum", "≥ 1.25 x before"]
    assert bounds("recv-1024-1x1") == ["≥ 2.2 x RabbitMQ quorum", "≥ 1 x before"]
    assert bounds("both-1024-1x1") == ["≥ 2 x RabbitMQ quorum", "≥ 1.25 x before"]
    assert {tuple(bounds(f"{mode}-100-1x1")) for mode in ("send", "recv", "both")} == {("≥ 2 x RabbitMQ quorum",)}
    assert {tuple(bounds(f"{mode}-10240-1x1")) for mode in ("send", "recv", "both")} == {("≥ 1.3 x RabbitMQ quorum",)}
    assert bounds("unpipelined-rate") == ["≥ 2 x before", "≥ 1 x RabbitMQ quorum"]
    assert bounds("unpipelined-p50") == ["≤ 0.5"]
    assert bounds("openloop-2000-end-p50") == ["≤ 1", "≤ 0.6 x before"]
    assert bounds("openloop-2000-end-p99") == ["≤ 2.5", "≤ 0.6 x before"]
    assert bounds("openloop-8000-end-p50") == ["≤ 0.5 x before"]
    assert [bounds(f"saturation-{mode}-p99") for mode in ("send", "both")] == [["≤ 100"], ["≤ 100"]]
    assert [bounds(key) for key in ("start", "idle-used", "idle-disk")] == [["≤ 1"], ["≤ 200"], ["≤ 64"]]
    assert bounds("connection-used") == ["≤ 60"]
    assert [bounds(f"backlog-1000000-{part}") for part in ("used", "restart")] == [["≤ 150"], ["≤ 2"]]
    assert bounds("backlog-10000000-used") == []
    assert [bounds(key) for key in ("accept-p50", "sessions-used", "sessions-share")] == [["≤ 2"], ["≤ 200"], ["≥ 0.6"]]
    assert [bounds(key) for key in ("duplicates-share", "duplicates-used")] == [["≥ 0.7"], ["≤ 100"]]
    assert bounds("transactions") == ["≥ 1500", "≥ 1 x before"]
    for key in ("topic-10", "forward-3", "sessions-1000", "duplicates-send"):
        assert "≥ 1 x before" in bounds(key)
    assert bounds("instructions-one") == ["≤ 350000"]


def test_every_row_belongs_to_a_group_that_can_be_selected():
    assert {row.group for row in BY_KEY.values()} == set(GROUPS)
    assert len(BY_KEY) == len(rows(Plan()))


def test_sizes_are_measured_on_one_link_and_shapes_at_1_kib_unless_all_are_crossed():
    few = Plan(sizes=(100, KIB), shapes=(PLAIN, Shape(16, 16)))
    assert few.cells == (Cell(100, PLAIN), Cell(KIB, PLAIN), Cell(KIB, Shape(16, 16)))
    crossed = Plan(sizes=(100, KIB), shapes=(PLAIN, Shape(16, 16)), cross=True)
    assert set(crossed.cells) == {*few.cells, Cell(100, Shape(16, 16))}


def test_options_change_only_what_they_name():
    full = plan(arguments([]))
    assert full == Plan()
    assert (full.rounds, full.warm_up_rounds, full.warm_up_seconds) == (5, 2, 8.0)
    assert plan(arguments(["--rounds", "1"])) == Plan(rounds=1)
    assert plan(arguments(["--quick", "--seconds", "1"])).seconds == 1
    assert plan(arguments(["--shapes", "16x4", "--rates", "500,half"])).shapes == (Shape(16, 4),)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rows", "throughput,speed"], "speed"),
        (["--peers", "kafka"], "kafka"),
        (["--shapes", "4x16"], "4x16"),
        (["--modes", "sent"], "sent"),
        (["--rates", "fast"], "fast"),
        (["--before", "/nonexistent"], "/nonexistent"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(words, named, capsys):
    with pytest.raises(SystemExit):
        arguments(words)
    assert named in capsys.readouterr().err


def test_the_command_that_is_shown_does_not_tell_where_files_lie():
    words = ["--before", "/home/me/old", "--json", "/tmp/x", "--page", "docs"]
    assert command(words) == "--before DIR --json FILE --page docs"


@pytest.mark.parametrize(("value", "text"), [(45678.9, "45,679"), (45.67, "45.7"), (0.456, "0.46"), (-250.0, "-250")])
def test_figures_are_printed_with_the_digits_they_are_worth(value, text):
    assert number(value) == text


def test_a_target_reads_as_it_is_checked():
    assert str(Target(1.8, RABBITMQ, at_least=True)) == "≥ 1.8 x RabbitMQ quorum"
    assert str(Target(2.5)) == "≤ 2.5"
