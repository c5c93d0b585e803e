"""Masks keys inside texts (connection strings, tokens, settings) that people without a right to the keys may read."""

import re

REDACTED = "***"
_SECRET_TEXT = re.compile(
    r"""(SharedAccessKey|SharedAccessSignature|sig|primary_key|secondary_key|root_key)(['"]?\s*[=:]\s*['"]?)[^\s;&,)'"}]+"""
)


def masked(text: str) -> str:
    """Return `text` with every key in it replaced by stars."""
    return _SECRET_TEXT.sub(rf"\1\2{REDACTED}", text) if "=" in text or ":" in text else text
