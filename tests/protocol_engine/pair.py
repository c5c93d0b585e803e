"""Two engines whose handlers note what they are told, and whose bytes reach each other."""

from typing import Any

from protocol import codec
from protocol.engine.engine import Engine
from protocol.engine.frames import PROTOCOL, walk
from protocol.engine.links import Link, Session

MESSAGE = b"\x00\x53\x75\xa0\x05hello"


class Side:
    """One end of a connection: a handler that notes what it is told, as (name, values)."""

    def __init__(self, server: bool, max_frame_size: int = 65_536) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.engine = Engine(
            self,
            server=server,
            container_id="server" if server else "client",
            max_frame_size=max_frame_size,
        )
        self.credit = 10
        self.max_message_bytes = 1000
        self.refusal: tuple[str, str] | None = None
        self.server = server
        self.link: Link | None = None

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == name]

    def on_open(self, container_id: str, hostname: str) -> None:
        self.events.append(("open", container_id))
        if self.server:
            self.engine.open()

    def on_session(self, session: Session) -> None:
        self.events.append(("session",))

    def on_session_end(self, session: Session) -> None:
        self.events.append(("session end",))

    def on_attach(self, link: Link) -> None:
        self.events.append(("attach", link.name, link.address, link.is_refused))
        self.link = link
        if self.server:
            if self.refusal:
                link.refuse(*self.refusal)
            else:
                link.accept() if link.is_sender else link.accept(self.max_message_bytes, self.credit)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        self.events.append(("detach", link.name, closed, condition, description))

    def on_flow(self, link: Link) -> None:
        self.events.append(("flow", link.credit, link.drain))

    def on_message(self, link: Link, delivery: Any, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        self.events.append(("message", delivery, payload, batch, settled))

    def on_oversized(self, link: Link, delivery: Any, size_bytes: int, settled: bool) -> None:
        self.events.append(("oversized", delivery, size_bytes))

    def on_crowded(self, link: Link, delivery: Any, settled: bool) -> None:
        self.events.append(("crowded", delivery, settled))

    def on_aborted(self, link: Link) -> None:
        self.events.append(("aborted", link.name))

    def on_outcome(self, link: Link, delivery: Any, token: bytes, state: int, settled: bool) -> None:
        self.events.append(("outcome", delivery, token, state, settled))

    def on_close(self, condition: str, description: str) -> None:
        self.events.append(("close", condition, description))


class Pair:
    """A client and a server whose bytes reach each other when `run` is called; `sent` is what the server wrote.

    `received` is what the client wrote.
    """

    def __init__(self, max_frame_size: int = 65_536) -> None:
        self.client = Side(server=False, max_frame_size=max_frame_size)
        self.server = Side(server=True, max_frame_size=max_frame_size)
        self.client.engine.open()
        self.session = self.client.engine.begin()
        self.sent = b""
        self.received = b""
        self.run()

    def run(self) -> None:
        while True:
            up = self.client.engine.pull()
            self.received += up
            if up:
                self.server.engine.push(up)
            down = self.server.engine.pull()
            self.sent += down
            if down:
                self.client.engine.push(down)
            if not up and not down:
                self.check()
                return

    def check(self) -> None:
        """Assert the invariants of both engines."""
        self.client.engine.check()
        self.server.engine.check()

    def attach(self, *, sender: bool, **options: Any) -> tuple[Link, Link]:
        """The client's link and the server's."""
        ours = self.client.engine.attach(self.session, "link", sender=sender, source="q", target="q", **options)
        self.run()
        theirs = self.server.link
        assert theirs is not None
        return ours, theirs


def frames(output: bytes) -> list[bytes]:
    return [output[start:end] for start, end, _, _ in walk(output) if not output.startswith(PROTOCOL, start)]


def performatives(output: bytes, code: int) -> list[list[Any]]:
    return [codec.decode(frame, 8)[0].value for frame in frames(output) if len(frame) > 10 and frame[10] == code]


def raw_frame(channel: int, body: bytes) -> bytes:
    return (8 + len(body)).to_bytes(4, "big") + b"\x02\x00" + channel.to_bytes(2, "big") + body


def flow(handle: int | None, delivery_count: int, credit: int, drain: bool, echo: bool) -> bytes:
    uint = codec.UInt
    link = [None] * 3 if handle is None else [uint(handle), uint(delivery_count), uint(credit)]
    fields = [uint(0), uint(1000), uint(0), uint(1000), *link, None, drain, echo]
    return raw_frame(0, codec.encode(codec.Described(codec.ULong(0x13), fields)))
