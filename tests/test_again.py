"""What fails beside other tests and passes alone: which of it `.ci/run` takes for passed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

CONFTEST = "from tests.conftest import pytest_addoption, pytest_terminal_summary\n"
# A test fails in those of its runs that are named.
TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("name", {names})
def test_it(name):
    runs = pathlib.Path(name)
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) not in {fails_in}
"""


class Project:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "conftest.py").write_text(CONFTEST)
        (directory / "pytest.ini").write_text("[pytest]\n")

    def has_tests(self, fails_in: set[int], names: tuple[str, ...] = ("one",)) -> None:
        (self.directory / "test_it.py").write_text(TESTS.format(names=names, fails_in=fails_in))

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.directory,
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    def again(self) -> subprocess.CompletedProcess[str]:
        return self.run("tests.again")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("shared", [(), ("--numprocesses", "2")])
def test_what_passes_alone_each_time_is_named_and_passes(project: Project, shared: tuple[str, ...]) -> None:
    project.has_tests({1}, ("one", "two"))
    assert project.run("pytest", *shared).returncode == 1
    done = project.again()
    assert done.returncode == 0, done.stdout
    assert "test_it.py::test_it[one]\n  test_it.py::test_it[two]" in done.stdout
    assert {len((project.directory / name).read_text()) for name in ("one", "two")} == {4}


@pytest.mark.parametrize("run", [2, 3, 4])
def test_what_fails_once_more_fails(project: Project, run: int) -> None:
    project.has_tests({1, run})
    assert project.run("pytest").returncode == 1
    assert project.again().returncode == 1


def test_many_failures_are_no_matter_of_load(project: Project) -> None:
    project.has_tests({1}, tuple(map(str, range(6))))
    assert project.run("pytest").returncode == 1
    assert project.again().returncode == 1
    assert (project.directory / "0").read_text() == "x"


def test_a_run_that_was_not_complete_is_not_tried_again(project: Project) -> None:
    assert project.again().returncode == 1
    project.has_tests({1})
    assert project.run("pytest", "--exitfirst").returncode in (1, 2)
    (project.directory / "test_other.py").write_text("import nothing_of_this_name\n")
    assert project.run("pytest").returncode == 2
    assert project.again().returncode == 1


def test_without_a_cache_tests_run_as_well(project: Project) -> None:
    project.has_tests({1})
    done = project.run("pytest", "-p", "no:cacheprovider")
    assert (done.returncode, done.stderr) == (1, "")
    assert project.again().returncode == 1


def test_what_passed_is_not_tried_again(project: Project) -> None:
    project.has_tests(set())
    assert project.run("pytest").returncode == 0
    assert project.again().returncode == 1
