"""One queue or dead-letter queue, a subscription's too: its counts, and what of it is in memory."""

from copy import copy

from broker.partition.state.lanes import Transfers
from broker.partition.state.line import Line
from broker.partition.state.locks import Locks
from broker.partition.state.outbox import Outbox
from broker.partition.state.receivers import Receiver
from broker.partition.state.sessions import Sessions
from broker.partition.state.terms import Kind, Terms
from broker.partition.state.window import Window
from storage.queue_ids import Part, entity_of, part_of
from storage.records import Counts, Field, Overlay, Place

# Reasons for dead-lettering, as they are counted.
MAX_DELIVERY_COUNT_EXCEEDED = "MaxDeliveryCountExceeded"
TTL_EXPIRED = "TTLExpiredException"
BY_APPLICATION = "Application"


class Tally:
    """What happened in a queue since the partition was opened. Messages, unless the name says otherwise.

    Each way to leave `incoming + restored + moved in` is counted once, so that every message can be accounted for.
    """

    __slots__ = (
        "abandoned",
        "activated",
        "cancelled",
        "completed",
        "dead_lettered",
        "deferred",
        "deleted",
        "duplicates",
        "expired",
        "forwarded",
        "incoming",
        "locks_ended",
        "locks_lost",
        "moved_in",
        "outgoing",
        "pings",
        "quarantined",
        "received_and_deleted",
        "released",
        "renewed",
        "restored",
        "rules_failed",
        "session_locks_lost",
        "sessions_accepted",
        "settlements_too_late",
        "unmatched",
    )

    def __init__(self) -> None:
        self.incoming = 0
        self.moved_in = 0  # dead-lettered from the main queue
        self.forwarded = 0  # to another entity
        self.restored = 0  # received and deleted, but never put on the wire
        self.outgoing = 0  # deliveries, by link and by request
        self.completed = 0
        self.received_and_deleted = 0
        self.abandoned = 0
        self.released = 0
        self.deferred = 0
        self.dead_lettered: dict[str, int] = {}  # by reason; `BY_APPLICATION`: by a receiver
        self.expired = 0  # dropped, not dead-lettered
        self.deleted = 0  # by delete-batch and purge
        self.cancelled = 0  # scheduled ones
        self.activated = 0
        self.locks_ended = 0  # ran out
        self.locks_lost = 0  # with a broken connection, or by a change of the entity
        self.renewed = 0
        self.settlements_too_late = 0
        self.duplicates = 0  # accepted and dropped, in `incoming` as well
        self.pings = 0  # accepted and dropped, in `incoming` as well
        self.quarantined = 0  # records that could not be read
        self.sessions_accepted = 0  # sessions
        self.session_locks_lost = 0  # sessions whose lock ran out, or was lost by a change of the entity
        self.unmatched = 0  # at a topic: no subscription took them
        self.rules_failed = 0  # filters and actions that failed on a message, whatever became of it

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        return {
            name: dict(value) if isinstance(value := getattr(self, name), dict) else value for name in self.__slots__
        }


class Totals:
    """What is shown of a partition as a whole. Only grows, whatever becomes of the queues."""

    def __init__(self) -> None:
        self.expired = 0  # dropped or dead-lettered
        self.dead_lettered = 0  # by the broker itself
        self.locks_expired = 0
        self.rules_failed = 0
        self.forwarded = 0
        self.duplicates = 0

    def copy(self) -> "Totals":
        return copy(self)

    def add(self, tally: Tally) -> None:
        by_broker = sum(count for reason, count in tally.dead_lettered.items() if reason != BY_APPLICATION)
        self.dead_lettered += by_broker
        self.expired += tally.expired + tally.dead_lettered.get(TTL_EXPIRED, 0)
        self.locks_expired += tally.locks_ended
        self.rules_failed += tally.rules_failed
        self.forwarded += tally.forwarded
        self.duplicates += tally.duplicates


class Queue:
    __slots__ = (
        "counts",
        "entity_id",
        "expiry_paused",
        "id",
        "line",
        "locks",
        "next_number",
        "outbox",
        "part",
        "receivers",
        "sessions",
        "size_bytes",
        "swept",
        "tally",
        "terms",
        "topic_id",
        "transfers",
        "window",
    )

    def __init__(self, queue_id: int, terms: Terms, counts: Counts, topic_id: int | None = None) -> None:
        self.id = queue_id
        self.entity_id = entity_of(queue_id)
        self.part = part_of(queue_id)
        self.terms = terms
        self.topic_id = topic_id  # of a subscription: the topic whose subscriptions it shares bodies with
        self.next_number = counts.next_sequence_number
        self.counts = [counts.available, counts.deferred, counts.scheduled]  # by Place
        self.size_bytes = counts.size_bytes
        self.window = Window()
        self.locks = Locks()
        self.line = Line()
        self.receivers: dict[object, Receiver] = {}
        self.outbox: Outbox | None = None  # of a queue that forwards, or did since the start
        self.transfers: Transfers | None = None  # of a transfer queue
        self.sessions: Sessions | None = None  # of the main part of an entity that requires sessions
        self.tally = Tally()
        self.swept = b""  # DUE keys below it have been looked at by expiry; those left belong to locked messages
        self.expiry_paused = False  # something may have expired, but nobody pulls: see expiry

    @property
    def is_dead_letter(self) -> bool:
        """Or a transfer queue, or a transfer dead-letter queue: no time to live is observed there."""
        return self.part != Part.MAIN

    @property
    def is_topic(self) -> bool:
        return self.terms.kind == Kind.TOPIC and self.part == Part.MAIN

    @property
    def forward_to(self) -> str:
        """The name, in lower case, of where messages move on to; empty if they stay."""
        return self.terms.forwards_to(self.part)

    @property
    def is_held_back(self) -> bool:
        """Messages may have been taken over by another partition, and it is not known which."""
        return self.outbox is not None and not self.outbox.synced

    @property
    def is_pulled(self) -> bool:
        """A receiver has credit, or waits for a session."""
        return bool(self.line.waiting) or (self.sessions is not None and bool(self.sessions.waiting))

    @property
    def is_awaited(self) -> bool:
        """What comes in will probably be read in the same turn."""
        return bool(self.line.waiting) or self.outbox is not None

    def ready(self) -> int:
        """Available and not locked, some perhaps expired or unreadable: never less than can be handed out."""
        if self.is_held_back:
            return 0
        return self.counts[Place.AVAILABLE] - self.locks.available_locked()

    def forget(self, number: int, overlay: Overlay | None) -> None:
        """An available, unlocked message has left the store; `overlay` is None if its entry cannot be read."""
        if self.sessions is None:
            self.window.remove(number)
        else:
            session_id = None if overlay is None else overlay[Field.SESSION]
            self.sessions.forget(number, session_id, self.locks)

    def stored_counts(self) -> Counts:
        available, deferred, scheduled = self.counts
        return Counts(self.next_number, available, deferred, scheduled, self.size_bytes)
