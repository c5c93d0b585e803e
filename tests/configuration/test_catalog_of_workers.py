"""While the broker runs, every partition has the home's catalog again, whichever commits a crash has lost."""

import math
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.catalog import changes
from broker.catalog.catalog import Definition, catalog_version, definitions, next_entity_id, reconcile
from broker.catalog.changing import Limits
from broker.errors import (
    BrokerError,
    DestinationNotFound,
    EntityAlreadyExists,
    EntityNotFound,
    InvalidArgument,
    NotAllowed,
    QuotaExceeded,
    ServerBusy,
)
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.namespace.rule_descriptions import RuleDescription, SqlFilter
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.settings.behaviour import Partitioning
from broker.worker.copies import Copies
from broker.worker.held_changes import HoldBounds
from broker.worker.home import GATEWAYS_MS, HANGS_MS, Done, Home
from storage.memory import MemoryStore
from storage.queue_ids import queue_id_of
from storage.records import DELETED_ENTITY_PREFIX, entity_key
from storage.store import Table
from tests.models import model_settings

T0 = 1_000
PARTITIONS = 4
WORKERS = 2  # partition p is on worker p % WORKERS, the home on worker 0
QUEUES = 6
STARTS = count(1)
ENTITIES: list[Description] = [
    *[QueueDescription(name=f"q{n}") for n in range(QUEUES)],
    TopicDescription(name="news"),
    SubscriptionDescription(topic="news", name="s"),
]
LAYOUT = bytes(16)
GATEWAY = "gateway"


def a_rule(name: str, expression: str = "size > 5") -> dict[str, Any]:
    return RuleDescription(name=name, filter=SqlFilter(expression=expression)).document(0)


def by_name(document: dict[str, Any]) -> str:
    return str(document["name"])


class Broker:
    """Workers as they are started, told of changes, and killed between the commits of two of their partitions."""

    def __init__(self, partitioning: Partitioning | None = None, hold_bounds: HoldBounds | None = None) -> None:
        self.partitioning = partitioning or Partitioning(max_entities=3)
        self.keeps_case = False
        self.hold_bounds = hold_bounds or HoldBounds()
        self.stores = [MemoryStore() for _ in range(PARTITIONS)]
        reconcile(self.stores, ENTITIES, T0)
        self.partitions: dict[int, Partition] = {}
        self.copies: dict[int, Copies] = {}
        self.home: Home[Any]
        self.now_ms = T0
        for worker in range(WORKERS):
            self.start(worker)

    def numbers(self, worker: int) -> range:
        return range(worker, PARTITIONS, WORKERS)

    def start(self, worker: int, *, connects: bool = True) -> None:
        for number in self.numbers(worker):
            self.stores[number].abort()
            self.partitions[number] = Partition(
                number,
                self.stores[number],
                now_ms=T0,
                incarnation=next(STARTS).to_bytes(6, "big"),
                settings=PartitionSettings(),
            )
        of_worker = {number: self.partitions[number] for number in self.numbers(worker)}
        stores = dict(enumerate(self.stores))
        self.copies[worker] = copies = Copies(of_worker, stores, lambda partition: None)
        if worker == 0:
            limits = Limits(self.partitioning, keeps_case=self.keeps_case)
            self.home = Home(copies, of_worker, stores, PARTITIONS, limits, self.hold_bounds, self.now_ms)
            copies.align(T0)
            self.commit(0, None)
        else:
            self.home.leave(worker, T0)
        for other in self.copies:  # who is connected to the home gets the catalog
            if connects and other != 0 and (worker in (0, other)):
                self.connect(other)

    def connect(self, worker: int) -> None:
        copies = self.copies[worker]
        version, stored = catalog_version(self.stores[0]), self.copies[0].stored()
        rules = self.home.join(worker, copies.in_service(), copies.lacking(version, stored), T0)
        assert rules.version == version
        copies.catch_up(version, stored, dict(rules.rules), T0)
        self.commit(worker, None)
        self.home.followed(worker, version, T0)

    def commit(self, worker: int, crash_after: int | None) -> bool:
        """False if the worker was killed after so many commits."""
        for at, number in enumerate(self.numbers(worker)):
            if at == crash_after:
                return False
            self.partitions[number].commit()
        return crash_after is None

    def change(self, *arguments: Any, crash_after: tuple[int | None, int | None] = (None, None)) -> Done[Any] | None:
        """As a request at the home; each worker is killed after so many of its commits, and started again."""
        return self._told(self.home.change(GATEWAY, 1, arguments, self.now_ms), crash_after)

    def remove(self, entity_id: int, crash_after: tuple[int | None, int | None] = (None, None)) -> Done[Any] | None:
        """As the worker does of a partition that has deleted the entity."""
        news = self.home.remove([entity_id], T0)
        return None if news is None else self._told(news, crash_after)

    def _told(self, news: Any, crash_after: tuple[int | None, int | None]) -> Done[Any] | None:
        if not self.commit(0, crash_after[0]):
            self.start(0)  # nobody was told
            return None
        assert not self.home.done
        self.follow(news)
        if self.commit(1, crash_after[1]):
            self.home.followed(1, news.version, T0)
        else:
            self.start(1)
        [told] = self.home.take_news()
        [done] = self.home.take_done()
        assert done.news == told == news
        return done

    def follow(self, news: Any) -> bool:
        copies = self.copies[1]
        if hasattr(news, "changes"):
            return copies.change(news.version, [*changes.decided(news.changes)], T0)
        return copies.remove(news.version, news.entity_ids, T0)

    def known(self) -> list[set[int]]:
        return [{item.entity_id for item in definitions(store)} for store in self.stores]

    def tables(self, number: int) -> Any:
        store = self.stores[number]
        entities, rules = (store.scan(table, b"\0", b"\xff" * 300, 1000) for table in (Table.ENTITIES, Table.RULES))
        return catalog_version(store), next_entity_id(store), entities, rules

    def free(self) -> None:
        """Let all partitions delete the messages and rules of deleted entities."""
        for partition in self.partitions.values():
            while (due_ms := partition.next_timer_ms()) is not None:
                partition.advance(due_ms)
                partition.commit()

    def check(self) -> None:
        self.free()
        for number in range(PARTITIONS):
            assert self.tables(number) == self.tables(0), number
            restarted = Partition(
                number, self.stores[number], now_ms=T0, incarnation=bytes(6), settings=PartitionSettings()
            )
            assert self.partitions[number]._core.entities.terms == restarted._core.entities.terms
            for item in definitions(self.stores[0]):
                if item.description.kind == "subscription":
                    one, other = (each.rules(item.entity_id) for each in (self.partitions[number], restarted))
                    assert sorted(one, key=by_name) == sorted(other, key=by_name)  # those of one moment in any order


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.mark.parametrize("next_deletion", [False, True])
def test_a_partition_beside_the_home_catches_up_after_a_crash_between_their_commits(broker, next_deletion):
    created = broker.change("create", "queue", {"name": "wide", "enable_partitioning": True}, None)
    wide = created.result["entity_id"]
    for partition in broker.partitions.values():
        partition.send(queue_id_of(wide), [[LAYOUT, b"old", None, None]] * 3, T0)
        partition.commit()
    broker.remove(wide, (1, None))
    if next_deletion:
        broker.remove(2)
    broker.check()
    for store in broker.stores:
        assert store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 10) == []
        assert store.scan(Table.META, DELETED_ENTITY_PREFIX, DELETED_ENTITY_PREFIX + b"\xff" * 5, 10) == []


def test_the_home_remembers_the_stores_of_all_partitions_and_tells_which_are_others(broker):
    first = [(each, b"store %d" % each) for each in range(PARTITIONS)]
    assert broker.home.recognize(first[:2]) == []
    assert broker.home.recognize(first[2:]) == []
    for _ in range(2):
        assert broker.home.recognize([list(each) for each in first]) == []
        broker.commit(0, None)
        broker.start(0)  # also over a restart
    assert broker.home.recognize([(1, b"another"), (2, b"store 2"), (3, b"a third")]) == [1, 3]
    assert broker.home.recognize([(1, b"another"), (2, b"store 2"), (3, b"a third")]) == []
    broker.check()


def test_contents_are_compared_and_not_only_version_numbers(broker):
    key = entity_key(1)
    definition = broker.stores[0].get(Table.ENTITIES, key)
    assert definition is not None
    broker.remove(1)
    for store in broker.stores[1:]:  # as an older release has left it
        store.put(Table.ENTITIES, key, definition)
        store.commit()
    for worker in range(WORKERS):
        broker.start(worker)
    broker.check()


def test_a_deletion_after_one_that_was_not_heard_of_does_not_hide_it(broker):
    for entity_id in (1, 2):
        news = broker.home.remove([entity_id], T0)
        broker.commit(0, None)
    assert not broker.follow(news)
    broker.commit(1, None)
    broker.connect(1)
    broker.check()
    assert [news.version for news in broker.home.take_news()] == [2, 3]
    broker.home.take_done()


def test_what_is_created_is_on_all_partitions_when_the_client_is_answered(broker):
    properties = {"name": "new", "lock_duration_ms": 60_000, "enable_partitioning": True}
    done = broker.change("create", "queue", properties, None)
    assert done.caller == GATEWAY
    assert (done.result["name"], done.result["lock_duration_ms"]) == ("new", 60_000)
    for partition in broker.partitions.values():
        partition.send(queue_id_of(done.result["entity_id"]), [[LAYOUT, b"m", None, None]], T0)
    broker.check()


def test_a_subscription_gets_its_rules_everywhere_or_takes_every_message(broker):
    rules = [a_rule("a"), a_rule("B", "size < 2")]
    some = broker.change("create", "subscription", {"topic": "NEWS", "name": "some"}, rules)
    everything = broker.change("create", "subscription", {"topic": "news", "name": "all"}, None)
    assert some.result["topic"] == "news"
    for partition in broker.partitions.values():
        assert {each["name"] for each in partition.rules(some.result["entity_id"])} == {"a", "B"}
        assert [each["filter"]["kind"] for each in partition.rules(everything.result["entity_id"])] == ["true"]
    broker.check()


def test_a_change_leaves_other_properties_and_the_messages(broker):
    broker.change("update", "Q0", {"max_delivery_count": 3})
    done = broker.change("update", "q0", {"lock_duration_ms": 7000})
    assert (done.result["max_delivery_count"], done.result["lock_duration_ms"]) == (3, 7000)
    assert done.result["entity_id"] == 1
    broker.check()


def test_a_queue_whose_name_looks_like_a_subscription_is_found_and_forwarded_to(broker):
    broker.change("create", "queue", {"name": "news/subscriptions/a/b"}, None)
    done = broker.change("update", "q0", {"forward_to": "News/Subscriptions/a/b"})
    assert done.result["forward_to"] == "News/Subscriptions/a/b"
    broker.change("update", "NEWS/subscriptions/A/b", {"max_delivery_count": 3})
    broker.check()


def test_a_deleted_topic_goes_with_its_subscriptions(broker):
    broker.change("delete", "News")
    assert broker.known()[3] == set(range(1, QUEUES + 1))
    new = broker.change("create", "topic", {"name": "news"}, None)
    assert new.result["entity_id"] == len(ENTITIES) + 1  # no id is ever used again
    broker.check()


def test_rules_of_a_partitioned_topic_change_on_all_partitions(broker):
    broker.change("create", "topic", {"name": "wide", "enable_partitioning": True}, None)
    done = broker.change("create", "subscription", {"topic": "wide", "name": "s"}, [a_rule("a")])
    entity_id, path = done.result["entity_id"], "wide/Subscriptions/s"
    assert done.result["partitions"] == [*range(PARTITIONS)]
    broker.now_ms += 5
    broker.change("add-rule", path, a_rule("b"))
    broker.change("remove-rule", path, "A")
    for partition in broker.partitions.values():
        assert [(each["name"], each["created_ms"]) for each in partition.rules(entity_id)] == [("b", T0 + 5)]
    broker.now_ms += 5
    broker.change("replace-rule", path, a_rule("B", "size > 7"))
    for partition in broker.partitions.values():
        [replaced] = partition.rules(entity_id)
        assert (replaced["name"], replaced["created_ms"]) == ("b", T0 + 5)
        assert replaced["filter"]["expression"] == "size > 7"
    with pytest.raises(InvalidArgument):
        broker.change("replace-rule", path, a_rule("b", "size >"))
    with pytest.raises(EntityNotFound, match="Rules/none"):
        broker.change("replace-rule", path, a_rule("none"))
    for wrong, name in ((EntityAlreadyExists, "B"), (InvalidArgument, "c")):
        with pytest.raises(wrong):
            broker.change("add-rule", path, a_rule(name, "size >" if name == "c" else "1 = 1"))
    with pytest.raises(EntityNotFound, match="Rules/a"):
        broker.change("remove-rule", path, "a")
    with pytest.raises(NotAllowed):
        broker.change("add-rule", "wide", a_rule("b"))
    broker.check()


def test_a_partition_that_missed_a_change_of_rules_gets_them_when_it_comes_back(broker):
    broker.change("create", "topic", {"name": "wide", "enable_partitioning": True}, None)
    broker.change("create", "subscription", {"topic": "wide", "name": "s"}, [a_rule("a"), a_rule("b")])
    broker.change("remove-rule", "wide/Subscriptions/s", "a", crash_after=(None, 1))
    broker.change("add-rule", "wide/Subscriptions/s", a_rule("c"), crash_after=(None, 0))
    broker.change("add-rule", "wide/Subscriptions/s", a_rule("d"), crash_after=(1, None))
    broker.check()
    assert [each["name"] for each in broker.partitions[3].rules(10)] == ["b", "c", "d"]


def test_a_partition_refuses_what_is_for_an_entity_that_it_has_not_heard_of_as_busy(broker):
    properties = {"name": "new", "enable_partitioning": True}
    news = broker.home.change(GATEWAY, 1, ["create", "queue", properties, None], T0)
    [[_, document, _]] = news.changes
    queue = queue_id_of(document["entity_id"])
    with pytest.raises(ServerBusy):
        broker.partitions[1].send(queue, [[LAYOUT, b"m", None, None]], T0)
    broker.commit(0, None)
    broker.follow(news)
    broker.home.followed(1, news.version, T0)
    broker.home.take_news()
    broker.home.take_done()
    broker.partitions[1].send(queue, [[LAYOUT, b"m", None, None]], T0)
    broker.change("delete", "q1")
    with pytest.raises(EntityNotFound):
        broker.partitions[1].send(queue_id_of(2), [[LAYOUT, b"m", None, None]], T0)


def test_while_a_partition_is_away_changes_name_it_and_change_nothing(broker):
    before = [broker.tables(number) for number in range(PARTITIONS)]
    broker.home.leave(1, T0)
    for change in (
        ("create", "queue", {"name": "new"}, None),
        ("update", "q0", {"max_delivery_count": 3}),
        ("delete", "q0"),
        ("add-rule", "news/subscriptions/s", a_rule("a")),
    ):
        with pytest.raises(ServerBusy, match="Partition 1 "):
            broker.change(*change)
    assert [broker.tables(number) for number in range(PARTITIONS)] == before
    broker.connect(1)
    broker.change("delete", "q0")
    broker.check()


def test_a_worker_that_hangs_holds_up_no_more_than_one_change(broker):
    broker.home.change(GATEWAY, 1, ["create", "queue", {"name": "a"}, None], T0)
    broker.home.change(GATEWAY, 2, ["create", "queue", {"name": "b"}, None], T0 + HANGS_MS)
    with pytest.raises(ServerBusy, match="Partition 1 does not answer"):
        broker.home.change(GATEWAY, 3, ["create", "queue", {"name": "c"}, None], T0 + HANGS_MS + 1)
    assert broker.home.take_done() == []
    broker.commit(0, None)
    broker.start(1)
    assert len(broker.home.take_news()) == 2
    assert [done.number for done in broker.home.take_done()] == [1, 2]
    broker.change("create", "queue", {"name": "c"}, None)
    broker.check()


def test_the_client_is_answered_when_the_gateways_know_and_one_that_hangs_is_not_waited_for(broker):
    home = broker.home
    for gateway in ("one", "other"):
        home.join(gateway, [], [], T0)
    news = home.change("one", 1, ["create", "queue", {"name": "a"}, None], T0)
    assert not home.has_news
    broker.follow(news)
    home.followed(1, news.version, T0)
    assert (home.take_news(), home.take_done()) == ([news], [])
    home.followed("one", news.version, T0)
    assert not home.has_news
    home.look(T0 + GATEWAYS_MS - 1)
    assert not home.has_news
    home.look(T0 + GATEWAYS_MS)
    [done] = home.take_done()
    assert (done.caller, done.number) == ("one", 1)
    second = home.change("one", 2, ["delete", "a"], T0)
    home.followed(1, second.version, T0)
    home.followed("one", second.version, T0)
    home.leave("other", T0)
    assert [done.number for done in home.take_done()] == [2]


def test_a_worker_that_comes_again_is_not_waited_for_on_its_earlier_connection(broker):
    home = broker.home
    news = home.change(GATEWAY, 1, ["create", "queue", {"name": "a"}, None], T0)
    home.join("again", [1, 3], [], T0)
    assert [*home.followers] == ["again"]
    assert (home.take_news(), [done.number for done in home.take_done()]) == ([news], [1])


QUEUE = {"name": "new"}


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (EntityAlreadyExists, "'Q1' already exists", ("create", "queue", {"name": "Q1"}, None)),
        (EntityAlreadyExists, "'NEWS' already exists", ("create", "queue", {"name": "NEWS"}, None)),
        (EntityAlreadyExists, "Subscriptions/S", ("create", "subscription", {"topic": "News", "name": "S"}, None)),
        (EntityNotFound, "'q1'", ("create", "subscription", {"topic": "q1", "name": "x"}, None)),
        (EntityNotFound, "'none'", ("create", "subscription", {"topic": "none", "name": "x"}, None)),
        (EntityNotFound, "'none'", ("update", "none", {})),
        (EntityNotFound, "'none'", ("delete", "none")),
        (InvalidArgument, "path", ("delete", 7)),
        (InvalidArgument, "kind", ("create", "relay", QUEUE, None)),
        (InvalidArgument, "kind", ("create", ["queue"], QUEUE, None)),
        (InvalidArgument, "not a map", ("create", "queue", None, None)),
        (InvalidArgument, "not a map", ("update", "q0", [1])),
        (InvalidArgument, "name", ("create", "queue", {}, None)),
        (InvalidArgument, "colour", ("create", "queue", {"name": "new", "colour": "red"}, None)),
        (InvalidArgument, "lock_duration_ms.*5000", ("create", "queue", QUEUE | {"lock_duration_ms": 4999}, None)),
        (InvalidArgument, "lock_duration_ms.*604800000", ("update", "q0", {"lock_duration_ms": 2**63})),
        (InvalidArgument, "lock_duration_ms.*at most 300000", ("update", "q0", {"lock_duration_ms": 300_001})),
        (
            InvalidArgument,
            "lock_duration_ms.*at most 300000",
            ("create", "queue", QUEUE | {"lock_duration_ms": 300_001}, None),
        ),
        (InvalidArgument, "lock_duration_ms", ("update", "q0", {"lock_duration_ms": math.nan})),
        (InvalidArgument, "user_metadata.*1024", ("update", "q0", {"user_metadata": "x" * 1025})),
        (InvalidArgument, "name cannot be changed", ("update", "q0", {"name": "q9"})),
        (InvalidArgument, "topic cannot", ("update", "news/Subscriptions/s", {"topic": "q0"})),
        (InvalidArgument, "requires_session is false", ("update", "q0", {"requires_session": True})),
        (InvalidArgument, "enable_partitioning is false", ("update", "q0", {"enable_partitioning": True})),
        (DestinationNotFound, "forward_to.*'none'", ("update", "q0", {"forward_to": "none"})),
        (InvalidArgument, "forward_to", ("update", "q0", {"forward_to": "news/Subscriptions/s"})),
        (InvalidArgument, "the entity itself", ("create", "queue", {"name": "round", "forward_to": "Round"}, None)),
        (NotAllowed, "only subscriptions", ("create", "queue", QUEUE, [a_rule("a")])),
        (
            EntityAlreadyExists,
            "x/Rules/A' already exists",
            ("create", "subscription", {"topic": "news", "name": "x"}, [a_rule("a"), a_rule("A")]),
        ),
        (
            InvalidArgument,
            "column=7",
            ("create", "subscription", {"topic": "news", "name": "x"}, [a_rule("a", "size >")]),
        ),
        (InvalidArgument, "no change", ("rename", "q0", "q1")),
        (InvalidArgument, "no change", ()),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason_and_changes_nothing(broker, error, text, change):
    before = [broker.tables(number) for number in range(PARTITIONS)]
    with pytest.raises(error, match=text):
        broker.change(*change)
    assert not broker.partitions[0].has_changed
    assert [broker.tables(number) for number in range(PARTITIONS)] == before


def test_the_namespace_has_no_more_partitioned_entities_than_allowed(broker):
    for name in "abc":
        broker.change("create", "queue", {"name": name, "enable_partitioning": True}, None)
    with pytest.raises(QuotaExceeded, match=r"3 partitioned.*partitioning\.max_entities"):
        broker.change("create", "queue", {"name": "d", "enable_partitioning": True}, None)
    broker.change("delete", "a")
    broker.change("create", "topic", {"name": "d", "enable_partitioning": True}, None)


def test_the_namespace_decides_whether_entities_are_partitioned():
    broker = Broker(Partitioning(default=True))
    wide = broker.change("create", "queue", {"name": "wide"}, None)
    plain = broker.change("create", "queue", {"name": "plain", "enable_partitioning": False}, None)
    assert [len(done.result["partitions"]) for done in (wide, plain)] == [PARTITIONS, 1]
    assert broker.change("update", "wide", {"user_metadata": "x"}).result["enable_partitioning"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=9)
    | st.sampled_from(["queue", "q0", "news", "news/Subscriptions/s", "a" * 300]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*SubscriptionDescription.model_fields]) | st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)


@model_settings(200, 1)
@given(
    name=st.sampled_from(["create", "update", "delete"]) | st.text(max_size=3),
    kind=st.sampled_from(["queue", "topic", "subscription", "q0", "news/Subscriptions/s"]) | VALUES,
    fields=VALUES,
)
def test_only_a_broker_error_comes_out_of_a_change(name, kind, fields):
    broker = Broker()
    for arguments in ([name, kind, fields, None], [name, kind, fields], [name, kind]):
        try:
            broker.change(*arguments)
        except BrokerError:
            assert not broker.partitions[0].has_changed
    broker.check()


CRASHES = st.sampled_from([None, None, None, 0, 1])
NAMES = st.sampled_from(["a", "b", "C", "c", "news", "wide"])


class Crashes(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.broker = Broker()

    @rule(data=st.data(), home=CRASHES, other=CRASHES)
    def remove(self, data, home, other):
        if left := sorted(self.broker.known()[0]):
            self.broker.remove(data.draw(st.sampled_from(left)), (home, other))

    @rule(
        kind=st.sampled_from(["queue", "topic", "subscription"]),
        name=NAMES,
        topic=NAMES,
        wide=st.booleans(),
        rules=st.none() | st.lists(NAMES.map(a_rule), max_size=3),
        home=CRASHES,
        other=CRASHES,
    )
    def create(self, kind, name, topic, wide, rules, home, other):
        fields = {"name": name} | ({"topic": topic} if kind == "subscription" else {"enable_partitioning": wide})
        self.try_to("create", kind, fields, rules, crash_after=(home, other))

    @rule(data=st.data(), change=st.sampled_from(["update", "delete", "add", "remove"]), home=CRASHES, other=CRASHES)
    def change(self, data, change, home, other):
        items = definitions(self.broker.stores[0])
        if change in ("add", "remove"):
            wide = [item for item in items if item.description.kind == "subscription" and len(item.partitions) > 1]
            if wide:
                path, name = data.draw(st.sampled_from(wide)).description.path, data.draw(NAMES)
                argument = a_rule(name) if change == "add" else name
                self.try_to(f"{change}-rule", path, argument, crash_after=(home, other))
        elif items:
            path = data.draw(st.sampled_from(items)).description.path
            fields = [{"user_metadata": data.draw(NAMES)}] if change == "update" else []
            self.try_to(change, path, *fields, crash_after=(home, other))

    def try_to(self, *change, crash_after):
        try:
            self.broker.change(*change, crash_after=crash_after)
        except (EntityAlreadyExists, EntityNotFound, QuotaExceeded, NotAllowed):
            assert not self.broker.partitions[0].has_changed

    @rule(worker=st.integers(0, WORKERS - 1))
    def restart(self, worker):
        self.broker.start(worker)

    @invariant()
    def all_partitions_have_the_same_catalog(self):
        if hasattr(self, "broker"):
            self.broker.check()


TestCrashes = Crashes.TestCase
TestCrashes.settings = model_settings(30, 12)


# --- temporary entities -----------------------------------------------------------------------------------------------


def provide(broker: Broker, holder: int, name: str = "replies", caller: str = GATEWAY) -> int:
    """The id of the queue that there is or is made, held by this holder of the gateway."""
    news = broker.home.change(caller, holder, ["provide", "queue", {"name": name}, None, holder], broker.now_ms)
    done = broker.home.take_done()[0] if news is None else broker._told(news, (None, None))
    assert done is not None
    return int(done.result["entity_id"])


def remove_orphans(broker: Broker) -> None:
    news = broker.home.remove_orphans(T0)
    if news is not None:
        broker._told(news, (None, None))


def names(broker: Broker) -> list[str]:
    return [item.description.path for item in definitions(broker.stores[1]) if item.temporary]


def release(broker: Broker, holder: int, caller: str = GATEWAY) -> None:
    assert broker.home.change(caller, 1, ["release", holder], T0) is None
    [done] = broker.home.take_done()
    assert done.news is None


def test_a_temporary_entity_is_deleted_when_nobody_holds_it(broker: Broker) -> None:
    made = provide(broker, 1)
    assert provide(broker, 2) == made
    assert provide(broker, 1, caller="another gateway") == made
    for holder, caller in ((1, GATEWAY), (2, GATEWAY)):
        release(broker, holder, caller)
        remove_orphans(broker)
        assert names(broker) == ["replies"]
    broker.home.leave("another gateway", T0)
    assert names(broker) == ["replies"]  # until somebody looks
    remove_orphans(broker)
    assert names(broker) == []
    broker.check()


def test_who_comes_before_the_deletion_keeps_a_temporary_entity(broker: Broker) -> None:
    made = provide(broker, 1)
    release(broker, 1)
    assert provide(broker, 2) == made
    remove_orphans(broker)
    assert names(broker) == ["replies"]


def test_after_a_start_of_the_home_nobody_holds_anything(broker: Broker) -> None:
    provide(broker, 1)
    provide(broker, 2, "others")
    broker.start(0)
    assert names(broker) == ["replies", "others"]
    remove_orphans(broker)
    assert names(broker) == []
    assert {item.description.path for item in definitions(broker.stores[0])} >= {"q0", "news"}
    broker.check()


def test_a_release_is_taken_while_entities_cannot_be_changed(broker: Broker) -> None:
    provide(broker, 1)
    broker.home.leave(1, T0)  # the other worker
    with pytest.raises(ServerBusy):
        broker.change("create", "queue", {"name": "new"}, None)
    release(broker, 1)
    assert broker.home.remove_orphans(T0) is not None


def test_what_is_provided_and_there_already_stays_as_it_is(broker: Broker) -> None:
    known = broker.home.change(GATEWAY, 1, ["provide", "queue", {"name": "Q0"}, None, 7], T0)
    assert known is None
    [done] = broker.home.take_done()
    assert done.result["name"] == "q0"
    release(broker, 7)
    assert broker.home.remove_orphans(T0) is None
    with pytest.raises(EntityAlreadyExists):
        broker.home.change(GATEWAY, 1, ["provide", "queue", {"name": "news"}, None, 7], T0)


def test_what_was_deleted_by_others_is_held_no_more(broker: Broker) -> None:
    provide(broker, 1)
    broker.change("delete", "replies")
    release(broker, 1)
    assert broker.home.remove_orphans(T0) is None


def test_a_second_answer_waits_for_the_creation_by_the_first(broker: Broker) -> None:
    news = broker.home.change(GATEWAY, 1, ["provide", "queue", {"name": "replies"}, None, 1], T0)
    assert broker.home.change("other", 2, ["provide", "queue", {"name": "replies"}, None, 1], T0) is None
    assert not broker.home.take_done()
    broker.commit(0, None)
    broker.follow(news)
    broker.commit(1, None)
    assert news is not None
    broker.home.followed(1, news.version, T0)
    assert [done.caller for done in broker.home.take_done()] == [GATEWAY, "other"]


def test_temporary_entities_do_not_use_up_the_ids(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.worker.home.LAST_ID", next_entity_id(broker.stores[0]))
    provide(broker, 1)
    with pytest.raises(QuotaExceeded):
        provide(broker, 2, "more")
    assert broker.change("create", "queue", {"name": "more"}, None) is not None


def test_definitions_that_are_not_temporary_are_stored_as_before(broker: Broker) -> None:
    provide(broker, 1)
    for item in definitions(broker.stores[0]):
        document = item.document()
        assert ("temporary" in document) == item.temporary == (item.description.path == "replies")
        assert Definition.from_document(document) == item
