"""Which messages of a queue another partition may have taken over, and which the queue still owns.

The other partition takes messages over and writes, in the same commit, up to which sequence number it has: its mark.
Here they are deleted when its answer has come. In between a crash or a lost connection leaves open which were taken,
and whoever is asked first is that partition: only its mark tells.

| `synced` | `partition` | `awaited` | messages of the queue                                                 |
|----------|-------------|-----------|-----------------------------------------------------------------------|
| True     | None        | False     | none has been taken over: all are the queue's own                     |
| True     | set         | False     | the same; marks are there, below all numbers that are left            |
| True     | set         | True      | those in `numbers` may be taken over, the others are the queue's own  |
| False    | set         | any       | some may be taken over, those with the lowest numbers: all are held back |

`partition` is recorded in META before the first message leaves for it, and deleted, or another is recorded, only when
synced. So whatever is changed meanwhile, and whatever crashes, the one that may have taken messages is always asked.

A transfer queue has an outbox for each partition, see `lanes`: the same holds of the messages for that partition.
"""

from itertools import pairwise

from broker.partition.state.window import Window

BACK_OFF_MS = 50
BACK_OFF_MAX_MS = 2000


class Outbox:
    __slots__ = (
        "awaited",
        "destination",
        "failures",
        "highest",
        "numbers",
        "partition",
        "retry_ms",
        "sent_bytes",
        "synced",
        "taken",
        "window",
    )

    def __init__(self, window: Window, partition: int | None = None) -> None:
        """`window`: of the messages to be forwarded. `partition`: as recorded; without that, nothing is elsewhere."""
        self.window = window
        self.partition = partition
        self.synced = partition is None
        self.awaited = False  # a command is under way to `partition`, and will be answered or lost
        self.sent_bytes = 0  # in that command
        self.numbers: list[int] = []  # sequence numbers of what was sent and is not answered, or not known to be taken
        self.taken = 0  # in a transfer queue: what is up to this number was taken over before the start, and is to go
        self.highest = 0  # sequence number that was taken out to be forwarded since the start
        self.destination = ("", 0)  # name in lower case and entity id, as last looked up
        self.failures = 0  # one after the other
        self.retry_ms = 0  # nothing is tried before

    def fail(self, now_ms: int) -> int:
        """It did not work, and may later. Returns when to try again."""
        delay_ms = min(BACK_OFF_MS << min(self.failures, 16), BACK_OFF_MAX_MS)
        self.failures += 1
        self.retry_ms = now_ms + delay_ms
        return self.retry_ms

    def succeed(self) -> None:
        self.failures = self.retry_ms = 0

    def check(self) -> None:
        """Assert that the state is one of the table's rows."""
        if self.partition is None:
            assert self.synced, "nobody is known who could say what was taken over"
            assert not self.awaited, "a command is under way to nobody"
        if self.synced and not self.awaited:
            assert not self.numbers, "what was sent is neither under way nor unknown"
        assert all(before < after for before, after in pairwise(self.numbers)), "sent out of order"
        self.window.check()
