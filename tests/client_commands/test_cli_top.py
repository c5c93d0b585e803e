"""`peeklock top`: the rates between samples, and the table of a real broker."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from broker.cli.watching.rates import Sample, Traffic, rows
from broker.cli.watching.traffic import parse
from protocol.client.requests import QueueCounts
from tests.brokers import REPOSITORY, Broker
from tests.patience import PATIENCE_S


def counts(active, **others):
    return QueueCounts(**{"active": active, **dict.fromkeys(NAMES, 0), **others})


NAMES = ("locked", "deferred", "scheduled", "dead_lettered", "size_bytes")


def test_rates_are_differences_and_the_busiest_is_first():
    before = Sample(10.0, {"a": counts(5), "b": counts(9)}, {"a": Traffic(100, 50)})
    now = Sample(12.0, {"a": counts(7), "b": counts(9), "new": counts(1)}, {"a": Traffic(120, 60), "b": Traffic(0, 80)})
    found = rows(before, now)
    assert [(row.name, row.incoming, row.outgoing, row.change) for row in found] == [
        ("b", 0, 40, 0),
        ("a", 10, 5, 1),
        ("new", 0, 0, 0),
    ]


def test_counters_that_begin_anew_are_no_negative_rate():
    before = Sample(0.0, {"a": counts(0)}, {"a": Traffic(100, 100)})
    [row] = rows(before, Sample(1.0, {"a": counts(0)}, {"a": Traffic(3, 0)}))
    assert (row.incoming, row.outgoing) == (0, 0)


def test_without_metrics_only_the_change_is_known():
    found = rows(Sample(0.0, {"a": counts(0), "b": counts(9)}, None), Sample(1.0, {"a": counts(0), "b": counts(1)}, {}))
    assert [(row.name, row.incoming, row.change) for row in found] == [("b", None, -8), ("a", None, 0)]


def test_metrics_are_summed_over_the_gateways():
    page = (
        "# TYPE peeklock_incoming_messages_total counter\n"
        'peeklock_incoming_messages_total{entity="a b\\"c",gateway="0"} 3.0\n'
        'peeklock_incoming_messages_total{entity="a b\\"c",gateway="1"} 4.0\n'
        'peeklock_outgoing_messages_total{entity="x",gateway="0"} 1.0\n'
        'peeklock_other{entity="x"} 5\n'
    )
    assert parse(page) == {'a b"c': Traffic(7, 0), "x": Traffic(0, 1)}
    assert parse("<html>") == {}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    queues = '[[queues]]\nname = "quiet"\n[[queues]]\nname = "busy"\n'
    with Broker(tmp_path_factory.mktemp("top"), queues) as broker:
        yield broker


@pytest.fixture
def command(broker):
    """The command `peeklock`, and its environment."""
    metrics = f"http://127.0.0.1:{broker.ops_port}/metrics"
    given = {"PEEKLOCK_CONNECTION_STRING": broker.connection_string, "PEEKLOCK_METRICS_URL": metrics}
    given["TERM"] = "xterm"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PEEKLOCK_")} | given

    def start(*arguments, **options):
        argv = [sys.executable, "-m", "broker.cli", *arguments]
        return subprocess.Popen(argv, cwd=REPOSITORY, env=environment, **options)

    return start


def done(process):
    out, error = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, error


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def test_a_table_of_json_for_scripts(command):
    watching = command("top", "--json", "--interval", "0.5", **PIPES)
    try:
        assert watching.stdout.readline().startswith('{"entities": [{"name": ')
        assert done(command("send", "busy", "--body", "x", "--count", "100", **PIPES))[0] == 0
        deadline = time.monotonic() + PATIENCE_S
        while (first := json.loads(watching.stdout.readline())["entities"][0])["in_per_second"] == 0:
            assert time.monotonic() < deadline
        assert first["name"] == "busy"
        assert (first["active"], first["dead_lettered"]) == (100, 0)
        assert first["in_per_second"] == pytest.approx(200, rel=0.5)
        watching.send_signal(signal.SIGINT)
        assert done(watching)[::2] == (0, "")
    finally:
        watching.kill()
    code, out, error = done(command("top", "--once", "--json", "--interval", "0.2", **PIPES))
    assert (code, error) == (0, "")
    assert {each["name"] for each in json.loads(out)["entities"]} == {"quiet", "busy"}


def test_a_table_as_text(command):
    code, out, _ = done(command("top", "--once", "--interval", "0.2", **PIPES))
    assert code == 0
    head, *lines = [line.split() for line in out.splitlines()]
    assert head[:4] == ["ENTITY", "IN/S", "OUT/S", "CHANGE/S"]
    assert {line[0] for line in lines} == {"quiet", "busy"}
    code, out, _ = done(command("top", "--once", "--interval", "0.2", "--metrics-url", "http://127.0.0.1:1", **PIPES))
    assert code == 0
    assert len(out.splitlines()[1].split()) == len(head) - 2


def test_a_live_table_on_a_terminal_ends_with_ctrl_c(command):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
    watching = command("top", "--interval", "0.2", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        seen = b""
        deadline = time.monotonic() + PATIENCE_S
        while b"quiet" not in seen or b"DEAD-LETTERED" not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        try:
            while rest := os.read(ours, 4096):
                seen += rest
        except OSError:
            pass  # the other end is closed
        assert watching.wait(PATIENCE_S) == 0
        assert b"Traceback" not in seen
    finally:
        watching.kill()
        os.close(ours)
