"""A real sidecar for tests: its own process, on free ports of the loopback interface."""

import sys
import time
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.processes import OwnProcess, ProcessFailed, connection_string


class Sidecar(OwnProcess):
    """`peeklock pair` with these arguments, besides those for its own ports. They are kept over restarts."""

    def __init__(self, directory: Path, port: int, ops_port: int, arguments: list[str]) -> None:
        super().__init__(directory / "sidecar.log", ops_port)
        self.port = port
        self._arguments = arguments

    def connection_string_for(self, key_name: str, key: str) -> str:
        return connection_string(self.port, key_name, key)

    def start(self) -> None:
        command = [sys.executable, "-m", "broker.cli", "pair", "--listen", f"127.0.0.1:{self.port}"]
        said_before = self.begin_command(*command, "--ops-port", str(self.ops_port), *self._arguments)
        deadline = time.monotonic() + PATIENCE_S
        while b"sidecar is ready" not in self.log_file.read_bytes()[said_before:]:
            if not self.running or time.monotonic() > deadline:
                text = f"not ready\n{self.log()}"
                self.kill()
                raise ProcessFailed(text)
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self.end()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None, "it is not running"
        self._process.send_signal(number)
