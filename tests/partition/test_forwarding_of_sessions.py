"""An entity with sessions forwards as any other: each message once, in the order of its session."""

import random

import pytest

from broker.partition.settings import PartitionSettings
from storage.records import Field
from tests.partition.accounts import problems
from tests.partition.forwarding_driver import Partitions, transfer_dead_letter
from tests.partition.topic_driver import event, text

HERE, THERE = 0, 1
PLACES = [HERE, THERE]
GROUP_ID = 10
SMALL = PartitionSettings(window=4, session_window=4, step=3, forward_count=3, turn_work=40)


@pytest.fixture(params=[PartitionSettings(), SMALL], ids=["usual", "small"])
def net(request):
    net = Partitions(2, request.param)
    yield net
    for store in net.stores:
        assert problems(store) == []
    for partition in net.partitions:
        for queue in partition._core.queues.values():
            queue.check()


def in_session(body, session):
    return event(body, system={GROUP_ID: session})


def told(deliveries) -> dict[str, list[str]]:
    """The bodies by session, as their overlays tell."""
    found: dict[str, list[str]] = {}
    for each in deliveries:
        found.setdefault(each.overlay[Field.SESSION], []).append(text(each.body))
    return found


@pytest.mark.parametrize("home", PLACES)
@pytest.mark.parametrize("has_sessions", [False, True])
def test_messages_move_on_in_the_order_of_their_sessions(net, home, has_sessions):
    b = net.queue("b", home, requires_session=has_sessions)
    a = net.queue("a", HERE, requires_session=True, forward_to="b")
    for at in range(20):
        net.send(a, in_session(str(at), f"s{at % 3}"))
    net.run()
    assert net.counts(a) == [0, 0, 0, 0, 0]
    if has_sessions:
        assert told(net.peek(b)) == {f"s{at}": [str(n) for n in range(at, 20, 3)] for at in range(3)}
    else:
        assert [text(each.body) for each in net.peek(b)] == [str(at) for at in range(20)]
        assert all(Field.SESSION not in each.overlay for each in net.peek(b))


@pytest.mark.parametrize("home", PLACES)
def test_a_subscription_with_sessions_forwards_its_copies(net, home):
    b = net.queue("b", home, requires_session=True)
    news = net.topic("news", HERE)
    net.subscription("news", "s", requires_session=True, forward_to="b")
    net.send(news, in_session("1", "x"), in_session("2", "y"), in_session("3", "x"))
    net.run()
    assert told(net.peek(b)) == {"x": ["1", "3"], "y": ["2"]}


def test_from_fragments_to_fragments_each_session_keeps_its_order(net):
    both = (HERE, THERE)
    b = net.fragments("b", both, enable_partitioning=True, requires_session=True)
    a = net.fragments("a", both, enable_partitioning=True, requires_session=True, forward_to="b")
    for at in range(24):
        place = at % 2
        net.send(a, in_session(str(at), f"s{at % 4}"), at=place)
    net.run()
    found: dict[str, list[str]] = {}
    for place in both:
        for session, bodies in told(net.peek(b, at=place)).items():
            assert session not in found, "a session is on one fragment"
            found[session] = bodies
    assert found == {f"s{at}": [str(n) for n in range(at, 24, 4)] for at in range(4)}


@pytest.mark.parametrize("home", PLACES)
def test_what_lies_in_the_queue_and_under_lock_goes_when_forwarding_begins(net, home):
    b = net.queue("b", home, requires_session=True)
    a = net.queue("a", HERE, requires_session=True)
    net.send(a, *(in_session(str(at), f"s{at % 2}") for at in range(10)))
    partition = net.partitions[HERE]
    partition.open_receiver("r", a, False, net.now_ms, ["s0", 1000])
    net.turn(HERE)
    partition.drain("r", 3)
    assert len(net.turn(HERE)["r"]) == 3
    net.queue("a", HERE, requires_session=True, forward_to="b")
    net.run()
    assert told(net.peek(b)) == {"s0": ["0", "2", "4", "6", "8"], "s1": ["1", "3", "5", "7", "9"]}
    assert net.counts(a)[:3] == [0, 0, 0]


@pytest.mark.parametrize("home", PLACES)
def test_messages_whose_lock_ends_step_by_step_go_once(home):
    net = Partitions(2, PartitionSettings(step=2, turn_work=8, window=4, session_window=4))
    b = net.queue("b", home, requires_session=True)
    a = net.queue("a", HERE, requires_session=True)
    for at in range(30):
        net.send(a, in_session(str(at), "s"))
    partition = net.partitions[HERE]
    partition.open_receiver("r", a, False, net.now_ms, ["s", 1000])
    net.turn(HERE)
    partition.drain("r", 20)
    locked = 0
    while locked < 20:
        locked += len(net.turn(HERE).get("r", ()))
    net.queue("a", HERE, requires_session=True, forward_to="b")
    net.run()
    assert told(net.peek(b)) == {"s": [str(at) for at in range(30)]}
    assert net.counts(a)[:3] == [0, 0, 0]


@pytest.mark.parametrize("is_answered", [False, True])
def test_when_forwarding_ends_what_is_left_is_received_by_session(net, is_answered):
    b = net.queue("b", THERE, requires_session=True)
    a = net.queue("a", HERE, requires_session=True, forward_to="b")
    net.send(a, *(in_session(str(at), "s") for at in range(3)))  # on its way to the other partition
    net.send(a, *(in_session(str(at), "s") for at in range(3, 8)))
    net.queue("a", HERE, requires_session=True)
    before = [text(each.body) for each in net.receive_session(a, 2)]
    if not is_answered:
        net.lose(HERE, THERE)
    net.run()
    after = [text(each.body) for each in net.receive_session(a, 20)]
    there = [text(each.body) for each in net.peek(b)]
    assert sorted([*before, *after, *there], key=int) == [str(at) for at in range(8)], "each is in one place, once"
    assert after == sorted(after, key=int)
    assert there == sorted(there, key=int)


def test_after_a_restart_nothing_is_received_before_it_is_known_what_was_taken(net):
    b = net.queue("b", THERE, requires_session=True)
    a = net.queue("a", HERE, requires_session=True, forward_to="b")
    net.send(a, *(in_session(str(at), "s") for at in range(3)))
    [connection] = net.connections[HERE, THERE]
    net.deliver(HERE, THERE, connection)  # taken over, and the answer is lost
    net.queue("a", HERE, requires_session=True)
    net.crash(HERE)
    assert net.receive_session(a, 5) == []
    net.run()
    there = [text(each.body) for each in net.peek(b)]
    after = [text(each.body) for each in net.receive_session(a, 5)]
    assert sorted([*there, *after]) == ["0", "1", "2"]


def test_to_itself_it_ends_by_the_limit_of_hops(net):
    net.queue("a", HERE, requires_session=True)
    a = net.queue("a", HERE, requires_session=True, forward_to="a")
    net.send(a, in_session("1", "x"), in_session("2", "y"))
    net.run()
    assert [text(each.body) for each in net.peek(transfer_dead_letter(a))] == ["1", "2"]
    assert net.counts(a)[:3] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_message_is_in_one_place_once(seed):
    """Sends, receivers, crashes, lost connections, forwarding on and off in any order."""
    choose = random.Random(seed)
    net = Partitions(2, choose.choice([PartitionSettings(), SMALL]))
    home = choose.choice(PLACES)
    b = net.queue("b", home, requires_session=True)
    a = net.queue("a", HERE, requires_session=True)
    sent: list[str] = []
    received: list[str] = []
    is_on = False
    for _ in range(60):
        match choose.randrange(8):
            case 0 | 1 | 2:
                some = [str(len(sent) + at) for at in range(choose.randrange(1, 6))]
                sent += some
                net.send(a, *(in_session(body, f"s{choose.randrange(3)}") for body in some))
            case 3:
                is_on = not is_on
                net.queue("a", HERE, requires_session=True, **({"forward_to": "b"} if is_on else {}))
            case 4 if not is_on:
                received += [text(each.body) for each in net.receive_session(a, choose.randrange(1, 4))]
            case 5 if home == THERE:
                net.lose(HERE, THERE)
            case 6:
                net.crash(choose.choice(PLACES))
            case 7:
                net.run()
        for partition in net.partitions:
            for queue in partition._core.queues.values():
                queue.check()
    net.queue("a", HERE, requires_session=True, forward_to="b")
    net.run()
    assert net.counts(a)[:3] == [0, 0, 0]
    there = [text(each.body) for each in net.peek(b)]
    assert sorted([*received, *there], key=int) == sent
    for store in net.stores:
        assert problems(store) == []
