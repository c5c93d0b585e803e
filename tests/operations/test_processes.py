"""The loop that keeps processes running, with real processes: stub children that do what a plan says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from broker.child import Instructions
from broker.settings.config import Settings
from broker.supervisor.processes import Backoff
from tests.patience import PATIENCE_S, eventually

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
NAMES = ("gateway", "worker-0", "worker-1")


class Stubs:
    """The loop in a process of its own; `directory` holds the children's plans and notes."""

    def __init__(self, directory, stop_seconds=10.0, stall_seconds=0.0, long_by=0):
        self.directory = directory
        self.long_by = long_by
        self.stop_seconds = stop_seconds
        self.stall_seconds = stall_seconds
        self.process = None

    def plan(self, name, behaviour):
        (self.directory / f"{name}.plan").write_text(behaviour)

    def run(self):
        script = HERE / "children" / "run_stubs.py"
        path = os.pathsep.join([str(script.parent), str(REPOSITORY)])
        self.process = subprocess.Popen(
            [sys.executable, script, self.directory, *map(str, (self.stop_seconds, self.stall_seconds, self.long_by))],
            env=os.environ | {"PYTHONPATH": path, "STUBS": str(self.directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self

    def wait_ready(self):
        """The children's answers."""
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith("READY "):
                    return json.loads(line.removeprefix("READY "))
            raise AssertionError("ended before it was ready, or was not in time")
        finally:
            timer.cancel()

    def wait(self):
        """(exit code, what it printed since)."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def starts(self, name):
        """[(process id, restarts), ...]"""
        lines = (self.directory / "starts").read_text().splitlines()
        return [(int(pid), int(restarts)) for who, pid, restarts in map(str.split, lines) if who == name]

    def ends(self):
        file = self.directory / "ends"
        return file.read_text().split() if file.exists() else []

    def pids(self):
        return [int(line.split()[1]) for line in (self.directory / "starts").read_text().splitlines()]

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
        if (self.directory / "starts").exists():
            for pid in self.pids():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if "stub_child" in process.cmdline():
                        process.kill()


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    yield stubs
    stubs.close()


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ready_once_all_are_with_their_answers(stubs):
    answers = stubs.run().wait_ready()
    assert answers == {name: {"ready": True, "port": 4711} for name in ("gateway", "worker-0", "worker-1")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_gateway_before_the_workers(stubs, number):
    stubs.run().wait_ready()
    stubs.process.send_signal(number)
    code, output = stubs.wait()
    assert code == 0
    assert stubs.ends()[0] == "gateway"
    assert sorted(stubs.ends()[1:]) == ["worker-0", "worker-1"]
    assert output.endswith("END\n")


def test_a_process_that_dies_is_started_again_and_told_how_often(stubs):
    stubs.run().wait_ready()
    os.kill(stubs.starts("worker-1")[0][0], signal.SIGKILL)
    eventually(lambda: len(stubs.starts("worker-1")) == 2, "worker-1 started again")
    os.kill(stubs.starts("worker-1")[1][0], signal.SIGKILL)
    eventually(lambda: len(stubs.starts("worker-1")) == 3, "worker-1 started again")
    assert [restarts for _, restarts in stubs.starts("worker-1")] == [0, 1, 2]
    assert len(stubs.starts("worker-0")) == len(stubs.starts("gateway")) == 1
    stubs.process.terminate()
    code, output = stubs.wait()
    assert code == 0
    assert "killed by SIGKILL" in output


def test_a_process_that_fails_at_first_may_try_again(stubs):
    stubs.plan("worker-0", "crash 2")
    stubs.run().wait_ready()
    assert len(stubs.starts("worker-0")) == 3


def test_a_broker_whose_process_never_starts_gives_up_and_leaves_nothing_behind(stubs):
    stubs.plan("worker-0", "crash 99")
    code, output = stubs.run().wait()
    assert code == 78
    assert "ERROR worker-0 ended 3 times while it started (exit code 3)" in output
    assert all(map(is_gone, stubs.pids()))


def test_a_permanent_fault_at_the_start_ends_all_with_its_message(stubs):
    stubs.plan("gateway", "fail cannot listen on port 5672: set amqp.port")
    code, output = stubs.run().wait()
    assert code == 78
    assert "ERROR cannot listen on port 5672: set amqp.port\n" in output
    assert all(map(is_gone, stubs.pids()))


def test_a_permanent_fault_of_a_process_started_again_leaves_the_others_serving(stubs):
    stubs.run().wait_ready()
    stubs.plan("worker-0", "fail the disk is gone")
    os.kill(stubs.starts("worker-0")[0][0], signal.SIGKILL)
    eventually(lambda: len(stubs.starts("worker-0")) == 2, "worker-0 started again")
    eventually(lambda: is_gone(stubs.starts("worker-0")[1][0]), "worker-0 ended by itself")
    assert not is_gone(stubs.starts("worker-1")[0][0])
    assert not is_gone(stubs.starts("gateway")[0][0])
    stubs.process.terminate()
    code, output = stubs.wait()
    assert code == 0
    assert "the disk is gone" in output


@pytest.mark.parametrize("is_serving", [False, True], ids=["at the start", "later"])
def test_a_process_that_finds_no_room_is_started_until_it_does(stubs, is_serving):
    if is_serving:
        stubs.run().wait_ready()
        stubs.plan("worker-0", "full 4")
        os.kill(stubs.starts("worker-0")[0][0], signal.SIGKILL)
        eventually(lambda: len(stubs.starts("worker-0")) == 5, "worker-0 has room")
    else:
        stubs.plan("worker-0", "full 4")
        stubs.run().wait_ready()
    assert len(stubs.starts("worker-0")) == 5
    assert len(stubs.starts("worker-1")) == len(stubs.starts("gateway")) == 1
    stubs.process.terminate()
    code, output = stubs.wait()
    assert code == 0
    assert "the disk has no room" in output or not is_serving, "before, it is behind the answer"


def test_a_process_that_ignores_sigterm_is_killed_in_time(tmp_path):
    stubs = Stubs(tmp_path, stop_seconds=0.2)
    try:
        stubs.plan("worker-0", "ignore SIGTERM")
        stubs.run().wait_ready()
        stubs.process.terminate()
        code, _ = stubs.wait()
        assert code == 1
        assert sorted(stubs.ends()) == ["gateway", "worker-1"]
        assert all(map(is_gone, stubs.pids()))
    finally:
        stubs.close()


def test_a_second_signal_means_now(stubs):
    stubs.plan("gateway", "ignore SIGTERM")
    stubs.run().wait_ready()
    stubs.process.terminate()
    for line in stubs.process.stdout:
        if "stopping" in line:
            break
    stubs.process.terminate()
    started = time.monotonic()
    code, _ = stubs.wait()
    assert code == 1
    assert time.monotonic() - started < stubs.stop_seconds
    assert all(map(is_gone, stubs.pids()))


def test_children_end_with_a_supervisor_that_is_killed(stubs):
    stubs.plan("worker-0", "ignore SIGTERM")
    stubs.run().wait_ready()
    pids = stubs.pids()
    assert not any(map(is_gone, pids))
    stubs.process.kill()
    eventually(lambda: all(map(is_gone, pids)), "all children gone")


def test_a_process_that_gives_no_sign_of_life_is_replaced_even_before_it_serves(tmp_path):
    stubs = Stubs(tmp_path, stall_seconds=3.0)
    try:
        stubs.plan("gateway", "hang 1")
        stubs.run().wait_ready()
        assert [restarts for _, restarts in stubs.starts("gateway")] == [0, 1]
        os.kill(stubs.starts("worker-0")[0][0], signal.SIGSTOP)
        eventually(lambda: len(stubs.starts("worker-0")) == 2, "worker-0 started again")
        assert len(stubs.starts("worker-1")) == 1
        stubs.process.terminate()
        code, output = stubs.wait()
        assert code == 0
        assert output.count("process stalled") == 1  # the first line was read by `wait_ready`
    finally:
        stubs.close()


@pytest.mark.parametrize("long_by", [0, 1000])
def test_processes_that_are_stopped_before_they_read_their_instructions_are_replaced(tmp_path, long_by):
    """However long these are: the supervisor does not wait for who does not read."""
    stubs = Stubs(tmp_path, stall_seconds=3.0, long_by=long_by)
    try:
        for number in range(3):
            (tmp_path / f"stop-{number}").touch()
        began = time.monotonic()
        stubs.run().wait_ready()
        assert time.monotonic() - began >= 3.0
        assert sorted(restarts for name in NAMES for _, restarts in stubs.starts(name)) == [1, 1, 1]
        stubs.process.terminate()
        assert stubs.wait()[0] == 0
    finally:
        stubs.close()


@pytest.mark.parametrize("behaviour", ["progress 7.5", "disk 7.5"])
def test_a_start_that_makes_progress_or_waits_for_the_disk_may_take_five_times_as_long(tmp_path, behaviour):
    stubs = Stubs(tmp_path, stall_seconds=1.5)
    try:
        for name in NAMES:
            stubs.plan(name, behaviour)
        stubs.run().wait_ready()
        assert [len(stubs.starts(name)) for name in NAMES] == [1, 1, 1]
    finally:
        stubs.close()


def test_a_start_that_is_stopped_while_it_waits_for_the_disk_is_replaced(tmp_path):
    stubs = Stubs(tmp_path, stall_seconds=3.0)
    try:
        for name in NAMES:
            stubs.plan(name, "stop-at-disk 1")
        stubs.run().wait_ready()
        assert [[restarts for _, restarts in stubs.starts(name)] for name in NAMES] == [[0, 1]] * 3
    finally:
        stubs.close()


def test_time_before_a_sign_of_life_does_not_count_after_it(tmp_path):
    """The first that gives one does so when the supervisor has looked at none for nearly a second."""
    stubs = Stubs(tmp_path, stall_seconds=1.5)
    try:
        for name in NAMES:
            stubs.plan(name, "beat once, later")
        stubs.run().wait_ready()
        running = {name: psutil.Process(stubs.starts(name)[0][0]) for name in NAMES}
        ended = {}

        def all_have_ended():
            ended.update({name: time.monotonic() for name in running if not running[name].is_running()} | ended)
            return len(ended) == len(NAMES)

        eventually(all_have_ended, "all were killed")
        beats = dict(map(str.split, (tmp_path / "beats").read_text().splitlines()))
        assert min(ended[name] - float(beats[name]) for name in NAMES) >= 1.5
    finally:
        stubs.close()


def test_what_a_library_prints_is_not_an_answer(stubs):
    stubs.plan("worker-0", "chatter")
    assert stubs.run().wait_ready()["worker-0"] == {"ready": True, "port": 4711}


def test_the_delay_doubles_to_a_limit_and_begins_again_after_a_steady_life():
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [backoff.after(seconds) for seconds in (30.0, 29.9)] == [0.1, 0.2]


def test_instructions_survive_the_way_to_the_child():
    instructions = Instructions(
        settings=Settings.model_validate({"security": {"root_key": "k" * 44}, "amqp": {"port": 0}}),
        supervisor=7,
        gateway=None,
        worker=1,
        partitions=(1, 3),
        sockets=("run/worker-0.sock", "run/worker-1.sock"),
        restarts=2,
        gateway_sockets=("run/gateway-0.sock", "run/gateway-1.sock"),
    )
    assert Instructions.from_json(instructions.to_json()) == instructions
    assert "\n" not in instructions.to_json()
