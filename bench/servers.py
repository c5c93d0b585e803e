"""A broker under measurement, on a fresh data directory with ports of its own on loopback; and Peeklock as one."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.load import Endpoint
from bench.processes import Memory, cpu_s, memory_of, tree
from bench.rows import ONE_PROCESS

ROOT = Path(__file__).parent.parent
QUEUES = 16
PARTITIONED_QUEUE = "partitioned"
START_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
PAUSE_TIMEOUT_S = 10.0


class ServerMissing(Exception):
    """The broker is not installed here. The text says what to do."""


class ServerFailed(Exception):
    """The broker did not start, or not in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_stopped(process: psutil.Process) -> bool:
    """All threads of the process are stopped, or it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return all(psutil.Process(thread.id).status() == psutil.STATUS_STOPPED for thread in process.threads())
    return not process.is_running()  # otherwise only a thread has ended


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server(ABC):
    """A broker's process tree. Between `pause` and `resume` it gets no CPU, so that it cannot disturb another's run."""

    name: str
    durable: str  # what has happened to a message when its sender is told that it was accepted
    endpoint: Endpoint
    root = ROOT  # where it is started
    start_timeout_s = START_TIMEOUT_S

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.log = directory / "log.txt"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def address(self, number: int) -> str:
        """The address of queue `number`, 1 to QUEUES."""

    @abstractmethod
    def _command(self) -> tuple[list[str], dict[str, str]]:
        """The command, and additions to the environment."""

    @abstractmethod
    def _is_ready(self) -> bool: ...

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Whatever must be done once before the first start, and does not count as part of it. Raises ServerFailed."""

    def spawn(self) -> None:
        """Start without waiting until it is ready."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        command, environment = self._command()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.root,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self) -> float:
        """Start and return the seconds until it was ready. Raises ServerFailed."""
        self.prepare()
        began = time.monotonic()
        self.spawn()
        while not self._is_ready():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() - began > self.start_timeout_s:
                self.kill()
                raise ServerFailed(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.005)
        return time.monotonic() - began

    def processes(self) -> list[psutil.Process]:
        return tree(self._process.pid) if self._process else []

    def memory(self) -> Memory:
        return memory_of(self.processes(), self.data_dir)

    def disk_bytes(self) -> int:
        """What its data occupies, whatever the files say their length is."""
        occupied = 0
        for path in self.data_dir.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # files come and go meanwhile
                occupied += path.lstat().st_blocks * 512
        return occupied

    def pause(self) -> None:
        """Stop every process of the tree, those too that one of them starts meanwhile. Raises ServerFailed.

        A process that waits for the disk stops when the disk is done.
        """
        told: set[int] = set()
        until = time.monotonic() + PAUSE_TIMEOUT_S
        while running := [process for process in self.processes() if not _is_stopped(process)]:
            if time.monotonic() > until:
                raise ServerFailed(f"{self.name}: processes do not stop: {[process.pid for process in running]}")
            for process in running:
                if process.pid not in told:
                    told.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()
            time.sleep(0.01)

    def resume(self) -> None:
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until it is idle, so that its background work for one run does not count for another."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            before = cpu_s(self.processes())
            time.sleep(0.3)
            if cpu_s(self.processes()) - before <= 0.02:
                return

    def stop(self) -> float:
        """End it as an operator would; return the seconds it took."""
        began = time.monotonic()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self.kill()
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL all of it at once, also what a root process that has ended left behind, and wait for its end."""
        if self._process is not None:
            processes = self.processes()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            psutil.wait_procs(processes, timeout=KILL_TIMEOUT_S)
            self._process = None

    def empty(self) -> None:
        """Delete the data of a server that is stopped."""
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def close(self) -> None:
        """End it and delete its files."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def awake(server: Server) -> Iterator[None]:
    """For a server that is paused: it runs in the block, which begins and ends when it is idle."""
    server.resume()
    server.settle()
    try:
        yield
        server.settle()
    finally:
        server.pause()


class Peeklock(Server):
    """This broker with default settings, but for the sizes its queues may grow to.

    `root` is the checkout whose broker runs: this one, or another commit's, with its own `.venv` if it has one.
    """

    name = "Peeklock"
    http_port = "off"
    durable = "in the worker's log, synced; messages that arrive together share a sync. Completions are synced likewise"

    def __init__(self, directory: Path, root: Path = ROOT, name: str = name) -> None:
        super().__init__(directory)
        self.root = root
        self.name = name
        self.endpoint = Endpoint(free_port(), "RootManageSharedAccessKey", "SAS_KEY_VALUE")
        self.ops_port = free_port()

    def version(self) -> str:
        git = ["git", "-C", str(self.root)]
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        if commit.returncode:
            return "not in a git checkout"
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
        return f"commit {commit.stdout.strip()}{' with changes' if changed else ''}"

    def address(self, number: int) -> str:
        return f"q{number}"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        config = self.directory / "peeklock.toml"
        config.write_text("\n".join([*self._settings(), *self._entities()]))
        command = [self.interpreter, "-m", "broker.cli", "serve", "--config", str(config), "--emulator"]
        command += ["--data-dir", str(self.data_dir)]
        command += [
            "--amqp-port",
            str(self.endpoint.port),
            "--ops-port",
            str(self.ops_port),
            "--http-port",
            self.http_port,
        ]
        return command, {"PYTHONPATH": str(self.root)}

    @property
    def interpreter(self) -> str:
        own = self.root / ".venv" / "bin" / "python"
        return str(own) if self.root != ROOT and own.exists() else sys.executable

    def _settings(self) -> list[str]:
        return []

    def _entities(self) -> list[str]:
        return [f'[[queues]]\nname = "q{n}"\nmax_size_mb = 20480\n' for n in range(1, QUEUES + 1)]

    def stored_bytes(self) -> int:
        """Bytes of all partitions' stores in use."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("peeklock_store_used_bytes{")))

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class PeeklockInOneProcess(Peeklock):
    """With the partitions in the gateway's process, as the quickstart has them."""

    name = ONE_PROCESS

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, name=self.name)

    def _settings(self) -> list[str]:
        return ["workers = 0"]


class PeeklockWithFeatures(Peeklock):
    """Peeklock with the topics, queue chains, session queues and duplicate detection of `bench.features`."""

    def _entities(self) -> list[str]:
        queues = [
            '[[queues]]\nname = "sessions"\nmax_size_mb = 20480\nrequires_session = true\nlock_duration_ms = 300000\n',
            '[[queues]]\nname = "ids"\nmax_size_mb = 20480\nrequires_duplicate_detection = true\n'
            "duplicate_detection_history_time_window_ms = 3600000\n",
        ]
        return [*super()._entities(), *queues, *_topics(), *_chain("first", "second", "third")]


class PeeklockPartitioned(Peeklock):
    """Peeklock with two workers, and the queue PARTITIONED_QUEUE on all of its partitions beside the plain ones."""

    def _settings(self) -> list[str]:
        return ["partitions = 4", "workers = 2"]

    def _entities(self) -> list[str]:
        return [
            *super()._entities(),
            f'[[queues]]\nname = "{PARTITIONED_QUEUE}"\nmax_size_mb = 20480\nenable_partitioning = true\n',
        ]


def _topics() -> list[str]:
    """Topics as the rows of the group `topics` name them."""
    correlation = '[[topics.subscriptions.rules]]\nname = "r"\nfilter = {{ kind = "correlation", label = "{}" }}\n'
    sql = '[[topics.subscriptions.rules]]\nname = "r"\nfilter = {{ kind = "sql", expression = "{}" }}\n'
    rules = {
        "ten": [""] * 10,
        "one": [correlation.format("wanted")],
        "thousand": [correlation.format("wanted" if n == 500 else f"other{n}") for n in range(1000)],
        "sql": [sql.format(f"sys.Label = 'label{n}' OR number > {n} AND region = 'eu'") for n in range(100)],
    }
    made = []
    for topic, subscriptions in rules.items():
        made.append(f'[[topics]]\nname = "{topic}"\nmax_size_mb = 20480\n')
        made += [f'[[topics.subscriptions]]\nname = "s{n}"\n{rule}' for n, rule in enumerate(subscriptions)]
    return made


def _chain(*names: str) -> list[str]:
    """Queues that forward to one another."""
    return [
        f'[[queues]]\nname = "{name}"\nmax_size_mb = 20480\n' + (f'forward_to = "{to}"\n' if to else "")
        for name, to in zip(names, (*names[1:], ""), strict=True)
    ]
