"""Links whose node is being made: a temporary queue or topic, or a subscription. The attach is answered after that."""

from collections.abc import Callable
from typing import Any

from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import BrokerError, OutcomeUnknown, ServerBusy
from broker.gateway.host import Host
from broker.gateway.namespace import Entity
from protocol import error_texts
from protocol.engine.deliveries import Delivery, forget
from protocol.engine.links import Link


class LinkInMaking:
    """It stands in for what the link is bound to (`broker.gateway.binding.Bound`), which `bind` makes of the entity."""

    def __init__(
        self, host: Host, link: Link, kind: str, fields: dict[str, Any], path: str, bind: Callable[[Entity], Any]
    ) -> None:
        """`path` is that of the entity with these properties. It is temporary if the host's `holding` has the link."""
        self._host = host
        self._link = link
        self._change = changes.request(changes.Provide(kind, fields, None, host.holding.number(link)))
        self._is_due = True
        self._path = path
        self._bind = bind
        host.active[self] = None

    def post(self) -> None:
        """Ask for it, once: at the end of the turn, so that the link is bound to this object when the answer comes."""
        is_due, self._is_due = self._is_due, False
        if is_due and not self._link.closed:
            self._ask()

    def _ask(self) -> None:
        router = self._host.gateway.router
        router.request(HOME, 0, self._change, self._answered, self._host, asker=self)

    def _answered(self, document: Any, error: BrokerError | None) -> None:
        if self._link.context is not self or self._link.closed:
            return
        if isinstance(error, OutcomeUnknown) and self._host.gateway.router.worker(HOME).is_awaited:
            self._ask()  # if it was made, it is found
        else:
            self._host.bind_made(self._link, lambda: self._made(error))

    def _made(self, error: BrokerError | None) -> Any:
        """Bind the link to the entity that was made for it. Raises BrokerError, ProtocolError."""
        if error is not None:
            raise error
        entity = self._host.gateway.namespace.at(self._path)
        if entity is None:  # it was deleted meanwhile
            raise ServerBusy(error_texts.SERVER_BUSY)
        if entity.is_temporary:
            self._host.holding.got(self._link, entity.entity_id)
        return self._bind(entity)

    # -- what the client may say meanwhile

    def on_flow(self) -> None:
        """The credit is known to the link, and used when it is bound."""

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        """The client had no credit for it."""
        forget(delivery)

    def on_oversized(self, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        forget(delivery)

    def on_crowded(self, delivery: Delivery, settled: bool) -> None:
        forget(delivery)

    def on_detach(self) -> None:
        """Leave the entity alone if it is made: it is durable, or released when the link is unbound."""
        self._host.gateway.router.drop_waiting(self)
