"""Outgoing performatives at their full width, for peers that read fields by position.

A list may leave out its trailing nulls (AMQP 1.0, 1.4), and Proton leaves out all of them, in nested lists too. The
engine of azure-servicebus up to 7.14.3 (`_pyamqp`) reads received fields by position and fails with an IndexError. By
its source it needs in each performative:

    open 10          field 9 is read; max-frame-size must not be null
    begin 8          field 7 is read
    attach 14        field 13 is read; source and target must not be empty lists, and initial-delivery-count not null
                     where the broker sends
    flow 11          field 6 is read, in flows of the session too
    transfer 11      the payload is appended to the fields and read as field 11
    disposition 6    field 4 is read, and all 6 when the client logs its frames
    detach 3         field 2 is read
    end 1, close 1   an empty list encoded as 0x45 is not understood as the body of a frame

7.15.0 adds all of these fields itself. Neither version adds missing fields of an error inside of `rejected` (the answer
to a send: the IndexError is swallowed and the send hangs until its timeout) or of `close`: these lists must have their
three elements. Where we write errors that costs nothing: an error always gets a description and an info map, which may
be empty (`protocol.amqp_error`; Proton writes an empty map, and leaves out one that was not put). Faults that Proton
finds itself have no info, so the errors of detach, end and close are completed here.

`CONTROL` is for every peer: it pads rare performatives and does not change transfers and dispositions. `EVERYTHING` is
for peers for which `reads_by_position` is true. Padding makes a frame up to 20 bytes longer and may thereby exceed the
max-frame-size of the peer, which Proton fills with the transfers of large messages; these clients do not check it.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final

from protocol import codec
from protocol.amqp_error import completed
from protocol.engine.frames import HEADER_BYTES, walk

_FIELDS: Final = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}
_FREQUENT: Final = (0x14, 0x15)
_ERROR_AT: Final = {0x16: 2, 0x17: 0, 0x18: 0}  # the index of the error among the fields

# Width by performative code, 0 to leave it as it is.
EVERYTHING: Final = bytes(_FIELDS.get(code, 0) for code in range(256))
CONTROL: Final = bytes(0 if code in _FREQUENT else width for code, width in enumerate(EVERYTHING))

_u32 = struct.Struct(">I").unpack_from
_HEAD_BYTES = 11  # frame header, and the descriptor 00 53 xx


def reads_by_position(open_properties: Mapping[Any, Any]) -> bool:
    """True if the peer that sent these open properties is a Python SDK of Azure, of any version."""
    return str(open_properties.get("product", "")).startswith("azsdk-python")


def pad(frames: bytes, widths: bytes = CONTROL) -> bytes:
    """Whole `frames` (a protocol header may be before them) with the performatives of `widths` at full width.

    Returns the same object if none was short. Raises ValueError if the bytes end within a frame.
    """
    pieces = []
    copied = last = 0
    for at, end, _, code in walk(frames):
        last = end
        if code and widths[code] and _HEAD_BYTES < end - at <= len(frames) - at:
            frame = _with_whole_error(frames[at:end]) if code in _ERROR_AT else None
            if frame is None:
                frame = _padded(frames, at, end, widths[code])
            if frame is not None:
                pieces.append(frames[copied:at])
                pieces.append(frame)
                copied = end
    if last != len(frames):
        raise ValueError(f"{len(frames)} bytes are not whole frames: the last ends at {last}")
    if not pieces:
        return frames
    pieces.append(frames[copied:])
    return b"".join(pieces)


def _with_whole_error(frame: bytes) -> bytes | None:
    """The detach, end or close padded, if its error lacks description or info; else None."""
    performative, _ = codec.decode(frame, HEADER_BYTES)
    fields = performative.value
    index = _ERROR_AT[performative.descriptor]
    error = fields[index] if len(fields) > index else None
    if error is None or (whole := completed(error)) is error:
        return None
    body = codec.encode(codec.Described(performative.descriptor, [*fields[:index], whole, *fields[index + 1 :]]))
    return (HEADER_BYTES + len(body)).to_bytes(4, "big") + frame[4:HEADER_BYTES] + body


def _padded(data: bytes, at: int, end: int, width: int) -> bytes | None:
    """The frame from `at` to `end` with nulls up to `width` fields, or None if it has them."""
    constructor = data[at + 11]
    if constructor == 0xC0:
        count, fields, fields_end = data[at + 13], at + 14, at + 13 + data[at + 12]
    elif constructor == 0xD0:
        count, fields, fields_end = _u32(data, at + 16)[0], at + 20, at + 16 + _u32(data, at + 12)[0]
    elif constructor == 0x45:
        count, fields, fields_end = 0, at + 12, at + 12
    else:
        return None
    if count >= width:
        return None
    content = data[fields:fields_end] + b"\x40" * (width - count)
    if len(content) < 255:
        prefix = struct.pack(">BBB", 0xC0, len(content) + 1, width)
    else:
        prefix = struct.pack(">BII", 0xD0, len(content) + 4, width)
    rest = b"".join((data[at + 4 : at + _HEAD_BYTES], prefix, content, data[fields_end:end]))
    return (len(rest) + 4).to_bytes(4, "big") + rest
