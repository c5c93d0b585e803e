"""The page of results: made of documents alone, with the plots of what they hold."""

import json
import re
from pathlib import Path

import pytest

from bench.plan import KIB, PLAIN, Plan
from bench.recording import cost_key
from bench.rows import ARTEMIS, BEFORE, PEEKLOCK, RABBITMQ
from tests.caller import REQUIRE_INTEROP

try:
    from bench import page
except ImportError as problem:
    if REQUIRE_INTEROP:
        raise
    pytest.skip(f"{problem}: pip install --group bench", allow_module_level=True)

from bench.document import costs, row
from bench.rows import verdicts

PLAN = Plan(sizes=(KIB,), shapes=(PLAIN,), backlogs=(1000,))


def a_document(samples, groups, *, perf_missing="perf is not installed", **other):
    return {
        "format": 1,
        "command": "make bench ARGS='--rounds 2'",
        "began": "2026-01-02T03:04+00:00",
        "minutes": 12.5,
        "machine": {
            **{"processor": "A processor", "cores": 2, "memory_gib": 24, "linux": "6.1", "file_system": "ext4"},
            "python": "3.11.7",
        },
        "servers": {name: {"version": f"{name} 1.0", "durable": "on disk"} for name in samples},
        "groups": groups,
        "plan": {
            **{"rounds": 2, "backlog_rounds": 1, "seconds": 5.0, "rate_seconds": 10.0, "warm_up_rounds": 2},
            **{"warm_up_seconds": 8.0, "sizes": [KIB], "shapes": [{"links": 1, "queues": 1}], "rates": ["2000"]},
            "backlogs": [1000],
        },
        "rows": [row(verdict, samples) for verdict in verdicts(PLAN, samples)],
        "costs": costs(PLAN, samples),
        "perf_missing": perf_missing,
        "runs": 100,
        "disturbed": [],
        "failed": [],
    } | other


def samples_of_everything():
    def of(base: float) -> dict[str, list[float]]:
        keys = [f"openloop-2000-{way}-{q}" for way in ("ack", "end") for q in ("p50", "p99", "p999", "most")]
        keys += [f"unpipelined-{part}" for part in ("rate", "p50", "p99", "p999", "most")]
        keys += [f"{mode}-1024-1x1" for mode in ("send", "recv", "both")]
        keys += [f"backlog-1000-{part}" for part in ("load", "used", "restart", "drain")]
        made = {key: [base, 3 * base] for key in keys}
        return made | {cost_key("send-1024-1x1", "cpu", role): [base] for role in ("gateway", "worker", "client")}

    return {PEEKLOCK: of(1111.0), BEFORE: of(2222.0), RABBITMQ: of(3333.0), ARTEMIS: of(4444.0)}


ALL = ["throughput", "unpipelined", "openloop", "backlog"]


def test_a_page_shows_each_figure_each_broker_and_each_plot_that_was_drawn(tmp_path):
    page.write([a_document(samples_of_everything(), ALL)], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    linked = set(re.findall(r"\(performance/(.*?\.png)\)", text))
    assert linked == {path.name for path in (tmp_path / "performance").glob("*.png")}
    assert linked == {f"{name}.png" for name in ("sizes", "links", "one-at-a-time", "open-loop", "backlog", "cpu")}
    assert "| 2,222 [1,111..3,333] | 6,666 [3,333..9,999] |" in text
    assert "| 0.33 | 0.25 |" in text
    assert "**This was a short run**" in text
    for said in (
        "make bench ARGS='--rounds 2'",
        "Artemis 1.0",
        "A processor, 2 cores",
        "2 x 8 s",
        "perf is not installed",
    ):
        assert said in text
    assert "2,222 (gateway 1,111, worker 1,111)" in text
    assert text.count("perf is not installed") == 1
    assert json.loads((tmp_path / "performance" / "results.json").read_text())[0]["groups"] == ALL


def test_figures_come_first_and_how_they_were_measured_comes_last(tmp_path):
    page.write([a_document(samples_of_everything(), ALL)], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    figures, how = text.split("## How it was measured\n")
    assert figures.index("## Throughput") < figures.index("## Cost of a message")
    for said in ("make bench ARGS=", "Artemis 1.0", "A processor", "2 x 8 s", "| on disk |"):
        assert said in how
        assert said not in figures
    assert "**This was a short run**" in figures


def test_an_earlier_version_is_not_on_the_page(tmp_path):
    page.write([a_document(samples_of_everything(), ALL)], tmp_path)
    assert BEFORE not in re.findall(r"[\w.]+", (tmp_path / "performance.md").read_text())
    assert "÷ before" not in (tmp_path / "performance.md").read_text()


def test_instructions_are_shown_where_they_were_counted_and_never_as_zero(tmp_path):
    samples = {PEEKLOCK: {cost_key("unpipelined", kind, "gateway"): [9000.0] for kind in ("cpu", "instructions")}}
    page.write([a_document(samples, ["unpipelined"], perf_missing=None)], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    assert "User instructions:" in text
    assert text.count("| one send at a time, 1 KiB | 9,000 |") == 2


def test_of_a_group_measured_twice_the_later_document_counts(tmp_path):
    first = a_document(samples_of_everything(), ALL)
    later = a_document({PEEKLOCK: {"backlog-1000-drain": [77.0]}}, ["backlog"], command="make bench ARGS='--later'")
    page.write([first, later], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    backlog = text[text.index("## Backlog") : text.index("## Cost")]
    assert "| 77.0 |" in backlog
    assert "2,222" not in backlog
    assert "--later" in text
    assert "## Open loop" in text


def test_what_failed_or_was_disturbed_is_said(tmp_path):
    told = {"failed": ["openloop, Artemis: amqpload\nboth: no"], "disturbed": ["a", "b"], "runs": 20}
    page.write([a_document(samples_of_everything(), ALL, **told)], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    assert "- openloop, Artemis: amqpload both: no\n" in text
    assert "In 2 of 20 runs, others used more than 0.3 cores" in text
    page.write([a_document(samples_of_everything(), ALL, **told | {"runs": 19})], tmp_path)
    assert "**Rates and latencies are doubtful**: in 2 of 19 runs" in (tmp_path / "performance.md").read_text()


def test_a_run_with_all_rounds_is_not_called_short(tmp_path):
    made = a_document(samples_of_everything(), ALL)
    made["plan"]["rounds"] = 5
    page.write([made], tmp_path)
    assert "short run" not in (tmp_path / "performance.md").read_text()


def test_plots_of_an_earlier_page_do_not_stay_and_another_page_does(tmp_path):
    page.write([a_document(samples_of_everything(), ALL)], tmp_path)
    other = tmp_path / "performance" / "scaling.md"  # made by bench.scaling
    other.write_text("another page")
    page.write([a_document({PEEKLOCK: {"start": [0.5]}}, ["idle"])], tmp_path)
    assert not list((tmp_path / "performance").glob("*.png"))
    assert other.read_text() == "another page"
    assert "(performance/scaling.md)" in (tmp_path / "performance.md").read_text()
    assert "## Start and idle" in (tmp_path / "performance.md").read_text()


def test_the_page_is_made_anew_of_files(tmp_path):
    source = tmp_path / "one.json"
    source.write_text(json.dumps(a_document(samples_of_everything(), ALL)))
    assert page.main([str(tmp_path / "docs"), str(source)]) == 0
    assert (tmp_path / "docs" / "performance.md").exists()


def test_a_run_is_added_to_what_a_page_has(tmp_path):
    docs, more = tmp_path / "docs", tmp_path / "more.json"
    page.write([a_document(samples_of_everything(), ALL)], docs)
    more.write_text(json.dumps(a_document({PEEKLOCK: {"backlog-1000-drain": [77.0]}}, ["backlog"])))
    assert page.main([str(docs), str(docs / "performance" / "results.json"), str(more)]) == 0
    text = (docs / "performance.md").read_text()
    assert "| 77.0 |" in text
    assert "## Open loop" in text
    assert len(json.loads((docs / "performance" / "results.json").read_text())) == 2


def test_the_page_of_this_repository_is_made_of_its_figures():
    docs = Path(__file__).parents[2] / "docs"
    documents = json.loads((docs / "performance" / page.RESULTS).read_text())
    drawn = {path.stem for path in (docs / page.FOLDER).glob("*.png")}
    assert (docs / page.PAGE).read_text() == page.page(page.latest(documents), drawn), "run: python -m bench.page"
