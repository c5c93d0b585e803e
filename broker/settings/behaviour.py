"""Settings of what happens to messages and entities: partitioning, delivery, expiry, forwarding."""

from enum import StrEnum

from pydantic import Field

from broker.namespace.entities import MAX_LOCK_MS, MINUTE_MS, Frozen


class ForwardingFailures(StrEnum):
    TRANSFER_DEAD_LETTER = "transfer_dead_letter"
    DEAD_LETTER = "dead_letter"


class Partitioning(Frozen):
    """Partitioned queues and topics, which are on all partitions."""

    default: bool = Field(
        False,
        description="Partition new queues and topics whose declarations do not say enable_partitioning.",
    )
    max_entities: int = Field(
        100, ge=0, le=10_000, description="Partitioned queues and topics that the namespace may have."
    )


class Delivery(Frozen):
    """How messages are handed out."""

    keep_locks_of_broken_connections: bool = Field(
        False,
        description="When a connection breaks, keep its locks until they expire, as the cloud does; "
        "else the messages are available at once and each delivery that left the broker counts as failed.",
    )
    max_lock_duration_ms: int = Field(
        5 * MINUTE_MS,
        ge=5 * MINUTE_MS,
        le=MAX_LOCK_MS,
        description="Longest lock_duration_ms that an entity may have. The cloud has 5 minutes; clients that renew "
        "locks do not need more.",
    )
    abandon_delays: bool = Field(
        False,
        description="A message that is abandoned with the property peeklock:delay-ms is available again so many "
        "milliseconds later, and the property is not stored. Else it is a property like others, as in the cloud.",
    )
    receive_active_by_number: bool = Field(
        False,
        description="The SDKs' request for deferred messages, which names them by their sequence numbers, receives "
        "active messages, too, for example those of a dead-letter queue. Else it does not find them, as in the cloud, "
        "unless it has peeklock:active.",
    )


class Expiry(Frozen):
    """What happens to messages whose time to live has ended."""

    timer: bool = Field(
        False,
        description="Where expired messages are dead-lettered, they move when their time comes, by a timer. Else they "
        "move while somebody receives from the entity, and by the timer only if the entity forwards its messages or "
        "its dead-lettered messages.",
    )


class Forwarding(Frozen):
    """What happens to messages that cannot be forwarded."""

    failures: ForwardingFailures = Field(
        ForwardingFailures.TRANSFER_DEAD_LETTER,
        description="The queue of the source for messages that can never be forwarded, because they made more than "
        "four hops or the destination is disabled, missing or over its size: `transfer_dead_letter` is its transfer "
        "dead-letter queue, and `dead_letter` its dead-letter queue, as in the cloud. Messages that clients send "
        "through an entity, and dead-lettered messages that cannot be forwarded, always go to the transfer "
        "dead-letter queue. What is in either queue stays there when this is changed.",
    )
