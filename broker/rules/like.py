"""Patterns of LIKE as regular expressions that match in time linear in the text, whatever the pattern.

`%` is any run of characters, `_` one character, anything else itself; the whole text has to match.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from broker.rules.errors import FilterError

MAX_PATTERN: Final = 1024  # characters; a pattern may come with a message

_RUN: Final = None  # in place of a piece of a pattern


@lru_cache(maxsize=1024)  # patterns of messages; those in the text of a rule are compiled with it
def like(pattern: str, escape: str | None = None) -> re.Pattern[str]:
    """For `fullmatch`. Raises FilterError if `escape` is not one character, or escapes nothing at the pattern's end."""
    if escape is not None and len(escape) != 1:
        raise FilterError(f"ESCAPE takes one character, not {escape[:20]!r}")
    if len(pattern) > MAX_PATTERN:
        raise FilterError(f"a pattern of LIKE has at most {MAX_PATTERN} characters, this one has {len(pattern)}")
    segments: list[list[str]] = [[]]
    for piece in _pieces(pattern, escape):
        if piece is _RUN:
            segments.append([])
        else:
            segments[-1].append(piece)
    first, *rest = segments
    if not rest:
        return re.compile("".join(first), re.DOTALL)
    *between, last = rest
    # A segment between two runs matches where it first can: that leaves most to those after it, so there is no going
    # back (an atomic group). The last one stands at the end, wherever the others ended before it.
    parts = ["".join(first), *(f"(?>.*?{''.join(segment)})" for segment in between if segment)]
    if last:
        parts.append(f"(?=.{{{len(last)}}})")
    parts.append("(?>.*)")
    if last:
        parts.append(f"(?<={''.join(last)})")
    return re.compile("".join(parts), re.DOTALL)


def _pieces(pattern: str, escape: str | None) -> Iterator[str | None]:
    """Expressions that match one character each; _RUN for a run."""
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None:
                raise FilterError("the pattern of LIKE ends with its ESCAPE character")
            yield re.escape(escaped)
        elif character == "%":
            yield _RUN
        else:
            yield "." if character == "_" else re.escape(character)
