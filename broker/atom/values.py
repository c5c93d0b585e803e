"""Values of elements: the texts that clients send, and those that the service answers with (management.md 1.6)."""

from datetime import UTC, datetime, timedelta
from typing import Final

from broker.namespace.durations import format_duration, parse_duration

UNLIMITED: Final = "P10675199DT2H48M5.4775807S"
"""The longest .NET TimeSpan, which stands for "never". Python sends a digit less, so days alone decide."""

NEVER: Final = "0001-01-01T00:00:00Z"
"""The time of what has not happened."""

UNLIMITED_MS: Final = 10_675_199 * 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_MS: Final = -62_135_596_800_000  # the times that a date has a year of four digits for
_LAST_MS: Final = 253_402_300_799_999


def read_boolean(text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise ValueError("must be true or false")


def read_number(text: str) -> int:
    digits = text.removeprefix("-").removeprefix("+")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19):
        raise ValueError("must be a whole number")
    return int(text)


def read_duration_ms(text: str) -> int:
    """Read a duration; the result is at most `UNLIMITED_MS`."""
    return min(parse_duration(text), UNLIMITED_MS)


def write_duration(duration_ms: int | None) -> str:
    return UNLIMITED if duration_ms is None else format_duration(duration_ms)


def write_boolean(value: bool) -> str:
    return "true" if value else "false"


def write_time(time_ms: int) -> str:
    """ISO 8601, UTC; milliseconds since 1970. A time outside of the years 1 to 9999 is shown as the nearest in them."""
    time_ms = min(max(time_ms, _FIRST_MS), _LAST_MS)
    return f"{(_EPOCH + timedelta(milliseconds=time_ms)).isoformat()[:19]}.{time_ms % 1000:03}Z"
