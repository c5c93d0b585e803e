"""The backlog of a pairing drained by a job of Spark, with two real brokers."""

import re
import time

import pyarrow.parquet as pq
import pytest

from tests.brokers import Broker
from tests.caller import KILL_DRIVERS
from tests.pipeline.backlogs import ENTITIES, NAME, QUEUES, SESSIONS, arrived, check_all_are_there_once, fill, left
from tests.pipeline.programs import Program

pytest.importorskip("pyspark")

from pipeline.jobs import drain


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("primary"), ENTITIES) as broker:
        yield broker


@pytest.fixture(scope="module")
def secondary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("secondary")) as broker:
        yield broker


@pytest.fixture
def arguments(primary, secondary, tmp_path):
    found = ["--primary-name", NAME, "--backlog-queues", "2", "--output", str(tmp_path / "out")]
    for side, broker in (("primary", primary), ("secondary", secondary)):
        (tmp_path / side).write_text(broker.connection_string + "\n")
        found += [f"--{side}-file", str(tmp_path / side), f"--{side}-http", f"http://localhost:{broker.http_port}"]
    return found


def test_first_it_counts_and_then_it_drains(quick, primary, secondary, arguments, tmp_path, capsys):
    assert drain.main(arguments) == 0
    assert "Dry run, nothing was changed: 0 messages are in the backlog of main." in capsys.readouterr().out
    fill(secondary, 600, "first")
    assert drain.main(arguments) == 0
    assert "Dry run, nothing was changed: 600 messages are in the backlog of main." in capsys.readouterr().out
    assert left(secondary) == 600
    before = pq.read_table(tmp_path / "out" / "before").to_pylist()
    assert {(row["queue"], row["entity"]) for row in before} == {
        (queue, entity) for queue in QUEUES for entity in ("orders", "talks", "news")
    }
    assert sum(row["sessions"] for row in before) == SESSIONS

    assert drain.main([*arguments, "--apply"]) == 0
    assert "600 messages moved to main, 0 are left in its backlog." in capsys.readouterr().out
    assert left(secondary) == 0
    check_all_are_there_once(primary, 600)
    queues = pq.read_table(tmp_path / "out" / "queues").to_pylist()
    assert sorted((row["queue"], row["end"]) for row in queues) == [(queue, "drained") for queue in QUEUES]
    assert sum(row["moved"] for row in queues) == 600
    assert "drained" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.skipif(not KILL_DRIVERS, reason="make kill-drivers")
def test_a_driver_killed_in_the_middle_loses_and_doubles_nothing_while_a_syphon_waits(
    quick, primary, secondary, arguments, tmp_path, capsys
):
    fill(secondary, 6000, "killed")
    both = ["--primary", primary.connection_string, "--secondary", secondary.connection_string]
    both += ["--primary-http", f"http://localhost:{primary.http_port}", "--primary-name", NAME, "--backlog-queues", "2"]
    both += ["--secondary-http", f"http://localhost:{secondary.http_port}"]
    driver = Program(tmp_path / "driver", "jobs", "run", "drain", *arguments, "--apply", "--rate", "250")
    syphon = None
    try:
        while not arrived(primary):
            assert driver.process.poll() is None, driver.log
            time.sleep(0.01)
        syphon = Program(tmp_path / "syphon", "syphon", *both)
        assert left(secondary) > 0
        driver.kill()
        # Now the syphon gets the leases, and another job does not.
        while len(re.findall("lease taken", syphon.log)) < len(QUEUES):
            assert syphon.process.poll() is None, syphon.log
            time.sleep(0.05)
        assert drain.main([*arguments, "--apply", "--wait-for-lease", "0"]) == 3
        assert "2 of 2 queues were not drained to their end" in capsys.readouterr().out
        queues = pq.read_table(tmp_path / "out" / "queues").to_pylist()
        assert {row["end"] for row in queues} == {"another syphon has its lease"}
        while left(secondary):
            time.sleep(0.05)
    finally:
        driver.kill()
        if syphon is not None:
            syphon.kill()
    check_all_are_there_once(primary, 6000)
