"""A syphon as a service: it may begin before the secondary is there, and says at any time how it fares.

service = Service(primary, secondary, None, options)
await service.run()
"""

import asyncio
from typing import Any, Final

from broker.logging import get_logger
from broker.pairing.namespaces import Namespace
from broker.pairing.reaching import SecondaryAway
from broker.pairing.syphon.checks import Found, check
from broker.pairing.syphon.counters import Counters
from broker.pairing.syphon.options import SyphonOptions
from broker.pairing.syphon.syphon import Syphon

log = get_logger("syphon")

FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 30.0
TELL_SECONDS: Final = 10.0


def snapshot(counters: Counters, *, is_primary_up: bool) -> dict[str, Any]:
    """What `broker.syphon_exposition` shows, as plain values."""
    return {"is_primary_up": is_primary_up, **counters.snapshot()}


class Service:
    """`primary_name` is for the paths of the backlog queues; by default the first part of the primary's host."""

    def __init__(
        self, primary: Namespace, secondary: Namespace, primary_name: str | None, options: SyphonOptions
    ) -> None:
        self._primary = primary
        self._secondary = secondary
        self._primary_name = primary_name
        self._options = options
        self._syphon: Syphon | None = None
        self._away = "it has not been looked for yet"  # why there is no connection to the secondary
        self._stopping = asyncio.Event()

    @property
    def counters(self) -> Counters:
        return Counters() if self._syphon is None else self._syphon.counters

    def unready(self) -> str | None:
        """Why nothing can be drained, or None. A primary that is away is no reason: the syphon waits for it."""
        if self._stopping.is_set():
            return "it is stopping"
        away = self._away if self._syphon is None else self._syphon.away
        return None if away is None else f"the secondary is away: {away}"

    def snapshot(self) -> dict[str, Any]:
        """Return this syphon's figures, as the function `snapshot` makes them."""
        return snapshot(self.counters, is_primary_up=self._syphon is not None and self._syphon.is_primary_up)

    def stop(self) -> None:
        """Let `run` end within seconds, with everything given back."""
        self._stopping.set()
        if self._syphon is not None:
            self._syphon.stop()

    async def run(self) -> None:
        """Run until `stop`, or until all queues are empty with `once`.

        Raises InvalidPairing for what nobody can wait for; with `once` that is SecondaryAway, too.
        """
        found = await self._found()
        if found is not None and not self._stopping.is_set():
            self._syphon = Syphon(self._primary, self._secondary, found, self._options)
            await self._syphon.run()

    async def keep_telling(self) -> None:
        """Log how many messages have been moved, while there are any. Runs until it is cancelled."""
        told = 0
        while True:
            await asyncio.sleep(TELL_SECONDS)
            moved = self.counters.completed
            if moved > told:
                per_second = round((moved - told) / TELL_SECONDS)
                log.info("messages moved", count=moved, per_second=per_second, left=self.counters.backlog)
            told = moved

    async def _found(self) -> Found | None:
        """What the syphon works with, as soon as the secondary is there. None if `stop` comes before."""
        retry_s = FIRST_RETRY_SECONDS
        while not self._stopping.is_set():
            try:
                return await self._checked()
            except SecondaryAway as error:
                if self._options.once:
                    raise
                if str(error) != self._away:
                    log.warning("secondary is away; waiting for it", reason=str(error))
                self._away = str(error)
                await self._before_stop(asyncio.create_task(asyncio.sleep(retry_s)))
                retry_s = min(2 * retry_s, LONGEST_RETRY_SECONDS)
        return None

    async def _checked(self) -> Found | None:
        checking = asyncio.create_task(check(self._primary, self._secondary, self._primary_name, self._options))
        await self._before_stop(checking)
        return None if checking.cancelled() else checking.result()

    async def _before_stop(self, task: "asyncio.Task[Any]") -> None:
        """Wait for the end of a task, which `stop` cancels."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (task, stopping):
                each.cancel()
            await asyncio.wait({task, stopping})
