"""Signs of life: what is said, how often, and how long a silence is for who watches."""

import importlib
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.liveness import BEAT, LOOK_SECONDS, ON_DISK, PIPE_SECONDS, PipeSigns, SharedSigns, Silence, is_stopped
from tests.patience import eventually


def never() -> bool:
    return False


def always() -> bool:
    return True


def test_a_silence_is_counted_from_the_start_and_anew_from_each_sign():
    silence = Silence(3.0)
    silence.heard(100.0)
    assert [silence.is_too_long(100.0 + seconds, never) for seconds in (1.0, 2.0, 2.9)] == [False] * 3
    silence.heard(102.95)
    assert [silence.is_too_long(102.95 + seconds, never) for seconds in (0.5, 1.5, 2.5, 2.9, 3.0)] == [False] * 4 + [
        True
    ]


def test_time_before_a_sign_does_not_count_after_it():
    """Nobody looked for nearly a second before the sign came."""
    silence = Silence(1.5)
    silence.heard(0.0)
    silence.heard(0.95)
    assert not silence.is_too_long(0.96, never)
    assert not silence.is_too_long(1.95, never)
    assert not silence.is_too_long(2.44, never)
    assert silence.is_too_long(2.46, never)


def test_time_in_which_nobody_looked_counts_as_one_look():
    silence = Silence(3.0)
    silence.heard(0.0)
    assert not silence.is_too_long(1000.0, never)
    assert silence.seconds == LOOK_SECONDS
    assert not silence.is_too_long(1001.0, never)
    assert silence.is_too_long(1002.0, never)


def test_while_it_waits_for_the_disk_only_time_counts_in_which_it_is_stopped():
    silence = Silence(3.0)
    silence.heard(0.0, waits_for_disk=True)
    for second in range(1, 1000):
        assert not silence.is_too_long(second, never)
        assert silence.disk_is_slow == (second >= 3)
    assert [silence.is_too_long(second, always) for second in (1000, 1001, 1002)] == [False, False, True]
    silence.heard(1003.0)
    assert not silence.disk_is_slow
    assert [silence.is_too_long(second, never) for second in (1004, 1005, 1006)] == [False, False, True]


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=40))
def test_a_silence_is_never_longer_than_the_time_since_the_last_sign(steps):
    silence = Silence(2.0)
    now = heard = 50.0
    silence.heard(now)
    for passed, signs, on_disk in steps:
        now += passed
        if signs:
            silence.heard(now, on_disk)
            heard = now
        too_long = silence.is_too_long(now, never)
        assert silence.seconds + silence.disk_seconds <= now - heard + 1e-9
        assert too_long == (silence.seconds >= 2.0)


def test_signs_in_a_pipe_are_few_and_none_about_the_disk_is_left_out():
    now, lines = 0.0, []
    signs = PipeSigns(lines.append, lambda: now)
    for step in range(1000):
        now = step / 1000
        signs.beat()
    assert set(lines) == {BEAT}
    assert 9 <= len(lines) <= 1 / PIPE_SECONDS + 1
    lines.clear()
    for _ in range(3):
        with signs.waiting_for_disk():
            pass
    assert lines == [ON_DISK, BEAT] * 3


def test_who_waits_for_the_disk_says_so_until_it_has_failed():
    lines = []
    with pytest.raises(OSError, match="of the disk"), PipeSigns(lines.append).waiting_for_disk():
        raise OSError("an error of the disk")
    assert lines == [ON_DISK, BEAT]


def test_shared_signs_are_taken_once():
    descriptor = os.memfd_create("signs")
    os.ftruncate(descriptor, 16)
    gives, takes = SharedSigns(descriptor), SharedSigns(descriptor)
    os.close(descriptor)
    assert not takes.take()
    gives.beat()
    gives.beat()
    assert takes.take()
    assert not takes.waits_for_disk
    assert not takes.take()
    with gives.waiting_for_disk():
        assert takes.take()
        assert takes.waits_for_disk
        assert not takes.take()
    assert takes.take()
    assert not takes.waits_for_disk
    takes.clear()
    assert not takes.take()


def test_each_module_that_is_loaded_is_a_sign_and_none_afterwards(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("of_signs_one", "of_signs_two", "of_signs_three"):
        (tmp_path / f"{name}.py").touch()
    lines = []
    signs = PipeSigns(lines.append, iter(range(1, 100)).__next__)
    with signs.loading():
        importlib.import_module("of_signs_one")
        importlib.import_module("of_signs_two")
    assert len(lines) >= 2
    count = len(lines)
    importlib.import_module("of_signs_three")
    assert len(lines) == count


def test_a_process_is_stopped_between_sigstop_and_sigcont_whatever_its_name_is():
    name = "import setproctitle, time; setproctitle.setthreadtitle(') T T'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", name], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert not is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: is_stopped(process.pid), "it is stopped")
            os.kill(process.pid, signal.SIGCONT)
            eventually(lambda: not is_stopped(process.pid), "it goes on")
        finally:
            process.kill()
    assert not is_stopped(process.pid)
