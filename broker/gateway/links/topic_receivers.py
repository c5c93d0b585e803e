"""Links on which clients mean to look at the scheduled messages of a topic, as they do through its $management node.

SDKs attach a receiver before they peek. A topic has nothing to receive, so the link ends when it asks for messages.
"""

from broker.errors import NotAllowed
from broker.gateway.links.entity_link import EntityLink
from broker.namespace.entities import Right
from protocol import error_texts


class TopicReceiver(EntityLink):
    """A client's receiver on a topic. It never gets a message."""

    right = Right.LISTEN

    def on_flow(self) -> None:
        if self.link.credit > 0 and not self.link.closed:
            self.detach(NotAllowed(error_texts.receiver_on_topic(self.entity.name)))

    def post(self) -> None:
        """It gathers nothing."""

    def on_detach(self) -> None:
        """It holds nothing."""
