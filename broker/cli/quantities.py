"""Durations and sizes as people write them: 30s, 1h30m, 7d, unlimited; 512KB, 2GB."""

import re
from typing import Final

from broker.atom.values import UNLIMITED, UNLIMITED_MS
from broker.namespace.durations import format_duration, parse_duration

_UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_PART: Final = re.compile(r"([0-9]{1,12})(ms|[dhms])", re.ASCII)
_UNLIMITED_WORDS: Final = ("unlimited", "never")
_SIZE: Final = re.compile(r"([0-9]{1,12})\s*(B|[KMGT]B)?", re.ASCII | re.IGNORECASE)
_SIZES: Final = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def duration_text(text: str) -> str:
    """Return the ISO 8601 form of 30s, 1h30m, 7d, 250ms, PT30S, or unlimited. Raises ValueError, with the fix."""
    given = text.strip()
    if given.lower() in _UNLIMITED_WORDS:
        return UNLIMITED
    if given.upper().startswith("P"):
        duration_ms = parse_duration(given.upper())
    else:
        duration_ms = _sum_of_parts(given.lower().replace(" ", ""))
    return UNLIMITED if duration_ms >= UNLIMITED_MS else format_duration(duration_ms)


def duration_ms(text: str) -> int:
    """Return milliseconds, of the same texts. Raises ValueError, with the fix."""
    return parse_duration(duration_text(text))


def _sum_of_parts(text: str) -> int:
    parts = list(_PART.finditer(text))
    units = [list(_UNITS_MS).index(part[2]) for part in parts]
    if "".join(part[0] for part in parts) != text or not parts or units != sorted(set(units)):
        raise ValueError("is no duration such as 30s, 5m, 1h30m, 7d or unlimited")
    return sum(int(part[1]) * _UNITS_MS[part[2]] for part in parts)


def people_duration(iso: str) -> str:
    """Return the ISO 8601 duration as 1h30m; as it is, if it is none."""
    try:
        duration_ms = parse_duration(iso)
    except ValueError:
        return iso
    if duration_ms >= UNLIMITED_MS:
        return "unlimited"
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        number, duration_ms = divmod(duration_ms, unit_ms)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


def size_in(unit: str, text: str) -> str:
    """Return a size in `unit` (KB, MB); without a unit it is in this one. Raises ValueError with the fix."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"is no size such as 1GB, 512KB or a number of {unit}")
    number, rest = divmod(int(match[1]) * _SIZES[(match[2] or unit).upper()], _SIZES[unit])
    if rest:
        raise ValueError(f"is no whole number of {unit}")
    return str(number)


def people_size(size_bytes: int) -> str:
    """Return a size with one digit behind the point: 512 B, 1.5 MB."""
    size = float(size_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
