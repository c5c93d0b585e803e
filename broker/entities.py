"""Descriptions of entities: what a user may set, with limits and defaults.

Limits are those of Azure Service Bus and of its emulator's schema. Durations are milliseconds; None means unlimited.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
DAY_MS = 24 * 60 * MINUTE_MS

EntityName = Annotated[str, StringConstraints(min_length=1, max_length=260, pattern=r"^[A-Za-z0-9](?:[\w./~-]*\w)?$")]


class Status(StrEnum):
    ACTIVE = "Active"
    DISABLED = "Disabled"
    SEND_DISABLED = "SendDisabled"
    RECEIVE_DISABLED = "ReceiveDisabled"


class Right(StrEnum):
    SEND = "Send"
    LISTEN = "Listen"
    MANAGE = "Manage"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class AuthorizationRule(Frozen):
    """A shared access key with rights. Manage implies Send and Listen."""

    key_name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    primary_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(repr=False)
    secondary_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(None, repr=False)
    rights: frozenset[Right]


class QueueDescription(Frozen):
    """A queue's properties. Those in `IMMUTABLE` are set at creation and never change."""

    name: EntityName
    lock_duration_ms: int = Field(30 * SECOND_MS, ge=5 * SECOND_MS, le=5 * MINUTE_MS)
    max_delivery_count: int = Field(10, ge=1, le=2**31 - 1)
    default_message_time_to_live_ms: int | None = Field(None, ge=SECOND_MS)
    dead_lettering_on_message_expiration: bool = False
    requires_session: bool = False
    requires_duplicate_detection: bool = False
    duplicate_detection_history_time_window_ms: int = Field(10 * MINUTE_MS, ge=5 * SECOND_MS, le=7 * DAY_MS)
    enable_partitioning: bool = False
    enable_batched_operations: bool = True
    max_size_mb: int = Field(1024, ge=1, le=80 * 1024)
    max_message_size_kb: int | None = Field(None, ge=1, le=100 * 1024)
    auto_delete_on_idle_ms: int | None = Field(None, ge=5 * MINUTE_MS)
    forward_to: EntityName | None = None
    forward_dead_lettered_messages_to: EntityName | None = None
    status: Status = Status.ACTIVE
    user_metadata: Annotated[str, StringConstraints(max_length=1024)] = ""
    authorization_rules: tuple[AuthorizationRule, ...] = Field((), max_length=12)


IMMUTABLE = ("requires_session", "requires_duplicate_detection", "enable_partitioning")
