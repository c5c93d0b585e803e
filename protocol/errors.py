"""Typed exceptions for wrong bytes from a peer.

Raised where it is found; the gateway translates each kind to a condition and a scope. Our own mistakes (encoding a
value that has no AMQP type) are TypeError and ValueError instead.
"""


class ProtocolError(Exception):
    """A peer's mistake. The text names what is wrong and may be shown to the peer."""


class DecodeError(ProtocolError):
    """Bytes that are not the AMQP they should be. `offset` counts from the start of the bytes given."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at byte {offset}")
        self.reason = reason
        self.offset = offset


class LimitExceeded(ProtocolError):
    """Well formed, but more than is allowed. `limit` names what is limited, `maximum` is the most allowed."""

    def __init__(self, limit: str, maximum: int, unit: str = "") -> None:
        super().__init__(f"the {limit} exceeds the limit of {maximum}{unit and ' '}{unit}")
        self.limit = limit
        self.maximum = maximum


class HeaderTooLarge(LimitExceeded):
    """Everything of a message but its body is larger than allowed, or one application property is."""


class InvalidField(ProtocolError):
    """A part of a message is well formed and not allowed to be what it is. `field` names the part."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
