"""Forwarding to partitioned entities and from them: each message goes to the fragment of its key, once, in order."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.namespace.fragments import fragment_of
from broker.partition.settings import PartitionSettings
from broker.wire import Extra
from protocol.codec import encode
from tests.models import model_settings
from tests.partition.accounts import assert_counted_rightly
from tests.partition.forwarding_driver import Partitions, dead_letter, transfer, transfer_dead_letter, via
from tests.partition.topic_driver import event, text
from tests.partition.turns import CountingStore

ALL = (0, 1, 2)
MESSAGE_ID, GROUP_ID = 0, 10
WAYS = [(source, destination) for source in ALL for destination in ALL if source != destination]


def made(body: str, session: str | None = None, ttl_ms: int | None = None):
    """A message with this body and id, and the session as its key."""
    layout, content, ttl_ms, extra = event(body, ttl_ms=ttl_ms, system={MESSAGE_ID: body, GROUP_ID: session})
    return [layout, content, ttl_ms, {**(extra or {}), Extra.MESSAGE_ID: encode(body)}]


def bodies(net: Partitions, queue: int, at: int) -> list[str]:
    return [text(each.body) for each in net.peek(queue, at)]


def spread(net: Partitions, queue: int) -> dict[int, list[str]]:
    return {at: bodies(net, queue, at) for at in ALL}


@pytest.fixture
def net() -> Partitions:
    return Partitions(3)


def test_each_message_goes_to_the_fragment_of_its_session(net: Partitions) -> None:
    there = net.fragments("there", ALL, requires_session=True)
    here = net.queue("here", 0, forward_to="there")
    sessions = [f"s{index}" for index in range(9)]
    net.send(here, *[made(f"{session} {number}", session) for number in range(3) for session in sessions])
    net.run()
    found = spread(net, there)
    assert sum(map(len, found.values())) == 27
    for at, held in found.items():
        for session in {body.split()[0] for body in held}:
            assert fragment_of(session.encode(), ALL) == at
            assert [body for body in held if body.split()[0] == session] == [f"{session} {n}" for n in range(3)]
    assert all(found.values())
    assert net.counts(here)[0] == net.counts(transfer(here))[0] == 0


def test_a_message_id_is_the_key_where_duplicates_are_detected(net: Partitions) -> None:
    there = net.fragments("there", ALL, requires_duplicate_detection=True)
    here, too = net.queue("here", 0, forward_to="there"), net.queue("too", 1, forward_to="there")
    for queue in (here, too):
        net.send(queue, *[made(f"m{number}") for number in range(12)])
    net.run()
    found = spread(net, there)
    assert Counter(body for held in found.values() for body in held) == Counter(f"m{number}" for number in range(12))
    assert all(fragment_of(body.encode(), ALL) == at for at, held in found.items() for body in held)


def test_messages_without_a_key_stay_on_a_partition_that_is_a_fragment(net: Partitions) -> None:
    there = net.fragments("there", (0, 2))
    here, too = net.queue("here", 0, forward_to="there"), net.queue("too", 1, forward_to="there")
    net.send(here, *[made(f"h{number}") for number in range(6)])
    net.send(too, *[made(f"t{number}") for number in range(6)])
    net.run()
    assert bodies(net, there, 0)[:6] == [f"h{number}" for number in range(6)]
    assert len(bodies(net, there, 0)) == len(bodies(net, there, 2)) + 6 == 9


def test_a_partitioned_queue_forwards_from_each_fragment(net: Partitions) -> None:
    there = net.queue("there", 1)
    here = net.fragments("here", ALL, forward_to="there")
    for at in ALL:
        net.send(here, made(f"a{at}"), made(f"b{at}"), at=at)
    net.run()
    found = bodies(net, there, 1)
    assert Counter(found) == Counter(f"{letter}{at}" for letter in "ab" for at in ALL)
    assert all(found.index(f"a{at}") < found.index(f"b{at}") for at in ALL)


def test_dead_lettered_messages_go_to_the_fragments_of_their_keys(net: Partitions) -> None:
    there = net.fragments("there", ALL, requires_session=True)
    here = net.queue("here", 0, forward_dead_lettered_messages_to="there", dead_lettering_on_message_expiration=True)
    net.send(here, *[made(f"m{number}", f"s{number}", ttl_ms=1000) for number in range(9)])
    partition = net.partitions[0]
    partition.open_receiver("r", here, False, net.now_ms)
    net.wait(2000)
    partition.grant("r", 1)
    net.turn(0)
    net.run()
    found = spread(net, there)
    assert {body: at for at, held in found.items() for body in held} == {
        f"m{number}": fragment_of(b"s%d" % number, ALL) for number in range(9)
    }
    assert net.counts(dead_letter(here))[0] == 0


def test_messages_sent_through_an_entity_go_to_the_fragments_of_their_keys(net: Partitions) -> None:
    there = net.fragments("there", ALL, requires_session=True)
    here = net.queue("here", 0)
    messages = []
    for number in range(9):
        layout, content, ttl_ms, extra = made(f"m{number}", f"s{number}")
        messages.append(via("there", [layout, content, ttl_ms, {**(extra or {}), Extra.SESSION_ID: f"s{number}"}]))
    net.partitions[0].send(transfer(here), messages, net.now_ms)
    net.turn(0)
    net.run()
    found = spread(net, there)
    assert {body: at for at, held in found.items() for body in held} == {
        f"m{number}": fragment_of(b"s%d" % number, ALL) for number in range(9)
    }


def test_a_fragment_that_is_away_delays_no_other(net: Partitions) -> None:
    there = net.fragments("there", ALL, requires_session=True)
    here = net.queue("here", 0, forward_to="there")
    of = {at: next(f"s{n}" for n in range(99) if fragment_of(b"s%d" % n, ALL) == at) for at in ALL}
    net.send(here, *[made(f"{at} {number}", of[at]) for number in range(5) for at in (1, 0, 2)])
    for _ in range(10):
        for connection in net.connections.get((0, 2), []):
            while connection.commands:
                net.deliver(0, 2, connection)
            while connection.answers:
                net.answer(0, connection)
    assert bodies(net, there, 0) == [f"0 {number}" for number in range(5)]
    assert bodies(net, there, 2) == [f"2 {number}" for number in range(5)]
    assert bodies(net, there, 1) == []
    net.run()
    assert bodies(net, there, 1) == [f"1 {number}" for number in range(5)]


def test_what_is_refused_for_good_is_in_the_transfer_dead_letter_queue(net: Partitions) -> None:
    net.fragments("there", ALL, status="SendDisabled", requires_session=True)
    here = net.queue("here", 0, forward_to="there")
    net.send(here, *[made(f"m{number}", f"s{number}") for number in range(6)])
    net.run()
    assert len(bodies(net, transfer_dead_letter(here), 0)) == 6


def test_a_message_makes_no_more_hops_than_allowed(net: Partitions) -> None:
    queues: dict[int, int] = {}
    for number in reversed(range(6)):
        to = f"q{number + 1}" if number < 5 else None
        queues[number] = net.fragments(f"q{number}", ALL, forward_to=to)
    net.send(queues[0], *[made(f"m{n}", f"s{n}") for n in range(6)], at=0)
    net.run()
    assert not any(spread(net, queues[5]).values())
    assert sum(map(len, spread(net, transfer_dead_letter(queues[4])).values())) == 6


class FragmentsModel(RuleBasedStateMachine):
    """Any interleaving of sends, crashes, lost answers and stale commands, between queues on one and on all partitions.

    a (plain) and p (partitioned) forward to each other's kind, s requires sessions, and d detects duplicates.
    """

    @initialize(
        count=st.sampled_from([1, 2, 100]),
        window=st.sampled_from([2, 4096]),
        turn_work=st.sampled_from([6, 10_000]),
        a_to=st.sampled_from(["p", "s", "d"]),
        p_to=st.sampled_from([None, "s", "d", "plain"]),
    )
    def start(self, count, window, turn_work, a_to, p_to):
        settings = PartitionSettings(forward_count=count, window=window, step=3, turn_work=turn_work)
        self.net = Partitions(3, settings, {number: CountingStore() for number in ALL})
        self.to = {"a": a_to, "p": p_to}
        self.queues = {
            "s": self.net.fragments("s", ALL, requires_session=True),
            "d": self.net.fragments("d", ALL, requires_duplicate_detection=True),
            "plain": self.net.queue("plain", 2),
        }
        self.queues["p"] = self.net.fragments("p", ALL, forward_to=p_to)
        self.queues["a"] = self.net.queue("a", 0, forward_to=a_to)
        self.sent: list[str] = []

    @rule(name=st.sampled_from(["a", "a", "p"]), at=st.sampled_from(ALL), count=st.integers(1, 5))
    def send(self, name, at, count):
        messages = []
        for _ in range(count):
            number = len(self.sent)
            session = f"s{number % 4}"
            self.sent.append(f"{name}{at if name == 'p' else ''} {session} {number:05}")
            messages.append(made(self.sent[-1], session))
        self.net.send(self.queues[name], *messages, at=at if name == "p" else 0)

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

    @rule(number=st.sampled_from(ALL))
    def crash(self, number):
        self.net.crash(number)

    @rule(ms=st.sampled_from([1, 50, 5000]))
    def wait(self, ms):
        self.net.wait(ms)

    @rule(to=st.sampled_from(["p", "s", "d", None]))
    def forward_elsewhere(self, to):
        self.to["a"] = to
        self.net.queue("a", 0, forward_to=to)

    @rule(to=st.sampled_from(["s", "d", "plain", None]))
    def fragments_forward_elsewhere(self, to):
        self.to["p"] = to
        self.net.fragments("p", ALL, forward_to=to)

    @invariant()
    def counts_are_right(self):
        for partition, store in zip(self.net.partitions, self.net.stores, strict=True):
            assert_counted_rightly(partition, store, self.net.now_ms)

    @rule()
    def everything_arrives_once(self):
        self.net.run()
        found = Counter()
        for name, queue in self.queues.items():
            for at in ALL if name not in ("a", "plain") else (0,) if name == "a" else (2,):
                held = bodies(self.net, queue, at)
                found += Counter(held)
                if name in ("s", "d"):
                    for body in held:
                        key = body.split()[1].encode()
                        assert fragment_of(key, ALL) == at, (name, body, at)
        assert found == Counter(self.sent)

    def teardown(self):
        if hasattr(self, "net"):
            self.everything_arrives_once()


TestFragmentsModel = FragmentsModel.TestCase
TestFragmentsModel.settings = model_settings(20, 40)
