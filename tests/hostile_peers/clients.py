"""Peers with a key that end with much under way. Each kind is a function that `KINDS` names."""

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from protocol.codec import Described, Symbol, UInt, ULong, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import CLOSE, DETACH, END, TRANSFER, Closed, RawPeer, frame_bytes, message
from tests.end_to_end.raw_requests import Node, put_token, token_for
from tests.hostile_input import OPENED, TOLD_AGAIN, WITH_RIGHTS, attach, detach, say, transfer
from tests.hostile_peers.peers import Place, reset
from tests.hostile_peers.strangers import BINARY, SEND, frame_of_socket, open_socket, read_until

KIB = 1 << 10
BEGUN = b"\x00\x53\x11"  # the descriptor of the broker's begin
TARGET, LARGE = "orders", "large"
LARGE_BYTES, LARGE_COUNT = 60 * KIB, 80  # messages that wait for peers which do not read them
PREPARED: Final = {name: hostile.before + hostile.of(32 * KIB) for name, hostile in WITH_RIGHTS.items()}


def connected(place: Place) -> RawPeer:
    return RawPeer.connect(place.ports.amqp)


def end(place: Place, peer: RawPeer) -> None:
    """By RST, FIN, end, detach or close, or not at all for now."""
    ways: dict[str, bytes] = {"detach": detach(0), "end": say(END), "close": say(CLOSE)}
    way = place.chance.choice((*ways, "FIN", "RST", "silence"))
    with suppress(OSError):
        if way in ways:
            peer.send(ways[way])
            with suppress(TimeoutError, Closed):
                peer.expect({"detach": DETACH, "end": END, "close": CLOSE}[way], 2.0)
        if way == "FIN":
            peer.socket.shutdown(socket.SHUT_WR)
    if way == "RST":
        reset(peer.socket)
    elif way == "silence":
        place.kept.keep(peer.socket)
    else:
        peer.socket.close()


def half_a_delivery(place: Place) -> None:
    """Most of a message of 1 MiB, whose end never comes."""
    peer = connected(place)
    with suppress(OSError):
        peer.send(attach(0, address=TARGET) + transfer(0, 0, b"\x00\x53\x75\xb0\x00\x0f\x00\x00", more=True))
        for _ in range(place.chance.randrange(1, 16)):
            peer.send(transfer(0, None, bytes(60 * KIB), more=True))
    end(place, peer)


def an_aborted_delivery(place: Place) -> None:
    peer = connected(place)
    with suppress(OSError):
        peer.send(attach(0, address=TARGET) + transfer(0, 0, bytes(60 * KIB), more=True))
        peer.say(TRANSFER, UInt(0), None, None, None, False, False, None, None, None, True)
    end(place, peer)


def half_a_delivery_over_a_socket(place: Place) -> None:
    """In a WebSocket's frames, the last of which has no end either."""
    init = encode(Described(ULong(0x41), [Symbol("PLAIN"), plain_response(KEY_NAME, KEY)]))
    begun = transfer(0, 0, b"\x00\x53\x75\xb0\x00\x0f\x00\x00", more=True)
    part = frame_of_socket(BINARY, transfer(0, None, bytes(60 * KIB), more=True))
    connection = open_socket(place)
    with suppress(ConnectionError):
        login = SASL_HEADER + frame_bytes(0, init, kind=1) + OPENED + attach(0, address=TARGET)
        connection.sendall(frame_of_socket(BINARY, login))
        read_until(connection, BEGUN)
        connection.sendall(frame_of_socket(BINARY, begun) + part * place.chance.randrange(1, 15) + place.cut(part))
    place.leave(connection)


def body_that_stops(place: Place) -> None:
    """Most of an HTTP request of 1 MiB with a right token."""
    token = generate("http://localhost/orders", KEY_NAME, KEY, int(time.time()) + 60).encode()
    connection = place.connect(place.ports.http)
    with suppress(OSError):
        connection.sendall(SEND + b"Authorization: " + token + b"\r\nContent-Length: %d\r\n\r\n" % (1000 * KIB))
        connection.sendall(bytes(place.chance.randrange(1000) * KIB))
    place.leave(connection)


def unsettled_deliveries(place: Place) -> None:
    """Messages that are locked for a receiver which ends."""
    peer = connected(place)
    receive_some(peer)
    end(place, peer)


def receive_some(peer: RawPeer) -> None:
    """Receive on handle 0 what this peer, or another one, has sent."""
    peer.attach_receiver(TARGET, credit=50)
    sender = peer.attach_sender(TARGET)
    for _ in range(10):
        peer.transfer(message(b"x"), sender, settled=True)
    with suppress(TimeoutError):
        for _ in range(10):
            peer.expect(TRANSFER, 1.0)


def attaching_links(place: Place) -> None:
    peer = connected(place)
    with suppress(OSError):
        peer.send(b"".join(attach(n, sender=n % 2 == 0, address=TARGET) for n in range(place.chance.randrange(1, 60))))
    end(place, peer)


def unread_output(place: Place) -> None:
    """Some MiB of messages are asked for and not read."""
    peer = RawPeer.connect(place.ports.amqp, receive_buffer_bytes=8 * KIB)
    peer.attach_receiver(LARGE, credit=LARGE_COUNT)
    time.sleep(place.chance.uniform(0.0, 0.3))  # the broker writes as much as it can
    end(place, peer)


def dispositions_again_and_again(place: Place) -> None:
    """For many deliveries that nobody settles."""
    peer = connected(place)
    receive_some(peer)
    states = list(TOLD_AGAIN.values())
    with suppress(OSError):
        peer.send(b"".join(place.chance.choice(states)(5000) for _ in range(100)))
    end(place, peer)


def costly_frames(place: Place) -> None:
    """Of the kinds that need a right."""
    peer = connected(place)
    with suppress(OSError):
        peer.send(place.chance.choice(list(PREPARED.values())))
    end(place, peer)


def management_requests(place: Place) -> None:
    """With responses that nobody may wait for."""
    peer = connected(place)
    with suppress(OSError, TimeoutError, Closed):
        node = Node(peer, f"{TARGET}/$management")
        for _ in range(place.chance.randrange(1, 40)):
            node.say("com.microsoft:peek-message", {"from-sequence-number": 0, "message-count": 100})
        node.say("no such operation", {"a": [None] * 1000})
    end(place, peer)


def tokens_for_queues_that_do_not_exist(place: Place) -> None:
    peer = RawPeer.anonymous(place.ports.amqp)
    with suppress(OSError, TimeoutError, Closed):
        node = Node(peer, "$cbs")
        for _ in range(20):
            name = f"none-{place.chance.randrange(1 << 30)}"
            put_token(node, name, token_for(name))
    end(place, peer)


def journal_of_others(place: Place) -> None:
    """Paths of the journal with what must not become a query, with a key and without."""
    path = "/$journal/0" + place.chance.choice(
        ("%3Fentity=*", "%3fentity=honest", "%23", "%26entity=*", "%2F..%2e", "%0d%0aX: y")
    )
    token = generate("http://localhost/orders", KEY_NAME, place.chance.choice((KEY, "wrong")), int(time.time()) + 60)
    connection = place.connect(place.ports.http)
    with suppress(OSError):
        connection.sendall(
            f"GET {path}?entity=orders HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n".encode()
        )
        connection.recv(4 * KIB)
    place.leave(connection)


KINDS: Final[Mapping[str, Callable[[Place], None]]] = {
    kind.__name__: kind
    for kind in (
        half_a_delivery,
        half_a_delivery_over_a_socket,
        body_that_stops,
        an_aborted_delivery,
        unsettled_deliveries,
        attaching_links,
        unread_output,
        dispositions_again_and_again,
        costly_frames,
        management_requests,
        tokens_for_queues_that_do_not_exist,
        journal_of_others,
    )
}


def put_large_messages(port: int) -> None:
    with RawPeer.connect(port) as peer:
        peer.attach_sender(LARGE)
        for _ in range(LARGE_COUNT):
            peer.transfer(message(bytes(LARGE_BYTES)), settled=True)
        peer.close()
