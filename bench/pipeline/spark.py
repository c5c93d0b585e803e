"""Spark on this machine, and the cost of what is done with it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench.load import LoadFailed
from bench.pipeline.brokers import PeeklockWithJournal
from bench.processes import cpu_s_by_process, cpu_s_by_role, cpu_s_since, tree
from bench.recording import CLIENT, CPU, Recorder, cost_key
from bench.servers import ServerMissing
from pyspark_peeklock import readiness

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
}
LOG_LEVEL = "ERROR"
TASKS = max(psutil.cpu_count() or 1, 2)


def find() -> None:
    """Raises ServerMissing if there is no Spark that could be started."""
    try:
        readiness.versions()
    except readiness.NotReady as missing:
        raise ServerMissing(f"{missing}; or `make spark`, or choose other --rows") from missing


def session() -> Any:
    """The session of this process, with all processors of the machine."""
    spark = readiness.session("peeklock bench", master="local[*]", settings=SETTINGS)
    spark.sparkContext.setLogLevel(LOG_LEVEL)
    return spark


class Place:
    """A directory of files for one measurement, with the file from which Spark reads the broker's credentials."""

    def __init__(self, directory: Path, server: PeeklockWithJournal) -> None:
        self._directory = directory
        self._made = 0
        self._secret = directory / "connection-string"
        self._secret.write_text(server.connection_string)
        self._http_endpoint = server.http_endpoint

    def fresh(self) -> str:
        """A path where nothing is yet."""
        self._made += 1
        return str(self._directory / str(self._made))

    def access(self) -> dict[str, str]:
        """Options of the sink."""
        return {"connectionStringFile": str(self._secret)}

    def journal(self) -> dict[str, str]:
        """Options of the source."""
        return {**self.access(), "mode": "journal", "httpEndpoint": self._http_endpoint, "minPartitions": str(TASKS)}


@contextmanager
def place(server: PeeklockWithJournal) -> Iterator[Place]:
    """What fails in Spark while the block runs is LoadFailed: it is listed, and the other measurements go on."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    with TemporaryDirectory(prefix="peeklock-bench-") as directory:
        try:
            yield Place(Path(directory), server)
        except (PySparkException, Py4JError) as error:
            raise LoadFailed(f"Spark: {str(error).strip().partition(chr(10))[0]}") from error


Work = Callable[[], float | None]
"""What is measured. It may return seconds, if it knows them better than the clock around it."""


def timed(bench: Recorder, server: PeeklockWithJournal, cell: str, count: int, work: Work) -> float:
    """Seconds that the work takes. CPU time of Spark and of the broker for each of `count` rows is kept as a cost."""
    used, own = cpu_s_by_role(server.processes()), cpu_s_by_process(_own_processes(server))
    began = time.monotonic()
    said = work()
    elapsed = time.monotonic() - began
    cost_s = {role: after - used.get(role, 0.0) for role, after in cpu_s_by_role(server.processes()).items()}
    cost_s[CLIENT] = cpu_s_since(own, _own_processes(server))
    for role, seconds in cost_s.items():
        bench.add(server, cost_key(cell, CPU, role), seconds / count * 1e6)
    return said or elapsed


def _own_processes(server: PeeklockWithJournal) -> list[psutil.Process]:
    """This process and its descendants, but for the broker: Spark's are among them."""
    brokers = set(server.processes())
    return [process for process in tree(os.getpid()) if process not in brokers]


def progress(query: Any) -> list[dict[str, Any]]:
    """Of the micro-batches of a stream that had rows."""
    failed = query.exception()
    if failed is not None:
        raise failed
    return [each for each in query.recentProgress if each["numInputRows"]]


def stop(spark: Any, query: Any) -> None:
    """End a stream. Spark logs each task of the micro-batch that this ends as an error, with its stack."""
    spark.sparkContext.setLogLevel("OFF")
    query.stop()
    spark.sparkContext.setLogLevel(LOG_LEVEL)


def seconds(batch: dict[str, Any]) -> float:
    """That a micro-batch took, its planning and its checkpoint included."""
    return float(batch["durationMs"]["triggerExecution"]) / 1000
