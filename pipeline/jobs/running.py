"""How a job runs as a program: its session, its progress on standard error, its output and its exit code.

Exit codes: 0 done; 1 the audit found faults, gaps or undecided messages, and an option says that it fails then; 2 wrong
use, or the input is no ledger; 3 it could not be done, such as with a file that is damaged.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError, Py4JJavaError
from pyarrow.fs import FileSystem, LocalFileSystem
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pipeline.jobs import classes
from pipeline.jobs.captured import DamagedLedger
from pipeline.jobs.causes import told
from pipeline.jobs.ledger import LedgerError, Source
from pipeline.jobs.report import Report, render
from protocol.client.errors import ClientError
from pyspark_peeklock import readiness
from pyspark_peeklock.errors import InvalidOption, PeeklockSourceError

FAULTS_FOUND: Final = 1
WRONG_USE: Final = 2
NOT_DONE: Final = 3

MAX_PLOTTED_HOURS: Final = 24 * 31
REPORT_NAME: Final = "report.html"
SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",  # days and hours of reports
    "spark.ui.showConsoleProgress": "false",  # progress is ours
    # Else PySpark looks for the line of each expression: of 6.6 s for an audit of some forty messages, 1.5 s.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Names of entities in lower case are keys in each pass over a ledger. By ICU, an audit of
    # 1,000,000 messages took 61 and 64 s of CPU, without 52 and 56.
    "spark.sql.icu.caseMappings.enabled": "false",
    # Spark takes the size of files for that of their rows, and sends a table that it takes for small to all tasks. Rows
    # of a ledger are ten times as large as their files, and bodies that are alike a thousand times.
    "spark.sql.sources.fileCompressionFactor": "100",
    # A small table is a part of its plan, and needs no exchange if it is in one piece.
    "spark.sql.leafNodeDefaultParallelism": "1",
}
_LEAST_PIECES: Final = "spark.sql.files.minPartitionNum"
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_HERE: Final = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    # A job of a minute ends before its code is optimized a second time: an audit of 1,000,000 messages took 88 s of CPU
    # with the second compiler and 69 s without. A heap that begins large is collected less often: 57 s in place of 62.
    _JAVA_OPTIONS: "-XX:TieredStopAtLevel=1 -XX:+UseParallelGC -XX:MetaspaceSize=300m -Xms1500m -XX:NewSize=800m",
    # Two for each core; a large ledger sets more (`ledger.read`). An audit of 1,000,000 messages took some 43 s of CPU
    # with 16 of them and 40 with 4.
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2)),
}


def session(name: str) -> SparkSession:
    """The session that spark-submit has configured, or one with all cores of this machine."""
    # A shell that spark-submit started has its configuration. Otherwise ours is for this machine.
    is_submitted = "SPARK_ENV_LOADED" in os.environ
    here = _HERE | {_JAVA_OPTIONS: f"{_HERE[_JAVA_OPTIONS]} {classes.reading()}"}
    spark: SparkSession = readiness.session(
        name, master=None if is_submitted else "local[*]", settings=SETTINGS if is_submitted else SETTINGS | here
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    if spark.conf.get(_LEAST_PIECES, None) is None:
        # As many as without the setting for small tables.
        spark.conf.set(_LEAST_PIECES, spark.sparkContext.defaultParallelism)
    return spark


@contextmanager
def step(text: str) -> Iterator[None]:
    """Say on standard error what is being done, and then how long it took."""
    began = time.monotonic()
    say(f"{text} ...")
    yield
    say(f"{text}: {time.monotonic() - began:.1f} s")


def say(text: str) -> None:
    """A line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all jobs over a ledger have. `text` is the docstring of the module."""
    first_line = (text or "").partition("\n")[0]
    found = argparse.ArgumentParser(prog=f"python -m {module}", description=first_line)
    found.add_argument("--ledger", required=True, metavar="PATH", help="Parquet of the ledger, as capture writes it.")
    _add_output(found)
    return found


def changing_parser(module: str, text: str, example: str) -> argparse.ArgumentParser:
    """A parser with the options of all jobs that change data in a broker."""
    found = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=text,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_output(found)
    found.add_argument("--apply", action="store_true", help="Change data. Without it nothing is changed: a dry run.")
    return found


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="DIR", help="Where Parquet and the report are written.")


def ledger_at(path: str) -> Source:
    """A ledger, of which standard error says whose it is. Raises LedgerError, DamagedLedger."""
    found = Source.at(path)
    say(found.described())
    return found


class WrongUse(Exception):
    """The options make no sense together, or with what is there. The text names the option."""


class NotDone(Exception):
    """It could not be done. The text says how far it came, and what to do."""


def number_at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def hour_of(seconds: int) -> datetime:
    """The time that is so many seconds after 1970, UTC, whatever the machine's zone is."""
    return datetime.fromtimestamp(seconds, UTC)


def hours_between(seconds: Sequence[int]) -> list[int]:
    """All hours from the first to the last, if they are not more than a plot can show; else those that are given."""
    if not seconds:
        return []
    first, last = min(seconds), max(seconds)
    if (last - first) // 3600 >= MAX_PLOTTED_HOURS:
        return sorted(set(seconds))
    return list(range(first, last + 1, 3600))


def write_tables(output: str, tables: dict[str, DataFrame]) -> None:
    """Write each as Parquet below `output`, in place of what was there."""

    def write(name: str) -> None:
        table, folder = tables[name], f"{output}/{name}"
        if table.isLocal():
            _write_here(table.toArrow(), folder)
        else:
            table.write.mode("overwrite").parquet(folder)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, tables))


def _write_here(rows: pa.Table, folder: str) -> None:
    """Write what this process has. For Spark this is a job, which takes half a second for a few rows."""
    files, path = files_at(folder)
    files.delete_dir_contents(path, missing_dir_ok=True)
    if isinstance(files, LocalFileSystem):
        files.create_dir(path)
    pq.write_table(rows, f"{path}/part-00000.parquet", filesystem=files)


def write_report(output: str, report: Report) -> None:
    """Write the page to `output`, a directory or a URL that pyarrow knows."""
    files, path = files_at(output)
    if isinstance(files, LocalFileSystem):
        files.create_dir(path)
    with files.open_output_stream(f"{path.rstrip('/')}/{REPORT_NAME}") as file:
        file.write(render(report).encode())


def files_at(url: str) -> tuple[FileSystem, str]:
    """The file system of a directory or URL, and the path there. Raises OSError."""
    if "://" not in url:
        return LocalFileSystem(), str(Path(url).absolute())
    try:
        # Hadoop, whose file systems Spark uses, calls some of them by other names than pyarrow.
        files, path = FileSystem.from_uri(url.replace("s3a://", "s3://", 1))
    except pa.ArrowInvalid as error:
        raise OSError(0, str(error), url) from error
    return files, path


def run(job: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """The exit code of a job. What a user can mend is one message on standard error, never a traceback."""
    try:
        return job(sys.argv[1:] if arguments is None else arguments)
    except readiness.NotReady as error:
        print(f"peeklock: {error}", file=sys.stderr)
        return NOT_DONE
    except (LedgerError, WrongUse, InvalidOption) as error:
        print(f"peeklock: {error}", file=sys.stderr)
        return WRONG_USE
    except (PySparkException, Py4JJavaError) as error:
        print(f"peeklock: Spark could not do it: {told(error)}", file=sys.stderr)
        return NOT_DONE
    except Py4JError as error:
        print(f"peeklock: Spark's process has ended, or does not answer: {told(error)}", file=sys.stderr)
        return NOT_DONE
    except (NotDone, DamagedLedger, PeeklockSourceError, ClientError, TimeoutError) as error:
        print(f"peeklock: {error}", file=sys.stderr)
        return NOT_DONE
    except OSError as error:
        print(f"peeklock: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return NOT_DONE
