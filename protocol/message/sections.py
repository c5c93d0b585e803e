"""Takes a sender's message apart by its sections (AMQP 1.0, 3.2) without looking into its body.

What is stored of a message is `annotation pairs ‖ bare message`, and a layout that says where the parts are:

- Of the header, durable and priority go into the layout and the time to live is handed on; the rest is the sender's
  business with its own hop.
- The pairs of the message annotations map follow one another as they were encoded. Keys that only a broker may set
  are left out. Delivery annotations, which Service Bus shows to receivers as well, are the first of these pairs, under
  a key that no client can use; few messages have any.
- The bare message (properties, application properties, body, footer) is bit for bit what was sent. Only a message
  whose sections stand in no usual order, or have descriptors in a form that some clients cannot read (anything but
  00 53 xx), is put into the usual form, and one without message-id gets one where the taker wants it.

Properties, annotations and application properties are checked for form and types, since a receiver that cannot decode
them would lose its connection to every delivery of the message. Bodies are not.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from protocol.codec import Symbol, ULong, decode, skip
from protocol.errors import DecodeError, HeaderTooLarge, InvalidField, LimitExceeded, ProtocolError
from protocol.message import section_content as content
from protocol.symbols import DESCRIPTOR_OF, Descriptor

MAX_HEADER_BYTES: Final = 64 * 1024  # all sections but the body
MAX_SECTIONS: Final = 10_000  # of one message; about 20 ms of work


class Layout(NamedTuple):
    """Where the parts of stored bytes are; 16 bytes, big-endian, in this order.

    `flags` are DURABLE, HAS_PRIORITY and HAS_DELIVERY_ANNOTATIONS; `priority` is 0 without its flag.
    `annotation_values` counts keys and values, as the count of an AMQP map does. The lengths of the sections include
    their descriptors, 0 is no section.
    """

    flags: int
    priority: int
    annotation_values: int
    annotation_bytes: int
    properties_bytes: int
    application_properties_bytes: int


LAYOUT: Final = struct.Struct(">BBHIII")


_ANNOTATIONS_BEGIN: Final = struct.Struct(">III")


def unpack_layout(layout: bytes) -> Layout:
    return Layout(*LAYOUT.unpack(layout))


NewId = Callable[[], bytes]
Incoming = tuple[bytes, bytes, int | None, content.Extra | None]  # layout, stored bytes, ttl in ms, extra


def take_apart(message: bytes, want_message_id: bool = False, new_id: NewId | None = None) -> Incoming:
    """Layout, bytes to store, time to live in milliseconds, and what else the broker needs of one encoded message.

    The extra map has only what the message has: scheduled enqueue time (ms), session id and partition key (str),
    True for a ping, and with `want_message_id` the message-id as an encoded AMQP value. Without any it is None.
    `new_id` makes the message-id, an encoded string, of a message without one; if it is None such a message stays so.

    Raises DecodeError for a malformed message, LimitExceeded for an id or key of more than 128 characters,
    HeaderTooLarge for more than 64 KiB beside the body or an application property of more than 32 KiB, InvalidField
    for an annotation or property that is not of its type or contradicts another.
    """
    try:
        incoming = _take_apart_usual(message, want_message_id, new_id)
    except (ProtocolError, IndexError, struct.error):
        incoming = None  # the general way finds the same mistake, and names it
    if incoming is not None:
        return incoming
    try:
        return _take_apart_any(message, want_message_id, new_id)
    except (IndexError, struct.error):
        raise DecodeError("the message ends within a section", len(message)) from None


def extra_of(layout: bytes, stored: bytes) -> content.Extra | None:
    """The extra map, with the message-id, of a message whose layout and stored bytes `take_apart` made.

    Without its annotations, if the session id was changed since and is not its partition key any more. Raises
    ProtocolError for what was changed in other ways so that it could not be sent.
    """
    parts = unpack_layout(layout)
    annotations = _ANNOTATIONS_BEGIN.pack(0x005372D1, 4 + parts.annotation_bytes, parts.annotation_values)
    try:
        return take_apart(annotations + stored, want_message_id=True)[3]
    except InvalidField:
        return take_apart(stored[parts.annotation_bytes :], want_message_id=True)[3]


# --- the usual way ----------------------------------------------------------------------------------------------------

# A section's descriptor and the constructor of its value in one number, then two bytes that most often are the
# value's size and count.
_begin = struct.Struct(">IBB").unpack_from
_size_and_count = struct.Struct(">II").unpack_from


def _take_apart_usual(message: bytes, want_message_id: bool, new_id: NewId | None = None) -> Incoming | None:
    """`take_apart` of a message whose sections are in order and end with one data section or value; else None."""
    length = len(message)
    flags = priority = annotation_values = annotation_bytes = properties_bytes = application_properties_bytes = 0
    ttl_ms: int | None = None
    extra: content.Extra = {}
    pairs: bytes | None = None
    at = 0
    begin, size, count = _begin(message)
    if begin == 0x005370C0:
        flags, priority, ttl_ms = content.header(message[3 : 5 + size])
        if ttl_ms == content.UINT_MAX:
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
        pairs, annotation_values = content.annotations(message, pairs_at, end, count, extra)
        annotation_bytes = end - pairs_at if pairs is None else len(pairs)
        at = end
        begin, size, count = _begin(message, at)
    bare = at
    has_id = False
    if begin == 0x005373C0:
        properties_bytes = 5 + size
        has_id = count > 0 and message[at + 6] != 0x40
        end = at + properties_bytes
        content.properties(message, at + 6, end, count, extra, want_message_id)
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
        content.properties(message, at + 12, end, count, extra, want_message_id)
    if end != at:
        at = end
        begin, size, count = _begin(message, at)
    if begin == 0x005374C1:
        application_properties_bytes = 5 + size
        end = at + application_properties_bytes
        content.application_properties(message, at + 6, end, count)
    elif begin == 0x005374D1:
        size, count = _size_and_count(message, at + 4)
        if size > MAX_HEADER_BYTES:
            return None
        application_properties_bytes = 8 + size
        end = at + application_properties_bytes
        content.application_properties(message, at + 12, end, count)
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
    if content.EXTRA_PARTITION_KEY in extra:
        content.check_keys(extra)
    if not has_id and new_id is not None:
        properties = content.with_message_id(message[bare : bare + properties_bytes], new_id())
        rest = memoryview(message)[bare + properties_bytes :]
        if not annotation_bytes:
            stored = b"".join((properties, rest))
        else:
            stored = b"".join((message[pairs_at:bare] if pairs is None else pairs, properties, rest))
        properties_bytes = len(properties)
    elif pairs is None:
        stored = message[pairs_at:]  # the pairs stand right before the bare message
    else:
        stored = b"".join((pairs, memoryview(message)[bare:]))
    return (
        LAYOUT.pack(
            flags, priority, annotation_values, annotation_bytes, properties_bytes, application_properties_bytes
        ),
        stored,
        ttl_ms,
        extra or None,
    )


# --- the general way --------------------------------------------------------------------------------------------------

_SECTIONS: Final = frozenset(range(Descriptor.HEADER, Descriptor.FOOTER + 1))
_KINDS: Final[dict[Any, Descriptor]] = {
    name_or_code: kind
    for name, kind in DESCRIPTOR_OF.items()
    if kind in _SECTIONS
    for name_or_code in (name, int(kind))
}

_LIST: Final = frozenset((0x45, 0xC0, 0xD0))
_MAP: Final = frozenset((0xC1, 0xD1))
_CONSTRUCTORS: Final = {
    Descriptor.HEADER: _LIST,
    Descriptor.DELIVERY_ANNOTATIONS: _MAP,
    Descriptor.MESSAGE_ANNOTATIONS: _MAP,
    Descriptor.PROPERTIES: _LIST,
    Descriptor.APPLICATION_PROPERTIES: _MAP,
    Descriptor.DATA: frozenset((0xA0, 0xB0)),
    Descriptor.AMQP_SEQUENCE: _LIST,
    Descriptor.AMQP_VALUE: frozenset(range(256)),
    Descriptor.FOOTER: _MAP,
}
_BODY: Final = (Descriptor.DATA, Descriptor.AMQP_SEQUENCE, Descriptor.AMQP_VALUE)


class Section(NamedTuple):
    """One section: its value is at `value` to `end` of the message, its descriptor from `start` on."""

    kind: Descriptor
    start: int
    value: int
    end: int


def scan(message: bytes, max_sections: int = MAX_SECTIONS) -> Iterator[Section]:
    """The sections of a message in the order they are in. Raises DecodeError and LimitExceeded.

    Descriptors may be any encoding of the code or the symbol; the values' types are checked, their content is not.
    """
    at = count = 0
    while at < len(message):
        count += 1
        if count > max_sections:
            raise LimitExceeded("number of sections in a message", max_sections)
        start = at
        if message[at] != 0:
            raise DecodeError("a section should begin with a descriptor", at)
        descriptor, at = decode(message, at + 1)
        kind = _KINDS.get(descriptor) if type(descriptor) in (ULong, Symbol) else None
        if kind is None:
            raise DecodeError("no section of a message has this descriptor", start)
        end = skip(message, at)
        if message[at] not in _CONSTRUCTORS[kind]:
            raise DecodeError(f"section {kind:#x} of a wrong type", at)
        yield Section(kind, start, at, end)
        at = end


def _take_apart_any(message: bytes, want_message_id: bool, new_id: NewId | None = None) -> Incoming:
    found: dict[Descriptor, Section] = {}
    rest = []
    body_bytes = 0
    for section in scan(message):
        kind = section.kind
        if kind in _BODY:
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

    extra: content.Extra = {}
    flags, priority, ttl_ms = 0, 0, None
    header = found.get(Descriptor.HEADER)
    if header:
        try:
            flags, priority, ttl_ms = content.header(message[header.value : header.end])
        except DecodeError as error:
            raise DecodeError(error.reason, header.value + error.offset) from None
    annotations = found.get(Descriptor.MESSAGE_ANNOTATIONS)
    pairs, annotation_values = b"", 0
    if annotations:
        at, end, count = _content(message, annotations)
        kept, annotation_values = content.annotations(message, at, end, count, extra)
        pairs = message[at:end] if kept is None else kept
    delivery_annotations = found.get(Descriptor.DELIVERY_ANNOTATIONS)
    if delivery_annotations:
        pair = content.delivery_annotations(message, *_content(message, delivery_annotations))
        if pair:
            flags |= content.HAS_DELIVERY_ANNOTATIONS
            pairs = pair + pairs
            annotation_values += 2
    properties = found.get(Descriptor.PROPERTIES)
    properties_section, has_id = b"", False
    if properties:
        at, end, count = _content(message, properties)
        content.properties(message, at, end, count, extra, want_message_id)
        properties_section = _usual_form(message, properties)
        has_id = count > 0 and message[at] != 0x40
        if ttl_ms == content.UINT_MAX:
            ttl_ms = content.longer_ttl(message[properties.value : properties.end])
    application_properties = found.get(Descriptor.APPLICATION_PROPERTIES)
    if application_properties:
        content.application_properties(message, *_content(message, application_properties))
    if content.EXTRA_PARTITION_KEY in extra:
        content.check_keys(extra)

    if not has_id and new_id is not None:
        properties_section = content.with_message_id(properties_section, new_id())
    parts = [_usual_form(message, part) for part in (application_properties, *rest) if part]
    return (
        LAYOUT.pack(
            flags,
            priority,
            annotation_values,
            len(pairs),
            len(properties_section),
            len(_usual_form(message, application_properties)) if application_properties else 0,
        ),
        b"".join((pairs, properties_section, *parts)),
        ttl_ms,
        extra or None,
    )


def _content(message: bytes, section: Section) -> tuple[int, int, int]:
    """Where the values of a list or map begin and end, and how many the section says there are."""
    at, end = section.value, section.end
    constructor = message[at]
    if constructor == 0x45:
        return end, end, 0
    if constructor < 0xD0:
        return at + 3, end, message[at + 2]
    return at + 9, end, int.from_bytes(message[at + 5 : at + 9], "big")


def _usual_form(message: bytes, section: Section) -> bytes:
    return bytes((0, 0x53, section.kind)) + message[section.value : section.end]
