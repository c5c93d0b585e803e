"""The model of `bench.scaling`: it finds the terms of which figures were made, and predicts what follows from them."""

import json

import pytest

from bench import load, scaling
from bench.plan import MODES
from bench.scaling import LAYOUTS, spread
from bench.scaling_model import Layout, Point, fit, least_squares, left_out, predict, total
from tests.caller import REQUIRE_INTEROP

TRUTH = {
    "gateway": {"message": 8.0, "frames": 0.5, "fragments": 0.02},
    "worker": {"message": 5.0, "frames": 0.3, "turns": 0.7, "fragments": 0.01},
    "checkpointer": {"message": 2.0},
}


def points(truth=TRUTH) -> list[Point]:
    from bench.scaling_model import cost

    return [
        (
            layout,
            {"gateways": float(layout.gateways)} | {role: cost(truth, role, layout.gateways, layout) for role in truth},
        )
        for layout in LAYOUTS
    ]


def test_the_terms_of_exact_figures_are_found():
    model = fit(points())
    for role, terms in TRUTH.items():
        assert model[role] == pytest.approx(terms)
    assert max(map(abs, left_out(points()))) < 1e-6


def test_no_term_is_negative():
    truth = {**TRUTH, "gateway": {"message": 8.0, "frames": -0.5, "fragments": 0.02}}
    assert fit(points(truth))["gateway"]["frames"] == 0.0


def test_what_the_rows_do_not_tell_apart_is_not_solved():
    assert least_squares([[1.0, 2.0], [2.0, 4.0]], [1.0, 2.0]) is None


def test_without_terms_that_grow_the_rate_grows_with_the_processors():
    flat = {
        role: {name: (value if name == "message" else 0.0) for name, value in of.items()} for role, of in TRUTH.items()
    }
    best = predict(flat, 15)
    assert best.rate == pytest.approx(1e6)
    assert (best.layout.gateways, best.layout.workers) == (8, 5) or best.layout.gateways + best.layout.workers <= 15
    assert predict(flat, 30).rate == pytest.approx(2e6)


def test_with_terms_that_grow_a_processor_adds_less():
    rates = [predict(TRUTH, processors).rate / processors for processors in (2, 8, 32, 128)]
    assert rates[1] > rates[2] > rates[3]


def test_work_on_half_of_the_gateways_counts_as_half_of_them():
    assert spread([1.0, 1.0, 0.0, 0.0]) == 2.0
    assert spread([1.0, 1.0, 1.0, 1.0]) == 4.0
    assert total(TRUTH, 4.0, Layout(4, 4)) > total(TRUTH, 2.0, Layout(4, 4))


def test_a_quick_run_fills_the_page(tmp_path):
    try:
        load.build()
    except load.LoadToolMissing as missing:
        pytest.fail(str(missing)) if REQUIRE_INTEROP else pytest.skip(str(missing))
    (tmp_path / "performance").mkdir()
    kept = tmp_path / "scaling.json"
    assert scaling.main(["--quick", "--json", str(kept), "--page", str(tmp_path)]) == 0
    made = json.loads(kept.read_text())
    assert all(set(of["modes"]) == set(MODES) for of in made["layouts"])
    assert all(value > 0 for of in made["layouts"] for value in of["modes"]["send"]["cost"]["worker"])
    page = (tmp_path / "performance" / "scaling.md").read_text()
    assert page.count("| send | ") + page.count("| receive") + page.count("| 1 | ") > 10
    (tmp_path / "performance" / "scaling.md").unlink()
    assert scaling.main(["--from", str(kept), "--page", str(tmp_path)]) == 0
    assert (tmp_path / "performance" / "scaling.md").read_text() == page
