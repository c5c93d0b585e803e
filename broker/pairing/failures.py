"""Which failures of a send say that the primary is unavailable (PN4).

A failure counts if the message could have been stored in a primary that works: nobody answers, the connection breaks,
the service fails, the entity is full or disabled. It does not count if the primary works, and only wants the sender to
wait (busy), or if the same send would fail on every day: no right, no such entity, a message that cannot be stored.
"""

from enum import Enum, auto
from typing import Final

from protocol import conditions
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, MessageRefused, MessageReturned


class Verdict(Enum):
    """What a failed send means."""

    UNAVAILABLE = auto()  # counts towards a failover
    WAIT = auto()  # does not count; the same send may succeed in the same place later
    FINAL = auto()  # does not count; the caller must be told


_WAIT: Final = frozenset({conditions.SERVER_BUSY})
_UNAVAILABLE: Final = frozenset(
    {
        conditions.INTERNAL_ERROR,
        conditions.RESOURCE_LIMIT_EXCEEDED,
        conditions.CONNECTION_FORCED,
        conditions.LINK_DETACH_FORCED,
        conditions.TIMEOUT,
        conditions.ENTITY_DISABLED,
        conditions.STORE_LOCK_LOST,
        conditions.PARTITION_NOT_OWNED,
    }
)
_OF_THE_MESSAGE: Final = frozenset(
    {
        conditions.LINK_MESSAGE_SIZE_EXCEEDED,
        conditions.DECODE_ERROR,
        conditions.INVALID_FIELD,
        conditions.ARGUMENT_ERROR,
        conditions.ARGUMENT_OUT_OF_RANGE,
    }
)


def verdict(error: BaseException) -> Verdict:
    """The meaning of an exception of `protocol.client`, or of TimeoutError, that ended a send to the primary."""
    match error:
        case AuthenticationFailed():
            return Verdict.FINAL
        case ClientError(condition=condition) if condition in _WAIT:
            return Verdict.WAIT
        case TimeoutError() | ConnectionLost() | MessageReturned():
            return Verdict.UNAVAILABLE
        case ClientError(condition=""):  # the peer has ended a link without a reason
            return Verdict.UNAVAILABLE
        case ClientError(condition=condition) if condition in _UNAVAILABLE:
            return Verdict.UNAVAILABLE
    return Verdict.FINAL


def is_of_the_message(error: BaseException) -> bool:
    """True if the message is at fault: no queue would take it."""
    return isinstance(error, MessageRefused) and error.condition in _OF_THE_MESSAGE
