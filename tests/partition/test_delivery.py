"""Handing out: order, fairness, credit, drain, receive-and-delete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import EntityDisabled, EntityNotFound
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import LAYOUT_BYTES, message_expires_ms
from storage.store import Table
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Driver, deliveries, message


def numbers(received):
    return [delivery.number for delivery in received]


def test_messages_come_in_order_with_the_numbers_from_one(queue):
    queue.send("a", "b")
    queue.send("c")
    received = queue.receive(5)
    assert [(d.number, d.body, d.delivery_count) for d in received] == [(1, b"a", 0), (2, b"b", 0), (3, b"c", 0)]


def test_stored_bytes_are_handed_out_as_they_came(queue):
    queue.send(message(b"\x00body", ttl_ms=5000))
    record = queue.receive_one().record
    assert record[24 : 24 + LAYOUT_BYTES] == bytes(range(LAYOUT_BYTES))
    assert record[24 + LAYOUT_BYTES :] == b"\x00body"
    assert int.from_bytes(record[8:16], "big") == START_MS
    assert message_expires_ms(record) == START_MS + 5000


def test_a_receiver_that_waits_gets_what_is_sent(queue):
    queue.open()
    queue.grant(2)
    assert queue.pump() == {}
    queue.send("a", "b", "c")
    assert numbers(queue.pump()["r"]) == [1, 2]
    assert queue.pump() == {}


def test_credit_is_a_limit_since_the_receiver_was_opened(queue):
    queue.send(*"abcdef")
    queue.open()
    queue.partition.grant("r", 2)
    queue.partition.grant("r", 3)
    assert numbers(queue.pump()["r"]) == [1, 2, 3]
    queue.partition.grant("r", 3)
    assert queue.pump() == {}
    queue.partition.grant("r", 4)
    assert numbers(queue.pump()["r"]) == [4]


def test_credit_taken_back_is_not_used(queue):
    queue.open()
    queue.partition.grant("r", 5)
    queue.partition.grant("r", 0)
    queue.send("a")
    assert queue.pump() == {}


def test_credit_of_two_to_the_32_hands_out_what_there_is(queue):
    queue.send("a")
    queue.open()
    queue.partition.grant("r", 2**32 - 1)
    assert numbers(queue.pump()["r"]) == [1]


def test_a_locked_message_is_passed_over(queue):
    queue.send("a", "b")
    queue.receive_one("first")
    assert queue.receive_one("second").body == b"b"
    assert queue.receive(5, "third") == []


def test_receivers_with_credit_share_what_there_is(queue):
    for receiver in "xyz":
        queue.open(receiver)
        queue.grant(10, receiver)
    queue.send(*"abcdefg")
    got = queue.pump()
    assert {receiver: numbers(received) for receiver, received in got.items()} == {
        "x": [1, 2, 3],
        "y": [4, 5],
        "z": [6, 7],
    }
    queue.send("h")
    assert list(queue.pump()) == ["y"]


def test_turns_go_on_with_one_message_at_a_time(queue):
    for receiver in "xyz":
        queue.open(receiver)
        queue.grant(10, receiver)
    order = []
    for body in "abcdef":
        queue.send(body)
        order += queue.pump()
    assert order == list("xyzxyz")


def test_a_receiver_with_more_credit_gets_messages_that_others_cannot_take(queue):
    queue.open("x")
    queue.open("y")
    queue.grant(1, "x")
    queue.grant(10, "y")
    queue.send(*"abcde")
    got = queue.pump()
    assert {receiver: numbers(received) for receiver, received in got.items()} == {"x": [1], "y": [2, 3, 4, 5]}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=12),
    st.lists(st.integers(1, 9), max_size=8),
)
def test_deals_exceed_no_limit_and_leave_nothing_that_somebody_has_credit_for(grants, sends):
    queue = Driver(settings=PartitionSettings(window=3))
    given_credit = dict.fromkeys(range(4), 0)
    got = dict.fromkeys(range(4), 0)
    total = 0
    for receiver in range(4):
        queue.open(receiver)
    for step in range(max(len(grants), len(sends))):
        if step < len(grants):
            receiver, credit = grants[step]
            given_credit[receiver] += credit
            queue.grant(credit, receiver)
        if step < len(sends):
            total += sends[step]
            queue.send(*["m"] * sends[step])
        for receiver, received in queue.pump().items():
            got[receiver] += len(received)
        assert all(got[receiver] <= given_credit[receiver] for receiver in got)
        assert sum(got.values()) == min(total, sum(given_credit.values()))


def test_draining_hands_out_the_available_messages_and_voids_the_rest(queue):
    queue.send("a", "b")
    queue.open()
    queue.partition.drain("r", 5)
    pumped = queue.partition.pump(queue.now_ms)
    assert numbers(deliveries(pumped.deliveries[0][2])) == [1, 2]
    assert pumped.drained == [("r", 2)]
    queue.send("c")
    assert queue.pump() == {}


def test_draining_without_credit_is_answered(queue):
    queue.open()
    queue.partition.drain("r", 0)
    assert queue.partition.pump(queue.now_ms).drained == [("r", 0)]
    assert not queue.partition.pump(queue.now_ms).drained


def test_a_drain_is_answered_only_after_all_it_can_have():
    queue = Driver(settings=PartitionSettings(pump_bytes_per_receiver=5000))
    queue.send(*[message(bytes(2000)) for _ in range(6)])
    queue.open()
    queue.partition.drain("r", 10)
    got, drained = 0, []
    for _ in range(10):
        pumped = queue.partition.pump(queue.now_ms)
        for _, _, items in pumped.deliveries:
            got += len(deliveries(items))
        drained += pumped.drained
        if not pumped.more:
            break
        assert drained == []
    assert (got, drained) == (6, [("r", 6)])


def test_one_turn_hands_out_bounded_bytes_to_one_receiver():
    queue = Driver(settings=PartitionSettings(pump_bytes_per_receiver=10_000))
    queue.send(*[message(bytes(3000)) for _ in range(20)])
    queue.open()
    queue.partition.grant("r", 100)
    pumped = queue.partition.pump(queue.now_ms)
    assert pumped.more
    assert sum(len(d.record) for d in deliveries(pumped.deliveries[0][2])) < 10_000 + 3100
    assert numbers(queue.pump()["r"]) == list(range(4, 21))


def test_one_turn_hands_out_bounded_bytes_in_all_and_the_rest_in_the_next():
    queue = Driver(settings=PartitionSettings(pump_bytes=10_000))
    queue.partition.put_entity(2, queue.description, queue.now_ms)
    for queue_id in (MAIN, 2 << 3):
        queue.send(*[message(bytes(3000)) for _ in range(4)], queue=queue_id)
        queue.open(queue_id, queue_id)
        queue.grant(10, queue_id)
    first = queue.partition.pump(queue.now_ms)
    assert [receiver for receiver, _, _ in first.deliveries] == [MAIN]
    assert first.more
    second = queue.partition.pump(queue.now_ms)
    assert second.deliveries[0][0] == 16  # who got nothing comes before who was cut short
    rest = queue.pump()
    assert sum(len(received) for received in rest.values()) == 8 - 3 - len(
        [d for _, _, items in second.deliveries for d in deliveries(items)]
    )


def test_receive_and_delete_removes_what_it_delivers(queue):
    queue.send("a", message("b", ttl_ms=1000))
    queue.open("r", receive_and_delete=True)
    queue.partition.grant("r", 5)
    [(_, until_ms, items)] = queue.partition.pump(queue.now_ms).deliveries
    assert until_ms == 0
    received = deliveries(items)
    assert [d.body for d in received] == [b"a", b"b"]
    assert len({d.token for d in received}) == 2
    assert all(len(d.token) == 16 for d in received)
    queue.partition.commit()
    assert queue.counts() == [0, 0, 0, 0, 0]
    for table in (Table.QUEUE, Table.MESSAGES, Table.DUE):
        assert queue.store.last_key(table) is None


def test_messages_deleted_but_never_sent_come_back_at_their_places(queue):
    queue.send("a", "b", "c")
    queue.open("r", receive_and_delete=True)
    queue.partition.grant("r", 2)
    [(_, _, items)] = queue.partition.pump(queue.now_ms).deliveries
    queue.partition.commit()
    queue.partition.restore(MAIN, items[5:], queue.now_ms)
    queue.partition.commit()
    assert numbers(queue.peek()) == [2, 3]
    assert [(d.number, d.body) for d in queue.receive(5, "other")] == [(2, b"b"), (3, b"c")]


def test_a_restored_message_keeps_its_time_to_live(queue):
    queue.send(message("a", ttl_ms=1000), message("b", ttl_ms=5000))
    queue.open("r", receive_and_delete=True)
    queue.partition.grant("r", 2)
    [(_, _, items)] = queue.partition.pump(queue.now_ms).deliveries
    queue.partition.commit()
    queue.now_ms += 2000
    queue.partition.restore(MAIN, items, queue.now_ms)
    assert queue.bodies() == ["b"]
    queue.wait(3000)
    assert queue.bodies() == []


def test_restoring_to_a_deleted_queue_does_nothing(queue):
    queue.send("a")
    queue.open("r", receive_and_delete=True)
    queue.partition.grant("r", 1)
    [(_, _, items)] = queue.partition.pump(queue.now_ms).deliveries
    queue.partition.delete_entity(1, queue.now_ms)
    queue.partition.restore(MAIN, items, queue.now_ms)
    assert queue.store.last_key(Table.MESSAGES) is None


def test_tokens_hold_partition_and_incarnation_and_are_never_given_twice(queue):
    queue.send("a", "b")
    tokens = [d.token for d in queue.receive(2)]
    queue.restart()
    tokens += [d.token for d in queue.receive(2)]
    assert len(set(tokens)) == 4
    assert {token[:8] for token in tokens} == {b"\0\5" + n.to_bytes(6, "big") for n in (1, 2)}


def test_locked_until_is_told_with_the_deliveries(queue):
    queue.send("a")
    queue.open()
    queue.partition.grant("r", 1)
    [(receiver, until_ms, _)] = queue.partition.pump(queue.now_ms).deliveries
    assert (receiver, until_ms) == ("r", queue.now_ms + LOCK_MS)


def test_calls_of_a_receiver_that_is_not_open_do_nothing(queue):
    queue.send("a")
    queue.partition.grant("ghost", 1)
    queue.partition.drain("ghost", 1)
    queue.partition.close_receiver("ghost", True, queue.now_ms)
    pumped = queue.partition.pump(queue.now_ms)
    assert not any(pumped)


def test_receiving_from_what_does_not_exist(queue):
    for queue_id in (16, MAIN | 3, MAIN | 7):
        with pytest.raises(EntityNotFound):
            queue.open("r", queue_id)


@pytest.mark.parametrize("status", ["Disabled", "ReceiveDisabled"])
def test_no_receiving_from_a_disabled_queue_nor_from_its_dead_letter_queue(status):
    queue = Driver(status=status)
    for queue_id in (MAIN, DEAD):
        with pytest.raises(EntityDisabled):
            queue.open("r", queue_id)


def test_settled_messages_leave_nothing_behind_in_memory():
    queue = Driver(settings=PartitionSettings(window=8))
    queue.open()
    for _ in range(300):
        queue.send(*"abcde", message("f", ttl_ms=10_000))
        queue.settle(Outcome.ACCEPTED, *queue.receive(5))
    queue.settle(Outcome.ACCEPTED, *queue.receive(10_000))
    core = queue.partition._core
    state = core.queues[MAIN]
    assert (state.locks.held, state.locks.expiring, state.window.returned, state.window.gone) == ({}, set(), [], set())
    assert len(state.window.entries) < 600
    assert core.receivers["r"].tokens == {}
    assert len(core.timers.heap) < 200
    assert core.bodies._fresh == {}


def test_a_turn_hands_out_what_came_in_it_besides_some_of_what_was_stored():
    """What was stored before is bounded by itself, and all together as ever."""
    queue = Driver(settings=PartitionSettings(pump_stored_bytes=10_000, pump_bytes=30_000))
    queue.send(*[message(bytes(2000)) for _ in range(20)])
    queue.open()
    queue.grant(100)
    assert 1 < handed_out(queue) <= 5  # of 2,500 bytes each
    queue.partition.send(MAIN, [message(bytes(2000)) for _ in range(2)], queue.now_ms)
    assert 5 < handed_out(queue) <= 12  # 10,000 bytes, and four times what came
    queue.partition.send(MAIN, [message(bytes(2000)) for _ in range(20)], queue.now_ms)
    assert handed_out(queue) <= 13  # 30,000 bytes, and the message that reaches them
    assert sum(len(received) for received in queue.pump().values()) > 0


def handed_out(queue: Driver) -> int:
    """Messages of one turn."""
    pumped = queue.partition.pump(queue.now_ms)
    queue.partition.end_turn()
    return sum(len(deliveries(items)) for _, _, items in pumped.deliveries)


def test_new_messages_are_held_in_memory_only_for_the_turn(queue):
    queue.open()
    queue.grant(1)
    queue.partition.send(MAIN, [message("a"), message("b")], queue.now_ms)
    bodies = queue.partition._core.bodies
    assert len(bodies._fresh) == 2
    queue.pump()
    assert (bodies._fresh, bodies.fresh_bytes) == ({}, 0)


def test_a_backlog_is_not_held_in_memory():
    queue = Driver(settings=PartitionSettings(window=16))
    for _ in range(50):
        queue.send(*["m"] * 20)
    window = queue.partition._core.queues[MAIN].window
    assert window.entries == []
    queue.receive(1)
    assert len(window.entries) - window.head <= 32
    queue.close()
    assert window.entries == []


def test_messages_sent_while_a_backlog_is_received_come_after_it():
    queue = Driver(settings=PartitionSettings(window=4))
    queue.send(*["m"] * 100)
    got = numbers(queue.receive(3))
    queue.send("n", "n")
    got += numbers(queue.receive(98))
    queue.send("o")
    assert got + numbers(queue.receive(5)) == list(range(1, 104))


def test_messages_without_room_in_a_turn_come_in_the_next():
    queue = Driver(settings=PartitionSettings(pump_bytes_per_receiver=5000))
    queue.send(*[message(bytes(3000 if n % 5 == 2 else 1)) for n in range(40)])
    assert numbers(queue.receive(100)) == list(range(1, 41))


def test_a_returned_message_goes_to_a_receiver_that_waits(queue):
    queue.send("a")
    a = queue.receive_one()
    queue.open("waiting")
    queue.grant(1, "waiting")
    queue.settle(Outcome.RELEASED, a)
    assert numbers(queue.pump()["waiting"]) == [1]


def test_many_returned_messages_are_not_held_in_memory():
    queue = Driver(settings=PartitionSettings(window=16))
    queue.send(*["m"] * 200)
    first = queue.receive(200)
    kept = first[::10]
    queue.settle(Outcome.RELEASED, *[d for d in first if d not in kept])
    window = queue.partition._core.queues[MAIN].window
    assert len(window.returned) <= 16
    again = queue.receive(500)
    assert numbers(again) == [d.number for d in first if d not in kept]
    queue.settle(Outcome.RELEASED, *kept)
    assert numbers(queue.receive(500)) == numbers(kept)
