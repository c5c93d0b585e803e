"""Runs alone what has failed beside other tests, three times: `python -m tests.again`.

SDKs and Spark have time-outs of their own, which a machine that is busy with other tests can exceed. What passes alone
each time is named, for its test to be mended; any other failure stays one. A run that was not complete, or in which
more tests failed than a busy machine explains, is not tried again.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMES = 3  # what fails in every second run passes so often in one of eight
MOST = 5
NAME = "peeklock/last_run"
FILE = Path(".pytest_cache/v", NAME)  # where pytest keeps it


def keep(config: pytest.Config, terminalreporter: Any, exit_status: int) -> None:
    """At the end of a run: keep how it ended, and the tests that failed."""
    reports = [report for outcome in ("failed", "error") for report in terminalreporter.getreports(outcome)]
    if cache := getattr(config, "cache", None):  # a caller may have turned it off
        cache.set(NAME, {"exit_status": int(exit_status), "failed": sorted({each.nodeid for each in reports})})


def to_try(last_run: Path) -> list[str]:
    """The tests of the last run that are tried again. None if that would say nothing."""
    if not last_run.is_file():
        return []
    last = json.loads(last_run.read_text())
    complete = last["exit_status"] == pytest.ExitCode.TESTS_FAILED
    return last["failed"] if complete and len(last["failed"]) <= MOST else []


def main() -> None:
    tests = to_try(FILE)
    if not tests:
        sys.exit("Nothing that failed is tried again alone.")
    for time in range(1, TIMES + 1):
        print(f"Alone, {time} of {TIMES}: {' '.join(tests)}", flush=True)
        if subprocess.run([sys.executable, "-m", "pytest", *tests]).returncode:
            sys.exit(1)
    print("These failed beside other tests and passed alone. Mend the tests, or what they found:", *tests, sep="\n  ")


if __name__ == "__main__":
    main()
