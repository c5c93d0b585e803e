"""A dead letter as the message that is sent again: without what the broker has added, and with repaired fields.

What is not repaired stays as its sender wrote it: an application property keeps its bytes, the body its sections.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from broker.cli.messages import corrected
from protocol.client.messages import Message, data_section, value_section
from protocol.codec import Char, Symbol, decode, encode, skip
from protocol.message.fields import MAX_ID_CHARACTERS
from protocol.message.sections import content_of, scan
from protocol.symbols import DEAD_LETTER_ERROR_DESCRIPTION, DEAD_LETTER_REASON, PARTITION_KEY, Descriptor
from pyspark_peeklock.decoding import text_of

# Columns of the source that can be repaired, and the fields of `Message` that are texts.
_FIELDS: Final = {
    "sessionId": "group_id",
    "correlationId": "correlation_id",
    "subject": "subject",
    "replyTo": "reply_to",
    "contentType": "content_type",
}
REPAIRABLE: Final = ("body", "applicationProperties", *_FIELDS, "partitionKey")
_OF_DEAD_LETTERS: Final = (DEAD_LETTER_REASON, DEAD_LETTER_ERROR_DESCRIPTION)
_DIGITS: Final = 60  # of an id's words, of a sequence number, a time and a round


class Unrepairable(Exception):
    """The repaired values make no message. The text names the column."""


def message_id(entity: str, enqueued_ms: int, number: int, attempt: int) -> str:
    """The id under which a dead letter is sent: `resubmit/<origin>/<sequence number>/<round>`.

    The origin is the entity and, because one that was deleted and made again counts its messages anew, the time when
    this one came there. It is a digest of both if the entity's name is too long for an id.
    """
    if len(entity) > MAX_ID_CHARACTERS - _DIGITS:
        entity = hashlib.sha256(entity.encode()).hexdigest()
    return f"resubmit/{entity}@{enqueued_ms:x}/{number}/{attempt}"


def repaired(dead_letter: bytes, new_id: str, changes: Mapping[str, Any]) -> bytes:
    """The encoded message to send. `changes` has the columns of REPAIRABLE that differ from the source's, with their
    new values: bytes, a dict of texts, or a text, and None to remove.

    Raises Unrepairable, ProtocolError, TypeError or ValueError.
    """
    message = Message.decode(dead_letter)
    properties = _application_properties(dead_letter, changes)
    corrected(message, {})
    message.application_properties = {}
    message.message_id = new_id
    for column, value in changes.items():
        if column in _FIELDS:
            setattr(message, _FIELDS[column], value)
        elif column == "partitionKey" and value is None:
            message.annotations.pop(PARTITION_KEY, None)
        elif column == "partitionKey":
            message.annotations[PARTITION_KEY] = value
        elif column == "body":
            message.body = _body(message, value)
    # The section of properties goes between those that `encode` writes and the body, which it takes as it is.
    message.body = properties + (message.body or data_section(b""))
    return message.encode()


def _body(message: Message, value: bytes | None) -> bytes:
    """A body of the kind that the message had."""
    if value is None:
        raise Unrepairable("body is null")
    before = message.content()
    if not isinstance(before, str):
        return data_section(value)
    try:
        return value_section(value.decode())
    except UnicodeDecodeError:
        raise Unrepairable("body was a text, and is no valid UTF-8 now") from None


def _application_properties(message: bytes, changes: Mapping[str, Any]) -> bytes:
    """The section, empty if there are none. Only changed values are encoded anew."""
    wanted = (changes["applicationProperties"] or {}) if "applicationProperties" in changes else None
    pairs: dict[str, bytes] = {}
    for name, pair, value in _pairs(message):
        if wanted is None or (name in wanted and wanted[name] == text_of(value)):
            pairs[name] = pair
        elif name in wanted:
            pairs[name] = encode(name) + encode(_of_type(value, wanted[name]))
    for name in (wanted or {}).keys() - pairs.keys():
        pairs[name] = encode(name) + encode((wanted or {})[name])
    for name in _OF_DEAD_LETTERS:
        pairs.pop(name, None)
    if not pairs:
        return b""
    content = b"".join(pairs.values())
    size, count = (len(content) + 4).to_bytes(4, "big"), (2 * len(pairs)).to_bytes(4, "big")
    return bytes((0, 0x53, Descriptor.APPLICATION_PROPERTIES, 0xD1)) + size + count + content


def _pairs(message: bytes) -> list[tuple[str, bytes, Any]]:
    """Return of each application property the name, the bytes of name and value, and the value."""
    found = []
    for section in scan(message):
        if section.kind is Descriptor.APPLICATION_PROPERTIES:
            at, end, _ = content_of(message, section)
            while at < end:
                name, value_at = decode(message, at)
                behind = skip(message, value_at)
                found.append((str(name), message[at:behind], decode(message, value_at)[0]))
                at = behind
    return found


def _of_type(before: Any, text: str | None) -> Any:
    """The text as a value of the type that the property had, or as a string if it is none of these."""
    kind = type(before)
    if text is None or kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if issubclass(kind, int | float | UUID | Char | Symbol):
        try:
            value = kind(text)
            encode(value)
        except ValueError:
            return text
        return value
    return text
