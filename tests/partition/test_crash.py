"""The process stops at each write and each commit in turn: on disk is what was confirmed, and nothing half done."""

from collections.abc import Iterator
from typing import Any

import pytest

from broker import requests
from broker.partition.settings import PartitionSettings
from broker.wire import ENTRY, Outcome, SendOperation, SettleOperation
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from storage.lmdb_store import LmdbStore
from storage.log.snapshot import Snapshot
from storage.queue_ids import Part
from storage.records import (
    NEVER,
    STAGED_PREFIX,
    STORE_ID_KEY,
    Counts,
    Field,
    Place,
    Timer,
    decode_counts,
    decode_entry,
    entity_key,
    message_expires_ms,
    message_key,
    unpack_due_key,
    unpack_queue_key,
)
from storage.seen_ids import PURGE_EVERY_MS
from storage.store import Store, Table
from storage.verification import verify_snapshot
from tests.partition.driver import DEAD, ENTITY, FEW_IDS, LOCK_MS, MAIN, START_MS, Driver, message
from tests.partition.forwarding_driver import via

WRITES = ("put", "append", "put_many", "delete", "delete_many")


class Stopped(Exception):
    pass


class StoppingStore:
    """A store that stops at a step: one step before each write, one before each commit, one after it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.steps_left: int | None = None
        self.steps = 0
        self.states: list[Any] = []  # after each commit

    def step(self) -> None:
        self.steps += 1
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left == 0:
                raise Stopped

    def commit(self) -> None:
        if not self._store.dirty:
            return
        self.step()
        self._store.commit()
        self.states.append(contents(self._store))
        self.step()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in WRITES:
            return found

        def write(*args: Any) -> Any:
            self.step()
            return found(*args)

        return write


def contents(store: Store) -> dict[Table, list[tuple[bytes, bytes]]]:
    """All but the store's id, which no two stores have alike."""
    found = {table: store.scan(table, b"\0", b"\xff" * 64, 10_000) for table in Table}
    found[Table.META] = [item for item in found[Table.META] if item[0] != STORE_ID_KEY]
    return found


def assert_consistent(state: dict[Table, list[tuple[bytes, bytes]]]) -> None:
    """Each body in exactly one queue, or of an open transaction; each timer of a message, each count true."""
    bodies = dict(state[Table.MESSAGES])
    used = [key.removeprefix(STAGED_PREFIX) for key, _ in state[Table.META] if key.startswith(STAGED_PREFIX)]
    counted: dict[int, list[int]] = {}
    timers = set()
    for key, value in state[Table.QUEUE]:
        queue_id, place, number = unpack_queue_key(key)
        entry = decode_entry(value)
        record = bodies[message_key(entry.message_id)]
        used.append(message_key(entry.message_id))
        counts = counted.setdefault(queue_id, [0, 0, 0, 0])
        counts[place] += 1
        counts[3] += len(record)
        expires_ms = (entry.overlay or {}).get(Field.EXPIRES_MS) or message_expires_ms(record)
        if place == Place.SCHEDULED:
            returns_ms = (entry.overlay or {}).get(Field.RETURNS_MS)
            scheduled_ms = int.from_bytes(record[8:16], "big") if returns_ms is None else returns_ms
            timers.add((queue_id, Timer.SCHEDULED, scheduled_ms, number))
        elif place == Place.AVAILABLE and expires_ms != NEVER and queue_id & 7 == Part.MAIN:
            timers.add((queue_id, Timer.EXPIRY, expires_ms, number))
    assert sorted(used) == sorted(bodies)
    assert {unpack_due_key(key) for key, _ in state[Table.DUE]} == timers
    stored = {key: decode_counts(value) for key, value in state[Table.COUNTS]}
    for queue_id, counts in counted.items():
        assert stored.pop(entity_key(queue_id))[1:] == tuple(counts)
    assert all(counts[1:] == Counts()[1:] for counts in stored.values())


Scenario = Iterator[None]
TRANSFER = MAIN | Part.TRANSFER
DELAY_OF_50 = {DELAY: encode(Long(50))}


def named(message_id: str) -> list[Any]:
    return message("m", message_id=encode(message_id))


def sending(queue: Driver) -> Scenario:
    yield
    queue.send("a")
    queue.send("b")


def a_batch(queue: Driver) -> Scenario:
    yield
    queue.send("a", message("b", ttl_ms=50), message("c", scheduled_ms=START_MS + 50), "d")


def a_batch_to_a_waiting_receiver(queue: Driver) -> Scenario:
    queue.open()
    queue.grant(2)
    yield
    queue.partition.send(MAIN, [message("a"), message("b"), message("c")], queue.now_ms)
    queue.settle(Outcome.ACCEPTED, *queue.pump()["r"])


def completing(queue: Driver) -> Scenario:
    queue.send("a", "b", message("c", ttl_ms=9000))
    received = queue.receive(3)
    yield
    queue.settle(Outcome.ACCEPTED, received[0])
    queue.settle(Outcome.ACCEPTED, *received[1:])


def abandoning(queue: Driver) -> Scenario:
    queue.send("a", "b")
    a, b = queue.receive(2)
    yield
    queue.settle(Outcome.ABANDONED, a, properties={"p": "1"})
    queue.settle(Outcome.RELEASED, b)


def abandoning_for_the_last_time(queue: Driver) -> Scenario:
    queue.change(max_delivery_count=1)
    queue.send("a", message("b", ttl_ms=9000))
    received = queue.receive(2)
    yield
    queue.settle(Outcome.ABANDONED, *received)


def abandoning_for_a_while(queue: Driver) -> Scenario:
    """One message expires before its delay ends."""
    queue.send("a", message("b", ttl_ms=9000), message("c", ttl_ms=40))
    received = queue.receive(3)
    queue.settle(Outcome.DEAD_LETTERED, received.pop(0))
    received_dead = queue.receive_one("d", DEAD)
    yield
    queue.settle(Outcome.ABANDONED, *received, properties={**DELAY_OF_50, "p": "1"})
    queue.settle(Outcome.ABANDONED, received_dead, properties=DELAY_OF_50, queue=DEAD)
    queue.wait(60)


def forwarding_before_a_message_is_back(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000))
    queue.settle(Outcome.DEAD_LETTERED, *queue.receive(2))
    queue.settle(Outcome.ABANDONED, *queue.receive(2, "d", DEAD), properties=DELAY_OF_50, queue=DEAD)
    yield
    queue.change(forward_dead_lettered_messages_to="orders")
    queue.wait(60)
    queue.pump()


def deferring(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000))
    received = queue.receive(2)
    yield
    queue.settle(Outcome.DEFERRED, *received, properties={"p": "1"})


def completing_what_was_deferred(queue: Driver) -> Scenario:
    queue.send("a", "b")
    queue.settle(Outcome.DEFERRED, *queue.receive(2))
    yield
    queue.request("receive-deferred", [1], True)
    _, items = queue.request("receive-deferred", [2], False)
    queue.request("settle", [items[0]], Outcome.ACCEPTED, None)


def receiving_active_messages_by_their_numbers(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000), "c", "d")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    yield
    queue.request("receive-deferred", [1, 2], True, True)
    _, items, _ = queue.request("receive-deferred", [4, 3], False, True)
    queue.request("settle", [items[0]], Outcome.ABANDONED, None)
    queue.request("settle", [items[ENTRY]], Outcome.ACCEPTED, None)


def dead_lettering(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000))
    received = queue.receive(2)
    yield
    queue.settle(Outcome.DEAD_LETTERED, *received, properties={"DeadLetterReason": "x"})


def completing_what_was_dead_lettered(queue: Driver) -> Scenario:
    queue.send(message("a", ttl_ms=9000))
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    dead = queue.receive_one("d", DEAD)
    yield
    queue.settle(Outcome.ACCEPTED, dead, queue=DEAD)


def receiving_and_deleting(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000), "c")
    queue.open("r", receive_and_delete=True)
    yield
    queue.grant(1)
    queue.pump()
    queue.grant(2)
    queue.pump()


def restoring(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000))
    queue.open("r", receive_and_delete=True)
    queue.partition.grant("r", 2)
    [(_, _, items)] = queue.partition.pump(queue.now_ms).deliveries
    queue.partition.commit()
    yield
    queue.partition.restore(MAIN, items, queue.now_ms)
    queue.partition.commit()


def locks_that_end(queue: Driver) -> Scenario:
    queue.change(max_delivery_count=2)
    queue.send("a", "b")
    queue.settle(Outcome.ABANDONED, queue.receive_one())
    queue.receive(2)
    yield
    queue.wait(LOCK_MS)


def a_connection_that_breaks(queue: Driver) -> Scenario:
    queue.change(max_delivery_count=2)
    queue.send("a", "b")
    queue.settle(Outcome.ABANDONED, queue.receive_one())
    queue.receive(2)
    yield
    queue.close(broken=True)


def expiring(queue: Driver) -> Scenario:
    queue.send(*[message(body, ttl_ms=50 + at) for at, body in enumerate("abcde")])
    yield
    queue.wait(60)


def expiring_to_the_dead_letter_queue(queue: Driver) -> Scenario:
    queue.change(dead_lettering_on_message_expiration=True)
    queue.send(*[message(body, ttl_ms=50) for body in "abc"], "d")
    queue.wait(60)
    yield
    queue.receive(1)
    queue.wait(1)


def activating(queue: Driver) -> Scenario:
    queue.send(*[message(body, scheduled_ms=START_MS + 50, ttl_ms=9000 if body == "b" else None) for body in "abcde"])
    yield
    queue.wait(60)


def sending_duplicates(queue: Driver) -> Scenario:
    queue.change(requires_duplicate_detection=True)
    queue.send(named("1"))
    yield
    queue.send(named("1"), named("2"), named("3"), named("2"))
    queue.send(named("3"))


def ids_that_become_runs(queue: Driver) -> Scenario:
    queue.change(requires_duplicate_detection=True, duplicate_detection_history_time_window_ms=5000)
    yield
    for number in range(3):
        queue.send(*[named(f"{number}{letter}") for letter in "abcde"])
        queue.wait(0)
        queue.send(named(f"{number}a"), named("0b"))
    queue.wait(5000 + PURGE_EVERY_MS)


def ids_whose_window_ends(queue: Driver) -> Scenario:
    queue.change(requires_duplicate_detection=True, duplicate_detection_history_time_window_ms=5000)
    queue.send(named("1"), named("2"), named("3"))
    queue.wait(5000)
    yield
    queue.send(named("3"), named("4"))
    queue.wait(PURGE_EVERY_MS)


def a_transaction(queue: Driver) -> Scenario:
    queue.send(*"abcd", message("e", ttl_ms=9000))
    a, b, c, d, e = queue.receive(5)
    yield
    partition, now_ms = queue.partition, queue.now_ms
    sends = SendOperation(
        MAIN, False, [[message("f")], [message("g", ttl_ms=50), message("h", scheduled_ms=now_ms + 50)]]
    )
    settles = [
        SettleOperation(MAIN, False, [each.token], outcome, None)
        for each, outcome in zip((a, b, c, d), Outcome, strict=False)
    ]
    assert partition.transact("t", True, [sends, *settles], now_ms) == [None] * 5
    partition.request_in("t", False, MAIN, requests.Schedule([message("i", scheduled_ms=now_ms + 50)]), now_ms)
    partition.request_in("t", False, MAIN, requests.Settle([e.token], Outcome.ACCEPTED, None), now_ms)
    assert not partition.commit()
    partition.discharge("t", True, now_ms)
    partition.commit()


def a_transaction_with_large_messages(queue: Driver) -> Scenario:
    """They are stored as they come. Another transaction like it is rolled back, and one does not end."""
    yield
    partition, now_ms = queue.partition, queue.now_ms
    large = bytes(COMMIT_BYTES + 1)
    for key in "tuv":
        for given in ({}, {"ttl_ms": 50}, {"scheduled_ms": now_ms + 50}):
            partition.transact(key, True, [SendOperation(MAIN, False, [[message(large, **given)]])], now_ms)
            partition.commit()
        partition.request_in(key, False, MAIN, requests.Schedule([message(large, scheduled_ms=now_ms + 60)]), now_ms)
        partition.commit()
    for key in "tu":
        partition.discharge(key, key == "t", now_ms)
        partition.commit()


def a_transaction_that_is_rolled_back(queue: Driver) -> Scenario:
    queue.send("a")
    received = queue.receive_one()
    yield
    settle = SettleOperation(MAIN, True, [received.token], Outcome.ACCEPTED, None)
    queue.partition.transact("t", True, [settle, SendOperation(MAIN, False, [[message("b")]])], queue.now_ms)
    queue.partition.discharge("t", False, queue.now_ms)
    queue.partition.commit()


def a_transaction_that_sends_to_others(queue: Driver) -> Scenario:
    """To one of this partition, of which there is but the queue itself, and to one that is gone."""
    queue.send("a")
    received = queue.receive_one()
    yield
    partition, now_ms = queue.partition, queue.now_ms
    names = ["orders", "gone", "orders"]
    sends = [
        [via(name, message(name, ttl_ms=9_000_000, scheduled_ms=at and now_ms + 50))] for at, name in enumerate(names)
    ]
    settle = SettleOperation(MAIN, False, [received.token], Outcome.ACCEPTED, None)
    assert partition.transact("t", True, [settle, SendOperation(TRANSFER, False, sends)], now_ms) == [None, None]
    partition.discharge("t", True, now_ms)
    partition.commit()
    queue.pump()
    queue.wait(50)
    queue.pump()


def scheduling_and_cancelling(queue: Driver) -> Scenario:
    yield
    numbers = queue.request("schedule", [message(body, scheduled_ms=START_MS + 50, ttl_ms=7) for body in "abc"])
    queue.request("cancel-scheduled", numbers[:2])


def deleting_a_batch(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000), "c")
    queue.receive_one()
    yield
    queue.request("delete-batch", 2, START_MS + 1)


def purging(queue: Driver) -> Scenario:
    queue.send("a", message("b", ttl_ms=9000), "c", message("d", scheduled_ms=START_MS + 50))
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    yield
    queue.request("purge")


def several_queues_in_one_turn(queue: Driver) -> Scenario:
    queue.send(*"abc")
    a, b, c = queue.receive(3)
    yield
    partition, now_ms = queue.partition, queue.now_ms
    partition.send(MAIN, [message("d"), message("e")], now_ms)
    partition.settle(MAIN, [a.token], Outcome.ACCEPTED, None, now_ms)
    partition.settle(MAIN, [b.token], Outcome.DEAD_LETTERED, None, now_ms)
    partition.settle(MAIN, [c.token], Outcome.ABANDONED, None, now_ms)
    partition.request(0, requests.Probe(), now_ms)
    queue.open("d", DEAD)
    queue.grant(1, "d")
    queue.settle(Outcome.DEFERRED, *queue.pump()["d"], queue=DEAD)


SCENARIOS = [
    sending,
    sending_duplicates,
    a_transaction,
    a_transaction_with_large_messages,
    a_transaction_that_is_rolled_back,
    a_transaction_that_sends_to_others,
    ids_that_become_runs,
    ids_whose_window_ends,
    a_batch,
    a_batch_to_a_waiting_receiver,
    completing,
    abandoning,
    abandoning_for_the_last_time,
    abandoning_for_a_while,
    forwarding_before_a_message_is_back,
    deferring,
    completing_what_was_deferred,
    receiving_active_messages_by_their_numbers,
    dead_lettering,
    completing_what_was_dead_lettered,
    receiving_and_deleting,
    restoring,
    locks_that_end,
    a_connection_that_breaks,
    expiring,
    expiring_to_the_dead_letter_queue,
    activating,
    scheduling_and_cancelling,
    deleting_a_batch,
    purging,
    several_queues_in_one_turn,
]


COMMIT_BYTES = 100  # of messages that the commit of a transaction writes


def open_store(path, create=False):
    return LmdbStore(path, partition_id=5, map_size_bytes=1 << 26, create=create)


def run(scenario, path, stop_at):
    """Run it on a new store until the step; returns the stopping store, and the state it began with."""
    disk = open_store(path, create=True)
    store = StoppingStore(disk)
    settings = PartitionSettings(step=2, seen_ids=FEW_IDS, commit_bytes=COMMIT_BYTES, abandon_delays=True)
    queue = Driver(store, settings)
    story = scenario(queue)
    next(story)
    assert not disk.dirty
    start = contents(disk)
    store.steps, store.states, store.steps_left = 0, [], stop_at
    try:
        next(story, None)
    except Stopped:
        pass
    else:
        assert stop_at is None
        assert not disk.dirty
    disk.close()
    return store, start


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_stopped_anywhere_it_holds_what_was_confirmed(scenario, tmp_path):
    whole, start = run(scenario, tmp_path / "whole", None)
    assert whole.states
    for state in whole.states:
        assert_consistent(state)
    for step in range(1, whole.steps + 1):
        path = tmp_path / str(step)
        stopped, begun_with = run(scenario, path, step)
        assert begun_with == start
        with Snapshot(path) as snapshot:
            assert not verify_snapshot(snapshot).problems
        disk = open_store(path)
        assert contents(disk) == [start, *whole.states][len(stopped.states)]
        assert stopped.states == whole.states[: len(stopped.states)]
        after(disk)


def after(disk: LmdbStore) -> None:
    """It is opened anew and used: nothing is in the way, and nothing is left when all is received."""
    queue = Driver(disk)
    queue.wait(10 * LOCK_MS)
    queue.pump()
    for queue_id in (MAIN, DEAD, MAIN | Part.TRANSFER_DEAD_LETTER):
        available, deferred, _, _ = queue.held(queue_id)
        received = queue.receive(100, queue_id, queue_id)
        assert len(received) == available
        queue.settle(Outcome.ACCEPTED, *received, queue=queue_id)
        assert queue.request("purge", queue=queue_id) == deferred
        assert queue.counts(queue_id) == [0, 0, 0, 0, 0]
    state = contents(disk)
    assert_consistent(state)
    assert state[Table.MESSAGES] == state[Table.QUEUE] == state[Table.DUE] == []
    disk.close()


def test_deletion_of_a_queue_stopped_anywhere_is_finished_after_a_restart(tmp_path):
    def deleting(queue):
        queue.send(*"abcde", message("f", ttl_ms=9000))
        queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
        yield
        queue.partition.delete_entity(ENTITY, queue.now_ms)
        queue.store.delete(Table.ENTITIES, entity_key(ENTITY))
        queue.partition.commit()
        queue.wait(1)

    whole, start = run(deleting, tmp_path / "whole", None)
    for step in range(1, whole.steps + 1):
        path = tmp_path / str(step)
        stopped, _ = run(deleting, path, step)
        disk = open_store(path)
        assert contents(disk) == [start, *whole.states][len(stopped.states)]
        if stopped.states:
            queue = Driver.__new__(Driver)
            queue.store, queue.settings, queue.now_ms, queue._starts, queue._limits = (
                disk,
                PartitionSettings(),
                0,
                0,
                {},
            )
            queue.start()
            queue.now_ms = START_MS
            queue.wait(1)
            assert contents(disk) == whole.states[-1]
        disk.close()
