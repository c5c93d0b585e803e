import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broker.catalog.catalog import (
    CannotReconcile,
    Definition,
    Reconciled,
    Update,
    catalog_version,
    definitions,
    home_partition,
    reconcile,
)
from broker.namespace.entities import (
    KEPT_FOR_CLIENTS,
    AuthorizationRule,
    Description,
    QueueDescription,
    Right,
    Status,
    SubscriptionDescription,
    TopicDescription,
)
from broker.namespace.rule_descriptions import DEFAULT_RULE, RuleDescription, SqlAction, SqlFilter
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.partition.state.terms import Terms
from broker.settings.behaviour import Partitioning
from broker.settings.config import ConfigurationError
from storage.lmdb_store import LmdbStore
from storage.memory import MemoryStore
from storage.records import decode_document, encode_document, entity_key, rule_key
from storage.store import Store, StoreError, StoreFull, Table
from tests.examples import examples

T0, T1, T2 = 1_000, 2_000, 3_000
PARTITIONS = 3


class Crash(Exception): ...


class Crashing(MemoryStore):
    """Does not survive its commit when told so: `keeps` says if the commit still got to the disk."""

    crash = False
    keeps = False

    def commit(self) -> None:
        if not self.crash:
            super().commit()
            return
        self.crash = False
        if self.keeps:
            super().commit()
        else:
            self.abort()
        raise Crash


@pytest.fixture
def stores() -> list[Crashing]:
    return [Crashing() for _ in range(PARTITIONS)]


def queue(name="orders", **properties) -> QueueDescription:
    return QueueDescription(name=name, **properties)


def contents(store: Store) -> list[list[tuple[bytes, bytes]]]:
    return [store.scan(table, b"", b"\xff" * 64, 1000) for table in Table]


def stored(entity_id: int, described: Description, updated_ms: int = T0, partitions: int = PARTITIONS) -> Definition:
    """The definition of a plain entity that was created at T0, in a namespace with so many partitions."""
    return Definition(entity_id, described, T0, updated_ms, (home_partition(described.home_name, partitions),))


def assert_alike(stores) -> None:
    assert all(contents(store) == contents(stores[0]) for store in stores)
    assert not any(store.dirty for store in stores)


def test_a_missing_entity_is_created_on_all_partitions(stores):
    orders = queue(lock_duration_ms=60_000, authorization_rules=(
        AuthorizationRule(key_name="k", primary_key="p", secondary_key=None, rights=frozenset({Right.SEND})),
    ))  # fmt: skip
    assert reconcile(stores, [orders, queue("bills")], T0) == Reconciled(1, ("orders", "bills"), (), ())
    for store in stores:
        assert definitions(store) == [stored(1, orders), stored(2, queue("bills"))]
        assert catalog_version(store) == 1
    assert_alike(stores)


def test_nothing_declared_changes_nothing(stores):
    assert reconcile(stores, [], T0) == Reconciled(0, (), (), ())
    assert contents(stores[0]) == contents(MemoryStore())


def test_the_same_declaration_again_changes_nothing(stores):
    reconcile(stores, [queue()], T0)
    before = contents(stores[0])
    assert reconcile(stores, [queue()], T1) == Reconciled(1, (), (), ())
    assert contents(stores[0]) == before


def test_mutable_differences_are_updated_and_named(stores):
    reconcile(stores, [queue(), queue("other")], T0)
    wanted = queue(max_delivery_count=3, status=Status.SEND_DISABLED, forward_to="other")
    result = reconcile(stores, [wanted], T1)
    changed = ("status", "max_delivery_count", "forward_to")
    assert result == Reconciled(2, (), (Update("orders", changed),), ())
    for store in stores:
        assert definitions(store) == [stored(1, wanted, T1), stored(2, queue("other"))]
    assert_alike(stores)


def test_every_property_but_the_immutable_can_be_updated(stores):
    other = queue(
        lock_duration_ms=5_000, max_delivery_count=1, default_message_time_to_live_ms=1_000,
        dead_lettering_on_message_expiration=True, duplicate_detection_history_time_window_ms=5_000,
        enable_batched_operations=False, max_size_mb=1, max_message_size_kb=1, auto_delete_on_idle_ms=300_000,
        forward_to="a", forward_dead_lettered_messages_to="b", status=Status.DISABLED, user_metadata="m",
        authorization_rules=(AuthorizationRule(key_name="k", primary_key="p", rights=frozenset()),),
        enable_express=True, support_ordering=True, forward_to_scheme="http",
        forward_dead_lettered_messages_to_scheme="https",
    )  # fmt: skip
    reconcile(stores, [queue(), queue("a"), queue("b")], T0)
    [update] = reconcile(stores, [other], T1).updated
    assert set(update.properties) == set(QueueDescription.model_fields) - {"name", *QueueDescription.immutable}
    assert definitions(stores[1])[0].description == other


@pytest.mark.parametrize("name", QueueDescription.immutable)
@pytest.mark.parametrize("stored", [True, False])
def test_an_immutable_difference_names_entity_property_and_values(stores, name, stored):
    reconcile(stores, [queue("Orders", **{name: stored})], T0, keep_case=True)
    before = [contents(store) for store in stores]
    words = {True: "true", False: "false"}
    with pytest.raises(
        CannotReconcile,
        match=f"queue 'Orders': {name} is {words[stored]} since its creation and cannot become {words[not stored]}",
    ):
        reconcile(stores, [queue("new"), queue("orders", max_delivery_count=3, **{name: not stored})], T1)
    assert [contents(store) for store in stores] == before
    assert not any(store.dirty for store in stores)


def test_all_immutable_differences_are_told_at_once(stores):
    reconcile(stores, [queue("a"), queue("b")], T0)
    wanted = [queue("a", requires_session=True, enable_partitioning=True), queue("b", requires_session=True)]
    with pytest.raises(CannotReconcile) as raised:
        reconcile(stores, wanted, T1)
    assert len(str(raised.value).splitlines()) == 3


def test_the_user_is_told_as_of_any_wrong_configuration():
    assert issubclass(CannotReconcile, ConfigurationError)


def test_names_are_one_in_any_case_and_keep_their_first_spelling(stores):
    reconcile(stores, [queue("Orders")], T0, keep_case=True)
    assert reconcile(stores, [queue("ORDERS")], T1) == Reconciled(1, (), (), ())
    reconcile(stores, [queue("orders", max_delivery_count=3)], T2)
    assert [item.description.name for item in definitions(stores[0])] == ["Orders"]


def test_entities_that_are_not_declared_stay(stores):
    reconcile(stores, [queue("a"), queue("b")], T0)
    reconcile(stores, [queue("c")], T1)
    assert [(item.entity_id, item.description.name) for item in definitions(stores[2])] == [
        (1, "a"),
        (2, "b"),
        (3, "c"),
    ]


def reconcile_until(crash_at: int, keeps: bool, stores: list[Crashing], declared) -> None:
    stores[crash_at].crash, stores[crash_at].keeps = True, keeps
    with pytest.raises(Crash):
        reconcile(stores, declared, T1)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_a_crash_between_partitions_is_mended_at_the_next_start(stores, partition, keeps):
    declared = [queue("a", max_delivery_count=3), queue("b")]
    reconcile(stores, [queue("a")], T0)
    reconcile_until(partition, keeps, stores, declared)
    result = reconcile(stores, declared, T2)
    began = partition > 0 or keeps
    assert result.version == 2
    assert result.created == (() if began else ("b",))
    assert result.copied == (tuple(range(partition + keeps, PARTITIONS)) if began else ())
    assert [item.description for item in definitions(stores[2])] == declared
    assert_alike(stores)


def test_a_crash_is_mended_even_if_the_declaration_is_gone(stores):
    reconcile_until(1, False, stores, [queue("a")])
    assert reconcile(stores, [], T2) == Reconciled(1, (), (), (1, 2))
    assert [item.description.name for item in definitions(stores[2])] == ["a"]
    assert_alike(stores)


def test_the_latest_catalog_wins_after_a_restore_of_copies_from_different_moments():
    older = MemoryStore()
    reconcile([older], [queue("a")], T0)
    newer = MemoryStore()
    reconcile([newer], [queue("a")], T0)
    reconcile([newer], [queue("b")], T1)
    stores = [older, newer]
    assert reconcile(stores, [queue("c")], T2) == Reconciled(3, ("c",), (), (0,))
    assert [(item.entity_id, item.description.name) for item in definitions(older)] == [(1, "a"), (2, "b"), (3, "c")]
    assert_alike(stores)


def test_a_full_home_starts_nothing():
    stores = [MemoryStore(capacity_bytes=64), MemoryStore()]
    with pytest.raises(StoreFull):
        reconcile(stores, [queue()], T0)
    assert definitions(stores[1]) == []


@pytest.mark.parametrize(
    ("table", "key", "reading"),
    [(Table.ENTITIES, entity_key(1), "entity 1"), (Table.META, b"catalog-version", "META catalog-version")],
)
def test_a_corrupt_record_is_named(stores, table, key, reading):
    reconcile(stores, [queue()], T0)
    stores[0].put(table, key, b"nonsense")
    stores[0].commit()
    with pytest.raises(StoreError, match=reading):
        reconcile(stores, [queue()], T1)


def test_an_entity_of_an_unknown_kind_is_refused():
    document = {**Definition(1, queue(), T0, T0).document(), "kind": "ring"}
    with pytest.raises(ValueError, match="kind 'ring' is unknown"):
        Definition.from_document(document)


@pytest.mark.parametrize("change", [{"lock_duration_ms": 1}, {"color": "red"}, {"partitions": None}])
def test_a_definition_out_of_its_limits_is_refused(change):
    with pytest.raises(ValueError, match="not a definition"):
        Definition.from_document({**Definition(1, queue(), T0, T0).document(), **change})


def test_a_definition_without_its_id_is_refused():
    document = Definition(1, queue(), T0, T0).document()
    del document["entity_id"]
    with pytest.raises(ValueError, match="not a definition"):
        Definition.from_document(document)


def test_entities_are_there_after_a_restart(tmp_path):
    def opened():
        return [
            LmdbStore(tmp_path / str(number), partition_id=number, map_size_bytes=1 << 24, create=True)
            for number in range(2)
        ]

    for now_ms, expected in ((T0, ("orders",)), (T1, ())):
        stores = opened()
        try:
            assert reconcile(stores, [queue(max_size_mb=5)], now_ms).created == expected
            assert definitions(stores[1]) == [stored(1, queue(max_size_mb=5), partitions=len(stores))]
        finally:
            for store in stores:
                store.close()


NAMES = st.sampled_from(["a", "A", "b", "c/d"])


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.tuples(
            st.dictionaries(NAMES.map(str.lower), st.integers(1, 3), max_size=3),
            st.none() | st.tuples(st.integers(0, PARTITIONS - 1), st.booleans()),
        ),
        max_size=6,
    )
)
def test_after_any_crashes_a_last_start_makes_all_partitions_equal(starts):
    stores = [Crashing() for _ in range(PARTITIONS)]
    begun: dict[str, set[int]] = {}
    for declared, crash in starts:
        for name, count in declared.items():
            begun.setdefault(name, set()).add(count)
        if crash:
            stores[crash[0]].crash, stores[crash[0]].keeps = True, crash[1]
        try:
            reconcile(stores, [queue(name, max_delivery_count=count) for name, count in declared.items()], T0)
        except Crash:
            continue
        finally:
            for store in stores:
                store.crash = False
        assert_alike(stores)
        found = {item.description.name: item.description.max_delivery_count for item in definitions(stores[0])}
        assert declared.items() <= found.items()
    reconcile(stores, [], T1)
    assert_alike(stores)
    left = definitions(stores[0])
    assert len({item.entity_id for item in left}) == len(left)
    assert all(item.description.max_delivery_count in begun[item.description.name] for item in left)


# Where a plain entity is put: versions that did not record it computed these values.


def test_the_home_of_a_name_never_changes():
    names = ["orders", "queue.1", "a/b/c", "x", "invoices-2024"]
    assert [home_partition(name, 4) for name in names] == [3, 3, 3, 1, 0]
    assert [home_partition(name, 1) for name in names] == [0] * 5


def test_the_home_does_not_depend_on_case():
    assert home_partition("ORDERS", 64) == home_partition("orders", 64)


def test_names_spread_over_partitions():
    homes = [home_partition(f"queue-{number}", 8) for number in range(800)]
    assert all(60 < homes.count(partition) < 140 for partition in range(8))


# Where entities live


def placed(stores, name: str) -> tuple[int, ...]:
    [found] = {item.partitions for store in stores for item in definitions(store) if item.description.path == name}
    return found


def test_a_partitioned_entity_lives_on_all_partitions_and_a_subscription_where_its_topic_does(stores):
    declared: list[Description] = [
        queue(enable_partitioning=True), topic(enable_partitioning=True), subscription(), topic("news"),
        subscription(topic="news"),
    ]  # fmt: skip
    reconcile(stores, declared, T0)
    everywhere, at_home = tuple(range(PARTITIONS)), (home_partition("news", PARTITIONS),)
    assert placed(stores, "orders") == placed(stores, "prices") == placed(stores, subscription().path) == everywhere
    assert placed(stores, "news") == placed(stores, "news/Subscriptions/audit") == at_home


def test_the_default_of_the_namespace_holds_for_new_entities_that_do_not_say(stores):
    partitioning = Partitioning(default=True)
    declared: list[Description] = [queue(), queue("plain", enable_partitioning=False), topic(), subscription()]
    reconcile(stores, declared, T0, partitioning=partitioning)
    everywhere = tuple(range(PARTITIONS))
    assert placed(stores, "orders") == placed(stores, "prices") == placed(stores, subscription().path) == everywhere
    assert placed(stores, "plain") == (home_partition("plain", PARTITIONS),)
    unchanged = reconcile(stores, [queue(), topic(), subscription()], T1)
    assert unchanged == Reconciled(1, (), (), ()), "what is stored stays, whatever the default is now"
    assert reconcile(stores, [queue("later")], T1).created == ("later",)
    assert placed(stores, "later") == (home_partition("later", PARTITIONS),)


def test_no_more_partitioned_entities_are_created_than_allowed(stores):
    two = Partitioning(max_entities=2)
    declared: list[Description] = [queue("a", enable_partitioning=True), topic(enable_partitioning=True)]
    reconcile(stores, [*declared, subscription(), queue("plain")], T0, partitioning=two)
    before = [contents(store) for store in stores]
    with pytest.raises(CannotReconcile, match="3 partitioned queues and topics are more than the 2 that"):
        reconcile(stores, [queue("b", enable_partitioning=True)], T1, partitioning=two)
    assert [contents(store) for store in stores] == before
    assert reconcile(stores, [queue("c")], T1, partitioning=Partitioning(max_entities=1)).created == ("c",)


@pytest.mark.parametrize("partitioned", [True, False])
def test_an_entity_of_an_earlier_version_stays_on_its_only_partition(stores, partitioned):
    reconcile(stores, [queue(enable_partitioning=partitioned)], T0)
    [definition] = definitions(stores[0])
    document = definition._replace(partitions=()).document()
    del document["partitions"]
    for store in stores:
        store.put(Table.ENTITIES, entity_key(1), encode_document(document))
        store.commit()
    assert reconcile(stores, [queue(enable_partitioning=partitioned)], T1) == Reconciled(2, (), (), ())
    assert placed(stores, "orders") == (home_partition("orders", PARTITIONS),)
    assert_alike(stores)
    assert reconcile(stores, [], T2).version == 2


def test_an_entity_stays_where_its_definition_says(stores):
    reconcile(stores, [topic(), subscription()], T0, {"prices/subscriptions/audit": (sql(),)})
    elsewhere = (home_partition("prices", PARTITIONS) + 1) % PARTITIONS
    for store in stores:
        for definition in definitions(store):
            document = definition._replace(partitions=(elsewhere,)).document()
            store.put(Table.ENTITIES, entity_key(definition.entity_id), encode_document(document))
        store.commit()
    change_rules(stores[elsewhere], AUDIT, sql("b"))
    reconcile(stores, [topic(max_size_mb=7), subscription("large")], T1)
    assert placed(stores, "prices") == placed(stores, "prices/Subscriptions/large") == (elsewhere,)
    assert [[rule.name for rule in stored_rules(store, AUDIT)] for store in stores] == [["b"]] * PARTITIONS


# Topics, subscriptions and their rules


def topic(name="prices", **properties) -> TopicDescription:
    return TopicDescription(name=name, **properties)


def subscription(name="audit", topic="prices", **properties) -> SubscriptionDescription:
    return SubscriptionDescription(name=name, topic=topic, **properties)


def sql(name="large", expression="amount > 5") -> RuleDescription:
    return RuleDescription(name=name, filter=SqlFilter(expression=expression))


def stored_rules(store: Store, entity_id: int) -> list[RuleDescription]:
    found = store.scan(Table.RULES, entity_key(entity_id), entity_key(entity_id + 1), 1000)
    return [RuleDescription.of_document(decode_document(value)) for _, value in found]


def home_of(stores, name="prices") -> Store:
    return stores[home_partition(name, len(stores))]


def change_rules(store: Store, entity_id: int, *rules: RuleDescription) -> None:
    """As the partition does while it runs."""
    store.delete_many(Table.RULES, [key for key, _ in store.scan(Table.RULES, b"", b"\xff" * 64, 1000)])
    store.put_many(
        Table.RULES, [(rule_key(entity_id, rule.name), encode_document(rule.document(T1))) for rule in rules]
    )
    store.commit()


AUDIT = 2  # the entity id of the first subscription


def test_a_topic_and_its_subscriptions_are_entities_of_their_own(stores):
    declared: list[Description] = [topic(), subscription(), subscription("large")]
    result = reconcile(stores, declared, T0)
    assert result == Reconciled(1, ("prices", "prices/Subscriptions/audit", "prices/Subscriptions/large"), (), ())
    for store in stores:
        assert definitions(store) == [stored(number, each) for number, each in enumerate(declared, 1)]
    assert_alike(stores)


def test_a_definition_survives_its_document():
    described: Description
    for described in (queue(), topic(max_size_mb=5), subscription(max_delivery_count=3)):
        definition = Definition(7, described, T0, T1, (0, 2))
        assert Definition.from_document(definition.document()) == definition
        assert definition.document()["kind"] == described.kind


def test_a_new_subscription_takes_every_message(stores):
    reconcile(stores, [topic(), subscription()], T0)
    for store in stores:
        assert stored_rules(store, AUDIT) == [DEFAULT_RULE]


def test_declared_rules_are_instead_of_the_default_rule(stores):
    reconcile(stores, [topic(), subscription()], T0, {"prices/subscriptions/audit": (sql("b"), sql("a"))})
    for store in stores:
        assert stored_rules(store, AUDIT) == [sql("a"), sql("b")]


def test_a_subscription_can_be_declared_to_have_no_rules(stores):
    reconcile(stores, [topic(), subscription()], T0, {"prices/subscriptions/audit": ()})
    assert stored_rules(stores[0], AUDIT) == []


def test_declared_rules_are_brought_in_line_and_keep_their_time_of_creation(stores):
    path = "prices/subscriptions/audit"
    reconcile(stores, [topic(), subscription()], T0, {path: (sql("a"), sql("b"))})
    result = reconcile(stores, [topic(), subscription()], T1, {path: (sql("A", "amount > 6"), sql("c"))})
    assert result == Reconciled(1, (), (Update("prices/Subscriptions/audit", ("rules",)),), ())
    documents = [decode_document(value) for _, value in stores[1].scan(Table.RULES, b"", b"\xff" * 64, 9)]
    assert documents == [sql("A", "amount > 6").document(T0), sql("c").document(T1)]
    assert_alike(stores)


def test_the_same_rules_declared_again_change_nothing(stores):
    rules = {"prices/subscriptions/audit": (sql("a"), sql("b"))}
    reconcile(stores, [topic(), subscription()], T0, rules)
    before = contents(stores[0])
    assert reconcile(stores, [topic(), subscription()], T0, rules) == Reconciled(1, (), (), ())
    assert contents(stores[0]) == before


FUTILE = RuleDescription(name="ttl", action=SqlAction(expression="SET sys.TimeToLive = 'soon'"))


def test_a_declared_rule_that_fails_on_every_message_is_refused(stores):
    text = refused(stores, [topic(), subscription()], {"prices/subscriptions/audit": (sql("a"), FUTILE)})
    assert text.startswith(
        "subscription 'prices/Subscriptions/audit': rule 'ttl' fails on every message: There was an "
    )
    assert "not 'soon'" in text


def test_a_declared_rule_that_fails_on_every_message_goes_on_if_it_is_stored_as_it_is_declared(stores):
    reconcile(stores, [topic(), subscription()], T0)
    change_rules(home_of(stores), AUDIT, FUTILE)
    rules = {"prices/subscriptions/audit": (FUTILE,)}
    result = reconcile(stores, [topic(), subscription()], T2, rules)
    [warning] = result.warnings
    assert warning.startswith("subscription 'prices/Subscriptions/audit': rule 'ttl' fails on every message: ")
    assert [stored_rules(store, AUDIT) for store in stores] == [[FUTILE]] * PARTITIONS
    assert reconcile(stores, [topic(), subscription()], T2, {}).warnings == ()
    changed = FUTILE.model_copy(update={"filter": SqlFilter(expression="a = 1")})
    assert "rule 'ttl' fails" in refused(stores, [topic(), subscription()], {"prices/subscriptions/audit": (changed,)})
    assert [stored_rules(store, AUDIT) for store in stores] == [[FUTILE]] * PARTITIONS


def test_rules_changed_while_running_stay_without_declaration_and_reach_all_partitions(stores):
    reconcile(stores, [topic(), subscription()], T0)
    change_rules(home_of(stores), AUDIT, sql("mine"))
    assert reconcile(stores, [topic(), subscription()], T2) == Reconciled(1, (), (), ())
    assert [stored_rules(store, AUDIT) for store in stores] == [[sql("mine")]] * PARTITIONS
    assert_alike(stores)


def test_rules_changed_while_running_stay_also_if_the_topic_is_no_longer_declared(stores):
    reconcile(stores, [topic(), subscription()], T0)
    change_rules(home_of(stores), AUDIT)
    reconcile(stores, [], T2)
    assert stored_rules(home_of(stores), AUDIT) == []
    assert_alike(stores)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("partition", range(PARTITIONS))
@pytest.mark.parametrize("declared", [{}, {"prices/subscriptions/audit": (sql(),)}], ids=["default", "declared"])
def test_a_subscriptions_first_rules_survive_a_crash_between_partitions(stores, partition, keeps, declared):
    stores[partition].crash, stores[partition].keeps = True, keeps
    with pytest.raises(Crash):
        reconcile(stores, [topic(), subscription()], T1, declared)
    reconcile(stores, [], T2)
    begun = partition > 0 or keeps
    expected = list(declared.get("prices/subscriptions/audit", (DEFAULT_RULE,))) if begun else []
    assert [stored_rules(store, AUDIT) for store in stores] == [expected] * PARTITIONS
    assert_alike(stores)


def test_a_subscription_keeps_the_spelling_of_its_topic(stores):
    reconcile(stores, [topic("Prices")], T0, keep_case=True)
    result = reconcile(stores, [topic("prices"), subscription(topic="PRICES")], T1)
    assert result.created == ("Prices/Subscriptions/audit",)
    assert reconcile(stores, [topic("prices"), subscription("AUDIT", topic="prices")], T2).created == ()


def refused(stores, declared, rules=None) -> str:
    before = [contents(store) for store in stores]
    with pytest.raises(CannotReconcile) as raised:
        reconcile(stores, declared, T1, rules)
    assert [contents(store) for store in stores] == before
    assert not any(store.dirty for store in stores)
    return str(raised.value)


def test_queues_and_topics_share_their_names(stores):
    reconcile(stores, [queue("Orders"), topic()], T0)
    text = "topic 'orders': a queue of this name exists. Declare a topic of another name"
    assert refused(stores, [topic("orders")]) == text
    assert refused(stores, [queue("prices")]).startswith("queue 'prices': a topic of this name exists")


@pytest.mark.parametrize("named", ["other", "orders"])
def test_a_subscription_needs_its_topic(stores, named):
    reconcile(stores, [queue("orders")], T0)
    text = f"subscription '{named}/Subscriptions/audit': there is no topic '{named}'. Declare it, too"
    assert refused(stores, [subscription(topic=named)]) == text


def test_a_subscriptions_sessions_are_fixed_at_its_creation(stores):
    reconcile(stores, [topic(), subscription()], T0)
    text = (
        "subscription 'prices/Subscriptions/audit': requires_session is false since its creation and cannot become true"
    )
    assert text in refused(stores, [subscription(requires_session=True)])


FORWARDING_FIELDS = ("forward_to", "forward_dead_lettered_messages_to")


@pytest.mark.parametrize("field", FORWARDING_FIELDS)
@pytest.mark.parametrize("to", ["missing", "prices/audit"])
def test_forwarding_needs_its_destination(stores, field, to):
    reconcile(stores, [topic(), subscription()], T0)
    for source in (queue("a", **{field: to}), subscription(**{field: to})):
        text = f"{source.kind} {source.path!r}: {field} {to!r} is no queue or topic. Declare it, or name another"
        assert refused(stores, [source]) == text


@pytest.mark.parametrize("field", FORWARDING_FIELDS)
def test_messages_can_be_forwarded_to_sessions(stores, field):
    declared = [queue("sessions", requires_session=True), queue("a", **{field: "Sessions"})]
    assert len(reconcile(stores, declared, T0).created) == 2


@pytest.mark.parametrize("field", FORWARDING_FIELDS)
def test_a_destination_may_be_declared_in_the_same_file(stores, field):
    declared: list[Description] = [queue("a", **{field: "B"}), queue("b", **{field: "prices"})]
    declared += [topic(), subscription(**{field: "a"})]
    assert len(reconcile(stores, declared, T0).created) == 4


def test_a_topic_has_a_limit_of_sql_filters(stores):
    declared: list[Description] = [topic(), subscription(), subscription("other")]
    many = tuple(sql(f"r{number}") for number in range(2000))
    paths = ("prices/subscriptions/audit", "prices/subscriptions/other")
    reconcile(stores[:1], declared, T0, {paths[0]: many})
    assert refused(stores[:1], declared, {paths[1]: many[:1]}) == (
        "topic 'prices': 2001 sql filters are more than the 2000 it may have"
    )


def test_a_topic_has_a_limit_of_subscriptions(stores):
    declared = [topic(), *(subscription(f"s{number}") for number in range(2001))]
    assert refused(stores[:1], declared) == "topic 'prices': 2001 subscriptions are more than the 2000 it may have"


def test_a_namespace_has_a_limit_of_entities(stores):
    declared = [queue(f"q{number}") for number in range(10_000)]
    assert "10001 queues and topics are more than the 10000 a namespace" in refused(stores[:1], [*declared, topic()])


@pytest.mark.parametrize(
    "value", [b"nonsense", encode_document(None), encode_document({"name": "x", "filter": {"kind": "y"}})]
)
def test_a_rule_that_cannot_be_read_is_left_to_its_partition_until_it_is_declared(stores, value):
    reconcile(stores, [topic(), subscription()], T0)
    home, key = home_of(stores), rule_key(AUDIT, "large")
    home.put(Table.RULES, key, value)
    home.commit()
    reconcile(stores, [], T1)
    assert [store.get(Table.RULES, key) for store in stores] == [value] * PARTITIONS
    reconcile(stores, [], T2)
    reconcile(stores, [topic(), subscription()], T2, {"prices/subscriptions/audit": (sql(),)})
    assert [stored_rules(store, AUDIT) for store in stores] == [[sql()]] * PARTITIONS


def test_a_subscription_lives_where_its_topic_does():
    assert subscription("b", topic="orders").home_name == "orders"
    assert topic("orders").home_name == queue("orders").home_name == "orders"


def test_a_start_that_changes_nothing_reads_each_definition_once_and_writes_nothing(stores, monkeypatch):
    declared = [queue(f"q{number}") for number in range(20)]
    reconcile(stores, declared, T0)
    read: list[object] = []
    from_document = Definition.from_document
    monkeypatch.setattr(
        Definition, "from_document", lambda document: read.append(document["name"]) or from_document(document)
    )
    for store in stores:
        store.crash = True  # at a commit
    assert reconcile(stores, declared, T1) == Reconciled(1, (), (), ())
    assert read == [description.name for description in declared]
    assert not any(store.dirty for store in stores)


def test_partitions_of_one_worker_read_each_definition_once(stores, monkeypatch):
    reconcile(stores, [topic(), subscription(), *(queue(f"q{number}") for number in range(20))], T0)
    read: list[object] = []
    of_definition = Terms.of_definition
    monkeypatch.setattr(
        Terms, "of_definition", lambda document, sku: read.append(document["name"]) or of_definition(document, sku)
    )
    known: dict[bytes, Terms] = {}
    for number, store in enumerate(stores):
        Partition(number, store, now_ms=T1, incarnation=bytes(6), settings=PartitionSettings(), known_terms=known)
        assert not store.dirty
    assert len(read) == 22


@pytest.mark.parametrize("description", [queue(), topic(), subscription()], ids=lambda each: each.kind)
def test_properties_that_came_later_are_stored_only_where_they_are_set(description):
    """So earlier stores keep their bytes, and processes of the version before read what does not use them."""
    document = Definition(1, description, T0, T0, (0,)).document()
    later = [name for name in KEPT_FOR_CLIENTS if name in type(description).model_fields]
    assert later
    assert not set(later) & document.keys()
    assert Definition.from_document(document).description == description
    for name, value in (("enable_express", True), ("support_ordering", False), ("forward_to_scheme", "https")):
        if name in later:
            changed = Definition(1, description.model_copy(update={name: value}), T0, T0, (0,))
            assert changed.document().keys() - document.keys() == {name}
            assert Definition.from_document(decode_document(encode_document(changed.document()))) == changed


@pytest.mark.parametrize("name", ["s$client$D", "s$$D", "s$a.b:c@d-e~f$D", "s$c$ND", "s" * 50 + "$" + "c" * 207 + "$D"])
def test_subscriptions_are_named_as_clients_of_jms_make_them(name):
    assert subscription(name, "news").path == f"news/Subscriptions/{name}"


@pytest.mark.parametrize("name", ["s" * 51, "s" * 51 + "$c$D", "$c$D", "s$c", "s$c$E", "s$c d$D", "s$c/d$D", "s$c$D$D"])
def test_other_names_with_a_client_id_are_refused(name):
    with pytest.raises(ValidationError):
        subscription(name, "news")
