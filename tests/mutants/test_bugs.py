"""The collection of bugs fits this checkout: each can be planted, and what comes of it compiles."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.bugs import Bug, load

ROOT = Path(__file__).resolve().parents[2]
BUGS = load()
AREAS = {  # the beginning of the path, and the least number of bugs
    "broker/gateway/": 4,
    "broker/journal/": 4,
    "broker/pairing/": 4,
    "broker/partition/": 4,
    "broker/worker/": 4,
    "protocol/": 4,
    "storage/": 4,
}
LEAST = 60
MOST_OF_A_FILE = 3
MOST_LINES = 5  # that a bug adds or changes


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_can_be_planted(bug):
    text = (ROOT / bug.file).read_text()
    planted = bug.planted(text)
    assert planted != text
    if bug.file.endswith(".py"):
        compile(planted, bug.file, "exec")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_small_and_says_what_it_does(bug):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", bug.name)
    assert bug.what
    assert "\n" not in bug.what
    before = Counter(bug.old.splitlines())
    assert (Counter(bug.new.splitlines()) - before).total() <= MOST_LINES


def test_names_are_unique():
    assert [name for name, count in Counter(bug.name for bug in BUGS).items() if count > 1] == []


def test_bugs_are_many_and_everywhere():
    assert len(BUGS) >= LEAST
    for area, least in AREAS.items():
        assert sum(bug.file.startswith(area) for bug in BUGS) >= least, area
    assert any(bug.file.endswith(".c") for bug in BUGS)
    assert max(Counter(bug.file for bug in BUGS).values()) <= MOST_OF_A_FILE


def test_bug_is_planted_in_its_file(tmp_path):
    bug = Bug("a-name", "some.py", "what a user sees", "old", "new")
    path = tmp_path / bug.file
    path.write_text("the old text\n")
    bug.plant(tmp_path)
    assert path.read_text() == "the new text\n"


@pytest.mark.parametrize("text", ["nothing of it", "old and old"])
def test_bug_whose_text_is_not_there_once_is_not_planted(tmp_path, text):
    bug = Bug("a-name", "some.py", "what a user sees", "old", "new")
    path = tmp_path / bug.file
    path.write_text(text)
    with pytest.raises(ValueError, match="a-name"):
        bug.plant(tmp_path)
    assert path.read_text() == text
