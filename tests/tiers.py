"""Which tests run when, as `tiers.toml` says; and which of them stay together when several processes share the tests.

change     `make test`: what a change can wait for. All tests that are named nowhere.
landing    `.ci/run` as well
nightly    `make test-all` as well
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

TABLE: Final = Path(__file__).with_suffix(".toml")
ALL: Final = "all"
CHANGE, LANDING, NIGHTLY = TIERS = ("change", "landing", "nightly")


class Tiers:
    """Names are ids of tests, files or folders, as pytest has them. What is named stands for all below it; a name that
    ends with * for all ids that begin so.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._tiers: dict[str, str] = {name: tier for tier in (LANDING, NIGHTLY) for name in table[tier]}
        self._begun = [name for name in self._tiers if name.endswith("*")]
        self._places = {name: place for place, name in enumerate(table["first"])}
        self._groups = {name: re.compile(group) for name, group in table["groups"].items()}
        self.in_tiers = [*table[LANDING], *table[NIGHTLY]]
        self.names = [*self.in_tiers, *table["first"], *table["groups"]]

    def tier_of(self, test: str) -> str:
        begun = (name for name in self._begun if test.startswith(name[:-1]))
        return next((self._tiers[name] for name in (*begun, *_around(test)) if name in self._tiers), CHANGE)

    def may_have(self, path: str, tier: str) -> bool:
        """True if a file or folder may have tests of this tier."""
        below = (each for name, each in self._tiers.items() if name.startswith((path + "::", path + "/")))
        return tier in (self.tier_of(path), *below)

    def place_of(self, test: str) -> int:
        """Tests with a lower place begin first, because they take longest."""
        return next((self._places[name] for name in _around(test) if name in self._places), len(self._places))

    def group_of(self, test: str) -> str:
        """One process runs all tests of a group, one after the other: all of a file, which may share a broker, or those
        whose ids begin with the same text that the table's pattern matches.
        """
        pattern = next((self._groups[name] for name in _around(test) if name in self._groups), None)
        if pattern is None:
            return test.partition("::")[0]
        found = pattern.match(test)
        return found[0] if found else test


def _around(test: str) -> Sequence[str]:
    """The test's id and what it is in, from the inside."""
    names = [test]
    without, bracket, _ = test.partition("[")
    if bracket:
        names.append(without)
    for separator in ("::", "/"):
        while separator in without:
            without = without.rpartition(separator)[0]
            names.append(without)
    return names


def read() -> Tiers:
    return Tiers(tomllib.loads(TABLE.read_text()))
