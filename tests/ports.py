"""Ports of the loopback interface for servers of tests.

A test's broker is killed and started again on the same ports, and in between nobody holds them. Each process therefore
draws from a block of ports of its own, which it locks as long as it lives, and gives a port again only after all others
of the block.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from pathlib import Path

# Below those that systems give to outgoing connections: a port that is free stays so until its broker listens.
FIRST, END = 10_240, 32_768
BLOCK = 256


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment, all different. Raises RuntimeError if the block has not so many."""
    ports: list[int] = []
    for port in islice(_ports(), BLOCK):
        with socket.socket() as attempt:
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"{count} ports are wanted, and {len(ports)} of a block of {BLOCK} are free")


@cache
def _ports() -> Iterator[int]:
    return cycle(_lock_a_block())


def _lock_a_block() -> range:
    locks = Path(tempfile.gettempdir()) / f"peeklock-test-ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    blocks = [range(first, first + BLOCK) for first in range(FIRST, END, BLOCK)]
    random.SystemRandom().shuffle(blocks)  # tests that run side by side may have seeded theirs alike
    for block in blocks:
        lock = os.open(locks / str(block.start), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        except BlockingIOError:
            os.close(lock)
            continue
        return block
    raise RuntimeError(f"all {len(blocks)} blocks of ports are in use; see {locks}")
