"""The scenarios of `topic_scenarios.py` with azure-servicebus."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from azure.servicebus import (
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import (
    MessageNotFoundError,
    MessagingEntityDisabledError,
    ServiceBusAuthenticationError,
    ServiceBusError,
)
from scene import Scene, all_of, body, equal, local, one, raises, scenario, true


def publish(scene: Scene, *messages: ServiceBusMessage | str, topic: str | None = None) -> None:
    with scene.client.get_topic_sender(topic or scene.queue) as sender:
        for message in messages:
            text = isinstance(message, str)
            sender.send_messages(ServiceBusMessage(message, **scene.keyed) if text else message)


def subscription(scene: Scene, name: str, **options: object) -> ServiceBusReceiver:
    return scene.client.get_subscription_receiver(scene.queue, name, **options)


def dead_letters(scene: Scene, name: str) -> ServiceBusReceiver:
    return subscription(scene, name, sub_queue=ServiceBusSubQueue.DEAD_LETTER)


def try_receive(receiver: ServiceBusReceiver) -> None:
    with receiver:
        receiver.receive_messages(1, max_wait_time=2)


def received(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """That many messages and no more, which are completed."""
    with receiver:
        messages = all_of(receiver, count) if count else []
        equal(bodies(receiver.receive_messages(1, max_wait_time=1)), [], "messages beyond those")
        return messages


def bodies(messages: Iterable[ServiceBusReceivedMessage]) -> list[bytes]:
    return [body(message) for message in messages]


def application_properties(message: ServiceBusReceivedMessage) -> dict[str, object]:
    """With texts as texts: this SDK shows them as bytes."""
    pairs = (message.application_properties or {}).items()
    return {name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in pairs}


def not_allowed(error: Exception, what: str) -> None:
    true("amqp:not-allowed" in str(error), f"{what}: {error}")


@scenario("topic-publish")
def topic_publish(scene: Scene) -> None:
    publish(scene, "first", ServiceBusMessage("second", subject="second", **scene.keyed))
    shown = [(body(m), local(m), m.delivery_count) for m in received(subscription(scene, "a"), 2)]
    equal(shown, [(b"first", 1, 0), (b"second", 2, 0)], "messages in a subscription")
    equal(bodies(received(subscription(scene, "b"), 2)), [b"first", b"second"], "messages in another")
    shown = [(body(m), local(m)) for m in received(subscription(scene, "second"), 1)]
    equal(shown, [(b"second", 1)], "messages where a rule selects")


@scenario("topic-batch")
def topic_batch(scene: Scene) -> None:
    with scene.client.get_topic_sender(scene.queue) as sender:
        batch = sender.create_message_batch()
        for i in range(100):
            batch.add_message(ServiceBusMessage("x", message_id=str(i)))
        sender.send_messages(batch)
    for name in "ab":
        messages = received(subscription(scene, name), 100)
        equal([message.message_id for message in messages], [str(i) for i in range(100)], "ids")
        equal([local(message) for message in messages], list(range(1, 101)), "sequence numbers")


@scenario("topic-schedule")
def topic_schedule(scene: Scene) -> None:
    due = datetime.now(UTC) + timedelta(seconds=6)
    with scene.client.get_topic_sender(scene.queue) as sender:
        numbers = sender.schedule_messages([ServiceBusMessage("kept"), ServiceBusMessage("cancelled")], due)
        sender.send_messages(ServiceBusMessage("kept too", scheduled_enqueue_time_utc=due))
        sender.cancel_scheduled_messages(numbers[1])
        raises(MessageNotFoundError, lambda: sender.cancel_scheduled_messages(numbers[1]), "a second cancel")
    with scene.receiver() as topic:
        equal(sorted(map(body, topic.peek_messages(5))), [b"kept", b"kept too"], "scheduled messages")
    with subscription(scene, "a") as receiver:
        equal(bodies(receiver.receive_messages(1, max_wait_time=1)), [], "messages before their time")
        messages = all_of(receiver, 2)
        late = datetime.now(UTC) - due
        true(timedelta(0) <= late < timedelta(seconds=15), f"delivered {late} late")
    equal(set(bodies(messages)), {b"kept", b"kept too"}, "messages in a subscription")
    equal(set(bodies(received(subscription(scene, "b"), 2))), {b"kept", b"kept too"}, "messages in another")


@scenario("topic-time-to-live")
def topic_time_to_live(scene: Scene) -> None:
    publish(scene, "x", ServiceBusMessage("half", time_to_live=timedelta(minutes=30)))
    time.sleep(1.5)  # longer than the subscription's time to live
    equal(bodies(received(subscription(scene, "brief"), 0)), [], "expired messages delivered")
    letters = received(dead_letters(scene, "brief"), 2)
    shown = {(body(message), message.dead_letter_reason) for message in letters}
    equal(shown, {(b"x", "TTLExpiredException"), (b"half", "TTLExpiredException")}, "dead letters")
    received(subscription(scene, "dropped"), 0)
    received(dead_letters(scene, "dropped"), 0)
    long = {body(message): message.time_to_live for message in received(subscription(scene, "long"), 2)}
    equal(long, {b"x": timedelta(hours=1), b"half": timedelta(minutes=30)}, "messages with their time to live")


@scenario("topic-disabled")
def topic_disabled(scene: Scene) -> None:
    raises(MessagingEntityDisabledError, lambda: publish(scene, "x"), "sending")
    received(subscription(scene, "a"), 0)


@scenario("topic-not-allowed")
def topic_not_allowed(scene: Scene) -> None:
    started = time.monotonic()
    receiving = raises(ServiceBusError, lambda: try_receive(scene.receiver()), "receiving from a topic")
    not_allowed(receiving, "receiving from a topic")
    address = f"{scene.queue}/Subscriptions/a"
    sending = raises(ServiceBusError, lambda: publish(scene, "x", topic=address), "sending to a subscription")
    not_allowed(sending, "sending to a subscription")
    true(time.monotonic() - started < 15, "the error took its time")
    received(subscription(scene, "a"), 0)


@scenario("unknown-topic")
def unknown_topic(scene: Scene) -> None:
    started = time.monotonic()
    refused = ServiceBusAuthenticationError  # the token is
    raises(refused, lambda: publish(scene, "x", topic=scene.queue + "-not"), "a topic")
    raises(refused, lambda: try_receive(subscription(scene, "not")), "a subscription")
    true(time.monotonic() - started < 15, "the error took its time")


@scenario("subscription-settle")
def subscription_settle(scene: Scene) -> None:
    publish(scene, "x")
    for name in ("a", "strict"):
        with subscription(scene, name) as receiver:
            receiver.abandon_message(one(receiver))
    (again,) = received(subscription(scene, "a"), 1)
    equal((body(again), again.delivery_count), (b"x", 1), "second delivery")
    received(subscription(scene, "strict"), 0)
    (letter,) = received(dead_letters(scene, "strict"), 1)
    equal((body(letter), letter.dead_letter_reason), (b"x", "MaxDeliveryCountExceeded"), "dead letter")


@scenario("subscription-defer")
def subscription_defer(scene: Scene) -> None:
    publish(scene, "later")
    with subscription(scene, "a") as receiver:
        message = one(receiver)
        receiver.defer_message(message)
        equal(receiver.receive_messages(1, max_wait_time=1), [], "deliveries of a deferred message")
        (deferred,) = receiver.receive_deferred_messages([message.sequence_number])
        equal((body(deferred), deferred.sequence_number), (b"later", message.sequence_number), "deferred message")
        receiver.complete_message(deferred)
        gone = lambda: receiver.receive_deferred_messages([message.sequence_number])  # noqa: E731
        raises(MessageNotFoundError, gone, "a completed message")
    equal(bodies(received(subscription(scene, "b"), 1)), [b"later"], "messages in the other subscription")


@scenario("subscription-dead-letter")
def subscription_dead_letter(scene: Scene) -> None:
    publish(scene, ServiceBusMessage("bad", message_id="id", application_properties={"kept": "yes"}))
    with subscription(scene, "a") as receiver:
        receiver.dead_letter_message(one(receiver), reason="my reason", error_description="my description")
    received(subscription(scene, "a"), 0)
    (letter,) = received(dead_letters(scene, "a"), 1)
    equal((body(letter), letter.message_id), (b"bad", "id"), "dead letter")
    equal((letter.dead_letter_reason, letter.dead_letter_error_description), ("my reason", "my description"), "reason")
    equal(application_properties(letter)["kept"], "yes", "application property")
    equal(letter.dead_letter_source, f"{scene.queue}/Subscriptions/a", "source")
    (other,) = received(subscription(scene, "b"), 1)
    equal((body(other), application_properties(other)), (b"bad", {"kept": "yes"}), "message in the other subscription")
    received(dead_letters(scene, "b"), 0)


@scenario("subscription-lock")
def subscription_lock(scene: Scene) -> None:
    publish(scene, "slow")
    with subscription(scene, "a") as receiver, subscription(scene, "b") as other:
        before = (message := one(receiver)).locked_until_utc
        apart = one(other).locked_until_utc - before
        true(timedelta(seconds=50) < apart < timedelta(seconds=60), f"the ends of the locks are {apart} apart")
        time.sleep(2)  # the lock lasts five seconds
        until = receiver.renew_message_lock(message)
        true(until - before > timedelta(seconds=1), f"renewed from {before} to {until}")
        time.sleep(4)  # the first lock would have ended
        receiver.complete_message(message)
    received(subscription(scene, "a"), 0)


@scenario("subscription-peek")
def subscription_peek(scene: Scene) -> None:
    publish(scene, *"abcde")
    received(subscription(scene, "b"), 5)
    with subscription(scene, "a") as receiver:
        browsed = receiver.peek_messages(10)
        equal(bodies(browsed), [b"a", b"b", b"c", b"d", b"e"], "browsed")
        some = receiver.peek_messages(2, sequence_number=browsed[2].sequence_number)
        equal([(local(m), body(m)) for m in some], [(3, b"c"), (4, b"d")], "browsed from a number")
        all_of(receiver, 5)
        equal(receiver.peek_messages(10), [], "browsed when empty")


@scenario("subscription-receive-and-delete")
def subscription_receive_and_delete(scene: Scene) -> None:
    publish(scene, "x", "y")
    with subscription(scene, "a", receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE) as receiver:
        equal(bodies(all_of(receiver, 2, complete=False)), [b"x", b"y"], "bodies")
    received(subscription(scene, "a"), 0)
    equal(bodies(received(subscription(scene, "b"), 2)), [b"x", b"y"], "messages in the other subscription")


@scenario("subscription-disabled")
def subscription_disabled(scene: Scene) -> None:
    publish(scene, "x")
    raises(MessagingEntityDisabledError, lambda: try_receive(subscription(scene, "off")), "receiving")
    equal(bodies(received(subscription(scene, "a"), 1)), [b"x"], "messages in the other subscription")


@scenario("sql-filter")
def sql_filter(scene: Scene) -> None:
    publish(
        scene,
        ServiceBusMessage("1", application_properties={"price": 150, "color": "red"}),
        ServiceBusMessage("2", application_properties={"price": 50.5, "color": "red"}, subject="abc"),
        ServiceBusMessage("3", message_id="x"),
        ServiceBusMessage("4", application_properties={"price": 100.5, "color": "red"}),
    )
    equal(sorted(bodies(received(subscription(scene, "dear"), 2))), [b"1", b"4"], "by price and color")
    equal(sorted(bodies(received(subscription(scene, "named"), 2))), [b"2", b"3"], "by label or id")
    equal(bodies(received(subscription(scene, "bare"), 1)), [b"3"], "without color and price")


@scenario("correlation-filter")
def correlation_filter(scene: Scene) -> None:
    publish(
        scene,
        ServiceBusMessage("1", subject="a", correlation_id="c"),
        ServiceBusMessage("2", subject="a", application_properties={"color": "red"}),
        ServiceBusMessage("3", application_properties={"count": 7, "color": "RED"}),
        ServiceBusMessage("4", application_properties={"count": 7.0}),
        ServiceBusMessage("5", application_properties={"count": "7"}),
    )
    equal(bodies(received(subscription(scene, "labelled"), 1)), [b"1"], "by label and correlation id")
    equal(bodies(received(subscription(scene, "red"), 1)), [b"2"], "by a string")
    equal(sorted(bodies(received(subscription(scene, "seven"), 2))), [b"3", b"4"], "by a number")


@scenario("filter-error")
def filter_error(scene: Scene) -> None:
    publish(
        scene,
        ServiceBusMessage("good", application_properties={"amount": 10, "parts": 5}),
        ServiceBusMessage("bad", application_properties={"amount": 10, "parts": 0}),
    )
    for name in ("kept", "dropped"):
        equal(bodies(received(subscription(scene, name), 1)), [b"good"], "messages selected")
    (letter,) = received(dead_letters(scene, "kept"), 1)
    equal((body(letter), letter.dead_letter_reason), (b"bad", "FilterException"), "dead letter")
    true("kept" in letter.dead_letter_error_description, f"description: {letter.dead_letter_error_description}")
    received(dead_letters(scene, "dropped"), 0)
    others = sorted(bodies(received(subscription(scene, "a"), 2)))
    equal(others, [b"bad", b"good"], "messages in another subscription")


@scenario("rule-action")
def rule_action(scene: Scene) -> None:
    sent = {"price": 150, "color": "red", "kept": True}
    publish(scene, ServiceBusMessage("x", subject="dear", application_properties=sent))
    (changed,) = received(subscription(scene, "half"), 1)
    expected = {"price": 75, "kept": True, "RuleName": "half"}
    equal(application_properties(changed), expected, "application properties")
    equal((body(changed), changed.subject), (b"x", "cheap"), "changed copy")
    (plain,) = received(subscription(scene, "a"), 1)
    equal(application_properties(plain), sent, "application properties of the other copy")
    equal((body(plain), plain.subject), (b"x", "dear"), "other copy")


@scenario("rule-copies")
def rule_copies(scene: Scene) -> None:
    publish(scene, ServiceBusMessage("x", application_properties={"color": "red"}))
    messages = received(subscription(scene, "a"), 3)
    equal(sorted(map(local, messages)), [1, 2, 3], "sequence numbers")
    shown = [application_properties(message) for message in messages]
    pairs = {(properties.get("RuleName"), properties.get("number")) for properties in shown}
    equal(pairs, {(None, None), ("one", 1), ("two", 2)}, "names of rules, and what they set")
    equal(bodies(messages), [b"x"] * 3, "bodies")
