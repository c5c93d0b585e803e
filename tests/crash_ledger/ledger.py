"""The ledger: every accept and every confirmed settlement a client saw, and what a broker may do after them.

Pure: it is told what happened on the wire and remembers. A message's key is (sender, number); no message is sent twice.

A broker may lose what it never accepted, and deliver again what was never confirmed as settled. It may not

- lose an accepted message, or one whose dead-lettering was confirmed;
- deliver again what was confirmed as completed, or from the queue what was confirmed as dead-lettered (the end of its
  lock tells a delivery that was only a long time on its way);
- change a body, or deliver what was never sent;
- dead-letter what no receiver dead-lettered (the delivery limit must be out of reach);
- deliver first deliveries of one sender to one receiver in another order than they were sent;
- lock a message for two receivers at once.

The last two are judged only while no link is lost, and among messages sent in the present *epoch*. An epoch begins
after each kill, after each lost link, and when that link is there again. Until then the broker may not know that it was
lost, and hand messages to it; they may rightly come back late, or to another receiver while bytes of their first
delivery are still on their way.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

Key = tuple[int, int]


class Outcome(Enum):
    """What a receiver asks for. Only the first two end a message's stay in its queue."""

    COMPLETE = auto()
    DEAD_LETTER = auto()
    ABANDON = auto()


class Breach(Enum):
    LOST = "accepted, never confirmed as settled, gone"
    LOST_DEAD_LETTER = "confirmed as dead-lettered, not in the dead-letter queue"
    RESURRECTED = "delivered again after its settlement was confirmed"
    CORRUPT = "body differs from what was sent"
    UNKNOWN = "never sent"
    DEAD_LETTERED = "in the dead-letter queue though no receiver put it there"
    REORDERED = "first delivery after a later message of the same sender"
    LOCKED_TWICE = "delivered to a receiver while another held its lock"


@dataclass(frozen=True)
class Violation:
    breach: Breach
    key: Key | None
    detail: str = ""
    holder: str = ""  # the receiver that held the lock, of LOCKED_TWICE

    def __str__(self) -> str:
        name = f"message {self.key[1]} of sender {self.key[0]}: " if self.key else ""
        return f"{name}{self.breach.value}{f' ({self.detail})' if self.detail else ''}"


@dataclass(slots=True)
class Entry:
    """One message. `asked`: outcomes sent that were not refused, in any lock; `confirmed`: the one that was."""

    epoch: int
    accepted: bool = False
    refused: bool = False
    deliveries: int = 0
    dead_letter_deliveries: int = 0
    asked: list[Outcome] = field(default_factory=list)
    confirmed: Outcome | None = None
    finished: bool = False  # completed out of the dead-letter queue, confirmed
    holder: str | None = None
    locked_until_ms: int = 0  # the latest of its deliveries


@dataclass(frozen=True)
class Summary:
    sent: int
    accepted: int
    refused: int
    unanswered: int
    unanswered_delivered: int
    deliveries: int
    delivered_again: int
    judged: int  # deliveries whose order and lock were judged
    completed: int
    dead_lettered: int
    settled_unconfirmed: int
    settlements_refused: int
    late: int
    epochs: int
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        counts = Counter(violation.breach for violation in self.violations)
        lines = [
            f"sent {self.sent:,}: accepted {self.accepted:,}, refused {self.refused:,}, never answered "
            f"{self.unanswered:,} (of these {self.unanswered_delivered:,} delivered all the same)",
            f"deliveries {self.deliveries:,}, of these again {self.delivered_again:,}; judged by order and lock "
            f"{self.judged:,}",
            f"settlements confirmed: completed {self.completed:,}, dead-lettered {self.dead_lettered:,}",
            f"settlements refused (lock lost): {self.settlements_refused:,}",
            f"completed, no answer seen, not delivered again: {self.settled_unconfirmed:,}",
            f"read when a later delivery of the message was settled already: {self.late:,}",
            *(f"{breach.name.lower().replace('_', ' ')}: {counts[breach]:,}" for breach in Breach),
            *(str(violation) for violation in self.violations[:20]),
        ]
        return "\n".join(lines)


class Ledger:
    """Told of events in the order in which one client saw them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.outage = False  # something is being killed, or has not recovered yet
        self._lost_links = 0  # that are not there again
        self.judged = 0  # deliveries whose order and lock were judged
        self.deliveries = 0
        self.settlements_refused = 0
        self.late = 0  # deliveries that came after a later one of the same message was settled
        self.violations: list[Violation] = []
        self._entries: dict[Key, Entry] = {}
        self._highest: dict[tuple[str, int], int] = {}  # (receiver, sender) → number of the last first delivery

    def new_epoch(self) -> None:
        """A process was killed, or a link was lost: what was locked may be free again."""
        self.epoch += 1
        self._highest.clear()

    def link_lost(self, name: str = "") -> None:
        """The broker knew it first: by then it may have handed out to others what was locked by this receiver."""
        self.violations = [each for each in self.violations if not name or each.holder != name]
        self._lost_links += 1
        self.new_epoch()

    def link_back(self) -> None:
        """A lost link is there again."""
        self._lost_links -= 1
        self.new_epoch()

    def sent(self, key: Key) -> None:
        assert key not in self._entries, "a key is sent once"
        self._entries[key] = Entry(self.epoch)

    def epoch_of(self, key: Key) -> int:
        """In which a message was sent."""
        return self._entries[key].epoch

    def is_refused(self, key: Key) -> bool:
        return self._entries[key].refused

    def is_settled(self, key: Key) -> bool:
        """Confirmed as completed or dead-lettered."""
        return self._entries[key].confirmed is not None

    def accepted(self, key: Key) -> None:
        self._entries[key].accepted = True

    def refused(self, key: Key) -> None:
        """The broker answered with another outcome than accepted."""
        self._entries[key].refused = True

    def corrupt(self, detail: str) -> None:
        self.violations.append(Violation(Breach.CORRUPT, None, detail))

    def delivered(self, key: Key, receiver: str, locked_until_ms: int = 0, *, dead_letter: bool = False) -> bool:
        """`receiver` names one link; `dead_letter`: it came out of the dead-letter queue.

        A message has one lock at a time, so a delivery whose lock ends before that of another one was handed out before
        it. On a slow link it may come after the other one was settled.

        Returns whether this is the first delivery of the message.
        """
        entry = self._entries.get(key)
        if entry is None:
            self._breach(Breach.UNKNOWN, key)
            return False
        if dead_letter:
            self._delivered_dead_letter(entry, key)
            return False
        newest_ms = entry.locked_until_ms
        entry.locked_until_ms = max(newest_ms, locked_until_ms)
        if entry.confirmed is not None and locked_until_ms < newest_ms:
            self.late += 1
        elif entry.confirmed is not None:
            self._breach(Breach.RESURRECTED, key, f"confirmed {entry.confirmed.name}, sent in epoch {entry.epoch}")
        if entry.epoch == self.epoch and not self._lost_links:
            self.judged += 1
            if entry.holder is not None and entry.holder != receiver:
                self._breach(Breach.LOCKED_TWICE, key, holder=entry.holder)
            if not entry.deliveries:
                self._check_order(key, receiver)
        entry.deliveries += 1
        self.deliveries += 1
        entry.holder = receiver
        return entry.deliveries == 1

    def _delivered_dead_letter(self, entry: Entry, key: Key) -> None:
        if entry.finished:
            self._breach(Breach.RESURRECTED, key, "out of the dead-letter queue")
        elif Outcome.DEAD_LETTER not in entry.asked and entry.confirmed is not Outcome.DEAD_LETTER:
            self._breach(Breach.DEAD_LETTERED, key)
        entry.dead_letter_deliveries += 1

    def _check_order(self, key: Key, receiver: str) -> None:
        sender, number = key
        highest = self._highest.get((receiver, sender), -1)
        if number < highest:
            self._breach(Breach.REORDERED, key, f"after {highest}, receiver {receiver}")
        self._highest[receiver, sender] = max(highest, number)

    def settling(self, key: Key, outcome: Outcome) -> None:
        """An outcome was sent; the broker may have applied it even if no answer comes."""
        if (entry := self._entries.get(key)) is not None:
            entry.asked.append(outcome)
            if outcome is Outcome.ABANDON:
                entry.holder = None  # from here on the broker may give it to anybody

    def settled(self, key: Key, outcome: Outcome, *, dead_letter: bool = False) -> None:
        """The broker confirmed it."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if dead_letter:
            entry.finished = entry.finished or outcome is Outcome.COMPLETE
        elif outcome is not Outcome.ABANDON:
            entry.confirmed = outcome
        entry.holder = None

    def settlement_refused(self, key: Key, outcome: Outcome) -> None:
        """The broker answered that it did not apply it, for instance because the lock was lost.

        During an outage this excuses it: the process that was killed may have applied it before it could answer.
        """
        if (entry := self._entries.get(key)) is not None:
            if not self.outage:
                entry.asked.remove(outcome)
            entry.holder = None
            self.settlements_refused += 1

    def close(self, *, drained: bool = True) -> Summary:
        """If both queues were drained and every settlement answered, what is missing now is lost."""
        unconfirmed = 0
        for key, entry in self._entries.items() if drained else ():
            if entry.confirmed is Outcome.DEAD_LETTER and not entry.dead_letter_deliveries:
                self._breach(Breach.LOST_DEAD_LETTER, key)
            elif entry.accepted and entry.confirmed is None and not entry.finished:
                if Outcome.COMPLETE in entry.asked:
                    unconfirmed += 1
                else:
                    self._breach(Breach.LOST, key, f"{entry.deliveries} deliveries, sent in epoch {entry.epoch}")
        entries = self._entries.values()
        unanswered = [entry for entry in entries if not entry.accepted and not entry.refused]
        return Summary(
            sent=len(entries),
            accepted=sum(entry.accepted for entry in entries),
            refused=sum(entry.refused for entry in entries),
            unanswered=len(unanswered),
            unanswered_delivered=sum(bool(entry.deliveries) for entry in unanswered),
            deliveries=self.deliveries,
            delivered_again=self.deliveries - sum(bool(entry.deliveries) for entry in entries),
            judged=self.judged,
            completed=sum(entry.confirmed is Outcome.COMPLETE for entry in entries),
            dead_lettered=sum(entry.confirmed is Outcome.DEAD_LETTER for entry in entries),
            settled_unconfirmed=unconfirmed,
            settlements_refused=self.settlements_refused,
            late=self.late,
            epochs=self.epoch + 1,
            violations=tuple(self.violations),
        )

    def _breach(self, breach: Breach, key: Key, detail: str = "", holder: str = "") -> None:
        self.violations.append(Violation(breach, key, detail, holder))
