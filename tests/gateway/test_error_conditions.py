"""Every error has its condition, and the condition its status."""

from typing import TypeVar

import pytest

from broker.errors import BrokerError
from broker.gateway.conditions import CONDITION, condition_of
from protocol import conditions
from protocol.errors import DecodeError, HeaderTooLarge, InvalidField, LimitExceeded, ProtocolError, UnequalKeys
from protocol.nodes.management import STATUS

Kind = TypeVar("Kind", BrokerError, ProtocolError)


def kinds(base: type[Kind]) -> set[type[Kind]]:
    return {base} | {kind for child in base.__subclasses__() for kind in kinds(child)}


def test_every_broker_error_has_a_condition_and_a_status() -> None:
    assert kinds(BrokerError) - {BrokerError} == set(CONDITION)
    assert all(condition in STATUS for condition in CONDITION.values())


PROTOCOL_ERRORS = sorted(kinds(ProtocolError), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", PROTOCOL_ERRORS)
def test_every_protocol_error_has_a_condition(kind: type[ProtocolError]) -> None:
    assert condition_of(kind.__new__(kind)).startswith(("amqp:", "com.microsoft:"))


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        (DecodeError("x", 0), conditions.DECODE_ERROR),
        (LimitExceeded("message-id", 128), conditions.ARGUMENT_ERROR),
        (HeaderTooLarge("header", 65536), conditions.ARGUMENT_ERROR),
        (InvalidField("partition key", "x"), conditions.ARGUMENT_ERROR),
        (UnequalKeys("partition key", "x"), conditions.NOT_ALLOWED),
    ],
)
def test_a_message_that_breaks_a_rule_has_a_condition(error: ProtocolError, condition: str) -> None:
    assert condition_of(error) == condition
