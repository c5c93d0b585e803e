"""The scenarios of `partitioned_scenarios.py` with Qpid Proton."""

import threading
import time
from collections.abc import Iterable
from typing import Any

from proton import UNDESCRIBED, Array, Data, Message, symbol, timestamp, uint
from scene import (
    TIMEOUT_S,
    Failed,
    Receiver,
    Scene,
    annotation,
    decoded,
    equal,
    fails,
    number_of,
    numbers,
    scenario,
    true,
)
from sessions import accept, get_state, set_state
from sessions import send as send_to
from transaction import Transaction

COUNT = 20
TEXTS = sorted(str(number) for number in range(COUNT))
KEYS = [f"key-{number}" for number in range(8)]
KEY = "x-opt-partition-key"
NOT_ALLOWED = "amqp:not-allowed"


def post(scene: Scene, messages: Iterable[Message]) -> None:
    sender = scene.sender()
    for message in messages:
        sender.post(message)
    sender.close()


def keyed(key: str, body: Any, **fields: Any) -> Message:
    return Message(body=body, annotations={symbol(KEY): key}, **fields)


def bodies(messages: Iterable[Message]) -> list[Any]:
    return [message.body for message in messages]


def partitions(sequence_numbers: Iterable[int]) -> set[int]:
    return {number >> 48 for number in sequence_numbers}


def on_several_partitions(sequence_numbers: Iterable[int]) -> None:
    found = partitions(sequence_numbers)
    true(len(found) > 1, f"all messages are on partition {found}")


def browsed(scene: Scene, start: int) -> list[Message]:
    """All from this sequence number on, in as many requests as that takes."""
    found: list[Message] = []
    while some := scene.peek(100, start):
        found += some
        start = number_of(some[-1]) + 1
    return found


@scenario("partitioned-spread")
def spread(scene: Scene) -> None:
    post(scene, [Message(body=text) for text in TEXTS])
    shown = browsed(scene, 1)
    equal(sorted(bodies(shown)), TEXTS, "browsed")
    found = [number_of(message) for message in shown]
    on_several_partitions(found)
    equal(found, sorted(found), "sequence numbers")
    equal([number_of(message) for message in browsed(scene, found[7])], found[7:], "browsed from a number")
    receiver = scene.receiver()
    equal(sorted(bodies(receiver.all_of(COUNT))), TEXTS, "messages")
    receiver.close()
    scene.nothing_is_left()


@scenario("partitioned-keys")
def keys(scene: Scene) -> None:
    post(scene, [keyed(key, turn) for turn in range(5) for key in KEYS])
    receiver = scene.receiver()
    messages = receiver.all_of(5 * len(KEYS))
    on_several_partitions(map(number_of, messages))
    for key in KEYS:
        mine = [message for message in messages if annotation(message, KEY) == key]
        equal(bodies(mine), [0, 1, 2, 3, 4], f"messages of {key}")
        equal(len(partitions(map(number_of, mine))), 1, f"partitions of {key}")
    receiver.close()
    scene.nothing_is_left()


@scenario("partitioned-key-mismatch")
def key_mismatch(scene: Scene) -> None:
    sender = scene.sender()
    try:
        sender.post(keyed("b", "never", group_id="a"))
    except Failed as error:
        true("session id" in error.text, f"error: {error}")
    else:
        raise AssertionError("a different partition key: nothing was raised")
    sender.post(keyed("a", "x", group_id="a"))
    receiver = scene.receiver()
    equal(bodies(receiver.all_of(1)), ["x"], "messages")
    receiver.close()
    scene.nothing_is_left()


@scenario("partitioned-numbers")
def by_numbers(scene: Scene) -> None:
    post(scene, [Message(body=text) for text in TEXTS])
    receiver = scene.receiver()
    taken = receiver.take(COUNT, TIMEOUT_S)
    found = [number_of(message) for message, _ in taken]
    on_several_partitions(found)
    for _, delivery in taken:
        receiver.modify(delivery, undeliverable=True)
    request = {"sequence-numbers": numbers(*found), "receiver-settle-mode": uint(1)}
    _, body = scene.manage("receive-by-sequence-number", request)
    equal(sorted(decoded(item["message"]).body for item in body["messages"]), TEXTS, "deferred messages")
    locks = Array(UNDESCRIBED, Data.UUID, *(item["lock-token"] for item in body["messages"]))
    scene.manage("update-disposition", {"disposition-status": "completed", "lock-tokens": locks})
    due_ms = round(time.time() * 1000) + 4000
    scheduled = []
    for key in KEYS:
        message = keyed(key, key)
        message.annotations[symbol("x-opt-scheduled-enqueue-time")] = timestamp(due_ms)
        item = {"message-id": key, "partition-key": key, "message": message.encode()}
        scheduled += scene.manage("schedule-message", {"messages": [item]})[1]["sequence-numbers"].elements
    on_several_partitions(scheduled)
    scene.manage("cancel-scheduled-message", {"sequence-numbers": numbers(*scheduled[:4])})
    equal(sorted(bodies(receiver.all_of(4))), KEYS[4:], "messages that arrived")
    receiver.close()
    scene.nothing_is_left()


@scenario("partitioned-duplicates")
def duplicates(scene: Scene) -> None:
    post(scene, [keyed(key, key, id="1") for key in ("a", "b", "a")])
    for _ in range(2):
        post(scene, [Message(body=text, id=f"id-{text}") for text in TEXTS])
    receiver = scene.receiver()
    equal(sorted(bodies(receiver.all_of(COUNT + 2))), [*TEXTS, "a", "b"], "messages")
    receiver.close()
    scene.nothing_is_left()


@scenario("partitioned-sessions")
def sessions(scene: Scene) -> None:
    for turn in range(3):
        for key in KEYS:
            send_to(scene, key, str(turn))
    accepted = [accept(scene) for _ in KEYS]
    equal(sorted(receiver.session_id for receiver in accepted), KEYS, "sessions")
    found: list[int] = []
    for receiver in accepted:
        messages = receiver.all_of(3)
        equal(bodies(messages), ["0", "1", "2"], "messages of a session")
        set_state(scene, receiver.session_id, receiver.session_id.encode())
        found += map(number_of, messages)
    on_several_partitions(found)
    other = Scene("partitioned-sessions")  # its connection is that of another thread
    sending = threading.Timer(1.5, send_to, (other, "late", "x"))
    sending.start()
    late = accept(scene)
    sending.join()
    other.close()
    equal((late.session_id, bodies(late.all_of(1))), ("late", ["x"]), "session waited for, and its messages")
    for receiver in accepted:
        receiver.close()
    for key in KEYS:
        receiver = accept(scene, key)
        equal(get_state(scene, key), key.encode(), "state when accepted again")
        receiver.close()


@scenario("partitioned-topic")
def topic(scene: Scene) -> None:
    post(scene, [Message(body=str(number), properties={"number": number}) for number in range(COUNT)])
    wanted = {"a": TEXTS, "some": sorted(str(number) for number in range(10, COUNT))}
    for name, expected in wanted.items():
        receiver = Receiver(scene.connection, f"{scene.queue}/Subscriptions/{name}")
        messages = receiver.all_of(len(expected))
        equal(sorted(bodies(messages)), expected, f"messages in {name}")
        on_several_partitions(map(number_of, messages))
        receiver.none("messages beyond those")


@scenario("partitioned-transactions")
def transactions(scene: Scene) -> None:
    post(scene, [keyed("a", "old")])
    sender, receiver = scene.sender(), scene.receiver()
    _, old = receiver.one()
    for wrong in (Message(body="never"), keyed("b", "never")):
        refused = Transaction(scene)
        refused.post(sender, keyed("a", "never"))
        fails(NOT_ALLOWED, lambda r=refused, m=wrong: r.post(sender, m), "no key, or another")
        refused.fail_to_commit()
    committed = Transaction(scene)
    for body in ("1", "2"):
        committed.post(sender, keyed("a", body))
    committed.transaction.accept(old)
    committed.commit()
    equal(bodies(receiver.all_of(2)), ["1", "2"], "messages")
    receiver.close()
    scene.nothing_is_left()


@scenario("partitioned-annotations")
def annotations(scene: Scene) -> None:
    post(scene, [keyed(key, key, id=f"{key} id") for key in KEYS])
    post(scene, [Message(body=text, id=text) for text in TEXTS])
    for message in scene.receiver().all_of(len(KEYS) + COUNT):
        equal(annotation(message, KEY), message.body, "key")
        equal(annotation(message, "x-opt-partition-id"), number_of(message) >> 48, "partition")
