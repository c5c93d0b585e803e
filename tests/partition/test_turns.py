"""What one turn does is bounded, whatever has piled up: entries read and messages moved are counted, not seconds."""

from typing import Any

import pytest

from broker.partition.settings import PartitionSettings
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Driver, message
from tests.partition.forwarding_driver import Partitions, transfer, via
from tests.partition.session_driver import SessionDriver
from tests.partition.turns import CountingStore

STEP = 10
EXPIRED = 300
BOUNDS = PartitionSettings(step=STEP)


def turns(queue: Driver[CountingStore]) -> list[tuple[int, bool]]:
    """How many messages each pump moved, and whether it asked for another; no timer fires."""
    found = []
    more = True
    while more:
        queue.store.begin()
        pumped = queue.partition.pump(queue.now_ms)
        found.append((queue.store.moved, pumped.more))
        queue.partition.commit()
        more = pumped.more
    return found


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("dead_letter", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_expired_messages_found_by_hand_out_are_moved_in_steps(sessions, dead_letter, restarts):
    store = CountingStore()
    driver = SessionDriver if sessions else Driver
    queue = driver(store=store, settings=BOUNDS, dead_lettering_on_message_expiration=dead_letter)
    extra: dict[str, Any] = {"session_id": "s"} if sessions else {}
    if not (sessions or restarts):
        queue.open()  # so that they are in the window
    queue.send(*[message("m", ttl_ms=50, **extra) for _ in range(EXPIRED)], message("last", **extra))
    if restarts:
        queue.restart()
    if sessions:
        queue.partition.open_receiver("r", MAIN, False, queue.now_ms, ["s", 0])
        queue._limits["r"] = 0
        queue.pump()
    elif restarts:
        queue.open()
    queue.now_ms += 50
    queue.grant(5)
    moved = turns(queue)
    assert sum(count for count, _ in moved) == EXPIRED
    assert max(count for count, _ in moved) <= STEP
    assert queue.held()[3] == 1
    assert len(queue.peek(DEAD, count=1000)) == EXPIRED * dead_letter


def test_a_session_whose_messages_have_expired_is_looked_at_in_steps():
    queue = SessionDriver(store=CountingStore(), settings=BOUNDS)
    queue.send(*[message("m", ttl_ms=50, session_id=str(n % 30)) for n in range(EXPIRED)])
    queue.send(message("last", session_id="z"))
    queue.now_ms += 50
    for receiver in range(5):
        queue.partition.open_receiver(receiver, MAIN, False, queue.now_ms, [None, 60_000])
    moved = turns(queue)
    assert sum(count for count, _ in moved) == EXPIRED
    assert max(count for count, _ in moved) <= STEP


def test_unreadable_messages_are_quarantined_in_steps():
    queue = Driver(store=CountingStore(), settings=BOUNDS)
    queue.send(*["m"] * EXPIRED, "last")
    for number in range(1, EXPIRED + 1):
        queue.store.damage_body(number)
    queue.open()
    queue.grant(1)
    moved = turns(queue)
    assert sum(count for count, _ in moved) == EXPIRED
    assert max(count for count, _ in moved) <= STEP
    assert queue.held() == [1, 0, 0, 1]


def test_locks_of_sessions_end_in_steps_of_messages():
    queue = SessionDriver(store=CountingStore(), settings=PartitionSettings(turn_work=100), max_delivery_count=1)
    for session in range(20):
        queue.put(str(session), *["m"] * 20)
        queue.partition.open_receiver(session, MAIN, False, queue.now_ms, [str(session), 0])
        queue._limits[session] = 0
        queue.pump()
        queue.grant(20, session)
        queue.pump()
    queue.now_ms += LOCK_MS
    moved = []
    while (due_ms := queue.partition.next_timer_ms()) is not None and due_ms <= queue.now_ms:
        queue.store.begin()
        queue.partition.advance(queue.now_ms)
        moved.append(queue.store.moved)
        queue.partition.commit()
    assert sum(moved) == 400
    assert max(moved) <= 100 + 20


def test_many_queues_share_what_a_turn_may_do():
    queue = Driver(store=CountingStore(), settings=PartitionSettings(turn_work=100))
    queues = [queue.add_queue(2 + n) for n in range(40)]
    for queue_id in queues:
        queue.send(*[message("m", ttl_ms=50) for _ in range(10)], message("last"), queue=queue_id)
        queue.open(queue_id, queue_id)
    queue.now_ms += 50
    for queue_id in queues:
        queue.grant(1, queue_id)
    moved = turns(queue)
    assert sum(count for count, _ in moved) == 400
    assert max(count for count, _ in moved) <= 100 + 10
    assert [queue.held(queue_id)[3] for queue_id in queues] == [1] * 40


def test_expired_messages_of_a_queue_that_forwards_are_moved_in_steps():
    store = CountingStore()
    net = Partitions(2, PartitionSettings(step=STEP, turn_work=50), stores={0: store})
    net.queue("b", 1)
    a = net.queue("a", 0, forward_to="b")
    net.partitions[0].send(a, [message("m", ttl_ms=50) for _ in range(EXPIRED)], net.now_ms)
    net.partitions[0].commit()
    net.now_ms += 50
    net.run()
    assert net.counts(a)[0] == 0
    assert store.most_moved <= 50 + STEP


def test_a_head_that_is_locked_is_passed_over_in_steps():
    queue = Driver(store=CountingStore(), settings=PartitionSettings(turn_work=1_000, window=10))
    for _ in range(40):
        queue.send(*["m"] * 250)
    queue.receive(10_000, "first")
    queue.send("last")
    queue.open("second")
    queue.partition._core.queue(MAIN).window.reset(queue.partition._core.queue(MAIN).locks.numbers())
    queue.grant(1, "second")
    read, more = [], True
    while more:
        queue.store.begin()
        pumped = queue.partition.pump(START_MS)
        read.append(queue.store.entries_read)
        more = pumped.more
        queue.partition.commit()
    assert sum(read) > 10_000
    assert max(read) < 1_000 + 1_024


def test_a_lane_reads_past_messages_for_other_lanes_in_steps():
    store = CountingStore()
    net = Partitions(3, PartitionSettings(turn_work=1_000), stores={0: store})
    a, b, c = net.queue("a", 0), net.queue("b", 1), net.queue("c", 2)
    for _ in range(30):
        net.send(transfer(a), *[via("b", "m")] * 500)
    net.send(transfer(a), via("c", "last"))
    net.crash(0)
    net.now_ms += 5_000
    store.most_read = 0
    net.run()
    assert (net.counts(b)[0], net.counts(c)[0]) == (15_000, 1)
    assert store.most_read < 1_000 + 2 * 1_024
