"""A queue with sessions as it must be: what test_session_model.py holds a partition against.

`orders` requires sessions; its dead-letter queue is a plain one; `inbox` is plain and forwards to it. The rules tell
this model what users do; `turn` is one turn of a worker, after which all that the partition did and shows must be what
the model has. Sessions come up in the order in which they became available, however small turns and steps are: each has
a rank of its own as a rule makes it available, and all that become so by what is due or forwarded in one turn have the
same. Where the order is the partition's own business the model looks: which of these comes first, what numbers dead
letters get, and whether expired messages have gone already.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from broker.errors import BrokerError, LockLost, NotAllowed, OperationTimeout, SessionLockLost
from broker.namespace.entities import QueueDescription
from broker.wire import Outcome
from protocol.codec import Described, Symbol, Timestamp, decode_exactly, encode
from protocol.message.intake import take_apart
from protocol.symbols import DELAY
from storage.records import Field, Place
from tests.partition.accounts import assert_counted_rightly
from tests.partition.driver import DEAD, MAIN, START_MS, define, deliveries
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import text
from tests.partition.turns import CountingStore

NEVER = 1 << 62
INBOX = 2 << 3
QUEUES = (MAIN, DEAD, INBOX)


class Orders(SessionDriver):
    """With the inbox."""

    def start(self) -> None:
        define(self.store, INBOX >> 3, QueueDescription(name="inbox", forward_to="orders"))
        self.store.commit()
        super().start()


@dataclass(frozen=True)
class Sent:
    """What a sender says of a message. With a session its partition key, if it has one, is the session."""

    body: str
    session: str | None = None
    ttl_ms: int | None = None
    scheduled_ms: int = 0
    message_id: str | None = None
    has_key: bool = False

    @property
    def identity(self) -> tuple[str | None, str | None]:
        key = (self.session if self.session is not None else "key") if self.has_key else None
        return self.message_id, key

    def incoming(self) -> list[Any]:
        annotations: dict[Symbol, Any] = {}
        if self.scheduled_ms:
            annotations[Symbol("x-opt-scheduled-enqueue-time")] = Timestamp(self.scheduled_ms)
        if self.has_key:
            annotations[Symbol("x-opt-partition-key")] = self.identity[1]
        sections = [
            Described(0x72, annotations),
            Described(0x73, [self.message_id] + [None] * 9 + [self.session]),
            Described(0x75, self.body.encode()),
        ]
        layout, body, _, extra = take_apart(b"".join(map(encode, sections)), want_message_id=True)
        return [layout, body, self.ttl_ms, extra]


@dataclass
class Message:
    sent: Sent
    number: int
    place: Place
    expires_ms: int
    ttl_ms: int | None
    count: int = 0
    properties: dict[str, Any] = field(default_factory=dict)
    first_number: int | None = None
    token: bytes | None = None  # locked
    until_ms: int = 0  # of a dead letter; else it is that of the session
    returns_ms: int | None = None  # scheduled because it was abandoned with a delay

    @property
    def body(self) -> str:
        return self.sent.body

    @property
    def session(self) -> str:
        assert self.sent.session is not None
        return self.sent.session


@dataclass
class Lock:
    receiver: str | None  # None: its connection broke, and the lock is kept
    until_ms: int
    unsent_from: bytes | None = None  # what has this token or a later one never reached the receiver


@dataclass
class Receiver:
    """Of a session, of none yet (it waits for one until `deadline_ms`), or of dead letters."""

    receive_and_delete: bool
    queue: int = MAIN
    session: str | None = None
    deadline_ms: int = 0
    limit: int = 0
    delivered: int = 0
    draining: bool = False

    @property
    def credit(self) -> int:
        return max(0, self.limit - self.delivered)

    @property
    def waits(self) -> bool:
        return self.queue == MAIN and self.session is None


@dataclass
class Transaction:
    """Its operations in order: ("send", queue, Sent), ("schedule", queue, numbers, [Sent]),
    ("settle", queue, tokens, outcome, properties, quiet), and ("state", queue, receiver, session, state).
    """

    key: str
    deadline_ms: int
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    sends: int = 0
    failed: bool = False
    timed_out: bool = False

    def settlements(self) -> list[tuple[Any, ...]]:
        return [operation[1:] for operation in self.operations if operation[0] == "settle"]


class SessionModel(RuleBasedStateMachine):
    driver: Orders

    def begin(self, driver: Orders, keep_locks: bool) -> None:
        self.driver = driver
        self.keep_locks = keep_locks
        self.queues: dict[int, list[Message]] = {queue: [] for queue in QUEUES}
        self.next_number = dict.fromkeys(QUEUES, 1)
        self.locks: dict[str, Lock] = {}
        self.receivers: dict[str, Receiver] = {}  # those that wait in the order in which they do
        self.states: dict[str, tuple[bytes, int]] = {}  # and when they were set
        self.ids: dict[tuple[str | None, str | None], tuple[int, int]] = {}  # end of the window, sequence number
        self.rank = 0
        self.in_turn = False
        self.ranks: dict[str, int] = {}  # sessions to be had; the lower the earlier they were
        self.latest: dict[str, int] = {}  # of these, those that may have gone with expired messages and come again
        self.moving: dict[str, Message] = {}  # dead-lettered in this turn
        self.gone: dict[str, str] = {}  # body: reason
        self.closing: dict[str, type[BrokerError]] = {}  # receivers that the partition closes in this turn, and why
        self.accepting: list[tuple[str, str]] = []  # receivers that have got the session they named, in this turn
        self.made = self.accepted = self.turns = self.ended_at = 0
        self.was_pulled = False  # after the last turn
        self.transactions: dict[str, Transaction] = {}
        self.forgotten: list[str] = []  # transactions that the partition lost when it was restarted
        self.tokens: list[tuple[int, bytes]] = []  # all that were ever given, with their queue
        self.removed: list[tuple[int, Message, list[Any]]] = []  # received and deleted: can be restored

    # -- what the model knows

    @property
    def now_ms(self) -> int:
        return self.driver.now_ms

    @property
    def terms(self) -> QueueDescription:
        return self.driver.description

    def can_send(self) -> bool:
        return self.terms.status in ("Active", "ReceiveDisabled")

    def can_receive(self) -> bool:
        return self.terms.status in ("Active", "SendDisabled")

    def pulling(self) -> bool:
        return any(r.waits or r.credit for r in self.receivers.values() if r.queue == MAIN)

    def lock_end(self, queue: int, m: Message) -> int:
        return m.until_ms if queue != MAIN else self.locks[m.session].until_ms

    def find(self, queue: int, token: bytes) -> Message | None:
        """The message that this token locks now."""
        m = next((m for m in self.queues[queue] if m.token == token), None)
        return m if m is not None and self.lock_end(queue, m) > self.now_ms else None

    def holds(self, name: str | None, session: str) -> bool:
        lock = self.locks.get(session)
        return name is not None and lock is not None and lock.receiver == name and lock.until_ms > self.now_ms

    def is_live(self, name: str | None) -> bool:
        """The receiver has a session, whose lock has not ended."""
        receiver = self.receivers.get(name or "")
        return receiver is not None and receiver.session is not None and self.holds(name, receiver.session)

    def locked(self, queue: int | None = None) -> list[tuple[int, Message]]:
        queues = QUEUES if queue is None else (queue,)
        return [(each, m) for each in queues for m in self.queues[each] if m.token is not None]

    def candidates(self) -> list[tuple[int, bytes]]:
        """Tokens to use: of locks held, and of some that are not."""
        return [(queue, m.token) for queue, m in self.locked() if m.token] + self.tokens[-2:]

    def staged(self, token: bytes) -> bool:
        open_ones = [each for each in self.transactions.values() if not each.timed_out]
        return any(token in tokens for each in open_ones for _, tokens, *_ in each.settlements())

    def refusal(
        self, queue: int, token: bytes, outcome: Outcome, properties: dict[str, Any] | None, asker: str | None
    ) -> type[BrokerError] | None:
        m = self.find(queue, token)
        if m is None:
            return SessionLockLost if queue == MAIN and asker is not None and not self.is_live(asker) else LockLost
        delays = properties is not None and DELAY in properties
        wrong_delay = delays and (
            outcome in (Outcome.DEFERRED, Outcome.DEAD_LETTERED)
            or (outcome == Outcome.ABANDONED and m.place == Place.DEFERRED)
        )
        is_dead = outcome == Outcome.DEAD_LETTERED and queue == DEAD
        return NotAllowed if self.staged(token) or is_dead or wrong_delay else None

    def expired(self, queue: int, m: Message) -> bool:
        return queue != DEAD and m.expires_ms <= self.now_ms

    def available(self, session: str) -> list[Message]:
        """Of the session, not locked; expired ones too, while they are there."""
        found = [m for m in self.queues[MAIN] if m.place == Place.AVAILABLE and m.token is None]
        return sorted((m for m in found if m.session == session), key=lambda m: m.number)

    def to_be_had(self) -> set[str]:
        """Sessions that are offered, some perhaps with nothing but expired messages."""
        free = (m for m in self.queues[MAIN] if m.place == Place.AVAILABLE and m.token is None)
        return {m.session for m in free} - self.locks.keys()

    # -- what happens to messages

    def come(self, session: str) -> None:
        """It is to be had, unless it is locked."""
        if session not in self.locks and session not in self.ranks:
            self.rank += not self.in_turn
            self.ranks[session] = self.rank

    def forget_ranks(self) -> None:
        """Of sessions that are locked, or have nothing any more."""
        there = self.to_be_had()
        self.ranks = {session: rank for session, rank in self.ranks.items() if session in there}
        self.latest = {session: rank for session, rank in self.latest.items() if session in there}

    def known(self, sent: Sent, number: int) -> int | None:
        """The sequence number of the message that this one repeats; None if it is new, and then has `number`."""
        if sent.message_id is None or not self.terms.requires_duplicate_detection:
            return None
        end_ms, first = self.ids.get(sent.identity, (0, 0))
        if end_ms > self.now_ms:
            return first
        window_ms = self.terms.duplicate_detection_history_time_window_ms
        self.ids[sent.identity] = (self.now_ms + window_ms, number)
        return None

    def accept(self, queue: int, sent: Sent, reserved: int | None = None) -> int:
        """Sent to the queue; its sequence number, or that of the message it repeats."""
        number = self.next_number[queue] if reserved is None else reserved
        self.accepted += 1
        known = self.known(sent, number) if queue == MAIN else None
        if known is not None:
            self.gone[sent.body] = "repeated"
            return known
        limits = [sent.ttl_ms, self.terms.default_message_time_to_live_ms if queue == MAIN else None]
        ttl_ms = min((limit for limit in limits if limit is not None), default=None)
        waits = sent.scheduled_ms > self.now_ms or reserved is not None
        self.next_number[queue] = max(self.next_number[queue], number + 1)
        expires_ms = NEVER if ttl_ms is None or waits else self.now_ms + ttl_ms
        place = Place.SCHEDULED if waits else Place.AVAILABLE
        self.queues[queue].append(Message(sent, number, place, expires_ms, ttl_ms))
        if queue == MAIN and place == Place.AVAILABLE and sent.session is not None:
            self.come(sent.session)
        return number

    def leave(self, queue: int, m: Message, reason: str) -> None:
        self.queues[queue].remove(m)
        self.gone[m.body] = reason

    def dead_letter(self, queue: int, m: Message, properties: dict[str, Any] | None) -> None:
        self.queues[queue].remove(m)
        m.properties = m.properties | (properties or {})
        m.first_number = m.first_number or m.number
        m.place, m.token = Place.AVAILABLE, None
        self.moving[m.body] = m

    def fail(self, queue: int, m: Message, properties: dict[str, Any] | None = None) -> None:
        properties = dict(properties or {})
        delay_ms = decode_exactly(properties.pop(DELAY)) if DELAY in properties else 0
        if self.stays(queue, m, properties) and delay_ms and not self.expired(queue, m):
            m.place = Place.SCHEDULED
            m.returns_ms = min(self.now_ms + delay_ms, NEVER if queue == DEAD else m.expires_ms)

    def stays(self, queue: int, m: Message, properties: dict[str, Any] | None) -> bool:
        """A delivery more has ended. False if it was the last one: then the message is dead-lettered."""
        m.token = None
        m.count += queue != DEAD
        m.properties = m.properties | (properties or {})
        limit = self.terms.max_delivery_count
        if queue != MAIN or m.count < limit:
            return True
        reason = f"Message could not be consumed after {limit} delivery attempts."
        properties = {"DeadLetterReason": "MaxDeliveryCountExceeded", "DeadLetterErrorDescription": reason}
        self.dead_letter(MAIN, m, properties)
        return False

    def settled(self, queue: int, m: Message, outcome: Outcome, properties: dict[str, Any] | None) -> None:
        match outcome:
            case Outcome.ACCEPTED:
                self.leave(queue, m, "completed")
            case Outcome.ABANDONED:
                self.fail(queue, m, properties)
            case Outcome.RELEASED:
                m.token = None
            case Outcome.DEFERRED:
                if self.stays(queue, m, properties):
                    m.place = Place.DEFERRED
            case Outcome.DEAD_LETTERED:
                self.dead_letter(queue, m, properties)

    def expire(self, m: Message) -> None:
        if m.place == Place.AVAILABLE:
            self.latest[m.session] = self.rank
        if not self.terms.dead_lettering_on_message_expiration:
            self.leave(MAIN, m, "expired")
            return
        reason = "The message expired and was dead lettered."
        properties = {"DeadLetterReason": "TTLExpiredException", "DeadLetterErrorDescription": reason}
        self.dead_letter(MAIN, m, properties)

    # -- what happens to locks and transactions

    def release(self, session: str, failed: bool) -> None:
        """The lock of the session ends."""
        lock = self.locks.pop(session)
        for _, m in self.locked(MAIN):
            if m.session == session:
                assert m.token is not None
                if failed and (lock.unsent_from is None or m.token < lock.unsent_from):
                    self.fail(MAIN, m)
                else:
                    m.token = None
        if self.available(session):
            self.come(session)

    def lose(self, session: str) -> None:
        """It ran out."""
        receiver = self.locks[session].receiver
        if receiver is not None:
            self.close(receiver, SessionLockLost)
        self.release(session, failed=True)

    def close(self, name: str, reason: type[BrokerError]) -> None:
        """By the partition."""
        del self.receivers[name]
        self.closing[name] = reason

    def rolled_back(self, transaction: Transaction) -> None:
        """What the client has forgotten comes again."""
        for queue, tokens, _, _, quiet in transaction.settlements():
            for m in [m for m in self.queues[queue] if m.token in tokens and quiet]:
                self.fail(queue, m)

    def commit(self, transaction: Transaction) -> None:
        for kind, queue, *operation in transaction.operations:
            if kind == "send":
                self.accept(queue, operation[0])
            elif kind == "schedule":
                for number, sent in zip(*operation, strict=True):
                    self.accept(queue, sent, number)
            elif kind == "state":
                _, session, state = operation
                self.keep_state(session, state)
            else:
                tokens, outcome, properties, _ = operation
                for token in tokens:
                    m = self.find(queue, token)
                    assert m is not None
                    self.settled(queue, m, outcome, properties)

    def keep_state(self, session: str, state: bytes | None) -> None:
        self.states.pop(session, None)
        if state:
            self.states[session] = (state, self.now_ms)

    # -- one turn of a worker, and what it must have done

    def turn(self) -> None:
        driver = self.driver
        self.turns += 1
        pulled = self.was_pulled or self.pulling()
        self.forget_ranks()
        self.rank += 1
        self.in_turn = True
        self.time_passed()
        while (due_ms := driver.partition.next_timer_ms()) is not None and due_ms <= self.now_ms:
            driver.partition.advance(self.now_ms)
        given: list[tuple[Any, int, list[Any]]] = []
        accepted: list[tuple[Any, str, int]] = []
        closed: list[tuple[Any, BrokerError]] = []
        drained: dict[Any, int] = {}
        more = True
        while more:
            if isinstance(driver.store, CountingStore):
                driver.store.begin()
            pumped = driver.partition.pump(self.now_ms)
            if isinstance(driver.store, CountingStore):
                driver.store.check(driver.settings, sum(len(deliveries(items)) for _, _, items in pumped.deliveries))
            driver.partition.commit()
            given += pumped.deliveries
            accepted += pumped.accepted
            closed += pumped.closed
            drained |= dict(pumped.drained)
            more = pumped.more
        overdue = self.end_waits({name for name, _, _ in accepted})
        assert {name: type(error) for name, error in closed} == self.closing
        self.closing.clear()
        self.forward()
        shown = {queue: driver.peek(queue, count=1000) for queue in QUEUES}
        self.look_for_expired(pulled or self.pulling(), {text(each.body) for each in shown[MAIN]})
        self.look_for_dead_letters(given, shown)
        self.check_accepted(accepted, overdue)
        self.check_deliveries(given)
        assert drained == {name: r.delivered for name, r in self.receivers.items() if r.draining}
        for r in self.receivers.values():
            if r.draining:
                r.draining, r.limit = False, r.delivered
        if self.pulling():
            assert not [m for m in self.queues[MAIN] if self.may_go(m)]
        self.was_pulled = self.pulling()
        self.in_turn = False
        self.compare(shown)

    def time_passed(self) -> None:
        for transaction in self.transactions.values():
            if transaction.deadline_ms <= self.now_ms and not transaction.timed_out:
                self.rolled_back(transaction)
                transaction.timed_out = True
        for session in [session for session, lock in self.locks.items() if lock.until_ms <= self.now_ms]:
            self.lose(session)
        for _, m in self.locked(DEAD):
            if m.until_ms <= self.now_ms:
                self.fail(DEAD, m)
        for queue in (MAIN, DEAD):
            for m in self.queues[queue]:
                if m.returns_ms is not None and m.returns_ms <= self.now_ms:
                    m.place, m.returns_ms = Place.AVAILABLE, None
                    if queue == MAIN:
                        self.come(m.session)
        for queue in (MAIN, INBOX):
            waiting = [m for m in self.queues[queue] if m.place == Place.SCHEDULED and m.returns_ms is None]
            due = [m for m in waiting if m.sent.scheduled_ms <= self.now_ms]
            for m in sorted(due, key=lambda m: (m.sent.scheduled_ms, m.number)):
                m.first_number, m.number = m.number, self.next_number[queue]
                self.next_number[queue] += 1
                m.place = Place.AVAILABLE
                m.expires_ms = NEVER if m.ttl_ms is None else self.now_ms + m.ttl_ms

    def forward(self) -> None:
        """What the inbox has available is in the queue now."""
        ttl_ms = self.terms.default_message_time_to_live_ms
        for m in sorted(self.queues[INBOX], key=lambda m: m.number):
            if m.place != Place.AVAILABLE:
                continue
            if self.expired(INBOX, m):
                self.leave(INBOX, m, "expired")
            elif not self.can_send():
                self.leave(INBOX, m, "could not be forwarded")
            elif m.sent.session is None:
                self.leave(INBOX, m, "has no session")
            elif self.known(m.sent, self.next_number[MAIN]) is not None:
                self.leave(INBOX, m, "repeated")
            else:
                self.queues[INBOX].remove(m)
                m.first_number = m.first_number or m.number
                m.number = self.next_number[MAIN]
                self.next_number[MAIN] += 1
                m.expires_ms = min(m.expires_ms, NEVER if ttl_ms is None else self.now_ms + ttl_ms)
                self.queues[MAIN].append(m)

    def may_go(self, m: Message) -> bool:
        if m.place == Place.DEFERRED and not self.terms.dead_lettering_on_message_expiration:
            return False
        return m.place != Place.SCHEDULED and m.token is None and m.expires_ms <= self.now_ms

    def look_for_expired(self, pulled: bool, in_main: set[str]) -> None:
        for m in [m for m in self.queues[MAIN] if self.may_go(m)]:
            if not self.terms.dead_lettering_on_message_expiration:
                assert m.body not in in_main
                self.expire(m)
            elif m.body not in in_main:
                assert pulled
                self.expire(m)

    def look_for_dead_letters(self, given, shown) -> None:
        """Those of this turn get their numbers."""
        arrived = {each.number: text(each.body) for each in shown[DEAD]}
        for receiver, _, items in given:
            if self.receivers[receiver].queue == DEAD:
                arrived |= {each.number: text(each.body) for each in deliveries(items)}
        for number in sorted(number for number in arrived if number >= self.next_number[DEAD]):
            assert number == self.next_number[DEAD]
            self.next_number[DEAD] += 1
            m = self.moving.pop(arrived[number])
            m.number, m.expires_ms = number, NEVER
            self.queues[DEAD].append(m)
        assert not self.moving

    def end_waits(self, accepted: set[str]) -> bool:
        """True if somebody waited for a session in vain."""
        waiting = [name for name, r in self.receivers.items() if r.waits and r.deadline_ms <= self.now_ms]
        overdue = [name for name in waiting if name not in accepted]
        for name in overdue:
            self.close(name, OperationTimeout)
        return bool(overdue)

    def check_accepted(self, accepted: list[tuple[str, str, int]], overdue: bool) -> None:
        """Those who named one got it; those who wait got, one after the other, what could be had for the longest.

        Who waited in vain may have gone before a session became available by what else was due in the same turn.
        """
        until_ms = self.now_ms + self.terms.lock_duration_ms
        assert [*accepted[: len(self.accepting)]] == [(*each, until_ms) for each in self.accepting]
        self.forget_ranks()
        there = self.to_be_had()
        for session in there:
            self.come(session)
        latest = self.ranks | self.latest
        live = {session for session in there if not all(self.expired(MAIN, m) for m in self.available(session))}
        waiting = [name for name, r in self.receivers.items() if r.waits]
        for name, session, until in accepted[len(self.accepting) :]:
            assert (name, until) == (waiting.pop(0), until_ms)
            assert session in live
            assert all(self.ranks[session] <= latest[each] for each in live)
            live.discard(session)
            del self.ranks[session], latest[session]
            self.latest.pop(session, None)
            self.receivers[name].session = session
            self.locks[session] = Lock(name, until)
        assert not (waiting and live)
        assert not (overdue and any(latest[session] < self.rank for session in live))
        self.accepting.clear()

    def check_deliveries(self, given: list[tuple[str, int, list[Any]]]) -> None:
        expected: dict[str, list[Message]] = {}
        for name, r in self.receivers.items():
            ready: list[Message] = []
            if r.queue == DEAD:
                ready = [m for m in self.queues[DEAD] if m.place == Place.AVAILABLE and m.token is None]
            elif r.session is not None:
                ready = [m for m in self.available(r.session) if not self.expired(MAIN, m)]
            expected[name] = sorted(ready, key=lambda m: m.number)[: r.credit]
        for name, until_ms, items in given:
            r = self.receivers[name]
            for at, each in enumerate(deliveries(items)):
                m = expected[name].pop(0)
                assert (each.number, text(each.body), each.delivery_count) == (m.number, m.body, m.count)
                assert each.properties == m.properties
                assert each.token not in [token for _, token in self.tokens]
                self.tokens.append((r.queue, each.token))
                r.delivered += 1
                if r.receive_and_delete:
                    assert until_ms == 0
                    self.leave(r.queue, m, "received and deleted")
                    self.removed.append((r.queue, m, items[at * 5 : at * 5 + 5]))
                    continue
                m.token = each.token
                m.until_ms = self.now_ms + self.terms.lock_duration_ms
                assert until_ms == self.lock_end(r.queue, m)
        assert not any(expected.values())

    def compare(self, shown) -> None:
        for queue, found in shown.items():
            expected = sorted(self.queues[queue], key=lambda m: m.number)
            source = "orders" if queue == DEAD else None
            assert [
                (
                    each.number,
                    each.token,
                    text(each.body),
                    each.delivery_count,
                    each.properties,
                    each.overlay.get(Field.ENQUEUE_SEQUENCE_NUMBER),
                    each.overlay.get(Field.DEAD_LETTER_SOURCE),
                    each.overlay.get(Field.RETURNS_MS),
                )
                for each in found
            ] == [
                (m.number, m.place, m.body, m.count, m.properties, m.first_number, source, m.returns_ms)
                for m in expected
            ]
            by_place = [sum(1 for m in expected if m.place == place) for place in Place]
            assert self.driver.held(queue) == [*by_place, sum(1 for m in expected if m.token is not None)]
            highest = max((m.number for m in expected), default=0)
            assert highest < self.driver.stored_counts(queue).next_sequence_number <= self.next_number[queue]
        listed = sorted((m.place, m.session, m.number) for m in self.queues[MAIN])
        assert self.driver.listed() == listed
        with_messages = {session for place, session, _ in listed if place == Place.AVAILABLE}
        assert self.sessions(None) == by_key(with_messages | self.states.keys())
        assert self.sessions(START_MS) == by_key(each for each, (_, ms) in self.states.items() if ms > START_MS)
        for session in sorted({session for _, session, _ in listed})[:1]:
            items = self.driver.request("peek-session", session, 0, 1000, 1 << 20)
            numbers = [number for _, each, number in listed if each == session]
            assert [each.number for each in deliveries(items)] == sorted(numbers)
        held = [m.body for queue in self.queues.values() for m in queue]
        assert len(held) == len(set(held))
        assert not set(held) & self.gone.keys()
        assert len(held) + len(self.gone) == self.accepted
        assert_counted_rightly(self.driver.partition, self.driver.store, self.now_ms)

    def sessions(self, after_ms: int | None) -> list[str]:
        found: list[str] = self.driver.request("get-message-sessions", after_ms, 0, 1000)
        return found


def by_key(sessions) -> list[str]:
    """In the order in which the partition lists them."""
    return sorted(sessions, key=lambda session: (len(session.encode()), session.encode()))
