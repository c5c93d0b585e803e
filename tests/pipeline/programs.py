"""`peeklock` as a process of its own that starts Spark, and can be killed with all that it has started."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from broker.administration.address import Address
from broker.atom.client_documents import counts
from broker.pairing.pairing import Namespace
from tests.brokers import REPOSITORY, Broker


class Program:
    """Its output goes to a file, so that it never waits for a reader."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "program.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "broker.cli", *map(str, arguments)],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "pipeline")])},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL the driver and its JVM at once, and wait until they and all Python workers are gone."""
        if self.process.poll() is not None:
            return  # by an earlier call, too
        everyone = psutil.Process(self.process.pid).children(recursive=True)
        for each in [self.process.pid, *(each.pid for each in everyone if "java" in each.name())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.wait()
        _, alive = psutil.wait_procs(everyone, timeout=10)
        for each in alive:
            each.kill()
        psutil.wait_procs(alive)


async def counts_over_http(broker: Broker, queue: str) -> dict[str, int]:
    """Of a queue, asked over HTTP: the client's engine for AMQP is for one event loop in a process."""
    address = Address("http", "localhost", broker.http_port)
    async with Namespace(broker.connection_string, http=address).management() as client:
        return counts((await client.get(queue)).description)
