"""Runs the tests that a change can reach: `python -m tests.changed [--since main] [pytest's arguments]`.

A change is all that is different from where the branch left `main`, committed or not. Tests that only start a broker
with a changed part in it are left to `make test`. Those that take longer (`tests.tiers`) are left to `make
test-landing`, unless they have changed themselves.
"""

import argparse
import subprocess
import sys

from tests.reach import Sources, Unknown, read
from tests.sources import ROOT
from tests.tiers import CHANGE

NO_TESTS = 5  # pytest's exit code


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_since(commit: str) -> list[str]:
    """Paths of files that were changed, added or deleted since the branch left this commit's."""
    [base] = git("merge-base", commit, "HEAD")
    return sorted(
        {*git("diff", "--name-only", "--no-renames", base), *git("ls-files", "--others", "--exclude-standard")}
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description=__doc__)
    parser.add_argument("--since", default="main", help="a branch or commit")
    parser.add_argument("--list", action="store_true", help="only print the paths of the tests")
    options, for_pytest = parser.parse_known_args()
    try:
        changed = changed_since(options.since)
    except subprocess.CalledProcessError as error:
        parser.error(error.stderr.strip())
    try:
        reach = Sources(read()).reached_by(changed)
    except Unknown as unknown:
        print(f"{unknown}: all tests run", file=sys.stderr)
        tests = ["tests"]
    else:
        tests = sorted(reach.tests)
        print(f"{len(changed)} files have changed, {len(tests)} files of tests can tell", file=sys.stderr)
        if reach.of_programs:
            print(f"{len(reach.of_programs)} more start programs with them: make test runs those", file=sys.stderr)
    if options.list:
        print(*tests, sep="\n")
        return
    own = [test for test in tests if test in changed]
    others = [test for test in tests if test not in own]
    failed = bool(own) and run(for_pytest, own)
    failed |= bool(others) and run([*for_pytest, "--tier", CHANGE], others)
    sys.exit(failed)


def run(options: list[str], tests: list[str]) -> bool:
    """False if all pass, or all are longer ones."""
    command = [sys.executable, "-m", "pytest", "--numprocesses", "auto", *options, *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode not in (0, NO_TESTS)


if __name__ == "__main__":
    main()
