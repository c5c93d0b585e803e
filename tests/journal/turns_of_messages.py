"""Frames with events, as a worker's partitions write them: made by hand, of messages that really are encoded so."""

from typing import Any

from protocol.codec import Symbol, encode
from protocol.message.intake import take_apart
from storage.journal.events import Hint, Op
from storage.log.changes import Operation
from storage.queue_ids import Part, queue_id_of
from storage.records import NEVER, Overlay, Place, encode_entry, encode_message, message_key, queue_key
from storage.store import Table

ORDERS = 7  # an entity
ACTIVE, DEAD = queue_id_of(ORDERS), queue_id_of(ORDERS, Part.DEAD_LETTER)
STORE = b"store-id"
NAMED = [Hint.NAMED, ORDERS, "orders"]


def section(descriptor: int, fields: list[Any]) -> bytes:
    content = b"".join(b"\x40" if field is None else encode(field) for field in fields)
    return (
        bytes((0, 0x53, descriptor, 0xD0))
        + (len(content) + 4).to_bytes(4, "big")
        + len(fields).to_bytes(4, "big")
        + content
    )


def record(
    body: bytes,
    *properties: Any,
    annotations: dict[str, Any] | None = None,
    enqueued_ms: int = 1_000,
    expires_ms: int = NEVER,
) -> bytes:
    """The stored record of a message; `properties` are the fields of its properties section, in order."""
    message = b""
    if annotations:
        message += b"\x00\x53\x72" + encode({Symbol(name): value for name, value in annotations.items()})
    if properties:
        message += section(0x73, list(properties))
    message += b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body
    layout, stored, _, _ = take_apart(message)
    return encode_message(enqueued_ms, expires_ms, layout, stored)


def stored(*records: tuple[int, bytes]) -> tuple[int, int, Any]:
    return Operation.INSERT, Table.MESSAGES, tuple((message_key(message_id), each) for message_id, each in records)


def entry(
    queue_id: int,
    number: int,
    message_id: int,
    place: int = Place.AVAILABLE,
    count: int = 0,
    overlay: Overlay | None = None,
) -> tuple[bytes, bytes]:
    return queue_key(queue_id, place, number), encode_entry(message_id, count, overlay)


def inserted(*entries: tuple[bytes, bytes]) -> tuple[int, int, Any]:
    return Operation.INSERT, Table.QUEUE, entries


def put(*entries: tuple[bytes, bytes]) -> tuple[int, int, Any]:
    return Operation.PUT, Table.QUEUE, entries


def deleted(queue_id: int, *numbers: int, place: int = Place.AVAILABLE) -> tuple[int, int, Any]:
    return Operation.DELETE, Table.QUEUE, tuple(queue_key(queue_id, place, number) for number in numbers)


def sent(first: int, *bodies: bytes, queue_id: int = ACTIVE) -> list[tuple[int, int, Any]]:
    """Messages under consecutive numbers, which are their message ids, too."""
    numbers = range(first, first + len(bodies))
    return [
        stored(*((number, record(body, f"id-{number}")) for number, body in zip(numbers, bodies, strict=True))),
        inserted(*(entry(queue_id, number, number) for number in numbers)),
    ]


def done(
    op: Op, queue_id: int, *numbers: int, counts: Any = None, reason: str | None = None, at_ms: int | None = None
) -> list[Any]:
    return [Hint.DONE, op, queue_id, numbers, counts, reason, at_ms]


def done_run(
    op: Op,
    queue_id: int,
    first: int,
    messages: int,
    count: int = 0,
    reason: str | None = None,
    at_ms: int | None = None,
) -> list[Any]:
    return [Hint.DONE_RUN, op, queue_id, first, messages, count, reason, at_ms]
