"""The locks of one queue by token, and its messages on their way to another partition, which count as locked.

A queue's lock duration is constant (when it changes, all locks are dropped), so locks end in the order of insertion; a
renewal inserts the lock again. Times must not go backwards much, because a lock behind one that ends later is found to
have ended only after that one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from operator import itemgetter

from broker.partition.state.window import Ref, number_of
from protocol.extension import extension
from storage.journal.events import Op
from storage.records import NEVER, Place

LOST = 0
_AVAILABLE, _DEFERRED = Place.AVAILABLE, Place.DEFERRED  # here, because to look up a member takes as long as a call


class Holder:
    """The holder of locks: a receiver, a session, or nobody in particular.

    `tokens` are the tokens of its locks, in ascending order, which is the order in which they were made. None of its
    locks lasts longer than `until_ms`; LOST ends all of them at once, however many there are.
    """

    __slots__ = ("tokens", "until_ms")

    def __init__(self) -> None:
        self.tokens: dict[bytes, None] = {}  # a dict only for its order
        self.until_ms = NEVER

    def tokens_from(self, first: bytes | None) -> list[bytes]:
        """This token and later ones; empty if `first` is None."""
        if first is None:
            return []
        return list(takewhile(first.__le__, reversed(self.tokens)))[::-1]


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


class Locks:
    __slots__ = ("deferred", "ending", "expiring", "forwarded", "held", "staged")

    def __init__(self) -> None:
        self.held: dict[bytes, Held] = {}
        self.forwarded: dict[int, Held] = {}  # by sequence number: available messages, until they are answered
        self.staged: set[bytes] = set()  # tokens settled in an open transaction; some locks may have ended
        self.ending: deque[Ending] = deque()  # their messages are to be put back; those of sessions are in `Sessions`
        self.deferred: set[int] = set()  # sequence numbers of locked messages in place deferred
        self.expiring: set[int] = set()  # sequence numbers of these, and of those that have a DUE entry

    def add(self, token: bytes, held: Held) -> None:
        self.held[token] = held
        ref, _, due_ms, place, _, _ = held
        if place == _DEFERRED:
            self.deferred.add(number_of(ref))
        elif due_ms != NEVER:
            self.expiring.add(number_of(ref))

    def find(self, token: bytes, now_ms: int) -> Held | None:
        """None if there is no such lock, or it ended at or before `now_ms`."""
        held = self.held.get(token)
        if held is None or _until_ms(held) <= now_ms or _holder(held).until_ms <= now_ms:
            return None
        return held

    def remove(self, token: bytes) -> Held:
        held = self.held.pop(token)
        ref, _, due_ms, place, _, holder = held
        holder.tokens.pop(token, None)
        if place == _DEFERRED:
            self.deferred.discard(number_of(ref))
        elif due_ms != NEVER:
            self.expiring.discard(number_of(ref))
        return held

    def remove_all(self, tokens: Iterable[bytes], now_ms: int) -> list[Held | None]:
        """One item per token, None where `find` would return None. This is the hot path of settlement."""
        if extension is not None:
            return list(extension.unlock(self.held, list(tokens), now_ms, NEVER, self.deferred, self.expiring))
        locks = self.held
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

    def renew(self, token: bytes, until_ms: int) -> None:
        ref, size, due_ms, place, _, holder = self.held.pop(token)
        self.held[token] = (ref, size, due_ms, place, until_ms, holder)

    def not_lost(self, tokens: Iterable[bytes]) -> list[bytes]:
        """Those of the tokens that are held. The time of some may be over unnoticed."""
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
        return len(self.held) + len(self.forwarded)

    def available_locked(self) -> int:
        """The number of these in place available."""
        return len(self.held) - len(self.deferred) + len(self.forwarded)

    def numbers(self) -> set[int]:
        """Sequence numbers of these. Takes time in proportion to the number of locks."""
        held = self.held.values()
        return {*self.forwarded, *(number_of(ref) for ref, _, _, place, _, _ in held if place == _AVAILABLE)}

    def check(self) -> None:
        """Assert what the comments above say of locks."""
        assert not NOBODY.tokens
        assert NOBODY.until_ms == NEVER
        held = self.held.values()
        in_deferred = {number_of(ref) for ref, _, _, place, _, _ in held if place == _DEFERRED}
        available = [number_of(ref) for ref, _, _, place, _, _ in held if place == _AVAILABLE]
        assert len(in_deferred) + len(available) == len(held), "locked in another place, or deferred and locked twice"
        assert self.deferred == in_deferred
        assert len(set(available)) == len(available), "a message is locked twice"
        assert self.forwarded.keys().isdisjoint(available), "a message is locked and on its way"
        expiring = {number_of(ref) for ref, _, due_ms, place, _, _ in held if place == _AVAILABLE and due_ms != NEVER}
        expiring |= {number for number, (_, _, due_ms, _, _, _) in self.forwarded.items() if due_ms != NEVER}
        assert self.expiring == expiring
        assert all(holder is NOBODY or token in holder.tokens for token, (_, _, _, _, _, holder) in self.held.items())
        for ending in self.ending:
            assert ending.holder.until_ms == LOST
            assert ending.holder.tokens.keys() <= self.held.keys()
