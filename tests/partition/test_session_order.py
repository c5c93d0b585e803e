"""In which order sessions are given to those who ask for any: the longest available first.

A session is available from when it has messages and no lock until it has none, or is locked. Those that were available
when the partition started come first, the ones with the oldest messages before the others.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from tests.examples import examples
from tests.partition.driver import LOCK_MS, START_MS
from tests.partition.session_driver import SessionDriver


@pytest.fixture(params=[1, 1000])
def queue(request):
    """Its turns are small, or not."""
    return SessionDriver(settings=PartitionSettings(step=request.param))


def look_at_sessions(queue):
    """Which are offered is looked up when somebody first wants any."""
    assert queue.accept("first") is None
    queue.close("first")


def close(queue):
    queue.close("r")


def lose_the_connection(queue):
    queue.close("r", broken=True)


def let_it_run_out(queue):
    queue.wait(LOCK_MS)


def change_the_entity(queue):
    queue.change(lock_duration_ms=LOCK_MS + 1)


@pytest.mark.parametrize("end_lock", [close, lose_the_connection, let_it_run_out, change_the_entity])
def test_a_session_whose_lock_ends_comes_after_the_others(queue, end_lock):
    queue.put("a", "1")
    queue.put("b", "2")
    queue.accept("r", "a")
    queue.receive(1)
    end_lock(queue)
    queue.put("c", "3")
    assert queue.offered() == ["b", "a", "c"]


def test_a_session_whose_lock_ends_comes_before_those_that_get_messages_later(queue):
    queue.accept("r", "a")
    queue.put("a", "1")
    queue.close("r")
    queue.put("b", "2")
    assert queue.offered() == ["a", "b"]


def test_after_a_restart_a_session_whose_lock_ends_comes_after_the_others(queue):
    queue.put("a", "1")
    queue.put("b", "2")
    queue.put("c", "3")
    queue.restart()
    queue.put("c", "4")
    queue.accept("r", "a")
    queue.receive(1)
    queue.put("d", "5")
    queue.close("r")
    queue.put("e", "6")
    assert queue.offered() == ["b", "c", "d", "a", "e"]


def test_a_session_keeps_its_place_when_its_oldest_message_is_deleted(queue):
    queue.put("a", "1")
    queue.put("b", "2")
    queue.put("a", "3")
    queue.restart()
    assert queue.request("delete-batch", 1, START_MS + 1, "a") == 1
    assert queue.offered() == ["a", "b"]


def test_a_session_whose_last_message_expired_comes_after_the_others_when_it_gets_another():
    queue = SessionDriver(settings=PartitionSettings(step=1))
    look_at_sessions(queue)
    queue.put("a", "1", ttl_ms=100)
    queue.put("b", "2")
    queue.now_ms += 100  # and no timer has come by
    queue.ask("r")
    assert not queue.partition.pump(queue.now_ms).accepted
    queue.close("r")
    queue.put("a", "3")
    assert queue.offered() == ["b", "a"]


class Model:
    """`order` is that of the available sessions, `messages` has numbers by session, `locked` receivers' sessions."""

    def __init__(self, step: int, turn_work: int) -> None:
        self.queue = SessionDriver(settings=PartitionSettings(step=step, turn_work=turn_work))
        self.messages: dict[str, list[int]] = {session: [] for session in "abcd"}
        self.order: list[str] = []
        self.locked: set[str] = set()
        self.next_number = 1

    def put(self, session):
        self.queue.put(session, "m")
        self.messages[session].append(self.next_number)
        self.next_number += 1
        if session not in self.locked and session not in self.order:
            self.order.append(session)

    def lock(self, session):
        if session not in self.locked:
            assert self.queue.accept(session, session) == session
            self.locked.add(session)
            self.order = [each for each in self.order if each != session]

    def lock_any(self, session):
        """The receiver has the name of the session it must get."""
        if self.order:
            assert self.queue.accept(self.order[0]) == self.order[0]
            self.locked.add(self.order.pop(0))

    def receive(self, session):
        if session in self.locked:
            self.queue.receive(1, session)

    def complete(self, session):
        if session in self.locked and self.messages[session] and not self.queue.held()[3]:
            self.queue.settle(Outcome.ACCEPTED, *self.queue.receive(1, session))
            del self.messages[session][0]

    def close(self, session, broken=False):
        if session in self.locked:
            self.end(session, broken)
            self.locked.discard(session)
            if self.messages[session]:
                self.order.append(session)

    def end(self, receiver, broken=False):
        """The receiver goes, and turns follow in which the messages of its session are put back."""
        self.queue.close(receiver, broken)
        self.queue.wait(0)

    def break_connection(self, session):
        self.close(session, broken=True)

    def delete(self, session):
        if session not in self.locked and self.messages[session]:
            assert self.queue.request("delete-batch", 1, START_MS + 1, session) == 1
            del self.messages[session][0]
            if not self.messages[session]:
                self.order.remove(session)

    def ask_in_vain(self, session):
        if not self.order:
            assert self.queue.accept("in vain") is None
            self.queue.close("in vain")

    def ask_for_a_moment(self, session):
        """One turn, which may not be enough to give a session."""
        if self.order:
            self.queue.ask("impatient", wait_ms=1000)
            [*accepted] = self.queue.partition.pump(self.queue.now_ms).accepted
            self.end("impatient")
            assert [given for _, given, _ in accepted] in ([], self.order[:1])
            if accepted:
                self.order.append(self.order.pop(0))

    def restart(self, session):
        self.queue.restart()
        self.locked.clear()
        there = [each for each in "abcd" if self.messages[each]]
        self.order = sorted(there, key=lambda each: self.messages[each][0])


STEPS = ["put"] * 4 + ["lock", "lock", "lock_any", "receive", "receive", "complete", "close", "close"]
STEPS += ["break_connection", "delete", "delete", "ask_in_vain", "ask_for_a_moment", "restart"]


@settings(max_examples=examples(400))
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abcd")), max_size=25),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([1, 10_000]),
)
@example([("put", "a"), ("put", "b"), ("lock", "a"), ("receive", "a"), ("close", "a")], 1000, 10_000)
def test_the_order_is_the_same_for_small_and_large_steps_and_whoever_asked_before(steps, step, turn_work):
    model = Model(step, turn_work)
    for name, session in steps:
        getattr(model, name)(session)
    for session in sorted(model.locked):
        model.close(session)
    assert model.queue.offered() == model.order
