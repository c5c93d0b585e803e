"""What the operations of one partition share: its store, queues, timers, and who is to be looked at in this turn."""

from collections.abc import Hashable
from itertools import count as count_from

from broker.errors import BrokerError, EntityNotFound
from broker.partition.bodies import Bodies
from broker.partition.queue import Queue, Totals
from broker.partition.receivers import Receiver
from broker.partition.recount import recount
from broker.partition.settings import PartitionSettings
from broker.partition.terms import Terms
from broker.partition.timers import Due, Timers
from storage.quarantine import quarantine
from storage.records import (
    CorruptRecord,
    Counts,
    Part,
    decode_counts,
    due_key,
    encode_counts,
    entity_key,
)
from storage.store import Store, Table

PARTS = (Part.MAIN, Part.DEAD_LETTER)


class Core:
    """`touched` have counts to be written; `awake` may have something for their receivers."""

    def __init__(self, store: Store, partition_id: int, incarnation: bytes, settings: PartitionSettings) -> None:
        self.store = store
        self.settings = settings
        self.bodies = Bodies(store)
        self.timers = Timers()
        self.terms: dict[int, Terms] = {}  # by entity id
        self.deleted: set[int] = set()  # entity ids whose messages are still being freed
        self.queues: dict[int, Queue] = {}  # those in use since the start, by queue id
        self.receivers: dict[Hashable, Receiver] = {}
        self.closed: list[tuple[Hashable, BrokerError]] = []
        self.touched: dict[int, Queue] = {}
        self.awake: dict[int, Queue] = {}
        self.token_prefix = partition_id.to_bytes(2, "big") + incarnation
        self.token_numbers = count_from(1)
        self.past = Totals()  # of queues since deleted
        self._refusing: bool | None = None  # True if the store is above its watermark; None: not known in this turn

    def find(self, queue_id: int) -> Queue | None:
        queue = self.queues.get(queue_id)
        return queue if queue is not None else self._open(queue_id)

    def queue(self, queue_id: int) -> Queue:
        """Raises EntityNotFound."""
        queue = self.queues.get(queue_id) or self._open(queue_id)
        if queue is None:
            raise EntityNotFound("The messaging entity could not be found.")
        return queue

    def _open(self, queue_id: int) -> Queue | None:
        terms = self.terms.get(queue_id >> 3)
        if terms is None or queue_id & 7 not in PARTS:
            return None
        queue = self.queues[queue_id] = Queue(queue_id, terms, self._counts(queue_id))
        return queue

    def _counts(self, queue_id: int) -> Counts:
        key = entity_key(queue_id)
        value = self.store.get(Table.COUNTS, key)
        if value is None:
            return Counts()
        try:
            return decode_counts(value)
        except CorruptRecord:
            quarantine(self.store, Table.COUNTS, key)
            counts = recount(self.store, queue_id)
            self.store.put(Table.COUNTS, key, encode_counts(counts))
            return counts

    def touch(self, queue: Queue) -> None:
        self.touched[queue.id] = queue

    def wake(self, queue: Queue) -> None:
        """The queue may have got something to hand out."""
        if queue.line.waiting or queue.line.draining:
            self.awake[queue.id] = queue

    def arm_expiry(self, queue: Queue, time_ms: int) -> None:
        """A DUE entry at `time_ms` was made."""
        if due_key(queue.id, Due.EXPIRY, time_ms, 0) < queue.swept:
            queue.swept = b""
        self.timers.arm(time_ms, (queue.id, Due.EXPIRY))

    def close_receiver(self, receiver: Receiver, error: BrokerError | None = None) -> Queue | None:
        """Take it out of everything but its locks. `error`: the broker's reason, to be told to the receiver."""
        del self.receivers[receiver.key]
        if error is not None:
            self.closed.append((receiver.key, error))
        queue = self.queues.get(receiver.queue_id)
        if queue is not None:
            queue.line.leave(receiver)
            del queue.receivers[receiver.key]
        return queue

    def store_is_full(self) -> bool:
        """Above the watermark, as of the first send of this turn."""
        if self._refusing is None:
            used, capacity = self.store.used_bytes(), self.store.capacity_bytes()
            limit = min(self.settings.store_watermark * capacity, capacity - self.settings.min_free_bytes)
            self._refusing = used > limit
        return self._refusing

    def end_turn(self) -> None:
        """Stage the counts. What was remembered of the turn is forgotten."""
        if self.touched:
            counts = [(entity_key(queue.id), encode_counts(queue.stored_counts())) for queue in self.touched.values()]
            self.store.put_many(Table.COUNTS, counts)
            self.touched.clear()
        self.bodies.turn_ended()
        self._refusing = None
