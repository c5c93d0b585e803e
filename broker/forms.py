"""The forms of what requests carry, by which those of another version, or of a mistake, are told."""

from types import NoneType
from typing import Any, Final

from broker.wire import Extra
from storage.records import LAYOUT_BYTES

# Types of the items of an incoming message, and of what its extra map has.
_MESSAGES: Final = {(bytes, bytes, ttl, extra) for ttl in (NoneType, int) for extra in (NoneType, dict)}
_SCHEDULED_MS: Final = int(Extra.SCHEDULED_MS)
_EXTRA: Final[dict[int, type]] = {
    _SCHEDULED_MS: int,
    int(Extra.SESSION_ID): str,
    int(Extra.PARTITION_KEY): str,
    int(Extra.MESSAGE_ID): bytes,
    int(Extra.DESTINATION): str,
}


def is_rule(value: Any) -> bool:
    """Whether it has the form of a rule document; its expressions and values may be wrong."""
    match value:
        case {"name": str(), "filter": {"kind": str() as kind} as wanted, "action": action}:
            has_filter = (
                _is_sql(wanted) if kind == "sql" else kind != "correlation" or _are_values(wanted.get("properties"))
            )
            return has_filter and (action is None or _is_sql(action))
    return False


def _is_sql(value: Any) -> bool:
    match value:
        case {"expression": str(), "parameters": parameters}:
            return _are_values(parameters)
    return False


def _are_values(value: Any) -> bool:
    """Whether these are encoded AMQP values by their names."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(each, bytes) for name, each in value.items()
    )


def is_message(value: Any) -> bool:
    """Whether it has the form of an incoming message: see `broker.wire`."""
    if type(value) not in (list, tuple) or tuple(map(type, value)) not in _MESSAGES:
        return False
    layout, _, ttl_ms, extra = value
    if len(layout) != LAYOUT_BYTES or (ttl_ms is not None and ttl_ms < 0):
        return False
    for key, item in extra.items() if extra else ():
        if type(item) is not _EXTRA.get(key, type(item)):
            return False
    return not extra or 0 <= extra.get(_SCHEDULED_MS, 0) < 1 << 63


def is_row(value: Any) -> bool:
    """Whether it has the form of a row of the table that it names: key, value, and record of its message."""
    match value:
        case [int(), bytes(), None | bytes(), None | bytes()]:
            return True
    return False
