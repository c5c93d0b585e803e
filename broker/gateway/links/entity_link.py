"""A link to an entity."""

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

    @property
    def tracker(self) -> str:
        return self.entity.tracker(self.connection.gateway.namespace.name)

    def detach(self, error: BrokerError) -> None:
        """End the link from our side."""
        self.connection.detach(self.link, error, self.tracker)
