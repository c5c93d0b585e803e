"""Values as text, and text as values, as .NET writes and reads them without a culture.

Times are ticks of 100 ns here: a duration's, or those since the year 1 in UTC.
"""

import math
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final
from uuid import UUID

from broker.namespace.durations import parse_duration
from protocol.symbols import EPOCH_TICKS, TICKS_PER_MS

MAX_CHARACTERS: Final = 64  # of a text that is read: no value of these types needs more
_MAX_TICKS: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TICKS_PER_SECOND: Final = 1000 * TICKS_PER_MS
_TIMESPAN: Final = re.compile(
    r"(?:([0-9]{1,8})\.)?([01]?[0-9]|2[0-3]):([0-5]?[0-9])(?::([0-5]?[0-9])(?:\.([0-9]{1,7}))?)?"
)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def text_of(value: str | UUID | float | Decimal) -> str:
    """The text of a string, a guid, a number or a boolean."""
    if type(value) is float:
        return _of_double(value)
    return format(value, "f") if type(value) is Decimal else str(value)


def _of_double(number: float) -> str:
    """The shortest digits that give the number; with an exponent from 1E+15 on, and below 0.0001."""
    if not math.isfinite(number):
        return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"
    if number == 0:
        return "-0" if math.copysign(1, number) < 0 else "0"
    shortest = Decimal(repr(number)).normalize()
    exponent = shortest.adjusted()
    if -5 < exponent < 15:
        return format(shortest, "f")
    first, *rest = map(str, shortest.as_tuple().digits)
    digits = f"{first}.{''.join(rest)}" if rest else first
    return f"{'-' if number < 0 else ''}{digits}E{'-' if exponent < 0 else '+'}{abs(exponent):02}"


def read_duration(text: str) -> int | None:
    """The ticks of hh:mm:ss, with days before it (1.00:00:00), or of ISO 8601 (PT10M); None if it is neither."""
    text = _stripped(text)
    sign, size = (-1, text[1:]) if text.startswith("-") else (1, text)
    if (found := _TIMESPAN.fullmatch(size)) is not None:
        days, hours, minutes, seconds, fraction = (each or "0" for each in found.groups())
        whole = ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
        return sign * min(whole * _TICKS_PER_SECOND + int(fraction.ljust(7, "0")), _MAX_TICKS)
    try:
        return sign * min(parse_duration(size) * TICKS_PER_MS, _MAX_TICKS)
    except ValueError:
        return None


def read_instant(text: str) -> int | None:
    """The ticks of ISO 8601 (2030-01-01T00:00:00Z) or RFC 1123 (Tue, 01 Jan 2030 00:00:00 GMT); None if it is neither.

    A time without a zone is UTC.
    """
    text = _stripped(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        try:
            time = datetime.strptime(text, "%a, %d %b %Y %H:%M:%S GMT")
        except ValueError:
            return None
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
    return EPOCH_TICKS + since // timedelta(microseconds=1) * 10


def read_integer(text: str) -> int | None:
    text = _stripped(text)
    return int(text) if _INTEGER.fullmatch(text) else None


def read_decimal(text: str) -> Decimal | None:
    """The number, of any size that its digits can have; None if the text is no number."""
    text = _stripped(text)
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def read_boolean(text: str) -> bool | None:
    return {"true": True, "false": False}.get(_stripped(text).lower())


def read_guid(text: str) -> UUID | None:
    try:
        return UUID(_stripped(text))
    except ValueError:
        return None


def _stripped(text: str) -> str:
    """Return the text without white space around it; empty if it is too long for any of these values."""
    return text.strip() if len(text) <= MAX_CHARACTERS else ""
