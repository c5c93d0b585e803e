"""Reads the filters of a receiver's source, besides that of its session (AMQP 1.0 3.5.8, Apache's registry of filters).

The type of a filter is the descriptor of its value, a symbol or a number; the key is a name of the client's choice.
Some clients send values without a descriptor: then the key says what is meant.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from protocol.codec import Described, Symbol
from protocol.errors import InvalidField

SELECTOR: Final = Symbol("apache.org:selector-filter:string")
NO_LOCAL: Final = Symbol("apache.org:no-local-filter:list")
_CODES: Final = {0x0000468C00000004: SELECTOR, 0x0000468C00000003: NO_LOCAL}
# Keys under which clients send these filters without a descriptor.
_KEYS: Final = {
    "jms-selector": SELECTOR,
    "selector": SELECTOR,
    "no-local": NO_LOCAL,
    SELECTOR: SELECTOR,
    NO_LOCAL: NO_LOCAL,
}


class SourceFilters(NamedTuple):
    """`selectors` are the texts of selectors, with their entries as received; the receiver wants what matches all."""

    selectors: tuple[str, ...]
    entries: Mapping[Any, Any]
    wants_no_local: bool


def read(filters: Mapping[Any, Any]) -> SourceFilters:
    """Raises InvalidField for a selector that is no text. Filters that are not known are left out."""
    entries = {key: value for key, value in filters.items() if _kind(key, value) == SELECTOR}
    texts = []
    for value in entries.values():
        text = value.value if isinstance(value, Described) else value
        if not isinstance(text, str):
            raise InvalidField(SELECTOR, "is no string")
        if text.strip():  # JMS: an empty one is none
            texts.append(str(text))
    wants_no_local = any(_kind(key, value) == NO_LOCAL for key, value in filters.items())
    return SourceFilters(tuple(texts), entries, wants_no_local)


def _kind(key: Any, value: Any) -> Symbol | None:
    """The type of a filter; None if it is unknown, or null, which is no filter."""
    if value is None:
        return None
    if not isinstance(value, Described):
        return _KEYS.get(str(key))
    descriptor = value.descriptor
    if isinstance(descriptor, str):
        return next((known for known in (SELECTOR, NO_LOCAL) if known == descriptor), None)
    return _CODES.get(descriptor) if isinstance(descriptor, int) else None
