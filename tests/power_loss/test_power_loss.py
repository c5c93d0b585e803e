"""A broker loses its power at many moments: nothing that was acknowledged is missing, nothing that was removed is back.

The long form is `make power-loss`.
"""

import random

import pytest

from tests.examples import examples
from tests.power_loss.disk import Deaf, Disk, Metadata
from tests.power_loss.record import TRACE_FILE, record
from tests.power_loss.simulate import AGAIN, Plan, run
from tests.power_loss.trace import SHIM, Kind, Trace, mark_of
from tests.shims import NoCompiler, make_shim

SEED = 11
RECORD_S = 3.0


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    try:
        return make_shim(SHIM, tmp_path_factory.mktemp("shim"))
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, shim):
    directory = tmp_path_factory.mktemp("power-loss") / "recorded"
    assert record(directory, shim, seconds=RECORD_S, seed=SEED) > 100
    return directory


def test_nothing_acknowledged_is_missing_after_a_loss_of_power(recorded, shim):
    losses = examples(250)
    report = run(recorded, shim, Plan(losses=losses, seed=SEED))
    assert report.breaches == []
    assert report.losses == losses
    assert report.messages > 6 * losses
    assert report.busy > losses / 5


def test_nor_after_another_during_the_recovery(recorded, shim):
    report = run(recorded, shim, Plan(losses=12, seed=SEED + 1, again=1.0))
    assert report.breaches == []
    assert report.again == 12 * AGAIN


def test_the_trace_says_all_that_the_broker_wrote(recorded, tmp_path):
    disk = Disk()
    mapped = set()
    for each in Trace(recorded / TRACE_FILE):
        if each.kind == Kind.MARK and "root" in (mark := mark_of(each)):
            disk.set_root(mark["root"])
        if each.kind == Kind.MAPPED:
            mapped.add(each.inode)
        disk.tell(each)
    disk.finish()
    disk.image(tmp_path / "image", random.Random(), Metadata.ORDERED)
    data = recorded / "broker" / "data"
    files = [path for path in data.rglob("*") if path.is_file() and path.stat().st_ino not in mapped]
    assert len(files) >= 8
    for path in files:
        assert (tmp_path / "image" / path.relative_to(data)).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize(
    ("deaf", "losses"),
    [
        (Deaf.FILES, 12),
        (Deaf.DSYNC, 40),  # a later sync of the same file makes up for it, so that few messages are lost
    ],
)
def test_a_disk_that_ignores_syncs_loses_messages(recorded, shim, deaf, losses):
    report = run(recorded, shim, Plan(losses, SEED, deaf=(deaf,)))
    assert report.missing > 0, report


def test_a_disk_that_ignores_syncs_of_directories_loses_stores(recorded, shim):
    assert len(run(recorded, shim, Plan(losses=10, seed=SEED, deaf=(Deaf.DIRECTORIES,))).breaches) > 5


def test_a_broker_that_answers_early_loses_messages(recorded, shim):
    report = run(recorded, shim, Plan(losses=15, seed=SEED, early=True))
    assert report.missing > 0, report


def test_a_store_that_does_not_sync_loses_messages(tmp_path, shim):
    record(tmp_path / "recorded", shim, seconds=0.5, seed=SEED, unsynced=True)
    report = run(tmp_path / "recorded", shim, Plan(losses=15, seed=SEED))
    assert report.missing > 0, report
