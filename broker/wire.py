"""The messages between gateways and workers, and among workers: msgpack arrays, many to a frame.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one array of messages, each an array that begins
with its `Op`. It has no meaning where a frame ends. `partition` is a partition id, `queue` a queue id. A `channel` is a
number the gateway chooses for one link on one partition; its answers come in the order of its requests. Commands with
channel 0 are not answered. `limit` counts deliveries since the receiver was opened (it is absolute).

An incoming message is [layout, body, ttl_ms | None, extra | None]: see `Extra`. In DELIVER, entries are flat, `ENTRY`
items each: token (16 bytes), sequence number, delivery count, message record, overlay | None. Many usual messages are
one value: see `broker.runs`.

A `session` is [session id, or None for any that is available; milliseconds to wait for one]; to a worker of
VERSION_WITH_NON_EXCLUSIVE_SESSIONS, for a session that is not exclusive, also: the token of its lock (16 bytes), and
True to take over the session that has this token. The receiver that had it gets CLOSED with SessionTakenOver, and its
CLOSE_RECEIVER says what never reached the client; then the other one gets OPENED.

`broker.requests` has what REQUEST may ask for, and what is answered.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from struct import Struct
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import msgpack

# The versions of these messages that this process can speak. A version may add kinds of messages, and items behind
# those that a message had; who reads them, supplies what an older process does not send. Processes of one namespace may
# be of neighbouring versions while they are replaced one after the other.
VERSION = 8
VERSION_WITH_RUNS = 3
VERSION_WITH_RUNS_IN_TRANSACTIONS = 4
VERSION_WITH_MARKS = 6
VERSION_WITH_BEATS = 6
VERSION_WITH_ANSWERS_TO_RESTORE = 6
VERSION_WITH_SELECTORS = 6
VERSION_WITH_NON_EXCLUSIVE_SESSIONS = 7
VERSION_WITH_LOCK_ENDS = 7
VERSION_WITH_TIMES_TO_LIVE = 8
OLDEST_VERSION = 1
ENTRY = 5  # items per delivery in DELIVER and in the results of peek and receive-deferred


TRANSACTION_OWNER_BYTES = 8  # the part of a transaction's id that identifies the connection
TRANSACTION_TIME_OUT_MS = 120_000  # after its first operation; a partition then rolls it back, and gateways say so


_bin_head = Struct(">BI").pack
_record_size = Struct(">I")  # of a run


class Op(IntEnum):
    """The kind of a message, which is its first item."""

    # gateway -> worker
    SEND = 1
    SEND_BATCH = 2
    OPEN_RECEIVER = 3
    GRANT = 4
    DRAIN = 5
    CLOSE_RECEIVER = 6
    SETTLE = 7
    REQUEST = 8
    RESTORE = 9
    WATCH = 13
    PASS = 14
    # worker -> another worker, and back
    FORWARD = 10
    FORWARDED = 11
    # a worker -> the worker of partition 0, which has the catalog
    REMOVE = 12
    JOIN = 15
    FOLLOWED = 16
    UNUSED = 17
    ANSWER = 18
    STORES = 25
    # gateway -> worker
    SEND_RUN = 19
    TAKES_RUNS = 20
    MARK = 21
    AWAIT = 22
    OPEN_SELECTIVE = 24
    # between machines: gateway or worker -> worker, and back
    BEAT = 23
    # worker -> gateway, and the first and those of the catalog -> another worker as well
    HELLO = 100
    SENT = 101
    REFUSED = 102
    OPENED = 103
    CLOSED = 104
    DRAINED = 105
    SETTLED = 106
    UNSETTLED = 107
    DELIVER = 108
    REPLY = 109
    FAILED = 110
    CATALOG = 111
    DELETED = 112
    AVAILABLE = 113
    CHANGED = 114
    RULES = 115
    DELIVER_RUN = 118
    DELIVER_RUNS = 119
    # the worker of partition 0 -> another worker
    ASK = 116
    KEEP = 117
    REPLACED = 120


# Each message is a tuple whose first item is its `Op`. Below the class of a message stands its constructor, which puts
# the `Op` there, and which is the declaration of its kind.

P = ParamSpec("P")
M = TypeVar("M", bound=tuple[Any, ...])

_kinds: dict[int, type[Any]] = {}  # the class of each message that is read
_shareable: set[int] = set()


def _declare(op: Op, kind: Callable[..., M], *, is_shareable: bool = False) -> int:
    """Messages with this `op` are of this class. Returns the number that they begin with. See `is_shareable`."""
    number = int(op)  # found faster by what is read, which are plain numbers
    _kinds[number] = cast(type[Any], kind)
    if is_shareable:
        _shareable.add(number)
    return number


def _message(op: Op, kind: Callable[Concatenate[int, P], M], *, is_shareable: bool = False) -> Callable[P, M]:
    """Declare messages as `_declare` does, and return their constructor."""
    return partial(kind, _declare(op, kind, is_shareable=is_shareable))


# The constructor of a NamedTuple is a Python function; `tuple.__new__` makes the same in a fraction of the time. So
# messages that there are many of are made with it.
_new = tuple.__new__


class Send(NamedTuple):
    """SEND: each message is a delivery of its own. SEND_BATCH: all messages are one delivery, stored all or none."""

    op: int
    partition: int
    channel: int
    queue: int
    messages: Sequence[Any]


_SEND = _declare(Op.SEND, Send, is_shareable=True)


def send(partition: int, channel: int, queue: int, messages: Sequence[Any]) -> Send:
    return _new(Send, (_SEND, partition, channel, queue, messages))


send_batch = _message(Op.SEND_BATCH, Send, is_shareable=True)


LARGE_RUN_BYTES = 1 << 20  # a larger run is passed on without copies where that can be

# A run (`broker.runs`); of a large frame, it is a view of that (`broker.large_frames`).
RunBytes = bytes | memoryview


class RunOfRecords:
    """A large run whose records are not put together."""

    __slots__ = ("_bytes", "records")

    def __init__(self, records: list[bytes]) -> None:
        self.records = records
        self._bytes = sum(map(len, records)) + _record_size.size * len(records)

    def __len__(self) -> int:
        return self._bytes

    def __bytes__(self) -> bytes:
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """The run in parts, of which the records are some."""
        for record in self.records:
            yield _record_size.pack(len(record))
            yield record


Run = RunBytes | RunOfRecords


class SendRun(NamedTuple):
    """SEND of all `messages` of a run (`broker.runs`), to a worker of VERSION_WITH_RUNS.

    Messages of a run have times to live for VERSION_WITH_TIMES_TO_LIVE only.
    """

    op: int
    partition: int
    channel: int
    queue: int
    messages: int
    run: RunBytes


send_run = _message(Op.SEND_RUN, SendRun, is_shareable=True)


class TakesRuns(NamedTuple):
    """The gateway takes DELIVER_RUN; `also_several`: and DELIVER_RUNS, from version 5 on."""

    op: int
    also_several: bool


takes_runs = partial(_message(Op.TAKES_RUNS, TakesRuns, is_shareable=True), True)


class Mark(NamedTuple):
    """MARK: the next deliveries that this channel sends, so many, have the numbers from `first` on.

    The partition notes with a delivery that it stores that it has its number, so that the gateway can ask for it
    (`broker.requests.Stored`) if the worker ends before it answers. The gateway never asks for numbers lower than
    `below`. `sender` are bytes that the gateway has chosen at random. For a worker of VERSION_WITH_MARKS.
    """

    op: int
    partition: int
    channel: int
    sender: bytes
    first: int
    deliveries: int
    below: int


mark = _message(Op.MARK, Mark, is_shareable=True)


class Beat(NamedTuple):
    """A sign of life, about each second, on a connection between machines: see `broker.cluster.silence`.

    The side that dialled begins, with a worker of VERSION_WITH_BEATS; this one beats from the first BEAT on.
    """

    op: int


beat = _message(Op.BEAT, Beat)


class OpenReceiver(NamedTuple):
    op: int
    partition: int
    channel: int
    queue: int
    receive_and_delete: bool
    session: Any  # None, or as above


open_receiver = _message(Op.OPEN_RECEIVER, OpenReceiver)


class OpenSelective(NamedTuple):
    """OPEN_RECEIVER of one that wants only messages which a selector selects, to a worker of VERSION_WITH_SELECTORS."""

    op: int
    partition: int
    channel: int
    queue: int
    receive_and_delete: bool
    session: Any
    selector: str


open_selective = _message(Op.OPEN_SELECTIVE, OpenSelective)


class Credit(NamedTuple):
    """GRANT: the receiver may get deliveries up to the limit. DRAIN: and credit that it cannot use now ends."""

    op: int
    partition: int
    channel: int
    limit: int


_GRANT = _declare(Op.GRANT, Credit, is_shareable=True)


def grant(partition: int, channel: int, limit: int) -> Credit:
    return _new(Credit, (_GRANT, partition, channel, limit))


drain = _message(Op.DRAIN, Credit)


class Watch(NamedTuple):
    """WATCH: tell the receiver (AVAILABLE) when there are messages for which it has no credit. It is told once, until
    its next grant. PASS: the receiver was told, and cannot take messages now.
    """

    op: int
    partition: int
    channel: int


watch = _message(Op.WATCH, Watch)
passes = _message(Op.PASS, Watch)


class Await(NamedTuple):
    """Tell who browses the queue (AVAILABLE), once, when it has had a message with this number, or a later one.

    CLOSE_RECEIVER ends that. If nobody can receive from the queue, or not any more, the answer is CLOSED. From
    version 6 on.
    """

    op: int
    partition: int
    channel: int
    queue: int
    number: int


await_more = _message(Op.AWAIT, Await)


class CloseReceiver(NamedTuple):
    """`unsent_from`: the deliveries from this token on never reached the client. None if all of them may have."""

    op: int
    partition: int
    channel: int
    broken: bool
    unsent_from: bytes | None


close_receiver = _message(Op.CLOSE_RECEIVER, CloseReceiver)


class Settle(NamedTuple):
    """`channels` are flat: channel, count of its tokens, ...

    From VERSION_WITH_RUNS on, a token may have four bytes more: a number of consecutive tokens.
    """

    op: int
    partition: int
    queue: int
    outcome: int
    channels: Sequence[int]
    tokens: Sequence[bytes]
    properties: dict[str, Any] | None


_SETTLE = _declare(Op.SETTLE, Settle, is_shareable=True)


def settle(
    partition: int,
    queue: int,
    outcome: int,
    channels: Sequence[int],
    tokens: Sequence[bytes],
    properties: dict[str, Any] | None,
) -> Settle:
    return _new(Settle, (_SETTLE, partition, queue, outcome, channels, tokens, properties))


class Request(NamedTuple):
    op: int
    partition: int
    number: int
    name: str
    queue: int
    arguments: list[Any]


request = _message(Op.REQUEST, Request)


class Restore(NamedTuple):
    """Messages that were received and deleted, but never written to the socket. `entries` are flat, as in DELIVER.

    From VERSION_WITH_ANSWERS_TO_RESTORE on, there may be a number behind the entries, of which there are no more than
    ITEMS_AT_ONCE then. As a request of this number it is answered, all or nothing: by REPLY with None, also if their
    entity was deleted, or by FAILED. Behind that may be the items of a `Mark` of one delivery. What the partition has
    noted under it is not put back again, so that the gateway can repeat what was not answered.
    """

    op: int
    partition: int
    queue: int
    entries: Sequence[Any]


restore = _message(Op.RESTORE, Restore)


def restore_as_request(
    partition: int, queue: int, entries: Sequence[Any], number: int, mark: "Mark | None" = None
) -> Restore:
    return _new(Restore, (Op.RESTORE, partition, queue, entries, number, *(mark or ())))


class Forward(NamedTuple):
    """`entries` are flat, 3 items a message: sequence number, message record, overlay.

    For a transfer queue the entity id is 0, and each overlay has the destination's id as
    `storage.records.Field.DESTINATION`.
    """

    op: int
    partition: int
    store_id: bytes
    source_partition: int
    source: int  # queue id
    entity_id: int
    entries: Sequence[Any]


forward = _message(Op.FORWARD, Forward)


class Forwarded(NamedTuple):
    """All messages up to this sequence number were taken over, except the refused ones: [error name, text,
    [sequence number, ...]].

    `busy` says why no more messages are taken over now, or is empty.
    """

    op: int
    source_partition: int
    source: int
    by: int  # the partition that answers
    up_to: int
    refused: Sequence[Any]
    busy: str


forwarded = _message(Op.FORWARDED, Forwarded)


class Remove(NamedTuple):
    """The partition of these entities has deleted them; the home is to remove them from the catalog."""

    op: int
    entity_ids: Sequence[int]


remove = _message(Op.REMOVE, Remove)


class Join(NamedTuple):
    """A worker has got the catalog: from now on it wants every change, for these partitions. It needs the rules of
    these subscriptions, and gets RULES.
    """

    op: int
    partitions: Sequence[int]
    entity_ids: Sequence[int]


join = _message(Op.JOIN, Join)


class Stores(NamedTuple):
    """Before JOIN: `ids` are [partition, id of its store], of all partitions of the worker. The home remembers them."""

    op: int
    ids: Sequence[Sequence[Any]]


stores = _message(Op.STORES, Stores)


class Replaced(NamedTuple):
    """The answer to STORES: these partitions had other stores before. If there are none, there is no answer."""

    op: int
    partitions: Sequence[int]


replaced = _message(Op.REPLACED, Replaced)


class Followed(NamedTuple):
    """All of the worker's partitions have the catalog of this version."""

    op: int
    version: int


followed = _message(Op.FOLLOWED, Followed)


class Unused(NamedTuple):
    """Nobody has used this partition's fragments of these entities for their intervals: see `broker.worker.unused`."""

    op: int
    partition: int
    entity_ids: Sequence[int]


unused = _message(Op.UNUSED, Unused)


class Answer(NamedTuple):
    """The answer to ASK. If the worker agrees, its fragments refuse all uses, also after a restart."""

    op: int
    entity_id: int
    number: int
    agrees: bool


answer = _message(Op.ANSWER, Answer)


class Hello(NamedTuple):
    """The first message of a worker. Those of version 1 had no more than the partitions: use `greeting`."""

    op: int
    version: int
    partitions: Sequence[int]
    oldest_version: int = 1
    identity: bytes = b""  # random bytes of this process
    namespace_id: bytes = b""  # that of the catalog; empty if the worker has never heard of it


hello = _message(Op.HELLO, Hello)


class Sent(NamedTuple):
    """So many deliveries are stored."""

    op: int
    channel: int
    deliveries: int


_SENT = _declare(Op.SENT, Sent, is_shareable=True)


def sent(channel: int, deliveries: int) -> Sent:
    return _new(Sent, (_SENT, channel, deliveries))


class Refused(NamedTuple):
    """REFUSED: so many deliveries are not stored, for this reason. UNSETTLED: so many are not settled."""

    op: int
    channel: int
    deliveries: int
    error: str  # name of a BrokerError
    text: str


refused = _message(Op.REFUSED, Refused)
unsettled = _message(Op.UNSETTLED, Refused)


class Opened(NamedTuple):
    """The receiver is open. A receiver of a session is told which session it got."""

    op: int
    channel: int
    session_id: str = ""
    locked_until_ms: int = 0


opened = _message(Op.OPENED, Opened)


class Closed(NamedTuple):
    """The receiver was refused or closed by the broker; or closed as asked, if both texts are empty."""

    op: int
    channel: int
    error: str = ""
    text: str = ""


closed = _message(Op.CLOSED, Closed)


class Drained(NamedTuple):
    op: int
    channel: int
    delivered: int  # since it was opened


drained = _message(Op.DRAINED, Drained)


class Available(NamedTuple):
    """The receiver watches, and there are messages for it. Its next GRANT, DRAIN or PASS is the answer."""

    op: int
    channel: int


available = _message(Op.AVAILABLE, Available)


class Settled(NamedTuple):
    """`channels` are flat: channel, count of its settlements, ..."""

    op: int
    channels: Sequence[int]


_SETTLED = _declare(Op.SETTLED, Settled, is_shareable=True)


def settled(channels: Sequence[int]) -> Settled:
    return _new(Settled, (_SETTLED, channels))


class Deliver(NamedTuple):
    op: int
    channel: int
    locked_until_ms: int
    entries: list[Any]


_DELIVER = _declare(Op.DELIVER, Deliver, is_shareable=True)


def deliver(channel: int, locked_until_ms: int, entries: list[Any]) -> Deliver:
    return _new(Deliver, (_DELIVER, channel, locked_until_ms, entries))


class DeliverRun(NamedTuple):
    """DELIVER of all `messages` of a run (`broker.runs`), with consecutive tokens.

    `numbers` is the first of consecutive sequence numbers, or 8 bytes (big-endian) for each.
    """

    op: int
    channel: int
    locked_until_ms: int
    token: bytes
    numbers: int | bytes
    delivery_count: int
    messages: int
    run: Run


deliver_run = _message(Op.DELIVER_RUN, DeliverRun, is_shareable=True)


class DeliverRuns(NamedTuple):
    """DELIVER_RUN of several channels: each of `deliveries` is [channel, locked_until_ms, the items behind these]."""

    op: int
    deliveries: Sequence[Any]


deliver_runs = _message(Op.DELIVER_RUNS, DeliverRuns, is_shareable=True)


class Reply(NamedTuple):
    op: int
    number: int
    result: Any


reply = _message(Op.REPLY, Reply)


class Failed(NamedTuple):
    op: int
    number: int
    error: str
    text: str


failed = _message(Op.FAILED, Failed)


class Catalog(NamedTuple):
    """All definitions; sent when a connection is made."""

    op: int
    version: int
    definitions: list[Any]


catalog = _message(Op.CATALOG, Catalog)


class Deleted(NamedTuple):
    """These entities were removed from the catalog, which now has this version."""

    op: int
    version: int
    entity_ids: Sequence[int]


deleted = _message(Op.DELETED, Deleted)


class Changed(NamedTuple):
    """The catalog has this version now, with these changes (`broker.catalog.changes`). A gateway is told when all
    workers have followed.
    """

    op: int
    version: int
    changes: list[Any]


changed = _message(Op.CHANGED, Changed)


class Rules(NamedTuple):
    """The rules that subscriptions have in the catalog of this version: pairs of an entity id and rule documents."""

    op: int
    version: int
    rules: list[Any]


rules = _message(Op.RULES, Rules)


class Ask(NamedTuple):
    """May this entity be deleted because nobody has used it? The number is that of the question."""

    op: int
    entity_id: int
    number: int


ask = _message(Op.ASK, Ask)


class Keep(NamedTuple):
    """The entity that was asked for stays."""

    op: int
    entity_id: int


keep = _message(Op.KEEP, Keep)


# Messages for one partition.
Command = (
    Send | SendRun | Mark | OpenReceiver | OpenSelective | Credit | Watch | Await | CloseReceiver | Settle | Request
    | Restore | Forward
)  # fmt: skip

# Messages for the home.
ForHome = Remove | Join | Stores | Followed | Unused | Answer

# Messages for no partition.
ForWorker = ForHome | TakesRuns | Beat

Message = (
    Command | ForWorker | Forwarded | Hello | Sent | Refused | Opened | Closed | Drained | Available | Settled | Deliver
    | DeliverRun | DeliverRuns | Reply | Failed | Catalog | Deleted | Changed | Rules | Ask | Keep | Replaced
)  # fmt: skip


def pack_up_to_run(packer: msgpack.Packer, message: "SendRun | DeliverRun") -> None:
    """Pack a message without its last item, the run; behind this come `run_head` and the run, without a copy."""
    packer.pack_array_header(len(message))
    for item in message[:-1]:
        packer.pack(item)


def run_head(run: Run) -> bytes:
    """What msgpack has in front of so many bytes (bin 32)."""
    return _bin_head(0xC6, len(run))


def greeting(hello: Hello) -> Hello:
    """Return the greeting with what a worker of an older version does not say."""
    said: list[Any] = list(hello)
    return Hello(*said[: len(Hello._fields)])


def incompatible(hello: Hello) -> str:
    """Why this process cannot talk to a worker that greets so; empty if it can."""
    if hello.version < OLDEST_VERSION or hello.oldest_version > VERSION:
        return (
            f"it speaks the versions {hello.oldest_version} to {hello.version} of the inner protocol, and this process "
            f"{OLDEST_VERSION} to {VERSION}: upgrade the older of the two"
        )
    return ""


def is_shareable(message: Message) -> bool:
    """True if another part of this process can have the message itself, because nobody changes an object in it.

    Messages that there are many of are shareable: they have numbers, bytes, overlays, and lists made for them. The
    others must be packed and unpacked.
    """
    return message[0] in _shareable and not (message[0] == _SETTLE and message[-1])


class Extra(IntEnum):
    """Keys of an incoming message's extra map, each present only when the message has it."""

    SCHEDULED_MS = 1
    SESSION_ID = 2
    PARTITION_KEY = 3
    MESSAGE_ID = 4  # encoded AMQP value
    PING = 5
    DESTINATION = 6  # for a transfer queue: the destination's name, in lower case


class Outcome(IntEnum):
    ACCEPTED = 0  # complete
    ABANDONED = 1  # modified: available again, one failed delivery more
    DEFERRED = 2  # modified, undeliverable here
    DEAD_LETTERED = 3  # rejected
    RELEASED = 4  # available again, no failed delivery


class SendOperation(NamedTuple):
    """Sends in a transaction, to one queue."""

    queue: int
    quiet: bool  # the client may not know of errors, so an error rolls the transaction back
    deliveries: list[list[Any]]  # the messages of each


class SettleOperation(NamedTuple):
    """Settlements in a transaction, of messages of one queue."""

    queue: int
    quiet: bool
    tokens: list[bytes]
    outcome: int
    properties: dict[str, Any] | None = None
    receiver: Hashable = None  # its channel on the wire, its key in a partition; given if the queue requires sessions


class SendRunOperation(NamedTuple):
    """Sends a run, whose messages are a delivery each, to a worker of VERSION_WITH_RUNS_IN_TRANSACTIONS."""

    queue: int
    quiet: bool
    messages: int
    run: bytes


Operation = SendOperation | SettleOperation | SendRunOperation

_OPERATIONS = (SendOperation, SettleOperation, SendRunOperation)


def pack_operations(operations: Iterable[Operation]) -> list[Any]:
    return [[_OPERATIONS.index(type(operation)), operation] for operation in operations]


def unpack_operations(packed: Iterable[Any]) -> list[Operation]:
    return [_OPERATIONS[kind](*fields) for kind, fields in packed]


# A command with more items is cut into several commands.
ITEMS_AT_ONCE = 256
_RESTORE_ITEMS = len(Restore._fields)  # of one that is not answered


def cut(command: Command | ForWorker) -> tuple[Command | ForWorker, Command | None]:
    """The command with its first ITEMS_AT_ONCE items, if they are independent, and one with the rest, if any."""
    if isinstance(command, Send):
        if command.op == _SEND and len(command.messages) > ITEMS_AT_ONCE:
            first, rest = command.messages[:ITEMS_AT_ONCE], command.messages[ITEMS_AT_ONCE:]
            return command._replace(messages=first), command._replace(messages=rest)
    elif isinstance(command, Settle):
        if len(command.tokens) > ITEMS_AT_ONCE:
            first, rest = command.tokens[:ITEMS_AT_ONCE], command.tokens[ITEMS_AT_ONCE:]
            channels, others = cut_channels(command.channels)
            return command._replace(tokens=first, channels=channels), command._replace(tokens=rest, channels=others)
    elif isinstance(command, Restore) and len(command) == _RESTORE_ITEMS:
        end = ITEMS_AT_ONCE * ENTRY
        if len(command.entries) <= end:
            return command, None
        return command._replace(entries=command.entries[:end]), command._replace(entries=command.entries[end:])
    return command, None


def cut_channels(channels: Sequence[int]) -> tuple[list[int], list[int]]:
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


items_of = partial(msgpack.unpackb, strict_map_key=False)


def unpack(
    frame: bytes | memoryview, items_of: Callable[[bytes | memoryview], Iterable[list[Any]]] = items_of
) -> list[Message]:
    """The messages of a frame that another process of this namespace made. Kinds that are unknown are left out."""
    kinds, make = _kinds, tuple.__new__  # calling the class costs twice as much
    messages: list[Message] = []
    for items in items_of(frame):  # no comprehension: most frames have few messages
        try:
            messages.append(make(kinds[items[0]], items))
        except KeyError:  # a later version's, which we have not said that we understand
            continue
    return messages
