"""Transactions that receive from one entity and send through it to others, while anything crashes or is lost.

What was received is gone with the commit, and what was sent is then at its destination, or in the transfer dead-letter
queue, once; at each destination in the order it was sent. Without the commit nothing of it happened.
"""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.partition.settings import PartitionSettings
from broker.wire import Operation, Outcome, SendOperation, SettleOperation
from tests.models import model_settings
from tests.partition.accounts import problems
from tests.partition.driver import Delivery
from tests.partition.forwarding_driver import Partitions, transfer, transfer_dead_letter, via
from tests.partition.turns import CountingStore

SOURCES = {"a": 0, "x": 1}
DESTINATIONS = {"b": 0, "c": 1, "d": 2, "e": 1}
WAYS = [(source, destination) for source in (0, 1) for destination in range(3) if source != destination]


class TransferringModel(RuleBasedStateMachine):
    @initialize(
        count=st.sampled_from([1, 2, 5, 100]),
        batch_bytes=st.sampled_from([200, 1 << 20]),
        total_bytes=st.sampled_from([100, 1 << 24]),
        window=st.sampled_from([2, 4096]),
        turn_work=st.sampled_from([6, 10_000]),
        commit_bytes=st.sampled_from([0, 1 << 20]),
    )
    def start(self, count, batch_bytes, total_bytes, window, turn_work, commit_bytes):
        settings = PartitionSettings(
            forward_count=count,
            forward_batch_bytes=batch_bytes,
            forward_bytes=total_bytes,
            window=window,
            step=3,
            turn_work=turn_work,
            commit_bytes=commit_bytes,
        )
        self.net = Partitions(3, settings, {number: CountingStore() for number in range(3)})
        homes = {**SOURCES, **DESTINATIONS}
        self.queues = {
            name: self.net.queue(name, home, max_delivery_count=1000, lock_duration_ms=300_000)
            for name, home in homes.items()
        }
        self.transactions = self.filled = 0
        self.left: dict[str, set[str]] = {name: set() for name in SOURCES}  # what is to be in the sources
        self.sent: Counter[str] = Counter()  # committed
        self.received: Counter[str] = Counter()

    # -- what happens

    @rule(name=st.sampled_from([*SOURCES]), count=st.integers(1, 3))
    def fill(self, name, count):
        bodies = [f"{name}{self.filled + at}" for at in range(count)]
        self.filled += count
        self.net.send(self.queues[name], *bodies)
        self.left[name] |= set(bodies)

    @rule(
        name=st.sampled_from([*SOURCES]),
        take=st.integers(0, 3),
        destinations=st.lists(st.sampled_from([*DESTINATIONS]), max_size=6),
        end=st.sampled_from(["commit", "commit", "commit", "roll back", "crash"]),
    )
    def transact(self, name, take, destinations, end):
        number, queue = SOURCES[name], self.queues[name]
        partition = self.net.partitions[number]
        received: list[Delivery] = self.net.receive(queue, take, receive_and_delete=False) if take else []
        self.transactions += 1
        bodies = [f"{name}-{self.transactions:05}-{at:02}-{to}" for at, to in enumerate(destinations)]
        sends = [[via(to, body)] for to, body in zip(destinations, bodies, strict=True)]
        tokens = [each.token for each in received]
        operations: list[Operation] = [
            SettleOperation(queue, False, tokens, Outcome.ACCEPTED, None),
            SendOperation(transfer(queue), False, sends),
        ]
        assert partition.transact(self.transactions, True, operations, self.net.now_ms) == [None, None]
        if end == "crash":
            self.net.crash(number)
            return
        partition.discharge(self.transactions, end == "commit", self.net.now_ms)
        if end == "commit":
            self.left[name] -= {each.body.decode() for each in received}
            self.sent.update(bodies)
        else:
            partition.settle(queue, tokens, Outcome.RELEASED, None, self.net.now_ms)
        self.net.turn(number)

    @rule(way=st.sampled_from(WAYS), pick=st.integers(0, 3))
    def deliver(self, way: tuple[int, int], pick: int) -> None:
        waiting = [each for each in self.net.connections.get(way, []) if each.commands]
        if waiting:
            self.net.deliver(*way, waiting[pick % len(waiting)])

    @rule(way=st.sampled_from(WAYS))
    def answer(self, way):
        for connection in self.net.connections.get(way, []):
            if connection.answers:
                self.net.answer(way[0], connection)
                return

    @rule(way=st.sampled_from(WAYS))
    def lose(self, way):
        self.net.lose(*way)

    @rule(number=st.integers(0, 2))
    def crash(self, number):
        self.net.crash(number)

    @rule(ms=st.sampled_from([1, 50, 500, 5000]))
    def wait(self, ms):
        self.net.wait(ms)

    @rule(name=st.sampled_from([*DESTINATIONS]), disabled=st.booleans())
    def disable(self, name, disabled):
        self.net.queue(name, DESTINATIONS[name], status="SendDisabled" if disabled else "Active")

    @rule(name=st.sampled_from([*DESTINATIONS]), count=st.integers(1, 5))
    def receive(self, name, count):
        for delivery in self.net.receive(self.queues[name], count):
            self.received[delivery.body.decode()] += 1

    # -- what must hold

    @invariant()
    def nothing_comes_twice_or_without_its_commit(self):
        if hasattr(self, "net"):
            assert self.received <= self.sent

    @invariant()
    def the_stores_are_consistent(self):
        if hasattr(self, "net"):
            for partition, store in zip(self.net.partitions, self.net.stores, strict=True):
                partition.check()
                assert problems(store) == []

    def teardown(self):
        if not hasattr(self, "net"):
            return
        for name, home in DESTINATIONS.items():
            self.net.queue(name, home)
        for way in WAYS:
            self.net.lose(*way)
        self.net.run()
        found = Counter(self.received)
        for name, queue in self.queues.items():
            bodies = self.net.bodies(queue)
            if name in SOURCES:
                assert set(bodies) == self.left[name]
                assert self.net.bodies(transfer(queue)) == []
                found.update(self.net.bodies(transfer_dead_letter(queue)))
            else:
                for source in SOURCES:
                    of_source = [body for body in bodies if body.startswith(source)]
                    assert of_source == sorted(of_source)
                assert all(body.endswith(name) for body in bodies)
                found.update(bodies)
        assert found == self.sent


TransferringModel.TestCase.settings = model_settings(examples=100, steps=40)
TestTransferring = TransferringModel.TestCase
