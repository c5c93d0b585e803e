"""Commands on two brokers as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.brokers import REPOSITORY, Broker
from tests.patience import PATIENCE_S


def both(primary: Broker, secondary: Broker) -> list[str]:
    """The options that name two brokers."""
    return [
        *("--primary", primary.connection_string, "--primary-http", f"http://localhost:{primary.http_port}"),
        *("--secondary", secondary.connection_string, "--secondary-http", f"http://localhost:{secondary.http_port}"),
    ]


class Command:
    """`peeklock` with arguments and further variables, started in `async with` or `with`-less by `start`.

    Its output goes to files, so that it never waits for a reader.
    """

    def __init__(self, directory: Path, *arguments: object, **variables: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._out, self._err = directory / "out", directory / "err"
        own = {name: value for name, value in os.environ.items() if not name.startswith("PEEKLOCK_")}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "broker.cli", *map(str, arguments)],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=own | variables,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def end(self, number: int | None = None) -> int:
        """Send a signal, if one is given, and wait for the end; the exit code."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)
