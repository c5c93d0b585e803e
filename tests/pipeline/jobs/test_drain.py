"""The backlog of a pairing drained by a job, with two real brokers: what it brings, and what faults leave."""

import asyncio
import re
import threading
import time
from collections import defaultdict
from random import Random

import pyarrow.parquet as pq
import pytest

from broker.administration.address import Address
from broker.pairing.aliases import to_backlog
from broker.pairing.backlog import backlog_queues, lease_queue
from broker.pairing.pairing import Namespace
from broker.pairing.provisioning import create_missing
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from tests.brokers import Broker
from tests.pipeline.programs import Program

pytest.importorskip("pyspark")

from pipeline.jobs import drain

NAME = "main"
QUEUES = backlog_queues(NAME, 2)
ENTITIES = """
[[queues]]
name = "orders"
requires_duplicate_detection = true
[[queues]]
name = "talks"
requires_session = true
requires_duplicate_detection = true
[[topics]]
name = "news"
requires_duplicate_detection = true
[[topics.subscriptions]]
name = "all"
"""
SESSIONS = 9


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


def in_broker(broker, work):
    async def connected():
        async with await connect_to(broker.connection_string) as connection:
            return await work(connection)

    return asyncio.run(connected())


def fill(secondary, count, run, entities=("orders", "talks", "news")):
    """As paired senders do it while the primary is away: each entity's sessions through one of the backlog queues."""
    chance = Random(count)
    parts = defaultdict(list)
    for number in range(count):
        entity = chance.choice(entities)
        session = chance.randrange(SESSIONS) if entity == "talks" else None
        group = None if session is None else f"s{session}"
        message = Message.of(b"%d" % number, message_id=f"{run}-{number}", group_id=group)
        queue = QUEUES[(session if session is not None else number) % len(QUEUES)]
        parts[queue].append(to_backlog(message.encode(), entity))

    async def send(connection):
        host = Namespace(secondary.connection_string, http=Address("http", "localhost", secondary.http_port))
        async with host.management() as client:
            await create_missing(client, NAME, len(QUEUES))
        for queue, messages in parts.items():
            sender = await connection.sender(queue)
            for start in range(0, len(messages), 200):
                await sender.send(pack_batch(messages[start : start + 200]), is_batch=True)

    in_broker(secondary, send)


def taken(primary):
    """The numbers of all messages in the primary, by entity and session, in their order; they are received."""
    found = defaultdict(list)

    async def take(connection):
        for path in ("orders", "news/subscriptions/all"):
            receiver = await connection.receiver(path, credit=0, receive_and_delete=True)
            while received := await receiver.fetch(1000, 0.2):
                found[path] += [int(each.message().content()) for each in received]
        while (session := await connection.accept_next_session("talks", 0.2)) is not None:
            async with session:
                while received := await session.fetch(1000, 0.2):
                    found[session.session_id] += [int(each.message().content()) for each in received]
                    await session.accept_all(received)

    in_broker(primary, take)
    return found


def left(secondary):
    async def work(connection):
        counts = [await (await connection.management(queue)).counts() for queue in QUEUES]
        return sum(each.active + each.dead_lettered for each in counts)

    return in_broker(secondary, work)


def moved(primary):
    async def work(connection):
        return sum(each.active for each in (await connection.counts()).values())

    return in_broker(primary, work)


def check_all_are_there_once(primary, count):
    found = taken(primary)
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(count))
    sessions = [f"s{n}" for n in range(SESSIONS)]
    assert set(found) == {"orders", "news/subscriptions/all", *sessions}
    for session in sessions:
        assert found[session] == sorted(found[session])


def test_first_it_counts_and_then_it_drains(spark, primary, secondary, arguments, tmp_path, capsys):
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
    assert [(row["queue"], row["end"]) for row in sorted(queues, key=lambda row: row["queue"])] == [
        (queue, "drained") for queue in QUEUES
    ]
    assert sum(row["moved"] for row in queues) == 600
    assert "drained" in (tmp_path / "out" / "report.html").read_text()


def test_a_driver_killed_in_the_middle_loses_and_doubles_nothing(spark, primary, secondary, arguments, tmp_path):
    fill(secondary, 6000, "killed")
    driver = Program(tmp_path, "jobs", "run", "drain", *arguments, "--apply", "--rate", "2000")
    try:
        while not moved(primary):
            assert driver.process.poll() is None, driver.log
            time.sleep(0.01)
    finally:
        driver.kill()
    assert left(secondary) > 0
    assert drain.main([*arguments, "--apply"]) == 0
    assert left(secondary) == 0
    check_all_are_there_once(primary, 6000)


def test_a_syphon_waits_for_the_leases_and_the_job_for_those_of_a_syphon(
    spark, primary, secondary, arguments, tmp_path, capsys
):
    fill(secondary, 800, "both")
    both = ["--primary", primary.connection_string, "--secondary", secondary.connection_string]
    both += ["--primary-http", f"http://localhost:{primary.http_port}", "--primary-name", NAME, "--backlog-queues", "2"]
    both += ["--secondary-http", f"http://localhost:{secondary.http_port}"]
    syphons = []

    def start_syphon():
        while not moved(primary):
            time.sleep(0.01)
        syphons.append(Program(tmp_path, "syphon", *both))

    thread = threading.Thread(target=start_syphon)
    thread.start()
    assert drain.main([*arguments, "--apply", "--rate", "200"]) == 0
    thread.join()
    [syphon] = syphons
    try:
        assert "800 messages moved to main, 0 are left" in capsys.readouterr().out
        check_all_are_there_once(primary, 800)
        # Now the syphon gets the leases that the job has given back, and the job does not.
        while len(re.findall("lease taken", syphon.log)) < len(QUEUES):
            assert syphon.process.poll() is None, syphon.log
            time.sleep(0.05)
        assert drain.main([*arguments, "--apply", "--wait-for-lease", "0"]) == 3
        assert "2 of 2 queues were not drained to their end" in capsys.readouterr().out
    finally:
        syphon.kill()
    queues = pq.read_table(tmp_path / "out" / "queues").to_pylist()
    assert {row["end"] for row in queues} == {"another syphon has its lease"}


def test_a_job_that_loses_its_lease_stops_and_one_that_moves_nothing_gives_up(
    spark, primary, secondary, arguments, tmp_path
):
    fill(secondary, 400, "lost", ["orders"])

    def take_lease_away():
        async def delete():
            host = Namespace(secondary.connection_string, http=Address("http", "localhost", secondary.http_port))
            async with host.management() as client:
                await client.delete(lease_queue(NAME))

        while not moved(primary):
            time.sleep(0.01)
        asyncio.run(delete())

    thread = threading.Thread(target=take_lease_away)
    thread.start()
    assert drain.main([*arguments, "--apply", "--rate", "40"]) == 3
    thread.join()
    queues = pq.read_table(tmp_path / "out" / "queues").to_pylist()
    assert "its lease was lost" in {row["end"] for row in queues}
    assert left(secondary) > 0

    primary.stop()
    assert drain.main([*arguments, "--apply", "--patience", "1"]) == 3
    queues = pq.read_table(tmp_path / "out" / "queues").to_pylist()
    assert {(row["end"], row["text"]) for row in queues} >= {("nothing moved any more", "the primary is away")}
    primary.start()
    assert drain.main([*arguments, "--apply"]) == 0
    assert sorted(taken(primary)["orders"]) == list(range(400))
