"""What a start does about definitions when stores have no room for what their log has."""

from pathlib import Path

import pytest

from broker.catalog.catalog import definitions
from broker.settings.config import Settings
from broker.supervisor.definitions import bring_in_line
from storage.data_dir import DataDirectory
from storage.store import StoreFull, Table
from tests.configuration.test_known_stores import settings_of, worked
from tests.logs import open_tables
from tests.without_room import Fault, Faults

CONFIG = 'partitions = 2\n[[queues]]\nname = "orders"\n'
MORE = CONFIG + '[[queues]]\nname = "invoices"\n'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a broker that was killed."""
    found = settings_of(tmp_path, CONFIG)
    with DataDirectory(found.data_dir, partitions=2):
        bring_in_line(found)
    worked(found, is_clean=False)
    return found


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    found = Faults(monkeypatch)
    found.update(dict.fromkeys((0, 1), Fault.NOTHING))
    return found


def paths(settings: Settings, partition: int) -> list[str]:
    with open_tables(settings.data_dir, partition) as store:
        return sorted(each.description.path for each in definitions(store))


def test_a_start_reads_them_through_the_log_and_leaves_it_to_the_worker(settings, faults):
    found = bring_in_line(settings)
    assert (found.damaged, found.no_room, found.reconciled.updated) == ({}, "", ())
    faults.clear()
    assert paths(settings, 0) == paths(settings, 1) == ["orders"]
    with open_tables(settings.data_dir, 0) as store:
        assert store.get(Table.QUARANTINE, b"key") == b"value"


@pytest.mark.parametrize("without_room", [(0, 1), (1,)])
def test_what_is_declared_anew_waits_for_a_start_with_room(settings, faults, tmp_path, without_room):
    for partition in {0, 1}.difference(without_room):
        del faults[partition]
    more = settings_of(tmp_path, MORE)
    assert "No space left on device" in bring_in_line(more).no_room
    faults.clear()
    found = bring_in_line(more)
    assert (found.damaged, found.no_room) == ({}, "")
    assert paths(more, 0) == paths(more, 1) == ["invoices", "orders"]


def test_a_partition_does_not_go_to_another_worker_while_it_needs_the_log_of_the_one_before(settings, faults):
    moved = settings.model_copy(update={"workers": 2})
    with pytest.raises(StoreFull, match="until there is room"):
        bring_in_line(moved)
    faults.clear()
    assert bring_in_line(moved).damaged == {}
