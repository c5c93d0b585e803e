"""Finds the sections of a message (AMQP 1.0, 3.2): where each begins and ends.

A section is a described value. Its content is checked in `fields`.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from protocol.codec import Symbol, ULong, decode, skip
from protocol.errors import DecodeError, LimitExceeded
from protocol.symbols import DESCRIPTOR_OF, Descriptor

MAX_SECTIONS: Final = 10_000  # in one message; about 20 ms of work

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
    Descriptor.DATA: frozenset((0xA0, 0xB0, 0x40)),  # null is no binary, but clients send it, and Service Bus takes it
    Descriptor.AMQP_SEQUENCE: _LIST,
    Descriptor.AMQP_VALUE: frozenset(range(256)),
    Descriptor.FOOTER: _MAP,
}
BODY: Final = (Descriptor.DATA, Descriptor.AMQP_SEQUENCE, Descriptor.AMQP_VALUE)


class Section(NamedTuple):
    """One section: its value is at `value` to `end` of the message, its descriptor from `start` on."""

    kind: Descriptor
    start: int
    value: int
    end: int


def scan(message: bytes, max_sections: int = MAX_SECTIONS) -> Iterator[Section]:
    """The sections of a message in their order. Raises DecodeError and LimitExceeded.

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


def content_of(message: bytes, section: Section) -> tuple[int, int, int]:
    """The begin and end of the values of a section's list or map, and their number by its encoding."""
    at, end = section.value, section.end
    constructor = message[at]
    if constructor == 0x45:
        return end, end, 0
    if constructor < 0xD0:
        return at + 3, end, message[at + 2]
    return at + 9, end, int.from_bytes(message[at + 5 : at + 9], "big")


def usual_form(message: bytes, section: Section) -> bytes:
    """The section with its descriptor in the form that every client reads: 00 53 xx."""
    return bytes((0, 0x53, section.kind)) + message[section.value : section.end]
