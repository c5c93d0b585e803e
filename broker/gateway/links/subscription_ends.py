"""Links by which clients of JMS end durable subscriptions (`unsubscribe`).

Such a client attaches under the name of the subscription's link with a source that is null, so that the answer has the
source that there is, and closes the link (2.6.3). Closing is answered when the subscription is deleted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import BrokerError, EntityNotFound
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.namespace import Entity
from protocol.engine.links import Link


class SubscriptionEnd:
    """`subscriptions` are those that end when the client closes the link."""

    def __init__(self, host: Host, link: Link, subscriptions: Sequence[Entity]) -> None:
        self._host = host
        self._link = link
        self._waiting = [each.name for each in subscriptions]
        self._error: BrokerError | None = None

    def on_close(self) -> None:
        """The client has closed the link; its answer comes later."""
        self._link.detaches_later = True
        self._host.later(0, self._delete)

    def _delete(self) -> None:
        for name in self._waiting:
            reply = partial(self._deleted, name)
            asked = changes.request(changes.Delete(name))
            self._host.gateway.router.request(HOME, 0, asked, reply, self._host)

    def _deleted(self, name: str, result: Any, error: BrokerError | None) -> None:
        self._waiting.remove(name)
        if error is not None and not isinstance(error, EntityNotFound):
            self._error = error
        if self._waiting:
            return
        if self._error is None:
            self._link.finish_detach()
        else:
            self._link.finish_detach(condition_of(self._error), self._host.tracked(str(self._error)))
        self._host.flush()

    def on_flow(self) -> None:
        """It has no messages."""

    def post(self) -> None:
        """It gathers nothing."""

    def on_detach(self) -> None:
        """It holds nothing."""
