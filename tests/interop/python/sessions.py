"""The scenarios of `session_scenarios.py` with azure-servicebus."""

import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    AutoLockRenewer,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
)
from azure.servicebus.exceptions import (
    MessageNotFoundError,
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)
from scene import Scene, all_of, body, equal, killed_while_holding, one, raises, scenario, true, try_receive

STATE_LIMIT = 64 * 1024
LATER_SESSION_IDS = [f"s{number:03}" for number in range(150)]


def send(scene: Scene, session_id: str, *contents: str) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        for content in contents:
            sender.send_messages(ServiceBusMessage(content, session_id=session_id))


def accept(scene: Scene, session_id: object = NEXT_AVAILABLE_SESSION, **options: object) -> ServiceBusReceiver:
    """A receiver, to be opened by `with`, of a session or of any; for that it waits 5 s unless told otherwise."""
    return scene.receiver(session_id=session_id, **{"max_wait_time": 5, **options})


def bodies(messages: Iterable[ServiceBusReceivedMessage]) -> list[str]:
    return [body(message).decode() for message in messages]


def none(receiver: ServiceBusReceiver, what: str) -> None:
    equal(bodies(receiver.receive_messages(1, max_wait_time=1)), [], what)


def refused(receiver: ServiceBusReceiver, kind: type[Exception], what: str) -> Exception:
    def open_it() -> None:
        with receiver:
            pass

    return raises(kind, open_it, what)


def not_allowed(error: Exception, what: str) -> None:
    true("amqp:not-allowed" in str(error), f"{what}: {error}")


@scenario("session-accept")
def session_accept(scene: Scene) -> None:
    send(scene, "a", "1", "2")
    send(scene, "b", "other")
    send(scene, "a", "3")
    with accept(scene, "a") as receiver:
        equal(receiver.session.session_id, "a", "session id")
        left = receiver.session.locked_until_utc - datetime.now(UTC)
        true(timedelta(seconds=40) < left <= timedelta(seconds=60), f"locked for {left}")
        messages = all_of(receiver, 3)
        equal(bodies(messages), ["1", "2", "3"], "bodies")
        equal({message.session_id for message in messages}, {"a"}, "session ids of the messages")
        equal({message.locked_until_utc for message in messages}, {None}, "ends of locks of their own")
        none(receiver, "messages left in the session")
    with accept(scene, "b") as receiver:
        equal(bodies(all_of(receiver, 1)), ["other"], "messages of the other session")


@scenario("session-next")
def session_next(scene: Scene) -> None:
    send(scene, "b", "first")
    send(scene, "a", "second")
    send(scene, "b", "third")
    with accept(scene) as first, accept(scene) as second:
        equal((first.session.session_id, second.session.session_id), ("b", "a"), "sessions")
        equal(bodies(all_of(first, 2)), ["first", "third"], "messages of one")
        equal(bodies(all_of(second, 1)), ["second"], "messages of the other")
        sending = threading.Timer(1.5, send, (scene, "c", "fourth"))
        sending.start()
        with accept(scene, max_wait_time=20) as receiver:
            equal(receiver.session.session_id, "c", "session waited for")
            equal(bodies(all_of(receiver, 1)), ["fourth"], "its messages")


@scenario("session-timeout")
def session_timeout(scene: Scene) -> None:
    started = time.monotonic()
    refused(accept(scene, max_wait_time=2), OperationTimeoutError, "accepting any session")
    true(1.5 < time.monotonic() - started < 15, f"that took {time.monotonic() - started:.1f} s")


@scenario("session-taken")
def session_taken(scene: Scene) -> None:
    with accept(scene, "a"):
        started = time.monotonic()
        refused(accept(scene, "a"), SessionCannotBeLockedError, "accepting it again")
        true(time.monotonic() - started < 15, "the error took its time")
        with accept(scene, "b") as other:
            equal(other.session.session_id, "b", "other session")


@scenario("session-close")
def session_close(scene: Scene) -> None:
    send(scene, "a", "held", "next")
    with accept(scene, "a") as receiver:
        equal(body(one(receiver)), b"held", "first delivery")
    with accept(scene, "a") as receiver:
        messages = all_of(receiver, 2)
        equal(bodies(messages), ["held", "next"], "messages")
        equal([message.delivery_count for message in messages], [0, 0], "delivery counts")


@scenario("session-connection-lost")
def session_connection_lost(scene: Scene) -> None:
    send(scene, "a", "held")
    killed_while_holding(scene.queue, "a")
    with accept(scene) as receiver:
        (message,) = all_of(receiver, 1)
        equal((body(message), message.delivery_count), (b"held", 1), "second delivery")


@scenario("session-renew")
def session_renew(scene: Scene) -> None:
    send(scene, "a", "slow")
    with accept(scene, "a") as receiver:
        message = one(receiver)
        before = receiver.session.locked_until_utc
        time.sleep(3)  # the lock lasts five seconds
        until = receiver.session.renew_lock()
        equal(receiver.session.locked_until_utc, until, "end of the lock")
        true(until - before > timedelta(seconds=2), f"renewed from {before} to {until}")
        time.sleep(3)  # the first lock would have ended
        receiver.complete_message(message)
    with accept(scene, "a") as receiver:
        none(receiver, "messages left")


@scenario("session-auto-renew")
def session_auto_renew(scene: Scene) -> None:
    send(scene, "a", "slow")
    with AutoLockRenewer() as renewer, accept(scene, "a", auto_lock_renewer=renewer) as receiver:
        message = one(receiver)
        time.sleep(8)  # longer than a lock lasts
        receiver.complete_message(message)
        equal(receiver.session.auto_renew_error, None, "error of the renewer")
        none(receiver, "messages left")
        renewer.close()  # the SDK cannot close a receiver while another thread renews its lock


@scenario("session-lock-lost")
def session_lock_lost(scene: Scene) -> None:
    send(scene, "a", "held")
    with accept(scene, "a") as receiver:
        message = one(receiver)
        raises(SessionLockLostError, lambda: receiver.receive_messages(1, max_wait_time=15), "receiving")
        raises(SessionLockLostError, lambda: receiver.complete_message(message), "settling")
        raises(SessionLockLostError, receiver.session.renew_lock, "renewing")
        raises(SessionLockLostError, receiver.session.get_state, "reading the state")
        raises(SessionLockLostError, lambda: receiver.session.set_state(b"x"), "setting the state")
    with accept(scene) as receiver:
        again = one(receiver)
        equal((body(again), again.delivery_count), (b"held", 1), "second delivery")
        equal(receiver.session.get_state(), None, "state")
        receiver.complete_message(again)


@scenario("session-state")
def session_state(scene: Scene) -> None:
    send(scene, "a", "x")
    binary = bytes(range(256)) * 40
    with accept(scene, "a") as receiver:
        session = receiver.session
        equal(session.get_state(), None, "state before it is set")
        for state, read in ((b"one", b"one"), (b"", None), (binary, binary)):
            session.set_state(state)
            equal(session.get_state(), read, "state")
        all_of(receiver, 1)
    refused(accept(scene, max_wait_time=1), OperationTimeoutError, "accepting a session that has only a state")
    with accept(scene, "a") as receiver:
        equal(receiver.session.get_state(), binary, "state when accepted again")
        receiver.session.set_state(None)
        equal(receiver.session.get_state(), None, "state when cleared")
    with accept(scene, "b") as receiver:
        equal(receiver.session.get_state(), None, "state of another session")


@scenario("session-state-limit")
def session_state_limit(scene: Scene) -> None:
    with accept(scene, "a") as receiver:
        receiver.session.set_state(b"x" * STATE_LIMIT)
        error = raises(ServiceBusError, lambda: receiver.session.set_state(b"y" * (STATE_LIMIT + 1)), "a byte more")
        true("limit is 65536 bytes" in str(error), f"error: {error}")
        equal(receiver.session.get_state(), b"x" * STATE_LIMIT, "state")


@scenario("session-abandon")
def session_abandon(scene: Scene) -> None:
    send(scene, "a", "first", "second")
    with accept(scene, "a") as receiver:
        message = one(receiver)
        equal((body(message), message.delivery_count), (b"first", 0), "first delivery")
        receiver.abandon_message(message)
        again = one(receiver)
        equal((body(again), again.delivery_count), (b"first", 1), "second delivery")
        receiver.complete_message(again)
        equal(bodies(all_of(receiver, 1)), ["second"], "next message")


@scenario("session-defer")
def session_defer(scene: Scene) -> None:
    send(scene, "a", "later", "now")
    with accept(scene, "a") as receiver:
        message = one(receiver)
        receiver.defer_message(message)
        equal(bodies(all_of(receiver, 1)), ["now"], "message after the deferred one")
        none(receiver, "deliveries of a deferred message")
    number = message.sequence_number
    with accept(scene, "b") as receiver:
        raises(MessageNotFoundError, lambda: receiver.receive_deferred_messages([number]), "in another session")
    with accept(scene, "a") as receiver:
        (deferred,) = receiver.receive_deferred_messages([number])
        equal((body(deferred), deferred.session_id), (b"later", "a"), "deferred message")
        receiver.complete_message(deferred)
        raises(MessageNotFoundError, lambda: receiver.receive_deferred_messages([number]), "a completed message")


@scenario("session-dead-letter")
def session_dead_letter(scene: Scene) -> None:
    send(scene, "a", "bad", "good")
    with accept(scene, "a") as receiver:
        receiver.dead_letter_message(one(receiver), reason="my reason", error_description="my description")
        equal(bodies(all_of(receiver, 1)), ["good"], "message after it")
    with scene.dead_letters() as receiver:
        (letter,) = all_of(receiver, 1)
        equal((body(letter), letter.session_id), (b"bad", "a"), "dead letter")
        equal(letter.dead_letter_reason, "my reason", "reason")
        equal(letter.dead_letter_error_description, "my description", "description")
        none(receiver, "dead letters left")


@scenario("session-schedule")
def session_schedule(scene: Scene) -> None:
    due = datetime.now(UTC) + timedelta(seconds=6)
    with scene.client.get_queue_sender(scene.queue) as sender:
        kept, cancelled = (ServiceBusMessage(text, session_id="a") for text in ("kept", "cancelled"))
        numbers = sender.schedule_messages([kept, cancelled], due)
        sender.cancel_scheduled_messages(numbers[1])
    refused(accept(scene, max_wait_time=1), OperationTimeoutError, "accepting the session before its time")
    with accept(scene, max_wait_time=15) as receiver:
        late = datetime.now(UTC) - due
        true(timedelta(0) <= late < timedelta(seconds=5), f"available {late} late")
        equal(receiver.session.session_id, "a", "session")
        equal(bodies(all_of(receiver, 1)), ["kept"], "messages")
        none(receiver, "other messages")


@scenario("session-peek")
def session_peek(scene: Scene) -> None:
    for session_id, content in (("a", "1"), ("b", "2"), ("a", "3"), ("a", "4"), ("b", "5")):
        send(scene, session_id, content)
    with accept(scene, "a") as receiver:
        browsed = receiver.peek_messages(10)
        equal(bodies(browsed), ["1", "3", "4"], "browsed")
        equal({message.session_id for message in browsed}, {"a"}, "session ids")
        after_first = receiver.peek_messages(10, sequence_number=browsed[0].sequence_number + 1)
        equal(bodies(after_first), ["3", "4"], "browsed from a number that is none of the session")
        equal(bodies(all_of(receiver, 3)), ["1", "3", "4"], "messages, which browsing does not lock")
        equal(receiver.peek_messages(10), [], "browsed when empty")


@scenario("session-receive-and-delete")
def session_receive_and_delete(scene: Scene) -> None:
    send(scene, "a", "x", "y")
    send(scene, "b", "z")
    with accept(scene, "a", receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE) as receiver:
        equal(bodies(all_of(receiver, 2, complete=False)), ["x", "y"], "bodies")
    with accept(scene) as receiver:
        equal(receiver.session.session_id, "b", "session that is left")
        equal(bodies(all_of(receiver, 1)), ["z"], "its messages")


@scenario("session-wait")
def session_wait(scene: Scene) -> None:
    for mode in (ServiceBusReceiveMode.RECEIVE_AND_DELETE, ServiceBusReceiveMode.PEEK_LOCK):
        send(scene, "a", "x", "y")
        with accept(scene, "a", receive_mode=mode, max_wait_time=5) as receiver:
            time.sleep(0.5)  # so that the lock ends before the wait does
            received = []
            for message in receiver:
                received.append(message)
                if mode is ServiceBusReceiveMode.PEEK_LOCK:
                    receiver.complete_message(message)
            equal(bodies(received), ["x", "y"], "bodies")


@scenario("session-push")
def session_push(scene: Scene) -> None:
    expected = [str(number) for number in range(10)]
    sending = threading.Thread(target=send, args=(scene, "a", *expected))
    with accept(scene, "a", max_wait_time=10) as receiver:
        sending.start()
        received = []
        for message in receiver:
            receiver.complete_message(message)
            received.append(body(message).decode())
            if len(received) == len(expected):
                break
        equal(received, expected, "bodies")
        none(receiver, "messages left")


@scenario("session-many")
def session_many(scene: Scene) -> None:
    session_ids = [f"s{number:02}" for number in range(20)]
    with scene.client.get_queue_sender(scene.queue) as sender:
        for turn in range(3):
            for id_ in session_ids:
                sender.send_messages(ServiceBusMessage(f"{id_} {turn}", session_id=id_))
    receivers = []
    for _ in session_ids:
        receiver = accept(scene)
        receiver.__enter__()
        receivers.append(receiver)
    equal(sorted(receiver.session.session_id for receiver in receivers), session_ids, "sessions")
    for turn in range(3):
        for receiver in receivers:
            message = one(receiver)
            equal(body(message).decode(), f"{receiver.session.session_id} {turn}", "message")
            receiver.complete_message(message)
    for receiver in receivers:
        receiver.close()
    refused(accept(scene, max_wait_time=1), OperationTimeoutError, "accepting a session when all are empty")


@scenario("session-list")
def session_list(scene: Scene) -> None:
    equal(list(scene.client.list_queue_sessions(scene.queue)), [], "sessions at first")
    with scene.client.get_queue_sender(scene.queue) as sender:
        for id_ in LATER_SESSION_IDS:
            sender.send_messages(ServiceBusMessage("x", session_id=id_))
    with accept(scene, "early") as receiver:
        receiver.session.set_state(b"early")
    time.sleep(0.1)  # times have milliseconds
    between = datetime.now(UTC)
    with accept(scene, "late") as receiver:
        receiver.session.set_state(b"late")
    everything = sorted(["early", "late", *LATER_SESSION_IDS])
    equal(sorted(scene.client.list_queue_sessions(scene.queue)), everything, "sessions")
    since = scene.client.list_queue_sessions(scene.queue, state_updated_after=between)
    equal(list(since), ["late"], "sessions whose state was set since")


@scenario("session-receiver-required")
def session_receiver_required(scene: Scene) -> None:
    send(scene, "a", "x")
    not_allowed(raises(ServiceBusError, lambda: try_receive(scene), "receiving"), "receiving")
    with accept(scene, "a") as receiver:
        equal(bodies(all_of(receiver, 1)), ["x"], "messages")


@scenario("session-id-required")
def session_id_required(scene: Scene) -> None:
    with scene.client.get_queue_sender(scene.queue) as sender:
        bare = ServiceBusMessage("bare")
        not_allowed(raises(ServiceBusError, lambda: sender.send_messages(bare), "sending"), "sending")
        batch = [ServiceBusMessage("one", session_id="a"), bare]
        not_allowed(raises(ServiceBusError, lambda: sender.send_messages(batch), "a batch"), "a batch")
        scheduling = lambda: sender.schedule_messages(bare, datetime.now(UTC) + timedelta(hours=1))  # noqa: E731
        not_allowed(raises(ServiceBusError, scheduling, "scheduling"), "scheduling")
        sender.send_messages(ServiceBusMessage("good", session_id="a"))
    with accept(scene, "a") as receiver:
        equal(bodies(receiver.peek_messages(10)), ["good"], "messages")


@scenario("session-not-required")
def session_not_required(scene: Scene) -> None:
    send(scene, "a", "x")
    for session_id in ("a", NEXT_AVAILABLE_SESSION):
        not_allowed(refused(accept(scene, session_id), ServiceBusError, "accepting"), "accepting")
    with scene.receiver() as receiver:
        (message,) = all_of(receiver, 1)
        equal((body(message), message.session_id), (b"x", "a"), "message")


@scenario("session-subscription")
def session_subscription(scene: Scene) -> None:
    def accepted(session_id: object = NEXT_AVAILABLE_SESSION, wait_s: float = 5, name: str = "a") -> ServiceBusReceiver:
        return scene.client.get_subscription_receiver(scene.queue, name, session_id=session_id, max_wait_time=wait_s)

    with scene.client.get_topic_sender(scene.queue) as sender:
        for session_id, content in (("a", "1"), ("b", "2"), ("a", "3")):
            sender.send_messages(ServiceBusMessage(content, session_id=session_id))
    with accepted("b") as second, accepted("b", name="b") as same_name, accepted() as first:
        equal(first.session.session_id, "a", "next session")
        equal(bodies(all_of(first, 2)), ["1", "3"], "messages of one")
        equal(bodies(all_of(second, 1)), ["2"], "messages of the other")
        equal(bodies(all_of(same_name, 1)), ["2"], "messages of the session of the same name")
        first.session.set_state(b"state")
        equal(first.session.get_state(), b"state", "state")
        refused(accepted("a"), SessionCannotBeLockedError, "accepting it again")
    refused(accepted(wait_s=1), OperationTimeoutError, "accepting any session when all are empty")
    with scene.client.get_subscription_receiver(scene.queue, "plain") as receiver:
        equal(sorted(bodies(all_of(receiver, 3))), ["1", "2", "3"], "messages of a subscription without sessions")
