"""The extension of `protocol/native`: see `protocol.extension`."""

from collections.abc import Callable
from typing import Any, Protocol, SupportsBytes

from typing_extensions import Buffer

# -- a partition's loops over usual messages; refs, held messages and entry items are those of `broker.partition`

def store_run(
    run: bytes | memoryview,
    enqueued_ms: int,
    expires_ms: int,
    first_number: int,
    first_message_id: int,
    session: int | None,
) -> tuple[list[tuple[bytes, bytes]], list[bytes], list[tuple[int, int, int, Any]], list[int] | None] | None:
    """Items of MESSAGES, values of entries, and refs of the messages of a run. Raises ValueError for what is no run.

    The last is when each message expires, if some have a time to live of their own, which the run has in place of that
    time; the others expire at `expires_ms`, and all of them at the latest.
    `session`: the key of their session ids in overlays. None if a message has no group-id that is a short string.
    """

class Entries:
    """Items of QUEUE, which are made when somebody asks for them.

    Each of the queues, (queue id, first number), has these values with consecutive numbers. The length is the number of
    all items.
    """

    def __init__(self, values: list[bytes], queues: list[tuple[int, int]]) -> None: ...
    @property
    def begin(self) -> tuple[bytes, int] | None:
        """The prefix of the keys of the only queue, and its first number; None if there are several."""

    def items(self) -> list[tuple[bytes, bytes]]: ...
    def part(self, begin: int, end: int) -> Entries:
        """These of the only queue."""

    def __len__(self) -> int: ...

class Keys:
    """Keys that end with a number, of QUEUE or MESSAGES, which are made when somebody asks for them.

    `ranges`: (first number, how many follow each other from there on), in the order in which they were added.
    """

    def __init__(self, prefix: bytes, ranges: list[tuple[int, int]]) -> None: ...
    @property
    def prefix(self) -> bytes: ...
    @property
    def ranges(self) -> list[tuple[int, int]]: ...
    @property
    def highest(self) -> bytes:
        """The highest key; empty if there is none."""

    def keys(self) -> list[bytes]: ...
    def of(self, ranges: list[tuple[int, int]]) -> Keys:
        """Those with the same prefix and these ranges."""

    def __len__(self) -> int: ...

def digests_of(run: bytes | memoryview) -> list[bytes] | None:
    """Digests of the message-ids of a run's messages, as in duplicate detection; None if one has no short string."""

def refs_of(items: list[tuple[bytes, bytes]]) -> list[tuple[int, int, int, None]] | None:
    """Of items of QUEUE; None if one has an overlay or is damaged."""

def run_of_refs(refs: list[Any]) -> tuple[int, int] | None:
    """The first number and each one's delivery count; None if they are no consecutive numbers with the same count."""

def split(refs: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Their sequence numbers, and their delivery counts."""

def are_whole(records: list[bytes | None]) -> bool:
    """True if the checksums of all records are right."""

def take_usual(
    refs: list[Any],
    records: list[bytes | None],
    never: int,
    weight_bytes: int,
    limit_bytes: int,
    now_ms: int,
    expire: bool,
) -> tuple[list[tuple[Any, bytes, int]], int] | None:
    """(ref, record, time when it expires) of the first messages, and their bytes with `weight_bytes` more for each.

    At least one, and up to the first with which the limit is reached. None if one of these is missing, has an overlay,
    or has expired. Without `expire`, none expires.
    """

def lock(
    taken: list[tuple[Any, bytes, int]],
    prefix: bytes,
    first_counter: int,
    until_ms: int,
    place: int,
    holder: Any,
    held: dict[bytes, Any],
    tokens: dict[bytes, None],
) -> list[Any]:
    """Lock the messages, with consecutive tokens. Returns entry items."""

def run_of_taken(
    taken: list[tuple[Any, bytes, int]], prefix: bytes, first_counter: int, never: int
) -> tuple[list[Any], list[Any], list[int]] | None:
    """Entry items, with consecutive tokens, refs, and bytes of the records; None if one of the messages expires."""

def give(
    batch: list[tuple[Any, Any, list[Any]]],
    records: list[bytes | None],
    weight_bytes: int,
    limit_bytes: int,
    prefix: bytes,
    first_counter: int,
) -> tuple[list[list[Any]], list[Any], list[int], list[Any], int] | None:
    """The messages of the first sessions of the batch, until their bytes as in `take_usual` reach the limit.

    The batch is (session, receiver, refs) each; the tokens are consecutive. Returns entry items of each session; then
    of all messages refs, bytes of the records, and sessions; and the bytes. None if a message is missing, expires, or
    has more in its overlay than the session, which the items leave out.
    """

def held_of(
    refs: list[Any], sizes: list[int], never: int, place: int, until_ms: int, holders: Any
) -> list[tuple[Any, int, int, int, int, Any]]:
    """Held messages; `holders` is the holder of all, or a list of one for each."""

def unlock(
    held: dict[bytes, Any], tokens: list[bytes], now_ms: int, never: int, deferred: set[int], expiring: set[int]
) -> list[Any]:
    """Remove the locks of these tokens; None in place of one that is not held, or has ended."""

def keys_of(messages: list[Any], queue_id: int, never: int, timer: int) -> tuple[Keys, Keys, list[bytes], int] | None:
    """Keys of QUEUE, MESSAGES and DUE, and bytes of held messages; None if one is not available."""

def run_of(records: list[bytes]) -> bytes: ...
def parts_of(entries: list[Any]) -> list[tuple[bytes, int | bytes, int, int, bytes] | list[Any]] | bool | None:
    """See `broker.runs`; False if a run is large."""

def together(
    deliveries: list[tuple[tuple[Any, int], int, list[Any]]], largest_bytes: int
) -> list[tuple[int, int, tuple[bytes, int | bytes, int, int, bytes]]] | None:
    """See `broker.runs`; no run is larger than `largest_bytes`."""

def ranges_of(ranges: list[bytes]) -> list[bytes]:
    """See `broker.runs`."""

def tokens_of(ranges: Any) -> list[bytes]:
    """Each token, of a sequence of tokens and ranges of tokens: see `broker.runs`."""

def pack_into(value: Any, buffer: Any, at: int) -> int | None:
    """Write a value as msgpack into a buffer from `at` on, as `msgpack.Packer` does. Returns the offset behind it.

    None if there is no room, or a kind of value is not known; then the buffer may be changed behind `at`.
    """

def delete_all(
    fresh: dict[bytes, bytes], changed: dict[bytes, bytes | None], keys: tuple[bytes, ...], highest: bytes
) -> bytes:
    """See `storage.log.changes.YoungTable.delete`. Returns the highest changed key, or `highest` if that is higher."""

# -- digests of message ids, and rows that begin with one: see `storage.seen_runs`

def passing(digests: list[bytes], bits: bytearray, shift: int) -> list[bytes]:
    """The digests that the filter does not exclude."""

def add_to_filter(bits: bytearray, shift: int, rows: list[bytes]) -> None: ...
def seen_rows(digests: list[bytes], end_ms: int, first_number: int) -> list[bytes]:
    """As `storage.records.encode_seen` of each, with consecutive numbers."""

def by_first_byte(rows: list[bytes]) -> list[list[bytes]]:
    """For each first byte, the rows that begin with it."""

# -- the journal: turns as `storage.log.frames` has them, in whose payload a place is a start and an end

def skim(payload: bytes | memoryview) -> tuple[int, list[tuple[int, list[tuple[int, int, Any]]]], Any] | None:
    """Time in ms, changes, and the place of the hints; operations have the place of their items. None for no turn."""

def entries_of(payload: bytes | memoryview, places: list[Any]) -> list[tuple[int, int, int]] | None:
    """Of items of QUEUE: the queue id of neighbours, their number, and the lowest sequence number; None for others."""

def numbers_of(payload: bytes | memoryview, places: list[Any]) -> list[tuple[int, int, int]] | None:
    """Of keys of QUEUE: the queue id, the first sequence number, and how many follow each other; None for others."""

class Columns:
    """See `storage.journal.columns`. The length is the number of rows."""

    def append(self, *fields: Any) -> None: ...
    def end_rows(self, numbers: Any, counts: Any) -> None: ...
    def end_run(self, first: int, rows: int, count: int) -> None: ...
    def enter(
        self,
        payload: bytes | memoryview,
        entries: list[Any],
        records: list[Any],
        shown: list[tuple[int, bool, bool]],
        properties_of: Callable[[bytes], tuple[str | None, ...]],
    ) -> bool:
        """Add rows of new messages: `entries` and `records` are places of items of QUEUE and MESSAGES.

        `shown`: of neighbours their number, and whether they have rows, and records in these. `properties_of` says what
        a record has that is not usual. False, and no rows, if an entry has an overlay, is scheduled, or has no record.
        """

    def take_column(self, index: int) -> tuple[int, Buffer | None, Buffer, Buffer | None] | None:
        """The number of nulls, and the buffers of Arrow's array, which the column has no more.

        None if all values are null.
        """

    def __len__(self) -> int: ...

Buffers = tuple[int, Buffer | None, Buffer, Buffer | None]
"""The number of nulls, and Arrow's buffers: validity, offsets, and bytes where there are any."""

def record_columns(
    validity: Buffer | None, offsets: Buffer, data: Buffer, first: int, count: int, wanted: int
) -> tuple[list[int], Buffers, Buffers, Buffers, int, Buffers, Buffers]:
    """What stored records show, as `pyspark_peeklock.records`: the buffers are those of Arrow's array of binaries.

    `wanted`: the sum of 1 body, 2 reply-to, 4 application properties. Returns the rows that are unusual, which are
    null here; body, reply-to, and application properties, which are offsets of pairs; the number of these, keys,
    values. Raises ValueError for buffers that have less, OverflowError for more than 2 GiB.
    """

# -- messages and frames; addresses are those of proton's objects

def setup(functions: dict[str, int], message_id_prefix: bytes) -> None: ...
def transfer(data: bytes, at: int, end: int) -> tuple[int, int, int | None, bool, bool] | None:
    """Of the transfer whose frame begins at `at`: where its performative ends, handle, delivery-id, settled, more.

    None if its message format is not 0, it has a state, is resumed or aborted, is not here up to its payload, or has an
    unusual encoding.
    """

def walk(
    data: bytes,
    at: int,
    largest: int,
    form: tuple[bytes, bytes, bytes, int],
    dispositions: bool,
    next_id: int,
    few_deliveries: int = 0,
) -> tuple[int, int]:
    """The offset behind usual frames of this form from `at` on, and the next delivery-id: see `frames_walk`.

    `form` is its head, its tag's head, the rest behind the tag, and the number of bytes of a delivery-id. Dispositions
    for more than `few_deliveries` are not usual, unless that is 0.
    """

def take_apart(message: bytes, message_id: bytes | None) -> tuple[bytes, bytes, int | None] | None:
    """Layout, stored bytes and time to live, as `protocol.message.intake.take_apart`; None if it is not usual."""

def render(
    record: bytes,
    sequence_number: int,
    delivery_count: int,
    lock_token: bytes | None,
    locked_until_ms: int,
    keys: int = 0,
    is_copy: bool = False,
) -> bytes | None:
    """The message as a receiver gets it, as `protocol.message.rendering.render`; None if the record is not usual.

    `keys` are those of `broker.namespace.fragments.Keys`: if not 0, the message says its partition and its key.
    `is_copy`: it is a subscription's, and says its number as that at which it was enqueued, too.
    """

def window(session: int) -> int:
    """How many transfers the peer of proton's session at this address takes, besides those that are written."""

def accept_all(addresses: bytes) -> None:
    """Accept and settle these deliveries of proton: see `Incoming.take_pending`."""

def settle_all(addresses: bytes, state: int, fields: bytes) -> None:
    """Settle these deliveries of proton with a state that it does not know, with these encoded fields."""

class Sender(Protocol):
    """The owner of an `Incoming`."""

    def on_gathering(self) -> None:
        """The first message has gathered since `take_run`."""

    def post_early(self) -> None:
        """More messages have gathered than should wait for the end of the turn, or the next is in another transaction.

        These must be taken.
        """

class Incoming:
    """Deliveries that come in on a link. Usual messages gather; `pending` deliveries wait for an outcome, in order.

    The peer has settled a delivery of address 0. The length is the number of pending deliveries.
    """

    def __init__(
        self,
        link: int,
        owner: Sender,
        max_message_bytes: int,
        gives_ids: bool = False,
        needs_id: bool = False,
        takes_sessions: bool = False,
        needs_session: bool = False,
        takes_transactions: bool = False,
    ) -> None:
        """`gives_ids`: a message without a message-id gets one. A message without what it needs is unusual, and one
        with a group-id, or in a transaction, that is not taken.
        """

    @property
    def count(self) -> int:
        """The number of messages that have gathered."""

    @property
    def message_bytes(self) -> int:
        """Their bytes, as they came."""

    @property
    def transaction(self) -> bytes | None:
        """The id of their transaction, if they are in one."""

    def take_run(self) -> bytes:
        """The messages that have gathered, as a run: see `broker.runs`."""

    def take_parts(self) -> bytes | None:
        """What has come of a delivery of several transfers that is not complete, which Python goes on with."""

    def take_pending(self, count: int) -> bytes:
        """The last pending deliveries, as numbers of 8 bytes in the machine's order, which are pending no more."""

    def append(self, delivery: int) -> None: ...
    def popleft(self) -> int: ...
    def pop(self) -> int: ...
    def accept(self, count: int) -> None:
        """The first deliveries are accepted."""

    def clear(self) -> None:
        """The link has ended: forget what has gathered and what waits for an answer."""

    def __len__(self) -> int: ...

class Receiver(Protocol):
    """The owner of an `Outgoing`."""

    def on_accepting(self) -> None:
        """The first accepted delivery has gathered since `take_accepted`."""

    def post_accepted(self) -> None:
        """Those that have gathered must be taken, because the next is not like them."""

class Outgoing:
    """Deliveries that go out on a link, accepted ones that have gathered, and outcomes that wait for their answer.

    These wait in one line, that of partition 0; `by_partition`, in a line for each partition, which the first two bytes
    of tokens say.
    """

    def __init__(
        self,
        link: int,
        owner: Receiver,
        settled: bool,
        by_partition: bool = False,
        keys: int = 0,
        is_copy: bool = False,
    ) -> None:
        """`keys`, `is_copy`: see `render`."""

    @property
    def count(self) -> int:
        """The number of accepted deliveries that have gathered."""

    @property
    def unsettled(self) -> int:
        """The number of deliveries without an outcome."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages that are not in the output yet."""

    def take_accepted(self) -> tuple[int, bool, list[bytes], bytes | None, bytes]:
        """The count of those that have gathered, True if the peer has settled them, their tokens, and two more.

        A token with four more bytes stands for as many consecutive tokens. If the peer has accepted them in a
        transaction, the fourth is its id, and the last has those that wait for an answer, which are in no line: see
        `Incoming.take_pending`.
        """

    def sent(self, delivery: int) -> None:
        """A delivery was sent by Python, and waits for its outcome."""

    def is_sent(self, delivery: int) -> bool: ...
    def told(self, delivery: int) -> bool:
        """Python takes the outcome of the delivery. False if it waited for none."""

    def last_tags(self, count: int) -> list[bytes]:
        """The tags of the last deliveries that were sent and have no outcome, in order."""

    def append(self, partition: int, delivery: int, outcome: int) -> None: ...
    def popleft(self, partition: int) -> tuple[int, int]: ...
    def settle(self, partition: int, count: int) -> tuple[int, int, int, int, int]:
        """The first outcomes are applied: settle their deliveries. Returns the number of each outcome."""

    def clear(self, partition: int) -> None:
        """Forget the outcomes that wait for an answer."""

    def pending(self, partition: int) -> int:
        """The number of outcomes that wait for an answer."""

    def end(self) -> int:
        """The link ends with its deliveries. Returns how many had no outcome."""

class Events(Protocol):
    """The engine of a `Pump`."""

    def on_event(self) -> None:
        """Handle proton's first event, and leave it to be popped."""

    def on_unusual(self, address: int, payload: bytes, settled: bool) -> None:
        """A message that only Python takes, and the address of its delivery. It is behind those that have gathered."""

    def take_part(self, address: int, size: int) -> bool:
        """True if the Incoming of the link at this address may keep so many bytes of an unfinished delivery."""

    def forget_parts(self, size: int) -> None:
        """A delivery of which so many bytes were kept is complete."""

    def on_parts(self, address: int) -> None:
        """Take the parts of the link's Incoming. What comes behind them is for Python."""

class Pump:
    """Moves frames between a connection's bytes and proton, with the links that were added."""

    def __init__(self, transport: int, collector: int, engine: Events) -> None: ...
    @property
    def finished(self) -> bool:
        """True if nothing will be written any more, as of the last `pull`."""

    def push(self, data: bytes, at: int, stop: int) -> int:
        """Give proton the bytes from `at` to `stop`, and handle their events.

        Returns `stop`, or an offset before that where Python had much to do: push again from there. -1 if proton found
        a fault.
        """

    def dispatch(self) -> None:
        """Handle proton's events."""

    piece_bytes: int
    """Output that is larger comes in pieces, which may be as much larger as a frame is; a megabyte."""

    def pull(self) -> bytes | list[memoryview]:
        """All output, in whole frames; pieces of whole frames if it is large."""

    def write_ahead(self) -> None:
        """Let proton write what it can now; the next `pull` has it. Events that nobody has handled are forgotten."""

    def deliver(
        self,
        outgoing: Outgoing,
        run: SupportsBytes | memoryview,
        at: int,
        count: int,
        token: bytes,
        numbers: int | bytes,
        delivery_count: int,
        locked_until_ms: int | None,
    ) -> tuple[int, int] | None:
        """Send `count` messages of the run from offset `at` on, on the link of `outgoing`, with consecutive tokens.

        A run that is no bytes and no memoryview is put together.

        `numbers` is the first of consecutive sequence numbers, or 8 bytes for each.

        Returns the offset behind them, and when the first was enqueued (ms, 0 before 1970). None if nothing is sent:
        they are not usual, or some take several frames, and the session's window is too small for all frames, or the
        messages are deleted when they are sent.
        """

    def add(self, link: Incoming | Outgoing, channel: int, handle: int) -> None:
        """`channel` and `handle` are those of the side that sends: the peer's of an Incoming, ours of an Outgoing."""

    def remove(self, link: Incoming | Outgoing) -> None: ...
    def close(self) -> None: ...
