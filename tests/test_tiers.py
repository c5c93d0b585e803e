"""The table of tiers names tests that there are, and each test is in one tier and one group."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.interop.scenarios import SDKS, applicable
from tests.sources import ROOT
from tests.tiers import CHANGE, LANDING, NIGHTLY, TIERS, Tiers, read

TABLE = Tiers(
    {
        "landing": ["tests/slow", "tests/fast/test_a.py::test_long", "tests/fast/test_a.py::test_cases[third]"],
        "nightly": [
            "tests/slow/test_ledger.py",
            "tests/fast/test_a.py::TestModel",
            "tests/slow/test_sdks.py::test_x[go-*",
        ],
        "first": ["tests/slow/test_ledger.py::test_b", "tests/slow"],
        "groups": {"tests/slow/test_sdks.py": ".*-(plain|partitioned)-", "tests/slow/test_waits.py": ".*"},
    }
)


@pytest.mark.parametrize(
    ("test", "tier"),
    [
        ("tests/fast/test_a.py::test_short", CHANGE),
        ("tests/fast/test_a.py::test_longer", CHANGE),
        ("tests/fast/test_a.py::test_long", LANDING),
        ("tests/fast/test_a.py::test_long[one::two]", LANDING),
        ("tests/fast/test_a.py::test_cases[third]", LANDING),
        ("tests/fast/test_a.py::test_cases[first]", CHANGE),
        ("tests/fast/test_a.py::TestModel::runTest", NIGHTLY),
        ("tests/slow/test_sdks.py::test_x[a/b]", LANDING),
        ("tests/slow/test_sdks.py::test_x[go-a/b]", NIGHTLY),
        ("tests/slow/test_ledger.py::test_b", NIGHTLY),
        ("tests/slower/test_a.py::test_b", CHANGE),
    ],
)
def test_what_is_named_stands_for_all_below_it(test, tier):
    assert TABLE.tier_of(test) == tier


def test_only_files_without_a_test_of_the_tier_are_passed_over():
    assert [tier for tier in TIERS if TABLE.may_have("tests", tier)] == [*TIERS]
    assert [tier for tier in TIERS if TABLE.may_have("tests/fast", tier)] == [*TIERS]
    assert [tier for tier in TIERS if TABLE.may_have("tests/fast/test_a.py", tier)] == [*TIERS]
    assert [tier for tier in TIERS if TABLE.may_have("tests/fast/test_b.py", tier)] == [CHANGE]
    assert [tier for tier in TIERS if TABLE.may_have("tests/slow", tier)] == [LANDING, NIGHTLY]
    assert [tier for tier in TIERS if TABLE.may_have("tests/slow/test_ledger.py", tier)] == [NIGHTLY]


def test_a_file_is_a_group_unless_its_tests_are_said_to_run_side_by_side():
    assert TABLE.group_of("tests/fast/test_a.py::test_a[x]") == TABLE.group_of("tests/fast/test_a.py::test_b")
    sdks = [f"tests/slow/test_sdks.py::test_x[{name}]" for name in ("go-plain-a", "go-plain-b", "go-partitioned-a")]
    first, second, third = map(TABLE.group_of, sdks)
    assert first == second != third
    assert TABLE.group_of("tests/slow/test_sdks.py::test_other") == "tests/slow/test_sdks.py::test_other"
    assert TABLE.group_of("tests/slow/test_waits.py::test_a") != TABLE.group_of("tests/slow/test_waits.py::test_b")


def test_an_sdk_runs_once_on_each_broker():
    runs = [(sdk, form) for sdk in SDKS for form in ("plain", "partitioned")]
    groups = {
        read().group_of(f"tests/interop/test_interop.py::test_scenario[{sdk}-{form}-{scenario.id}]")
        for sdk, form in runs
        for scenario in applicable(sdk, partitioned=form == "partitioned")
    }
    assert len(groups) == len(runs)


def test_the_longest_begin_first():
    tests = ["tests/fast/test_a.py::test_a", "tests/slow/test_a.py::test_a", "tests/slow/test_ledger.py::test_b[1]"]
    assert sorted(tests, key=TABLE.place_of) == tests[::-1]


@cache
def names_in(path: Path) -> set[str]:
    """Functions and classes of a file; models are classes that are made by a call."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return found


@pytest.mark.parametrize("name", sorted(set(read().names)))
def test_each_name_of_the_table_is_that_of_tests(name):
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    if test:
        assert test.partition("[")[0].partition("::")[0] in names_in(ROOT / path)


def test_no_test_is_in_two_tiers():
    names = read().in_tiers
    assert len(set(names)) == len(names)
