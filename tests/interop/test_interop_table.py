"""The committed table of README.md says what the scenarios say, and that all hold."""

from broker.catalog.catalog import home_partition
from broker.settings.config import Settings
from tests.interop.partitioned_scenarios import KEYED, NOT_PARTITIONED_WITH, ONLY_PARTITIONED, PLAIN
from tests.interop.readme import FORMS, README, render
from tests.interop.scenarios import NOT_APPLICABLE, NOTES, SCENARIOS, SDKS, applicable
from tests.interop.sdks import PROGRAMS


def test_the_readme_has_every_scenario_with_every_library_and_all_pass() -> None:
    all_pass = {
        form: {sdk: {scenario.id: True for scenario in applicable(sdk, partitioned=form)} for sdk in SDKS}
        for form in FORMS
    }
    assert README.read_text() == render(all_pass), "write it anew: python -m tests.interop.readme"


def test_exceptions_and_notes_are_about_scenarios_that_exist() -> None:
    ids = {scenario.id for scenario in SCENARIOS}
    for exceptions in (*NOT_APPLICABLE.values(), *NOTES.values(), PLAIN, *NOT_PARTITIONED_WITH.values()):
        assert exceptions.keys() <= ids
    assert ids >= KEYED
    assert not KEYED & PLAIN.keys()
    assert not ONLY_PARTITIONED & {*KEYED, *PLAIN}
    for sdk, notes in NOTES.items():
        assert not notes.keys() & NOT_APPLICABLE[sdk].keys()


def test_every_scenario_is_run_by_some_library_and_has_a_name_of_its_own() -> None:
    assert len({scenario.id for scenario in SCENARIOS}) == len(SCENARIOS)
    assert all(len(scenario.entity) <= 250 for scenario in SCENARIOS)
    run = {form: {scenario.id for sdk in SDKS for scenario in applicable(sdk, partitioned=form)} for form in FORMS}
    ids = {scenario.id for scenario in SCENARIOS}
    assert run == {False: ids - ONLY_PARTITIONED, True: ids}


def test_a_scenario_on_several_queues_has_some_on_other_partitions() -> None:
    partitions = Settings.model_fields["partitions"].default
    for scenario in SCENARIOS:
        if scenario.others:
            homes = {home_partition(name, partitions) for name in (scenario.entity, *scenario.other_queues)}
            assert len(homes) > min(2, scenario.others)


def test_every_library_of_the_table_has_a_program() -> None:
    assert set(PROGRAMS) == set(SDKS)
