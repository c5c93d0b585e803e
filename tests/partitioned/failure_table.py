"""Measures what clients see when a worker has a fault: `python -m tests.partitioned.failure_table` writes the page.

A cell says whether an operation works or which condition the client gets, and in which time. Times are put into
classes that are far apart, so that a busy machine changes no cell.
"""

import argparse
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from broker.worker.home import HANGS_MS
from tests.brokers import REPOSITORY, Broker
from tests.cluster.machines import Cluster
from tests.end_to_end.health import is_ready, logged, worker_of
from tests.end_to_end.raw_peer import Closed, RawPeer, message
from tests.interop.waits import section
from tests.own_disk import OwnDisk
from tests.partitioned.operations import (
    ALL,
    FAULTY,
    KEPT,
    NOT_READY,
    PARTITIONS,
    WORKERS,
    Kind,
    Operation,
    Run,
    Scene,
    answered,
    declared,
    entity_of,
    name_on,
)
from tests.patience import eventually
from tests.shims import make_shim

PAGE = REPOSITORY / "docs" / "failures.md"
SHIM = Path(__file__).with_name("slow_disk.c")
AT_ONCE_S = 0.5
STALL_S = 6.0
NOTICED_S = STALL_S / 3 + 1  # a worker that does not answer is looked for each second, so it takes up to this long
WAIT_S = 10.0  # more than by default: the restart may take longer on a busy machine
AWAY_S = 1.5  # until a killed worker is started again
CHANGES_WAIT_S = HANGS_MS / 1000 + 0.5  # by now it is known that the worker does not follow the first change
DELAY_S = 0.7  # of each sync of a slow disk
SILENCE_S = 5.0  # H
GONE_S = SILENCE_S + 2
FROZEN_S = GONE_S + 2
FILE_BYTES = 8 << 20  # that stay free on a disk, and that a log may have: they fit onto a small disk
BUSY_QUEUE = name_on(FAULTY, "busy")

CHECKED_S = 2.0  # in which `/readyz` has an answer, on a busy machine

AT_ONCE = f"< {AT_ONCE_S:g} s"
NOTICED, CHECKED, REPLACED, BACK, DISK = "< T/3 + 1 s", "< 1 s", "when replaced", "when back", "with the disk"
GONE = "< H + 2 s"

UNDER_WAY, AWAY, HUNG, STALLED, SLOW, FULL = "under-way", "away", "hung", "stalled", "slow", "full"
FROZEN = "frozen"
COLUMNS = (UNDER_WAY, AWAY, HUNG, STALLED, SLOW, FULL, FROZEN)
Cells = dict[str, list[str]]
"""Column → a cell for each of the operations."""


@dataclass(frozen=True)
class Outcome:
    """The condition that an operation ended with, and the seconds that it took."""

    answer: str
    seconds: float


class Column:
    """All operations at once, each in a thread with a connection of its own."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._broker, self._name = broker, name
        self._begins, self._over = threading.Event(), threading.Event()
        self._outcomes: dict[Operation, Outcome] = {}
        self._failures: list[BaseException] = []
        self._prepared = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in ALL]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._prepared.acquire()
        self._raise()

    def _run(self, operation: Operation) -> None:
        try:
            with RawPeer.connect(self._broker.amqp_port) as peer:
                scene = Scene(self._broker, peer, entity_of(operation, self._name), self._over.is_set)
                run = operation.run(scene)
                try:
                    next(run)
                finally:
                    self._prepared.release()
                self._begins.wait()
                self._outcomes[operation] = self._measured(run)
        except BaseException as failure:
            failure.add_note(f"{operation.kind.value}: {operation.title}")
            self._failures.append(failure)

    def _measured(self, run: Run) -> Outcome:
        began = time.monotonic()
        try:
            next(run)
        except StopIteration as end:
            return Outcome(str(end.value), time.monotonic() - began)
        raise AssertionError("an operation yields once")

    def begin(self) -> None:
        self._begins.set()

    def end(self) -> list[Outcome]:
        """Of all operations; the fault is over. Raises what one failed of."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._raise()
        return [self._outcomes[each] for each in ALL]

    def _raise(self) -> None:
        if self._failures:
            raise self._failures[0]


def cell(column: str, outcome: Outcome) -> str:
    if outcome.answer == KEPT:
        return KEPT
    if outcome.seconds < AT_ONCE_S:
        within = AT_ONCE
    elif outcome.answer == NOT_READY and outcome.seconds < CHECKED_S:
        within = CHECKED
    elif column in (UNDER_WAY, AWAY):
        within = BACK
    elif column == HUNG and outcome.seconds < (NOTICED_S + STALL_S) / 2:
        within = NOTICED
    elif column == FROZEN and outcome.seconds < GONE_S:
        within = NOTICED if outcome.seconds < (NOTICED_S + SILENCE_S) / 2 else GONE
    else:
        within = {HUNG: REPLACED, STALLED: REPLACED, SLOW: DISK, FROZEN: BACK}.get(column, "late")
    shown = f"`{outcome.answer.removeprefix('com.microsoft:')}`" if outcome.answer else "yes"
    return f"{shown}, {within}"


def config(*columns: str) -> str:
    return f"""
partitions = {PARTITIONS}
worker_stall_timeout_ms = {STALL_S * 1000:.0f}
worker_restart_wait_ms = {WAIT_S * 1000:.0f}

[store]
min_free_disk_bytes = {FILE_BYTES}
log_bytes = {FILE_BYTES}

[[queues]]
name = "{BUSY_QUEUE}"

{declared(columns)}"""


@contextmanager
def running(broker: Broker) -> Iterator[Broker]:
    try:
        broker.start()
        yield broker
        assert "Traceback" not in broker.log_file.read_text(), broker.log()
    finally:
        for process in broker.processes():
            process.resume()
        broker.kill()


# -- faults


def killed(directory: Path, column: str) -> list[Outcome]:
    """The supervisor is stopped for a time, so that it does not start the worker anew at once."""
    with running(Broker(directory, config(column), workers=WORKERS)) as broker:
        operations = Column(broker, column)
        worker, supervisor = worker_of(broker, FAULTY), broker.processes()[0]
        supervisor.suspend()
        worker.suspend()
        if column == UNDER_WAY:
            operations.begin()
            time.sleep(0.3)  # the operations have reached the worker's socket, as far as they go there
        worker.kill()
        eventually(lambda: logged(broker, "worker connection lost"), "the gateway knows")
        operations.begin()
        time.sleep(AWAY_S)
        supervisor.resume()
        eventually(lambda: is_ready(broker), "it is back")
        return operations.end()


def hung(directory: Path) -> dict[str, list[Outcome]]:
    with running(Broker(directory, config(HUNG, STALLED), workers=WORKERS)) as broker:
        first, second = Column(broker, HUNG), Column(broker, STALLED)
        worker = worker_of(broker, FAULTY)
        worker.suspend()
        first.begin()
        began = time.monotonic()
        eventually(lambda: logged(broker, "worker does not answer"), "it is noticed")
        time.sleep(max(0.0, began + CHANGES_WAIT_S - time.monotonic()))
        second.begin()
        worker.wait(2 * STALL_S)
        eventually(lambda: is_ready(broker), "it is replaced")
        return {HUNG: first.end(), STALLED: second.end()}


def slow(directory: Path) -> list[Outcome]:
    """Raises NoCompiler."""
    directory.mkdir(parents=True, exist_ok=True)
    control = directory / "slow"
    prefix = ("env", f"LD_PRELOAD={make_shim(SHIM, directory)}", f"SLOW_DISK={control}")
    with running(Broker(directory / "broker", config(SLOW), prefix=prefix, workers=WORKERS)) as broker:
        operations = Column(broker, SLOW)
        written = control.with_suffix(".new")
        written.write_text(f"{DELAY_S * 1e6:.0f} {worker_of(broker, FAULTY).pid}")
        written.rename(control)
        with load_on(broker):
            # The first answer is 503, because the disk has only now become slow.
            eventually(lambda: broker.get("/readyz")[0] == 200, "the broker is ready with a slow disk")
            operations.begin()
            time.sleep(DELAY_S)  # so that what only waits goes through a slow sync, too
            return operations.end()


@contextmanager
def load_on(broker: Broker) -> Iterator[None]:
    """The worker always writes something to its disk."""
    ends = threading.Event()

    def send() -> None:
        with suppress(OSError, Closed), RawPeer.connect(broker.amqp_port) as peer:
            handle = peer.attach_sender(BUSY_QUEUE)
            while not ends.is_set():
                peer.transfer(message(b"load"), handle)
                answered(peer, 1)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(DELAY_S / 10)  # the first write is under way
    try:
        yield
    finally:
        ends.set()
        thread.join()


def full(directory: Path, disk: OwnDisk) -> list[Outcome]:
    """The worker's log and its partitions are on a disk of their own, which somebody else has filled."""
    broker = Broker(directory, config(FULL), prefix=disk.prefix, workers=WORKERS)
    broker.start()
    broker.stop()
    for name in ("logs/1", *(f"partitions/{number}" for number in range(1, PARTITIONS, WORKERS))):
        there = disk.path / name
        disk.run("mkdir", "-p", str(there.parent))
        # Zeros stay zeros: a log has written its segments in advance, so that they do not lack room later.
        disk.run("cp", "-a", str(broker.data_dir / name), str(there))
        disk.run("mount", "--bind", str(there), str(broker.data_dir / name))
    with running(broker):
        operations = Column(broker, FULL)
        with disk.kept_full():  # what a log frees would be room
            eventually(lambda: is_refused(broker), "nothing more is taken")
            operations.begin()
            return operations.end()


def frozen(directory: Path) -> list[Outcome]:
    """A cluster, and all processes of the worker's machine stand still. Its kernel acknowledges what it is sent."""
    settings = f"worker_stall_timeout_ms = {STALL_S * 1000:.0f}\n{declared((FROZEN,))}"
    silence = f"heartbeat_timeout_ms = {SILENCE_S * 1000:.0f}\n"
    with Cluster(directory, settings, partitions=PARTITIONS, workers=WORKERS, cluster=silence) as cluster:
        operations = Column(cluster.gateways[0], FROZEN)
        with cluster.of(FAULTY).frozen():
            operations.begin()
            time.sleep(FROZEN_S)
        outcomes = operations.end()
        for machine in cluster.machines:
            assert "Traceback" not in machine.log_file.read_text(), machine.log()
        return outcomes


def is_refused(broker: Broker) -> bool:
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"one more"), peer.attach_sender(BUSY_QUEUE))
        return answered(peer, 1) != ""


def shown(measured: dict[str, list[Outcome]]) -> Cells:
    return {column: [cell(column, each) for each in outcomes] for column, outcomes in measured.items()}


# -- the page

INTRODUCTION = f"""\
# What clients see when a worker has a fault

A broker has {PARTITIONS} partitions and {WORKERS} workers, and one of these (*this worker*) has a fault. The
table of each fault has the operations that end otherwise than usual. The rest is **served as usual**: it works within
{AT_ONCE_S:g} s, and a session that is held stays locked. That holds for all that is on other workers.
[All operations](#what-was-measured) were measured.

*yes* means that the operation works. Otherwise the client gets that condition (without `com.microsoft:`), or that HTTP
status. Then comes the time that it takes: at once ({AT_ONCE}), at most {NOTICED[2:]}, {GONE[2:]} or
{CHECKED[2:]}, until the process is there again (*{REPLACED}*, *{BACK}*), or as long as the disk
(*{DISK}*). T is `worker_stall_timeout_ms`, and H is `cluster.heartbeat_timeout_ms`.

SDKs try again after `server-busy` and `timeout`. After `message-lock-lost` and `session-lock-lost` the message is
delivered again. While a fragment is away for longer, peek shows the messages of the others.
"""


class Fault(NamedTuple):
    title: str
    text: str
    columns: dict[str, str]
    """Those of the measurement, with their heads."""


FAULTS = (
    Fault(
        "The worker is killed",
        """\
The supervisor starts it again at once, and it is back when its log is replayed.

- *Under way*: the worker had got the operation, and nobody knows whether it was done (`timeout`). What may be done
  twice waits until the worker is back, and is done then: to read, to renew, to wait for a session. Of messages without
  a key, the worker then says which it has stored; if it is not back within 8 s, they go to another fragment.
- *Begun while it is away*: the operation waits until the worker is back. So does a change of an entity, which needs all
  workers. If the worker is not back within `worker_restart_wait_ms` (3 s), what waits is refused (`server-busy`), and
  what begins later is refused at once.
""",
        {UNDER_WAY: "under way", AWAY: "begun while it is away"},
    ),
    Fault(
        "The worker hangs",
        """\
The process does nothing. What begins before anyone notices waits. After T/3 + 1 s at most, operations for this worker
are refused (`server-busy`). After T the supervisor replaces it.
""",
        {HUNG: "begun before anyone notices", STALLED: "begun after T/3 + 1 s"},
    ),
    Fault(
        "The disk is slow",
        """\
Each sync of the worker takes long, and so does what needs this worker. `/readyz` was asked before, and so knows how
slow the disk is.
""",
        {SLOW: "answer"},
    ),
    Fault(
        "The disk is full",
        """\
Less than `store.min_free_disk_bytes` is free. What would store something is refused until there is room. What is stored
can be received and settled. The same holds when a store has no room for what it accepted before: at first for its
partition only, and for all of the worker when their log has `store.log_bytes`.
""",
        {FULL: "answer"},
    ),
    Fault(
        "The worker's machine freezes",
        """\
The namespace is on several machines, and that of the worker stands still, or has lost its power or its network. No
connection ends, but no sign of life comes. What is under way then is answered as at the worker's death; what begins
later is refused as busy. If the machine goes on, the worker drops what has come meanwhile. A slow disk is no silence:
signs of life do not wait for it.
""",
        {FROZEN: "under way"},
    ),
)
MEASURED = """\
## What was measured

`python -m tests.partitioned.failure_table` did each of these operations in each failure, and made the tables;
`tests/partitioned/test_failure_table.py` does them again.
"""


AS_USUAL = "as usual"


def usual(operation: Operation) -> str:
    """Its cell when the worker has no fault."""
    return KEPT if operation.title.startswith("hold a session") else f"yes, {AT_ONCE}"


def by_entity(operations: Iterable[Operation]) -> list[str]:
    """A line for each kind of entity."""
    titles: dict[Kind, list[str]] = {}
    for operation in operations:
        titles.setdefault(operation.kind, []).append(operation.title)
    return [f"*{kind.value}*: {'; '.join(names)}" for kind, names in titles.items()]


def table(fault: Fault, cells: Cells) -> str:
    """What is not as usual: operations with the same answers in one row."""
    rows: dict[tuple[str, ...], list[Operation]] = {}
    for number, operation in enumerate(ALL):
        measured = [cells[column][number] for column in fault.columns]
        answers = tuple(AS_USUAL if answer == usual(operation) else answer for answer in measured)
        if {*answers} != {AS_USUAL}:
            rows.setdefault(answers, []).append(operation)
    lines = [["operation", *fault.columns.values()], ["---"] * (1 + len(fault.columns))]
    lines += [["<br>".join(by_entity(operations)), *answers] for answers, operations in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(cells: Cells) -> str:
    parts = [INTRODUCTION]
    parts += [f"## {fault.title}\n\n{fault.text}\n{table(fault, cells)}" for fault in FAULTS]
    parts.append(MEASURED + "\n" + "".join(f"- {line}\n" for line in by_entity(ALL)))
    of_users = section(PAGE.read_text())  # which tests/interop/waits.py has measured
    return "\n".join([*parts, *([of_users] if of_users else [])])


def documented() -> Cells:
    """What the page says."""
    page = PAGE.read_text()
    tables = re.findall(r"(?:^\|.*\n)+", page.removesuffix(section(page)), re.MULTILINE)
    numbers = {(operation.kind.value, operation.title): number for number, operation in enumerate(ALL)}
    cells = {column: [usual(operation) for operation in ALL] for column in COLUMNS}
    for fault, text in zip(FAULTS, tables, strict=True):
        for line in text.splitlines()[2:]:
            operations, *answers = (cell.strip() for cell in line.strip("|").split("|"))
            for of_entity in operations.split("<br>"):
                entity, _, titles = of_entity.partition(": ")
                for title in titles.split("; "):
                    for column, answer in zip(fault.columns, answers, strict=True):
                        if answer != AS_USUAL:
                            cells[column][numbers[entity.strip("*"), title]] = answer
    return cells


def measure_all(directory: Path, say: Callable[[str], None]) -> dict[str, list[Outcome]]:
    say("killed")
    found = {column: killed(directory / column, column) for column in (UNDER_WAY, AWAY)}
    say("hung")
    found |= hung(directory / HUNG)
    say("slow")
    found[SLOW] = slow(directory / SLOW)
    say("full")
    (directory / FULL).mkdir()
    with OwnDisk(directory / FULL) as disk:
        found[FULL] = full(directory / FULL / "broker", disk)
    say("frozen")
    found[FROZEN] = frozen(directory / FROZEN)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.partitioned.failure_table", description=__doc__)
    parser.add_argument("--seconds", action="store_true", help="print the measured times, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="peeklock-failures-") as name:
        measured = measure_all(Path(name), lambda text: print(text, flush=True))
    if options.seconds:
        for number, operation in enumerate(ALL):
            seconds = " ".join(f"{measured[column][number].seconds:8.3f}" for column in COLUMNS)
            print(f"{seconds}  {operation.kind.value}: {operation.title}")
    PAGE.write_text(render(shown(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
