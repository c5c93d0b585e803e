"""Messages as commands read, print and correct them."""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.printable import json_text
from storage import wording

if TYPE_CHECKING:
    from protocol.client.messages import Message

DEAD_LETTER_SUFFIX = "/$deadletterqueue"


def named(name: str | None) -> str | None:
    """Check the name of an entity that an argument or option gives."""
    if name is not None and not name.strip("/"):
        raise typer.BadParameter("names nothing")
    return name


QueueArgument = Annotated[
    str,
    typer.Argument(
        metavar="QUEUE", help="The name of a queue, or a subscription as TOPIC/subscriptions/NAME.", callback=named
    ),
]


DeadLetterOption = Annotated[bool, typer.Option("--dead-letter", help="Use its dead-letter queue.")]


def address_of(queue: str, dead_letter: bool) -> str:
    return queue + DEAD_LETTER_SUFFIX if dead_letter else queue


def is_dead_letter(address: str) -> bool:
    """Dead-letter queues have no sessions, whatever their entity has."""
    return address.lower().endswith(DEAD_LETTER_SUFFIX)


def counted(count: int) -> str:
    return wording.counted(count, "message")


class State(StrEnum):
    """Locked messages are active."""

    ACTIVE = "active"
    DEFERRED = "deferred"
    SCHEDULED = "scheduled"


StateOption = Annotated[
    list[State] | None, typer.Option("--state", help="Only messages in this state; may be repeated.")
]


def state_of(message: "Message") -> State | None:
    """Return the state of a message that was browsed; None for one that was received."""
    state = message.annotations.get("x-opt-message-state")
    return None if state is None else (State.ACTIVE, State.DEFERRED, State.SCHEDULED)[state]


def require_values(values: Mapping[str, Any]) -> None:
    """End the command if AMQP has no such values."""
    from protocol.client.messages import Message

    try:
        Message.of(b"", application_properties=dict(values)).encode()
    except (TypeError, ValueError) as error:
        fail(f"AMQP has no such value: {error}", WRONG_USE)


def corrected(message: "Message", changes: Mapping[str, Any], removals: Sequence[str] = ()) -> "Message":
    """Return a dead-lettered message to send again, without the broker's annotations and with changed properties.

    Its time to live starts again.
    """
    from protocol import symbols

    for annotation in (
        symbols.SEQUENCE_NUMBER,
        symbols.ENQUEUED_TIME,
        symbols.LOCKED_UNTIL,
        symbols.ENQUEUE_SEQUENCE_NUMBER,
        symbols.DEADLETTER_SOURCE,
        symbols.MESSAGE_STATE,
        symbols.SCHEDULED_ENQUEUE_TIME,
    ):
        message.annotations.pop(annotation, None)
    is_of_fragment = message.annotations.pop(symbols.PARTITION_ID, None) is not None
    ids = (message.group_id, str(message.message_id))
    if is_of_fragment and message.annotations.get(symbols.PARTITION_KEY) in ids:
        # It is perhaps not its sender's, but was added by the partitioned entity. Without it the same key chooses the
        # fragment again, also if the session is to be another.
        message.annotations.pop(symbols.PARTITION_KEY, None)
    for name in (symbols.DEAD_LETTER_REASON, symbols.DEAD_LETTER_ERROR_DESCRIPTION, *removals):
        message.application_properties.pop(name, None)
    message.application_properties.update(changes)
    message.delivery_count = None
    if message.ttl_ms is not None:
        # If there is a time to live, the broker has set these, from the time to live that has ended.
        message.absolute_expiry_ms = message.creation_ms = None
    return message


def print_message(message: "Message") -> None:
    """Print a message as one line of JSON; what it does not have is left out."""
    annotations = message.annotations
    times = {
        name: datetime.fromtimestamp(annotations[key] / 1000, UTC).isoformat(timespec="milliseconds")
        for name, key in (("enqueued", "x-opt-enqueued-time"), ("scheduled", "x-opt-scheduled-enqueue-time"))
        if key in annotations
    }
    fields = {
        "sequence_number": message.sequence_number,
        "message_id": message.message_id,
        "subject": message.subject,
        "content_type": message.content_type,
        "correlation_id": message.correlation_id,
        "session_id": message.group_id,
        "delivery_count": message.delivery_count,
        "state": state_of(message),
        **times,
        "properties": message.application_properties or None,
    }
    shown = {name: _plain(value) for name, value in fields.items() if value is not None}
    typer.echo(json_text(shown | {"body": _plain(message.content())}))


def _plain(value: Any) -> Any:
    """Return an AMQP value as a JSON value; bytes that are not text become {"base64": ...}."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # JSON has no such number
    if isinstance(value, str | int | float | None):
        return value
    try:
        return [_plain(item) for item in value]
    except TypeError:
        return str(value)
