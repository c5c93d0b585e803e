"""Whatever another process asks for, a partition refuses it with a BrokerError or does it, and goes on.

Requests are of every name, and each of their arguments may be anything that msgpack has. So it may be with a gateway of
another version, or one with a mistake.
"""

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import requests
from broker.errors import BrokerError
from broker.named_records import Malformed
from storage.records import Place
from tests.examples import examples
from tests.partition.accounts import assert_counted_rightly
from tests.partition.test_any_command import ENTITIES, QUEUE_IDS, World

NAMES = sorted(
    name
    for name, record in requests.RECORDS.classes.items()
    if record not in (requests.Metrics, requests.ChangeCatalog, requests.Transact, requests.Discharge)
)
EDGES = [0, 1, -1, 2, 127, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)]
TEXTS = ["", "a", "b", "$Default", "\0", "\U0001f600" * 64, "é" * 130, "x" * 300]
ANYTHING = st.recursive(
    st.sampled_from([None, True, False, 0.5, float("nan"), float("inf"), *EDGES, *TEXTS])
    | st.binary(max_size=20)
    | st.sampled_from([bytes(16), bytes(17), b"\xff" * 100]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*EDGES, *TEXTS]), inner, max_size=3),
    max_leaves=5,
)
RULE = {"name": "new", "created_ms": 1, "filter": {"kind": "true"}, "action": None}
SQL = {"kind": "sql", "expression": "a = @x", "parameters": {"@x": b"\x41"}}
CORRELATION = {"kind": "correlation", "label": "a", "properties": {"a": b"\x41"}}
RULES = st.sampled_from([RULE, {**RULE, "filter": SQL}, {**RULE, "filter": CORRELATION, "action": SQL}])
COUNTS = st.integers(0, 9)
SESSIONS = st.sampled_from(["a", "b", "none"])
MESSAGES = st.sampled_from(
    [[bytes(16), b"", None, None], [bytes(16), b"", 1, {1: 2**50}], [bytes(16), b"", 0, {1: 0, 2: "a", 4: b"\x41"}]]
)


@st.composite
def spoiled(draw: st.DrawFn, usual: st.SearchStrategy[Any]) -> Any:
    """A usual value, or one with something else in its place, or within."""
    value = draw(usual)
    if not draw(st.booleans()):
        return value
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        rest = {each: item for each, item in value.items() if each != key}
        return rest if draw(st.booleans()) else {**rest, key: draw(spoiled(st.just(value[key])))}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(spoiled(st.just(value[at]))), *value[at + 1 :]]
    return draw(ANYTHING)


def usual(world: World) -> dict[str, list[st.SearchStrategy[Any]]]:
    """The arguments of each request, as a gateway sends them."""
    tokens = st.lists(st.sampled_from(world.tokens), min_size=1, max_size=2)
    numbers = st.lists(st.integers(1, 7), min_size=1, max_size=2)
    look: list[st.SearchStrategy[Any]] = [COUNTS, COUNTS, st.just(1 << 20)]
    move: list[st.SearchStrategy[Any]] = [st.just(b"move"), st.sampled_from([1, 2, 10])]
    holder = [st.integers(0, 1), SESSIONS]
    page: list[st.SearchStrategy[Any]] = [st.none() | st.just(1), COUNTS, COUNTS]
    settle = [tokens, st.integers(0, 4), st.none() | st.just({"a": b"\x41"}), st.integers(0, 1)]
    ids = [st.sampled_from(QUEUE_IDS)] * 2
    return {
        "renew-locks": [tokens],
        "peek": [*look, st.booleans()],
        "peek-session": [SESSIONS, *look, st.booleans()],
        "browse": [*look, st.none() | SESSIONS, st.none() | st.just("a = 1"), st.booleans()],
        "receive-deferred": [numbers, st.booleans(), st.booleans()],
        "receive-session-deferred": [*holder, numbers, st.booleans(), st.booleans()],
        "settle": settle,
        "schedule": [st.lists(MESSAGES, min_size=1, max_size=2)],
        "cancel-scheduled": [numbers],
        "delete-batch": [COUNTS, st.just(2**50), SESSIONS],
        "purge": [st.lists(st.sampled_from([int(each) for each in Place]), max_size=2)],
        "add-rule": [RULES],
        "replace-rule": [RULES],
        "remove-rule": [st.sampled_from(TEXTS)],
        "get-rule": [st.sampled_from(TEXTS)],
        "enumerate-rules": [COUNTS, COUNTS],
        "renew-session-lock": holder,
        "get-session-state": holder,
        "set-session-state": [*holder, st.none() | st.binary(max_size=3)],
        "get-message-sessions": page,
        "page-message-sessions": page,
        "message-sessions-behind": [page[0], SESSIONS, COUNTS],
        "counts": ids,
        "accessed": ids,
        "filter-counts": [st.sampled_from(sorted(ENTITIES))],
        "probe": [],
        "stored": [st.just(b"gateway!")],
        "arrive": move,
        "depart": move,
        "rows": [*move, st.just(1 << 20), COUNTS],
        "store-rows": [move[0], st.just([])],
        "hold": move,
        "freeze": move,
        "transact-request": [],
    }


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50))
@given(data=st.data())
def test_only_a_broker_error_comes_of_any_request(name: str, data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(1, 4))):
        arguments = [data.draw(spoiled(each)) for each in usual(world)[name]]
        arguments = data.draw(st.just(arguments) | st.just(arguments[:-1]) | st.just([*arguments, None]))
        entity_ids = [2, 12] if "session" in name else [11, 12] if "rule" in name else [1]
        queue_id = data.draw(st.sampled_from([each << 3 for each in entity_ids]) | st.sampled_from(QUEUE_IDS))
        transaction = data.draw(st.sampled_from([None, None, "t"]))
        with contextlib.suppress(BrokerError, Malformed):
            world.request(name, queue_id, msgpack.unpackb(msgpack.packb(arguments), strict_map_key=False), transaction)
        world.turn()
    assert_counted_rightly(world.partition, world.store, world.now_ms)
    world.start()
    world.turn()
    assert_counted_rightly(world.partition, world.store, world.now_ms)
