"""The brokers under measurement, each started on a fresh data directory with ports of its own on loopback."""

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
from pathlib import Path

import psutil

from bench.load import Endpoint
from bench.processes import Memory, cpu_s, memory_of, tree

ROOT = Path(__file__).parent.parent
QUEUES = 16
START_TIMEOUT_S = 60.0
RABBITMQ_PLACES = ("/usr/lib/rabbitmq/lib", "/usr/local/lib/rabbitmq/lib")


class ServerMissing(Exception):
    """The broker is not installed here. The text says what to do."""


class ServerFailed(Exception):
    """The broker did not start, or not in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server(ABC):
    """A broker's process tree. Between `pause` and `resume` it gets no CPU, so that it cannot disturb another's run."""

    name: str
    endpoint: Endpoint

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.log = directory / "log.txt"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def address(self, number: int) -> str:
        """The address of queue `number`, 1 to QUEUES."""

    @abstractmethod
    def _command(self) -> tuple[list[str], dict[str, str]]:
        """The command, and additions to the environment."""

    @abstractmethod
    def _is_ready(self) -> bool: ...

    def spawn(self) -> None:
        """Start without waiting until it is ready."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        command, environment = self._command()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self) -> float:
        """Start and return the seconds until it was ready. Raises ServerFailed."""
        began = time.monotonic()
        self.spawn()
        while not self._is_ready():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                self.kill()
                raise ServerFailed(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.005)
        return time.monotonic() - began

    def processes(self) -> list[psutil.Process]:
        return tree(self._process.pid) if self._process else []

    def memory(self) -> Memory:
        return memory_of(self.processes(), self.data_dir)

    def pause(self) -> None:
        for process in self.processes():
            process.suspend()

    def resume(self) -> None:
        for process in reversed(self.processes()):
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
        """SIGKILL all of it; also what a root process that has ended left behind."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            self._process = None

    def empty(self) -> None:
        """Delete the data of a server that is stopped."""
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def close(self) -> None:
        """End it and delete its files."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Peeklock(Server):
    """This broker with default settings, but for the sizes its queues may grow to."""

    name = "Peeklock"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.endpoint = Endpoint(free_port(), "RootManageSharedAccessKey", "SAS_KEY_VALUE")
        self.ops_port = free_port()

    def address(self, number: int) -> str:
        return f"q{number}"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        config = self.directory / "peeklock.toml"
        config.write_text("\n".join(self._entities()))
        command = [sys.executable, "-m", "broker.cli", "serve", "--config", str(config), "--emulator"]
        command += ["--data-dir", str(self.data_dir)]
        command += ["--amqp-port", str(self.endpoint.port), "--ops-port", str(self.ops_port)]
        return command, {}

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


class PeeklockWithFeatures(Peeklock):
    """Peeklock with the topics, queue chains, session queues and duplicate detection of `bench.features`."""

    def _entities(self) -> list[str]:
        queues = [
            '[[queues]]\nname = "sessions"\nmax_size_mb = 20480\nrequires_session = true\nlock_duration_ms = 300000\n',
            '[[queues]]\nname = "ids"\nmax_size_mb = 20480\nrequires_duplicate_detection = true\n'
            "duplicate_detection_history_time_window_ms = 3600000\n",
        ]
        return [*super()._entities(), *queues, *_topics(), *_chain("first", "second", "third")]


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


class RabbitMQ(Server):
    """Debian's rabbitmq-server with its AMQP 1.0 plugin and quorum queues of a single member."""

    name = "RabbitMQ quorum"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._scripts = self.find_scripts()
        self.endpoint = Endpoint(free_port(), "guest", "guest")
        self._distribution_port = free_port()
        self._epmd_port = free_port()
        self._epmd: subprocess.Popen[bytes] | None = None
        self._declared = False

    @staticmethod
    def find_scripts() -> Path:
        for place in RABBITMQ_PLACES:
            for scripts in sorted(Path(place).glob("rabbitmq_server-*/sbin"), reverse=True):
                if (scripts / "rabbitmq-server").exists() and shutil.which("epmd"):
                    return scripts
        raise ServerMissing(
            "rabbitmq-server not found: install it (apt-get install rabbitmq-server; its service need not run), "
            "or measure without a peer (--no-peer)"
        )

    def address(self, number: int) -> str:
        return f"/amq/queue/qq{number}"

    def _environment(self) -> dict[str, str]:
        """The environment with files in our directory and our ports; nothing of a system-wide installation is used."""
        return {
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.endpoint.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.data_dir),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
        }

    def _command(self) -> tuple[list[str], dict[str, str]]:
        (self.directory / "enabled_plugins").write_text("[rabbitmq_amqp1_0].\n")
        (self.directory / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{self.endpoint.port}\n")
        if self._epmd is None:  # started here, in the foreground, or it would stay behind as a daemon
            self._epmd = subprocess.Popen(
                ["epmd", "-address", "127.0.0.1", "-port", str(self._epmd_port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return [str(self._scripts / "rabbitmq-server")], self._environment()

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.endpoint.port)):
                return False
        return True

    def start(self) -> float:
        seconds = super().start()
        if not self._declared:
            self._declare()
            self._declared = True
        return seconds

    def _declare(self) -> None:
        declare = (
            '[rabbit_amqqueue:declare({resource,<<"/">>,queue,list_to_binary("qq"++integer_to_list(I))},'
            ' true, false, [{<<"x-queue-type">>,longstr,<<"quorum">>}], none, <<"bench">>)'
            f" || I <- lists:seq(1,{QUEUES})], ok."
        )
        done = subprocess.run(
            [str(self._scripts / "rabbitmqctl"), "eval", declare],
            env=os.environ | self._environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise ServerFailed(f"rabbitmqctl could not declare the queues: {done.stdout}{done.stderr}")

    def close(self) -> None:
        super().close()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
            self._epmd = None
