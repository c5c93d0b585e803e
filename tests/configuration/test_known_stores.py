"""What a start does about a store that is not there: it makes the first one, and never another in its place."""

import os
import shutil
from collections.abc import Callable
from errno import EDQUOT, ENOSPC, EROFS
from pathlib import Path

import lmdb
import pytest

from broker.catalog.catalog import definitions, home_partition
from broker.catalog.rehearsal import rehearse
from broker.settings.config import ConfigurationError, Settings
from broker.settings.sources import load
from broker.supervisor.definitions import InLine, bring_in_line
from broker.supervisor.supervisor import _note_stores
from storage.data_dir import DESCRIPTION_FILE, DataDirectory, Description, partition_path, read_description
from storage.durable import write_file
from storage.lmdb_store import DATA_FILE
from storage.log.recovery import log_directory
from storage.maintenance import backup, restore
from storage.records import KNOWN_STORES_KEY, encode_document
from storage.store import StoreError, Table
from tests.logs import crash, open_log, open_tables

PARTITIONS = (0, 1, 2)
CONFIG = "partitions = 3\n" + "".join(f'[[queues]]\nname = "queue{number}"\n' for number in range(12))
assert {home_partition(f"queue{number}", 3) for number in range(12)} == set(PARTITIONS)


def settings_of(directory: Path, config: str = CONFIG) -> Settings:
    file = directory / "config.toml"
    file.write_text(config)
    free_ports = {"--amqp-port": "0", "--http-port": "0", "--ops-port": "0"}
    return load(file, {"--data-dir": str(directory / "data")} | free_ports).settings.model_copy(
        update={"data_dir": directory / "data"}
    )


def started(settings: Settings) -> InLine:
    """As far as a start gets before it has processes."""
    with DataDirectory(settings.data_dir, partitions=settings.partitions) as directory:
        found = bring_in_line(settings)
        directory.note_stores(settings.partitions_here)
        return found


def worked(settings: Settings, *, is_clean: bool) -> None:
    """A worker has had all partitions, and was stopped or killed."""
    log = open_log(settings.data_dir, settings.partitions_here)
    for store in log.stores.values():
        store.put(Table.QUARANTINE, b"key", b"value")
    log.commit()
    log.close() if is_clean else crash(log)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a data directory that was used."""
    found = settings_of(tmp_path)
    assert started(found).damaged == {}
    return found


def lose_file(path: Path) -> None:
    (path / DATA_FILE).unlink()


def lose_directory(path: Path) -> None:
    shutil.rmtree(path)


def empty_file(path: Path) -> None:
    (path / DATA_FILE).write_bytes(b"")


def new_file(path: Path) -> None:
    """As LMDB makes it, without any table."""
    lose_file(path)
    lmdb.open(str(path)).close()


LOSSES = [lose_file, lose_directory, empty_file, new_file]


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in directory.rglob(DATA_FILE)}


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_store_that_was_made_is_not_made_again(
    settings: Settings, lose: Callable[[Path], None], is_clean: bool
) -> None:
    worked(settings, is_clean=is_clean)
    path = partition_path(settings.data_dir, 2)
    shutil.copytree(path, settings.data_dir / "kept")
    lose(path)
    before = files(path)
    for _ in range(2):
        [(partition, text)] = started(settings).damaged.items()
        assert partition == 2
        assert text.startswith(f"{path / DATA_FILE}: ")
        assert "Put it back" in text
        assert 'remove 2 from "stores"' in text
        assert files(path) == before
    for other in (0, 1):
        with open_tables(settings.data_dir, other) as store:
            assert store.get(Table.QUARANTINE, b"key") == b"value"
    shutil.rmtree(path, ignore_errors=True)
    (settings.data_dir / "kept").rename(path)
    assert started(settings).damaged == {}
    with open_tables(settings.data_dir, 2) as store:
        assert store.get(Table.QUARANTINE, b"key") == b"value"


@pytest.mark.parametrize("lose", LOSSES)
def test_without_the_store_of_the_home_nothing_starts_and_nothing_is_changed(
    settings: Settings, lose: Callable[[Path], None]
) -> None:
    worked(settings, is_clean=True)
    path = partition_path(settings.data_dir, 0)
    lose(path)
    before = files(settings.data_dir)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="the store of partition 0 is damaged") as raised:
            started(settings)
        assert str(path / DATA_FILE) in str(raised.value)
        assert '"stores"' not in str(raised.value), "the catalog cannot be begun anew"
        assert files(settings.data_dir) == before


@pytest.mark.parametrize("lose", LOSSES)
def test_a_check_of_the_configuration_names_the_store(settings: Settings, lose: Callable[[Path], None]) -> None:
    worked(settings, is_clean=True)
    assert rehearse(settings, 0).problems == []
    lose(partition_path(settings.data_dir, 0))
    with pytest.raises(StoreError, match="partitions/0"):
        rehearse(settings, 0)


def test_without_all_stores_nothing_starts(settings: Settings) -> None:
    shutil.rmtree(settings.data_dir / "partitions")
    with pytest.raises(ConfigurationError, match="the store of partition 0 is damaged"):
        started(settings)


def test_a_log_that_went_on_without_a_missing_store_is_kept_beside_it(settings: Settings) -> None:
    """What was only in the log is there when the store is put back, also after the log has gone on for long."""
    worked(settings, is_clean=False)
    path = partition_path(settings.data_dir, 2)
    path.rename(settings.data_dir / "kept")
    started(settings)
    assert not path.exists(), "so that it can be put back"
    log = open_log(settings.data_dir, (0, 1))
    for number in range(200):
        log.stores[0].put(Table.QUARANTINE, b"%d" % number, bytes(200_000))
        log.commit()
    log.close()
    (settings.data_dir / "kept").rename(path)
    started(settings)
    with open_tables(settings.data_dir, 2) as store:
        assert store.get(Table.QUARANTINE, b"key") == b"value"
    assert [each.name for each in log_directory(settings.data_dir, 0).parent.iterdir()] == ["0"]


def forget_stores(settings: Settings) -> None:
    """As earlier versions described a data directory."""
    write_file(settings.data_dir / DESCRIPTION_FILE, Description(len(PARTITIONS)).to_json())


@pytest.mark.parametrize("known_by", ["log", "definitions"])
@pytest.mark.parametrize("partition", [0, 2])
def test_in_a_directory_of_an_earlier_version_logs_and_definitions_know_stores(
    tmp_path: Path, partition: int, known_by: str
) -> None:
    settings = settings_of(tmp_path, CONFIG if known_by == "definitions" else "partitions = 3\n")
    started(settings)
    worked(settings, is_clean=True)
    forget_stores(settings)
    if known_by == "definitions":
        shutil.rmtree(settings.data_dir / "logs")
    path = partition_path(settings.data_dir, partition)
    lose_directory(path)
    if partition == 0:
        with pytest.raises(ConfigurationError, match="the store of partition 0 is damaged"):
            started(settings)
    else:
        assert list(started(settings).damaged) == [partition]
        found = read_description(settings.data_dir)
        assert found is not None
        assert found.stores == PARTITIONS
    assert not path.exists()


@pytest.mark.parametrize("there", [(), (0,), (0, 1), PARTITIONS])
@pytest.mark.parametrize("has_definitions", [True, False])
def test_a_first_start_that_was_interrupted_is_gone_on_with(
    tmp_path: Path, there: tuple[int, ...], has_definitions: bool
) -> None:
    """The description is there first, then one store after the other, and then the definitions in them."""
    settings = settings_of(tmp_path, CONFIG if has_definitions else "partitions = 3\n")
    if there == PARTITIONS:
        with DataDirectory(settings.data_dir, partitions=3):
            bring_in_line(settings)
    else:
        DataDirectory(settings.data_dir, partitions=3).close()
        for number in there:
            partition_path(settings.data_dir, number).mkdir(parents=True)
            lmdb.open(str(partition_path(settings.data_dir, number))).close()
    assert started(settings).damaged == {}
    for number in PARTITIONS:
        with open_tables(settings.data_dir, number) as store:
            assert len(definitions(store)) == len(settings.queues)


@pytest.mark.parametrize("number", [ENOSPC, EDQUOT, EROFS])
def test_a_full_disk_keeps_no_directory_of_an_earlier_version_from_being_used(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    forget_stores(settings)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with DataDirectory(settings.data_dir, partitions=3) as directory:
        monkeypatch.setattr("storage.data_dir.write_file", fail)
        if number == EROFS:
            with pytest.raises(ConfigurationError, match="cannot be written"):
                _note_stores(directory, PARTITIONS)
            return
        _note_stores(directory, PARTITIONS)
        assert "would not notice" in capsys.readouterr().out
        assert directory.described().stores is None


def test_partitions_that_are_added_are_made_and_known(settings: Settings, tmp_path: Path) -> None:
    grown = settings_of(tmp_path, CONFIG.replace("partitions = 3", "partitions = 5"))
    with DataDirectory(grown.data_dir, partitions=5) as directory:
        directory.grow()
    found = read_description(grown.data_dir)
    assert found is not None
    assert (found.partitions, found.stores) == (5, PARTITIONS)
    assert started(grown).damaged == {}  # also after a crash before they were made
    lose_directory(partition_path(grown.data_dir, 4))
    assert list(started(grown).damaged) == [4]


def test_a_backup_and_what_is_restored_of_it_know_their_stores(settings: Settings, tmp_path: Path) -> None:
    worked(settings, is_clean=True)
    with open_tables(settings.data_dir, 0) as store:
        store.put(Table.META, KNOWN_STORES_KEY, encode_document([[0, b"store"]]))
        store.commit()
    backup(settings.data_dir, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    for directory in (tmp_path / "backup", tmp_path / "restored"):
        found = read_description(directory)
        assert found is not None
        assert found.stores == PARTITIONS
    with open_tables(tmp_path / "restored", 0) as store:  # its stores have new ids
        assert store.get(Table.META, KNOWN_STORES_KEY) is None
    of_restored = settings.model_copy(update={"data_dir": tmp_path / "restored"})
    assert started(of_restored).damaged == {}
    lose_file(partition_path(of_restored.data_dir, 1))
    assert list(started(of_restored).damaged) == [1]
