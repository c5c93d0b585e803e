"""Transactions of one partition that have not ended: what is to be done when they are committed."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from broker.errors import BrokerError
from broker.wire import Outcome


class Send(NamedTuple):
    queue_id: int
    messages: Sequence[Any]
    reserved: int | None  # the first of their sequence numbers, where the client was told them


class Settle(NamedTuple):
    queue_id: int
    tokens: Sequence[bytes]
    outcome: Outcome
    properties: dict[str, Any] | None
    quiet: bool  # the client does not know these deliveries any more


class Transaction:
    __slots__ = (
        "deadline_ms",
        "failure",
        "key",
        "message_bytes",
        "message_count",
        "operations",
        "owner",
        "settled_bytes",
        "settled_count",
    )

    def __init__(self, deadline_ms: int, owner: Hashable) -> None:
        self.owner = owner
        self.deadline_ms = deadline_ms
        self.operations: list[Send | Settle] = []
        self.message_count = 0  # sent in it
        self.message_bytes = 0
        self.settled_count = 0  # messages
        self.settled_bytes = 0  # of properties that this writes
        self.key: str | None = None  # the partition key that its messages have in common
        self.failure: BrokerError | None = None  # it cannot be committed any more


class Transactions:
    """By the key that the caller chose, the oldest first. Those in `timed_out` are rolled back, and not discharged."""

    def __init__(self) -> None:
        self.open: dict[Hashable, Transaction] = {}
        self.timed_out: set[Hashable] = set()
        self.message_bytes = 0
        self.owner_bytes: Counter[Hashable] = Counter()  # of these, by the owner of their transaction
        self.committed = 0
        self.rolled_back = 0

    def grow(self, transaction: Transaction, added_bytes: int) -> None:
        """Messages become a part of it."""
        transaction.message_bytes += added_bytes
        self.message_bytes += added_bytes
        self.owner_bytes[transaction.owner] += added_bytes

    def release(self, transaction: Transaction) -> None:
        """It has ended."""
        self.message_bytes -= transaction.message_bytes
        self.owner_bytes[transaction.owner] -= transaction.message_bytes
        if not self.owner_bytes[transaction.owner]:
            del self.owner_bytes[transaction.owner]
