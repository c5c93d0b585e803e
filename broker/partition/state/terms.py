"""The parts of an entity's definition that the state machine uses; `broker.catalog.catalog` stores definitions."""

from enum import IntEnum
from typing import Any, NamedTuple

from broker.namespace.entities import (
    DESCRIPTIONS,
    Description,
    QueueDescription,
    Status,
    SubscriptionDescription,
    TopicDescription,
)
from broker.namespace.tiers import Sku, share_bytes
from storage.queue_ids import Part
from storage.records import PARTITION_SHIFT


class Kind(IntEnum):
    QUEUE = 0
    TOPIC = 1  # clients send to it and never receive from it
    SUBSCRIPTION = 2  # clients receive from it; its messages come from its topic


_CAN_SEND = (Status.ACTIVE, Status.RECEIVE_DISABLED)
_CAN_RECEIVE = (Status.ACTIVE, Status.SEND_DISABLED)


class Terms(NamedTuple):
    """Kept for each entity, so it is small: 10,000 descriptions would fill tens of megabytes.

    `name` is the address. Fields about receiving have no meaning for a topic, nor has the size for a subscription.
    """

    name: str
    lock_duration_ms: int
    max_delivery_count: int
    time_to_live_ms: int | None
    dead_letter_expired: bool
    size_bytes_max: int
    status: Status
    kind: Kind = Kind.QUEUE
    topic: str = ""  # for a subscription: the topic's name in lower case
    dead_letter_failed: bool = False  # for a subscription: dead-letter messages on which a rule fails
    forward_to: str = ""  # name of a queue or topic in lower case; empty if messages stay
    forward_dead_lettered_to: str = ""
    duplicate_window_ms: int = 0  # for a queue or topic with duplicate detection
    requires_session: bool = False
    idle_limit_ms: int = 0  # the entity is deleted after this time without a use; 0: never
    partitions: tuple[int, ...] = ()  # those that the entity lives on; empty if that is only known by its name

    @classmethod
    def of(cls, description: Description, partitions: tuple[int, ...] = (), sku: Sku | None = None) -> "Terms":
        """Make the terms of an entity that lives on these partitions, in a namespace of this tier."""
        terms = cls._of(description)._replace(partitions=partitions)
        if isinstance(description, SubscriptionDescription) or not description.enable_partitioning:
            return terms
        return terms._replace(size_bytes_max=share_bytes(description.max_size_mb, sku, max(1, len(partitions))))

    @classmethod
    def _of(cls, description: Description) -> "Terms":
        match description:
            case TopicDescription():
                return cls(
                    name=description.name,
                    lock_duration_ms=0,
                    max_delivery_count=0,
                    time_to_live_ms=description.default_message_time_to_live_ms,
                    dead_letter_expired=False,
                    size_bytes_max=description.max_size_mb << 20,
                    status=description.status,
                    kind=Kind.TOPIC,
                    duplicate_window_ms=_duplicate_window_ms(description),
                    idle_limit_ms=description.auto_delete_on_idle_ms or 0,
                )
            case SubscriptionDescription():
                return cls(
                    name=description.path,
                    lock_duration_ms=description.lock_duration_ms,
                    max_delivery_count=description.max_delivery_count,
                    time_to_live_ms=description.default_message_time_to_live_ms,
                    dead_letter_expired=description.dead_lettering_on_message_expiration,
                    size_bytes_max=0,
                    status=description.status,
                    kind=Kind.SUBSCRIPTION,
                    topic=description.topic.lower(),
                    dead_letter_failed=description.dead_lettering_on_filter_evaluation_exceptions,
                    forward_to=(description.forward_to or "").lower(),
                    forward_dead_lettered_to=(description.forward_dead_lettered_messages_to or "").lower(),
                    requires_session=description.requires_session,
                    idle_limit_ms=description.auto_delete_on_idle_ms or 0,
                )
            case QueueDescription():
                return cls(
                    name=description.name,
                    lock_duration_ms=description.lock_duration_ms,
                    max_delivery_count=description.max_delivery_count,
                    time_to_live_ms=description.default_message_time_to_live_ms,
                    dead_letter_expired=description.dead_lettering_on_message_expiration,
                    size_bytes_max=description.max_size_mb << 20,
                    status=description.status,
                    forward_to=(description.forward_to or "").lower(),
                    forward_dead_lettered_to=(description.forward_dead_lettered_messages_to or "").lower(),
                    duplicate_window_ms=_duplicate_window_ms(description),
                    requires_session=description.requires_session,
                    idle_limit_ms=description.auto_delete_on_idle_ms or 0,
                )

    @classmethod
    def of_definition(cls, document: dict[str, Any], sku: Sku | None = None) -> "Terms":
        """The terms in a stored definition: the description's fields, and some of the catalog. Raises ValueError."""
        kind = DESCRIPTIONS.get(document["kind"])
        if kind is None:
            raise ValueError(f"kind {document['kind']!r} is unknown")
        known = _FIELDS[document["kind"]]
        description = kind.model_validate({name: value for name, value in document.items() if name in known})
        return cls.of(description, tuple(document.get("partitions", ())), sku)

    def first_number(self, partition: int) -> int:
        """The first sequence number that this partition gives: those of a partitioned entity say which it is."""
        return (partition << PARTITION_SHIFT) + 1 if len(self.partitions) > 1 else 1

    def forwards_to(self, part: int) -> str:
        """The name, in lower case, of the entity that this part forwards messages to; empty if they stay."""
        if part == Part.MAIN:
            return self.forward_to
        return self.forward_dead_lettered_to if part == Part.DEAD_LETTER else ""

    @property
    def can_send(self) -> bool:
        return self.status in _CAN_SEND

    @property
    def can_receive(self) -> bool:
        return self.status in _CAN_RECEIVE


_FIELDS = {kind: frozenset(description.model_fields) for kind, description in DESCRIPTIONS.items()}


def _duplicate_window_ms(description: QueueDescription | TopicDescription) -> int:
    return description.duplicate_detection_history_time_window_ms if description.requires_duplicate_detection else 0
