"""One backlog queue drained as a task does it, with two real brokers: leases, faults and what they leave."""

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from broker.pairing.backlog import lease_queue
from broker.pairing.syphon.checks import check
from broker.pairing.syphon.options import SyphonOptions
from pipeline.jobs.draining import End, Plan, drain
from pyspark_peeklock.options import Access
from tests.brokers import REPOSITORY, Broker
from tests.pipeline.backlogs import (
    ENTITIES,
    NAME,
    QUEUES,
    arrived,
    check_all_are_there_once,
    fill,
    in_broker,
    left,
    namespace,
    taken,
)

TASK = "import pickle, sys; from pipeline.jobs.draining import drain; drain(*pickle.load(sys.stdin.buffer))"


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("primary"), ENTITIES) as broker:
        yield broker


@pytest.fixture(scope="module")
def secondary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("secondary")) as broker:
        yield broker


@pytest.fixture
def plan(primary, secondary, tmp_path):
    accesses = []
    for side, broker in (("primary", primary), ("secondary", secondary)):
        (tmp_path / side).write_text(broker.connection_string)
        accesses.append(Access(str(tmp_path / side), None))
    found = asyncio.run(check(namespace(primary), namespace(secondary), NAME, SyphonOptions(len(QUEUES))))
    return Plan(*accesses, found, rate=None, lease_wait_s=30.0, patience_s=30.0)


def drain_all(plan):
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda queue: drain(queue, plan), QUEUES))


def test_a_task_killed_in_the_middle_loses_and_doubles_nothing(primary, secondary, plan):
    fill(secondary, 3000, "killed")
    tasks = []
    for queue in QUEUES:
        task = subprocess.Popen([sys.executable, "-c", TASK], stdin=subprocess.PIPE, cwd=REPOSITORY)
        task.stdin.write(pickle.dumps((queue, replace(plan, rate=2000.0))))
        task.stdin.close()
        tasks.append(task)
    while not arrived(primary):
        time.sleep(0.01)
    for task in tasks:
        task.kill()
        task.wait()
    assert left(secondary) > 0
    assert {each.end for each in drain_all(plan)} == {End.DRAINED}
    assert left(secondary) == 0
    check_all_are_there_once(primary, 3000)


def test_nobody_drains_a_queue_whose_lease_another_has(primary, secondary, plan):
    fill(secondary, 200, "leased")

    async def hold(connection):
        lease = await connection.accept_session(lease_queue(NAME), QUEUES[0].rpartition("/")[2])
        found = await asyncio.to_thread(drain_all, replace(plan, lease_wait_s=0.0))
        assert left(secondary) > 0
        waiting = asyncio.create_task(asyncio.to_thread(drain, QUEUES[0], plan))
        await lease.close()
        return [*found, await waiting]

    first, second, again = in_broker(secondary, hold)
    assert (first.end, first.moved) == (End.LEASED, 0)
    assert (second.end, again.end) == (End.DRAINED, End.DRAINED)
    assert second.moved + again.moved == 200
    check_all_are_there_once(primary, 200)


def test_a_task_that_loses_its_lease_stops(primary, secondary, plan):
    fill(secondary, 600, "lost", ["orders"])

    def take_lease_away():
        async def delete():
            async with namespace(secondary).management() as client:
                await client.delete(lease_queue(NAME))

        while not arrived(primary):
            time.sleep(0.01)
        asyncio.run(delete())

    thread = threading.Thread(target=take_lease_away)
    thread.start()
    found = drain(QUEUES[0], replace(plan, rate=50.0))
    thread.join()
    assert found.end is End.LEASE_LOST
    assert left(secondary) > 300
    assert drain(QUEUES[0], plan).end is End.REFUSED
    asyncio.run(check(namespace(primary), namespace(secondary), NAME, SyphonOptions(len(QUEUES))))
    drain_all(plan)
    assert sorted(taken(primary)["orders"]) == list(range(600))


def test_a_task_that_moves_nothing_gives_up_and_says_why(primary, secondary, plan):
    fill(secondary, 10, "away", ["orders"])
    primary.stop()
    found = drain(QUEUES[0], replace(plan, patience_s=1.0))
    primary.start()
    assert (found.end, found.moved, found.text) == (End.STUCK, 0, "the primary is away")
    assert {each.end for each in drain_all(plan)} == {End.DRAINED}
    assert sorted(taken(primary)["orders"]) == list(range(10))


def test_what_has_no_destination_is_counted_as_dead_letters(primary, secondary, plan):
    fill(secondary, 10, "nowhere", ["nowhere"])
    found = drain_all(plan)
    assert {each.end for each in found} == {End.DRAINED}
    assert sum(each.dead_lettered["SyphonDestinationNotFound"] for each in found) == 10
