"""Reads from a receiver's attach which session it asks for, and makes the answer (amqp.md 7.1 to 7.3).

One of two filters asks for a session. That of a session that is not exclusive has a list: the id of the session, or
null for any; and a lock token, by which a receiver takes the session over from the one that holds it, or null. The
answer has the same list with the id and the token of the session.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from protocol.codec import Described, Long, Symbol, ULong
from protocol.errors import InvalidField
from protocol.message.fields import check_session_id
from protocol.symbols import (
    EPOCH_TICKS,
    LOCKED_UNTIL_UTC,
    NON_EXCLUSIVE_SESSION_FILTER,
    NON_EXCLUSIVE_SESSION_FILTER_OF_PREVIEWS,
    SESSION_FILTER,
    TICKS_PER_MS,
    TIMEOUT,
)

DEFAULT_WAIT_MS: Final = 65_000
MAX_WAIT_MS: Final = (1 << 32) - 1  # the longest wait that clients can ask for, in a uint
_NON_EXCLUSIVE: Final = (NON_EXCLUSIVE_SESSION_FILTER, NON_EXCLUSIVE_SESSION_FILTER_OF_PREVIEWS)
_NON_EXCLUSIVE_CODE: Final = ULong(0x000000137000000E)


@dataclass(frozen=True)
class SessionRequest:
    """`session_id` is None for any available session; then the client waits up to `wait_ms`.

    `lock_token` is set if the client takes the session over from a receiver that has told it the token.
    """

    session_id: str | None
    wait_ms: int
    filters: Mapping[Any, Any]  # as received
    key: Symbol = SESSION_FILTER  # the filter that asks for the session
    lock_token: UUID | None = None

    @property
    def is_exclusive(self) -> bool:
        """True if nobody can take the session over."""
        return self.key == SESSION_FILTER


def read(filters: Mapping[Any, Any], properties: Mapping[Any, Any]) -> SessionRequest | None:
    """The request for a session in a source's filters and an attach's properties; None if there is none.

    Raises InvalidField for a filter that is neither a string nor null, LimitExceeded for an id that is too long.
    """
    asked = [key for key in (SESSION_FILTER, *_NON_EXCLUSIVE) if key in filters]
    if not asked:
        return None
    key, *others = asked
    if others:
        raise InvalidField(key, f"is one of two filters for a session; the other is {others[0]}")
    value, lock_token = filters[key], None
    if isinstance(value, Described):
        value = value.value
    if key != SESSION_FILTER:
        value, lock_token = _session_and_token(key, value)
    if value is not None:
        if not isinstance(value, str):
            raise InvalidField(key, "has neither a session id nor null")
        value = str(value)
        check_session_id(value)
    return SessionRequest(value, _wait_ms(properties.get(TIMEOUT)), filters, key, lock_token)


def is_non_exclusive(filters: Mapping[Any, Any]) -> bool:
    """True if the filters ask for a session that is not exclusive."""
    return any(key in filters for key in _NON_EXCLUSIVE)


def _session_and_token(key: Symbol, value: Any) -> tuple[Any, UUID | None]:
    """The items of the list, which may end early (1.4: what is missing is null). Raises InvalidField."""
    if not isinstance(value, list) or len(value) > 2:
        raise InvalidField(key, "is no list of a session id and a lock token")
    session_id, lock_token = [*value, None, None][:2]
    if lock_token is not None and not isinstance(lock_token, UUID):
        raise InvalidField(key, "has a lock token that is no uuid")
    if lock_token is not None and session_id is None:
        raise InvalidField(key, "has a lock token and no session id")
    return session_id, lock_token


def _wait_ms(value: Any) -> int:
    """The time to wait, which clients encode as any type of number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return DEFAULT_WAIT_MS
    return int(min(max(value, 0), MAX_WAIT_MS))


def accepted_filters(request: SessionRequest, session_id: str, lock_token: UUID | None = None) -> dict[Any, Any]:
    """The filter in the answer: the id of the session, as a described value if the request had one.

    Some clients cannot decode a described value; another one closes the connection if the value is not described.
    That of a session that is not exclusive has its lock token, too, and is always described.
    """
    asked = request.filters[request.key]
    if not request.is_exclusive:
        descriptor = asked.descriptor if isinstance(asked, Described) else _NON_EXCLUSIVE_CODE
        return {request.key: Described(descriptor, [session_id, lock_token])}
    value = Described(asked.descriptor, session_id) if isinstance(asked, Described) else session_id
    return {request.key: value}


def accepted_properties(locked_until_ms: int) -> dict[Symbol, Long]:
    """The properties of the answer, without which some clients fail."""
    return {LOCKED_UNTIL_UTC: Long(EPOCH_TICKS + locked_until_ms * TICKS_PER_MS)}
