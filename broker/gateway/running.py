"""The life of a process with an event loop, as its supervisor wants it: it beats, and it ends when it is told to."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

BEAT_SECONDS = 1.0


def set_at_sigterm(stopping: asyncio.Event) -> None:
    """SIGINT means nothing here: the supervisor decides."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)


async def keep_beating(beat: Callable[[], None], goes_on: Callable[[], bool] = lambda: True) -> None:
    """A sign of life (`broker.pulse`) each second while the loop makes rounds, and `goes_on` says the same of what is
    done beside the loop. Runs until it is cancelled."""
    while True:
        if goes_on():
            beat()
        await asyncio.sleep(BEAT_SECONDS)


async def serve_beside(serving: Coroutine[Any, Any, None], others: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Return when `serving` has. The others end before only if this process has failed: this raises their exception."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each) for each in (serving, *others)]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
