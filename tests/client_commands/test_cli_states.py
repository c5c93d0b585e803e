"""Commands on messages in some states, and on sessions."""

import asyncio
import json
import time
from typing import Any
from uuid import UUID

import pytest
from proton import Delivery, Message, symbol, timestamp
from proton.utils import BlockingConnection

from protocol.client.connection import connect_to
from protocol.client.errors import RequestFailed
from protocol.client.messages import Message as ClientMessage
from protocol.codec import Long, UInt, array
from tests.brokers import KEY, KEY_NAME
from tests.patience import PATIENCE_S


@pytest.fixture
def connection(broker):
    connection = BlockingConnection(
        f"amqp://localhost:{broker.amqp_port}", timeout=PATIENCE_S, user=KEY_NAME, password=KEY, allowed_mechs="PLAIN"
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
        receiver.receive(timeout=PATIENCE_S)
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


@pytest.mark.parametrize("queue", ["later", "later-spread"])
def test_messages_are_given_back_with_a_delay(peeklock, connection, queue):
    sender = connection.create_sender(queue)
    for number in range(3):
        sender.send(Message(body=f"{number}"))
    kept = peeklock("receive", queue, "--keep", "--delay", "3s", "--count", 3)
    assert (kept.exit_code, len(kept.stdout.splitlines())) == (0, 3), kept.stderr
    assert states(peeklock, queue) == {"scheduled": 3}
    again = peeklock("receive", queue, "--wait", 10, "--count", 3)
    shown = [json.loads(line) for line in again.stdout.splitlines()]
    assert {each["delivery_count"] for each in shown} == {1}
    assert all("properties" not in each for each in shown)
    assert peeklock("receive", queue, "--delay", "3s").exit_code == 2
    for wrong in ("never", "8d", "-1s", "x"):
        assert peeklock("receive", queue, "--keep", "--delay", wrong).exit_code == 2
    peeklock("purge", queue, "--yes")


def test_a_delay_that_is_none_is_refused_on_a_link(peeklock, connection):
    sender, receiver = connection.create_sender("refused"), connection.create_receiver("refused", credit=10)
    delays = [2**63 - 1, float("nan"), "3000", [3000], {"ms": 3000}]
    for locked, delay in enumerate(delays, 1):
        sender.send(Message(body="x"))
        receiver.receive(timeout=PATIENCE_S)
        delivery = receiver.fetcher.unsettled[-1]
        delivery.local.annotations = {symbol("peeklock:delay-ms"): delay}
        delivery.update(Delivery.MODIFIED)
        connection.wait(lambda delivery=delivery: delivery.settled)
        assert delivery.remote_state == Delivery.REJECTED
        problem = "is 9223372036854775807; it is 0 to 604800000 milliseconds" if locked == 1 else "is no whole number"
        assert f"'peeklock:delay-ms' {problem}" in delivery.remote.condition.description
        counts = {each["name"]: each for each in json.loads(peeklock("queues", "--json").stdout)}
        assert counts["refused"]["locked"] == locked


@pytest.mark.parametrize("queue", ["named", "named-spread"])
def test_active_messages_are_received_by_their_numbers_where_that_is_the_default(broker, queue):
    """By a request as SDKs send it for deferred messages."""

    async def work() -> None:
        async with await connect_to(broker.connection_string) as client:
            sender, management = await client.sender(queue), await client.management(queue)
            for number in range(5):
                await sender.send(ClientMessage.of(b"%d" % number).encode())
            shown = [ClientMessage.decode(each) for each in await management.peek(9)]
            numbers = {message.content(): message.sequence_number for message in shown}

            async def receive(mode: int, *contents: bytes, **more: bool) -> list[Any]:
                named = array(Long, [numbers[content] for content in contents])
                request = {"sequence-numbers": named, "receiver-settle-mode": UInt(mode), **more}
                answer = await management.request("com.microsoft:receive-by-sequence-number", request)
                return [(ClientMessage.decode(each["message"]), each.get("lock-token")) for each in answer["messages"]]

            with pytest.raises(RequestFailed, match="no unlocked deferred message"):
                await receive(1, b"1", **{"peeklock:active": False})
            found = await receive(1, b"3", b"1")
            assert {message.content() for message, _ in found} == {b"1", b"3"}
            assert {message.annotations["x-opt-message-state"] for message, _ in found} == {0}
            assert all("x-opt-locked-until" in message.annotations for message, _ in found)
            [(deleted, token)] = await receive(0, b"2")
            assert (deleted.content(), token) == (b"2", None)
            async with await client.receiver(queue, credit=0) as receiver:
                rest = await receiver.fetch(9, PATIENCE_S)
                assert {received.message().content() for received in rest} == {b"0", b"4"}
                assert (await management.counts()).locked == 4
                tokens = array(UUID, [token for _, token in found])
                completed = {"disposition-status": "completed", "lock-tokens": tokens}
                await management.request("com.microsoft:update-disposition", completed)
                assert (await management.counts()).active == 2

    asyncio.run(work())


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


def test_messages_move_to_another_entity_each_in_a_transaction(peeklock, connection):
    for queue in ("plain", "spread"):
        peeklock("purge", queue, "--yes")
    sender = connection.create_sender("plain")
    for number in range(250):
        sender.send(Message(id=f"m{number}", body=str(number), properties={"n": number, "wrong": True}))
    moved = peeklock("transfer", "plain", "news", "--count", 2)
    assert moved.exit_code == 1
    assert "news" in moved.stderr
    assert states(peeklock, "plain", "--count", 300) == {"active": 250}, "nothing is lost"
    result = peeklock("transfer", "plain", "target", "--where", "n >= 240", "--set", "n:=1", "--unset", "wrong")
    assert (result.exit_code, result.stdout) == (0, "10 messages moved from plain to target\n"), result.stderr
    first, *_ = [json.loads(line) for line in peeklock("receive", "target", "--count", 20).stdout.splitlines()]
    assert (first["message_id"], first["properties"], first["delivery_count"]) == ("m240", {"n": 1}, 0)
    assert json.loads(peeklock("transfer", "plain", "target", "--json").stdout)["moved"] == 240
    assert states(peeklock, "plain") == {}
    bodies = [json.loads(line)["body"] for line in peeklock("receive", "target", "--count", 300).stdout.splitlines()]
    assert bodies == [str(number) for number in range(240)]


def test_what_a_full_target_cannot_take_is_not_lost(peeklock, connection):
    sender = connection.create_sender("plain")
    for number in range(30):
        sender.send(Message(id=str(number), body=b"x" * 100_000))
    result = peeklock("transfer", "plain", "full")
    assert (result.exit_code, result.stdout) == (0, "30 messages moved from plain to full\n"), result.stderr
    assert states(peeklock, "plain") == {}
    counts = {each["name"]: each for each in json.loads(peeklock("queues", "--json").stdout)}
    there, plain = counts["full"]["active"], counts["plain"]
    assert there > 0
    assert there + plain["transfer"] + plain["transfer_dead_lettered"] == 30, counts


HOSTILE = ["a\x1b[2Jb", "two\nlines", "a\x9b31m", "\u202etxt", "end\u2028"]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_is_printed_of_others_controls_no_terminal(peeklock, connection, text):
    message = Message(id=text, group_id=text, subject=text, body=text, properties={text: text})
    connection.create_sender("talks").send(message)
    for command in (("peek", "talks"), ("sessions", "talks"), ("sessions", "talks", "--json")):
        printed = peeklock(*command)
        assert printed.exit_code == 0
        assert all(line.isprintable() for line in printed.stdout.split("\n"))
    assert text in json.loads(peeklock("sessions", "talks", "--json").stdout)
    shown = json.loads(peeklock("receive", "talks", "--session", text).stdout)
    assert (shown["message_id"], shown["body"], shown["properties"]) == (text, text, {text: text})
    refused = peeklock("receive", text)
    assert refused.exit_code == 1
    assert all(line.isprintable() for line in refused.stderr.split("\n"))
