"""Finds single values in the stored bytes of a message, without decoding the rest (see `layout`).

`intake` has checked these bytes.
"""

from typing import Final

from protocol.codec import skip

# Constructors of keys that are texts, and where the text begins behind them.
_TEXT_AT: Final = {0xA1: 2, 0xA3: 2, 0xB1: 5, 0xB3: 5}


def annotation(pairs: bytes, key: bytes) -> bytes | None:
    """The encoded value of the annotation with this key among encoded pairs; None if there is none."""
    found = _pair(pairs, key)
    return None if found is None else pairs[found[1] : found[2]]


def without(pairs: bytes, key: bytes) -> bytes:
    """The encoded pairs but that with this key; `pairs` itself if there is none."""
    found = _pair(pairs, key)
    return pairs if found is None else pairs[: found[0]] + pairs[found[2] :]


def _pair(pairs: bytes, key: bytes) -> tuple[int, int, int] | None:
    """Where the annotation with this key begins, where its value does, and where it ends."""
    if key not in pairs:
        return None
    at = 0
    while at < len(pairs):
        value_at = skip(pairs, at)
        text_at = _TEXT_AT.get(pairs[at])
        end = skip(pairs, value_at)
        if text_at is not None and pairs[at + text_at : value_at] == key:
            return at, value_at, end
        at = end
    return None


def values_of(section: bytes) -> tuple[int, int]:
    """The count of a section's list or map, and the offset of its first value."""
    constructor = section[3]
    if constructor == 0x45:
        return 0, 4
    if constructor < 0xD0:
        return section[5], 6
    return int.from_bytes(section[8:12], "big"), 12


def field(properties: bytes, index: int) -> bytes | None:
    """An encoded field of the properties section (empty: none), by its index; None if it is null or not there."""
    count, at = values_of(properties) if properties else (0, 0)
    if index >= count:
        return None
    for _ in range(index):
        at = skip(properties, at)
    return None if properties[at] == 0x40 else properties[at : skip(properties, at)]
