"""Checks a sender's message and converts it to the form in which it is stored (see `layout`).

- Durable and priority of the header go into the layout, and the time to live is returned. Its first-acquirer is stored
  with the delivery annotations. Its delivery count concerns only the hop from the sender, and is dropped.
- Annotations that only a broker may set are left out.
- The bare message stays bit for bit as it was sent, with two exceptions. A message whose sections are in an unusual
  order, or have descriptors that some clients cannot read (anything but 00 53 xx), is put into the usual form. And a
  message without message-id gets one, if the caller gives a `new_id`.

Bodies are not decoded.
"""

import struct
from collections.abc import Callable
from typing import Final

from protocol import bounds
from protocol.codec import decode_exactly, encode, skip
from protocol.errors import DecodeError, HeaderTooLarge, InvalidField, ProtocolError
from protocol.message import fields
from protocol.message.layout import HAS_DELIVERY_ANNOTATIONS, LAYOUT, unpack_layout
from protocol.message.sections import BODY, Section, content_of, scan, usual_form
from protocol.symbols import STORED_DELIVERY_ANNOTATIONS, STORED_FIRST_ACQUIRER, Descriptor

MAX_HEADER_BYTES: Final = 64 * 1024  # all sections but the body

_ANNOTATIONS_BEGIN: Final = struct.Struct(">III")
_pack_layout = LAYOUT.pack

NewId = Callable[[], bytes]
Incoming = tuple[bytes, bytes, int | None, fields.Extra | None]  # layout, stored bytes, ttl in ms, extra


def take_apart(message: bytes, want_message_id: bool = False, new_id: NewId | None = None) -> Incoming:
    """Layout, bytes to store, time to live in milliseconds, and the extra map of one encoded message.

    The extra map has, if the message has them: scheduled enqueue time (ms), session id and partition key (str), True
    for a ping, and with `want_message_id` the message-id as an encoded AMQP value. It is None if it would be empty.
    `new_id` makes a message-id, an encoded string, for a message without one; if it is None, the message gets none.

    Raises DecodeError for a malformed message, LimitExceeded for an id or key of more than 128 characters,
    HeaderTooLarge for more than 64 KiB without the body or an application property of more than 32 KiB, InvalidField
    for an annotation or property that has a wrong type or contradicts another one.
    """
    try:
        incoming = _take_apart_usual(message, want_message_id, new_id)
    except (ProtocolError, IndexError, struct.error):
        incoming = None  # the general way finds the same mistake and names it
    if incoming is not None:
        return incoming
    try:
        return _take_apart_any(message, want_message_id, new_id)
    except (IndexError, struct.error):
        raise DecodeError("the message ends within a section", len(message)) from None


def extra_of(layout: bytes, stored: bytes) -> fields.Extra | None:
    """The extra map, with the message-id, of a message whose layout and stored bytes `take_apart` made.

    If the session id was changed since and differs from the partition key, annotations are ignored. Raises
    ProtocolError if other changes made a message that could not be sent.
    """
    parts = unpack_layout(layout)
    annotations = _ANNOTATIONS_BEGIN.pack(0x005372D1, 4 + parts.annotation_bytes, parts.annotation_values)
    try:
        return take_apart(annotations + stored, want_message_id=True)[3]
    except InvalidField:
        return take_apart(stored[parts.annotation_bytes :], want_message_id=True)[3]


# --- the usual way ----------------------------------------------------------------------------------------------------

# A section's descriptor and the constructor of its value as one number, then two bytes that usually are the size and
# count of the value.
_begin = struct.Struct(">IBB").unpack_from
_size_and_count = struct.Struct(">II").unpack_from


def _take_apart_usual(message: bytes, want_message_id: bool, new_id: NewId | None = None) -> Incoming | None:
    """`take_apart` for a message whose sections are in order and end with one data section or value; else None."""
    length = len(message)
    flags = priority = annotation_values = annotation_bytes = properties_bytes = application_properties_bytes = 0
    ttl_ms: int | None = None
    extra: fields.Extra = {}
    pairs: bytes | None = None
    at = 0
    begin, size, count = _begin(message)
    if begin == 0x005370C0:
        flags, priority, ttl_ms, first_acquirer = fields.header(message[3 : 5 + size])
        if ttl_ms == fields.UINT_MAX or first_acquirer is not None:
            return None
        at = 5 + size
        begin, size, count = _begin(message, at)
    elif begin == 0x00537045:
        at = 4
        begin, size, count = _begin(message, at)
    pairs_at = end = at
    if begin == 0x005372C1:
        end += 5 + size
        pairs_at += 6
    elif begin == 0x005372D1:
        size, count = _size_and_count(message, at + 4)
        if size > MAX_HEADER_BYTES:
            return None
        end += 8 + size
        pairs_at += 12
    if end != at:
        pairs, annotation_values = fields.annotations(message, pairs_at, end, count, extra)
        annotation_bytes = end - pairs_at if pairs is None else len(pairs)
        at = end
        begin, size, count = _begin(message, at)
    bare = at
    has_id = False
    if begin == 0x005373C0:
        properties_bytes = 5 + size
        has_id = count > 0 and message[at + 6] != 0x40
        end = at + properties_bytes
        fields.properties(message, at + 6, end, count, extra, want_message_id)
    elif begin == 0x00537345:
        properties_bytes = 4
        end = at + 4
    elif begin == 0x005373D0:
        size, count = _size_and_count(message, at + 4)
        if size > MAX_HEADER_BYTES:
            return None
        properties_bytes = 8 + size
        has_id = count > 0 and message[at + 12] != 0x40
        end = at + properties_bytes
        fields.properties(message, at + 12, end, count, extra, want_message_id)
    if end != at:
        at = end
        begin, size, count = _begin(message, at)
    if begin == 0x005374C1:
        application_properties_bytes = 5 + size
        end = at + application_properties_bytes
        fields.application_properties(message, at + 6, end, count)
    elif begin == 0x005374D1:
        size, count = _size_and_count(message, at + 4)
        if size > MAX_HEADER_BYTES:
            return None
        application_properties_bytes = 8 + size
        end = at + application_properties_bytes
        fields.application_properties(message, at + 12, end, count)
    if end != at:
        at = end
        begin, size, count = _begin(message, at)
    if begin == 0x005375A0:
        end = at + 5 + size
    elif begin == 0x005375B0:
        end = at + 8 + int.from_bytes(message[at + 4 : at + 8], "big")
    elif begin >> 8 == 0x005377:
        end = skip(message, at + 3)
    if end != length or end == at or at > MAX_HEADER_BYTES:
        return None
    if fields.EXTRA_PARTITION_KEY in extra:
        fields.check_keys(extra)
    if not has_id and new_id is not None:
        properties = _with_message_id(message[bare : bare + properties_bytes], new_id())
        rest = memoryview(message)[bare + properties_bytes :]
        if not annotation_bytes:
            stored = b"".join((properties, rest))
        else:
            stored = b"".join((message[pairs_at:bare] if pairs is None else pairs, properties, rest))
        properties_bytes = len(properties)
    elif pairs is None:
        stored = message[pairs_at:]  # the pairs are right before the bare message
    else:
        stored = b"".join((pairs, memoryview(message)[bare:]))
    return (
        _pack_layout(
            flags, priority, annotation_values, annotation_bytes, properties_bytes, application_properties_bytes
        ),
        stored,
        ttl_ms,
        extra or None,
    )


# --- the general way --------------------------------------------------------------------------------------------------


def _take_apart_any(message: bytes, want_message_id: bool, new_id: NewId | None = None) -> Incoming:
    found: dict[Descriptor, Section] = {}
    rest = []
    body_bytes = 0
    for section in scan(message):
        kind = section.kind
        if kind in BODY:
            body_bytes += section.end - section.start
            rest.append(section)
        elif kind is Descriptor.FOOTER:
            rest.append(section)
        else:
            if kind in found:
                raise DecodeError(f"section {kind:#x} twice", section.start)
            found[kind] = section
    if len(message) - body_bytes > MAX_HEADER_BYTES:
        raise HeaderTooLarge("size of header, annotations and properties", MAX_HEADER_BYTES, "bytes")

    extra: fields.Extra = {}
    flags, priority, ttl_ms, first_acquirer = 0, 0, None, None
    header = found.get(Descriptor.HEADER)
    if header:
        try:
            flags, priority, ttl_ms, first_acquirer = fields.header(message[header.value : header.end])
        except DecodeError as error:
            raise DecodeError(error.reason, header.value + error.offset) from None
    annotations = found.get(Descriptor.MESSAGE_ANNOTATIONS)
    pairs, annotation_values = b"", 0
    if annotations:
        at, end, count = content_of(message, annotations)
        kept, annotation_values = fields.annotations(message, at, end, count, extra)
        pairs = message[at:end] if kept is None else kept
    pair = _delivery_annotations_pair(message, found.get(Descriptor.DELIVERY_ANNOTATIONS), first_acquirer)
    if pair:
        flags |= HAS_DELIVERY_ANNOTATIONS
        pairs = pair + pairs
        annotation_values += 2
    properties = found.get(Descriptor.PROPERTIES)
    properties_section, has_id = b"", False
    if properties:
        at, end, count = content_of(message, properties)
        fields.properties(message, at, end, count, extra, want_message_id)
        properties_section = usual_form(message, properties)
        has_id = count > 0 and message[at] != 0x40
        if ttl_ms == fields.UINT_MAX:
            ttl_ms = _longer_ttl(message[properties.value : properties.end])
    application_properties = found.get(Descriptor.APPLICATION_PROPERTIES)
    if application_properties:
        fields.application_properties(message, *content_of(message, application_properties))
    if fields.EXTRA_PARTITION_KEY in extra:
        fields.check_keys(extra)

    if not has_id and new_id is not None:
        properties_section = _with_message_id(properties_section, new_id())
    parts = [usual_form(message, part) for part in (application_properties, *rest) if part]
    return (
        _pack_layout(
            flags,
            priority,
            annotation_values,
            len(pairs),
            len(properties_section),
            len(usual_form(message, application_properties)) if application_properties else 0,
        ),
        b"".join((pairs, properties_section, *parts)),
        ttl_ms,
        extra or None,
    )


_STORED_DELIVERY_ANNOTATIONS: Final = encode(STORED_DELIVERY_ANNOTATIONS) + b"\xd1"


def _delivery_annotations_pair(message: bytes, section: Section | None, first_acquirer: bool | None) -> bytes:
    """The pair that stores first-acquirer and the sender's delivery annotations; no bytes if there are neither."""
    pairs, values = b"", 0
    if section is not None:
        at, end, count = content_of(message, section)
        kept, values = fields.delivery_annotations(message, at, end, count)
        pairs = message[at:end] if kept is None else kept
    if first_acquirer is not None:
        pairs = encode(STORED_FIRST_ACQUIRER) + encode(first_acquirer) + pairs
        values += 2
    if not values:
        return b""
    return _STORED_DELIVERY_ANNOTATIONS + struct.pack(">II", 4 + len(pairs), values) + pairs


def _longer_ttl(properties: bytes) -> int:
    """The true time to live of a message whose header has the maximum: .NET gives it as two times in the properties."""
    values = [*decode_exactly(properties), *[None] * 13]
    absolute_expiry_time, creation_time = values[8], values[9]
    if absolute_expiry_time is None or creation_time is None:
        return fields.UINT_MAX
    return max(fields.UINT_MAX, bounds.span_ms(int(absolute_expiry_time) - int(creation_time)))


# --- either way -------------------------------------------------------------------------------------------------------

_ONE_FIELD: Final = {length: b"\x00\x53\x73\xc0" + bytes((1 + length, 1)) for length in range(1, 255)}


def _with_message_id(section: bytes, message_id: bytes) -> bytes:
    """Add a message-id, an encoded short string, to a properties section without one, or to no section (no bytes)."""
    if len(section) <= 4:
        return _ONE_FIELD[len(message_id)] + message_id
    if section[3] == 0xC0:
        count, rest = section[5], section[7:]
    else:
        count, rest = int.from_bytes(section[8:12], "big"), section[13:]
    if count == 0:
        return _ONE_FIELD[len(message_id)] + message_id
    length = len(message_id) + len(rest)  # the null in its place is left out
    if length < 255:
        return b"".join((b"\x00\x53\x73\xc0", bytes((1 + length, count)), message_id, rest))
    return b"".join((b"\x00\x53\x73\xd0", struct.pack(">II", 4 + length, count), message_id, rest))
