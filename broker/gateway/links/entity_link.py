"""A link to an entity."""

from collections.abc import Callable

from broker.errors import BrokerError
from broker.gateway.host import Host
from broker.gateway.namespace import Entity
from broker.namespace.entities import Right
from protocol.addresses import Address
from protocol.engine.links import Link


class EntityLink:
    """The common part of a client's sender and receiver. Their channels lead to the partitions of the entity."""

    right: Right

    def __init__(self, connection: Host, link: Link, entity: Entity, address: Address) -> None:
        self.connection = connection
        self.link = link
        self.entity = entity
        self.paths = [address.resource]  # the client needs the right on these as long as the link exists
        self.queue = entity.queue(address.part)
        self.metrics = connection.gateway.metrics.entity(entity.name)
        # From `wind_up` on: what the client asks for now came too late and has no effect.
        self.is_ending = False
        self._end: Callable[[], None] | None = None

    @property
    def tracker(self) -> str:
        return self.entity.tracker(self.connection.gateway.namespace.name)

    def detach(self, error: BrokerError) -> None:
        """End the link from our side."""
        self.connection.detach(self.link, error, self.tracker)

    @property
    def owes_answers(self) -> bool:
        """Something that the client has asked for is not answered yet."""
        return False

    def wind_up(self, end: Callable[[], None]) -> None:
        """The link ends from our side: call `end` when what the client has asked for until now is answered.

        It may be done already, and the client would never hear of it.
        """
        if self.is_ending:
            return
        self.is_ending, self._end = True, end
        self.link.take_over()
        self.end_if_answered()

    def end_if_answered(self) -> None:
        """End the link if it owes no more answers; call this at the end of a turn in which something was answered."""
        end = self._end
        if end is not None and not self.link.closed and not self.owes_answers:
            self._end = None
            end()
