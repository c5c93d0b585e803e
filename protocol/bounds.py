"""Bounds of the times, spans, counts and numbers that come from outside: one place says them, and keeps to them.

Clients say "ever" and "at once" by the ends of their own types, and some say nonsense. What is read from a peer is
brought within these bounds where it is read; so behind that nothing asks whether a time is before 1970, whether a sum
of times fits into 64 bits, or whether a count fits into an AMQP int.

| what             | bounds                   | outside of them                                              |
|------------------|--------------------------|--------------------------------------------------------------|
| time             | 0 to `LATEST_MS`         | the nearer of them: long ago, or never                       |
| span             | 0 to `LONGEST_MS`        | the nearer of them                                           |
| count, page      | its least to `MAX_COUNT` | too few is refused; too many is as many as there can be      |
| sequence number  | 0 to `MAX_NUMBER`        | refused: no message has it                                   |
"""

from typing import Final

LATEST_MS: Final = 253_402_300_799_999  # end of the year 9999, the last that .NET, Python and ISO 8601 have
LONGEST_MS: Final = 922_337_203_685_478  # .NET's TimeSpan.MaxValue, which means unlimited; some 29,000 years
MAX_COUNT: Final = (1 << 31) - 1  # an AMQP int, by which answers count
MAX_NUMBER: Final = (1 << 63) - 1  # an AMQP long, in which messages carry their sequence numbers


def time_ms(value: int) -> int:
    """Milliseconds since 1970 as they are kept; .NET's DateTime.MinValue is -62135596800000."""
    return min(max(0, value), LATEST_MS)


def span_ms(value: int) -> int:
    return min(max(0, value), LONGEST_MS)
