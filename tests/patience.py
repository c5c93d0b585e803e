"""How long tests wait for what must come. A test that holds the broker to a time states that time itself."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0  # only a test that fails waits so long


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first answer that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.02)
    return answer


async def until(condition: Callable[[], object]) -> None:
    """Let others run until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
