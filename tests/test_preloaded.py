"""A copy of the process that has loaded the modules is what a command is that was started as a user does."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from bench.processes import command_of
from broker import __version__
from tests import preloaded
from tests.patience import PATIENCE_S, eventually

COMMAND = (sys.executable, "-m", "broker.cli")
CONFIG = "amqp.port = 0\nhttp.port = 0\nops.port = 0\n"


@pytest.fixture(params=[False, True], ids=["copy", "whole"])
def is_whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(preloaded, "WHOLE_STARTS", request.param)
    return bool(request.param)


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes] | preloaded.Copy:
    with (tmp_path / "log").open("ab") as log:
        return preloaded.start([*COMMAND, *arguments], log)


def serving(tmp_path: Path) -> subprocess.Popen[bytes] | preloaded.Copy:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.toml").write_text(CONFIG)
    process = started(tmp_path, "serve", "--config", f"{tmp_path}/config.toml", "--data-dir", f"{tmp_path}/data")
    eventually(lambda: "is ready" in (tmp_path / "log").read_text(), "it serves")
    return process


@pytest.mark.usefixtures("is_whole")
def test_it_has_its_arguments_its_log_and_its_exit_code(tmp_path: Path) -> None:
    assert started(tmp_path, "--version").wait(PATIENCE_S) == 0
    assert (tmp_path / "log").read_text() == f"{__version__}\n"
    assert started(tmp_path, "serve", "--amqp-port", "70000", "--data-dir", str(tmp_path)).wait(PATIENCE_S) == 78
    assert "--amqp-port" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("is_whole")
def test_it_has_the_environment_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEKLOCK_AMQP__PORT", "many")
    assert started(tmp_path, "config", "check").wait(PATIENCE_S) != 0
    assert "PEEKLOCK_AMQP__PORT" in (tmp_path / "log").read_text()


def test_it_serves_as_the_leader_of_a_session_and_ends_in_order(tmp_path: Path, is_whole: bool) -> None:
    process = serving(tmp_path)
    assert isinstance(process, subprocess.Popen) == is_whole
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
    seen = psutil.Process(process.pid)
    assert command_of(seen)[1:4] == ["-m", "broker.cli", "serve"]
    children = {command_of(each)[-1] for each in seen.children()}
    assert {"broker.gateway", "broker.worker"} <= children or "broker.one_process" in children
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == process.poll() == 0


def test_it_has_no_files_of_the_process_that_it_was_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [serving(tmp_path / name) for name in ("a", "b")]
    found = []
    for is_whole in (False, True):
        monkeypatch.setattr(preloaded, "WHOLE_STARTS", is_whole)
        process = serving(tmp_path / str(is_whole))
        found.append(kinds_of_files(process.pid))
        others.append(process)
    assert found[0] == found[1]
    for each in others:
        each.kill()
        assert each.wait(PATIENCE_S) == -signal.SIGKILL


def kinds_of_files(pid: int) -> Counter[str]:
    return Counter(
        str(each.readlink()).partition(":")[0]
        for each in Path(f"/proc/{pid}/fd").iterdir()
        if not str(each.readlink()).startswith("/")
    )


PROGRAM = """
import sys
from collections import Counter
from pathlib import Path
from tests.test_preloaded import serving
print(serving(Path(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_the_tests_however_they_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=preloaded.REPOSITORY) as tests:
        assert tests.stdout is not None
        copy = psutil.Process(int(tests.stdout.readline()))
        family = [copy, *copy.children(recursive=True)]
        tests.kill()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []


def test_where_the_environment_says_how_an_interpreter_starts_it_is_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloaded, "WHOLE_STARTS", False)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    process = started(tmp_path, "--version")
    assert isinstance(process, subprocess.Popen)
    assert process.wait(PATIENCE_S) == 0


def test_modules_are_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "WHOLE_STARTS", False)
    assert started(tmp_path, "--version").wait(PATIENCE_S) == 0  # has loaded them
    used = []
    for is_whole in (False, True):
        monkeypatch.setattr(preloaded, "WHOLE_STARTS", is_whole)
        process = serving(tmp_path / str(is_whole))
        used.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
        process.kill()
        process.wait()
    assert used[0] < used[1] / 2
