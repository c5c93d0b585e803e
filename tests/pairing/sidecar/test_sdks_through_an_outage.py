"""The SDKs of four languages, unmodified, send through a sidecar while the primary is killed and started again."""

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from tests.brokers import Broker
from tests.interop.sdks import OUTAGES
from tests.interop.test_interop import ensure
from tests.pairing.conftest import taken
from tests.pairing.sidecar.conftest import Pair

pytestmark = [pytest.mark.interop, pytest.mark.slow]

SECONDS = 30
BEFORE_S = 3.0
AWAY_S = 6.0
END_S = 90.0
QUEUES = "".join(f'[[queues]]\nname = "{name}"\nrequires_duplicate_detection = true\n' for name in OUTAGES)


class Sender:
    """A program that sends to the queue of its own name."""

    def __init__(self, directory: Path, name: str, connection_string: str) -> None:
        self.name = name
        self._out, self._err = directory / f"{name}.out", directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [*map(str, OUTAGES[name].command), connection_string, name, str(SECONDS)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def accepted(self) -> list[int]:
        return [int(line) for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def told(self, text: str) -> str:
        return f"{self.name}: {text}\n{self._err.read_text()[-2000:]}"


def test_each_accepted_message_is_in_the_primary_or_in_the_backlog(tmp_path, secondary):
    for program in OUTAGES.values():
        ensure(program.toolchain)
    away = Broker(tmp_path / "primary", QUEUES)
    with away, Pair(tmp_path, away, secondary, "sdks") as pair:
        senders = [Sender(tmp_path, name, pair.connection_string()) for name in OUTAGES]
        try:
            until = time.monotonic() + SECONDS / 2
            while not all(sender.accepted for sender in senders):
                assert time.monotonic() < until, "not all programs send"
                time.sleep(0.1)
            time.sleep(BEFORE_S)
            before = {sender.name: sender.accepted[-1] for sender in senders}
            away.kill()
            time.sleep(AWAY_S)
            away.start()
            for sender in senders:
                assert sender.process.wait(END_S) == 0, sender.told("it has failed")
        finally:
            for sender in senders:
                sender.process.kill()
                sender.process.wait()
        backlog = [each for queue in pair.queues for each in asyncio.run(taken(secondary, queue))]
        for sender in senders:
            mine = [each for each in backlog if each.application_properties["x-ms-path"] == sender.name]
            here = {int(str(each.message_id)) for each in mine}
            there = [int(str(each.message_id)) for each in asyncio.run(taken(away, sender.name))]
            assert len(there) == len(set(there)), sender.told("a message is there twice")
            assert set(sender.accepted) <= here | set(there), sender.told("a message is lost")
            assert here, sender.told("nothing is in the backlog")
            assert max(there) > max(here) > before[sender.name], sender.told("it has not come back")
