"""What is sent through one entity to others: with the transaction or not at all, then once and in order at each."""

from typing import Any

import pytest

from broker import requests
from broker.errors import EntityNotFound, NotAllowed, QuotaExceeded, TransactionRollback
from broker.partition.sessions.membership import SESSION_ID_IS_NULL
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome, SendOperation, SettleOperation
from storage.records import COPY_BYTES, Field, forwarded_key, message_expires_ms, message_key, queue_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import LOCK_MS, Delivery, message
from tests.partition.forwarding_driver import Partitions, dead_letter, transfer, transfer_dead_letter, via
from tests.partition.topic_driver import event, rule, text

HERE, THERE, ELSEWHERE = 0, 1, 2
PLACES = [HERE, THERE]
T = "transaction"
REASON, DESCRIPTION = "DeadLetterReason", "DeadLetterErrorDescription"


@pytest.fixture
def net():
    net = Partitions(3)
    yield net
    for store in net.stores:
        assert problems(store) == []


def send(net, queue: int, to: str, *messages: str | list[Any]) -> None:
    net.send(transfer(queue), *[via(to, each) for each in messages])


def transact(net, completed: int, received: list[Delivery], through: int, *messages: list[Any], where: int = HERE):
    """Messages received from `completed` are completed, and these are sent through an entity, in one transaction."""
    settle = SettleOperation(completed, False, [each.token for each in received], Outcome.ACCEPTED, None)
    sends = SendOperation(transfer(through), False, [[each] for each in messages])
    results = net.partitions[where].transact(T, True, [settle, sends], net.now_ms)
    net.turn(where)
    return results


def discharge(net, commit: bool = True, where: int = HERE) -> None:
    try:
        net.partitions[where].discharge(T, commit, net.now_ms)
    finally:
        net.turn(where)


def reasons(net, queue: int) -> list[tuple[str, str]]:
    return [
        (each.body.decode(), each.properties[REASON])
        for each in net.peek(transfer_dead_letter(queue))
        if Field.DESTINATION not in each.overlay
    ]


# -- in a transaction


@pytest.mark.parametrize("home", PLACES)
def test_receiving_here_and_sending_elsewhere_is_done_in_one_commit(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.send(a, "old")
    received = net.receive(a, receive_and_delete=False)
    assert transact(net, a, received, a, via("b", "1"), via("b", "2")) == [None, None]
    net.run()
    assert (net.counts(a)[0], net.bodies(b), net.bodies(transfer(a))) == (1, [], [])
    discharge(net)
    net.run()
    assert (net.counts(a), net.bodies(b)) == ([0, 0, 0, 0, 0], ["1", "2"])
    assert net.counts(transfer(a)) == [0, 0, 0, 0, 0]


def test_rolled_back_nothing_was_sent_and_the_lock_is_kept(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    net.send(a, "old")
    received = net.receive(a, receive_and_delete=False)
    transact(net, a, received, a, via("b", "1"))
    discharge(net, commit=False)
    net.run()
    assert net.bodies(b) == []
    assert net.counts(a)[4] == 1
    assert net.stores[HERE].get(Table.META, forwarded_key(transfer(a))) is None


def test_a_lock_that_is_lost_meanwhile_sends_nothing(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    net.send(a, "old")
    received = net.receive(a, receive_and_delete=False)
    transact(net, a, received, a, via("b", "1"))
    net.wait(LOCK_MS)
    with pytest.raises(TransactionRollback):
        discharge(net)
    net.run()
    assert (net.bodies(a), net.bodies(b)) == (["old"], [])


def test_all_of_it_counts_for_the_size_of_the_entity_it_is_sent_through(net):
    a, _ = net.queue("a", HERE, max_size_mb=1), net.queue("b", THERE)
    partition = net.partitions[HERE]
    half = "x" * 600_000
    operations = [SendOperation(a, False, [[message(half)]]), SendOperation(transfer(a), False, [[via("b", half)]])]
    assert partition.transact(T, True, operations, net.now_ms) == [None, None]
    with pytest.raises(TransactionRollback, match="maximum entity size"):
        discharge(net)
    assert (net.bodies(a), net.bodies(transfer(a))) == ([], [])


def test_what_is_sent_through_a_queue_later_counts_for_its_size_until_it_has_left(net):
    a, _ = net.queue("a", HERE, max_size_mb=1), net.queue("b", THERE)
    net.send(a, "x" * 400_000)
    send(net, a, "b", "x" * 600_000)
    with pytest.raises(QuotaExceeded, match="maximum entity size"):
        net.send(a, "x" * 100_000)
    net.run()
    net.send(a, "x" * 600_000)


def test_keys_of_messages_for_others_are_those_of_others(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    sends = [[via("b", message(key, partition_key=key))] for key in "123"]
    operations = [
        SendOperation(a, False, [[message("0", partition_key="0")]]),
        SendOperation(transfer(a), False, sends),
    ]
    assert net.partitions[HERE].transact(T, True, operations, net.now_ms) == [None, None]
    discharge(net)
    net.run()
    assert (net.bodies(a), net.bodies(b)) == (["0"], ["1", "2", "3"])


# -- moving on


def test_each_destination_gets_its_own_in_order(net):
    a = net.queue("a", HERE)
    homes = {"b": HERE, "c": THERE, "d": ELSEWHERE, "e": THERE}
    queues = {name: net.queue(name, home) for name, home in homes.items()}
    for number in range(5):
        net.send(transfer(a), *[via(name, f"{name}{number}") for name in homes])
    net.run()
    for name, queue in queues.items():
        assert net.bodies(queue) == [f"{name}{number}" for number in range(5)]


def test_messages_for_several_entities_of_one_partition_go_together(net):
    a = net.queue("a", HERE)
    for name in "bc":
        net.queue(name, THERE)
    net.send(transfer(a), *[via(name, name) for name in "bcbcbc"])
    [connection] = net.connections[HERE, THERE]
    [command] = connection.commands
    assert command.entries[0::3] == [1, 2, 3, 4, 5, 6]
    net.deliver(HERE, THERE, connection)
    net.answer(HERE, connection)
    assert not connection.commands
    assert [net.bodies(net.entities[name].queue) for name in "bc"] == [["b"] * 3, ["c"] * 3]


def test_a_partition_that_does_not_answer_holds_up_nothing_for_others(net):
    a, c = net.queue("a", HERE), net.queue("c", ELSEWHERE)
    net.queue("b", THERE)
    net.send(transfer(a), via("b", "1"))
    net.lose(HERE, THERE)
    for number in range(3):
        net.send(transfer(a), via("b", "2"), via("c", str(number)))
        [connection] = net.connections[HERE, ELSEWHERE]
        net.deliver(HERE, ELSEWHERE, connection)
        net.answer(HERE, connection)
    assert net.bodies(c) == ["0", "1", "2"]
    assert net.bodies(transfer(a)) == ["1", "2", "2", "2"]


@pytest.mark.parametrize("crash", [False, True])
def test_a_backlog_for_one_partition_is_passed_over_for_another(crash):
    net = Partitions(3, PartitionSettings(window=2, forward_count=100))
    a, b, c = net.queue("a", HERE), net.queue("b", THERE), net.queue("c", ELSEWHERE)
    sent = [str(number) for number in range(3000)]
    for at in range(0, 3000, 100):
        net.send(transfer(a), *[via("b", each) for each in sent[at : at + 100]])
    if crash:
        net.crash(HERE)
        net.connections.clear()  # the command is lost, and nobody notices
    net.send(transfer(a), *[via("c", each) for each in sent[:7]])
    for _ in range(10):
        net.turn(HERE)
        for connection in net.connections.get((HERE, ELSEWHERE), []):
            while connection.commands:
                net.deliver(HERE, ELSEWHERE, connection)
                net.answer(HERE, connection)
    assert net.bodies(c) == sent[:7]
    net.lose(HERE, THERE)
    net.partitions[HERE].unreachable([THERE], net.now_ms)
    net.run()
    assert [each.body.decode() for each in net.receive(b, 5000)] == sent


def test_what_is_known_of_it_moves_along(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", "0")
    net.run()
    net.receive(b)
    net.wait(500)
    send(net, a, "B".lower(), message("1", ttl_ms=60_000))
    sent_ms = net.now_ms
    net.run()
    [found] = net.peek(b)
    assert found.number == 2
    assert found.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 2
    assert found.overlay[Field.HOPS] == 1
    assert found.overlay[Field.ENQUEUED_MS] >= sent_ms
    assert Field.DESTINATION not in found.overlay
    assert message_expires_ms(found.record) == sent_ms + 60_000


def test_it_is_the_first_of_four_hops(net):
    a = net.queue("a", HERE)
    queues = [net.queue(f"q{at}", at % 2) for at in range(5)]
    for at in range(4):
        net.queue(f"q{at}", at % 2, forward_to=f"q{at + 1}")
    send(net, a, "q0", "1")
    net.run()
    assert [net.bodies(transfer_dead_letter(queue)) for queue in queues] == [[], [], [], ["1"], []]


def test_the_time_to_live_goes_on_and_ends_at_the_destination(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE, dead_lettering_on_message_expiration=True)
    send(net, a, "b", message("1", ttl_ms=1000))
    net.lose(HERE, THERE)
    net.now_ms += 60_000
    assert net.bodies(transfer(a)) == ["1"]
    net.run()
    assert net.receive(b) == []
    net.run()
    assert net.bodies(dead_letter(b)) == ["1"]


def test_a_scheduled_message_waits_in_the_transfer_queue(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", message("1", ttl_ms=100_000, scheduled_ms=net.now_ms + 60_000), "2")
    net.run()
    assert net.bodies(b) == ["2"]
    assert net.counts(transfer(a))[:3] == [0, 0, 1]
    net.wait(60_000)
    now_ms = net.now_ms
    net.run()
    assert net.bodies(b) == ["2", "1"]
    assert net.peek(b)[1].overlay[Field.EXPIRES_MS] == now_ms + 100_000
    assert net.counts(transfer(a)) == [0, 0, 0, 0, 0]


def test_a_ping_goes_nowhere(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", message("ping", ping=True), "1")
    net.run()
    assert net.bodies(b) == ["1"]


def test_messages_sent_through_an_entity_ignore_its_own_rules(net):
    a = net.queue(
        "a", HERE, requires_session=True, requires_duplicate_detection=True, default_message_time_to_live_ms=1000
    )
    b = net.queue("b", THERE)
    net.queue("a", HERE, requires_session=True, requires_duplicate_detection=True, status="Disabled")
    send(net, a, "b", event("1", system={0: "id"}), event("2", system={0: "id"}))
    net.run()
    assert [text(each.body) for each in net.peek(b)] == ["1", "2"]


# -- at the destination it is as if it were sent there


@pytest.mark.parametrize("home", PLACES)
def test_a_topics_rules_select_it(net, home):
    a = net.queue("a", HERE)
    net.topic("news", home)
    red = net.subscription("news", "red", rules=[rule("red", "colour = 'red'", "SET seen = 1")])
    every = net.subscription("news", "every")
    send(net, a, "news", event("1", colour="red"), event("2"))
    net.run()
    assert [[text(each.body) for each in net.peek(queue)] for queue in (red, every)] == [["1"], ["1", "2"]]


@pytest.mark.parametrize("home", PLACES)
def test_duplicates_are_known_there(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home, requires_duplicate_detection=True)
    send(net, a, "b", event("1", system={0: "id"}), event("2", system={0: "id"}), event("3", system={0: "other"}))
    net.run()
    assert [text(each.body) for each in net.peek(b)] == ["1", "3"]


@pytest.mark.parametrize("home", PLACES)
def test_sessions_are_those_of_the_destination(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home, requires_session=True)
    send(net, a, "b", event("1", system={10: "s"}), event("2"))
    net.run()
    assert net.partitions[home].request(b, requests.GetMessageSessions(None, 0, 10), net.now_ms) == ["s"]
    assert net.peek(dead_letter(b)) == []
    [refused] = net.peek(transfer_dead_letter(a))
    assert (text(refused.body), refused.properties[REASON]) == ("2", SESSION_ID_IS_NULL)


# -- what is refused for good is in the transfer dead-letter queue


@pytest.mark.parametrize("home", PLACES)
def test_a_destination_that_is_disabled_or_deleted(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home, status="SendDisabled")
    c = net.queue("c", home)
    net.delete("c")
    net.send(transfer(a), via("b", "1"), via("c", "2"), via("b", "3"))
    net.queue("d", home)
    send(net, a, "d", "4")
    net.run()
    assert reasons(net, a) == [("1", "EntityDisabled"), ("2", "EntityNotFound"), ("3", "EntityDisabled")]
    first, second, _ = net.peek(transfer_dead_letter(a))
    assert "'b' is currently disabled" in first.properties[DESCRIPTION]
    assert "The entity 'c'" in second.properties[DESCRIPTION]
    assert first.overlay[Field.DEAD_LETTER_SOURCE] == "a"
    assert net.bodies(net.entities["d"].queue) == ["4"]
    assert c != b


def test_a_destination_deleted_while_messages_are_under_way(net):
    a, c = net.queue("a", HERE), net.queue("c", THERE)
    net.queue("b", THERE)
    net.send(transfer(a), via("c", "0"), via("b", "1"), via("c", "2"))
    [connection] = net.connections[HERE, THERE]
    net.partitions[THERE].delete_entity(net.entities["b"].entity_id, net.now_ms)
    net.turn(THERE)
    net.deliver(HERE, THERE, connection)
    net.answer(HERE, connection)
    assert reasons(net, a) == [("1", "EntityNotFound")]
    net.partitions[HERE].delete_entity(net.entities["b"].entity_id, net.now_ms)
    net.turn(HERE)
    for store in net.stores:
        store.delete(Table.ENTITIES, net.entities["b"].entity_id.to_bytes(4, "big"))
        store.commit()
    net.run()
    assert net.bodies(c) == ["0", "2"]


@pytest.mark.parametrize("home", PLACES)
def test_a_destination_that_is_full(net, home):
    a, b, c = net.queue("a", HERE), net.queue("b", home, max_size_mb=1), net.queue("c", home)
    big = "x" * 700_000
    net.send(transfer(a), via("b", big), via("c", "1"), via("b", "y" + big), via("c", "2"), via("b", "3"))
    net.run()
    assert ([len(each) for each in net.bodies(b)], net.bodies(c)) == ([700_000, 1], ["1", "2"])
    assert [(body[0], reason) for body, reason in reasons(net, a)] == [("y", "QuotaExceeded")]


@pytest.mark.parametrize("home", PLACES)
def test_messages_after_a_refused_one_in_the_same_turn_move_on(net, home):
    a, b, c = net.queue("a", HERE), net.queue("b", home, max_size_mb=1), net.queue("c", home)
    net.send(b, "x" * ((1 << 20) - 100))
    net.send(transfer(a), *[via(name, name) for name in "bcbc"])
    net.run()
    assert net.bodies(c) == ["c", "c"]
    assert [body for body, _ in reasons(net, a)] == ["b"], "there was room for one"


def test_a_subscription_is_no_destination(net):
    a = net.queue("a", HERE)
    net.topic("news", THERE)
    net.subscription("news", "s")
    net.entities["news/subscriptions/s"].partition = THERE
    send(net, a, "news/subscriptions/s", "1")
    net.run()
    assert reasons(net, a) == [("1", "EntityNotFound")]


def test_a_store_that_is_full_is_asked_again(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    store = net.stores[THERE]
    store._capacity_bytes = store.used_bytes()
    send(net, a, "b", "1", "2")
    for _ in range(3):
        [connection] = net.connections[HERE, THERE]
        net.deliver(HERE, THERE, connection)
        net.answer(HERE, connection)
        net.wait(1000)
    store._capacity_bytes = 1 << 40
    net.run()
    assert net.bodies(b) == ["1", "2"]


def test_two_that_wait_are_each_asked_again_in_time(net):
    a, b, c = net.queue("a", HERE), net.queue("b", THERE), net.queue("c", ELSEWHERE)
    net.send(transfer(a), via("b", "1"), via("c", "2"))
    for _ in range(3):
        net.lose(HERE, ELSEWHERE)
        net.wait(1000)
    net.lose(HERE, THERE)
    net.lose(HERE, ELSEWHERE)
    net.run()
    assert (net.bodies(transfer(a)), net.bodies(b), net.bodies(c)) == ([], ["1"], ["2"])


# -- exactly once


@pytest.mark.parametrize("crashed", PLACES)
@pytest.mark.parametrize("delivered", [False, True])
def test_a_crash_of_either_side_doubles_and_loses_nothing(net, crashed, delivered):
    a, b, c = net.queue("a", HERE), net.queue("b", THERE), net.queue("c", ELSEWHERE)
    net.send(transfer(a), via("b", "1"), via("c", "x"), via("b", "2"))
    if delivered:
        net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.crash(crashed)
    send(net, a, "b", "3")
    net.run()
    assert (net.bodies(transfer(a)), net.bodies(b), net.bodies(c)) == ([], ["1", "2", "3"], ["x"])


def test_messages_taken_over_before_a_crash_are_not_sent_to_another_entity(net):
    """The destination is gone when the source starts again: what it had taken is not given up."""
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", "1")
    net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.crash(HERE)
    assert net.bodies(b) == ["1"]
    send(net, a, "b", "2")
    net.queue("b", THERE, status="SendDisabled")
    net.run()
    assert net.bodies(b) == ["1"]
    assert reasons(net, a) == [("2", "EntityDisabled")]


def test_an_answer_that_is_lost_doubles_nothing(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", "1", "2")
    net.deliver(HERE, THERE, net.connections[HERE, THERE][0])
    net.lose(HERE, THERE)
    send(net, a, "b", "3")
    net.run()
    assert (net.bodies(transfer(a)), net.bodies(b)) == ([], ["1", "2", "3"])


def test_within_a_partition_it_is_there_after_a_crash_that_came_before_it_moved(net):
    a, b = net.queue("a", HERE), net.queue("b", HERE)
    net.partitions[HERE].send(transfer(a), [via("b", "1")], net.now_ms)
    net.partitions[HERE].commit()
    net.crash(HERE)
    assert (net.bodies(transfer(a)), net.bodies(b)) == ([], ["1"])


# -- entities of every kind


def test_a_topic_and_a_subscription_can_be_sent_through_and_it_counts_for_the_topic(net):
    topic = net.topic("news", HERE, max_size_mb=1)
    subscription = net.subscription("news", "s")
    b = net.queue("b", THERE)
    big = "x" * 400_000
    for queue in (topic, subscription):
        send(net, queue, "b", big)
    with pytest.raises(QuotaExceeded, match="maximum entity size has been reached or exceeded for 'news'"):
        send(net, subscription, "b", big)
    assert net.counts(topic)[3] == net.counts(transfer(subscription))[3] + COPY_BYTES
    for store in net.stores:
        assert problems(store) == []
    net.run()
    assert len(net.bodies(b)) == 2
    assert net.counts(topic)[3] == 0
    send(net, subscription, "gone", "1")
    assert [queue for queue in (topic, subscription) if reasons(net, queue)] == [subscription]


@pytest.mark.parametrize("home", PLACES)
def test_through_a_dead_letter_queues_entity_messages_go_back_where_they_came_from(net, home):
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.send(a, "bad")
    [received] = net.receive(a, receive_and_delete=False)
    net.partitions[HERE].settle(a, [received.token], Outcome.DEAD_LETTERED, None, net.now_ms)
    net.turn(HERE)
    received = net.receive(dead_letter(a), receive_and_delete=False)
    transact(net, dead_letter(a), received, a, via("b", "good"))
    discharge(net)
    net.run()
    assert (net.bodies(dead_letter(a)), net.bodies(b)) == ([], ["good"])


def test_nobody_receives_from_a_transfer_queue_or_touches_what_is_in_it(net):
    a = net.queue("a", HERE)
    net.queue("b", THERE)
    send(net, a, "b", "1")
    with pytest.raises(EntityNotFound):
        net.receive(transfer(a))
    asked = (requests.Purge(), requests.ReceiveDeferred([1], False), requests.DeleteBatch(1, net.now_ms))
    for each in asked:
        with pytest.raises(NotAllowed):
            net.partitions[HERE].request(transfer(a), each, net.now_ms)
    assert net.counts(transfer(a))[::4] == [1, 1]


def test_an_entity_that_is_deleted_takes_along_what_waits_in_it(net):
    a, b = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", "1")
    net.delete("a")
    net.run()
    assert net.bodies(b) == []
    assert net.stores[HERE].get(Table.META, forwarded_key(transfer(a))) is None
    assert net.stores[HERE].get(Table.COUNTS, transfer(a).to_bytes(4, "big")) is None


@pytest.mark.parametrize("table", [Table.QUEUE, Table.MESSAGES])
@pytest.mark.parametrize("home", PLACES)
def test_unreadable_messages_are_quarantined_and_the_others_move_on(table, home):
    net = Partitions(2)
    a, b = net.queue("a", HERE), net.queue("b", home)
    net.partitions[HERE].send(transfer(a), [via("b", "1"), via("b", "2")], net.now_ms)
    net.partitions[HERE].commit()
    key = queue_key(transfer(a), 0, 1) if table is Table.QUEUE else message_key(1)
    net.stores[HERE].put(table, key, b"nonsense")
    net.stores[HERE].commit()
    net.crash(HERE)
    net.run()
    assert net.bodies(b) == ["2"]
    assert net.counts(transfer(a))[0] == 0


def test_moved_messages_are_counted_as_forwarded(net):
    a, _ = net.queue("a", HERE), net.queue("b", THERE)
    send(net, a, "b", "1", "2")
    send(net, a, "gone", "3")
    net.run()
    gauges = net.partitions[HERE].gauges()
    assert (gauges["forwarded"], gauges["dead_lettered"]) == (2, 1)
