"""Limits of a partition's work and memory. One value of each kind per broker; entities have their own terms."""

from dataclasses import dataclass, field
from typing import Any

from broker.namespace.tiers import Sku
from storage.seen_runs import SeenLimits

MIB = 1 << 20


@dataclass(frozen=True)
class PartitionSettings:
    """Counts are of messages unless the name says otherwise."""

    keep_locks_of_broken_connections: bool = False  # True as in the cloud: such a lock ends with its time
    expiry_timer: bool = False  # True: expired messages are dead-lettered in time, also without a receiver
    dead_letter_unforwarded: bool = False  # True: what cannot be forwarded goes to the dead-letter queue of its source
    sku: Sku | None = None  # the namespace's tier, which decides about the sizes of partitioned entities
    abandon_delays: bool = False  # True: the property `protocol.symbols.DELAY` of an abandoned message is its delay
    store_watermark: float = 0.9  # of the store's capacity; above it sends are refused, so that settling always works
    min_free_bytes: int = 0  # of the store and its disk; sends are refused when less is left
    window: int = 4096  # entries of one queue's head in memory; as many returned ones on top
    session_window: int = 128  # entries of one locked session's head in memory; as many returned ones on top
    pump_bytes_per_receiver: int = 4 * MIB  # handed to one receiver in one turn
    pump_bytes: int = 16 * MIB  # handed out in one turn in all
    # Of these, what was stored before the turn. With more, large messages fall out of the processor's cache between
    # their steps, and a gateway waits longer for the next ones.
    pump_stored_bytes: int = MIB
    forward_count: int = 1000  # forwarded by one queue at once
    forward_batch_bytes: int = MIB  # forwarded by one queue at once
    forward_bytes: int = 16 * MIB  # under way from this partition to others in all
    commit_bytes: int = MIB  # of messages that the commit of a transaction writes; others are stored when they come
    transaction_bytes: int = 256 * MIB  # of messages in all open transactions
    connection_transaction_bytes: int = 64 * MIB  # of messages in open transactions of one client's connection
    # Records that one turn reads or writes for work that the next can continue; far fewer if the store is nearly full.
    turn_work: int = 10_000
    step: int = 1000  # timers fired, or messages of a deleted entity freed, per queue and turn
    step_bytes: int = 8 * MIB  # of records read in one step
    peek_max: int = 1000  # in one answer to `peek`; the caller then asks for the next ones
    request_items: int = 4000  # numbers, tokens or messages that one request names; settlements in one transaction
    request_bytes: int = 16 * MIB  # read or written by one request for several messages
    properties_bytes: int = 64 * 1024  # names and values set on one message by its receivers
    seen_ids: SeenLimits = field(default_factory=SeenLimits)  # for duplicate detection

    @classmethod
    def of(cls, settings: Any) -> "PartitionSettings":
        """Made of a `broker.settings.config.Settings`, which the state machine does not import."""
        return cls(
            keep_locks_of_broken_connections=settings.delivery.keep_locks_of_broken_connections,
            expiry_timer=settings.expiry.timer,
            dead_letter_unforwarded=settings.forwarding.failures == "dead_letter",
            sku=settings.sku,
            abandon_delays=settings.delivery.abandon_delays,
            store_watermark=settings.store.send_watermark,
            min_free_bytes=settings.store.min_free_disk_bytes,
            connection_transaction_bytes=max(cls.connection_transaction_bytes, settings.amqp.max_message_size_bytes),
        )
