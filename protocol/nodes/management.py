"""The $management node of an entity: requests as typed arguments, responses with the exact types that SDKs assert.

Requests are read leniently: any integer type, list or array, string or symbol or binary; unknown keys are ignored.
Responses are written strictly: an int status, a symbol condition, arrays, and always a map as the body.

    call = management.parse(request)        # ManagementError: answer with encode_failure
    call.arguments                          # RenewLocks, PeekMessages, ...: the class is the operation
    management.encode_success(request, ...) # or encode_peeked, encode_deferred, ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Final
from uuid import UUID

from protocol import bounds, conditions
from protocol.codec import Array, Int, Long, Symbol, Timestamp, array, encode
from protocol.nodes.entity_operations import CreateEntity as CreateEntity
from protocol.nodes.entity_operations import DeleteEntity as DeleteEntity
from protocol.nodes.entity_operations import MoveEntity as MoveEntity
from protocol.nodes.entity_operations import UpdateEntity as UpdateEntity
from protocol.nodes.entity_operations import (
    entity_body,
    read_create_entity,
    read_delete_entity,
    read_move_entity,
    read_update_entity,
)
from protocol.nodes.management_fields import ArgumentError as ArgumentError
from protocol.nodes.management_fields import ArgumentOutOfRange as ArgumentOutOfRange
from protocol.nodes.management_fields import Fields
from protocol.nodes.management_fields import ManagementError as ManagementError
from protocol.nodes.management_fields import UnknownOperation as UnknownOperation
from protocol.nodes.request_message import Request, encode_response, text
from protocol.nodes.rule_operations import AddRule as AddRule
from protocol.nodes.rule_operations import EnumerateRules as EnumerateRules
from protocol.nodes.rule_operations import RemoveRule as RemoveRule
from protocol.nodes.rule_operations import Rule, read_add_rule, read_enumerate_rules, read_remove_rule, rules_body
from protocol.nodes.session_operations import GetMessageSessions as GetMessageSessions
from protocol.nodes.session_operations import GetSessionState as GetSessionState
from protocol.nodes.session_operations import RenewSessionLock as RenewSessionLock
from protocol.nodes.session_operations import SetSessionState as SetSessionState
from protocol.nodes.session_operations import (
    read_get_message_sessions,
    read_get_session_state,
    read_renew_session_lock,
    read_set_session_state,
    renewed_body,
    sessions_body,
    state_body,
)
from protocol.symbols import ACTIVE

OK: Final = 200
NO_CONTENT: Final = 204

# The status for each condition (8.5); any other condition is an internal error, 500.
STATUS: Final[Mapping[str, int]] = {
    conditions.ARGUMENT_ERROR: 400,
    conditions.ARGUMENT_OUT_OF_RANGE: 400,
    conditions.NOT_ALLOWED: 400,
    conditions.DECODE_ERROR: 400,
    conditions.INVALID_FIELD: 400,
    conditions.PRECONDITION_FAILED: 400,
    conditions.ENTITY_DISABLED: 400,
    conditions.UNAUTHORIZED_ACCESS: 401,
    conditions.AUTH_FAILED: 401,
    conditions.PUBLISHER_REVOKED: 401,
    conditions.RESOURCE_LIMIT_EXCEEDED: 403,
    conditions.LINK_MESSAGE_SIZE_EXCEEDED: 403,
    conditions.NOT_FOUND: 404,
    conditions.MESSAGE_NOT_FOUND: 404,
    conditions.SESSION_NOT_FOUND: 404,
    conditions.TIMEOUT: 408,
    conditions.TRANSACTION_UNKNOWN_ID: 400,
    conditions.TRANSACTION_ROLLBACK: 400,
    conditions.TRANSACTION_TIMEOUT: 408,
    conditions.ENTITY_ALREADY_EXISTS: 409,
    conditions.MESSAGE_LOCK_LOST: 410,
    conditions.SESSION_LOCK_LOST: 410,
    conditions.SESSION_CANNOT_BE_LOCKED: 410,
    conditions.STORE_LOCK_LOST: 410,
    conditions.LINK_STOLEN: 410,
    conditions.PARTITION_NOT_OWNED: 410,
    conditions.INTERNAL_ERROR: 500,
    conditions.NO_MATCHING_SUBSCRIPTION: 500,
    conditions.NOT_IMPLEMENTED: 501,
    conditions.SERVER_BUSY: 503,
}


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RenewLocks:
    lock_tokens: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class PeekMessages:
    from_sequence_number: int  # inclusive
    message_count: int
    session_id: str | None
    omit_body: bool


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """`message` is a complete encoded message; the other fields repeat its content, as the client set them."""

    message: bytes
    message_id: Any
    session_id: str | None
    partition_key: str | None
    via_partition_key: str | None


@dataclass(frozen=True, slots=True)
class ScheduleMessages:
    messages: tuple[ScheduledMessage, ...]


@dataclass(frozen=True, slots=True)
class CancelScheduled:
    sequence_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiveDeferred:
    """`active`, which is Peeklock's: receive active messages, too. None if the client does not say it."""

    sequence_numbers: tuple[int, ...]
    receive_and_delete: bool
    session_id: str | None
    active: bool | None = None


class Disposition(Enum):
    COMPLETED = "completed"
    ABANDONED = "abandoned"
    DEAD_LETTERED = "suspended"
    DEFERRED = "defered"


@dataclass(frozen=True, slots=True)
class UpdateDisposition:
    """`properties_to_modify` holds encoded AMQP values by name. An empty reason or description is None."""

    disposition: Disposition
    lock_tokens: tuple[UUID, ...]
    dead_letter_reason: str | None
    dead_letter_description: str | None
    properties_to_modify: Mapping[str, bytes]
    session_id: str | None


@dataclass(frozen=True, slots=True)
class DeleteMessages:
    """Deletes messages enqueued before `enqueued_before_ms`, at most `message_count`."""

    message_count: int
    enqueued_before_ms: int
    session_id: str | None


class MessageState(StrEnum):
    """Where messages of an entity are, for operations of Peeklock's own. Locked messages are among the active ones."""

    ACTIVE = "active"
    DEFERRED = "deferred"
    SCHEDULED = "scheduled"


@dataclass(frozen=True, slots=True)
class Purge:
    """Deletes the messages in these states that are not locked. An operation of Peeklock: Service Bus has none."""

    states: tuple[MessageState, ...]


@dataclass(frozen=True, slots=True)
class GetCounts:
    """Counts of the messages of the entity. An operation of Peeklock."""


@dataclass(frozen=True, slots=True)
class ListCounts:
    """Counts of the messages of the `count` entities after the name `after`. Peeklock's, on the namespace's node."""

    after: str
    count: int


Arguments = (
    RenewLocks
    | PeekMessages
    | ScheduleMessages
    | CancelScheduled
    | ReceiveDeferred
    | UpdateDisposition
    | DeleteMessages
    | Purge
    | GetCounts
    | ListCounts
    | CreateEntity
    | UpdateEntity
    | DeleteEntity
    | MoveEntity
    | AddRule
    | RemoveRule
    | EnumerateRules
    | RenewSessionLock
    | GetSessionState
    | SetSessionState
    | GetMessageSessions
)


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request. `associated_link_name` is the data link it belongs to, if the client named one."""

    operation: str
    arguments: Arguments
    server_timeout_ms: int | None
    associated_link_name: str | None
    tracking_id: str | None


def operation_of(request: Request) -> str | None:
    """The name of the operation as the client spells it, whether there is such an operation or not; None without one.

    Names count in any case.
    """
    return text(request.properties.get("operation"))


def parse(request: Request) -> Call:
    """Read a request. Raises a ManagementError."""
    properties = request.properties
    operation = operation_of(request)
    if operation is None:
        raise ArgumentError("The application property 'operation' is missing.")
    reader = _READERS.get(operation.lower())
    if reader is None:
        raise UnknownOperation(f"The operation '{operation[:100]}' is not offered.")
    body = request.body if request.body is not None else {}
    if not isinstance(body, dict):
        raise ArgumentError(f"The body of '{operation}' is not a map.")
    envelope = Fields(properties)
    timeout_ms = envelope.optional_integer("com.microsoft:server-timeout")
    if timeout_ms is None:
        timeout_ms = envelope.optional_integer("server-timeout")
    return Call(
        operation.lower(),
        reader(Fields(body)),
        None if timeout_ms is None else bounds.span_ms(timeout_ms),
        envelope.optional_string("associated-link-name"),
        envelope.optional_string("com.microsoft:tracking-id"),
    )


# --- operations -------------------------------------------------------------------------------------------------------


def _renew_locks(fields: Fields) -> RenewLocks:
    return RenewLocks(fields.lock_tokens())


def _peek_messages(fields: Fields) -> PeekMessages:
    return PeekMessages(
        # Numbers begin at 1, but some clients begin to peek at the smallest long.
        max(0, fields.integer("from-sequence-number", -(1 << 63), bounds.MAX_NUMBER)),
        fields.count("message-count", 1),
        fields.optional_string("session-id"),
        fields.optional_boolean("omit-message-body"),
    )


def _schedule_messages(fields: Fields) -> ScheduleMessages:
    items = fields.collection("messages", "maps", lambda item: isinstance(item, dict))
    return ScheduleMessages(tuple(_scheduled_message(Fields(item)) for item in items))


def _scheduled_message(fields: Fields) -> ScheduledMessage:
    return ScheduledMessage(
        fields.binary("message"),
        fields.value("message-id"),
        fields.optional_string("session-id"),
        fields.optional_string("partition-key"),
        fields.optional_string("via-partition-key"),
    )


def _cancel_scheduled(fields: Fields) -> CancelScheduled:
    return CancelScheduled(fields.sequence_numbers())


def _receive_deferred(fields: Fields) -> ReceiveDeferred:
    mode = fields.integer("receiver-settle-mode", 0)
    if mode > 1:
        raise ArgumentOutOfRange(f"'receiver-settle-mode' is {mode}; it is 0 or 1.")
    active = None if fields.value(ACTIVE) is None else fields.optional_boolean(ACTIVE)
    return ReceiveDeferred(fields.sequence_numbers(), mode == 0, fields.optional_string("session-id"), active)


def _update_disposition(fields: Fields) -> UpdateDisposition:
    status = fields.optional_string("disposition-status")
    if status is None:
        raise ArgumentError("'disposition-status' is missing.")
    disposition = _DISPOSITIONS.get(status.lower())
    if disposition is None:
        raise ArgumentError(f"'disposition-status' is '{status[:100]}'; it is one of {', '.join(_DISPOSITIONS)}.")
    return UpdateDisposition(
        disposition,
        fields.lock_tokens(),
        # Python sends an empty string if there is none.
        fields.optional_string("deadletter-reason") or None,
        fields.optional_string("deadletter-description") or None,
        _properties_to_modify(fields.value("properties-to-modify")),
        fields.optional_string("session-id"),
    )


def _properties_to_modify(value: Any) -> Mapping[str, bytes]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ArgumentError("'properties-to-modify' is not a map with names as its keys.")
    for name, item in value.items():
        if isinstance(item, list | dict | Array):
            raise ArgumentError(f"'properties-to-modify': '{name[:100]}' is not a simple value.")
    return {str(name): encode(item) for name, item in value.items()}


def _delete_messages(fields: Fields) -> DeleteMessages:
    return DeleteMessages(
        fields.count("message-count", 1),
        fields.time_ms("enqueued-time-utc"),
        fields.optional_string("session-id"),
    )


def _purge(fields: Fields) -> Purge:
    text = fields.optional_string("states")
    if text is None:
        return Purge(tuple(MessageState))
    try:
        return Purge(tuple(MessageState(each) for each in text.split(",")))
    except ValueError:
        raise ArgumentError(f"'states' is not some of {', '.join(MessageState)}, with commas between them.") from None


def _get_counts(_: Fields) -> GetCounts:
    return GetCounts()


def _list_counts(fields: Fields) -> ListCounts:
    return ListCounts(fields.optional_string("after") or "", fields.count("count", 1))


_DISPOSITIONS: Final = {item.value: item for item in Disposition} | {"deferred": Disposition.DEFERRED}

_READERS: Final[Mapping[str, Callable[[Fields], Arguments]]] = {
    "com.microsoft:renew-lock": _renew_locks,
    "com.microsoft:peek-message": _peek_messages,
    "com.microsoft:schedule-message": _schedule_messages,
    "com.microsoft:cancel-scheduled-message": _cancel_scheduled,
    "com.microsoft:receive-by-sequence-number": _receive_deferred,
    "com.microsoft:update-disposition": _update_disposition,
    "com.microsoft:batch-delete-messages": _delete_messages,
    "com.microsoft:add-rule": read_add_rule,
    "com.microsoft:remove-rule": read_remove_rule,
    "com.microsoft:enumerate-rules": read_enumerate_rules,
    "com.microsoft:renew-session-lock": read_renew_session_lock,
    "com.microsoft:get-session-state": read_get_session_state,
    "com.microsoft:set-session-state": read_set_session_state,
    "com.microsoft:get-message-sessions": read_get_message_sessions,
    "peeklock:purge": _purge,
    "peeklock:get-counts": _get_counts,
    "peeklock:list-counts": _list_counts,
    "peeklock:create-entity": read_create_entity,
    "peeklock:update-entity": read_update_entity,
    "peeklock:delete-entity": read_delete_entity,
    "peeklock:move-entity": read_move_entity,
}


# --- responses --------------------------------------------------------------------------------------------------------


def encode_success(request: Request, body: Mapping[str, Any] | None = None) -> bytes:
    """200. `body` holds values of exact AMQP types."""
    return _encode(request, OK, "OK", body)


def encode_expirations(request: Request, locked_until_ms: Iterable[int]) -> bytes:
    """200 to renew-lock: the new ends of the locks in the order of the request."""
    return encode_success(request, {"expirations": array(Timestamp, locked_until_ms)})


def encode_sequence_numbers(request: Request, sequence_numbers: Iterable[int]) -> bytes:
    """200 to schedule-message, in the order of the request."""
    return encode_success(request, {"sequence-numbers": array(Long, sequence_numbers)})


def encode_deleted(request: Request, count: int) -> bytes:
    """200 to batch-delete-messages, or 204 if there was none."""
    return encode_success(request, {"message-count": Int(count)}) if count else encode_no_content(request)


def encode_purged(request: Request, count: int) -> bytes:
    """200 to purge."""
    return encode_success(request, {"message-count": Long(count)})


def encode_counts(request: Request, counts: Mapping[str, int]) -> bytes:
    """200 to get-counts; `counts` by name."""
    return encode_success(request, {"counts": _longs(counts)})


def encode_counts_of_all(request: Request, counts: Mapping[str, Mapping[str, int]]) -> bytes:
    """200 to list-counts; `counts` by entity, in their order."""
    items = [{"name": entity, "counts": _longs(values)} for entity, values in counts.items()]
    return encode_success(request, {"entities": items})


def encode_entity(request: Request, properties: Mapping[str, Any]) -> bytes:
    """200 to create-entity and update-entity: all properties of the entity."""
    return encode_success(request, entity_body(properties))


def _longs(values: Mapping[str, int]) -> dict[str, Long]:
    return {name: Long(value) for name, value in values.items()}


def encode_peeked(request: Request, messages: Sequence[bytes]) -> bytes:
    """200 to peek-message with the encoded `messages`, or 204 if there are none. For limits see `peeked_that_fit`."""
    if not messages:
        return encode_no_content(request)
    return encode_success(request, {"messages": [{"message": message} for message in messages]})


def peeked_that_fit(request: Request, messages: Sequence[bytes], max_bytes: int) -> Sequence[bytes]:
    """The first of the encoded `messages` whose answer has no more than `max_bytes`; one at least, if there is any."""
    room = max_bytes - len(encode_success(request, {"messages": []})) - _COUNTS_BYTES
    return messages[: max(1, _fitting([{"message": message} for message in messages], room))]


def encode_deferred(request: Request, messages: Iterable[tuple[UUID | None, bytes]], max_bytes: int = 0) -> bytes:
    """200 to receive-by-sequence-number: lock token (None if received and deleted) and encoded message of each.

    An answer of more than `max_bytes` (0: no limit) is a failure, 403; the messages then stay locked until their locks
    end.
    """
    items = [
        {"message": message} if token is None else {"lock-token": token, "message": message}
        for token, message in messages
    ]
    return encode_limited(request, {"messages": items}, max_bytes)


def encode_rules(request: Request, rules: Sequence[tuple[Rule, int]], max_bytes: int = 0) -> bytes:
    """200 to enumerate-rules, or 204 if there are none: rules with the times of their creation.

    More than `max_bytes` (0: no limit) is a failure, 403: clients take a short page for the last.
    """
    return encode_limited(request, rules_body(rules), max_bytes) if rules else encode_no_content(request)


def encode_session_renewed(request: Request, locked_until_ms: int) -> bytes:
    """200 to renew-session-lock: the new end of the lock."""
    return encode_success(request, renewed_body(locked_until_ms))


def encode_session_state(request: Request, state: bytes | None) -> bytes:
    """200 to get-session-state."""
    return encode_success(request, state_body(state))


def encode_sessions(request: Request, skip: int, session_ids: Sequence[str], max_bytes: int = 0) -> bytes:
    """200 to get-message-sessions, or 204 if there are none.

    More than `max_bytes` (0: no limit) is a failure, 403: clients take a short page for the last.
    """
    if not session_ids:
        return encode_no_content(request, conditions.SESSION_NOT_FOUND)
    return encode_limited(request, sessions_body(skip, session_ids), max_bytes)


def encode_limited(request: Request, body: Mapping[str, Any], max_bytes: int) -> bytes:
    """200, or 403 if the response would be larger than `max_bytes` (0: no limit)."""
    response = encode_success(request, body)
    if not max_bytes or len(response) <= max_bytes:
        return response
    problem = (
        f"The response has {len(response)} bytes; the limit of the link is {max_bytes} bytes. Ask for less at once."
    )
    return encode_failure(request, conditions.LINK_MESSAGE_SIZE_EXCEEDED, problem)


def encode_no_content(request: Request, condition: Symbol | None = None) -> bytes:
    """204: there is nothing, which is no error."""
    return _encode(request, NO_CONTENT, "No Content", None, condition)


def encode_failure(request: Request, condition: Symbol, description: str) -> bytes:
    return _encode(request, STATUS.get(condition, 500), description, None, condition)


# The list of messages, and the map around it, may need the wide form of size and count.
_COUNTS_BYTES: Final = 16


def _fitting(items: Sequence[Mapping[str, Any]], max_bytes: int) -> int:
    """The number of first `items` whose encoding has no more than `max_bytes`."""
    for count, item in enumerate(items):
        max_bytes -= len(encode(item))
        if max_bytes < 0:
            return count
    return len(items)


def _encode(
    request: Request, status: int, description: str, body: Mapping[str, Any] | None, condition: Symbol | None = None
) -> bytes:
    properties: dict[str, Any] = {"statusCode": Int(status), "statusDescription": description}
    if condition is not None:
        properties["errorCondition"] = Symbol(condition)
    # Python and Go read the body before the status.
    return encode_response(request, properties, dict(body or {}))
