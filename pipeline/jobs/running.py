"""How a job runs as a program: its session, its progress on standard error, its output and its exit code.

Exit codes: 0 done; 1 faults were found, and --fail-on-faults was given; 2 wrong use, or the input is no ledger; 3 it could
not be done, such as with a file that is damaged.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pipeline.jobs.ledger import LedgerError
from pipeline.jobs.report import Report, render

FAULTS_FOUND: Final = 1
WRONG_USE: Final = 2
NOT_DONE: Final = 3

REPORT_NAME: Final = "report.html"
_DEFAULTS: Final = {
    "spark.sql.session.timeZone": "UTC",  # days and hours of reports
    "spark.ui.showConsoleProgress": "false",  # progress is ours
    "spark.ui.enabled": "false",
    "spark.sql.ansi.enabled": "true",
    # Rows of one place are few, so that a shuffle into many small parts is dearer than its sort.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "64",
}


def session(name: str) -> SparkSession:
    """The session that spark-submit has configured, or one with all cores of this machine."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers are the system's python3, without our packages
    builder = SparkSession.builder.appName(name)
    if "SPARK_ENV_LOADED" not in os.environ:  # not started by spark-submit, which has its own configuration
        builder = builder.master("local[*]").config("spark.driver.memory", "2g")
        for key, value in _DEFAULTS.items():
            builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark


@contextmanager
def step(text: str) -> Iterator[None]:
    """Say on standard error what is being done, and then how long it took."""
    began = time.monotonic()
    print(f"{text} ...", file=sys.stderr, flush=True)
    yield
    print(f"{text}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all jobs have. `text` is the docstring of the module."""
    first_line = (text or "").partition("\n")[0]
    found = argparse.ArgumentParser(prog=f"python -m {module}", description=first_line)
    found.add_argument("--ledger", required=True, metavar="PATH", help="Parquet of the ledger, as capture writes it.")
    found.add_argument("--output", required=True, metavar="DIR", help="Where Parquet and the report are written.")
    return found


def number_at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def write_tables(output: str, tables: dict[str, DataFrame]) -> None:
    """Write each as Parquet below `output`, in place of what was there."""
    for name, table in tables.items():
        table.write.mode("overwrite").parquet(f"{output}/{name}")


def write_report(output: str, report: Report) -> None:
    """Write the page to `output`, a directory or a URL that pyarrow knows."""
    page = render(report).encode()
    if "://" in output:
        from pyarrow.fs import FileSystem

        files, path = FileSystem.from_uri(output.replace("s3a://", "s3://", 1))
        with files.open_output_stream(f"{path}/{REPORT_NAME}") as file:
            file.write(page)
        return
    Path(output).mkdir(parents=True, exist_ok=True)
    (Path(output) / REPORT_NAME).write_bytes(page)


def run(job: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """The exit code of a job. What a user can mend is one message on standard error, never a traceback."""
    try:
        return job(sys.argv[1:] if arguments is None else arguments)
    except LedgerError as error:
        print(f"peeklock: {error}", file=sys.stderr)
        return WRONG_USE
    except PySparkException as error:
        first_line = str(error).strip().partition("\n")[0]
        print(f"peeklock: Spark could not do it: {first_line}", file=sys.stderr)
        return NOT_DONE
    except OSError as error:
        print(f"peeklock: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return NOT_DONE
