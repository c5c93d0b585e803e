"""Typed exceptions for wrong bytes from a peer.

The code that finds wrong bytes raises them. The gateway translates each class to a condition and a scope. Mistakes in
our own code, such as encoding a value that has no AMQP type, raise TypeError or ValueError instead.
"""


class ProtocolError(Exception):
    """A peer's mistake. The text names what is wrong and may be shown to the peer."""


class DecodeError(ProtocolError):
    """The bytes are not valid AMQP. `offset` counts from the start of the given bytes."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at byte {offset}")
        self.reason = reason
        self.offset = offset


class LimitExceeded(ProtocolError):
    """The bytes are well formed, but exceed a limit. `limit` is its name, `maximum` its value."""

    def __init__(self, limit: str, maximum: int, unit: str = "") -> None:
        super().__init__(f"the {limit} exceeds the limit of {maximum}{unit and ' '}{unit}")
        self.limit = limit
        self.maximum = maximum


class HeaderTooLarge(LimitExceeded):
    """A message without its body, or one application property, is larger than allowed."""


class EmptyBatch(ProtocolError):
    """A batch of messages without messages."""

    def __init__(self) -> None:
        super().__init__("a batch without messages")


class InvalidField(ProtocolError):
    """A part of a message is well formed, but its type or value is not allowed. `field` names the part."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class UnequalKeys(InvalidField):
    """The session id and the partition key of a message differ."""
