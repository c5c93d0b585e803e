"""Proton alone, as its C library is: bytes of frames in, events and bytes out, and nothing of ours between."""

from collections.abc import Sequence
from typing import Any

from protocol import codec
from protocol.codec import Described, UInt, ULong
from protocol.engine.frames import HEADER_BYTES, frame_of, walk
from protocol.engine.proton.library import Pointer, condition_of, ffi, lib
from protocol.symbols import AMQP_HEADER, Descriptor

OPEN, BEGIN, ATTACH, FLOW = Descriptor.OPEN, Descriptor.BEGIN, Descriptor.ATTACH, Descriptor.FLOW
TRANSFER, DISPOSITION, DETACH = Descriptor.TRANSFER, Descriptor.DISPOSITION, Descriptor.DETACH
END, CLOSE = Descriptor.END, Descriptor.CLOSE
MESSAGE = b"\x00\x53\x75\xa0\x05hello"
MAX_FRAME_BYTES = 65_536
WINDOW = UInt(1000)


class Bare:
    """A transport of the server's side, with its connection and events. `channel` 0 is the only session of tests."""

    def __init__(self) -> None:
        self.transport, self.connection, self.collector = lib.pn_transport(), lib.pn_connection(), lib.pn_collector()
        lib.pn_transport_set_server(self.transport)
        lib.pn_transport_set_max_frame(self.transport, MAX_FRAME_BYTES)
        lib.pn_connection_set_container(self.connection, b"server")
        lib.pn_connection_collect(self.connection, self.collector)
        lib.pn_transport_bind(self.transport, self.connection)

    def free(self) -> None:
        lib.pn_transport_unbind(self.transport)
        lib.pn_collector_release(self.collector)
        lib.pn_connection_release(self.connection)
        lib.pn_decref(self.connection)
        lib.pn_decref(self.transport)
        lib.pn_collector_free(self.collector)

    # -- bytes

    def push(self, *frames: bytes) -> list[tuple[int, Pointer]]:
        """Give it frames, and return the events that come of them: the kind of each, and its link or session."""
        data = b"".join(frames)
        while data:
            taken = lib.pn_transport_push(self.transport, data, len(data))
            if taken <= 0:
                break
            data = data[taken:]
        return self.events()

    def events(self) -> list[tuple[int, Pointer]]:
        found = []
        while event := lib.pn_collector_peek(self.collector):
            kind = lib.pn_event_type(event)
            of = lib.pn_event_link(event) or lib.pn_event_session(event)
            found.append((kind, of))
            lib.pn_collector_pop(self.collector)
        return found

    def pull(self) -> bytes:
        buffer, output = ffi.new("char[]", 1 << 20), b""
        while (size := lib.pn_transport_peek(self.transport, buffer, len(buffer))) > 0:
            output += bytes(ffi.buffer(buffer, size))
            lib.pn_transport_pop(self.transport, size)
        return output

    def written(self) -> list[tuple[int, list[Any], bytes]]:
        """The frames that it writes now: code, fields and payload."""
        return read(self.pull())

    def fault(self) -> tuple[str, str]:
        return condition_of(lib.pn_transport_condition(self.transport))

    # -- what tests begin with

    def open(self, **fields: Any) -> None:
        self.push(AMQP_HEADER, opened(**fields))
        lib.pn_connection_open(self.connection)
        self.pull()
        self.events()

    def begin(self, window: int = WINDOW) -> Pointer:
        """The peer's session on channel 0, answered."""
        [session] = told(lib.PN_SESSION_REMOTE_OPEN, self.push(begun(window)))
        lib.pn_session_open(session)
        self.pull()
        self.events()
        return session

    def attach(self, name: str = "link", handle: int = 0, *, sends: bool, credit: int = 10) -> Pointer:
        """The peer's link on it, answered; `sends`: the peer is the sender. The credit is granted by the other side."""
        [link] = told(lib.PN_LINK_REMOTE_OPEN, self.push(attached(name, handle, sends=sends)))
        lib.pn_link_open(link)
        if sends:
            lib.pn_link_flow(link, credit)
        else:
            self.push(flowed(handle, 0, credit))
        self.pull()
        self.events()
        return link


def frame(code: int, *fields: Any, payload: bytes = b"", channel: int = 0) -> bytes:
    written = frame_of(channel, code, list(fields))
    return (len(written) + len(payload)).to_bytes(4, "big") + written[4:] + payload


def read(output: bytes) -> list[tuple[int, list[Any], bytes]]:
    found = []
    for start, end, _, code in walk(output):
        if code:
            performative, body_end = codec.decode(output[start:end], HEADER_BYTES)
            found.append((code, performative.value, output[start + body_end : end]))
    return found


def opened(max_frame_size: int | None = None) -> bytes:
    return frame(OPEN, "client", None, None if max_frame_size is None else UInt(max_frame_size))


def begun(window: int = WINDOW, channel: int = 0) -> bytes:
    return frame(BEGIN, None, UInt(0), UInt(window), WINDOW, channel=channel)


def attached(name: str = "link", handle: int = 0, *, sends: bool) -> bytes:
    source, target = Described(ULong(Descriptor.SOURCE), ["q"]), Described(ULong(Descriptor.TARGET), ["q"])
    return frame(ATTACH, name, UInt(handle), not sends, None, None, source, target, None, None, UInt(0))


def flowed(
    handle: int, delivery_count: int, credit: int, *, drain: bool = False, echo: bool = False, **more: int
) -> bytes:
    window = UInt(more.get("window", WINDOW))
    next_incoming = UInt(more.get("next_incoming", 0))
    of_link = [UInt(handle), UInt(delivery_count), UInt(credit)]
    return frame(FLOW, next_incoming, window, UInt(0), WINDOW, *of_link, None, drain, echo)


def transferred(delivery_id: int, handle: int = 0, *more: Any, tag: bytes = b"t", payload: bytes = MESSAGE) -> bytes:
    """A transfer; `more` are its fields from the message format on."""
    return frame(TRANSFER, UInt(handle), UInt(delivery_id), tag, *more, payload=payload)


def told(kind: int, events: Sequence[tuple[int, Pointer]]) -> list[Pointer]:
    """The links or sessions of the events of this kind."""
    return [of for each, of in events if each == kind]


def send(link: Pointer, tag: bytes, message: bytes = MESSAGE) -> Pointer:
    tag_bytes = ffi.new("char[]", tag)
    delivery = lib.pn_delivery(link, ffi.new("pn_delivery_tag_t *", (len(tag), tag_bytes))[0])
    lib.pn_link_send(link, message, len(message))
    lib.pn_link_advance(link)
    return delivery
