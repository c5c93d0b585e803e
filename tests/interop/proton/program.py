"""The scenarios of `scenarios.py` with Qpid Proton: `program.py SCENARIO...`, one line of JSON for each.

What the Azure SDKs do over `$management` is done here request by request.
"""

import json
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import corners  # noqa: F401 - it registers its scenarios
import partitioned  # noqa: F401 - it registers its scenarios
import sessions
import topics  # noqa: F401 - it registers its scenarios
from proton import (
    UNDESCRIBED,
    Array,
    ConnectionException,
    Data,
    Delivery,
    Described,
    Link,
    Message,
    Terminus,
    int32,
    symbol,
    timestamp,
    ubyte,
    uint,
    ulong,
)
from proton.handlers import MessagingHandler
from proton.reactor import AtMostOnce, Container, Copy, LinkOption, Selector
from scene import (
    CONFIG,
    SCENARIOS,
    TIMEOUT_S,
    PeekLock,
    ReceiveAndDelete,
    Receiver,
    Scene,
    annotation,
    decoded,
    equal,
    fails,
    killed_while_holding,
    local,
    number_of,
    numbers,
    scenario,
    tag,
    tokens,
    true,
)
from transaction import Transaction

AT_ONCE = 16


@scenario("send-complete")
def send_complete(scene: Scene) -> None:
    scene.send("hello")
    receiver = scene.receiver()
    message, delivery = receiver.one()
    equal((message.body, message.delivery_count), ("hello", 0), "body and delivery count")
    receiver.settle(delivery)
    receiver.close()
    scene.nothing_is_left()


@scenario("properties")
def properties(scene: Scene) -> None:
    sent = {
        "id": "id-1",
        "subject": "subject",
        "correlation_id": "correlation",
        "content_type": symbol("text/plain"),
        "address": "to-somebody",
        "reply_to": "reply-to",
        "reply_to_group_id": "reply-session",
        "user_id": b"user",
        "durable": True,
        "priority": 7,
        "ttl": 3600.0,
    }
    annotations = {symbol("x-opt-partition-key"): "key", symbol("x-opt-of-somebody"): ulong(2**63)}
    scene.sender().post(Message(body="x", annotations=annotations, **sent))
    receiver = scene.receiver()
    message, delivery = receiver.one()
    for name, value in sent.items():
        equal(getattr(message, name), value, name)
    for name, value in annotations.items():
        equal(message.annotations[name], value, name)
    equal(local(message), 1, "sequence number")
    enqueued = annotation(message, "x-opt-enqueued-time")
    equal((type(enqueued), type(annotation(message, "x-opt-locked-until"))), (timestamp, timestamp), "types of times")
    true(abs(enqueued - time.time() * 1000) < 30_000, f"enqueued {enqueued}")
    true(annotation(message, "x-opt-locked-until") > time.time() * 1000, "lock end")
    equal(round(message.expiry_time * 1000) - enqueued, 3_600_000, "expires")
    receiver.settle(delivery)


@scenario("duplicates")
def duplicates(scene: Scene) -> None:
    sender = scene.sender()
    for text, message_id in (("a", "1"), ("b", "1"), ("c", ulong(1)), ("d", "2")):
        sender.post(Message(body=text, id=message_id))
    equal(sorted(message.body for message in scene.receiver().all_of(2)), ["a", "d"], "bodies")
    scene.nothing_is_left()


@scenario("transactions")
def transactions(scene: Scene) -> None:
    scene.send("old")
    sender, receiver = scene.sender(), scene.receiver()
    _, old = receiver.one()
    rolled_back = Transaction(scene)
    rolled_back.send(sender, "never")
    rolled_back.abort()
    committed = Transaction(scene)
    for text in ("a", "b"):
        committed.send(sender, text)
    committed.transaction.accept(old)
    receiver.none("before the commit")
    committed.commit()
    equal([message.body for message in receiver.all_of(2)], ["a", "b"], "bodies")
    receiver.close()
    scene.nothing_is_left()


class Through(LinkOption):
    """A sender through the entity it is attached to, to another."""

    def __init__(self, destination: str) -> None:
        self._properties = {symbol("com.microsoft:transfer-destination-address"): destination}

    def apply(self, link: Link) -> None:
        link.properties = self._properties


@scenario("transactions-across")
def transactions_across(scene: Scene) -> None:
    others = [f"{scene.queue}-{number}" for number in (1, 2, 3)]
    scene.send("old")
    receiver, senders = scene.receiver(), [scene.sender(Through(other)) for other in others]
    equal(senders[0].blocking.link.remote_properties, senders[0].blocking.link.properties, "properties of the answer")
    _, old = receiver.one()
    rolled_back = Transaction(scene)
    for sender in senders:
        rolled_back.send(sender, "never")
    rolled_back.abort()
    committed = Transaction(scene)
    for sender in senders:
        committed.send(sender, "a")
    committed.transaction.accept(old)
    receivers = [Receiver(scene.connection, other) for other in others]
    receivers[0].none("before the commit")
    committed.commit()
    for sender in senders:
        sender.post(Message(body="b", **scene.keyed))  # outside of a transaction, by the same way
    for each in receivers:
        equal([message.body for message in each.all_of(2)], ["a", "b"], "bodies")
        each.none("left at the destination")
    receiver.close()
    scene.nothing_is_left()


@scenario("application-properties")
def application_properties(scene: Scene) -> None:
    sent = {
        "text": "grüße 🐇",
        "symbol": symbol("symbol"),
        "long": -(2**40),
        "ulong": ulong(2**63),
        "int": int32(-7),
        "ubyte": ubyte(200),
        "double": 2.5,
        "yes": True,
        "no": False,
        "none": None,
        "when": timestamp(1_704_164_645_678),
        "uuid": uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
        "binary": b"\x00\xff",
        "described": Described(symbol("com.microsoft:timespan"), 36_000_000_000),
    }
    scene.sender().post(Message(body="x", properties=sent))
    receiver = scene.receiver()
    message, delivery = receiver.one()
    equal(message.properties, sent, "application properties")
    for name in ("symbol", "ulong", "int", "ubyte", "when"):
        equal(type(message.properties[name]), type(sent[name]), f"type of {name}")
    receiver.settle(delivery)


@scenario("bodies")
def bodies(scene: Scene) -> None:
    sent = [
        Message(body=bytes(range(256)) * 4, inferred=True, **scene.keyed),
        Message(body=b"", inferred=True, **scene.keyed),
        Message(body={"text": "value", "number": 7, "list": [1, 2, 3]}, **scene.keyed),
        Message(body=[1, "b", None], inferred=True, **scene.keyed),
        Message(body=Described(symbol("test:described"), "inside"), **scene.keyed),
        Message(body=Array(UNDESCRIBED, Data.INT, 1, 2, 3), **scene.keyed),
    ]
    sender = scene.sender()
    for message in sent:
        sender.post(message)
    received = scene.receiver().all_of(len(sent))
    for i, (got, expected) in enumerate(zip(received, sent, strict=True)):
        equal((got.body, got.inferred), (expected.body, expected.inferred), f"body {i}")


@scenario("large-message")
def large_message(scene: Scene) -> None:
    content = bytes(i * 31 % 251 for i in range(900 * 1024))
    scene.send(content)
    (message,) = scene.receiver().all_of(1)
    true(message.body == content, "the body differs")


@scenario("pipelined")
def pipelined(scene: Scene) -> None:
    sender = scene.sender()
    sender.settled([sender.start(Message(id=ulong(i), body="x" * 100)) for i in range(2000)])
    receiver = scene.receiver()
    equal(sorted(message.id for message in receiver.all_of(2000)), list(range(2000)), "ids")
    receiver.close()
    scene.nothing_is_left()


@scenario("presettled-send")
def presettled_send(scene: Scene) -> None:
    sender = scene.sender(AtMostOnce())
    for i in range(10):
        sender.start(Message(body=str(i), **scene.keyed))
    equal([message.body for message in scene.receiver().all_of(10)], [str(i) for i in range(10)], "bodies")


@scenario("receive-and-delete")
def receive_and_delete(scene: Scene) -> None:
    scene.send("a", "b")
    receiver = scene.receiver(ReceiveAndDelete())
    taken = receiver.take(2, TIMEOUT_S)
    equal([(message.body, delivery.settled) for message, delivery in taken], [("a", True), ("b", True)], "received")
    receiver.close()
    scene.nothing_is_left()


@scenario("abandon")
def abandon(scene: Scene) -> None:
    sender = scene.sender()
    sender.post(Message(id="id", body="first", **scene.keyed))
    sender.post(Message(body="second", **scene.keyed))
    receiver = scene.receiver()
    message, delivery = receiver.one()
    equal((message.body, message.delivery_count), ("first", 0), "first delivery")
    first_tag = tag(delivery)
    receiver.modify(delivery)
    again, delivery = receiver.one()
    equal((again.body, again.delivery_count, again.id), ("first", 1, "id"), "second delivery")
    true(tag(delivery) != first_tag, "the lock token is the old one")
    receiver.settle(delivery, Delivery.RELEASED)
    released, delivery = receiver.one()
    equal((released.body, released.delivery_count), ("first", 1), "after releasing, which is no failed delivery")
    receiver.settle(delivery)
    last, delivery = receiver.one()
    equal(last.body, "second", "next message")
    receiver.settle(delivery)


@scenario("abandon-properties")
def abandon_properties(scene: Scene) -> None:
    scene.sender().post(Message(body="x", properties={"kept": int32(1), "changed": "before"}))
    receiver = scene.receiver()
    _, delivery = receiver.one()
    receiver.modify(delivery, annotations={symbol("changed"): "after", symbol("added"): 5})
    message, delivery = receiver.one()
    equal(message.properties, {"kept": 1, "changed": "after", "added": 5}, "application properties")
    receiver.settle(delivery)


@scenario("defer")
def defer(scene: Scene) -> None:
    scene.send("later")
    receiver = scene.receiver()
    message, delivery = receiver.one()
    number = annotation(message, "x-opt-sequence-number")
    receiver.modify(delivery, undeliverable=True)
    receiver.none("deliveries of a deferred message")
    request = {"sequence-numbers": numbers(number), "receiver-settle-mode": uint(1)}
    _, body = scene.manage("receive-by-sequence-number", request)
    (item,) = body["messages"]
    equal(decoded(item["message"]).body, "later", "body")
    lock = Array(UNDESCRIBED, Data.UUID, item["lock-token"])
    scene.manage("update-disposition", {"disposition-status": "completed", "lock-tokens": lock})
    gone = "com.microsoft:message-not-found"
    fails(gone, lambda: scene.manage("receive-by-sequence-number", request), "a completed message")
    scene.nothing_is_left()


@scenario("dead-letter")
def dead_letter(scene: Scene) -> None:
    scene.sender().post(Message(id="id", body="bad", properties={"kept": "yes"}))
    receiver = scene.receiver()
    _, delivery = receiver.one()
    reasons = {"DeadLetterReason": "my reason", "DeadLetterErrorDescription": "my description", "added": 7}
    receiver.dead_letter(delivery, **reasons)
    receiver.none("messages in the queue itself")
    letters = scene.dead_letters()
    message, delivery = letters.one()
    equal((message.body, message.id), ("bad", "id"), "dead-lettered message")
    equal(message.properties, {**reasons, "kept": "yes"}, "application properties")
    equal(annotation(message, "x-opt-deadletter-source"), scene.queue, "source")
    letters.settle(delivery)
    letters.none("dead letters left")


@scenario("dead-letter-queue")
def dead_letter_queue(scene: Scene) -> None:
    scene.sender().post(Message(body="bad", ttl=3))
    receiver = scene.receiver()
    receiver.dead_letter(receiver.one()[1], DeadLetterReason="because")
    time.sleep(3.5)  # a dead letter outlives its time to live
    queue = f"{scene.queue}/$DeadLetterQueue"
    equal([message.body for message in scene.peek(5, queue=queue)], ["bad"], "browsed")
    letters = scene.dead_letters()
    message, delivery = letters.one()
    letters.modify(delivery)
    again, delivery = letters.one()
    equal(again.delivery_count, message.delivery_count, "delivery count")
    equal(again.properties["DeadLetterReason"], "because", "reason")
    letters.settle(delivery)
    equal(scene.peek(5, queue=queue), [], "left")


@scenario("max-delivery-count")
def max_delivery_count(scene: Scene) -> None:
    scene.send("poison")
    receiver = scene.receiver()
    for count in range(2):
        message, delivery = receiver.one()
        equal(message.delivery_count, count, "delivery count")
        receiver.modify(delivery)
    receiver.none("messages in the queue itself")
    (message,) = scene.dead_letters().all_of(1)
    reason = message.properties["DeadLetterReason"]
    equal((message.body, reason), ("poison", "MaxDeliveryCountExceeded"), "dead letter")


@scenario("lock-expiry")
def lock_expiry(scene: Scene) -> None:
    scene.sender().post(Message(id="id", body="slow"))
    first, second = scene.receiver(), scene.receiver()
    first.one()
    started = time.monotonic()
    second.none("messages while locked")
    again, delivery = second.one()
    true(time.monotonic() - started > 3.5, f"delivered again after {time.monotonic() - started:.1f} s")
    equal((again.id, again.delivery_count), ("id", 1), "second delivery")
    second.settle(delivery)


@scenario("renew-lock")
def renew_lock(scene: Scene) -> None:
    scene.send("slow")
    receiver = scene.receiver()
    message, delivery = receiver.one()
    before = annotation(message, "x-opt-locked-until")
    time.sleep(3)  # the lock lasts five seconds
    _, body = scene.manage("renew-lock", {"lock-tokens": tokens(delivery)})
    (until,) = body["expirations"].elements
    true(until - before > 2000, f"renewed from {before} to {until}")
    time.sleep(3.5)  # the first lock would have ended
    receiver.settle(delivery)
    scene.nothing_is_left()


@scenario("send-again")
def send_again(scene: Scene) -> None:
    sender, receiver = scene.sender(), scene.receiver()
    sent = Message(id="id", subject="s", group_id="ключ", body="x", properties={"k": "v", "n": 1})
    sent.annotations = {symbol("x-opt-partition-key"): "ключ"}
    sender.post(sent)
    message, delivery = receiver.one()
    receiver.settle(delivery)
    sender.post(message)
    again, delivery = receiver.one()
    receiver.settle(delivery)
    equal((again.id, again.subject, again.group_id, again.body), ("id", "s", "ключ", "x"), "what it had")
    equal(again.annotations["x-opt-partition-key"], "ключ", "partition key")
    equal(again.properties, {"k": "v", "n": 1}, "properties")


@scenario("lock-lost")
def lock_lost(scene: Scene) -> None:
    scene.send("slow")
    receiver = scene.receiver()
    _, delivery = receiver.one()
    time.sleep(6)  # longer than a lock lasts
    lost = "com.microsoft:message-lock-lost"
    lock = tokens(delivery)
    fails(lost, lambda: scene.manage("renew-lock", {"lock-tokens": lock}), "renewing a lost lock")
    delivery.update(Delivery.ACCEPTED)
    scene.connection.wait(lambda: delivery.settled, timeout=TIMEOUT_S, msg="waiting for an answer")
    equal(delivery.remote_state, Delivery.REJECTED, "answer to completing after the lock")
    equal(delivery.remote.condition.name, lost, "its condition")
    delivery.settle()
    again, delivery = receiver.one()
    equal(again.delivery_count, 1, "delivery count")
    receiver.settle(delivery)


@scenario("peek")
def peek(scene: Scene) -> None:
    scene.send(*"abcde")
    browsed = scene.peek(10)
    equal([message.body for message in browsed], list("abcde"), "browsed")
    some = [(local(message), message.body) for message in scene.peek(2, number_of(browsed[2]))]
    equal(some, [(3, "c"), (4, "d")], "browsed from a number")
    equal([locked_until(message) for message in browsed], [None] * 5, "browsed as locked")
    receiver = scene.receiver()
    locked, delivery = receiver.one()
    looked = scene.peek(2, number_of(locked))
    equal([locked_until(message) for message in looked], [locked_until(locked), None], "ends of locks")
    receiver.settle(delivery)
    equal(len(receiver.all_of(4)), 4, "received after browsing")
    equal(scene.peek(10), [], "browsed when empty")


def locked_until(message: Message) -> Any:
    return message.annotations.get(symbol("x-opt-locked-until"))


def browsed(scene: Scene, queue: str, *options: LinkOption) -> list[Message]:
    """All that a link shows which asks for copies."""
    browser = Receiver(scene.connection, queue, [Copy(), *options])
    found = browser.take(100, 2)
    for _, delivery in found:
        if not delivery.settled:
            browser.settle(delivery)
    equal(browser.link.remote_source.distribution_mode, Terminus.DIST_MODE_COPY, "distribution mode of the answer")
    browser.close()
    return [message for message, _ in found]


@scenario("browse")
def browse(scene: Scene) -> None:
    scene.send(*"abcde")
    for option in (AtMostOnce(), PeekLock(), AtMostOnce()):
        shown = browsed(scene, scene.queue, option)
        equal([(each.body, each.delivery_count) for each in shown], [(body, 0) for body in "abcde"], "browsed")
    receiver = scene.receiver()
    _, delivery = receiver.one()
    receiver.dead_letter(delivery)
    dead = f"{scene.queue}/$DeadLetterQueue"
    for _ in range(2):
        equal([each.body for each in browsed(scene, dead, AtMostOnce())], ["a"], "browsed dead letters")
    rest = receiver.all_of(4)
    equal([(each.body, each.delivery_count) for each in rest], [(body, 0) for body in "bcde"], "received")
    equal(browsed(scene, scene.queue), [], "browsed when empty")
    equal(len(scene.dead_letters().all_of(1)), 1, "received dead letters")


@scenario("selector")
def selector(scene: Scene) -> None:
    sender = scene.sender()
    for number in range(6):
        properties = {"color": ("red", "blue")[number % 2], "n": number}
        sender.post(Message(id=f"id-{number}", subject=f"type-{number}", correlation_id=f"corr-{number}",
                            priority=number, body=number, properties=properties))  # fmt: skip
    shown = browsed(scene, scene.queue, Selector("color = 'blue'"), AtMostOnce())
    equal(sorted(each.body for each in shown), [1, 3, 5], "browsed")
    for text, expected in {
        "color = 'red' AND n BETWEEN 1 AND 3": [2],
        "JMSCorrelationID = 'corr-3' OR JMSType LIKE 'type-_' AND JMSPriority > 4": [3, 5],
        "color = 'green'": [],
    }.items():
        receiver = Receiver(scene.connection, scene.queue, [Selector(text), PeekLock()])
        filters = receiver.link.remote_source.filter
        filters.rewind()
        filters.next()
        equal([each.value for each in filters.get_object().values()], [text], "filters of the answer")
        taken = receiver.take(10, 2)
        equal(sorted(message.body for message, _ in taken), expected, text)
        for _, delivery in taken:
            receiver.settle(delivery)
        receiver.close()
    rest = scene.receiver().all_of(3)
    equal(sorted((each.body, each.delivery_count) for each in rest), [(0, 0), (1, 0), (4, 0)], "the rest")
    for text, condition in {"color =": "amqp:invalid-field", "JMSReplyTo = 'x'": "amqp:not-implemented"}.items():
        fails(condition, lambda text=text: Receiver(scene.connection, scene.queue, Selector(text)), text)


def later(body: str, due_ms: int) -> Message:
    return Message(id=body, body=body, annotations={symbol("x-opt-scheduled-enqueue-time"): timestamp(due_ms)})


@scenario("schedule")
def schedule(scene: Scene) -> None:
    due_ms = round(time.time() * 1000) + 4000
    request = {"messages": [{"message-id": "later", "message": later("later", due_ms).encode()}]}
    _, body = scene.manage("schedule-message", request)
    (number,) = body["sequence-numbers"].elements
    scene.sender().post(later("later too", due_ms))
    browsed = {message.body: message for message in scene.peek(5)}
    shown = {body: annotation(message, "x-opt-message-state") for body, message in browsed.items()}
    equal(shown, {"later": 2, "later too": 2}, "browsed with state")
    equal(number_of(browsed["later"]), number, "the number returned")
    receiver = scene.receiver()
    receiver.none("messages before their time")
    messages = receiver.all_of(2)
    late = time.time() * 1000 - due_ms
    true(0 <= late < 15_000, f"delivered {late} ms late")
    equal({message.body for message in messages}, {"later", "later too"}, "bodies")


@scenario("cancel-scheduled")
def cancel_scheduled(scene: Scene) -> None:
    due_ms = round(time.time() * 1000) + 3000
    items = [{"message-id": body, "message": later(body, due_ms).encode()} for body in ("kept", "cancelled")]
    _, body = scene.manage("schedule-message", {"messages": items})
    request = {"sequence-numbers": numbers(body["sequence-numbers"].elements[1])}
    scene.manage("cancel-scheduled-message", request)
    gone = "com.microsoft:message-not-found"
    fails(gone, lambda: scene.manage("cancel-scheduled-message", request), "a second cancel")
    equal([message.body for message in scene.receiver().all_of(1)], ["kept"], "messages that arrived")
    scene.nothing_is_left()


@scenario("time-to-live")
def time_to_live(scene: Scene) -> None:
    sender = scene.sender()
    sender.post(Message(body="short", ttl=1))
    sender.post(Message(body="long"))
    time.sleep(1.5)  # longer than its time to live
    equal([message.body for message in scene.receiver().all_of(1)], ["long"], "messages that arrived")
    scene.nothing_is_left()


@scenario("time-to-live-dead-letter")
def time_to_live_dead_letter(scene: Scene) -> None:
    scene.sender().post(Message(body="short", ttl=1))
    time.sleep(1.5)  # longer than its time to live
    scene.receiver().none("expired messages delivered")
    (message,) = scene.dead_letters().all_of(1)
    reason = message.properties["DeadLetterReason"]
    equal((message.body, reason), ("short", "TTLExpiredException"), "dead letter")


@scenario("settle-elsewhere")
def settle_elsewhere(scene: Scene) -> None:
    scene.send("x")
    receiver = scene.receiver()
    _, delivery = receiver.one()
    request = {"disposition-status": "completed", "lock-tokens": tokens(delivery)}
    receiver.close()
    scene.manage("update-disposition", request)
    lost = "com.microsoft:message-lock-lost"
    fails(lost, lambda: scene.manage("update-disposition", request), "a second settlement")
    scene.nothing_is_left()


@scenario("prompt-return")
def prompt_return(scene: Scene) -> None:
    receiver = scene.receiver()
    started = time.monotonic()
    equal(receiver.take(10, 0.5), [], "messages of an empty queue")
    true(time.monotonic() - started < 10, f"draining took {time.monotonic() - started:.1f} s")
    scene.send(*"abc")
    got = receiver.take(10, 1)
    equal(sorted(message.body for message, _ in got), list("abc"), "a short receive")
    for _, delivery in got:
        receiver.settle(delivery)
    scene.send("d", "e")
    equal(sorted(message.body for message in receiver.all_of(2)), ["d", "e"], "the rest")
    scene.nothing_is_left()


@scenario("prefetch")
def prefetch(scene: Scene) -> None:
    scene.send(*map(str, range(100)))
    receiver = scene.receiver()
    received: list[str] = []
    receiver.link.flow(50)
    deadline = time.monotonic() + TIMEOUT_S
    while len(received) < 100 and time.monotonic() < deadline:
        receiver.pump(0.5, lambda: bool(receiver.inbox))
        some, receiver.inbox = receiver.inbox, []
        receiver.link.flow(len(some))
        for _, delivery in some:
            delivery.update(Delivery.ACCEPTED)
        receiver.answered([delivery for _, delivery in some])
        received += [message.body for message, _ in some]
    equal(received, [str(i) for i in range(100)], "bodies")
    receiver.close()
    scene.nothing_is_left()


@scenario("push-receive")
def push_receive(scene: Scene) -> None:
    received: list[str] = []

    class Consumer(MessagingHandler):
        def on_start(self, event: Any) -> None:
            user, password = scene.login
            connection = event.container.connect(
                f"{CONFIG['host']}:{CONFIG['port']}",
                user=user,
                password=password,
                allowed_mechs="PLAIN",
                allow_insecure_mechs=True,
            )
            event.container.create_receiver(connection, scene.queue)

        def on_message(self, event: Any) -> None:
            received.append(event.message.body)
            if len(received) == 20:
                self.accept(event.delivery)
                event.receiver.close()
                event.connection.close()

    consumer = threading.Thread(target=Container(Consumer()).run, daemon=True)
    consumer.start()
    scene.send(*map(str, range(20)))
    consumer.join(TIMEOUT_S)
    equal(received, [str(i) for i in range(20)], "bodies")
    scene.nothing_is_left()


@scenario("competing")
def competing(scene: Scene) -> None:
    scene.send(*map(str, range(60)))
    received: list[str] = []

    def consume() -> list[str]:
        connection = scene.connect()
        receiver = scene.receiver(connection=connection)
        mine: list[str] = []
        while taken := receiver.take(5, 1):
            for message, delivery in taken:
                receiver.settle(delivery)
                mine.append(message.body)
        connection.close()
        return mine

    with ThreadPoolExecutor(3) as pool:
        for consumer in [pool.submit(consume) for _ in range(3)]:
            received += consumer.result()
    equal(sorted(received, key=int), [str(i) for i in range(60)], "bodies")


@scenario("connection-reuse")
def connection_reuse(scene: Scene) -> None:
    for i in range(4):
        scene.send(f"{i} a", f"{i} b")
        first, second = scene.receiver(), scene.receiver()
        taken = [first.one(), second.one()]
        equal(sorted(message.body for message, _ in taken), [f"{i} a", f"{i} b"], "bodies")
        first.settle(taken[0][1])
        second.settle(taken[1][1])
        first.close()
        second.close()
    scene.nothing_is_left()


@scenario("close-unsettled")
def close_unsettled(scene: Scene) -> None:
    scene.send("held")
    first = scene.receiver()
    first.one()
    first.close()
    second = scene.receiver()
    second.none("messages while locked")
    message, delivery = second.one()
    equal((message.body, message.delivery_count), ("held", 1), "second delivery")
    second.settle(delivery)


@scenario("connection-lost")
def connection_lost(scene: Scene) -> None:
    scene.send("held")
    killed_while_holding(scene.queue)
    message, delivery = (receiver := scene.receiver()).one(3)
    equal((message.body, message.delivery_count), ("held", 1), "second delivery")
    receiver.settle(delivery)


@scenario("batch-delete")
def batch_delete(scene: Scene) -> None:
    scene.send(*map(str, range(25)))

    def delete(count: int) -> tuple[int, Any]:
        before = timestamp(round(time.time() * 1000) + 60_000)
        request = {"message-count": int32(count), "enqueued-time-utc": before}
        return scene.manage("batch-delete-messages", request)

    equal(delete(10)[1]["message-count"], 10, "deleted")
    equal([message.body for message in scene.peek(50)], [str(i) for i in range(10, 25)], "left")
    equal(delete(500)[1]["message-count"], 15, "deleted with room to spare")
    equal(delete(500)[0], 204, "status when there is nothing")
    scene.nothing_is_left()


@scenario("unknown-queue")
def unknown_queue(scene: Scene) -> None:
    text = fails("amqp:not-found", lambda: scene.send("x"), "sending")
    true("The messaging entity '" in text and "' could not be found" in text, f"description: {text}")
    fails("amqp:not-found", scene.receiver, "receiving")


@scenario("wrong-key")
def wrong_key(scene: Scene) -> None:
    other = Scene("wrong-key", (CONFIG["key_name"], "wrong"))
    try:
        other.send("x")
    except ConnectionException as error:
        true("auth" in str(error).lower(), f"error: {error}")
    else:
        raise AssertionError("connecting with a wrong key: nothing was raised")
    scene.nothing_is_left()


@scenario("missing-right")
def missing_right(scene: Scene) -> None:
    listener, sender = Scene("missing-right", CONFIG["listener"]), Scene("missing-right", CONFIG["sender"])
    fails("amqp:unauthorized-access", lambda: listener.send("x"), "sending without the right")
    sender.send("x")
    fails("amqp:unauthorized-access", sender.receiver, "receiving without the right")
    equal([message.body for message in listener.receiver().all_of(1)], ["x"], "bodies")
    listener.close()
    sender.close()


@scenario("oversized")
def oversized(scene: Scene) -> None:
    sender = scene.sender()
    equal(sender.blocking.link.remote_max_message_size, 64 * 1024, "max-message-size of the link")
    large = Message(body=b"x" * 100_000)
    fails("amqp:link:message-size-exceeded", lambda: sender.post(large), "sending 100,000 bytes")
    sender.post(Message(body="small"))
    equal([message.body for message in scene.receiver().all_of(1)], ["small"], "messages that arrived")


ENTITY_DISABLED = "com.microsoft:entity-disabled"


@scenario("disabled")
def disabled(scene: Scene) -> None:
    fails(ENTITY_DISABLED, lambda: scene.send("x"), "sending")
    fails(ENTITY_DISABLED, scene.receiver, "receiving")


@scenario("send-disabled")
def send_disabled(scene: Scene) -> None:
    fails(ENTITY_DISABLED, lambda: scene.send("x"), "sending")
    scene.nothing_is_left()


@scenario("receive-disabled")
def receive_disabled(scene: Scene) -> None:
    scene.send("x")
    fails(ENTITY_DISABLED, scene.receiver, "receiving")


def run(name: str) -> dict[str, object]:
    started = time.monotonic()
    try:
        if name not in SCENARIOS:
            raise AssertionError("this program does not know the scenario")
        scene = Scene(name)
        SCENARIOS[name](scene)
        scene.close()
    except Exception as error:
        where = "".join(traceback.format_exception(error, limit=-4))
        return {"scenario": name, "ok": False, "detail": f"{error!r}\n{where}", "seconds": time.monotonic() - started}
    return {"scenario": name, "ok": True, "detail": "", "seconds": time.monotonic() - started}


def hold(queue: str, session_id: str | None = None) -> None:
    """Receive one message, of the session if one is named, say so, and wait to be killed."""
    scene = Scene("")
    scene.queue = queue
    receiver = scene.receiver() if session_id is None else sessions.accept(scene, session_id)
    receiver.one()
    print("held", flush=True)
    time.sleep(60)


def main() -> None:
    if sys.argv[1] == "--hold":
        return hold(*sys.argv[2:])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for result in as_completed([pool.submit(run, name) for name in sys.argv[1:]]):
            print(json.dumps(result.result()), flush=True)


if __name__ == "__main__":
    main()
