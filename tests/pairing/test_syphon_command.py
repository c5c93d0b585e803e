"""`peeklock syphon` between two real brokers, as its users meet it."""

import asyncio
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from protocol.client.connection import connect_to
from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.pairing.commands import Command, both
from tests.pairing.conftest import QUEUES, fill, taken
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

# Not an emulator: keys are looked at.
STRICT = f"""
[security]
root_key = "{KEY}"
[[security.authorization_rules]]
key_name = "listener"
primary_key = "listener's"
rights = ["Listen"]
"""
HARMFUL = """
[[queues]]
name = "harm/x-servicebus-transfer/0"
max_delivery_count = 3
default_message_time_to_live_ms = 3600000
"""


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("primary"), STRICT + QUEUES, arguments=()) as broker:
        yield broker


@pytest.fixture(scope="module")
def secondary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("secondary"), STRICT + HARMFUL, arguments=()) as broker:
        yield broker


@pytest.fixture
def syphon(primary, secondary, tmp_path):
    """Starts the command. Each test has backlog queues of its own, by the primary's name."""
    started = []

    def start(*arguments, options=None, variables=None):
        options = both(primary, secondary) if options is None else options
        directory = tmp_path / str(len(started))
        started.append(Command(directory, "syphon", *options, *arguments, **(variables or {})))
        return started[-1]

    yield start
    for each in started:
        each.__exit__()


def is_listening(command):
    return "lease taken" in command.err


def made(syphon, name, *arguments):
    """The names of the backlog queues, which a first run has made."""
    assert syphon("--once", "--primary-name", name, "--backlog-queues", 2, *arguments).end() == 0
    return [f"{name}/x-servicebus-transfer/{index}" for index in range(2)]


def test_a_syphon_that_starts_while_the_primary_is_frozen_gets_its_leases(primary, secondary, syphon):
    """It waits for the primary then, as for one that is away."""
    queues = made(syphon, "frozen")
    asyncio.run(fill(secondary, queues[0], "orders", 3))
    stopped = primary.processes()
    for process in stopped:
        process.suspend()
    try:
        command = syphon("--primary-name", "frozen", "--backlog-queues", 2)
        eventually(lambda: is_listening(command), "the leases")  # it asks for 15 s
        assert "the primary is away now" in command.err
    finally:
        for process in stopped:
            process.resume()
    found = []

    def have_come():
        found.extend(asyncio.run(taken(primary, "orders")))
        return len(found) >= 3

    eventually(have_come, "all have come")


def test_once_brings_all_and_says_how_many(primary, secondary, syphon):
    queues = made(syphon, "once")
    asyncio.run(fill(secondary, queues[0], "orders", 250))
    asyncio.run(fill(secondary, queues[1], "gone", 2))
    command = syphon("--once", "--primary-name", "once", "--backlog-queues", 2)
    assert command.end() == 0, command.err
    assert command.out == "250 messages moved to once, 2 dead-lettered\n"
    assert len(asyncio.run(taken(primary, "orders"))) == 250
    # Without a terminal there are lines of JSON, one for each event, and no progress bar.
    assert all(json.loads(line)["event"] for line in command.err.splitlines())


def test_the_namespaces_may_be_in_variables_and_the_report_json(primary, secondary, syphon):
    names = ("PRIMARY", "PRIMARY_HTTP", "SECONDARY", "SECONDARY_HTTP")
    variables = {f"PEEKLOCK_{name}": value for name, value in zip(names, both(primary, secondary)[1::2], strict=True)}
    command = syphon("--once", "--json", "--primary-name", "v", "--backlog-queues", 1, options=(), variables=variables)
    assert command.end() == 0, command.err
    assert json.loads(command.out) == {"moved": 0, "dead_lettered": {}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(primary, secondary, syphon, number):
    name = f"signal{number:d}"
    queues = made(syphon, name)
    [port] = free_ports(1)
    command = syphon("--primary-name", name, "--backlog-queues", 2, "--rate", 50, "--ops-port", port)
    eventually(lambda: is_listening(command), "the leases")
    asyncio.run(fill(secondary, queues[0], "orders", 500))
    eventually(lambda: moved_by(port) > 0, "some are moved")
    began = time.monotonic()
    assert command.end(number) == 0, command.err
    assert time.monotonic() - began < 8  # all would take ten
    moved = int(command.out.split()[0])
    assert 0 < moved < 500
    # Nothing is locked, and no lease is held: the next one need not wait.
    began = time.monotonic()
    last = syphon("--once", "--primary-name", name, "--backlog-queues", 2)
    assert last.end() == 0, last.err
    assert time.monotonic() - began < 30  # half as long as a lock
    assert last.out == f"{500 - moved} messages moved to {name}\n"
    assert len(asyncio.run(taken(primary, "orders"))) == 500


def test_the_rate_is_a_limit(primary, secondary, syphon):
    queues = made(syphon, "rate")
    asyncio.run(fill(secondary, queues[0], "orders", 400))
    began = time.monotonic()
    command = syphon("--once", "--primary-name", "rate", "--backlog-queues", 2, "--rate", 200)
    assert command.end() == 0, command.err
    assert time.monotonic() - began > 1.8  # a tenth of a second's share may go at once
    assert command.out == "400 messages moved to rate\n"
    asyncio.run(taken(primary, "orders"))


def test_queues_that_may_harm_messages_are_named_and_drained(primary, secondary, syphon):
    asyncio.run(fill(secondary, "harm/x-servicebus-transfer/0", "orders", 3))
    command = syphon("--once", "--primary-name", "harm", "--backlog-queues", 1)
    assert command.end() == 0
    assert "MaxDeliveryCount" in command.err
    assert "DefaultMessageTimeToLive" in command.err
    assert command.out == "3 messages moved to harm\n"
    asyncio.run(taken(primary, "orders"))


# --- the secondary or the primary is away -----------------------------------------------------------------------------


def test_once_fails_without_the_secondary_and_a_service_waits_for_it(primary, syphon, tmp_path):
    late = Broker(tmp_path / "late")
    options = both(primary, late)
    command = syphon("--once", "--primary-name", "late", "--backlog-queues", 1, options=options)
    assert command.end() == 1
    assert command.out == ""
    assert command.err.startswith("peeklock: the secondary cannot be reached: cannot connect to localhost port")
    waiting = syphon("--primary-name", "late", "--backlog-queues", 1, options=options)
    eventually(lambda: "secondary is away; waiting for it" in waiting.err, "it says so")
    with late:
        eventually(lambda: is_listening(waiting), "the leases")
        asyncio.run(fill(late, "late/x-servicebus-transfer/0", "orders", 5))
        eventually(lambda: asyncio.run(count(late, "late/x-servicebus-transfer/0")) == 0, "all are moved")
        assert waiting.end(signal.SIGTERM) == 0, waiting.err
    assert len(asyncio.run(taken(primary, "orders"))) == 5


async def count(broker, queue):
    async with await connect_to(broker.connection_string) as connection:
        return (await (await connection.management(queue)).counts()).active


def test_a_signal_ends_also_who_waits(primary, syphon, tmp_path):
    waiting = syphon("--backlog-queues", 1, options=both(primary, Broker(tmp_path / "never")))
    eventually(lambda: "waiting for it" in waiting.err, "it says so")
    assert waiting.end(signal.SIGTERM) == 0
    assert waiting.out == "0 messages moved to localhost\n"


def test_the_primary_may_be_away_at_first(secondary, syphon, tmp_path):
    late = Broker(tmp_path / "primary", QUEUES)
    command = syphon("--once", "--primary-name", "away", "--backlog-queues", 1, options=both(late, secondary))
    eventually(lambda: is_listening(command), "the leases")
    asyncio.run(fill(secondary, "away/x-servicebus-transfer/0", "orders", 5))
    with late:
        assert command.end() == 0, command.err
        assert len(asyncio.run(taken(late, "orders"))) == 5


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backlog-queues", "0"], "--backlog-queues"),
        (["--rate", "0"], "the rate is 0.0; it must be a number of messages per second above 0"),
        (["--rate", "nan"], "the rate is nan; it must be a number of messages per second above 0"),
        (["--primary-name", "a b"], "the primary's name is 'a b'; it must be"),
        (["--primary", ""], "give --primary, or set PEEKLOCK_PRIMARY"),
        (["--secondary", "nonsense"], "--secondary: A part of the connection string has no '='"),
        (["--primary-http", "ftp://x"], "--primary-http: 'ftp://x' is no address such as http://localhost:5300"),
        (["--ops-port", "70000"], "--ops-port"),
    ],
)
def test_wrong_use_is_told(primary, secondary, syphon, arguments, text):
    command = syphon(*arguments)
    assert command.end() == 2
    assert text in " ".join(command.err.split())


def test_one_namespace_is_no_pair(primary, syphon):
    command = syphon("--once", options=both(primary, primary))
    assert command.end() == 2
    assert (
        command.err == "peeklock: the secondary is the primary: both connection strings have the same host and port\n"
    )
    other_name = [each.replace("//localhost", "//127.0.0.1") for each in both(primary, primary)[4:]]
    command = syphon("--once", options=both(primary, primary)[:4] + other_name)
    assert command.end() == 1
    assert "peeklock: the secondary is the primary: both are the namespace 'peeklock'\n" in command.err


@pytest.mark.parametrize(
    ("side", "key_name", "key", "text"),
    [
        ("secondary", KEY_NAME, "wrong", "the secondary refuses the key"),
        ("primary", KEY_NAME, "wrong", "the primary refuses the key"),
        ("secondary", "listener", "listener's", "is missing in the secondary, and was not made"),
    ],
)
def test_missing_rights_are_told(primary, secondary, syphon, side, key_name, key, text):
    brokers = {"primary": primary, "secondary": secondary}
    login = ("--" + side, brokers[side].connection_string_for(key_name, key))
    command = syphon("--primary-name", f"rights-{side}-{key_name}", "--backlog-queues", 1, *login)
    assert command.end() == 1  # it does not wait for what nobody may have
    last = command.err.splitlines()[-1]
    assert last.startswith("peeklock: ")
    assert text in last
    assert key not in command.err


def test_an_operations_port_that_is_taken_is_told(syphon):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        command = syphon("--primary-name", "taken", "--ops-port", held.getsockname()[1])
        assert command.end() == 1
    assert command.err.startswith("peeklock: --ops-port: cannot listen on 127.0.0.1 port")


# --- watching it ------------------------------------------------------------------------------------------------------


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def moved_by(port):
    lines = get(port, "/metrics")[1].splitlines()
    [moved] = [line for line in lines if line.startswith("peeklock_syphon_completed_messages_total ")]
    return float(moved.split()[1])


def test_metrics_and_readiness_are_told(primary, syphon, tmp_path):
    [port] = free_ports(1)
    late = Broker(tmp_path / "late")
    command = syphon("--primary-name", "told", "--backlog-queues", 2, "--ops-port", port, options=both(primary, late))
    eventually(lambda: "waiting for it" in command.err, "it says so")
    assert get(port, "/healthz")[0] == get(port, "/livez")[0] == 200
    status, answer = get(port, "/readyz")
    assert status == 503
    assert "the secondary is away: the secondary cannot be reached" in json.loads(answer)["reason"]
    assert "peeklock_syphon_primary_up 0.0" in get(port, "/metrics")[1]
    with late:
        eventually(lambda: get(port, "/readyz") == (200, '{"status": "ready"}'), "it is ready")
        eventually(lambda: command.err.count("lease taken") == 2, "the leases")
        asyncio.run(fill(late, "told/x-servicebus-transfer/1", "orders", 30))
        asyncio.run(fill(late, "told/x-servicebus-transfer/1", "gone", 2))
        eventually(lambda: "peeklock_syphon_completed_messages_total 30.0" in get(port, "/metrics")[1], "all are moved")
        eventually(
            lambda: (
                'peeklock_syphon_deadletter_message_total{reason="SyphonDestinationNotFound"} 2.0'
                in get(port, "/metrics")[1]
            ),
            "dead letters",
        )
        page = get(port, "/metrics")[1].splitlines()
        for line in (
            "peeklock_syphon_moved_messages_total 30.0",
            "peeklock_syphon_polls_total 0.0",
            "peeklock_syphon_primary_up 1.0",
            'peeklock_syphon_lease_held{queue="told/x-servicebus-transfer/0"} 1.0',
            'peeklock_syphon_deferred_messages{queue="told/x-servicebus-transfer/0"} 0.0',
            'peeklock_syphon_backlog_messages{queue="told/x-servicebus-transfer/0"} 0.0',
        ):
            assert line in page
        assert any(line.startswith('peeklock_process_resident_memory_bytes{process="syphon"}') for line in page)
        assert json.loads(get(port, "/nothing")[1])["paths"] == ["/livez", "/healthz", "/readyz", "/metrics"]
        assert command.end(signal.SIGTERM) == 0
    asyncio.run(taken(primary, "orders"))


def test_a_terminal_shows_a_progress_bar(primary, secondary, syphon):
    queues = made(syphon, "bar")
    asyncio.run(fill(secondary, queues[0], "orders", 300))
    ours, theirs = pty.openpty()
    arguments = ["syphon", *both(primary, secondary), "--once", "--primary-name", "bar", "--backlog-queues", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "broker.cli", *arguments, "--rate", "200"],
        cwd=REPOSITORY,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out == b"300 messages moved to bar\n"
    assert b"draining the backlog of bar" in shown
    totals = [int(each) for each in re.findall(rb"\d+/(\d+)", shown)]
    assert 300 <= max(totals) < 400  # what was counted first, and what had been moved by then
    assert b"primary is there" in shown
    asyncio.run(taken(primary, "orders"))
