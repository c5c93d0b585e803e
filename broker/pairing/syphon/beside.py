"""A syphon in a process that has other work: whatever becomes of the syphon, that goes on.

beside = Beside(lambda: Service(primary, secondary, name, options))
await beside.run()
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from broker.logging import get_logger
from broker.pairing.options import InvalidPairing
from broker.pairing.syphon.service import Service

log = get_logger("syphon")

RETRY_SECONDS: Final = 30.0  # after what nobody can wait for: somebody must change something


class Beside:
    """`make` makes the service that is run, and a new one after each that has failed."""

    def __init__(self, make: Callable[[], Service]) -> None:
        self._make = make
        self._stopping = asyncio.Event()
        self._problem = ""
        self._service = make()

    def problem(self) -> str:
        """Why nothing can be drained; empty if it can."""
        unready = self._service.unready()
        return "" if unready is None else self._problem or unready

    def snapshot(self) -> dict[str, Any]:
        """What `broker.syphon_exposition` shows, as plain values."""
        return self._service.snapshot()

    def stop(self) -> None:
        """Let `run` end within seconds, with everything given back."""
        self._stopping.set()
        self._service.stop()

    async def run(self) -> None:
        """Drain the backlog until `stop`. What prevents it is logged, and tried again."""
        while not self._stopping.is_set():
            telling = asyncio.create_task(self._service.keep_telling())
            try:
                await self._service.run()
                return
            except InvalidPairing as error:
                if str(error) != self._problem:
                    log.error("the backlog cannot be drained", reason=str(error), retry_in_seconds=RETRY_SECONDS)
                self._problem = str(error)
            except Exception:
                log.exception("the syphon has failed", retry_in_seconds=RETRY_SECONDS)
                self._problem = "it has failed"
            finally:
                telling.cancel()
            await self._rest()
            if not self._stopping.is_set():
                self._service = self._make()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await self._stopping.wait()
        except TimeoutError:
            pass
