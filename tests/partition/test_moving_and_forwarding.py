"""Entities that forward, and those that messages are forwarded to, are moved: each message arrives once, in order."""

from collections.abc import Iterator

import pytest

from broker.errors import ServerBusy
from tests.partition.accounts import problems
from tests.partition.forwarding_driver import Partitions, transfer, via

HERE, THERE, ELSEWHERE = 0, 1, 2
BODIES = [f"m{number}" for number in range(8)]


@pytest.fixture
def net() -> Iterator[Partitions]:
    net = Partitions(3)
    yield net
    net.run()
    for store in net.stores:
        assert problems(store) == []


def deliver_first(net: Partitions, source: int, destination: int) -> None:
    """The command is taken over, and its answer stays on the way."""
    net.deliver(source, destination, net.connections[source, destination][-1])


@pytest.mark.parametrize("to", [HERE, ELSEWHERE])
@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("crashes", [False, True])
def test_the_destination_moves(net: Partitions, to: int, taken_over: bool, crashes: bool) -> None:
    target = net.queue("target", THERE)
    source = net.queue("source", HERE, forward_to="target")
    net.send(source, *BODIES[:2])
    net.run()
    net.begin_move("target", to)
    net.send(source, *BODIES[2:4])
    if taken_over:
        deliver_first(net, HERE, THERE)
    net.freeze("target")
    net.send(source, *BODIES[4:6])
    if crashes:
        net.crash(HERE)
    net.finish_move("target", to, first=HERE)
    net.send(source, *BODIES[6:])
    net.run()
    assert net.bodies(target) == BODIES
    assert net.counts(source)[0] == 0


@pytest.mark.parametrize("to", [HERE, ELSEWHERE])
@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("crashes", [False, True])
def test_the_destination_of_what_is_sent_through_another_entity_moves(
    net: Partitions, to: int, taken_over: bool, crashes: bool
) -> None:
    target, other = net.queue("target", THERE), net.queue("other", THERE)
    through = net.queue("through", HERE)
    net.begin_move("target", to)
    net.send(transfer(through), *[via("target", each) for each in BODIES[:3]], via("other", "other"))
    if taken_over:
        deliver_first(net, HERE, THERE)
    net.freeze("target")
    if crashes:
        net.crash(HERE)
    net.send(transfer(through), *[via("target", each) for each in BODIES[3:6]])
    net.finish_move("target", to)
    net.run()
    net.send(transfer(through), *[via("target", each) for each in BODIES[6:]])
    net.run()
    assert net.bodies(target) == BODIES
    assert net.bodies(other) == ["other"]
    assert net.counts(transfer(through))[0] == 0


@pytest.mark.parametrize("to", [THERE, ELSEWHERE])
def test_an_entity_that_forwards_moves_when_what_it_has_sent_is_answered(net: Partitions, to: int) -> None:
    target = net.queue("target", THERE)
    source = net.queue("source", HERE, forward_to="target")
    through = net.queue("through", HERE)
    net.send(source, *BODIES[:2])
    net.send(transfer(through), via("target", "v0"))
    for name in ("source", "through"):
        net.begin_move(name, to)
        with pytest.raises(ServerBusy):
            net.freeze(name)
    net.send(source, *BODIES[2:4])  # they wait, because it is quiet
    net.send(transfer(through), via("target", "v1"))
    for connection in net.connections[HERE, THERE]:
        while connection.commands:
            net.deliver(HERE, THERE, connection)
        while connection.answers:
            net.answer(HERE, connection)
    for name in ("source", "through"):
        net.freeze(name)
        net.finish_move(name, to)
    net.send(source, *BODIES[4:])
    net.send(transfer(through), via("target", "v2"))
    net.run()
    found = net.bodies(target)
    assert [each for each in found if each[0] == "m"] == BODIES
    assert [each for each in found if each[0] == "v"] == ["v0", "v1", "v2"]


def test_moving_there_and_back_keeps_the_marks_of_what_it_forwards(net: Partitions) -> None:
    target = net.queue("target", HERE)
    source = net.queue("source", HERE, forward_to="target")
    for number, to in enumerate([THERE, HERE, ELSEWHERE, HERE, THERE]):
        net.begin_move("source", to)
        net.freeze("source")
        net.finish_move("source", to)
        net.send(source, BODIES[number])
        net.wait(0)
        if to != HERE:
            connection = net.connections[to, HERE][-1]
            while not connection.commands[0].entries:  # it asks for the mark
                net.deliver(to, HERE, connection)
                net.answer(to, connection)
            net.deliver(to, HERE, connection)
            net.lose(to, HERE)  # it never hears that the message was taken over
        net.run()
    assert net.bodies(target) == BODIES[:5]


def test_a_topic_that_moves_publishes_what_waited(net: Partitions) -> None:
    target = net.queue("target", THERE)
    topic = net.topic("news", HERE)
    kept, moving = net.subscription("news", "kept"), net.subscription("news", "moving", forward_to="target")
    net.send(topic, *BODIES[:4])
    net.run()
    net.begin_move("news", ELSEWHERE)
    net.send(topic, *BODIES[4:6])
    net.run()
    net.freeze("news")
    net.finish_move("news", ELSEWHERE)
    net.send(topic, *BODIES[6:])
    net.run()
    assert net.bodies(kept) == BODIES
    assert net.bodies(target) == BODIES
    assert net.counts(moving)[0] == 0
