"""Stores rebuilt from captured rows, against those that the rows are of: after any run of the models of partitions, and
at cuts in the middle of it."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from protocol.codec import Timestamp
from storage.queue_ids import entity_of
from storage.records import message_parts
from tests.examples import examples
from tests.models import model_settings
from tests.partition.driver import START_MS
from tests.partition.forwarding_driver import Partitions
from tests.partition.hinted_store import HintedStore
from tests.partition.moving_driver import World
from tests.partition.rebuilt_stores import (
    RecordedStore,
    assert_equal,
    entries_of,
    is_defined,
    rebuilt,
    states_of,
    time_of,
)
from tests.partition.test_forwarding_model import ForwardingModel
from tests.partition.test_moving import KINDS, MANY, READING
from tests.partition.test_partition_model import PartitionModel
from tests.partition.test_session_model import SessionQueue
from tests.partition.test_topic_model import TopicModel
from tests.partition.topic_driver import A, B, TopicDriver, event, rule

EVERY = 7  # steps


def last_turn(*stores: Any) -> int:
    return max((store.turns[-1][0] for store in stores if store.turns), default=-1)


class OnePartition:
    """Beside a model whose driver has one partition."""

    driver: Any

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.seen: list[tuple[int, Any]] = []  # turns, and what was there after them

    @invariant()
    def what_is_there_is_remembered(self):
        self.steps += 1
        if self.steps % EVERY == 0 and hasattr(self, "driver") and not self.driver.store.dirty:
            store = self.driver.store
            self.seen.append((last_turn(store), (entries_of(store), states_of(store))))

    def teardown(self):
        super().teardown()
        if not hasattr(self, "driver"):
            return
        store = self.driver.store
        store.commit()
        stores, found = rebuilt({5: store})
        assert found[5].unknown == 0
        assert_equal(store, stores[5])
        for turn, (wanted, states) in self.seen:
            stores, _ = rebuilt({5: store}, time_of(turn))
            assert states_of(stores[5]) == {key: state for key, state in states.items() if is_of_defined(store, key)}
            there = {key: each[:2] for key, each in entries_of(stores[5]).items()}
            assert there == {key: each[:2] for key, each in wanted.items() if is_defined(store, key[0])}


class RebuiltPartition(OnePartition, PartitionModel):
    store_class = RecordedStore


class RebuiltTopic(OnePartition, TopicModel):
    pass


@pytest.mark.parametrize("requires_session", [False, True])
def test_a_copy_that_an_action_delays_waits_in_the_rebuilt_store_too(requires_session):
    topic = TopicDriver(B, store=RecordedStore())
    action = "SET sys.ScheduledEnqueueTimeUtc = @at; SET sys.SessionId = 's'"
    later = rule("later", action=action, at=Timestamp(START_MS + 5_000))
    topic.subscribe(A, later, requires_session=requires_session)
    topic.publish(event("m", ttl_ms=1_000))
    stores, found = rebuilt({5: topic.store})
    assert found[5].unknown == 0
    assert_equal(topic.store, stores[5])
    assert topic.counts(A)[:3] == [0, 0, 1]


class RebuiltSessions(OnePartition, SessionQueue):
    store_class = RecordedStore


def is_of_defined(store: Any, session_key: bytes) -> bool:
    return is_defined(store, int.from_bytes(session_key[:4], "big"))


def bodies_of(store: Any) -> Counter[bytes]:
    return Counter(message_parts(record)[1] for _, _, record in entries_of(store).values() if record is not None)


class StoreWithPast(RecordedStore):
    """Knows which bodies came into its queues, and left them, in each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.there: set[tuple[int, bytes]] = set()  # queue id, body
        self.past: dict[int, list[tuple[bytes, int, bool]]] = {}  # by turn: body, queue id, True if it came

    def commit(self) -> None:
        before = len(self.turns)
        super().commit()
        if len(self.turns) > before:
            entries = [(key[0], record) for key, (_, _, record) in entries_of(self).items()]
            there = {(queue_id, message_parts(record)[1]) for queue_id, record in entries if record is not None}
            left = [(body, queue_id, False) for queue_id, body in self.there - there]
            self.past[last_turn(self)] = left + [(body, queue_id, True) for queue_id, body in there - self.there]
            self.there = there


def not_consumed(stores: dict[int, Any], turn: int) -> set[bytes]:
    """Bodies that are still where they came last, as of a turn.

    A queue that has forwarded a message has it until it hears so, even if a client has taken it from the destination.
    """
    changes = sorted(
        (at, partition, number, change)
        for partition, store in stores.items()
        for at, changed in store.past.items()
        if at <= turn
        for number, change in enumerate(changed)
    )
    last: dict[bytes, tuple[int, int]] = {}  # partition, queue id
    found: set[bytes] = set()
    for _, partition, _, (body, queue_id, came) in changes:
        if came:
            last[body] = partition, queue_id
            found.add(body)
        elif last.get(body) == (partition, queue_id):
            found.discard(body)
    return found


class RebuiltForwarding(ForwardingModel):
    """Between partitions: a message that is under way is in two stores, and must be in one of those that are rebuilt.

    Stores are rebuilt as of CUTS turns.
    """

    CUTS = 12

    store_class = StoreWithPast
    net: Partitions[StoreWithPast]

    def teardown(self):
        super().teardown()
        if not hasattr(self, "net"):
            return
        originals = dict(enumerate(self.net.stores))
        stores, _ = rebuilt(originals)
        for partition, store in originals.items():
            assert_equal(store, stores[partition])
        turns = sorted({turn for store in originals.values() for turn in store.past})
        for turn in turns[:: max(1, len(turns) // self.CUTS)]:
            stores, _ = rebuilt(originals, time_of(turn))
            assert sum(map(bodies_of, stores.values()), Counter()) == Counter(not_consumed(originals, turn))


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_message_under_way_is_where_the_cut_has_it(is_answered):
    net = Partitions[HintedStore](2)
    net.queue("b", 1)
    net.send(net.queue("a", 0, forward_to="b"), "one", "two")
    originals = dict(enumerate(net.stores))
    before = last_turn(*net.stores)
    [connection] = net.connections[0, 1]
    net.deliver(0, 1, connection)
    if is_answered:
        net.answer(0, connection)
    for until in (None, time_of(last_turn(*net.stores))):
        stores, found = rebuilt(originals, until)
        assert [sorted(bodies_of(each)) for each in stores.values()] == [[], [b"one", b"two"]]
        assert found[0].taken_over == (0 if is_answered else 2)
    stores, found = rebuilt(originals, time_of(before))
    assert [sorted(bodies_of(each)) for each in stores.values()] == [[b"one", b"two"], []]
    # The partitions were not captured up to the same moment: the destination's rows are missing.
    originals[1].turns = [each for each in originals[1].turns if each[0] <= before]
    stores, found = rebuilt(originals)
    assert [sorted(bodies_of(each)) for each in stores.values()] == [[b"one", b"two"], []]
    assert found[0].put_back == (2 if is_answered else 0)


def of_moved(world: World, store: Any) -> dict[Any, Any]:
    entries = {key: each[:2] for key, each in entries_of(store).items() if entity_of(key[0]) in world.ids}
    states = states_of(store).items()
    return entries | {key: each for key, each in states if entity_of(int.from_bytes(key[:4], "big")) in world.ids}


@settings(max_examples=examples(40))
@given(
    kind=st.sampled_from(KINDS),
    before=MANY,
    reading=READING,
    is_kept=st.booleans(),
    between=MANY,
    again=READING,
    after=MANY,
)
def test_an_entity_that_is_moved_is_on_one_partition(kind, before, reading, is_kept, between, again, after):
    """Wherever the cut is: before, during or after the move, which may be given up."""
    world = World(kind)
    seen: list[tuple[int, Any]] = []

    def do(steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, int):
                world.rows(step)
            else:
                world.use(*step)
            seen.append((last_turn(*world.stores.values()), of_moved(world, world.stores[world.at])))

    do(before)
    for steps, ends in ((reading, world.keep if is_kept else world.finish), (again, world.finish)):
        world.begin_move()
        do(steps)
        world.freeze()
        ends()
        do(between)
        world.rest()
    do(after)
    for turn, wanted in seen[:: max(1, len(seen) // 8)]:
        stores, _ = rebuilt(world.stores, time_of(turn))
        first, second = (of_moved(world, store) for store in stores.values())
        assert not first.keys() & second.keys()
        assert first | second == wanted


TestRebuiltPartition = RebuiltPartition.TestCase
TestRebuiltPartition.settings = model_settings(examples=25, steps=40)
TestRebuiltTopic = RebuiltTopic.TestCase
TestRebuiltTopic.settings = model_settings(examples=15, steps=30)
TestRebuiltSessions = RebuiltSessions.TestCase
TestRebuiltSessions.settings = model_settings(examples=15, steps=30)
TestRebuiltForwarding = RebuiltForwarding.TestCase
TestRebuiltForwarding.settings = model_settings(examples=25, steps=40)
