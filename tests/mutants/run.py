"""Plants bugs one at a time and looks which test finds each: `python -m tests.mutants.run`.

Each is planted in a copy of the last commit. There the tests run that it can reach: first those in whose own process it
is, the nearest before the others, then those that start a broker with it. The first failure ends it. Results
are added to a file, so a run that was ended goes on where it was. With the results of an earlier run the tests that
found the bugs there come first.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest

from tests.mutants.bugs import Bug, load
from tests.reach import Sources, read
from tests.sources import ROOT
from tests.tiers import TIERS

EXTENSION = Path("protocol/_native.abi3.so")
# Their subject is the sources themselves.
NO_TESTS = (
    "tests/mutants/",
    "tests/test_reach.py",
    "tests/test_imports.py",
    "tests/test_references.py",
    "tests/bench/",
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NOTHING_COLLECTED = pytest.ExitCode.NO_TESTS_COLLECTED


@dataclass(frozen=True)
class Result:
    """`found_by` is the first test that failed, or "" if none did; `is_whole` is False if the time was over."""

    bug: str
    found_by: str
    seconds: float
    is_whole: bool = True

    def __str__(self) -> str:
        if self.found_by:
            return f"{self.bug}: found by {self.found_by} in {self.seconds:.0f} s"
        return f"{self.bug}: {'SURVIVES' if self.is_whole else 'not found before the time was over'}"


class Checkout:
    """A copy of the last commit, with the tests of another one if `tests_of` names it; with the tests of all tiers, or
    with those of some, one tier after the other.
    """

    def __init__(self, root: Path, tests_of: str | None, tiers: Sequence[str]) -> None:
        self.root = root
        self._choices = [["--tier", tier] for tier in tiers] or [[]]
        self._sources = Sources(read())
        self._run("git", "worktree", "add", "--quiet", "--detach", str(root), cwd=ROOT)
        if tests_of is not None:
            self._run("git", "rm", "-r", "--quiet", "tests")
            # pyproject.toml says how to run them.
            self._run("git", "checkout", "--quiet", tests_of, "--", "tests", "pyproject.toml")
        shutil.copy2(ROOT / EXTENSION, root / EXTENSION)

    def close(self) -> None:
        self._run("git", "worktree", "remove", "--force", str(self.root), cwd=ROOT)

    @contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        path, built = self.root / bug.file, self.root / EXTENSION
        text = path.read_text()
        bug.plant(self.root)
        try:
            if bug.file.startswith("protocol/native/"):
                self._run(sys.executable, "protocol/native/build.py")
            yield
        finally:
            path.write_text(text)
            shutil.copy2(ROOT / EXTENSION, built)

    def tests_of(self, bug: Bug) -> list[str]:
        reach = self._sources.reached_by([bug.file])
        found = self._sources.nearest_first(reach.tests | reach.of_programs, bug.file)
        return [test for test in found if not test.startswith(NO_TESTS) and (self.root / test).exists()]

    def first_failure(self, tests: list[str], seconds: float) -> tuple[str, bool]:
        """The first test that fails, or "", and whether there was time for all."""
        end = time.monotonic() + seconds
        for choice in self._choices if tests else []:  # without names pytest would run all there are
            found_by, is_whole = self._first_failure([*choice, *tests], end - time.monotonic())
            if found_by or not is_whole:
                return found_by, is_whole
        return "", True

    def _first_failure(self, arguments: list[str], seconds: float) -> tuple[str, bool]:
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *arguments]
        # Processes that tests start find our packages by their installation, which is not this copy, if not by this.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(self.root), str(self.root / "pipeline")))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run compiles all tests again
        with tempfile.TemporaryFile("w+") as output:
            running = subprocess.Popen(command, cwd=self.root, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                running.wait(seconds)
            except subprocess.TimeoutExpired:
                for process in (*psutil.Process(running.pid).children(recursive=True), running):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()  # brokers lead groups of their own
                running.wait()
                return "", False
            output.seek(0)
            said = output.read()
        if running.returncode in (0, NOTHING_COLLECTED) or "\nERROR: not found: " in said:  # a test that is gone
            return "", True
        failed = FAILED.search(said)
        if failed is None:
            raise RuntimeError(f"pytest ended with {running.returncode}:\n{said[-2000:]}")
        return failed[1], True

    def _run(self, *command: str, cwd: Path | None = None) -> None:
        subprocess.run(command, cwd=cwd or self.root, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="BUG", help="names; without any, all of them")
    parser.add_argument("--at-random", type=int, metavar="COUNT", help="so many of them, drawn at random")
    parser.add_argument("--seconds", type=float, default=1800, help="for each bug")
    parser.add_argument("--tests-of", metavar="COMMIT", help="with the tests as they are in this commit")
    parser.add_argument("--tiers", nargs="*", default=[], choices=TIERS, help="only the tests of these, in turn")
    parser.add_argument("--known", type=Path, metavar="FILE", help="earlier results, whose tests come first")
    parser.add_argument("--results", type=Path, metavar="FILE", help="without it, one in build/ for these two commits")
    options = parser.parse_args()
    bugs = [bug for bug in load() if not options.only or bug.name in options.only]
    if unknown := set(options.only) - {bug.name for bug in bugs}:
        parser.error(f"no such bugs: {', '.join(sorted(unknown))}")
    if options.at_random:
        bugs = random.sample(bugs, min(options.at_random, len(bugs)))
    results = options.results or ROOT / "build" / f"mutants-{commit('HEAD')}-{commit(options.tests_of or 'HEAD')}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    known = {result.bug: result for result in results_in(results)}
    found_before = {result.bug: result.found_by for result in results_in(options.known)} if options.known else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        checkout = Checkout(Path(directory) / "checkout", options.tests_of, options.tiers)
        try:
            for bug in bugs:
                if bug.name not in known:
                    known[bug.name] = looked_for(bug, checkout, options.seconds, found_before.get(bug.name, ""))
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(known[bug.name])) + "\n")
                print(known[bug.name], flush=True)
        finally:
            checkout.close()
    missed = [bug.name for bug in bugs if not known[bug.name].found_by]
    print(f"{len(bugs) - len(missed)} of {len(bugs)} bugs were found")
    sys.exit(bool(missed))


def commit(name: str) -> str:
    found = subprocess.run(["git", "rev-parse", "--short", name], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def results_in(path: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def looked_for(bug: Bug, checkout: Checkout, seconds: float, first: str = "") -> Result:
    """A test that fails without the bug as well, as for want of a tool, is left out. The `first` test, which found the
    bug before, is tried alone before the others, if it is still there.
    """
    began = time.monotonic()
    tests = checkout.tests_of(bug)
    if first.partition("::")[0] in tests:
        with checkout.planted(bug):
            found_by, _ = checkout.first_failure([first], seconds)
        if found_by and not checkout.first_failure([found_by], seconds)[0]:
            return Result(bug.name, found_by, time.monotonic() - began)
    while True:
        left = seconds - (time.monotonic() - began)
        with checkout.planted(bug):
            found_by, is_whole = checkout.first_failure(tests, left)
        if not found_by or not checkout.first_failure([found_by], seconds)[0]:
            return Result(bug.name, found_by, time.monotonic() - began, is_whole)
        print(f"{found_by} fails without {bug.name}, too", file=sys.stderr)
        tests.remove(found_by.partition("::")[0])


if __name__ == "__main__":
    main()
