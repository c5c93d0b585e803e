"""A queue as it was at offsets of the journal, browsed while messages come and go. No Java."""

import asyncio
import json
import random
import threading

import pytest

pytest.importorskip("pyspark")
from hypothesis import given
from hypothesis import strategies as st

from protocol.client.browsing import FRAGMENT_BITS
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.codec import Timestamp
from pyspark_peeklock.as_of import ENTERING, LEAVING, MOVED, AsOfReader, Changes, narrowed
from pyspark_peeklock.browse import NumberRange
from pyspark_peeklock.errors import InvalidOption
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.options import Access, BrowseOptions, Options
from pyspark_peeklock.parts import OffsetRange
from pyspark_peeklock.rows import SCHEMA
from storage.journal import events
from tests.brokers import Broker
from tests.patience import PATIENCE_S
from tests.pipeline.spark.taking import take_all

CONFIG = """
partitions = 2
[[queues]]
name = "orders"
[[queues]]
name = "spread"
enable_partitioning = true
[journal]
mode = "events"
"""
FAR = 4_102_444_800_000  # 2100


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("as-of"), CONFIG) as broker:
        yield broker


@pytest.fixture
def secret(broker, tmp_path):
    path = tmp_path / "secret"
    path.write_text(broker.connection_string)
    return path


@pytest.fixture
def journal(broker, secret):
    client = JournalClient(Endpoint(Access(str(secret), None), f"http://localhost:{broker.http_port}", 10.0))
    yield client
    client.close()


def reader(broker, secret, entity, cut, **more):
    given = {"connectionStringFile": secret, "httpEndpoint": f"http://localhost:{broker.http_port}", "entity": entity}
    texts = {name: str(value) for name, value in {**given, "asOfOffsets": cut, **more}.items()}
    return AsOfReader(BrowseOptions.of(Options(texts)), SCHEMA)


def shown(found):
    """How each message went, by its number; None if it is there."""
    rows = [row for task in found.partitions() for batch in found.read(task) for row in batch.to_pylist()]
    numbers = [row["sequenceNumber"] for row in rows]
    assert len(numbers) == len(set(numbers))
    return {row["sequenceNumber"]: row["op"] for row in rows}


def cut_of(journal):
    return json.dumps({str(each.partition): each.stable for each in journal.states(current=True)[1].values()})


def at(journal, cut, entity, sub_queue="active"):
    """The numbers of the messages in the queue, as the journal tells it from its beginning."""
    there = set()
    for partition, offset in json.loads(cut).items():
        wanted = OffsetRange(int(partition), journal.states()[1][int(partition)].epoch, 0, offset)
        for batch in journal.batches(wanted, entity=entity, records=False):
            for row in batch.to_pylist():
                if row["subQueue"] == sub_queue and row["op"] in ENTERING:
                    there.add(row["sequenceNumber"])
                elif row["subQueue"] == sub_queue and row["op"] in LEAVING:
                    there.remove(row["sequenceNumber"])
    return there


def send(broker, entity, count, **more):
    async def work():
        async with await connect_to(broker.connection_string) as connection:
            sender = await connection.sender(entity)
            await sender.send_all(Message.of(b"x" * 100, **more).encode() for _ in range(count))

    asyncio.run(work())


def settle(broker, entity, completed, dead_lettered):
    async def work():
        async with await connect_to(broker.connection_string) as connection:
            receiver = await connection.receiver(entity, credit=0)
            for number, each in enumerate(await receiver.fetch(completed + dead_lettered, timeout_s=PATIENCE_S)):
                await (receiver.accept(each) if number < completed else receiver.reject(each))

    asyncio.run(work())


def test_what_came_is_left_out_and_what_went_is_put_back(broker, secret, journal):
    send(broker, "orders", 20)
    send(broker, "orders", 1, annotations={"x-opt-scheduled-enqueue-time": Timestamp(FAR)})
    settle(broker, "orders", 3, 2)
    cut = cut_of(journal)
    before, dead = at(journal, cut, "orders"), at(journal, cut, "orders", "deadletter")
    assert (len(before), len(dead)) == (16, 2)
    send(broker, "orders", 5)
    settle(broker, "orders", 4, 1)
    found = shown(reader(broker, secret, "orders", cut))
    assert found.keys() == before
    gone = sorted(op for op in found.values() if op)
    assert gone == ["completed"] * 4 + ["deadlettered"]
    assert shown(reader(broker, secret, "orders", cut, subQueue="deadletter")) == dict.fromkeys(dead)
    assert shown(reader(broker, secret, "orders", cut_of(journal))).keys() == at(journal, cut_of(journal), "orders")
    take_all(broker, "orders")
    assert shown(reader(broker, secret, "orders", cut, minPartitions=4)).keys() == before
    assert len(shown(reader(broker, secret, "orders", "latest"))) == 1  # the scheduled one


def test_offsets_that_are_not_there_are_refused(broker, secret, journal):
    [first, *_] = json.loads(cut_of(journal)).items()
    with pytest.raises(InvalidOption, match=r"'asOfOffsets': partition .* ends at offset .*, and 1000000 is behind it"):
        reader(broker, secret, "orders", json.dumps({first[0]: 1_000_000})).partitions()
    with pytest.raises(InvalidOption, match="option 'asOfOffsets': there is no partition 77"):
        reader(broker, secret, "orders", '{"77": 0}').partitions()


def test_while_messages_come_and_go_it_is_what_the_journal_says(broker, secret, journal):
    stopping = threading.Event()

    def work():
        chance = random.Random(3)
        while not stopping.is_set():
            send(broker, "spread", chance.randrange(1, 40))
            settle(broker, "spread", chance.randrange(1, 30), chance.randrange(4))

    send(broker, "spread", 300)
    worker = threading.Thread(target=work)
    worker.start()
    try:
        found = [(cut, shown(reader(broker, secret, "spread", cut, minPartitions=5))) for cut in cuts(journal, 3)]
    finally:
        stopping.set()
        worker.join()
    assert any(op for _, rows in found for op in rows.values()), "none went while it was browsed"
    for cut, rows in found:
        assert rows.keys() == at(journal, cut, "spread")


def cuts(journal, count):
    for _ in range(count):
        yield cut_of(journal)


def test_the_ops_are_those_of_the_journal():
    assert {events.name_of(op) for op in events.ENTERING} == ENTERING
    assert {events.name_of(op) for op in events.LEAVING} == LEAVING | {MOVED}


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40), st.data())
def test_whenever_each_message_is_seen_the_answer_is_the_same(story, data):
    """`story`: in which fragment a message comes, or the oldest or youngest one goes."""
    last, there, states, rows = {}, [], [()], []
    for fragment, goes in story:
        if goes and there:
            number = there.pop(0 if fragment else -1)
            rows.append(("completed", None, number))
        else:
            last[fragment] = last.get(fragment, fragment << FRAGMENT_BITS) + 1
            there.append(last[fragment])
            rows.append(("enqueued", None, last[fragment]))
        states.append(tuple(there))
    cut, planned, end = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 3)))

    def changes(until):
        found = Changes()
        for row in rows[cut:until]:
            found.add(*row)
        return found

    found = [
        NumberRange(min(numbers), max(numbers))
        for fragment in range(3)
        if (numbers := [each for each in states[planned] if each >> FRAGMENT_BITS == fragment])
    ]
    answer = []
    for each in narrowed(found, changes(planned)):
        browsed = data.draw(st.integers(planned, end))
        seen = {number for number in states[browsed] if each.first <= number <= each.last}
        went = {number for number in changes(end).went if each.first <= number <= each.last}
        answer += [*seen, *(went - seen)]
    assert sorted(answer) == sorted(states[cut])
