"""The run tells who finds a bug from who fails without it, and an end of the tests from an end of the time."""

from contextlib import contextmanager
from typing import Any

import pytest

from tests.mutants.bugs import Bug
from tests.mutants.run import looked_for

BUG = Bug("a-name", "some.py", "what a user sees", "old", "new")


class Checkout:
    """Test files fail with the bug, or always; `slow` ones take all of the time."""

    def __init__(self, tests: dict[str, str]) -> None:
        self._tests = tests
        self._is_planted = False

    @contextmanager
    def planted(self, bug: Bug):
        self._is_planted = True
        yield
        self._is_planted = False

    def tests_of(self, bug: Bug) -> list[str]:
        return [*self._tests]

    def first_failure(self, tests: list[str], seconds: float) -> tuple[str, bool]:
        for test in tests:
            kind = self._tests[test.partition("::")[0]]
            if kind == "slow":
                return "", False
            if kind == "always" or (kind == "finds" and self._is_planted):
                return f"{test.partition('::')[0]}::test", True
        return "", True


@pytest.mark.parametrize(
    ("tests", "found_by", "is_whole"),
    [
        ({"a": "passes", "b": "finds"}, "b::test", True),
        ({"a": "always", "b": "finds"}, "b::test", True),
        ({"a": "always", "b": "passes"}, "", True),
        ({"a": "passes", "b": "slow"}, "", False),
        ({}, "", True),
    ],
)
def test_who_finds_a_bug(tests: dict[str, str], found_by: str, is_whole: bool) -> None:
    checkout: Any = Checkout(tests)
    result = looked_for(BUG, checkout, 60)
    assert (result.found_by, result.is_whole) == (found_by, is_whole)
    assert ("found by" in str(result)) == bool(found_by)


@pytest.mark.parametrize(
    ("tests", "found_by"),
    [
        ({"a": "slow", "b": "finds"}, "b::test"),
        ({"a": "finds", "b": "passes"}, "a::test"),
        ({"a": "finds", "b": "always"}, "a::test"),
        ({"a": "finds"}, "a::test"),
    ],
    ids=["it finds it again", "it passes now", "it fails now without the bug", "it is gone"],
)
def test_what_found_a_bug_before_comes_first(tests: dict[str, str], found_by: str) -> None:
    checkout: Any = Checkout(tests)
    assert looked_for(BUG, checkout, 60, first="b::test").found_by == found_by
