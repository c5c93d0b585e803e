"""The language between gateways and workers, and among workers: msgpack arrays, many to a frame.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one array of messages, each an array that begins
with its `Op`. Everything that one loop turn has to say goes into one frame. `partition` is a partition id, `queue` a
queue id. A `channel` is a number the gateway chooses for one link on one partition; its answers come in the order of
its requests. Channel 0 wants no answer. `limit` counts deliveries since the receiver was opened (it is absolute).

An incoming message is [layout, body, ttl_ms | None, extra | None]: see `Extra`. In DELIVER, entries are flat, `ENTRY`
items each: token (16 bytes), sequence number, delivery count, message record, overlay | None. In the answer to `peek`
the `Place` of the message stands where the token would.

A `session` is [session id, or None for any that is available; milliseconds to wait for one]. A `receiver` among the
arguments of a request is the channel of the caller's receiver that holds the lock of the session.

Requests, their arguments and results (all or nothing each; `docs/architecture.md` has the meaning):
    renew-locks       [tokens]                                   [locked_until_ms, ...] in the same order
    peek              from sequence number, count, max bytes     entry items
    peek-session      session id, then as peek                   entry items
    receive-deferred  [sequence numbers], receive_and_delete     [locked_until_ms, entry items]
    receive-session-deferred  receiver, session id, then as receive-deferred  [locked_until_ms, entry items]
    settle            [tokens], outcome, properties | None, and where sessions are required: receiver  None
    schedule          [messages]                                 [sequence numbers]
    cancel-scheduled  [sequence numbers]                         None
    delete-batch      count, enqueued before ms, and to delete of one session only: its id  number deleted
    purge                                                        number deleted
    add-rule          rule document, see broker.namespace.rule_descriptions  None
    remove-rule       name                                       None
    enumerate-rules   skip, top                                  [rule document, ...] in the order of their creation
    renew-session-lock  receiver, session id                     locked_until_ms
    get-session-state   receiver, session id                     state | None
    set-session-state   receiver, session id, state | None       None
    get-message-sessions  state set after ms | None, skip, top   [session id, ...]; None: with messages, or a state
    counts                                                       queue -> available, deferred, scheduled, bytes, locked
    metrics                                                      see broker.metrics
    probe                                                        None, after a real write and read
    transact          transaction id, begins, [operation, ...]   per operation None, or per delivery of it None or
                                                                 [error name, text]
    transact-request  transaction id, begins, name, [argument, ...]   as `schedule` or `settle` of that name
    discharge         transaction id, commit                     None

Operations of a transaction are `SendOperation` and `SettleOperation`.
`begins` is True with the first of a transaction's requests: another that finds it unknown fails. A transaction belongs
to the gateway's connection, and is rolled back with it. The first half of its id is that of the client's connection.
"""

from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

VERSION = 1
ENTRY = 5  # items per delivery in DELIVER and in the results of peek and receive-deferred


TRANSACTION_OWNER_BYTES = 8  # of a transaction's id: of which connection it is


class Op(IntEnum):
    # gateway -> worker
    SEND = 1  # partition, channel, queue, [message, ...]: as many deliveries
    SEND_BATCH = 2  # partition, channel, queue, [message, ...]: one delivery, all or nothing
    OPEN_RECEIVER = 3  # partition, channel, queue, receive_and_delete, session | None
    GRANT = 4  # partition, channel, limit
    DRAIN = 5  # partition, channel, limit
    # `unsent_from`: the client cannot have the deliveries with this token and later ones, nor those it does not know of
    CLOSE_RECEIVER = 6  # partition, channel, broken, unsent_from
    SETTLE = 7  # partition, queue, outcome, [channel, count of its tokens, ...], [token, ...], properties | None
    REQUEST = 8  # partition, request id, name, queue, [argument, ...]
    RESTORE = 9  # partition, queue, [entry items, ...]: received and deleted, but never put on the wire
    # worker -> another worker; entries are flat, 3 items per message: sequence number, message record, overlay
    # of a transfer queue: entity id 0, each overlay has its own as `storage.records.Field.DESTINATION`
    FORWARD = 10  # partition, store id, source partition, source queue, entity id, [entry items, ...]
    # The answer: source partition, source queue, partition that answers, all taken up to this sequence number, those
    # refused as [error name, text, [sequence number, ...]], and why nothing more is taken now, or "".
    FORWARDED = 11
    # a worker -> the worker of partition 0
    REMOVE = 12  # [entity id, ...]: deleted where they lived, and to be taken out of the catalog
    # worker -> gateway, and the first and those of the catalog -> another worker as well
    HELLO = 100  # version, [partition, ...]
    SENT = 101  # channel, count of deliveries stored
    REFUSED = 102  # channel, count of deliveries refused, error name, text
    OPENED = 103  # channel, and of a receiver of a session: session id, locked_until_ms
    CLOSED = 104  # channel, error name, text: refused, or detached by the broker; closed as asked if both are empty
    DRAINED = 105  # channel, deliveries since it was opened
    SETTLED = 106  # [channel, count, ...]
    UNSETTLED = 107  # channel, count, error name, text
    DELIVER = 108  # channel, locked_until_ms, [entry items, ...]
    REPLY = 109  # request id, result
    FAILED = 110  # request id, error name, text
    CATALOG = 111  # version, [definition, ...]: when the connection is made
    DELETED = 112  # version, [entity id, ...]: the catalog has these no more


# Requests with a `receiver`, and which of the arguments that is.
RECEIVER_AT = {
    "receive-session-deferred": 0,
    "settle": 3,
    "renew-session-lock": 0,
    "get-session-state": 0,
    "set-session-state": 0,
}


class Extra(IntEnum):
    """Keys of an incoming message's extra map, each present only when the message has it."""

    SCHEDULED_MS = 1
    SESSION_ID = 2
    PARTITION_KEY = 3
    MESSAGE_ID = 4  # encoded AMQP value
    PING = 5
    DESTINATION = 6  # to a transfer queue: name in lower case of the queue or topic that it is for


class Outcome(IntEnum):
    ACCEPTED = 0  # complete
    ABANDONED = 1  # modified: available again, one failed delivery more
    DEFERRED = 2  # modified, undeliverable here
    DEAD_LETTERED = 3  # rejected
    RELEASED = 4  # available again, no failed delivery


class SendOperation(NamedTuple):
    """Sends in a transaction, to one queue."""

    queue: int
    quiet: bool  # the client hears of no error, so that an error rolls all of it back
    deliveries: list[list[Any]]  # the messages of each


class SettleOperation(NamedTuple):
    """Settlements in a transaction, of messages of one queue."""

    queue: int
    quiet: bool
    tokens: list[bytes]
    outcome: int
    properties: dict[str, Any] | None = None
    receiver: Hashable = None  # its channel on the wire, its key in a partition; named where sessions are required


Operation = SendOperation | SettleOperation

_OPERATIONS = (SendOperation, SettleOperation)


def pack_operations(operations: Iterable[Operation]) -> list[Any]:
    return [[_OPERATIONS.index(type(operation)), operation] for operation in operations]


def unpack_operations(packed: Iterable[Any]) -> list[Operation]:
    return [_OPERATIONS[kind](*fields) for kind, fields in packed]


# So many items of one command are done at once. What is more is a command of its own.
ITEMS_AT_ONCE = 256
# Commands whose items are independent of each other: where they are, and how many values each has.
_INDEPENDENT = {Op.SEND: (4, 1), Op.SETTLE: (5, 1), Op.RESTORE: (3, ENTRY)}


def cut(command: list[Any]) -> tuple[list[Any], list[Any] | None]:
    """A command of no more than ITEMS_AT_ONCE independent items, and one of the rest, if there are more."""
    found = _INDEPENDENT.get(command[0])
    if found is None or len(command[found[0]]) <= ITEMS_AT_ONCE * found[1]:
        return command, None
    at, values = found
    items, end = command[at], ITEMS_AT_ONCE * values
    first, rest = [*command], [*command]
    first[at], rest[at] = items[:end], items[end:]
    if command[0] == Op.SETTLE:
        first[4], rest[4] = _cut_channels(command[4])
    return first, rest


def _cut_channels(channels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Channels, each followed by the count of its tokens: those of the first ITEMS_AT_ONCE tokens, and of the rest."""
    first: list[int] = []
    rest: list[int] = []
    left = ITEMS_AT_ONCE
    for channel, count in zip(channels[0::2], channels[1::2], strict=True):
        taken = min(count, left)
        left -= taken
        if taken:
            first += (channel, taken)
        if taken < count:
            rest += (channel, count - taken)
    return first, rest


def unpack(frame: bytes | memoryview) -> list[list[Any]]:
    messages: list[list[Any]] = msgpack.unpackb(frame, strict_map_key=False)
    return messages
