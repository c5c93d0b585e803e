"""The process that compares definitions at a start, and any that is run apart: it is replaced if it hangs."""

import os
import signal
import time

import pytest

from broker.settings.config import ConfigurationError, Settings
from broker.supervisor import definitions
from broker.supervisor.definitions import bring_in_line
from storage.apart import ProcessDied, ProcessStalled, apart_in_time
from storage.data_dir import DataDirectory
from storage.liveness import SharedSigns

STALL_S = 1.0


def _stops(signs, on_disk):
    signs.beat()
    if on_disk:
        with signs.waiting_for_disk():
            os.kill(os.getpid(), signal.SIGSTOP)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def _stands_still(signs):
    time.sleep(60)


def _makes_progress(signs, seconds):
    for _ in range(round(seconds / 0.1)):
        time.sleep(0.1)
        signs.beat()
    return "done"


def _waits_for_disk(signs, seconds):
    with signs.waiting_for_disk():
        time.sleep(seconds)
    return "done"


def _dies(signs):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("function", "arguments"), [(_stops, (False,)), (_stops, (True,)), (_stands_still, ())])
def test_a_process_that_hangs_is_killed(function, arguments):
    signs, began = SharedSigns(), time.monotonic()
    with pytest.raises(ProcessStalled, match=r"no progress for [1-9] seconds"):
        apart_in_time(signs, STALL_S, function, signs, *arguments)
    assert STALL_S <= time.monotonic() - began < 30


@pytest.mark.parametrize("function", [_makes_progress, _waits_for_disk])
def test_one_that_makes_progress_or_waits_for_the_disk_may_take_five_times_as_long(function):
    signs = SharedSigns()
    assert apart_in_time(signs, STALL_S, function, signs, 5 * STALL_S) == "done"
    assert apart_in_time(signs, STALL_S, function, signs, 0.2) == "done"


def test_one_that_dies_is_told_at_once():
    signs, began = SharedSigns(), time.monotonic()
    with pytest.raises(ProcessDied, match="SIGKILL"):
        apart_in_time(signs, 60.0, _dies, signs)
    assert time.monotonic() - began < 30


@pytest.fixture
def settings(tmp_path):
    found = Settings.model_validate(
        {"data_dir": tmp_path / "data", "worker_stall_timeout_ms": 3000, "queues": [{"name": "orders"}]}
    )
    with DataDirectory(found.data_dir, partitions=found.partitions):
        yield found


def stopping(monkeypatch, tmp_path, times):
    """The first so many processes stop when they have begun."""
    usual, begun = definitions._reconcile, tmp_path / "begun"

    def reconcile(*arguments):
        with begun.open("ab") as file:
            file.write(b".")
        if begun.stat().st_size <= times:
            os.kill(os.getpid(), signal.SIGSTOP)
        return usual(*arguments)

    monkeypatch.setattr(definitions, "_reconcile", reconcile)


def test_a_start_goes_on_with_another_process(monkeypatch, tmp_path, settings):
    stopping(monkeypatch, tmp_path, 1)
    assert bring_in_line(settings).reconciled.created == ("orders",)


def test_a_start_gives_up_when_each_process_hangs(monkeypatch, tmp_path, settings):
    stopping(monkeypatch, tmp_path, 3)
    with pytest.raises(ConfigurationError, match="cannot be compared: no progress for 3 seconds, 3 times"):
        bring_in_line(settings)
