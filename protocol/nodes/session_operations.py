"""Sessions on the wire: the operations of a $management node on sessions, in the form that SDKs use (amqp.md 8.4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol import bounds
from protocol.codec import Int, Timestamp, array
from protocol.message.fields import check_session_id
from protocol.nodes.management_fields import ArgumentError, Fields

MAX_PAGE: Final = 10_000  # sessions in one answer


@dataclass(frozen=True, slots=True)
class RenewSessionLock:
    session_id: str


@dataclass(frozen=True, slots=True)
class GetSessionState:
    session_id: str


@dataclass(frozen=True, slots=True)
class SetSessionState:
    """None clears the state."""

    session_id: str
    state: bytes | None


@dataclass(frozen=True, slots=True)
class GetMessageSessions:
    """Sessions whose state was set after `updated_after_ms`; None: sessions with active messages or a state.

    For the latter, clients send the end of .NET's time, which they round in two ways. `behind`: the last session of the
    page before, from which a client that names it goes on; others go on from `skip`.
    """

    updated_after_ms: int | None
    skip: int
    top: int
    behind: str | None = None


def read_renew_session_lock(fields: Fields) -> RenewSessionLock:
    return RenewSessionLock(_session_id(fields))


def read_get_session_state(fields: Fields) -> GetSessionState:
    return GetSessionState(_session_id(fields))


def read_set_session_state(fields: Fields) -> SetSessionState:
    state = fields.value("session-state")
    return SetSessionState(_session_id(fields), None if state is None else fields.binary("session-state"))


def read_get_message_sessions(fields: Fields) -> GetMessageSessions:
    after_ms = fields.optional_integer("last-updated-time")
    behind = fields.optional_string("last-session-id") or None
    if behind is not None:
        check_session_id(behind)
    return GetMessageSessions(
        None if after_ms is None or after_ms >= bounds.LATEST_MS else bounds.time_ms(after_ms),
        fields.count("skip", 0),
        fields.integer("top", 1, MAX_PAGE),
        behind,
    )


def _session_id(fields: Fields) -> str:
    """The session id, which may be empty."""
    session_id = fields.optional_string("session-id")
    if session_id is None:
        raise ArgumentError("'session-id' is missing.")
    check_session_id(session_id)
    return session_id


def renewed_body(locked_until_ms: int) -> dict[str, Any]:
    return {"expiration": Timestamp(locked_until_ms)}


def state_body(state: bytes | None) -> dict[str, Any]:
    return {"session-state": state}


def sessions_body(skip: int, session_ids: Sequence[str]) -> dict[str, Any]:
    """`skip` is that of the next page."""
    return {"skip": Int(skip), "sessions-ids": array(str, session_ids)}
