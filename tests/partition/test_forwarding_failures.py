"""With `forwarding.failures = "dead_letter"`, what can never be forwarded is in the dead-letter queue of its source."""

import pytest

from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import Field
from tests.partition.driver import message
from tests.partition.forwarding_driver import Partitions, dead_letter, transfer, transfer_dead_letter, via
from tests.partition.test_forwarding import DESCRIPTION, HERE, PLACES, REASON, THERE, chain
from tests.partition.test_forwarding_to_fragments import made
from tests.partition.topic_driver import event, text

SETTINGS = PartitionSettings(dead_letter_unforwarded=True)


@pytest.fixture
def net() -> Partitions:
    return Partitions(2, SETTINGS)


def assert_dead_lettered(net, queue, source, reason, said, *bodies):
    found = net.peek(dead_letter(queue))
    assert [text(each.body) for each in found] == [*bodies]
    for each in found:
        assert each.properties[REASON] == reason
        assert said in each.properties[DESCRIPTION]
        assert each.overlay[Field.DEAD_LETTER_SOURCE] == source
    assert net.counts(dead_letter(queue))[0] == len(bodies)
    assert net.counts(transfer_dead_letter(queue))[0] == net.counts(queue)[0] == 0


@pytest.mark.parametrize("home", PLACES)
def test_to_a_disabled_entity(net, home):
    a, _ = chain(net, HERE, home)
    net.queue("q1", home, status="Disabled")
    net.send(a, event("1", ttl_ms=1_000_000), event("2"))
    net.run()
    assert_dead_lettered(net, a, "q0", "EntityDisabled", "'q1' is currently disabled", "1", "2")


@pytest.mark.parametrize("home", PLACES)
def test_to_an_entity_that_was_deleted(net, home):
    a, _ = chain(net, HERE, home)
    net.delete("q1")
    net.send(a, event("1"))
    net.run()
    assert_dead_lettered(net, a, "q0", "EntityNotFound", "could not be found", "1")


@pytest.mark.parametrize("home", PLACES)
def test_to_a_full_entity(net, home):
    a = net.queue("a", HERE, max_size_mb=50)
    b = net.queue("b", home, max_size_mb=1)
    net.send(b, message(bytes(1_000_000)))
    net.queue("a", HERE, forward_to="b")
    net.send(a, event("x" * 100_000))
    net.run()
    [found] = net.peek(dead_letter(a))
    assert found.properties[REASON] == "QuotaExceeded"


@pytest.mark.parametrize("homes", [[HERE] * 6, [HERE, THERE] * 3])
def test_after_four_hops_it_is_in_the_dead_letter_queue_of_the_fifth(net, homes):
    queues = chain(net, *homes)
    net.send(queues[0], event("1"))
    net.run()
    said = "The maximum number of allowed hops when forwarding between queues"
    assert_dead_lettered(net, queues[4], "q4", "MaxTransferHopCountExceeded", said, "1")


def test_of_a_subscription(net):
    net.queue("q", THERE, status="Disabled")
    topic = net.topic("t", HERE)
    moves = net.subscription("t", "moves", forward_to="q")
    net.send(topic, event("1"))
    net.run()
    assert_dead_lettered(net, moves, "t/Subscriptions/moves", "EntityDisabled", "disabled", "1")


def test_on_its_way_to_a_fragment():
    net = Partitions(3, SETTINGS)
    net.fragments("there", (0, 1, 2), status="SendDisabled")
    a = net.queue("a", 0, forward_to="there")
    net.send(a, *[made(str(number), f"s{number}") for number in range(9)])
    net.run()
    assert sorted(text(each.body) for each in net.peek(dead_letter(a))) == [*map(str, range(9))]
    assert {each.properties[REASON] for each in net.peek(dead_letter(a))} == {"EntityDisabled"}
    assert net.counts(transfer_dead_letter(a))[0] == net.counts(transfer(a))[0] == 0


@pytest.mark.parametrize("home", PLACES)
def test_what_is_sent_through_an_entity_is_in_its_transfer_dead_letter_queue(net, home):
    a = net.queue("a", HERE)
    net.queue("b", home, status="SendDisabled")
    net.send(transfer(a), via("b", "1"))
    net.run()
    assert net.bodies(transfer_dead_letter(a)) == ["1"]
    assert net.counts(dead_letter(a))[0] == 0


@pytest.mark.parametrize("home", PLACES)
def test_dead_letters_that_cannot_move_on_are_in_the_transfer_dead_letter_queue(net, home):
    net.queue("b", home, status="Disabled")
    a = net.queue("a", HERE, forward_dead_lettered_messages_to="b")
    net.send(a, "1")
    [received] = net.receive(a, receive_and_delete=False)
    net.partitions[HERE].settle(a, [received.token], Outcome.DEAD_LETTERED, None, net.now_ms)
    net.turn(HERE)
    net.run()
    assert net.bodies(transfer_dead_letter(a)) == ["1"]
    assert net.bodies(dead_letter(a)) == []


def test_dead_letters_that_are_forwarded_back_end_after_four_hops(net):
    net.queue("b", HERE, status="Disabled")
    a = net.queue("a", HERE, forward_to="b", forward_dead_lettered_messages_to="a2")
    net.queue("a2", HERE, forward_to="a")
    net.send(a, "1")
    net.run()
    everywhere = [queue for name in ("a", "a2") for queue in (net.entities[name].queue,)]
    found = [part for queue in everywhere for part in (dead_letter(queue), transfer_dead_letter(queue))]
    assert sum(net.counts(queue)[0] for queue in (*everywhere, *found)) == 1


def test_what_was_in_the_transfer_dead_letter_queue_before_stays_there():
    net = Partitions(1)
    a, _ = chain(net, HERE, HERE)
    net.queue("q1", HERE, status="Disabled")
    net.send(a, event("1"))
    net.run()
    net.settings = SETTINGS
    net.crash(HERE)
    net.send(a, event("2"))
    net.run()
    assert [text(each.body) for each in net.peek(transfer_dead_letter(a))] == ["1"]
    assert [text(each.body) for each in net.peek(dead_letter(a))] == ["2"]
