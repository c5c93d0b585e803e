"""A backlog queue is drained, in simulated time: where its messages go, in which order, and what if they cannot."""

import asyncio

import pytest

from broker.pairing.costs import polls
from broker.pairing.syphon.budget import Limits
from broker.pairing.syphon.leases import Deferred
from protocol.client.messages import Message
from tests.pairing.syphon import worlds
from tests.pairing.syphon.simulation import Entity, now_s, simulate
from tests.pairing.syphon.worlds import Syphon, World, until

DAY_S = 24 * 3600


def simulated(test):
    """The test runs in simulated time."""

    def run():
        simulate(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@simulated
async def test_messages_reach_their_destinations_and_leave_the_backlog():
    world = World(orders=Entity(), news=Entity())
    for number in range(50):
        world.put("orders" if number % 2 else "news", message_id=str(number))
    syphon = Syphon(world, once=True)
    await syphon.task
    assert world.bodies("orders") == [b"%d" % number for number in range(1, 50, 2)]
    assert world.bodies("news") == [b"%d" % number for number in range(0, 50, 2)]
    assert not world.queue.entries
    assert not world.queue.dead
    counters = syphon.counters
    assert (counters.moved, counters.completed, counters.deferrals, counters.released) == (50, 50, 0, 0)
    assert counters.moved_bytes > 50
    assert counters.queues[world.queue.path].is_leased is False
    assert world.queue.holder is None
    assert len(world.primary.batches) < 20


@simulated
async def test_a_key_keeps_its_order_and_destinations_share_nothing():
    world = World(orders=Entity(), slow=Entity())
    for number in range(300):
        world.put("orders", group_id=f"s{number % 7}", message_id=str(number))
    syphon = Syphon(world, Limits(messages=60, credit=20), once=True)
    await syphon.task
    stored = world.primary.entities["orders"].messages
    for session in {group for _, group, _ in stored}:
        numbers = [int(body) for _, group, body in stored if group == session]
        assert numbers == sorted(numbers)
    assert len(stored) == 300
    assert syphon.most_held <= 60


@simulated
async def test_what_cannot_be_moved_is_a_dead_letter_with_a_reason_and_the_rest_moves_on():
    world = World(orders=Entity(), sessions=Entity(requires_session=True), small=Entity(limit_bytes=200))
    world.put("orders", b"1")
    world.put("gone", b"2")
    world.put("sessions", b"no session")
    world.put("sessions", b"3", group_id="s")
    world.put("small", bytes(300))
    world.put("small", b"4")
    world.put("orders", b"poison", content_type="poison")
    world.put("topic/Subscriptions/all/$DeadLetterQueue")
    world.put("$cbs")
    world.put("orders/$Management")
    world.put("other/x-servicebus-transfer/0")
    world.queue.put(Message.of(b"no aliases").encode(), None)
    world.queue.put(Message.of(b"wrong", application_properties={"x-ms-path": 5}).encode(), None)
    for number in range(20):
        world.put("orders", b"%d" % number)
    syphon = Syphon(world, once=True)
    await syphon.task
    assert syphon.counters.dead_lettered == {
        "SyphonDestinationNotFound": 1,
        "SyphonMessageRefused": 2,
        "SyphonMessageTooLarge": 1,
        "SyphonDestinationNotAllowed": 4,
        "SyphonNotRestorable": 2,
    }
    assert sorted(world.reasons) == sorted(syphon.counters.dead_lettered.elements())
    assert sorted(world.bodies("orders")) == sorted([b"1", *(b"%d" % number for number in range(20))])
    assert (world.bodies("sessions"), world.bodies("small")) == ([b"3"], [b"4"])
    assert not world.queue.entries


@simulated
async def test_a_destination_that_fails_for_a_moment_keeps_its_order_and_defers_nothing():
    world = World(orders=Entity(fault="com.microsoft:server-busy"), news=Entity())
    for number in range(40):
        world.put("orders", group_id="s", message_id=str(number))
        world.put("news")
    syphon = Syphon(world, once=True)
    await until(lambda: len(world.bodies("news")) == 40)
    await asyncio.sleep(0.5)  # it is tried again, in vain
    world.primary.entities["orders"].fault = None
    await syphon.task
    assert world.bodies("orders") == [b"%d" % number for number in range(0, 80, 2)]
    assert syphon.counters.deferrals == 0


@simulated
async def test_a_destination_that_is_disabled_is_set_aside_and_others_are_moved():
    world = World(orders=Entity(fault="com.microsoft:entity-disabled"), news=Entity())
    for number in range(200):
        world.put("orders" if number < 150 else "news", group_id="s", message_id=str(number))
    syphon = Syphon(world, Limits(messages=40, credit=20), once=True)
    await until(lambda: len(world.bodies("news")) == 50, 60)
    await until(lambda: syphon.counters.deferrals >= 150, 60)
    assert world.queue.state.low == 1
    assert world.queue.state.high >= 150
    assert world.bodies("orders") == []
    world.put("orders", b"later", group_id="s", message_id="later")
    await asyncio.sleep(300)
    tries = len(world.primary.batches)
    await asyncio.sleep(600)
    assert 5 <= len(world.primary.batches) - tries <= 25  # with waits of a minute
    world.primary.entities["orders"].fault = None
    await syphon.task
    assert world.bodies("orders") == [*(b"%d" % number for number in range(150)), b"later"]
    assert world.queue.state is None
    assert not world.queue.dead
    assert not world.queue.entries


@simulated
async def test_another_syphon_finds_what_was_deferred_and_moves_it_first():
    world = World(orders=Entity(fault="amqp:resource-limit-exceeded"))
    for number in range(30):
        world.put("orders", group_id="s", message_id=str(number))
    first = Syphon(world)
    await until(lambda: first.counters.deferrals == 30, 60)
    await first.stop()
    assert world.queue.holder is None
    for number in range(30, 60):
        world.put("orders", group_id="s", message_id=str(number))
    world.primary.entities["orders"].fault = None
    second = Syphon(world, once=True)
    await second.task
    assert world.bodies("orders") == [b"%d" % number for number in range(60)]
    assert world.queue.state is None


@simulated
async def test_deferred_messages_that_nobody_has_noted_are_found_when_the_queue_is_empty():
    world = World()
    number = world.put("orders", b"lost")
    world.queue.entries[number].state = 1
    world.queue.entries[world.queue.put(Message.of(b"x").encode(), None)].state = 1
    syphon = Syphon(world)
    await until(lambda: world.bodies("orders") == [b"lost"], 60)
    await until(lambda: world.reasons == ["SyphonNotRestorable"], 60)
    await until(lambda: world.queue.state is None and not world.queue.entries, 60)
    await syphon.stop()


@simulated
async def test_a_deferred_message_that_cannot_be_restored_is_a_dead_letter_and_the_drain_ends():
    world = World()
    properties = {"x-ms-path": "orders", "x-ms-timetolive": "an hour"}
    wrong = world.queue.put(Message.of(b"wrong", application_properties=properties).encode(), None)
    world.queue.entries[wrong].state = 1
    world.queue.entries[world.put("orders", b"right")].state = 1
    syphon = Syphon(world, once=True)
    await until(syphon.task.done, 60)
    assert world.bodies("orders") == [b"right"]
    assert world.reasons == ["SyphonNotRestorable"]
    assert syphon.counters.dead_lettered == {"SyphonNotRestorable": 1}
    assert world.queue.state is None
    assert not world.queue.entries


@simulated
async def test_when_the_primary_goes_everything_is_released_and_nothing_is_lost():
    world = World()
    for number in range(100):
        world.put("orders", group_id=f"s{number % 3}", message_id=str(number))
    world.primary.slowness_s = 1
    syphon = Syphon(world, Limits(messages=50, credit=30), once=True)
    await until(lambda: len(world.bodies("orders")) > 20)
    world.primary.go()
    await asyncio.sleep(1)  # and it takes no more
    assert not any(entry.is_locked for entry in world.queue.entries.values())
    assert syphon.counters.released > 0
    assert syphon.backlogs[-1].credit == 0
    world.primary.slowness_s = 0
    world.primary.come()
    await syphon.task
    stored = world.primary.entities["orders"].messages
    assert len(stored) == 100
    for session in ("s0", "s1", "s2"):
        numbers = [int(body) for _, group, body in stored if group == session]
        assert numbers == sorted(numbers)
    assert len(syphon.backlogs) == 1  # it has kept its lease and its link


@simulated
async def test_a_lost_completion_does_not_send_again():
    world = World(orders=Entity(detects_duplicates=False))
    for _ in range(20):
        world.put("orders")
    world.queue.lock_s = 5
    syphon = Syphon(world, once=True)
    await until(lambda: world.bodies("orders"))
    world.queue.lose_locks()
    await syphon.task
    assert sorted(world.bodies("orders"), key=int) == [b"%d" % number for number in range(20)]


@simulated
async def test_a_connection_lost_before_the_completion_does_not_send_again():
    world = World(orders=Entity(detects_duplicates=False))
    world.primary.slowness_s = 2
    for _ in range(20):
        world.put("orders")
    syphon = Syphon(world, once=True)
    await until(lambda: syphon.most_held == 20)
    syphon.wire.stall()
    await until(lambda: world.bodies("orders"))
    await asyncio.sleep(1)
    syphon.wire.cut()
    await syphon.task
    assert sorted(world.bodies("orders"), key=int) == [b"%d" % number for number in range(20)]
    assert not world.queue.entries


@simulated
async def test_locks_are_renewed_while_messages_wait_for_a_slow_primary():
    world = World(orders=Entity(detects_duplicates=False))
    world.primary.slowness_s = 25
    for _ in range(4):
        world.put("orders", group_id="s")
    syphon = Syphon(world, Limits(messages=2, credit=1), once=True)
    for _ in range(8):
        world.put("orders", bytes(200_000), group_id="t")
    await syphon.task
    assert len(world.bodies("orders")) == 12
    assert all(entry.deliveries <= 1 for entry in world.queue.entries.values())


@simulated
async def test_two_syphons_never_drain_one_queue_and_the_other_takes_over():
    world = World(orders=Entity(detects_duplicates=False))
    first, second = Syphon(world), Syphon(world)
    for number in range(20):
        world.put("orders", group_id="s", message_id=str(number))
    await until(lambda: not world.queue.entries, 60)
    await asyncio.sleep(1)  # the other one gets nothing meanwhile
    assert {first.counters.moved, second.counters.moved} == {0, 20}
    await first.kill()
    world.put("orders", b"last", group_id="s")
    await until(lambda: len(world.bodies("orders")) == 21, 60)
    await until(lambda: second.counters.moved, 60)
    await second.stop()


@simulated
async def test_who_takes_over_waits_for_messages_that_the_other_has_locked():
    world = World()
    world.queue.keeps_locks = True
    world.primary.slowness_s = 2
    for number in range(30):
        world.put("orders", group_id="s", message_id=str(number))
    first = Syphon(world, Limits(messages=10, credit=10))
    await until(lambda: len(world.bodies("orders")) >= 5)
    world.primary.entities["orders"].fault = "amqp:internal-error"
    first.wire.stall()  # it is cut off: its locks last, and its lease ends
    began = now_s()
    second = Syphon(world, once=True)
    await asyncio.sleep(1)  # sends of the first fail meanwhile
    world.primary.entities["orders"].fault = None
    world.primary.slowness_s = 0
    await second.task
    assert now_s() - began > 50
    assert world.bodies("orders") == [b"%d" % number for number in range(30)]
    await first.kill()


@simulated
async def test_polls_are_counted_and_cost_what_the_cloud_bills():
    world = World()
    syphon = Syphon(world)
    await until(lambda: syphon.backlogs)
    await asyncio.sleep(24 * 3600 + 10)
    assert syphon.counters.polls == 96  # of one queue: with ten, 960 a day
    world.put("orders", b"x")
    await until(lambda: not world.queue.entries)
    await asyncio.sleep(901)
    assert syphon.counters.polls == 97
    await syphon.stop()


def test_ten_quiet_queues_cost_40_polls_an_hour_960_a_day_and_28800_in_30_days(monkeypatch):
    monkeypatch.setattr(worlds, "LEASE_S", DAY_S)  # its renewals cost no polls, and would take most of the test's time

    async def run():
        syphons = [Syphon(World(seed)) for seed in range(10)]
        await until(lambda: all(each.backlogs for each in syphons))
        begun_s, counted = now_s(), []
        for seconds in (3600, DAY_S, 30 * DAY_S):
            await asyncio.sleep(begun_s + seconds + 1 - now_s())  # a poll begins a moment after the one before it
            counted.append(sum(each.counters.polls for each in syphons))
        for each in syphons:
            await each.stop()
        return counted

    assert simulate(run()) == [40, 960, 28_800] == [polls(10, seconds) for seconds in (3600, DAY_S, 30 * DAY_S)]


@simulated
async def test_no_more_are_moved_than_the_rate_allows():
    world = World()
    for _ in range(100):
        world.put("orders")
    syphon = Syphon(world, rate=10, once=True)
    await syphon.task
    assert 9 <= now_s() <= 12
    assert len(world.bodies("orders")) == 100


@simulated
async def test_large_messages_find_room_one_by_one():
    world = World(orders=Entity(limit_bytes=1 << 30))
    for _ in range(12):
        world.put("orders", bytes(3 << 20))
    syphon = Syphon(world, Limits(bytes=4 << 20), once=True)
    await syphon.task
    assert len(world.bodies("orders")) == 12
    assert syphon.most_held <= 2


@simulated
async def test_a_stop_ends_within_seconds_although_the_primary_hangs():
    world = World()
    for _ in range(10):
        world.put("orders")
    world.primary.slowness_s = 1000
    syphon = Syphon(world)
    await until(lambda: world.primary.batches)
    began = now_s()
    await syphon.stop()
    assert now_s() - began < 6
    assert world.queue.holder is None
    assert not any(entry.is_locked for entry in world.queue.entries.values())


@pytest.mark.parametrize("state", [Deferred(0, 5), Deferred(3, (1 << 63) - 1)])
def test_a_note_of_what_is_deferred_may_be_too_wide(state):
    async def run():
        world = World()
        world.queue.state = state
        for number in range(30):
            world.put("orders", group_id="s", message_id=str(number))
        syphon = Syphon(world, once=True)
        await syphon.task
        assert world.bodies("orders") == [b"%d" % number for number in range(30)]
        assert world.queue.state is None

    simulate(run())
