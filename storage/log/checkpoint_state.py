"""Where a log is with its checkpoints: a state, and a table of what follows each event.

| state     | what it is                                                          | event          | next      |
|-----------|---------------------------------------------------------------------|----------------|-----------|
| none      | no checkpoint is being made, and none is due                        | wanted         | due       |
|           |                                                                     | begun          | under way |
|           |                                                                     | futile         | none      |
| due       | it begins when nothing is staged or being committed                 | wanted         | due       |
|           |                                                                     | begun          | under way |
|           |                                                                     | futile         | none      |
| under way | the checkpointer writes to the tables, or will when it runs again   | waited in vain | stuck     |
|           |                                                                     | done           | none      |
| stuck     | the same; a commit has waited for it as long as commits may         | done           | none      |

A checkpoint is futile where the tables of no partition would have room for it. While one is being made no other is
wanted: when it is done, the log looks whether the next one is due. An event that is not in the table cannot happen.
"""

from enum import IntEnum, StrEnum, auto
from typing import Final


class State(IntEnum):
    NONE = auto()
    DUE = auto()
    UNDER_WAY = auto()
    STUCK = auto()


class Event(StrEnum):
    WANTED = auto()
    BEGUN = auto()
    FUTILE = auto()
    WAITED_IN_VAIN = auto()
    DONE = auto()


NEXT: Final[dict[State, dict[Event, State]]] = {
    State.NONE: {Event.WANTED: State.DUE, Event.BEGUN: State.UNDER_WAY, Event.FUTILE: State.NONE},
    State.DUE: {Event.WANTED: State.DUE, Event.BEGUN: State.UNDER_WAY, Event.FUTILE: State.NONE},
    State.UNDER_WAY: {Event.WAITED_IN_VAIN: State.STUCK, Event.DONE: State.NONE},
    State.STUCK: {Event.DONE: State.NONE},
}
