"""New queues and topics are named in lower case, unless a setting keeps the case. What exists keeps its name."""

from collections.abc import Sequence
from typing import Any

import pytest

from broker.catalog.catalog import (
    CATALOG_VERSION_KEY,
    Definition,
    Reconciled,
    definitions,
    home_partition,
    reconcile,
)
from broker.errors import EntityAlreadyExists
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.namespace.rule_descriptions import RuleDescription, SqlFilter
from storage.memory import MemoryStore
from storage.records import NEXT_ENTITY_ID_KEY, encode_document, entity_key, rule_key
from storage.store import Table
from tests.configuration.test_catalog_of_workers import GATEWAY, PARTITIONS, T0, Broker

T1 = 2_000
RULE = RuleDescription(name="Large", filter=SqlFilter(expression="size > 5"))
DECLARED: list[Description] = [
    QueueDescription(name="Orders/EU"),
    TopicDescription(name="News"),
    SubscriptionDescription(topic="NEWS", name="All", forward_to="ORDERS/eu"),
]
DECLARED_RULES = {"news/subscriptions/all": [RULE]}


@pytest.fixture
def stores() -> list[MemoryStore]:
    return [MemoryStore() for _ in range(PARTITIONS)]


@pytest.fixture
def stores_before(stores: list[MemoryStore]) -> list[MemoryStore]:
    """As the version before has written them, which kept the case of names."""
    described = [*DECLARED[:2], SubscriptionDescription(topic="News", name="All", forward_to="ORDERS/eu")]
    for store in stores:
        for entity_id, each in enumerate(described, 1):
            home = home_partition(each.home_name, PARTITIONS)
            document = Definition(entity_id, each, T0, T0, (home,)).document()
            store.put(Table.ENTITIES, entity_key(entity_id), encode_document(document))
        store.put(Table.RULES, rule_key(3, "Large"), encode_document(RULE.document(T0)))
        store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(4))
        store.put(Table.META, CATALOG_VERSION_KEY, encode_document(1))
        store.commit()
    return stores


def paths(stores: Sequence[MemoryStore]) -> list[str]:
    [found] = {tuple(each.description.path for each in definitions(store)) for store in stores}
    return [*found]


# --- declared ---------------------------------------------------------------------------------------------------------


def test_what_is_declared_is_made_in_lower_case_and_subscriptions_keep_theirs(stores):
    done = reconcile(stores, DECLARED, T0, DECLARED_RULES)
    assert done.created == ("orders/eu", "news", "news/Subscriptions/All")
    assert paths(stores) == [*done.created]
    assert reconcile(stores, DECLARED, T1, DECLARED_RULES) == Reconciled(1, (), (), ())
    [rule] = stores[0].scan(Table.RULES, b"", b"\xff" * 64, 10)
    assert rule == (rule_key(3, "Large"), encode_document(RULE.document(T0)))
    assert definitions(stores[0])[2].description.forward_to == "ORDERS/eu"


def test_both_forms_of_a_name_have_one_home(stores):
    reconcile(stores, DECLARED, T0)
    lower = [each.partitions for each in definitions(stores[0])]
    cased = [MemoryStore() for _ in range(PARTITIONS)]
    reconcile(cased, DECLARED, T0, keep_case=True)
    assert lower == [each.partitions for each in definitions(cased[0])]


def test_with_the_setting_names_are_as_declared(stores):
    done = reconcile(stores, DECLARED, T0, keep_case=True)
    assert done.created == ("Orders/EU", "News", "News/Subscriptions/All")
    assert paths(stores) == [*done.created]


@pytest.mark.parametrize("keep_case", [False, True])
def test_what_the_version_before_has_stored_keeps_its_names(stores_before, keep_case):
    before = [store.scan(Table.ENTITIES, b"", b"\xff" * 64, 10) for store in stores_before]
    declared = [each.model_copy(update={"name": each.name.swapcase()}) for each in DECLARED[:2]]
    declared.append(SubscriptionDescription(topic="nEWS", name="ALL", forward_to="ORDERS/eu"))
    again = reconcile(stores_before, declared, T1, DECLARED_RULES, keep_case=keep_case)
    assert again == Reconciled(1, (), (), ())
    assert [store.scan(Table.ENTITIES, b"", b"\xff" * 64, 10) for store in stores_before] == before
    other: list[Description] = [
        QueueDescription(name="ORDERS/eu", max_delivery_count=3),
        SubscriptionDescription(topic="news", name="New"),
    ]
    done = reconcile(stores_before, other, T1, keep_case=keep_case)
    assert (done.updated[0].path, done.created) == ("Orders/EU", ("News/Subscriptions/New",))
    assert paths(stores_before) == ["Orders/EU", "News", "News/Subscriptions/All", "News/Subscriptions/New"]


def test_a_name_that_has_no_lower_case_form_of_its_length_stays(stores):
    """İ becomes two characters, so what may be the name of a queue has a lower-case form that may not."""
    long = "a" + "İ" * 130 + "b" * 129
    reconcile(stores, [QueueDescription(name=long), QueueDescription(name="Aİ")], T0)
    assert paths(stores) == [long, "ai̇"]
    assert reconcile(stores, [QueueDescription(name=long.upper()), QueueDescription(name="AI")], T1).created == ("ai",)
    assert definitions(stores[0])[0].description.name == long, "it can be read again"


# --- made by clients --------------------------------------------------------------------------------------------------


def kept(broker: Broker) -> list[str]:
    [found] = {tuple(sorted(each.description.path for each in definitions(store))) for store in broker.stores}
    return [each for each in found if each[:2].lower() == "x-"]


def made(broker: Broker, *change: Any) -> dict[str, Any]:
    """What the client that asks for the change is answered."""
    done = broker.change(*change)
    assert done is not None
    found: dict[str, Any] = done.result
    return found


def restart(broker: Broker, *, keeps_case: bool) -> None:
    """The home's worker, with this setting."""
    broker.keeps_case = keeps_case
    broker.start(0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.mark.parametrize("operation", ["create", "provide"])
@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_what_clients_make_is_in_lower_case_on_all_partitions(broker, operation, kind):
    holder = [0] if operation == "provide" else []
    assert made(broker, operation, kind, {"name": "X-Mixed/Case"}, None, *holder)["name"] == "x-mixed/case"
    assert kept(broker) == ["x-mixed/case"]
    with pytest.raises(EntityAlreadyExists, match="'X-MIXED/case' already exists"):
        broker.change("create", kind, {"name": "X-MIXED/case"}, None)
    fields = {"name": "X-Mixed/Case", "user_metadata": "t"}
    assert made(broker, "update", "X-Mixed/Case", fields)["name"] == "x-mixed/case"
    broker.change("delete", "X-MIXED/CASE")
    assert kept(broker) == []


def test_a_temporary_entity_is_made_in_lower_case(broker):
    assert made(broker, "provide", "queue", {"name": "X-Temporary"}, None, 1)["name"] == "x-temporary"


def test_a_subscription_keeps_its_name_and_has_the_stored_one_of_its_topic(broker):
    broker.change("create", "topic", {"name": "X-Topic"}, None)
    found = made(broker, "create", "subscription", {"name": "All", "topic": "X-TOPIC", "forward_to": "Q1"}, None)
    assert (found["topic"], found["name"], found["forward_to"]) == ("x-topic", "All", "Q1")
    assert kept(broker) == ["x-topic", "x-topic/Subscriptions/All"]


def test_what_was_made_with_the_setting_keeps_its_name_without_it(broker):
    restart(broker, keeps_case=True)
    assert made(broker, "create", "queue", {"name": "X-Kept"}, None)["name"] == "X-Kept"
    restart(broker, keeps_case=False)
    assert made(broker, "update", "x-kept", {"user_metadata": "t"})["name"] == "X-Kept"
    assert broker.home.change(GATEWAY, 2, ["provide", "queue", {"name": "X-KEPT"}, None, 0], T1) is None
    assert [each.result["name"] for each in broker.home.take_done()] == ["X-Kept"]
    with pytest.raises(EntityAlreadyExists):
        broker.change("create", "queue", {"name": "x-kept"}, None)
    assert kept(broker) == ["X-Kept"]
    broker.change("delete", "x-kept")
    assert made(broker, "create", "queue", {"name": "X-Kept"}, None)["name"] == "x-kept"


def test_a_partition_that_missed_it_and_one_that_gets_the_entity_by_a_move_have_the_homes_name(broker):
    restart(broker, keeps_case=True)
    broker.change("create", "queue", {"name": "X-Moved"}, None, crash_after=(None, 0))
    restart(broker, keeps_case=False)
    assert kept(broker) == ["X-Moved"]
    [queue] = [each for each in definitions(broker.stores[0]) if each.description.name == "X-Moved"]
    to = (queue.partitions[0] + 1) % PARTITIONS
    assert broker.home.change(GATEWAY, 2, ["begin-move", "x-MOVED", to], T1) is None
    [begun] = broker.home.take_done()
    moved = made(broker, "end-move", begun.result[2])
    assert (moved["name"], moved["partitions"]) == ("X-Moved", [to])
    assert kept(broker) == ["X-Moved"]
