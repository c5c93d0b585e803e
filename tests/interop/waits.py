"""Measures what users of each SDK wait when processes of a broker are killed: `python -m tests.interop.waits`.

A broker with one worker and one gateway. For each SDK a program of its own has users, each of which does one kind of
operation, once in 0.4 s, with the SDK's default settings. When all users have begun, the worker is killed, then the
gateway, and at last the whole broker, which is started again at once. What a user waits is the longest of its calls
that ended after the kill, until all are served again. A call may fail: the SDK has given up, or the broker has said
that a lock is lost. It counts as the others do, and its error is named.

The programs are `python/waits.py`, `javascript/waits.js`, `go/waits`, `Waits.java` and `dotnet/azure/Waits.cs`. rhea,
Proton, AMQP.Net Lite and Qpid JMS never try an operation again: what their users see is what the broker answers.

Prints a table for each of the three, as docs/failures.md has them; with `--write` they are put there. On a machine that
does other work as well it takes no longer, but the figures are of that machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.client.connection import connect_to
from protocol.client.messages import Message
from tests.brokers import REPOSITORY, Broker
from tests.end_to_end.health import is_ready
from tests.interop.harness import CannotListen, SecureBroker, trust
from tests.interop.sdks import WAITS, Program
from tests.patience import PATIENCE_S, eventually

PAGE = REPOSITORY / "docs" / "failures.md"
USERS = 8
PERIOD_S = 0.4
OPERATIONS = {
    "send": "send",
    "receive": "receive",
    "complete": "complete",
    "accept": "accept a session",
    "renew": "renew a lock",
    "administer": "create or delete a queue",
}
FAULTS = {
    "worker": "the worker is killed",
    "gateway": "the gateway is killed",
    "broker": "the whole broker is killed, and started at once",
}
STORED = 5_000  # messages to receive, and to complete: more than all users take
AROUND_S = 2.0  # without a fault, before the kill and after all are served again
SERVED = 2  # operations of each user that began after the broker was ready

TITLE = "## What users of SDKs wait"
INTRODUCTION = f"""\
{USERS} users of each operation do it once in {PERIOD_S:g} s each, with the default settings of the SDK, while a process
of the broker is killed once. The times are the median and the largest of what these users waited: for each, its longest
call from the kill on. Behind them are the errors that users got: with the worker or the gateway, locks are lost. The
broker has one worker and one gateway; `make waits` has measured it."""

CONFIG = (
    "gateways = 1\n"
    + "".join(
        f'[[queues]]\nname = "waits-{name}"\nlock_duration_ms = 300000\n'
        for name in ("send", "receive", "complete", "renew")
    )
    + '[[queues]]\nname = "waits-accept"\nrequires_session = true\n'
)


@dataclass(frozen=True)
class Limits:
    """In seconds. JavaScript's SDK tries again after 30 s, and all together take ten minutes at most."""

    settled: float = 1.0  # a user for whom an operation takes so long is not served yet
    most: float = 40.0  # after a kill: who is not served by then waits longer than this
    begins: float = 60.0  # until all users of a program have begun


User = tuple[str, int]
"""Its operation, and its number."""


@dataclass(frozen=True)
class Call:
    """Times are those of the system's clock, which all programs have."""

    began: float
    seconds: float
    error: str

    @property
    def ended(self) -> float:
        return self.began + self.seconds


@dataclass(frozen=True)
class Cell:
    """What the users of one operation have waited in seconds, and the errors that they got."""

    waits: tuple[float, ...]
    unserved: int = 0  # users that were not served when the time was over
    errors: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = f"{statistics.median(self.waits):.1f} s, {max(self.waits):.1f} s"
        if self.unserved:
            shown += f", {self.unserved} not served"
        named = ", ".join(f"{count} `{error}`" for error, count in sorted(self.errors.items()))
        return f"{shown}; {named}" if named else shown


Row = dict[str, Cell]
"""Operation → what was measured of one SDK, with one fault."""


class Users:
    """A program that runs, and what it has reported."""

    def __init__(self, program: Program, broker: SecureBroker, operations: Sequence[str], errors: Path) -> None:
        self.expected = [(operation, number) for operation in operations for number in range(USERS)]
        config = {
            "connection_string": broker.connection_string,
            "secure": broker.secure_connection_string,
            "authority": str(broker.authority.certificate_file),
            "users": USERS,
            "period_s": PERIOD_S,
            "operations": operations,
        }
        environment = {**os.environ, **trust(broker), "PEEKLOCK_INTEROP": json.dumps(config)}
        self._errors = errors
        with errors.open("wb") as terminal:
            self._process = subprocess.Popen(
                program.command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._lock = threading.Lock()
        self._calls: dict[User, list[Call]] = defaultdict(list)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            if not line.startswith(b"{"):
                continue
            said = json.loads(line)
            call = Call(said["began"], said["seconds"], said["error"])
            with self._lock:
                self._calls[said["operation"], said["user"]].append(call)

    def calls(self, after: float) -> dict[User, list[Call]]:
        """Those of each user that ended after this time."""
        with self._lock:
            return {user: [each for each in self._calls[user] if each.ended > after] for user in self.expected}

    def unserved(self, after: float, settled_s: float) -> list[User]:
        """Users of whom so many operations in a row have not succeeded that began after this time."""
        calls = self.calls(after)
        return [user for user in self.expected if not is_served(calls[user], after, settled_s)]

    def await_served(self, after: float, limit_s: float, settled_s: float) -> list[User]:
        """Returns who is not served in time. Raises RuntimeError if the program has ended."""
        until = time.time() + limit_s
        while (unserved := self.unserved(after, settled_s)) and time.time() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the program has ended\n{self.terminal()}")
            time.sleep(0.1)
        return unserved

    def terminal(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._output.close()


def is_served(calls: Sequence[Call], after: float, settled_s: float) -> bool:
    """The last of these calls began after this time, succeeded and were fast."""
    last = calls[-SERVED:]
    return len(last) == SERVED and all(
        not each.error and each.began > after and each.seconds < settled_s for each in last
    )


def measured(calls: Mapping[User, Sequence[Call]], unserved: Iterable[User], killed: float, until: float) -> Row:
    """Of the calls that ended after the kill and began before `until`. Who has no such call waits until then."""
    waits: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, Counter[str]] = defaultdict(Counter)
    for (operation, _), of_user in calls.items():
        concerned = [each for each in of_user if killed < each.ended and each.began < until]
        waits[operation].append(max((each.seconds for each in concerned), default=until - killed))
        errors[operation].update(each.error for each in concerned if each.error)
    count = Counter(operation for operation, _ in unserved)
    return {name: Cell(tuple(waits[name]), count[name], dict(errors[name])) for name in waits}


# -- the broker


def kill(broker: Broker, fault: str) -> None:
    """Returns when the broker is ready again."""
    if fault == "broker":
        broker.kill()
        broker.wait_until_ready(broker.begin())
        return
    victim = broker.worker() if fault == "worker" else broker.gateway()
    victim.kill()
    victim.wait(PATIENCE_S)  # what is ready from now on is the next process
    eventually(lambda: is_ready(broker), "it is back")


async def _store(broker: Broker, queue: str, count: int) -> None:
    connection = await connect_to(broker.connection_string)
    async with connection:
        sender = await connection.sender(queue)
        for _ in range(0, count, 500):
            await asyncio.gather(*(sender.send(Message.of(b"m").encode()) for _ in range(500)))


def store(broker: Broker) -> None:
    for queue, count in (("waits-receive", STORED), ("waits-complete", STORED), ("waits-renew", STORED // 10)):
        asyncio.run(_store(broker, queue, count))


# -- what is measured


def measure(
    sdk: str,
    directory: Path,
    faults: Sequence[str],
    operations: Sequence[str],
    say: Callable[[str], None],
    limits: Limits = Limits(),
) -> dict[str, Row]:
    """Fault → row. Raises RuntimeError, with what the program wrote on its terminal."""
    rows: dict[str, Row] = {}
    broker = SecureBroker(directory / "broker", CONFIG, workers=1)
    with broker:
        store(broker)
        users = Users(WAITS[sdk], broker, operations, directory / "terminal")
        try:
            if idle := users.await_served(0.0, limits.begins, limits.settled):
                raise RuntimeError(f"{sdk}: {idle} did not begin\n{users.terminal()}")
            for fault in faults:
                time.sleep(AROUND_S)
                killed = time.time()
                kill(broker, fault)
                ready = time.time()
                unserved = users.await_served(ready, limits.most, limits.settled)
                until = time.time()
                rows[fault] = measured(users.calls(killed), unserved, killed, until)
                say(f"{sdk}: {fault}: ready after {ready - killed:.1f} s, served after {until - killed:.1f} s")
                if unserved:
                    say(f"{sdk}: {fault}: not served: {unserved}\n{users.terminal()}")
        finally:
            users.close()
    return rows


def render(rows: Mapping[str, Mapping[str, Row]]) -> str:
    """`rows`: SDK → fault → row."""
    parts = [f"{TITLE}\n\n{INTRODUCTION}"]
    for fault, title in FAULTS.items():
        measured_of = {sdk: row[fault] for sdk, row in rows.items() if fault in row}
        if not measured_of:
            continue
        names = [name for name in OPERATIONS if any(name in row for row in measured_of.values())]
        lines = [[title, *(OPERATIONS[name] for name in names)], ["---"] * (len(names) + 1)]
        lines += [[sdk, *(str(row.get(name, "-")) for name in names)] for sdk, row in measured_of.items()]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def section(page: str) -> str:
    """What the page has from TITLE on; empty if it has nothing."""
    at = page.find(f"\n{TITLE}\n")
    return "" if at < 0 else page[at + 1 :]


def written(page: str, rendered: str) -> str:
    return page.removesuffix(section(page)).rstrip("\n") + "\n\n" + rendered


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tests.interop.waits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sdks", nargs="*", metavar="SDK", help=f"of {', '.join(WAITS)} (default: all)")
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], default=[*FAULTS])
    parser.add_argument("--operations", nargs="+", choices=[*OPERATIONS], default=[*OPERATIONS])
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(REPOSITORY)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.sdks) - {*WAITS}:
        parser.error(f"no SDK has the name {', '.join(sorted(unknown))}")
    failures = []
    rows: dict[str, dict[str, Row]] = {}
    for sdk in options.sdks or WAITS:
        try:
            WAITS[sdk].toolchain.ensure()
            with tempfile.TemporaryDirectory(prefix="peeklock-waits-") as name:
                rows[sdk] = measure(sdk, Path(name), options.faults, options.operations, say)
        except (RuntimeError, OSError, subprocess.SubprocessError, CannotListen) as failure:
            say(f"{sdk}: {failure}")
            failures.append(sdk)
    rendered = render(rows)
    print(rendered)
    if options.write and not failures:
        PAGE.write_text(written(PAGE.read_text(), rendered))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
