"""What a start costs: what each process imports, and that processes load while the stores are made ready.

Seconds depend on the machine, so they are measured by `make bench`; these tests hold what they come from.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.child import Instructions
from broker.settings.config import Settings
from broker.supervisor.processes import Processes, Role
from tests.patience import PATIENCE_S, eventually

REPOSITORY = Path(__file__).resolve().parents[2]

# Libraries and parts of ours that cost tens of milliseconds each, and that a start can do without.
HEAVY = {
    "lark", "prometheus_client", "rich", "broker.exposition", "broker.rules.compiling", "broker.rules.syntax",
    "broker.settings.reference", "protocol.client.connection",
}  # fmt: skip
OF_COMMANDS = {"typer", "broker.cli.commands", "broker.settings.sources"}
OF_THE_GATEWAY = {"uvloop", "aiohttp", "cproton_ffi", "protocol.engine.engine"}
OF_SETTINGS = {"pydantic", "broker.settings.config"}

MAY_NOT_LOAD = {
    "broker.cli.entry": HEAVY | OF_COMMANDS | OF_THE_GATEWAY | OF_SETTINGS | {"asyncio", "structlog", "lmdb"},
    "broker.cli.commands": HEAVY | OF_THE_GATEWAY | {"asyncio", "defusedxml", "lmdb", "ssl", "structlog"},
    "broker.supervisor.supervisor": HEAVY | OF_COMMANDS | OF_THE_GATEWAY,
    "broker.gateway.gateway": HEAVY | OF_COMMANDS | {"lmdb"},
    "broker.observer.observer": HEAVY | OF_COMMANDS | {"lmdb", "cproton_ffi", "protocol.engine.engine"},
    "broker.worker.process": HEAVY | OF_COMMANDS | OF_THE_GATEWAY,
}


@pytest.mark.parametrize("module", MAY_NOT_LOAD)
def test_a_process_loads_nothing_heavy_that_it_starts_without(module):
    script = f"import sys, {module}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    loaded = set(done.stdout.split())
    assert module in loaded
    assert sorted(loaded & MAY_NOT_LOAD[module]) == []


CHILD = """
import sys
from pathlib import Path
Path("loaded").touch()
Path("instructed").write_text(sys.stdin.readline())
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    (tmp_path / "stub_that_waits.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def instructions(restarts):
        return Instructions(
            settings=Settings(), supervisor=os.getpid(), gateway=0, worker=None, partitions=(), sockets=(), restarts=0
        )

    monkeypatch.chdir(tmp_path)
    return Processes([[Role("stub", "stub_that_waits", instructions)]], tmp_path, 1.0, lambda: None)


def test_a_process_loads_before_it_is_told_what_to_do(processes, tmp_path):
    others = set(psutil.Process().children())  # of tests before
    processes.load()
    try:
        eventually((tmp_path / "loaded").exists, "it has loaded")
        assert not (tmp_path / "instructed").exists()
        [child] = set(psutil.Process().children()) - others
    finally:
        processes.discard()
    assert not child.is_running()
    assert not (tmp_path / "instructed").exists()


def test_a_start_that_is_refused_late_leaves_no_process(tmp_path):
    """An entity's definition is compared when the processes load already."""

    def serve(queue):
        config = tmp_path / "config.toml"
        config.write_text(
            f"workers = 1\n[amqp]\nport = 0\n[http]\nport = 0\n[ops]\nport = 0\n[[queues]]\nname = 'orders'\n{queue}\n"
        )
        command = [sys.executable, "-m", "broker.cli", "serve", "--config", config, "--data-dir", tmp_path / "data"]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with serve("") as first:
        assert "is ready" in first.stdout.readline()
        first.terminate()
    with serve("requires_session = true") as second:
        _, log = second.communicate(timeout=PATIENCE_S)
    assert second.returncode != 0
    assert "requires_session" in log
    data = tmp_path / "data"
    assert [process.pid for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(data)] == []


OPENED = """
import sys
from broker.catalog.catalog import reconcile
from broker.namespace.entities import QueueDescription, TopicDescription
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.settings.config import Settings
from storage.memory import MemoryStore

def opened(description):
    store = MemoryStore()
    reconcile([store], [description], 0)
    settings = PartitionSettings.of(Settings())
    return store, Partition(0, store, now_ms=0, incarnation=bytes(6), settings=settings)
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "for description in (QueueDescription(name='q'), TopicDescription(name='t')):\n"
            "    opened(description)\n"
            "    print('broker.rules.syntax' in sys.modules)\n",
            "False True",
        ),
        (
            "import threading\n"
            "from broker.catalog.catalog import Definition\n"
            "from broker.catalog.changes import Put\n"
            "from broker.worker.copies import Copies\n"
            "store, partition = opened(QueueDescription(name='q'))\n"
            "topic = Definition(9, TopicDescription(name='t'), 0, 0, (0,)).document()\n"
            "print(Copies({0: partition}, {0: store}, lambda _: None).change(2, [Put(topic, None)], 0))\n"
            "[loading] = {*threading.enumerate()} - {threading.main_thread()}\n"
            "loading.join()\n"
            "print('broker.rules.syntax' in sys.modules)\n",
            "True True",
        ),
    ],
    ids=["when a partition is opened that knows a topic", "beside turns when the first topic is created"],
)
def test_the_language_of_rules_is_loaded(script, says):
    done = subprocess.run(
        [sys.executable, "-c", OPENED + script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (" ".join(done.stdout.split()), done.stderr) == (says, "")
