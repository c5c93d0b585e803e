"""Requests to $cbs and $management, and their responses, as messages.

A request is a message with an operation in its application properties and an argument in its amqp-value. The response
carries the request's message-id as its correlation-id, with the same AMQP type: Python sends a uuid, Java a ulong,
others a string, and each expects its own type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from protocol.codec import Buffer, Described, decode, encode
from protocol.errors import DecodeError, InvalidField
from protocol.symbols import DESCRIPTOR_OF, Descriptor

# Of a request that is refused unread, so much is kept for the answer: there its message-id and reply-to are.
HEAD_BYTES = 16 << 10

_MESSAGE_ID, _REPLY_TO, _CORRELATION_ID = 0, 4, 5  # fields of the properties (3.2.4)


@dataclass(frozen=True, slots=True)
class Request:
    """`message_id` is a number, uuid, binary, string or None; `properties` are the application properties."""

    message_id: Any
    reply_to: str | None
    properties: Mapping[str, Any]
    body: Any


def parse(message: Buffer) -> Request:
    """Parse a request, whose sections may be in any order. Raises DecodeError, LimitExceeded or InvalidField."""
    sections: dict[int, Any] = {}
    offset = 0
    while offset < len(message):
        offset = _read_section(message, offset, sections)
    return _request_of(sections)


def parse_head(head: Buffer) -> Request:
    """Parse what there is of a request that was cut off, for an answer to it: its body is None.

    Raises DecodeError, LimitExceeded or InvalidField, also if its properties are not there.
    """
    sections: dict[int, Any] = {}
    offset = 0
    try:
        while offset < len(head):
            offset = _read_section(head, offset, sections)
    except DecodeError:
        if Descriptor.PROPERTIES not in sections:
            raise
    if Descriptor.PROPERTIES not in sections:
        raise DecodeError("the beginning of a request without properties", offset)
    sections.pop(Descriptor.AMQP_VALUE, None)
    return _request_of(sections)


def _read_section(message: Buffer, offset: int, sections: dict[int, Any]) -> int:
    """Add the section at this offset; returns its end."""
    section, end = decode(message, offset)
    if not isinstance(section, Described):
        raise DecodeError("a value where a section of a message is due", offset)
    descriptor = section.descriptor
    code = DESCRIPTOR_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
    if isinstance(code, int):
        sections[code] = section.value
    return end


def _request_of(sections: dict[int, Any]) -> Request:
    fields = sections.get(Descriptor.PROPERTIES) or []
    if not isinstance(fields, list):
        raise InvalidField("properties", "not a list")
    properties = sections.get(Descriptor.APPLICATION_PROPERTIES) or {}
    if not isinstance(properties, dict):
        raise InvalidField("application-properties", "not a map")
    fields += [None] * (_CORRELATION_ID + 1 - len(fields))
    message_id = fields[_MESSAGE_ID] if fields[_MESSAGE_ID] is not None else fields[_CORRELATION_ID]
    if not isinstance(message_id, int | UUID | bytes | str | None):
        raise InvalidField("message-id", "not a number, uuid, binary or string")
    reply_to = fields[_REPLY_TO]
    if not isinstance(reply_to, str | None):
        raise InvalidField("reply-to", "not a string")
    return Request(message_id, reply_to, properties, sections.get(Descriptor.AMQP_VALUE))


def text(value: Any) -> str | None:
    """The text of a string, or of a binary, as Python sends its operations; None for other types."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value if isinstance(value, str) else None


def encode_response(request: Request, properties: Mapping[str, Any], body: Any) -> bytes:
    """The response to `request`, with `properties` as its application properties and `body` as its amqp-value."""
    fields = [None] * _CORRELATION_ID + [request.message_id]
    return b"".join(
        encode(Described(code, value))
        for code, value in (
            (Descriptor.PROPERTIES, fields),
            (Descriptor.APPLICATION_PROPERTIES, dict(properties)),
            (Descriptor.AMQP_VALUE, body),
        )
    )
