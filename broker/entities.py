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

    key_name: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="SharedAccessKeyName of connection strings."
    )
    primary_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        repr=False, description="SharedAccessKey of connection strings."
    )
    secondary_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        None, repr=False, description="Second key, valid like the first, so that keys can be changed without a gap."
    )
    rights: frozenset[Right] = Field(description="List of Send, Listen and Manage; Manage implies the others.")


class QueueDescription(Frozen):
    """A queue's properties. Those in `IMMUTABLE` are set at creation and never change."""

    name: EntityName = Field(description="Name of the queue.")
    lock_duration_ms: int = Field(
        30 * SECOND_MS,
        ge=5 * SECOND_MS,
        le=5 * MINUTE_MS,
        description="Time a receiver has a message locked for, unless it renews.",
    )
    max_delivery_count: int = Field(
        10, ge=1, le=2**31 - 1, description="Failed deliveries after which a message is dead-lettered."
    )
    default_message_time_to_live_ms: int | None = Field(
        None,
        ge=SECOND_MS,
        description="Time to live of a message that has none, and the longest of one that has; unset is unlimited.",
    )
    dead_lettering_on_message_expiration: bool = Field(
        False, description="Dead-letter expired messages, else they are dropped."
    )
    requires_session: bool = Field(False, description="Messages belong to sessions, and receivers accept sessions.")
    requires_duplicate_detection: bool = Field(
        False, description="Drop a message whose message id was seen within the window."
    )
    duplicate_detection_history_time_window_ms: int = Field(
        10 * MINUTE_MS, ge=5 * SECOND_MS, le=7 * DAY_MS, description="Window of duplicate detection."
    )
    enable_partitioning: bool = Field(False, description="Spread the queue over all partitions.")
    enable_batched_operations: bool = Field(
        True, description="Kept for clients that read it; operations are always batched."
    )
    max_size_mb: int = Field(
        1024, ge=1, le=80 * 1024, description="Size of stored messages above which sends are refused."
    )
    max_message_size_kb: int | None = Field(
        None, ge=1, le=100 * 1024, description="Largest message, where smaller than amqp.max_message_size_bytes."
    )
    auto_delete_on_idle_ms: int | None = Field(
        None, ge=5 * MINUTE_MS, description="Idle time after which the queue is deleted; unset is never."
    )
    forward_to: EntityName | None = Field(None, description="Queue that messages are moved on to.")
    forward_dead_lettered_messages_to: EntityName | None = Field(
        None, description="Queue that dead-lettered messages are moved on to."
    )
    status: Status = Field(Status.ACTIVE, description="What clients may do with the queue.")
    user_metadata: Annotated[str, StringConstraints(max_length=1024)] = Field("", description="Free text.")
    authorization_rules: tuple[AuthorizationRule, ...] = Field(
        (), max_length=12, description="Shared access keys for this queue."
    )


IMMUTABLE = ("requires_session", "requires_duplicate_detection", "enable_partitioning")
