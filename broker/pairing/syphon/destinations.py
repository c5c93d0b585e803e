"""Whether a destination takes messages, and when it is tried again: a state machine that is told the time.

| state | messages that we hold, or get | what is sent | a send fails | the wait is over | the shelf is empty |
|---|---|---|---|---|---|
| open | are sent | all | paused, then shelved |  |  |
| paused | wait with us, locked | nothing |  | open |  |
| shelved | are deferred: on the shelf | nothing |  | unshelving |  |
| unshelving | are deferred: on the shelf | those of the shelf | shelved |  | open |

So a destination that fails for a moment costs nothing, and one that fails for long blocks no other. What is deferred
comes first when the destination works again, and nothing overtakes it. A failure counts if the send began in the
present state. Waits double from `FIRST_WAIT_MS` on, until a message is taken. Times are of one monotonic clock.
"""

from collections import deque
from enum import StrEnum, auto
from typing import Any, Final

from broker.pairing.aliases import Restored
from broker.pairing.syphon.blame import why_not_a_destination
from broker.pairing.syphon.shelf import Shelf

FIRST_WAIT_MS: Final = 1000
LONGEST_WAIT_MS: Final = 60_000


class State(StrEnum):
    OPEN = auto()
    PAUSED = auto()
    SHELVED = auto()
    UNSHELVING = auto()


class Held:
    """A message of the backlog queue that we hold.

    `source` is what settles it: a delivery, or the lock of a deferred message, if it `is_shelved`. `message` is what is
    sent, empty when the primary has taken it. `locked_ms` is when we got or renewed the lock.
    """

    __slots__ = ("enqueued_ms", "is_shelved", "lane", "locked_ms", "message", "number", "size", "source")

    def __init__(self, restored: Restored, source: Any, lane: "Lane", shelved: bool, now_ms: int) -> None:
        self.number = restored.number
        self.enqueued_ms = restored.enqueued_ms
        self.message = restored.message
        self.size = len(restored.message)
        self.source = source
        self.lane = lane
        self.is_shelved = shelved
        self.locked_ms = now_ms


class Lane:
    """Messages of one destination that must keep their order, those with the same key; without a key there is none.

    `parts` go first: batches that were sent in vain, or halves of them. `in_flight` counts batches.
    """

    __slots__ = ("destination", "in_flight", "key", "parts", "waiting")

    def __init__(self, destination: "Destination", key: str | None) -> None:
        self.destination = destination
        self.key = key
        self.waiting: deque[Held] = deque()
        self.parts: deque[list[Held]] = deque()
        self.in_flight = 0

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.parts


class Destination:
    """`name` is the path as the first message had it; `fault` says why nothing is sent there.

    `held` counts messages that we hold and that are not settled.

    `in_flight` counts batches, `deferring` messages whose deferral is not confirmed. `era` changes whenever sends end.
    """

    __slots__ = (
        "deferring",
        "era",
        "failures",
        "fault",
        "held",
        "in_flight",
        "is_fetching",
        "lanes",
        "name",
        "retry_ms",
        "shelf",
        "state",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.fault = why_not_a_destination(name)
        self.state = State.OPEN
        self.era = 0
        self.failures = 0  # in a row
        self.retry_ms: int | None = None  # when the wait is over
        self.lanes: dict[str | None, Lane] = {}
        self.shelf = Shelf()
        self.held = 0
        self.in_flight = 0
        self.deferring = 0
        self.is_fetching = False  # messages of the shelf are on their way to us

    @property
    def sends(self) -> bool:
        return self.state is State.OPEN or self.state is State.UNSHELVING

    @property
    def defers(self) -> bool:
        """What comes is deferred."""
        return self.state is State.SHELVED or self.state is State.UNSHELVING

    @property
    def is_idle(self) -> bool:
        """There is nothing to know about it."""
        return self.state is State.OPEN and not self.held and not self.in_flight and not len(self.shelf)

    def lane(self, key: str | None) -> Lane:
        found = self.lanes.get(key)
        if found is None:
            found = self.lanes[key] = Lane(self, key)
        return found

    def taken(self, era: int) -> None:
        """The primary has taken messages that were sent in this era."""
        if era == self.era:
            self.failures = 0

    def failed(self, era: int, now_ms: int) -> None:
        """A send that began in this era has failed because of the moment."""
        if era != self.era:
            return
        self.failures += 1
        keeps = self.state is State.OPEN and self.failures == 1
        self.state = State.PAUSED if keeps else State.SHELVED
        self.era += 1
        self.retry_ms = now_ms + min(FIRST_WAIT_MS << min(self.failures - 1, 16), LONGEST_WAIT_MS)

    def shelve(self, now_ms: int) -> None:
        """There are deferred messages of an earlier syphon: they come first."""
        if self.state is not State.SHELVED:
            self.state = State.SHELVED
            self.era += 1
            self.retry_ms = now_ms

    def tick(self, now_ms: int) -> None:
        """Let the time pass. A shelved destination waits, too, until it is known what is on its shelf."""
        if self.retry_ms is None or now_ms < self.retry_ms:
            return
        if self.state is State.PAUSED:
            self.state, self.retry_ms = State.OPEN, None
        elif not self.in_flight and not self.deferring:
            self.state, self.retry_ms = State.UNSHELVING, None

    def emptied(self) -> None:
        """If nothing is left on the shelf, or on its way to it or from it, what comes is sent again."""
        if self.state is State.UNSHELVING and not (len(self.shelf) or self.is_fetching or self.deferring or self.held):
            self.state = State.OPEN
