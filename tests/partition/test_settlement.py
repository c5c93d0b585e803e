"""Locks and outcomes."""

from typing import Any

import pytest

from broker.errors import LockLost, MessageTooLarge, NotAllowed
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from protocol.codec import Described, ULong, encode
from protocol.message.layout import LAYOUT
from storage.queue_ids import Part
from storage.records import Field
from tests.partition.driver import DEAD, LOCK_MS, MAIN, Driver, message

ALL = list(Outcome)
NOT_ACCEPTED = [outcome for outcome in Outcome if outcome != Outcome.ACCEPTED]


def lost(results):
    return [isinstance(result, LockLost) for result in results]


def test_a_completed_message_is_gone(queue):
    queue.send("a", "b")
    first, _ = queue.receive(2)
    assert queue.settle(Outcome.ACCEPTED, first) == [None]
    assert queue.counts() == [1, 0, 0, 41, 1]
    queue.restart()
    assert queue.bodies() == ["b"]


def test_many_are_settled_at_once_each_with_its_own_result(queue):
    queue.send(*"abcd")
    a, b, c, d = queue.receive(4)
    queue.settle(Outcome.ACCEPTED, b)
    assert lost(queue.settle(Outcome.ACCEPTED, a, b, c, c)) == [False, True, False, True]
    assert queue.bodies() == ["d"]
    assert queue.settle(Outcome.ACCEPTED, d) == [None]


@pytest.mark.parametrize("outcome", ALL)
def test_settling_at_the_instant_the_lock_ends_is_too_late(queue, outcome):
    queue.send("a")
    delivery = queue.receive_one()
    queue.now_ms += LOCK_MS
    assert lost(queue.settle(outcome, delivery)) == [True]
    assert queue.held() == [1, 0, 0, 1]


@pytest.mark.parametrize("outcome", ALL)
def test_settling_just_before_the_lock_ends_is_in_time(queue, outcome):
    queue.send("a")
    delivery = queue.receive_one()
    queue.now_ms += LOCK_MS - 1
    assert queue.settle(outcome, delivery) == [None]


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("second", ALL)
def test_a_message_is_settled_once(queue, first, second):
    queue.send("a")
    delivery = queue.receive_one()
    queue.settle(first, delivery)
    assert lost(queue.settle(second, delivery)) == [True]


@pytest.mark.parametrize("outcome", ALL)
def test_an_unknown_token_is_a_lost_lock(queue, outcome):
    results = queue.partition.settle(MAIN, [bytes(16), b"short"], outcome, None, queue.now_ms)
    assert lost(results) == [True, True]


def test_a_token_settles_only_in_its_own_queue(queue):
    queue.send("a")
    delivery = queue.receive_one()
    assert lost(queue.settle(Outcome.ACCEPTED, delivery, queue=DEAD)) == [True]


def test_settling_in_a_queue_that_does_not_exist(queue):
    [result] = queue.partition.settle(99 << 3, [bytes(16)], Outcome.ACCEPTED, None, queue.now_ms)
    assert type(result).__name__ == "EntityNotFound"


def test_an_abandoned_message_is_back_at_its_place_with_a_failed_delivery_more(queue):
    queue.send("a", "b")
    first = queue.receive_one()
    queue.settle(Outcome.ABANDONED, first)
    again, second = queue.receive(2)
    assert (again.number, again.delivery_count, second.number) == (1, 1, 2)
    assert again.token != first.token


def test_a_released_message_is_back_at_its_place_and_nothing_is_counted(queue):
    queue.send("a", "b")
    queue.settle(Outcome.RELEASED, queue.receive_one())
    again, second = queue.receive(2)
    assert [(again.number, again.delivery_count), second.number] == [(1, 0), 2]


def test_returned_messages_come_in_order_before_later_ones(queue):
    queue.send(*"abcdef")
    a, b, c, d = queue.receive(4)
    queue.settle(Outcome.RELEASED, c)
    queue.settle(Outcome.RELEASED, a)
    assert [delivery.number for delivery in queue.receive(9)] == [1, 3, 5, 6]
    queue.settle(Outcome.RELEASED, d)
    queue.settle(Outcome.RELEASED, b)
    assert [delivery.number for delivery in queue.receive(9)] == [2, 4]


def test_the_failed_deliveries_survive_a_restart(queue):
    queue.send("a")
    for _ in range(3):
        queue.settle(Outcome.ABANDONED, queue.receive_one())
    queue.restart()
    assert queue.receive_one().delivery_count == 3


def test_a_lock_that_ends_counts_as_a_failed_delivery(queue):
    queue.send("a", "b")
    queue.receive(2)
    queue.wait(LOCK_MS - 1)
    assert queue.held() == [2, 0, 0, 2]
    queue.wait(1)
    assert queue.held() == [2, 0, 0, 0]
    assert [(d.number, d.delivery_count) for d in queue.receive(2)] == [(1, 1), (2, 1)]


def test_a_lock_is_renewed_from_now_on(queue):
    queue.send("a", "b")
    a, _ = queue.receive(2)
    queue.wait(LOCK_MS - 1)
    assert queue.request("renew-locks", [a.token]) == [queue.now_ms + LOCK_MS]
    queue.wait(LOCK_MS - 1)
    assert queue.held() == [2, 0, 0, 1]
    assert queue.settle(Outcome.ACCEPTED, a) == [None]


def test_all_locks_of_a_request_are_renewed(queue):
    queue.send("a", "b", "c")
    received = queue.receive(3)
    queue.wait(LOCK_MS - 1)
    until_ms = queue.now_ms + LOCK_MS
    assert queue.request("renew-locks", [each.token for each in received]) == [until_ms] * 3
    queue.wait(LOCK_MS - 1)
    assert queue.settle(Outcome.ACCEPTED, *received) == [None] * 3


def test_a_renewed_lock_is_still_its_receivers(queue):
    queue.send("a", "b")
    a, b = queue.receive(2)
    queue.request("renew-locks", [a.token, b.token])
    queue.settle(Outcome.ACCEPTED, a)
    queue.close(broken=True)
    assert queue.held() == [1, 0, 0, 0]
    assert queue.receive_one("other").delivery_count == 1


def test_renewing_is_for_all_or_none(queue):
    queue.send("a", "b")
    a, b = queue.receive(2)
    queue.settle(Outcome.ACCEPTED, b)
    queue.now_ms += 10
    with pytest.raises(LockLost):
        queue.request("renew-locks", [a.token, b.token])
    queue.wait(LOCK_MS - 10)
    assert lost(queue.settle(Outcome.ACCEPTED, a)) == [True]


def test_renewing_at_the_instant_the_lock_ends_is_too_late(queue):
    queue.send("a")
    a = queue.receive_one()
    queue.now_ms += LOCK_MS
    with pytest.raises(LockLost):
        queue.request("renew-locks", [a.token])


@pytest.mark.parametrize("way", ["abandon", "lock end", "broken connection"])
def test_the_last_failed_delivery_leads_to_the_dead_letter_queue(way):
    queue = Driver(max_delivery_count=3)
    queue.send("a")
    for count in range(3):
        delivery = queue.receive_one()
        assert delivery.delivery_count == count
        if way == "abandon":
            queue.settle(Outcome.ABANDONED, delivery)
        elif way == "lock end":
            queue.wait(LOCK_MS)
        else:
            queue.close(broken=True)
    assert queue.held() == [0, 0, 0, 0]
    [dead] = queue.receive(5, "d", DEAD)
    assert dead.properties == {
        "DeadLetterReason": "MaxDeliveryCountExceeded",
        "DeadLetterErrorDescription": "Message could not be consumed after 3 delivery attempts.",
    }
    assert dead.delivery_count == 3


def test_releasing_any_number_of_times_does_not_dead_letter():
    queue = Driver(max_delivery_count=1)
    queue.send("a")
    for _ in range(5):
        queue.settle(Outcome.RELEASED, queue.receive_one())
    assert queue.held(DEAD) == [0, 0, 0, 0]


def test_a_dead_lettered_message_tells_whence_and_why(queue):
    queue.send("a", "b")
    _, b = queue.receive(2)
    reason = {"DeadLetterReason": "bad", "DeadLetterErrorDescription": "really", "more": b"\xa1\x01x"}
    assert queue.settle(Outcome.DEAD_LETTERED, b, properties=reason) == [None]
    assert queue.counts()[3] == queue.counts(DEAD)[3] == 41
    [dead] = queue.receive(5, "d", DEAD)
    assert (dead.number, dead.body, dead.properties) == (1, b"b", reason)
    assert dead.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 2
    assert dead.overlay[Field.DEAD_LETTER_SOURCE] == "orders"


def test_dead_lettering_without_a_reason_sets_none(queue):
    queue.send("a")
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    assert queue.receive_one("d", DEAD).properties == {}


def test_a_receiver_of_the_dead_letter_queue_waits_for_what_comes(queue):
    queue.open("d", DEAD)
    queue.grant(1, "d")
    queue.send("a")
    a = queue.receive_one()
    queue.partition.settle(MAIN, [a.token], Outcome.DEAD_LETTERED, None, queue.now_ms)
    assert [d.body for d in queue.pump()["d"]] == [b"a"]


def test_nothing_can_be_dead_lettered_from_a_dead_letter_queue(queue):
    queue.send("a")
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    dead = queue.receive_one("d", DEAD)
    [result] = queue.settle(Outcome.DEAD_LETTERED, dead, queue=DEAD)
    assert isinstance(result, NotAllowed)
    assert queue.settle(Outcome.ACCEPTED, dead, queue=DEAD) == [None]


@pytest.mark.parametrize("part", [Part.DEAD_LETTER, Part.TRANSFER_DEAD_LETTER])
@pytest.mark.parametrize("way", ["abandon", "lock end", "broken connection"])
def test_in_a_dead_letter_queue_no_failed_delivery_counts(way, part):
    queue = Driver(max_delivery_count=1)
    queue.send("a")
    if part == Part.DEAD_LETTER:
        queue.settle(Outcome.ABANDONED, queue.receive_one())
        before = 1
    else:
        queue.change(forward_to="nowhere")
        queue.pump()
        before = 0
    for times in range(1, 4):
        dead = queue.receive_one("d", MAIN | part)
        assert dead.delivery_count == before
        if way == "abandon":
            queue.settle(Outcome.ABANDONED, dead, queue=MAIN | part, properties={"times": str(times)})
        elif way == "lock end":
            queue.wait(LOCK_MS)
        else:
            queue.close("d", broken=True)
    queue.restart()
    assert queue.held(MAIN | part) == [1, 0, 0, 0]
    dead = queue.receive_one("d", MAIN | part)
    assert dead.delivery_count == before
    assert dead.properties.get("times") == ("3" if way == "abandon" else None)


def test_properties_of_receivers_add_up(queue):
    queue.send("a")
    queue.settle(Outcome.ABANDONED, queue.receive_one(), properties={"tries": "1", "who": "x"})
    queue.settle(Outcome.RELEASED, queue.receive_one())
    second = queue.receive_one()
    assert second.properties == {"tries": "1", "who": "x"}
    queue.settle(Outcome.DEFERRED, second, properties={"tries": b"\x54\x02"})
    queue.restart()
    assert queue.peek()[0].properties == {"tries": b"\x54\x02", "who": "x"}


def test_properties_of_receivers_have_a_limit_and_the_message_stays_locked():
    queue = Driver(settings=PartitionSettings(properties_bytes=100))
    queue.send("a")
    queue.settle(Outcome.ABANDONED, queue.receive_one(), properties={"a": "x" * 90})
    delivery = queue.receive_one()
    [result] = queue.settle(Outcome.ABANDONED, delivery, properties={"b": "x" * 90})
    assert isinstance(result, MessageTooLarge)
    assert queue.settle(Outcome.ABANDONED, delivery, properties={"a": "y" * 90}) == [None]


TOO_LARGE = {
    "DeadLetterReason": "HeaderSizeExceeded",
    "DeadLetterErrorDescription": "The size quota for this stream exceeded the limit.",
}


def large_header(subject_bytes: int, body_bytes: int = 10) -> list[Any]:
    fields = encode(Described(ULong(0x73), ["id", None, None, "s" * subject_bytes]))
    layout = LAYOUT.pack(0, 0, 0, 0, len(fields), 0)
    return [layout, fields + encode(Described(ULong(0x75), bytes(body_bytes))), None, None]


@pytest.mark.parametrize("body_bytes", [10, 1 << 20])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_message_that_a_reason_makes_too_large_is_dead_lettered_with_that_as_the_reason(body_bytes, in_parts):
    queue = Driver()
    queue.send(large_header(60_000, body_bytes))
    reason = {"DeadLetterReason": "r" * 4096, "DeadLetterErrorDescription": "d" * 4096}
    if in_parts:
        queue.settle(Outcome.ABANDONED, queue.receive_one(), properties={"p": "x" * 4096})
        reason = {"DeadLetterReason": "r" * 4096}
    assert queue.settle(Outcome.DEAD_LETTERED, queue.receive_one(), properties=reason) == [None]
    [dead] = queue.peek(queue=DEAD)
    assert dead.properties == ({"p": "x" * 4096} if in_parts else {}) | TOO_LARGE
    assert queue.partition.tallies()[MAIN]["dead_lettered"] == {"HeaderSizeExceeded": 1}


@pytest.mark.parametrize("body_bytes", [10, 1 << 20])
def test_a_message_that_a_reason_does_not_make_too_large_keeps_it(body_bytes):
    queue = Driver()
    queue.send(large_header(56_000, body_bytes))
    reason = {"DeadLetterReason": "r" * 4096, "DeadLetterErrorDescription": "d" * 4096}
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one(), properties=reason)
    assert queue.peek(queue=DEAD)[0].properties == reason


def test_more_properties_than_a_message_may_have_dead_letter_it_all_the_same(queue):
    queue.send("a")
    assert queue.settle(Outcome.DEAD_LETTERED, queue.receive_one(), properties={"p": "x" * 70_000}) == [None]
    assert queue.peek(queue=DEAD)[0].properties == TOO_LARGE


def test_a_broken_connection_drops_its_own_locks_only(queue):
    queue.send("a", "b")
    queue.receive_one("first")
    b = queue.receive_one("second")
    queue.close("first", broken=True)
    assert queue.settle(Outcome.ACCEPTED, b) == [None]
    again = queue.receive_one("third")
    assert (again.body, again.delivery_count) == (b"a", 1)


@pytest.mark.parametrize("keep_locks", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_what_never_reached_the_receiver_is_back_and_counts_as_nothing(broken, keep_locks):
    queue = Driver(settings=PartitionSettings(keep_locks_of_broken_connections=keep_locks))
    queue.send("a", "b", "c")
    a, b, c = queue.receive(3)
    queue.close(broken=broken, unsent_from=b.token)
    again = queue.receive(3, "other")
    failed = [("a", 1)] if broken and not keep_locks else []  # else it stays locked
    assert [(each.body.decode(), each.delivery_count) for each in again] == [*failed, ("b", 0), ("c", 0)]
    assert all(isinstance(lost, LockLost) for lost in queue.settle(Outcome.ACCEPTED, b, c))
    assert (queue.settle(Outcome.ACCEPTED, a) == [None]) is not bool(failed)


def test_messages_handed_out_while_the_connection_broke_are_back(queue):
    """The gateway did not know of it: it names the first token after the last it has got."""
    queue.send("a", "b")
    [a] = queue.receive(1)
    [_] = queue.receive(1)
    queue.close(broken=True, unsent_from=a.token + b"\0")
    assert [each.delivery_count for each in queue.receive(2, "other")] == [1, 0]


def test_a_clean_detach_keeps_the_locks(queue):
    queue.send("a")
    a = queue.receive_one()
    queue.close()
    assert queue.receive(1, "other") == []
    assert queue.settle(Outcome.ACCEPTED, a) == [None]
    assert queue.held() == [0, 0, 0, 0]


def test_after_a_clean_detach_the_locks_end_in_their_time(queue):
    queue.send("a")
    queue.receive_one()
    queue.close()
    queue.wait(LOCK_MS)
    assert queue.receive_one("other").delivery_count == 1


def test_locks_of_a_broken_connection_are_kept_if_so_set():
    queue = Driver(settings=PartitionSettings(keep_locks_of_broken_connections=True))
    queue.send("a")
    a = queue.receive_one()
    queue.close(broken=True)
    assert queue.held() == [1, 0, 0, 1]
    assert queue.settle(Outcome.ACCEPTED, a) == [None]


def test_a_restart_loses_locks_and_counts_no_failure(queue):
    queue.send("a")
    a = queue.receive_one()
    queue.restart()
    assert lost(queue.settle(Outcome.ACCEPTED, a)) == [True]
    assert queue.receive_one().delivery_count == 0


def test_settling_by_request_is_for_all_or_none(queue):
    queue.send("a", "b")
    a, b = queue.receive(2)
    with pytest.raises(LockLost):
        queue.request("settle", [a.token, bytes(16)], Outcome.ACCEPTED, None)
    assert queue.held() == [2, 0, 0, 2]
    assert queue.request("settle", [a.token, b.token], Outcome.DEFERRED, {"p": "1"}) is None
    assert queue.held() == [0, 2, 0, 0]


# -- deferred


def test_a_deferred_message_is_had_by_its_number_only(queue):
    queue.send("a", "b")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    assert [d.body for d in queue.receive(5)] == [b"b"]
    until_ms, items = queue.request("receive-deferred", [1], False)
    assert (until_ms, items[1]) == (queue.now_ms + LOCK_MS, 1)
    assert queue.partition.settle(MAIN, [items[0]], Outcome.ACCEPTED, None, queue.now_ms) == [None]
    assert queue.held() == [1, 0, 0, 1]


def receive_deferred(queue, number, queue_id=MAIN):
    _, items = queue.request("receive-deferred", [number], False, queue=queue_id)
    [delivery] = [d for d in [items] if len(d) == 5]
    return type("Token", (), {"token": delivery[0], "delivery_count": delivery[2]})


@pytest.mark.parametrize(
    ("outcome", "held", "dead"),
    [
        (Outcome.ACCEPTED, [0, 0, 0, 0], 0),
        (Outcome.ABANDONED, [0, 1, 0, 0], 0),
        (Outcome.RELEASED, [0, 1, 0, 0], 0),
        (Outcome.DEFERRED, [0, 1, 0, 0], 0),
        (Outcome.DEAD_LETTERED, [0, 0, 0, 0], 1),
    ],
)
def test_a_deferred_message_takes_every_outcome(queue, outcome, held, dead):
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    queue.open("other")
    queue.grant(1, "other")
    again = receive_deferred(queue, 1)
    assert queue.held() == [0, 1, 0, 1]
    assert queue.partition.settle(MAIN, [again.token], outcome, None, queue.now_ms) == [None]
    assert queue.pump() == {}
    assert queue.held() == held
    assert queue.held(DEAD)[0] == dead
    if held[1]:
        assert receive_deferred(queue, 1).delivery_count == 1 + (outcome in (Outcome.ABANDONED, Outcome.DEFERRED))


def test_each_deferral_and_each_abandonment_of_a_deferred_message_counts_as_a_delivery(queue):
    queue.send("a")
    counts = []
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    for outcome in (Outcome.DEFERRED, Outcome.ABANDONED, Outcome.RELEASED):
        again = receive_deferred(queue, 1)
        counts.append(again.delivery_count)
        queue.partition.settle(MAIN, [again.token], outcome, None, queue.now_ms)
    queue.restart()
    queue.open("other")
    assert [*counts, receive_deferred(queue, 1).delivery_count] == [1, 2, 3, 3]


@pytest.mark.parametrize("earlier", [Outcome.ABANDONED, Outcome.DEFERRED])
def test_the_deferral_that_reaches_the_maximum_dead_letters(earlier):
    queue = Driver(max_delivery_count=2)
    queue.send("a")
    queue.settle(earlier, queue.receive_one())
    last = receive_deferred(queue, 1) if earlier == Outcome.DEFERRED else queue.receive_one()
    assert queue.settle(Outcome.DEFERRED, last, properties={"p": "1"}) == [None]
    assert (queue.held(), queue.held(DEAD)) == ([0, 0, 0, 0], [1, 0, 0, 0])
    [dead] = queue.peek(queue=DEAD)
    assert dead.properties == {
        "p": "1",
        "DeadLetterReason": "MaxDeliveryCountExceeded",
        "DeadLetterErrorDescription": "Message could not be consumed after 2 delivery attempts.",
    }
    assert dead.delivery_count == 2


def test_a_first_deferral_dead_letters_where_one_delivery_is_the_maximum():
    queue = Driver(max_delivery_count=1)
    queue.send("a", "b")
    queue.settle(Outcome.DEFERRED, *queue.receive(2))
    assert (queue.held(), queue.held(DEAD)) == ([0, 0, 0, 0], [2, 0, 0, 0])


def test_a_deferred_message_stays_deferred_when_its_lock_ends(queue):
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    receive_deferred(queue, 1)
    queue.wait(LOCK_MS)
    assert queue.held() == [0, 1, 0, 0]
    assert receive_deferred(queue, 1).delivery_count == 2


def test_a_deferred_message_that_fails_too_often_is_dead_lettered():
    queue = Driver(max_delivery_count=3)
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    for _ in range(2):
        queue.partition.settle(MAIN, [receive_deferred(queue, 1).token], Outcome.ABANDONED, None, queue.now_ms)
    assert (queue.held(), queue.held(DEAD)) == ([0, 0, 0, 0], [1, 0, 0, 0])


def test_a_dead_lettered_message_can_be_deferred(queue):
    queue.send("a")
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    queue.settle(Outcome.DEFERRED, queue.receive_one("d", DEAD), queue=DEAD)
    assert queue.held(DEAD) == [0, 1, 0, 0]
    again = receive_deferred(queue, 1, DEAD)
    assert again.delivery_count == 0  # nothing is counted there
    assert queue.partition.settle(DEAD, [again.token], Outcome.ACCEPTED, None, queue.now_ms) == [None]


def test_every_message_can_be_accounted_for(queue):
    queue.send(*"abcdef", message("p", ping=True))
    a, b, c, _, _, _ = queue.receive(6)
    queue.settle(Outcome.ACCEPTED, a)
    queue.settle(Outcome.DEAD_LETTERED, b)
    queue.settle(Outcome.ABANDONED, c)
    tallies = queue.partition.tallies()
    main, dead = tallies[MAIN], tallies[MAIN | Part.DEAD_LETTER]
    assert (main["incoming"], main["pings"], main["outgoing"]) == (7, 1, 6)
    assert (main["completed"], main["abandoned"], main["dead_lettered"]) == (1, 1, {"Application": 1})
    assert dead["moved_in"] == 1
