"""The credit of a receiving link on a partitioned entity, shared out to the entity's fragments.

All grants together are never more than the link may get. No credit lies idle while a fragment has a message: a fragment
without a grant says that it has messages (`available`), and then it gets free credit, or credit that is recalled from
another one. With enough credit every fragment has a part of it in advance, and nothing needs to be said.

While all fragments are busy, one has often used up its grant just before the others do. A grant to be recalled then
would soon have been used, so grants are only recalled when they are `IDLE_SECONDS` old (`again_at`). A grant of which
nothing has been used for `UNUSED_SECONDS` is that of a fragment without messages: all of these are recalled together.
Until then the messages of one batch, which lie on one fragment, pause for a client that asked for all of them at once;
the SDK for .NET takes a pause of 20 ms for the end, and then releases what comes before its next call. Scarce credit is
recalled at once.

A fragment that gives back a part of its grant has few messages: from then on it gets no more in advance than it has
used (`limit`), and the others get the rest. So one that has nearly all messages gets nearly all the credit. Each time
that it says that it has more, its limit grows, until it has none.

A fragment answers a recall when it has delivered what it could. If it does not answer in time (`overdue`), its credit
is used elsewhere; what it still delivers then may be more than the link's credit, and goes back.

Pure: the caller sends the actions that are returned. `GRANT`: the fragment's grant is `granted` from now on, and it
says when it has messages and no grant. `RECALL`: the same, and then the rest of the grant ends, and the fragment says
so. `PASS`: the link cannot take any messages now, so the fragment need not say that it has some, or its word is vain.
While a client receives without a pause, it has often no credit for a moment, so a fragment waits `PASS_SECONDS` for
a grant before it is passed.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

IDLE_SECONDS = 0.02
UNUSED_SECONDS = 0.002
PASS_SECONDS = 0.01
GROWTH = 4  # by which a limit is multiplied
LIMITLESS = 1 << 12  # deliveries; a limit that would be as large ends


class Kind(Enum):
    GRANT = 0
    RECALL = 1
    PASS = 2


class Action(NamedTuple):
    kind: Kind
    fragment: int
    granted: int = 0


class _Share:
    """What one fragment has of the credit."""

    __slots__ = (
        *("awaits_since", "fragment", "granted", "granted_at", "has_more", "is_empty", "is_recalled", "is_there"),
        *("limit", "used", "watches"),
    )

    def __init__(self, fragment: int) -> None:
        self.fragment = fragment
        self.granted = 0  # deliveries that may still come and are counted
        self.granted_at = 0.0  # time of the last grant
        self.has_more = False  # it has said that it has messages, and got no grant since then
        self.awaits_since: float | None = None  # it has said so then, and got no answer yet
        self.watches = True  # it will say when it has messages and no grant
        self.is_recalled = False  # a recall is under way
        self.is_empty = False  # asked since the drain began, it had fewer messages than its grant
        self.is_there = False  # connected
        self.used = 0  # deliveries since the last grant
        self.limit: int | None = None  # what it may be granted at once; None is its part


class Shares:
    """The credit of one link. `room` is always the number of deliveries that the link may get now in all."""

    def __init__(self, fragments: Iterable[int]) -> None:
        """No fragment is connected yet."""
        self._shares = {fragment: _Share(fragment) for fragment in fragments}
        self._order = list(self._shares.values())  # who waited longest for a grant comes first
        self.is_draining = False
        self.again_at: float | None = None  # when to call `spread` again, because then it may recall or pass

    # -- what happens

    def connected(self, fragment: int) -> None:
        """The receiver is open there, without a grant."""
        share = self._shares[fragment] = self._replace(fragment)
        share.is_there = True

    def lost(self, fragment: int) -> None:
        """Expect nothing more from the fragment."""
        self._replace(fragment)

    def delivered(self, fragment: int, count: int) -> None:
        share = self._shares[fragment]
        share.granted = max(0, share.granted - count)
        share.used += count

    def available(self, fragment: int, now: float) -> None:
        """It has messages and no grant. `now` is in seconds."""
        share = self._shares[fragment]
        if not (share.granted or share.is_recalled):  # else a grant, which is the answer, was on its way
            share.has_more = True
            share.awaits_since = now
            share.watches = False
            if share.limit is not None:
                grown = max(1, GROWTH * share.limit)
                share.limit = grown if grown < LIMITLESS else None

    def stop(self, fragment: int) -> bool:
        """Its grant is void until it has answered a recall. False if a recall is under way."""
        share = self._shares[fragment]
        share.granted = 0
        was_recalled, share.is_recalled = share.is_recalled, True
        return not was_recalled

    def returned(self, fragment: int, is_used_up: bool) -> None:
        """The answer to a recall. `is_used_up`: it has delivered all that it was granted, so it may have more."""
        share = self._shares[fragment]
        share.is_recalled = False
        share.granted = 0
        share.watches = True
        share.is_empty = not is_used_up
        if not (is_used_up or self.is_draining):
            share.limit = share.used

    def overdue(self, fragment: int) -> None:
        """It has not answered a recall in time. Its grant does not count any more."""
        share = self._shares[fragment]
        share.granted = 0
        share.is_empty = True

    # -- what to do

    def spread(self, room: int, now: float) -> Iterator[Action]:
        """Share out the credit as it is now. `now` is in seconds."""
        self.again_at = None
        free = room - self.granted
        if free < 0:
            yield from self._reduce(-free, now)
            free = room - self.granted
        shares = [share for share in self._order if share.is_there and not share.is_recalled]
        if not shares:
            return
        wanting = [share for share in shares if share.has_more]
        if room <= 0:
            yield from self._pass(wanting, now)
            return
        part = self._part(room)
        is_scarce = room < 2 * len(self._order)
        for index, share in enumerate(wanting):
            count = -(-free // (len(wanting) - index)) if is_scarce else min(_most(share, part), free)
            if count > 0:
                free -= count
                yield self._grant(share, count, now)
        unserved = [share for share in wanting if share.has_more]
        if unserved:
            yield from self._recall(len(unserved), shares, is_scarce, now)
        else:
            for share in shares:
                most = _most(share, part)
                count = min(most - share.granted, free)
                if count > 0 and share.granted <= most // 2:
                    free -= count
                    yield self._grant(share, share.granted + count, now)
        for share in shares:
            if not (share.granted or share.watches or share.has_more):
                yield self._grant(share, 0, now)

    def drain(self, room: int, now: float) -> Iterator[Action]:
        """Ask all fragments for what they have, as far as the credit allows. To be called until `is_drained`."""
        if not self.is_draining:
            self.is_draining = True
            for share in self._order:
                share.is_empty = False
        free = room - self.granted
        left = [share for share in self._order if share.is_there and not share.is_recalled and not share.is_empty]
        for index, share in enumerate(left):
            count = share.granted
            if not count and free > 0:
                count = -(-free // (len(left) - index))
                free -= count
            if count > 0:
                self._grant(share, count, now)
                share.is_recalled = True
                yield Action(Kind.RECALL, share.fragment, count)

    def rest(self) -> Iterator[Action]:
        """The link gets nothing for a while: no fragment is to say that it has messages, until the next `spread`."""
        for share in self._order:
            if share.is_there and share.watches and not (share.granted or share.is_recalled):
                share.watches = False
                yield Action(Kind.PASS, share.fragment)

    def is_drained(self, room: int) -> bool:
        """True if every fragment was asked, or the credit is used up. Then the drain has ended."""
        if any(share.is_recalled and share.granted for share in self._order):
            return False
        if room > 0 and not all(share.is_empty for share in self._order if share.is_there):
            return False
        self.is_draining = False
        return True

    @property
    def granted(self) -> int:
        return sum(share.granted for share in self._order)

    @property
    def recalled(self) -> Sequence[int]:
        """The fragments that have not answered a recall."""
        return [share.fragment for share in self._order if share.is_recalled]

    # -- parts

    def _part(self, room: int) -> int:
        """The grant that is the same for all fragments whose limits are not below it."""
        equal, left, count = room // len(self._order), room, 0
        for share in self._order:
            if share.limit is None or share.limit >= equal:
                count += 1
            else:
                left -= share.limit
        return left // max(1, count)

    def _replace(self, fragment: int) -> _Share:
        """Forget what was said to the fragment and by it."""
        before = self._shares[fragment]
        share = self._shares[fragment] = _Share(fragment)
        self._order[self._order.index(before)] = share
        return share

    def _grant(self, share: _Share, count: int, now: float) -> Action:
        share.granted_at = now
        if count > share.granted:
            self._order.remove(share)
            self._order.append(share)
        share.granted = count
        share.used = 0
        share.has_more = False
        share.awaits_since = None
        share.watches = True
        return Action(Kind.GRANT, share.fragment, count)

    def _reduce(self, excess: int, now: float) -> Iterator[Action]:
        """The link may get less than it was: take the largest grants back, without waiting for an answer."""
        for share in sorted(self._order, key=lambda share: -share.granted):
            cut = min(share.granted, excess)
            if cut > 0 and not share.is_recalled:
                excess -= cut
                yield self._grant(share, share.granted - cut, now)

    def _recall(self, wanted: int, shares: Sequence[_Share], at_once: bool, now: float) -> Iterator[Action]:
        """Recall grants of fragments that do not say that they have more, until `wanted` credits come back.

        And unless credit is scarce, all of which nothing was used.
        """
        coming = sum(share.granted for share in self._order if share.is_recalled)
        for share in sorted(shares, key=lambda share: -share.granted):
            if not share.granted:
                break
            is_unused = not (share.used or at_once)
            if share.has_more or (coming >= wanted and not is_unused):
                continue
            idle_at = share.granted_at + (UNUSED_SECONDS if is_unused else IDLE_SECONDS)
            if not at_once and idle_at > now:
                self._look_again(idle_at)
            else:
                coming += share.granted
                share.is_recalled = True
                yield Action(Kind.RECALL, share.fragment, share.granted)

    def _pass(self, wanting: Sequence[_Share], now: float) -> Iterator[Action]:
        """Answer those that have waited for long."""
        for share in wanting:
            if share.awaits_since is None:
                continue
            pass_at = share.awaits_since + PASS_SECONDS
            if pass_at > now:
                self._look_again(pass_at)
            else:
                share.awaits_since = None
                yield Action(Kind.PASS, share.fragment)

    def _look_again(self, at: float) -> None:
        self.again_at = at if self.again_at is None else min(self.again_at, at)


def _most(share: _Share, part: int) -> int:
    """What the fragment may be granted at once."""
    return part if share.limit is None else min(share.limit, part)
