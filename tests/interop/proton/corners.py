"""The scenarios of `corner_scenarios.py` with Qpid Proton."""

import time
import uuid
from typing import Any

from proton import UNDESCRIBED, Array, Data, Message, int32, symbol, timestamp, uint
from scene import (
    TIMEOUT_S,
    Receiver,
    Scene,
    Sender,
    annotation,
    decoded,
    equal,
    fails,
    number_of,
    numbers,
    scenario,
    true,
)
from sessions import EVER, InSession

REASON_LIMIT = 4096  # characters of a reason that are kept
SCHEDULED = "x-opt-scheduled-enqueue-time"
STATE = symbol("x-opt-message-state")
NOT_FOUND = "com.microsoft:message-not-found"
NULL_AS_DATA = b"\x00\x53\x75\x40"


def by_number(scene: Scene, number: int) -> tuple[Message, uuid.UUID]:
    """The deferred message with this number, and its lock token."""
    request = {"sequence-numbers": numbers(number), "receiver-settle-mode": uint(1)}
    _, body = scene.manage("receive-by-sequence-number", request)
    (item,) = body["messages"]
    return decoded(item["message"]), item["lock-token"]


def dispose(scene: Scene, token: uuid.UUID, status: str) -> None:
    tokens = Array(UNDESCRIBED, Data.UUID, token)
    scene.manage("update-disposition", {"disposition-status": status, "lock-tokens": tokens})


def schedule(scene: Scene, message: Message, due_s: float) -> int:
    message.annotations = {symbol(SCHEDULED): timestamp(round(due_s * 1000))}
    item = {"message-id": "id", "message": message.encode()}
    _, body = scene.manage("schedule-message", {"messages": [item]})
    (number,) = body["sequence-numbers"].elements
    return int(number)


def subscription(scene: Scene, name: str) -> Receiver:
    return Receiver(scene.connection, f"{scene.queue}/Subscriptions/{name}")


def completed(receiver: Receiver) -> Message:
    message, delivery = receiver.one()
    receiver.settle(delivery)
    return message


@scenario("deferral-count")
def deferral_count(scene: Scene) -> None:
    scene.send("m")
    receiver = scene.receiver()
    message, delivery = receiver.one()
    equal(message.delivery_count, 0, "delivery count at first")
    number = number_of(message)
    receiver.modify(delivery, undeliverable=True)
    message, token = by_number(scene, number)
    equal(message.delivery_count, 1, "delivery count after a deferral")
    dispose(scene, token, "abandoned")
    message, token = by_number(scene, number)
    equal(message.delivery_count, 2, "delivery count after an abandon")
    dispose(scene, token, "defered")
    letter = completed(scene.dead_letters())
    equal((letter.body, letter.properties["DeadLetterReason"]), ("m", "MaxDeliveryCountExceeded"), "dead letter")
    fails(NOT_FOUND, lambda: by_number(scene, number), "the deferred message")
    receiver.close()
    scene.nothing_is_left()


@scenario("message-states")
def message_states(scene: Scene) -> None:
    schedule(scene, Message(body="scheduled"), time.time() + 4)
    sender = scene.sender()
    for first_acquirer in (True, False):
        sender.post(Message(body=str(first_acquirer), first_acquirer=first_acquirer))
    receiver = scene.receiver()
    taken = receiver.take(3, TIMEOUT_S)
    shown = {message.body: (message.first_acquirer, message.annotations.get(STATE)) for message, _ in taken}
    equal(shown, {"scheduled": (False, 2), "True": (True, None), "False": (False, None)}, "first-acquirer and state")
    message, delivery = taken[0]
    receiver.modify(delivery, undeliverable=True)
    deferred, _ = by_number(scene, number_of(message))
    equal(deferred.annotations[STATE], 1, "state of a deferred message")


@scenario("large-requests")
def large_requests(scene: Scene) -> None:
    due_s = time.time() + 3600
    number = schedule(scene, Message(body=bytes(262_000), inferred=True), due_s)
    (browsed,) = scene.peek(1, number)
    equal(len(browsed.body), 262_000, "bytes browsed")
    began = time.monotonic()
    too_large = Message(body=bytes(300_000), inferred=True)
    fails("amqp:link:message-size-exceeded", lambda: schedule(scene, too_large, due_s), "scheduling 300,000 bytes")
    true(time.monotonic() - began < 15, "the error took its time")
    scene.manage("cancel-scheduled-message", {"sequence-numbers": numbers(number)})


@scenario("long-reason")
def long_reason(scene: Scene) -> None:
    scene.send("bad")
    receiver = scene.receiver()
    _, delivery = receiver.one()
    receiver.dead_letter(delivery, DeadLetterReason="r" * 40_000, DeadLetterErrorDescription="description")
    letter = completed(scene.dead_letters())
    expected = {"DeadLetterReason": "r" * REASON_LIMIT, "DeadLetterErrorDescription": "description"}
    equal(letter.properties, expected, "application properties")


class Encoded(Message):
    """A message that has these bytes on the wire."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self._encoded = encoded

    def encode(self) -> bytes:
        return self._encoded


@scenario("null-data")
def null_data(scene: Scene) -> None:
    sender: Sender = scene.sender()
    sender.post(Encoded(NULL_AS_DATA))
    receiver = scene.receiver()
    message, delivery = receiver.one()
    equal((message.body, message.inferred), (None, True), "data")
    receiver.settle(delivery)


@scenario("expiry-forwarded")
def expiry_forwarded(scene: Scene) -> None:
    scene.send("m")
    message = completed(Receiver(scene.connection, f"{scene.queue}-1"))
    equal((message.body, message.properties["DeadLetterReason"]), ("m", "TTLExpiredException"), "message")


@scenario("rule-conversions")
def rule_conversions(scene: Scene) -> None:
    sender = scene.sender()
    for subject in ("n-8", "n-7"):
        sender.post(Message(body=subject, subject=subject, properties={"number": int32(7)}))
    message = completed(subscription(scene, "a"))
    equal((message.body, message.correlation_id), ("n-7", "7"), "message and correlation id")
    equal((message.properties["joined"], message.ttl), ("n-7", 600), "text and number, and the time to live")


@scenario("action-delay")
def action_delay(scene: Scene) -> None:
    began = time.monotonic()
    scene.send("m")
    found: dict[Any, Any] = completed(subscription(scene, "now")).annotations
    equal((found.get(STATE), found.get(symbol(SCHEDULED))), (None, None), "copy")
    message = completed(subscription(scene, "later"))
    true(time.monotonic() - began >= 3, "the copy came too early")
    equal(message.annotations[STATE], 2, "state")
    late_ms = annotation(message, "x-opt-enqueued-time") - annotation(message, SCHEDULED)
    true(0 <= late_ms < 15_000, f"enqueued {late_ms} ms behind the time that is shown")


@scenario("session-by-number")
def session_by_number(scene: Scene) -> None:
    scene.sender().post(Message(body="later", group_id="a"))
    holding = scene.connect()
    holder = scene.receiver(InSession("a", 5), holding)
    message, delivery = holder.one()
    holder.modify(delivery, undeliverable=True)
    sequence_numbers = numbers(number_of(message))
    request = {"sequence-numbers": sequence_numbers, "receiver-settle-mode": uint(0), "session-id": "a"}
    # Over the scene's own connection, which holds no session.
    _, body = scene.manage("receive-by-sequence-number", request)
    equal([decoded(item["message"]).body for item in body["messages"]], ["later"], "messages")
    fails(NOT_FOUND, lambda: scene.manage("receive-by-sequence-number", request), "a message that is gone")
    holding.close()


@scenario("session-pages")
def session_pages(scene: Scene) -> None:
    sender = scene.sender()
    ids = [f"s{number:02}" for number in range(12)]
    for session_id in ids:
        sender.post(Message(body="x", group_id=session_id))
    for by_skip in (True, False):
        found: list[str] = []
        skip = 0
        while True:
            request: dict[str, object] = {"last-updated-time": EVER, "skip": int32(skip), "top": int32(5)}
            if found and not by_skip:
                request["last-session-id"] = found[-1]
            status, body = scene.manage("get-message-sessions", request)
            if status == 204:
                break
            found += body["sessions-ids"].elements
            if by_skip:
                skip = body["skip"]
                equal(skip, len(found), "where the next page begins")
        equal(sorted(found), ids, "sessions by skip" if by_skip else "sessions behind the last one")
