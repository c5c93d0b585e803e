"""When a process on another machine is taken for gone although nothing has ended the connection to it.

A machine that freezes, or that loses its power or its network, ends no connection. What was sent to it may even be
acknowledged, since a kernel does that for processes that are stopped. So both sides of a connection send a message
about each second (`broker.wire.Beat`), and one that hears nothing for `cluster.heartbeat_timeout_ms` ends the
connection: what is under way on it is answered as if the other process had died.

A worker that waits for its disk is not gone. It beats meanwhile (`broker.worker.heartbeats`), for as long as its
supervisor would wait for it.
"""

import socket
from typing import NamedTuple

from broker.settings.config import Settings

BEAT_SECONDS = 1.0  # between two beats of one side, and between two looks of the other


class Patience(NamedTuple):
    """`silence_ms` is the time that the other side may be silent. `stall_ms` is that for which a worker may make no
    turn: it then beats, once it has begun to.
    """

    silence_ms: int
    stall_ms: int

    @classmethod
    def of(cls, settings: Settings) -> "Patience":
        return cls(settings.cluster.heartbeat_timeout_ms, settings.worker_stall_timeout_ms)

    @property
    def longest_ms(self) -> int:
        """The time of silence after which the other side is gone, whatever it waits for."""
        return self.silence_ms + self.stall_ms


class Silence:
    """Counts the looks at another side at which nothing had come since the look before.

    It counts them instead of reading a clock, because this process may have been stopped itself. Then it has not read
    yet what came meanwhile, and the time that passed is no silence of the other side.
    """

    __slots__ = ("_looks", "_patience", "beats")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._looks = 0
        self.beats = False  # the other side has begun to

    def look(self, heard: bool) -> bool:
        """Say if the other side is gone. Call this each BEAT_SECONDS. `heard`: something came since the last call."""
        if heard:
            self._looks = 0
            return False
        self._looks += 1
        # A worker begins to beat in a turn, and that may have to wait for the disk.
        limit_ms = self._patience.silence_ms if self.beats else self._patience.longest_ms
        return self._looks * BEAT_SECONDS * 1000 >= limit_ms


def let_beats_decide(connection: socket.socket, patience: Patience) -> None:
    """The other side beats. While it waits for its disk, it reads nothing; TCP must not take it for gone then."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience.longest_ms)
