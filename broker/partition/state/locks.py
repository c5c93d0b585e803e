"""The locks of one queue by token, and its messages on their way to another partition, which count as locked.

A queue's lock duration is constant (when it changes, all locks are dropped), so locks end in the order of insertion; a
renewal inserts the lock again. Times must not go backwards much, because a lock behind one that ends later is found to
have ended only after that one.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat, takewhile
from operator import attrgetter, itemgetter
from typing import NamedTuple

from broker.partition.state.window import Ref, number_of
from broker.runs import RANGE_BYTES, count_of, range_of, token_ahead, tokens_of
from protocol.extension import extension
from protocol.lock_tokens import COMMON_BYTES, TOKEN_BYTES
from storage.journal.events import Op
from storage.records import NEVER, Place

LOST = 0
_AVAILABLE, _DEFERRED = Place.AVAILABLE, Place.DEFERRED  # here, because to look up a member takes as long as a call


class Holder:
    """The holder of locks: a receiver, a session, or nobody in particular.

    `tokens` are the tokens of its locks, in ascending order, which is the order in which they were made; `Locks.tokens`
    has all. None of its locks lasts longer than `until_ms`; LOST ends all of them at once, however many there are.
    """

    __slots__ = ("tokens", "until_ms")

    def __init__(self) -> None:
        self.tokens: dict[bytes, None] = {}  # a dict only for its order
        self.until_ms = NEVER


# The holder of locks that requests took: no receiver holds them, so they are found only by token. Its `tokens` stay
# empty.
NOBODY = Holder()

# A held message: ref, bytes of its record, time of its DUE entry or NEVER, place, end of the lock (0 if there is no
# lock), its holder. A plain tuple: one is made per delivery.
Held = tuple[Ref, int, int, int, int, Holder]

# Getters of its parts, as those of a ref (`window`).
ref_of: Callable[[Held], Ref] = itemgetter(0)
size_of: Callable[[Held], int] = itemgetter(1)
_until_ms: Callable[[Held], int] = itemgetter(4)
_holder: Callable[[Held], Holder] = itemgetter(5)
_ends_ms: Callable[[Holder], int] = attrgetter("until_ms")
_token_of: Callable[[tuple[bytes, Held]], bytes] = itemgetter(0)


def end_of(held: Held) -> int:
    """When the lock of this held message ends."""
    return min(_until_ms(held), _holder(held).until_ms)


class Ending:
    """The lost locks of one holder whose messages are not all back yet.

    `failed_by`: by this the deliveries failed, except those with the token `unsent_from` or a later one; None if they
    did not fail.
    """

    __slots__ = ("failed_by", "holder", "unsent_from")

    def __init__(self, holder: Holder, failed_by: Op | None, unsent_from: bytes | None = None) -> None:
        holder.until_ms = LOST
        self.holder = holder
        self.failed_by = failed_by
        self.unsent_from = unsent_from

    def failed(self, token: bytes) -> Op | None:
        """By what this delivery failed, if it did."""
        return self.failed_by if self.unsent_from is None or token < self.unsent_from else None


class LockRun(NamedTuple):
    """Locks that were made together. The messages are available, without a DUE entry, and their tokens consecutive.

    `sizes` are the bytes of their records. `holders`: the holder of all, or one for each.
    """

    first: bytes
    refs: list[Ref]
    sizes: list[int]
    until_ms: int
    holders: Holder | list[Holder]

    def part(self, begin: int, end: int) -> "LockRun":
        first, refs, sizes, until_ms, holders = self
        if not isinstance(holders, Holder):
            holders = holders[begin:end]
        return LockRun(token_ahead(first, begin), refs[begin:end], sizes[begin:end], until_ms, holders)

    def has_ended(self, begin: int, end: int, now_ms: int) -> bool:
        """True if one of these locks has ended at this time."""
        holders = (self.holders,) if isinstance(self.holders, Holder) else self.holders[begin:end]
        return min(self.until_ms, *map(_ends_ms, holders)) <= now_ms

    def held(self) -> list[Held]:
        _, refs, sizes, until_ms, holders = self
        if extension is not None:
            found: list[Held] = extension.held_of(refs, sizes, NEVER, _AVAILABLE, until_ms, holders)
            return found
        each = repeat(holders, len(refs)) if isinstance(holders, Holder) else holders
        return [
            (ref, size, NEVER, _AVAILABLE, until_ms, holder)
            for ref, size, holder in zip(refs, sizes, each, strict=True)
        ]


RUNS_MAX = 1024  # of one queue; a list of many takes long to change
_NOTHING = (b"", 0, b"")  # a token, the end of its lock, and the latest token
INDEX_FORGOTTEN = 100  # numbers of locks that are gone may be kept beside as many as twice the others


class Locks:
    """`held` has each lock, and its holder each token. Locks that were made together come into both only when somebody
    asks for more than to settle some of them, so that most never do.
    """

    __slots__ = (
        *("_by_number", "_firsts", "_held", "_in_runs", "_indexed", "_runs"),
        *("deferred", "ending", "expiring", "forwarded", "staged"),
    )

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}
        # Later locks than those in `_held`, in the order of their tokens; and the counters of the runs' first tokens.
        self._runs: list[LockRun] = []
        self._firsts: list[int] = []
        self._in_runs = 0  # the number of their locks
        # Tokens by sequence number, for `ends_of`, and the last lock that was noted: see `_index`. Some are gone. What
        # makes and ends locks leaves these alone, because few queues are peeked while they have locks.
        self._by_number: dict[int, bytes] = {}
        self._indexed = _NOTHING
        self.forwarded: dict[int, Held] = {}  # by sequence number: available messages, until they are answered
        self.staged: set[bytes] = set()  # tokens settled in an open transaction; some locks may have ended
        self.ending: deque[Ending] = deque()  # their messages are to be put back; those of sessions are in `Sessions`
        self.deferred: set[int] = set()  # sequence numbers of locked messages in place deferred
        self.expiring: set[int] = set()  # sequence numbers of these, and of those that have a DUE entry

    @property
    def held(self) -> dict[bytes, Held]:
        if self._runs:
            self.part_runs()
        return self._held

    def add_run(self, run: LockRun) -> None:
        """Add these locks, whose tokens must be later than all others."""
        if len(self._runs) >= RUNS_MAX:
            self.part_runs()
        self._firsts.append(_counter_of(run.first))
        self._runs.append(run)
        self._in_runs += len(run.refs)

    def tokens(self, holder: Holder) -> dict[bytes, None]:
        """The tokens of all its locks: see `Holder`."""
        if self._runs:
            self.part_runs()
        return holder.tokens

    def tokens_from(self, holder: Holder, first: bytes | None) -> list[bytes]:
        """Return its tokens from this one on; empty if `first` is None."""
        if first is None:
            return []
        return list(takewhile(first.__le__, reversed(self.tokens(holder))))[::-1]

    def part_runs(self) -> None:
        """Let `held` and the holders have each lock."""
        for token, held in self._of_runs():
            self._held[token] = held
            _holder(held).tokens[token] = None
        self._runs.clear()
        self._firsts.clear()
        self._in_runs = 0

    def _of_runs(self) -> Iterator[tuple[bytes, Held]]:
        for run in self._runs:
            for ahead, held in enumerate(run.held()):
                yield token_ahead(run.first, ahead), held

    def _place(self, token: bytes) -> tuple[int, int] | None:
        """The run that has the lock of this token, or of the first of this range, and where; None if none has it."""
        counter = _counter_of(token)
        at = bisect_right(self._firsts, counter) - 1
        if at < 0 or len(token) not in (TOKEN_BYTES, RANGE_BYTES):
            return None
        run = self._runs[at]
        begin = counter - self._firsts[at]
        return (at, begin) if begin < len(run.refs) and run.first[:COMMON_BYTES] == token[:COMMON_BYTES] else None

    def _take(self, at: int, begin: int, count: int) -> list[Held]:
        """Remove so many locks of this run."""
        run = self._runs[at]
        end, length = begin + count, len(run.refs)
        self._in_runs -= count
        if count == length:
            del self._firsts[at], self._runs[at]
            return run.held()
        left = [run.part(0, begin)] if begin else []
        if end < length:
            left.append(run.part(end, length))
        self._runs[at : at + 1] = left
        self._firsts[at : at + 1] = [_counter_of(each.first) for each in left]
        return run.part(begin, end).held()

    def add(self, token: bytes, held: Held) -> None:
        self.held[token] = held
        ref, _, due_ms, place, _, _ = held
        if place == _DEFERRED:
            self.deferred.add(number_of(ref))
        elif due_ms != NEVER:
            self.expiring.add(number_of(ref))

    def find(self, token: bytes, now_ms: int) -> Held | None:
        """None if there is no such lock, or it ended at or before `now_ms`."""
        held = self._held.get(token)
        if held is None and (place := self._place(token)) is not None:
            at, begin = place
            [held] = self._runs[at].part(begin, begin + 1).held()
        if held is None or _until_ms(held) <= now_ms or _holder(held).until_ms <= now_ms:
            return None
        return held

    def ends_of(self, numbers: Iterable[int], now_ms: int) -> dict[int, int]:
        """When the locks of those of these messages end that have one, by number. Not where sessions are required."""
        self._index()
        ends: dict[int, int] = {}
        for number in numbers:
            token = self._by_number.get(number)
            if token is not None and (held := self.find(token, now_ms)) is not None:
                ends[number] = end_of(held)
        return ends

    def _index(self) -> None:
        """Note the numbers of the locks that were made or renewed since the last time; these are behind the others.

        That is: behind the last lock that was noted then, or if that is gone, those that end no earlier, and those with
        later tokens, which may end earlier if the lock duration was changed.
        """
        locks = self.held
        self._forget_numbers()
        last_token, last_ms, latest_token = self._indexed

        def is_new(lock: tuple[bytes, Held]) -> bool:
            token, held = lock
            return token != last_token and (_until_ms(held) >= last_ms or token > latest_token)

        new = list(takewhile(is_new, reversed(locks.items())))
        if not new:
            return
        self._by_number.update((number_of(ref_of(held)), token) for token, held in new)
        token, held = new[0]
        self._indexed = (token, _until_ms(held), max(latest_token, *map(_token_of, new)))

    def _forget_numbers(self) -> None:
        """If most of the locks that were noted are gone."""
        if len(self._by_number) > 2 * len(self._held) + INDEX_FORGOTTEN:
            self._by_number = {}
            self._indexed = _NOTHING

    def remove(self, token: bytes) -> Held:
        if token not in self._held and (found := self._place(token)) is not None:
            [held] = self._take(*found, 1)
            return held
        held = self._held.pop(token)
        ref, _, due_ms, place, _, holder = held
        holder.tokens.pop(token, None)
        if place == _DEFERRED:
            self.deferred.discard(number_of(ref))
        elif due_ms != NEVER:
            self.expiring.discard(number_of(ref))
        return held

    def remove_all(self, ranges: Sequence[bytes], now_ms: int) -> list[Held | None]:
        """One item per token of the ranges (see `tokens_of`), None where `find` would return None.

        This is the hot path of settlement.
        """
        if not self._runs:
            return self._remove_each(tokens_of(ranges), now_ms)
        removed: list[Held | None] = []
        for each in ranges:
            left = count_of((each,))
            while left:
                place = self._place(each)
                if place is None:
                    counter, later = _counter_of(each), bisect_right(self._firsts, _counter_of(each))
                    count = min(left, self._firsts[later] - counter) if later < len(self._firsts) else left
                    singles = range_of(each[:TOKEN_BYTES], count) if len(each) == RANGE_BYTES else each
                    removed += self._remove_each(tokens_of([singles]), now_ms)
                else:
                    at, begin = place
                    run = self._runs[at]
                    count = min(left, len(run.refs) - begin)
                    if run.has_ended(begin, begin + count, now_ms):
                        self.part_runs()
                        continue
                    removed += self._take(at, begin, count)
                left -= count
                if left:
                    each = range_of(token_ahead(each[:TOKEN_BYTES], count), left)
        return removed

    def _remove_each(self, tokens: list[bytes], now_ms: int) -> list[Held | None]:
        """Remove locks as `remove_all` does, that are in no run."""
        if extension is not None:
            return list(extension.unlock(self._held, tokens, now_ms, NEVER, self.deferred, self.expiring))
        locks = self._held
        removed: list[Held | None] = []
        for token in tokens:
            held = locks.get(token)
            if held is None:
                removed.append(None)
                continue
            ref, _, due_ms, place, until_ms, holder = held
            if until_ms <= now_ms or holder.until_ms <= now_ms:
                removed.append(None)
                continue
            del locks[token]
            holder.tokens.pop(token, None)
            if place:  # ref[0] is its number: the fastest way to it where few are asked for theirs
                self.deferred.discard(ref[0])
            elif due_ms != NEVER:
                self.expiring.discard(ref[0])
            removed.append(held)
        return removed

    def has_none_staged(self, ranges: Sequence[bytes]) -> bool:
        """True if no open transaction settles one of these."""
        return not self.staged or self.staged.isdisjoint(tokens_of(ranges))

    def have(self, tokens: Sequence[bytes], now_ms: int) -> bool:
        """True if `find` finds each of these, and no open transaction settles one."""
        locks, staged = self.held, self.staged
        for token in tokens:
            held = locks.get(token)
            if held is None or token in staged:
                return False
            _, _, _, _, until_ms, holder = held
            if until_ms <= now_ms or holder.until_ms <= now_ms:
                return False
        return True

    def renew(self, token: bytes, until_ms: int) -> None:
        ref, size, due_ms, place, _, holder = self.held.pop(token)
        self.held[token] = (ref, size, due_ms, place, until_ms, holder)
        if token == self._indexed[0]:  # it is behind others now, which may not have been noted
            self._indexed = (b"", *self._indexed[1:])

    def not_lost(self, tokens: Iterable[bytes]) -> list[bytes]:
        """Return those of the tokens that are held. The time of some may be over unnoticed."""
        held = self.held
        return [token for token in tokens if token in held and _holder(held[token]).until_ms != LOST]

    def set_apart(self, tokens: Sequence[bytes]) -> Holder:
        """Give these locks, the oldest first, a holder of their own."""
        apart = Holder()
        for token in tokens:
            ref, size, due_ms, place, until_ms, holder = self.held[token]
            holder.tokens.pop(token, None)
            apart.tokens[token] = None
            self.held[token] = (ref, size, due_ms, place, until_ms, apart)
        return apart

    def ended(self, now_ms: int, limit: int) -> list[bytes]:
        """Tokens of up to `limit` locks that ended at or before `now_ms`."""
        tokens = []
        for token, held in islice(self.held.items(), limit):
            if _until_ms(held) > now_ms:
                break
            tokens.append(token)
        self._forget_numbers()
        return tokens

    def first_end_ms(self) -> int | None:
        for held in self.held.values():
            return _until_ms(held)
        return None

    def forward(self, held: Held) -> None:
        """Note that an available message is on its way to another partition."""
        (number, _, _, _), _, due_ms, _, _, _ = held
        self.forwarded[number] = held
        if due_ms != NEVER:
            self.expiring.add(number)

    def end_forward(self, number: int) -> Held | None:
        held = self.forwarded.pop(number, None)
        self.expiring.discard(number)
        return held

    def has(self, place: Place, number: int) -> bool:
        """True if the message of this number in this place is held. May take time with the number of locks."""
        if place == _DEFERRED:
            return number in self.deferred
        return place == _AVAILABLE and (
            number in self.forwarded
            or any(
                locked == number and its_place == place
                for (locked, _, _, _), _, _, its_place, _, _ in self.held.values()
            )
        )

    def count(self) -> int:
        """The number of messages that are locked or on their way."""
        return len(self._held) + self._in_runs + len(self.forwarded)

    def available_locked(self) -> int:
        """The number of these in place available."""
        return self.count() - len(self.deferred)

    def numbers(self) -> set[int]:
        """Sequence numbers of these. Takes time in proportion to the number of locks."""
        held = self.held.values()
        return {*self.forwarded, *(number_of(ref) for ref, _, _, place, _, _ in held if place == _AVAILABLE)}

    def check(self) -> None:
        """Assert what the comments above say of locks."""
        assert not NOBODY.tokens
        assert NOBODY.until_ms == NEVER
        in_runs = dict(self._of_runs())
        assert self._in_runs == len(in_runs) == sum(len(run.sizes) for run in self._runs)
        assert all(isinstance(run.holders, Holder) or len(run.holders) == len(run.refs) for run in self._runs)
        assert max(self._held, default=b"") < min(in_runs, default=b"\xff"), "a lock in a run is not later"
        assert [_counter_of(run.first) for run in self._runs] == self._firsts
        assert [*in_runs] == sorted(in_runs)
        held = [*self._held.values(), *in_runs.values()]
        in_deferred = {number_of(ref) for ref, _, _, place, _, _ in held if place == _DEFERRED}
        available = [number_of(ref) for ref, _, _, place, _, _ in held if place == _AVAILABLE]
        assert len(in_deferred) + len(available) == len(held), "locked in another place, or deferred and locked twice"
        assert self.deferred == in_deferred
        assert len(set(available)) == len(available), "a message is locked twice"
        assert self.forwarded.keys().isdisjoint(available), "a message is locked and on its way"
        expiring = {number_of(ref) for ref, _, due_ms, place, _, _ in held if place == _AVAILABLE and due_ms != NEVER}
        expiring |= {number for number, (_, _, due_ms, _, _, _) in self.forwarded.items() if due_ms != NEVER}
        assert self.expiring == expiring
        assert all(holder is NOBODY or token in holder.tokens for token, (*_, holder) in self._held.items())
        for ending in self.ending:
            assert ending.holder.until_ms == LOST
            assert ending.holder.tokens.keys() <= self._held.keys()
        noted = ((number, self._held.get(token)) for number, token in self._by_number.items())
        assert all(each is None or number_of(ref_of(each)) == number for number, each in noted)


def _counter_of(token: bytes) -> int:
    return int.from_bytes(token[COMMON_BYTES:TOKEN_BYTES], "big")
