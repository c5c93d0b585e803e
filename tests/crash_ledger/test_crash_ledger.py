"""What was accepted is never lost and what was settled never comes back, whatever is killed under load."""

import time

import pytest

from tests.brokers import KEY, KEY_NAME, Broker
from tests.crash_ledger import bodies
from tests.crash_ledger.ledger import Breach, Ledger, Outcome
from tests.crash_ledger.links import Login, Receiver, Sender
from tests.crash_ledger.load import Load, Mix
from tests.crash_ledger.run import CONFIG, QUEUE, Victim, kill, run
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("workers", "victims"),
    [
        (1, (Victim.ALL, Victim.CHECKPOINTER, Victim.WORKER, Victim.GATEWAY)),
        (0, (Victim.ALL, Victim.CHECKPOINTER, Victim.ONE_PROCESS, Victim.ONE_PROCESS)),
    ],
)
def test_nothing_accepted_is_lost_and_nothing_settled_returns_over_kills(tmp_path, workers, victims):
    report = run(tmp_path, 4, seed=3, victims=victims, longest_gap_s=0.5, workers=workers)
    assert report.sound, str(report)
    assert report.summary.accepted > 500
    assert report.summary.completed > 500
    assert report.summary.dead_lettered > 0
    assert report.others.chains.committed > 20
    assert report.others.order.completed_count > 100
    assert len(report.others.ids.completed) > 100


def test_on_partitioned_queues_nothing_is_lost_nothing_returns_and_keys_keep_their_order(tmp_path):
    victims = (Victim.WORKER, Victim.PAUSED_WORKER, Victim.GATEWAY, Victim.PAUSED_GATEWAY)
    report = run(tmp_path, 4, seed=3, victims=victims, longest_gap_s=0.5, workers=2, partitioned=True)
    assert report.sound, str(report)
    assert report.summary.accepted > 500
    assert report.summary.completed > 500
    assert report.others.chains.committed > 20
    assert report.others.order.completed_count > 100
    assert len(report.others.ids.completed) > 100
    assert report.others.copies.completed_count > 500


def test_a_message_taken_behind_the_ledgers_back_is_reported_lost_and_one_put_back_as_resurrected(tmp_path):
    """The whole tool, with one message lost and one resurrected by another client in the broker's place."""
    with Broker(tmp_path, CONFIG) as broker:
        login = Login(broker.amqp_port, KEY_NAME, KEY)
        ledger = Ledger()
        load = Load(login, QUEUE, ledger, Mix(senders=1, receivers=0), seed=1)
        load.run(PATIENCE_S, until=lambda: load.accepted >= 10)
        load.sending = False
        load.run(0.3)  # answers to what is on its way
        stolen = steal_one(login)
        load.add_receiver()
        load.run(PATIENCE_S, until=lambda: load.gone >= load.accepted - 1)
        returned = next(key for key in ((0, number) for number in range(10)) if key != stolen)
        put_back(login, returned)
        load.drain()
    summary = ledger.close()
    assert {(violation.breach, violation.key) for violation in summary.violations} == {
        (Breach.LOST, stolen),
        (Breach.RESURRECTED, returned),
    }


def steal_one(login: Login) -> tuple[int, int]:
    """Complete the first message of the queue."""
    taken: list[tuple[int, int]] = []
    settled: list[bool] = []

    def delivered(receiver, delivery, body):
        key, _ = bodies.read(body)
        taken.append(key)
        receiver.window = 0
        receiver.settle(delivery, key, Outcome.COMPLETE)

    receiver = Receiver(login, "thief", QUEUE, 1, delivered, lambda key, outcome, applied: settled.append(applied))
    exchange(receiver, lambda: bool(settled))
    receiver.close()
    assert settled == [True]
    return taken[0]


def put_back(login: Login, key: tuple[int, int]) -> None:
    answers: list[bool] = []
    sender = Sender(login, "forger", QUEUE, lambda key, accepted: answers.append(accepted))
    exchange(sender, lambda: sender.credit > 0)
    sender.send(key, bodies.make(key, time.monotonic_ns()))
    exchange(sender, lambda: bool(answers))
    sender.close()
    assert answers == [True]


def exchange(peer, until) -> None:
    end = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < end, "no answer"
        peer.write()
        peer.read()
        time.sleep(0.001)
    peer.write()


def test_a_message_sent_while_the_worker_is_down_is_refused_without_waiting_for_other_traffic(tmp_path):
    """One send, then silence from this side: the answer must come by itself."""
    answers: list[bool] = []
    with Broker(tmp_path, CONFIG, workers=1) as broker:
        login = Login(broker.amqp_port, KEY_NAME, KEY)
        sender = Sender(login, "sender", QUEUE, lambda key, accepted: answers.append(accepted))
        exchange(sender, lambda: sender.credit > 0)
        supervisor = broker.processes()[0]
        supervisor.suspend()  # it would start the worker again
        try:
            kill(broker, Victim.WORKER)
            time.sleep(0.2)  # the gateway has noticed
            sender.send((0, 0), bodies.make((0, 0), 0))
            exchange(sender, lambda: bool(answers))
        finally:
            supervisor.resume()
            sender.close()
    assert answers == [False]
