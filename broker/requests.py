"""The requests of partitions: what each asks for, and what it is answered.

On the wire (`broker.wire.Request`), a request is a name and a list of arguments, which are the fields of its record.
A request is done wholly, or not at all; `docs/architecture.md` has the meaning.

Messages in an answer are flat items, `wire.ENTRY` for each, as in DELIVER. In the answers to `Peek`, `PeekSession` and
`Browse`, the token is replaced by the `Place` of the message.
"""

from collections.abc import Hashable, Sequence
from typing import Annotated, Any, Final, NamedTuple, cast

from broker.errors import NotAllowed, NotImplementedByBroker
from broker.forms import is_message, is_row, is_rule
from broker.named_records import NamedRecords
from storage.records import Place

# On the wire it is the channel of the caller's receiver that holds the lock of the session, or 0 if none does; in a
# partition, the key of this receiver, or None.
Receiver = Annotated[Hashable, int]
ANYONE: Final = -1  # In place of a receiver: it does not matter who holds the session. It never travels.

Id = Annotated[int, range(1 << 32)]  # of a queue or an entity
Number = Annotated[int, range(1 << 64)]  # the sequence number of a message
At = Annotated[int, range(len(Place))]  # a `Place`
Row = Annotated[Sequence[Any], is_row]  # see `broker.partition.moving.departure`
Message = Annotated[Sequence[Any], is_message]
Document = Annotated[dict[str, Any], is_rule]  # see `broker.namespace.rule_descriptions`

# -- messages


class RenewLocks(NamedTuple):
    """Renew the locks of messages. The answer is [locked_until_ms, ...] in the order of the tokens."""

    tokens: Sequence[bytes]


class Peek(NamedTuple):
    """Show messages from this number on. The answer is their items.

    `with_lock_ends`, from VERSION_WITH_LOCK_ENDS on: the answer is [items, lock ends], and these are a map of locked
    until ms by sequence number.
    """

    from_number: Number
    most: int
    max_bytes: int
    with_lock_ends: bool = False


class PeekSession(NamedTuple):
    """Peek at messages of one session. The answer is that of `Peek`."""

    session_id: str
    from_number: Number
    most: int
    max_bytes: int
    with_lock_ends: bool = False


class Browse(NamedTuple):
    """Show messages to a browser, perhaps those of one session, or those that a selector selects.

    The answer is [items, the number to go on from, True if that is behind all messages]; there may be no items before
    the end. `with_lock_ends` adds the lock ends, as those of `Peek`.
    """

    from_number: Number
    most: int
    max_bytes: int
    session_id: str | None
    selector: str | None = None  # always sent, since VERSION_WITH_SELECTORS
    with_lock_ends: bool = False


class ReceiveDeferred(NamedTuple):
    """Receive deferred messages by their numbers. The answer is [locked_until_ms or 0, items].

    With `active`, active messages are received, too, and their numbers stand behind the items.
    """

    numbers: Sequence[Number]
    receive_and_delete: bool
    active: bool = False


class ReceiveSessionDeferred(NamedTuple):
    """Receive messages of one session by their numbers. The answer is that of `ReceiveDeferred`."""

    receiver: Receiver
    session_id: str
    numbers: Sequence[Number]
    receive_and_delete: bool
    active: bool = False


class Settle(NamedTuple):
    """Settle messages, whichever receiver got them. The answer is None.

    Where sessions are required, a `receiver` may say who asks: what a session has lost is not settled then.
    """

    tokens: Sequence[bytes]
    outcome: int  # see `wire.Outcome`
    properties: dict[str, Any] | None
    receiver: Receiver = ANYONE


class Schedule(NamedTuple):
    """Send messages, at their times. The answer is their sequence numbers."""

    messages: Sequence[Message]


class CancelScheduled(NamedTuple):
    """Delete scheduled messages. The answer is None."""

    numbers: Sequence[Number]


class DeleteBatch(NamedTuple):
    """Delete the oldest available messages that were enqueued before this time, perhaps of one session only.

    The answer is their number.
    """

    most: int
    before_ms: int
    session_id: str | None = None


class Purge(NamedTuple):
    """Delete unlocked messages at these places (`Place`), or at all. The answer is their number."""

    places: Sequence[At] | None = None


# -- rules of a subscription


class AddRule(NamedTuple):
    """Add a rule. The answer is None."""

    rule: Document


class ReplaceRule(NamedTuple):
    """Let the rule of this name be another. The answer is None."""

    rule: Document


class RemoveRule(NamedTuple):
    """Remove a rule. The answer is None."""

    name: str


class GetRule(NamedTuple):
    """Ask for a rule. The answer is its document."""

    name: str


class EnumerateRules(NamedTuple):
    """List rules. The answer is [rule document, ...] in the order of their names."""

    skip: int
    top: int


# -- sessions


class RenewSessionLock(NamedTuple):
    """Renew the lock of a session. The answer is locked_until_ms."""

    receiver: Receiver
    session_id: str


class GetSessionState(NamedTuple):
    """Ask for the state of a session. The answer is the state or None."""

    receiver: Receiver
    session_id: str


class SetSessionState(NamedTuple):
    """Set the state of a session, or clear it. The answer is None."""

    receiver: Receiver
    session_id: str
    state: bytes | None


class GetMessageSessions(NamedTuple):
    """List the sessions whose state was set after this time, or all that have messages or a state.

    The answer is [session id, ...].
    """

    updated_after_ms: int | None
    skip: int
    top: int


class PageMessageSessions(NamedTuple):
    """Ask as `GetMessageSessions` does. The answer is [the number skipped, [session id, ...]]."""

    updated_after_ms: int | None
    skip: int
    top: int


class MessageSessionsBehind(NamedTuple):
    """Ask for the sessions behind this one. The answer is that of `GetMessageSessions`."""

    updated_after_ms: int | None
    session_id: str
    top: int


# -- the partition


class Counts(NamedTuple):
    """Count the messages of these queues; of all, if none is named.

    The answer is by queue: available, deferred, scheduled, bytes, locked.
    """

    queue_ids: Sequence[Id] = ()


class Accessed(NamedTuple):
    """Ask when entities were used.

    The answer is [ms when the partition was opened, by entity: ms of the last access since, or 0].
    """

    entity_ids: Sequence[Id]


class FilterCounts(NamedTuple):
    """Count the filters of topics. The answer is by topic: SQL filters, correlation filters."""

    entity_ids: Sequence[Id]


class Metrics(NamedTuple):
    """Ask for the counters of the worker. The answer is its snapshot: see `broker.metrics`."""


class Probe(NamedTuple):
    """Write and read. The answer is a shortage of room, or None."""


class Stored(NamedTuple):
    """Ask which deliveries with marks (`wire.Mark`) of this sender are stored.

    The answer is flat ranges of numbers: the first, the one behind the last, ...
    """

    sender: bytes


# -- moves of entities: see `broker.partition.moving`


class Arrive(NamedTuple):
    """Make ready for the rows of an entity. The answer is None."""

    token: bytes
    entity_id: Id


class Depart(NamedTuple):
    """Begin to read the rows of an entity. The answer is None."""

    token: bytes
    entity_id: Id


class Rows(NamedTuple):
    """Read the next rows. The answer is [rows, True if all were read once, how many are noted]."""

    token: bytes
    entity_id: Id
    limit_bytes: int
    limit: int


class StoreRows(NamedTuple):
    """Store rows of the other partition. The answer is None."""

    token: bytes
    rows: Sequence[Row]


class Hold(NamedTuple):
    """Let the entity be quiet. The answer is [number of locks, number of batches without an answer]."""

    token: bytes
    entity_id: Id


class Freeze(NamedTuple):
    """Let the entity refuse all uses. The answer is None."""

    token: bytes
    entity_id: Id


# -- the catalog


class ChangeCatalog(NamedTuple):
    """Ask the home for one change, as it travels (`broker.catalog.changes`). The answer is that of the change."""

    change: Sequence[Any]


# -- transactions
#
# A transaction begins with the first request that names it. Later ones fail if it is unknown. When the gateway's
# connection ends, its transactions are rolled back. The first half of a transaction's id identifies the client's
# connection.


class Transact(NamedTuple):
    """Add operations, which `wire.pack_operations` has packed. The answer is per operation None, or per delivery of it
    None or [error name, text].
    """

    transaction: bytes
    begins: bool  # True in the first request of the transaction
    operations: Sequence[Any]


class TransactRequest(NamedTuple):
    """Add a request, one of `InTransaction`, as it travels. The answer is that of the request."""

    transaction: bytes
    begins: bool
    name: str
    arguments: Sequence[Any]


class Discharge(NamedTuple):
    """End a transaction. The answer is None."""

    transaction: bytes
    commit: bool


# Those that can be a part of a transaction (amqp.md 10.3).
InTransaction = Schedule | Settle | CancelScheduled | SetSessionState
IN_TRANSACTIONS: Final = (Schedule, Settle, CancelScheduled, SetSessionState)
WITH_RECEIVER: Final = (ReceiveSessionDeferred, Settle, RenewSessionLock, GetSessionState, SetSessionState)

Rule = AddRule | ReplaceRule | RemoveRule | GetRule | EnumerateRules
RULES: Final = (AddRule, ReplaceRule, RemoveRule, GetRule, EnumerateRules)
OfQueue = (
    RenewLocks | Peek | PeekSession | Browse | ReceiveDeferred | ReceiveSessionDeferred | Settle | Schedule
    | CancelScheduled | DeleteBatch | Purge | Rule | RenewSessionLock | GetSessionState | SetSessionState
    | GetMessageSessions | PageMessageSessions | MessageSessionsBehind
)  # fmt: skip
OfPartition = (
    Counts | Accessed | FilterCounts | Probe | Stored | Arrive | Depart | Rows | StoreRows | Hold | Freeze
)  # fmt: skip
Request = OfQueue | OfPartition | Metrics | ChangeCatalog | Transact | TransactRequest | Discharge

# What these requests have behind their arguments is left out, as it always was; others are refused for that.
_LEFT_OUT: Final = (
    RenewLocks, Peek, PeekSession, Browse, ReceiveDeferred, ReceiveSessionDeferred, Settle, Schedule, CancelScheduled,
    DeleteBatch, Purge, AddRule, ReplaceRule, RemoveRule, GetRule, Metrics, Probe, Stored, Discharge,
)  # fmt: skip

RECORDS: Final[NamedRecords[Request]] = NamedRecords(
    {
        "renew-locks": RenewLocks,
        "peek": Peek,
        "peek-session": PeekSession,
        "browse": Browse,
        "receive-deferred": ReceiveDeferred,
        "receive-session-deferred": ReceiveSessionDeferred,
        "settle": Settle,
        "schedule": Schedule,
        "cancel-scheduled": CancelScheduled,
        "delete-batch": DeleteBatch,
        "purge": Purge,
        "add-rule": AddRule,
        "replace-rule": ReplaceRule,
        "remove-rule": RemoveRule,
        "get-rule": GetRule,
        "enumerate-rules": EnumerateRules,
        "renew-session-lock": RenewSessionLock,
        "get-session-state": GetSessionState,
        "set-session-state": SetSessionState,
        "get-message-sessions": GetMessageSessions,
        "page-message-sessions": PageMessageSessions,
        "message-sessions-behind": MessageSessionsBehind,
        "counts": Counts,
        "accessed": Accessed,
        "filter-counts": FilterCounts,
        "metrics": Metrics,
        "probe": Probe,
        "stored": Stored,
        "arrive": Arrive,
        "depart": Depart,
        "rows": Rows,
        "store-rows": StoreRows,
        "hold": Hold,
        "freeze": Freeze,
        "change-catalog": ChangeCatalog,
        "transact": Transact,
        "transact-request": TransactRequest,
        "discharge": Discharge,
    },
    take_all=(Counts, Accessed, FilterCounts, ChangeCatalog),
    take_more=_LEFT_OUT,
    least={Browse: 5},
)
CHANGE_CATALOG: Final = RECORDS.name_of(ChangeCatalog)


def packed(request: Request) -> tuple[str, list[Any]]:
    """The name and the arguments, as they travel."""
    return RECORDS.packed(request)


def parsed(name: str, arguments: Sequence[Any]) -> Request:
    """Return the request that has arrived. Raises NotImplementedByBroker; Malformed."""
    request = RECORDS.parsed(name, arguments)
    if request is None:
        raise NotImplementedByBroker(f"There is no operation '{name}'.")
    return request


def parsed_in_transaction(name: str, arguments: Sequence[Any]) -> InTransaction:
    """Return the request that has arrived in a `TransactRequest`. Raises NotAllowed; Malformed."""
    if RECORDS.classes.get(name) not in IN_TRANSACTIONS:
        raise NotAllowed(f"The operation '{name}' cannot be a part of a transaction.")
    return cast(InTransaction, RECORDS.parsed(name, arguments))
