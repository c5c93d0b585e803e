"""The order in which the receivers of one queue get messages.

Receivers with credit stand in line. Messages are given out in rounds: one to each receiver, from the front of the line.
A receiver that got a message while others did not goes to the end of the line.

A receiver on a partitioned entity has its credit on one partition or another. On those where it has none it may watch:
it is told when there are messages that nobody with credit takes. As many are told as there are such messages, so that
one message does not wake everybody. Who is told answers with a grant, or passes.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from broker.partition.state.receivers import Receiver


class Line:
    __slots__ = ("draining", "told", "waiting", "watching")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Hashable, Receiver] = OrderedDict()  # those with credit
        self.watching: OrderedDict[Hashable, Receiver] = OrderedDict()  # those that watch, and were not told
        self.told: set[Hashable] = set()  # those that were told, and have not answered
        self.draining: dict[Hashable, Receiver] = {}

    @property
    def is_pulled(self) -> bool:
        """True if a receiver has credit, here or on another partition."""
        return bool(self.waiting or self.watching or self.told)

    def grant(self, receiver: Receiver, limit: int) -> None:
        receiver.limit = limit
        if limit > receiver.delivered:
            self.waiting.setdefault(receiver.key, receiver)
            if receiver.watches:
                self.told.discard(receiver.key)
                self.watching.pop(receiver.key, None)
        else:
            self._leave_line(receiver)

    def watch(self, receiver: Receiver) -> None:
        """From now on the receiver watches whenever it has no credit."""
        receiver.watches = True
        if receiver.key not in self.waiting:
            self.watching.setdefault(receiver.key, receiver)

    def passes(self, receiver: Receiver) -> None:
        """The receiver was told, and cannot take messages now. It watches again after its next grant."""
        self.told.discard(receiver.key)
        self.watching.pop(receiver.key, None)

    def tell(self, ready: int) -> list[Receiver]:
        """There are so many messages, and nobody in line: the receivers to tell now."""
        count = min(ready - len(self.told), len(self.watching))
        found = [self.watching.popitem(last=False)[1] for _ in range(count)]
        self.told.update(receiver.key for receiver in found)
        return found

    def drain(self, receiver: Receiver, limit: int) -> None:
        self.grant(receiver, limit)
        self.draining[receiver.key] = receiver

    def leave(self, receiver: Receiver) -> None:
        """The receiver is closed."""
        self.waiting.pop(receiver.key, None)
        self.draining.pop(receiver.key, None)
        self.watching.pop(receiver.key, None)
        self.told.discard(receiver.key)

    def _leave_line(self, receiver: Receiver) -> None:
        """The receiver has no credit any more."""
        self.waiting.pop(receiver.key, None)
        if receiver.watches:
            self.told.discard(receiver.key)
            self.watching.setdefault(receiver.key, receiver)

    def end_drain(self, receiver: Receiver) -> None:
        """The receiver drains: the rest of its grant ends."""
        del self.draining[receiver.key]
        receiver.limit = receiver.delivered
        self._leave_line(receiver)

    def next_round(self, ready: int) -> tuple[list[Receiver], int]:
        """The receivers that get up to `ready` messages (at least 1) now, and the number of messages for all of them.

        None of them gets more than its share, rounded up.
        """
        waiting = self.waiting
        if len(waiting) == 1:
            (receiver,) = waiting.values()
            credit = receiver.limit - receiver.delivered
            return [receiver], credit if credit < ready else ready
        count = min(len(waiting), ready)
        group = list(islice(self.waiting.values(), count))
        return group, min(count * min(receiver.limit - receiver.delivered for receiver in group), ready)

    def served(self, group: list[Receiver], dealt: int) -> None:
        """`dealt` messages went to `group`; the first may have got one more. Their `delivered` is up to date."""
        ahead = dealt % len(group) if len(group) == len(self.waiting) else dealt
        for receiver in group[:ahead]:
            self.waiting.move_to_end(receiver.key)
        for receiver in group:
            if receiver.delivered >= receiver.limit:
                self._leave_line(receiver)

    def take_used_up(self) -> list[Receiver]:
        """Take, as `take_drained` does, those that have no credit left to wait with."""
        drained = [receiver for receiver in self.draining.values() if receiver.key not in self.waiting]
        for receiver in drained:
            self.end_drain(receiver)
        return drained

    def take_drained(self) -> list[Receiver]:
        """The receivers that drain: the rest of their grants ends, and they leave the line."""
        drained = list(self.draining.values())
        for receiver in drained:
            self.end_drain(receiver)
        return drained
