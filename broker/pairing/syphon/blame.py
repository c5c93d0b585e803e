"""Who is to blame for a send to the primary that has failed, and so what becomes of the messages.

| to blame | for example | its messages |
|---|---|---|
| the message | too large, no session id for a queue with sessions | dead letters, once it is known which of the batch |
| the destination | not there, a subscription | dead letters, all of them |
| the moment | disabled, full, busy, no right to send | wait for the destination, which is tried again |
| the primary | the connection has ended | go back to the backlog; nothing is sent any more |

A missing right is of the moment: who runs the syphon can give it, and the messages are not to blame.
"""

from enum import Enum, auto
from typing import Final, NamedTuple

from broker.pairing.aliases import MAX_PATH_CHARACTERS
from broker.pairing.failures import Verdict, verdict
from protocol import conditions
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkDetached, MessageRefused

# Reasons of dead letters
NOT_RESTORABLE: Final = "SyphonNotRestorable"
DESTINATION_NOT_FOUND: Final = "SyphonDestinationNotFound"
DESTINATION_NOT_ALLOWED: Final = "SyphonDestinationNotAllowed"
TOO_LARGE: Final = "SyphonMessageTooLarge"
REFUSED: Final = "SyphonMessageRefused"

MAX_TEXT_CHARACTERS: Final = 1024
_BACKLOG: Final = "/x-servicebus-transfer"


class Blame(Enum):
    MESSAGE = auto()
    DESTINATION = auto()
    MOMENT = auto()
    PRIMARY = auto()


class Fault(NamedTuple):
    """`reason` is that of a dead letter, and `text` its description."""

    blame: Blame
    reason: str
    text: str


_RIGHTS: Final = frozenset({conditions.UNAUTHORIZED_ACCESS, conditions.AUTH_FAILED})
_NOT_THERE: Final = frozenset({conditions.NOT_FOUND})
_NOT_FOR_SENDS: Final = frozenset({conditions.NOT_ALLOWED, conditions.NOT_IMPLEMENTED, conditions.INVALID_FIELD})


def fault_of(error: BaseException) -> Fault:
    """The fault in an exception of `protocol.client`, or a TimeoutError, that ended a send or an attach of a sender."""
    text = str(error)[:MAX_TEXT_CHARACTERS]
    match error:
        case ConnectionLost():
            return Fault(Blame.PRIMARY, REFUSED, text)
        case AuthenticationFailed():
            return Fault(Blame.MOMENT, REFUSED, text)
        case ClientError(condition=condition) if condition in _NOT_THERE:
            return Fault(Blame.DESTINATION, DESTINATION_NOT_FOUND, text)
        case LinkDetached(condition=condition) if condition in _NOT_FOR_SENDS:
            return Fault(Blame.DESTINATION, DESTINATION_NOT_ALLOWED, text)
        case MessageRefused(condition=conditions.LINK_MESSAGE_SIZE_EXCEEDED):
            return Fault(Blame.MESSAGE, TOO_LARGE, text)
        case MessageRefused(condition=condition) if condition not in _RIGHTS and verdict(error) is Verdict.FINAL:
            return Fault(Blame.MESSAGE, REFUSED, text)
    return Fault(Blame.MOMENT, REFUSED, text)


def why_not_a_destination(path: str) -> Fault | None:
    """Why a message must not be sent to this path of the primary, whoever has written it; None if it may.

    Sent to a request node, such as `$cbs`, it would be a request with the rights of the syphon. From a backlog queue
    there, another syphon would take it, perhaps to this one.
    """
    lower = path.lower()
    if not 0 < len(path) <= MAX_PATH_CHARACTERS or not path.isprintable() or "://" in path or path.startswith("/"):
        text = "is no name of a queue or topic"
    elif any(segment.startswith("$") for segment in lower.split("/")):
        text = "is a part of an entity that takes no messages"
    elif f"{_BACKLOG}/" in lower or lower.endswith((_BACKLOG, f"{_BACKLOG}-leases")):
        text = "is a backlog queue itself"
    else:
        return None
    return Fault(Blame.DESTINATION, DESTINATION_NOT_ALLOWED, f"The destination {path[:MAX_PATH_CHARACTERS]!r} {text}.")
