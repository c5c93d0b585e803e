"""Opens many idle AMQP connections, each with one session and one receiver, and holds them until told to end.

Raw sockets and hand-made frames (AMQP 1.0 parts 2 and 5), so that thousands cost this program next to nothing.
Prints `open N` when all receivers are attached; ends when standard input is closed.
"""

import argparse
import resource
import selectors
import socket
import struct
import sys
import time

AT_ONCE = 100  # connections being opened at the same time: below a listener's usual backlog
TIMEOUT_S = 120.0
CREDIT = 10
SASL_OUTCOME, OPEN, ATTACH, DETACH, CLOSE = 0x44, 0x10, 0x12, 0x16, 0x18


class Refused(Exception):
    """The broker ended a connection or refused what was asked."""


def _text(value: str, code: int) -> bytes:
    raw = value.encode()
    return struct.pack(">BI", code, len(raw)) + raw


def string(value: str) -> bytes:
    return _text(value, 0xB1)


def symbol(value: str) -> bytes:
    return _text(value, 0xB3)


def uint(value: int) -> bytes:
    return struct.pack(">BI", 0x70, value)


NULL, TRUE = b"\x40", b"\x41"


def described(code: int, *fields: bytes) -> bytes:
    body = b"".join(fields)
    return struct.pack(">BBBBII", 0x00, 0x53, code, 0xD0, len(body) + 4, len(fields)) + body


def frame(kind: int, performative: bytes) -> bytes:
    return struct.pack(">IBBH", len(performative) + 8, 2, kind, 0) + performative


def greeting(user: str, password: str) -> bytes:
    response = b"\0" + user.encode() + b"\0" + password.encode()
    init = described(0x41, symbol("PLAIN"), struct.pack(">BI", 0xB0, len(response)) + response)
    return b"AMQP\x03\x01\x00\x00" + frame(1, init)


def receiver(name: str, hostname: str, address: str, credit: int) -> bytes:
    """Header, open, begin, attach of a receiver, flow with its credit."""
    source, target = described(0x28, string(address)), described(0x29)
    attach = described(0x12, string(name), uint(0), TRUE, NULL, NULL, source, target)
    flow = described(0x13, uint(0), uint(2048), uint(0), uint(2048), uint(0), uint(0), uint(credit))
    return b"".join(
        [
            b"AMQP\x00\x01\x00\x00",
            frame(0, described(0x10, string(name), string(hostname))),
            frame(0, described(0x11, NULL, uint(0), uint(2048), uint(2048))),
            frame(0, attach),
            frame(0, flow),
        ]
    )


class Connection:
    """One connection on its way to an attached receiver."""

    def __init__(self, host: str, port: int, greeting: bytes, then: bytes) -> None:
        self.socket = socket.create_connection((host, port), timeout=10)
        self.attached = False
        self._then = then
        self._input = bytearray()
        self.socket.sendall(greeting)

    def on_readable(self) -> None:
        """Raises Refused."""
        data = self.socket.recv(65536)
        if not data:
            raise Refused("connection closed")
        self._input += data
        while (code := self._next_performative()) is not None:
            if code == SASL_OUTCOME:
                self.socket.sendall(self._then)
            elif code == ATTACH:
                self.attached = True
            elif code in (DETACH, CLOSE):
                raise Refused(f"refused: {bytes(self._last)!r}")

    def _next_performative(self) -> int | None:
        """The descriptor of the next complete frame; 0 for a protocol header or an empty frame."""
        if len(self._input) < 8:
            return None
        if self._input[:4] == b"AMQP":
            del self._input[:8]
            return 0
        size, offset = struct.unpack_from(">IB", self._input)
        if len(self._input) < size:
            return None
        self._last = self._input[:size]
        del self._input[:size]
        body = self._last[offset * 4 :]
        if body[:2] == b"\x00\x53":
            if body[2] == SASL_OUTCOME and b"\x50\x00" not in body[3:] and b"\x50" in body[3:]:
                raise Refused(f"login refused: {bytes(body)!r}")
            return body[2]
        if body[:2] == b"\x00\x80":
            return body[9]
        return 0


def open_all(
    host: str, port: int, user: str, password: str, addresses: list[str], count: int, *, credit: int = CREDIT
) -> list[Connection]:
    """Returns when every receiver is attached. Raises Refused or TimeoutError."""
    hello = greeting(user, password)
    opened: list[Connection] = []
    pending = 0
    until = time.monotonic() + TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        while len(opened) < count or pending:
            while len(opened) < count and pending < AT_ONCE:
                number = len(opened)
                then = receiver(f"idle-{number}", host, addresses[number % len(addresses)], credit)
                connection = Connection(host, port, hello, then)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                opened.append(connection)
                pending += 1
            for key, _ in selector.select(1):
                connection = key.data
                connection.on_readable()
                if connection.attached:
                    selector.unregister(connection.socket)
                    pending -= 1
            if time.monotonic() > until:
                raise TimeoutError(f"{pending} of {len(opened)} connections have no attached receiver yet")
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--password", required=True)
    parser.add_argument("--addresses", required=True, help="comma-separated; receivers take turns")
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(options.count + 100, most), most))
    addresses = options.addresses.split(",")
    held = open_all(options.host, options.port, options.user, options.password, addresses, options.count)
    print(f"open {len(held)}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
