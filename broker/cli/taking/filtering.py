"""`--where`: a condition in the SQL language of rules, evaluated on messages here (management.md 3.3)."""

from collections.abc import Callable

from broker.cli.ending import WRONG_USE, fail
from broker.rules.errors import InvalidRule
from broker.rules.filters import compile_filter
from broker.rules.message import MessageView
from protocol.client.messages import Message


def condition(expression: str) -> Callable[[Message], bool]:
    """Return a function that says whether a message is meant. Ends the command if the expression is wrong.

    A message on which the condition fails, or has no result, is not meant.
    """
    try:
        compiled = compile_filter(expression)
    except InvalidRule as error:
        fail(f"--where: {error}", WRONG_USE)

    def is_meant(message: Message) -> bool:
        try:
            return compiled.matches(view(message))
        except Exception:  # as the broker does: a filter that fails has no result for this message
            return False

    return is_meant


def view(message: Message) -> MessageView:
    properties = [
        message.message_id, message.user_id, message.to, message.subject, message.reply_to, message.correlation_id,
        message.content_type, message.content_encoding, message.absolute_expiry_ms, message.creation_ms,
        message.group_id, message.group_sequence, message.reply_to_group_id,
    ]  # fmt: skip
    given = {"DeliveryCount": message.delivery_count or 0}
    return MessageView(properties, message.application_properties, message.annotations, given)
