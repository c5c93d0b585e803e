"""Whether a message's properties have grown past the limit of a sender, which dead-letters it (DL4).

They grow by what the actions of rules and receivers set. To look at the sections of a stored message, all of it is
read. So they are only looked at if what is known does not decide, and as long as the turn has work left.
"""

from typing import Any

from broker.partition.messages.moves import DESCRIPTION, REASON, Properties
from broker.partition.state.core import Core
from broker.partition.state.locks import Held
from broker.partition.state.tally import HEADER_SIZE_EXCEEDED
from protocol.errors import ProtocolError
from protocol.message.intake import MAX_HEADER_BYTES
from protocol.message.rendering import header_bytes
from storage.records import MESSAGE_HEADER_BYTES, Field, Overlay, message_parts

TEXT = "The size quota for this stream exceeded the limit."
SAID: Properties = {REASON: HEADER_SIZE_EXCEEDED, DESCRIPTION: TEXT}

_PAIR_BYTES = 16  # what a pair has besides name and value, at most
_READ_PER_WORK = 64 * 1024  # bytes that cost a turn as much as another record


def exceed_with(core: Core, held: Held, properties: Properties) -> bool:
    """True if the message's properties are too many once a receiver has set these."""
    (_, message_id, _, overlay), size, *_ = held
    before: Overlay = overlay or {}
    set_since = {**(before.get(Field.PROPERTIES) or {}), **properties}
    system: dict[int, bytes | None] = before.get(Field.SYSTEM) or {}
    if sizes_of(set_since) > MAX_HEADER_BYTES:
        return True
    if size - MESSAGE_HEADER_BYTES + most_bytes(set_since, system) <= MAX_HEADER_BYTES:
        return False
    if core.turn.work and core.work_left() <= 0:
        return False
    core.turn.work += 1 + size // _READ_PER_WORK
    record = core.bodies.read_one(message_id)
    return record is not None and exceed(*message_parts(record), set_since, system)


def exceed(layout: bytes, body: bytes, properties: Properties, system: dict[int, bytes | None]) -> bool:
    """True if the properties of a message with these stored bytes are too many with these changes."""
    try:
        return header_bytes(layout, body, properties, system) > MAX_HEADER_BYTES
    except (ProtocolError, IndexError):
        return False  # whoever receives it cannot read it either


def most_bytes(properties: Properties, system: dict[int, bytes | None]) -> int:
    """What these changes add, at most."""
    added_bytes = sizes_of(properties) + sum(len(value or b"") for value in system.values())
    return added_bytes + _PAIR_BYTES * (len(properties) + len(system) + 2)


def sizes_of(properties: dict[str, Any]) -> int:
    """Bytes of names and values."""
    return sum(map(size_of_pair, properties.items()))


def size_of_pair(item: tuple[str, str | bytes | None]) -> int:
    name, value = item
    return len(name.encode()) + len(value.encode() if isinstance(value, str) else value or b"")
