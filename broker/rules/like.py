"""Patterns of LIKE: `%` is any run of characters, `_` one character, anything else itself; the whole text has to match.

A pattern is split at its runs into segments. The first segment must be at the start of the text and the last at its
end. Each of the others is taken at its first match behind the one before. That leaves the most text to the segments
after it, so there is no backtracking. A segment is characters with gaps (`_`) between them, and is found piece by piece
with `str.find`: where a piece is found next, the segment cannot begin earlier. So the cost of a pattern is about the
length of the text. The exception are patterns of many pieces, each of which is found everywhere in the text while the
whole segment is found nowhere. Therefore searched characters are counted, and `MessageView.spend` ends the search.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple, Protocol

from broker.rules.errors import FilterError

MAX_PATTERN: Final = 1024  # characters; a pattern may be a property of a message
FIND_STEPS: Final = 32  # one call costs as much as looking at this many characters
# In a text below 2,500 characters `str.find` may compare the whole piece at each character.
_PIECE_CHARACTERS: Final = 8

_RUN: Final = "%%"  # stands for a run among the characters of a pattern
_ANY: Final = "__"


class Budget(Protocol):
    def spend(self, steps: int) -> None:
        """Take so many steps from the budget. Raises FilterError if there are not enough left."""


class _Segment(NamedTuple):
    """`pieces` are the strings between gaps, with their offsets in the segment; `literal` is the whole segment if it
    has no gaps.
    """

    length: int
    pieces: tuple[tuple[int, str], ...]
    literal: str | None

    def stands_at(self, text: str, at: int, budget: Budget) -> bool:
        if self.literal is not None:
            return text.startswith(self.literal, at)
        budget.spend(FIND_STEPS * len(self.pieces))
        return all(text.startswith(piece, at + offset) for offset, piece in self.pieces)

    def end_in(self, text: str, at: int, end: int, budget: Budget) -> int:
        """The end of the first match from `at` on that ends by `end`; -1 if there is none."""
        last = end - self.length
        while at <= last:
            for offset, piece in self.pieces:
                start = at + offset
                found = text.find(piece, start, last + offset + len(piece))
                budget.spend((last + offset if found < 0 else found) - start + FIND_STEPS)
                if found != start:
                    if found < 0:
                        return -1
                    at = found - offset
                    break
            else:
                return at + self.length
        return -1


class Pattern:
    __slots__ = ("_between", "_first", "_last", "_least")

    def __init__(self, segments: list[list[str]]) -> None:
        first, *between = map(_segment, segments)
        self._first = first
        self._last = between.pop() if between else None
        self._between = [segment for segment in between if segment.length]
        self._least = sum(len(segment) for segment in segments)

    def matches(self, text: str, budget: Budget) -> bool:
        """Decide whether the whole text matches. Raises FilterError if that costs more than `budget` has."""
        if len(text) < self._least:
            return False
        first, last = self._first, self._last
        if last is None:
            return len(text) == first.length and first.stands_at(text, 0, budget)
        end = len(text) - last.length
        if not first.stands_at(text, 0, budget) or not last.stands_at(text, end, budget):
            return False
        at = first.length
        for segment in self._between:
            at = segment.end_in(text, at, end, budget)
            if at < 0:
                return False
        return True


@lru_cache(maxsize=1024)  # for patterns from messages; those in the text of a rule are compiled with the rule
def like(pattern: str, escape: str | None = None) -> Pattern:
    """Compile a pattern of LIKE.

    Raises FilterError if it is too long, or `escape` is not one character, or escapes nothing at the pattern's end.
    """
    if escape is not None and len(escape) != 1:
        raise FilterError(f"ESCAPE takes one character, not {escape[:20]!r}")
    if len(pattern) > MAX_PATTERN:
        raise FilterError(f"a pattern of LIKE has at most {MAX_PATTERN} characters, this one has {len(pattern)}")
    segments: list[list[str]] = [[]]
    for character in _characters(pattern, escape):
        if character is _RUN:
            segments.append([])
        else:
            segments[-1].append(character)
    return Pattern(segments)


def _characters(pattern: str, escape: str | None) -> Iterator[str]:
    """The characters of the pattern, with _ANY and _RUN for the special ones."""
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None:
                raise FilterError("the pattern of LIKE ends with its ESCAPE character")
            yield escaped
        else:
            yield _RUN if character == "%" else _ANY if character == "_" else character


def _segment(characters: list[str]) -> _Segment:
    pieces = []
    at = 0
    for is_gap, group in groupby(characters, lambda character: character is _ANY):
        of_group = list(group)
        if not is_gap:
            for begin in range(0, len(of_group), _PIECE_CHARACTERS):
                pieces.append((at + begin, "".join(of_group[begin : begin + _PIECE_CHARACTERS])))
        at += len(of_group)
    literal = None if any(character is _ANY for character in characters) else "".join(characters)
    return _Segment(len(characters), tuple(pieces), literal)
