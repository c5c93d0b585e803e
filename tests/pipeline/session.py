"""The Spark session that all tests of the pipeline share: its start takes ten seconds."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.caller import VARIABLES

# All plans are of few rows. The tests of the audit took 196 s of CPU with the second compiler, and 145 s without.
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xms800m"


def missing() -> str | None:
    """What the tests of Spark lack here."""
    if find_spec("pyspark") is None:
        return "pip install 'peeklock[spark]'"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "Java 17 or later"
    return None


def require() -> None:
    """Skip a test that needs Spark and Java where one is missing, or fail it if PEEKLOCK_REQUIRE_SPARK=1."""
    if (lacking := missing()) is not None:
        if VARIABLES.get("PEEKLOCK_REQUIRE_SPARK") == "1":
            pytest.fail(f"needs {lacking}")
        pytest.skip(f"needs {lacking}")


def _python(path: Path) -> Path:
    """The interpreter of Spark's workers. They come first where that is allowed: Spark fails the query if one takes
    ten seconds to load (PythonWorkerFactory has them as a constant), and on a busy machine it does.
    """
    path.write_text(f'#!/bin/sh\nexec nice -n -10 {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A session with two cores."""
    require()
    from pyspark.sql import SparkSession

    from pipeline.jobs import classes, running

    os.environ["PYSPARK_PYTHON"] = str(_python(tmp_path_factory.mktemp("python") / "python"))
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", f"{_JAVA_OPTIONS} {classes.reading()}")
    )
    for name, value in running.SETTINGS.items():
        builder = builder.config(name, value)
    started = builder.getOrCreate()
    started.sparkContext.setLogLevel("ERROR")
    yield started
    started.stop()
