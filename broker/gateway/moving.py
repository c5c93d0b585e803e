"""Leads the move of an entity to another partition: passes its rows on, and lets the home decide in the end.

The messages go through this gateway, one request after the other, while clients go on using the entity. Only for the
last rows is it frozen: what clients ask for meanwhile is refused as busy, and receivers wait. If anything fails before
the home has decided, or this process ends, the entity stays where it is (`broker.worker.moves`).
"""

import asyncio
import time
from contextlib import suppress
from typing import Any

from broker import requests
from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import BrokerError, ServerBusy
from broker.gateway.router import Router
from broker.logging import get_logger

ROWS_BYTES = 1 << 20  # of one request
ROWS = 2000
FEW_ROWS = 200  # that may be left when the entity becomes quiet
TRIES = 1000  # requests in a row after which the entity changes too fast
QUIET_SECONDS = 5.0  # time for receivers to settle what they have; then the locks end
LOOK_SECONDS = 0.02

log = get_logger("gateway")


async def move(router: Router, path: str, partition: int) -> dict[str, Any]:
    """Returns the definition of the entity, which lives on this partition then. Raises BrokerError."""
    started = time.monotonic()
    entity_id, source, token = await _change(router, changes.BeginMove(path, partition))
    try:
        moving = _Move(router, entity_id, source, partition, token)
        await moving.prepare()
        frozen_seconds = await moving.finish()
        definition: dict[str, Any] = await _change(router, changes.EndMove(token))
    except Exception as error:
        log.warning("entity not moved", entity=path, partition=partition, error=str(error))
        with suppress(BrokerError):  # the home may have heard already that it cannot go on
            await _change(router, changes.CancelMove(token))
        raise
    log.info(
        "entity moved",
        entity=path,
        partition=partition,
        before=source,
        rows=moving.rows,
        seconds=round(time.monotonic() - started, 3),
        frozen_seconds=round(frozen_seconds, 3),
    )
    return definition


async def _change(router: Router, change: changes.Asked) -> Any:
    return await router.ask(HOME, 0, changes.request(change))


class _Move:
    def __init__(self, router: Router, entity_id: int, source: int, to: int, token: bytes) -> None:
        self._router = router
        self._token = token
        self._entity_id = entity_id
        self._source = source
        self._to = to
        self.rows = 0  # that were passed on

    async def prepare(self) -> None:
        """Pass on everything but the rows that clients change at the same time, and let locks be settled."""
        await self._ask(self._to, requests.Arrive(self._token, self._entity_id))
        await self._ask(self._source, requests.Depart(self._token, self._entity_id))
        behind = 0  # requests in a row that left rows which had changed
        while behind < TRIES:
            is_read, noted = await self._pass_on()
            if is_read and noted <= FEW_ROWS:
                break
            behind = behind + 1 if noted else 0
        else:
            raise ServerBusy("The entity changes faster than it can be moved. Please try again when it is used less.")
        until = time.monotonic() + QUIET_SECONDS
        hold = requests.Hold(self._token, self._entity_id)
        while sum(await self._ask(self._source, hold)) and time.monotonic() < until:
            await self._pass_on()
            await asyncio.sleep(LOOK_SECONDS)

    async def finish(self) -> float:
        """Freeze the entity, and pass on what is left. Returns the seconds that this took."""
        started = time.monotonic()
        await self._ask(self._source, requests.Freeze(self._token, self._entity_id))
        while (await self._pass_on()) != (True, 0):
            pass
        return time.monotonic() - started

    async def _pass_on(self) -> tuple[bool, int]:
        """The next rows. True if all were read once, and the number of those that have changed since."""
        following = requests.Rows(self._token, self._entity_id, ROWS_BYTES, ROWS)
        found, is_read, noted = await self._ask(self._source, following)
        if found:
            self.rows += len(found)
            await self._ask(self._to, requests.StoreRows(self._token, found))
        return is_read, noted

    async def _ask(self, partition: int, asked: requests.Request) -> Any:
        return await self._router.ask(partition, 0, asked)
