"""Addresses of nodes: the many spellings of an entity's path, and what they mean.

    queue, topic                        an entity
    topic/Subscriptions/subscription    an entity
    <entity>/$DeadLetterQueue           its dead-letter queue
    <entity>/$Transfer/$DeadLetterQueue its transfer dead-letter queue
    <any of these>/$management          the management node of that
    $management                         the management node of the namespace
    $cbs                                claims

Addresses are case-insensitive, may begin with one slash, and may be a URL with any host and port. A path that begins
with a slash, and the path of a URL, are percent-encoded. Entity names may contain slashes, so a path is parsed from the
right.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from protocol.errors import ProtocolError

MAX_PATH_CHARACTERS = 260  # of a queue's or topic's path
MAX_SUBSCRIPTION_CHARACTERS = 50
MAX_CLIENTS_SUBSCRIPTION_CHARACTERS = 260  # with a client id, as clients of JMS have them (`protocol.subscribers`)
MAX_ADDRESS_CHARACTERS = 2048  # with URL and percent-encoding

_ORIGIN: Final = re.compile(r"(?:amqps?|sb|https?|wss?)://[^/]*", re.IGNORECASE)
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")


class InvalidAddress(ProtocolError):
    """The address cannot be that of any entity or node."""


class Node(Enum):
    ENTITY = "entity"
    MANAGEMENT = "management"
    CBS = "cbs"


class Part(Enum):
    """The sub-queues of an entity that have an address."""

    MAIN = "main"
    DEAD_LETTER = "dead-letter"
    TRANSFER_DEAD_LETTER = "transfer-dead-letter"


_SUFFIXES: Final = (
    ("/$transfer/$deadletterqueue", Part.TRANSFER_DEAD_LETTER),
    ("/$deadletterqueue", Part.DEAD_LETTER),
)

_SUFFIX: Final = {part: suffix for suffix, part in _SUFFIXES}


@dataclass(frozen=True, slots=True)
class Subscription:
    topic: str
    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """`path` is the entity's path as it was given, and `key` the same in lower case, for look-ups.

    Both are empty for $cbs and for the namespace (as an audience, or its management node). The path of a subscription
    is the whole topic/Subscriptions/name; `subscription` has its parts.
    """

    path: str
    part: Part = Part.MAIN
    node: Node = Node.ENTITY
    subscription: Subscription | None = None

    @property
    def key(self) -> str:
        return self.path.lower()

    @property
    def owner(self) -> str:
        """The path of the queue or topic whose keys count here: of a subscription, that of its topic."""
        return self.subscription.topic if self.subscription else self.path

    @property
    def resource(self) -> str:
        """The path with its sub-queue's suffix, in lower case; rights are held on it."""
        return self.key + _SUFFIX.get(self.part, "")


def parse(address: str) -> Address:
    """The address of a link's source or target. Raises InvalidAddress."""
    parsed = parse_audience(address)
    if not parsed.path and parsed.node is Node.ENTITY:
        raise InvalidAddress("The address names no entity.")
    return parsed


@lru_cache(maxsize=256)  # a client attaches many links to one entity
def parse_audience(audience: str) -> Address:
    """The audience of a token: an address as in `parse`, or the namespace (an empty path). Raises InvalidAddress."""
    if len(audience) > MAX_ADDRESS_CHARACTERS:
        raise InvalidAddress(f"The address is longer than {MAX_ADDRESS_CHARACTERS} characters.")
    path = _decoded_path(audience)
    if path.lower() == "$cbs":
        return Address("", node=Node.CBS)
    # With a slash in front, a suffix may also be the whole path.
    path = "/" + path if path else ""
    node, part = Node.ENTITY, Part.MAIN
    if path.lower().endswith("/$management"):
        path, node = path[: -len("/$management")], Node.MANAGEMENT
    for suffix, meaning in _SUFFIXES:
        if path.lower().endswith(suffix):
            path, part = path[: -len(suffix)], meaning
            break
    if path.lower().endswith(tuple(suffix for suffix, _ in _SUFFIXES)):
        raise InvalidAddress("A dead-letter queue has no dead-letter queue of its own.")
    if not path and part is not Part.MAIN:
        raise InvalidAddress("The address names a dead-letter queue, and no entity.")
    path = path.removeprefix("/")
    return Address(path, part, node, _subscription(path) if path else None)


def reaches(scope: str, path: str) -> bool:
    """True if rights at `scope` hold at `path`. Both are `Address.resource`.

    Those at the namespace, which is empty, hold everywhere; those at an entity for its sub-queues and subscriptions,
    and not at other entities whose paths go on behind it.
    """
    if not scope or path == scope:
        return True
    if not path.startswith(f"{scope}/"):
        return False
    below = path[len(scope) + 1 :]
    if below.startswith("$"):
        return True
    kind, _, name = below.partition("/$")[0].partition("/")
    return kind == "subscriptions" and name != "" and "/" not in name  # with more segments it is an entity's name


def _decoded_path(address: str) -> str:
    """The path of `address`, without the slashes around it."""
    origin = _ORIGIN.match(address)
    path = address[origin.end() :] if origin else address
    if origin or path.startswith("/"):
        try:
            path = unquote(path, errors="strict").removeprefix("/")
        except UnicodeDecodeError:
            raise InvalidAddress("The address is not UTF-8 where it is percent-encoded.") from None
    if _UNPRINTABLE.search(path):
        raise InvalidAddress("The address contains control characters.")
    return path.removesuffix("/")


def _subscription(path: str) -> Subscription | None:
    """The parts of `path` if it is a subscription's. Raises InvalidAddress if names are empty or too long."""
    segments = path.split("/")
    if not all(segments):
        raise InvalidAddress(f"The path '{path}' has an empty segment.")
    subscription = None
    if len(segments) > 2 and segments[-2].lower() == "subscriptions":
        subscription = Subscription("/".join(segments[:-2]), segments[-1])
        most = MAX_CLIENTS_SUBSCRIPTION_CHARACTERS if "$" in subscription.name else MAX_SUBSCRIPTION_CHARACTERS
        if len(subscription.name) > most:
            raise InvalidAddress(f"A subscription's name is longer than {most} characters.")
    if len(subscription.topic if subscription else path) > MAX_PATH_CHARACTERS:
        raise InvalidAddress(f"An entity's path is longer than {MAX_PATH_CHARACTERS} characters.")
    return subscription
