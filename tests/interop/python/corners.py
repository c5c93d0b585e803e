"""The scenarios of `corner_scenarios.py` with azure-servicebus."""

import time
from datetime import UTC, datetime, timedelta

from azure.servicebus import ServiceBusMessage, ServiceBusMessageState
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader
from azure.servicebus.exceptions import MessageSizeExceededError
from scene import Scene, all_of, body, equal, one, raises, scenario, true

REASON_LIMIT = 4096  # characters of a reason that are kept


@scenario("deferral-count")
def deferral_count(scene: Scene) -> None:
    scene.send("m")
    with scene.receiver() as receiver, scene.dead_letters() as letters:
        message = one(receiver)
        equal(message.delivery_count, 0, "delivery count at first")
        number = message.sequence_number
        receiver.defer_message(message)
        (message,) = receiver.receive_deferred_messages(number)
        equal(message.delivery_count, 1, "delivery count after a deferral")
        receiver.abandon_message(message)
        (message,) = receiver.receive_deferred_messages(number)
        equal(message.delivery_count, 2, "delivery count after an abandon")
        receiver.defer_message(message)
        letter = one(letters)
        equal((body(letter), letter.dead_letter_reason), (b"m", "MaxDeliveryCountExceeded"), "dead letter")
        letters.complete_message(letter)
    scene.nothing_is_left()


@scenario("message-states")
def message_states(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        soon = datetime.now(UTC) + timedelta(seconds=4)
        sender.schedule_messages(ServiceBusMessage("scheduled"), soon)
        for first_acquirer in (True, False):
            header = AmqpMessageHeader(first_acquirer=first_acquirer)
            sender.send_messages(AmqpAnnotatedMessage(data_body=str(first_acquirer), header=header))
    with scene.receiver() as receiver:
        messages = {body(message): message for message in all_of(receiver, 3, complete=False)}
        states = {content: message.state for content, message in messages.items()}
        active = ServiceBusMessageState.ACTIVE
        expected = {b"scheduled": ServiceBusMessageState.SCHEDULED, b"True": active, b"False": active}
        equal(states, expected, "states")
        for content in (b"True", b"False"):
            header = messages[content].raw_amqp_message.header
            equal(str(header.first_acquirer).encode(), content, "first-acquirer")
        receiver.defer_message(messages[b"True"])
        (deferred,) = receiver.receive_deferred_messages(messages[b"True"].sequence_number)
        equal(deferred.state, ServiceBusMessageState.DEFERRED, "state of a deferred message")


@scenario("large-requests")
def large_requests(scene: Scene) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with scene.client.get_queue_sender(scene.queue) as sender, scene.receiver() as receiver:
        (number,) = sender.schedule_messages(ServiceBusMessage(b"x" * 262_000), later)
        (browsed,) = receiver.peek_messages(1, sequence_number=number)
        equal(len(body(browsed)), 262_000, "bytes browsed")
        began = time.monotonic()
        too_large = ServiceBusMessage(b"x" * 300_000)
        raises(MessageSizeExceededError, lambda: sender.schedule_messages(too_large, later), "300,000 bytes")
        true(time.monotonic() - began < 15, "the error took its time")
        sender.cancel_scheduled_messages(number)


@scenario("long-reason")
def long_reason(scene: Scene) -> None:
    scene.send("bad")
    with scene.receiver() as receiver, scene.dead_letters() as letters:
        receiver.dead_letter_message(one(receiver), reason="r" * 40_000, error_description="description")
        letter = one(letters)
        equal(letter.dead_letter_reason, "r" * REASON_LIMIT, "reason")
        equal(letter.dead_letter_error_description, "description", "description")
        letters.complete_message(letter)


@scenario("expiry-forwarded")
def expiry_forwarded(scene: Scene) -> None:
    scene.send("m")
    with scene.client.get_queue_receiver(f"{scene.queue}-1") as receiver:
        message = one(receiver)
        equal((body(message), message.dead_letter_reason), (b"m", "TTLExpiredException"), "message")
        receiver.complete_message(message)


@scenario("rule-conversions")
def rule_conversions(scene: Scene) -> None:
    with scene.client.get_topic_sender(scene.queue) as sender:
        for subject in ("n-8", "n-7"):
            sender.send_messages(ServiceBusMessage(subject, subject=subject, application_properties={"number": 7}))
    with scene.client.get_subscription_receiver(scene.queue, "a") as receiver:
        message = one(receiver)
        equal((body(message), message.correlation_id), (b"n-7", "7"), "message and correlation id")
        equal(message.application_properties[b"joined"], b"n-7", "text and number")
        equal(message.time_to_live, timedelta(minutes=10), "time to live")
        receiver.complete_message(message)


@scenario("action-delay")
def action_delay(scene: Scene) -> None:
    with scene.client.get_topic_sender(scene.queue) as sender:
        began = time.monotonic()
        sender.send_messages(ServiceBusMessage("m"))
    with scene.client.get_subscription_receiver(scene.queue, "now") as receiver:
        message = one(receiver)
        equal((message.state, message.scheduled_enqueue_time_utc), (ServiceBusMessageState.ACTIVE, None), "copy")
        receiver.complete_message(message)
    with scene.client.get_subscription_receiver(scene.queue, "later") as receiver:
        message = one(receiver)
        true(time.monotonic() - began >= 3, "the copy came too early")
        equal(message.state, ServiceBusMessageState.SCHEDULED, "state")
        late = message.enqueued_time_utc - message.scheduled_enqueue_time_utc
        true(timedelta(0) <= late < timedelta(seconds=15), f"enqueued {late} behind the time that is shown")
        receiver.complete_message(message)
