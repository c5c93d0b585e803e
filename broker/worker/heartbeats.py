"""Signs of life of a worker to processes on other machines, by a thread of its own: see `broker.cluster.silence`.

The worker's turns wait for the disk, and a worker that waits is not gone. The thread beats for it, until no turn was
made for so long that the supervisor replaces the worker. A process that is stopped stops with all its threads.
"""

import threading
import time
from collections.abc import Callable

from broker.cluster.silence import BEAT_SECONDS, Patience
from broker.worker.peer import Peer


def _boot_time() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Heartbeats:
    """`patience` is that of the others, too: all processes of a namespace should have the same settings."""

    def __init__(self, patience: Patience, clock: Callable[[], float] = _boot_time) -> None:
        self.patience = patience
        self._clock = clock
        self._peers: set[Peer] = set()
        self._turned_s = self._beat_s = clock()
        self._was_silent = False

    def begin(self) -> None:
        """Beat until this process ends."""
        self._turned_s = self._beat_s = self._clock()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def add(self, peer: Peer) -> None:
        self._peers.add(peer)

    def discard(self, peer: Peer) -> None:
        self._peers.discard(peer)

    def turned(self) -> bool:
        """To be called by turns, each BEAT_SECONDS.

        True: for so long nobody has heard of this process that the others have given it up. They have told clients that
        the outcome is unknown, and have perhaps done elsewhere what they had asked for here.
        """
        now_s = self._clock()
        was_silent = self._was_silent or self._is_long_ago(now_s)
        self._was_silent = False
        self._turned_s = now_s
        if was_silent:
            self._beat_s = now_s
        return was_silent

    def beat(self) -> None:
        """Called by the thread, each BEAT_SECONDS."""
        now_s = self._clock()
        if (now_s - self._turned_s) * 1000 > self.patience.stall_ms:
            return
        if self._is_long_ago(now_s):
            self._was_silent = True  # which the next turn is told before it takes anything
        self._beat_s = now_s
        for peer in tuple(self._peers):
            peer.beat()

    def _is_long_ago(self, now_s: float) -> bool:
        return (now_s - self._beat_s) * 1000 >= self.patience.silence_ms

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self.beat()
