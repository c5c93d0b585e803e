"""Commands on messages in some states, and on sessions."""

import json
import time

import pytest
from proton import Delivery, Message, symbol, timestamp
from proton.utils import BlockingConnection
from typer.testing import CliRunner

from broker.cli.all_commands import app
from broker.cli.target import CONNECTION_STRING_VARIABLE
from tests.brokers import KEY, KEY_NAME, Broker

CONFIG = (
    'partitions = 2\n[[queues]]\nname = "plain"\n[[queues]]\nname = "spread"\nenable_partitioning = true\n'
    '[[queues]]\nname = "talks"\nrequires_session = true\n'
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), CONFIG) as running:
        yield running


@pytest.fixture
def peeklock(broker, monkeypatch):
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, broker.connection_string)
    return lambda *arguments, **options: CliRunner().invoke(app, [str(each) for each in arguments], **options)


@pytest.fixture
def connection(broker):
    connection = BlockingConnection(
        f"amqp://localhost:{broker.amqp_port}", timeout=20, user=KEY_NAME, password=KEY, allowed_mechs="PLAIN"
    )
    yield connection
    connection.close()


def states(peeklock, queue, *options):
    result = peeklock("peek", queue, "--count", 50, *options)
    assert result.exit_code == 0, result.stderr
    found = [json.loads(line)["state"] for line in result.stdout.splitlines()]
    return {state: found.count(state) for state in found}


@pytest.mark.parametrize("queue", ["plain", "spread"])
def test_messages_are_browsed_and_purged_by_state(peeklock, connection, queue):
    sender, receiver = connection.create_sender(queue), connection.create_receiver(queue, credit=2)
    for number in range(2):
        sender.send(Message(body=f"deferred {number}"))
    for _ in range(2):
        receiver.receive(timeout=20)
        delivery = receiver.fetcher.unsettled[0]
        delivery.local.undeliverable = True
        receiver.settle(Delivery.MODIFIED)
    receiver.close()
    later = {symbol("x-opt-scheduled-enqueue-time"): timestamp(int(time.time() * 1000) + 3_600_000)}
    for number in range(3):
        sender.send(Message(body=f"scheduled {number}", annotations=later))
    for number in range(4):
        sender.send(Message(body=f"active {number}"))

    assert states(peeklock, queue) == {"deferred": 2, "scheduled": 3, "active": 4}
    assert states(peeklock, queue, "--state", "scheduled") == {"scheduled": 3}
    assert states(peeklock, queue, "--state", "active", "--state", "deferred") == {"deferred": 2, "active": 4}
    assert len(peeklock("peek", queue, "--state", "active", "--count", 3).stdout.splitlines()) == 3

    asked = peeklock("purge", queue, "--state", "scheduled", input="n\n")
    assert asked.exit_code == 1
    assert f"Delete all scheduled messages of {queue}?" in asked.stderr
    purged = peeklock("purge", queue, "--state", "scheduled", "--yes", "--json")
    assert json.loads(purged.stdout)["deleted"] == 3
    assert states(peeklock, queue) == {"deferred": 2, "active": 4}
    assert peeklock("purge", queue, "--state", "deferred", "--yes").stdout == f"2 messages deleted from {queue}\n"
    assert states(peeklock, queue) == {"active": 4}
    assert peeklock("purge", queue, "--yes").stdout == f"4 messages deleted from {queue}\n"
    assert peeklock("purge", queue, "--state", "lost", "--yes").exit_code == 2


def test_sessions_are_listed_and_counted(peeklock, connection):
    result = peeklock("sessions", "talks")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "0 sessions in talks\n")
    sender = connection.create_sender("talks")
    names = [f"talk {number:03}" for number in range(250)]
    for name in names:
        sender.send(Message(body="x", group_id=name))
    result = peeklock("sessions", "talks")
    assert sorted(result.stdout.splitlines()) == names
    assert result.stderr == "250 sessions in talks\n"
    assert sorted(json.loads(peeklock("sessions", "talks", "--json").stdout)) == names
    assert peeklock("sessions", "plain").exit_code == 1
