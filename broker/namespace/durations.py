"""Durations as ISO 8601 writes them, in milliseconds here.

Of ISO 8601: weeks, days, hours, minutes, seconds, the last part with a fraction. Years and months are refused: they
have no fixed length.
"""

import re
from decimal import ROUND_HALF_UP, Decimal

_NUMBER = r"(\d+(?:[.,]\d+)?)"
_DURATION = re.compile(
    rf"P(?=[\dT])(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=\d)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?", re.ASCII
)
_UNITS_MS = (7 * 86_400_000, 86_400_000, 3_600_000, 60_000, 1000)


def parse_duration(text: str) -> int:
    """Milliseconds, rounded half up. Raises ValueError, with the fix, if `text` is not such a duration."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or len(text) > 64:
        raise ValueError("must be an ISO 8601 duration of days, hours, minutes and seconds, such as PT30S, PT1H or P7D")
    parts = [(part.replace(",", "."), unit) for part, unit in zip(match.groups(), _UNITS_MS, strict=True) if part]
    if any("." in part for part, _ in parts[:-1]):
        raise ValueError("must have a fraction in its last part only, such as PT1M0.5S")
    total = sum(Decimal(part) * unit for part, unit in parts)
    return int(Decimal(total).quantize(Decimal(1), ROUND_HALF_UP))


def format_duration(duration_ms: int) -> str:
    """The shortest form without weeks: PT30S, PT1H, P7D, PT0.25S. `duration_ms` is not negative."""
    days, rest_ms = divmod(duration_ms, 86_400_000)
    hours, rest_ms = divmod(rest_ms, 3_600_000)
    minutes, rest_ms = divmod(rest_ms, 60_000)
    seconds = f"{rest_ms // 1000}.{rest_ms % 1000:03}".rstrip("0").rstrip(".")
    time = "".join(f"{number}{unit}" for number, unit in ((hours, "H"), (minutes, "M")) if number)
    if seconds != "0":
        time += seconds + "S"
    date = f"{days}D" if days else ""
    return f"P{date}T{time}" if time else f"P{date}" if date else "PT0S"
