"""Properties that a receiver sets while it settles, as the partition keeps them: names, and encoded AMQP values."""

from collections.abc import Collection, Mapping
from typing import Any

from protocol import codec
from protocol.codec import Array
from protocol.engine.rejections import MAX_REASON_CHARACTERS

DEAD_LETTER_REASON = "DeadLetterReason"
DEAD_LETTER_DESCRIPTION = "DeadLetterErrorDescription"


def encode_properties(properties: Mapping[Any, Any], directives: Collection[str] = ()) -> dict[str, Any] | None:
    """Keys as strings, values as encoded AMQP; pairs that cannot be application properties (11.2) are left out.

    Those with the names `directives` are meant for the partition, which refuses the settlement if it cannot read them.
    """
    return {
        str(name): codec.encode(value)
        for name, value in properties.items()
        if isinstance(name, str) and (name in directives or not isinstance(value, dict | list | Array))
    } or None


def dead_letter_properties(info: Mapping[Any, Any], description: str = "") -> dict[str, Any] | None:
    """Properties of a message that its receiver dead-letters, from the info map of `rejected` (amqp.md 6.1).

    Without an info map the description of the error becomes the description of the dead-lettered message.
    """
    properties: dict[str, Any] = {}
    for name, value in info.items():
        if name in (DEAD_LETTER_REASON, DEAD_LETTER_DESCRIPTION) and isinstance(value, str):
            properties[str(name)] = str(value)[:MAX_REASON_CHARACTERS]
        else:
            properties |= encode_properties({name: value}) or {}
    if description and DEAD_LETTER_DESCRIPTION not in properties:
        properties[DEAD_LETTER_DESCRIPTION] = description[:MAX_REASON_CHARACTERS]
    return properties or None
