"""What the scenarios with azure-servicebus share: a client with an entity, and assertions that name what differs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)

CONFIG = json.loads(os.environ["PEEKLOCK_INTEROP"])
SCENARIOS: dict[str, Callable[["Scene"], None]] = {}


def scenario(name: str) -> Callable[[Callable[["Scene"], None]], Callable[["Scene"], None]]:
    def register(run: Callable[["Scene"], None]) -> Callable[["Scene"], None]:
        SCENARIOS[name] = run
        return run

    return register


def equal(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


def true(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def raises(kinds: type[Exception] | tuple[type[Exception], ...], action: Callable[[], object], what: str) -> Exception:
    try:
        action()
    except kinds as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what}: expected {kinds}, got {error!r}") from error
    raise AssertionError(f"{what}: nothing was raised")


def body(message: ServiceBusReceivedMessage) -> bytes:
    return b"".join(message.body)


class Scene:
    """A client and the queue of one scenario. Messages whose order matters get `keyed`, which is one partition key."""

    def __init__(self, name: str, connection_string: str = CONFIG["connection_string"]) -> None:
        self.queue = CONFIG["entity_prefix"] + name
        self.keyed = {"partition_key": name} if name in CONFIG["keyed"] else {}
        self.client = ServiceBusClient.from_connection_string(connection_string, retry_total=0)

    def send(self, *bodies: str | bytes) -> None:
        with self.client.get_queue_sender(self.queue) as sender:
            for content in bodies:
                sender.send_messages(ServiceBusMessage(content, message_id=str(content)[:100], **self.keyed))

    def receiver(self, **options: object) -> ServiceBusReceiver:
        return self.client.get_queue_receiver(self.queue, **options)

    def dead_letters(self) -> ServiceBusReceiver:
        return self.receiver(sub_queue=ServiceBusSubQueue.DEAD_LETTER)

    def nothing_is_left(self) -> None:
        with self.receiver() as receiver:
            equal(receiver.receive_messages(1, max_wait_time=1), [], "messages left")
            equal(receiver.peek_messages(10), [], "messages left to browse")


def local(message: ServiceBusReceivedMessage) -> int:
    """The message's sequence number without the partition, which is in the highest 16 bits on partitioned entities."""
    return message.sequence_number & (1 << 48) - 1


def one(receiver: ServiceBusReceiver, wait_s: float = 60) -> ServiceBusReceivedMessage:
    messages = receiver.receive_messages(1, max_wait_time=wait_s)
    equal(len(messages), 1, "messages received")
    return messages[0]


def killed_while_holding(queue: str, *session_id: str) -> None:
    """Let another process of this program receive the queue's message, or the session's, and kill it."""
    command = [sys.executable, sys.argv[0], "--hold", queue, *session_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        equal(holder.stdout.readline().strip(), b"held", "what the other process says")
        holder.kill()


def try_receive(scene: Scene) -> None:
    with scene.receiver() as receiver:
        receiver.receive_messages(1, max_wait_time=2)


def all_of(receiver: ServiceBusReceiver, count: int, *, complete: bool = True) -> list[ServiceBusReceivedMessage]:
    received: list[ServiceBusReceivedMessage] = []
    while len(received) < count:
        some = receiver.receive_messages(min(200, count - len(received)), max_wait_time=60)
        if not some:
            raise AssertionError(f"{len(received)} of {count} messages arrived")
        for message in some if complete else ():
            receiver.complete_message(message)
        received += some
    return received
