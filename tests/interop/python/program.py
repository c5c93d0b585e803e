"""The scenarios of `scenarios.py` with azure-servicebus: `program.py SCENARIO...`, one line of JSON for each."""

import asyncio
import json
import subprocess
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime, timedelta
from pathlib import Path

import administration  # noqa: F401 - it registers its scenarios
import corners  # noqa: F401 - it registers its scenarios
import partitioned  # noqa: F401 - it registers its scenarios
import sessions  # noqa: F401 - it registers its scenarios
import topics  # noqa: F401 - it registers its scenarios
from azure.servicebus import AutoLockRenewer, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.aio import ServiceBusClient as AsyncServiceBusClient
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessageNotFoundError,
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
)
from scene import (
    CONFIG,
    SCENARIOS,
    Scene,
    all_of,
    body,
    equal,
    killed_while_holding,
    local,
    one,
    raises,
    scenario,
    true,
    try_receive,
)

AT_ONCE = 16


@scenario("send-complete")
def send_complete(scene: Scene) -> None:
    scene.send("hello")
    with scene.receiver() as receiver:
        message = one(receiver)
        equal(body(message), b"hello", "body")
        equal(message.delivery_count, 0, "delivery count")
        receiver.complete_message(message)
    scene.nothing_is_left()


@scenario("properties")
def properties(scene: Scene) -> None:
    sent = {
        "message_id": "id-1",
        "subject": "subject",
        "correlation_id": "correlation",
        "content_type": "text/plain",
        "to": "to-somebody",
        "reply_to": "reply-to",
        "reply_to_session_id": "reply-session",
        "partition_key": "key",
    }
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage("x", time_to_live=timedelta(hours=1), **sent))
    with scene.receiver() as receiver:
        message = one(receiver)
        for name, value in sent.items():
            equal(getattr(message, name), value, name)
        now = datetime.now(UTC)
        equal(local(message), 1, "sequence number")
        true(abs(message.enqueued_time_utc - now) < timedelta(seconds=30), f"enqueued {message.enqueued_time_utc}")
        true(message.locked_until_utc > now, f"locked until {message.locked_until_utc}")
        equal(message.time_to_live, timedelta(hours=1), "time to live")
        equal(message.expires_at_utc, message.enqueued_time_utc + timedelta(hours=1), "expires")
        true(isinstance(message.lock_token, uuid.UUID), "lock token")
        receiver.complete_message(message)


@scenario("application-properties")
def application_properties(scene: Scene) -> None:
    sent = {
        "text": "grüße 🐇",
        "zero": 0,
        "negative": -7,
        "largest": 2**31 - 1,
        "double": 2.5,
        "yes": True,
        "no": False,
        "none": None,
        "uuid": uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
    }
    when = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage("x", application_properties={**sent, "when": when}))
    with scene.receiver() as receiver:
        message = one(receiver)
        received = {(k.decode() if isinstance(k, bytes) else k): v for k, v in message.application_properties.items()}
        received = {k: v.decode() if isinstance(v, bytes) else v for k, v in received.items()}
        equal(received.pop("when"), int(when.timestamp() * 1000), "timestamp")  # the SDK decodes to milliseconds
        equal(received, sent, "application properties")
        equal(type(received["yes"]), bool, "type of a boolean")
        receiver.complete_message(message)


@scenario("bodies")
def bodies(scene: Scene) -> None:
    binary = bytes(range(256)) * 4
    value = {b"text": b"value", b"number": 7, b"list": [1, 2, 3]}
    annotations = {"x-opt-partition-key": scene.keyed["partition_key"]} if scene.keyed else None
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage(binary, **scene.keyed))
        sender.send_messages(ServiceBusMessage(b"", **scene.keyed))
        for sections in (
            {"value_body": value},
            {"sequence_body": [[1, 2, 3], [b"a", b"b"]]},
            {"data_body": [b"part one", b"part two"]},
        ):
            sender.send_messages(AmqpAnnotatedMessage(**sections, annotations=annotations))
    with scene.receiver() as receiver:
        messages = all_of(receiver, 5)
        equal(body(messages[0]), binary, "binary body")
        equal(body(messages[1]), b"", "empty body")
        equal(messages[2].body_type, AmqpMessageBodyType.VALUE, "type of a value body")
        equal(messages[2].body, value, "value body")
        equal(messages[3].body_type, AmqpMessageBodyType.SEQUENCE, "type of a sequence body")
        equal([list(part) for part in messages[3].body], [[1, 2, 3], [b"a", b"b"]], "sequence body")
        equal(list(messages[4].body), [b"part one", b"part two"], "two data sections")


@scenario("batch")
def batch(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        outgoing = sender.create_message_batch()
        for i in range(100):
            outgoing.add_message(ServiceBusMessage(f"message {i}", message_id=str(i)))
        sender.send_messages(outgoing)
    with scene.receiver() as receiver:
        messages = all_of(receiver, 100)
        equal([message.message_id for message in messages], [str(i) for i in range(100)], "ids")
        equal([local(message) for message in messages], list(range(1, 101)), "sequence numbers")
        equal(body(messages[99]), b"message 99", "body")


@scenario("large-message")
def large_message(scene: Scene) -> None:
    content = bytes(i * 31 % 251 for i in range(900 * 1024))
    scene.send(content)
    with scene.receiver() as receiver:
        message = one(receiver)
        true(body(message) == content, "the body differs")
        receiver.complete_message(message)


@scenario("pipelined")
def pipelined(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        for start in range(0, 2000, 200):
            sender.send_messages([ServiceBusMessage("x" * 100, message_id=str(start + i)) for i in range(200)])
    with scene.receiver(prefetch_count=200) as receiver:
        messages = all_of(receiver, 2000)
    equal(sorted(int(message.message_id) for message in messages), list(range(2000)), "ids")
    scene.nothing_is_left()


@scenario("receive-and-delete")
def receive_and_delete(scene: Scene) -> None:
    scene.send("a", "b")
    with scene.receiver(receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE) as receiver:
        equal([body(message) for message in all_of(receiver, 2, complete=False)], [b"a", b"b"], "bodies")
    scene.nothing_is_left()


@scenario("abandon")
def abandon(scene: Scene) -> None:
    scene.send("first", "second")
    with scene.receiver() as receiver:
        message = one(receiver)
        equal((body(message), message.delivery_count), (b"first", 0), "first delivery")
        receiver.abandon_message(message)
        again = one(receiver)
        equal(
            (body(again), again.delivery_count, again.message_id), (b"first", 1, message.message_id), "second delivery"
        )
        true(again.lock_token != message.lock_token, "the lock token is the old one")
        receiver.complete_message(again)
        last = one(receiver)
        equal(body(last), b"second", "next message")
        receiver.complete_message(last)


@scenario("defer")
def defer(scene: Scene) -> None:
    scene.send("later")
    with scene.receiver() as receiver:
        message = one(receiver)
        receiver.defer_message(message)
        equal(receiver.receive_messages(1, max_wait_time=1), [], "deliveries of a deferred message")
        number = message.sequence_number
        (deferred,) = receiver.receive_deferred_messages([number])
        equal((body(deferred), deferred.sequence_number), (b"later", number), "deferred message")
        receiver.complete_message(deferred)
        raises(MessageNotFoundError, lambda: receiver.receive_deferred_messages([number]), "a completed message")
    scene.nothing_is_left()


@scenario("dead-letter")
def dead_letter(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage("bad", message_id="id", application_properties={"kept": "yes"}))
    with scene.receiver() as receiver:
        receiver.dead_letter_message(one(receiver), reason="my reason", error_description="my description")
        equal(receiver.receive_messages(1, max_wait_time=1), [], "messages in the queue itself")
    with scene.dead_letters() as receiver:
        message = one(receiver)
        equal((body(message), message.message_id), (b"bad", "id"), "dead-lettered message")
        equal(message.dead_letter_reason, "my reason", "reason")
        equal(message.dead_letter_error_description, "my description", "description")
        equal(message.application_properties[b"kept"], b"yes", "application property")
        equal(message.dead_letter_source, scene.queue, "source")
        receiver.complete_message(message)
        equal(receiver.receive_messages(1, max_wait_time=1), [], "dead letters left")


@scenario("dead-letter-queue")
def dead_letter_queue(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage("bad", time_to_live=timedelta(seconds=3)))
    with scene.receiver() as receiver:
        receiver.dead_letter_message(one(receiver), reason="because")
    time.sleep(3.5)  # a dead letter outlives its time to live
    with scene.dead_letters() as receiver:
        equal([body(message) for message in receiver.peek_messages(5)], [b"bad"], "browsed")
        message = one(receiver)
        receiver.abandon_message(message)
        again = one(receiver)
        equal(again.delivery_count, message.delivery_count, "delivery count")
        equal(again.dead_letter_reason, "because", "reason")
        receiver.complete_message(again)
        equal(receiver.peek_messages(5), [], "left")


@scenario("max-delivery-count")
def max_delivery_count(scene: Scene) -> None:
    scene.send("poison")
    with scene.receiver() as receiver:
        for count in range(2):
            message = one(receiver)
            equal(message.delivery_count, count, "delivery count")
            receiver.abandon_message(message)
        equal(receiver.receive_messages(1, max_wait_time=1), [], "messages in the queue itself")
    with scene.dead_letters() as receiver:
        message = one(receiver)
        equal((body(message), message.dead_letter_reason), (b"poison", "MaxDeliveryCountExceeded"), "dead letter")
        receiver.complete_message(message)


@scenario("lock-expiry")
def lock_expiry(scene: Scene) -> None:
    scene.send("slow")
    with scene.receiver() as first, scene.receiver() as second:
        message = one(first)
        started = time.monotonic()
        equal(second.receive_messages(1, max_wait_time=1), [], "messages while locked")
        again = one(second)
        true(time.monotonic() - started > 3.5, f"delivered again after {time.monotonic() - started:.1f} s")
        equal((again.message_id, again.delivery_count), (message.message_id, 1), "second delivery")
        second.complete_message(again)


@scenario("renew-lock")
def renew_lock(scene: Scene) -> None:
    scene.send("slow")
    with scene.receiver() as receiver:
        message = one(receiver)
        before = message.locked_until_utc
        time.sleep(3)  # the lock lasts five seconds
        until = receiver.renew_message_lock(message)
        true(until - before > timedelta(seconds=2), f"renewed from {before} to {until}")
        time.sleep(3.5)  # the first lock would have ended
        receiver.complete_message(message)
    scene.nothing_is_left()


@scenario("auto-renew")
def auto_renew(scene: Scene) -> None:
    scene.send("slow")
    with AutoLockRenewer(max_lock_renewal_duration=60) as renewer, scene.receiver() as receiver:
        message = one(receiver)
        renewer.register(receiver, message)
        time.sleep(8)  # longer than a lock lasts
        equal(message.auto_renew_error, None, "error of the renewer")
        receiver.complete_message(message)
        renewer.close()  # the SDK cannot close a receiver while another thread renews one of its locks
    scene.nothing_is_left()


@scenario("auto-renew-many")
def auto_renew_many(scene: Scene) -> None:
    # In processes of their own, since the renewer is busy with 300 messages and would wait for all other scenarios.
    command = [sys.executable, str(Path(__file__).with_name("renewing.py"))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ways = {way: subprocess.Popen([*command, way, scene.queue], **pipes) for way in ("threads", "tasks")}
    for way, process in ways.items():
        output, errors = process.communicate(timeout=150)
        equal((process.returncode, output), (0, "kept 300\n"), f"what came of {way} ({errors[-2000:]})")
    scene.nothing_is_left()


@scenario("send-again")
def send_again(scene: Scene) -> None:
    given = {"message_id": "id", "subject": "s", "session_id": "ключ", "partition_key": "ключ"}
    with scene.client.get_queue_sender(scene.queue) as sender, scene.receiver() as receiver:
        sender.send_messages(ServiceBusMessage("x", application_properties={"k": "v", "n": 1}, **given))
        for way in (sender.send_messages, lambda message: sender.send_messages([message])):
            message = one(receiver)
            receiver.complete_message(message)
            way(message)
        again = one(receiver)
        receiver.complete_message(again)
        equal({name: getattr(again, name) for name in given}, given, "what it had")
        equal((body(again), again.application_properties), (b"x", {b"k": b"v", b"n": 1}), "body and properties")
        equal(local(again), 3, "sequence number")


@scenario("lock-lost")
def lock_lost(scene: Scene) -> None:
    scene.send("slow")
    with scene.receiver() as receiver:
        message = one(receiver)
        time.sleep(6)  # longer than a lock lasts
        # The SDK refuses to complete by its own clock; only renewing asks the broker.
        raises(MessageLockLostError, lambda: receiver.renew_message_lock(message), "renewing a lost lock")
        raises(MessageLockLostError, lambda: receiver.complete_message(message), "completing after the lock")
        again = one(receiver)
        equal((again.message_id, again.delivery_count), (message.message_id, 1), "second delivery")
        receiver.complete_message(again)


@scenario("peek")
def peek(scene: Scene) -> None:
    scene.send(*"abcde")
    with scene.receiver() as receiver:
        browsed = receiver.peek_messages(10)
        equal([body(message) for message in browsed], [b"a", b"b", b"c", b"d", b"e"], "browsed")
        some = receiver.peek_messages(2, sequence_number=browsed[2].sequence_number)
        equal([(local(m), body(m)) for m in some], [(3, b"c"), (4, b"d")], "browsed from a number")
        equal([message.locked_until_utc for message in browsed], [None] * 5, "browsed as locked")
        locked = one(receiver)
        looked = receiver.peek_messages(2, sequence_number=locked.sequence_number or 0)
        equal([message.locked_until_utc for message in looked], [locked.locked_until_utc, None], "ends of locks")
        receiver.complete_message(locked)
        equal(len(all_of(receiver, 4)), 4, "received after browsing")
        equal(receiver.peek_messages(10), [], "browsed when empty")


@scenario("schedule")
def schedule(scene: Scene) -> None:
    due = datetime.now(UTC) + timedelta(seconds=6)
    with scene.client.get_queue_sender(scene.queue) as sender:
        (number,) = sender.schedule_messages(ServiceBusMessage("later"), due)
        sender.send_messages(ServiceBusMessage("later too", scheduled_enqueue_time_utc=due))
    with scene.receiver() as receiver:
        browsed = receiver.peek_messages(5)
        equal({(body(m), int(m.state)) for m in browsed}, {(b"later", 2), (b"later too", 2)}, "browsed with state")
        true(number in {m.sequence_number for m in browsed}, "the number returned is not there")
        equal(receiver.receive_messages(1, max_wait_time=1), [], "messages before their time")
        messages = all_of(receiver, 2)
        early = due - datetime.now(UTC)
        true(early < timedelta(0), f"delivered {early} early")
        true(-early < timedelta(seconds=15), f"delivered {-early} late")
        equal({body(m) for m in messages}, {b"later", b"later too"}, "bodies")


@scenario("cancel-scheduled")
def cancel_scheduled(scene: Scene) -> None:
    due = datetime.now(UTC) + timedelta(seconds=6)
    with scene.client.get_queue_sender(scene.queue) as sender:
        numbers = sender.schedule_messages([ServiceBusMessage("kept"), ServiceBusMessage("cancelled")], due)
        sender.cancel_scheduled_messages(numbers[1])
        raises(MessageNotFoundError, lambda: sender.cancel_scheduled_messages(numbers[1]), "a second cancel")
    with scene.receiver() as receiver:
        message = one(receiver)
        equal(body(message), b"kept", "message that arrived")
        receiver.complete_message(message)
    scene.nothing_is_left()


@scenario("time-to-live")
def time_to_live(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage("short", time_to_live=timedelta(seconds=1)))
        sender.send_messages(ServiceBusMessage("long"))
    time.sleep(1.5)  # longer than its time to live
    with scene.receiver() as receiver:
        message = one(receiver)
        equal(body(message), b"long", "message that arrived")
        receiver.complete_message(message)
    scene.nothing_is_left()


@scenario("time-to-live-dead-letter")
def time_to_live_dead_letter(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages(ServiceBusMessage("short", time_to_live=timedelta(seconds=1)))
    time.sleep(1.5)  # longer than its time to live
    with scene.receiver() as receiver, scene.dead_letters() as dead:
        equal(receiver.receive_messages(1, max_wait_time=1), [], "expired messages delivered")
        message = one(dead)
        equal((body(message), message.dead_letter_reason), (b"short", "TTLExpiredException"), "dead letter")
        dead.complete_message(message)


@scenario("prompt-return")
def prompt_return(scene: Scene) -> None:
    with scene.receiver() as receiver:
        started = time.monotonic()
        equal(receiver.receive_messages(10, max_wait_time=1), [], "messages of an empty queue")
        true(0.8 < time.monotonic() - started < 15, f"an empty receive took {time.monotonic() - started:.1f} s")
        scene.send("a", "b", "c")
        started = time.monotonic()
        got = receiver.receive_messages(10, max_wait_time=20)
        true(time.monotonic() - started < 10, f"a short receive took {time.monotonic() - started:.1f} s")
        for message in got:
            receiver.complete_message(message)
        scene.send("d", "e")
        rest = all_of(receiver, 5 - len(got))
        equal({body(m) for m in (*got, *rest)}, {b"a", b"b", b"c", b"d", b"e"}, "bodies")
    scene.nothing_is_left()


@scenario("prefetch")
def prefetch(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages([ServiceBusMessage("x", message_id=str(i), **scene.keyed) for i in range(100)])
    with scene.receiver(prefetch_count=50) as receiver:
        equal([m.message_id for m in all_of(receiver, 100)], [str(i) for i in range(100)], "ids")
    scene.nothing_is_left()


@scenario("push-receive")
def push_receive(scene: Scene) -> None:
    async def run() -> None:
        client = AsyncServiceBusClient.from_connection_string(CONFIG["connection_string"], retry_total=0)
        received: list[bytes] = []

        async def consume() -> None:
            async with client.get_queue_receiver(scene.queue) as receiver:
                async for message in receiver:
                    received.append(body(message))
                    await receiver.complete_message(message)
                    if len(received) == 20:
                        return

        async with client:
            consumer = asyncio.create_task(consume())
            async with client.get_queue_sender(scene.queue) as sender:
                for i in range(20):
                    await sender.send_messages(ServiceBusMessage(str(i), **scene.keyed))
            await asyncio.wait_for(consumer, 30)
        equal(received, [str(i).encode() for i in range(20)], "bodies")

    asyncio.run(run())
    scene.nothing_is_left()


@scenario("duplicates")
def duplicates(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        for text, message_id in (("a", "1"), ("b", "1"), ("c", "2")):
            sender.send_messages(ServiceBusMessage(text, message_id=message_id))
        sender.send_messages([ServiceBusMessage(text, message_id="3") for text in "de"])
    with scene.receiver() as receiver:
        messages = [one(receiver) for _ in range(3)]
        equal(sorted(body(message) for message in messages), [b"a", b"c", b"d"], "bodies")
        for message in messages:
            receiver.complete_message(message)
    scene.nothing_is_left()


@scenario("competing")
def competing(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        sender.send_messages([ServiceBusMessage("x", message_id=str(i)) for i in range(60)])
    ids: list[str] = []
    lock = threading.Lock()

    def consume() -> None:
        with scene.receiver() as receiver:
            while messages := receiver.receive_messages(5, max_wait_time=3):
                for message in messages:
                    receiver.complete_message(message)
                with lock:
                    ids.extend(message.message_id for message in messages)

    with ThreadPoolExecutor(3) as pool:
        for consumer in [pool.submit(consume) for _ in range(3)]:
            consumer.result()
    equal(sorted(ids, key=int), [str(i) for i in range(60)], "ids")


@scenario("connection-reuse")
def connection_reuse(scene: Scene) -> None:
    for i in range(4):
        scene.send(f"{i} a", f"{i} b")
        with scene.receiver() as first, scene.receiver() as second:
            messages = one(first), one(second)
            equal({body(m) for m in messages}, {f"{i} a".encode(), f"{i} b".encode()}, "bodies")
            first.complete_message(messages[0])
            second.complete_message(messages[1])
    scene.nothing_is_left()


@scenario("close-unsettled")
def close_unsettled(scene: Scene) -> None:
    scene.send("held")
    with scene.receiver() as receiver:
        one(receiver)
    with scene.receiver() as receiver:
        message = one(receiver)
        equal((body(message), message.delivery_count), (b"held", 1), "second delivery")
        receiver.complete_message(message)


@scenario("connection-lost")
def connection_lost(scene: Scene) -> None:
    scene.send("held")
    killed_while_holding(scene.queue)
    with scene.receiver() as receiver:
        message = one(receiver, 3)
        equal((body(message), message.delivery_count), (b"held", 1), "second delivery")
        receiver.complete_message(message)


@scenario("unknown-queue")
def unknown_queue(scene: Scene) -> None:
    started = time.monotonic()
    # The token is refused already; the SDK has one error for whatever status that has.
    raises(ServiceBusAuthenticationError, lambda: scene.send("x"), "sending")
    raises(ServiceBusAuthenticationError, lambda: try_receive(scene), "receiving")
    true(time.monotonic() - started < 15, "the error took its time")


@scenario("wrong-key")
def wrong_key(scene: Scene) -> None:
    other = Scene("wrong-key", CONFIG["wrong_key"])
    refused = (ServiceBusAuthenticationError, ServiceBusAuthorizationError)
    raises(refused, lambda: other.send("x"), "sending")
    scene.nothing_is_left()


@scenario("signature")
def signature(scene: Scene) -> None:
    signed = Scene("signature", CONFIG["signature"])
    signed.send("x")
    with signed.receiver() as receiver:
        receiver.complete_message(one(receiver))
    scene.nothing_is_left()


@scenario("missing-right")
def missing_right(scene: Scene) -> None:
    listener, sender = Scene("missing-right", CONFIG["listen_only"]), Scene("missing-right", CONFIG["send_only"])
    refused = (ServiceBusAuthenticationError, ServiceBusAuthorizationError)
    raises(refused, lambda: listener.send("x"), "sending without the right")
    sender.send("x")
    raises(refused, lambda: try_receive(sender), "receiving without the right")
    with listener.receiver() as receiver:
        receiver.complete_message(one(receiver))


@scenario("oversized")
def oversized(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        large, small = ServiceBusMessage(b"x" * 100_000), ServiceBusMessage("small")
        raises(MessageSizeExceededError, lambda: sender.send_messages(large), "sending 100,000 bytes")
        sender.send_messages(small)
    with scene.receiver() as receiver:
        message = one(receiver)
        equal(body(message), b"small", "message that arrived")
        receiver.complete_message(message)


@scenario("disabled")
def disabled(scene: Scene) -> None:
    raises(MessagingEntityDisabledError, lambda: scene.send("x"), "sending")
    raises(MessagingEntityDisabledError, lambda: try_receive(scene), "receiving")


@scenario("send-disabled")
def send_disabled(scene: Scene) -> None:
    raises(MessagingEntityDisabledError, lambda: scene.send("x"), "sending")
    scene.nothing_is_left()


@scenario("receive-disabled")
def receive_disabled(scene: Scene) -> None:
    scene.send("x")
    raises(MessagingEntityDisabledError, lambda: try_receive(scene), "receiving")


def run(name: str) -> dict[str, object]:
    started = time.monotonic()
    try:
        if name not in SCENARIOS:
            raise AssertionError("this program does not know the scenario")
        scene = Scene(name)
        with scene.client:
            SCENARIOS[name](scene)
    except Exception as error:
        where = "".join(traceback.format_exception(error, limit=-4))
        return {"scenario": name, "ok": False, "detail": f"{error!r}\n{where}", "seconds": time.monotonic() - started}
    return {"scenario": name, "ok": True, "detail": "", "seconds": time.monotonic() - started}


def hold(queue: str, session_id: str | None = None) -> None:
    """Receive one message, of the session if one is named, say so, and wait to be killed."""
    scene = Scene("")
    scene.queue = queue
    one(scene.receiver(session_id=session_id))
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
