"""While a worker brings its stores up to date, readiness and the log say so."""

import json
import os
import re
from pathlib import Path

from broker.starting import Phase, Starting, phase_of
from storage.log.recovery import log_directory
from storage.log.segments import segment_path
from tests.brokers import Broker
from tests.end_to_end.health import serves
from tests.patience import PATIENCE_S, eventually

CONFIG = '[[queues]]\nname = "witness"\n'


def test_a_phase_is_read_until_the_worker_serves(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.starting"
    assert phase_of(path) is None
    starting = Starting(path)
    for phase in Phase:
        starting.enter(phase)
        assert phase_of(path) is phase
    starting.done()
    assert phase_of(path) is None
    starting.done()


def test_a_phase_that_cannot_be_written_or_makes_no_sense_is_unknown(tmp_path: Path) -> None:
    Starting(tmp_path / "missing" / "worker-0.starting").enter(Phase.OPENING)
    assert phase_of(tmp_path / "missing" / "worker-0.starting") is None
    for content in (b"", b"\xff", b"nonsense"):
        (tmp_path / "file").write_bytes(content)
        assert phase_of(tmp_path / "file") is None


def test_while_a_worker_replays_its_log_readiness_says_so(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG, arguments=("--emulator", "--partitions", "2"), workers=1) as broker:
        serves(broker.amqp_port)
        # Who opens it waits for somebody who writes to it: a replay that takes as long as we like.
        pipe = segment_path(log_directory(broker.data_dir, 0), 99)
        os.mkfifo(pipe)
        killed = broker.worker()
        killed.kill()
        killed.wait(PATIENCE_S)

        def says_why() -> bool:
            status, body = broker.get("/readyz")
            assert status == 503, body
            return set(json.loads(body)["partitions"].values()) == {str(Phase.REPLAYING)}

        eventually(says_why, "readiness says what the worker does")
        assert broker.get("/livez")[0] == 200
        pipe.unlink()
        broker.worker().kill()
        eventually(lambda: broker.get("/readyz")[0] == 200, "ready again")
        serves(broker.amqp_port)
        assert not [*(broker.data_dir / "run").glob("*.starting")]


def test_the_log_says_that_a_killed_brokers_stores_are_brought_up_to_date(tmp_path: Path) -> None:
    def told() -> list[str]:
        return re.findall(r"bringing its stores up to date|stores are up to date", broker.log_file.read_text())

    with Broker(tmp_path, CONFIG, arguments=("--emulator", "--partitions", "2"), workers=1) as broker:
        broker.restart()
        assert told() == []  # it was stopped
        serves(broker.amqp_port)
        broker.kill()
        broker.start()
        assert told() == ["bringing its stores up to date", "stores are up to date"]
        serves(broker.amqp_port)
