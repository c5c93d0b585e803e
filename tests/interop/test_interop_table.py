"""The committed table of README.md says what the scenarios say, and that all hold."""

from tests.interop.readme import README, render
from tests.interop.scenario import ENTITY_PREFIX
from tests.interop.scenarios import NOT_APPLICABLE, NOTES, SCENARIOS, SDKS, applicable
from tests.interop.sdks import PROGRAMS


def test_the_readme_has_every_scenario_with_every_library_and_all_pass() -> None:
    all_pass = {sdk: {scenario.id: True for scenario in applicable(sdk)} for sdk in SDKS}
    assert README.read_text() == render(all_pass), "write it anew: python -m tests.interop.readme"


def test_exceptions_and_notes_are_about_scenarios_that_exist() -> None:
    ids = {scenario.id for scenario in SCENARIOS}
    for exceptions in (*NOT_APPLICABLE.values(), *NOTES.values()):
        assert exceptions.keys() <= ids
    for sdk, notes in NOTES.items():
        assert not notes.keys() & NOT_APPLICABLE[sdk].keys()


def test_every_scenario_is_run_by_some_library_and_has_a_name_of_its_own() -> None:
    assert len({scenario.id for scenario in SCENARIOS}) == len(SCENARIOS)
    assert all(len(ENTITY_PREFIX + scenario.id) <= 260 for scenario in SCENARIOS)
    assert {scenario.id for sdk in SDKS for scenario in applicable(sdk)} == {scenario.id for scenario in SCENARIOS}


def test_every_library_of_the_table_has_a_program() -> None:
    assert set(PROGRAMS) == set(SDKS)
