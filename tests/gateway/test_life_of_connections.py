"""The life of a client's connection: a connection in every state meets everything that can happen to it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.gateway import connection as connections
from broker.gateway.life import CLIENT_CLOSED, HAS_ENGINE, HAS_SOCKET, HEARS, NEXT, READS, WAS_OPEN, Event, State
from protocol import conditions
from protocol.codec import Described, Symbol, ULong, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import CLOSE, OPEN, frame_bytes
from tests.gateway.in_process import Client, started_gateway
from tests.patience import until

HOSTILE = b"\0\0\0\x08\x01\0\0\0"  # an empty frame with a data offset of 4 bytes


def test_every_state_knows_what_follows_each_event_that_can_happen_in_it() -> None:
    assert list(NEXT) == list(State)
    assert {event for events in NEXT.values() for event in events} == set(Event)
    assert set(State) - HAS_SOCKET == {State.NEW, State.ENDED}
    assert all(NEXT[state][Event.LOST] is State.ENDED for state in HAS_SOCKET)


def test_no_state_comes_back_and_all_but_the_first_are_reached() -> None:
    reached = {State.NEW}
    while more := {after for state in reached for after in NEXT[state].values()} - reached:
        reached |= more
    assert reached == set(State)

    def later(state: State) -> set[State]:
        return {after for following in NEXT[state].values() for after in (following, *later(following))}

    assert all(state not in later(state) for state in State)


def test_a_connection_with_an_engine_has_a_socket_and_hears_until_it_has_hung_up() -> None:
    assert HAS_ENGINE < HAS_SOCKET
    assert READS < HEARS < HAS_SOCKET
    assert all(state not in HEARS for state in (events.get(Event.HUNG_UP) for events in NEXT.values()) if state)
    assert CLIENT_CLOSED < WAS_OPEN < HAS_ENGINE


def sasl(key: str) -> bytes:
    init = encode(Described(ULong(0x41), [Symbol("PLAIN"), plain_response(KEY_NAME, key)]))
    return SASL_HEADER + frame_bytes(0, init, kind=1)


class Scene:
    """A connection in some state."""

    def __init__(self, directory: Path, state: State) -> None:
        self.gateway, _ = started_gateway(directory)
        self.client = Client(self.gateway)
        self.connection = self.client.connection
        MAKE[state](self)
        assert self.connection.state is state

    @property
    def is_cut(self) -> bool:
        """The socket ends without more ado."""
        return self.client.transport.ended

    def connect(self) -> None:
        self.client.transport.connect()

    def authenticate(self, key: str = KEY) -> None:
        self.connect()
        self.client.transport.feed(sasl(key))

    def open(self) -> None:
        self.client.connect()

    def refuse(self) -> None:
        self.authenticate()
        self.close()

    def hang_up(self) -> None:
        self.open()
        self.close()

    def hear_close(self) -> None:
        """The client does not read, so that the answer cannot be written."""
        self.open()
        self.connection.pause_writing()
        self.client_closes()

    def leave(self) -> None:
        self.open()
        self.client.transport.close = lambda: None  # it has output to write before
        self.client_closes()

    def lose(self) -> None:
        self.open()
        self.connection.connection_lost(None)

    # -- what happens

    def shows_key(self) -> None:
        self.client.transport.feed(sasl(KEY))

    def shows_wrong_key(self) -> None:
        self.client.transport.feed(sasl("wrong"))

    def client_opens(self) -> None:
        self.client.say(OPEN, "client", "localhost", header=True)

    def client_closes(self) -> None:
        self.client.say(CLOSE)

    def client_says_nonsense(self) -> None:
        self.client.transport.feed(HOSTILE * 10)

    def client_ends_its_output(self) -> None:
        self.connection.eof_received()

    def close(self) -> None:
        self.connection.close(conditions.RESOURCE_LIMIT_EXCEEDED, "too much")

    def fail(self) -> None:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            self.connection.fail(error)

    def shut_down(self) -> None:
        self.connection.shut_down()

    def is_late(self) -> None:
        self.connection._too_late("too late")

    def is_lost(self) -> None:
        self.connection.connection_lost(None)

    def stalls(self) -> None:
        self.connection.pause_writing()
        self.connection.resume_writing()

    def passes_time(self) -> None:
        connection = self.connection
        connection.tick(1000)
        connection.look_after()
        connection.regulate()
        connection.flush()
        connection.rules_changed()
        connection.detach_from([])
        assert not connection.go_on(0)
        assert connection.held_bytes() >= 0
        assert connection.output_room_bytes >= 0


MAKE: dict[State, Callable[[Scene], None]] = {
    State.NEW: lambda scene: None,
    State.SASL: Scene.connect,
    State.DENIED: lambda scene: scene.authenticate("wrong"),
    State.OPENING: Scene.authenticate,
    State.REFUSED: Scene.refuse,
    State.OPEN: Scene.open,
    State.HUNG_UP: Scene.hang_up,
    State.CLOSED: Scene.hear_close,
    State.LEFT: Scene.leave,
    State.ENDED: Scene.lose,
}
CUT = "cut"
# What each state becomes; the others stay as they are.
_HANG_UP: dict[State, State | str] = {State.OPENING: State.REFUSED, State.OPEN: State.HUNG_UP}
_CLOSE: dict[State, State | str] = {State.SASL: CUT, **_HANG_UP}
HAPPENS: dict[Callable[[Scene], None], dict[State, State | str]] = {
    Scene.shows_key: {State.SASL: State.OPENING, **_HANG_UP},  # too late, its bytes are no AMQP
    Scene.shows_wrong_key: {State.SASL: State.DENIED, **_HANG_UP},
    Scene.client_opens: {State.SASL: State.OPEN, State.OPENING: State.OPEN, State.OPEN: State.HUNG_UP},
    Scene.client_closes: {State.SASL: State.DENIED, State.OPENING: State.REFUSED, State.OPEN: State.LEFT},
    Scene.client_says_nonsense: {State.SASL: State.DENIED, **_HANG_UP},
    Scene.client_ends_its_output: {},
    Scene.close: _CLOSE,
    Scene.fail: _CLOSE,
    Scene.shut_down: _CLOSE,
    Scene.is_late: _CLOSE,
    Scene.is_lost: dict.fromkeys(HAS_SOCKET, State.ENDED),
    Scene.stalls: {State.CLOSED: State.LEFT},
    Scene.passes_time: {},
}


# Nobody has the socket of a new connection, and a socket is lost once.
_WITHOUT_SOCKET = (Scene.close, Scene.fail, Scene.shut_down, Scene.passes_time)
CASES = [
    pytest.param(state, happens, id=f"{state.name.lower()}-{happens.__name__}")
    for state in State
    for happens in HAPPENS
    if (state is not State.NEW or happens in _WITHOUT_SOCKET)
    and not (state is State.ENDED and happens is Scene.is_lost)
]


@pytest.mark.parametrize(("state", "happens"), CASES)
async def test_everything_that_happens_in_every_state(
    state: State, happens: Callable[[Scene], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    log = SimpleNamespace(
        info=lambda event, **_: None,
        warning=lambda event, **_: None,
        exception=lambda event, **_: failures.append(event),
    )
    monkeypatch.setattr(connections, "log", log)
    scene = Scene(tmp_path, state)
    happens(scene)
    after = HAPPENS[happens].get(state, state)
    assert (CUT if scene.is_cut and after == CUT else scene.connection.state) == after
    assert failures == ["connection failed"] * (happens == Scene.fail)
    if scene.connection.state in HAS_SOCKET:
        scene.connection.connection_lost(None)
    assert scene.connection.state is (State.NEW if state is State.NEW else State.ENDED)
    assert scene.connection not in scene.gateway.connections
    assert failures == ["connection failed"] * (happens == Scene.fail)
    assert not scene.connection._timers._handles


@pytest.mark.parametrize("state", [State.DENIED, State.REFUSED, State.HUNG_UP, State.LEFT])
async def test_a_connection_ends_when_the_client_does_not_go(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CLOSE_GRACE_SECONDS", 0.01)
    scene = Scene(tmp_path, state)
    await until(lambda: scene.connection.state is State.ENDED)


async def test_a_second_failure_cuts_the_connection(tmp_path: Path) -> None:
    scene = Scene(tmp_path, State.OPEN)
    scene.fail()
    assert scene.connection.state is State.HUNG_UP
    assert not scene.is_cut
    scene.fail()
    assert scene.is_cut


async def test_only_connections_that_were_open_are_logged_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    log = SimpleNamespace(info=lambda event, **_: logged.append(event), warning=lambda event, **_: None)
    monkeypatch.setattr(connections, "log", log)
    for state in HAS_SOCKET:
        logged.clear()
        scene = Scene(tmp_path, state)
        scene.is_lost()
        assert ("connection ended" in logged) is (state in WAS_OPEN)
