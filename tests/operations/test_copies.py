"""The first gateways and workers are copies of the supervisor's process, made before it has read its settings."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from bench.processes import command_of
from tests import preloaded
from tests.brokers import REPOSITORY, Broker
from tests.patience import PATIENCE_S, eventually

SERVE = (sys.executable, "-m", "broker.cli", "serve", "--config")
QUEUE = "[[queues]]\nname = 'orders'\n"


@pytest.fixture(autouse=True)
def whole_starts(monkeypatch):
    """This is about what a start does with its modules."""
    monkeypatch.setattr(preloaded, "WHOLE_STARTS", True)


@pytest.fixture(params=[(1, 1), (2, 3)], ids=["one of each", "two gateways and three workers"])
def waiting(tmp_path, monkeypatch, request):
    """A supervisor that waits for its file of settings, and its copies, which wait for their instructions."""
    gateways, workers = request.param
    monkeypatch.setenv("PEEKLOCK_GATEWAYS", str(gateways))
    monkeypatch.setenv("PEEKLOCK_WORKERS", str(workers))
    expected = ["broker.gateway"] * gateways + ["broker.observer"] * (gateways > 1) + ["broker.worker"] * workers
    os.mkfifo(tmp_path / "config.toml")
    with subprocess.Popen([*SERVE, tmp_path / "config.toml"], cwd=REPOSITORY, stderr=subprocess.PIPE) as serve:

        def titled():
            found = psutil.Process(serve.pid).children()
            modules = sorted(command_of(each)[-1] for each in found)
            return found if modules == expected else []

        try:
            yield serve, eventually(titled, "both run")
        finally:
            serve.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_copies_without_instructions_end_with_the_supervisor(waiting, number):
    serve, copies = waiting
    serve.send_signal(number)
    _, alive = psutil.wait_procs(copies, timeout=PATIENCE_S)
    assert alive == []


def test_while_modules_load_no_callback_drops_the_end():
    """An exception that is raised in the callback of a weak reference, as each import has some, is only printed."""
    program = (
        "import os, signal, weakref; from broker.supervisor import interpreters\n"
        "class Lock: pass\n"
        "lock = Lock(); interpreters.start_ahead([])\n"
        "reference = weakref.ref(lock, lambda _: os.kill(os.getpid(), signal.SIGTERM))\n"
        "del lock; print('it goes on')"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_copies_are_in_groups_of_their_own(waiting):
    """So that Ctrl-C, which a terminal sends to the supervisor's group, is not theirs."""
    serve, copies = waiting
    assert sorted(os.getpgid(each.pid) for each in copies) == sorted(each.pid for each in copies)
    assert os.getpgid(serve.pid) not in {each.pid for each in copies}


@pytest.mark.parametrize("victim", ["broker.gateway", "broker.worker"])
def test_a_copy_that_ends_while_settings_are_read_is_replaced(tmp_path, victim):
    broker = Broker(tmp_path, QUEUE)
    text = broker.config_file.read_text()
    broker.config_file.unlink()
    os.mkfifo(broker.config_file)
    try:
        said_before = broker.begin()
        [process] = eventually(lambda: broker.running_as(victim), "it runs")
        process.kill()
        broker.config_file.write_text(text)
        broker.wait_until_ready(said_before)
        [other] = broker.running_as(victim)
        assert other.pid != process.pid
        broker.stop()
    finally:
        broker.kill()


def test_a_broker_starts_without_standard_input(tmp_path):
    """A pipe of a copy would have its number."""
    closed = tmp_path / "closed"
    closed.write_text('#!/bin/sh\nexec "$@" 0<&-\n')
    closed.chmod(0o700)
    with Broker(tmp_path, QUEUE, prefix=(str(closed),)) as broker:
        assert len(broker.running_as("broker.gateway", "broker.worker")) == 2


def test_copies_have_no_settings_in_their_environment(tmp_path, monkeypatch):
    """Nor has what they start, such as the worker's checkpointer, which shows the variables that the worker has."""
    monkeypatch.setenv("PEEKLOCK_LOG__LEVEL", "error")
    monkeypatch.setenv("ANOTHER", "is kept")
    with Broker(tmp_path, QUEUE) as broker:
        shown = {each.pid: each.environ() for each in broker.processes()}
        assert "PEEKLOCK_LOG__LEVEL" in shown.pop(broker.pid)
        assert len(shown) == 3
        names = {name for each in shown.values() for name in each} - {"PEEKLOCK_PURE"}  # of how the tests run
        assert not [name for name in names if name.startswith("PEEKLOCK")]
        assert shown[broker.checkpointer().pid]["ANOTHER"] == "is kept"
