"""Names of entities on the command line: QUEUE, TOPIC/SUBSCRIPTION, TOPIC/SUBSCRIPTION/RULE, and the URLs' forms.

Names of queues and topics may have slashes, so a name is read from its right end, as the broker does. Whether the
characters are allowed is for the broker to say; refused here is what would name something else in a URL.
"""

from typing import NamedTuple
from urllib.parse import quote


class WrongPath(ValueError):
    """The text is for the user."""


class Path(NamedTuple):
    """`entity` is the path of a topic or queue; the others are empty if a topic or queue is meant."""

    entity: str
    subscription: str = ""
    rule: str = ""

    @property
    def shown(self) -> str:
        return "/".join(part for part in self if part)

    @property
    def url_path(self) -> str:
        """Return the path percent-encoded, without a slash before it."""
        path = quote(self.entity, safe="/")
        if self.subscription:
            path += f"/Subscriptions/{quote(self.subscription, safe='')}"
        if self.rule:
            path += f"/Rules/{quote(self.rule, safe='')}"
        return path


def entity_path(text: str) -> Path:
    """Return a queue or topic. Raises WrongPath."""
    return Path("/".join(_segments(text)))


def subscription_path(text: str) -> Path:
    """Read TOPIC/NAME or TOPIC/subscriptions/NAME. Raises WrongPath."""
    *topic, name = _segments(text)
    if len(topic) > 1 and topic[-1].lower() == "subscriptions":
        topic = topic[:-1]
    if not topic:
        raise WrongPath(f"{text!r} is not TOPIC/SUBSCRIPTION")
    return Path("/".join(topic), name)


def rule_path(text: str) -> Path:
    """Read TOPIC/SUBSCRIPTION/RULE or TOPIC/subscriptions/NAME/rules/RULE. Raises WrongPath."""
    *rest, name = _segments(text)
    if len(rest) > 3 and rest[-1].lower() == "rules" and rest[-3].lower() == "subscriptions":
        rest = rest[:-1]
    if len(rest) < 2:
        raise WrongPath(f"{text!r} is not TOPIC/SUBSCRIPTION/RULE")
    return subscription_path("/".join(rest))._replace(rule=name)


def _segments(text: str) -> list[str]:
    segments = text.strip("/").split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        raise WrongPath(f"{text!r} has an empty part, or one that is '.' or '..'")
    if not all(character.isprintable() for character in text):
        raise WrongPath(f"{text!r} has characters that no name has")
    if segments[0].startswith("$"):
        raise WrongPath(f"{text!r} begins with a $, which no name does")
    return segments
