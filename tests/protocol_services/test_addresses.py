import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.addresses import (
    MAX_ADDRESS_CHARACTERS,
    Address,
    InvalidAddress,
    Node,
    Part,
    Subscription,
    parse,
    parse_audience,
)
from tests.examples import examples


@pytest.mark.parametrize(
    "text",
    [
        "queue",
        "/queue",
        "queue/",
        "amqps://localhost:5672/queue",
        "amqp://host/queue",
        "sb://host/queue/",
        "SB://host/queue",
        "/%71ueue",
        "amqps://host/queu%65",
    ],
)
def test_every_spelling_of_a_queue_is_the_queue(text):
    assert parse(text) == Address("queue")


def test_the_key_is_in_lower_case_and_the_path_as_it_was_given():
    address = parse("MyQueue")
    assert (address.path, address.key) == ("MyQueue", "myqueue")


@pytest.mark.parametrize(
    ("text", "path", "part", "node"),
    [
        ("q/$DeadLetterQueue", "q", Part.DEAD_LETTER, Node.ENTITY),
        ("q/$deadletterqueue", "q", Part.DEAD_LETTER, Node.ENTITY),
        ("q/$Transfer/$DeadLetterQueue", "q", Part.TRANSFER_DEAD_LETTER, Node.ENTITY),
        ("q/$management", "q", Part.MAIN, Node.MANAGEMENT),
        ("$management", "", Part.MAIN, Node.MANAGEMENT),
        ("amqp://host/$Management", "", Part.MAIN, Node.MANAGEMENT),
        ("q/$Management", "q", Part.MAIN, Node.MANAGEMENT),
        ("Q/$DEADLETTERQUEUE/$MANAGEMENT", "Q", Part.DEAD_LETTER, Node.MANAGEMENT),
        ("q/$transfer/$deadletterqueue/$management", "q", Part.TRANSFER_DEAD_LETTER, Node.MANAGEMENT),
        ("/a/b%20c/$management", "a/b c", Part.MAIN, Node.MANAGEMENT),
        ("amqps://h/a/b/%24DeadLetterQueue", "a/b", Part.DEAD_LETTER, Node.ENTITY),
        ("$cbs", "", Part.MAIN, Node.CBS),
        ("/$CBS", "", Part.MAIN, Node.CBS),
        ("sb://host/$cbs", "", Part.MAIN, Node.CBS),
        # Not suffixes: these belong to the name.
        ("$management/q", "$management/q", Part.MAIN, Node.ENTITY),
        ("q$management", "q$management", Part.MAIN, Node.ENTITY),
        ("q/$deadletterqueue/$transfer", "q/$deadletterqueue/$transfer", Part.MAIN, Node.ENTITY),
        ("q/$cbs", "q/$cbs", Part.MAIN, Node.ENTITY),
        # A relative path is not percent-encoded.
        ("100%25", "100%25", Part.MAIN, Node.ENTITY),
    ],
)
def test_part_and_node_are_read_from_the_right(text, path, part, node):
    assert parse(text) == Address(path, part, node)


@pytest.mark.parametrize(
    ("text", "topic", "name"),
    [
        ("topic/Subscriptions/sub", "topic", "sub"),
        ("topic/subscriptions/sub", "topic", "sub"),
        ("a/b/SUBSCRIPTIONS/Sub", "a/b", "Sub"),
        ("a/subscriptions/subscriptions/b", "a/subscriptions", "b"),
        ("t/subscriptions/s/$DeadLetterQueue/$management", "t", "s"),
    ],
)
def test_a_subscription_is_the_last_segment_behind_subscriptions(text, topic, name):
    assert parse(text).subscription == Subscription(topic, name)


def test_a_subscriptions_key_is_its_whole_path():
    assert parse("T/Subscriptions/S/$DeadLetterQueue").key == "t/subscriptions/s"


@pytest.mark.parametrize("text", ["subscriptions/s", "a/subscriptions", "a/subscription/b", "a/subscriptions/b/c"])
def test_other_paths_are_not_subscriptions(text):
    assert parse(text) == Address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "//",
        "sb://host",
        "sb://host/",
        "a//b",
        "//a",
        "$DeadLetterQueue",
        "/$transfer/$deadletterqueue/$management",
        "topic/subscriptions//$management",
        "a\0b",
        "/a%00b",
        "/%ff",
        "q" * 261,
        "t" * 261 + "/subscriptions/s",
        "t/subscriptions/" + "s" * 51,
        "t/subscriptions/s$" + "c" * 257 + "$D",
        "q" * (MAX_ADDRESS_CHARACTERS + 1),
    ],
)
def test_addresses_that_can_name_nothing_are_refused(text):
    with pytest.raises(InvalidAddress):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "q" * 260,
        "t" * 260 + "/subscriptions/" + "s" * 50 + "/$deadletterqueue",
        "t/subscriptions/s$" + "c" * 256 + "$D/$deadletterqueue",
    ],
)
def test_names_as_long_as_is_allowed_are_taken(text):
    assert parse(text).path == text.removesuffix("/$deadletterqueue")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sb://localhost:5672/q1", Address("q1")),
        ("amqps://host/", Address("")),
        ("sb://host", Address("")),
        ("sb://host/q/$management", Address("q", node=Node.MANAGEMENT)),
        ("sb://host/$management", Address("", node=Node.MANAGEMENT)),
        (
            "sb://h/T/Subscriptions/S/$DeadLetterQueue",
            Address("T/Subscriptions/S", Part.DEAD_LETTER, Node.ENTITY, Subscription("T", "S")),
        ),
    ],
)
def test_an_audience_may_be_the_namespace(text, expected):
    assert parse_audience(text) == expected


PIECES = (
    *("a", "/", "//", "%", "%2", "%2f", "%ff", "\0", "İ", "é", "sb://", "amqps://h:1"),
    *("$management", "$deadletterqueue", "$transfer", "$cbs", "subscriptions"),
)


@settings(max_examples=examples(300))
@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from(PIECES)).map("".join),
    )
)
@example("İ/$management")
def test_hostile_addresses_raise_invalid_address_only(text):
    try:
        address = parse_audience(text)
    except InvalidAddress:
        return
    assert not address.path.startswith("/")
    assert not address.path.endswith("/")
    again = parse(address.path) if address.path and "%" not in address.path else None
    assert again is None or len(again.path) <= len(address.path)


def test_a_dead_letter_queue_has_none_of_its_own():
    for address in ("q/$deadletterqueue/$deadletterqueue", "$deadletterqueue/$DeadLetterQueue"):
        with pytest.raises(InvalidAddress, match="no dead-letter queue of its own"):
            parse(address)
