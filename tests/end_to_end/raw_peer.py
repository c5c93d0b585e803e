"""An AMQP peer of nothing but sockets and frames, which says whatever a test wants said, right or wrong.

    peer = RawPeer.connect(port)          # SASL with the root key, open, begin on channel 0
    peer.attach_sender("orders")
    peer.transfer(message(b"body"))
    assert peer.expect(DISPOSITION).fields[4] == ...

Frames are built from codec values, field by field, so that any of them can be wrong. What is not expected yet is
kept in order; every wait has an end.
"""

import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from protocol.codec import Described, Symbol, UByte, UInt, ULong, UShort, array, decode, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from protocol.symbols import AMQP_HEADER
from tests.brokers import KEY, KEY_NAME
from tests.patience import PATIENCE_S
from tests.whole_frames import require_whole

OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
SASL_OUTCOME = 0x44
RECEIVED, ACCEPTED, REJECTED, RELEASED, MODIFIED = range(0x23, 0x28)
BATCH_FORMAT = 0x80013700
HEARTBEAT = bytes.fromhex("0000000802000000")

NULL = object()  # a terminus that is null
PYTHON = "azsdk-python-servicebus"  # the product of an SDK that reads fields by position


class Closed(Exception):
    """The broker has closed the socket, or reset it."""


class Frame(NamedTuple):
    """A frame's performative: `code` None and no fields for an empty frame. `payload` is what follows it."""

    channel: int
    code: int | None
    fields: list[Any]
    payload: bytes


def frame_bytes(channel: int, body: bytes, kind: int = 0) -> bytes:
    return (8 + len(body)).to_bytes(4, "big") + bytes((2, kind)) + channel.to_bytes(2, "big") + body


def performative(channel: int, code: int, fields: Sequence[Any], payload: bytes = b"") -> bytes:
    return frame_bytes(channel, encode(Described(ULong(code), list(fields))) + payload)


def raw_performative(channel: int, code: int, content: bytes, count: int) -> bytes:
    """Like `performative`, of fields that are encoded already, well or badly."""
    return frame_bytes(
        channel, b"\x00\x53" + bytes((code, 0xD0)) + (len(content) + 4).to_bytes(4, "big") + _u32(count) + content
    )


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


def source(address: Any, *, dynamic: bool = False, mode: Any = None, filters: Any = None) -> Described:
    return Described(ULong(0x28), [address, UInt(0), Symbol("session-end"), UInt(0), dynamic, None, mode, filters])


def target(address: Any, *, dynamic: bool = False) -> Described:
    return Described(ULong(0x29), [address, UInt(0), Symbol("session-end"), UInt(0), dynamic])


def coordinator() -> Described:
    return Described(ULong(0x30), [])


def outcome(code: int, *fields: Any) -> Described:
    return Described(ULong(code), list(fields))


def error_of(frame: Frame) -> tuple[str, str]:
    """Condition and description of the error in a detach, end, close or rejected."""
    index = {DETACH: 2, END: 0, CLOSE: 0, DISPOSITION: 4}[frame.code or 0]
    error = frame.fields[index] if len(frame.fields) > index else None
    if frame.code == DISPOSITION:
        assert error is not None
        assert error.descriptor == REJECTED, error
        error = error.value[0]
    if error is None:
        return "", ""
    return str(error.value[0]), str(error.value[1])


def message(
    body: bytes = b"",
    *,
    properties: Sequence[Any] = (),
    annotations: Any = None,
    header: Any = None,
    application: Any = None,
) -> bytes:
    """An encoded message of the sections that are given, and one data section."""
    sections = []
    if header is not None:
        sections.append(encode(Described(ULong(0x70), list(header))))
    if annotations is not None:
        sections.append(encode(Described(ULong(0x72), annotations)))
    if properties:
        sections.append(encode(Described(ULong(0x73), list(properties))))
    if application is not None:
        sections.append(encode(Described(ULong(0x74), application)))
    sections.append(encode(Described(ULong(0x75), body)))
    return b"".join(sections)


def body_of(payload: bytes) -> bytes:
    """The data of an encoded message's data section."""
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        if section.descriptor == 0x75:
            return bytes(section.value)
    raise AssertionError("a message without data")


def batch(*messages: bytes) -> bytes:
    return b"".join(encode(Described(ULong(0x75), each)) for each in messages)


class RawPeer:
    """One connection. Numbers of handles and deliveries are the test's own business; these are only defaults."""

    def __init__(
        self,
        port: int,
        *,
        receive_buffer_bytes: int | None = None,
        product: str | None = None,
        properties: dict[Symbol, Any] | None = None,
        desired: Sequence[str] = (),
        container: str = "raw-peer",
    ) -> None:
        """`product` is what its open says of itself: that of Python's SDK reads fields by position. `properties`: the
        others of its open. `desired` are the capabilities that it asks for.
        """
        self.desired = desired
        self.container = container
        self.product = product
        self.properties = properties or {}
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self._input = b""
        self._layer_begins = True
        self._kept: deque[Frame] = deque()
        self.next_delivery_id = 0
        self.next_handle = 0

    @classmethod
    def connect(cls, port: int, *, key_name: str = KEY_NAME, key: str = KEY, **options: Any) -> Self:
        """A peer that may do what the key allows, with a session on channel 0."""
        peer = cls(port, **options)
        try:
            peer.sasl_plain(key_name, key)
            peer.open()
            peer.begin()
        except BaseException:
            peer.socket.close()
            raise
        return peer

    @classmethod
    def anonymous(cls, port: int) -> Self:
        """A peer without any right, with a session on channel 0."""
        peer = cls(port)
        peer.sasl("ANONYMOUS", b"")
        peer.open()
        peer.begin()
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    # -- bytes and frames

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say(self, code: int, *fields: Any, channel: int = 0, payload: bytes = b"") -> None:
        self.send(performative(channel, code, fields, payload))

    def receive(self, timeout_s: float = PATIENCE_S) -> Frame:
        """The next frame, a heartbeat too. Raises Closed, or TimeoutError."""
        if self._kept:
            return self._kept.popleft()
        return self._read(time.monotonic() + timeout_s)

    def _read(self, deadline: float) -> Frame:
        if self._layer_begins:
            self._need(8, deadline)
            header, self._input = self._input[:8], self._input[8:]
            assert header in (AMQP_HEADER, SASL_HEADER), header
            self._layer_begins = False
        self._need(4, deadline)
        size = int.from_bytes(self._input[:4], "big")
        self._need(size, deadline)
        frame, self._input = self._input[:size], self._input[size:]
        channel = int.from_bytes(frame[6:8], "big")
        if size == 8:
            return Frame(channel, None, [], b"")
        described, end = decode(frame, 8)
        require_whole(int(described.descriptor), described.value, by_position=self.product == PYTHON)
        return Frame(channel, int(described.descriptor), described.value, frame[end:])

    def _need(self, count: int, deadline: float) -> None:
        while len(self._input) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("nothing came")
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError as error:
                raise Closed from error
            finally:
                with suppress(OSError):
                    self.socket.settimeout(PATIENCE_S)
            if not data:
                raise Closed
            self._input += data

    def expect(self, code: int, timeout_s: float = PATIENCE_S) -> Frame:
        """The next frame with this performative; others that come before it are kept. Raises Closed, TimeoutError."""
        for frame in self._kept:
            if frame.code == code:
                self._kept.remove(frame)
                return frame
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._read(deadline)
            if frame.code == code:
                return frame
            if frame.code is not None:
                self._kept.append(frame)

    def keep(self, frames: Sequence[Frame]) -> None:
        """Keep frames that were taken, before all others."""
        self._kept.extendleft(reversed(frames))

    def take_kept(self, code: int) -> Frame | None:
        """The next of those that came while other frames were expected; None if there is none."""
        found = next((frame for frame in self._kept if frame.code == code), None)
        if found is not None:
            self._kept.remove(found)
        return found

    def drop(self, code: int) -> None:
        """Forget what is kept of this performative: what came on a link before its detach is of no use after it."""
        self._kept = deque(frame for frame in self._kept if frame.code != code)

    def nothing_more(self, code: int, within_s: float = 0.2) -> None:
        """Fails if a frame with this performative comes."""
        try:
            frame = self.expect(code, within_s)
        except (TimeoutError, Closed):
            return
        raise AssertionError(f"unexpected {frame}")

    def wait_closed(self, timeout_s: float = PATIENCE_S) -> list[Frame]:
        """Everything until the broker closes the socket."""
        frames = list(self._kept)
        self._kept.clear()
        deadline = time.monotonic() + timeout_s
        with suppress(Closed):
            while True:
                frames.append(self._read(deadline))
        return frames

    # -- layers

    def sasl(self, mechanism: str, response: bytes | None) -> Frame:
        """The outcome. The AMQP layer begins behind it."""
        init = encode(Described(ULong(0x41), [Symbol(mechanism), response]))
        self.send(SASL_HEADER + frame_bytes(0, init, kind=1))
        frame = self.expect(SASL_OUTCOME)
        self._kept.clear()  # the mechanisms
        self._layer_begins = True
        return frame

    def sasl_plain(self, key_name: str = KEY_NAME, key: str = KEY) -> Frame:
        return self.sasl("PLAIN", plain_response(key_name, key))

    def open(self, *, idle_time_out_ms: int | None = None, header: bool = True) -> Frame:
        idle = None if idle_time_out_ms is None else UInt(idle_time_out_ms)
        fields: list[Any] = [self.container, "localhost", UInt(1 << 20), UShort(65535), idle]
        properties = self.properties if self.product is None else {**self.properties, Symbol("product"): self.product}
        if properties or self.desired:
            desired = array(Symbol, map(Symbol, self.desired)) if self.desired else None
            fields += [None, None, None, desired, properties or None]
        self.send((AMQP_HEADER if header else b"") + performative(0, OPEN, fields))
        return self.expect(OPEN)

    def begin(self, channel: int = 0, *, incoming_window: int = 1 << 20) -> Frame:
        self.say(BEGIN, None, UInt(0), UInt(incoming_window), UInt(1 << 20), UInt(65535), channel=channel)
        return self.expect(BEGIN)

    def close(self) -> list[Frame]:
        """Close cleanly; what came until the end."""
        self.say(CLOSE)
        return self.wait_closed()

    # -- links: `sender` and `receiver` are this peer's roles

    def attach(
        self,
        *,
        sender: bool,
        address: Any = None,
        name: Any = None,
        handle: Any = None,
        channel: int = 0,
        source_: Any = None,
        target_: Any = None,
        settled: bool = False,
        max_message_bytes: int | None = None,
        properties: Any = None,
    ) -> int:
        """Say attach, and do not wait; returns the handle. A terminus may be NULL."""
        if handle is None:
            handle = self.next_handle
            self.next_handle += 1
        if source_ is None:
            source_ = source("here" if sender else address)
        if target_ is None:
            target_ = target(address if sender else "here")
        self.say(
            ATTACH,
            name if name is not None else f"link-{handle}",
            UInt(handle),
            not sender,
            UByte(1 if settled else 0 if not sender else 2),
            UByte(0 if settled or sender else 1),
            None if source_ is NULL else source_,
            None if target_ is NULL else target_,
            None,
            None,
            UInt(0) if sender else None,
            None if max_message_bytes is None else ULong(max_message_bytes),
            None,
            None,
            properties,
            channel=channel,
        )
        return int(handle)

    def attach_sender(self, address: str, **options: Any) -> int:
        """An attached sender with credit."""
        handle = self.attach(sender=True, address=address, **options)
        attached = self.expect(ATTACH)
        assert attached.fields[6] is not None, self.expect(DETACH)
        self.expect(FLOW)
        return handle

    def attach_receiver(self, address: str, credit: int = 0, **options: Any) -> int:
        handle = self.attach(sender=False, address=address, **options)
        attached = self.expect(ATTACH)
        assert attached.fields[5] is not None, self.expect(DETACH)
        if credit:
            self.flow(handle, credit, channel=options.get("channel", 0))
        return handle

    def refusal(self) -> tuple[str, str]:
        """Condition and description with which an attach is refused: an attach without terminus, then a detach."""
        attached = self.expect(ATTACH)
        detached = self.expect(DETACH)
        assert None in attached.fields[5:7], attached
        assert detached.fields[1] is True
        return error_of(detached)

    def flow(
        self,
        handle: int | None,
        credit: int = 0,
        *,
        delivery_count: int = 0,
        drain: bool = False,
        echo: bool = False,
        channel: int = 0,
        incoming_window: int = 1 << 20,
        next_incoming_id: int = 0,
    ) -> None:
        link: list[Any] = [None, None, None]
        if handle is not None:
            link = [UInt(handle), UInt(delivery_count), UInt(credit)]
        window = [UInt(next_incoming_id), UInt(incoming_window), UInt(0), UInt(1 << 20)]
        self.say(FLOW, *window, *link, None, drain, echo, channel=channel)

    def wait_until_read(self) -> None:
        """The broker has read all that was said until now."""
        handle = self.attach(sender=True, address="there is no such entity")
        self.refusal()
        self.detach(handle)

    def transfer(
        self,
        payload: bytes,
        handle: int = 0,
        *,
        settled: bool | None = False,
        message_format: int = 0,
        more: bool = False,
        first: bool = True,
        channel: int = 0,
        tag: Any = None,
        state: Any = None,
    ) -> int:
        """One transfer frame; returns the delivery id. With `first` False it goes on with the delivery before."""
        if first:
            delivery_id = self.next_delivery_id
            self.next_delivery_id += 1
            tag = delivery_id.to_bytes(16, "big") if tag is None else tag
            fields = [UInt(handle), UInt(delivery_id), tag, UInt(message_format), settled, more]
        else:
            delivery_id = self.next_delivery_id - 1
            fields = [UInt(handle), None, None, None, settled, more]
        if state is not None:
            fields += [None, state]
        self.say(TRANSFER, *fields, channel=channel, payload=payload)
        return delivery_id

    def transfer_in_parts(self, payload: bytes, handle: int = 0, *, part_bytes: int = 60_000, **options: Any) -> None:
        """As many transfers as frames of this size need; the same options for all."""
        for at in range(0, len(payload), part_bytes):
            more = at + part_bytes < len(payload)
            self.transfer(payload[at : at + part_bytes], handle, more=more, first=at == 0, **options)

    def settle(
        self, first: int, last: int | None = None, *, state: Any = None, settled: bool = False, role: bool = True
    ) -> None:
        state = outcome(ACCEPTED) if state is None else state
        self.say(DISPOSITION, role, UInt(first), None if last is None else UInt(last), settled, state)

    def detach(self, handle: int, closed: bool = True, channel: int = 0) -> None:
        self.say(DETACH, UInt(handle), closed, channel=channel)
