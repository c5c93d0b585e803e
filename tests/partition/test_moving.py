"""A move of an entity to another partition is invisible: it leaves the entity as a restart of its process would."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import BrokerError, EntityMoving, InvalidArgument
from broker.wire import Outcome
from storage.queue_ids import queue_id_of
from storage.records import entity_key
from storage.store import Table
from tests.examples import examples
from tests.partition.moving_driver import ENTITY, FIRST, SECOND, SOME, World

KINDS = ["plain", "sessions", "forwards", "topic"]
TTLS = st.sampled_from([None, 1000, 20_000])
AFTER = st.sampled_from([0, 0, 0, 5000, 90_000])
SMALL = st.integers(0, 9)
USES = st.one_of(
    st.tuples(st.just("send"), SMALL, TTLS, AFTER, st.sampled_from("st")),
    st.tuples(st.just("send"), SMALL, TTLS, AFTER, st.sampled_from("st")),
    st.tuples(st.just("receive"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("take"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("put_back")),
    st.tuples(st.just("settle"), SMALL, st.sampled_from(list(Outcome)), st.sampled_from([0, 1, 1, 6000, 50_000])),
    st.tuples(st.just("receive_deferred"), st.integers(0, 3), st.integers(1, 6)),
    st.tuples(st.just("receive_deferred"), st.integers(0, 3), st.integers(1, 6), st.just(True)),
    st.tuples(st.just("set_state"), st.sampled_from("st"), st.sampled_from([b"", b"state", b"another"])),
    st.tuples(st.just("cancel"), st.integers(1, 6)),
    st.tuples(st.just("peek"), st.integers(0, 3)),
    st.tuples(st.just("counts")),
    st.tuples(st.just("wait"), st.sampled_from([1, 6000, 31_000, 100_000])),
)
MANY = st.lists(USES, min_size=3, max_size=15)
# While rows are read: a use, or a number of rows that are taken.
READING = st.lists(st.one_of(USES, st.integers(1, 9)), min_size=1, max_size=25)


def both(worlds: tuple[World, World], use: tuple[Any, ...]) -> None:
    seen = [world.use(*use) for world in worlds]
    assert seen[0] == seen[1], use


def read(worlds: tuple[World, World], reading: list[Any]) -> None:
    moving = worlds[0]
    moving.begin_move()
    for step in reading:
        if isinstance(step, int):
            moving.rows(step)
        else:
            both(worlds, step)


def same_to_the_end(worlds: tuple[World, World], after: list[Any], at: int) -> None:
    moving, other = worlds
    for use in after:
        both(worlds, use)
    for world in worlds:
        world.rest()
        world.check()
    assert moving.stored(at) == other.stored(FIRST)
    assert moving.leftovers(SECOND if at == FIRST else FIRST) == []


def move(worlds: tuple[World, World], reading: list[Any]) -> None:
    """The other world's process restarts where the entity is frozen in this one."""
    moving, other = worlds
    read(worlds, reading)
    moving.freeze()
    other.pump()
    other.restart()
    refuses_what_comes_back(moving)
    left = moving.at
    moving.finish()
    refuses_what_comes_back(moving, left)


def refuses_what_comes_back(world: World, *wherever: int) -> None:
    """A gateway keeps what it has received and deleted for a client until the entity lives somewhere."""
    stored = {each: world.stored(each) for each in world.stores}
    for partition in wherever or world.stores:
        for _ in world.unsent[:1]:
            with pytest.raises(EntityMoving):
                world.put_back(partition)
    assert stored == {each: world.stored(each) for each in world.stores}


@settings(max_examples=examples(100))
@given(kind=st.sampled_from(KINDS), before=MANY, reading=READING, between=MANY, again=READING, after=MANY)
def test_nobody_sees_a_move(kind, before, reading, between, again, after):
    worlds = World(kind), World(kind)
    for use in before:
        both(worlds, use)
    move(worlds, reading)
    for use in between:
        both(worlds, use)
    for world in worlds:
        world.rest()
    move(worlds, again)
    same_to_the_end(worlds, after, FIRST)


@settings(max_examples=examples(100))
@given(
    kind=st.sampled_from(KINDS),
    before=MANY,
    reading=READING,
    freezes=st.booleans(),
    dies=st.sampled_from(["-", "5", "6"]),
    after=MANY,
)
def test_a_move_that_is_given_up_leaves_nothing(kind, before, reading, freezes, dies, after):
    worlds = moving, other = World(kind), World(kind)
    for use in before:
        both(worlds, use)
    read(worlds, reading)
    if freezes:
        moving.freeze()
        other.pump()
        other.restart()
    if dies != "-":
        moving.restart(int(dies))
        if int(dies) == FIRST:
            other.restart()
        if freezes:
            assert moving.use("peek", 0) == "EntityMoving"
    moving.keep()
    same_to_the_end(worlds, after, FIRST)


@settings(max_examples=examples(40))
@given(
    kind=st.sampled_from(KINDS), before=MANY, dies=st.lists(st.sampled_from([FIRST, SECOND]), max_size=3), after=MANY
)
def test_processes_may_die_before_and_after_the_decision(kind, before, dies, after):
    worlds = moving, other = World(kind), World(kind)
    for use in before:
        both(worlds, use)
    moving.begin_move()
    moving.freeze()
    other.pump()
    other.restart()
    while moving.rows() != (True, 0):
        pass
    for partition in dies:
        moving.restart(partition)
    for partition in moving.stores:  # as a start does, which writes the home's definitions into all stores
        moving._define(partition, SECOND)
        moving.stores[partition].commit()
        moving.restart(partition)
    moving.at = SECOND
    other.restart()
    same_to_the_end(worlds, after, SECOND)


@pytest.mark.parametrize("kind", KINDS)
def test_it_refuses_uses_where_it_does_not_live(kind):
    world = World(kind)
    world.send(1, None, 0, "s")
    world.at = SECOND
    for use in (("send", 1, None, 0, "s"), ("receive", 0, 1), ("peek", 0), ("cancel", 1)):
        assert world.use(*use) == "EntityMoving"
    assert world.counts() == {}


def test_rows_of_a_subscription_that_was_deleted_meanwhile_are_refused():
    world = World("topic")
    world.send(1, None, 0, "s")
    world.begin_move()
    world.partitions[SECOND].delete_entities([SOME], world.now_ms)
    world.partitions[SECOND].commit()
    with pytest.raises(InvalidArgument):
        world.finish()
    queues = entity_key(queue_id_of(SOME)), entity_key(queue_id_of(SOME + 1))
    assert not list(world.stores[SECOND].scan(Table.QUEUE, *queues, 9))


def test_no_more_rows_are_read_than_have_the_bytes_asked_for():
    world = World("plain")
    for number in range(3):
        world.send(number, None, 0, "")
    world.begin_move()
    read, is_read = [], False
    while not is_read:
        found, is_read, _ = world.ask(FIRST, "rows", ENTITY, 1, 1000)
        assert len(found) == (0 if is_read else 1)
        read += found
    assert sum(table == Table.QUEUE for table, *_ in read) == 3


def test_what_leaves_its_place_and_comes_back_between_two_rows_is_moved_with_its_timer():
    """It was received and deleted, and never sent."""
    world = World("plain")
    world.send(1, 20_000, 0, "")
    world.begin_move()
    while not world.rows()[0]:
        pass
    world.partition.open_receiver("r", queue_id_of(ENTITY), True, world.now_ms)
    world.partition.grant("r", 1)
    [(_, _, items)] = world.partition.pump(world.now_ms).deliveries
    world.partition.commit()
    world.rows(1)  # that it has left its place
    world.partition.restore(queue_id_of(ENTITY), items, world.now_ms)
    world.partition.commit()
    world.freeze()
    world.finish()
    world.rest()
    world.check()
    assert [number for _, number, *_ in world.peek(0)] == [1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dies", ["", "before", "after"])
def test_what_comes_back_while_the_entity_is_moved_is_there_once_where_it_lives_then(kind, dies):
    """It was received and deleted, and never sent. The answer of a process that dies is lost, not what it has done."""
    world = World(kind)
    for number in range(3):
        world.send(number, None, 0, "s")
    sent = [number for number, *_ in world.take(0, 3)]
    assert len(sent) == 3
    world.begin_move()
    world.rows()
    world.freeze()
    refuses_what_comes_back(world)
    world.finish()
    refuses_what_comes_back(world, FIRST)
    world.put_back(dies=dies)
    world.rest()
    world.check()
    assert [(number, count) for number, count, *_ in world.receive(0, 9)] == [(number, 0) for number in sent]


def test_what_comes_back_to_a_deleted_entity_stays_deleted():
    world = World("plain")
    world.send(1, None, 0, "")
    world.take(0, 1)
    world.partition.delete_entity(ENTITY, world.now_ms)
    world.put_back()
    world.rest()
    world.check()


def test_only_the_move_that_has_begun_goes_on():
    world = World("plain")
    for name, args in (("rows", (ENTITY, 1, 1)), ("hold", (ENTITY,)), ("freeze", (ENTITY,))):
        with pytest.raises(InvalidArgument):
            world.ask(FIRST, name, *args)
    world.send(1, None, 0, "")
    world.begin_move()
    found, _, _ = world.ask(FIRST, "rows", ENTITY, 1 << 20, 100)
    world.keep()
    with pytest.raises(InvalidArgument):
        world.ask(SECOND, "store-rows", found)
    with pytest.raises(BrokerError):  # what came first is still being deleted, or nothing has come
        world.ask(FIRST, "arrive", ENTITY)
    world.check()


def test_rules_are_known_where_the_topic_does_not_live():
    world = World("topic")
    elsewhere = world.partitions[SECOND]
    rule = {"name": "few", "filter": {"kind": "false"}, "action": None, "created_ms": world.now_ms}
    elsewhere.set_rules(SOME, [rule])
    elsewhere.set_rule(SOME, {**rule, "name": "more"})
    elsewhere.drop_rule(SOME, "few")
    elsewhere.commit()
    assert [each["name"] for each in elsewhere.rules(SOME)] == ["more"]
    world.partition.set_rules(SOME, [{**rule, "name": "of its partition"}])
    world.partition.commit()
    world.begin_move()
    world.freeze()
    world.finish()
    assert [each["name"] for each in elsewhere.rules(SOME)] == ["of its partition"], (
        "those of the partition that it lived on"
    )
