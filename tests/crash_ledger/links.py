"""One AMQP connection with one link, on proton's Python binding: bytes in, what happened out.

Not the broker's own engine or client, so that a fault they share with the broker cannot hide.
"""

import contextlib
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from proton import Collector, Connection, Delivery, Event, Link, Message, Session, Transport, TransportException

from tests.crash_ledger.ledger import Key, Outcome

READ_BYTES = 256 * 1024
DURABLE_HEADER = b"\x00\x53\x70\xc0\x02\x01\x41"


def with_key(partition_key: str) -> bytes:
    """The section of a message's annotations."""
    name, value = b"x-opt-partition-key", partition_key.encode()
    pair = b"\xa3" + bytes((len(name),)) + name + b"\xa1" + bytes((len(value),)) + value
    return b"\x00\x53\x72\xc1" + bytes((1 + len(pair), 2)) + pair


@dataclass(frozen=True)
class Login:
    """Where to connect, and as whom (SASL PLAIN)."""

    port: int
    user: str
    password: str
    host: str = "127.0.0.1"


class LinkLost(Exception):
    """The connection or the link ended. The text says why."""


class Peer(ABC):
    """A connection and its one link. Its methods raise LinkLost when it is of no further use."""

    def __init__(self, login: Login, name: str, address: str) -> None:
        try:
            self.socket = socket.create_connection((login.host, login.port), timeout=5)
        except OSError as error:
            raise LinkLost(str(error)) from None
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.name = name
        self.attached = False
        self._collector = Collector()
        self._connection = Connection()
        self._connection.collect(self._collector)
        self._connection.container = name
        self._connection.hostname = "localhost"
        self._connection.user = login.user
        self._connection.password = login.password
        self._transport = Transport()
        sasl = self._transport.sasl()
        sasl.allow_insecure_mechs = True
        sasl.allowed_mechs("PLAIN")
        self._transport.bind(self._connection)
        self._connection.open()
        session = self._connection.session()
        session.open()
        self._open_link(session, name, address)
        self.write()

    @abstractmethod
    def _open_link(self, session: Session, name: str, address: str) -> None: ...

    @abstractmethod
    def _on_delivery(self, delivery: Delivery) -> None: ...

    def read(self) -> None:
        """Take what the socket holds; its events are handled even if the connection has ended behind them."""
        ended = ""
        try:
            while True:
                data = self.socket.recv(READ_BYTES)
                if not data:
                    ended = "closed by the broker"
                    break
                for at in range(0, len(data), 16384):
                    self._push(data[at : at + 16384])
        except BlockingIOError:
            pass
        except OSError as error:
            ended = str(error)
        self._handle_events()
        if ended:
            raise LinkLost(ended)

    def _push(self, data: bytes) -> None:
        while data:
            room = self._transport.capacity()
            if room < 0:
                return  # it has failed or ended; the event that says so is in the collector
            if room == 0:
                self._handle_events()
                continue
            try:
                self._transport.push(data[:room])
            except TransportException as error:
                raise LinkLost(str(error)) from None
            data = data[room:]

    def write(self) -> None:
        """Send what is due, as far as the socket takes it."""
        self._handle_events()
        self._transport.tick(time.monotonic())
        while (pending := self._transport.pending()) > 0:
            output = self._transport.peek(min(pending, READ_BYTES))
            assert output is not None
            try:
                taken = self.socket.send(output)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkLost(str(error)) from None
            self._transport.pop(taken)

    def close(self) -> None:
        """End the connection without ceremony."""
        self.socket.close()
        with contextlib.suppress(Exception):
            self._transport.unbind()

    def _handle_events(self) -> None:
        while (event := self._collector.peek()) is not None:
            kind = event.type
            if kind is Event.DELIVERY:
                assert event.delivery is not None
                self._on_delivery(event.delivery)
            elif kind is Event.LINK_REMOTE_OPEN:
                self.attached = True
            elif kind in (Event.LINK_REMOTE_CLOSE, Event.LINK_REMOTE_DETACH):
                assert event.link is not None
                raise LinkLost(f"detached: {event.link.remote_condition}")
            elif kind is Event.CONNECTION_REMOTE_CLOSE:
                raise LinkLost(f"closed: {self._connection.remote_condition}")
            elif kind is Event.TRANSPORT_ERROR:
                raise LinkLost(f"transport: {self._transport.condition}")
            self._collector.pop()


class Sender(Peer):
    """Sends messages and reports what the broker answered: `answered(key, accepted)`."""

    def __init__(
        self,
        login: Login,
        name: str,
        address: str,
        answered: Callable[[Key, bool], None],
        partition_key: str | None = None,
    ) -> None:
        self._answered = answered
        self._head = DURABLE_HEADER + (b"" if partition_key is None else with_key(partition_key))
        self.unanswered = 0
        super().__init__(login, name, address)

    def _open_link(self, session: Session, name: str, address: str) -> None:
        self._link = session.sender(name)
        self._link.target.address = address
        self._link.snd_settle_mode = Link.SND_UNSETTLED
        self._link.open()

    @property
    def credit(self) -> int:
        return self._link.credit if self.attached else 0

    def send(self, key: Key, body: bytes) -> None:
        """Needs credit. The bytes leave with the next `write`."""
        delivery = self._link.delivery(f"{key[0]}-{key[1]}")
        delivery.key = key
        self._link.stream(self._head + b"\x00\x53\x75\xb0" + struct.pack(">I", len(body)) + body)
        self._link.advance()
        self.unanswered += 1

    def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.updated and (delivery.settled or delivery.remote_state in FINAL):
            self.unanswered -= 1
            self._answered(delivery.key, delivery.remote_state == Delivery.ACCEPTED)
            delivery.settle()


class Receiver(Peer):
    """Receives under lock, and settles with confirmation (`rcv-settle-mode` second).

    `window` is the credit kept up; 0 gives no more. Reports `delivered(receiver, delivery, body)`, where `delivery`
    has `locked_until_ms`, and `confirmed(key, outcome, applied)` for each answer to `settle`.
    """

    def __init__(
        self,
        login: Login,
        name: str,
        address: str,
        window: int,
        delivered: "Callable[[Receiver, Delivery, bytes], None]",
        confirmed: Callable[[Key, Outcome, bool], None],
    ) -> None:
        self.window = window
        self._delivered = delivered
        self._confirmed = confirmed
        self.unconfirmed: set[Key] = set()
        self._is_draining = False
        super().__init__(login, name, address)

    def _open_link(self, session: Session, name: str, address: str) -> None:
        self._link = session.receiver(name)
        self._link.source.address = address
        self._link.snd_settle_mode = Link.SND_UNSETTLED
        self._link.rcv_settle_mode = Link.RCV_SECOND
        self._link.open()
        self._link.flow(self.window)

    def drain(self) -> None:
        """Ask for what there is, up to the credit: when `is_drained`, it has come."""
        self._is_draining = True
        self._link.drain(0)

    @property
    def is_drained(self) -> bool:
        return not self._link.draining()

    def go_on(self) -> None:
        """Behind a drain: as before it."""
        self._is_draining = False
        self._link.flow(self.window - self._link.credit)

    def settle(self, delivery: Delivery, key: Key, outcome: Outcome) -> None:
        """The outcome leaves with the next `write`. Credit follows."""
        delivery.key, delivery.outcome = key, outcome
        self.unconfirmed.add(key)
        delivery.update(STATES[outcome])

    def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.readable and not delivery.partial:
            encoded = self._link.recv(delivery.pending)
            assert encoded is not None
            self._link.advance()
            message = Message()
            message.decode(encoded)
            body = message.body
            delivery.locked_until_ms = int(message.annotations["x-opt-locked-until"])
            self._delivered(self, delivery, bytes(body) if isinstance(body, bytes | memoryview) else b"")
            if self.window and not self._is_draining and self._link.credit <= self.window // 2:
                self._link.flow(self.window - self._link.credit)
        elif delivery.settled and hasattr(delivery, "outcome"):
            applied = (
                delivery.remote_state == STATES[delivery.outcome] and delivery.remote.condition is None
            )  # a refusal is `rejected` with an error; the answer to dead-lettering is `rejected` without one
            self.unconfirmed.discard(delivery.key)
            self._confirmed(delivery.key, delivery.outcome, applied)
            delivery.settle()


FINAL = (Delivery.ACCEPTED, Delivery.REJECTED, Delivery.RELEASED, Delivery.MODIFIED)
STATES = {
    Outcome.COMPLETE: Delivery.ACCEPTED,
    Outcome.DEAD_LETTER: Delivery.REJECTED,
    Outcome.ABANDON: Delivery.MODIFIED,
}
