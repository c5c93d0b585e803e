"""What a process keeps of the memory that it frees, and what it gives back. Each test has a process of its own."""

import ctypes
import subprocess
import sys

import pytest

from storage import heap
from tests.processes import REPOSITORY

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it is glibc's")

BEGIN = """
import resource
from storage.heap import Freed, free_bytes, keep_freed
MIB = 1 << 20
keep_freed()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
"""


def told(script: str) -> list[int]:
    command = [sys.executable, "-c", BEGIN + script]
    result = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return [int(each) for each in result.stdout.split()]


@pytest.mark.parametrize("mib", [1, 7, 9, 12, 24])
def test_buffers_that_are_freed_are_used_again_whatever_their_size(mib: int) -> None:
    """Until it is 32 MiB, which the C library maps each time."""
    *_, last = told(
        f"""
for _ in range(6):
    before = faults()
    for _ in range(4):
        buffer = b"x" * ({mib} * MIB)
        del buffer
    print(faults() - before)
"""
    )
    assert last < 100, "each page of a mapped buffer is a fault: 256 in a MiB"


def test_what_is_not_used_any_more_is_given_back() -> None:
    """Small things between large ones keep the C library from doing that by itself."""
    before, kept, first, early, given_back, left = told(
        """
print(resident())
freed = Freed()
buffers, small = [], []
for number in range(30):
    buffers.append(b"x" * (6 * MIB))
    small.append(b"y" * 5000)
buffers.clear()
print(resident())
for now_s in (100, 109, 110):
    freed.look(now_s)
    print(resident())
for now_s in (120, 130, 140):
    freed.look(now_s)
print(int(free_bytes() > 100 * MIB))
"""
    )
    assert kept > before + (150 << 20)
    assert first > before + (150 << 20), "it may be used again"
    assert early > before + (150 << 20)
    assert given_back < before + (40 << 20)
    assert left, "it is free still, but has no memory"


@pytest.mark.parametrize("size_bytes", [0, 1, 3 << 20, heap.MOST_KEPT_BYTES, heap.MOST_KEPT_BYTES + 1])
def test_room_is_of_the_size_and_keeps_what_is_written(size_bytes):
    room = heap.room_for(size_bytes)
    written = bytes(range(256)) * (size_bytes // 256) + bytes(size_bytes % 256)
    room[:] = written
    assert room == written
