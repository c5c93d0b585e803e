"""A record that is damaged on disk while windows, lanes or locks have its message: it leaves all of them, and once."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker import requests
from broker.errors import BrokerError
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import CorruptRecord, Place, decode_entry, message_key, queue_key, unpack_queue_key
from storage.store import Store, Table
from tests.models import model_settings
from tests.partition.driver import LOCK_MS, MAIN, START_MS, Delivery, Driver, message
from tests.partition.forwarding_driver import Partitions, transfer, via
from tests.partition.session_driver import SessionDriver

HERE, THERE, ELSEWHERE = 0, 1, 2


def damage(store: Store, table: Table, key: bytes) -> None:
    value = store.get(table, key)
    assert value is not None
    store.put(table, key, value[:-1] + bytes([value[-1] ^ 1]))
    store.commit()


def entries(store: Store, queue_id: int) -> list[tuple[Place, int]]:
    """(place, sequence number) of all that is stored of a queue."""
    keys = [unpack_queue_key(key) for key, _ in store.scan(Table.QUEUE, b"\0", b"\xff" * 14, 10_000)]
    return [(Place(place), number) for of, place, number in keys if of == queue_id]


def assert_counted(partition, store: Store, *queue_ids: int) -> None:
    partition.check()
    for queue_id in queue_ids:
        counts = partition.request(0, requests.Counts([queue_id]), START_MS)[queue_id]
        places = [place for place, _ in entries(store, queue_id)]
        assert counts[:3] == [places.count(place) for place in Place]


# -- transfer queues


def lanes(**bounds):
    """Entity `a` here; messages sent through it to the others wait, in the windows of their lanes or under way."""
    net = Partitions(3, PartitionSettings(**bounds))
    queues = {name: net.queue(name, at) for name, at in (("a", HERE), ("b", THERE), ("c", ELSEWHERE))}
    return net, transfer(queues["a"]), queues


def check(net: Partitions, *queue_ids: int) -> None:
    assert_counted(net.partitions[HERE], net.stores[HERE], *queue_ids)


@pytest.mark.parametrize("table", [Table.MESSAGES, Table.QUEUE])
def test_a_message_of_a_transfer_queue_that_browsing_quarantines_leaves_its_lane(table):
    net, through, queues = lanes(forward_count=1)
    net.send(through, *[via("b", str(n)) for n in range(4)], via("c", "4"))
    damage(net.stores[HERE], table, message_key(3) if table == Table.MESSAGES else queue_key(through, 0, 3))
    net.peek(through)
    check(net, through)
    net.run()
    check(net, through)
    assert net.bodies(queues["b"]) == ["0", "1", "3"]
    assert net.bodies(queues["c"]) == ["4"]


@pytest.mark.parametrize("count", [1, 3])
def test_an_entry_that_a_lane_finds_damaged_and_another_has_in_memory_is_counted_once(count):
    net, through, queues = lanes(forward_count=count)
    net.send(through, *[via("b", str(n)) for n in range(3)], via("c", "3"))
    net.crash(HERE)
    [to_b], [to_c] = net.connections[HERE, THERE][-1:], net.connections[HERE, ELSEWHERE][-1:]
    net.deliver(HERE, THERE, to_b)  # the question for the mark
    net.answer(HERE, to_b)
    damage(net.stores[HERE], Table.QUEUE, queue_key(through, 0, 2))
    net.deliver(HERE, ELSEWHERE, to_c)
    net.answer(HERE, to_c)
    check(net, through)
    net.run()
    check(net, through)
    assert [body for body in net.bodies(queues["b"]) if body != "1"] == ["0", "2"]
    assert net.bodies(queues["c"]) == ["3"]
    assert entries(net.stores[HERE], through) == []


class DamageToLanes(RuleBasedStateMachine):
    """Messages sent through one entity to two others, answers late or never, and damage anywhere at any time."""

    @initialize(count=st.sampled_from([1, 3]), window=st.sampled_from([1, 4, 100]))
    def start(self, count, window):
        self.net, self.through, self.queues = lanes(forward_count=count, window=window)
        self.sent = 0

    @rule(to=st.sampled_from("bbc"), count=st.integers(1, 4), later=st.booleans())
    def send(self, to, count, later):
        extra = {"scheduled_ms": self.net.now_ms + 100} if later else {}
        self.net.send(self.through, *[via(to, message(str(self.sent + n), **extra)) for n in range(count)])
        self.sent += count

    @rule(pick=st.integers(0, 30), body=st.booleans())
    def damage(self, pick, body):
        store = self.net.stores[HERE]
        found = entries(store, self.through)
        if found:
            place, number = found[pick % len(found)]
            key = queue_key(self.through, place, number)
            stored = store.get(Table.QUEUE, key)
            assert stored is not None
            try:
                message_id = decode_entry(stored).message_id
                if body:
                    damage(store, Table.MESSAGES, message_key(message_id))
            except CorruptRecord:
                return
            if not body:
                damage(store, Table.QUEUE, key)

    @rule()
    def peek(self):
        self.net.peek(self.through)

    @rule(way=st.sampled_from([THERE, ELSEWHERE]), answered=st.booleans())
    def deliver(self, way, answered):
        for connection in self.net.connections.get((HERE, way), []):
            if connection.commands:
                self.net.deliver(HERE, way, connection)
            if answered and connection.answers:
                self.net.answer(HERE, connection)

    @rule(way=st.sampled_from([THERE, ELSEWHERE]))
    def lose(self, way):
        self.net.lose(HERE, way)

    @rule()
    def crash(self):
        self.net.crash(HERE)

    @rule()
    def wait(self):
        self.net.wait(3000)

    @invariant()
    def each_entry_is_counted_once(self):
        if hasattr(self, "net"):
            check(self.net, self.through)

    def teardown(self):
        if hasattr(self, "net"):
            self.net.run()
            check(self.net, self.through)
            assert entries(self.net.stores[HERE], self.through) == []


TestDamageToLanes = DamageToLanes.TestCase
TestDamageToLanes.settings = model_settings(60, 30)


# -- queues and sessions


class DamageToQueues(RuleBasedStateMachine):
    """Every operation of a queue, with sessions or without, while entries and bodies are damaged on disk."""

    @initialize(
        sessions=st.booleans(), window=st.sampled_from([1, 3, 100]), dead=st.booleans(), step=st.sampled_from([1, 100])
    )
    def start(self, sessions, window, dead, step):
        bounds = PartitionSettings(window=window, session_window=window, step=step)
        driver = SessionDriver if sessions else Driver
        self.queue = driver(settings=bounds, dead_lettering_on_message_expiration=dead)
        self.sessions = sessions
        self.received: list[Delivery] = []
        self.number = 0

    @rule(count=st.integers(1, 4), ttl=st.sampled_from([None, None, 50]), session=st.sampled_from("st"))
    def send(self, count, ttl, session):
        extra = {"session_id": session} if self.sessions else {}
        self.queue.send(*[message("m", ttl_ms=ttl, **extra) for _ in range(count)])

    @rule(pick=st.integers(0, 30), body=st.booleans(), dead=st.booleans())
    def damage(self, pick, body, dead):
        store, queue_id = self.queue.store, MAIN | dead
        found = entries(store, queue_id)
        if found:
            place, number = found[pick % len(found)]
            key = queue_key(queue_id, place, number)
            stored = store.get(Table.QUEUE, key)
            assert stored is not None
            try:
                message_id = decode_entry(stored).message_id
                if body:
                    damage(store, Table.MESSAGES, message_key(message_id))
            except CorruptRecord:
                return
            if not body:
                damage(store, Table.QUEUE, key)

    @rule(session=st.sampled_from("st"))
    def open(self, session):
        self.number += 1
        try:
            self.queue.partition.open_receiver(
                f"r{self.number}", MAIN, False, self.queue.now_ms, [session, 0] if self.sessions else None
            )
        except BrokerError:
            return
        self.queue._limits[f"r{self.number}"] = 0
        self.keep(self.queue.pump())

    @rule(count=st.integers(1, 3))
    def grant(self, count):
        for receiver in list(self.queue.partition._core.receivers):
            self.queue.grant(count, receiver)
        self.keep(self.queue.pump())

    def keep(self, pumped):
        self.received += [delivery for given in pumped.values() for delivery in given]

    @precondition(lambda self: self.received)
    @rule(outcome=st.sampled_from(Outcome), pick=st.integers(0, 9))
    def settle(self, outcome, pick):
        self.queue.settle(outcome, self.received.pop(pick % len(self.received)))
        self.keep(self.queue.pump())

    @rule(broken=st.booleans())
    def close(self, broken):
        for receiver in list(self.queue.partition._core.receivers):
            self.queue.close(receiver, broken)

    @rule(name=st.sampled_from(["peek", "purge", "delete-batch", "receive-deferred"]), number=st.integers(1, 9))
    def request(self, name, number):
        args = {
            "peek": [0, 100, 1 << 20],
            "purge": [],
            "delete-batch": [number, START_MS * 2],
            "receive-deferred": [[number], False],
        }[name]
        try:
            self.queue.request(name, *args)
        except BrokerError:
            self.queue.partition.commit()

    @rule(ms=st.sampled_from([50, 100, LOCK_MS]))
    def wait(self, ms):
        self.queue.wait(ms)
        self.keep(self.queue.pump())

    @rule()
    def restart(self):
        self.queue.restart()
        self.received.clear()

    @invariant()
    def each_entry_is_counted_once(self):
        if hasattr(self, "queue"):
            assert_counted(self.queue.partition, self.queue.store, MAIN, MAIN | 1)


TestDamageToQueues = DamageToQueues.TestCase
TestDamageToQueues.settings = model_settings(100, 40)
