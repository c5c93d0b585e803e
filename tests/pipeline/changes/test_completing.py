"""Messages completed by their numbers: those that are meant and no others, by Peeklock's way and by that of all."""

import asyncio
import threading
import time

import pytest

from pipeline.jobs.changing.completing import Wanted, complete
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from pyspark_peeklock.options import Access
from tests.brokers import Broker
from tests.patience import PATIENCE_S, eventually
from tests.pipeline.holding import locked
from tests.pipeline.programs import counts_over_http

DEAD = "/$deadletterqueue"
ENTITIES = """
partitions = 2

[[queues]]
name = "orders"

[[queues]]
name = "spread"
enable_partitioning = true
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), ENTITIES) as broker:
        yield broker


@pytest.fixture
def access(broker, tmp_path):
    (tmp_path / "secret").write_text(broker.connection_string)
    return Access(str(tmp_path / "secret"), None)


@pytest.fixture(params=["by number", "by locking all"])
def way(request, monkeypatch):
    if request.param != "by number":  # as Azure Service Bus, which does not lock active messages by their numbers
        monkeypatch.setattr("protocol.client.requests.ACTIVE", "not-known")
    return request.param


def in_broker(broker, work):
    async def connected():
        async with await connect_to(broker.connection_string) as connection:
            return await work(connection)

    return asyncio.run(connected())


def dead_letters(broker, queue, count):
    """Make so many; returns them as they are wanted, with their numbers."""

    async def work(connection):
        sender = await connection.sender(queue)
        messages = [Message.of(b"%d" % n).encode() for n in range(count)]
        for start in range(0, count, 500):
            await sender.send(pack_batch(messages[start : start + 500]), is_batch=True)
        receiver = await connection.receiver(queue, credit=0)
        left = count
        while left:
            received = await receiver.fetch(500, 1)
            await asyncio.gather(*(receiver.reject(each) for each in received))
            left -= len(received)
        management, start, found = await connection.management(queue + DEAD), 0, []
        while page := await management.peek(1000, start):
            peeked = [Message.decode(each) for each in page]
            start = (peeked[-1].sequence_number or 0) + 1
            found += [
                Wanted(each.sequence_number or 0, each.annotations["x-opt-enqueued-time"], 100) for each in peeked
            ]
        return found

    return in_broker(broker, work)


def take(broker, address):
    """Numbers and delivery counts of all messages there, which are received and deleted."""

    async def work(connection):
        found = {}
        receiver = await connection.receiver(address, credit=0, receive_and_delete=True)
        while received := await receiver.fetch(1000, 0.3):
            messages = [each.message() for each in received]
            found |= {each.sequence_number: each.delivery_count or 0 for each in messages}
        return found

    return in_broker(broker, work)


@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_only_those_that_are_meant_are_completed_and_no_delivery_is_counted(broker, access, way, queue):
    found = dead_letters(broker, queue, 600)
    wanted = found[100:500:2]
    done = complete(access, queue + DEAD, wanted, PATIENCE_S)
    assert done == ([each.number for each in wanted], [], [])
    others = {each.number for each in found} - {each.number for each in wanted}
    assert take(broker, queue + DEAD) == dict.fromkeys(others, 0)


def test_what_is_gone_or_locked_is_told_apart(broker, access, way):
    found = dead_letters(broker, "orders", 30)

    async def settle_some(connection):
        receiver = await connection.receiver("orders" + DEAD, credit=0)
        await receiver.accept_all(await receiver.fetch(4))

    in_broker(broker, settle_some)
    numbers = [each.number for each in found]
    with locked(broker, "orders" + DEAD, 6):
        done = complete(access, "orders" + DEAD, found[:20], PATIENCE_S)
    assert done == (numbers[10:20], numbers[:4], numbers[4:10])
    assert complete(access, "orders" + DEAD, found[:20], PATIENCE_S) == (
        numbers[4:10],
        numbers[:4] + numbers[10:20],
        [],
    )
    assert take(broker, "orders" + DEAD) == dict.fromkeys(numbers[20:], 0)


def test_another_message_under_the_same_number_is_none_of_ours(broker, access, way):
    found = dead_letters(broker, "orders", 3)
    wanted = [each._replace(enqueued_ms=each.enqueued_ms - 1) for each in found]
    assert complete(access, "orders" + DEAD, wanted, PATIENCE_S).completed == []
    assert take(broker, "orders" + DEAD).keys() == {each.number for each in found}


def test_deferred_ones_are_completed_too(broker, access, way):
    found = dead_letters(broker, "orders", 4)

    async def defer(connection):
        receiver = await connection.receiver("orders" + DEAD, credit=0)
        await receiver.defer_all(await receiver.fetch(2))

    in_broker(broker, defer)
    wanted = [each._replace(is_active=place >= 2) for place, each in enumerate(found)]
    assert complete(access, "orders" + DEAD, wanted, PATIENCE_S).completed == [each.number for each in found]
    assert complete(access, "orders" + DEAD, [], PATIENCE_S) == ([], [], [])


def test_a_broker_that_is_killed_meanwhile_makes_no_difference(broker, access, way):
    found = dead_letters(broker, "orders", 4000)

    def kill():
        while asyncio.run(counts_over_http(broker, "orders"))["dead_lettered"] == len(found):
            pass
        broker.kill()
        broker.start()

    thread = threading.Thread(target=kill)
    thread.start()
    done = complete(access, "orders" + DEAD, found[:3000], PATIENCE_S)
    thread.join()
    assert sorted(done.completed + done.gone) == [each.number for each in found[:3000]]
    assert done.left == []
    assert take(broker, "orders" + DEAD).keys() == {each.number for each in found[3000:]}


def test_while_a_worker_is_away_it_is_tried_again(tmp_path, way):
    """Its gateway stays and refuses as busy, or answers that the outcome is not known."""
    with Broker(tmp_path, ENTITIES, workers=1) as broker:
        (tmp_path / "secret").write_text(broker.connection_string)
        found = dead_letters(broker, "orders", 3000)

        def kill():
            for _ in range(4):
                time.sleep(0.2)  # the supervisor starts it again
                for worker in broker.worker_processes():
                    worker.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        ended = []
        for start in range(0, 3000, 1000):
            ended.append(
                complete(Access(str(tmp_path / "secret"), None), "orders" + DEAD, found[start : start + 1000], 60.0)
            )
        thread.join()
        assert [number for each in ended for number in each.left] == []
        numbers = sorted(number for each in ended for number in (*each.completed, *each.gone))
        assert numbers == [each.number for each in found]
        eventually(lambda: broker.get("/readyz")[0] == 200, "the worker is there again")
        assert take(broker, "orders" + DEAD) == {}
