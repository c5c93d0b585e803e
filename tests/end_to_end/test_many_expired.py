"""Very many messages that expire at once move in turns that are bounded, and other clients are served meanwhile."""

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.partition.settings import PartitionSettings
from protocol.client.connection import Connection
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from storage.maintenance import verify
from tests.brokers import Broker
from tests.clients import run
from tests.patience import PATIENCE_S

MANY = 30_000
BATCH = 500
TTL_MS = 1_000

QUEUES = """
partitions = 2

[[queues]]
name = "other"

[[queues]]
name = "work"
max_size_mb = 5120

[[queues]]
name = "many"
max_size_mb = 5120
dead_lettering_on_message_expiration = true
"""
BY_TIMER = "\n[expiry]\ntimer = true\n"
FORWARDING = 'forward_dead_lettered_messages_to = "work"\n'


async def fill(connection: Connection, count: int) -> None:
    batch = pack_batch([Message.of(b"x" * 100, ttl_ms=TTL_MS).encode()] * BATCH)
    async with await connection.sender("many") as sender:
        for at in range(0, count, 50 * BATCH):
            batches = range(at, min(at + 50 * BATCH, count), BATCH)
            await asyncio.gather(*(sender.send(batch, is_batch=True) for _ in batches))


async def passed(connection: Connection) -> float:
    """How long a message took from one client to another, in seconds."""
    began = time.monotonic()
    async with await connection.sender("other") as sender, await connection.receiver("other") as receiver:
        await sender.send(Message.of(b"m").encode())
        message = await receiver.receive(PATIENCE_S)
        assert message is not None
        await receiver.accept(message)
    return time.monotonic() - began


async def served_until_moved(connection: Connection, count: int, patience_s: float = 3 * PATIENCE_S) -> list[float]:
    """Pass messages until all have moved; the time of each, in seconds."""
    times: list[float] = []
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        times.append(await passed(connection))
        counts = await connection.counts()
        many, work = counts.get("many"), counts.get("work")
        in_dead_letters = (many.dead_lettered if many else 0) + (work.active if work else 0)
        active = many.active if many else 0
        assert active + in_dead_letters <= count
        if not active and in_dead_letters == count:
            return times
    raise AssertionError(f"not all have moved: {await connection.counts()}")


def turns(broker: Broker) -> float:
    _, text = broker.get("/metrics")
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "peeklock_worker_turns_total")


def all_expired(directory: Path, config: str, count: int) -> Broker:
    """A broker, not started, in which so many messages have expired that move as soon as it starts with `config`."""
    broker = Broker(directory, QUEUES, workers=1)
    with broker:
        run(broker, lambda connection: fill(connection, count))
        assert run(broker, Connection.counts)["many"].active == count  # nobody receives, so none moves
    broker.config_file.write_text(config)
    return broker


@pytest.mark.parametrize("config", [QUEUES + BY_TIMER, QUEUES + FORWARDING], ids=["timer", "forwarded"])
def test_they_move_step_by_step_while_others_are_served(tmp_path: Path, config: str) -> None:
    with all_expired(tmp_path, config, MANY) as broker:
        run(broker, lambda connection: served_until_moved(connection, MANY))
        # Between two turns all others are served.
        assert turns(broker) >= MANY // PartitionSettings().step
    assert verify(broker.data_dir).ok
