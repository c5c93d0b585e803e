"""What an engine does when its peer begins or ends something: each event in each state, as `TRANSITIONS` has it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from protocol.codec import Described, Symbol, UInt, ULong, UShort
from protocol.engine.engine import TRANSITIONS, State
from protocol.engine.frames import frame_of
from protocol.engine.links import Link
from protocol.engine.proton.library import Pointer, lib
from protocol.symbols import AMQP_HEADER
from protocol.symbols import Descriptor as Code
from tests.protocol_engine.pair import Pair, Side, frames

_ERROR = Described(ULong(Code.ERROR), [Symbol("a:b"), "why", {}])
_OPEN = frame_of(0, Code.OPEN, ["peer"])
_BEGIN = frame_of(7, Code.BEGIN, [None, UInt(0), UInt(9), UInt(9)])
_END = frame_of(0, Code.END, [_ERROR])
_ATTACH = frame_of(
    0,
    Code.ATTACH,
    [
        *["link", UInt(3), False, None, None],
        *(Described(ULong(code), ["q"]) for code in (Code.SOURCE, Code.TARGET)),
        *[None, None, UInt(0)],
    ],
)
_CLOSE = frame_of(0, Code.CLOSE, [_ERROR])


def _detach(closed: bool) -> bytes:
    return frame_of(0, Code.DETACH, [UInt(3), closed, _ERROR])


class Late(Side):
    """It answers closed links later."""

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        super().on_detach(link, closed, condition, description)
        link.detaches_later = True


class Silent(Side):
    """It answers no attach."""

    def on_attach(self, link: Link) -> None:
        self.events.append(("attach", link.name))
        self.link = link


# Each brings the pair into a state, and returns what events are about then.


def _connection(pair: Pair) -> Pointer:
    return None


def _session(pair: Pair) -> Pointer:
    [pointer] = pair.server.engine.sessions
    return pointer


def _own_session(pair: Pair) -> Pointer:
    session = pair.server.engine.begin()
    pair.server.engine.pull()
    return session.pointer


def _attached(pair: Pair) -> Pointer:
    pair.server.engine.push(_ATTACH)
    pair.server.engine.pull()
    assert pair.server.link is not None
    return pair.server.link.pointer


def _own_link(pair: Pair) -> Pointer:
    """On the session that the peer has begun, without an answer yet."""
    [session] = pair.server.engine.sessions.values()
    link = pair.server.engine.attach(session, "link", sender=False, source="q", target="q")
    pair.server.engine.pull()
    return link.pointer


def _own_closed(pair: Pair) -> Pointer:
    pointer = _own_link(pair)
    pair.server.engine.links[pointer].detach()
    return pointer


def _closed(pair: Pair) -> Pointer:
    pointer = _attached(pair)
    pair.server.engine.links[pointer].detach()
    pair.server.engine.pull()
    return pointer


def _left(pair: Pair) -> Pointer:
    pointer = _attached(pair)
    pair.server.engine.push(_detach(True))
    return pointer


def _nothing(pair: Pair) -> Pointer:
    return None


class Row(NamedTuple):
    """What the peer sends in a state, the handler's events, the frames that are written, and the state behind that.

    Without frames of the peer, because none makes such an event, the engine is told of it.
    """

    arrange: Callable[[Pair], Pointer]
    sends: bytes
    told: list[str]
    writes: list[int]
    then: State
    side: type[Side] = Side


ROWS = {
    (lib.PN_CONNECTION_REMOTE_CLOSE, State.OPEN): Row(_connection, _CLOSE, ["close"], [Code.CLOSE], State.OPEN),
    (lib.PN_TRANSPORT_ERROR, State.OPEN): Row(
        _connection, frame_of(5, Code.END, []), [], [Code.CLOSE], State.OPEN
    ),  # no such channel
    (lib.PN_SESSION_REMOTE_OPEN, State.UNKNOWN): Row(_nothing, _BEGIN, ["session"], [Code.BEGIN], State.OPEN),
    (lib.PN_SESSION_REMOTE_OPEN, State.OPEN): Row(
        _own_session, frame_of(7, Code.BEGIN, [UShort(1), UInt(0), UInt(9), UInt(9)]), [], [], State.OPEN
    ),
    (lib.PN_SESSION_REMOTE_CLOSE, State.OPEN): Row(_session, _END, ["session end"], [Code.END], State.UNKNOWN),
    (lib.PN_SESSION_REMOTE_CLOSE, State.UNKNOWN): Row(_nothing, b"", [], [], State.UNKNOWN),
    (lib.PN_LINK_REMOTE_OPEN, State.UNKNOWN): Row(_nothing, _ATTACH, ["attach"], [Code.ATTACH, Code.FLOW], State.OPEN),
    (lib.PN_LINK_REMOTE_OPEN, State.OPEN): Row(_own_link, _ATTACH, ["attach"], [], State.OPEN, Silent),
    (lib.PN_LINK_REMOTE_OPEN, State.CLOSED): Row(_own_closed, _ATTACH, ["attach"], [Code.DETACH], State.CLOSED, Silent),
    (lib.PN_LINK_REMOTE_OPEN, State.LEAVING): Row(_left, b"", ["attach"], [Code.FLOW], State.OPEN, Late),
    (lib.PN_LINK_REMOTE_CLOSE, State.OPEN): Row(_attached, _detach(True), ["detach"], [Code.DETACH], State.UNKNOWN),
    (lib.PN_LINK_REMOTE_CLOSE, State.CLOSED): Row(_closed, _detach(True), ["detach"], [], State.UNKNOWN),
    (lib.PN_LINK_REMOTE_CLOSE, State.LEAVING): Row(_left, b"", [], [], State.LEAVING, Late),
    (lib.PN_LINK_REMOTE_CLOSE, State.UNKNOWN): Row(_nothing, b"", [], [], State.UNKNOWN),
    (lib.PN_LINK_REMOTE_DETACH, State.OPEN): Row(_attached, _detach(False), ["detach"], [Code.DETACH], State.UNKNOWN),
    (lib.PN_LINK_REMOTE_DETACH, State.CLOSED): Row(_closed, _detach(False), ["detach"], [], State.UNKNOWN),
    (lib.PN_LINK_REMOTE_DETACH, State.LEAVING): Row(_left, b"", [], [], State.LEAVING, Late),
    (lib.PN_LINK_REMOTE_DETACH, State.UNKNOWN): Row(_nothing, b"", [], [], State.UNKNOWN),
}
_NAMES = {getattr(lib, name): name.removeprefix("PN_") for name in dir(lib) if "_REMOTE_" in name or "_ERROR" in name}


def _codes(output: bytes) -> list[int]:
    return [frame[10] for frame in frames(output) if len(frame) > 10]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Side]], Pair]]:
    made: list[Pair] = []

    def make(side: type[Side]) -> Pair:
        monkeypatch.setattr("tests.protocol_engine.pair.Side", side)
        made.append(Pair())
        return made[-1]

    yield make
    for pair in made:
        pair.client.engine.free()
        pair.server.engine.free()


@pytest.mark.parametrize(
    ("event", "state"), [pytest.param(*key, id=f"{_NAMES.get(key[0])}-{key[1].name}") for key in ROWS]
)
def test_each_event_in_each_state(make: Callable[[type[Side]], Pair], event: int, state: State) -> None:
    row = ROWS[event, state]
    pair = make(row.side)
    server = pair.server
    pointer = row.arrange(pair)
    assert server.engine.state_of(event, pointer) is state
    server.events.clear()
    if row.sends:
        server.engine.push(row.sends)
    else:
        server.engine.change(event, pointer)
    server.engine.check()
    if pointer is None and row.then is State.OPEN:
        pointer = server.link.pointer if server.link else [*server.engine.sessions][-1]
    assert server.engine.state_of(event, pointer) is row.then
    assert [name for name, *_ in server.events] == row.told
    assert _codes(server.engine.pull()) == row.writes


def test_an_open_is_told_and_answered(make: Callable[[type[Side]], Pair]) -> None:
    """The only event of a connection that is not open yet."""
    side = Side(server=True)
    side.engine.push(AMQP_HEADER + _OPEN)
    side.engine.check()
    assert side.named("open") == [("peer",)]
    assert _codes(side.engine.pull()) == [Code.OPEN]
    side.engine.free()


def test_a_peer_that_detaches_before_the_answer_gets_both(make: Callable[[type[Side]], Pair]) -> None:
    pair = make(Silent)
    pair.server.engine.push(_ATTACH)
    pair.server.engine.push(_detach(True))
    pair.server.engine.check()
    assert _codes(pair.server.engine.pull()) == [Code.ATTACH, Code.DETACH]


def test_a_peer_that_attaches_before_its_detach_is_answered_has_another_link(
    make: Callable[[type[Side]], Pair],
) -> None:
    pair = make(Late)
    engine = pair.server.engine
    left = _left(pair)
    engine.push(_ATTACH)
    engine.check()
    assert engine.state_of(lib.PN_LINK_REMOTE_OPEN, left) is State.LEAVING
    assert [link.name for link in engine.links.values()] == ["link"]


def test_the_reason_of_an_end_is_told(make: Callable[[type[Side]], Pair]) -> None:
    pair = make(Side)
    _attached(pair)
    pair.server.engine.push(_END)
    pair.server.engine.check()
    assert pair.server.named("detach") == [("link", True, "a:b", "why")]
    assert not pair.server.engine.links


def test_each_transition_has_a_row() -> None:
    keys: set[Any] = {*ROWS, (lib.PN_CONNECTION_REMOTE_OPEN, State.OPEN)}
    assert keys == set(TRANSITIONS)
