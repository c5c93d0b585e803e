"""Locks that were made together are as single ones, in whatever order they are settled, renewed, lost and looked at."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.partition.state import locks
from broker.partition.state.locks import Holder, LockRun, Locks
from broker.runs import count_of, range_of
from storage.records import NEVER, Place

PREFIXES = b"\0" * 8, b"\1" * 8
MOST = 40  # tokens
# First counter and number of tokens, or nothing for one token; prefix.
RANGE = st.tuples(st.integers(0, MOST), st.none() | st.integers(0, 12), st.sampled_from([0, 0, 0, 0, 1]))
STEPS = st.lists(
    st.tuples(st.just("lock"), st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, 3))
    | st.tuples(st.just("settle"), st.lists(RANGE, min_size=1, max_size=4))
    | st.tuples(st.sampled_from(["renew", "remove", "find", "apart"]), st.integers(0, MOST))
    | st.tuples(st.sampled_from(["lose", "end"]), st.integers(0, 1))
    | st.tuples(st.sampled_from(["later", "look", "expiring"])),
    max_size=15,
)


def token(counter: int, prefix: int = 0) -> bytes:
    return PREFIXES[prefix] + counter.to_bytes(8, "big")


def tokens_from(first: int, count: int | None, prefix: int) -> bytes:
    return token(first, prefix) if count is None else range_of(token(first, prefix), count)


class World:
    def __init__(self, in_runs: bool) -> None:
        self.in_runs = in_runs
        self.locks = Locks()
        self.holders = [Holder(), Holder()]
        self.now_ms = 1_000
        self.counter = 0

    def seen(self, held: Any) -> Any:
        return held and (*held[:5], self.holders.index(held[5]) if held[5] in self.holders else None)

    def step(self, kind: str, *arguments: Any) -> Any:
        locks_, now_ms = self.locks, self.now_ms
        if kind == "lock":
            numbers, lasts = arguments
            until_ms, holders = now_ms + 10 * lasts, [self.holders[number] for number in numbers]
            refs: list[Any] = [(self.counter + ahead, 7, 0, None) for ahead in range(len(holders))]
            if self.in_runs:
                of_all = holders if len(set(numbers)) > 1 else holders[0]
                locks_.add_run(LockRun(token(self.counter), refs, [*range(len(refs))], until_ms, of_all))
            for ahead, (ref, holder) in enumerate(zip(refs, holders, strict=True) if not self.in_runs else ()):
                locks_.add(token(self.counter + ahead), (ref, ahead, NEVER, Place.AVAILABLE, until_ms, holder))
                holder.tokens[token(self.counter + ahead)] = None
            self.counter += len(refs)
        elif kind == "expiring":
            ref = self.counter, 7, 0, None
            locks_.add(token(self.counter), (ref, 3, 5_000, Place.AVAILABLE, now_ms + 20, self.holders[0]))
            self.holders[0].tokens[token(self.counter)] = None
            self.counter += 1
        elif kind == "settle":
            ranges = [tokens_from(*each) for each in arguments[0]]
            removed = locks_.remove_all(ranges, now_ms)
            assert len(removed) == count_of(ranges)
            return [*map(self.seen, removed)]
        elif kind == "lose":
            holder = self.holders[arguments[0]]
            self.holders[arguments[0]] = Holder()
            return [self.seen(locks_.remove(each)) for each in locks_.tokens_from(holder, b"")]
        elif kind == "end":
            self.holders[arguments[0]].until_ms = now_ms
        elif kind == "later":
            self.now_ms += 10
        elif kind == "look":
            return self.look()
        elif locks_.find(one := token(arguments[0]), now_ms) is not None:
            if kind == "renew":
                locks_.renew(one, now_ms + 30)
            elif kind == "apart":
                self.holders.append(locks_.set_apart([one]))
            elif kind == "remove":
                return self.seen(locks_.remove(one))
            return True
        return None

    def look(self) -> Any:
        found = self.locks
        held = [(each, self.seen(lock)) for each, lock in found.held.items()]
        ended = found.ended(self.now_ms, 5), found.first_end_ms(), found.numbers()
        return held, ended, [[*found.tokens(each)] for each in self.holders], [found.has(Place.AVAILABLE, 3)]


@pytest.mark.parametrize("is_native", [True, False])
@given(STEPS)
def test_runs_of_locks_are_as_single_locks(is_native, steps):
    one, other = World(in_runs=True), World(in_runs=False)
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(locks, "extension", None)
        for step in steps:
            assert one.step(*step) == other.step(*step)
            one.locks.check()
            other.locks.check()
            assert one.locks.count() == other.locks.count() == one.locks.available_locked()
        assert one.look() == other.look()
