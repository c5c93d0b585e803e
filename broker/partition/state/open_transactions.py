"""The open transactions of one partition, with the operations to do when they are committed."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from broker.errors import BrokerError
from broker.wire import Outcome


class Send(NamedTuple):
    queue_id: int
    messages: Sequence[Any]
    reserved: int | None  # the first of their sequence numbers, if the client was told these


class SendRun(NamedTuple):
    """Usual messages to a queue that needs nothing of them but their records: see `broker.runs`."""

    queue_id: int
    run: bytes


class Settle(NamedTuple):
    queue_id: int
    tokens: list[bytes]
    outcome: Outcome
    properties: dict[str, Any] | None
    quiet: bool  # the client has settled these deliveries and has forgotten them


class Cancel(NamedTuple):
    """Scheduled messages that are deleted."""

    queue_id: int
    numbers: list[int]


class SetState(NamedTuple):
    """The state of a session, set by the receiver that has its lock."""

    queue_id: int
    session_id: str
    state: bytes | None
    receiver: Hashable


Staged = Send | SendRun | Settle | Cancel | SetState


class Transaction:
    __slots__ = (
        "cancelled",
        "deadline_ms",
        "failure",
        "key",
        "message_bytes",
        "message_count",
        "operations",
        "owner",
        "settled_bytes",
        "settled_count",
        "staged",
        "unstaged_bytes",
    )

    def __init__(self, deadline_ms: int, owner: Hashable) -> None:
        self.owner = owner
        self.deadline_ms = deadline_ms
        self.operations: list[Staged] = []
        self.message_count = 0  # messages sent in the transaction
        self.message_bytes = 0
        self.unstaged_bytes = 0  # of these, bytes that only memory has
        self.staged: list[int] = []  # ids of the messages whose records are stored already
        self.cancelled: set[tuple[int, int]] = set()  # queue id and sequence number of messages cancelled in it
        self.settled_count = 0  # messages settled or cancelled in the transaction, and states set
        self.settled_bytes = 0  # of the properties that these settlements write, these messages and states
        self.key: str | None = None  # the common partition key of its messages
        self.failure: BrokerError | None = None  # why it cannot be committed any more


class Transactions:
    """By the caller's key, the oldest first. Transactions in `timed_out` are rolled back, but not discharged yet."""

    def __init__(self) -> None:
        self.open: dict[Hashable, Transaction] = {}
        self.timed_out: set[Hashable] = set()
        self.message_bytes = 0
        self.owner_bytes: Counter[Hashable] = Counter()  # bytes of messages, by the owner of the transaction
        self.committed = 0
        self.rolled_back = 0

    def grow(self, transaction: Transaction, added_bytes: int) -> None:
        """Count messages that join the transaction."""
        transaction.message_bytes += added_bytes
        self.message_bytes += added_bytes
        self.owner_bytes[transaction.owner] += added_bytes

    def release(self, transaction: Transaction) -> None:
        """The transaction has ended: do not count its messages any more."""
        self.message_bytes -= transaction.message_bytes
        self.owner_bytes[transaction.owner] -= transaction.message_bytes
        if not self.owner_bytes[transaction.owner]:
            del self.owner_bytes[transaction.owner]
