"""Memory of processes as the benchmarks count it."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.processes import cpu_s, cpu_s_by_process, cpu_s_since, memory_of, role, tree

MIB = 1 << 20
HOLD = """
import mmap, sys
heap = bytearray(b"x" * {heap})
with open({path!r}, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    touched = sum(mapped[at] for at in range(0, len(mapped), {page}))
    print("ready", flush=True)
    sys.stdin.read()
"""


def hold(path: Path, heap: int) -> "subprocess.Popen[str]":
    """A process with `heap` bytes of its own and all pages of the file mapped."""
    program = HOLD.format(heap=heap, path=str(path), page=mmap.PAGESIZE)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_pages_that_map_the_store_are_not_counted_as_memory_and_heap_is(tmp_path):
    store = tmp_path / "data.mdb"
    store.write_bytes(b"y" * (32 * MIB))
    with hold(store, heap=16 * MIB) as process:
        seen = memory_of([psutil.Process(process.pid)], tmp_path)
        elsewhere = memory_of([psutil.Process(process.pid)], Path("/nonexistent"))
        process.communicate()
    assert seen.store_cache == 32 * MIB
    assert 16 * MIB < seen.anonymous < seen.used < 32 * MIB
    assert seen.rss >= seen.pss == pytest.approx(elsewhere.pss, abs=MIB)  # it may take a page in between
    assert elsewhere.used == pytest.approx(seen.used + 32 * MIB, abs=MIB)


def test_a_page_shared_by_two_processes_counts_once_in_pss_and_twice_in_rss(tmp_path):
    store = tmp_path / "data.mdb"
    store.write_bytes(b"y" * (32 * MIB))
    with hold(store, heap=MIB) as one, hold(store, heap=MIB) as other:
        both = memory_of([psutil.Process(one.pid), psutil.Process(other.pid)], tmp_path)
        one.communicate()
        other.communicate()
    assert both.store_cache == 32 * MIB
    assert both.rss > 64 * MIB


def test_a_process_that_has_ended_has_no_tree_and_no_memory(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(process.pid)
    process.wait()
    assert tree(process.pid) == []
    assert memory_of([gone], tmp_path).rss == 0


# As PySpark's daemon does, the parent does not wait for its child.
FORGET = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def work(s):
    end = time.process_time() + s
    while time.process_time() < end: pass
if (child := os.fork()) == 0:
    work(0.5)
    print("worked", flush=True)
    time.sleep(600)
sys.stdin.readline()
os.kill(child, signal.SIGKILL)
work(0.2)
while os.path.exists(f"/proc/{child}"): time.sleep(0.01)
print("alone", flush=True)
sys.stdin.read()
"""


def test_cpu_time_is_finer_than_a_tick_of_the_kernel_and_that_of_ended_processes_is_nothing(tmp_path):
    (tmp_path / "empty").write_bytes(b"z")
    began = time.process_time()
    assert began <= cpu_s([psutil.Process()]) <= time.process_time()
    with hold(tmp_path / "empty", heap=1) as process:
        other = psutil.Process(process.pid)
        assert 0 < cpu_s([other]) < 600
    assert cpu_s([other]) == 0


def test_a_child_that_nobody_waited_for_does_not_take_its_time_from_others():
    with subprocess.Popen(
        [sys.executable, "-c", FORGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "worked\n"
        before = cpu_s_by_process(tree(process.pid))
        assert sum(before.values()) >= 0.47
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "alone\n"
        # The kernel tells user and system time each in whole ticks of 10 ms, rounded down.
        assert 0.17 <= cpu_s_since(before, tree(process.pid)) < 0.5
        process.communicate()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -m broker.cli serve --config x", "supervisor"),
        ("/a/python -P -m broker.worker", "worker"),
        ("valgrind --tool=none /a/python -P -m broker.gateway", "gateway"),
        ("/a/python -P -m broker.one_process", "one_process"),
        ("python -m storage.log.checkpointer.__main__", "checkpointer"),
        ("/usr/lib/erlang/erts-13/bin/beam.smp -W w -- -root /x", "beam.smp"),
    ],
)
def test_a_process_is_named_after_its_module_or_its_program(command, name):
    assert role(command.split()) == name


def test_a_copy_of_the_supervisors_process_has_its_command_in_one_text():
    assert role(["/a/python -P -m broker.worker", "", ""]) == "worker"
    assert role(["/usr/bin/tool"]) == "tool"
