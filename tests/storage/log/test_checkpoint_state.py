"""A log in every state of its checkpoints meets everything that can happen to it."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from storage.liveness import STALL_SECONDS
from storage.log import commit_log
from storage.log.checkpoint_state import NEXT, Event, State
from storage.log.commit_log import LONGEST_WAIT_SECONDS, OLDEST_SECONDS, CommitLog, LogLimits
from storage.store import Table
from tests.logged_turns import Local, open_local
from tests.logs import crash, open_tables

LIMITS = LogLimits(segment_bytes=32 << 10, log_bytes=100 << 10)
MAKING = {State.UNDER_WAY, State.STUCK}


def test_every_state_knows_what_follows_each_event_that_can_happen_in_it() -> None:
    begins = {Event.WANTED, Event.BEGUN, Event.FUTILE}
    assert {state: set(events) for state, events in NEXT.items()} == {
        State.NONE: begins,
        State.DUE: begins,
        State.UNDER_WAY: {Event.WAITED_IN_VAIN, Event.DONE},
        State.STUCK: {Event.DONE},
    }


def test_all_states_are_reached_and_each_leads_back() -> None:
    assert set(NEXT) == set(State)
    for first in State:
        reached = {first}
        while more := {after for state in reached for after in NEXT[state].values()} - reached:
            reached |= more
        assert reached == set(State)


class Clock:
    """Only waiting for the checkpointer takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Watched(Local):
    """Answers after a wait of `after_seconds`, or not."""

    descriptor = 0
    clock: Clock
    after_seconds: float | None = None

    def has_answered(self, within_seconds: float = 0.0) -> bool:
        if self.after_seconds is None or self.after_seconds > within_seconds:
            self.clock.now += within_seconds
            return False
        self.clock.now += self.after_seconds
        return True


class Scene:
    """A log in some state, which has committed something before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, state: State) -> None:
        self.monkeypatch = monkeypatch
        self.clock = Clock()
        monkeypatch.setattr(commit_log, "time", self.clock)
        self.log = open_local(monkeypatch, directory, (0, 1), Watched, limits=LIMITS)
        self.checkpointer = cast(Watched, self.log.checkpointer)
        self.checkpointer.clock = self.clock
        self.checkpointer.start()
        self.number = 0
        self.stage()
        self.log.commit()
        MAKE[state](self)
        assert self.state is state
        self.log.check()

    @property
    def state(self) -> State:
        return self.log.state

    def stage(self, size: int = 10) -> None:
        self.number += 1
        self.log.stores[0].put(Table.MESSAGES, self.number.to_bytes(4, "big"), bytes(size))

    def make_due(self) -> None:
        self.stage()
        self.grow_old()

    def begin(self) -> None:
        self.log.begin_checkpoint()

    def get_stuck(self) -> None:
        self.begin()
        self.wait_in_vain()

    # -- what happens

    def grow_old(self) -> None:
        """What is young has been so for long."""
        self.clock.now += OLDEST_SECONDS
        self.log.beat()

    def commit(self) -> None:
        self.stage()
        self.log.commit()

    def abort(self) -> None:
        """The next end of a commit finds nothing staged."""
        self.stage()
        self.log.stores[0].abort()
        self.log.end_commit()

    def fill(self) -> None:
        """A segment's worth of changes comes."""
        self.stage(LIMITS.segment_bytes)
        self.log.commit()

    def wait_in_vain(self) -> None:
        """The log is longer than it may be, and the checkpointer does not answer."""
        while self.log.young_bytes() <= LIMITS.log_bytes:
            self.fill()
        self.commit()

    def be_done(self) -> None:
        if self.log.is_checkpointing:
            self.log.hear()

    def lack_room(self) -> None:
        """No partition has room: who is asked to begin a checkpoint begins none."""
        self.monkeypatch.setattr(CommitLog, "_may_fit", lambda *_: False)
        self.log.end_commit()
        self.log.stores[0].abort()
        self.log.end_commit()

    def lose_checkpointer(self) -> None:
        self.checkpointer.is_running = False
        self.log.beat()


MAKE: dict[State, Callable[[Scene], None]] = {
    State.NONE: lambda scene: None,
    State.DUE: Scene.make_due,
    State.UNDER_WAY: Scene.begin,
    State.STUCK: Scene.get_stuck,
}
_BEGIN = dict.fromkeys((State.NONE, State.DUE), State.UNDER_WAY)
# What each state becomes; the others stay as they are.
HAPPENS: dict[Callable[[Scene], None], dict[State, State]] = {
    Scene.stage: {},
    Scene.grow_old: {State.NONE: State.UNDER_WAY},
    Scene.commit: {State.DUE: State.UNDER_WAY},
    Scene.abort: {State.DUE: State.UNDER_WAY},
    Scene.fill: _BEGIN,
    Scene.wait_in_vain: dict.fromkeys(State, State.STUCK),
    Scene.be_done: {State.UNDER_WAY: State.NONE, State.STUCK: State.UNDER_WAY},  # much has come since the first began
    Scene.lack_room: {State.DUE: State.NONE},
    Scene.lose_checkpointer: {},
}


@pytest.mark.parametrize("happens", HAPPENS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_everything_that_happens_in_every_state(
    state: State, happens: Callable[[Scene], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, tmp_path, state)
    happens(scene)
    assert scene.state is HAPPENS[happens].get(state, state)
    assert scene.log.is_checkpointing is (scene.state in MAKING)
    scene.log.check()
    crash(scene.log)


def test_who_waited_until_the_last_moment_has_not_waited_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is done, so the log accepts messages again."""
    scene = Scene(monkeypatch, tmp_path, State.UNDER_WAY)
    monkeypatch.setattr(CommitLog, "_checkpoint_if_due", lambda *_: None)
    scene.checkpointer.after_seconds = min(LONGEST_WAIT_SECONDS, STALL_SECONDS / 3)
    while scene.state is State.UNDER_WAY:
        scene.fill()
    assert scene.state is State.NONE
    assert scene.log.checkpoints == 1
    crash(scene.log)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_while_a_checkpoint_is_stuck_and_the_log_is_long_nothing_is_accepted(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, tmp_path, state)
    is_stuck = state is State.STUCK
    assert scene.log.accepts(0, 10, 0) is not is_stuck
    assert (scene.log.shortage(0) is not None) is is_stuck
    crash(scene.log)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_a_log_is_closed_in_every_state_and_its_tables_have_all(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, tmp_path, state)
    scene.log.stores[0].abort()
    found = scene.log.stores[0].record_count(Table.MESSAGES)
    scene.log.close()
    with open_tables(tmp_path, 0, map_size_bytes=1 << 24) as tables:
        assert tables.record_count(Table.MESSAGES) == found > 0
