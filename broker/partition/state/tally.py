"""Counters of what happened in queues since their partition was opened. They only grow."""

from copy import copy

# The reasons under which dead-lettering is counted.
MAX_DELIVERY_COUNT_EXCEEDED = "MaxDeliveryCountExceeded"
TTL_EXPIRED = "TTLExpiredException"
HEADER_SIZE_EXCEEDED = "HeaderSizeExceeded"
BY_APPLICATION = "Application"


class Tally:
    """Counts of messages in a queue since the partition was opened (unless the name says something else).

    Messages enter by `incoming + restored + moved in`. Each message that leaves is counted once, so that none is
    unaccounted for.
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
        self.restored = 0  # received and deleted, but never sent
        self.outgoing = 0  # deliveries, by link and by request
        self.completed = 0
        self.received_and_deleted = 0
        self.abandoned = 0
        self.released = 0
        self.deferred = 0
        self.dead_lettered: dict[str, int] = {}  # by reason; `BY_APPLICATION` stands for a receiver
        self.expired = 0  # dropped, not dead-lettered
        self.deleted = 0  # by delete-batch and purge
        self.cancelled = 0  # scheduled messages
        self.activated = 0
        self.locks_ended = 0  # by their time
        self.locks_lost = 0  # because of a broken connection, or a change of the entity
        self.renewed = 0
        self.settlements_too_late = 0
        self.duplicates = 0  # accepted and dropped, in `incoming` as well
        self.pings = 0  # accepted and dropped, in `incoming` as well
        self.quarantined = 0  # records that could not be read
        self.sessions_accepted = 0  # sessions
        self.session_locks_lost = 0  # sessions whose lock ended by its time, or by a change of the entity
        self.unmatched = 0  # at a topic: no subscription took them
        self.rules_failed = 0  # filters and actions that failed on a message

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        return {
            name: dict(value) if isinstance(value := getattr(self, name), dict) else value for name in self.__slots__
        }


class Totals:
    """The counters of a whole partition. They only grow, even if queues are deleted."""

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
