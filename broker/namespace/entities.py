"""Descriptions of entities: what a user may set, with limits and defaults.

Limits are those of Azure Service Bus and of its emulator's schema. Durations are milliseconds; None means unlimited.
A subscription's rules are described in `broker.namespace.rule_descriptions`.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from broker.namespace import names
from protocol.bounds import LONGEST_MS

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
DAY_MS = 24 * 60 * MINUTE_MS
MAX_LOCK_MS = 7 * DAY_MS

MAX_NAME_CHARACTERS = 260
MAX_HOPS = 4  # how often a message is forwarded at most (amqp.md 13.1)


def _names_no_subscription(name: str) -> str:
    """Refuse a name that would be read as a subscription: addresses are parsed from the right."""
    segments = name.lower().split("/")
    if "" in segments or (len(segments) > 2 and segments[-2] == "subscriptions"):
        raise PydanticCustomError(
            "no_address", "has no address: it must not hold // or end in /Subscriptions/ and a name"
        )
    return name


EntityName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_NAME_CHARACTERS, pattern=r"^[A-Za-z0-9](?:[\w./~-]*[\w-])?$"),
    AfterValidator(_names_no_subscription),
]
# Behind the second form is what is added to the names that clients of JMS choose (`protocol.subscribers`).
SubscriptionName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=260,
        pattern=r"^[A-Za-z0-9](?:[\w.~-]{0,48}[\w-])?(?:\$[\w.:@~-]*\$N?D)?$",
    ),
]


class Status(StrEnum):
    ACTIVE = "Active"
    DISABLED = "Disabled"
    SEND_DISABLED = "SendDisabled"
    RECEIVE_DISABLED = "ReceiveDisabled"


Scheme = Literal["sb", "http", "https", "amqp", "amqps"]
"""Of the URL in which a client names an entity. It says nothing about how messages get there."""

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


class Right(StrEnum):
    SEND = "Send"
    LISTEN = "Listen"
    MANAGE = "Manage"


class Frozen(BaseModel):
    # The wrong value may be a key, and texts of errors are logged.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


def _each_once(rights: tuple[Right, ...]) -> tuple[Right, ...]:
    """Drop repetitions, and keep the order given, which clients of the administration API get back."""
    return tuple(dict.fromkeys(rights))


class AuthorizationRule(Frozen):
    """A shared access key with rights. Manage implies Send and Listen."""

    key_name: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="SharedAccessKeyName of connection strings."
    )
    primary_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        repr=False, description="SharedAccessKey of connection strings."
    )
    secondary_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        None,
        repr=False,
        description="Second key, as valid as the first, so that clients can change keys one after another.",
    )
    rights: Annotated[tuple[Right, ...], AfterValidator(_each_once)] = Field(
        description="List of Send, Listen and Manage; Manage implies the others."
    )


class _Description(Frozen):
    """The properties that all entities have. Those in `immutable` are set at creation and never change."""

    kind: ClassVar[str]
    immutable: ClassVar[tuple[str, ...]]

    name: EntityName = Field(description=f"Name of the entity: {names.RULES['queue']}.")
    default_message_time_to_live_ms: int | None = Field(
        None,
        ge=SECOND_MS,
        le=LONGEST_MS,
        description="Time to live of messages that have none; messages cannot have a longer one. Unset is unlimited.",
    )
    enable_batched_operations: bool = Field(
        True, description="No effect, operations are always batched; kept for clients that read it."
    )
    auto_delete_on_idle_ms: int | None = Field(
        None,
        ge=5 * MINUTE_MS,
        le=LONGEST_MS,
        description="Idle time after which the entity is deleted; unset is never.",
    )
    status: Status = Field(Status.ACTIVE, description="What clients may do with the entity.")
    user_metadata: Annotated[str, StringConstraints(max_length=1024)] = Field("", description="Free text.")

    @property
    def path(self) -> str:
        """The address, unique in the namespace without regard to case."""
        return self.name

    @property
    def home_name(self) -> str:
        """The name that says which partition a new entity is put on (`broker.catalog.catalog.home_partition`)."""
        return self.name


class _Sent(_Description):
    """The properties that queues and topics have in common: both are sent to."""

    requires_duplicate_detection: bool = Field(
        False, description="Drop a message whose message id was seen within the window."
    )
    duplicate_detection_history_time_window_ms: int = Field(
        10 * MINUTE_MS, ge=5 * SECOND_MS, le=7 * DAY_MS, description="Window of duplicate detection."
    )
    enable_partitioning: bool = Field(False, description="Spread the entity over all partitions.")
    max_size_mb: int = Field(
        1024,
        ge=1,
        le=80 * 1024,
        description="Size of stored messages above which sends are refused. All fragments of a partitioned entity have "
        "16 times this together, or with sku = 'premium' as many times as there are fragments; each has its share.",
    )
    max_message_size_kb: int | None = Field(
        None,
        ge=1,
        le=100 * 1024,
        description="Largest message accepted, if this is less than amqp.max_message_size_bytes.",
    )
    enable_express: bool = Field(False, description="No effect; kept for clients that read it.")
    support_ordering: bool | None = Field(
        None,
        description="No effect; kept for clients that read it. Unset shows true, and false where it is partitioned.",
    )
    authorization_rules: tuple[AuthorizationRule, ...] = Field(
        (), max_length=12, description="Shared access keys for this entity and all below it."
    )


class _Received(_Description):
    """The properties that queues and subscriptions have in common: both are received from."""

    lock_duration_ms: int = Field(
        30 * SECOND_MS,
        ge=5 * SECOND_MS,
        le=MAX_LOCK_MS,
        description="Time that a lock of a receiver lasts, unless the receiver renews it. At most "
        "delivery.max_lock_duration_ms. The administration API and Config.json have a default of their own: 60000.",
    )
    max_delivery_count: int = Field(
        10,
        ge=1,
        le=2**31 - 1,
        description="Deliveries, failed or ended by a deferral, after which a message is dead-lettered.",
    )
    dead_lettering_on_message_expiration: bool = Field(
        False, description="Dead-letter expired messages; else they are dropped."
    )
    requires_session: bool = Field(False, description="Messages belong to sessions, and receivers accept sessions.")
    forward_to: EntityName | None = Field(None, description="Queue or topic that messages are moved on to.")
    forward_dead_lettered_messages_to: EntityName | None = Field(
        None, description="Queue or topic that dead-lettered messages are moved on to."
    )
    forward_to_scheme: Scheme = Field(
        "sb", description="Scheme of the URL that shows forward_to to administration clients; no other effect."
    )
    forward_dead_lettered_messages_to_scheme: Scheme = Field(
        "sb", description="As forward_to_scheme, for forward_dead_lettered_messages_to."
    )


class QueueDescription(_Sent, _Received):
    kind = "queue"
    immutable = ("requires_session", "requires_duplicate_detection", "enable_partitioning")


class TopicDescription(_Sent):
    """A topic. Clients send to it, and receive from its subscriptions."""

    kind = "topic"
    immutable = ("requires_duplicate_detection", "enable_partitioning")

    status: Literal[Status.ACTIVE, Status.DISABLED, Status.SEND_DISABLED] = Field(
        Status.ACTIVE, description="What clients may do with the topic; its subscriptions have their own status."
    )


class SubscriptionProperties(_Received):
    """The properties of a subscription without the name of its topic."""

    name: SubscriptionName = Field(description=f"Name of the subscription: {names.RULES['subscription']}.")
    dead_lettering_on_filter_evaluation_exceptions: bool = Field(
        True,
        description="Dead-letter a message on which a rule's filter or action fails; else this subscription drops it.",
    )
    status: Literal[Status.ACTIVE, Status.DISABLED, Status.RECEIVE_DISABLED] = Field(
        Status.ACTIVE, description="What clients may do with the subscription; a disabled one still collects messages."
    )


class SubscriptionDescription(SubscriptionProperties):
    """A subscription: a queue with copies of those messages of the topic that its rules select."""

    kind = "subscription"
    immutable = ("requires_session",)

    topic: EntityName = Field(description="Name of the topic.")

    @property
    def path(self) -> str:
        return f"{self.topic}/Subscriptions/{self.name}"

    @property
    def home_name(self) -> str:
        """A subscription lives where its topic does."""
        return self.topic


Description = QueueDescription | TopicDescription | SubscriptionDescription


def in_lower_case(new: Description) -> Description:
    """A new entity as the cloud names it: a queue or topic in lower case, and a subscription as it is."""
    if isinstance(new, SubscriptionDescription):
        return new
    name = new.name.lower()  # as paths are compared
    # A letter may become two, so the name of a valid description could be too long for one.
    return new.model_copy(update={"name": name}) if len(name) <= MAX_NAME_CHARACTERS else new


KEPT_FOR_CLIENTS = (
    "enable_express",
    "support_ordering",
    "forward_to_scheme",
    "forward_dead_lettered_messages_to_scheme",
)
"""Properties without an effect. They came later than the others, so their defaults are not stored."""

DESCRIPTIONS: dict[str, type[Description]] = {
    each.kind: each for each in (QueueDescription, TopicDescription, SubscriptionDescription)
}
