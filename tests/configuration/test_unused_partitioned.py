"""AutoDeleteOnIdle of partitioned entities: all fragments are unused, or it stays; whoever dies at whatever moment."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker import requests, wire
from broker.catalog.catalog import catalog_version, definitions
from broker.errors import EntityNotFound, ServerBusy
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.partition.state.idleness import GRID_MS
from broker.wire import Op
from broker.worker.unused import ANSWER_MS, UnusedEntities
from storage.queue_ids import queue_id_of
from storage.records import AUTO_DELETED_PREFIX, DELETED_ENTITY_PREFIX, IDLE_PREFIX
from storage.store import Table
from tests.configuration.workers_in_process import Workers
from tests.models import model_settings, rarely

T0 = 1_000_000
PARTITIONS = 4
INTERVAL_MS = 300_000
STEP_MS = INTERVAL_MS // 10
QUEUE, TOPIC, SUBSCRIPTION, KEPT = 1, 2, 3, 4  # entity ids
ENTITIES: list[Description] = [
    QueueDescription(name="wide", enable_partitioning=True, auto_delete_on_idle_ms=INTERVAL_MS),
    TopicDescription(name="news", enable_partitioning=True, auto_delete_on_idle_ms=INTERVAL_MS),
    SubscriptionDescription(topic="news", name="s", auto_delete_on_idle_ms=INTERVAL_MS),
    SubscriptionDescription(topic="news", name="kept"),
]
PATHS = {QUEUE: "wide", TOPIC: "news", SUBSCRIPTION: "news/Subscriptions/s", KEPT: "news/Subscriptions/kept"}
LAYOUT = bytes(16)
RULE = {"name": "r", "filter": {"kind": "true"}, "action": None}


class Scene(Workers):
    """Workers and their entities. Whenever an entity goes, the scene checks that it may."""

    def __init__(self, count: int = 2) -> None:
        self.catalog: set[int] = set()  # as the home has committed it
        self.deleting: set[int] = set()  # by a client
        self.served_ms: dict[tuple[int, int], int] = defaultdict(int)  # entity, partition: since its last use
        self.accepted: dict[tuple[int, int], int] = defaultdict(int)  # messages
        super().__init__(ENTITIES, PARTITIONS, count, T0, self.look)
        self.catalog = {item.entity_id for item in definitions(self.stores[0])}
        self.connect()

    def look(self) -> None:
        """After each turn: what is deleted was unused on all partitions for the interval."""
        if not self.catalog:
            return
        found = {item.entity_id for item in definitions(self.stores[0])}
        gone = self.catalog - found
        for entity_id in gone - self.deleting:
            if TOPIC in gone and entity_id != QUEUE:
                continue  # it goes with it
            for partition in range(PARTITIONS):
                served_ms = self.served_ms[entity_id, partition]
                assert served_ms >= INTERVAL_MS, f"{PATHS[entity_id]} on {partition} was used {served_ms} ms ago"
        self.catalog = found

    def wait(self, ms: int, turns: int = 4) -> None:
        """Time passes for all workers that run."""
        for entity_id in self.catalog:
            for partition in self.partitions:
                self.served_ms[entity_id, partition] += ms
        self.now_ms += ms
        self.settle(turns)

    def wait_steps(self, count: int) -> None:
        for _ in range(count):
            self.wait(STEP_MS)

    def use(self, entity_id: int, partition: int, kill_after: int | None = None) -> bool:
        """Send to it, or browse a subscription; its worker is killed after so many commits. True if that was done."""
        before = set(self.catalog)
        found = self.partitions[partition]
        queue = queue_id_of(entity_id)
        is_sent = entity_id in (QUEUE, TOPIC)
        used = [entity_id, *([TOPIC] if entity_id in (SUBSCRIPTION, KEPT) else [])]
        self.touch(partition)
        try:
            if is_sent:
                found.send(queue, [[LAYOUT, b"m", None, None]], self.now_ms)
            else:
                found.request(queue, requests.Peek(0, 1, 100), self.now_ms)
        except (ServerBusy, EntityNotFound):
            self.turn(partition % self.count, kill_after)
            return False
        assert entity_id in before, f"{PATHS[entity_id]} is used on {partition} after its deletion"
        at = self.numbers(partition % self.count).index(partition)
        alive = self.turn(partition % self.count, kill_after)
        if alive or kill_after is None or at < kill_after:
            for each in used:
                self.served_ms[each, partition] = 0
            if is_sent:
                self.accepted[entity_id, partition] += 1
        return alive

    @property
    def followers(self) -> dict[Any, tuple[int, ...]]:
        """The workers that follow the home."""
        home = self._running[0][0]._home
        assert home is not None
        return home.followers

    @property
    def home(self) -> UnusedEntities[Any]:
        home = self._running[0][0]._home
        assert home is not None
        return home._unused

    def has_agreed(self, partition: int) -> bool:
        return any(idle.has_agreed for idle in self.partitions[partition]._core.idle_times.of.values())

    def check(self) -> None:
        """Nothing that was accepted is lost, as long as its entity is there."""
        for (entity_id, partition), count in self.accepted.items():
            if entity_id in self.catalog and partition in self.partitions:
                for each in (QUEUE,) if entity_id == QUEUE else (KEPT,):
                    queue = queue_id_of(each)
                    counts = self.partitions[partition].request(0, requests.Counts([queue]), self.now_ms)
                    assert counts[queue][0] == count, (PATHS[each], partition)

    def start_all(self) -> None:
        for number in range(self.count):
            self.start(number)
        self.connect()

    def end(self) -> None:
        """Nobody uses anything any more: all is deleted everywhere, and nothing is left of it."""
        self.start_all()
        for _ in ENTITIES:
            if len(self.followers) < self.count - 1:
                self.connect()  # a deletion came between catalog and rules: that worker hung up, and dials again
        assert len(self.followers) == self.count - 1
        self.check()
        for number in range(PARTITIONS):
            assert not self.has_agreed(number), number
        self.wait_steps(10)
        self.connect()
        self.wait_steps(4)
        assert self.catalog == set()
        self.settle()
        for store in self.stores:
            assert catalog_version(store) == catalog_version(self.stores[0])
            assert definitions(store) == []
            for prefix in (IDLE_PREFIX, AUTO_DELETED_PREFIX, DELETED_ENTITY_PREFIX):
                assert store.scan(Table.META, prefix, prefix + b"\xff" * 5, 10) == []
            for table in (Table.MESSAGES, Table.QUEUE, Table.RULES, Table.COUNTS):
                assert store.scan(table, b"\0", b"\xff" * 32, 10) == []


@pytest.fixture(params=[1, 2, 3, 4])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """With one worker to as many as there are partitions."""
    scene = Scene(request.param)
    yield scene
    scene.close()


@pytest.fixture
def pair() -> Iterator[Scene]:
    scene = Scene(2)
    yield scene
    scene.close()


def test_what_nobody_uses_is_deleted_after_its_interval(scene: Scene) -> None:
    for partition in range(PARTITIONS):
        scene.use(QUEUE, partition)
        scene.use(TOPIC, partition)
    scene.wait_steps(9)
    assert scene.catalog == {QUEUE, TOPIC, SUBSCRIPTION, KEPT}
    scene.wait(STEP_MS + GRID_MS)
    assert scene.catalog == set()
    scene.end()
    home = scene.partitions[0].gauges()["auto_deleted"]
    assert home == 4
    assert sum(each.gauges()["auto_deleted"] for each in scene.partitions.values()) == home


@pytest.mark.parametrize("partition", range(PARTITIONS))
@pytest.mark.parametrize("entity_id", [QUEUE, TOPIC, SUBSCRIPTION, KEPT])
def test_a_use_of_one_fragment_keeps_it(scene: Scene, entity_id: int, partition: int) -> None:
    scene.wait_steps(6)
    scene.wait(STEP_MS + GRID_MS)
    scene.use(entity_id, partition)
    scene.wait_steps(9)
    assert (
        scene.catalog
        == {
            QUEUE: {QUEUE},
            TOPIC: {TOPIC, KEPT},  # what a topic publishes is no use of a subscription
            SUBSCRIPTION: {TOPIC, SUBSCRIPTION, KEPT},
            KEPT: {TOPIC, KEPT},
        }[entity_id]
    )
    for each in range(PARTITIONS):
        assert not scene.has_agreed(each)
    scene.wait(STEP_MS + GRID_MS)
    assert scene.catalog == set()
    scene.end()


def test_uses_in_turn_by_which_no_fragment_is_always_in_use_keep_it(scene: Scene) -> None:
    for at in range(12):
        scene.wait_steps(5)
        assert scene.use(QUEUE, at % PARTITIONS)
    assert QUEUE in scene.catalog
    scene.end()


def nearly_over(scene: Scene) -> None:
    scene.wait_steps(9)
    scene.wait(STEP_MS + GRID_MS, 0)


def asked(scene: Scene) -> None:
    """The home has asked, and nobody has heard it."""
    nearly_over(scene)
    for number in reversed(range(scene.count)):
        scene.turn(number)
    for _ in range(5):
        scene.turn(0)
    assert scene.home._rounds.keys() == {QUEUE, TOPIC, SUBSCRIPTION}


def agreed_at_1(scene: Scene) -> None:
    """Worker 1 has agreed, and the home has not heard it; worker 2, if there is one, was not given a turn."""
    asked(scene)
    scene.turn(1)
    assert scene.has_agreed(1)
    assert scene.catalog == {QUEUE, TOPIC, SUBSCRIPTION, KEPT}


def test_a_fragment_that_has_agreed_refuses_uses_until_it_is_deleted(pair: Scene) -> None:
    agreed_at_1(pair)
    for entity_id in (QUEUE, TOPIC, SUBSCRIPTION, KEPT):
        with pytest.raises(ServerBusy):
            pair.partitions[1].request(queue_id_of(entity_id), requests.Peek(0, 1, 1), pair.now_ms)
    pair.settle()
    assert pair.catalog == set()
    for entity_id in (QUEUE, TOPIC, SUBSCRIPTION, KEPT):
        with pytest.raises(EntityNotFound):
            pair.partitions[1].request(queue_id_of(entity_id), requests.Peek(0, 1, 1), pair.now_ms)
    pair.end()


def test_a_use_at_the_home_while_others_have_agreed_keeps_it(pair: Scene) -> None:
    agreed_at_1(pair)
    assert pair.use(QUEUE, 2)
    pair.settle()
    assert pair.catalog == {QUEUE}
    assert not pair.has_agreed(1)
    assert pair.use(QUEUE, 1)
    pair.end()


CHANGES = [
    (("update", "wide", {"user_metadata": "x"}), {QUEUE}),
    (("update", "news", {"user_metadata": "x"}), {TOPIC, KEPT}),
    (("update", PATHS[SUBSCRIPTION], {"user_metadata": "x"}), {TOPIC, SUBSCRIPTION, KEPT}),
    (("update", PATHS[KEPT], {"user_metadata": "x"}), {TOPIC, KEPT}),
    (("create", "subscription", {"topic": "news", "name": "new"}, None), {TOPIC, KEPT, KEPT + 1}),
    (("add-rule", PATHS[SUBSCRIPTION], RULE), {TOPIC, SUBSCRIPTION, KEPT}),
    (("remove-rule", PATHS[SUBSCRIPTION], "$Default"), {TOPIC, SUBSCRIPTION, KEPT}),
]


@pytest.mark.parametrize(("change", "stays"), CHANGES)
def test_a_change_uses_all_fragments_also_while_it_is_decided(pair: Scene, change: Any, stays: set[int]) -> None:
    asked(pair)
    assert pair.ask(*change)[0] == Op.REPLY
    assert pair.catalog == stays
    for partition in range(PARTITIONS):
        assert not pair.has_agreed(partition)
        assert pair.use(min(stays), partition)


@pytest.mark.parametrize(("change", "stays"), CHANGES)
def test_a_change_uses_all_fragments_for_another_interval(pair: Scene, change: Any, stays: set[int]) -> None:
    pair.wait_steps(8)
    assert pair.ask(*change)[0] == Op.REPLY
    pair.wait_steps(9)
    assert pair.catalog == stays
    pair.end()


def test_a_deletion_while_it_is_decided(pair: Scene) -> None:
    asked(pair)
    pair.deleting = {TOPIC, SUBSCRIPTION, KEPT}
    assert pair.ask("delete", "news")[0] == Op.REPLY
    pair.settle()
    assert not pair.home._said
    pair.end()


def test_while_a_partition_is_away_nothing_is_deleted(pair: Scene) -> None:
    pair.wait_steps(5)
    pair.kill(1)
    pair.wait_steps(30)
    assert pair.use(QUEUE, 0)
    assert pair.catalog == {QUEUE, TOPIC, SUBSCRIPTION, KEPT}
    pair.end()


def test_while_a_partition_is_parked_nothing_is_deleted(pair: Scene) -> None:
    asked(pair)
    assert not pair.turn(1, kill_after=2)
    pair.start(1, parked=[3])
    assert pair.has_agreed(1)
    pair.connect()
    assert pair.use(QUEUE, 1), "the other partition of the worker serves it again"
    pair.wait_steps(30)
    assert pair.catalog == {QUEUE, TOPIC, SUBSCRIPTION, KEPT}
    pair.kill(1)
    pair.end()


@pytest.mark.parametrize("kill_after", [0, 1, 2])
def test_a_worker_that_dies_when_it_agrees_refuses_uses_until_it_has_the_catalog(pair: Scene, kill_after: int) -> None:
    pair.use(QUEUE, 1)
    asked(pair)
    assert not pair.turn(1, kill_after)
    pair.start(1)
    assert pair.has_agreed(1) == (kill_after > 0)
    assert pair.has_agreed(3) == (kill_after > 1)
    if kill_after:
        with pytest.raises(ServerBusy):
            pair.partitions[1].send(queue_id_of(QUEUE), [[LAYOUT, b"m", None, None]], pair.now_ms)
    pair.connect()
    assert not pair.has_agreed(1)
    pair.check()
    pair.end()


def test_a_worker_that_dies_before_it_hears_of_the_deletion_accepts_nothing_after_it(pair: Scene) -> None:
    agreed_at_1(pair)
    pair.kill(1)
    pair.start(1)
    for _ in range(20):
        pair.use(QUEUE, 1)
        pair.turn(0)
        pair.now_ms += 50
    pair.end()


@pytest.mark.parametrize("kill_after", [0, 1, 2])
def test_a_home_that_dies_when_it_decides(pair: Scene, kill_after: int) -> None:
    agreed_at_1(pair)
    assert not pair.turn(0, kill_after)
    assert (QUEUE in pair.catalog) == (kill_after == 0)
    for _ in range(3):
        assert not pair.use(QUEUE, 1) or kill_after < 0
        pair.wait(STEP_MS)
    assert pair.has_agreed(1)
    pair.start_all()
    assert not pair.has_agreed(1)
    assert (QUEUE in pair.catalog) == (kill_after == 0)
    pair.end()


def test_a_worker_that_hangs_keeps_the_others_from_uses_for_a_moment_only() -> None:
    scene = Scene(3)
    agreed_at_1(scene)
    scene.wait(ANSWER_MS + 1, 0)
    for _ in range(3):
        scene.turn(0)
        scene.turn(1)
    assert not scene.has_agreed(1)
    assert scene.use(QUEUE, 1)
    scene.settle()
    assert QUEUE in scene.catalog
    scene.end()
    scene.close()


def test_an_answer_to_an_earlier_question_is_none(pair: Scene) -> None:
    asked(pair)
    home = pair.home
    first = home._rounds[QUEUE]
    [caller] = first.asked
    home.used(QUEUE)
    assert [message for _, message in home.messages] == [wire.keep(QUEUE)]
    for partition in range(PARTITIONS):
        assert home.said(partition, [QUEUE], pair.now_ms) == []
    second = home._rounds[QUEUE]
    assert home.answered(caller, QUEUE, first.number, True, pair.now_ms) == []
    assert home.answered("another", QUEUE, second.number, True, pair.now_ms) == []
    assert home.answered(caller, QUEUE, second.number, True, pair.now_ms) == [QUEUE]


def test_a_worker_that_says_what_is_unused_before_it_has_joined_is_away(pair: Scene) -> None:
    nearly_over(pair)
    home: Any = pair._running[0][0]._home
    [caller] = home.followers
    home.leave(caller, pair.now_ms)
    for partition in range(PARTITIONS):
        pair.partitions[partition].advance(pair.now_ms)
        assert home.said_unused(partition, [QUEUE], pair.now_ms) is None
    assert not pair.home._rounds
    assert QUEUE in pair.catalog


def test_a_worker_that_joins_takes_the_place_of_the_one_before_it_and_agreed_to_nothing(pair: Scene) -> None:
    """Its earlier connection was lost, and the home has not heard that yet."""
    asked(pair)
    home: Any = pair._running[0][0]._home
    [caller] = home.followers
    number = pair.home._rounds[QUEUE].number
    home.join("its new connection", [1, 3], [], pair.now_ms)
    assert list(home.followers) == ["its new connection"]
    assert home.answered(caller, wire.answer(QUEUE, number, True), pair.now_ms) is None
    assert QUEUE in pair.catalog
    assert home.take_messages() == []


class Crashes(RuleBasedStateMachine):
    @initialize(count=st.integers(1, 4))
    def begin(self, count):
        self.turns = self.ended_at = 0
        self.scene = Scene(count)

    def worker(self, data):
        return data.draw(st.sampled_from(self.scene.running))

    def is_any_running(self):
        return bool(self.scene.running)

    @precondition(is_any_running)
    @rule(data=st.data(), entity_id=st.sampled_from(list(PATHS)), kill_after=st.sampled_from([None] * 6 + [0, 1, 2]))
    def use(self, data, entity_id, kill_after):
        self.scene.use(entity_id, data.draw(st.sampled_from(sorted(self.scene.partitions))), kill_after)

    @rule(steps=st.integers(1, 12))
    def wait(self, steps):
        self.scene.wait_steps(steps)
        self.turns += 1

    @rule(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["turn"] * 12 + ["use"] * 3 + ["start"] * 2 + ["kill", "die"]),
                st.integers(0, PARTITIONS - 1),  # of the partition's worker
                st.sampled_from([QUEUE, QUEUE, TOPIC, SUBSCRIPTION]),
                st.integers(0, 2),
            ),
            min_size=8,
            max_size=40,
        ),
        restarts=st.booleans(),
    )
    def decide(self, steps, restarts):
        """The intervals have ended. What happens to the question whether the entities can be deleted?"""
        if restarts:
            self.scene.start_all()
        nearly_over(self.scene)
        for kind, partition, entity_id, kill_after in steps:
            worker = partition % self.scene.count
            if kind == "start":
                self.scene.start(worker)
            elif worker not in self.scene.running:
                continue
            elif kind == "use":
                self.scene.use(entity_id, partition)
            elif kind == "kill":
                self.scene.kill(worker)
            else:
                self.scene.wait(20, 0)
                self.scene.turn(worker, kill_after if kind == "die" else None)
        self.turns += 1

    @precondition(is_any_running)
    @rule(data=st.data())
    def kill(self, data):
        self.scene.kill(self.worker(data))

    @rule(data=st.data())
    def start(self, data):
        self.scene.start(data.draw(st.integers(0, self.scene.count - 1)))

    @rule()
    def start_all(self):
        self.scene.start_all()

    @precondition(lambda self: 0 in self.scene.running)
    @rarely
    @rule(
        change=st.sampled_from(
            [
                ("update", "wide", {"user_metadata": "x"}),
                ("update", "news/Subscriptions/s", {"user_metadata": "x"}),
                ("delete", "news/Subscriptions/s"),
                ("create", "subscription", {"topic": "news", "name": "new"}, None),
            ]
        )
    )
    def change(self, change):
        before = self.scene.catalog
        self.scene.deleting = {SUBSCRIPTION} if change[0] == "delete" else set()
        reply = self.scene.ask(*change)
        self.scene.deleting = set()
        if reply is not None and reply[0] == Op.REPLY:
            of = QUEUE if change[1] == "wide" else TOPIC
            assert of in before

    @invariant()
    def nothing_accepted_is_lost(self):
        if hasattr(self, "scene"):
            self.scene.check()

    def teardown(self):
        if hasattr(self, "scene"):
            try:
                self.scene.end()
            finally:
                self.scene.close()


TestCrashes = Crashes.TestCase
TestCrashes.settings = model_settings(30, 30)
