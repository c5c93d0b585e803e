"""A gateway without sockets: clients that speak frames, and workers that answer what a test says."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import msgpack

from broker import runs, wire
from broker.catalog.catalog import Definition
from broker.child import Instructions
from broker.gateway.connection import ClientConnection
from broker.gateway.gateway import Gateway
from broker.gateway.worker_socket import SocketConnection
from broker.namespace.entities import QueueDescription
from broker.namespace.tiers import Sku
from broker.settings.config import Settings
from broker.wire import Op, SendRun, Settle
from protocol.codec import Described, Symbol, UByte, UInt, ULong, UShort, decode, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from protocol.symbols import AMQP_HEADER
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import (
    ATTACH,
    BEGIN,
    CLOSE,
    FLOW,
    OPEN,
    TRANSFER,
    Frame,
    frame_bytes,
    performative,
    source,
    target,
)
from tests.whole_frames import require_whole

QUEUE_ID = 7 << 3  # of `orders`


def without_runs(command: Any) -> Any:
    """The same command with each message and token of its own."""
    if isinstance(command, SendRun):
        messages = runs.messages_of(command.run, with_extra=True)
        return wire.send(command.partition, command.channel, command.queue, messages)
    if isinstance(command, Settle) and sum(command.channels[1::2]) != len(command.tokens):
        return command._replace(tokens=runs.tokens_of(command.tokens))
    return command


class Transport(asyncio.Transport):
    """What is written to it is kept. Its end is told to the protocol soon, as asyncio does."""

    def __init__(self, protocol: asyncio.Protocol | asyncio.BufferedProtocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.ended = False
        self.is_reading_paused = False

    def connect(self) -> None:
        self.protocol.connection_made(self)

    def feed(self, data: bytes) -> None:
        """The peer sends; as with asyncio, what the protocol raises ends the connection (here: the test)."""
        while data and not self.ended:
            if isinstance(self.protocol, asyncio.Protocol):
                self.protocol.data_received(data)
                return
            with memoryview(self.protocol.get_buffer(-1)) as buffer:
                taken = min(len(buffer), len(data))
                buffer[:taken] = data[:taken]
            self.protocol.buffer_updated(taken)
            data = data[taken:]

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.written += part

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def close(self) -> None:
        self.abort()

    def is_closing(self) -> bool:
        return self.ended

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Worker:
    """The other end of a gateway's connection to its worker."""

    def __init__(self, connection: SocketConnection, partition: int = 0, version: int = wire.VERSION) -> None:
        self.connection = connection
        self.transport = Transport(connection)
        self.transport.connect()
        self.say([Op.HELLO, version, [partition]])

    async def commands(self, *, as_they_are: bool = False) -> list[list[Any]]:
        """What came since the last call, but that the gateway follows the catalog; messages of runs one by one, unless
        `as_they_are`.
        """
        await asyncio.sleep(0)  # what waits for the end of the turn is written
        data, self.transport.written = bytes(self.transport.written), bytearray()
        commands: list[list[Any]] = []
        at = 0
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            commands += [
                list(each if as_they_are else without_runs(each))
                for each in wire.unpack(data[at + 4 : end])
                if each.op not in (Op.JOIN, Op.FOLLOWED, Op.TAKES_RUNS)
            ]
            at = end
        return commands

    def say(self, *messages: Any) -> None:
        """One frame with these."""
        body = msgpack.packb(messages)
        self.transport.feed(len(body).to_bytes(4, "big") + body)

    def lose(self) -> None:
        """The worker dies."""
        self.transport.ended = True
        self.connection.connection_lost(None)


class Client:
    """One client of the gateway, with a session on channel 0."""

    def __init__(self, gateway: Gateway) -> None:
        self.connection = ClientConnection(gateway)
        self.transport = Transport(self.connection)
        self._frames: deque[Frame] = deque()
        self.next_handle = 0
        self.next_delivery_id = 0

    def connect(self) -> None:
        self.transport.connect()
        init = encode(Described(ULong(0x41), [Symbol("PLAIN"), plain_response(KEY_NAME, KEY)]))
        self.transport.feed(SASL_HEADER + frame_bytes(0, init, kind=1))
        self.transport.written.clear()
        self.say(OPEN, "client", "localhost", UInt(1 << 20), UShort(100), header=True)
        self.say(BEGIN, None, UInt(0), UInt(1000), UInt(1000), UInt(1000))
        del self.transport.written[:8]

    def say(self, code: int, *fields: Any, payload: bytes = b"", header: bool = False) -> None:
        self.transport.feed((AMQP_HEADER if header else b"") + performative(0, code, fields, payload))

    def attach(
        self, *, sender: bool, address: str, credit: int = 0, mode: Any = None, filters: dict[Any, Any] | None = None
    ) -> int:
        """`mode` and `filters` are of a receiver's source."""
        handle = self.next_handle
        self.next_handle += 1
        ends = (
            (source("here"), target(address))
            if sender
            else (source(address, mode=mode, filters=filters), target("here"))
        )
        count = UInt(0) if sender else None
        modes = UByte(2 if sender else 0), UByte(0 if sender else 1)
        self.say(ATTACH, f"link-{handle}", UInt(handle), not sender, *modes, *ends, None, None, count)
        if credit:
            numbers = (UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(handle), UInt(0), UInt(credit))
            self.say(FLOW, *numbers)
        return handle

    def transfer(self, handle: int, payload: bytes, *, settled: bool = False) -> int:
        number = self.next_delivery_id
        self.next_delivery_id += 1
        fields = (UInt(handle), UInt(number), number.to_bytes(8, "big"), UInt(0), settled)
        self.say(TRANSFER, *fields, payload=payload)
        return number

    def frames(self) -> list[Frame]:
        """What the gateway has said since the last call."""
        data, self.transport.written = bytes(self.transport.written), bytearray()
        frames = []
        at = 0
        while at < len(data):
            end = at + int.from_bytes(data[at : at + 4], "big")
            if end - at > 8:
                described, rest = decode(data[:end], at + 8)
                require_whole(int(described.descriptor), described.value)
                frames.append(Frame(0, int(described.descriptor), described.value, data[rest:end]))
            at = end
        return frames

    @property
    def has_ended(self) -> bool:
        """Its connection is closed, or cut."""
        return self.transport.ended or any(frame.code == CLOSE for frame in self.frames())


def started_gateway(directory: Path, **properties: Any) -> tuple[Gateway, Worker]:
    """A gateway that knows the queue `orders`, and its only worker."""
    gateway, [worker] = gateway_with_workers(directory, 1, **properties)
    return gateway, worker


def gateway_with_workers(
    directory: Path, count: int, *, sku: Sku | None = None, **properties: Any
) -> tuple[Gateway, list[Worker]]:
    """A gateway with so many workers, each with one partition; the queue `orders` is on all of them."""
    settings = Settings.model_validate(
        {
            "data_dir": str(directory),
            "partitions": count,
            "workers": count,
            "security": {"root_key": KEY},
            "ops": {"port": None},
            "sku": sku,
        }
    )
    sockets = tuple(f"worker-{number}" for number in range(count))
    instructions = Instructions(
        settings=settings, supervisor=0, gateway=0, worker=None, partitions=(), sockets=sockets, restarts=0
    )
    gateway = Gateway(instructions)
    workers = []
    for number, connection in enumerate(gateway.router.workers):
        assert isinstance(connection, SocketConnection)
        workers.append(Worker(connection, number))
    description = QueueDescription(name="orders", enable_partitioning=count > 1, **properties)
    document = Definition(QUEUE_ID >> 3, description, 0, 0, tuple(range(count))).document()
    workers[0].say([Op.CATALOG, 1, [document]])
    return gateway, workers
