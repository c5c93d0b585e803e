"""A real broker for tests: its own process tree, in its own directory, on free ports of the loopback interface."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.processes import command_of
from tests.caller import SIDECAR, WORKERS
from tests.patience import PATIENCE_S
from tests.ports import free_ports
from tests.processes import REPOSITORY as REPOSITORY
from tests.processes import OwnProcess, ProcessFailed, connection_string
from tests.sidecars import Sidecar

KEY_NAME = "RootManageSharedAccessKey"
KEY = "SAS_KEY_VALUE"  # the emulator's well-known key


BrokerFailed = ProcessFailed


class Broker(OwnProcess):
    """One broker and its data directory, which outlives `stop`, `kill` and `restart`.

    `config` is the text of a TOML file. Ports are chosen once and kept over restarts. `prefix` is a command that runs
    the broker's, in its own process. `workers` is the setting, which is not to be in `config`; 0 is one process, and
    None is what a user gets who does not set it. A test that needs a process for the worker says so.

    With PEEKLOCK_TEST_SIDECAR=1 clients reach it through a sidecar, at `amqp_port`; `own_amqp_port` is the broker's.
    """

    def __init__(
        self,
        directory: Path,
        config: str = "",
        *,
        arguments: tuple[str, ...] = ("--emulator",),
        prefix: tuple[str, ...] = (),
        workers: int | None = WORKERS,
    ) -> None:
        assert "\nworkers =" not in f"\n{config}", "say it as an argument"
        self.directory = directory
        self.data_dir = directory / "data"
        self.config_file = directory / "config.toml"
        self.arguments = arguments
        self.prefix = prefix
        self.workers = workers
        self.own_amqp_port, self.http_port, ops_port = free_ports(3)
        super().__init__(directory / "broker.log", ops_port)
        self.amqp_port = self.own_amqp_port
        self.sidecar: Sidecar | None = None
        self.config_file.write_text(config)
        if SIDECAR:
            self._put_sidecar_before()

    def _put_sidecar_before(self) -> None:
        """Its secondary is not there: it is to pass on what clients do, and not to fail over."""
        self.amqp_port, ops_port, nowhere, http_nowhere = free_ports(4)
        key = f"SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY};UseDevelopmentEmulator=true"
        arguments = ["--primary", f"Endpoint=sb://localhost:{self.own_amqp_port};{key}"]
        arguments += ["--secondary", f"Endpoint=sb://localhost:{nowhere};{key}", "--failover-interval", "1h"]
        arguments += ["--primary-http", f"http://localhost:{self.http_port}"]
        arguments += ["--secondary-http", f"http://localhost:{http_nowhere}"]
        self.sidecar = Sidecar(self.directory, self.amqp_port, ops_port, arguments)

    @property
    def connection_string(self) -> str:
        return self.connection_string_for(KEY_NAME, KEY)

    def connection_string_for(self, key_name: str, key: str) -> str:
        return connection_string(self.amqp_port, key_name, key)

    def command(self) -> list[str]:
        command = ["serve", "--config", str(self.config_file), "--data-dir", str(self.data_dir)]
        command += ["--amqp-port", str(self.own_amqp_port), "--http-port", str(self.http_port)]
        command += ["--ops-port", str(self.ops_port), *self.arguments]
        return command if self.workers is None else [*command, "--workers", str(self.workers)]

    def start(self) -> None:
        """Start it and wait until it is ready; on failure kill what started and raise BrokerFailed."""
        said_before = self.begin()
        try:
            self.wait_until_ready(said_before)
        except BrokerFailed:
            self.kill()
            raise
        if self.sidecar is not None and not self.sidecar.running:
            self.sidecar.start()

    def begin(self) -> int:
        """Start it. Returns what `wait_until_ready` needs: the bytes that its log had before."""
        return self.begin_command(*self.prefix, sys.executable, "-m", "broker.cli", *self.command())

    def stop(self) -> None:
        """End it by SIGTERM, as an operator does. Raises BrokerFailed if it does not end cleanly in time."""
        if self._process is None:
            return
        if self.sidecar is not None:
            self.sidecar.stop()
        self.end()

    def kill(self) -> None:
        """SIGKILL the whole process tree at once, as a power cut would, and wait until all of it is gone."""
        if self._process is None:
            return
        if self.sidecar is not None:
            self.sidecar.kill()
        tree = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # it leads its own process group; also when it is dead itself
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(tree, timeout=PATIENCE_S)
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def processes(self) -> list[psutil.Process]:
        """The supervisor and everything below it; the supervisor first, so that killing in order restarts nothing."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def gateway(self) -> psutil.Process:
        """The only gateway; also the process that is both."""
        [found] = self.running_as("broker.gateway", "broker.one_process")
        return found

    def gateways(self) -> list[psutil.Process]:
        """All gateways, in the order in which they were started."""
        return sorted(self.running_as("broker.gateway"), key=lambda process: process.create_time())

    def observer(self) -> psutil.Process:
        """The process with the operations endpoint, where no gateway has it."""
        [found] = self.running_as("broker.observer")
        return found

    def worker_processes(self) -> list[psutil.Process]:
        """Workers in the order in which they were started; also the process that is both."""
        return sorted(self.running_as("broker.worker", "broker.one_process"), key=lambda process: process.create_time())

    def worker(self) -> psutil.Process:
        """The only worker."""
        [found] = self.worker_processes()
        return found

    def checkpointer(self) -> psutil.Process:
        """That of the only worker."""
        [found] = self.running_as("storage.log.checkpointer")
        return found

    def running_as(self, *modules: str) -> list[psutil.Process]:
        return [process for process in self.processes() if set(modules) & set(command_of(process))]

    def log(self) -> str:
        return super().log() if self.sidecar is None else super().log() + self.sidecar.log()

    def wait_until_ready(self, said_before: int) -> None:
        """Until it says so behind `said_before` bytes of its log: who answers on its port may be another broker."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if not self.running:
                raise BrokerFailed(f"ended while starting\n{self.log()}")
            with contextlib.suppress(OSError):
                if (
                    b" is ready." in self.log_file.read_bytes()[said_before:]
                    and self.get("/readyz", timeout_s=2.0)[0] == 200
                ):
                    return
            time.sleep(0.02)
        raise BrokerFailed(f"not ready after {PATIENCE_S:.0f} s\n{self.log()}")


@contextlib.contextmanager
def running(broker: Broker) -> Iterator[Broker]:
    """Start it; in the end it stops in order, and nothing unforeseen is in its log. However that goes, it is gone."""
    try:
        broker.start()
        yield broker
        broker.stop()
        assert "Traceback" not in broker.log_file.read_text(), broker.log()
    finally:
        broker.kill()
