"""Typed exceptions of the client, with the peer's condition and description."""

from typing import Self


class ClientError(Exception):
    """`condition` is the peer's AMQP error condition, empty if it gave none; `description` its text, or ours."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{description} ({condition})" if condition and description else description or condition)
        self.condition = condition
        self.description = description

    def again(self) -> Self:
        """A copy of the error for another task: one exception raised in several tasks would mix their tracebacks."""
        return type(self)(self.condition, self.description)


class ConnectionLost(ClientError):
    """The connection could not be made, or it ended. Unanswered operations may or may not have been done."""


class AuthenticationFailed(ClientError):
    """The peer refuses our credentials or our token."""


class LinkDetached(ClientError):
    """The peer did not attach the link, or has ended it. Unanswered operations may or may not have been done."""


class LinkClosed(LinkDetached):
    """The link, or its connection, was closed from our side."""


class MessageRefused(ClientError):
    """The peer did not accept the message: `rejected`, with the reason (3.4.2)."""


class MessageReturned(ClientError):
    """The peer did not accept the message, but it is not wrong: `released` or `modified`. A retry may help."""


class SettlementRefused(ClientError):
    """The outcome of a received message was not applied; mostly because its lock was lost."""


class RequestFailed(ClientError):
    """A node answered a request with a failure. `status` is the HTTP-like status code."""

    def __init__(self, condition: str, description: str, status: int = 500) -> None:
        super().__init__(condition, description)
        self.status = status

    def again(self) -> Self:
        return type(self)(self.condition, self.description, self.status)


class NeedsPeeklock(ClientError):
    """The peer does not have this operation, which is Peeklock's own."""
