"""The scenarios of `partitioned_scenarios.py` with azure-servicebus."""

import threading
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
)
from azure.servicebus.exceptions import ServiceBusError
from scene import Scene, all_of, body, equal, raises, scenario, true

COUNT = 20
TEXTS = sorted(str(number) for number in range(COUNT))
KEYS = [f"key-{number}" for number in range(8)]


def post(scene: Scene, messages: Iterable[ServiceBusMessage]) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        for message in messages:
            sender.send_messages(message)


def texts(messages: Iterable[ServiceBusReceivedMessage]) -> list[str]:
    return sorted(body(message).decode() for message in messages)


def on_several_partitions(messages: Iterable[ServiceBusReceivedMessage]) -> None:
    partitions = {message.sequence_number >> 48 for message in messages}
    true(len(partitions) > 1, f"all messages are on partition {partitions}")


def browsed(receiver: ServiceBusReceiver, start: int) -> list[ServiceBusReceivedMessage]:
    """All from this sequence number on, in as many calls as that takes."""
    found: list[ServiceBusReceivedMessage] = []
    while some := receiver.peek_messages(100, sequence_number=start):
        found += some
        start = some[-1].sequence_number + 1
    return found


@scenario("partitioned-spread")
def spread(scene: Scene) -> None:
    post(scene, [ServiceBusMessage(text) for text in TEXTS])
    with scene.receiver() as receiver:
        shown = browsed(receiver, 1)
        equal(texts(shown), TEXTS, "browsed")
        on_several_partitions(shown)
        numbers = [message.sequence_number for message in shown]
        equal(numbers, sorted(numbers), "sequence numbers")
        rest = [message.sequence_number for message in browsed(receiver, numbers[7])]
        equal(rest, numbers[7:], "browsed from a number")
        equal(texts(all_of(receiver, COUNT)), TEXTS, "messages")
    scene.nothing_is_left()


@scenario("partitioned-keys")
def keys(scene: Scene) -> None:
    post(scene, [ServiceBusMessage(str(turn), partition_key=key) for turn in range(5) for key in KEYS])
    with scene.client.get_queue_sender(scene.queue) as sender:
        batch = [ServiceBusMessage("never", partition_key=key) for key in KEYS]
        error = raises(ServiceBusError, lambda: sender.send_messages(batch), "a batch with several keys")
        true("amqp:not-allowed" in str(error), f"error: {error}")
    with scene.receiver() as receiver:
        messages = all_of(receiver, 5 * len(KEYS))
    for key in KEYS:
        mine = [message for message in messages if message.partition_key == key]
        equal([body(message) for message in mine], [b"0", b"1", b"2", b"3", b"4"], f"messages of {key}")
        equal(len({message.sequence_number >> 48 for message in mine}), 1, f"partitions of {key}")
    on_several_partitions(messages)
    scene.nothing_is_left()


@scenario("partitioned-key-mismatch")
def key_mismatch(scene: Scene) -> None:
    different = {"session_id": "a", "partition_key": "b"}
    raises(ValueError, lambda: post(scene, [ServiceBusMessage("never", **different)]), "a different partition key")
    post(scene, [ServiceBusMessage("x", session_id="a", partition_key="a")])
    with scene.receiver() as receiver:
        equal(texts(all_of(receiver, 1)), ["x"], "messages")
    scene.nothing_is_left()


@scenario("partitioned-numbers")
def numbers(scene: Scene) -> None:
    post(scene, [ServiceBusMessage(text) for text in TEXTS])
    with scene.receiver() as receiver:
        messages = all_of(receiver, COUNT, complete=False)
        on_several_partitions(messages)
        for message in messages:
            receiver.defer_message(message)
        deferred = receiver.receive_deferred_messages([message.sequence_number for message in messages])
        equal(texts(deferred), TEXTS, "deferred messages")
        for message in deferred:
            receiver.complete_message(message)
    due = datetime.now(UTC) + timedelta(seconds=6)
    with scene.client.get_queue_sender(scene.queue) as sender:
        scheduled = {}
        for key in KEYS:
            (scheduled[key],) = sender.schedule_messages(ServiceBusMessage(key, partition_key=key), due)
        true(len({number >> 48 for number in scheduled.values()}) > 1, f"numbers: {scheduled}")
        sender.cancel_scheduled_messages([scheduled[key] for key in KEYS[:4]])
    with scene.receiver() as receiver:
        equal(texts(all_of(receiver, 4)), KEYS[4:], "messages that arrived")
    scene.nothing_is_left()


@scenario("partitioned-duplicates")
def duplicates(scene: Scene) -> None:
    keyed = [("a", "1"), ("b", "1"), ("a", "1")]
    post(scene, [ServiceBusMessage(key, message_id=id_, partition_key=key) for key, id_ in keyed])
    for _ in range(2):
        post(scene, [ServiceBusMessage(text, message_id=f"id-{text}") for text in TEXTS])
    with scene.receiver() as receiver:
        equal(texts(all_of(receiver, COUNT + 2)), [*TEXTS, "a", "b"], "messages")
    scene.nothing_is_left()


@scenario("partitioned-sessions")
def sessions(scene: Scene) -> None:
    def accept(session_id: object = NEXT_AVAILABLE_SESSION) -> ServiceBusReceiver:
        return scene.receiver(session_id=session_id, max_wait_time=20)

    post(scene, [ServiceBusMessage(str(turn), session_id=key) for turn in range(3) for key in KEYS])
    accepted, everything = [], []
    for _ in KEYS:
        receiver = accept()
        receiver.__enter__()
        accepted.append(receiver)
    equal(sorted(receiver.session.session_id for receiver in accepted), KEYS, "sessions")
    for receiver in accepted:
        messages = all_of(receiver, 3)
        equal([body(message) for message in messages], [b"0", b"1", b"2"], "messages of a session")
        receiver.session.set_state(receiver.session.session_id.encode())
        everything += messages
    on_several_partitions(everything)
    threading.Timer(1.5, post, (scene, [ServiceBusMessage("x", session_id="late")])).start()
    with accept() as receiver:
        equal(receiver.session.session_id, "late", "session waited for")
        equal(texts(all_of(receiver, 1)), ["x"], "its messages")
    for receiver in accepted:
        receiver.close()
    for key in KEYS:
        with accept(key) as receiver:
            equal(receiver.session.get_state(), key.encode(), "state when accepted again")


@scenario("partitioned-topic")
def topic(scene: Scene) -> None:
    with scene.client.get_topic_sender(scene.queue) as sender:
        for number in range(COUNT):
            sender.send_messages(ServiceBusMessage(str(number), application_properties={"number": number}))
    wanted = {"a": TEXTS, "some": sorted(str(number) for number in range(10, COUNT))}
    for name, expected in wanted.items():
        with scene.client.get_subscription_receiver(scene.queue, name) as receiver:
            messages = all_of(receiver, len(expected))
            equal(texts(messages), expected, f"messages in {name}")
            on_several_partitions(messages)
            equal(receiver.receive_messages(1, max_wait_time=1), [], "messages beyond those")


@scenario("partitioned-annotations")
def annotations(scene: Scene) -> None:
    keyed = [ServiceBusMessage("x", message_id=f"{key} id", partition_key=key) for key in KEYS]
    post(scene, [*keyed, *(ServiceBusMessage("x", message_id=text) for text in TEXTS)])
    with scene.receiver() as receiver:
        for message in all_of(receiver, len(KEYS) + COUNT):
            expected = message.message_id.removesuffix(" id")
            found = message.raw_amqp_message.annotations
            equal(message.partition_key, expected, "key")
            equal(found[b"x-opt-partition-id"], message.sequence_number >> 48, "partition")
