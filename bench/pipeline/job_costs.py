"""What jobs of the pipeline cost over a capture: CPU, time, and the memory of all their processes.

    python -m bench.pipeline.large_capture /tmp/capture --messages 2000000
    python -m bench.pipeline.job_costs /tmp/capture dead-letters usage latency audit

Memory is the largest sum of PSS that was seen: each page counts once, however many processes have it.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import psutil

from bench.processes import tree

PERIOD_S: Final = 0.3
OPTIONS: Final = {"audit": ("--whole",)}


class Costs(NamedTuple):
    """`cpu_s`: user and system, of all processes; `pss_bytes`: the largest sum."""

    code: int
    cpu_s: float
    seconds: float
    pss_bytes: int


def cost_of(command: Sequence[str]) -> Costs:
    """Run it to its end."""
    used: dict[psutil.Process, float] = {}
    largest, began = 0, time.monotonic()
    job = subprocess.Popen(command, stdout=sys.stderr)
    while job.poll() is None:
        # A worker of Python ends unnoticed: what it had used when it was last seen counts.
        now = 0
        for process in tree(job.pid):
            with suppress(OSError, psutil.Error):
                times = process.cpu_times()
                used[process] = times.user + times.system
                now += _pss_bytes(process.pid)
        largest = max(largest, now)
        time.sleep(PERIOD_S)
    return Costs(job.returncode, sum(used.values()), time.monotonic() - began, largest)


def _pss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("capture", type=Path, metavar="FOLDER")
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.jobs:
        with TemporaryDirectory(prefix="peeklock-bench-") as output:
            command = [sys.executable, "-m", "broker.cli", "jobs", "run", name]
            command += ["--ledger", str(options.capture), "--output", output, *OPTIONS.get(name, ())]
            found = cost_of(command)
        failed += found.code != 0
        print(
            f"{name}: exit code {found.code}, {found.cpu_s:.0f} s of CPU, {found.seconds:.0f} s, "
            f"{found.pss_bytes / 2**30:.2f} GiB",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
