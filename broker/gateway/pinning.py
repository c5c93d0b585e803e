"""Which links pin the cross-entity sessions of a client (`broker.gateway.crossing`): that depends on the client."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Pinning(Enum):
    """What pins a client's sessions."""

    NEVER = 0  # they do not cross entities, in whatever order their links are attached
    BY_RECEIVERS = 1
    BY_LINKS = 2

    @classmethod
    def of(cls, open_properties: Mapping[Any, Any]) -> "Pinning":
        """Return how the client that sent these open properties pins: Azure's SDKs name themselves in two of them."""
        named = any("azsdk-" in str(open_properties.get(name, "")) for name in ("user-agent", "product"))
        return cls.BY_LINKS if named else cls.BY_RECEIVERS
