"""The temporary entities that the links of one connection hold; the home deletes them when nobody does.

Only links of a connection that holds an entity may receive from it. The home knows each holder by a number
(`broker.worker.temporary`).
"""

import asyncio
from collections.abc import Iterator
from functools import partial

from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import BrokerError, QuotaExceeded, ServerBusy
from broker.gateway.router import Router
from protocol import error_texts
from protocol.engine.links import Link

# A home that does not take a release, because it has stood still for long, is told again after this time.
AGAIN_SECONDS = 1.0


class Holding:
    """`numbers` are those of holders, for all connections of the gateway."""

    def __init__(self, router: Router, numbers: Iterator[int], most: int) -> None:
        self._router = router
        self._numbers = numbers
        self._most = most
        self._numbers_of: dict[Link, int] = {}
        self._entities: dict[Link, int] = {}  # ids, once the entity is there

    def begin(self, link: Link) -> int:
        """The link is about to hold an entity. Returns the holder's number. Raises QuotaExceeded."""
        if len(self._numbers_of) >= self._most:
            raise QuotaExceeded(error_texts.too_many_temporary(self._most))
        number = self._numbers_of[link] = next(self._numbers)
        return number

    def number(self, link: Link) -> int:
        """The number of the link as a holder; 0 if it is none."""
        return self._numbers_of.get(link, 0)

    def got(self, link: Link, entity_id: int) -> None:
        self._entities[link] = entity_id

    def end(self, link: Link) -> None:
        """The link has ended, or gets no entity."""
        self._entities.pop(link, None)
        number = self._numbers_of.pop(link, None)
        if number is not None:
            _release(self._router, number)

    def __contains__(self, entity_id: int) -> bool:
        return entity_id in self._entities.values()


def _release(router: Router, number: int) -> None:
    asked = changes.request(changes.Release(number))
    router.request(HOME, 0, asked, partial(_released, router, number), waits=False)


def _released(router: Router, number: int, result: object, error: BrokerError | None) -> None:
    """If the connection to the home is lost, so is all that this gateway holds (`OutcomeUnknown`)."""
    if isinstance(error, ServerBusy):
        asyncio.get_running_loop().call_later(AGAIN_SECONDS, _release, router, number)
