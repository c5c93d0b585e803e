"""A command of ours as a process of its own, for tests: its log, its operations endpoint, its end."""

import os
import signal
import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from tests import preloaded
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parent.parent
LOG_TAIL_BYTES = 20_000


def connection_string(port: int, key_name: str, key: str) -> str:
    return (
        f"Endpoint=sb://localhost:{port};SharedAccessKeyName={key_name};SharedAccessKey={key};"
        "UseDevelopmentEmulator=true;"
    )


class ProcessFailed(Exception):
    """It did not start or stop as it should; the text ends with its log."""


class OwnProcess(ABC):
    """Use it in `with`. It may be started again after its end; `log_file` has what all runs have written."""

    def __init__(self, log_file: Path, ops_port: int) -> None:
        self.log_file = log_file
        self.ops_port = ops_port
        self._process: subprocess.Popen[bytes] | preloaded.Copy | None = None
        log_file.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill() if error else self.stop()

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it is ready. Raises ProcessFailed."""

    @abstractmethod
    def stop(self) -> None:
        """End it by SIGTERM, as an operator does. Raises ProcessFailed if it does not end cleanly in time."""

    @abstractmethod
    def kill(self) -> None:
        """End it by SIGKILL, and wait until it is gone."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def begin_command(self, *command: str) -> int:
        """Start it as the leader of a process group. Returns the bytes that its log had before."""
        assert self._process is None, "it is running already"
        with self.log_file.open("ab") as log:
            said_before = log.tell()
            self._process = preloaded.start(command, log)
        return said_before

    def end(self) -> None:
        """SIGTERM. Raises ProcessFailed if it does not end cleanly in time."""
        assert self._process is not None, "it is not running"
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessFailed(f"still running {PATIENCE_S:.0f} s after SIGTERM\n{self.log()}") from None
        self._process = None
        if code != 0:
            raise ProcessFailed(f"ended with exit code {code} after SIGTERM\n{self.log()}")

    def get(self, path: str, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """GET from the operations endpoint: (HTTP status, body). Raises OSError while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}{path}", timeout=timeout_s) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def log(self) -> str:
        """The end of what it wrote on its terminal."""
        with self.log_file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return f"--- {self.log_file} ---\n{log.read().decode(errors='replace')}"
