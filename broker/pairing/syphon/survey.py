"""What peeking shows of a message in a backlog queue."""

from typing import Final, NamedTuple

from broker.pairing.aliases import PATH
from protocol.client.messages import Message
from protocol.errors import ProtocolError
from protocol.symbols import MESSAGE_STATE, SEQUENCE_NUMBER

ACTIVE: Final = 0
DEFERRED: Final = 1


class Seen(NamedTuple):
    """A message in the queue. `path` is its destination, None if it has none."""

    number: int
    state: int
    path: str | None


def seen(message: bytes) -> Seen | None:
    """A peeked message; None if it cannot be read."""
    try:
        parsed = Message.decode(message)
    except (ProtocolError, IndexError, TypeError, ValueError):
        return None
    number, state = parsed.annotations.get(SEQUENCE_NUMBER), parsed.annotations.get(MESSAGE_STATE, ACTIVE)
    path = parsed.application_properties.get(PATH)
    if not isinstance(number, int) or not isinstance(state, int):
        return None
    return Seen(int(number), int(state), str(path) if isinstance(path, str) else None)
