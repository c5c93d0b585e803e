"""Work that the operations of one turn leave for its end: queues to serve, answers to give, counts to write."""

from collections.abc import Hashable, Mapping

from broker.errors import BrokerError
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import Receiver


class Turn:
    """Work lists of one partition. Queues are by queue id, in the order in which they were added.

    Queues in `awake`, `outgoing` and `offering` that a turn does not get to stay for the next one.
    """

    __slots__ = (
        "accepted",
        "awake",
        "browsed",
        "closed",
        "offering",
        "outgoing",
        "part_limit",
        "touched",
        "work",
        "work_limit",
    )

    def __init__(self) -> None:
        self.touched: dict[int, Queue] = {}  # queues whose counts must be written
        self.awake: dict[int, Queue] = {}  # queues that may have messages for their receivers
        self.outgoing: dict[int, Queue] = {}  # queues that may have messages to forward
        self.offering: dict[int, Queue] = {}  # queues that may have a session for a waiting receiver
        self.browsed: dict[int, Queue] = {}  # queues that may have messages for browsers that wait for more
        self.accepted: list[Receiver] = []  # receivers that have got a session
        self.closed: list[tuple[Hashable, BrokerError]] = []  # receivers closed by the broker, and the errors
        self.work = 0  # the approximate number of records read or written; it bounds a turn, see `Core.work_left`
        self.work_limit: int | None = None  # None: not computed in this turn yet
        self.part_limit = 0  # the share of one part of the turn, see `Core.begin_part`

    def touch(self, queue: Queue) -> None:
        self.touched[queue.id] = queue
        if queue.browsers:
            self.browsed[queue.id] = queue

    def wake(self, queue: Queue) -> None:
        """Note that the queue may have messages to hand out or forward, or sessions to offer."""
        line = queue.line
        if line.waiting or line.draining or line.watching or queue.selections:
            self.awake[queue.id] = queue
        if queue.outbox is not None or queue.transfers is not None:
            self.outgoing[queue.id] = queue
        if queue.sessions is not None and queue.sessions.waiting:
            self.offering[queue.id] = queue

    def take_awake(self) -> dict[int, Queue]:
        taken, self.awake = self.awake, {}
        return taken

    def take_outgoing(self) -> dict[int, Queue]:
        taken, self.outgoing = self.outgoing, {}
        return taken

    def take_offering(self) -> dict[int, Queue]:
        taken, self.offering = self.offering, {}
        return taken

    def take_browsed(self) -> dict[int, Queue]:
        taken, self.browsed = self.browsed, {}
        return taken

    def take_accepted(self) -> list[Receiver]:
        taken, self.accepted = self.accepted, []
        return taken

    def take_closed(self) -> list[tuple[Hashable, BrokerError]]:
        taken, self.closed = self.closed, []
        return taken

    def forget(self, queue_id: int) -> None:
        """The queue is deleted: remove it from all lists."""
        for queues in (self.touched, self.awake, self.outgoing, self.offering, self.browsed):
            queues.pop(queue_id, None)

    def check(self, queues: Mapping[int, Queue]) -> None:
        """Assert the invariants of the work lists between two calls; `queues` are those that are open, by queue id."""
        for listed in (self.touched, self.awake, self.outgoing, self.offering, self.browsed):
            assert all(queues.get(queue_id) is queue for queue_id, queue in listed.items()), "work for a closed queue"
        assert all(queue.outbox or queue.transfers for queue in self.outgoing.values()), "it cannot forward"
        assert all(queue.sessions is not None for queue in self.offering.values()), "it has no sessions to offer"
        assert self.work >= 0
        assert self.work_limit is None or self.part_limit > 0, "a part of the turn has no share of the work"
