"""The journal's process, killed while workers write their logs."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from broker.child import Instructions
from broker.settings.config import Settings
from broker.settings.stores import Journal, JournalMode
from storage.data_dir import RUN
from storage.log.follower import durable_lsn, position_path, read_position
from tests.brokers import REPOSITORY
from tests.journal.journaled import journaled, logged, wanted
from tests.patience import PATIENCE_S

WRITER = Path(__file__).parent / "journaled.py"


class Process:
    """As the supervisor starts it."""

    def __init__(self, directory: Path, workers: int) -> None:
        settings = Settings(data_dir=directory, partitions=4, workers=workers, journal=Journal(mode=JournalMode.BODIES))
        instructions = Instructions(
            settings=settings,
            supervisor=os.getpid(),
            gateway=None,
            worker=None,
            partitions=(),
            sockets=(),
            restarts=0,
            journal_socket=f"{RUN}/journal.reports.sock",
            directory=str(directory),
        )
        command = [sys.executable, "-m", "broker.journal"]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY
        )
        self.child.stdin.write(instructions.to_json().encode() + b"\n")
        self.child.stdin.close()
        while (line := self.child.stdout.readline()) == b"\n":  # signs of life
            pass
        assert line == b'{"ready": true}\n'

    def end(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        self.child.stdout.close()
        return self.child.wait(timeout=PATIENCE_S)


def test_killed_again_and_again_every_row_comes_once(tmp_path):
    (tmp_path / RUN).mkdir()
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print("seed", seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(WRITER.parent)))}
    writers = [
        subprocess.Popen(
            [sys.executable, str(WRITER), str(tmp_path), str(worker), str(seed), "1200"],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for worker in (0, 1)
    ]
    kills = 0
    while any(writer.poll() is None for writer in writers) or kills < 4:
        process = Process(tmp_path, 2)
        time.sleep(chance.uniform(0, 0.7))  # it may be killed anywhere
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
        kills += 1
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdout.close()
    process = Process(tmp_path, 2)
    assert process.end() == 0, "it drains the logs before it ends"
    for worker in (0, 1):
        payloads = list(logged(tmp_path, worker))
        assert read_position(position_path(tmp_path, worker)).lsn == durable_lsn(tmp_path, worker)
        for partition in (worker, worker + 2):
            rows = journaled(tmp_path, partition)
            assert rows == wanted(payloads, partition)
            assert len(rows) > 1000
