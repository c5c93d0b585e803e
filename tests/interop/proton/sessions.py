"""The scenarios of `session_scenarios.py` with Qpid Proton.

A session is asked for by a filter of the source, and managed by requests.
"""

import threading
import time
from typing import Any

from proton import UNDESCRIBED, Array, Data, Link, Message, int32, symbol, timestamp, uint
from proton.handlers import MessagingHandler
from proton.reactor import Container
from proton.utils import BlockingConnection
from scene import (
    CONFIG,
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
    number_of,
    numbers,
    scenario,
    tokens,
    true,
)

FILTER = symbol("com.microsoft:session-filter")
TICKS_OF_1970 = 621_355_968_000_000_000
EVER = timestamp(253_402_300_800_000)
STATE_LIMIT = 64 * 1024
NOT_ALLOWED = "amqp:not-allowed"
TAKEN = "com.microsoft:session-cannot-be-locked"
LOCK_LOST = "com.microsoft:session-lock-lost"
TIMED_OUT = "com.microsoft:timeout"
NOT_FOUND = "com.microsoft:message-not-found"


class InSession(PeekLock):
    """Of the session, or of any for which the broker waits."""

    def __init__(self, session_id: str | None, wait_s: float) -> None:
        self.session_id = session_id
        self.wait_ms = round(wait_s * 1000)

    def apply(self, link: Link) -> None:
        super().apply(link)
        link.source.filter.put_dict({FILTER: self.session_id})
        link.properties = {symbol("com.microsoft:timeout"): uint(self.wait_ms)}


class DeletingInSession(InSession):
    def apply(self, link: Link) -> None:
        super().apply(link)
        ReceiveAndDelete().apply(link)


class SessionReceiver(Receiver):
    def __init__(self, connection: BlockingConnection, address: str, options: InSession) -> None:
        super().__init__(connection, address, options)
        filters = self.link.remote_source.filter
        filters.rewind()
        filters.next()
        self.session_id = filters.get_dict()[FILTER]
        ticks = self.link.remote_properties[symbol("com.microsoft:locked-until-utc")]
        self.locked_until_ms = (ticks - TICKS_OF_1970) // 10_000


def accept(
    scene: Scene, session_id: str | None = None, wait_s: float = TIMEOUT_S, address: str = ""
) -> SessionReceiver:
    return SessionReceiver(scene.connection, address or scene.queue, InSession(session_id, wait_s))


def none_is_available(scene: Scene, what: str, address: str = "") -> None:
    fails(TIMED_OUT, lambda: accept(scene, wait_s=1, address=address), what)


def send(scene: Scene, session_id: str, *contents: str) -> None:
    sender = scene.sender()
    for content in contents:
        sender.post(Message(body=content, group_id=session_id))
    sender.close()


def bodies(messages: list[Message]) -> list[Any]:
    return [message.body for message in messages]


def counted(messages: list[Message]) -> list[tuple[Any, int]]:
    return [(message.body, message.delivery_count) for message in messages]


def get_state(scene: Scene, session_id: str, address: str | None = None) -> bytes | None:
    _, body = scene.manage("get-session-state", {"session-id": session_id}, address)
    return body["session-state"]


def set_state(scene: Scene, session_id: str, state: bytes | None, address: str | None = None) -> None:
    scene.manage("set-session-state", {"session-id": session_id, "session-state": state}, address)


def renew(scene: Scene, session_id: str) -> int:
    _, body = scene.manage("renew-session-lock", {"session-id": session_id})
    return body["expiration"]


def browse(scene: Scene, session_id: str, start: int) -> list[Message]:
    request = {"from-sequence-number": start, "message-count": int32(10), "session-id": session_id}
    status, body = scene.manage("peek-message", request)
    return [] if status == 204 else [decoded(item["message"]) for item in body["messages"]]


def listed(scene: Scene, after: timestamp) -> list[str]:
    ids: list[str] = []
    while True:
        request = {"last-updated-time": after, "skip": int32(len(ids)), "top": int32(100)}
        status, body = scene.manage("get-message-sessions", request)
        if status == 204:
            return ids
        ids += body["sessions-ids"].elements


@scenario("session-accept")
def session_accept(scene: Scene) -> None:
    send(scene, "a", "1", "2")
    send(scene, "b", "other")
    send(scene, "a", "3")
    receiver = accept(scene, "a")
    equal(receiver.session_id, "a", "session id")
    left_s = receiver.locked_until_ms / 1000 - time.time()
    true(40 < left_s <= 60, f"locked for {left_s} s")
    messages = receiver.all_of(3)
    equal(bodies(messages), ["1", "2", "3"], "bodies")
    equal({message.group_id for message in messages}, {"a"}, "session ids of the messages")
    equal(annotation(messages[0], "x-opt-locked-until"), receiver.locked_until_ms, "lock of a message")
    receiver.none("messages left in the session")
    equal(bodies(accept(scene, "b").all_of(1)), ["other"], "messages of the other session")


@scenario("session-next")
def session_next(scene: Scene) -> None:
    send(scene, "b", "first")
    send(scene, "a", "second")
    send(scene, "b", "third")
    first, second = accept(scene), accept(scene)
    equal((first.session_id, second.session_id), ("b", "a"), "sessions")
    equal(bodies(first.all_of(2)), ["first", "third"], "messages of one")
    equal(bodies(second.all_of(1)), ["second"], "messages of the other")
    other = Scene("session-next")
    sending = threading.Timer(1.5, send, (other, "c", "fourth"))
    sending.start()
    third = accept(scene)
    equal(third.session_id, "c", "session waited for")
    equal(bodies(third.all_of(1)), ["fourth"], "its messages")
    sending.join()
    other.close()


@scenario("session-timeout")
def session_timeout(scene: Scene) -> None:
    started = time.monotonic()
    fails(TIMED_OUT, lambda: accept(scene, wait_s=2), "accepting any session")
    true(2 <= time.monotonic() - started < 15, f"that took {time.monotonic() - started:.1f} s")


@scenario("session-taken")
def session_taken(scene: Scene) -> None:
    holder = accept(scene, "a")
    other = Scene("session-taken")
    started = time.monotonic()
    fails(TAKEN, lambda: accept(scene, "a"), "accepting it again")
    fails(TAKEN, lambda: accept(other, "a"), "accepting it on another connection")
    true(time.monotonic() - started < 15, "the error took its time")
    equal((holder.session_id, accept(other, "b").session_id), ("a", "b"), "sessions")
    other.close()


@scenario("session-close")
def session_close(scene: Scene) -> None:
    send(scene, "a", "held", "next")
    receiver = accept(scene, "a")
    equal(receiver.one()[0].body, "held", "first delivery")
    receiver.close()
    equal(counted(accept(scene, "a").all_of(2)), [("held", 0), ("next", 0)], "messages and deliveries")


@scenario("session-connection-lost")
def session_connection_lost(scene: Scene) -> None:
    send(scene, "a", "held")
    killed_while_holding(scene.queue, "a")
    equal(counted(accept(scene).all_of(1)), [("held", 1)], "second delivery")


@scenario("session-renew")
def session_renew(scene: Scene) -> None:
    send(scene, "a", "slow")
    receiver = accept(scene, "a")
    _, delivery = receiver.one()
    time.sleep(3)  # the lock lasts five seconds
    moved_ms = renew(scene, "a") - receiver.locked_until_ms
    true(moved_ms > 2000, f"renewed by {moved_ms} ms")
    time.sleep(3)  # the first lock would have ended
    receiver.settle(delivery)
    receiver.close()
    accept(scene, "a").none("messages left")


@scenario("session-lock-lost")
def session_lock_lost(scene: Scene) -> None:
    send(scene, "a", "held")
    receiver = accept(scene, "a")
    _, delivery = receiver.one()
    lock = tokens(delivery)
    receiver.pump(15, lambda: receiver.link.remote_condition is not None)
    equal(receiver.link.remote_condition and receiver.link.remote_condition.name, LOCK_LOST, "error of the link")
    settling = {"disposition-status": "completed", "lock-tokens": lock, "session-id": "a"}
    fails(LOCK_LOST, lambda: scene.manage("update-disposition", settling), "settling")
    fails(LOCK_LOST, lambda: renew(scene, "a"), "renewing")
    fails(LOCK_LOST, lambda: get_state(scene, "a"), "reading the state")
    fails(LOCK_LOST, lambda: set_state(scene, "a", b"x"), "setting the state")
    equal(counted(accept(scene).all_of(1)), [("held", 1)], "second delivery")
    equal(get_state(scene, "a"), None, "state")


@scenario("session-state")
def session_state(scene: Scene) -> None:
    send(scene, "a", "x")
    receiver = accept(scene, "a")
    equal(get_state(scene, "a"), None, "state before it is set")
    binary = bytes(range(256)) * 40
    for state, read in ((b"one", b"one"), (b"", None), (binary, binary)):
        set_state(scene, "a", state)
        equal(get_state(scene, "a"), read, "state")
    receiver.all_of(1)
    receiver.close()
    none_is_available(scene, "accepting a session that has only a state")
    accept(scene, "a")
    equal(get_state(scene, "a"), binary, "state when accepted again")
    set_state(scene, "a", None)
    equal(get_state(scene, "a"), None, "state when cleared")
    accept(scene, "b")
    equal(get_state(scene, "b"), None, "state of another session")


@scenario("session-state-limit")
def session_state_limit(scene: Scene) -> None:
    accept(scene, "a")
    set_state(scene, "a", b"x" * STATE_LIMIT)
    above = lambda: set_state(scene, "a", b"y" * (STATE_LIMIT + 1))  # noqa: E731
    fails("amqp:link:message-size-exceeded", above, "a byte more")
    equal(get_state(scene, "a"), b"x" * STATE_LIMIT, "state")


@scenario("session-abandon")
def session_abandon(scene: Scene) -> None:
    send(scene, "a", "first", "second")
    receiver = accept(scene, "a")
    message, delivery = receiver.one()
    equal(counted([message]), [("first", 0)], "first delivery")
    receiver.modify(delivery)
    message, delivery = receiver.one()
    equal(counted([message]), [("first", 1)], "second delivery")
    receiver.settle(delivery)
    equal(bodies(receiver.all_of(1)), ["second"], "next message")


@scenario("session-defer")
def session_defer(scene: Scene) -> None:
    send(scene, "a", "later", "now")
    receiver = accept(scene, "a")
    message, delivery = receiver.one()
    wanted = {
        "sequence-numbers": numbers(annotation(message, "x-opt-sequence-number")),
        "receiver-settle-mode": uint(1),
    }
    receiver.modify(delivery, undeliverable=True)
    equal(bodies(receiver.all_of(1)), ["now"], "message after the deferred one")
    receiver.none("deliveries of a deferred message")

    def receive_in(session_id: str) -> list[Any]:
        _, body = scene.manage("receive-by-sequence-number", {**wanted, "session-id": session_id})
        return body["messages"]

    accept(scene, "b")
    fails(NOT_FOUND, lambda: receive_in("b"), "in another session")
    (item,) = receive_in("a")
    deferred = decoded(item["message"])
    equal((deferred.body, deferred.group_id), ("later", "a"), "deferred message")
    lock = Array(UNDESCRIBED, Data.UUID, item["lock-token"])
    settling = {"disposition-status": "completed", "lock-tokens": lock, "session-id": "a"}
    scene.manage("update-disposition", settling)
    fails(NOT_FOUND, lambda: receive_in("a"), "a completed message")


@scenario("session-dead-letter")
def session_dead_letter(scene: Scene) -> None:
    send(scene, "a", "bad", "good")
    receiver = accept(scene, "a")
    _, delivery = receiver.one()
    reasons = {"DeadLetterReason": "my reason", "DeadLetterErrorDescription": "my description"}
    receiver.dead_letter(delivery, **reasons)
    equal(bodies(receiver.all_of(1)), ["good"], "message after it")
    letters = scene.dead_letters()
    (letter,) = letters.all_of(1)
    equal((letter.body, letter.group_id), ("bad", "a"), "dead letter")
    equal({name: letter.properties[name] for name in reasons}, reasons, "reason and description")
    letters.none("dead letters left")


@scenario("session-schedule")
def session_schedule(scene: Scene) -> None:
    due_ms = round(time.time() * 1000) + 4000
    items = []
    for body in ("kept", "cancelled"):
        annotations = {symbol("x-opt-scheduled-enqueue-time"): timestamp(due_ms)}
        message = Message(body=body, group_id="a", annotations=annotations)
        items.append({"message-id": body, "session-id": "a", "message": message.encode()})
    _, answer = scene.manage("schedule-message", {"messages": items})
    cancelled = numbers(answer["sequence-numbers"].elements[1])
    scene.manage("cancel-scheduled-message", {"sequence-numbers": cancelled})
    none_is_available(scene, "accepting the session before its time")
    receiver = accept(scene)
    late_ms = time.time() * 1000 - due_ms
    true(0 <= late_ms < 5000, f"available {late_ms} ms late")
    equal(receiver.session_id, "a", "session")
    equal(bodies(receiver.all_of(1)), ["kept"], "messages")
    receiver.none("other messages")


@scenario("session-peek")
def session_peek(scene: Scene) -> None:
    for session_id, content in (("a", "1"), ("b", "2"), ("a", "3"), ("a", "4"), ("b", "5")):
        send(scene, session_id, content)
    receiver = accept(scene, "a")
    browsed = browse(scene, "a", 1)
    equal(bodies(browsed), ["1", "3", "4"], "browsed")
    equal({message.group_id for message in browsed}, {"a"}, "session ids")
    after_first = browse(scene, "a", number_of(browsed[0]) + 1)
    equal(bodies(after_first), ["3", "4"], "browsed from a number that is none of the session")
    equal(bodies(receiver.all_of(3)), ["1", "3", "4"], "messages, which browsing does not lock")
    equal(browse(scene, "a", 1), [], "browsed when empty")


@scenario("session-receive-and-delete")
def session_receive_and_delete(scene: Scene) -> None:
    send(scene, "a", "x", "y")
    send(scene, "b", "z")
    receiver = SessionReceiver(scene.connection, scene.queue, DeletingInSession("a", 0))
    equal(bodies([message for message, _ in receiver.take(2, TIMEOUT_S)]), ["x", "y"], "bodies")
    receiver.close()
    following = accept(scene)
    equal(following.session_id, "b", "session that is left")
    equal(bodies(following.all_of(1)), ["z"], "its messages")


@scenario("session-wait")
def session_wait(scene: Scene) -> None:
    send(scene, "a", "x")
    receiver = SessionReceiver(scene.connection, scene.queue, DeletingInSession("a", 0))
    equal(bodies([message for message, _ in receiver.take(1, TIMEOUT_S)]), ["x"], "bodies")
    equal(receiver.take(1, 5.5), [], "messages while the lock ends")
    receiver.close()


@scenario("session-push")
def session_push(scene: Scene) -> None:
    expected = [str(number) for number in range(10)]
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
            event.container.create_receiver(connection, scene.queue, options=InSession("a", 0))

        def on_message(self, event: Any) -> None:
            received.append(event.message.body)
            if len(received) == len(expected):
                self.accept(event.delivery)
                event.receiver.close()
                event.connection.close()

    consumer = threading.Thread(target=Container(Consumer()).run, daemon=True)
    consumer.start()
    send(scene, "a", *expected)
    consumer.join(TIMEOUT_S)
    equal(received, expected, "bodies")
    accept(scene, "a").none("messages left")


@scenario("session-many")
def session_many(scene: Scene) -> None:
    session_ids = [f"s{number:02}" for number in range(20)]
    for turn in range(3):
        for session_id in session_ids:
            send(scene, session_id, f"{session_id} {turn}")
    receivers = [accept(scene) for _ in session_ids]
    equal(sorted(receiver.session_id for receiver in receivers), session_ids, "sessions")
    for turn in range(3):
        for receiver in receivers:
            message, delivery = receiver.one()
            equal(message.body, f"{receiver.session_id} {turn}", "message")
            receiver.settle(delivery)
    for receiver in receivers:
        receiver.close()
    none_is_available(scene, "accepting a session when all are empty")


@scenario("session-list")
def session_list(scene: Scene) -> None:
    equal(listed(scene, EVER), [], "sessions at first")
    session_ids = [f"s{number:03}" for number in range(150)]
    sender = scene.sender()
    sender.settled([sender.start(Message(body="x", group_id=session_id)) for session_id in session_ids])
    accept(scene, "early")
    set_state(scene, "early", b"early")
    time.sleep(0.1)  # times have milliseconds
    between = timestamp(round(time.time() * 1000))
    accept(scene, "late")
    set_state(scene, "late", b"late")
    equal(sorted(listed(scene, EVER)), sorted(["early", "late", *session_ids]), "sessions")
    equal(listed(scene, between), ["late"], "sessions whose state was set since")


@scenario("session-receiver-required")
def session_receiver_required(scene: Scene) -> None:
    send(scene, "a", "x")
    fails(NOT_ALLOWED, scene.receiver, "receiving")
    equal(bodies(accept(scene, "a").all_of(1)), ["x"], "messages")


@scenario("session-id-required")
def session_id_required(scene: Scene) -> None:
    sender = scene.sender()
    fails(NOT_ALLOWED, lambda: sender.post(Message(body="bare")), "sending")
    later = {symbol("x-opt-scheduled-enqueue-time"): timestamp(round(time.time() * 1000) + 3_600_000)}
    items = [{"message-id": "1", "message": Message(body="bare", annotations=later).encode()}]
    fails(NOT_ALLOWED, lambda: scene.manage("schedule-message", {"messages": items}), "scheduling")
    sender.post(Message(body="good", group_id="a"))
    equal(bodies(scene.peek(10)), ["good"], "messages")


@scenario("session-not-required")
def session_not_required(scene: Scene) -> None:
    send(scene, "a", "x")
    fails(NOT_ALLOWED, lambda: accept(scene, "a"), "accepting a session")
    fails(NOT_ALLOWED, lambda: accept(scene), "accepting any session")
    (message,) = scene.receiver().all_of(1)
    equal((message.body, message.group_id), ("x", "a"), "message")


@scenario("session-subscription")
def session_subscription(scene: Scene) -> None:
    a, b, plain = (f"{scene.queue}/Subscriptions/{name}" for name in ("a", "b", "plain"))
    for session_id, content in (("a", "1"), ("b", "2"), ("a", "3")):
        send(scene, session_id, content)
    second, same_name, first = (
        accept(scene, "b", address=a),
        accept(scene, "b", address=b),
        accept(scene, address=a),
    )
    equal((first.session_id, second.session_id), ("a", "b"), "sessions")
    equal(bodies(first.all_of(2)), ["1", "3"], "messages of one")
    equal(bodies(second.all_of(1)), ["2"], "messages of the other")
    equal(bodies(same_name.all_of(1)), ["2"], "messages of the session of the same name")
    set_state(scene, "a", b"state", a)
    equal(get_state(scene, "a", a), b"state", "state")
    fails(TAKEN, lambda: accept(scene, "a", address=a), "accepting it again")
    none_is_available(scene, "accepting any session when all are empty", a)
    messages = Receiver(scene.connection, plain).all_of(3)
    equal(sorted(bodies(messages)), ["1", "2", "3"], "messages of a subscription without sessions")
