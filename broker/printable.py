"""Text of others for terminals and logs: nothing in it controls a terminal, or looks like another line.

Names, ids and error texts may have any character of Unicode. Some terminals take U+0080 to U+009F for commands,
some programs those of U+2028 and U+2029 for ends of lines, and readers are deceived by those that turn text around.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

_NOT_ASCII: Final = re.compile(r"[^\n\x20-\x7e]")


def printable(text: str) -> str:
    """The text on one line; other characters are shown as escape sequences of Python."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str, indent: str = "") -> str:
    """The text with its lines, each as `printable` makes it."""
    return "\n".join(f"{indent}{printable(line)}" for line in text.replace("\r\n", "\n").split("\n"))


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """JSON that can be read: only what cannot be printed is escaped. Without `indent` it is one line."""
    return _NOT_ASCII.sub(_escaped, json.dumps(value, indent=indent, default=default, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    character = found.group()
    if character.isprintable():
        return character
    octets = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{octets[at : at + 2].hex()}" for at in range(0, len(octets), 2))
