"""Counters of perf: what it prints, and a real count where this machine has one."""

import shutil
import subprocess
import sys
import time

import psutil
import pytest

from bench import counters

SOFTWARE = "task-clock"  # counted everywhere, in nanoseconds or milliseconds of CPU


def test_counts_are_read_and_what_was_not_counted_is_no_zero():
    assert counters.parse("12345,,instructions:u,1000,100.00,,\n") == 12345
    assert counters.parse("1.50,msec,task-clock,1500000,100.00,0.9,CPUs utilized\n") == 1
    assert counters.parse("<not supported>,,instructions:u,0,100.00,,\n") is None
    assert counters.parse("<not counted>,,instructions:u,0,0.00,,\n") is None
    assert counters.parse("") is None


def test_a_machine_that_does_not_count_an_event_has_a_reason():
    assert "no-such-event" in (counters.reason_missing("no-such-event") or "perf is not installed: no-such-event")


def test_a_process_that_perf_could_not_count_has_no_figure():
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed")
    if counters.reason_missing() is None:
        pytest.skip(f"perf counts {counters.USER_INSTRUCTIONS} here")
    with counters.counting([psutil.Process()]) as counted:
        pass
    assert counted == {}


def test_processes_are_counted_while_they_run_under_their_roles():
    if shutil.which("perf") is None or counters.reason_missing(SOFTWARE):
        pytest.skip(f"perf does not count {SOFTWARE} here")
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()  # until it runs, it may have no command yet
        with counters.counting([psutil.Process(busy.pid)], SOFTWARE) as counted:
            time.sleep(0.5)  # it runs meanwhile
    finally:
        busy.kill()
        busy.communicate()
    ((name, count),) = counted.items()
    assert name.startswith("python")
    assert count > 0
