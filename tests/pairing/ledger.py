"""Two paired brokers under a ledger, while the primary is killed, stopped, cut off and slowed at random.

    python -m tests.pairing.ledger --minutes 30

Clients send to a queue, a topic and sessions; others receive and browse meanwhile. A syphon drains the backlog, and is
killed now and then. In the end the books must balance (`tests.pairing.books`).
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from enum import Enum
from pathlib import Path

from broker.pairing.options import PairingOptions
from broker.pairing.pairing import Pairing
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError
from protocol.client.messages import Message
from protocol.errors import ProtocolError
from protocol.symbols import PING_CONTENT_TYPE
from tests.brokers import REPOSITORY, Broker, free_ports
from tests.pairing.books import Books, Key, Way
from tests.pairing.conftest import QUEUES, namespace
from tests.pairing.wire import State, Wire

CLIENTS = 3
SESSIONS = 6
READ_FROM = {"orders": "orders", "news": "news/Subscriptions/all", "sessions": "sessions"}
SEND_TIMEOUT_S = 20.0
BETWEEN_SENDS_S = 0.02
ON_ITS_WAY_S = 0.3


class Trouble(Enum):
    KILL = "primary killed"
    KILL_SLOW = "primary killed while much is on its way"
    STOP = "primary stopped"
    CUT = "primary cut off"
    SLOW = "primary slowed"
    KILL_SYPHON = "syphon killed"


class Syphon:
    """The process that drains the backlog, started again when it was killed."""

    def __init__(self, primary: Broker, port: int, secondary: Broker, name: str, rate: float, log: Path) -> None:
        self._arguments = [
            "syphon",
            "--primary",
            primary.connection_string.replace(str(primary.amqp_port), str(port)),
            "--secondary",
            secondary.connection_string,
            "--primary-http",
            f"http://localhost:{primary.http_port}",
            "--secondary-http",
            f"http://localhost:{secondary.http_port}",
            "--primary-name",
            name,
            "--backlog-queues",
            str(3),
            "--rate",
            str(rate),
        ]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "broker.cli", *self._arguments],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)


class Run:
    """One run of the ledger. Troubles last `longest_s` at most.

    `rate` is that of the syphon. With less than senders send it often has a backlog when the next trouble comes.
    """

    def __init__(self, directory: Path, seed: int, options: PairingOptions, longest_s: float, rate: float) -> None:
        self.books = Books()
        self.counts: Counter[str] = Counter()
        self.options = options
        self._longest_s = longest_s
        self._rate = rate
        self._chance = random.Random(seed)
        self._directory = directory
        self.primary = Broker(directory / "primary", QUEUES)
        self.secondary = Broker(directory / "secondary")
        self._ends = asyncio.Event()
        self._unsure: set[Key] = set()  # settlements without an answer: the message may be gone, or come again

    async def run(self, seconds: float) -> list[str]:
        """The breaches that were found."""
        async with AsyncExitStack() as stack:
            for broker in (self.primary, self.secondary):
                await asyncio.to_thread(broker.start)
                stack.callback(broker.kill)
            self._wire = await stack.enter_async_context(Wire(free_ports(1)[0], self.primary.amqp_port))
            through = self.primary.connection_string.replace(str(self.primary.amqp_port), str(self._wire.port))
            self._pairings = [
                await stack.enter_async_context(
                    await Pairing.open(
                        namespace(self.primary, through), namespace(self.secondary), self.options, primary_name="main"
                    )
                )
                for _ in range(CLIENTS)
            ]
            log = self._directory / "syphon.log"
            self._syphon = Syphon(self.primary, self._wire.port, self.secondary, "main", self._rate, log)
            self._syphon.start()
            stack.callback(self._syphon.kill)
            readers = [asyncio.create_task(self._again(self._browse, entity)) for entity in READ_FROM.values()]
            readers += [asyncio.create_task(self._again(self._receive, "orders"))]
            senders = [asyncio.create_task(self._send(number)) for number in range(CLIENTS * len(READ_FROM))]
            await self._trouble(time.monotonic() + seconds)
            self._ends.set()
            await asyncio.gather(*senders)
            await self._drain()
            await asyncio.gather(*readers)
            code = await asyncio.to_thread(self._syphon.stop)
            ended = [f"the syphon ended with exit code {code}"] if code else []
            return ended + self.books.breaches(["sessions"])

    # -- clients

    async def _send(self, number: int) -> None:
        """One sender after the other: each waits for its answer, so that the order of a session is known."""
        entity = [*READ_FROM][number % len(READ_FROM)]
        sender = self._pairings[number // len(READ_FROM)].sender(entity)
        count = 0
        while not self._ends.is_set():
            count += 1
            group = f"session {number} {count % SESSIONS}" if entity == "sessions" else ""
            key = Key(entity, group, number, count)
            self.books.sent.add(key)
            message = Message.of(
                "|".join(map(str, key)).encode(),
                message_id=f"{number}:{count}",
                group_id=group or None,
                ttl_ms=3_600_000 if count % 3 else None,
            )
            try:
                sent = await sender.send(message.encode(), SEND_TIMEOUT_S)
                self.books.accepted[key] = Way(*sent)
            except (ClientError, TimeoutError):
                self.counts["sends that failed"] += 1
            await asyncio.sleep(BETWEEN_SENDS_S)

    async def _again(self, work: Callable[[Connection, str], Awaitable[None]], address: str) -> None:
        """Do it until the end, over connections that are lost."""
        while not self._ends.is_set():
            with suppress(ClientError, ProtocolError, TimeoutError):
                async with await connect_to(self.primary.connection_string, timeout_s=2) as connection:
                    while not self._ends.is_set():
                        await work(connection, address)
            await asyncio.sleep(0.1)

    async def _browse(self, connection: Connection, address: str) -> None:
        management = await connection.management(address)
        for message in await management.peek(100):
            self._look(Message.decode(message))
        await asyncio.sleep(0.05)

    async def _receive(self, connection: Connection, address: str) -> None:
        receiver = await connection.receiver(address, credit=50)
        while not self._ends.is_set():
            received = await receiver.receive(0.2)
            if received is not None:
                message = received.message()
                self._look(message)
                with suppress(ClientError):
                    await receiver.accept(received)
                    self.books.found.append(key_of(message))
                    continue
                self._unsure.add(key_of(message))

    def _look(self, message: Message) -> None:
        self.books.pings_seen += message.content_type == PING_CONTENT_TYPE

    # -- troubles

    async def _trouble(self, until: float) -> None:
        chance = self._chance
        first = chance.sample([*Trouble], len(Trouble))  # each kind once, also in a short run
        while (left_s := until - time.monotonic()) > 0:
            trouble = first.pop() if first else chance.choices([*Trouble], [2, 2, 3, 3, 2, 2])[0]
            lasts_s = min(chance.uniform(0.1, 1) * self._longest_s, left_s)
            self.counts[trouble.value] += 1
            match trouble:
                case Trouble.KILL | Trouble.KILL_SLOW:
                    if trouble is Trouble.KILL_SLOW:
                        self._wire.delay_s = ON_ITS_WAY_S
                        self._wire.become(State.SLOW)
                        await asyncio.sleep(2 * ON_ITS_WAY_S)
                    await asyncio.to_thread(self.primary.kill)
                    self._wire.become(State.WHOLE)
                    await asyncio.sleep(lasts_s)
                    await asyncio.to_thread(self.primary.start)
                case Trouble.STOP:
                    stopped = self.primary.processes()
                    for process in stopped:
                        process.suspend()
                    await asyncio.sleep(lasts_s)
                    for process in stopped:
                        process.resume()
                case Trouble.CUT | Trouble.SLOW:
                    self._wire.delay_s = chance.uniform(0.1, 1)
                    self._wire.become(State.CUT if trouble is Trouble.CUT else State.SLOW)
                    await asyncio.sleep(lasts_s)
                    self._wire.become(State.WHOLE)
                case Trouble.KILL_SYPHON:
                    await asyncio.to_thread(self._syphon.kill)
                    await asyncio.sleep(min(1, lasts_s))
            self._syphon.start()
            await asyncio.sleep(chance.uniform(0, self._longest_s / 2))

    # -- the end

    async def _drain(self) -> None:
        """Wait until the backlog is empty, and look at everything in the primary."""
        self._syphon.start()
        async with await connect_to(self.secondary.connection_string) as connection:
            deadline = time.monotonic() + 180
            while left := sum(
                counts.active + counts.deferred
                for name, counts in (await connection.counts()).items()
                if name in self._pairings[0].queues
            ):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{left} messages are in the backlog after three minutes")
                await asyncio.sleep(0.2)
            dead = {name: counts.dead_lettered for name, counts in (await connection.counts()).items()}
            assert not any(dead.values()), dead
        async with await connect_to(self.primary.connection_string) as connection:
            for address in READ_FROM.values():
                self.books.found += await self._left(connection, address)
        missing = self.books.accepted.keys() - set(self.books.found)
        self.books.found += missing & self._unsure  # completed, though nobody could say so

    async def _left(self, connection: Connection, address: str) -> list[Key]:
        """What is left in an entity, in the order of its sequence numbers, as a browser sees it."""
        management = await connection.management(address)
        found: list[Key] = []
        number = 0
        while messages := [Message.decode(each) for each in await management.peek(200, number)]:
            found += map(key_of, messages)
            for message in messages:
                self._look(message)
            number = (messages[-1].sequence_number or 0) + 1
        return found


def key_of(message: Message) -> Key:
    entity, group, sender, number = message.content().decode().split("|")
    return Key(entity, group, int(sender), int(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--longest", type=float, default=15, help="seconds that a trouble lasts at most")
    parser.add_argument("--rate", type=float, default=1000, help="messages per second that the syphon may move")
    parser.add_argument("--failover-interval", type=float, default=3, help="seconds")
    parser.add_argument("--ping-interval", type=float, default=3, help="seconds")
    arguments = parser.parse_args()
    options = PairingOptions(
        backlog_queue_count=3,
        failover_interval_ms=int(1000 * arguments.failover_interval),
        ping_interval_ms=int(1000 * arguments.ping_interval),
        attempt_timeout_ms=2000,
        busy_wait_ms=500,
    )
    with tempfile.TemporaryDirectory(prefix="peeklock-pairing-") as directory:
        run = Run(Path(directory), arguments.seed, options, arguments.longest, arguments.rate)
        breaches = asyncio.run(run.run(60 * arguments.minutes))
        print(f"seed {arguments.seed}: {dict(run.counts)}")
        print(run.books.summary())
        for pairing in run._pairings:
            print(pairing.counters)
        print("\n".join(breaches[:20]) or "the books balance")
    sys.exit(bool(breaches))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
