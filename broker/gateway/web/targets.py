"""What the path of a request names: messages (management.md 2), or entities and lists of them (1.1).

Names of queues and topics may have slashes, and clients send these as they are or percent-encoded. So a path is decoded
first and then read from its right end: the last `/Subscriptions/`, and a `/Rules/` behind it.
"""

import re
from enum import Enum
from typing import NamedTuple
from urllib.parse import unquote
from uuid import UUID

from broker.errors import InvalidArgument

MAX_PATH_CHARACTERS = 1024
_ORIGIN = re.compile(r"(?i:https?|wss?)://[^/]*")


class Resource(Enum):
    ROOT = "root"
    NAMESPACE = "namespace"
    QUEUES = "queues"
    TOPICS = "topics"
    ENTITY = "entity"
    SUBSCRIPTIONS = "subscriptions"
    SUBSCRIPTION = "subscription"
    RULES = "rules"
    RULE = "rule"


class Target(NamedTuple):
    """`entity` is the path of a queue or topic, as the client spells it."""

    resource: Resource
    entity: str = ""
    subscription: str = ""
    rule: str = ""

    @property
    def path(self) -> str:
        """The path of the entity that has, or is, what is named."""
        return f"{self.entity}/Subscriptions/{self.subscription}" if self.subscription else self.entity

    @property
    def url_path(self) -> str:
        """Return the path as it stands in the URLs of answers; the case of its fixed parts matters to clients."""
        end = {
            Resource.NAMESPACE: "$namespaceinfo",
            Resource.QUEUES: "$Resources/queues",
            Resource.TOPICS: "$Resources/topics",
            Resource.SUBSCRIPTIONS: "/Subscriptions",
            Resource.RULES: "/Rules",
            Resource.RULE: f"/Rules/{self.rule}",
        }.get(self.resource, "")
        return self.path + end


_FIXED = {
    "": Resource.ROOT,
    "$namespaceinfo": Resource.NAMESPACE,
    "$resources/queues": Resource.QUEUES,
    "$resources/topics": Resource.TOPICS,
}


def path_of(target: str) -> str:
    """The path in the target of a request, which may be a whole URL (RFC 9112, 3.2.2): Java's WebSockets send that."""
    target = target.partition("?")[0]
    origin = _ORIGIN.match(target)
    return target[origin.end() :] if origin else target


def decoded(raw_path: str) -> str:
    """The path without slashes around it. Raises InvalidArgument."""
    if len(raw_path) > MAX_PATH_CHARACTERS * 3:
        raise InvalidArgument(f"The path is longer than {MAX_PATH_CHARACTERS} characters.")
    try:
        path = unquote(raw_path, errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgument("The path is not UTF-8 where it is percent-encoded.") from None
    if any(character < " " or character == "\x7f" for character in path):
        raise InvalidArgument("The path contains control characters.")
    path = path.removeprefix("/").removesuffix("/")
    if len(path) > MAX_PATH_CHARACTERS:
        raise InvalidArgument(f"The path is longer than {MAX_PATH_CHARACTERS} characters.")
    if path and any(segment in ("", ".", "..") for segment in path.split("/")):
        raise InvalidArgument("The path has an empty segment, or one that is '.' or '..'.")
    return path


def parse(path: str) -> Target:
    """What a `decoded` path names, whether that exists or not."""
    if (fixed := _FIXED.get(path.lower())) is not None:
        return Target(fixed)
    segments = path.split("/")
    lower = [segment.lower() for segment in segments]
    match lower[-1], lower[-2:-1], lower[-3:-2], lower[-4:-3]:
        case _, ["rules"], [_], ["subscriptions"] if len(segments) > 4:
            return Target(Resource.RULE, "/".join(segments[:-4]), segments[-3], segments[-1])
        case "rules", [_], ["subscriptions"], _ if len(segments) > 3:
            return Target(Resource.RULES, "/".join(segments[:-3]), segments[-2])
        case _, ["subscriptions"], _, _ if len(segments) > 2:
            return Target(Resource.SUBSCRIPTION, "/".join(segments[:-2]), segments[-1])
        case "subscriptions", _, _, _ if len(segments) > 1:
            return Target(Resource.SUBSCRIPTIONS, "/".join(segments[:-1]))
    return Target(Resource.ENTITY, path)


def is_of_messages(method: str, path: str) -> bool:
    """True if a request with a `decoded` path sends, receives or settles messages. All others are management."""
    segments = path.lower().split("/")
    match segments[-3:]:
        case [*_, entity, "messages"] if entity:
            return method == "POST"
        case [*_, "messages", "head"] if len(segments) > 2:
            return method in ("POST", "DELETE")
        case ["messages", _, token] if len(segments) > 3:
            return method in ("POST", "PUT", "DELETE") and _is_uuid(token)
    return False


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True
