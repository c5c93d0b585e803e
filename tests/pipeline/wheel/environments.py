"""Virtual environments that have the wheel pyspark-peeklock, and nothing of the checkout."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.caller import VARIABLES
from tests.sources import ROOT

TIMEOUT_S: Final = 900.0
SETTINGS: Final = {
    "spark.master": "local[1]",
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
}


def build(directory: Path) -> Path:
    """The wheel, as `make spark-wheel` builds it by pipeline/wheel.py."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT / "pipeline", check=True, capture_output=True, timeout=TIMEOUT_S)
    [found] = directory.glob("*.whl")
    return found


class Environment:
    """A new one. Tests that need it are skipped where pip cannot get what it needs, unless PEEKLOCK_REQUIRE_SPARK=1."""

    def __init__(self, path: Path, *requirements: str | Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", path], check=True, timeout=TIMEOUT_S)
        self.bin = path / "bin"
        self.pip("install", *requirements)

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def pip(self, *arguments: str | Path) -> None:
        done = _run([self.python, "-m", "pip", "--quiet", *arguments], self.bin)
        if done.returncode:
            left_out(f"pip {arguments[0]}: {done.stderr[-1000:]}")

    def submit(self, spark_submit: Path, directory: Path, *arguments: str | Path) -> str:
        """What a program printed that Spark ran with this environment's Python. Raises AssertionError."""
        options = [each for name, value in SETTINGS.items() for each in ("--conf", f"{name}={value}")]
        done = _run([spark_submit, *options, *arguments], directory, PYSPARK_PYTHON=str(self.python))
        if "UNRESOLVED DEPENDENCIES" in done.stdout + done.stderr:
            left_out(f"Spark cannot get the packages of {arguments}")
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def left_out(reason: str) -> None:
    """Skip the test, or fail it where nothing may be skipped."""
    if VARIABLES.get("PEEKLOCK_REQUIRE_SPARK") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _run(command: list[str | Path], directory: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(each) for each in command],
        cwd=directory,
        env={**kept, "PYSPARK_DRIVER_PYTHON": variables.get("PYSPARK_PYTHON", ""), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
