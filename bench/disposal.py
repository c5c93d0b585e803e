"""What sends wait for while a deleted queue is disposed of: `python -m bench.disposal`.

A deleted queue's messages are freed step by step, in turns of their partition, and whatever is sent to the partition
waits for the turn that is under way. The broker has one partition, so that all sends meet these turns. A few senders
send one message at a time each: first with nothing beside it, then from the deletion of a queue on. Both take as long
as a disposal with nothing beside it, which is measured first. Beside sends it takes longer, so all of these meet it.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench import load
from bench.load import Tools
from bench.processes import cpu_s, role
from bench.servers import ROOT, Peeklock
from protocol.client.connection import Connection, connect
from protocol.client.connection_string import SharedAccessKey
from protocol.client.messages import Message

VICTIM = "deleted"
BUSY = 0.05  # share of a processor that a worker at rest does not use
LOOK_S = 0.1
TIMEOUT_S = 600.0


class PeeklockOnOnePartition(Peeklock):
    def _settings(self) -> list[str]:
        return ["partitions = 1", "workers = 1"]

    def worker(self) -> psutil.Process:
        [worker] = [process for process in self.processes() if role(process.cmdline()) == "worker"]
        return worker


@dataclass(frozen=True)
class Measured:
    """Seconds from send to accept, of each send, without and beside a disposal; seconds of each disposal alone."""

    alone: list[float]
    beside: list[float]
    disposals: list[float]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(what: str, sends: Sequence[float]) -> str:
    p50, p99, most = (1000 * quantile(sends, share) for share in (0.5, 0.99, 1))
    return f"{what:24} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   most {most:7.2f} ms   {len(sends)} sends"


class Bench:
    def __init__(self, server: PeeklockOnOnePartition, tools: Tools, options: argparse.Namespace) -> None:
        self.server = server
        self.tools = tools
        self.options = options
        self.message = Message.of(bytes(options.size)).encode()

    async def run(self) -> Measured:
        measured = Measured([], [], [])
        end = self.server.endpoint
        async with await connect(
            end.host, end.port, SharedAccessKey(end.user, end.password), timeout_s=TIMEOUT_S
        ) as connection:
            await self.sends(connection, self.options.seconds)  # a warm-up
            for _ in range(self.options.rounds):
                await self.fill(connection)
                begun = time.perf_counter()
                await self.delete(connection)
                took = await self.until_at_rest() - begun
                measured.disposals.append(took)
                await asyncio.to_thread(self.server.settle)
                measured.alone.extend(await self.sends(connection, took))
                await self.fill(connection)
                await self.delete(connection)
                measured.beside.extend(await self.sends(connection, took))
                await self.until_at_rest()
        return measured

    async def fill(self, connection: Connection) -> None:
        namespace = await connection.management("")
        await namespace.request_of_peeklock(
            "peeklock:create-entity", {"kind": "queue", "properties": {"name": VICTIM, "max_size_mb": 20480}}
        )
        options = ("-n", str(self.options.messages), "--size", str(self.options.size))
        await asyncio.to_thread(load.run, self.tools.load, "send", self.server.endpoint, VICTIM, *options)
        await asyncio.to_thread(self.server.settle)

    async def delete(self, connection: Connection) -> None:
        namespace = await connection.management("")
        await namespace.request_of_peeklock("peeklock:delete-entity", {"path": VICTIM})

    async def until_at_rest(self) -> float:
        """The time at which the worker had last used a part of a processor that is worth mention."""
        worker = [self.server.worker()]
        rest = time.perf_counter()
        used_s = cpu_s(worker)
        while time.perf_counter() - rest < 3 * LOOK_S:
            await asyncio.sleep(LOOK_S)
            now, now_s = time.perf_counter(), cpu_s(worker)
            if now_s - used_s > BUSY * LOOK_S:
                rest = now
            used_s = now_s
        return rest

    async def sends(self, connection: Connection, seconds: float) -> list[float]:
        """The seconds of each send of some senders that send one message at a time."""
        until = time.perf_counter() + seconds
        found: list[float] = []

        async def send() -> None:
            sender = await connection.sender(self.server.address(1))
            while (begun := time.perf_counter()) < until:
                await sender.send(self.message)
                found.append(time.perf_counter() - begun)
            await sender.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.options.senders):
                group.create_task(send())
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disposal", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="in the deleted queue (%(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a body (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="deletions beside which is sent (%(default)s)")
    parser.add_argument("--senders", type=int, default=4, help="each with one message at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the warm-up (%(default)s)")
    parser.add_argument(
        "--before", type=Path, help="a checkout of another commit, whose broker is measured after this one's"
    )
    options = parser.parse_args(arguments)
    tools = load.build()
    for root in filter(None, (ROOT, options.before and options.before.resolve())):
        with TemporaryDirectory() as directory:
            server = PeeklockOnOnePartition(Path(directory), root)
            print(f"{server.version()}, {options.messages} messages of {options.size} bytes, {options.senders} senders")
            try:
                server.start()
                measured = asyncio.run(Bench(server, tools, options).run())
            finally:
                server.kill()
        print(line("nothing beside", measured.alone))
        print(line("beside the disposal", measured.beside))
        print(f"{'a disposal alone':24} {', '.join(f'{each:.2f}' for each in measured.disposals)} s")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
