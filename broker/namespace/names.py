"""The rules for names, in the words that every refusal and the documentation use."""

from collections.abc import Mapping
from typing import Any, Final

ENDS: Final = "with a letter or digit at the start, and one or _ at the end"
_OF_ENTITY: Final = f"1 to 260 letters, digits and . _ - / ~, {ENDS}"

RULES: Final = {
    "queue": _OF_ENTITY,
    "topic": _OF_ENTITY,
    "subscription": f"1 to 50 letters, digits and . _ - ~, {ENDS}",
    "rule": "1 to 50 characters other than / \\ @ ? # * and control characters, with no space at either end",
}
"""By what is named. The text comes after "must be"."""


def problem(kind: str, details: Mapping[str, Any]) -> str:
    """What an error of pydantic means for the name of a queue, topic, subscription or rule: "must be ..."."""
    return str(details["msg"]) if details["type"] == "no_address" else f"must be {RULES[kind]}"
