"""The order in which the receivers of one queue get messages.

Receivers with credit stand in line. Messages are given out in rounds: one to each receiver, from the front of the line.
A receiver that got a message while others did not goes to the end of the line.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from broker.partition.state.receivers import Receiver


class Line:
    __slots__ = ("draining", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Hashable, Receiver] = OrderedDict()  # those with credit
        self.draining: dict[Hashable, Receiver] = {}

    def grant(self, receiver: Receiver, limit: int) -> None:
        receiver.limit = limit
        if limit > receiver.delivered:
            self.waiting.setdefault(receiver.key, receiver)
        else:
            self.waiting.pop(receiver.key, None)

    def drain(self, receiver: Receiver, limit: int) -> None:
        self.grant(receiver, limit)
        self.draining[receiver.key] = receiver

    def leave(self, receiver: Receiver) -> None:
        self.waiting.pop(receiver.key, None)
        self.draining.pop(receiver.key, None)

    def end_drain(self, receiver: Receiver) -> None:
        """The receiver drains: the rest of its grant ends."""
        del self.draining[receiver.key]
        receiver.limit = receiver.delivered
        self.waiting.pop(receiver.key, None)

    def next_round(self, ready: int) -> tuple[list[Receiver], int]:
        """The receivers that get up to `ready` messages (at least 1) now, and the number of messages for each."""
        waiting = self.waiting
        if len(waiting) == 1:
            (receiver,) = waiting.values()
            credit = receiver.limit - receiver.delivered
            return [receiver], credit if credit < ready else ready
        count = min(len(waiting), ready)
        group = list(islice(self.waiting.values(), count))
        return group, min(min(receiver.limit - receiver.delivered for receiver in group), ready // count)

    def served(self, group: list[Receiver], dealt: int) -> None:
        """`dealt` messages went to `group`, one after the other and round by round; their `delivered` is up to date."""
        ahead = dealt % len(group) if len(group) == len(self.waiting) else dealt
        for receiver in group[:ahead]:
            self.waiting.move_to_end(receiver.key)
        for receiver in group:
            if receiver.delivered >= receiver.limit:
                del self.waiting[receiver.key]

    def take_drained(self) -> list[Receiver]:
        """The receivers that drain: the rest of their grants ends, and they leave the line."""
        drained = list(self.draining.values())
        for receiver in drained:
            self.end_drain(receiver)
        return drained
