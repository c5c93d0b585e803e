"""A restore by several processes, which is killed and goes on where it was."""

import os
import random
import signal
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired

import psutil
import pytest

from bench.pipeline import captured_rows
from storage.capture.sifting import Work
from storage.capture.writing import CaptureOptions
from storage.data_dir import UNFINISHED, partition_path
from storage.lmdb_store import DATA_FILE, TablesSnapshot
from storage.maintenance import WORK, verify
from storage.store import Table
from tests.pairing.commands import Command
from tests.patience import PATIENCE_S, eventually
from tests.restoring.test_restore_command import restore
from tests.restoring.written import captured_orders

MESSAGES = 40_000


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Path:
    """Files of some 100 KiB, so that there are many units."""
    found = tmp_path_factory.mktemp("captured")
    captured_rows.write(
        str(found), MESSAGES, body_bytes=100, alive=0.1, wait=2000, options=CaptureOptions(file_bytes=100 << 10)
    )
    return found


def command(folder: Path, url: Path, processes: int = 2) -> Command:
    arguments = ("restore", "--from-capture", url, "--data-dir", folder / "data", "--processes", processes)
    return Command(folder / "command", *arguments)


def done(folder: Path, url: Path, processes: int = 2) -> str:
    with command(folder, url, processes) as running:
        assert running.process.wait(PATIENCE_S) == 0, running.err
        return running.out.replace(str(folder), "")


def tables(data_dir: Path) -> list[list[tuple[bytes, bytes]]]:
    """All that is in the stores, but for what is different in each of them."""
    found = []
    for partition in range(4):
        with TablesSnapshot(partition_path(data_dir, partition)) as snapshot:
            found += [list(snapshot.items(table)) for table in Table if table is not Table.META]
    return found


@pytest.fixture(scope="module")
def wanted(url, tmp_path_factory) -> tuple[str, list[list[tuple[bytes, bytes]]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    told = done(folder, url, 1)
    assert verify(folder / "data").ok
    assert not (folder / "data" / WORK).exists()
    return told, tables(folder / "data")


def test_several_processes_restore_what_one_does(url, wanted, tmp_path):
    assert (done(tmp_path, url, 3), tables(tmp_path / "data")) == wanted


def test_whenever_it_is_killed_it_goes_on(url, wanted, tmp_path):
    chance, kills, before = random.Random(7), 0, set()

    def units() -> set[str]:
        return {each.stem for each in (tmp_path / "data" / WORK).glob("*.json")}

    def is_further(running: Command, before: set[str]) -> bool:
        return units() > before or running.process.poll() is not None

    while True:
        with command(tmp_path, url) as running:
            eventually(partial(is_further, running, before), "more is done, or all")
            try:
                code = running.process.wait(chance.random() / 8)
            except TimeoutExpired:
                assert running.end(signal.SIGKILL) == -signal.SIGKILL
                kills += 1
                if not (tmp_path / "data" / UNFINISHED).exists():
                    break  # it had only to end
                if not (tmp_path / "data" / "peeklock.json").exists():
                    assert before <= units()  # nothing is done again
                    before = units()
                continue
            assert code == 0, running.err
            break
    assert kills >= 2
    assert tables(tmp_path / "data") == wanted[1]
    assert verify(tmp_path / "data").ok
    assert sorted(each.name for each in (tmp_path / "data").iterdir()) == ["lock", "partitions", "peeklock.json"]


def test_killed_before_the_last_step_a_broker_refuses_the_directory(url, tmp_path):
    with command(tmp_path, url) as running:
        eventually(lambda: (tmp_path / "data" / UNFINISHED).exists(), "it has begun")
        running.end(signal.SIGKILL)
    with Command(tmp_path / "serve", "serve", "--data-dir", tmp_path / "data") as broker:
        assert broker.end() != 0
        assert "is what a restore has made so far" in broker.err
    assert not (tmp_path / "data" / "peeklock.json").exists()


def test_processes_end_with_the_command(url, tmp_path):
    with command(tmp_path, url) as running:
        eventually(lambda: len(psutil.Process(running.process.pid).children()) >= 2, "processes are there")
        children = psutil.Process(running.process.pid).children()
        running.end(signal.SIGKILL)
        psutil.wait_procs(children, PATIENCE_S)
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children)


def test_a_process_that_is_killed_is_told_and_the_command_can_be_repeated(url, wanted, tmp_path):
    with command(tmp_path, url) as running:
        work = Work(tmp_path / "data" / WORK)
        eventually(lambda: any(work.folder.glob("ledger-*.json")), "units are done")
        victim = next(
            each for each in psutil.Process(running.process.pid).children() if "spawn_main" in " ".join(each.cmdline())
        )
        os.kill(victim.pid, signal.SIGKILL)
        assert running.process.wait(PATIENCE_S) == 1
        assert "a process ended by SIGKILL" in running.err
        assert "run the command again" in running.err
        assert f"What was done so far is in {work.folder}" in running.err
    assert (done(tmp_path, url), tables(tmp_path / "data")) == wanted


def test_another_wish_begins_anew(tmp_path):
    captured_orders(tmp_path / "captured")
    file = next((tmp_path / "captured").glob("table=messages/**/*.parquet"))
    kept = file.read_bytes()
    file.write_bytes(kept[:-9])
    assert str(file) in restore(tmp_path, code=1)
    work = tmp_path / "data" / WORK
    plan, looked_at = (work / "plan.json").read_bytes(), next(work.glob("ledger-*-look.json"))
    looked_at_ns = looked_at.stat().st_mtime_ns
    restore(tmp_path, code=1)
    assert looked_at.stat().st_mtime_ns == looked_at_ns
    restore(tmp_path, "--since", "2026-01-01T00:00:00Z", code=1)
    assert (work / "plan.json").read_bytes() != plan
    assert looked_at.stat().st_mtime_ns != looked_at_ns
    file.write_bytes(kept)
    restore(tmp_path, "--entity", "orders")
    assert verify(tmp_path / "data").ok


@pytest.mark.parametrize("step", ["partitions moved", "description written"])
def test_killed_in_the_last_moment(url, wanted, tmp_path, step):
    """Between the steps that make it a data directory."""
    done(tmp_path, url)
    data = tmp_path / "data"
    (data / UNFINISHED).touch()
    (data / WORK).mkdir()
    if step == "partitions moved":
        (data / "peeklock.json").unlink()
    told = done(tmp_path, url)
    assert ("was restored before" in told) == (step == "description written")
    assert tables(data) == wanted[1]
    assert (data / "partitions" / "0" / DATA_FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in data.iterdir()) == ["lock", "partitions", "peeklock.json"]
