"""The life of one client's connection: a state, and a table of what follows each event.

| state   | what it is                                          | has | event         | next    |
|---------|-----------------------------------------------------|-----|---------------|---------|
| new     | not connected yet                                   |     | connected     | sasl    |
| sasl    | the client shows who it is                          | S   | authenticated | opening |
|         |                                                     |     | hung up       | denied  |
| denied  | hung up: the client did not show who it is          | S   |               |         |
| opening | the client's open is awaited                        | S E | opened        | open    |
|         |                                                     |     | hung up       | refused |
| refused | hung up before the open                             | S E | opened        | hung up |
| open    | links may be attached; perhaps we have sent a close | S E | closed        | closed  |
|         |                                                     |     | hung up       | hung up |
| hung up | our output has ended; the client may still write    | S E | closed        | left    |
| closed  | the client has sent a close, which is answered      | S E | hung up       | left    |
| left    | hung up, and the client has sent a close            | S E |               |         |
| ended   | the socket is gone                                  |     |               |         |

S: it has a socket, so `lost` may follow, which makes it `ended`. E: it has an engine, which may still tell what it had
read before we hung up. An event that is not in the table cannot happen: the engine takes one open, and then one close.
"""

from enum import IntEnum, StrEnum, auto
from typing import Final


class State(IntEnum):
    """Numbers, because to look for one in a set takes no call of Python."""

    NEW = auto()
    SASL = auto()
    DENIED = auto()
    OPENING = auto()
    REFUSED = auto()
    OPEN = auto()
    HUNG_UP = auto()
    CLOSED = auto()
    LEFT = auto()
    ENDED = auto()


class Event(StrEnum):
    CONNECTED = auto()
    AUTHENTICATED = auto()
    OPENED = auto()  # the client's open has come
    CLOSED = auto()  # the client's close has come
    HUNG_UP = auto()  # we write nothing more
    LOST = auto()


_LOST = {Event.LOST: State.ENDED}

NEXT: Final[dict[State, dict[Event, State]]] = {
    State.NEW: {Event.CONNECTED: State.SASL},
    State.SASL: {Event.AUTHENTICATED: State.OPENING, Event.HUNG_UP: State.DENIED, **_LOST},
    State.DENIED: _LOST,
    State.OPENING: {Event.OPENED: State.OPEN, Event.HUNG_UP: State.REFUSED, **_LOST},
    State.REFUSED: {Event.OPENED: State.HUNG_UP, **_LOST},
    State.OPEN: {Event.CLOSED: State.CLOSED, Event.HUNG_UP: State.HUNG_UP, **_LOST},
    State.HUNG_UP: {Event.CLOSED: State.LEFT, **_LOST},
    State.CLOSED: {Event.HUNG_UP: State.LEFT, **_LOST},
    State.LEFT: _LOST,
    State.ENDED: {},
}

HAS_SOCKET: Final = frozenset(state for state, events in NEXT.items() if Event.LOST in events)
HAS_ENGINE: Final = HAS_SOCKET - {State.SASL, State.DENIED}
HEARS: Final = frozenset(state for state, events in NEXT.items() if Event.HUNG_UP in events)  # we have not hung up
READS: Final = frozenset({State.OPENING, State.OPEN})  # what comes goes to the engine
WRITES: Final = HAS_ENGINE & HEARS  # what comes from the engine goes to the socket
WAS_OPEN: Final = frozenset({State.OPEN, State.HUNG_UP, State.CLOSED, State.LEFT})
CLIENT_CLOSED: Final = frozenset({State.CLOSED, State.LEFT})
