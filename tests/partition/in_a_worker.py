"""Commands of a gateway for a partition, done in the turns of a worker."""

import socket
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack

from broker import wire
from broker.touched_partition import TouchedPartition
from broker.worker.clock import Clock
from broker.worker.dialling import UnixDialler
from broker.worker.worker import Caller, Worker
from tests.logs import InMemory
from tests.partition.driver import Driver

PARTITION = 5  # the driver's


def through_a_worker(driver: Driver, *commands: list[Any]) -> list[Any]:
    """They are in one frame of a gateway, and done in as many turns as the worker takes. Returns the answers."""
    ours, theirs = socket.socketpair()
    answers: list[Any] = []
    with closing(ours), closing(theirs), TemporaryDirectory() as directory:
        clock = Clock(driver.now_ms, 0)
        touched = TouchedPartition(Path(directory) / "touched")
        partitions: dict[int, Any] = {PARTITION: driver.partition}
        turns = InMemory(driver.store)
        listener: Any = ours  # nobody connects
        dialler = UnixDialler(["0"])
        worker = Worker(
            0, 0, partitions, {PARTITION: driver.store}, listener, lambda _: dialler, 6, clock, touched, turns
        )
        caller = Caller(ours)
        caller.unread.extend(wire.unpack(msgpack.packb(commands)))  # type: ignore[arg-type]
        more = True
        while more or caller.unread:
            worker._take_commands(caller)
            more = worker._finish_turn(time.monotonic(), more)
            answers += caller.answers
            caller.answers.clear()
    return answers
