"""What a link on a topic says of the subscription that it wants, as clients of JMS build it (Qpid JMS, JMS 2.0).

    name                          durable, or durable and shared by the connections of one client id
    name|2, name|3                further consumers of the same shared one
    name|global, name|global2     durable and shared by all connections without a client id
    name|volatile1                shared, not durable, of a client id
    name|global-volatile1         shared, not durable, without a client id

The client id is the container id of the connection. A consumer that neither shares nor is durable has a link name
without meaning. In Service Bus, a subscription that such a client has made is named

    name$client id$D              nothing between the two if there is no client id

That is documented for durable ones; the name of the others, with ND, is ours.
"""

import re
from collections.abc import Collection
from enum import Enum
from typing import Final, NamedTuple

from protocol.symbols import SHARED, TOPIC_CAPABILITIES

_OF_SHARED: Final = re.compile(r"(?P<name>[^|]+)\|(?:(?P<kind>global|volatile|global-volatile)?\d*)")


class Wanted(Enum):
    """`EXISTING`: the link does not say that it is of a subscriber. `OWN`: a subscription of this link alone."""

    EXISTING = "existing"
    DURABLE = "durable"
    SHARED = "shared"  # and not durable
    OWN = "own"


class Subscriber(NamedTuple):
    """`name` is the subscription's as the client knows it, or the link's. `client_id` may be empty."""

    wanted: Wanted
    name: str
    client_id: str

    @property
    def made_name(self) -> str:
        """The name of the subscription that is made for the client; not of one of its own."""
        return f"{self.name}${self.client_id}${'D' if self.wanted is Wanted.DURABLE else 'ND'}"


def subscriber_of(
    link_name: str, client_id: str, capabilities: Collection[str], outlives_connection: bool
) -> Subscriber:
    """`client_id` is the connection's container id. The last two are those of the source that the link asks for."""
    found = _OF_SHARED.fullmatch(link_name)
    is_shared = SHARED in capabilities
    if found is not None and (is_shared or outlives_connection):
        kind = found["kind"] or ""
        is_volatile = kind.endswith("volatile") or not outlives_connection
        wanted = Wanted.SHARED if is_volatile else Wanted.DURABLE
        return Subscriber(wanted, found["name"], "" if kind.startswith("global") else client_id)
    if outlives_connection:
        return Subscriber(Wanted.DURABLE, link_name, client_id)
    is_subscriber = not TOPIC_CAPABILITIES.isdisjoint(capabilities)
    return Subscriber(Wanted.OWN if is_subscriber else Wanted.EXISTING, link_name, client_id)
