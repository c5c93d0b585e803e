"""ActiveMQ Artemis as a peer: a broker of its own, made by `artemis create` from the distribution of Maven Central."""

import ctypes
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from bench.load import Endpoint
from bench.servers import QUEUES, Server, ServerFailed, ServerMissing, free_port, is_listening

VERSION = "2.44.0"
ARTIFACT = f"org.apache.activemq:apache-artemis:{VERSION}:tar.gz:bin"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peeklock-bench"
HOME = CACHE / f"apache-artemis-{VERSION}"
USER = PASSWORD = "bench"
UNUSED = ("--no-web", "--no-stomp-acceptor", "--no-mqtt-acceptor", "--no-hornetq-acceptor", "--no-amqp-acceptor")
# It halts a broker that seems stuck for two minutes, as one does that was stopped while others had their turns.
ANALYZER_ON, ANALYZER_OFF = (f"<critical-analyzer>{value}</critical-analyzer>" for value in ("true", "false"))
JOURNALS = {"ASYNCIO": "AMQ221012", "NIO": "AMQ221013"}  # the numbers of the lines that say which one is in use


def journal() -> str:
    """ASYNCIO where its native code can load libaio, NIO elsewhere."""
    try:
        ctypes.CDLL("libaio.so.1")
    except OSError:
        return "NIO"
    return "ASYNCIO"


class Artemis(Server):
    """Artemis with what `artemis create` sets up, and anycast queues."""

    name = "Artemis"
    durable = (
        "in the journal, synced (journal-datasync and journal-sync-non-transactional are on, as `artemis create` has"
        " them). The client is not told when a completion is on disk"
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.journal = journal()
        self.endpoint = Endpoint(free_port(), USER, PASSWORD)
        self._instance = directory / "instance"

    @staticmethod
    def find() -> None:
        """Have the distribution at HOME; fetch it with Maven if it is not there. Raises ServerMissing."""
        for tool in ("java", "mvn"):
            if shutil.which(tool) is None and not (tool == "mvn" and HOME.exists()):
                raise ServerMissing(
                    f"{tool} not found: Artemis needs Java 17 and is fetched with Maven;"
                    " install them, or leave Artemis out (--peers rabbitmq, or --peers none)"
                )
        if HOME.exists():
            return
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={scratch}"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
            archives = list(Path(scratch).glob("*.tar.gz"))
            if done.returncode or not archives:
                raise ServerMissing(f"{' '.join(command)}: {done.stdout}{done.stderr}")
            with tarfile.open(archives[0]) as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / HOME.name).rename(HOME)

    def version(self) -> str:
        java = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr.splitlines()
        return f"{VERSION}, {self.journal} journal, -Xmx2G, {java[0] if java else 'unknown Java'}"

    def address(self, number: int) -> str:
        return f"q{number}"

    def prepare(self) -> None:
        if self._instance.exists():
            return
        queues = ",".join(self.address(n) for n in range(1, QUEUES + 1))
        command = [str(HOME / "bin" / "artemis"), "create", str(self._instance), "--silent", *UNUSED]
        command += ["--aio" if self.journal == "ASYNCIO" else "--nio", "--data", str(self.data_dir)]
        command += ["--user", USER, "--password", PASSWORD, "--require-login", "--queues", queues]
        command += ["--host", self.endpoint.host, "--default-port", str(self.endpoint.port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        settings = self._instance / "etc" / "broker.xml"
        if done.returncode or not settings.exists():
            raise ServerFailed(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        text = settings.read_text()
        if ANALYZER_ON not in text:
            raise ServerFailed(f"{settings} does not have {ANALYZER_ON}")
        settings.write_text(text.replace(ANALYZER_ON, ANALYZER_OFF))

    def _command(self) -> tuple[list[str], dict[str, str]]:
        return [str(self._instance / "bin" / "artemis"), "run"], {}

    def _is_ready(self) -> bool:
        return is_listening(self.endpoint.port)

    def start(self) -> float:
        seconds = super().start()
        if JOURNALS[self.journal] not in self.log.read_text(errors="replace"):
            self.kill()
            raise ServerFailed(f"Artemis does not use its {self.journal} journal: {self.log.read_text()[-2000:]}")
        return seconds
