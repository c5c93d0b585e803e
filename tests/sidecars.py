"""A real sidecar for tests: its own process, on free ports of the loopback interface."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 20_000


class SidecarFailed(Exception):
    """It did not start or stop as it should; the text ends with its log."""


class Sidecar:
    """`peeklock pair` with these arguments, besides those for its own ports. They are kept over restarts."""

    def __init__(self, directory: Path, port: int, ops_port: int, arguments: list[str]) -> None:
        self.port = port
        self.ops_port = ops_port
        self.log_file = directory / "sidecar.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill() if error else self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the sidecar is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def connection_string_for(self, key_name: str, key: str) -> str:
        return (
            f"Endpoint=sb://localhost:{self.port};SharedAccessKeyName={key_name};SharedAccessKey={key};"
            "UseDevelopmentEmulator=true;"
        )

    def start(self) -> None:
        """Start it and wait until it is ready."""
        assert self._process is None, "the sidecar is running already"
        command = [sys.executable, "-m", "broker.cli", "pair", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--ops-port", str(self.ops_port), *self._arguments]
        with self.log_file.open("ab") as log:
            said_before = log.tell()
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"sidecar is ready" not in self.log_file.read_bytes()[said_before:]:
            if not self.running or time.monotonic() > deadline:
                text = f"not ready\n{self.log()}"
                self.kill()
                raise SidecarFailed(text)
            time.sleep(0.02)

    def stop(self) -> None:
        """End it by SIGTERM. Raises SidecarFailed if it does not end cleanly in time."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SidecarFailed(f"still running {STOP_TIMEOUT_S:.0f} s after SIGTERM\n{self.log()}") from None
        self._process = None
        if code != 0:
            raise SidecarFailed(f"ended with exit code {code} after SIGTERM\n{self.log()}")

    def signal(self, number: int) -> None:
        assert self._process is not None, "the sidecar is not running"
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def get(self, path: str, timeout_s: float = 2.0) -> tuple[int, str]:
        """GET from the operations endpoint: (HTTP status, body). Raises OSError while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}{path}", timeout=timeout_s) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def log(self) -> str:
        """The end of what it wrote."""
        with contextlib.suppress(FileNotFoundError), self.log_file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return f"--- {self.log_file} ---\n{log.read().decode(errors='replace')}"
        return ""
