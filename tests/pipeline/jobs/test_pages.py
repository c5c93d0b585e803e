"""Pages of jobs and their plots, drawn from values that no ledger has to be made for."""

import re

import pytest

from tests.pipeline import ledgers
from tests.pipeline.pages import HOSTILE, Page

pytest.importorskip("matplotlib")

from pipeline.jobs import plots
from pipeline.jobs.report import (
    MAX_CELL_CHARACTERS,
    Duration,
    Headline,
    Report,
    Section,
    Table,
    counted,
    duration,
    heading,
    labels,
    render,
    shown,
)

DURATION = r"[\d\u202f]+(\.\d+)?\u202f(ms|s|min|h|d)"
REASONS = [f"{HOSTILE} could not be read since it has no customer, says handler {number}" for number in range(15)]


def texts_of(drawn):
    return [text.strip() for text in re.findall("<text [^>]*>([^<]*)</text>", drawn)]


def colours_of(drawn):
    return set(re.findall(r"var\(--series-(\d+)\)", drawn))


def test_pages_show_values_as_people_read_them():
    assert [shown(value) for value in (None, True, 1234567, 1234.5, "a\x00b", "x" * 1000)] == [
        "-",
        "yes",
        "1\u202f234\u202f567",
        "1\u202f234.50",
        "a\ufffdb",
        "x" * MAX_CELL_CHARACTERS + "\u2026",
    ]


def test_a_page_says_how_many_rows_it_leaves_out_and_shows_empty_tables():
    tables = [Table("Some", ("A",), [(1,)], total=2000), Table("None", ("A",), [])]
    text = Page(render(Report("Title", "Fine.", "good", [], [Section("S", "", (), tables)]))).text
    assert "The first 1 of 2\u202f000" in text
    assert "None." in text


@pytest.mark.parametrize("values", [[None, None], [0, 0], [1e-3, 1e12]])
def test_plots_of_any_values_are_svg_in_the_colours_of_the_page(values):
    times = [ledgers.START, ledgers.START.replace(hour=9)]
    drawn = plots.lines(HOSTILE, times, {HOSTILE: values, "b": values}, "ms", log=True)
    assert drawn.startswith("<svg ")
    assert "<script" not in drawn
    assert not re.search(r"#0[0a]0[0a]0[0-9a]", drawn)
    assert "var(--series-1)" in drawn
    assert drawn == plots.lines(HOSTILE, times, {HOSTILE: values, "b": values}, "ms", log=True)


@pytest.mark.parametrize("values", [(0.0, 0.0), (300.0, 4000.0), (41.0, 43.0), (5.0, 5e6), (0.0, 1e12)])
def test_logarithmic_axes_are_labelled_as_people_write_numbers(values):
    times = [ledgers.START, ledgers.START.replace(hour=9)]
    over_time = plots.lines("Latency", times, {"a": values}, "ms", log=True)
    by_name = plots.points("Latency", {HOSTILE: {"p50": values[0], "p99": values[1]}, "b": {"p50": 1.0}}, "ms")
    for drawn in (over_time, by_name):
        texts = [text.strip() for text in re.findall("<text [^>]*>([^<]*)</text>", drawn)]
        assert not any("\\" in text or "{" in text for text in texts)
        assert len([text for text in texts if re.fullmatch(DURATION, text)]) >= 2
    assert "<script" not in by_name
    assert "var(--series-2)" in by_name


def test_entities_of_one_name_are_told_apart_by_their_namespaces():
    assert labels([("a", "orders"), ("b", "orders"), ("a", "x")]) == {
        ("a", "orders"): "orders (a)",
        ("b", "orders"): "orders (b)",
        ("a", "x"): "x (a)",
    }
    assert labels([("a", "orders"), ("a", "x")]) == {("a", "orders"): "orders", ("a", "x"): "x"}


def test_columns_have_names_for_people():
    names = ("sequenceNumber", "op", "firstTime", "Cost (EUR)", "p50", "Bytes sent", "")
    assert [heading(name) for name in names] == [
        *("Sequence number", "Op", "First time", "Cost (EUR)", "p50", "Bytes sent", ""),
    ]


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        *((0.0, "0 ms"), (0.004, "0.004 ms"), (12.345, "12.3 ms"), (999, "999 ms"), (1000, "1 s"), (1300, "1.3 s")),
        *(
            (90_000, "90 s"),
            (150_000, "2.5 min"),
            (200_000_000, "2.31 d"),
            (7_000_000, "117 min"),
            (93_600_000, "26 h"),
        ),
        *((3.2e11, "3\u202f704 d"), (1e-9, "0 ms"), (8.64e22, "1\u202f000\u202f000\u202f000\u202f000\u202f000 d")),
    ],
)
def test_times_are_said_in_the_unit_of_people(milliseconds, text):
    said = duration(milliseconds)
    assert said.replace("\u202f", " ") == text.replace("\u202f", " ")
    assert shown(Duration(milliseconds)) == said


def test_one_is_not_many():
    assert [counted(number, "message") for number in (0, 1, 2, 1234)] == [
        *("0 messages", "1 message", "2 messages", "1,234 messages"),
    ]
    assert [counted(number, "message was", "messages were") for number in (1, 2)] == [
        "1 message was",
        "2 messages were",
    ]


def test_each_of_fifteen_long_reasons_has_a_label_of_its_own_or_is_counted_among_the_others():
    counts = {"orders": {reason: 100 - index for index, reason in enumerate(REASONS)}, "bills": {REASONS[14]: 3}}
    drawn = plots.bars("Dead letters", counts, "messages")
    assert colours_of(drawn) == {str(number) for number in range(1, 12)}
    found = [text for text in texts_of(drawn) if "…" in text]
    assert len(set(found)) == len(found) == plots.MAX_LINES
    assert "5 others" in texts_of(drawn)
    assert all(len(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")) <= 34 for text in found)
    over_time = plots.lines("By hour", [ledgers.START], {reason: [1.0] for reason in REASONS[:10]}, "messages")
    assert colours_of(over_time) == {str(number) for number in range(1, 11)}


def test_labels_that_begin_and_end_alike_are_numbered():
    names = ["a" * 100 + str(number) + "z" * 100 for number in range(3)]
    drawn = plots.points("Latency", {name: {"p50": 1.0, "p99": 2.0} for name in names}, "ms")
    assert [text[-4:] for text in texts_of(drawn) if text.startswith("aaa")] == [" (1)", " (2)", " (3)"]


def test_a_page_has_its_figure_at_the_top_and_names_columns_in_each_cell():
    table = Table("Some", ("sequenceNumber", HOSTILE), [(1, HOSTILE)])
    page = render(Report("Title", "Fine.", "bad", [], [Section("S", "", (), [table])], Headline(1234, HOSTILE)))
    text = Page(page).text
    assert text.index("1\u202f234") < text.index(shown(HOSTILE)) < text.index("Fine.")
    assert '<td data-column="Sequence number" class="number">1</td>' in page
    assert "script" not in Page(page).tags
