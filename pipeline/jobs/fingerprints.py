"""Which messages are alike but for numbers and ids: a fingerprint of the text with these masked.

Poison messages of one cause differ in what identifies them: order numbers, times, ids. Masked are UUIDs, hexadecimal
numbers of twelve digits and more, and all other digits; white space counts as one space.
"""

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

HASHED_CHARACTERS: Final = 64 << 10  # of a text; what is behind them makes no difference
_BYTES_OF_CHARACTER: Final = 4

_MASKS: Final = (
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<id>"),
    (r"\b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{12,}\b", "<hex>"),
    (r"[0-9]+", "<n>"),
    (r"\s+", " "),
)


def text_of(body: Column) -> Column:
    """The bytes as text; what is no UTF-8 becomes U+FFFD."""
    return F.make_valid_utf8(F.substring(body, 1, HASHED_CHARACTERS * _BYTES_OF_CHARACTER).cast("string"))


def masked(text: Column) -> Column:
    text = F.substring(text, 1, HASHED_CHARACTERS)
    for pattern, mask in _MASKS:
        text = F.regexp_replace(text, pattern, mask)
    return text


def fingerprint(masked_text: Column) -> Column:
    """16 hexadecimal digits."""
    return F.lpad(F.lower(F.hex(F.xxhash64(masked_text))), 16, "0")
