"""Transactions of a partition: all at once at the discharge, or nothing."""

from typing import Any

import pytest

from broker import requests
from broker.errors import (
    BrokerError,
    EntityNotFound,
    LockLost,
    MessageNotFound,
    NotAllowed,
    QuotaExceeded,
    SessionLockLost,
    TransactionRollback,
    TransactionTimeout,
)
from broker.partition.settings import PartitionSettings
from broker.partition.transactions import MAX_MESSAGES
from broker.wire import TRANSACTION_TIME_OUT_MS, Operation, Outcome, SendOperation, SettleOperation
from protocol.codec import encode
from tests.partition.driver import DEAD, LOCK_MS, MAIN, Delivery, Driver, define, describe, message
from tests.partition.hinted_store import HintedStore
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC, A, TopicDriver

T = "transaction"
OTHER = 2 << 3


class TransactionDriver(Driver):
    """Each `begins` until told otherwise: as if what began it and this had come in one frame."""

    begins = True

    def transact(self, *operations: Operation, key: str = T) -> list[Any]:
        results = self.partition.transact(key, self.begins, operations, self.now_ms)
        self.partition.commit()
        return results

    def send_in(self, *messages: list[Any] | str, queue: int = MAIN, key: str = T, quiet: bool = False) -> Any:
        sends = [[message(m) if isinstance(m, str) else m] for m in messages]
        [result] = self.transact(SendOperation(queue, quiet, sends), key=key)
        return result

    def settle_in(
        self, outcome: Outcome, *received: Delivery, queue: int = MAIN, key: str = T, quiet: bool = False, **named: Any
    ) -> Any:
        tokens = [delivery.token for delivery in received]
        [result] = self.transact(SettleOperation(queue, quiet, tokens, outcome, named or None), key=key)
        return result

    def ask_in(self, name: str, *args: Any, queue: int = MAIN, key: str = T) -> Any:
        result = self.partition.request_in(key, self.begins, queue, requests.RECORDS.made(name, *args), self.now_ms)
        self.partition.commit()
        return result

    def discharge(self, commit: bool = True, key: str = T) -> None:
        try:
            self.partition.discharge(key, commit, self.now_ms)
        finally:
            self.partition.commit()


@pytest.fixture
def queue():
    return TransactionDriver()


def refused(kind: type[BrokerError], result: Any) -> bool:
    return [name for name, _ in result] == [kind.__name__]


def test_sent_messages_are_there_at_the_commit_and_not_before(queue):
    assert queue.send_in("a", "b") is None
    assert queue.send_in("c") is None
    assert queue.bodies() == []
    queue.discharge()
    assert queue.bodies() == ["a", "b", "c"]
    assert [delivery.number for delivery in queue.peek()] == [1, 2, 3]


def test_a_waiting_receiver_gets_it_after_the_commit(queue):
    queue.open()
    queue.grant(5)
    queue.send_in("a")
    assert queue.pump() == {}
    queue.discharge()
    assert [delivery.body for delivery in queue.pump()["r"]] == [b"a"]


def test_rolled_back_messages_were_never_sent(queue):
    queue.send_in("a")
    queue.discharge(commit=False)
    assert queue.bodies() == []
    queue.send("b")
    assert queue.peek()[0].number == 1


@pytest.mark.parametrize(
    ("outcome", "held", "dead"),
    [
        (Outcome.ACCEPTED, [0, 0, 0, 0], 0),
        (Outcome.ABANDONED, [1, 0, 0, 0], 0),
        (Outcome.RELEASED, [1, 0, 0, 0], 0),
        (Outcome.DEFERRED, [0, 1, 0, 0], 0),
        (Outcome.DEAD_LETTERED, [0, 0, 0, 0], 1),
    ],
)
def test_each_outcome_takes_effect_at_the_commit(queue, outcome, held, dead):
    queue.send("a")
    received = queue.receive_one()
    assert queue.settle_in(outcome, received, p="1") is None
    assert queue.held() == [1, 0, 0, 1]
    queue.discharge()
    assert (queue.held(), queue.held(DEAD)[0]) == (held, dead)
    if outcome in (Outcome.ABANDONED, Outcome.DEFERRED):
        assert queue.peek()[0].properties == {"p": "1"}
    assert isinstance(queue.settle(Outcome.ACCEPTED, received)[0], LockLost)


def test_after_a_rollback_the_lock_is_as_it_was(queue):
    queue.send("a")
    received = queue.receive_one()
    queue.settle_in(Outcome.ACCEPTED, received)
    queue.discharge(commit=False)
    assert queue.held() == [1, 0, 0, 1]
    assert queue.settle(Outcome.ACCEPTED, received) == [None]
    assert queue.held() == [0, 0, 0, 0]


def test_after_a_rollback_what_the_client_has_forgotten_comes_again_as_failed(queue):
    """Whatever else is in the transaction, before it and behind."""
    queue.send("a", "b", "c")
    first, second, third = queue.receive(3)
    queue.send_in("never")
    queue.settle_in(Outcome.ACCEPTED, third)
    queue.settle_in(Outcome.ACCEPTED, first, second, quiet=True)
    queue.discharge(commit=False)
    assert queue.settle(Outcome.ACCEPTED, third) == [None]
    assert [(delivery.body, delivery.delivery_count) for delivery in queue.receive(2)] == [(b"a", 1), (b"b", 1)]


def test_in_a_transaction_a_message_is_settled_by_nobody_else(queue):
    queue.send("a", "b")
    a, b = queue.receive(2)
    queue.settle_in(Outcome.ACCEPTED, a)
    for outcome in (Outcome.ACCEPTED, Outcome.ABANDONED):
        assert isinstance(queue.settle(outcome, a)[0], NotAllowed)
    with pytest.raises(NotAllowed):
        queue.request("settle", [b.token, a.token], Outcome.ACCEPTED, None)
    assert refused(NotAllowed, queue.settle_in(Outcome.ABANDONED, a))
    assert refused(NotAllowed, queue.settle_in(Outcome.ABANDONED, a, key="another"))
    assert queue.settle(Outcome.ACCEPTED, b) == [None]
    queue.discharge()
    assert queue.held() == [0, 0, 0, 0]


def test_a_lock_renewed_meanwhile_holds(queue):
    queue.send("a")
    received = queue.receive_one()
    queue.settle_in(Outcome.ACCEPTED, received)
    queue.wait(LOCK_MS - 1)
    queue.request("renew-locks", [received.token])
    queue.wait(LOCK_MS - 1)
    queue.discharge()
    assert queue.held() == [0, 0, 0, 0]


@pytest.mark.parametrize("fires", [True, False])
def test_a_lock_that_ends_meanwhile_rolls_all_back(queue, fires):
    queue.send("a", "b")
    a, b = queue.receive(2)
    queue.settle_in(Outcome.ACCEPTED, a, b)
    queue.request("renew-locks", [b.token])
    queue.send_in("c")
    if fires:
        queue.wait(1)
        queue.request("renew-locks", [b.token])
        queue.wait(LOCK_MS - 1)
    else:
        queue.now_ms += LOCK_MS
    with pytest.raises(TransactionRollback, match="lock"):
        queue.discharge()
    assert "c" not in queue.bodies()
    queue.wait(LOCK_MS)
    assert queue.held() == [2, 0, 0, 0]


def test_locks_lost_with_the_connection_roll_all_back(queue):
    queue.send("a")
    queue.settle_in(Outcome.ACCEPTED, queue.receive_one())
    queue.close(broken=True)
    with pytest.raises(TransactionRollback):
        queue.discharge()
    assert queue.receive_one("again").delivery_count == 1


def test_an_impossible_operation_is_refused_at_once_and_the_others_go_on(queue):
    queue.send("a")
    received = queue.receive_one()
    queue.settle(Outcome.ACCEPTED, received)
    assert refused(LockLost, queue.settle_in(Outcome.ACCEPTED, received))
    assert refused(EntityNotFound, queue.send_in("a", queue=99 << 3))
    assert refused(EntityNotFound, queue.settle_in(Outcome.ACCEPTED, received, queue=99 << 3))
    assert refused(NotAllowed, queue.send_in("a", queue=DEAD))
    queue.send_in("b")
    queue.discharge()
    assert queue.bodies() == ["b"]


def test_of_several_each_has_its_own_answer(queue):
    good, bad = message("a", partition_key="1"), message("b", partition_key="2")
    assert queue.send_in(good, bad, "c") == [
        None,
        ["NotAllowed", "All messages of a transaction must have the same partition key."],
        None,
    ]
    queue.discharge()
    assert queue.bodies() == ["a", "c"]


def test_an_error_that_nobody_is_told_rolls_all_back(queue):
    queue.send_in("a")
    queue.send_in("b", queue=DEAD, quiet=True)
    with pytest.raises(TransactionRollback):
        queue.discharge()
    assert queue.bodies() == []


def test_keys_must_not_contradict_and_sessions_are_no_keys(queue):
    assert queue.send_in("no key", message("k", partition_key="1")) is None
    for session in "ab":
        assert queue.send_in(message(session, session_id=session, partition_key=session)) is None
    assert refused(NotAllowed, queue.send_in(message("l", partition_key="2")))
    queue.discharge()
    assert queue.bodies() == ["no key", "k", "a", "b"]


def test_at_most_so_many_messages_are_sent_in_one(queue):
    queue.send_in(*["m"] * MAX_MESSAGES)
    assert refused(QuotaExceeded, queue.send_in("n"))
    queue.discharge()
    assert queue.held()[0] == MAX_MESSAGES


def test_the_bytes_of_all_are_bounded():
    queue = TransactionDriver(settings=PartitionSettings(transaction_bytes=100))
    queue.send_in("x" * 60)
    assert refused(QuotaExceeded, queue.send_in("x" * 60, key="another"))
    queue.discharge(commit=False)
    assert queue.send_in("x" * 60, key="another") is None
    queue.discharge(key="another")
    assert queue.send_in("x" * 60) is None


def test_an_entity_that_is_full_by_all_of_it_rolls_it_back(queue):
    queue.change(max_size_mb=1)
    for _ in range(2):
        assert queue.send_in("x" * 600_000) is None
    with pytest.raises(TransactionRollback, match="maximum entity size"):
        queue.discharge()
    assert queue.bodies() == []


@pytest.mark.parametrize("change", [{"status": "SendDisabled"}, {"lock_duration_ms": 5000}])
def test_an_entity_that_is_changed_meanwhile_may_roll_it_back(queue, change):
    queue.send("a")
    queue.settle_in(Outcome.ACCEPTED, queue.receive_one())
    queue.send_in("b")
    queue.change(**change)
    with pytest.raises(TransactionRollback):
        queue.discharge()
    assert queue.bodies() == ["a"]


def test_an_entity_deleted_meanwhile_rolls_it_back(queue):
    queue.send("a")
    queue.settle_in(Outcome.ACCEPTED, queue.receive_one(), quiet=True)
    queue.partition.delete_entity(MAIN >> 3, queue.now_ms)
    with pytest.raises(TransactionRollback):
        queue.discharge()
    queue.send_in("a", queue=MAIN)
    queue.discharge(commit=False)


def test_it_ends_after_two_minutes(queue):
    queue.change(lock_duration_ms=300_000)
    queue.send("a")
    received = queue.receive_one()
    queue.settle_in(Outcome.ACCEPTED, received)
    queue.send_in("b")
    queue.wait(TRANSACTION_TIME_OUT_MS - 1)
    queue.begins = False
    queue.send_in("c")
    queue.wait(1)
    with pytest.raises(TransactionTimeout):
        queue.send_in("d")
    assert queue.settle(Outcome.ACCEPTED, received) == [None]
    with pytest.raises(TransactionTimeout):
        queue.discharge()
    with pytest.raises(TransactionRollback):
        queue.discharge()
    assert queue.bodies() == []


def test_at_the_end_of_its_time_no_timer_is_needed(queue):
    queue.send_in("a")
    queue.now_ms += TRANSACTION_TIME_OUT_MS
    with pytest.raises(TransactionTimeout):
        queue.discharge()
    assert queue.bodies() == []


def test_each_has_its_own_time(queue):
    queue.send_in("a")
    queue.wait(1000)
    queue.send_in("b", key="another")
    queue.wait(TRANSACTION_TIME_OUT_MS - 1000)
    queue.discharge(key="another")
    assert queue.bodies() == ["b"]


def test_after_a_restart_the_rest_of_it_is_not_taken_for_the_whole(queue):
    queue.send_in("a")
    queue.restart()
    queue.begins = False
    for late in (lambda: queue.send_in("b"), lambda: queue.ask_in("schedule", ["b"]), queue.discharge):
        with pytest.raises(TransactionRollback):
            late()
    queue.discharge(commit=False)
    assert queue.bodies() == []


def test_scheduled_messages_have_the_number_that_was_told(queue):
    later = {"scheduled_ms": queue.now_ms + 1000}
    numbers = queue.ask_in("schedule", [message("a", **later), message("b", **later)])
    queue.send("c")
    assert numbers == [1, 2]
    queue.discharge()
    assert [(delivery.number, delivery.body) for delivery in queue.peek()] == [(1, b"a"), (2, b"b"), (3, b"c")]
    queue.request("cancel-scheduled", [1])
    queue.wait(1000)
    assert [(delivery.number, delivery.body) for delivery in queue.receive(5)] == [(3, b"c"), (4, b"b")]


def test_one_whose_time_has_come_before_the_commit_arrives_at_once(queue):
    queue.open()
    queue.grant(5)
    [number] = queue.ask_in("schedule", [message("a", scheduled_ms=queue.now_ms + 10, ttl_ms=50)])
    queue.wait(20)
    queue.discharge()
    queue.wait(0)
    [delivery] = queue.pump()["r"]
    assert (delivery.body, delivery.number) == (b"a", number + 1)


@pytest.mark.parametrize("to", ["queue", "topic"])
def test_a_duplicate_among_scheduled_messages_does_not_change_the_numbers_of_the_others(to):
    if to == "queue":
        driver, queue_id = Driver(requires_duplicate_detection=True), MAIN
    else:
        driver, queue_id = TopicDriver(A), TOPIC
        driver.put_topic(requires_duplicate_detection=True)
    at_ms = driver.now_ms + 1000
    known = message("known", message_id=encode("1"))
    later = [message(body, scheduled_ms=at_ms, message_id=encode(body)) for body in "bc"]
    again = message("again", scheduled_ms=at_ms, message_id=encode("1"))
    ping = message("", ping=True)
    driver.send(known, queue=queue_id)
    numbers = driver.partition.request_in(T, True, queue_id, requests.Schedule([again, ping, *later]), driver.now_ms)
    driver.partition.discharge(T, True, driver.now_ms)
    driver.partition.commit()
    driver.request("cancel-scheduled", [numbers[2]], queue=queue_id)
    driver.wait(1000)
    assert driver.bodies(A if to == "topic" else MAIN) == ["known", "c"]


def test_numbers_of_a_rollback_are_left_out(queue):
    queue.ask_in("schedule", [message("a", scheduled_ms=queue.now_ms + 10)])
    queue.discharge(commit=False)
    queue.send("b")
    assert [delivery.number for delivery in queue.receive(2)] == [2]


def test_settling_by_request_is_all_or_nothing(queue):
    queue.send("a", "b")
    a, b = queue.receive(2)
    queue.settle(Outcome.ACCEPTED, b)
    with pytest.raises(LockLost):
        queue.ask_in("settle", [a.token, b.token], Outcome.ACCEPTED, None)
    assert queue.settle(Outcome.ABANDONED, a) == [None]
    a = queue.receive_one()
    queue.ask_in("settle", [a.token], Outcome.ACCEPTED, None)
    assert queue.held() == [1, 0, 0, 1]
    queue.discharge()
    assert queue.held() == [0, 0, 0, 0]


def later(queue, *bodies, wait_ms=1000):
    return [message(body, scheduled_ms=queue.now_ms + wait_ms) for body in bodies]


def numbers(queue):
    return [delivery.number for delivery in queue.peek()]


def test_a_cancellation_is_done_at_the_commit_and_not_before(queue):
    first, second, third = queue.request("schedule", later(queue, "a", "b", "c"))
    queue.ask_in("cancel-scheduled", [first, third, first])
    assert numbers(queue) == [first, second, third]
    queue.discharge()
    assert numbers(queue) == [second]
    queue.wait(1000)
    assert queue.bodies() == ["b"]


def test_rolled_back_nothing_was_cancelled(queue):
    [number] = queue.request("schedule", later(queue, "a"))
    queue.ask_in("cancel-scheduled", [number])
    queue.discharge(commit=False)
    queue.ask_in("cancel-scheduled", [number])
    queue.discharge(commit=False)
    queue.wait(1000)
    assert queue.bodies() == ["a"]


def test_cancelling_is_all_or_nothing_and_not_done_twice(queue):
    first, second = queue.request("schedule", later(queue, "a", "b"))
    for wrong in ([first, 77], [1 << 70], [-1]):
        with pytest.raises(MessageNotFound):
            queue.ask_in("cancel-scheduled", wrong)
    queue.ask_in("cancel-scheduled", [first])
    with pytest.raises(MessageNotFound, match="already"):
        queue.ask_in("cancel-scheduled", [second, first])
    queue.send_in("c")
    queue.discharge()
    assert numbers(queue) == [second, 3]


@pytest.mark.parametrize("by", ["its time", "somebody else", "another transaction"])
def test_a_message_that_is_not_scheduled_any_more_rolls_all_back(queue, by):
    [number] = queue.request("schedule", later(queue, "a"))
    queue.send_in("never")
    queue.ask_in("cancel-scheduled", [number])
    if by == "its time":
        queue.wait(1000)
    elif by == "somebody else":
        queue.request("cancel-scheduled", [number])
    else:
        queue.ask_in("cancel-scheduled", [number], key="another")
        queue.discharge(key="another")
    with pytest.raises(TransactionRollback, match="No scheduled message"):
        queue.discharge()
    assert queue.bodies() == (["a"] if by == "its time" else [])


def test_what_is_scheduled_in_it_cannot_be_cancelled_before_the_commit(queue):
    [number] = queue.ask_in("schedule", later(queue, "a"))
    with pytest.raises(MessageNotFound):
        queue.ask_in("cancel-scheduled", [number])
    queue.discharge()
    assert numbers(queue) == [number]


def test_what_one_transaction_cancels_is_bounded_but_for_a_single_message():
    queue = TransactionDriver(settings=PartitionSettings(request_items=3, request_bytes=1000))
    large = queue.request("schedule", later(queue, "x" * 2000))
    small = [queue.request("schedule", later(queue, "x" * 300))[0] for _ in range(4)]
    queue.ask_in("cancel-scheduled", large)
    with pytest.raises(QuotaExceeded, match="1000 bytes"):
        queue.ask_in("cancel-scheduled", small[:1])
    queue.discharge()
    for number in small[:2]:
        queue.ask_in("cancel-scheduled", [number])
    with pytest.raises(QuotaExceeded, match="1000 bytes"):
        queue.ask_in("cancel-scheduled", small[2:3])
    with pytest.raises(QuotaExceeded, match="more than 3 messages"):
        queue.ask_in("cancel-scheduled", small[2:])
    queue.discharge()
    assert numbers(queue) == small[2:]


def test_messages_of_a_topic_are_cancelled_in_one():
    topic = TopicDriver(A)
    [number] = topic.request("schedule", later(topic, "a"), queue=TOPIC)
    topic.partition.request_in(T, True, TOPIC, requests.CancelScheduled([number]), topic.now_ms)
    topic.partition.discharge(T, True, topic.now_ms)
    topic.partition.commit()
    topic.wait(1000)
    assert topic.bodies(A) == []


class Sessions(SessionDriver):
    """One with session "s", which receiver "r" holds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings=PartitionSettings(**settings), max_size_mb=1)
        self.put("s", "x")
        assert self.accept("r", "s") == "s"

    def set_in(self, state: bytes | None, receiver: str = "r", session: str = "s") -> None:
        self.partition.request_in(T, True, MAIN, requests.SetSessionState(receiver, session, state), self.now_ms)
        self.partition.commit()

    def end(self, commit: bool = True) -> None:
        try:
            self.partition.discharge(T, commit, self.now_ms)
        finally:
            self.partition.commit()

    def state(self) -> bytes | None:
        state: bytes | None = self.of_session("get-session-state", "s")
        return state


@pytest.mark.parametrize("commit", [True, False])
def test_the_state_of_a_session_is_set_at_the_commit_and_not_before(commit):
    queue = Sessions()
    queue.of_session("set-session-state", "s", b"before")
    for state in (b"half", b"whole"):
        queue.set_in(state)
        assert queue.state() == b"before"
    queue.end(commit)
    assert queue.state() == (b"whole" if commit else b"before")
    queue.set_in(None)
    queue.end(commit)
    assert queue.state() == (None if commit else b"before")


def test_only_who_holds_a_session_sets_its_state_in_a_transaction():
    queue = Sessions()
    for receiver, session in (("other", "s"), ("r", "t")):
        with pytest.raises(SessionLockLost):
            queue.set_in(b"x", receiver, session)
    plain = TransactionDriver()
    with pytest.raises(NotAllowed, match="does not require sessions"):
        plain.ask_in("set-session-state", "r", "s", b"x")


@pytest.mark.parametrize("again", [False, True])
def test_a_session_that_is_lost_meanwhile_rolls_all_back(again):
    queue = Sessions()
    queue.set_in(b"never")
    queue.wait(queue.description.lock_duration_ms)
    if again:
        assert queue.accept("another", "s") == "s"
    with pytest.raises(TransactionRollback, match="session lock"):
        queue.end()
    assert queue.accept("r2", "s") == "s" if not again else True
    assert queue.of_session("get-session-state", "s", receiver="another" if again else "r2") is None


def test_a_state_for_which_there_is_no_room_is_refused_at_once_or_with_the_commit():
    queue = Sessions()
    half = b"x" * 600_000
    with pytest.raises(QuotaExceeded, match="maximum entity size"):
        queue.set_in(2 * half)
    queue.set_in(half)
    sends = SendOperation(MAIN, False, [[message(half, session_id="s")]])
    assert queue.partition.transact(T, False, [sends], queue.now_ms) == [None]  # by itself there is room for it
    with pytest.raises(TransactionRollback, match="maximum entity size"):
        queue.end()
    assert queue.state() is None
    queue.set_in(half)
    queue.set_in(half)  # in its place
    queue.end()
    assert queue.state() == half


def test_the_states_that_one_transaction_sets_are_bounded_but_for_a_single_one():
    queue = Sessions(request_bytes=1000)
    queue.set_in(b"x" * 2000)
    with pytest.raises(QuotaExceeded, match="1000 bytes"):
        queue.set_in(b"x")
    queue.end()
    assert queue.state() == b"x" * 2000


def test_other_requests_are_no_part_of_one():
    for name in requests.RECORDS.classes.keys() - {"schedule", "settle", "cancel-scheduled", "set-session-state"}:
        with pytest.raises(NotAllowed):
            requests.parsed_in_transaction(name, [])


def test_duplicates_are_found_at_the_commit(queue):
    queue.change(requires_duplicate_detection=True)
    one = message("a", message_id=encode("1"))
    queue.send_in(one, one)
    queue.ask_in("schedule", [message("b", message_id=encode("1"), scheduled_ms=queue.now_ms + 10)])
    queue.discharge(commit=False)
    queue.send_in(one, message("b", message_id=encode("2")), one)
    queue.discharge()
    assert queue.bodies() == ["a", "b"]


def test_a_topic_and_a_subscription_on_its_partition_take_part_together():
    topic = TopicDriver(A)
    topic.send("a", queue=TOPIC)
    received = topic.receive_one(queue=A)
    sends = SendOperation(TOPIC, False, [[message("b")]])
    settles = SettleOperation(A, False, [received.token], Outcome.ACCEPTED, None)
    assert topic.partition.transact(T, True, [sends, settles], topic.now_ms) == [None, None]
    later = message("c", scheduled_ms=topic.now_ms + 5)
    assert topic.partition.request_in(T, False, TOPIC, requests.Schedule([later]), topic.now_ms) == [2]
    assert topic.bodies(A) == ["a"]
    topic.partition.discharge(T, True, topic.now_ms)
    topic.partition.commit()
    assert topic.bodies(A) == ["b"]
    topic.wait(5)
    assert topic.bodies(A) == ["b", "c"]


def test_what_became_of_them_is_counted(queue):
    for key in "abc":
        queue.send_in(key, key=key)
    queue.discharge(key="a")
    queue.discharge(key="b", commit=False)
    gauges = queue.partition.gauges()
    assert [gauges[name] for name in ("transactions", "committed", "rolled_back")] == [1, 1, 1]


def test_a_store_with_room_for_a_part_of_it_rolls_all_back():
    store = HintedStore(capacity_bytes=100_000)
    define(store, OTHER >> 3, describe().model_copy(update={"name": "other"}))
    queue = TransactionDriver(store, PartitionSettings(store_watermark=1))
    for each in (MAIN, OTHER):
        assert queue.send_in("x" * 60_000, queue=each) is None
    with pytest.raises(TransactionRollback, match="nearly full"):
        queue.discharge()
    assert queue.bodies() + queue.bodies(OTHER) == []


def test_the_open_transactions_of_one_connection_leave_room_for_those_of_others():
    queue = TransactionDriver(settings=PartitionSettings(transaction_bytes=100, connection_transaction_bytes=40))

    def send(key, owner, size):
        sends = [SendOperation(MAIN, False, [[message(bytes(size))]])]
        [result] = queue.partition.transact(key, True, sends, queue.now_ms, owner)
        return result

    assert send("a", "greedy", 30) is None
    [[name, text]] = send("b", "greedy", 20)
    assert name == "QuotaExceeded"
    assert "connection" in text
    assert send("c", "modest", 40) is None
    with pytest.raises(QuotaExceeded, match="connection"):
        queue.partition.request_in("a", False, MAIN, requests.Schedule([message(bytes(20))]), queue.now_ms, "greedy")
    queue.discharge(key="a")
    assert send("b", "greedy", 40) is None  # there is room again
    queue.discharge(commit=False, key="b")
    assert send("d", "greedy", 40) is None
    queue.wait(TRANSACTION_TIME_OUT_MS)
    assert send("e", "greedy", 40) is None
    assert send("f", "others", 40) is None
    [[name, text]] = send("g", "more", 40)
    assert name == "QuotaExceeded"  # in all
