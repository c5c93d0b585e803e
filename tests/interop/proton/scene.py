"""What the scenarios with Qpid Proton share: a connection with an entity, its links and its management node."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from cproton_ffi import ffi, lib
from proton import UNDESCRIBED, Array, Condition, Data, Delivery, Endpoint, Link, Message, Timeout, int32, symbol
from proton.handlers import MessagingHandler
from proton.reactor import LinkOption
from proton.utils import BlockingConnection, LinkDetached

CONFIG = json.loads(os.environ["PEEKLOCK_INTEROP"])
SCENARIOS: dict[str, Callable[["Scene"], None]] = {}
TIMEOUT_S = 60


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


class Failed(Exception):
    """The broker's answer is an error."""

    def __init__(self, condition: str | None, text: str = "") -> None:
        super().__init__(f"{condition}: {text}")
        self.condition = condition
        self.text = text


def fails(condition: str, action: Callable[[], object], what: str) -> str:
    """`action` must fail with `condition`; returns the description."""
    try:
        action()
    except Failed as error:
        equal(error.condition, condition, what)
        return error.text
    except LinkDetached as error:
        equal(error.condition, condition, what)
        return str(error)
    raise AssertionError(f"{what}: nothing was raised")


class PeekLock(LinkOption):
    """A receiver that waits for the broker's answer to each settlement (rcv-settle-mode second, 2.8.3)."""

    def apply(self, link: Link) -> None:
        link.snd_settle_mode = Link.SND_UNSETTLED
        link.rcv_settle_mode = Link.RCV_SECOND


class ReceiveAndDelete(LinkOption):
    def apply(self, link: Link) -> None:
        link.snd_settle_mode = Link.SND_SETTLED
        link.rcv_settle_mode = Link.RCV_FIRST


class Sender:
    def __init__(self, connection: BlockingConnection, queue: str, options: LinkOption | None = None) -> None:
        self.blocking = connection.create_sender(queue, name=str(uuid.uuid4()), options=options)
        self.connection = connection

    def post(self, message: Message) -> None:
        """Send and wait; raises Failed if the broker refuses."""
        self.settled([self.start(message)])

    def start(self, message: Message) -> Delivery:
        self.connection.wait(lambda: self.blocking.link.credit > 0, timeout=TIMEOUT_S)
        return self.blocking.link.send(message)

    def settled(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.connection.wait(lambda d=delivery: d.settled, timeout=TIMEOUT_S)
            condition = delivery.remote.condition
            if delivery.remote_state != Delivery.ACCEPTED:
                raise Failed(condition and condition.name, condition.description if condition else "")
            delivery.settle()

    def close(self) -> None:
        self.blocking.close()


class Receiver(MessagingHandler):
    def __init__(self, connection: BlockingConnection, queue: str, options: LinkOption | None = None) -> None:
        super().__init__(prefetch=0, auto_accept=False, auto_settle=False)
        self.inbox: list[tuple[Message, Delivery]] = []
        self.connection = connection
        self.blocking = connection.create_receiver(
            queue, credit=0, handler=self, name=str(uuid.uuid4()), options=options or PeekLock()
        )
        self.link = self.blocking.link

    def on_message(self, event: Any) -> None:
        self.inbox.append((event.message, event.delivery))

    def on_link_error(self, event: Any) -> None:
        """Leave it to the blocking connection, which raises LinkDetached; otherwise the whole connection is closed."""

    def take(self, count: int, wait_s: float) -> list[tuple[Message, Delivery]]:
        """Up to `count` messages that arrive in `wait_s`; credit left over is drained."""
        self.link.flow(max(0, count - len(self.inbox)))
        deadline = time.monotonic() + wait_s
        while len(self.inbox) < count and (left := deadline - time.monotonic()) > 0:
            self.pump(min(left, 0.2), lambda: len(self.inbox) >= count)
        if self.link.credit:
            self.link.drain(0)
            self.connection.wait(lambda: not self.link.draining(), timeout=TIMEOUT_S, msg="draining")
            self.link.drain_mode = False
        taken, self.inbox = self.inbox[:count], self.inbox[count:]
        return taken

    def pump(self, wait_s: float, until: Callable[[], bool] = lambda: False) -> None:
        try:
            self.connection.wait(until, timeout=wait_s)
        except Timeout:
            return

    def end(self) -> None:
        """Give credit, for which the broker detaches the link. Raises LinkDetached."""
        self.link.flow(1)
        self.connection.wait(lambda: self.link.state & Endpoint.REMOTE_CLOSED, timeout=TIMEOUT_S, msg="the link's end")
        raise LinkDetached(self.link)

    def one(self, wait_s: float = TIMEOUT_S) -> tuple[Message, Delivery]:
        taken = self.take(1, wait_s)
        equal(len(taken), 1, "messages received")
        return taken[0]

    def none(self, what: str) -> None:
        equal([message.body for message, _ in self.take(1, 1)], [], what)

    def settle(self, delivery: Delivery, outcome: int = Delivery.ACCEPTED) -> None:
        """Settle and wait for the broker's answer; raises Failed with its error."""
        delivery.update(outcome)
        self.answered([delivery])

    def answered(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.connection.wait(lambda d=delivery: d.settled, timeout=TIMEOUT_S, msg="waiting for an answer")
            equal(delivery.remote_state, delivery.local_state, "state of the answer")
            condition = delivery.remote.condition
            delivery.settle()
            if condition is not None:
                raise Failed(condition.name, condition.description)

    def modify(self, delivery: Delivery, *, undeliverable: bool = False, annotations: Any = None) -> None:
        delivery.local.failed = True
        delivery.local.undeliverable = undeliverable
        if annotations is not None:
            delivery.local.annotations = annotations
        self.settle(delivery, Delivery.MODIFIED)

    def dead_letter(self, delivery: Delivery, **info: object) -> None:
        delivery.local.condition = Condition("com.microsoft:dead-letter", None, info or None)
        self.settle(delivery, Delivery.REJECTED)

    def all_of(self, count: int) -> list[Message]:
        taken = self.take(count, TIMEOUT_S)
        equal(len(taken), count, "messages received")
        for _, delivery in taken:
            delivery.update(Delivery.ACCEPTED)
        self.answered([delivery for _, delivery in taken])
        return [message for message, _ in taken]

    def close(self) -> None:
        self.blocking.close()


def killed_while_holding(queue: str, *session_id: str) -> None:
    """Let another process of this program receive the queue's message, or the session's, and kill it."""
    command = [sys.executable, sys.argv[0], "--hold", queue, *session_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        equal(holder.stdout.readline().strip(), b"held", "what the other process says")
        holder.kill()


class Scene:
    """Connections with one login, and the queue of one scenario.

    Messages whose order matters get `keyed`, which is one partition key.
    """

    def __init__(self, name: str, login: tuple[str, str] = (CONFIG["key_name"], CONFIG["key"])) -> None:
        self.queue = CONFIG["entity_prefix"] + name
        self.keyed = {"annotations": {symbol("x-opt-partition-key"): name}} if name in CONFIG["keyed"] else {}
        self.login = login
        self._connection: BlockingConnection | None = None

    def connect(self) -> BlockingConnection:
        user, password = self.login
        return BlockingConnection(
            f"{CONFIG['host']}:{CONFIG['port']}",
            timeout=TIMEOUT_S,
            user=user,
            password=password,
            allowed_mechs="PLAIN",
            allow_insecure_mechs=True,
            sasl_enabled=True,
        )

    @property
    def connection(self) -> BlockingConnection:
        self._connection = self._connection or self.connect()
        return self._connection

    def sender(self, options: LinkOption | None = None) -> Sender:
        return Sender(self.connection, self.queue, options)

    def send(self, *bodies: object) -> None:
        sender = self.sender()
        for body in bodies:
            sender.post(Message(body=body, **self.keyed))
        sender.close()

    def receiver(self, options: LinkOption | None = None, connection: BlockingConnection | None = None) -> Receiver:
        return Receiver(connection or self.connection, self.queue, options)

    def dead_letters(self) -> Receiver:
        return Receiver(self.connection, f"{self.queue}/$DeadLetterQueue")

    def manage(self, operation: str, body: dict[str, object], queue: str | None = None) -> tuple[int, Any]:
        """One request to the queue's management node: (status, body). Raises Failed."""
        address = f"{queue or self.queue}/$management"
        reply_to = f"reply-{uuid.uuid4()}"

        class ReplyTo(LinkOption):
            def apply(self, link: Link) -> None:
                link.target.address = reply_to

        receiver = Receiver(self.connection, address, ReplyTo())
        sender = Sender(self.connection, address)
        properties = {"operation": f"com.microsoft:{operation}"}
        sender.post(Message(id=reply_to, reply_to=reply_to, properties=properties, body=body))
        answer, delivery = receiver.one()
        delivery.settle()
        sender.close()
        receiver.close()
        equal(answer.correlation_id, reply_to, "correlation id")
        status = answer.properties["statusCode"]
        equal(type(status), int32, "type of statusCode")
        if status >= 300:
            raise Failed(answer.properties.get("errorCondition"), str(answer.properties.get("statusDescription")))
        return int(status), owned(answer.body)

    def peek(self, count: int, start: int = 1, queue: str | None = None) -> list[Message]:
        request = {"from-sequence-number": start, "message-count": int32(count)}
        status, body = self.manage("peek-message", request, queue)
        return [] if status == 204 else [decoded(item["message"]) for item in body["messages"]]

    def nothing_is_left(self) -> None:
        receiver = self.receiver()
        equal([message.body for message, _ in receiver.take(1, 1)], [], "messages left")
        receiver.close()
        equal(self.peek(10), [], "messages left to browse")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def owned(value: Any) -> Any:
    """A copy that outlives its message: Proton shows binaries as views of the message's memory."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {key: owned(item) for key, item in value.items()}
    return [owned(item) for item in value] if isinstance(value, list) else value


def decoded(encoded: bytes) -> Message:
    message = Message()
    message.decode(encoded)
    return message


def annotation(message: Message, name: str) -> Any:
    return message.annotations[symbol(name)]


def number_of(message: Message) -> int:
    return int(annotation(message, "x-opt-sequence-number"))


def local(message: Message) -> int:
    """The message's sequence number without the partition, which is in the highest 16 bits on partitioned entities."""
    return number_of(message) & (1 << 48) - 1


def numbers(*sequence_numbers: int) -> Array:
    return Array(UNDESCRIBED, Data.LONG, *sequence_numbers)


def tokens(*deliveries: Delivery) -> Array:
    """Lock tokens of deliveries; a tag holds the GUID in .NET order."""
    return Array(UNDESCRIBED, Data.UUID, *(uuid.UUID(bytes_le=tag(delivery)) for delivery in deliveries))


def tag(delivery: Delivery) -> bytes:
    """The delivery's tag. `Delivery.tag` expects text, so this asks the library below."""
    raw = lib.pn_delivery_tag(delivery._impl)
    return bytes(ffi.unpack(raw.start, raw.size))
