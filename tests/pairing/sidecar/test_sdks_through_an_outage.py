"""The SDKs of four languages, unmodified, send through a sidecar while the primary is killed and started again."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.client.messages import Message
from tests.brokers import Broker
from tests.interop.sdks import OUTAGES, PYTHON_OUTAGES, Program
from tests.interop.test_interop import ensure
from tests.pairing.conftest import taken
from tests.pairing.sidecar.conftest import Pair

pytestmark = pytest.mark.interop

SECONDS = 600  # of the programs, which the test ends before
BEFORE_S = 3.0
AWAY_S = 6.0
STEP_S = 120.0  # on a busy machine, a program takes half a minute to start
QUEUES = "".join(f'[[queues]]\nname = "{name}"\nrequires_duplicate_detection = true\n' for name in OUTAGES)


class Running:
    """A program that uses the queue of its own name."""

    def __init__(self, directory: Path, name: str, program: Program, connection_string: str) -> None:
        self.name = name
        self._out, self._err = directory / f"{name}.out", directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [*map(str, program.command), connection_string, name, str(SECONDS)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def accepted(self) -> list[int]:
        """What a program that only sends has printed."""
        return [int(line) for line in self.lines]

    def numbers(self, what: str) -> set[int]:
        """What a program that does several things has printed of one of them."""
        return {int(number) for each, number in map(str.split, self.lines) if each == what}

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def told(self, text: str) -> str:
        return f"{self.name}: {text}\n{self.errors[-2000:]}"


def numbers(messages: list[Message]) -> list[int]:
    return [int(str(each.message_id)) for each in messages]


def wait_for(check: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + STEP_S
    while not check():
        assert time.monotonic() < until, otherwise
        time.sleep(0.1)


def wait_for_progress(senders: list[Running], otherwise: str) -> None:
    since = {sender.name: sender.accepted[-1] for sender in senders}
    wait_for(lambda: all(sender.accepted[-1] > since[sender.name] for sender in senders), otherwise)


def test_each_accepted_message_is_in_the_primary_or_in_the_backlog(tmp_path, secondary):
    for program in OUTAGES.values():
        ensure(program.toolchain)
    away = Broker(tmp_path / "primary", QUEUES)
    with away, Pair(tmp_path, away, secondary, "sdks") as pair:
        senders = [Running(tmp_path, name, program, pair.connection_string()) for name, program in OUTAGES.items()]
        try:
            wait_for(lambda: all(sender.accepted for sender in senders), "not all programs send")
            time.sleep(BEFORE_S)  # they send meanwhile
            before = {sender.name: sender.accepted[-1] for sender in senders}
            away.kill()
            time.sleep(AWAY_S)  # their sends fail, and the sidecar fails over
            wait_for_progress(senders, "not all programs send without the primary")
            since = {sender.name: sender.accepted[-1] for sender in senders}
            away.start()
            primary: dict[str, list[int]] = {sender.name: [] for sender in senders}

            def have_come_back() -> bool:
                for sender in senders:
                    primary[sender.name] += numbers(asyncio.run(taken(away, sender.name)))
                return all(max(primary[name], default=0) > since[name] for name in primary)

            wait_for(have_come_back, "not all programs send to the primary again")
            for sender in senders:
                assert sender.process.poll() is None, sender.told("it has ended")
        finally:
            for sender in senders:
                sender.process.kill()
                sender.process.wait()
        backlog = [each for queue in pair.queues for each in asyncio.run(taken(secondary, queue))]
        for sender in senders:
            mine = [each for each in backlog if each.application_properties["x-ms-path"] == sender.name]
            here = set(numbers(mine))
            there = primary[sender.name] + numbers(asyncio.run(taken(away, sender.name)))
            assert len(there) == len(set(there)), sender.told("a message is there twice")
            assert set(sender.accepted) <= here | set(there), sender.told("a message is lost")
            assert here, sender.told("nothing is in the backlog")
            assert max(there) > max(here) > before[sender.name], sender.told("it has not come back")


def test_pythons_senders_and_receivers_try_again(tmp_path, secondary):
    """They read errors by position, and told `list index out of range` to the program when a field was missing."""
    for program in PYTHON_OUTAGES.values():
        ensure(program.toolchain)
    queues = "".join(f'[[queues]]\nname = "{name}"\nrequires_duplicate_detection = true\n' for name in PYTHON_OUTAGES)
    away = Broker(tmp_path / "primary", queues)
    with away, Pair(tmp_path, away, secondary, "pythons") as pair:
        programs = [Running(tmp_path, *each, pair.connection_string()) for each in PYTHON_OUTAGES.items()]

        def go_on(*whats: str) -> None:
            wanted = [(each, what) for each in programs for what in whats]
            last = [max(each.numbers(what), default=-1) for each, what in wanted]

            def have_gone_on() -> bool:
                now = [max(each.numbers(what), default=-1) for each, what in wanted]
                return all(one > other + 5 for one, other in zip(now, last, strict=True))

            wait_for(have_gone_on, "\n".join(each.told(f"not all of {whats}") for each in programs))

        try:
            go_on("sent", "received")
            for _ in range(2):
                away.kill()
                go_on("sent")
                away.start()
                go_on("sent", "received")
            for each in programs:
                assert each.process.poll() is None, each.told("it has ended")
                assert "list index out of range" not in each.errors, each.told("it reads what is not there")
                assert "IndexError" not in each.errors, each.told("it reads what is not there")
        finally:
            for each in programs:
                each.process.kill()
                each.process.wait()
