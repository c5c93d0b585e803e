"""A whole session as a well-behaved client would say it, and what becomes of it by chance.

`mutated(random)` is one case. Half of the changes are made within a frame whose size is then put right, so that they
get past the framing.
"""

import struct
from random import Random

from protocol.codec import Described, Symbol, UInt, ULong, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from protocol.symbols import AMQP_HEADER, DESCRIPTOR_OF
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BATCH_FORMAT,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    MODIFIED,
    OPEN,
    REJECTED,
    RELEASED,
    TRANSFER,
    batch,
    coordinator,
    frame_bytes,
    message,
    outcome,
    performative,
    source,
    target,
)

NULL = b"\x40"
HOSTILE = (
    b"\xf0" + struct.pack(">II", 5, 0x7FFFFFFF) + b"\x41",
    b"\xf0" + struct.pack(">II", 8, 0x7FFFFFFF) + b"\x00\x53\x23\x45",
    b"\xd0" + struct.pack(">II", 4, 0x7FFFFFFF),
    b"\xd1\x00\x00\x00\x04\xff\xff\xff\xfe",
    b"\xb0\xff\xff\xff\xff",
    b"\xb1\x7f\xff\xff\xff",
    b"\x00" * 400,
    b"\x00\x40" * 200 + NULL,
    b"\xc0\x02\x01" * 80 + NULL,
    b"\xe0\x02\xff\x41",
    b"\x45",
    b"\x70\xff\xff\xff\xff",
    b"\x80" + b"\xff" * 8,
)


_NAME: dict[int, str] = {code: name for name, code in DESCRIPTOR_OF.items()}


def sasl_init(key_name: str, key: str) -> bytes:
    init = encode(Described(ULong(0x41), [Symbol("PLAIN"), plain_response(key_name, key)]))
    return SASL_HEADER + frame_bytes(0, init, kind=1)


def session(queue: str) -> list[bytes]:
    """The frames of one connection, the AMQP header first."""

    def say(code: int, *fields: object, channel: int = 0, payload: bytes = b"") -> bytes:
        return performative(channel, code, fields, payload)

    def attach(name: str, handle: int, sender: bool, address: str, **more: object) -> bytes:
        return say(
            ATTACH,
            name,
            UInt(handle),
            not sender,
            None,
            None,
            source("here" if sender else address, filters={Symbol("f"): Described(Symbol("f:string"), "x")}),
            target(address if sender else "here"),
            None,
            None,
            UInt(0) if sender else None,
            ULong(1 << 20),
            None,
            None,
            {Symbol("com.microsoft:timeout"): UInt(1000)},
        )

    def transfer(handle: int, number: int, payload: bytes, **more: object) -> bytes:
        form = UInt(BATCH_FORMAT if more.get("is_batch") else 0)
        tag = number.to_bytes(16, "big")
        settled, rest = more.get("settled", False), more.get("more", False)
        return say(TRANSFER, UInt(handle), UInt(number), tag, form, settled, rest, payload=payload)

    full = message(
        b"body",
        header=[True, None, UInt(60_000)],
        annotations={Symbol("x-opt-partition-key"): "k"},
        properties=["id", None, "to", "subject", None, "correlation"],
        application={"a": 1, "b": "text", "c": 2.5},
    )
    error = Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), "text", {"DeadLetterReason": "r"}])
    return [
        AMQP_HEADER,
        say(OPEN, "fuzz", "localhost", UInt(65536), None, UInt(60_000), None, None, None, None, {Symbol("p"): "q"}),
        say(BEGIN, None, UInt(0), UInt(1000), UInt(1000), UInt(255)),
        attach("sender", 0, True, queue),
        attach("receiver", 1, False, queue),
        say(FLOW, UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(1), UInt(0), UInt(10), None, False, True),
        transfer(0, 0, full),
        transfer(0, 1, full[:20], more=True),
        say(TRANSFER, UInt(0), None, None, None, None, False, payload=full[20:]),
        transfer(0, 2, batch(full, message(b"two")), is_batch=True),
        transfer(0, 3, full, settled=True),
        say(DISPOSITION, True, UInt(0), UInt(1), False, outcome(ACCEPTED)),
        say(DISPOSITION, True, UInt(2), None, False, outcome(MODIFIED, True, False, {Symbol("m"): "n"})),
        say(DISPOSITION, True, UInt(3), None, False, outcome(REJECTED, error)),
        say(DISPOSITION, True, UInt(4), UInt(9), True, outcome(RELEASED)),
        say(FLOW, UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(1), UInt(5), UInt(5), None, True, False),
        say(BEGIN, None, UInt(0), UInt(10), UInt(10), channel=1),
        say(ATTACH, "node", UInt(0), False, None, None, source("x"), target("$cbs"), None, None, UInt(0), channel=1),
        say(ATTACH, "tx", UInt(1), False, None, None, source("x"), coordinator(), None, None, UInt(0), channel=1),
        say(TRANSFER, UInt(0), UInt(0), b"t", UInt(0), True, False, payload=full, channel=1),
        say(FLOW, UInt(0), UInt(10), UInt(0), UInt(10), None, None, None, None, None, True, channel=1),
        bytes.fromhex("0000000802000000"),
        say(DETACH, UInt(0), True),
        say(DETACH, UInt(1), False, Described(ULong(0x1D), [Symbol("test:error"), "text"])),
        say(END, channel=1),
        say(END),
        say(CLOSE),
    ]


def mutated(random: Random, frames: list[bytes]) -> bytes:
    frames = list(frames)
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        at = random.randrange(len(frames))
        kind = random.randrange(12)
        if kind == 0:
            del frames[at]
        elif kind == 1:
            frames.insert(random.randrange(len(frames) + 1), frames[at])
        elif kind == 2:
            other = random.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        elif kind == 3:
            frames[at] = _changed(random, frames[at])
        elif kind == 4:
            frames[at] = _in_unusual_form(random, frames[at])
        elif kind == 5 and len(frames[at]) < 1000:
            frames[at] *= random.choice((2, 2, 3, 5, 300))
        else:
            frames[at] = _changed_within(random, frames[at])
        if not frames:
            break
    return b"".join(frames)


def _in_unusual_form(random: Random, frame: bytes) -> bytes:
    """With an extended header, or another encoding of the descriptor, or both."""
    if len(frame) <= 12 or frame[:4] == b"AMQP":
        return frame
    head, body = frame[4:8], frame[8:]
    if random.random() < 0.5:
        descriptor = random.choice((b"\x80" + bytes(7) + body[2:3], encode(Symbol(_NAME.get(body[2], "")))))
        body = body[:1] + descriptor + body[3:]
    if random.random() < 0.5:
        words = random.choice((3, 4, 40, 255))
        head, body = bytes((words,)) + head[1:], bytes(4 * words - 8) + body
    return (4 + len(head) + len(body)).to_bytes(4, "big") + head + body


def _changed(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    at = random.randrange(len(changed) + 1)
    match random.randrange(5):
        case 0:
            del changed[at : at + random.randrange(1, 9)]
        case 1:
            changed[at:at] = random.randbytes(random.randrange(1, 9))
        case 2:
            changed[at:at] = random.choice(HOSTILE)
        case 3:
            changed[at : at + 1] = bytes((random.choice((0, 1, 0x40, 0x41, 0x45, 0x53, 0x7F, 0x80, 0xC0, 0xFF)),))
        case _ if at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def _changed_within(random: Random, frame: bytes) -> bytes:
    """The frame's size fits afterwards, and in half of the cases that of its performative's list, too."""
    if len(frame) <= 12 or frame[:4] == b"AMQP":
        return _changed(random, frame)
    head, content = frame[4:11], frame[11:]
    if random.random() < 0.5 and content[:1] == b"\xc0" and len(content) > 3:
        size = content[1]
        fields = _changed(random, content[3 : 2 + size])
        if len(fields) < 254:
            content = bytes((0xC0, len(fields) + 1, content[2])) + fields + content[2 + size :]
        else:
            content = b"\xd0" + struct.pack(">II", len(fields) + 4, content[2]) + fields + content[2 + size :]
    else:
        content = _changed(random, content)
    return (4 + len(head) + len(content)).to_bytes(4, "big") + head + content
