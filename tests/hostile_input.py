"""Bytes that cost a receiver more than others: each kind of frame that a peer can say again and again.

A peer says `OPENED` (without SASL, on one session), then `before`, then as many units as it likes. Only those of
`WITH_RIGHTS` need a right.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from protocol.codec import Described, Symbol, UInt, ULong, encode
from protocol.symbols import AMQP_HEADER
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BATCH_FORMAT,
    BEGIN,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    HEARTBEAT,
    MODIFIED,
    OPEN,
    RECEIVED,
    TRANSFER,
    message,
    outcome,
    performative,
    raw_performative,
    source,
    target,
)

WINDOW: Final = UInt(1 << 30)


def say(code: int, *fields: Any, channel: int = 0, payload: bytes = b"") -> bytes:
    return performative(channel, code, fields, payload)


OPENED: Final = (
    AMQP_HEADER + say(OPEN, "hostile", "localhost", UInt(65536)) + say(BEGIN, None, UInt(0), WINDOW, WINDOW, UInt(255))
)


def attach(
    handle: int, *, sender: bool = True, address: Any = "orders", properties: Any = None, name: str = ""
) -> bytes:
    ends = (source("here"), target(address)) if sender else (source(address), target("here"))
    count = UInt(0) if sender else None
    name = name or f"link-{handle}"
    return say(ATTACH, name, UInt(handle), not sender, None, None, *ends, None, None, count, *[None] * 3, properties)


def detach(handle: int) -> bytes:
    return say(DETACH, UInt(handle), True)


def transfer(
    handle: int, number: int | None, payload: bytes = b"", *, more: bool = False, batch: bool = False
) -> bytes:
    form, tag = UInt(BATCH_FORMAT if batch else 0), b"t" if number is not None else None
    return say(
        TRANSFER, UInt(handle), None if number is None else UInt(number), tag, form, False, more, payload=payload
    )


def extended(frame: bytes) -> bytes:
    """The frame with an extended header (2.3.1)."""
    return (len(frame) + 4).to_bytes(4, "big") + b"\x03" + frame[5:8] + bytes(4) + frame[8:]


def described_at_length(frame: bytes) -> bytes:
    """The frame with a descriptor of eight bytes."""
    body = b"\x00\x80" + bytes(7) + frame[10:]
    return (8 + len(body)).to_bytes(4, "big") + frame[4:8] + body


def described_by_name(frame: bytes, name: str) -> bytes:
    body = b"\x00" + encode(Symbol(name)) + frame[11:]
    return (8 + len(body)).to_bytes(4, "big") + frame[4:8] + body


def empty_elements(count: int, constructor: int = 0x41) -> bytes:
    """An array of so many elements that take no bytes."""
    return b"\xf0" + struct.pack(">II", 5, count) + bytes((constructor,))


def nested(levels: int) -> bytes:
    value = b"\x45"
    for _ in range(levels):
        value = b"\xc0" + bytes((len(value) + 1, 1)) + value
    return value


def uuids(count: int) -> bytes:
    """A map whose keys are different uuids with the same hash."""
    step = (1 << 61) - 1
    pairs = b"".join(encode(UUID(int=number * step)) + b"\x40" for number in range(1, count + 1))
    return b"\xd1" + struct.pack(">II", len(pairs) + 4, 2 * count) + pairs


def flow_with(value: bytes) -> bytes:
    """A flow of the session with this value in its properties."""
    fields = b"".join(map(encode, (UInt(0), WINDOW, UInt(0), WINDOW))) + b"\x40" * 4 + b"\x42\x42"
    pair = encode(Symbol("a")) + value
    properties = b"\xd1" + struct.pack(">II", len(pair) + 4, 2) + pair
    return raw_performative(0, FLOW, fields + properties, 11)


FLOW_OF_SESSION: Final = say(FLOW, UInt(0), WINDOW, UInt(0), WINDOW)
ECHO: Final = say(FLOW, UInt(0), WINDOW, UInt(0), WINDOW, *[None] * 4, False, True)
ATTACH_AND_DETACH: Final = attach(7) + detach(7)
PEEK: Final = message(
    properties=["1", None, None, None, "here"], application={"operation": "com.microsoft:peek-message"}
)


@dataclass(frozen=True)
class Hostile:
    """`unit` is said again and again, or is made of its number. `is_refused`: nothing of it is allowed."""

    unit: bytes | Callable[[int], bytes]
    before: bytes = b""
    is_refused: bool = False

    def of(self, size: int) -> bytes:
        """At least one unit, and about `size` bytes."""
        if isinstance(self.unit, bytes):
            return self.unit * max(1, size // len(self.unit))
        units, made = [self.unit(0)], len(self.unit(0))
        while made < size:
            units.append(self.unit(len(units)))
            made += len(units[-1])
        return b"".join(units)


HOSTILE: Final[Mapping[str, Hostile]] = {
    "empty frames": Hostile(HEARTBEAT),
    "empty frames with an extended header": Hostile(extended(HEARTBEAT)),
    "flows": Hostile(FLOW_OF_SESSION),
    "flows with an extended header": Hostile(extended(FLOW_OF_SESSION)),
    "flows with a long descriptor": Hostile(described_at_length(FLOW_OF_SESSION)),
    "flows with a name as descriptor": Hostile(described_by_name(FLOW_OF_SESSION, "amqp:flow:list")),
    "frames in turn in usual and unusual form": Hostile(FLOW_OF_SESSION + extended(FLOW_OF_SESSION)),
    "flows that are echoed": Hostile(ECHO),
    "flows with arrays of nothing": Hostile(flow_with(empty_elements(4000))),
    "flows with arrays of empty lists": Hostile(flow_with(empty_elements(4000, 0x45))),
    "flows with nested lists": Hostile(flow_with(nested(28))),
    "flows with nested descriptors": Hostile(flow_with(b"\x00\x44" * 28 + b"\x40")),
    "flows with many descriptors": Hostile(
        flow_with(b"\xd0" + struct.pack(">II", 4 + 4 * 1000, 1000) + b"\x00\x53\x01\x40" * 1000)
    ),
    "flows with a map of uuids": Hostile(flow_with(uuids(60))),
    "flows with a map of uuids with one hash": Hostile(flow_with(uuids(2000)), is_refused=True),
    "sessions": Hostile(say(BEGIN, None, UInt(0), WINDOW, WINDOW, channel=5) + say(END, channel=5)),
    "links": Hostile(ATTACH_AND_DETACH),
    "links in an unusual form": Hostile(extended(attach(7)) + described_at_length(detach(7))),
    "refused links": Hostile(attach(7, address=None) + detach(7)),
    "links with much in them": Hostile(attach(7, properties={Symbol("a"): [None] * 3000}) + detach(7)),
    "links in sessions": Hostile(
        say(BEGIN, None, UInt(0), WINDOW, WINDOW, channel=5)
        + attach(0)[:6] + b"\x00\x05" + attach(0)[8:]
        + say(END, channel=5)
    ),
    "transfers on no link": Hostile(transfer(9, 0), is_refused=True),
    "dispositions of nothing": Hostile(say(DISPOSITION, True, UInt(0), UInt(0), False, outcome(ACCEPTED))),
    "dispositions with much in them": Hostile(
        say(DISPOSITION, True, UInt(0), None, True, outcome(MODIFIED, True, False, {Symbol("m"): [None] * 2000}))
    ),
}  # fmt: skip

WITH_RIGHTS: Final[Mapping[str, Hostile]] = {
    "parts of one byte": Hostile(transfer(0, None, b"x", more=True), attach(0) + transfer(0, 0, b"x", more=True)),
    "parts without bytes": Hostile(transfer(0, None, more=True), attach(0) + transfer(0, 0, b"x", more=True)),
    "tiny messages": Hostile(lambda number: transfer(0, number, b"\x00\x53\x75\xa0\x00"), attach(0)),
    "messages without sections": Hostile(lambda number: transfer(0, number), attach(0)),
    "batches without messages": Hostile(lambda number: transfer(0, number, batch=True), attach(0)),
    "messages with a partition key": Hostile(
        lambda number: transfer(0, number, message(annotations={Symbol("x-opt-partition-key"): "k"})), attach(0)
    ),
    "messages with arrays of nothing": Hostile(
        lambda number: transfer(
            0, number, b"\x00\x53\x72\xc1\x10\x02\xa3\x01a" + empty_elements(4000) + b"\x00\x53\x75\xa0\x00"
        ),
        attach(0),
    ),
    "ids that do not follow one another": Hostile(lambda number: transfer(0, 7 * number), attach(0)),
    "such ids, settled": Hostile(
        lambda number: transfer(0, 7 * number) + say(DISPOSITION, False, UInt(7 * number), None, True), attach(0)
    ),
    "requests": Hostile(
        lambda number: transfer(0, number, PEEK),
        attach(0, address="orders/$management") + attach(1, sender=False, address="orders/$management"),
    ),
}


def telling_again(count: int, state: Any = None) -> bytes:
    """A disposition for deliveries 0 to `count` - 1 that settles none of them."""
    return say(DISPOSITION, True, UInt(0), UInt(count - 1), False, state)


TOLD_AGAIN: Final[Mapping[str, Callable[[int], bytes]]] = {
    "without a state": telling_again,
    "received": partial(telling_again, state=outcome(RECEIVED, UInt(0), ULong(0))),
    "accepted": partial(telling_again, state=outcome(ACCEPTED)),
    "in a transaction": partial(
        telling_again, state=Described(ULong(0x34), [b"0123456789abcdef", Described(ULong(ACCEPTED), [])])
    ),
}  # fmt: skip
