"""Commands that take messages out of an entity: which ones, what they lock meanwhile, and what they say is left."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cli.taking.held import Held
from broker.cli.taking.selection import Chosen
from protocol.client.browsing import browse, highest
from protocol.client.connection import connect_to
from protocol.client.errors import SettlementRefused
from protocol.client.messages import Message
from protocol.codec import Timestamp
from tests.brokers import REPOSITORY
from tests.patience import PATIENCE_S, eventually

DEAD = "/$deadletterqueue"


@pytest.fixture(autouse=True)
def empty(peeklock):
    """Queues as the tests expect them: without messages of tests before."""
    yield
    for queue in ("plain", "spread", "talks", "talks/spread", "target", "small"):
        for options in ((), ("--dead-letter",)):
            assert peeklock("purge", queue, "--yes", *options).exit_code == 0


def on(broker, work):
    """Do `work` on a connection of the client library."""

    async def main():
        async with await connect_to(broker.connection_string) as connection:
            return await work(connection)

    return asyncio.run(main())


def numbered(numbers, session=None, **values):
    return [
        Message.of(b"%d" % n, message_id=str(n), group_id=session, application_properties={"n": n, **values})
        for n in numbers
    ]


def send(broker, queue, *messages):
    async def work(connection):
        sender = await connection.sender(queue)
        if queue in ("spread", "scattered"):
            for message in messages:
                await sender.send(message.encode())  # one by one, so that they are on all partitions
        else:
            await sender.send_all(message.encode() for message in messages)

    on(broker, work)


def found(peeklock, queue, *options, counts=frozenset({0})):
    """The bodies of all messages, after a check that only such deliveries were counted and nothing is locked."""
    result = peeklock("peek", queue, "--count", 5000, *options)
    assert result.exit_code == 0, result.stderr
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    assert {message["delivery_count"] for message in messages} <= counts
    free = peeklock("receive", queue, "--keep", "--count", 5000, *options)
    assert len(free.stdout.splitlines()) == len(messages), "some are locked"
    return [message["body"] for message in messages]


def arrive(peeklock, queue, count):
    """Wait for messages that are moved to another partition."""
    eventually(lambda: len(peeklock("peek", queue, "--count", count).stdout.splitlines()) >= count, "all have come")


class Others:
    """Another receiver, which holds messages while the block runs."""

    def __init__(self, broker, queue, count, session=None):
        self._of = broker, queue, count, session

    def __enter__(self):
        broker, queue, count, session = self._of
        self._loop = asyncio.new_event_loop()

        async def hold():
            connection = await connect_to(broker.connection_string)
            if session is None:
                receiver = await connection.receiver(queue, credit=0)
            else:
                receiver = await connection.accept_session(queue, session)
            held = await receiver.fetch(count)
            assert len(held) == count
            return connection, receiver, held

        self._connection, self._receiver, self._held = self._loop.run_until_complete(hold())

    def __exit__(self, *_):
        async def give_back():
            await asyncio.gather(*map(self._receiver.release, self._held))
            await self._connection.close()

        self._loop.run_until_complete(give_back())
        self._loop.close()


# --- what is found without locks --------------------------------------------------------------------------------------


NUMBERS = st.integers(0, 3).flatmap(
    lambda fragment: st.integers(0, 40) | st.integers(0, (1 << 48) - 1).map(lambda n: n + (fragment << 48))
)


@given(st.sets(NUMBERS | st.sampled_from([1, (1 << 48) - 1, 1 << 48, (1 << 63) - 1])))
def test_the_last_number_of_each_fragment_is_found_in_few_steps(numbers):
    steps = 0

    async def first_from(number):
        nonlocal steps
        steps += 1
        assert 0 <= number < 1 << 63
        return min((each for each in numbers if each >= number), default=None)

    last = {}
    for number in sorted(numbers):
        last[number >> 48] = number
    assert asyncio.run(highest(first_from)) == last
    assert steps <= 1 + 100 * len(last)


def test_browsing_ends_with_the_last_numbers(broker):
    send(broker, "spread", *numbered(range(40)))

    async def work(connection):
        management = await connection.management("spread")
        there = [message.sequence_number or 0 async for message in browse(management, page=3)]
        assert (len(there), there) == (40, sorted(there))
        last = {number >> 48: number for number in there}
        assert len(last) == 2, "both partitions"
        first = min(last)
        some = {**last, first: there[4]}
        shown = [message.sequence_number async for message in browse(management, page=3, last=some)]
        assert shown == [number for number in there if number >> 48 != first or number <= there[4]]
        assert [message async for message in browse(management, last={})] == []

    on(broker, work)


@given(st.sets(NUMBERS), NUMBERS)
def test_what_is_chosen_is_found_again(numbers, other):
    chosen = Chosen()
    for number in sorted(numbers):
        chosen.add(number)
    assert all(number in chosen for number in numbers)
    assert (other in chosen) == (other in numbers)
    assert len(chosen) == len(numbers)


# --- what lies before is held, and given back -------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["plain", "spread"])
def test_a_condition_that_few_messages_meet(peeklock, broker, queue):
    send(broker, queue, *numbered(range(500)))
    result = peeklock("dead-letter", queue, "--where", "n IN (3, 300, 499)")
    assert (result.exit_code, result.stdout) == (0, f"3 messages dead-lettered from {queue}\n"), result.stderr
    assert sorted(map(int, found(peeklock, queue))) == [n for n in range(500) if n not in (3, 300, 499)]
    result = peeklock("dead-letter", queue, "--where", "n < 400 AND n % 2 = 0", "--count", 20)
    assert result.stdout == f"20 messages dead-lettered from {queue}\n", result.stderr
    result = peeklock("resend", queue, "--where", "n = 300", "--to", "target")
    assert result.stdout == "1 message sent to target again\n", result.stderr
    assert len(found(peeklock, queue, "--dead-letter")) == 22
    result = peeklock("transfer", queue, "target", "--where", "n = 301")
    assert result.stdout == f"1 message moved from {queue} to target\n", result.stderr
    assert len(found(peeklock, queue)) == 476
    assert peeklock("dead-letter", queue, "--where", "n = 1000").stdout == f"0 messages dead-lettered from {queue}\n"


def test_more_than_can_be_locked_lie_before(peeklock, broker, monkeypatch):
    send(broker, "plain", *numbered(range(300)))
    with monkeypatch.context() as patch:
        patch.setattr("broker.cli.taking.held.Held.MOST", 100)
        kept = peeklock("receive", "plain", "--keep", "--count", 150)
        assert len(kept.stdout.splitlines()) == 100
        assert kept.stderr == "peeklock: no more than 100 messages can be kept at once\n"
        result = peeklock("dead-letter", "plain", "--where", "n = 50 OR n > 297")
    assert (result.exit_code, result.stdout) == (1, "1 message dead-lettered from plain\n")
    assert result.stderr == "peeklock: 2 messages not reached behind 100 others, the most that are locked\n"
    assert len(found(peeklock, "plain")) == 299


def test_a_message_that_cannot_be_moved_is_given_back(peeklock, broker, monkeypatch):
    send(broker, "plain", *numbered(range(3)))
    result = peeklock("transfer", "plain", "small", "--set", "long=" + "x" * 2000)
    assert (result.exit_code, result.stdout) == (1, "0 messages moved from plain to small\n")
    assert "message-size-exceeded" in result.stderr
    assert found(peeklock, "plain") == ["0", "1", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("broker.cli.taking.moving.MOST_BYTES", 1)
        assert peeklock("transfer", "plain", "target").stdout == "3 messages moved from plain to target\n"
    arrive(peeklock, "target", 3)
    assert found(peeklock, "target") == ["0", "1", "2"]


def test_messages_of_a_partitioned_queue_are_moved_until_one_is_refused(peeklock, broker):
    send(broker, "scattered", *numbered(range(40)))
    result = peeklock("transfer", "scattered", "small", "--count", 10, "--where", "n < 30")
    assert (result.exit_code, result.stdout) == (0, "10 messages moved from scattered to small\n"), result.stderr
    assert len(found(peeklock, "scattered")) == 30
    result = peeklock("transfer", "scattered", "small", "--set", "long=" + "x" * 2000)
    assert (result.exit_code, result.stdout) == (1, "0 messages moved from scattered to small\n")
    assert len(peeklock("receive", "scattered", "--keep", "--count", 99).stdout.splitlines()) == 29
    assert peeklock("dead-letter", "scattered", "--count", 99).stdout == "29 messages dead-lettered from scattered\n"
    result = peeklock("transfer", "scattered", "target", "--dead-letter")
    assert result.stdout == "29 messages moved from scattered/$deadletterqueue to target\n", result.stderr


def test_locks_are_renewed_while_they_are_held(broker, monkeypatch):
    """Locks last 5 seconds. One of them is lost, and the others stay."""
    monkeypatch.setattr("broker.cli.taking.held.RENEW_SECONDS", 0.5)
    send(broker, "brief", *numbered(range(5)))
    send(broker, "brief-talks", *numbered(range(2), "s"))

    async def work(connection):
        plain, talks = await connection.management("brief"), await connection.management("brief-talks")
        receiver, of_session = (
            await connection.receiver("brief", credit=0),
            await connection.accept_session("brief-talks", "s"),
        )
        async with Held(receiver, plain) as held, Held(of_session, talks) as session_held:
            taken = await receiver.fetch(10)
            in_session = await of_session.fetch(10)
            for each in taken:
                held.add(each)
            for each in in_session:
                session_held.add(each)
            await plain.request(
                "com.microsoft:update-disposition",
                {"disposition-status": "completed", "lock-tokens": [taken[1].lock_token]},
            )
            await asyncio.sleep(6)  # longer than a lock lasts
            await held.take(taken[1:3])
            await receiver.accept(taken[2])
            with pytest.raises(SettlementRefused):
                await receiver.accept(taken[1])
            await session_held.take(in_session[:1])
            await of_session.accept(in_session[0])
        again, in_session = await receiver.fetch(10), await of_session.fetch(10)
        messages = [received.message() for received in (*again, *in_session)]
        contents = [(message.content(), message.delivery_count) for message in messages]
        assert contents == [(b"0", 0), (b"3", 0), (b"4", 0), (b"1", 0)]
        await asyncio.gather(*map(receiver.accept, again), *map(of_session.accept, in_session))

    on(broker, work)


# --- what others have -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["plain", "spread"])
def test_what_others_have_locked_is_said(peeklock, broker, queue):
    send(broker, queue, *numbered(range(20)))
    with Others(broker, queue, 3):
        result = peeklock("dead-letter", queue, "--where", "n >= 0")
        assert (result.exit_code, result.stdout) == (1, f"17 messages dead-lettered from {queue}\n")
        assert result.stderr == "peeklock: 3 messages locked by other receivers, or gone\n"
    with Others(broker, queue + DEAD, 4):
        result = peeklock("resend", queue, "--json")
        assert (result.exit_code, json.loads(result.stdout)["sent"]) == (1, 13)
        assert result.stderr == "peeklock: 4 messages locked by other receivers, or gone\n"
        # What is wanted can be had, so nothing is left.
        assert peeklock("dead-letter", queue, "--count", 2).exit_code == 0
        assert peeklock("dead-letter", queue, "--where", "n >= 0", "--count", 2).exit_code == 0
    with Others(broker, queue, 12):
        result = peeklock("transfer", queue, "target", "--count", 1)
        assert (result.exit_code, result.stdout) == (1, f"0 messages moved from {queue} to target\n")
    with Others(broker, queue, 1):
        number = json.loads(peeklock("peek", queue, "--count", 1).stdout)["sequence_number"]
        result = peeklock("dead-letter", queue, "--number", number, "--number", 12345)
        assert (result.exit_code, result.stdout) == (1, f"0 messages dead-lettered from {queue}\n")
        assert result.stderr.startswith(f"peeklock: {queue} has no message with the number 12345; 1 message locked by")


def test_numbers_of_messages_in_all_states(peeklock, broker):
    async def work(connection):
        sender = await connection.sender("plain")
        await sender.send_all(message.encode() for message in numbered(range(3)))
        receiver = await connection.receiver("plain", credit=0)
        [first] = await receiver.fetch(1)
        await receiver.modify(first, undeliverable_here=True)
        later = numbered([9])[0]
        later.annotations["x-opt-scheduled-enqueue-time"] = Timestamp((time.time() + 3600) * 1000)
        await sender.send(later.encode())

    on(broker, work)
    shown = [json.loads(line) for line in peeklock("peek", "plain").stdout.splitlines()]
    numbers = {message["body"]: message["sequence_number"] for message in shown}
    arguments = [each for body in ("0", "2", "9") for each in ("--number", numbers[body])]
    result = peeklock("dead-letter", "plain", *arguments)
    assert (result.exit_code, result.stdout) == (1, "2 messages dead-lettered from plain\n")
    assert (
        result.stderr == f"peeklock: message {numbers['9']} of plain is scheduled: it cannot be taken before its time\n"
    )
    assert found(peeklock, "plain", "--dead-letter", counts={0, 1}) == ["0", "2"]  # the first was deferred


def test_messages_that_come_back_are_not_taken_again(peeklock, broker):
    send(broker, "plain", *numbered(range(150)))
    result = peeklock("transfer", "plain", "boomerang")
    assert (result.exit_code, result.stdout) == (0, "150 messages moved from plain to boomerang\n"), result.stderr
    result = peeklock("transfer", "plain", "boomerang", "--where", "n >= 0")
    assert result.stdout.endswith("messages moved from plain to boomerang\n"), result.stderr


def test_ctrl_c_says_what_was_done_and_counts_no_delivery(peeklock, broker):
    send(broker, "plain", *numbered(range(4500)))
    environment = {**os.environ, "PEEKLOCK_CONNECTION_STRING": broker.connection_string}
    command = [sys.executable, "-m", "broker.cli", "transfer", "plain", "target", "--where", "n % 3 = 0"]
    moving = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    eventually(lambda: peeklock("peek", "target", "--count", 1).stdout, "some are moved")
    moving.send_signal(signal.SIGINT)
    out, error = moving.communicate(timeout=PATIENCE_S)
    assert moving.returncode == 130
    assert "Traceback" not in error
    moved = int(re.fullmatch(r"(\d+) messages moved from plain to target\n", out)[1])
    assert 0 < moved < 1500
    assert len(found(peeklock, "plain")) == 4500 - moved
    arrive(peeklock, "target", moved)
    assert found(peeklock, "target") == [str(3 * n) for n in range(moved)]


def test_messages_that_nobody_reads_are_given_back(peeklock, broker):
    """As with `| head -1`."""
    send(broker, "plain", *numbered(range(300)))
    environment = {**os.environ, "PEEKLOCK_CONNECTION_STRING": broker.connection_string}
    command = [sys.executable, "-m", "broker.cli", "receive", "plain", "--count", "300"]
    unread, out = os.pipe()
    os.close(unread)
    receiving = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(out)
    assert (receiving.returncode, receiving.stderr) == (1, "")
    assert len(found(peeklock, "plain")) == 300


# --- sessions ---------------------------------------------------------------------------------------------------------

SESSIONS = ["a", "b", "", "d é"]


@pytest.fixture(params=["talks", "talks/spread"])
def talks(request, broker):
    """A queue with three messages in each of some sessions."""
    send(
        broker,
        request.param,
        *(each for n, name in enumerate(SESSIONS) for each in numbered(range(3 * n, 3 * n + 3), name)),
    )
    return request.param


def bodies(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line)["body"] for line in result.stdout.splitlines()]


def test_sessions_are_received_in_turn(peeklock, talks):
    assert bodies(peeklock("receive", talks, "--session", "b", "--count", 2)) == ["3", "4"]
    assert bodies(peeklock("receive", talks, "--session", "", "--keep", "--count", 9)) == ["6", "7", "8"]
    kept = peeklock("receive", talks, "--keep", "--count", 99)
    assert sorted(bodies(kept), key=int) == ["0", "1", "2", "5", "6", "7", "8", "9", "10", "11"]
    of_one = [json.loads(line)["body"] for line in kept.stdout.splitlines() if json.loads(line)["session_id"] == "d é"]
    assert of_one == ["9", "10", "11"]
    assert len(bodies(peeklock("receive", talks, "--count", 4))) == 4
    assert len(bodies(peeklock("receive", talks, "--count", 99))) == 6
    result = peeklock("receive", talks)
    assert (result.exit_code, result.stderr) == (0, f"peeklock: nothing to receive from {talks}\n")
    assert peeklock("send", talks, "--body", "x", "--session", "new").exit_code == 0
    assert bodies(peeklock("receive", talks, "--session", "new")) == ["x"]
    result = peeklock("receive", talks, "--session", "x" * 200)
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_session_is_peeked_at(peeklock, talks):
    assert bodies(peeklock("peek", talks, "--session", "d é")) == ["9", "10", "11"]
    assert bodies(peeklock("peek", talks, "--session", "")) == ["6", "7", "8"]
    assert bodies(peeklock("peek", talks, "--session", "a", "--count", 2, "--state", "active")) == ["0", "1"]
    assert bodies(peeklock("peek", talks, "--session", "nobody")) == []


def test_messages_of_sessions_are_dead_lettered_and_sent_again(peeklock, talks):
    assert peeklock("dead-letter", talks, "--session", "a").stdout == f"1 message dead-lettered from {talks}\n"
    result = peeklock("dead-letter", talks, "--where", "n IN (1, 4, 11) OR sys.SessionId = ''")
    assert (result.exit_code, result.stdout) == (0, f"6 messages dead-lettered from {talks}\n"), result.stderr
    result = peeklock("dead-letter", talks, "--session", "b", "--count", 99)
    assert result.stdout == f"2 messages dead-lettered from {talks}\n", result.stderr
    assert len(bodies(peeklock("peek", talks, "--dead-letter"))) == 9
    assert len(bodies(peeklock("peek", talks, "--dead-letter", "--session", ""))) == 3
    assert peeklock("resend", talks, "--session", "b").stdout == f"3 messages sent to {talks} again\n"
    assert peeklock("resend", talks).stdout == f"6 messages sent to {talks} again\n"
    for n, name in enumerate(SESSIONS):
        assert sorted(bodies(peeklock("receive", talks, "--session", name, "--count", 9)), key=int) == [
            str(each) for each in range(3 * n, 3 * n + 3)
        ]


def test_messages_of_sessions_are_moved(peeklock, talks):
    result = peeklock("transfer", talks, "target", "--where", "n % 3 = 2")
    assert (result.exit_code, result.stdout) == (0, f"4 messages moved from {talks} to target\n"), result.stderr
    result = peeklock("transfer", talks, "target", "--session", "b")
    assert result.stdout == f"2 messages moved from {talks} to target\n", result.stderr
    left = found(peeklock, talks)
    assert sorted(left, key=int) == ["0", "1", "6", "7", "9", "10"]
    result = peeklock("transfer", talks, "target")
    assert result.stdout == f"6 messages moved from {talks} to target\n", result.stderr
    assert found(peeklock, talks) == []


def test_a_session_that_others_hold_is_said(peeklock, broker, talks):
    with Others(broker, talks, 1, "b"):
        result = peeklock("dead-letter", talks, "--where", "n >= 2")
        assert (result.exit_code, result.stdout) == (1, f"7 messages dead-lettered from {talks}\n")
        assert result.stderr == "peeklock: 3 messages in a session that other receivers hold: 'b'\n"
        result = peeklock("transfer", talks, "target", "--session", "b")
        assert (result.exit_code, result.stdout) == (1, f"0 messages moved from {talks} to target\n")
        assert result.stderr == "peeklock: 3 messages in a session that other receivers hold: 'b'\n"
        result = peeklock("receive", talks, "--session", "b")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "session-cannot-be-locked" in result.stderr
        assert sorted(bodies(peeklock("receive", talks, "--count", 9))) == ["0", "1"]
        assert peeklock("resend", talks, "--count", 3).exit_code == 0
        assert peeklock("dead-letter", talks, "--count", 2).exit_code == 0, "there are enough others"
    assert peeklock("dead-letter", talks, "--session", "b", "--count", 3).exit_code == 0


def test_deferred_messages_of_sessions_are_dead_lettered_by_number(peeklock, broker, talks):
    async def work(connection):
        async with await connection.accept_session(talks, "a") as receiver:
            [first] = await receiver.fetch(1)
            await receiver.modify(first, undeliverable_here=True)

    on(broker, work)
    shown = [json.loads(line) for line in peeklock("peek", talks, "--count", 20).stdout.splitlines()]
    numbers = {message["body"]: message["sequence_number"] for message in shown}
    arguments = [each for body in ("0", "2", "10") for each in ("--number", numbers[body])]
    with Others(broker, talks, 1, "a"):
        result = peeklock("dead-letter", talks, *arguments)
        assert (result.exit_code, result.stdout) == (1, f"1 message dead-lettered from {talks}\n")
        assert result.stderr == "peeklock: 2 messages in a session that other receivers hold: 'a'\n"
    result = peeklock("dead-letter", talks, *arguments[:4], "--reason", "r")
    assert (result.exit_code, result.stdout) == (0, f"2 messages dead-lettered from {talks}\n"), result.stderr
    assert sorted(bodies(peeklock("peek", talks, "--dead-letter")), key=int) == ["0", "2", "10"]


def test_where_there_are_no_sessions(peeklock, broker):
    send(broker, "plain", *numbered(range(3), "s"))
    for arguments in (("receive",), ("dead-letter",), ("peek",)):
        result = peeklock(*arguments, "plain", "--session", "s")
        assert (result.exit_code, result.stdout) == (1, ""), arguments
        assert result.stderr.count("\n") == 1
    assert peeklock("receive", "plain", "--dead-letter", "--session", "s").exit_code == 2
    assert peeklock("dead-letter", "plain", "--count", 3).exit_code == 0
    assert peeklock("resend", "plain", "--session", "t").stdout == "0 messages sent to plain again\n"
    assert peeklock("resend", "plain", "--session", "s").stdout == "3 messages sent to plain again\n"
