"""A standalone cluster of Spark on this machine: a master and workers as processes, and drivers by spark-submit."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyspark

from tests.brokers import REPOSITORY
from tests.patience import PATIENCE_S
from tests.ports import free_ports

BIN = Path(pyspark.__file__).parent / "bin"
# These processes live for a minute or two: the second compiler would cost more than it saves.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
PYTHON_WORKERS = "pyspark.daemon"


class ClusterFailed(Exception):
    """A process did not do what it should; the text ends with its log."""


class _Process:
    """A program of Spark with its own log file."""

    def __init__(self, log: Path, *command: object, environment: dict[str, str] | None = None) -> None:
        self.log_file = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(each) for each in command],
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.poll()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """It and all below it."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Its exit code. Raises ClusterFailed if it does not end in time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ClusterFailed(f"still running after {seconds:.0f} s\n{self.log()[-4000:]}") from None

    def kill(self) -> None:
        """SIGKILL to all of it."""
        tree = self.tree()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(tree, timeout=PATIENCE_S)

    def wait_for_line(self, pattern: str) -> None:
        """Raises ClusterFailed."""
        end = time.monotonic() + PATIENCE_S
        while re.search(pattern, self.log()) is None:
            if self.code is not None or time.monotonic() > end:
                raise ClusterFailed(f"{self.log_file.name} never said {pattern!r}\n{self.log()[-4000:]}")
            time.sleep(0.05)


_ENVIRONMENT = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
    "SPARK_DAEMON_MEMORY": "256m",
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONUNBUFFERED": "1",
}


def _name(path: str) -> str:
    return Path(path).name


class Driver(_Process):
    """A program that spark-submit has started: Spark's JVM, and below it the program's Python."""

    def jvm(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def python(self, program: str) -> psutil.Process:
        """The process that runs the program. Raises LookupError."""
        for process in self.tree()[1:]:
            with suppress(psutil.NoSuchProcess):
                command = process.cmdline()  # that of a shell or a launcher names the program too
                if command and "python" in Path(command[0]).name and program in map(_name, command):
                    return process
        raise LookupError(program)

    def planner(self) -> psutil.Process:
        """A process in which Spark asks the data source what to read next. Raises LookupError."""
        for process in self.tree()[1:]:
            with suppress(psutil.NoSuchProcess):
                if PYTHON_WORKERS in process.cmdline():
                    return process
        raise LookupError(PYTHON_WORKERS)


class StandaloneCluster:
    """Use it in `with`: a master and so many workers, each of two cores and 1 GiB."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self._directory = directory
        self._count = workers
        self._started: list[_Process] = []
        self.workers: list[_Process] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        port, *web_ports = free_ports(2 + self._count)
        self.url = f"spark://127.0.0.1:{port}"
        common = ["--host", "127.0.0.1", "--webui-port"]
        master = self._daemon("master", "master.Master", *common, web_ports[0], "--port", port)
        master.wait_for_line("elected leader|ALIVE")
        for number in range(self._count):
            work = self._directory / f"work-{number}"
            arguments = [*common, web_ports[1 + number], "--cores", 2, "--memory", "1g", "--work-dir", work]
            self.workers.append(self._daemon(f"worker-{number}", "worker.Worker", *arguments, self.url))
        for worker in self.workers:
            worker.wait_for_line("Successfully registered with master")

    def _daemon(self, name: str, kind: str, *arguments: object) -> _Process:
        command = [BIN / "spark-class", f"org.apache.spark.deploy.{kind}", *arguments]
        process = _Process(self._directory / f"{name}.log", *command)
        self._started.append(process)
        return process

    def submit(self, name: str, program: Path, *arguments: object, settings: dict[str, str] | None = None) -> Driver:
        """Start a program in client mode; what it says is in `<name>.log`. It ends with the cluster at the latest."""
        given = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": str(self._count),  # an executor on each worker
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.default.parallelism": "2",
            "spark.sql.shuffle.partitions": "2",
            **(settings or {}),
        }
        options = [each for key, value in given.items() for each in ("--conf", f"{key}={value}")]
        command = [BIN / "spark-submit", "--master", self.url, *options, program, *arguments]
        driver = Driver(self._directory / f"{name}.log", *command)
        self._started.append(driver)
        return driver

    def executors(self) -> list[psutil.Process]:
        """The JVMs that run tasks, of all applications."""
        return self._below(EXECUTOR)

    def python_workers(self) -> list[psutil.Process]:
        """The Python processes below the executors."""
        return self._below(PYTHON_WORKERS)

    def _below(self, argument: str) -> list[psutil.Process]:
        found = []
        for worker in self.workers:
            for process in worker.tree()[1:]:
                with suppress(psutil.NoSuchProcess):
                    if argument in process.cmdline():
                        found.append(process)
        return found

    def kill(self) -> None:
        """End all that was started, the drivers first."""
        while self._started:
            process = self._started.pop()
            if process.code is None:
                process.kill()


def killed(process: psutil.Process) -> int:
    """SIGKILL, and wait until it is gone. Returns its pid."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs([process], timeout=PATIENCE_S)
    return process.pid
