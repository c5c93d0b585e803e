"""Which first segment of a resource without a scheme is a host, and no part of an entity's path.

Names of entities have dots, too, and a token that is signed for the entity `tenant1.inbox` must not give away the
namespace. So a segment is a host only if nobody could mean an entity by it: `localhost`, an IP address, what has a
port, and the broker's own names. It does not matter which entities exist, nor how a client calls the broker.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

DEFAULT_HOST_NAMES: Final = ("*.servicebus.windows.net",)
MAX_CHARACTERS: Final = 255
_PORT: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?", re.ASCII)
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_PATTERN: Final = re.compile(rf"(?:{_LABEL}|\*\.{_LABEL})(?:\.{_LABEL})*", re.ASCII)


class HostNames:
    """`patterns` are names of hosts, or with `*.` before a name: then any one label may stand there (RFC 6125 6.4.3).

    What is no such pattern names nothing.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        names = [each.lower().removesuffix(".") for each in patterns]
        names = [each for each in names if is_pattern(each)]
        self._names = frozenset(each for each in names if not each.startswith("*"))
        self._domains = frozenset(each[len("*.") :] for each in names if each.startswith("*"))

    def has(self, segment: str) -> bool:
        """True if the segment is a host, perhaps with a port."""
        if len(segment) > MAX_CHARACTERS or not segment.isascii():
            return False
        found = _PORT.fullmatch(segment.lower())
        if found is None:
            return False
        name, port = found[1].removesuffix("."), found[2]
        if port is not None or name == "localhost" or _is_address(name):
            return True
        label, _, domain = name.partition(".")
        return name in self._names or (label != "" and domain in self._domains)


def is_pattern(text: str) -> bool:
    return len(text) <= MAX_CHARACTERS and _PATTERN.fullmatch(text) is not None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
