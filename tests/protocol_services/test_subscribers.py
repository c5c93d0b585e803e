"""What the names of links say, as Qpid JMS builds them (its AmqpSubscriptionTracker)."""

import pytest

from protocol.subscribers import Subscriber, Wanted, subscriber_of

TOPIC, SHARED, GLOBAL = "topic", "shared", "global"
CLIENT = "client-1"


@pytest.mark.parametrize(
    ("link_name", "capabilities", "durable", "expected", "made"),
    [
        ("sub", (TOPIC,), True, Subscriber(Wanted.DURABLE, "sub", CLIENT), "sub$client-1$D"),
        ("sub", (TOPIC, SHARED), True, Subscriber(Wanted.DURABLE, "sub", CLIENT), "sub$client-1$D"),
        ("sub|2", (TOPIC, SHARED), True, Subscriber(Wanted.DURABLE, "sub", CLIENT), "sub$client-1$D"),
        ("sub|global", (TOPIC, SHARED, GLOBAL), True, Subscriber(Wanted.DURABLE, "sub", ""), "sub$$D"),
        ("sub|global12", (TOPIC, SHARED, GLOBAL), True, Subscriber(Wanted.DURABLE, "sub", ""), "sub$$D"),
        ("sub|volatile1", (TOPIC, SHARED), False, Subscriber(Wanted.SHARED, "sub", CLIENT), "sub$client-1$ND"),
        ("sub|global-volatile3", (TOPIC, SHARED, GLOBAL), False, Subscriber(Wanted.SHARED, "sub", ""), "sub$$ND"),
    ],
)
def test_the_name_of_a_link_says_which_subscription_is_meant(
    link_name: str, capabilities: tuple[str, ...], durable: bool, expected: Subscriber, made: str
) -> None:
    found = subscriber_of(link_name, CLIENT, capabilities, durable)
    assert found == expected
    assert found.made_name == made


@pytest.mark.parametrize("capability", ["topic", "temporary-topic"])
def test_a_consumer_that_neither_shares_nor_is_durable_has_a_subscription_of_its_own(capability: str) -> None:
    name = "qpid-jms:receiver:ID:1:1:1:news"
    assert subscriber_of(name, CLIENT, (capability,), False) == Subscriber(Wanted.OWN, name, CLIENT)


@pytest.mark.parametrize("name", ["sub", "sub|global", "6b0e4a2c-receiver"])
@pytest.mark.parametrize("capabilities", [(), ("queue",)])
def test_a_link_of_no_subscriber_may_still_name_what_there_is(name: str, capabilities: tuple[str, ...]) -> None:
    assert subscriber_of(name, CLIENT, capabilities, False) == Subscriber(Wanted.EXISTING, name, CLIENT)


@pytest.mark.parametrize("name", ["|global", "a|b", "a|global|2", "a|volatilex"])
def test_a_name_that_qpid_does_not_build_is_the_name_of_the_subscription(name: str) -> None:
    assert subscriber_of(name, CLIENT, (TOPIC, SHARED), True) == Subscriber(Wanted.DURABLE, name, CLIENT)
