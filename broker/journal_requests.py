"""What a journal's process is asked, as values: read from a client's request, and written into a gateway's.

A gateway asks with nothing but these values. No text of a client gets into the target of an inner request as it came,
so what is answered is what the rights were checked for.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

PATH: Final = "/$journal"
CONSUMERS: Final = f"{PATH}/consumers/"
DEFAULT_BYTES: Final = 16 << 20  # of the frames of one answer
MAX_BYTES: Final = 256 << 20
MAX_OFFSET: Final = (1 << 63) - 1
MAX_PATTERN_CHARACTERS: Final = 1024
EPOCH_DIGITS: Final = 16
_EPOCH: Final = re.compile(f"[0-9a-fA-F]{{{EPOCH_DIGITS}}}")
_CONSUMER: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")

Query = Iterable[tuple[str, str]]
"""Parameters with their values, decoded, as often as they are given."""


class WrongRequest(Exception):
    """The text is for the user, and begins in lower case. `status` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class NoPartition(WrongRequest):
    def __init__(self, partition: int | str) -> None:
        super().__init__(404, f"there is no journal of a partition {str(partition)[:20]!r}")


class Target(NamedTuple):
    """The target of an inner request: a path that needs no percent-encoding, and a query that is not encoded yet."""

    path: str
    query: dict[str, str]


# Asks for nothing, and whatever is answered says that the process is there.
SIGN_OF_LIFE: Final = Target(f"{PATH}/alive", {})


class Overview(NamedTuple):
    """The question which offsets there are. `is_current`: with all that the workers have confirmed before it."""

    is_current: bool

    @classmethod
    def read(cls, query: Query) -> Self:
        """Read the query of a request for the overview. Raises WrongRequest."""
        return cls(bool(_number(_parameters(query), "current", 0, 0, 1)))

    def target(self) -> Target:
        return Target(PATH, {"current": str(int(self.is_current))})


class Consumer(NamedTuple):
    """How far one of those that read the journal is."""

    name: str

    @classmethod
    def read(cls, name: str) -> Self:
        """Read the name of a consumer. Raises WrongRequest."""
        if not _CONSUMER.fullmatch(name) or name in (".", ".."):
            raise WrongRequest(
                400, "the name of a consumer has 1 to 100 letters, digits, dots, underscores and hyphens"
            )
        return cls(name)

    def target(self) -> Target:
        return Target(f"{CONSUMERS}{self.name}", {})


class Range(NamedTuple):
    """Rows of a partition: those of `first` <= offset < `end`, in about `max_bytes`, with bodies if `has_records`.

    `pattern` is as of a shell, and fits paths of entities. `owner` is the path of a queue or topic in lower case: then
    only rows of that, and of its subscriptions, are given, whatever the pattern says. Either may be None. `epoch` is in
    lower case.
    """

    partition: int
    epoch: str
    first: int
    end: int
    max_bytes: int
    has_records: bool
    pattern: str | None
    owner: str | None = None

    @classmethod
    def read(cls, partition: str, query: Query) -> Self:
        """`partition` is what stands in the path. Raises WrongRequest."""
        parameters = _parameters(query)
        found = cls(
            _partition(partition),
            _epoch(parameters),
            _number(parameters, "from", None, 0, MAX_OFFSET),
            _number(parameters, "to", None, 0, MAX_OFFSET),
            _number(parameters, "maxBytes", DEFAULT_BYTES, 1, MAX_BYTES),
            bool(_number(parameters, "records", 1, 0, 1)),
            _path(parameters, "entity"),
            _path(parameters, "owner"),
        )
        if found.end < found.first:
            raise WrongRequest(400, "'to' must not be below 'from'")
        return found

    def target(self) -> Target:
        query = {
            "epoch": self.epoch,
            "from": str(self.first),
            "to": str(self.end),
            "maxBytes": str(self.max_bytes),
            "records": str(int(self.has_records)),
        }
        for name, text in (("entity", self.pattern), ("owner", self.owner)):
            if text is not None:
                query[name] = text
        return Target(f"{PATH}/{self.partition}", query)


def _parameters(query: Query) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, text in query:
        if name in found:  # whoever reads only the first, or the last, would read another request
            raise WrongRequest(400, f"{name[:20]!r} is given more than once")
        found[name] = text
    return found


def _partition(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise NoPartition(text)
    return int(text)


def _epoch(parameters: dict[str, str]) -> str:
    text = parameters.get("epoch", "")
    if not _EPOCH.fullmatch(text):
        raise WrongRequest(400, f"'epoch' must be the {EPOCH_DIGITS} hex digits that /$journal says")
    return text.lower()


def _path(parameters: dict[str, str], name: str) -> str | None:
    text = parameters.get(name)
    if text is not None and not (0 < len(text) <= MAX_PATTERN_CHARACTERS and text.isprintable()):
        raise WrongRequest(400, f"{name!r} must be a pattern of 1 to {MAX_PATTERN_CHARACTERS} characters")
    return text


def _number(parameters: dict[str, str], name: str, default: int | None, least: int, most: int) -> int:
    text = parameters.get(name)
    if text is None and default is not None:
        return default
    if (
        text is None
        or not text.isascii()
        or not text.isdecimal()
        or not least <= int(text[:20]) <= most
        or len(text) > 20
    ):
        raise WrongRequest(400, f"{name!r} must be a number from {least} to {most}")
    return int(text)
