"""Hardware counters of running processes, read by `perf stat`, which many virtual machines do not offer."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache

import psutil

from bench.processes import command_of, role

USER_INSTRUCTIONS = "instructions:u"
ATTACH_S = 0.2  # perf says nothing when it has attached


@cache
def reason_missing(event: str = USER_INSTRUCTIONS) -> str | None:
    """Why perf cannot count the event here, or None."""
    if shutil.which("perf") is None:
        return "perf is not installed"
    done = subprocess.run(["perf", "stat", "-x,", "-e", event, "--", "true"], capture_output=True, text=True)
    if done.returncode or parse(done.stderr) is None:
        return f"perf stat does not count {event} on this machine"
    return None


def parse(text: str) -> int | None:
    """The count in what `perf stat -x,` prints for one event; None when it was not counted."""
    for line in text.splitlines():
        value = line.split(",")[0]
        with contextlib.suppress(ValueError):
            return int(float(value))
    return None


@contextlib.contextmanager
def counting(processes: Sequence[psutil.Process], event: str = USER_INSTRUCTIONS) -> Iterator[dict[str, int]]:
    """What processes of each role count while the block runs: the dictionary is filled at its end."""
    counted: dict[str, int] = {}
    command = ["perf", "stat", "-x,", "-e", event, "-p"]
    watched = [
        (role(command_of(process)), subprocess.Popen([*command, str(process.pid)], stderr=subprocess.PIPE, text=True))
        for process in processes
    ]
    time.sleep(ATTACH_S)
    try:
        yield counted
    finally:
        for name, perf in watched:
            perf.send_signal(signal.SIGINT)
            _, printed = perf.communicate()
            if (count := parse(printed)) is not None:  # what was not counted must not look like zero
                counted[name] = counted.get(name, 0) + count
