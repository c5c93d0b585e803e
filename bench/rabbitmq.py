"""RabbitMQ as a peer: a node of its own, of which a system-wide installation lends only the programs."""

import os
import shutil
import subprocess
from pathlib import Path

from bench.load import Endpoint
from bench.servers import QUEUES, Server, ServerFailed, ServerMissing, free_port, is_listening

PLACES = ("/usr/lib/rabbitmq/lib", "/usr/local/lib/rabbitmq/lib")


class RabbitMQ(Server):
    """Debian's rabbitmq-server with its AMQP 1.0 plugin and quorum queues of a single member."""

    name = "RabbitMQ quorum"
    durable = (
        "in the write-ahead log of the queue's single member, synced (fdatasync); messages that arrive together share a"
        " sync. The client is not told when a completion is on disk"
    )

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
        for place in PLACES:
            for scripts in sorted(Path(place).glob("rabbitmq_server-*/sbin"), reverse=True):
                if (scripts / "rabbitmq-server").exists() and shutil.which("epmd"):
                    return scripts
        raise ServerMissing(
            "rabbitmq-server not found: install it (apt-get install rabbitmq-server; its service need not run), "
            "or leave RabbitMQ out (--peers artemis, or --peers none)"
        )

    def version(self) -> str:
        release = self._scripts.parent.name.partition("-")[2]
        return f"{release}, AMQP 1.0 plugin, quorum queues with one member"

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
        return is_listening(self.endpoint.port)

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
