"""Two paired brokers under a ledger, while the primary is killed, stopped, cut off and slowed at random.

    python -m tests.pairing.ledger --minutes 30

Clients send to a queue, a topic and sessions, by the library or through a sidecar. Others receive and browse meanwhile.
A syphon drains the backlog, and is killed now and then. In the end the books must balance (`tests.pairing.books`).
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

from broker.pairing.backlog import backlog_queues
from broker.pairing.options import PairingOptions
from broker.pairing.pairing import Pairing
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError
from protocol.client.messages import Message
from protocol.errors import ProtocolError
from protocol.symbols import PING_CONTENT_TYPE
from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.pairing.again import Again
from tests.pairing.books import Books, Key, Way
from tests.pairing.conftest import QUEUES, namespace
from tests.pairing.wire import State, Wire
from tests.patience import PATIENCE_S
from tests.ports import free_ports
from tests.sidecars import Sidecar

NAME = "main"
CLIENTS = 3
SESSIONS = 6
READ_FROM = {"orders": "orders", "news": "news/Subscriptions/all", "sessions": "sessions"}
SEND_TIMEOUT_S = 20.0
BETWEEN_SENDS_S = 0.02
ON_ITS_WAY_S = 0.3


Send = Callable[[bytes], Awaitable[Way]]


class Trouble(Enum):
    KILL = "primary killed"
    KILL_SLOW = "primary killed while much is on its way"
    STOP = "primary stopped"
    CUT = "primary cut off"
    SLOW = "primary slowed"
    KILL_SYPHON = "syphon killed"


class Syphon:
    """The process that drains the backlog, started again when it was killed."""

    def __init__(self, primary: Broker, port: int, secondary: Broker, queues: int, rate: float, log: Path) -> None:
        through = primary.connection_string.replace(str(primary.amqp_port), str(port))
        self._arguments = ["syphon", *_namespaces(primary, through, secondary)]
        self._arguments += ["--backlog-queues", str(queues), "--rate", str(rate)]
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
        return self._process.wait(PATIENCE_S)


class Run:
    """One run of the ledger. Troubles last `longest_s` at most.

    `rate` is that of the syphon. With less than senders send it often has a backlog when the next trouble comes.
    `by_sidecar`: clients send through one, and not by the library.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        options: PairingOptions,
        longest_s: float,
        rate: float,
        *,
        by_sidecar: bool = False,
    ) -> None:
        self.books = Books()
        self.counts: Counter[str] = Counter()
        self.options = options
        self._longest_s = longest_s
        self._rate = rate
        self._by_sidecar = by_sidecar
        self.pairings: list[Pairing] = []
        self.by_backlog = 0  # messages that a sidecar has sent there
        self._sidecar: Sidecar | None = None
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
            senders = await (self._by_a_sidecar if self._by_sidecar else self._by_the_library)(stack, through)
            log = self._directory / "syphon.log"
            queues = self.options.backlog_queue_count
            self._syphon = Syphon(self.primary, self._wire.port, self.secondary, queues, self._rate, log)
            self._syphon.start()
            stack.callback(self._syphon.kill)
            readers = [asyncio.create_task(self._again(self._browse, entity)) for entity in READ_FROM.values()]
            readers += [asyncio.create_task(self._again(self._receive, "orders"))]
            sending = [asyncio.create_task(self._send(number, send)) for number, send in enumerate(senders)]
            await self._trouble(time.monotonic() + seconds)
            self._ends.set()
            await asyncio.gather(*sending)
            await self._drain()
            await asyncio.gather(*readers)
            if self._sidecar is not None:
                self.by_backlog = await asyncio.to_thread(_sent_to_backlog, self._sidecar)
            code = await asyncio.to_thread(self._syphon.stop)
            ended = [f"the syphon ended with exit code {code}"] if code else []
            return ended + self.books.breaches(["sessions"], self._unknown_ways)

    @property
    def _unknown_ways(self) -> int:
        """The primary, the backlog queues, and once more the primary.

        There, what a sidecar has sent without an answer, while the primary stood still, comes after what it sent later.
        """
        return 2 + self.options.backlog_queue_count

    # -- clients

    async def _by_the_library(self, stack: AsyncExitStack, primary: str) -> list[Send]:
        """One after the other for each entity; `primary` is a connection string."""
        found: list[Send] = []
        for _ in range(CLIENTS):
            one, other = namespace(self.primary, primary), namespace(self.secondary)
            pairing = await Pairing.open(one, other, self.options, primary_name=NAME)
            self.pairings.append(await stack.enter_async_context(pairing))
            found += [_by(pairing, entity) for entity in READ_FROM]
        return found

    async def _by_a_sidecar(self, stack: AsyncExitStack, primary: str) -> list[Send]:
        arguments = [*_namespaces(self.primary, primary, self.secondary), "--backlog-queues"]
        arguments += [str(self.options.backlog_queue_count)]
        for name in ("failover_interval", "ping_interval", "attempt_timeout"):
            arguments += [f"--{name.replace('_', '-')}", f"{getattr(self.options, f'{name}_ms')}ms"]
        port, ops_port = free_ports(2)
        sidecar = self._sidecar = Sidecar(self._directory / "sidecar", port, ops_port, arguments)
        await asyncio.to_thread(sidecar.start)
        stack.callback(sidecar.kill)
        found: list[Send] = []
        for number in range(CLIENTS * len(READ_FROM)):
            client = await stack.enter_async_context(Again(sidecar.connection_string_for(KEY_NAME, KEY)))
            found.append(_through(client, [*READ_FROM][number % len(READ_FROM)]))
        return found

    async def _send(self, number: int, send: Send) -> None:
        """One message after the other: each waits for its answer, so that the order of a session is known."""
        entity = [*READ_FROM][number % len(READ_FROM)]
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
                self.books.accepted[key] = await send(message.encode())
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
                        await asyncio.sleep(2 * ON_ITS_WAY_S)  # some are on their way when it is killed
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
                if name in backlog_queues(NAME, self.options.backlog_queue_count)
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


def _by(pairing: Pairing, entity: str) -> Send:
    sender = pairing.sender(entity)

    async def send(message: bytes) -> Way:
        return Way(*await sender.send(message, SEND_TIMEOUT_S))

    return send


def _through(client: Again, entity: str) -> Send:
    async def send(message: bytes) -> Way:
        attempts = await client.send(entity, message, SEND_TIMEOUT_S)
        return Way("", False, attempts > 1)

    return send


def _sent_to_backlog(sidecar: Sidecar) -> int:
    name = "peeklock_pair_messages_sent_to_backlog_total "
    _, text = sidecar.get("/metrics")
    return int(next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)))


def _namespaces(primary: Broker, connection_string: str, secondary: Broker) -> list[str]:
    """Options of a syphon or a sidecar; the primary is reached by that connection string."""
    return [
        *("--primary", connection_string, "--primary-http", f"http://localhost:{primary.http_port}"),
        *("--secondary", secondary.connection_string, "--secondary-http", f"http://localhost:{secondary.http_port}"),
        *("--primary-name", NAME),
    ]


def key_of(message: Message) -> Key:
    entity, group, sender, number = message.content().decode().split("|")
    return Key(entity, group, int(sender), int(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--longest", type=float, default=15, help="seconds that a trouble lasts at most")
    parser.add_argument("--rate", type=float, default=1000, help="messages per second that the syphon may move")
    parser.add_argument("--sidecar", action="store_true", help="clients send through one, and not by the library")
    parser.add_argument("--failover-interval", type=float, default=3, help="seconds")
    parser.add_argument("--ping-interval", type=float, default=3, help="seconds")
    arguments = parser.parse_args()
    options = PairingOptions(
        backlog_queue_count=1 if arguments.sidecar else 3,  # few ways, so that order says more
        failover_interval_ms=int(1000 * arguments.failover_interval),
        ping_interval_ms=int(1000 * arguments.ping_interval),
        attempt_timeout_ms=2000,
        busy_wait_ms=500,
    )
    with tempfile.TemporaryDirectory(prefix="peeklock-pairing-") as directory:
        run = Run(
            Path(directory), arguments.seed, options, arguments.longest, arguments.rate, by_sidecar=arguments.sidecar
        )
        breaches = asyncio.run(run.run(60 * arguments.minutes))
        print(f"seed {arguments.seed}: {dict(run.counts)}")
        print(run.books.summary())
        if arguments.sidecar:
            print(f"the sidecar has sent {run.by_backlog:,} of these to the backlog")
        for pairing in run.pairings:
            print(pairing.counters)
        print("\n".join(breaches[:20]) or "the books balance")
    sys.exit(bool(breaches))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
