"""The clock of a namespace differs by hours from that of the clients of a pairing."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from broker.pairing.options import PairingOptions
from broker.pairing.pairing import Pairing
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from tests.brokers import Broker
from tests.pairing.commands import Command, both
from tests.pairing.conftest import QUEUES, namespace

SHIFT = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {seconds}
time.time_ns = lambda: _time_ns() + {seconds} * 10**9
"""
HOURS = 5 * 3600
FAST = PairingOptions(
    backlog_queue_count=1, failover_interval_ms=300, ping_interval_ms=300, attempt_timeout_ms=300, busy_wait_ms=100
)


@contextmanager
def running(broker: Broker, monkeypatch, seconds: int) -> Iterator[None]:
    """All of its processes have a clock that is ahead by so much."""
    (broker.directory / "sitecustomize.py").write_text(SHIFT.format(seconds=seconds))
    with monkeypatch.context() as context:
        context.setenv("PYTHONPATH", str(broker.directory))
        broker.start()
    try:
        yield
    finally:
        broker.kill()


@pytest.mark.parametrize(("primary_s", "secondary_s"), [(-HOURS, 0), (0, -HOURS), (-HOURS, -2 * HOURS)])
def test_clocks_behind_do_no_harm(tmp_path, monkeypatch, primary_s, secondary_s):
    primary, secondary = Broker(tmp_path / "primary", QUEUES), Broker(tmp_path / "secondary")
    with running(secondary, monkeypatch, secondary_s):

        async def outage() -> None:
            async with await Pairing.open(namespace(primary), namespace(secondary), FAST, primary_name="c") as pairing:
                sender = pairing.sender("sessions")
                for number in range(20):
                    message = Message.of(b"%d" % number, message_id=f"{number}", group_id="s", ttl_ms=60_000)
                    await sender.send(message.encode())
                assert pairing.counters.sent_to_backlog == 20

        asyncio.run(outage())
        with running(primary, monkeypatch, primary_s):
            arguments = ("syphon", "--once", *both(primary, secondary), "--primary-name", "c", "--backlog-queues", 1)
            with Command(tmp_path / "syphon", *arguments) as command:
                assert command.end() == 0, command.err
            assert command.out == "20 messages moved to c\n"

            async def browsed() -> list[bytes]:
                async with await connect_to(primary.connection_string) as connection:
                    management = await connection.management("sessions")
                    return [Message.decode(each).content() for each in await management.peek(100)]

            assert asyncio.run(browsed()) == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize("side", ["primary", "secondary"])
def test_a_clock_ahead_by_more_than_a_token_lasts_is_told(tmp_path, monkeypatch, side):
    primary, secondary = Broker(tmp_path / "primary", QUEUES), Broker(tmp_path / "secondary")
    shifts = (HOURS, 0) if side == "primary" else (0, HOURS)
    with running(primary, monkeypatch, shifts[0]), running(secondary, monkeypatch, shifts[1]):
        options = [*both(primary, secondary), "--primary-name", "c", "--backlog-queues", 1]
        for name, more in (("syphon", ["--once"]), ("pair", ["--listen", "127.0.0.1:0"])):
            with Command(tmp_path / name, name, *options, *more) as command:
                assert command.end() == 1, command.err
                assert f"the {side} " in command.err
                assert "expire" in command.err.lower()
                assert "Traceback" not in command.err
