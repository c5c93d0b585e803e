"""Messages to a coordinator of transactions, and the transactional states of outcomes (AMQP 1.0, 4.5)."""

from typing import Any, NamedTuple

from protocol.codec import Described
from protocol.errors import DecodeError, InvalidField
from protocol.nodes.request_message import parse as parse_request
from protocol.symbols import DESCRIPTOR_OF, Descriptor


class Declare(NamedTuple):
    """Begin a transaction (4.5.2)."""


class Discharge(NamedTuple):
    """End a transaction (4.5.3)."""

    transaction: bytes
    fail: bool


class TransactionalOutcome(NamedTuple):
    """`state` is the code of an outcome, with its fields in order."""

    state: int
    fields: list[Any]


def parse(message: bytes) -> Declare | Discharge:
    """The declare or discharge in a message to a coordinator. Raises DecodeError, LimitExceeded or InvalidField."""
    body = parse_request(message).body
    code, fields = _described(body)
    if code == Descriptor.DECLARE:
        if fields and fields[0] is not None:
            raise InvalidField("global-id", "distributed transactions are not offered")
        return Declare()
    if code == Descriptor.DISCHARGE:
        transaction, fail = (*fields, None, None)[:2]
        if not isinstance(transaction, bytes):
            raise InvalidField("txn-id", "is not binary")
        if not isinstance(fail, bool | None):
            raise InvalidField("fail", "is not a boolean")
        return Discharge(transaction, bool(fail))
    raise DecodeError("a message to a coordinator that is neither declare nor discharge", 0)


def outcome_of(value: Described | None) -> TransactionalOutcome | None:
    """The outcome in a transactional-state (4.5.8); None if it has no known outcome (3.4)."""
    code, fields = _described(value)
    if code is None or not Descriptor.ACCEPTED <= code <= Descriptor.MODIFIED:
        return None
    return TransactionalOutcome(code, fields)


def _described(value: Any) -> tuple[int | None, list[Any]]:
    if not isinstance(value, Described):
        return None, []
    descriptor = value.descriptor
    code = DESCRIPTOR_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
    if not isinstance(code, int) or isinstance(code, bool):
        return None, []
    return int(code), value.value if isinstance(value.value, list) else []
