"""The rules for names, in the words that every refusal and the documentation use."""

from collections.abc import Mapping
from typing import Any, Final

ENDS: Final = "with a letter or digit at the start, and one or _ or - at the end"
_OF_ENTITY: Final = f"1 to 260 letters, digits and . _ - / ~, {ENDS}"

RULES: Final = {
    "queue": _OF_ENTITY,
    "topic": _OF_ENTITY,
    "subscription": f"1 to 50 letters, digits and . _ - ~, {ENDS}; behind it may be $client id$D, of a client of JMS",
    "rule": "1 to 50 characters other than / \\ @ ? # * and control characters, with no space at either end",
}
"""By what is named. The text comes after "must be"."""

OF_SEGMENTS: Final = "Entity segments can contain only letters, numbers, periods (.), hyphens (-), and underscores (_)."
"""What Service Bus says of a name that it refuses. It takes ~ as well."""


def problem(kind: str, details: Mapping[str, Any]) -> str:
    """What an error of pydantic means for the name of a queue, topic, subscription or rule: "must be ..."."""
    return str(details["msg"]) if details["type"] == "no_address" else f"must be {RULES[kind]}"


def refusal(kind: str, details: Mapping[str, Any]) -> str:
    """The same as sentences for a client: "The queue's name is not valid: it must be ..."."""
    text = f"The {kind}'s name is not valid: it {problem(kind, details)}."
    return text if kind == "rule" else f"{text} {OF_SEGMENTS}"
