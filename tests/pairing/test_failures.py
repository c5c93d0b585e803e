"""Which failures of a send count towards a failover (PN4)."""

import pytest

from broker.errors import BrokerError
from broker.gateway.conditions import condition_of
from broker.pairing.failures import Verdict, is_of_the_message, verdict
from protocol import conditions
from protocol.client.errors import (
    AuthenticationFailed,
    ConnectionLost,
    LinkDetached,
    MessageRefused,
    MessageReturned,
)

COUNTING = {
    "amqp:internal-error",
    "amqp:resource-limit-exceeded",
    "amqp:connection:forced",
    "amqp:link:detach-forced",
    "com.microsoft:timeout",
    "com.microsoft:entity-disabled",
    "com.microsoft:store-lock-lost",
    "com.microsoft:partition-not-owned",
}
ALL = {value for name, value in vars(conditions).items() if name.isupper()}


@pytest.mark.parametrize("condition", sorted(ALL | {"amqp:something-else"}))
def test_a_condition_means_the_same_from_a_refusal_and_from_a_detach(condition):
    expected = Verdict.UNAVAILABLE if condition in COUNTING else Verdict.FINAL
    if condition == "com.microsoft:server-busy":
        expected = Verdict.WAIT
    assert verdict(MessageRefused(condition, "")) is expected
    assert verdict(LinkDetached(condition, "")) is expected


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionLost("", ""),
        ConnectionLost("amqp:not-found", ""),
        MessageReturned("", ""),
        LinkDetached("", ""),
    ],
)
def test_no_answer_counts(error):
    assert verdict(error) is Verdict.UNAVAILABLE


@pytest.mark.parametrize("error", [AuthenticationFailed("amqp:internal-error", ""), ValueError()])
def test_wrong_credentials_and_our_own_mistakes_do_not_count(error):
    assert verdict(error) is Verdict.FINAL


def test_only_a_refused_message_is_at_fault():
    assert is_of_the_message(MessageRefused("amqp:link:message-size-exceeded", ""))
    assert not is_of_the_message(MessageRefused("amqp:not-found", ""))
    assert not is_of_the_message(LinkDetached("amqp:link:message-size-exceeded", ""))


def test_all_that_the_broker_says_has_a_meaning_that_is_meant():
    """A new error of the broker must be put where it belongs."""
    known = {str(condition_of(kind(""))) for kind in BrokerError.__subclasses__()}
    assert known <= ALL
