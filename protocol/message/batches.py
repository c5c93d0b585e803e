"""Several messages in one transfer: message format 0x80013700.

The payload is a message (the envelope) whose body is data sections, each one encoded message. The envelope's own
properties repeat those of the first message as a hint for routing, and are ignored here.
"""

from collections.abc import Iterable
from typing import Final

from protocol.codec import encode
from protocol.errors import DecodeError, EmptyBatch, LimitExceeded
from protocol.message.sections import scan
from protocol.symbols import Descriptor

MAX_BATCH_MESSAGES: Final = 16_384  # about as many of the smallest messages that clients send fill 1 MiB
_ENVELOPE_SECTIONS: Final = 16  # besides the data sections
_DATA: Final = bytes((0x00, 0x53, Descriptor.DATA))


def unpack_batch(payload: bytes, max_messages: int = MAX_BATCH_MESSAGES) -> list[bytes]:
    """The encoded messages in order; they are not checked.

    Raises EmptyBatch for an envelope without messages, DecodeError for one that is malformed or has another kind of
    body, and LimitExceeded for more than `max_messages`.
    """
    messages: list[bytes] = []
    for section in scan(payload, max_messages + _ENVELOPE_SECTIONS):
        if section.kind is Descriptor.DATA:
            if len(messages) == max_messages:
                raise LimitExceeded("number of messages in a batch", max_messages)
            constructor = payload[section.value]
            if constructor == 0x40:
                raise DecodeError("a message of a batch that is null", section.value)
            size_bytes = 1 if constructor == 0xA0 else 4
            messages.append(payload[section.value + 1 + size_bytes : section.end])
        elif section.kind in (Descriptor.AMQP_VALUE, Descriptor.AMQP_SEQUENCE):
            raise DecodeError("a batch whose body is not data", section.start)
    if not messages:
        raise EmptyBatch
    return messages


def pack_batch(messages: Iterable[bytes]) -> bytes:
    """The payload of a batch of these encoded messages, to which `unpack_batch` is the inverse."""
    return b"".join(_DATA + encode(message) for message in messages)


def batch_bytes(message_bytes: int) -> int:
    """What a message of this size adds to a batch, at most."""
    return len(_DATA) + 5 + message_bytes
