"""Peers without any right, over AMQP, TLS, WebSockets and HTTP. Each kind is a function that `KINDS` names."""

import base64
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from protocol.engine.sasl import SASL_HEADER
from tests.end_to_end.raw_peer import BEGIN, RawPeer, frame_bytes
from tests.hostile_input import HOSTILE, OPENED, WINDOW, attach, extended, say, transfer
from tests.hostile_peers.peers import Place

KIB = 1 << 10
MIB = 1 << 20
UNIT_BYTES = 48 * KIB  # of what costs the most for its size: the honest clients share the gateway with it
SHOUTED: Final = {name: hostile.before + hostile.of(UNIT_BYTES) for name, hostile in HOSTILE.items()}


# --- AMQP -------------------------------------------------------------------------------------------------------------


def shouts(place: Place) -> None:
    """Frames that cost more than others, on a connection without SASL."""
    connection = place.connect()
    connection.sendall(OPENED)
    with suppress(OSError):
        connection.sendall(place.chance.choice(list(SHOUTED.values())))
    place.leave(connection)


def unusual_frames_of_sasl(place: Place) -> None:
    """Frames with an extended header, and values that take no bytes, where SASL is expected."""
    connection = place.connect()
    array = b"\xf0" + struct.pack(">II", 5, 4000) + b"\x41"
    init = b"\x00\x80" + bytes(7) + b"\x41\xd0" + struct.pack(">II", 4 + len(array), 1) + array
    frame = frame_bytes(0, init, kind=1)
    with suppress(OSError):
        connection.sendall(
            SASL_HEADER + place.chance.choice((frame, extended(frame), extended(frame_bytes(0, b"", 1)) * 500))
        )
    place.leave(connection)


def half_a_frame(place: Place) -> None:
    connection = place.connect()
    connection.sendall(OPENED + place.cut(attach(0)))
    place.leave(connection)


def half_a_large_frame(place: Place) -> None:
    """All but the end of the largest frame, so that it is kept."""
    connection = place.connect()
    with suppress(OSError):
        connection.sendall(OPENED + struct.pack(">IBBH", 64 * KIB, 2, 0, 0) + bytes(60 * KIB))
    place.leave(connection)


def half_a_handshake_of_tls(place: Place) -> None:
    connection = place.connect(place.chance.choice((place.ports.amqps, place.ports.https)))
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + place.chance.randbytes(500)
    connection.sendall(place.cut(hello))
    place.leave(connection)


def tls_and_silence(place: Place) -> None:
    place.leave(place.connect_tls(place.chance.choice((place.ports.amqps, place.ports.https))))


def shouts_over_tls(place: Place) -> None:
    connection = place.connect_tls(place.ports.amqps)
    with suppress(OSError):
        connection.sendall(OPENED + place.chance.choice(list(SHOUTED.values())))
    place.leave(connection)


def header_and_silence(place: Place) -> None:
    connection = place.connect()
    connection.sendall(SASL_HEADER)
    place.leave(connection)


def wrong_key(place: Place) -> None:
    with RawPeer(place.ports.amqp) as peer:
        outcome = peer.sasl_plain(key="no such key")
        assert int(outcome.fields[0]) == 1, outcome


def much_for_a_key(place: Place) -> None:
    """More than a frame of SASL may have."""
    connection = place.connect()
    with suppress(OSError):
        connection.sendall(SASL_HEADER + struct.pack(">IBBH", MIB, 2, 1, 0) + bytes(200 * KIB))
    place.leave(connection)


def slow_bytes(place: Place) -> None:
    connection = place.connect()
    with suppress(OSError):
        for byte in OPENED[: place.chance.randrange(10, 40)]:
            connection.sendall(bytes((byte,)))
            time.sleep(0.005)
    place.leave(connection)


def noise(place: Place) -> None:
    connection = place.connect(place.chance.choice((place.ports.amqp, place.ports.amqps, place.ports.http)))
    with suppress(OSError):
        connection.sendall(place.chance.randbytes(place.chance.randrange(1, 4 * KIB)))
    place.leave(connection)


def parts_without_rights(place: Place) -> None:
    """Messages that are begun on links of an anonymous peer."""
    peer = RawPeer.anonymous(place.ports.amqp)
    links = [attach(handle, address="$cbs" if handle == 0 else "orders") for handle in range(10)]
    parts = [transfer(handle, handle, bytes(20 * KIB), more=True) for handle in range(10)]
    with suppress(OSError):
        peer.send(b"".join(links + parts))
    place.leave(peer.socket)


def links_and_silence(place: Place) -> None:
    """Sessions with a few links each, within what a stranger may have."""
    connection = place.connect()
    with suppress(OSError):
        for channel in range(1, 4):
            frame = attach(0)
            connection.sendall(
                (OPENED if channel == 1 else b"")
                + say(BEGIN, None, WINDOW, WINDOW, WINDOW, channel=channel)
                + frame[:6] + channel.to_bytes(2, "big") + frame[8:]
            )  # fmt: skip
    place.leave(connection)


# --- WebSockets -------------------------------------------------------------------------------------------------------

UPGRADE: Final = (
    b"GET /$servicebus/websocket HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: AMQPWSB10\r\nSec-WebSocket-Key: "
    + base64.b64encode(bytes(16))
    + b"\r\n\r\n"
)
CONTINUED, BINARY, END_OF_SOCKET, PING = 0, 2, 8, 9
LAST = 0x80


def frame_of_socket(kind: int, payload: bytes, *, announced: int | None = None, last: bool = True) -> bytes:
    """A client's frame, masked with zeros. `announced` is said for its length."""
    size = len(payload) if announced is None else announced
    if size < 126:
        length = bytes((0x80 | size,))
    elif size < 1 << 16:
        length = b"\xfe" + struct.pack(">H", size)
    else:
        length = b"\xff" + struct.pack(">Q", size)
    return bytes(((LAST if last else 0) | kind,)) + length + bytes(4) + payload


def over_a_socket(place: Place, data: bytes) -> None:
    connection = open_socket(place)
    with suppress(OSError):
        connection.sendall(data)
    place.leave(connection)


def open_socket(place: Place) -> socket.socket:
    connection = place.connect(place.ports.http)
    connection.sendall(UPGRADE)
    read_until(connection, b"\r\n\r\n")
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> None:
    """Raises ConnectionError if the broker ends it before, and TimeoutError."""
    read = b""
    while wanted not in read:
        data = connection.recv(4 * KIB)
        if not data:
            raise ConnectionError(f"ended after {read!r}")
        read += data


def large_frame_announced(place: Place) -> None:
    announced = place.chance.choice((MIB, 16 * MIB, 1 << 40))
    over_a_socket(place, frame_of_socket(BINARY, bytes(200 * KIB), announced=announced))


def part_of_a_frame_of_a_socket(place: Place) -> None:
    over_a_socket(place, place.cut(frame_of_socket(BINARY, OPENED + SHOUTED["flows"])))


def many_small_fragments(place: Place) -> None:
    data = OPENED + attach(0)
    fragments = [frame_of_socket(CONTINUED, data[at : at + 1], last=False) for at in range(1, len(data))]
    empty = frame_of_socket(CONTINUED, b"", last=False) * 2000
    over_a_socket(place, frame_of_socket(BINARY, data[:1], last=False) + b"".join(fragments) + empty)


def pings(place: Place) -> None:
    over_a_socket(place, frame_of_socket(PING, bytes(125)) * 300)


def close_in_the_midst(place: Place) -> None:
    begun = frame_of_socket(BINARY, OPENED, last=False)
    over_a_socket(place, begun + frame_of_socket(END_OF_SOCKET, b"\x03\xe8") + begun)


def shouts_over_a_socket(place: Place) -> None:
    over_a_socket(place, frame_of_socket(BINARY, OPENED + place.chance.choice(list(SHOUTED.values()))))


def half_an_upgrade(place: Place) -> None:
    connection = place.connect(place.ports.http)
    connection.sendall(place.cut(UPGRADE))
    place.leave(connection)


def upgrade_and_silence(place: Place) -> None:
    over_a_socket(place, place.chance.choice((b"", frame_of_socket(BINARY, SASL_HEADER))))


# --- HTTP -------------------------------------------------------------------------------------------------------------

SEND: Final = b"POST /orders/messages HTTP/1.1\r\nHost: localhost\r\n"


def ask(place: Place, data: bytes) -> None:
    """Without waiting for all of the answer."""
    connection = place.connect(place.ports.http)
    with suppress(OSError):
        connection.sendall(data)
        if place.chance.random() < 0.5:
            connection.recv(64 * KIB)
    place.leave(connection)


def half_a_request(place: Place) -> None:
    ask(place, place.cut(SEND + b"Content-Length: 3\r\n"))


def large_head(place: Place) -> None:
    ask(place, SEND + place.chance.choice((b"X-A: " + b"a" * 200 * KIB, b"X-A: a\r\n" * 20_000)))


def body_without_a_right(place: Place) -> None:
    size = place.chance.choice((10 * KIB, 500 * KIB))
    ask(place, SEND + b"Content-Length: %d\r\n\r\n" % MIB + bytes(size))


def nonsense_in_chunks(place: Place) -> None:
    chunks = (b"zz\r\nabc\r\n", b"ffffffffffffffff\r\nabc", b"1\r\na\r\n" * 2000, b"-1\r\n", b"5;" + b"x" * 20 * KIB)
    ask(place, SEND + b"Transfer-Encoding: chunked\r\n\r\n" + place.chance.choice(chunks))


def requests_in_a_row(place: Place) -> None:
    ask(place, (SEND + b"Content-Length: 3\r\n\r\nabc") * place.chance.randrange(10, 200))


def wrong_token(place: Place) -> None:
    token = place.chance.choice(
        (b"SharedAccessSignature sr=orders&sig=x&se=9999999999&skn=app", b"Basic YTpi", b"x" * 4 * KIB)
    )
    ask(place, SEND + b"Authorization: " + token + b"\r\nContent-Length: 3\r\n\r\nabc")


KINDS: Final[Mapping[str, Callable[[Place], None]]] = {
    kind.__name__: kind
    for kind in (
        shouts,
        unusual_frames_of_sasl,
        half_a_frame,
        half_a_large_frame,
        half_a_handshake_of_tls,
        tls_and_silence,
        shouts_over_tls,
        header_and_silence,
        wrong_key,
        much_for_a_key,
        slow_bytes,
        noise,
        parts_without_rights,
        links_and_silence,
        large_frame_announced,
        part_of_a_frame_of_a_socket,
        many_small_fragments,
        pings,
        close_in_the_midst,
        shouts_over_a_socket,
        half_an_upgrade,
        upgrade_and_silence,
        half_a_request,
        large_head,
        body_without_a_right,
        nonsense_in_chunks,
        requests_in_a_row,
        wrong_token,
    )
}
