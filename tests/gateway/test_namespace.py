"""What a gateway finds under an address, and what may be done with it."""

import pytest

from broker.errors import EntityDisabled, EntityNotFound, NotAllowed
from broker.gateway.namespace import Entity, Namespace
from broker.namespace.entities import QueueDescription, Status, SubscriptionDescription, TopicDescription
from protocol.addresses import Part, parse

QUEUE = Entity(1, QueueDescription(name="Orders", max_message_size_kb=1), (0,))
TOPIC = Entity(2, TopicDescription(name="news/World"), (1,))
SUBSCRIPTION = Entity(3, SubscriptionDescription(topic="news/World", name="All", requires_session=True), (1,))


@pytest.fixture
def namespace() -> Namespace:
    found = Namespace("peeklock")
    found.replace([QUEUE, TOPIC, SUBSCRIPTION])
    return found


@pytest.mark.parametrize(
    ("address", "entity"),
    [
        ("orders", QUEUE),
        ("ORDERS/$management", QUEUE),
        ("orders/$deadletterqueue", QUEUE),
        ("News/world", TOPIC),
        ("news/world/$management", TOPIC),
        ("news/world/$transfer/$deadletterqueue", TOPIC),
        ("news/world/Subscriptions/all", SUBSCRIPTION),
        ("/news/WORLD/subscriptions/ALL/$DeadLetterQueue/$management", SUBSCRIPTION),
        ("sb://host:5672/news%2Fworld/subscriptions/all", SUBSCRIPTION),
    ],
)
def test_entities_are_found_by_any_spelling_of_their_paths(namespace, address, entity):
    assert namespace.find(parse(address)) is entity


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("other", "The messaging entity 'peeklock:queue:other' could not be found."),
        (
            "news/world/subscriptions/other",
            "'peeklock:subscription:news/world/subscriptions/other' could not be",
        ),
        ("orders/subscriptions/all", "could not be found."),
        ("news/world/$deadletterqueue", "The messaging entity 'peeklock:queue:news/world' could not be found."),
        ("news", "could not be found."),
    ],
)
def test_the_error_of_a_missing_entity_has_words_that_sdks_know(namespace, address, text):
    with pytest.raises(EntityNotFound) as raised:
        namespace.find(parse(address))
    assert text in str(raised.value)


def test_an_entity_is_one_object_over_all_catalogs():
    namespace = Namespace("peeklock")
    queue = Entity(1, QueueDescription(name="orders"), (0,))
    gone = Entity(2, QueueDescription(name="replies"), (1,))
    namespace.replace([queue, gone])
    changed = QueueDescription(name="orders", status=Status.SEND_DISABLED)
    made_anew = Entity(3, QueueDescription(name="replies"), (1,))
    assert namespace.replace([Entity(1, changed, (0,)), made_anew]) == [gone]
    assert namespace.find(parse("orders")) is queue
    assert queue.description is changed  # so links know it, too
    assert namespace.find(parse("replies")) is made_anew


def test_entities_have_their_whole_paths_as_names(namespace):
    assert namespace.names() == {1: "Orders", 2: "news/World", 3: "news/World/Subscriptions/All"}
    assert SUBSCRIPTION.tracker("ns") == "ns:Subscription:news/World/Subscriptions/All"
    assert TOPIC.tracker("ns") == "ns:Topic:news/World"


def test_a_subscriptions_queues_are_its_own():
    assert SUBSCRIPTION.queue(Part.MAIN) == 3 << 3
    assert SUBSCRIPTION.queue(Part.DEAD_LETTER) == 3 << 3 | 1


def test_a_subscription_is_not_sent_to():
    QUEUE.require_send()
    QUEUE.require_receive()
    TOPIC.require_send()
    SUBSCRIPTION.require_receive()
    TOPIC.require_receive()  # clients mean to peek
    with pytest.raises(NotAllowed, match="cannot be sent to"):
        SUBSCRIPTION.require_send()


@pytest.mark.parametrize(
    ("status", "sends", "receives"),
    [
        (Status.ACTIVE, True, True),
        (Status.DISABLED, False, False),
        (Status.SEND_DISABLED, False, True),
        (Status.RECEIVE_DISABLED, True, False),
    ],
)
def test_a_status_disables_a_direction(status, sends, receives):
    entity = Entity(1, QueueDescription(name="q", status=status), (0,))
    for allowed, require in ((sends, entity.require_send), (receives, entity.require_receive)):
        if allowed:
            require()
        else:
            with pytest.raises(EntityDisabled, match=status.value):
                require()


def test_nobody_receives_from_an_entity_that_forwards():
    main = QueueDescription(name="q", forward_to="b")
    dead = SubscriptionDescription(topic="t", name="s", forward_dead_lettered_messages_to="b")
    for description, forwarding, others in (
        (main, Part.MAIN, (Part.DEAD_LETTER, Part.TRANSFER_DEAD_LETTER)),
        (dead, Part.DEAD_LETTER, (Part.MAIN, Part.TRANSFER_DEAD_LETTER)),
    ):
        entity = Entity(1, description, (0,))
        with pytest.raises(NotAllowed, match=r"auto-forwarding enabled.*forwards to 'b'"):
            entity.require_receive(forwarding)
        for part in others:
            entity.require_receive(part)


def test_a_topics_transfer_dead_letter_queue_is_received_from():
    TOPIC.require_receive(Part.TRANSFER_DEAD_LETTER)
    assert TOPIC.queue(Part.TRANSFER_DEAD_LETTER) == TOPIC.entity_id << 3 | 2


def test_the_largest_message_is_the_entitys_or_the_brokers():
    assert QUEUE.max_message_bytes(5000) == 1024
    assert TOPIC.max_message_bytes(5000) == 5000
    assert SUBSCRIPTION.max_message_bytes(5000) == 5000


def test_sessions_are_the_subscriptions():
    assert (QUEUE.requires_session, TOPIC.requires_session, SUBSCRIPTION.requires_session) == (False, False, True)
