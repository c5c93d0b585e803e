"""What is said where Spark cannot run: one line with what to install."""

import os
import stat
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

JAVA = """#!/bin/sh
echo 'openjdk version "{}" 2020-01-01' >&2
exit {}
"""


def said(tmp_path, *, hide="", **environment):
    """Exit code and the lines of `python -m pyspark_peeklock`; `hide` is a package that is as if not installed."""
    (tmp_path / "hidden").mkdir(exist_ok=True)
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nfound = m.distribution\n"
        "def distribution(name):\n"
        f"    if name == {hide!r}: raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.distribution = distribution\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pyspark_peeklock"],
        env={"PYTHONPATH": str(tmp_path / "hidden"), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return ran.returncode, ran.stdout.splitlines(), ran.stderr.splitlines()


def java(tmp_path, version, code=0):
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text(JAVA.format(version, code))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(home)


@pytest.fixture(autouse=True)
def _packages():
    pytest.importorskip("pyspark")


def test_versions_are_shown(tmp_path):
    code, out, errors = said(tmp_path, JAVA_HOME=java(tmp_path, "21.0.1"))
    assert (code, errors) == (0, [])
    assert out[0].startswith("pyspark 4.")
    assert out[0].endswith("java 21.0.1")


@pytest.mark.parametrize(
    ("version", "code", "expected"), [("1.8.0_392", 0, "Java 1.8.0_392 at"), ("17.0.1", 1, "-version fails")]
)
def test_an_old_or_broken_java_is_named(tmp_path, version, code, expected):
    code, out, errors = said(tmp_path, JAVA_HOME=java(tmp_path, version, code))
    assert (code, out, len(errors)) == (1, [], 1)
    assert expected in errors[0]
    assert "install Java 17 or later" in errors[0]


def test_no_java_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for environment in ({"PATH": str(tmp_path / "empty")}, {"JAVA_HOME": str(tmp_path / "empty")}):
        code, out, errors = said(tmp_path, **environment)
        assert (code, out, len(errors)) == (1, [], 1)
        assert errors[0].startswith("Spark needs Java, and there is none")


def test_a_missing_package_is_one_line(tmp_path):
    code, out, errors = said(tmp_path, hide="pyspark")
    assert (code, out, errors) == (1, [], ["pyspark is not installed: pip install 'peeklock[spark]'"])
