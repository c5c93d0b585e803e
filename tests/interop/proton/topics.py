"""The scenarios of `topic_scenarios.py` with Qpid Proton."""

import time
from typing import Any

from proton import (
    UNDESCRIBED,
    Array,
    Data,
    Described,
    Message,
    byte,
    float32,
    int32,
    short,
    symbol,
    timestamp,
    ubyte,
    uint,
    ulong,
    ushort,
)
from scene import (
    TIMEOUT_S,
    ReceiveAndDelete,
    Receiver,
    Scene,
    Sender,
    annotation,
    decoded,
    equal,
    fails,
    local,
    number_of,
    numbers,
    scenario,
    tokens,
    true,
)

HALF_HOUR_S = 1800
NOT_ALLOWED = "amqp:not-allowed"
NOT_FOUND = "amqp:not-found"
MESSAGE_NOT_FOUND = "com.microsoft:message-not-found"
ENTITY_DISABLED = "com.microsoft:entity-disabled"

RULE = 0x13700000004
EMPTY_ACTION = 0x13700000005
SQL_ACTION = 0x13700000006
SQL_FILTER = 0x1370000006
TRUE_FILTER = 0x1370000007
CORRELATION_FILTER = 0x1370000009


def address(scene: Scene, name: str) -> str:
    return f"{scene.queue}/Subscriptions/{name}"


def subscription(scene: Scene, name: str) -> Receiver:
    return Receiver(scene.connection, address(scene, name))


def dead_letters(scene: Scene, name: str) -> Receiver:
    return Receiver(scene.connection, f"{address(scene, name)}/$DeadLetterQueue")


def publish(scene: Scene, *messages: Message) -> None:
    sender = scene.sender()
    for message in messages:
        sender.post(message)
    sender.close()


def received(receiver: Receiver, count: int) -> list[Message]:
    """That many messages and no more, which are completed."""
    messages = receiver.all_of(count)
    receiver.none("messages beyond those")
    receiver.close()
    return messages


def bodies(messages: list[Message]) -> list[Any]:
    return [message.body for message in messages]


def sequence_numbers(messages: list[Message]) -> list[int]:
    return [local(message) for message in messages]


def later(body: str, due_ms: int) -> Message:
    return Message(id=body, body=body, annotations={symbol("x-opt-scheduled-enqueue-time"): timestamp(due_ms)})


def add_rule(scene: Scene, name: str, **description: object) -> None:
    parts = {key.replace("_", "-"): value for key, value in description.items()}
    scene.manage("add-rule", {"rule-name": name, "rule-description": parts}, address(scene, "a"))


def remove_rule(scene: Scene, name: str) -> None:
    scene.manage("remove-rule", {"rule-name": name}, address(scene, "a"))


def rules_of(scene: Scene, skip: int = 0, top: int = 100) -> list[list[Any]]:
    """[filter, action, name, creation time] of each rule."""
    request = {"skip": int32(skip), "top": int32(top)}
    status, body = scene.manage("enumerate-rules", request, address(scene, "a"))
    if status == 204:
        return []
    found = [item["rule-description"] for item in body["rules"]]
    equal([rule.descriptor for rule in found], [RULE] * len(found), "descriptors of rules")
    return [rule.value for rule in found]


def is_missing(text: str) -> None:
    true("The messaging entity '" in text and "' could not be found" in text, f"description: {text}")


@scenario("topic-publish")
def topic_publish(scene: Scene) -> None:
    publish(scene, Message(body="first", **scene.keyed), Message(body="second", subject="second", **scene.keyed))
    messages = received(subscription(scene, "a"), 2)
    equal(bodies(messages), ["first", "second"], "messages in a subscription")
    equal((sequence_numbers(messages), messages[0].delivery_count), ([1, 2], 0), "numbers and delivery count")
    equal(bodies(received(subscription(scene, "b"), 2)), ["first", "second"], "messages in another")
    messages = received(subscription(scene, "second"), 1)
    equal((bodies(messages), sequence_numbers(messages)), (["second"], [1]), "messages where a rule selects")


@scenario("topic-schedule")
def topic_schedule(scene: Scene) -> None:
    due_ms = round(time.time() * 1000) + 3000
    items = [{"message-id": body, "message": later(body, due_ms).encode()} for body in ("kept", "cancelled")]
    _, body = scene.manage("schedule-message", {"messages": items})
    publish(scene, later("kept too", due_ms))
    request = {"sequence-numbers": numbers(body["sequence-numbers"].elements[1])}
    scene.manage("cancel-scheduled-message", request)
    fails(MESSAGE_NOT_FOUND, lambda: scene.manage("cancel-scheduled-message", request), "a second cancel")
    scene.receiver()  # taken for one that means to peek
    _, body = scene.manage("peek-message", {"from-sequence-number": 0, "message-count": int32(5)})
    equal(len(body["messages"]), 2, "scheduled messages")
    receiver = subscription(scene, "a")
    receiver.none("messages before their time")
    messages = receiver.all_of(2)
    late = time.time() * 1000 - due_ms
    true(0 <= late < 15_000, f"delivered {late} ms late")
    equal(sorted(bodies(messages)), ["kept", "kept too"], "messages in a subscription")
    equal(sorted(bodies(received(subscription(scene, "b"), 2))), ["kept", "kept too"], "messages in another")


@scenario("topic-time-to-live")
def topic_time_to_live(scene: Scene) -> None:
    publish(scene, Message(body="x"), Message(body="half", ttl=HALF_HOUR_S))
    time.sleep(1.5)  # longer than the subscription's time to live
    received(subscription(scene, "brief"), 0)
    letters = received(dead_letters(scene, "brief"), 2)
    equal(sorted(bodies(letters)), ["half", "x"], "dead letters")
    reasons = {message.properties["DeadLetterReason"] for message in letters}
    equal(reasons, {"TTLExpiredException"}, "reasons")
    received(subscription(scene, "dropped"), 0)
    received(dead_letters(scene, "dropped"), 0)
    long = {message.body: message.ttl for message in received(subscription(scene, "long"), 2)}
    equal(long, {"x": 2 * HALF_HOUR_S, "half": HALF_HOUR_S}, "messages with their time to live")


@scenario("topic-disabled")
def topic_disabled(scene: Scene) -> None:
    fails(ENTITY_DISABLED, lambda: scene.send("x"), "sending")
    received(subscription(scene, "a"), 0)


@scenario("topic-not-allowed")
def topic_not_allowed(scene: Scene) -> None:
    fails(NOT_ALLOWED, lambda: scene.receiver().end(), "receiving from a topic")
    fails(NOT_ALLOWED, lambda: Sender(scene.connection, address(scene, "a")), "sending to a subscription")
    received(subscription(scene, "a"), 0)


@scenario("unknown-topic")
def unknown_topic(scene: Scene) -> None:
    is_missing(fails(NOT_FOUND, lambda: Sender(scene.connection, f"{scene.queue}-not"), "a topic"))
    is_missing(fails(NOT_FOUND, lambda: subscription(scene, "not"), "a subscription"))


@scenario("subscription-settle")
def subscription_settle(scene: Scene) -> None:
    scene.send("x")
    for name in ("a", "strict"):
        receiver = subscription(scene, name)
        receiver.modify(receiver.one()[1])
        receiver.close()
    (again,) = received(subscription(scene, "a"), 1)
    equal((again.body, again.delivery_count), ("x", 1), "second delivery")
    received(subscription(scene, "strict"), 0)
    (letter,) = received(dead_letters(scene, "strict"), 1)
    equal((letter.body, letter.properties["DeadLetterReason"]), ("x", "MaxDeliveryCountExceeded"), "dead letter")


@scenario("subscription-defer")
def subscription_defer(scene: Scene) -> None:
    scene.send("later")
    receiver = subscription(scene, "a")
    message, delivery = receiver.one()
    receiver.modify(delivery, undeliverable=True)
    receiver.none("deliveries of a deferred message")
    number = annotation(message, "x-opt-sequence-number")
    request = {"sequence-numbers": numbers(number), "receiver-settle-mode": uint(1)}

    def receive_deferred() -> Any:
        return scene.manage("receive-by-sequence-number", request, address(scene, "a"))[1]

    (item,) = receive_deferred()["messages"]
    equal(decoded(item["message"]).body, "later", "body")
    lock = Array(UNDESCRIBED, Data.UUID, item["lock-token"])
    settlement = {"disposition-status": "completed", "lock-tokens": lock}
    scene.manage("update-disposition", settlement, address(scene, "a"))
    fails(MESSAGE_NOT_FOUND, receive_deferred, "a completed message")
    equal(bodies(received(subscription(scene, "b"), 1)), ["later"], "messages in the other subscription")


@scenario("subscription-dead-letter")
def subscription_dead_letter(scene: Scene) -> None:
    spellings = [
        f"{scene.queue}/Subscriptions/a/$DeadLetterQueue",
        f"{scene.queue.upper()}/subscriptions/A/$deadletterqueue",
        f"/{scene.queue}/Subscriptions/a/$DeadLetterQueue",
        f"amqps://localhost:5671/{scene.queue}/subscriptions/%61/%24DeadLetterQueue",
    ]
    publish(scene, *(Message(id="id", body="bad", properties={"kept": "yes"}) for _ in spellings))
    info = {"DeadLetterReason": "my reason", "DeadLetterErrorDescription": "my description"}
    receiver = subscription(scene, "a")
    for _, delivery in receiver.take(len(spellings), TIMEOUT_S):
        receiver.dead_letter(delivery, **info)
    receiver.none("messages in the subscription itself")
    for spelling in spellings:
        letters = Receiver(scene.connection, spelling)
        letter, delivery = letters.one()
        equal((letter.body, letter.id), ("bad", "id"), "dead letter")
        equal(letter.properties, {**info, "kept": "yes"}, "its properties")
        equal(annotation(letter, "x-opt-deadletter-source"), address(scene, "a"), "source")
        letters.settle(delivery)
        letters.close()
    received(dead_letters(scene, "a"), 0)
    others = received(subscription(scene, "b"), len(spellings))
    equal([other.properties for other in others], [{"kept": "yes"}] * len(spellings), "in the other subscription")
    received(dead_letters(scene, "b"), 0)


@scenario("subscription-lock")
def subscription_lock(scene: Scene) -> None:
    scene.send("slow")
    receiver, other = subscription(scene, "a"), subscription(scene, "b")
    message, delivery = receiver.one()
    before = annotation(message, "x-opt-locked-until")
    apart = annotation(other.one()[0], "x-opt-locked-until") - before
    true(50_000 < apart < 60_000, f"the ends of the locks are {apart} ms apart")
    time.sleep(2)  # the lock lasts five seconds
    _, body = scene.manage("renew-lock", {"lock-tokens": tokens(delivery)}, address(scene, "a"))
    (until,) = body["expirations"].elements
    true(until - before > 1000, f"renewed from {before} to {until}")
    time.sleep(4)  # the first lock would have ended
    receiver.settle(delivery)
    receiver.none("messages left")


@scenario("subscription-peek")
def subscription_peek(scene: Scene) -> None:
    scene.send(*"abcde")
    received(subscription(scene, "b"), 5)
    browsed = scene.peek(10, queue=address(scene, "a"))
    equal(bodies(browsed), list("abcde"), "browsed")
    some = scene.peek(2, number_of(browsed[2]), address(scene, "a"))
    equal((bodies(some), sequence_numbers(some)), (["c", "d"], [3, 4]), "browsed from a number")
    received(subscription(scene, "a"), 5)
    equal(scene.peek(10, queue=address(scene, "a")), [], "browsed when empty")


@scenario("subscription-receive-and-delete")
def subscription_receive_and_delete(scene: Scene) -> None:
    scene.send("x", "y")
    receiver = Receiver(scene.connection, address(scene, "a"), ReceiveAndDelete())
    taken = receiver.take(2, TIMEOUT_S)
    equal([message.body for message, _ in taken], ["x", "y"], "bodies")
    true(all(delivery.settled for _, delivery in taken), "a delivery was not settled")
    receiver.close()
    received(subscription(scene, "a"), 0)
    equal(bodies(received(subscription(scene, "b"), 2)), ["x", "y"], "messages in the other subscription")


@scenario("subscription-disabled")
def subscription_disabled(scene: Scene) -> None:
    scene.send("x")
    fails(ENTITY_DISABLED, lambda: subscription(scene, "off"), "receiving")
    equal(bodies(received(subscription(scene, "a"), 1)), ["x"], "messages in the other subscription")


@scenario("sql-filter")
def sql_filter(scene: Scene) -> None:
    publish(
        scene,
        Message(body="1", properties={"price": int32(150), "color": "red"}),
        Message(body="2", properties={"price": 50.5, "color": "red"}, subject="abc"),
        Message(body="3", id="x"),
        Message(body="4", properties={"price": 100.5, "color": "red"}),
    )
    equal(sorted(bodies(received(subscription(scene, "dear"), 2))), ["1", "4"], "by price and color")
    equal(sorted(bodies(received(subscription(scene, "named"), 2))), ["2", "3"], "by label or id")
    equal(bodies(received(subscription(scene, "bare"), 1)), ["3"], "without color and price")


@scenario("correlation-filter")
def correlation_filter(scene: Scene) -> None:
    sevens = [kind(7) for kind in (byte, ubyte, short, ushort, int32, uint, int, ulong, float32, float)]
    publish(
        scene,
        Message(body="1", subject="a", correlation_id="c"),
        Message(body="2", subject="a", properties={"color": "red"}),
        *(Message(body=type(seven).__name__, properties={"count": seven}) for seven in sevens),
        Message(body="other", properties={"count": 7.5, "color": "RED"}),
        Message(body="text", properties={"count": "7"}),
    )
    equal(bodies(received(subscription(scene, "labelled"), 1)), ["1"], "by label and correlation id")
    equal(bodies(received(subscription(scene, "red"), 1)), ["2"], "by a string")
    types = sorted(type(seven).__name__ for seven in sevens)
    equal(sorted(bodies(received(subscription(scene, "seven"), len(types)))), types, "by a number")


@scenario("filter-error")
def filter_error(scene: Scene) -> None:
    publish(
        scene,
        Message(body="good", properties={"amount": 10, "parts": 5}),
        Message(body="bad", properties={"amount": 10, "parts": 0}),
    )
    for name in ("kept", "dropped"):
        equal(bodies(received(subscription(scene, name), 1)), ["good"], "messages selected")
    (letter,) = received(dead_letters(scene, "kept"), 1)
    equal((letter.body, letter.properties["DeadLetterReason"]), ("bad", "FilterException"), "dead letter")
    description = letter.properties["DeadLetterErrorDescription"]
    true("kept" in description, f"description: {description}")
    received(dead_letters(scene, "dropped"), 0)
    others = sorted(bodies(received(subscription(scene, "a"), 2)))
    equal(others, ["bad", "good"], "messages in another subscription")


@scenario("rule-action")
def rule_action(scene: Scene) -> None:
    sent = {"price": 150, "color": "red", "kept": True}
    publish(scene, Message(body="x", subject="dear", properties=sent))
    (changed,) = received(subscription(scene, "half"), 1)
    equal((changed.body, changed.subject), ("x", "cheap"), "changed copy")
    equal(changed.properties, {"price": 75, "kept": True, "RuleName": "half"}, "its properties")
    (plain,) = received(subscription(scene, "a"), 1)
    equal((plain.body, plain.subject, plain.properties), ("x", "dear", sent), "other copy")


@scenario("rule-copies")
def rule_copies(scene: Scene) -> None:
    publish(scene, Message(body="x", properties={"color": "red"}))
    messages = received(subscription(scene, "a"), 3)
    equal((bodies(messages), sequence_numbers(messages)), (["x"] * 3, [1, 2, 3]), "bodies and sequence numbers")
    pairs = {(message.properties.get("RuleName"), message.properties.get("number")) for message in messages}
    equal(pairs, {(None, None), ("one", 1), ("two", 2)}, "names of rules, and what they set")


@scenario("rule-default")
def rule_default(scene: Scene) -> None:
    ((filter_, action, name, created),) = rules_of(scene)
    equal((filter_, action), (Described(TRUE_FILTER, []), Described(EMPTY_ACTION, [])), "filter and action")
    equal((name, type(created)), ("$Default", timestamp), "rule of a new subscription")
    true(abs(time.time() * 1000 - created) < 600_000, f"created {created}")
    scene.send("before")
    remove_rule(scene, "$Default")
    equal(rules_of(scene), [], "rules left")
    scene.send("nowhere")
    add_rule(scene, "$Default", sql_filter={"expression": "1=1"})
    scene.send("after")
    equal(sorted(bodies(received(subscription(scene, "a"), 2))), ["after", "before"], "messages that arrived")


@scenario("rule-manager")
def rule_manager(scene: Scene) -> None:
    properties = {"color": "red", "count": int32(7), "ratio": 2.5, "good": True, "when": timestamp(86_400_000)}
    action = {"expression": "SET price = price / 2"}
    add_rule(scene, "sql", sql_filter={"expression": "price > 100"}, sql_rule_action=action)
    add_rule(scene, "correlation", correlation_filter={"label": "s", "reply-to": None, "properties": properties})
    remove_rule(scene, "$Default")
    correlation, sql = rules_of(scene)
    expected = [Described(SQL_FILTER, ["price > 100", 20]), Described(SQL_ACTION, [*action.values(), 20]), "sql"]
    equal(sql[:3], expected, "a rule with an SQL filter and an action")
    fields = [None, None, None, None, "s", None, None, None, properties]
    expected = [Described(CORRELATION_FILTER, fields), Described(EMPTY_ACTION, []), "correlation"]
    equal(correlation[:3], expected, "a rule with a correlation filter")
    found = correlation[0].value[8]
    types = {name: type(value) for name, value in properties.items()}
    equal({name: type(value) for name, value in found.items()}, types, "types of its properties")
    equal([rule[2] for rule in rules_of(scene, 1, 1)], ["sql"], "rules of the second page")
    matching = {**properties, "count": 7.0}
    publish(
        scene,
        Message(body="1", properties={"price": 150}),
        Message(body="2", subject="s", properties=matching),
        Message(body="3", subject="s", properties={**matching, "good": False}),
    )
    remove_rule(scene, "sql")
    publish(scene, Message(body="4", properties={"price": 150}), Message(body="5", subject="s", properties=matching))
    messages = sorted(received(subscription(scene, "a"), 3), key=lambda message: message.body)
    equal(bodies(messages), ["1", "2", "5"], "messages that arrived")
    equal(messages[0].properties, {"price": 75, "RuleName": "sql"}, "properties after the action")


@scenario("rule-errors")
def rule_errors(scene: Scene) -> None:
    every, wrong = {"expression": "1=1"}, "com.microsoft:argument-error"
    exists = "com.microsoft:entity-already-exists"
    fails(exists, lambda: add_rule(scene, "$Default", sql_filter=every), "a name that is there")
    is_missing(fails(NOT_FOUND, lambda: remove_rule(scene, "not"), "a missing rule"))
    sql_filter, sql_action = {"expression": "price > > 1"}, {"expression": "SET a = 1 +"}
    text = fails(wrong, lambda: add_rule(scene, "wrong", sql_filter=sql_filter), "a wrong filter")
    true("[Token line=1, column=9," in text, f"description: {text}")
    text = fails(
        wrong, lambda: add_rule(scene, "wrong", sql_filter=every, sql_rule_action=sql_action), "a wrong action"
    )
    true("[Token line=1, column=12," in text, f"description: {text}")
    equal([rule[2] for rule in rules_of(scene)], ["$Default"], "names")
