"""The time of a worker while the wall clock goes on, jumps, and is set back."""

from hypothesis import given
from hypothesis import strategies as st

from broker.worker.clock import SLOWNESS, TOLERANCE_MS, Clock

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000

# Each: milliseconds that pass, and by how much the wall clock is set meanwhile.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 50) | st.integers(0, 10 * HOUR_MS),
        st.just(0) | st.integers(-5, 5) | st.integers(-5 * HOUR_MS, 5 * HOUR_MS),
    ),
    max_size=50,
)


def test_it_is_the_wall_clock_as_long_as_that_goes_on():
    clock = Clock(START_MS, 7)
    for passed_ms in (0, 1, 10, HOUR_MS):
        assert clock.read(START_MS + passed_ms, 7 + passed_ms) == START_MS + passed_ms
        assert clock.ahead_ms == 0


def test_it_follows_a_wall_clock_that_is_set_forward_at_once():
    clock = Clock(START_MS, 0)
    assert clock.read(START_MS + HOUR_MS, 10) == START_MS + HOUR_MS
    assert clock.ahead_ms == 0


def test_spans_go_on_while_a_wall_clock_that_was_set_back_catches_up():
    clock = Clock(START_MS, 0)
    wall_ms = START_MS - HOUR_MS
    assert clock.read(wall_ms, 0) == START_MS
    assert clock.ahead_ms == HOUR_MS
    for passed_ms in range(0, SLOWNESS * HOUR_MS + 1, 1000):
        now_ms = clock.read(wall_ms + passed_ms, passed_ms)
        assert now_ms == START_MS + passed_ms - passed_ms // SLOWNESS
        assert clock.ahead_ms == now_ms - (wall_ms + passed_ms)
    assert clock.ahead_ms == 0
    assert clock.read(wall_ms + passed_ms + 5, passed_ms + 5) == wall_ms + passed_ms + 5


def test_readings_of_less_than_a_step_add_up():
    clock = Clock(START_MS, 0)
    for passed_ms in range(1, 1001):
        clock.read(START_MS - HOUR_MS + passed_ms, passed_ms)
    assert clock.now_ms == START_MS + 1000 - 1000 // SLOWNESS


@given(st.lists(st.integers(0, 3_000), max_size=50), st.integers(0, 999), st.integers(0, 999))
def test_clocks_that_tick_at_different_moments_are_never_apart(steps, wall_us, monotonic_us):
    """Else the lock of a session and that of its message would be told 1 ms apart."""
    clock = Clock(START_MS, 0)
    for passed_us in steps:
        wall_us += passed_us
        monotonic_us += passed_us
        assert clock.read(START_MS + wall_us // 1000, monotonic_us // 1000) == START_MS + wall_us // 1000
        assert clock.ahead_ms == 0


@given(STEPS)
def test_it_never_goes_back_never_stands_still_for_long_and_is_never_behind(steps):
    clock = Clock(START_MS, 0)
    wall_ms, monotonic_ms = START_MS, 0
    for passed_ms, set_by_ms in steps:
        before_ms, was_ahead = clock.now_ms, clock.ahead_ms > 0
        wall_ms += passed_ms + set_by_ms
        monotonic_ms += passed_ms
        now_ms = clock.read(wall_ms, monotonic_ms)
        assert now_ms == clock.now_ms
        assert 0 <= now_ms - wall_ms - clock.ahead_ms <= TOLERANCE_MS
        assert clock.ahead_ms >= 0
        gone_ms = now_ms - before_ms
        assert gone_ms >= max(0, passed_ms - passed_ms // SLOWNESS - 1 - TOLERANCE_MS)
        if not was_ahead and not clock.ahead_ms:
            assert abs(gone_ms - passed_ms - set_by_ms) <= TOLERANCE_MS
        if gone_ms > passed_ms:
            assert clock.ahead_ms == 0
