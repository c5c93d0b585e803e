"""Which messages are alike but for numbers and ids: a fingerprint of the text with these masked.

Poison messages of one cause differ in what identifies them: order numbers, times, ids. Masked are UUIDs, hexadecimal
numbers of twelve digits and more, and all other digits; white space counts as one space.
"""

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

HASHED_CHARACTERS: Final = 64 << 10  # of a text; what is behind them makes no difference
BINARY: Final = "binary"
_BYTES_OF_CHARACTER: Final = 4
_SAMPLE_BYTES: Final = 32
_NO_TEXT: Final = r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]"  # not \x1b, with which colours of terminals begin

_MASKS: Final = (
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<id>"),
    (r"\b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{12,}\b", "<hex>"),
    (r"[0-9]+", "<n>"),
    (r"\s+", " "),
)


def text_of(body: Column) -> Column:
    """The bytes as text; what is no UTF-8 becomes U+FFFD."""
    return F.make_valid_utf8(F.substring(body, 1, HASHED_CHARACTERS * _BYTES_OF_CHARACTER).cast("string"))


def is_binary(body: Column) -> Column:
    """Whether the bytes are no text: they are not UTF-8, or have control characters that texts do not have."""
    start = F.substring(body, 1, HASHED_CHARACTERS * _BYTES_OF_CHARACTER)
    # The last character may be cut.
    wholes = [
        F.substring(start, F.lit(1), F.greatest(F.length(start) - cut, F.lit(0)))
        for cut in range(1, _BYTES_OF_CHARACTER)
    ]
    is_cut = F.length(body) > F.length(start)
    is_utf8 = F.is_valid_utf8(start.cast("string")) | (
        is_cut & F.greatest(*(F.is_valid_utf8(whole.cast("string")) for whole in wholes))
    )
    return ~is_utf8 | F.make_valid_utf8(start.cast("string")).rlike(_NO_TEXT)


def binary_sample(body: Column) -> Column:
    """What is said in place of bytes that are no text: how many, and the first in hexadecimal."""
    first = F.lower(F.hex(F.substring(body, 1, _SAMPLE_BYTES)))
    more = F.when(F.length(body) > _SAMPLE_BYTES, "…").otherwise("")
    return F.concat(F.lit(BINARY + ", "), F.length(body), F.lit(" bytes: "), first, more)


def masked(text: Column) -> Column:
    text = F.substring(text, 1, HASHED_CHARACTERS)
    for pattern, mask in _MASKS:
        text = F.regexp_replace(text, pattern, mask)
    return text


def fingerprint(masked_text: Column) -> Column:
    """16 hexadecimal digits."""
    return F.lpad(F.lower(F.hex(F.xxhash64(masked_text))), 16, "0")
