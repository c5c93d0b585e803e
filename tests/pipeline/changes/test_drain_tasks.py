"""One backlog queue drained as a task does it, with two real brokers: leases, faults and what they leave."""

import asyncio
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from broker.pairing.backlog import lease_queue
from broker.pairing.syphon.checks import check
from broker.pairing.syphon.options import SyphonOptions
from pipeline.jobs.changing.draining import End, Plan
from pyspark_peeklock.options import Access
from tests.brokers import REPOSITORY, Broker
from tests.patience import eventually
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

# A process for each, as in Spark.
TASK = """
import pickle, sys
from pipeline.jobs.changing.draining import drain
sys.stdout.buffer.write(pickle.dumps(drain(*pickle.load(sys.stdin.buffer))))
"""


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
    for side, broker in (("primary", primary), ("secondary", secondary)):
        (tmp_path / side).write_text(broker.connection_string)
    first, second = (Access(str(tmp_path / side), None) for side in ("primary", "secondary"))
    found = asyncio.run(check(namespace(primary), namespace(secondary), NAME, SyphonOptions(len(QUEUES))))
    return Plan(first, second, found, rate=None, lease_wait_s=30.0, patience_s=30.0)


def begin(queue, plan):
    task = subprocess.Popen([sys.executable, "-c", TASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY)
    task.stdin.write(pickle.dumps((queue, plan)))
    task.stdin.close()
    return task


def end(task):
    with task:
        return pickle.loads(task.stdout.read())


def drain_all(plan):
    return [end(task) for task in [begin(queue, plan) for queue in QUEUES]]


def test_a_task_killed_in_the_middle_loses_and_doubles_nothing(primary, secondary, plan):
    fill(secondary, 3000, "killed")
    tasks = [begin(queue, replace(plan, rate=2000.0)) for queue in QUEUES]
    eventually(lambda: arrived(primary), "the first have arrived")
    for task in tasks:
        task.kill()
        with task:
            pass
    assert left(secondary) > 0
    assert {each.end for each in drain_all(plan)} == {End.DRAINED}
    assert left(secondary) == 0
    check_all_are_there_once(primary, 3000)


def test_nobody_drains_a_queue_whose_lease_another_has(primary, secondary, plan):
    fill(secondary, 200, "leased")

    async def hold(connection):
        lease = await connection.accept_session(lease_queue(NAME), QUEUES[0].rpartition("/")[2])
        found = await asyncio.to_thread(drain_all, replace(plan, lease_wait_s=0.0))
        waiting = begin(QUEUES[0], plan)
        await lease.close()
        return [*found, await asyncio.to_thread(end, waiting)]

    first, second, again = in_broker(secondary, hold)
    assert (first.end, first.moved) == (End.LEASED, 0)
    assert (second.end, again.end) == (End.DRAINED, End.DRAINED)
    assert second.moved + again.moved == 200
    check_all_are_there_once(primary, 200)


def test_a_task_that_moves_nothing_gives_up_and_says_why(primary, secondary, plan):
    fill(secondary, 10, "away", ["orders"])
    primary.stop()
    found = end(begin(QUEUES[0], replace(plan, patience_s=1.0)))
    primary.start()
    assert (found.end, found.moved, found.text) == (End.STUCK, 0, "the primary is away")
    assert {each.end for each in drain_all(plan)} == {End.DRAINED}
    assert sorted(taken(primary)["orders"]) == list(range(10))


def test_what_has_no_destination_is_counted_as_dead_letters(primary, secondary, plan):
    fill(secondary, 10, "nowhere", ["nowhere"])
    found = drain_all(plan)
    assert {each.end for each in found} == {End.DRAINED}
    assert sum(each.dead_lettered["SyphonDestinationNotFound"] for each in found) == 10


def test_a_task_that_loses_its_lease_stops(primary, secondary, plan):
    fill(secondary, 600, "lost", ["orders"])

    async def take_lease_away():
        async with namespace(secondary).management() as client:
            await client.delete(lease_queue(NAME))

    task = begin(QUEUES[0], replace(plan, rate=50.0))
    eventually(lambda: arrived(primary), "the first have arrived")
    asyncio.run(take_lease_away())
    found = end(task)
    assert found.end is End.LEASE_LOST
    assert left(secondary) > 300
    assert end(begin(QUEUES[0], plan)).end is End.REFUSED
    # Messages that it had locked stay so for a minute; what has arrived came in order, and once.
    found = taken(primary)["orders"]
    assert found == list(range(0, 2 * len(found), 2))
