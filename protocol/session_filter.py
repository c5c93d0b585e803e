"""Reads from a receiver's attach which session it asks for, and makes the answer (amqp.md 7.1 to 7.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from protocol.codec import Described, Long, Symbol
from protocol.errors import InvalidField
from protocol.message.fields import check_session_id
from protocol.symbols import EPOCH_TICKS, LOCKED_UNTIL_UTC, SESSION_FILTER, TICKS_PER_MS, TIMEOUT

DEFAULT_WAIT_MS: Final = 65_000
MAX_WAIT_MS: Final = (1 << 32) - 1  # the longest wait that clients can ask for, in a uint


@dataclass(frozen=True)
class SessionRequest:
    """`session_id` is None for any available session; then the client waits up to `wait_ms`."""

    session_id: str | None
    wait_ms: int
    filters: Mapping[Any, Any]  # as received


def read(filters: Mapping[Any, Any], properties: Mapping[Any, Any]) -> SessionRequest | None:
    """The request for a session in a source's filters and an attach's properties; None if there is none.

    Raises InvalidField for a filter that is neither a string nor null, LimitExceeded for an id that is too long.
    """
    if SESSION_FILTER not in filters:
        return None
    value = filters[SESSION_FILTER]
    if isinstance(value, Described):
        value = value.value
    if value is not None:
        if not isinstance(value, str):
            raise InvalidField(SESSION_FILTER, "is neither a session id nor null")
        value = str(value)
        check_session_id(value)
    return SessionRequest(value, _wait_ms(properties.get(TIMEOUT)), filters)


def _wait_ms(value: Any) -> int:
    """The time to wait, which clients encode as any type of number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return DEFAULT_WAIT_MS
    return int(min(max(value, 0), MAX_WAIT_MS))


def accepted_filters(request: SessionRequest, session_id: str) -> dict[Any, Any]:
    """The filter in the answer: the id of the session, as a described value if the request had one.

    Some clients cannot decode a described value; another one closes the connection if the value is not described.
    """
    asked = request.filters[SESSION_FILTER]
    value = Described(asked.descriptor, session_id) if isinstance(asked, Described) else session_id
    return {SESSION_FILTER: value}


def accepted_properties(locked_until_ms: int) -> dict[Symbol, Long]:
    """The properties of the answer, without which some clients fail."""
    return {LOCKED_UNTIL_UTC: Long(EPOCH_TICKS + locked_until_ms * TICKS_PER_MS)}
