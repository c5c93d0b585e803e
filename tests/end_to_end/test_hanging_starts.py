"""Processes that hang in their start are replaced; those whose start takes long are not."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.brokers import Broker
from tests.end_to_end.health import is_ready, logged, serves
from tests.patience import PATIENCE_S, eventually
from tests.shims import NoCompiler, make_shim

SHIM = Path(__file__).parents[1] / "partitioned" / "slow_disk.c"
STALL_S = 3.0
READY = b" is ready."
CONFIG = f"""
partitions = 2
worker_stall_timeout_ms = {STALL_S * 1000:.0f}
gateway_stall_timeout_ms = {STALL_S * 1000:.0f}
[[queues]]
name = "witness"
"""
JOURNAL = '[journal]\nmode = "events"\n'
CASES = [
    # the process, further settings, workers
    ("broker.worker", "", 1),
    ("broker.worker", "", 2),
    ("broker.gateway", "", 1),
    ("broker.gateway", "gateways = 2\n", 1),
    ("broker.observer", "gateways = 2\n", 1),
    ("broker.one_process", "", 0),
    ("broker.journal", JOURNAL, 1),
    ("storage.log.checkpointer", "", 1),
]


def config_with(further: str) -> str:
    return CONFIG + further if further.startswith("[") else further + CONFIG


@contextmanager
def running(directory: Path, further: str, workers: int) -> Iterator[Broker]:
    broker = Broker(directory, config_with(further), workers=workers)
    try:
        yield broker
    finally:
        for process in broker.processes():
            process.resume()
        broker.stop()
        broker.kill()
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def newcomer(broker: Broker, module: str, known: set[int]) -> psutil.Process:
    """Stop a process that runs this module and is not among those that are known, as soon as it is there."""

    def found() -> psutil.Process | None:
        for process in broker.running_as(module):
            if process.pid not in known:
                process.suspend()
                return process
        return None

    return eventually(found, f"{module} is started")


@pytest.mark.parametrize(("module", "further", "workers"), CASES)
def test_a_process_that_stops_as_soon_as_it_is_started_again_is_replaced(tmp_path, module, further, workers):
    with running(tmp_path, further, workers) as broker:
        broker.start()
        known = broker.running_as(module)
        known[0].kill()
        stopped = newcomer(broker, module, {process.pid for process in known})
        began = time.monotonic()
        if module == "storage.log.checkpointer":
            serves(broker.amqp_port)  # it has something to do
        stopped.wait(PATIENCE_S)
        assert time.monotonic() - began > STALL_S - 1.5
        assert logged(broker, "stalled; killing it")
        eventually(lambda: len(broker.running_as(module)) == len(known), "another has come")
        eventually(lambda: is_ready(broker), "it serves")
        serves(broker.amqp_port)


@pytest.mark.parametrize(("module", "further", "workers"), CASES[2:7])
def test_a_process_that_stops_at_the_first_start_is_replaced(tmp_path, module, further, workers):
    with running(tmp_path, further, workers) as broker:
        said_before = broker.begin()
        newcomer(broker, module, set())
        broker.wait_until_ready(said_before)
        assert logged(broker, "process stalled")
        serves(broker.amqp_port)


@pytest.fixture
def slow(tmp_path):
    """A command that makes a broker's disk slow, and how: seconds for each sync."""
    try:
        shim = make_shim(SHIM, tmp_path)
    except NoCompiler as reason:
        pytest.skip(str(reason))
    control = tmp_path / "slow"

    def say(seconds: float) -> None:
        control.with_suffix(".new").write_text(f"{seconds * 1e6:.0f} 0")
        control.with_suffix(".new").rename(control)

    return ("env", f"LD_PRELOAD={shim}", f"SLOW_DISK={control}"), say


@pytest.mark.parametrize("workers", [1, 0])
def test_a_start_on_a_slow_disk_may_take_five_times_as_long(tmp_path, slow, workers):
    """That of a worker that was killed, and that of a broker, which compares definitions first."""
    prefix, say = slow
    with Broker(tmp_path / "broker", CONFIG.replace("= 2", "= 4"), prefix=prefix, workers=workers) as broker:
        serves(broker.amqp_port)
        killed = broker.worker()
        say(STALL_S / 2)
        killed.kill()
        eventually(lambda: starts(broker) == 2, "it is started again")
        eventually(lambda: is_ready(broker), "it serves")
        took = re.findall(r'"seconds": ([0-9.]+), "event": "process ready"', broker.log_file.read_text())
        assert float(took[-1]) > 5 * STALL_S
        broker.kill()
        began = time.monotonic()
        said_before = broker.begin()
        eventually(lambda: READY in broker.log_file.read_bytes()[said_before:], "it serves")
        assert time.monotonic() - began > 5 * STALL_S
        say(0)
        serves(broker.amqp_port)
        assert not logged(broker, "stalled")


def starts(broker: Broker) -> int:
    return len(re.findall("log replayed", broker.log_file.read_text()))
