"""The timers of one client's connection, which end with it."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto


class Timer(Enum):
    DEADLINE = auto()  # of what the client must do next: SASL, its open, a token
    EXPIRY = auto()  # of the next right that ends
    STALL = auto()  # how long the client may not read


class Timers:
    """Timers with a name, of which there is one at a time, and any number of others."""

    def __init__(self) -> None:
        self._handles: dict[object, asyncio.TimerHandle] = {}

    def start(self, timer: Timer, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` after the delay, and not when this timer would have ended before."""
        self.stop(timer)
        self._start(timer, delay_s, call)

    def stop(self, timer: Timer) -> None:
        handle = self._handles.pop(timer, None)
        if handle is not None:
            handle.cancel()

    def add(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` after the delay, too."""
        self._start(object(), delay_s, call)

    def stop_all(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _start(self, name: object, delay_s: float, call: Callable[[], None]) -> None:
        self._handles[name] = asyncio.get_running_loop().call_later(delay_s, self._end, name, call)

    def _end(self, name: object, call: Callable[[], None]) -> None:
        del self._handles[name]
        call()
