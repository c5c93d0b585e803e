"""The state machine of an entity's health: every state meets every event, and time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.pairing.health import NEXT, Event, PathHealth, State

FAILOVER, PING = 10_000, 60_000


def health(state: State) -> PathHealth:
    """One in this state since 0."""
    found = PathHealth(FAILOVER, PING, -FAILOVER)
    if state is not State.HEALTHY:
        found.failed(-FAILOVER, -FAILOVER if state is State.FAILED_OVER else 0)
    if state is State.FAILED_OVER:
        found.tick(0)
    assert found.state is state
    return found


def test_each_state_knows_what_follows_each_event_that_can_happen_in_it():
    assert set(NEXT) == set(State)
    for state, events in NEXT.items():
        possible = set(Event) if state is State.SUSPECT else set(Event) - {Event.INTERVAL_OVER}
        assert set(events) == possible


@pytest.mark.parametrize("state", State)
def test_a_success_makes_healthy(state):
    one = health(state)
    one.succeeded(5)
    assert (one.state, one.deadline_ms) == (State.HEALTHY, None)


@pytest.mark.parametrize("state", State)
def test_marking_makes_healthy(state):
    one = health(state)
    one.mark_healthy(5)
    assert (one.state, one.deadline_ms) == (State.HEALTHY, None)


def test_the_interval_begins_with_the_first_failure():
    one = health(State.HEALTHY)
    one.failed(1, 2)
    assert (one.state, one.deadline_ms) == (State.SUSPECT, 2 + FAILOVER)
    one.failed(3, 5000)
    assert not one.tick(1 + FAILOVER)
    assert one.state is State.SUSPECT
    one.tick(2 + FAILOVER)
    assert one.has_failed_over
    assert one.since_ms == 2 + FAILOVER


def test_a_success_within_the_interval_stops_it():
    one = health(State.SUSPECT)
    one.succeeded(FAILOVER - 1)
    assert not one.tick(10 * FAILOVER)
    assert one.state is State.HEALTHY
    one.failed(FAILOVER, FAILOVER)
    assert one.deadline_ms == 2 * FAILOVER


def test_without_an_interval_the_first_failure_counts():
    one = PathHealth(0, PING, 0)
    one.failed(0, 7)
    assert one.has_failed_over
    assert one.deadline_ms == 7 + PING


def test_a_failure_of_a_send_from_before_the_last_success_says_nothing():
    one = health(State.FAILED_OVER)
    one.succeeded(100)
    one.failed(99, 200)
    assert one.deadline_ms is None
    one.failed(100, 200)
    assert one.deadline_ms == 200 + FAILOVER


def test_one_ping_is_due_in_each_interval():
    one = health(State.FAILED_OVER)
    due = [now_ms for now_ms in range(0, 10 * PING + 1, 50) if one.tick(now_ms)]
    assert due == [PING * number for number in range(1, 11)]


def test_pings_that_were_missed_are_not_made_up_for():
    one = health(State.FAILED_OVER)
    assert one.tick(10 * PING)
    assert not one.tick(10 * PING + PING - 1)
    assert one.tick(11 * PING)


times = st.integers(0, 1000) | st.sampled_from([0, 2**31, 2**63 - 1])
steps = st.lists(
    st.tuples(st.sampled_from(["succeeded", "failed", "tick", "mark"]), times, st.integers(0, 50)), max_size=60
)


@given(st.integers(0, 100), st.integers(1, 100), steps)
def test_any_history_keeps_the_promises(failover_ms, ping_ms, history):
    one = PathHealth(failover_ms, ping_ms, 0)
    now = last_good = 0
    failing_since = None  # the first failure that counts since the last success
    pings = []
    for what, step, age in history:
        now += step
        if what == "succeeded":
            one.succeeded(now)
        elif what == "mark":
            one.mark_healthy(now)
        elif what == "failed":
            began = max(0, now - age)
            one.failed(began, now)
            if began >= last_good and failing_since is None:
                failing_since = now
        elif one.tick(now):
            pings.append(now)
            assert one.has_failed_over
        if what in ("succeeded", "mark"):
            last_good, failing_since = now, None
            pings.clear()
        assert (one.state is State.HEALTHY) == (failing_since is None)
        if one.has_failed_over:
            assert now - failing_since >= failover_ms
        if one.state is State.SUSPECT and what == "tick":
            assert now - failing_since < failover_ms
        assert (one.deadline_ms is None) == (one.state is State.HEALTHY)
        assert all(later - sooner >= ping_ms for sooner, later in pairwise(pings))
