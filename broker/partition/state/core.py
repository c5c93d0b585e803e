"""The state that all operations of a partition share: its store, queues and timers."""

from collections.abc import Callable, Hashable, Sequence

from broker.errors import BrokerError, EntityMoving, EntityNotFound, ServerBusy
from broker.partition.settings import PartitionSettings
from broker.partition.state.bodies import Bodies
from broker.partition.state.entities import Entities
from broker.partition.state.idle_times import IdleTimes
from broker.partition.state.journal import Journal
from broker.partition.state.lanes import Transfers
from broker.partition.state.open_transactions import Transactions
from broker.partition.state.outbox import Outbox
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import Receiver
from broker.partition.state.recount import recount, recount_copies
from broker.partition.state.room import PAGE_BYTES, Room
from broker.partition.state.sessions import Sessions
from broker.partition.state.stored_marks import StoredMarks
from broker.partition.state.stored_rules import FlawedRule, flawed, read_rules
from broker.partition.state.tally import Totals
from broker.partition.state.terms import Kind
from broker.partition.state.timers import Due, Timers
from broker.partition.state.topic import Topic
from broker.partition.state.turn import Turn
from protocol import error_texts
from storage.quarantine import quarantine
from storage.queue_ids import Part, entity_of, part_of, queue_id_of
from storage.records import CorruptRecord, Counts, decode_counts, due_key, encode_counts, entity_key
from storage.seen_ids import SeenIds
from storage.seen_runs import SeenMemory
from storage.store import Store, Table

PARTS = (Part.MAIN, Part.DEAD_LETTER, Part.TRANSFER_DEAD_LETTER, Part.TRANSFER)
# The room for a copy of a message (its entry, key, timer and reference, on half-full pages), and the pages of a queue
# that change with its first copy.
COPY_ROOM_BYTES = 192
PAGES_PER_QUEUE = 3
# After the wall clock was set back, it catches up slowly; but if it is set again, at once. So look again after this
# time.
LOOK_AGAIN_MS = 5000
PARTS_OF_A_TURN = 5  # commands, timers, forwarding, offering sessions, handing out
_COUNTS = Table.COUNTS  # here, because to look up a member of an enum takes as long as a call
_EXPIRY = Due.EXPIRY
_TOPIC_PARTS = (Part.MAIN, Part.TRANSFER_DEAD_LETTER, Part.TRANSFER)


class Forwarding:
    """Messages on their way to other partitions."""

    def __init__(self) -> None:
        self.store_id: bytes | None = None  # set when it was read
        self.awaited: dict[tuple[int, int], tuple[Queue, Outbox]] = {}  # commands under way, by queue id and partition
        self.bytes = 0  # bytes of records in these commands
        self.waiting: dict[int, Queue] = {}  # queues that continue when there are fewer bytes


class Core:
    """The parts of a partition, and the work of its turn."""

    def __init__(
        self,
        store: Store,
        partition_id: int,
        incarnation: bytes,
        settings: PartitionSettings,
        home: Callable[[str], int],
    ) -> None:
        """`home`: name of a queue or topic -> the partition to ask for it, if its definition does not say."""
        self.store = store
        self.partition_id = partition_id
        self.opened_ms = 0  # set when the entities were read
        self.settings = settings
        self.bodies = Bodies(store)
        self.journal = Journal(store)
        self.timers = Timers()
        self.entities = Entities(partition_id, home)
        self.idle_times = IdleTimes()
        self.topics: dict[int, Topic] = {}  # topics that were published to since the start, by entity id
        self.flaws: list[FlawedRule] = []  # found in `topics`, and not taken yet
        self.queues: dict[int, Queue] = {}  # queues that were used since the start, by queue id
        self.receivers: dict[Hashable, Receiver] = {}
        self.browsers: dict[Hashable, int] = {}  # those that wait for more messages -> queue id
        self.turn = Turn()
        self.room = Room(store, settings)
        self.marks = StoredMarks(store)
        self.forwarding = Forwarding()
        self.transactions = Transactions()
        self.seen_ids: dict[int, SeenIds] = {}  # for entities with duplicate detection, by entity id
        self.seen_memory = SeenMemory(settings.seen_ids)
        self.token_prefix = partition_id.to_bytes(2, "big") + incarnation
        self.next_token = 1  # the counter of the next lock token
        self.past = Totals()  # counters of queues that were deleted
        self.ahead_ms = 0  # milliseconds ahead of the wall clock: see `wall_ms`
        self.changes = 0  # the number of changes in memory: see `changing`
        self._changes_before = 0

    def take_tokens(self, count: int) -> int:
        """The counter of the first of so many lock tokens."""
        first = self.next_token
        self.next_token += count
        return first

    def wall_ms(self, time_ms: int) -> int:
        """The time of the wall clock at a time of the partition, which is ahead after the wall clock was set back.

        Scheduled times, and the ends of locks that clients are told, are times of the wall clock.
        """
        return time_ms - self.ahead_ms

    def arm_scheduled(self, queue_id: int, scheduled_ms: int, now_ms: int) -> None:
        """Arm the timer for a message that is scheduled for this time of the wall clock."""
        due_ms = scheduled_ms
        if scheduled_ms <= now_ms:
            due_ms = min(scheduled_ms + self.ahead_ms, now_ms + LOOK_AGAIN_MS)
        self.timers.arm(due_ms, (queue_id, Due.SCHEDULED))

    def begin_command(self) -> None:
        """A command of a caller begins: it did not make the changes before this."""
        self._changes_before = self.store.writes + self.changes

    def changing(self) -> None:
        """Call this before a command changes anything in memory, unless it has staged a write before.

        Cached contents of the store, and counters for metrics, do not count as changes.
        """
        self.changes += 1

    @property
    def has_changed(self) -> bool:
        """True if memory or staged writes have changed since the last command began."""
        return self.store.writes + self.changes != self._changes_before

    def find(self, queue_id: int) -> Queue | None:
        queue = self.queues.get(queue_id)
        return queue if queue is not None else self._open(queue_id)

    def queue(self, queue_id: int) -> Queue:
        """The queue, which is opened if needed. Raises EntityNotFound, EntityMoving, ServerBusy."""
        queue = self.queues.get(queue_id) or self._open(queue_id)
        if queue is None:
            if entity_of(queue_id) in self.entities.terms and not self.entities.lives_here(entity_of(queue_id)):
                raise EntityMoving(error_texts.SERVER_BUSY)
            if (
                entity_of(queue_id) >= self.entities.next_id
            ):  # the partition has missed its creation, and will hear of it
                raise ServerBusy(error_texts.SERVER_BUSY)
            raise EntityNotFound("The messaging entity could not be found.")
        return queue

    def access(self, queue_id: int, now_ms: int) -> Queue:
        """Return the queue, as `queue` does, for a command of a client; see `accesses`."""
        queue = self.queues.get(queue_id) or self.queue(queue_id)
        queue.accessed_ms = now_ms
        return queue

    def _open(self, queue_id: int) -> Queue | None:
        terms = self.entities.terms.get(entity_of(queue_id))
        if terms is None or not self.entities.lives_here(entity_of(queue_id)):
            return None
        if part_of(queue_id) not in (PARTS if terms.kind != Kind.TOPIC else _TOPIC_PARTS):
            return None
        topic_id = self.entities.topic_ids[terms.topic] if terms.kind == Kind.SUBSCRIPTION else None
        counts = self._counts(queue_id)
        if counts.next_sequence_number < (first := terms.first_number(self.partition_id)):
            counts = counts._replace(next_sequence_number=first)
        queue = self.queues[queue_id] = Queue(queue_id, terms, counts, topic_id)
        self.journal.named(queue.entity_id, terms.name)
        main = self.queues.get(queue_id_of(queue.entity_id))
        if main is not None:
            main.counted_with = None
        if queue.forward_to:
            queue.outbox = Outbox(queue.window)
            queue.window.active = True
        if part_of(queue_id) == Part.TRANSFER:
            queue.transfers = Transfers(lambda name: self.entities.partitions_of(name)[0])
        if terms.requires_session and part_of(queue_id) == Part.MAIN:
            queue.sessions = Sessions(self.store, queue_id, self.settings.session_window)
        return queue

    def topic(self, topic_id: int) -> Topic:
        """The subscriptions and rules of this topic, which exists."""
        topic = self.topics.get(topic_id)
        if topic is None:
            topic = self.topics[topic_id] = Topic()
            for entity_id in sorted(self.entities.subscription_ids[topic_id]):
                rules = read_rules(self.store, entity_id)
                topic.add_subscription(entity_id, rules)
                self.flaws += flawed(self.entities.terms[entity_id].name, rules)
        return topic

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
            topic_id = entity_of(queue_id)
            if topic_id in self.entities.subscription_ids:
                freed = [each for each, deleted in self.entities.deleted.items() if deleted.topic_id == topic_id]
                copies_bytes = recount_copies(self.store, [*self.entities.subscription_ids[topic_id], *freed])
                counts = counts._replace(size_bytes=counts.size_bytes + copies_bytes)
            self.store.put(Table.COUNTS, key, encode_counts(counts))
            return counts

    def arm_expiry(self, queue: Queue, time_ms: int) -> None:
        """Arm the timer for a DUE entry that was made at `time_ms`."""
        if due_key(queue.id, _EXPIRY, time_ms, 0) < queue.swept:
            queue.swept = b""
        self.timers.arm(time_ms, (queue.id, _EXPIRY))

    def enter(self, queue: Queue, receiver: Receiver) -> None:
        """The receiver is open."""
        self.receivers[receiver.key] = receiver
        queue.enter(receiver)

    def close_receiver(self, receiver: Receiver, error: BrokerError | None = None) -> Queue | None:
        """Remove the receiver from everything but its locks. The receiver is told `error`, the broker's reason."""
        del self.receivers[receiver.key]
        if error is not None:
            self.turn.closed.append((receiver.key, error))
        queue = self.queues.get(receiver.queue_id)
        if queue is not None:
            queue.leave(receiver)
        return queue

    def store_is_full(self) -> bool:
        """True if the store is above the watermark, as of the begin of this turn."""
        return self.room.free_bytes() < 0

    def work_left(self) -> int:
        """The number of records that this turn may still read or write. Below 1, the rest is for the next turn.

        Work that is done step by step asks for this, and adds to `Turn.work`. Each changed record takes some pages
        until the next commit but one, so turns are smaller when the store has less room.
        """
        turn = self.turn
        if turn.work_limit is None:
            turn.work_limit = self.room.work_limit()
            turn.part_limit = turn.work_limit // PARTS_OF_A_TURN or 1
        return turn.work_limit - turn.work

    def worked(self, *sizes: int) -> None:
        """Count records of these sizes in bytes that were written; a large one counts as several."""
        turn_work, step_bytes = self.settings.turn_work, self.settings.step_bytes
        self.turn.work += len(sizes) + sum([size_bytes * turn_work // step_bytes for size_bytes in sizes])

    def end_of_work(self) -> None:
        """End the work of this turn, because enough bytes were read."""
        self.turn.work += max(0, self.work_left())

    def begin_part(self) -> None:
        """A part of a turn begins: it gets its share, even if the other parts have used up the work."""
        turn = self.turn
        if self.work_left() < turn.part_limit:
            turn.work_limit = turn.work + turn.part_limit

    def step(self) -> int:
        """The number of messages that one step may take now, at least 1."""
        return max(1, min(self.settings.step, self.work_left()))

    def has_room(self, sizes: Sequence[int], copies: int = 0, queues: int = 0, overlay_bytes: int = 0) -> bool:
        """True if records of these sizes can be stored, and there is still room for other work after that.

        The same must hold for `copies` in `queues`, whose overlays take `overlay_bytes` in all.
        """
        copies_bytes = copies * COPY_ROOM_BYTES + overlay_bytes
        if self.room.free_bytes() < copies_bytes:
            self.room.refuse()
            return False
        pages = queues * PAGES_PER_QUEUE + -(-copies_bytes // PAGE_BYTES)
        added_bytes = sum(sizes)
        self.room.take(added_bytes + pages * PAGE_BYTES)
        if not self.store.fits(added_bytes, sizes, pages):
            self.room.refuse()
            return False
        return True

    def end_turn(self) -> None:
        """Stage the counts, and reset the state of the turn."""
        turn = self.turn
        if turn.touched:
            counts = [(entity_key(queue.id), queue.encoded_counts()) for queue in turn.touched.values()]
            self.store.put_many(_COUNTS, counts)
            turn.touched.clear()
        if self.marks.noted:
            self.marks.write()
        self.bodies.turn_ended()
        self.room.end_turn(turn.work)
        turn.work_limit = None
        turn.work = 0
