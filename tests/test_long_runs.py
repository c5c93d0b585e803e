"""`make help` is one screen, and what runs for long is explained by `make long-runs`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
LONG_RUNS = (ROOT / "tests" / "long-runs.mk").read_text()
SCREEN = 24  # lines of a terminal


def explained(text: str) -> list[str]:
    return re.findall(r"^#   make ([\w-]+)", text, re.MULTILINE)


def targets(text: str) -> list[str]:
    return re.findall(r"^([\w-]+):(?!=)", text, re.MULTILINE)


def test_the_help_is_one_screen():
    assert len(re.findall(r"^#   ", MAKEFILE, re.MULTILINE)) < SCREEN
    assert "long-runs" in explained(MAKEFILE)


def test_each_long_run_is_explained_once():
    assert sorted(explained(LONG_RUNS)) == sorted(set(targets(LONG_RUNS)) - {"long-runs"})
    assert not set(explained(LONG_RUNS)) & set(explained(MAKEFILE))
    assert not set(targets(LONG_RUNS)) & set(targets(MAKEFILE))


def test_no_long_run_is_taken_for_a_file():
    [phony] = re.findall(r"^\.PHONY: (.*)", LONG_RUNS, re.MULTILINE)
    assert phony.split() == targets(LONG_RUNS)
