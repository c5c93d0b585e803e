"""A link to an entity: one channel to the entity's partition."""

from typing import Any

from broker.errors import BrokerError
from broker.gateway.host import Host
from broker.gateway.namespace import Entity
from broker.namespace.entities import Right
from protocol.addresses import Address
from protocol.engine.links import Link


class EntityLink:
    """The common part of a client's sender and receiver."""

    right: Right

    def __init__(self, connection: Host, link: Link, entity: Entity, address: Address) -> None:
        self.connection = connection
        self.link = link
        self.entity = entity
        self.paths = [address.resource]  # the client needs the right on these as long as the link exists
        self.queue = entity.queue(address.part)
        self.partition = entity.partition
        self.metrics = connection.gateway.metrics.entity(entity.name)
        self.worker = connection.gateway.router.worker(entity.partition)
        self.channel = connection.gateway.router.next_number()
        self.worker.channels[self.channel] = self
        self._worker_is_down = False  # a command of this turn could not be posted

    @property
    def tracker(self) -> str:
        return self.entity.tracker(self.connection.gateway.namespace.name)

    def detach(self, error: BrokerError) -> None:
        """End the link from our side."""
        self.connection.detach(self.link, error, self.tracker)

    # Answers that only senders or only receivers get.

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        raise AssertionError("no sends on this channel")

    def on_opened(self, session_id: str = "", locked_until_ms: int = 0) -> None: ...

    def on_drained(self, delivered: int) -> None:
        raise AssertionError("no receiver on this channel")

    def on_settled(self, count: int, error: BrokerError | None) -> None:
        raise AssertionError("no receiver on this channel")

    def on_deliver(self, locked_until_ms: int, entries: list[Any]) -> None:
        raise AssertionError("no receiver on this channel")

    def on_closed(self, error: BrokerError | None) -> None:
        raise AssertionError("no receiver on this channel")

    def on_worker_lost(self) -> None:
        raise NotImplementedError

    def answer_unposted(self) -> None:
        """Answer what is pending: it could not be posted, so none of it was done."""
        raise NotImplementedError

    def on_worker_back(self) -> None: ...

    def answer_if_down(self) -> None:
        """Answer what could not be posted: before this turn's output is written, and before the worker is back."""
        if self._worker_is_down:
            self._worker_is_down = False
            self.answer_unposted()
