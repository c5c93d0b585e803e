"""One queue of an entity (main, dead-letter or transfer): its counts, and the part of it that is in memory."""

from collections import deque
from collections.abc import Hashable, Sequence

from broker.partition.state.deferrals import Deferrals
from broker.partition.state.lanes import Transfers
from broker.partition.state.line import Line
from broker.partition.state.locks import Locks
from broker.partition.state.outbox import Outbox
from broker.partition.state.receivers import Receiver
from broker.partition.state.selection import Selection
from broker.partition.state.sessions import Sessions
from broker.partition.state.tally import Tally
from broker.partition.state.terms import Kind, Terms
from broker.partition.state.window import Window
from storage.queue_ids import Part, entity_of, part_of
from storage.records import Counts, Overlay, Place, encode_counts

_AVAILABLE = Place.AVAILABLE  # here, because to look up a member of an enum takes as long as a call


class Queue:
    __slots__ = (
        "accessed_ms",
        "browsers",
        "counted_with",
        "counts",
        "deferrals",
        "entity_id",
        "expiry_paused",
        "id",
        "is_dead_letter",
        "is_topic",
        "line",
        "locks",
        "next_number",
        "outbox",
        "part",
        "receivers",
        "selections",
        "sessions",
        "size_bytes",
        "swept",
        "tally",
        "terms",
        "topic_id",
        "transfers",
        "turns",
        "window",
    )

    def __init__(self, queue_id: int, terms: Terms, counts: Counts, topic_id: int | None = None) -> None:
        self.id = queue_id
        self.entity_id = entity_of(queue_id)
        self.part = part_of(queue_id)
        # True also for the transfer and transfer dead-letter queue: in all of these a time to live has no effect.
        self.is_dead_letter = self.part != Part.MAIN
        self.is_topic = terms.kind == Kind.TOPIC and not self.is_dead_letter
        self.terms = terms
        self.topic_id = topic_id  # for a subscription: its topic, whose subscriptions share bodies
        self.next_number = counts.next_sequence_number
        self.counts = [counts.available, counts.deferred, counts.scheduled]  # by Place
        self.size_bytes = counts.size_bytes
        self.window = Window()
        self.locks = Locks()
        self.line = Line()
        self.receivers: dict[object, Receiver] = {}
        # Receivers with selectors, by the text of the selector; where sessions are required they are among the others.
        self.selections: dict[str, Selection] = {}
        # In which order those with each selector, and those without (None), are served; empty without selectors.
        self.turns: deque[Selection | None] = deque()
        self.browsers: dict[Hashable, int] = {}  # those that wait for a message with this number, or a later one
        self.outbox: Outbox | None = None  # for a queue that forwards, or has forwarded since the start
        self.transfers: Transfers | None = None  # for a transfer queue
        self.sessions: Sessions | None = None  # for the main part of an entity that requires sessions
        self.tally = Tally()
        self.accessed_ms = 0  # when clients last used the queue, since it was opened here; see `accesses`
        self.swept = b""  # expiry has looked at DUE keys below this; those that are left belong to locked messages
        # For a main part: the open queues that count for the entity's quota besides it; None if they must be looked up.
        self.counted_with: tuple[Queue, ...] | None = None
        self.deferrals: Deferrals | None = None  # for a main part with deferred messages that expire
        self.expiry_paused = False  # messages may have expired, but no receiver pulls: see expiry

    @property
    def forward_to(self) -> str:
        """The name, in lower case, of the entity that messages are forwarded to; empty if they stay."""
        return self.terms.forwards_to(self.part)

    @property
    def is_held_back(self) -> bool:
        """True if another partition may have taken messages over, and we do not know which."""
        return self.outbox is not None and not self.outbox.synced

    @property
    def is_pulled(self) -> bool:
        """True if a receiver has credit, here or on another partition, or waits for a session."""
        if self.line.is_pulled:
            return True
        if self.selections and any(selection.line.is_pulled for selection in self.selections.values()):
            return True
        return self.sessions is not None and bool(self.sessions.waiting)

    @property
    def is_in_use(self) -> bool:
        """True if somebody waits for messages, to receive them or to look at them."""
        return bool(self.browsers) or self.is_pulled

    @property
    def is_awaited(self) -> bool:
        """True if incoming messages will probably be read in the same turn."""
        return bool(self.line.waiting) or self.outbox is not None or bool(self.selections)

    def ready(self) -> int:
        """The number of available, unlocked messages. Some may be expired or unreadable, so fewer may be handed out."""
        if self.outbox is not None and self.is_held_back:
            return 0
        return self.counts[_AVAILABLE] - self.locks.available_locked()

    def line_of(self, receiver: Receiver) -> Line:
        """The line that the receiver stands in when it has credit."""
        selection = self.selections.get(receiver.selector.text) if receiver.selector is not None else None
        return self.line if selection is None else selection.line

    def enter(self, receiver: Receiver) -> None:
        """The receiver is open."""
        self.receivers[receiver.key] = receiver
        if receiver.selector is None or self.sessions is not None:
            return
        selection = self.selections.get(receiver.selector.text)
        if selection is None:
            selection = self.selections[receiver.selector.text] = Selection(receiver.selector)
            self.turns.extend([selection] if self.turns else [None, selection])
        selection.receivers += 1

    def leave(self, receiver: Receiver) -> None:
        """The receiver is closed."""
        self.line_of(receiver).leave(receiver)
        del self.receivers[receiver.key]
        if self.sessions is not None:
            self.sessions.waiting.pop(receiver.key, None)
        elif receiver.selector is not None:
            selection = self.selections[receiver.selector.text]
            selection.receivers -= 1
            if not selection.receivers:
                del self.selections[receiver.selector.text]
                self.turns.remove(selection)
                if not self.selections:
                    self.turns.clear()

    def forget(self, messages: Sequence[tuple[int, Overlay | None]]) -> None:
        """Available messages, (sequence number, overlay), leave the store: remove them from all windows.

        The overlay is None if the entry cannot be read.
        """
        if self.sessions is not None:
            self.sessions.forget(messages)
            if not self.window.active:
                return
        numbers = [number for number, _ in messages]
        self.window.remove(numbers)
        if self.transfers is not None:
            for lane in self.transfers.lanes.values():
                lane.window.remove(numbers)

    def encoded_counts(self) -> bytes:
        """Its record in COUNTS."""
        available, deferred, scheduled = self.counts
        return encode_counts((self.next_number, available, deferred, scheduled, self.size_bytes))

    def check(self) -> None:
        """Assert the invariants of a queue in memory between operations. Takes time in proportion to its state."""
        assert min(*self.counts, self.size_bytes) >= 0, "a count is negative"
        assert self.counts[Place.DEFERRED] >= len(self.locks.deferred)
        assert self.counts[Place.AVAILABLE] >= self.locks.available_locked(), "more is locked than there is"
        self.locks.check()
        self.window.check()
        locked = self.locks.numbers()
        windows = [self.window]
        if self.outbox is not None:
            self.outbox.check()
        if self.transfers is not None:
            for lane in self.transfers.lanes.values():
                lane.check()
                windows.append(lane.window)
        if self.sessions is not None:
            self.sessions.check()
            windows += [session.window for session in self.sessions.locked.values()]
        in_memory = [number for window in windows for number in window.numbers()]
        assert len(set(in_memory)) == len(in_memory), "a message is in two windows"
        assert locked.isdisjoint(in_memory), "a message can be handed out while it is locked or on its way"
