"""The credit of links over the fragments of an entity, against fragments that hand out as partitions do."""

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.gateway.links.shares import IDLE_SECONDS, PASS_SECONDS, UNUSED_SECONDS, Action, Kind, Shares
from broker.partition.state.line import Line
from broker.partition.state.receivers import Receiver
from tests.examples import examples

FRAGMENTS = 3
LINKS = 2


class Fragment:
    """Messages and a line, and what was sent to and by it and is still on the way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.messages = 0
        self.line = Line()
        self.receivers: dict[int, Receiver] = {}
        self.commands: deque[tuple[int, Any]] = deque()
        self.answers: deque[tuple[Any, tuple[str, int]]] = deque()

    def open(self, link: int) -> None:
        self.receivers[link] = Receiver(link, 1, False)
        self.line.watch(self.receivers[link])

    def work(self) -> None:
        """Do one command, then what a partition does at the end of a turn."""
        if self.commands:
            link, (kind, _, limit) = self.commands.popleft()
            receiver = self.receivers[link]
            if kind is Kind.GRANT:
                self.line.grant(receiver, limit)
            elif kind is Kind.RECALL:
                self.line.drain(receiver, limit)
            else:
                self.line.passes(receiver)
        while self.line.waiting and self.messages:
            group, dealt = self.line.next_round(self.messages)
            self.messages -= dealt
            for place, receiver in enumerate(group):
                count = len(range(place, dealt, len(group)))
                receiver.delivered += count
                if count:
                    self.answers.append((receiver.key, ("delivered", count)))
            self.line.served(group, dealt)
        for receiver in self.line.take_drained():
            self.answers.append((receiver.key, ("returned", receiver.delivered)))
        if self.line.watching and not self.line.waiting and self.messages:
            self.answers += [(receiver.key, ("available", 0)) for receiver in self.line.tell(self.messages)]


class Link:
    """What the gateway does with the shares of one link."""

    def __init__(self, number: int, fragments: list[Fragment]) -> None:
        self.number = number
        self.fragments = fragments
        self.shares = Shares(range(len(fragments)))
        self.now = 0.0
        self.credit = 0
        self.delivered = [0] * len(fragments)
        self.limits = [0] * len(fragments)
        self.drains = False
        self.given_back = 0  # deliveries beyond the credit
        self.reduced = False  # credit was taken back while it was granted

    def connect(self) -> None:
        for fragment in self.fragments:
            fragment.open(self.number)
            self.shares.connected(fragment.number)

    def act(self) -> None:
        if not self.drains:
            self._send(self.shares.spread(self.credit, self.now))
            return
        self._send(self.shares.drain(self.credit, self.now))
        if self.shares.is_drained(self.credit):
            self.drains = False
            self.credit = 0
            self._send(self.shares.spread(0, self.now))

    def _send(self, actions: Any) -> None:
        for kind, at, granted in actions:
            self.limits[at] = self.delivered[at] + granted
            self.fragments[at].commands.append((self.number, (kind, at, self.limits[at])))

    def wait(self, until: float) -> None:
        self.now = until
        if self.shares.again_at is not None and self.shares.again_at <= until:
            self.act()

    def hear(self, at: int, what: str, count: int) -> None:
        if what == "delivered":
            self.delivered[at] += count
            self.shares.delivered(at, count)
            self.given_back += max(0, count - self.credit)
            self.credit -= min(count, self.credit)
        elif what == "returned":
            self.shares.returned(at, count >= self.limits[at] > 0)
        else:
            self.shares.available(at, self.now)
        self.act()

    def hear_all(self, fragment: Fragment) -> None:
        """No other link is there."""
        while fragment.answers:
            _, (what, count) = fragment.answers.popleft()
            self.hear(fragment.number, what, count)


class SharesMachine(RuleBasedStateMachine):
    """Messages come, clients give credit and drain, and everything is late."""

    @initialize()
    def begin(self) -> None:
        self.fragments = [Fragment(number) for number in range(FRAGMENTS)]
        self.links = [Link(number, self.fragments) for number in range(LINKS)]
        for link in self.links:
            link.connect()
        self.stopped: set[int] = set()
        self.was_overdue = False

    @rule(at=st.integers(0, FRAGMENTS - 1), count=st.sampled_from([1, 1, 2, 7, 40]))
    def messages_come(self, at: int, count: int) -> None:
        self.fragments[at].messages += count

    @rule(link=st.integers(0, LINKS - 1), count=st.sampled_from([1, 1, 2, 3, 10, 100]))
    def credit_comes(self, link: int, count: int) -> None:
        self.links[link].credit += count
        self.links[link].act()

    @rule(link=st.integers(0, LINKS - 1), credit=st.sampled_from([0, 1, 5]))
    def credit_is_taken_back(self, link: int, credit: int) -> None:
        found = self.links[link]
        if credit < found.credit:
            found.credit = credit
            found.reduced = True
            found.act()

    @rule(link=st.integers(0, LINKS - 1))
    def drain(self, link: int) -> None:
        self.links[link].drains = True
        self.links[link].act()

    @precondition(lambda self: any(link.credit == 0 and not link.drains for link in self.links))
    @rule()
    def links_without_credit_rest(self) -> None:
        for link in self.links:
            if link.credit == 0 and not link.drains:
                link._send(link.shares.rest())

    @rule(seconds=st.sampled_from([0.001, UNUSED_SECONDS, PASS_SECONDS, IDLE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        for link in self.links:
            link.wait(link.now + seconds)

    @rule(at=st.integers(0, FRAGMENTS - 1))
    def fragment_works(self, at: int) -> None:
        if at not in self.stopped:
            self.fragments[at].work()

    @rule(at=st.integers(0, FRAGMENTS - 1))
    def answer_arrives(self, at: int) -> None:
        fragment = self.fragments[at]
        if fragment.answers:
            link, (what, count) = fragment.answers.popleft()
            self.links[link].hear(at, what, count)

    @rule(at=st.integers(0, FRAGMENTS - 1))
    def fragment_stops(self, at: int) -> None:
        self.stopped.add(at)

    @rule()
    def fragments_go_on(self) -> None:
        self.stopped.clear()

    @precondition(lambda self: self.stopped)
    @rule()
    def recalls_are_overdue(self) -> None:
        for link in self.links:
            for at in link.shares.recalled:
                if at in self.stopped:
                    link.shares.overdue(at)
                    self.was_overdue = True
            link.act()

    @rule()
    def everything_settles(self) -> None:
        """Nothing is on the way any more: no credit is idle, and no drain unanswered."""
        self.stopped.clear()
        for _ in range(10_000):
            busy = False
            for at, fragment in enumerate(self.fragments):
                before = len(fragment.answers)
                busy = busy or bool(fragment.commands)
                fragment.work()
                busy = busy or len(fragment.answers) > before
                while fragment.answers:
                    busy = True
                    key, (what, count) = fragment.answers.popleft()
                    self.links[key].hear(at, what, count)
            if not busy:
                due = [link.shares.again_at for link in self.links if link.shares.again_at is not None]
                if not due:
                    break
                for link in self.links:
                    link.wait(max(due))
        else:
            raise AssertionError("it never comes to rest")
        for link in self.links:
            assert not link.drains, "the drain is never answered"
            assert not (link.credit and any(fragment.messages for fragment in self.fragments)), "credit is idle"

    @invariant()
    def no_more_is_granted_than_there_is_credit(self) -> None:
        for link in getattr(self, "links", []):
            if not link.reduced:
                granted = link.shares.granted
                if self.was_overdue:  # what came late took credit that was recalled elsewhere, and it goes back then
                    granted -= sum(link.shares._shares[at].granted for at in link.shares.recalled)
                assert granted <= link.credit
                assert self.was_overdue or not link.given_back


TestShares = SharesMachine.TestCase
TestShares.settings = settings(max_examples=examples(300), stateful_step_count=60)


def alone(count: int) -> Link:
    link = Link(0, [Fragment(number) for number in range(count)])
    link.connect()
    return link


def connected(count: int) -> Shares:
    shares = Shares(range(count))
    for at in range(count):
        shares.connected(at)
    return shares


def test_with_enough_credit_each_fragment_has_its_part_in_advance():
    assert [*connected(4).spread(1003, 0.0)] == [Action(Kind.GRANT, at, 250) for at in range(4)]


def test_scarce_credit_waits_for_who_has_messages():
    shares = connected(4)
    assert [*shares.spread(3, 0.0)] == []
    shares.available(2, 0.0)
    assert [*shares.spread(3, 0.0)] == [Action(Kind.GRANT, 2, 3)]


def test_scarce_credit_is_recalled_for_who_has_messages():
    shares = connected(2)
    assert [*shares.spread(2, 0.0)] == [Action(Kind.GRANT, at, 1) for at in range(2)]
    shares.delivered(0, 1)
    shares.available(0, 0.0)
    assert [*shares.spread(1, 0.0)] == [Action(Kind.RECALL, 1, 1)]
    assert [*shares.spread(1, 0.0)] == []
    shares.returned(1, False)
    assert [*shares.spread(1, 0.0)] == [Action(Kind.GRANT, 0, 1)]


def test_with_enough_credit_a_grant_is_recalled_when_nobody_has_used_it_for_a_while():
    shares = connected(2)
    assert [*shares.spread(10, 1.0)] == [Action(Kind.GRANT, at, 5) for at in range(2)]
    shares.delivered(0, 5)
    shares.available(0, 0.0)
    shares.delivered(1, 1)
    assert [*shares.spread(4, 1.01)] == []
    assert shares.again_at == 1.0 + IDLE_SECONDS
    assert [*shares.spread(4, shares.again_at)] == [Action(Kind.RECALL, 1, 4)]
    assert shares.again_at is None


def test_grants_of_which_nothing_was_used_are_all_recalled_soon():
    shares = connected(4)
    assert [*shares.spread(100, 1.0)] == [Action(Kind.GRANT, at, 25) for at in range(4)]
    shares.delivered(0, 25)
    shares.available(0, 1.0)
    shares.delivered(3, 1)
    assert [*shares.spread(74, 1.001)] == []
    assert shares.again_at == 1.0 + UNUSED_SECONDS
    assert [*shares.spread(74, shares.again_at)] == [Action(Kind.RECALL, at, 25) for at in (1, 2)]
    assert shares.again_at is None
    shares.returned(1, False)
    [grant, *_] = shares.spread(74, 1.003)
    assert (grant.kind, grant.fragment) == (Kind.GRANT, 0)


@pytest.mark.parametrize("fragments", [4, 16])
def test_the_messages_of_one_fragment_come_without_a_pause(fragments):
    """A round is half a millisecond. The client asks once for all; its receive call ends after 20 ms without any."""
    link = alone(fragments)
    link.fragments[1].messages = link.credit = 100
    link.act()
    pause = 0
    while link.fragments[1].messages or link.fragments[1].answers:
        before = link.delivered[1]
        for fragment in link.fragments:
            fragment.work()
            link.hear_all(fragment)
        link.wait(link.now + 0.0005)
        pause = 0 if link.delivered[1] > before else pause + 1
        assert pause < 10
    assert link.delivered[1] == 100


def test_while_all_fragments_are_busy_nothing_is_recalled():
    shares = connected(2)
    assert [*shares.spread(10, 1.0)] == [Action(Kind.GRANT, at, 5) for at in range(2)]
    shares.delivered(0, 5)
    shares.available(0, 1.001)
    assert [*shares.spread(5, 1.001)] == []
    shares.delivered(1, 5)
    shares.available(1, 1.001)
    assert [*shares.spread(0, 1.001)] == []
    assert [*shares.spread(10, 1.015)] == [Action(Kind.GRANT, at, 5) for at in range(2)]


def test_a_fragment_that_does_not_answer_keeps_no_credit():
    shares = connected(2)
    shares.available(0, 0.0)
    assert [*shares.spread(1, 0.0)] == [Action(Kind.GRANT, 0, 1)]
    shares.available(1, 0.0)
    assert [*shares.spread(1, 0.0)] == [Action(Kind.RECALL, 0, 1)]
    shares.overdue(0)
    assert [*shares.spread(1, 0.0)] == [Action(Kind.GRANT, 1, 1)]
    shares.delivered(1, 1)
    shares.delivered(0, 1)
    shares.returned(0, True)
    assert shares.granted == 0


def test_without_credit_messages_are_left_to_others():
    shares = connected(2)
    shares.available(1, 1.0)
    assert [*shares.spread(0, 1.0)] == []
    assert shares.again_at == 1.0 + PASS_SECONDS
    assert [*shares.spread(0, shares.again_at)] == [Action(Kind.PASS, 1)]
    assert shares.again_at is None
    assert [*shares.spread(0, 2.0)] == []
    assert [*shares.spread(1, 2.0)] == [Action(Kind.GRANT, 1, 1)], "they may be there still"


def test_a_link_that_rests_waits_for_nothing_until_it_has_credit_again():
    shares = connected(3)
    shares.lost(2)
    assert [*shares.rest()] == [Action(Kind.PASS, 0), Action(Kind.PASS, 1)]
    assert [*shares.rest()] == [*shares.spread(0, 0.0)] == []
    assert [*shares.spread(1, 0.0)] == [Action(Kind.GRANT, 0), Action(Kind.GRANT, 1)]
    assert [*shares.spread(1, 0.0)] == []


def test_a_fragment_with_a_grant_is_not_told_to_rest():
    shares = connected(2)
    shares.available(0, 0.0)
    assert [*shares.spread(1, 0.0)] == [Action(Kind.GRANT, 0, 1)]
    assert [*shares.rest()] == [Action(Kind.PASS, 1)]
    shares.delivered(0, 1)
    assert [*shares.rest()] == [Action(Kind.PASS, 0)]


def test_a_fragment_that_is_away_gets_nothing():
    shares = connected(2)
    shares.lost(0)
    assert [*shares.spread(10, 0.0)] == [Action(Kind.GRANT, 1, 5)]
    shares.connected(0)
    assert [*shares.spread(10, 0.0)] == [Action(Kind.GRANT, 0, 5)]


@pytest.mark.parametrize("credit", [1, 2, 5, 100])
def test_no_fragment_starves_beside_others_that_always_have_more(credit):
    link = alone(FRAGMENTS)
    for fragment in link.fragments:
        fragment.messages = 1_000_000
    for _ in range(300):
        link.credit = credit
        link.act()
        for fragment in link.fragments:
            fragment.work()
            link.hear_all(fragment)
    assert min(link.delivered) > 300 * credit / FRAGMENTS / 4


def test_who_has_waited_longest_gets_its_whole_part():
    shares = connected(4)
    assert [*shares.spread(1000, 1.0)] == [Action(Kind.GRANT, at, 250) for at in range(4)]
    for at in (2, 0, 1):
        shares.delivered(at, 250)
        shares.available(at, 1.0)
    assert [*shares.spread(600, 1.0)] == [Action(Kind.GRANT, at, count) for at, count in ((0, 150), (1, 150), (2, 50))]


def test_a_fragment_gets_no_more_in_advance_than_it_has_used():
    shares = connected(2)
    assert [*shares.spread(100, 1.0)] == [Action(Kind.GRANT, at, 50) for at in range(2)]
    shares.delivered(0, 50)
    shares.available(0, 1.0)
    shares.delivered(1, 3)
    now = 1.0 + IDLE_SECONDS
    assert [*shares.spread(47, now)] == [Action(Kind.RECALL, 1, 47)]
    shares.returned(1, False)
    assert [*shares.spread(100, now)] == [Action(Kind.GRANT, 0, 97), Action(Kind.GRANT, 1, 3)]
    shares.delivered(1, 3)
    shares.available(1, now)
    assert [*shares.spread(197, now)] == [Action(Kind.GRANT, 1, 12)], "it has more than it had"


@pytest.mark.parametrize("credit", [8, 100, 1000])
@pytest.mark.parametrize("others", [0, 1])
def test_a_fragment_with_nearly_all_messages_gets_nearly_all_the_credit(credit, others):
    """A round is a millisecond, in which all commands and answers arrive; the client gives credit back at a half."""
    link = alone(4)
    link.credit = credit
    link.act()
    fragments = link.fragments
    fragments[1].messages = 40 * credit
    rounds = 0
    while fragments[1].messages:
        rounds += 1
        if rounds % 10 == 0:
            for at in (0, 2, 3):
                fragments[at].messages += others
        for fragment in fragments:
            while fragment.commands:
                fragment.work()
            fragment.work()
        for fragment in fragments:
            link.hear_all(fragment)
        if link.credit <= credit // 2:
            link.credit = credit
        link.act()
        link.wait(link.now + 0.001)
    assert rounds <= 100  # 40 at least, and 20 before the others' grants are recalled
