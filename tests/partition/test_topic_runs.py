"""A run that is sent to a topic is published as its messages are when they come one by one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import QuotaExceeded
from broker.partition.settings import PartitionSettings
from broker.partition.topics import publishing
from protocol.extension import extension
from storage.store import Table
from tests.partition.driver import deliveries, run
from tests.partition.topic_driver import TOPIC, A, B, C, TopicDriver, event, rule

RUNS = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=8), max_size=6)
KINDS: dict[str, tuple[dict[str, Any], list[tuple[int, list[Any], dict[str, Any]]]]] = {
    "none": ({}, []),
    "one": ({}, [(A, [], {})]),
    "three": ({}, [(A, [], {}), (B, [], {}), (C, [], {})]),
    "a rule": ({}, [(A, [], {}), (B, [rule("r", "1 = 1")], {})]),
    "no match": ({}, [(A, [rule("r", "1 = 0")], {})]),
    "a time to live": ({}, [(A, [], {"default_message_time_to_live_ms": 2000}), (B, [], {})]),
    "the topic's": ({"default_message_time_to_live_ms": 2000}, [(A, [], {})]),
    "sessions": ({}, [(A, [], {"requires_session": True}), (B, [], {})]),
    "forwarding": ({}, [(A, [], {"forward_to": "main"}), (B, [], {})]),
}


@pytest.mark.parametrize("kind", KINDS)
@given(RUNS, st.sampled_from([10_000, 12]), st.booleans())
def test_a_run_is_published_as_its_messages_are(kind, turns, turn_work, has_receiver):
    ends = []
    for in_runs in (False, True):
        properties, subscriptions = KINDS[kind]
        world = TopicDriver(settings=PartitionSettings(turn_work=turn_work), **properties)
        for queue_id, rules, own in subscriptions:
            world.subscribe(queue_id, *rules, **own)
        if has_receiver and kind in ("one", "three", "a rule"):
            world.partition.open_receiver("r", A, False, world.now_ms)
            world.partition.grant("r", 3)
        seen = []
        for bodies in turns:
            messages = [event(body, 1000 if at == 2 else None) for at, body in enumerate(bodies)]
            if in_runs:
                world.partition.send_run(TOPIC, run(messages), world.now_ms)
            else:
                world.partition.send(TOPIC, messages, world.now_ms)
            world.partition.advance(world.now_ms)
            seen += [deliveries(items) for _, _, items in world.partition.pump(world.now_ms).deliveries]
            world.partition.end_turn()
            world.partition.commit()
            world.partition.check()
            world.now_ms += 700
        stored = {table: world.store.scan(table, b"", b"\xff" * 40, 1000) for table in Table if table != Table.META}
        bodies_seen = [(each.number, each.body) for turn in seen for each in turn]
        ends.append((stored, world.partition.tallies(), bodies_seen, [world.peek(each) for each, *_ in subscriptions]))
    assert ends[0] == ends[1]


@pytest.mark.skipif(extension is None, reason="the extension is not built, or is switched off")
def test_usual_runs_are_published_without_python(monkeypatch):
    world = TopicDriver(A, B)
    monkeypatch.setattr(publishing, "_FanOut", None)
    world.partition.send_run(TOPIC, run([event(b"1"), event(b"2")]), world.now_ms)
    world.partition.commit()
    assert world.texts(A) == world.texts(B) == ["1", "2"]


def test_a_run_that_is_too_much_is_refused_and_leaves_nothing():
    world = TopicDriver(A, max_size_mb=1)
    with pytest.raises(QuotaExceeded):
        world.partition.send_run(TOPIC, run([event(bytes(600_000)), event(bytes(600_000))]), world.now_ms)
    world.partition.commit()
    world.partition.check()
    assert world.texts(A) == []
