"""Changes of the catalog keep their bytes: between processes of neighbouring versions, and in the stores."""

from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker import requests, wire
from broker.catalog import changes
from broker.catalog.changes import Asked, Decided
from broker.errors import InvalidArgument
from broker.named_records import Malformed
from storage.store import Table
from tests.configuration.test_catalog_of_workers import Broker, a_rule

TOKEN = bytes(range(16))
TEXT = "\0\U0001f600é" * 30
RULE = {"name": TEXT, "created_ms": 0, "filter": {"kind": "sql", "expression": "(", "parameters": {"@a": b"@"}}}
RULE |= {"action": None}
FIELDS = {"name": TEXT, "lock_duration_ms": -1, "forward_to": None, "": [{}], "status": 1.5}
DEFINITION = {"kind": "queue", "entity_id": 2**29 - 1, "created_ms": 2**53, "partitions": [0, 3], "name": TEXT}

# As gateways of version 7 have sent them in requests, and homes in CHANGED, before they were records; and what a series
# of changes has left in the stores. The lines are never changed.
PACKED = [line.split() for line in (Path(__file__).parent / "packed_changes.txt").read_text().splitlines()]
ASKED: list[Asked] = [
    changes.Create("queue", FIELDS, None),
    changes.Create("subscription", {}, [RULE, RULE]),
    changes.Update(TEXT, FIELDS),
    changes.Delete("news/Subscriptions/a"),
    changes.Provide("queue", FIELDS, None, 0),
    changes.Provide("topic", {}, [RULE], 2**63),
    changes.Release(7),
    changes.AddRule("a/subscriptions/b", RULE),
    changes.ReplaceRule(TEXT, RULE),
    changes.RemoveRule(TEXT, ""),
    changes.BeginMove(TEXT, 3),
    changes.BeginMove("", -1),
    changes.EndMove(TOKEN),
    changes.CancelMove(TOKEN),
]
DECIDED: list[Decided] = [
    changes.Put(DEFINITION, None),
    changes.Put(DEFINITION, [RULE]),
    changes.SetRule(2**29, RULE),
    changes.DropRule(1, TEXT),
]
SERIES: list[list[Any]] = [
    ["create", "queue", {"name": "Orders", "lock_duration_ms": 5000, "max_delivery_count": 3}, None],
    ["create", "topic", {"name": "wide", "enable_partitioning": True}, None],
    ["create", "subscription", {"topic": "WIDE", "name": "Some"}, [a_rule("a"), a_rule("b", "x = 'é'")]],
    ["create", "subscription", {"topic": "wide", "name": "all"}, None],
    ["update", "orders", {"max_delivery_count": 7, "user_metadata": "\0\U0001f600"}],
    ["add-rule", "wide/Subscriptions/some", a_rule("c")],
    ["replace-rule", "wide/subscriptions/some", a_rule("B", "size > 7")],
    ["remove-rule", "wide/Subscriptions/Some", "A"],
    ["delete", "q3"],
    ["provide", "queue", {"name": "for-a-while"}, None, 7],
]


def lines(*names: str) -> list[str]:
    return [line for name, line in PACKED if name in names]


@pytest.mark.parametrize(("change", "line"), list(zip(ASKED, lines("asked"), strict=True)))
def test_what_is_asked_for_keeps_its_bytes(change: Asked, line: str) -> None:
    name, arguments = requests.packed(changes.request(change))
    assert msgpack.packb(wire.request(1, 9, name, 8, arguments)).hex() == line
    [message] = wire.unpack(bytes.fromhex(line), lambda data: [msgpack.unpackb(data, strict_map_key=False)])
    assert isinstance(message, wire.Request)
    request = requests.parsed(message.name, message.arguments)
    assert isinstance(request, requests.ChangeCatalog)
    found = changes.asked(request.change)
    assert type(found) is type(change)
    assert found == change


@pytest.mark.parametrize(("change", "line"), list(zip(DECIDED, lines("decided"), strict=True)))
def test_what_is_decided_keeps_its_bytes(change: Decided, line: str) -> None:
    assert msgpack.packb(wire.changed(4, changes.packed([change]))).hex() == line
    [message] = wire.unpack(bytes.fromhex(line), lambda data: [msgpack.unpackb(data, strict_map_key=False)])
    assert isinstance(message, wire.Changed)
    [found] = changes.decided(message.changes)
    assert type(found) is type(change)
    assert found == change


def test_every_change_is_tried() -> None:
    assert {type(each) for each in ASKED} == {*changes.ASKED.classes.values()}
    assert {type(each) for each in DECIDED} == {*changes.DECIDED.classes.values()}


def test_what_is_stored_keeps_its_bytes() -> None:
    broker = Broker()
    for change in SERIES:
        broker.change(*change)
    for number, line in zip((0, 3), lines("stored"), strict=True):
        store = broker.stores[number]
        tables = [
            [*store.scan(each, b"", b"\xff" * 300, 1 << 20)] for each in (Table.META, Table.ENTITIES, Table.RULES)
        ]
        assert msgpack.packb(tables).hex() == line


def test_kinds_of_a_later_version_are_left_out() -> None:
    packed: list[list[Any]] = [["put", DEFINITION, None], ["more", 1], ["drop-rule", 1, "a"]]
    assert [*changes.decided(packed)] == [changes.Put(DEFINITION, None), changes.DropRule(1, "a")]


@pytest.mark.parametrize(
    "packed",
    [
        [],
        ["lost"],
        [None],
        [["create"]],
        ["create"],
        ["create", "queue", {}],
        ["delete"],
        ["delete", "a", "b"],
        [{}, 1],
    ],
)
def test_what_is_no_change_is_refused(packed: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="no change of entities"):
        changes.asked(packed)


@pytest.mark.parametrize(
    "packed", [["create", "queue", {}, 5], ["add-rule", "a", None], ["remove-rule", "a", 1], ["release", []]]
)
def test_fields_of_wrong_types_are_refused(packed: list[Any]) -> None:
    with pytest.raises(Malformed):
        changes.asked(packed)
