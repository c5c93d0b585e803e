"""What forwarding promises: each message moves on once, in order, with what belongs to it, or goes where it is seen."""

import pytest

from broker import requests
from broker.errors import NotAllowed
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from protocol.codec import Described, Long, Symbol, encode
from storage.records import NEVER, Field, entity_key, mark_key, message_expires_ms
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import LOCK_MS, deliveries, message
from tests.partition.forwarding_driver import Partitions, dead_letter, transfer_dead_letter
from tests.partition.topic_driver import event, rule, text

HERE, THERE = 0, 1
PLACES = [HERE, THERE]
REASON, DESCRIPTION = "DeadLetterReason", "DeadLetterErrorDescription"


@pytest.fixture
def net():
    net = Partitions(2)
    yield net
    for store in net.stores:
        assert problems(store) == []


def chain(net, *homes, **properties):
    """Queues that forward each to the next."""
    names = [f"q{at}" for at in range(len(homes))]
    queues = [net.queue(name, home) for name, home in zip(names, homes, strict=True)]
    for at, (name, home) in enumerate(zip(names[:-1], homes, strict=False)):
        net.queue(name, home, forward_to=names[at + 1], **properties)
    return queues


# -- moving on


@pytest.mark.parametrize("home", PLACES)
def test_messages_move_on_in_their_order(net, home):
    a, b = chain(net, HERE, home)
    net.send(a, "1", "2")
    net.send(a, "3")
    net.run()
    assert net.bodies(b) == ["1", "2", "3"]
    assert net.bodies(a) == []
    assert net.counts(a) == [0, 0, 0, 0, 0]
    assert net.partitions[HERE].gauges()["forwarded"] == 3


def test_within_a_partition_a_chain_is_passed_in_one_turn(net):
    a, _, _, d = chain(net, HERE, HERE, HERE, HERE)
    net.send(a, "1")
    assert net.bodies(d) == ["1"]


def test_a_receiver_at_the_destination_gets_it_in_the_same_turn(net):
    a, b = chain(net, HERE, HERE)
    net.partitions[HERE].open_receiver("r", b, True, net.now_ms)
    net.partitions[HERE].grant("r", 5)
    net.partitions[HERE].send(a, [message("1")], net.now_ms)
    [delivery] = net.turn(HERE)["r"]
    assert delivery.body == b"1"


@pytest.mark.parametrize("home", PLACES)
def test_earlier_messages_move_on_when_forwarding_is_set(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.send(a, "1", "2")
    net.crash(HERE)  # nothing of the queue is in memory
    net.queue("a", HERE, forward_to="B")
    net.run()
    assert net.bodies(b) == ["1", "2"]


@pytest.mark.parametrize("home", PLACES)
def test_a_scheduled_message_moves_on_when_its_time_comes(net, home):
    a, b = chain(net, HERE, home)
    net.send(a, message("1", scheduled_ms=net.now_ms + 60_000))
    net.run()
    assert net.bodies(b) == []
    net.wait(60_000)
    net.run()
    assert net.bodies(b) == ["1"]


@pytest.mark.parametrize("home", PLACES)
def test_a_deferred_message_stays(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.send(a, "1", "2")
    [first] = net.receive(a, receive_and_delete=False)
    net.partitions[HERE].settle(a, [first.token], Outcome.DEFERRED, None, net.now_ms)
    net.partitions[HERE].commit()
    net.queue("a", HERE, forward_to="b")
    net.run()
    assert (net.bodies(a), net.bodies(b)) == (["1"], ["2"])


def test_a_batch_is_bounded_by_count_and_by_bytes(net):
    net = Partitions(2, PartitionSettings(forward_count=3, forward_batch_bytes=5000))
    a, b = chain(net, HERE, THERE)
    net.send(a, *map(str, range(7)), "x" * 4000, "y" * 4000)
    [connection] = net.connections[HERE, THERE]
    found = []
    while connection.commands:
        found.append(len(connection.commands[0].entries) // 3)
        assert len(connection.commands) == 1
        net.deliver(HERE, THERE, connection)
        net.answer(HERE, connection)
    assert found == [3, 3, 2, 1]
    assert len(net.bodies(b)) == 9


def test_bytes_under_way_to_all_partitions_are_bounded(net):
    net = Partitions(2, PartitionSettings(forward_bytes=2000))
    target = net.queue("target", THERE)
    for at in range(5):
        queue = net.queue(f"q{at}", HERE, forward_to="target")
        net.send(queue, "x" * 1500)
    [connection] = net.connections[HERE, THERE]
    assert len(connection.commands) == 1
    net.run()
    assert len(net.bodies(target)) == 5


def test_one_turn_moves_a_bounded_part_and_asks_for_more(net):
    net = Partitions(1, PartitionSettings(forward_count=2, pump_bytes=2000))
    a, b = net.queue("a", HERE), net.queue("b", HERE)
    net.send(a, *map(str, range(10)))
    net.partitions[HERE].put_entity(a >> 3, net.entities["a"].description.model_copy(update={"forward_to": "b"}), 0)
    pumped = net.partitions[HERE].pump(net.now_ms)
    net.partitions[HERE].commit()
    assert pumped.more
    assert 0 < len(net.bodies(b)) < 10
    net.turn(HERE)
    assert net.bodies(b) == [*map(str, range(10))]


# -- what belongs to a message


@pytest.mark.parametrize("home", PLACES)
def test_number_and_time_are_new_and_the_first_number_and_the_hops_are_kept(net, home):
    a, b, c = chain(net, HERE, home, HERE)
    net.queue("q0", HERE)
    net.send(a, "0")
    net.receive(a)
    net.send(a, "1")
    sent_ms = net.now_ms
    net.wait(700)
    net.queue("q0", HERE, forward_to="q1")
    net.run()
    [found] = net.peek(c)
    assert found.number == 1
    assert found.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 2
    assert found.overlay[Field.HOPS] == 2
    assert found.overlay[Field.ENQUEUED_MS] >= sent_ms + 700
    assert found.delivery_count == 0
    assert net.counts(b) == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("home", PLACES)
def test_the_delivery_count_starts_anew_and_properties_set_by_receivers_stay(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.send(a, "1")
    [first] = net.receive(a, receive_and_delete=False)
    net.partitions[HERE].settle(a, [first.token], Outcome.ABANDONED, {"p": "1"}, net.now_ms)
    net.turn(HERE)
    net.queue("a", HERE, forward_to="b")
    net.run()
    [found] = net.peek(b)
    assert (found.delivery_count, found.properties) == (0, {"p": "1"})


@pytest.mark.parametrize("home", PLACES)
@pytest.mark.parametrize(("own_ms", "left_ms"), [(None, 8000), (20_000, 8000), (5000, 5000)])
def test_the_time_to_live_goes_on_and_the_destinations_may_end_it_earlier(net, home, own_ms, left_ms):
    a, b = net.queue("a", HERE), net.queue("b", home, default_message_time_to_live_ms=own_ms)
    net.send(a, message("1", ttl_ms=10_000))
    net.wait(2000)
    now_ms = net.now_ms
    net.queue("a", HERE, forward_to="b")
    [connection] = net.connections.get((HERE, THERE), [None])
    if connection:
        net.deliver(HERE, THERE, connection)
        net.answer(HERE, connection)
    [found] = net.peek(b)
    assert (found.overlay.get(Field.EXPIRES_MS) or message_expires_ms(found.record)) == now_ms + left_ms
    net.wait(left_ms)
    assert net.bodies(b) == []


@pytest.mark.parametrize("home", PLACES)
def test_a_message_that_expired_before_it_moved_goes_where_expired_messages_go(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.send(a, message("1", ttl_ms=50), "2")
    net.now_ms += 50
    net.queue("a", HERE, forward_to="b", dead_lettering_on_message_expiration=True)
    net.run()
    assert (net.bodies(dead_letter(a)), net.bodies(b)) == (["1"], ["2"])


# -- dead-letter queues


@pytest.mark.parametrize("home", PLACES)
def test_dead_lettered_messages_move_on_with_reason_and_source_and_without_their_time_to_live(net, home):
    b = net.queue("b", home)
    a = net.queue(
        "a",
        HERE,
        forward_dead_lettered_messages_to="b",
        max_delivery_count=1,
        dead_lettering_on_message_expiration=True,
    )
    net.send(a, message("1", ttl_ms=50))
    net.now_ms += 50
    assert net.receive(a) == []
    net.run()
    net.wait(LOCK_MS)
    [found] = net.peek(b)
    assert found.overlay[Field.DEAD_LETTER_SOURCE] == "a"
    assert found.properties[REASON] == "TTLExpiredException"
    assert found.overlay[Field.EXPIRES_MS] == NEVER
    assert net.bodies(dead_letter(a)) == []


def test_dead_lettered_again_at_the_destination_it_has_the_last_source_and_reason(net):
    b = net.queue("b", THERE)
    a = net.queue("a", HERE, forward_dead_lettered_messages_to="b")
    net.send(a, "1")
    for queue, where in ((a, HERE), (b, THERE)):
        [received] = net.receive(queue, receive_and_delete=False)
        net.partitions[where].settle(queue, [received.token], Outcome.DEAD_LETTERED, {REASON: "bad"}, net.now_ms)
        net.turn(where)
        net.run()
    [found] = net.peek(dead_letter(b))
    assert found.overlay[Field.DEAD_LETTER_SOURCE] == "b"
    assert found.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 1


# -- receivers


@pytest.mark.parametrize(("part", "field"), [(0, "forward_to"), (1, "forward_dead_lettered_messages_to")])
def test_an_entity_that_forwards_has_no_receivers(net, part, field):
    net.queue("b", HERE)
    a = net.queue("a", HERE, **{field: "b"})
    with pytest.raises(NotAllowed, match="auto-forwarding enabled: 'a' forwards to 'b'"):
        net.receive(a | part)
    with pytest.raises(NotAllowed, match="auto-forwarding"):
        net.partitions[HERE].request(a | part, requests.ReceiveDeferred([1], False), net.now_ms)
    assert net.receive(a | 1 - part) == []


@pytest.mark.parametrize("home", PLACES)
def test_setting_it_closes_receivers_and_their_locks_are_lost_without_a_failed_delivery(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    partition = net.partitions[HERE]
    net.send(a, "1", "2", "3")
    partition.open_receiver("r", a, False, net.now_ms)
    partition.grant("r", 2)
    locked = net.turn(HERE)["r"]
    partition.put_entity(a >> 3, net.entities["a"].description.model_copy(update={"forward_to": "b"}), net.now_ms)
    pumped = partition.pump(net.now_ms)
    partition.commit()
    [(receiver, error)] = pumped.closed
    assert receiver == "r"
    assert isinstance(error, NotAllowed)
    [result] = partition.settle(a, [locked[0].token], Outcome.ACCEPTED, None, net.now_ms)
    assert result is not None
    for command in pumped.forwards:
        net._connection(HERE, THERE).commands.append(command)
    net.run()
    assert [(found.body, found.delivery_count) for found in net.peek(b)] == [(b"1", 0), (b"2", 0), (b"3", 0)]


def test_a_receiver_takes_the_rest_when_forwarding_is_taken_off(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1")
    net.send(a, "2")  # waits while the other is under way
    net.queue("q0", HERE)
    assert [found.body for found in net.receive(a, 5)] == [b"2"]
    net.run()
    assert (net.bodies(a), net.bodies(b)) == ([], ["1"])


def test_a_source_that_may_not_be_received_from_does_not_forward(net):
    a, b = chain(net, HERE, THERE)
    net.queue("q0", HERE, forward_to="q1", status="ReceiveDisabled")
    net.send(a, "1")
    net.run()
    assert net.bodies(a) == ["1"]
    net.queue("q0", HERE, forward_to="q1")
    net.run()
    assert net.bodies(b) == ["1"]


# -- refused for good: the transfer dead-letter queue


def assert_transfer_dead_lettered(net, queue, reason, text, *bodies):
    found = net.peek(transfer_dead_letter(queue))
    assert [each.body.decode() for each in found] == [*bodies]
    for each in found:
        assert each.properties[REASON] == reason
        assert text in each.properties[DESCRIPTION]
        assert each.overlay[Field.DEAD_LETTER_SOURCE] == net.entities[name_of(net, queue)].description.path
    assert net.counts(transfer_dead_letter(queue))[0] == len(bodies)


def name_of(net, queue):
    return next(name for name, each in net.entities.items() if each.entity_id == queue >> 3)


@pytest.mark.parametrize("home", PLACES)
@pytest.mark.parametrize("status", ["Disabled", "SendDisabled"])
def test_to_a_disabled_entity(net, home, status):
    a, b = chain(net, HERE, home)
    net.queue("q1", home, status=status)
    net.send(a, "1", "2")
    net.run()
    assert_transfer_dead_lettered(net, a, "EntityDisabled", "'q1' is currently disabled", "1", "2")
    net.queue("q1", home)
    net.send(a, "3")
    net.run()
    assert net.bodies(b) == ["3"]


@pytest.mark.parametrize("home", PLACES)
def test_to_an_entity_that_was_deleted(net, home):
    a, _ = chain(net, HERE, home)
    net.delete("q1")
    net.send(a, "1")
    net.run()
    assert_transfer_dead_lettered(net, a, "EntityNotFound", "could not be found", "1")
    replaced = net._put(net.entities["q1"].description.model_copy(update={"name": "q1"}), home)
    assert replaced  # the name is free again


def test_to_an_entity_deleted_while_messages_were_under_way(net):
    a, _ = chain(net, HERE, THERE)
    net.send(a, "1")
    [connection] = net.connections[HERE, THERE]
    net.partitions[THERE].delete_entity(net.entities["q1"].entity_id, net.now_ms)
    net.turn(THERE)
    net.deliver(HERE, THERE, connection)
    net.answer(HERE, connection)
    assert_transfer_dead_lettered(net, a, "EntityNotFound", "could not be found", "1")


@pytest.mark.parametrize("home", PLACES)
def test_a_full_entity_takes_messages_that_fit_in_order(net, home):
    a, b = net.queue("a", HERE, max_size_mb=50), net.queue("b", home, max_size_mb=1)
    sizes = [500_000, 400_000, 300_000, 200_000, 100_000]
    net.send(a, *[message(bytes([65 + at]) * size) for at, size in enumerate(sizes)])
    net.queue("a", HERE, forward_to="b")
    net.run()
    assert [found.body[:1] for found in net.peek(b)] == [b"A", b"B", b"E"]
    refused = net.peek(transfer_dead_letter(a))
    assert [found.body[:1] for found in refused] == [b"C", b"D"]
    assert refused[0].properties[REASON] == "QuotaExceeded"
    assert "maximum entity size" in refused[0].properties[DESCRIPTION]


@pytest.mark.parametrize("home", PLACES)
def test_dead_letters_that_cannot_move_on_are_in_the_transfer_dead_letter_queue_too(net, home):
    net.queue("b", home, status="Disabled")
    a = net.queue("a", HERE, forward_dead_lettered_messages_to="b")
    net.send(a, "1")
    [received] = net.receive(a, receive_and_delete=False)
    net.partitions[HERE].settle(a, [received.token], Outcome.DEAD_LETTERED, None, net.now_ms)
    net.turn(HERE)
    net.run()
    assert_transfer_dead_lettered(net, a, "EntityDisabled", "disabled", "1")
    assert net.bodies(dead_letter(a)) == []


@pytest.mark.parametrize("homes", [[HERE] * 6, [HERE, THERE] * 3])
def test_after_four_hops_it_goes_no_further(net, homes):
    queues = chain(net, *homes)
    net.send(queues[0], "1")
    net.run()
    assert [net.bodies(queue) for queue in queues] == [[]] * 6
    text = "The maximum number of allowed hops when forwarding between queues"
    assert_transfer_dead_lettered(net, queues[4], "MaxTransferHopCountExceeded", text, "1")


@pytest.mark.parametrize("home", PLACES)
def test_a_cycle_ends(net, home):
    a, b = chain(net, HERE, home)
    net.queue("q1", home, forward_to="q0")
    net.send(a, *map(str, range(5)))
    net.run()
    assert net.bodies(transfer_dead_letter(a)) == [*map(str, range(5))]
    assert net.bodies(b) == []


def test_the_transfer_dead_letter_queue_is_received_from_as_others_and_knows_no_time_to_live(net):
    a, _ = chain(net, HERE, HERE)
    net.queue("q1", HERE, status="Disabled")
    net.send(a, message("1", ttl_ms=1000))
    net.wait(2 * LOCK_MS)
    [received] = net.receive(transfer_dead_letter(a), receive_and_delete=False)
    [error] = net.partitions[HERE].settle(
        transfer_dead_letter(a), [received.token], Outcome.DEAD_LETTERED, None, net.now_ms
    )
    assert isinstance(error, NotAllowed)
    [error] = net.partitions[HERE].settle(transfer_dead_letter(a), [received.token], Outcome.ACCEPTED, None, net.now_ms)
    assert error is None
    net.turn(HERE)
    assert net.counts(transfer_dead_letter(a)) == [0, 0, 0, 0, 0]


def test_it_counts_for_the_size_of_the_queue(net):
    a = net.queue("a", HERE, max_size_mb=1, forward_to="b")
    net.send(a, message(bytes(1_000_000)))
    assert net.counts(transfer_dead_letter(a))[0] == 1
    with pytest.raises(Exception, match="maximum entity size"):
        net.send(a, message(bytes(100_000)))


# -- refused for now: again, from the same message on


def test_a_destination_whose_store_is_full_is_asked_again(net):
    a, b = chain(net, HERE, THERE)
    store = net.stores[THERE]
    store._capacity_bytes = store.used_bytes()
    net.send(a, "1", "2")
    [connection] = net.connections[HERE, THERE]
    tried = 0
    for _ in range(20):
        net.wait(100)
        while connection.commands:
            tried += 1
            net.deliver(HERE, THERE, connection)
            net.answer(HERE, connection)
    assert 3 < tried < 10, "it backs off"
    store._capacity_bytes = 1 << 40
    net.run()
    assert net.bodies(b) == ["1", "2"]


def test_within_a_partition_a_full_store_is_emptied_by_forwarding(net):
    a, b = chain(net, HERE, HERE)
    net.queue("q0", HERE)
    net.send(a, "1")
    store = net.stores[HERE]
    store._capacity_bytes = store.used_bytes() + 2000
    net.queue("q0", HERE, forward_to="q1")
    assert net.bodies(b) == ["1"]


def test_a_source_that_the_destinations_partition_does_not_know_yet_is_asked_to_come_again(net):
    b = net.queue("b", THERE)
    [up_to, refused, busy] = net.partitions[THERE].take_over(b"s" * 8, 999 << 3, b >> 3, [1, b"r", {}], net.now_ms)
    assert (up_to, refused) == (0, [])
    assert "not known" in busy


# -- exactly once


def test_an_answer_that_is_lost_doubles_nothing(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1", "2")
    net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.lose(HERE, THERE)
    net.run()
    assert (net.bodies(a), net.bodies(b)) == ([], ["1", "2"])


@pytest.mark.parametrize("crashed", PLACES)
@pytest.mark.parametrize("delivered", [False, True])
def test_a_crash_of_either_side_doubles_and_loses_nothing(net, crashed, delivered):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1", "2")
    if delivered:
        net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.crash(crashed)
    net.send(a, "3")
    net.run()
    assert (net.bodies(a), net.bodies(b)) == ([], ["1", "2", "3"])


def test_a_message_sent_again_is_known_by_its_number(net):
    """The mark holds by itself: here the destination takes the same command twice."""
    a, b = chain(net, HERE, THERE)
    net.send(a, "1", "2")
    [connection] = net.connections[HERE, THERE]
    command = connection.commands[0]
    net.deliver(HERE, THERE, connection)
    _, _, store_id, _, source, entity_id, entries = command
    again = net.partitions[THERE].take_over(store_id, source, entity_id, entries, net.now_ms)
    net.turn(THERE)
    assert again == (2, [], "")
    assert net.bodies(b) == ["1", "2"]


def test_another_store_of_the_same_partition_is_another_source(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1")
    net.run()
    [up_to, _, _] = net.partitions[THERE].take_over(b"another!", a, b >> 3, [1, net.peek(b)[0].record, {}], net.now_ms)
    net.turn(THERE)
    assert up_to == 1
    assert net.bodies(b) == ["1", "1"]


def test_a_refused_message_is_not_passed_over_when_the_answer_is_lost(net):
    a, b = net.queue("a", HERE, max_size_mb=50), net.queue("b", THERE, max_size_mb=1)
    net.send(a, message(b"A"), message(b"B" * 2_000_000), message(b"C"))
    net = set_forwarding(net)
    [connection] = net.connections[HERE, THERE]
    net.deliver(HERE, THERE, connection)  # takes A over, refuses B
    net.crash(HERE)
    net.run()
    assert [found.body[:1] for found in net.peek(b)] == [b"A", b"C"]
    assert [found.body[:1] for found in net.peek(transfer_dead_letter(a))] == [b"B"]


def set_forwarding(net):
    net.queue("a", HERE, max_size_mb=50, forward_to="b")
    return net


def test_a_command_of_a_lost_connection_must_not_be_read_after_one_of_the_next(net):
    """What `Connection` does here, a worker does: by then the message may have gone another way."""
    net = Partitions(3)
    a, b, c = net.queue("a", 0), net.queue("b", 1), net.queue("c", 2)
    net.queue("a", 0, forward_to="b")
    net.send(a, "1")
    [stale] = net.connections[0, 1]
    net.lose(0, 1)
    net.wait(100)
    [_, fresh] = net.connections[0, 1]
    net.deliver(0, 1, fresh)  # asks for the mark
    net.answer(0, fresh)
    fresh.commands.clear()
    net.lose(0, 1)
    net.wait(1000)
    net.queue("a", 0, forward_to="c")
    net.deliver(0, 1, stale)
    net.run()
    assert (net.bodies(b), net.bodies(c)) == ([], ["1"])


@pytest.mark.parametrize("crash", [False, True])
def test_a_message_redirected_while_an_answer_is_missing_arrives_once(net, crash):
    net = Partitions(3)
    a, b, c = net.queue("a", 0), net.queue("b", 1), net.queue("c", 2)
    net.queue("a", 0, forward_to="b")
    net.send(a, "1")
    net.deliver(0, 1, net.connections[0, 1][0])
    if crash:
        net.crash(0)
    else:
        net.lose(0, 1)
    net.queue("a", 0, forward_to="c")
    net.send(a, "2")
    net.run()
    assert (net.bodies(b), net.bodies(c)) == (["1"], ["2"])


def test_a_receive_waits_while_we_do_not_know_what_was_taken_over(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1")
    net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.crash(HERE)
    net.send(a, "2")
    net.queue("q0", HERE)
    partition = net.partitions[HERE]
    partition.open_receiver("r", a, True, net.now_ms)
    partition.grant("r", 5)
    assert net.turn(HERE) == {}
    got = []
    for connection in list(net.connections[HERE, THERE]):
        while connection.commands:
            net.deliver(HERE, THERE, connection)
        while connection.answers:
            queue_id, by, (up_to, refused, busy) = connection.answers.popleft()
            partition.taken_over(queue_id, by, up_to, refused, busy, net.now_ms)
            got += net.turn(HERE).get("r", [])
    assert [found.body for found in got] == [b"2"]
    assert net.bodies(b) == ["1"]
    partition.close_receiver("r", False, net.now_ms)


def test_a_message_does_not_expire_while_we_do_not_know_whether_it_was_taken_over(net):
    a, b = chain(net, HERE, THERE, dead_lettering_on_message_expiration=True)
    net.send(a, message("1", ttl_ms=50), message("2", ttl_ms=50))
    net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.crash(HERE)
    net.crash(THERE)
    net.wait(10)
    net.now_ms += 50
    net.run()
    assert net.bodies(dead_letter(a)) == []
    assert net.bodies(b) == []  # expired there
    assert net.counts(b) == [0, 0, 0, 0, 0]


def test_purging_an_entity_that_forwards_leaves_messages_under_way(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1", "2")
    net.send(a, "3")
    assert net.partitions[HERE].request(a, requests.Purge(), net.now_ms) == 1
    net.turn(HERE)
    assert net.counts(a)[4] == 2
    net.run()
    assert (net.bodies(a), net.bodies(b)) == ([], ["1", "2"])


def test_a_message_put_back_after_higher_numbers_were_forwarded_gets_a_new_number(net):
    """A gateway gives back what it could not deliver. The old number is below the mark: it would be taken for gone."""
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    net.send(a, "1", "2")
    partition = net.partitions[HERE]
    partition.open_receiver("r", a, True, net.now_ms)
    partition.grant("r", 1)
    pumped = partition.pump(net.now_ms)
    partition.commit()
    [(_, _, items)] = pumped.deliveries
    assert deliveries(items)[0].number == 1
    net.queue("a", HERE, forward_to="b")
    net.run()
    partition.restore(a, items, net.now_ms)
    net.turn(HERE)
    net.run()
    net.crash(HERE)
    net.run()
    assert net.bodies(b) == ["2", "1"]
    assert net.peek(b)[1].overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 1


def test_a_mark_that_cannot_be_read_is_set_aside_and_forwarding_goes_on(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1")
    net.run()
    key = mark_key(bytes(8), a)
    assert net.stores[THERE].get(Table.MARKS, key)
    net.stores[THERE].put(Table.MARKS, key, b"nonsense")
    net.stores[THERE].commit()
    net.send(a, "2")
    net.run()
    assert net.bodies(b) == ["1", "2"]
    assert net.partitions[THERE].gauges()["quarantined"] == 1


def test_marks_and_all_else_of_a_deleted_queue_are_freed(net):
    a, b = chain(net, HERE, THERE)
    net.send(a, "1")
    net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.send(a, "2")
    net.delete("q0")
    net.run()
    for store in net.stores:
        assert store.scan(Table.MARKS, b"\0", b"\xff" * 20, 9) == []
        assert [key for key, _ in store.scan(Table.META, b"forwarded-", b"forwarded.", 9)] == []
    assert net.stores[HERE].scan(Table.MESSAGES, b"\0", b"\xff" * 9, 9) == []
    assert net.stores[HERE].get(Table.COUNTS, entity_key(a)) is None
    assert net.bodies(b) == ["1"]


# -- topics and subscriptions


@pytest.mark.parametrize("home", PLACES)
def test_to_a_topic_it_is_published_and_its_rules_see_what_was_set_since(net, home):
    net.topic("t", home)
    plain = net.subscription("t", "plain")
    chosen = net.subscription("t", "chosen", [rule("r", "colour = 'red' AND sys.Label = 'l'")])
    other = net.subscription("t", "other", [rule("r", "colour = 'blue'")])
    first = net.topic("first", HERE)
    net.subscription("first", "s", [rule("paint", action="SET colour = 'red'; SET sys.Label = 'l'")], forward_to="t")
    net.send(first, event("1", colour="blue"))
    net.run()
    assert [text(found.body) for found in net.peek(plain)] == ["1"]
    assert [text(found.body) for found in net.peek(chosen)] == ["1"]
    assert net.peek(other) == []
    [found] = net.peek(plain)
    assert found.overlay[Field.HOPS] == 1
    assert Field.PROPERTIES not in found.overlay


@pytest.mark.parametrize("home", PLACES)
def test_from_subscriptions_that_share_a_body_each_copy_moves_on_by_itself(net, home):
    target = net.queue("q", home)
    topic = net.topic("t", HERE)
    stays = net.subscription("t", "stays")
    for name in ("one", "two"):
        net.subscription("t", name, forward_to="q")
    net.send(topic, event("1"), event("2"))
    net.run()
    assert [text(found.body) for found in net.peek(target)] == ["1", "2", "1", "2"]
    assert [text(found.body) for found in net.peek(stays)] == ["1", "2"]
    assert net.stores[HERE].scan(Table.REFS, b"\0", b"\xff" * 9, 9) == []
    for queue in (target, stays):
        assert len(net.receive(queue, 9)) in (2, 4)
    for store in net.stores:
        assert store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 9) == []
    assert net.counts(topic)[3] == 0


def test_a_subscription_that_cannot_forward_has_a_transfer_dead_letter_queue_of_its_own(net):
    net.queue("q", THERE, status="Disabled")
    topic = net.topic("t", HERE)
    stays = net.subscription("t", "stays")
    moves = net.subscription("t", "moves", forward_to="q")
    net.send(topic, event("1"))
    net.run()
    [found] = net.peek(transfer_dead_letter(moves))
    assert found.overlay[Field.DEAD_LETTER_SOURCE] == "t/Subscriptions/moves"
    assert found.properties[REASON] == "EntityDisabled"
    for queue in (stays, transfer_dead_letter(moves)):
        assert len(net.receive(queue)) == 1
    assert net.counts(topic)[3] == 0


@pytest.mark.parametrize("home", PLACES)
def test_to_a_topic_without_a_matching_subscription_it_is_accepted_and_dropped(net, home):
    topic = net.topic("t", home)
    a = net.queue("a", HERE, forward_to="t")
    net.send(a, "1")
    net.run()
    assert net.counts(a)[0] == net.counts(transfer_dead_letter(a))[0] == net.counts(topic)[3] == 0


@pytest.mark.parametrize("home", PLACES)
@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_an_entity_with_duplicate_detection_drops_forwarded_messages_that_it_has_seen(net, home, kind):
    if kind == "queue":
        target = kept = net.queue("b", home, requires_duplicate_detection=True)
    else:
        target = net.topic("b", home, requires_duplicate_detection=True)
        kept = net.subscription("b", "s")
    a = net.queue("a", HERE, forward_to="b")
    with_ids = [event(body, system={0: message_id}) for body, message_id in (("1", "x"), ("2", "y"), ("3", "x"))]
    net.send(a, *with_ids, event("4"))
    net.run()
    net.send(a, event("5", system={0: "y"}))
    net.run()
    assert [text(found.body) for found in net.peek(kept)] == ["1", "2", "4"]
    assert net.counts(a) == [0, 0, 0, 0, 0]
    assert target


def test_an_id_set_by_a_rule_is_the_one_that_is_compared(net):
    target = net.queue("b", THERE, requires_duplicate_detection=True)
    topic = net.topic("t", HERE)
    net.subscription("t", "s", [rule("r", action="SET sys.MessageId = 'same'")], forward_to="b")
    net.send(topic, event("1", system={0: "x"}), event("2", system={0: "y"}))
    net.run()
    assert [text(found.body) for found in net.peek(target)] == ["1"]


@pytest.mark.parametrize("home", PLACES)
def test_a_copy_that_an_action_delays_is_forwarded_when_its_time_comes(net, home):
    target = net.queue("q", home)
    topic = net.topic("t", HERE)
    action = "SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + @delay"
    later = rule("later", action=action, delay=Described(Symbol("com.microsoft:timespan"), Long(3_600_000 * 10_000)))
    source = net.subscription("t", "s", [later, rule("now")], forward_to="q")
    net.send(topic, event("1"))
    net.run()
    assert [text(found.body) for found in net.peek(target)] == ["1"]
    assert net.counts(source)[:3] == [0, 0, 1]
    net.wait(3_600_000)
    net.run()
    now, delayed = net.peek(target)
    assert [text(found.body) for found in (now, delayed)] == ["1", "1"]
    assert delayed.overlay[Field.SCHEDULED_MS] == now.overlay[Field.ENQUEUED_MS] + 3_600_000
    assert net.counts(source) == [0, 0, 0, 0, 0]
    assert net.counts(topic)[3] == 0


# -- to itself, which a change of the entity may ask for


@pytest.mark.parametrize("properties", [{}, {"requires_duplicate_detection": True}], ids=["plain", "duplicates"])
def test_messages_that_an_entity_forwards_to_itself_end_by_the_limit_of_hops(net, properties):
    a = net.queue("a", HERE, **properties)
    net.send(a, message("1", message_id=encode("1")), message("2", message_id=encode("2")))
    net.queue("a", HERE, forward_to="a", **properties)
    net.send(a, message("3", message_id=encode("3")))
    net.run()
    assert net.bodies(a) == []
    assert net.bodies(transfer_dead_letter(a)) == ["1", "2", "3"]
    overlay = net.peek(transfer_dead_letter(a))[0].overlay
    assert overlay[Field.PROPERTIES][REASON] == "MaxTransferHopCountExceeded"
    net.queue("a", HERE, **properties)
    net.send(a, message("4", message_id=encode("4")))
    assert net.bodies(a) == ["4"], "it takes messages as before"


@pytest.mark.parametrize("properties", [{}, {"requires_duplicate_detection": True}], ids=["plain", "duplicates"])
def test_messages_that_fragments_forward_to_their_entity_end_by_the_limit_of_hops(net, properties):
    both = (HERE, THERE)
    net.fragments("a", both, enable_partitioning=True, **properties)
    a = net.fragments("a", both, enable_partitioning=True, forward_to="a", **properties)
    for at in range(6):
        net.send(a, message(str(at), message_id=encode(str(at))))
    for _ in range(20):
        net.run()
    found = [each.body.decode() for place in both for each in net.peek(transfer_dead_letter(a), at=place)]
    assert sorted(found) == [str(at) for at in range(6)]
