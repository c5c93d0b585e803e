"""How fast `peeklock syphon` drains a large backlog, and how much memory it takes meanwhile.

    python -m tests.pairing.drain --messages 1000000 --entities 1000

The backlog is filled as paired senders do it while the primary is away. In the end every message must be in the primary
once.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

from broker.pairing.aliases import to_backlog
from broker.pairing.backlog import backlog_queues
from broker.pairing.provisioning import create_missing
from protocol.client.connection import Connection, connect_to
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from tests.brokers import Broker
from tests.pairing.commands import Command, both
from tests.pairing.conftest import namespace
from tests.ports import free_ports

NAME = "main"
PART = 200  # messages in one transfer
SAMPLE_SECONDS = 1.0
MIB = 1 << 20


class Sample(NamedTuple):
    """`moved` messages; memory is resident, of the syphon and of all processes of the two brokers."""

    seconds: float
    moved: int
    syphon_bytes: int
    brokers_bytes: int


class Backlog:
    """What is sent: `messages` for `entities` at random, with a body of `body_bytes` each."""

    def __init__(self, messages: int, entities: int, body_bytes: int, queues: int) -> None:
        self.messages = messages
        self.entities = entities
        self.queues = queues
        self._body = Random(1).randbytes(body_bytes)

    def config(self, detect_duplicates: bool) -> str:
        """Of the primary."""
        detects = "requires_duplicate_detection = true\n" if detect_duplicates else ""
        return "".join(f'[[queues]]\nname = "entity-{number}"\n{detects}' for number in range(self.entities))

    def of_queue(self, index: int) -> Iterator[bytes]:
        chance = Random(index)
        for number in range(index, self.messages, self.queues):
            message = Message.of(self._body, message_id=str(number)).encode()
            yield to_backlog(message, f"entity-{chance.randrange(self.entities)}")

    async def fill(self, secondary: Broker) -> None:
        async with namespace(secondary).management() as client:
            await create_missing(client, NAME, self.queues)
        async with await connect_to(secondary.connection_string) as connection:
            queues = enumerate(backlog_queues(NAME, self.queues))
            await asyncio.gather(*(self._fill(connection, index, queue) for index, queue in queues))

    async def _fill(self, connection: Connection, index: int, queue: str) -> None:
        sender = await connection.sender(queue)
        part: list[bytes] = []
        for message in self.of_queue(index):
            part.append(message)
            if len(part) == PART:
                await sender.send(pack_batch(part), is_batch=True)
                part.clear()
        if part:
            await sender.send(pack_batch(part), is_batch=True)


def watch(command: Command, port: int, brokers: list[Broker]) -> list[Sample]:
    """Sample until the command has ended."""
    began, samples = time.monotonic(), []
    process = psutil.Process(command.process.pid)
    while command.process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                page = answer.read().decode()
            moved = re.search(r"^peeklock_syphon_completed_messages_total (\S+)$", page, re.MULTILINE)
            assert moved is not None
            in_brokers = sum(each.memory_info().rss for broker in brokers for each in broker.processes())
            sample = Sample(time.monotonic() - began, int(float(moved[1])), process.memory_info().rss, in_brokers)
        except (OSError, psutil.Error):
            continue  # it begins, or has ended
        samples.append(sample)
    return samples


def tell(samples: list[Sample], messages: int) -> None:
    print("   moved  seconds      per s  syphon MiB  brokers MiB")
    due, last = 0, Sample(0, 0, 0, 0)
    for each in samples:
        if each.moved >= due or each is samples[-1]:
            per_second = (each.moved - last.moved) / max(each.seconds - last.seconds, SAMPLE_SECONDS)
            memory = f"{each.syphon_bytes / MIB:>11.1f} {each.brokers_bytes / MIB:>12.1f}"
            print(f"{each.moved:>8} {each.seconds:>8.1f} {per_second:>10.0f} {memory}")
            due, last = each.moved + messages // 20, each
    begun = next(each for each in samples if each.moved)
    rate = (samples[-1].moved - begun.moved) / (samples[-1].seconds - begun.seconds)
    settled = [each.syphon_bytes / MIB for each in samples if each.moved >= messages // 10]
    memory = f"after the first tenth the syphon has {min(settled):.1f} to {max(settled):.1f} MiB"
    print(f"{rate:.0f} messages per second; {memory}")


async def in_primary(primary: Broker) -> int:
    async with await connect_to(primary.connection_string, timeout_s=60) as connection:
        return sum(counts.active for counts in (await connection.counts()).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--entities", type=int, default=1000)
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--queues", type=int, default=10)
    parser.add_argument("--detect-duplicates", action="store_true")
    arguments = parser.parse_args()
    backlog = Backlog(arguments.messages, arguments.entities, arguments.body_bytes, arguments.queues)
    with tempfile.TemporaryDirectory(prefix="peeklock-drain-") as name:
        directory = Path(name)
        with (
            Broker(directory / "primary", backlog.config(arguments.detect_duplicates)) as primary,
            Broker(directory / "secondary") as secondary,
        ):
            began = time.monotonic()
            asyncio.run(backlog.fill(secondary))
            print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
            [port] = free_ports(1)
            options = ["--once", "--primary-name", NAME, "--backlog-queues", backlog.queues, "--ops-port", port]
            with Command(directory / "syphon", "syphon", *both(primary, secondary), *options) as command:
                samples = watch(command, port, [primary, secondary])
                print(command.out, end="")
            if command.process.returncode or not samples:
                sys.exit(f"it failed:\n{command.err[-2000:]}")
            tell(samples, backlog.messages)
            found = asyncio.run(in_primary(primary))
    if found != backlog.messages:
        sys.exit(f"{found} messages are in the primary, of {backlog.messages}")


if __name__ == "__main__":
    main()
