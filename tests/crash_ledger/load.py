"""Senders and receivers on one queue, in one loop of one thread, that reconnect for ever and write the ledger.

One turn: read every socket that has something; write deliveries into the ledger at once and confirmations only after
all sockets were read. So a delivery that was on its way before another receiver's confirmation is never taken for
one after it.
"""

import random
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from proton import Delivery

from tests.crash_ledger import bodies
from tests.crash_ledger.ledger import Key, Ledger, Outcome
from tests.crash_ledger.links import LinkLost, Login, Peer, Receiver, Sender

RECONNECT_AFTER_S = 0.05
RESEND_AFTER_S = 0.05
ATTACH_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 120.0
BROKEN_BY_US = "broken by the test"


@dataclass(frozen=True)
class Mix:
    """What the load does. Shares are of deliveries; the rest is completed at once."""

    senders: int = 2
    receivers: int = 3
    window: int = 100  # unanswered sends of a sender, credit of a receiver
    most_waiting: int = 3000  # messages in the queue above which senders pause
    rate_per_s: float | None = None  # of all senders; None: as fast as this program can
    dead_letter: float = 0.02
    abandon: float = 0.05
    hold: float = 0.2  # locked for up to `hold_s`, then settled like the others
    hold_s: float = 0.2
    has_keys: bool = False  # each sender has a partition key for its messages, so their order holds


@dataclass
class Slot:
    """A place for a link, which is opened again whenever it is lost."""

    name: str
    open: Callable[[str], Peer]
    peer: Peer | None = None
    not_before: float = 0.0
    send_after: float = 0.0  # a sender that was refused pauses, as clients do that are told to come back later
    opened: int = 0
    since: float = 0.0
    is_lost: bool = False  # and not attached again; the ledger knows


@dataclass
class Held:
    """A delivery that will be settled later, if its link lives until then."""

    due: float
    receiver: Receiver
    delivery: Delivery
    key: Key
    outcome: Outcome


@dataclass
class Load:
    """`latencies_ms`: send to first delivery. `lost_links`: why links ended, in order."""

    login: Login
    queue: str
    ledger: Ledger
    mix: Mix = field(default_factory=Mix)
    seed: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    lost_links: list[str] = field(default_factory=list)
    accepted: int = 0
    gone: int = 0  # confirmed as completed or dead-lettered
    sending: bool = True

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._selector = selectors.DefaultSelector()
        self._next_number = [0] * self.mix.senders
        self._senders = [Slot(f"sender-{n}", partial(self._open_sender, n)) for n in range(self.mix.senders)]
        self._receivers = [Slot(f"receiver-{n}", self._open_receiver) for n in range(self.mix.receivers)]
        self._slots = [*self._receivers, *self._senders]
        self._confirmed: list[tuple[Key, Outcome, bool]] = []
        self._held: deque[Held] = deque()
        self._dead_letter = False
        self._accepted_in = -1  # the epoch in which the message accepted last was sent
        self._doubtful: set[Key] = set()  # settled, but whether the broker did it will not be known
        self._began = time.monotonic()
        self._sent = 0
        self._last_delivery = 0.0

    # --- the loop

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Work for so long, or until `until()` is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self._turn()

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S, quiet_s: float = 1.0) -> None:
        """Stop sending; receive and complete until both queues are empty and everything is answered.

        A message that was handed to a lost link may come later. `quiet_s` is longer than the broker takes to notice.

        Silence alone would not tell an empty queue from a broker that does not deliver, so a last message must
        come through it. Raises TimeoutError.
        """
        self.sending = False
        self._until_quiet(timeout_s, quiet_s)
        self._send_one_through(timeout_s)
        self._until_quiet(timeout_s, 1.0)
        self._close(self._slots)
        self._dead_letter = True
        self._slots = [Slot("dead-letter-receiver", self._open_receiver)]
        self._until_quiet(timeout_s, 1.0)
        self._close(self._slots)
        self._selector.close()

    def drained(self, problems: list[str]) -> bool:
        """As `drain`; False if it took too long, which is added to the problems."""
        try:
            self.drain()
        except TimeoutError as timeout:
            problems.append(str(timeout))
            return False
        return True

    def all_attached(self) -> bool:
        return all(slot.peer is not None and slot.peer.attached for slot in self._slots)

    def add_receiver(self) -> None:
        slot = Slot(f"receiver-{len(self._receivers)}", self._open_receiver)
        self._receivers.append(slot)
        self._slots.append(slot)

    def break_a_connection(self) -> None:
        """Close one at random without a word, whatever it has locked or sent; it is opened again shortly."""
        connected = [slot for slot in self._slots if slot.peer is not None]
        if connected:
            self._lose(self._chance.choice(connected), BROKEN_BY_US)

    def serves(self) -> bool:
        """Every link is attached, and a message sent since the last kill or lost link was accepted."""
        return self.all_attached() and self._accepted_in == self.ledger.epoch

    def waiting(self) -> int:
        """Accepted and not yet settled, as far as this side knows."""
        return self.accepted - self.gone - len(self._doubtful)

    def all_lost(self) -> bool:
        """All that the ended connections held was read. Until the broker listens again, no new ones can be made."""
        return all(slot.peer is None for slot in self._slots)

    def new_epoch(self) -> None:
        """Call once a process is dead."""
        self.ledger.new_epoch()

    def _until_quiet(self, timeout_s: float, quiet_s: float) -> None:
        """Nothing has come for `quiet_s`, and the broker says to each receiver that there is nothing."""
        end = time.monotonic() + timeout_s
        self._last_delivery = time.monotonic()
        while not (self._is_quiet(quiet_s) and self._is_empty(end, timeout_s)):
            self._turn_before(end, timeout_s)

    def _is_quiet(self, quiet_s: float) -> bool:
        """Silence counts from when all links are there."""
        if not self.all_attached():
            self._last_delivery = time.monotonic()
        return time.monotonic() - self._last_delivery >= quiet_s and not self._unanswered()

    def _is_empty(self, end: float, timeout_s: float) -> bool:
        """Drain all receivers: silence may be a disk that takes seconds for a write."""
        before, receivers = self._last_delivery, self._receiving()
        for receiver in receivers:
            receiver.drain()
        while self.all_attached() and not all(receiver.is_drained for receiver in receivers):
            self._turn_before(end, timeout_s)
        now = self._receiving()
        for receiver in now:
            receiver.go_on()
        return now == receivers and self.all_attached() and self._last_delivery == before

    def _receiving(self) -> list[Receiver]:
        return [slot.peer for slot in self._slots if isinstance(slot.peer, Receiver)]

    def _turn_before(self, end: float, timeout_s: float) -> None:
        self._turn()
        if time.monotonic() > end:
            raise TimeoutError(f"not drained after {timeout_s:.0f} s; {self._unanswered()} answers are missing")

    def _send_one_through(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        key: Key | None = None
        while key is None or not self.ledger.is_settled(key):
            if key is None or self.ledger.is_refused(key):
                key = self._send_one()
            self._turn()
            if time.monotonic() > end:
                raise TimeoutError(f"not drained: a last message was not delivered in {timeout_s:.0f} s")

    def _send_one(self) -> Key | None:
        """None when no sender has credit."""
        for number, slot in enumerate(self._senders):
            if isinstance(slot.peer, Sender) and slot.peer.credit > 0 and time.monotonic() >= slot.send_after:
                return self._send(number, slot.peer)
        return None

    def _unanswered(self) -> int:
        peers = [slot.peer for slot in self._slots]
        sends = sum(peer.unanswered for peer in peers if isinstance(peer, Sender))
        return sends + sum(len(peer.unconfirmed) for peer in peers if isinstance(peer, Receiver)) + len(self._held)

    def _turn(self) -> None:
        self._reconnect()
        for key, _ in self._selector.select(0.002):
            slot: Slot = key.data
            if slot.peer is not None:
                self._try(slot, slot.peer.read)
        for message, outcome, applied in self._confirmed:
            if applied:
                self.ledger.settled(message, outcome, dead_letter=self._dead_letter)
                self.gone += outcome is not Outcome.ABANDON
            else:
                self.ledger.settlement_refused(message, outcome)
                self._doubtful.add(message)
        self._confirmed.clear()
        self._settle_held()
        self._pump()
        for slot in self._slots:
            if slot.peer is not None:
                self._try(slot, slot.peer.write)

    # --- links

    def _reconnect(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.peer is None and now >= slot.not_before:
                slot.opened += 1
                slot.since = now
                try:
                    slot.peer = slot.open(f"{slot.name}-{slot.opened}")
                except LinkLost:
                    slot.not_before = now + RECONNECT_AFTER_S
                else:
                    self._selector.register(slot.peer.socket, selectors.EVENT_READ, slot)
            elif slot.peer is not None and not slot.peer.attached and now - slot.since > ATTACH_TIMEOUT_S:
                self._lose(slot, "not attached in time")
            elif slot.peer is not None and slot.peer.attached and slot.is_lost:
                slot.is_lost = False
                self.ledger.link_back()

    def _open_sender(self, number: int, name: str) -> Peer:
        key = f"sender-{number}" if self.mix.has_keys else None
        return Sender(self.login, name, self.queue, self._answered, key)

    def _open_receiver(self, name: str) -> Peer:
        address = f"{self.queue}/$deadletterqueue" if self._dead_letter else self.queue
        return Receiver(self.login, name, address, self.mix.window, self._delivered, self._on_confirmed)

    def _try(self, slot: Slot, action: Callable[[], None]) -> None:
        try:
            action()
        except LinkLost as lost:
            self._lose(slot, str(lost))

    def _lose(self, slot: Slot, reason: str) -> None:
        assert slot.peer is not None
        name = slot.peer.name
        self.lost_links.append(f"{slot.name}: {reason}")
        self._close([slot])
        slot.not_before = time.monotonic() + RECONNECT_AFTER_S
        if not slot.is_lost:
            slot.is_lost = True
            self.ledger.link_lost(name)

    def _close(self, slots: list[Slot]) -> None:
        for slot in slots:
            if (peer := slot.peer) is not None:
                self._selector.unregister(peer.socket)
                peer.close()
                slot.peer = None
                if isinstance(peer, Receiver):
                    self._doubtful |= peer.unconfirmed
                self._held = deque(held for held in self._held if held.receiver is not peer)

    # --- sending

    def _pump(self) -> None:
        if not self.sending:
            return
        budget = self._budget()
        now = time.monotonic()
        order = list(enumerate(self._senders))
        self._chance.shuffle(order)  # or the first would take all of a small budget
        for number, slot in order:
            sender = slot.peer
            if not isinstance(sender, Sender) or now < slot.send_after:
                continue
            while budget > 0 and sender.credit > 0 and sender.unanswered < self.mix.window:
                self._send(number, sender)
                budget -= 1

    def _send(self, number: int, sender: Sender) -> Key:
        key = (number, self._next_number[number])
        self._next_number[number] += 1
        self.ledger.sent(key)
        sender.send(key, bodies.make(key, time.monotonic_ns()))
        self._sent += 1
        return key

    def _budget(self) -> float:
        """Messages that may be sent now."""
        room = self.mix.most_waiting - self.waiting()
        if self.mix.rate_per_s is None:
            return min(room, 50)  # so that one turn stays short
        due = (time.monotonic() - self._began) * self.mix.rate_per_s - self._sent
        if due > self.mix.rate_per_s:  # after a pause: do not catch up
            self._began = time.monotonic() - self._sent / self.mix.rate_per_s
        return min(room, due)

    def _answered(self, key: Key, accepted: bool) -> None:
        if accepted:
            self.ledger.accepted(key)
            self.accepted += 1
            self._accepted_in = self.ledger.epoch_of(key)
        else:
            self.ledger.refused(key)
            self._senders[key[0]].send_after = time.monotonic() + RESEND_AFTER_S

    # --- receiving

    def _delivered(self, receiver: Receiver, delivery: Delivery, body: bytes) -> None:
        now = time.monotonic()
        self._last_delivery = now
        try:
            key, sent_ns = bodies.read(body)
        except bodies.Damaged as damage:
            self.ledger.corrupt(str(damage))
            return
        if self.ledger.delivered(key, receiver.name, delivery.locked_until_ms, dead_letter=self._dead_letter):
            self.latencies_ms.append((time.monotonic_ns() - sent_ns) / 1e6)
        self._doubtful.discard(key)
        outcome = self._choose()
        if self.sending and self._chance.random() < self.mix.hold:
            due = now + self._chance.random() * self.mix.hold_s
            self._held.append(Held(due, receiver, delivery, key, outcome))
        else:
            self._settle(receiver, delivery, key, outcome)

    def _choose(self) -> Outcome:
        if not self.sending:
            return Outcome.COMPLETE
        throw = self._chance.random()
        if throw < self.mix.dead_letter:
            return Outcome.DEAD_LETTER
        return Outcome.ABANDON if throw < self.mix.dead_letter + self.mix.abandon else Outcome.COMPLETE

    def _settle(self, receiver: Receiver, delivery: Delivery, key: Key, outcome: Outcome) -> None:
        self.ledger.settling(key, outcome)
        receiver.settle(delivery, key, outcome)

    def _settle_held(self) -> None:
        now = time.monotonic()
        later: deque[Held] = deque()
        for held in self._held:
            if held.due <= now or not self.sending:
                self._settle(held.receiver, held.delivery, held.key, held.outcome)
            else:
                later.append(held)
        self._held = later

    def _on_confirmed(self, key: Key, outcome: Outcome, applied: bool) -> None:
        self._confirmed.append((key, outcome, applied))
