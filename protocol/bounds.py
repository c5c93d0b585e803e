"""Bounds of the times, spans, counts and numbers that come from outside: defined and applied in this one place.

Clients use the ends of their own types for "never" and "at once", and some send nonsense. Values from a peer are
brought within these bounds where they are read. So no other code must check whether a time is before 1970, whether a
sum of times fits into 64 bits, or whether a count fits into an AMQP int.

| what             | bounds                   | outside of them                                              |
|------------------|--------------------------|--------------------------------------------------------------|
| time             | 0 to `LATEST_MS`         | becomes the nearer bound: long ago, or never                 |
| span             | 0 to `LONGEST_MS`        | becomes the nearer bound                                     |
| count, page      | its least to `MAX_COUNT` | too few is refused; too many becomes `MAX_COUNT`             |
| sequence number  | 0 to `MAX_NUMBER`        | is refused: no message has it                                |
| delay            | 0 to `MAX_DELAY_MS`      | is refused: it is Peeklock's own, so no client relies on it  |
"""

from typing import Final

LATEST_MS: Final = 253_402_300_799_999  # end of the year 9999, the last year of .NET, Python and ISO 8601
LONGEST_MS: Final = 922_337_203_685_478  # .NET's TimeSpan.MaxValue, which means unlimited; some 29,000 years
MAX_COUNT: Final = (1 << 31) - 1  # the largest AMQP int; counts in answers are ints
MAX_NUMBER: Final = (1 << 63) - 1  # the largest AMQP long; sequence numbers on messages are longs
MAX_DELAY_MS: Final = 7 * 86_400_000  # of a message that is abandoned with a delay


def time_ms(value: int) -> int:
    """The time within the bounds, milliseconds since 1970; .NET's DateTime.MinValue is -62135596800000."""
    return min(max(0, value), LATEST_MS)


def span_ms(value: int) -> int:
    return min(max(0, value), LONGEST_MS)
