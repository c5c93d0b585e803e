"""Keeps track of the messages of a queue that another partition may have taken over, and of those it still owns.

The other partition takes messages over and writes its mark in the same commit: the highest sequence number that it has.
This partition deletes the messages when the answer comes. If a crash or a lost connection comes in between, only the
mark tells which messages were taken over. So the first step afterwards is to ask the other partition for its mark.

| `synced` | `partition` | `awaited` | messages of the queue                                                 |
|----------|-------------|-----------|-----------------------------------------------------------------------|
| True     | None        | False     | none was taken over: the queue owns all                               |
| True     | set         | False     | the same; the partition has a mark, below all numbers of the queue    |
| True     | set         | True      | those in `numbers` may be taken over; the queue owns the others       |
| False    | set         | any       | those with the lowest numbers may be taken over: all are held back    |

`partition` is recorded in META before the first message leaves for it. It is deleted or replaced only when `synced`. So
after any change and any crash, the partition that may have taken messages over is asked.

A transfer queue has an outbox for each partition, see `lanes`. The same holds for the messages for that partition.
"""

from itertools import pairwise

from broker.partition.state.window import Window

BACK_OFF_MS = 50
BACK_OFF_MAX_MS = 2000


class Outbox:
    __slots__ = (
        "awaited",
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
        """`window`: of the messages to forward. `partition`: as in META; None if no messages may be elsewhere."""
        self.window = window
        self.partition = partition
        self.synced = partition is None
        self.awaited = False  # a command to `partition` is under way, and will be answered or lost
        self.sent_bytes = 0  # bytes of messages in that command
        self.numbers: list[int] = []  # sequence numbers of messages sent without an answer, or in doubt
        self.taken = 0  # in a transfer queue: up to this number, taken over before the start; to delete
        self.highest = 0  # the highest sequence number that was taken out since the start
        self.failures = 0  # consecutive ones
        self.retry_ms = 0  # the earliest time of the next try

    def fail(self, now_ms: int) -> int:
        """An attempt failed, and a later one may succeed. Returns the time of the next try."""
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
