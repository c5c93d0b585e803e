"""Whatever a client can make a gateway ask of a partition, only a BrokerError comes out, and the partition goes on.

Requests and messages are AMQP values over the whole ranges of their types. The gateway's own readers make of them what
they send to a worker, and it goes through msgpack as it does on its way.
"""

import contextlib
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import requests, wire
from broker.errors import BrokerError
from broker.gateway.links.outcomes import transactional_outcome
from broker.gateway.namespace import Entity
from broker.gateway.nodes.management import ManagementRequests
from broker.metrics import EntityMetrics
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.namespace.fragments import Keys
from broker.partition.partition import Partition
from broker.partition.requests import Underway
from broker.partition.settings import PartitionSettings
from broker.runs import count_of
from broker.wire import (
    Extra,
    Outcome,
    SendOperation,
    SendRunOperation,
    SettleOperation,
    pack_operations,
    unpack_operations,
)
from protocol import session_filter
from protocol.addresses import Part
from protocol.codec import (
    Array,
    Byte,
    Char,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    array,
    decode_exactly,
    encode,
)
from protocol.errors import ProtocolError
from protocol.lock_tokens import uuid_of
from protocol.message.intake import take_apart
from protocol.nodes.management import _READERS, parse
from protocol.nodes.request_message import Request
from protocol.symbols import DELAY, SESSION_FILTER, TIMEOUT
from storage.queue_ids import Part as QueuePart
from storage.queue_ids import queue_id_of
from storage.records import NEVER, STORE_ID_KEY, Field, encode_document, encode_message
from storage.store import Table
from tests.examples import examples
from tests.partition.accounts import assert_counted_rightly
from tests.partition.driver import START_MS, deliveries, run
from tests.partition.driver import define as define_entity
from tests.partition.hinted_store import HintedStore

ENTITIES: dict[int, Description] = {
    1: QueueDescription(name="plain"),
    2: QueueDescription(name="sessions", requires_session=True),
    3: QueueDescription(name="once", requires_duplicate_detection=True, default_message_time_to_live_ms=5000),
    4: QueueDescription(name="moves", forward_to="once"),
    5: QueueDescription(name="idle", auto_delete_on_idle_ms=300_000),
    10: TopicDescription(name="news"),
    11: SubscriptionDescription(topic="news", name="all", dead_lettering_on_message_expiration=True),
    12: SubscriptionDescription(topic="news", name="in-sessions", requires_session=True),
}
TOKEN = uuid_of(bytes(16))
PLAIN, SESSIONS = queue_id_of(1), queue_id_of(2)

# -- AMQP values

EDGES = [0, 1, 2, 100, 127, 255, 256, 10_000, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TIMES = [0, START_MS - 1, START_MS, START_MS + 1, START_MS + 60_000, 253_402_300_799_999, -62_135_596_800_000]


def integers(kind: type, low: int, high: int) -> st.SearchStrategy[Any]:
    edges = [each for edge in (*EDGES, *TIMES) for each in (edge, -edge) if low <= each <= high]
    return (st.sampled_from(edges) | st.integers(low, high)).map(kind)


INTEGERS = st.one_of(
    integers(UByte, 0, 2**8 - 1),
    integers(UShort, 0, 2**16 - 1),
    integers(UInt, 0, 2**32 - 1),
    integers(ULong, 0, 2**64 - 1),
    integers(Byte, -(2**7), 2**7 - 1),
    integers(Short, -(2**15), 2**15 - 1),
    integers(Int, -(2**31), 2**31 - 1),
    integers(Long, -(2**63), 2**63 - 1),
    integers(Timestamp, -(2**63), 2**63 - 1),
)
EXTREMES = st.sampled_from(
    [Long(2**63 - 1), ULong(2**63), ULong(2**64 - 1), UInt(2**32 - 1), Int(2**31 - 1), Int(-1), Long(-(2**63))]
)
COUNTS = st.integers(1, 9).map(Int) | EXTREMES | INTEGERS
STRINGS = st.sampled_from(["", "a", "b", "all", "$Default", "x" * 128, "\U0001f600" * 64, "\0", "é" * 130]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)
SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    STRINGS,
    STRINGS.filter(str.isascii).map(Symbol),
    st.binary(max_size=20),
    st.uuids(),
    st.floats(),
    st.floats(width=32).map(Float),
    st.characters(exclude_categories=["Cs"]).map(Char),
    st.binary(min_size=16, max_size=16).map(Decimal128),
)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(STRINGS, inner, max_size=3),
        inner.map(lambda value: Described(Symbol("x:y"), value)),
    ),
    max_leaves=4,
)

# -- messages and requests as clients encode them

KEYS = ["x-opt-scheduled-enqueue-time", "x-opt-partition-key", "x-opt-via-partition-key"]


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Most of them well formed, with one of a few session ids or none."""
    sections = []
    if draw(st.booleans()):
        ttl = draw(st.none() | integers(UInt, 0, 2**32 - 1))
        sections.append(Described(0x70, [draw(st.booleans()), draw(st.none() | st.just(UByte(200))), ttl]))
    if draw(st.booleans()):
        time_ms = draw(integers(Timestamp, -(2**63), 2**63 - 1))
        notes: dict[Any, Any] = {Symbol(KEYS[0]): time_ms}
        notes |= draw(st.dictionaries(st.sampled_from(KEYS[1:]).map(Symbol), STRINGS, max_size=1))
        sections.append(Described(0x72, notes))
    if draw(st.booleans()):
        fields: list[Any] = [None] * 13
        fields[0] = draw(st.none() | STRINGS | st.uuids() | st.binary(max_size=3) | integers(ULong, 0, 2**64 - 1))
        fields[6] = draw(st.sampled_from([None, None, Symbol("application/vnd.ms-servicebus-ping")]))
        fields[8:10] = [draw(st.none() | integers(Timestamp, -(2**63), 2**63 - 1)) for _ in range(2)]
        fields[10] = draw(st.sampled_from([None, "a", "b", "", "é" * 128]))
        sections.append(Described(0x73, fields))
    if draw(st.booleans()):
        sections.append(Described(0x74, draw(st.dictionaries(STRINGS, SIMPLE, max_size=3))))
    sections.append(Described(0x75, draw(st.binary(max_size=10))))
    return b"".join(map(encode, sections))


NAMES = {
    "lock-tokens": None,
    "from-sequence-number": COUNTS,
    "message-count": COUNTS,
    "session-id": st.sampled_from(["a", "b", "", "none"]) | STRINGS,
    "omit-message-body": st.booleans(),
    "messages": st.lists(messages().map(lambda message: {"message": message}), min_size=1, max_size=3),
    "sequence-numbers": st.lists(st.integers(1, 7).map(Long), min_size=1, max_size=2)
    | st.lists(INTEGERS, min_size=1, max_size=4),
    "receiver-settle-mode": st.sampled_from([UInt(0), UInt(1)]),
    "peeklock:active": st.booleans(),
    "disposition-status": st.sampled_from(["completed", "abandoned", "suspended", "defered"]),
    "states": st.sampled_from(["active", "deferred,scheduled", "scheduled,scheduled", "active,lost", ","]) | STRINGS,
    "deadletter-reason": STRINGS,
    "deadletter-description": STRINGS,
    "properties-to-modify": st.dictionaries(STRINGS | st.just(DELAY), SIMPLE, max_size=3)
    | st.fixed_dictionaries({DELAY: COUNTS | st.sampled_from([0.0, 50.0, -1.0, 1e300])}),
    "enqueued-time-utc": EXTREMES | INTEGERS,
    "session-state": st.binary(max_size=30),
    "last-updated-time": EXTREMES | INTEGERS,
    "skip": COUNTS,
    "last-session-id": st.sampled_from(["a", "b", "", "none"]) | STRINGS,
    "top": COUNTS,
    "rule-name": STRINGS,
    "rule-description": st.fixed_dictionaries(
        {},
        optional={
            "sql-filter": st.sampled_from(["1=1", "a < b", "sys.Label LIKE '%x'", "(", "a"]).map(
                lambda text: {"expression": text}
            ),
            "correlation-filter": st.fixed_dictionaries(
                {}, optional={"label": STRINGS, "properties": st.dictionaries(STRINGS, SIMPLE, max_size=2)}
            ),
            "sql-rule-action": st.sampled_from(["SET a = 1", "SET sys.Label = b", "x"]).map(
                lambda text: {"expression": text}
            ),
        },
    ),
    "count": COUNTS,
    "after": STRINGS,
}


def fields_of(operation: str) -> list[str]:
    """Which fields the reader of an operation asks for."""
    read: dict[str, None] = {}

    class Noted(dict[Any, Any]):
        def get(self, name: Any, default: Any = None) -> Any:
            read[name] = None
            return super().get(name, default)

    full = {"lock-tokens": array(UUID, [TOKEN]), "sequence-numbers": [Long(1)], "messages": [{"message": b""}]}
    full |= dict.fromkeys(("from-sequence-number", "message-count", "enqueued-time-utc", "skip", "top", "count"), 1)
    full |= {"receiver-settle-mode": 0, "session-id": "a", "rule-name": "a", "disposition-status": "completed"}
    parse(Request("1", "me", {"operation": operation}, Noted(full)))
    return list(read)


# Changes of entities are for the namespace's home; tests/configuration/test_catalog_of_workers.py draws them.
FIELDS_OF = {operation: fields_of(operation) for operation in _READERS if not operation.endswith("-entity")}


@st.composite
def bodies(draw: st.DrawFn, operation: str, tokens: list[Any]) -> dict[str, Any]:
    """Of a request that could be meant; in some, one of the arguments is anything, or is missing."""
    odd = draw(st.none() | st.sampled_from(sorted(NAMES)))
    names = [name for name in FIELDS_OF[operation] if name != "session-id" or draw(st.booleans())]
    body = {}
    for name in names:
        usual = NAMES[name]
        if usual is None:
            usual = st.lists(st.sampled_from(tokens) | st.uuids(), min_size=1, max_size=3, unique=True)
        if name != odd:
            body[name] = draw(usual)
        elif draw(st.booleans()):
            body[name] = draw(VALUES)
    as_array = draw(st.booleans())
    for name in ("lock-tokens", "sequence-numbers"):
        items = body.get(name)
        if as_array and isinstance(items, list) and items:
            body[name] = in_array(items)
    return body


def in_array(items: list[Any]) -> list[Any] | Array:
    """An array of these, if they are of one type that an array can have."""
    descriptor, values = None, items
    if all(isinstance(item, Described) for item in items):
        descriptor, values = items[0].descriptor, [item.value for item in items]
    kinds = {type(value) for value in values}
    return Array(kinds.pop(), tuple(values), descriptor) if len(kinds) == 1 and Described not in kinds else items


# -- the partition, and what stands between it and the client


def on_the_wire(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value), strict_map_key=False)


class World:
    """A partition with some of everything; commands as a worker hands them on."""

    def __init__(self) -> None:
        self.store = HintedStore()
        self.now_ms = START_MS
        for entity_id, description in ENTITIES.items():
            define_entity(self.store, entity_id, description)
        self.store.put(Table.META, STORE_ID_KEY, encode_document(b"this one"))
        self.store.commit()
        self.starts = 0
        self.start()
        for entity_id in (11, 12):
            rule = {"name": "$Default", "filter": {"kind": "true"}, "action": None}
            self.partition.request(queue_id_of(entity_id), requests.AddRule(rule), self.now_ms)
        body = encode(Described(0x75, b"x"))
        in_session = encode(Described(0x73, [None] * 10 + ["a"])) + body
        in_future = {Symbol(KEYS[0]): Timestamp(START_MS + 60_000)}
        later = [encode(Described(0x72, in_future)) + each for each in (body, in_session)]
        for queue_id, message, scheduled in ((PLAIN, body, later[0]), (SESSIONS, in_session, later[1])):
            sent = [list(take_apart(each, True)) for each in (*[message] * 5, scheduled)]
            self.partition.send(queue_id, sent, self.now_ms)
        self.partition.send(
            queue_id_of(10), [list(take_apart(each, True)) for each in (in_session, later[1])], START_MS
        )
        for queue_id, session in ((PLAIN, None), (SESSIONS, ["a", 0])):
            self.partition.open_receiver(queue_id, queue_id, False, self.now_ms, session)
            self.partition.grant(queue_id, 4)
        self.turn()
        tokens = [each.token for each in self.received[PLAIN]]
        self.partition.settle(PLAIN, tokens[:1], Outcome.DEFERRED, None, self.now_ms)
        self.partition.settle(PLAIN, tokens[1:2], Outcome.DEAD_LETTERED, None, self.now_ms)
        self.turn()

    def start(self) -> None:
        self.starts += 1
        self.received: dict[Any, list[Any]] = {}
        self.deleted: list[list[Any]] = []  # entry items, with their queue, of what was received and deleted
        self.transactions: dict[str, bool] = {}
        self.partition = Partition(
            5,
            self.store,
            now_ms=self.now_ms,
            incarnation=self.starts.to_bytes(6, "big"),
            settings=PartitionSettings(
                window=4, session_window=2, step=3, peek_max=5, request_bytes=500, abandon_delays=True
            ),
            home=lambda name: 6 if name == "elsewhere" else 5,
        )

    @property
    def tokens(self) -> list[bytes]:
        return [each.token for found in self.received.values() for each in found] + [bytes(16)]

    def turn(self) -> None:
        for _ in range(100):
            due_ms = self.partition.next_timer_ms()
            if due_ms is not None and due_ms <= self.now_ms:
                self.partition.advance(self.now_ms)
            pumped = self.partition.pump(self.now_ms)
            for receiver, until_ms, items in pumped.deliveries:
                if until_ms:
                    self.received.setdefault(receiver, []).extend(deliveries(items))
                else:
                    self.deleted.append([receiver, items])
            self.partition.commit()
            due_ms = self.partition.next_timer_ms()
            if not pumped.more and (due_ms is None or due_ms > self.now_ms):
                break
        else:
            raise AssertionError("it never ends")
        self.partition.check()

    def begins(self, transaction: str) -> bool:
        begins = transaction not in self.transactions
        self.transactions[transaction] = True
        return begins

    def request(self, name: str, queue_id: int, arguments: list[Any], transaction: str | None = None) -> Any:
        asked: Any = requests.parsed(name, arguments)
        if isinstance(asked, requests.WITH_RECEIVER) and asked.receiver != requests.ANYONE:
            asked = asked._replace(receiver=queue_id if asked.receiver else None)
        if transaction is None or not isinstance(asked, requests.Schedule | requests.Settle):
            result = self.partition.request(queue_id, asked, self.now_ms)
            if isinstance(result, Underway):
                while not self.partition.go_on(result):
                    self.partition.commit()
                return result.result
            return result
        return self.partition.request_in(transaction, self.begins(transaction), queue_id, asked, self.now_ms)

    def ask(self, entity_id: int, part: Part, operation: str, body: Any, transaction: str | None) -> bytes | None:
        """A management request, as the gateway reads and answers it; None if no partition answers it."""

        def request(partition: int, queue: int, asked: requests.Request, reply: Any, *_: Any, **__: Any) -> None:
            try:
                name, arguments = on_the_wire(requests.packed(asked))
                result = on_the_wire(self.request(name, queue, arguments, transaction))
            except BrokerError as error:
                reply(None, error)
            else:
                reply(result, None)

        answers: list[bytes] = []
        entity = Entity(entity_id, ENTITIES[entity_id], (5,))
        host: Any = SimpleNamespace(
            gateway=SimpleNamespace(
                metrics=SimpleNamespace(entity=lambda _: EntityMetrics()),
                router=SimpleNamespace(request=request, any_of=min, worker=lambda _: WORKER),
                settings=SimpleNamespace(
                    amqp=SimpleNamespace(max_message_size_bytes=1 << 20),
                    delivery=SimpleNamespace(receive_active_by_number=self.starts % 2 > 0),
                ),
                new_message_id=lambda: encode("new"),
                namespace=SimpleNamespace(keys_of=lambda _: Keys.NONE),
            ),
            rights=SimpleNamespace(require=lambda *_: None),
            post_gathered=lambda: None,
            sessions={
                (SESSIONS, "a"): SimpleNamespace(channel=1, is_exclusive=True, link=SimpleNamespace(name="link"))
            },
            tracked=lambda text, *_: text,
        )
        link: Any = SimpleNamespace(closed=False)
        address: Any = SimpleNamespace(node="$management", resource=entity.name, part=part)
        node = ManagementRequests(host, link, entity, address)
        wanted = Request("1", "me", {"operation": operation, "associated-link-name": "link"}, body)
        try:
            node.handle(wanted, answers.append)
        except (BrokerError, ProtocolError) as error:
            node.fail(wanted, error, answers.append)
        return answers[0] if answers else None


WORKER = SimpleNamespace(is_usable=True, tells_lock_ends=True)
QUEUE_IDS = [queue_id_of(entity_id, part) for entity_id in (*ENTITIES, 99) for part in QueuePart]


def taken_apart(data: st.DataObject, queue_id: int) -> list[list[Any]]:
    """Messages as a gateway sends them to this queue."""
    found = []
    for message in data.draw(st.lists(messages(), max_size=3)):
        with contextlib.suppress(ProtocolError):
            incoming: list[Any] = list(take_apart(message, data.draw(st.booleans())))
            if queue_id in [queue_id_of(entity_id, QueuePart.TRANSFER) for entity_id in ENTITIES]:
                destination = data.draw(st.sampled_from(["plain", "news", "sessions", "elsewhere", "nowhere"]))
                incoming[3] = {**(incoming[3] or {}), Extra.DESTINATION: destination}
            found.append(incoming)
    return on_the_wire(found)


def outcome(data: st.DataObject) -> tuple[int, dict[str, Any] | None]:
    kind = data.draw(st.sampled_from([0x24, 0x25, 0x26, 0x27]))
    info = data.draw(st.dictionaries(STRINGS | st.just(DELAY), VALUES, max_size=3))
    fields = {
        0x25: [Described(ULong(0x1D), [Symbol("x"), data.draw(STRINGS), info])],
        0x27: [True, data.draw(st.booleans()), info],
    }.get(kind, [])
    found, properties = transactional_outcome(decode_exactly(encode(Described(ULong(kind), fields))), (DELAY,))
    return int(found), on_the_wire(properties)


SELECTORS = STRINGS | st.sampled_from(
    [
        "JMSPriority >= 0",
        "a = 'a' OR b > 1 OR all IS NULL",
        "JMSType LIKE '%'",
        "JMSTimestamp / 0 = 1",
        "NOT a",
        "1 = 2",
    ]
)


def send(world: World, data: st.DataObject) -> None:
    queue_id = data.draw(st.sampled_from(QUEUE_IDS))
    world.partition.send(queue_id, taken_apart(data, queue_id), world.now_ms)


def manage(world: World, data: st.DataObject, operation: str = "") -> None:
    operation = operation or data.draw(st.sampled_from(sorted(FIELDS_OF)))
    body = data.draw(bodies(operation, [uuid_of(token) for token in world.tokens]))
    transaction = data.draw(st.sampled_from([None, None, "t", "u"]))
    part = data.draw(st.sampled_from([Part.MAIN, Part.MAIN, *Part]))
    usual = [2, 12] if "session" in operation else [11, 12] if "rule" in operation else [1]
    entity_id = data.draw(st.sampled_from([*usual, *usual, *usual]) | st.sampled_from(sorted(ENTITIES)))
    world.ask(entity_id, part, operation, decode_exactly(encode(body)), transaction)


def settle(world: World, data: st.DataObject) -> None:
    queue_id = data.draw(st.sampled_from([PLAIN, SESSIONS, *QUEUE_IDS]))
    tokens = data.draw(st.lists(st.sampled_from(world.tokens), max_size=4))
    counts = st.sampled_from([b"", b"", b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\2", b"\0\0\1\0"])
    ranges = [token + data.draw(counts) for token in tokens]
    kind, properties = outcome(data)
    results = world.partition.settle(queue_id, ranges, kind, properties, world.now_ms)
    assert len(world.partition.as_told(queue_id, queue_id, results, world.now_ms)) == count_of(ranges)


def receive(world: World, data: st.DataObject) -> None:
    queue_id = data.draw(st.sampled_from(QUEUE_IDS))
    filters = data.draw(
        st.sampled_from([{}, {SESSION_FILTER: None}]) | STRINGS.map(lambda text: {SESSION_FILTER: text})
    )
    try:
        asked = session_filter.read(filters, {TIMEOUT: data.draw(VALUES)})
    except ProtocolError:
        return  # refused by the gateway
    session = None if asked is None else on_the_wire([asked.session_id, asked.wait_ms])
    if world.partition._core.receivers.get(queue_id) is None:
        selector = data.draw(st.none() | SELECTORS)
        world.partition.open_receiver(queue_id, queue_id, data.draw(st.booleans()), world.now_ms, session, selector)


def credit(world: World, data: st.DataObject) -> None:
    grant = data.draw(st.sampled_from([world.partition.grant, world.partition.drain]))
    grant(data.draw(st.sampled_from(QUEUE_IDS)), data.draw(st.integers(0, 2**64 - 1)))


def watch(world: World, data: st.DataObject) -> None:
    watch_or_pass = data.draw(st.sampled_from([world.partition.watch, world.partition.passes]))
    watch_or_pass(data.draw(st.sampled_from(QUEUE_IDS)))


def browse(world: World, data: st.DataObject) -> None:
    """The numbers are the gateway's own; the count is the client's credit, and the session its filter's."""
    queue_id = data.draw(st.sampled_from(QUEUE_IDS))
    number = data.draw(st.sampled_from([0, 1, 3, 2**48, 2**63 - 1]))
    if data.draw(st.booleans()):
        if queue_id not in world.partition._core.receivers:
            world.partition.await_more(queue_id, queue_id, number, world.now_ms)
        return
    count = data.draw(st.integers(1, 2**32 - 1))
    session, selector = data.draw(st.none() | STRINGS), data.draw(st.none() | SELECTORS)
    arguments = [number, count, data.draw(st.sampled_from([1, 500])), session, selector]
    _, after, is_end = world.request("browse", queue_id, arguments)
    assert is_end or after > number


def close(world: World, data: st.DataObject) -> None:
    world.partition.close_receiver(data.draw(st.sampled_from(QUEUE_IDS)), data.draw(st.booleans()), world.now_ms)


def transact(world: World, data: st.DataObject) -> None:
    transaction = data.draw(st.sampled_from(["t", "u"]))
    operations: list[wire.Operation] = []
    for _ in range(data.draw(st.integers(1, 3))):
        queue_id = data.draw(st.sampled_from(QUEUE_IDS))
        kind = data.draw(st.sampled_from(["send", "run", "settle"]))
        if kind == "run":
            made = [[*each[:2], None, None] for each in taken_apart(data, queue_id)]
            operations.append(SendRunOperation(queue_id, data.draw(st.booleans()), len(made), run(made)))
        elif kind == "send":
            operations.append(SendOperation(queue_id, data.draw(st.booleans()), [taken_apart(data, queue_id)]))
        else:
            tokens = data.draw(st.lists(st.sampled_from(world.tokens), max_size=3))
            operations.append(SettleOperation(queue_id, data.draw(st.booleans()), tokens, *outcome(data), queue_id))
    unpacked = unpack_operations(on_the_wire(pack_operations(operations)))
    world.partition.transact(transaction, world.begins(transaction), unpacked, world.now_ms)


def discharge(world: World, data: st.DataObject) -> None:
    transaction = data.draw(st.sampled_from(["t", "u"]))
    world.transactions.pop(transaction, None)
    world.partition.discharge(transaction, data.draw(st.booleans()), world.now_ms)


def restore(world: World, data: st.DataObject) -> None:
    if world.deleted:
        queue_id, items = world.deleted.pop()
        world.partition.restore(queue_id, on_the_wire(items), world.now_ms)


def take_over(world: World, data: st.DataObject) -> None:
    numbers = sorted(data.draw(st.sets(st.integers(1, 20) | st.just(2**63 - 1), max_size=3)))
    entries: list[Any] = []
    destination = data.draw(st.sampled_from([*ENTITIES, 0]))
    for number in numbers:
        incoming = next(iter(taken_apart(data, PLAIN)), None) or list(take_apart(encode(Described(0x75, b""))))
        overlay: dict[int, Any] = {Field.ENQUEUE_SEQUENCE_NUMBER: number, Field.HOPS: 1}
        if destination == 0:
            overlay[Field.DESTINATION] = data.draw(st.sampled_from(sorted(ENTITIES)))
        entries += (number, encode_message(START_MS, NEVER, incoming[0], incoming[1]), overlay)
    source = data.draw(st.sampled_from(QUEUE_IDS))
    world.partition.take_over(b"another!", source, destination, on_the_wire(entries), world.now_ms)


def pass_time(world: World, data: st.DataObject) -> None:
    world.now_ms += data.draw(st.sampled_from([0, 1, 30_000, 120_000, 10**10]))


COMMANDS = (
    send,
    manage,
    manage,
    manage,
    settle,
    receive,
    credit,
    watch,
    browse,
    close,
    transact,
    discharge,
    restore,
    take_over,
)


@settings(max_examples=examples(100))
@given(st.data())
def test_only_a_broker_error_comes_out_and_the_partition_goes_on(data):
    world = World()
    for _ in range(data.draw(st.integers(1, 8))):
        command = data.draw(st.sampled_from((*COMMANDS, pass_time)))
        with contextlib.suppress(BrokerError):
            command(world, data)
        world.turn()
    assert_counted_rightly(world.partition, world.store, world.now_ms)
    world.start()
    world.turn()  # a queue that forwards and has scheduled messages writes at the start
    assert_counted_rightly(world.partition, world.store, world.now_ms)
    body = list(take_apart(encode(Described(0x75, b"after"))))
    world.partition.send(PLAIN, [body], world.now_ms)
    world.partition.open_receiver("after", PLAIN, False, world.now_ms)
    world.partition.grant("after", 2**31)
    world.turn()
    assert world.received["after"][-1].body.endswith(b"after")


@pytest.mark.parametrize("operation", sorted(FIELDS_OF))
@settings(max_examples=examples(50))
@given(data=st.data())
def test_only_a_broker_error_comes_of_a_request(operation, data):
    world = World()
    for _ in range(4):
        with contextlib.suppress(BrokerError):
            manage(world, data, operation)
        world.turn()
    assert_counted_rightly(world.partition, world.store, world.now_ms)


def test_every_field_that_a_request_can_have_is_tried():
    assert {name for names in FIELDS_OF.values() for name in names} == set(NAMES)
