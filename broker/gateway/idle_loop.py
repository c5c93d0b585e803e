"""Lets an event loop poll for a while before it sleeps: see `broker.idle_polling`."""

import asyncio
import os
import time

from broker.idle_polling import IdlePolling


class IdleLoop:
    """The loop that runs when something is `handled`. It polls by making rounds."""

    def __init__(self, most_seconds: float) -> None:
        self._polling = IdlePolling(most_seconds)
        self._handled_at = 0.0  # the end of what was handled last
        self._ends_at = 0.0
        self._makes_rounds = False

    def begins(self) -> None:
        """Something has come, and will be handled."""
        self._polling.waited(time.monotonic() - self._handled_at)

    def handled(self) -> None:
        """It was handled. From now on the loop makes rounds for the time for which it may poll."""
        self._handled_at = time.monotonic()
        self._ends_at = self._handled_at + self._polling.window
        if self._polling.window and not self._makes_rounds:
            self._makes_rounds = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        if time.monotonic() < self._ends_at:
            os.sched_yield()
            asyncio.get_running_loop().call_soon(self._round)
        else:
            self._makes_rounds = False
