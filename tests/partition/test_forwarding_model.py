"""Forwarding between partitions: any interleaving of sends, crashes of either side, lost answers and stale commands.

Nothing may be lost or come twice: not in what receivers get, not between the queues, not in dead-letter queues. What
comes to a queue by one way only comes in the order in which it was sent. One destination requires sessions, which half
of the messages have; another one detects duplicates, and must not take what is sent again after a crash for one.
"""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.errors import NotAllowed
from broker.partition.settings import PartitionSettings
from broker.wire import Extra, Outcome
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from tests.models import model_settings
from tests.partition.accounts import assert_counted_rightly
from tests.partition.forwarding_driver import Partitions, dead_letter, transfer_dead_letter
from tests.partition.topic_driver import event, text
from tests.partition.turns import CountingStore

# name: partition, and where it may forward to. Messages are sent to a, and to x; e comes from a's dead-letter queue.
HOMES = {"a": 0, "b": 1, "c": 0, "d": 2, "e": 1, "x": 2, "y": 2}
MAY_FORWARD = {"a": ["b", "c", "d", None], "b": ["c", "d", None], "c": ["y", None], "x": ["y", None]}
WAYS = [(source, destination) for source in range(3) for destination in range(3) if source != destination]
WITH_SESSIONS, WITHOUT_DUPLICATES = "y", "d"
MESSAGE_ID, GROUP_ID = 0, 10
MESSAGES = st.integers(1, 5)
TTLS = st.sampled_from([None, None, None, 30, 400])


class ForwardingModel(RuleBasedStateMachine):
    store_class: type[CountingStore] = CountingStore

    @initialize(
        count=st.sampled_from([1, 2, 5, 100]),
        batch_bytes=st.sampled_from([200, 1 << 20]),
        total_bytes=st.sampled_from([100, 1 << 24]),
        window=st.sampled_from([2, 4096]),
        turn_work=st.sampled_from([6, 10_000]),
        forward_to=st.fixed_dictionaries({name: st.sampled_from(to) for name, to in MAY_FORWARD.items()}),
    )
    def start(self, count, batch_bytes, total_bytes, window, turn_work, forward_to):
        self.net = Partitions(
            3,
            PartitionSettings(
                forward_count=count,
                forward_batch_bytes=batch_bytes,
                forward_bytes=total_bytes,
                window=window,
                step=3,
                turn_work=turn_work,
                abandon_delays=True,
            ),
            {number: self.store_class() for number in range(3)},
        )
        self.properties = {
            name: {"dead_lettering_on_message_expiration": True, "max_delivery_count": 1000} for name in HOMES
        }
        self.properties[WITH_SESSIONS]["requires_session"] = True
        self.properties[WITHOUT_DUPLICATES]["requires_duplicate_detection"] = True
        self.queues = {name: self.net.queue(name, HOMES[name], **self.properties[name]) for name in HOMES}
        self.sent: list[str] = []
        self.received: Counter[str] = Counter()
        self.delayed: set[str] = set()  # they may come after what was sent later
        for name, to in forward_to.items():
            self.change(name, forward_to=to)

    def change(self, name, **properties):
        self.properties[name] |= properties
        self.net.queue(name, HOMES[name], **self.properties[name])

    # -- what happens

    @rule(name=st.sampled_from(["a", "a", "x"]), count=MESSAGES, ttl_ms=TTLS)
    def send(self, name, count, ttl_ms):
        bodies = [f"{name}{len(self.sent) + at:05}" for at in range(count)]
        self.net.send(self.queues[name], *[self.message(body, ttl_ms) for body in bodies])
        self.sent += bodies

    def message(self, body, ttl_ms):
        """Every second one is of a session."""
        number = int(body[1:])
        session = "st"[number // 2 % 2] if number % 2 else None
        made = event(body, ttl_ms=ttl_ms, system={MESSAGE_ID: body, GROUP_ID: session})
        return [*made[:3], {**(made[3] or {}), Extra.MESSAGE_ID: encode(body)}]

    def bodies(self, queue):
        return [text(each.body) for each in self.net.peek(queue)]

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

    @rule()
    def run_for_a_while(self):
        for way in WAYS:
            self.deliver(way, 0)
            self.answer(way)

    @rule(way=st.sampled_from(WAYS))
    def lose(self, way):
        self.net.lose(*way)

    @rule(number=st.integers(0, 2))
    def crash(self, number):
        self.net.crash(number)

    @rule(ms=st.sampled_from([1, 50, 500, 5000]))
    def wait(self, ms):
        self.net.wait(ms)

    @rule(name=st.sampled_from([*MAY_FORWARD]), pick=st.integers(0, 3))
    def forward_elsewhere(self, name, pick):
        to = MAY_FORWARD[name]
        self.change(name, forward_to=to[pick % len(to)])

    @rule(to=st.sampled_from(["e", None]))
    def forward_dead_letters(self, to):
        self.change("a", forward_dead_lettered_messages_to=to)

    @rule(name=st.sampled_from(["b", "c", "d", "e"]), disabled=st.booleans())
    def disable(self, name, disabled):
        self.change(name, status="SendDisabled" if disabled else "Active")

    @rule(name=st.sampled_from([*HOMES]), count=MESSAGES, dead=st.booleans())
    def receive(self, name, count, dead):
        queue = dead_letter(self.queues[name]) if dead else self.queues[name]
        forwards = self.properties[name].get("forward_dead_lettered_messages_to" if dead else "forward_to")
        if forwards:
            with pytest.raises(NotAllowed):
                self.net.receive(queue)
            return
        if name == WITH_SESSIONS and not dead:
            received = self.net.receive_session(queue, count)
        else:
            received = self.net.receive(queue, count)
        for delivery in received:
            self.received[text(delivery.body)] += 1

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def abandon(self, name):
        """What a receiver had and gave back is as it was before."""
        if not self.properties[name].get("forward_to"):
            self.net.receive(self.queues[name], 2, receive_and_delete=False)

    @rule(
        name=st.sampled_from(["a", "a", "b", "c", "y"]),
        ms=st.sampled_from([1, 50, 500, 5000]),
        dead=st.booleans(),
        then_forwards=st.booleans(),
    )
    def abandon_for_a_while(self, name, ms, dead, then_forwards):
        """Meanwhile the queue may begin to forward, or end it; perhaps at once."""
        queue = dead_letter(self.queues[name]) if dead else self.queues[name]
        forwards = self.properties[name].get("forward_dead_lettered_messages_to" if dead else "forward_to")
        if forwards or (name == WITH_SESSIONS and not dead):
            return
        partition = self.net.partitions[HOMES[name]]
        for each in self.net.receive(queue, 2, receive_and_delete=False):
            self.delayed.add(text(each.body))
            delay = {DELAY: encode(Long(ms))}
            assert partition.settle(queue, [each.token], Outcome.ABANDONED, delay, self.net.now_ms) == [None]
        self.net.turn(HOMES[name])
        if then_forwards and name in MAY_FORWARD:
            self.forward_elsewhere(name, 0)

    # -- what must hold

    @invariant()
    def nothing_is_received_twice(self):
        if hasattr(self, "net"):
            assert max(self.received.values(), default=0) <= 1

    @invariant()
    def the_stores_are_consistent(self):
        if hasattr(self, "net"):
            for partition, store in zip(self.net.partitions, self.net.stores, strict=True):
                assert_counted_rightly(partition, store, self.net.now_ms)

    def teardown(self):
        if not hasattr(self, "net"):
            return
        for name in HOMES:
            self.change(name, status="Active")
        for way in WAYS:
            self.net.lose(*way)
        self.net.wait(5000)
        self.net.run()
        found = Counter(self.received)
        for name, queue in self.queues.items():
            forwards = self.properties[name].get("forward_to")
            bodies = self.bodies(queue)
            assert not forwards or not bodies
            assert self.net.counts(queue)[0] == len(bodies)
            if name in "ab":
                in_order = [body for body in bodies if body not in self.delayed]
                assert in_order == sorted(in_order)
            found.update(bodies)
            found.update(self.bodies(dead_letter(queue)))
            found.update(self.bodies(transfer_dead_letter(queue)))
        assert found == Counter(self.sent)


ForwardingModel.TestCase.settings = model_settings(examples=100, steps=40)
TestForwarding = ForwardingModel.TestCase
