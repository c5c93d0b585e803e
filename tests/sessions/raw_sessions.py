"""What raw peers say of sessions."""

from typing import Any

from protocol.codec import Described, Symbol, UInt, ULong, decode
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    TRANSFER,
    Frame,
    RawPeer,
    body_of,
    message,
    source,
)
from tests.end_to_end.raw_requests import Node

FILTER = Symbol("com.microsoft:session-filter")
GO = ULong(0x000000137000000C)
TIMEOUT = Symbol("com.microsoft:timeout")


def described(session_id: str | None) -> Described:
    """The filter as Go has it."""
    return Described(GO, session_id)


def in_session(session_id: str | None, body: bytes = b"", **options: Any) -> bytes:
    return message(body, properties=[None] * 10 + [session_id], **options)


def send(peer: RawPeer, queue: str, *messages: tuple[str | None, bytes]) -> None:
    handle = peer.attach_sender(queue)
    for session_id, body in messages:
        peer.transfer(in_session(session_id, body), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(handle)
    peer.expect(DETACH)


def ask(peer: RawPeer, queue: str, value: Any = None, wait_ms: int | None = None, **options: Any) -> int:
    """Attach a receiver that wants a session, and do not wait; returns the handle."""
    properties = None if wait_ms is None else {TIMEOUT: UInt(wait_ms)}
    return peer.attach(sender=False, source_=source(queue, filters={FILTER: value}), properties=properties, **options)


def accept(
    peer: RawPeer, queue: str, value: Any = None, wait_ms: int | None = None, **options: Any
) -> tuple[int, Frame]:
    """The handle, and the broker's attach."""
    handle = ask(peer, queue, value, wait_ms, **options)
    attached = peer.expect(ATTACH)
    assert attached.fields[5] is not None, attached
    return handle, attached


def session_of(attached: Frame) -> Any:
    """The filter's value in the answer."""
    return attached.fields[5].value[7][FILTER]


def receive(peer: RawPeer, handle: int, count: int = 1) -> list[tuple[Frame, bytes]]:
    peer.flow(handle, count)
    frames = [peer.expect(TRANSFER) for _ in range(count)]
    return [(frame, body_of(frame.payload)) for frame in frames]


def annotations_of(payload: bytes) -> dict[Any, Any]:
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        if section.descriptor == 0x72:
            return dict(section.value)
    raise AssertionError("a message without annotations")


def purge(port: int, *queues: str) -> None:
    """Take all messages there are; what is locked by connections that are gone is free."""
    with RawPeer.connect(port) as peer:
        for queue in queues:
            for address in (queue, f"{queue}/$DeadLetterQueue"):
                assert Node(peer, f"{address}/$management").ask("peeklock:purge", {}).status in (200, 204)
        peer.close()
