"""The partition against a plain model: random operations, clock steps, changes and restarts.

After each step everything is compared: what each queue shows, its counts in memory and on disk, and every delivery.
Where the order of the partition's own work is its own business, the model looks: an expired message may have gone or
not, within what is promised, and dead-lettered messages get whatever next number.
"""

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker import requests
from broker.errors import (
    BrokerError,
    EntityDisabled,
    InvalidArgument,
    LockLost,
    MessageNotFound,
    NotAllowed,
    OutOfRange,
    QuotaExceeded,
    TransactionRollback,
    TransactionTimeout,
)
from broker.partition.settings import PartitionSettings
from broker.partition.transactions import MAX_MESSAGES
from broker.runs import ranges_of
from broker.wire import TRANSACTION_TIME_OUT_MS, Extra, Operation, Outcome, SendOperation, SettleOperation
from protocol.bounds import MAX_DELAY_MS
from protocol.codec import Decimal64, Int, Long, Timestamp, UInt, ULong, encode
from protocol.symbols import DELAY
from storage.records import MESSAGE_HEADER_BYTES, Field, Place
from tests.models import STRAY, model_settings, rarely
from tests.partition.accounts import assert_counted_rightly
from tests.partition.driver import DEAD, FEW_IDS, LOCK_MS, MAIN, Driver, deliveries, message
from tests.partition.turns import CountingStore

NEVER = 1 << 62
QUEUES = st.sampled_from([MAIN, MAIN, MAIN, DEAD])
RECEIVERS = st.sampled_from("wxyz")
TTLS = st.sampled_from([None] * 6 + [0, 40, 500, LOCK_MS + 100])
PICK = st.integers(0, 12)
IDS = st.sampled_from([None, None, None, "a", "b", "c"])
PADDING = ["", "", "", "x" * 400, "x" * 900]  # so that turns end in the middle of what was read
# Abandoned with a delay: what clients may send, and what is refused.
DELAYS: list[Any] = [0, UInt(30), Int(1), 40, Long(500), 60.0, LOCK_MS + 50.0, MAX_DELAY_MS]
BEYOND: list[Any] = [-1, Long(MAX_DELAY_MS + 1), Long(2**63 - 1), ULong(2**64 - 1), Long(-(2**63)), 1e308, -1e-3 * 1000]
NO_DELAYS: list[Any] = [None, True, "30", 0.5, float("nan"), float("inf"), b"30", Timestamp(30), Decimal64(bytes(8))]
MAYBE_DELAYS = st.sampled_from([None] * 24 + [encode(each) for each in DELAYS * 2 + BEYOND + NO_DELAYS])
DELAY_MS = {encode(each): int(each) for each in DELAYS}
WRONG_DELAYS: dict[bytes, type[BrokerError]] = {
    **{encode(each): OutOfRange for each in BEYOND},
    **{encode(each): InvalidArgument for each in NO_DELAYS},
}


def some(place: Place):
    """A rule that wants messages in this place."""
    return precondition(lambda self: any(m.place == place for queue in self.queues.values() for m in queue))


some_locked = precondition(lambda self: self.locked())
some_receiver = precondition(lambda self: self.receivers)


@dataclass
class Message:
    body: str
    number: int
    place: Place
    enqueued_ms: int
    expires_ms: int = NEVER
    ttl_ms: int | None = None
    scheduled_ms: int = 0
    count: int = 0
    properties: dict[str, Any] = field(default_factory=dict)
    first_number: int | None = None
    token: bytes | None = None  # locked
    until_ms: int = 0
    owner: str | None = None
    delayed: bool = False  # scheduled because it was abandoned with a delay


@dataclass
class Receiver:
    queue: int
    receive_and_delete: bool
    limit: int = 0
    delivered: int = 0
    draining: bool = False

    @property
    def credit(self) -> int:
        return max(0, self.limit - self.delivered)


@dataclass
class Transaction:
    """Operations in order: what is sent as (body, ttl, wait until, message id, number that was told, or None), what is
    settled as its arguments, what is cancelled by its number.
    """

    key: str
    deadline_ms: int
    sends: int = 0
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    timed_out: bool = False

    def settles(self, token: bytes | None) -> bool:
        return not self.timed_out and any(
            kind == "settle" and token == operation[1] for kind, *operation in self.operations
        )


class PartitionModel(RuleBasedStateMachine):
    store_class: type[CountingStore] = CountingStore

    @initialize(
        dead_letter_expired=st.booleans(),
        limit=st.integers(1, 4),
        window=st.sampled_from([2, 5, 100]),
        step=st.sampled_from([2, 100]),
        turn_work=st.sampled_from([4, 10_000]),
        commit_bytes=st.sampled_from([0, 1 << 20]),
        pump_bytes=st.sampled_from([1500, 1 << 20]),
        keep_locks=st.booleans(),
        detects_duplicates=st.booleans(),
        delays=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        dead_letter_expired,
        limit,
        window,
        step,
        turn_work,
        commit_bytes,
        pump_bytes,
        keep_locks,
        detects_duplicates,
        delays,
    ):
        self.driver = Driver(
            store=self.store_class(),
            settings=PartitionSettings(
                window=window,
                step=step,
                turn_work=turn_work,
                commit_bytes=commit_bytes,
                pump_bytes=pump_bytes,
                pump_bytes_per_receiver=pump_bytes // 2,
                keep_locks_of_broken_connections=keep_locks,
                abandon_delays=delays,
                seen_ids=FEW_IDS,
            ),
            dead_lettering_on_message_expiration=dead_letter_expired,
            max_delivery_count=limit,
            requires_duplicate_detection=detects_duplicates,
            duplicate_detection_history_time_window_ms=5000,
        )
        self.keep_locks = keep_locks
        self.delays = delays
        self.queues: dict[int, list[Message]] = {MAIN: [], DEAD: []}
        self.next_number = {MAIN: 1, DEAD: 1}
        self.receivers: dict[str, Receiver] = {}
        self.moving: dict[str, Message] = {}  # dead-lettered in this step
        self.gone: dict[str, str] = {}  # body: reason
        self.accepted = self.turns = self.ended_at = 0
        self.transaction: Transaction | None = None
        self.transactions = 0
        self.ids: dict[str, tuple[int, int]] = {}  # of messages accepted: end of the window, sequence number
        self.tokens: list[tuple[int, bytes]] = []  # all that were ever given, with their queue
        self.removed: list[tuple[int, Message, list[Any]]] = []  # received and deleted: can be restored
        self.locked_since: dict[bytes, None] = {}

    # -- what the model knows

    @property
    def now_ms(self) -> int:
        return self.driver.now_ms

    @property
    def terms(self):
        return self.driver.description

    def can_send(self) -> bool:
        return self.terms.status in ("Active", "ReceiveDisabled")

    def can_receive(self) -> bool:
        return self.terms.status in ("Active", "SendDisabled")

    def pulling(self, queue: int) -> bool:
        return any(r.queue == queue and r.credit for r in self.receivers.values())

    def known(self, message_id: str | None, number: int) -> int | None:
        """The sequence number of the message that one with this id repeats; None if it is new, and then `number`."""
        if message_id is None or not self.terms.requires_duplicate_detection:
            return None
        end_ms, first = self.ids.get(message_id, (0, 0))
        if end_ms > self.now_ms:
            return first
        window_ms = self.terms.duplicate_detection_history_time_window_ms
        self.ids[message_id] = (self.now_ms + window_ms, number)
        return None

    def accept(
        self, ttl_ms: int | None, scheduled_ms: int, body: str | None = None, reserved: int | None = None
    ) -> Message:
        default = self.terms.default_message_time_to_live_ms
        effective = min((t for t in (ttl_ms, default) if t is not None), default=None)
        self.accepted += 1
        number = self.next_number[MAIN] if reserved is None else reserved
        self.next_number[MAIN] = max(self.next_number[MAIN], number + 1)
        waits = scheduled_ms > self.now_ms or reserved is not None
        found = Message(
            body=body or self.body(self.accepted),
            number=number,
            place=Place.SCHEDULED if waits else Place.AVAILABLE,
            enqueued_ms=self.now_ms,
            expires_ms=NEVER if effective is None or waits else self.now_ms + effective,
            ttl_ms=effective,
            scheduled_ms=scheduled_ms,
        )
        self.queues[MAIN].append(found)
        return found

    def body(self, number: int) -> str:
        return f"m{number}{PADDING[number % len(PADDING)]}"

    def expired(self, queue: int, m: Message) -> bool:
        return queue == MAIN and m.expires_ms <= self.now_ms

    def leave(self, queue: int, m: Message, reason: str) -> None:
        self.queues[queue].remove(m)
        self.gone[m.body] = reason

    def move(self, m: Message, properties: dict[str, Any] | None) -> None:
        self.queues[MAIN].remove(m)
        m.properties = m.properties | (properties or {})
        m.first_number = m.first_number or m.number
        m.place, m.token, m.owner = Place.AVAILABLE, None, None
        self.moving[m.body] = m

    def unlock(self, m: Message) -> None:
        m.token, m.owner, m.until_ms = None, None, 0

    def fail(self, queue: int, m: Message, properties: dict[str, Any] | None = None) -> None:
        delay_ms = 0
        if self.delays and properties and DELAY in properties:
            delay_ms = DELAY_MS[properties[DELAY]]
            properties = {name: value for name, value in properties.items() if name != DELAY}
        if self.stays(queue, m, properties) and delay_ms and not self.expired(queue, m):
            m.place, m.delayed = Place.SCHEDULED, True
            m.scheduled_ms = min(self.now_ms + delay_ms, m.expires_ms if queue == MAIN else NEVER)

    def stays(self, queue: int, m: Message, properties: dict[str, Any] | None) -> bool:
        """A delivery more has ended. False if it was the last one: then the message is dead-lettered."""
        self.unlock(m)
        m.count += queue == MAIN
        m.properties = m.properties | (properties or {})
        limit = self.terms.max_delivery_count
        if queue == DEAD or m.count < limit:
            return True
        text = f"Message could not be consumed after {limit} delivery attempts."
        self.move(m, {"DeadLetterReason": "MaxDeliveryCountExceeded", "DeadLetterErrorDescription": text})
        return False

    def expire_on_access(self, m: Message) -> None:
        if self.terms.dead_lettering_on_message_expiration:
            text = "The message expired and was dead lettered."
            self.move(m, {"DeadLetterReason": "TTLExpiredException", "DeadLetterErrorDescription": text})
        else:
            self.leave(MAIN, m, "expired")

    def locked(self) -> list[tuple[int, Message]]:
        return [(queue, m) for queue in self.queues for m in self.queues[queue] if m.token is not None]

    def candidates(self) -> list[tuple[int, bytes]]:
        """Tokens to use: of locks held, and of some that are not."""
        return [(queue, m.token) for queue, m in self.locked() if m.token] + self.tokens[-2:]

    def find(self, queue: int, token: bytes) -> Message | None:
        return next((m for m in self.queues[queue] if m.token == token and m.until_ms > self.now_ms), None)

    # -- one turn of a worker, and what it must have done

    def turn(self) -> None:
        driver = self.driver
        self.turns += 1
        pulled = self.pulling(MAIN)
        self.time_passed()
        while (due_ms := driver.partition.next_timer_ms()) is not None and due_ms <= self.now_ms:
            driver.partition.advance(self.now_ms)
        given: list[tuple[Hashable, int, list[Any]]] = []
        drained: dict[Hashable, int] = {}
        more = True
        while more:
            driver.store.begin()
            pumped = driver.partition.pump(self.now_ms)
            deleted = sum(len(deliveries(items)) for _, until_ms, items in pumped.deliveries if until_ms == 0)
            assert driver.store.moved <= deleted + driver.settings.step  # what has expired, of the one queue that has
            driver.partition.commit()
            given += pumped.deliveries
            drained |= dict(pumped.drained)
            assert len(dict(pumped.drained)) == len(pumped.drained)
            assert not pumped.closed or not self.can_receive()
            more = pumped.more
        shown = {queue: driver.peek(queue, count=1000) for queue in (MAIN, DEAD)}
        self.look_for_expired(pulled, shown, given)
        self.check_deliveries(given)
        self.check_drained(drained)
        if self.pulling(MAIN):
            assert not [m for m in self.queues[MAIN] if self.may_go(m)]
        self.compare(shown)

    def time_passed(self) -> None:
        if self.transaction and self.transaction.deadline_ms <= self.now_ms and not self.transaction.timed_out:
            self.rolled_back(self.transaction)
            self.transaction.timed_out = True
        for queue, m in self.locked():
            if m.until_ms <= self.now_ms:
                self.fail(queue, m)
        waiting = [m for queue in self.queues.values() for m in queue if m.place == Place.SCHEDULED]
        due = [m for m in waiting if m.scheduled_ms <= self.now_ms]
        for m in sorted(due, key=lambda m: (m.scheduled_ms, m.number)):
            if m.delayed:
                m.place, m.delayed = Place.AVAILABLE, False
                continue
            m.first_number, m.number = m.number, self.next_number[MAIN]
            self.next_number[MAIN] += 1
            m.place, m.enqueued_ms = Place.AVAILABLE, self.now_ms
            m.expires_ms = NEVER if m.ttl_ms is None else self.now_ms + m.ttl_ms

    def may_go(self, m: Message) -> bool:
        if m.place == Place.DEFERRED and not self.terms.dead_lettering_on_message_expiration:
            return False
        return m.place != Place.SCHEDULED and m.token is None and m.expires_ms <= self.now_ms

    def look_for_expired(self, pulled, shown, given) -> None:
        """Messages that may have gone are looked for; then those dead-lettered in this step get their numbers."""
        in_main = {d.body.decode() for d in shown[MAIN]}
        for m in [m for m in self.queues[MAIN] if self.may_go(m)]:
            if not self.terms.dead_lettering_on_message_expiration:
                assert m.body not in in_main
                self.expire_on_access(m)
            elif m.body not in in_main:
                assert pulled
                self.expire_on_access(m)
        arrived = {d.number: d.body.decode() for d in shown[DEAD]}
        for receiver, _, items in given:
            if self.receivers[receiver].queue == DEAD:
                arrived |= {d.number: d.body.decode() for d in deliveries(items)}
        for number in sorted(number for number in arrived if number >= self.next_number[DEAD]):
            assert number == self.next_number[DEAD]
            self.next_number[DEAD] += 1
            m = self.moving.pop(arrived[number])
            m.number = number
            self.queues[DEAD].append(m)
        assert not self.moving

    def check_deliveries(self, given) -> None:
        for queue in (MAIN, DEAD):
            ready = [m for m in self.queues[queue] if m.place == Place.AVAILABLE and m.token is None]
            ready = sorted((m for m in ready if not self.expired(queue, m)), key=lambda m: m.number)
            credit = sum(r.credit for r in self.receivers.values() if r.queue == queue)
            expected = {m.number: m for m in ready[:credit]}
            for receiver, until_ms, items in given:
                r = self.receivers[receiver]
                if r.queue != queue:
                    continue
                numbers = [d.number for d in deliveries(items)]
                assert numbers == sorted(numbers)
                assert len(numbers) <= r.credit
                r.delivered += len(numbers)
                for at, d in enumerate(deliveries(items)):
                    m = expected.pop(d.number)  # once only, and only what is due
                    assert (d.body.decode(), d.delivery_count, d.properties) == (m.body, m.count, m.properties)
                    assert d.token not in [token for _, token in self.tokens]
                    self.tokens.append((queue, d.token))
                    if r.receive_and_delete:
                        assert until_ms == 0
                        self.leave(queue, m, "received and deleted")
                        self.removed.append((queue, m, items[at * 5 : at * 5 + 5]))
                    else:
                        assert until_ms == self.now_ms + self.terms.lock_duration_ms
                        m.token, m.until_ms, m.owner = d.token, until_ms, receiver
            assert expected == {}

    def check_drained(self, drained: dict[Hashable, int]) -> None:
        assert drained == {name: r.delivered for name, r in self.receivers.items() if r.draining}
        for r in self.receivers.values():
            if r.draining:
                r.draining, r.limit = False, r.delivered

    def compare(self, shown) -> None:
        for queue, found in shown.items():
            expected = sorted(self.queues[queue], key=lambda m: m.number)
            assert [
                (
                    d.number,
                    d.token,
                    d.body.decode(),
                    d.delivery_count,
                    d.properties,
                    d.overlay.get(Field.ENQUEUE_SEQUENCE_NUMBER),
                    d.overlay.get(Field.DEAD_LETTER_SOURCE),
                    d.overlay.get(Field.RETURNS_MS),
                )
                for d in found
            ] == [
                (
                    m.number,
                    m.place,
                    m.body,
                    m.count,
                    m.properties,
                    m.first_number,
                    "orders" if queue == DEAD else None,
                    m.scheduled_ms if m.delayed else None,
                )
                for m in expected
            ]
            by_place = [sum(1 for m in expected if m.place == place) for place in Place]
            size_bytes = sum(len(m.body) + MESSAGE_HEADER_BYTES for m in expected)
            locked = sum(1 for m in expected if m.token is not None)
            assert self.driver.counts(queue) == [*by_place, size_bytes, locked]
            stored = self.driver.stored_counts(queue)
            assert stored[1:] == (*by_place, size_bytes)
            # Numbers told in a transaction are not on disk before others follow them.
            highest = max((m.number for m in expected), default=0)
            assert highest < stored.next_sequence_number <= self.next_number[queue]
        assert_counted_rightly(self.driver.partition, self.driver.store, self.now_ms)

    @invariant()
    def every_accepted_message_is_in_one_place_or_gone_for_a_reason(self):
        if hasattr(self, "driver"):
            held = [m.body for queue in self.queues.values() for m in queue]
            assert len(held) == len(set(held))
            assert not set(held) & set(self.gone)
            assert len(held) + len(self.gone) == self.accepted

    # -- what users do

    @rule(sent=st.lists(st.tuples(TTLS, st.sampled_from([0, 0, 0, 30, 700]), IDS), min_size=1, max_size=6))
    def send(self, sent):
        batch = []
        ids = dict(self.ids)
        new = []
        for ttl_ms, wait, message_id in sent:
            extra = {"scheduled_ms": self.now_ms + wait} if wait else {}
            if message_id is not None:
                extra["message_id"] = encode(message_id)
            batch.append(message(self.body(self.accepted + len(new) + 1), ttl_ms=ttl_ms, **extra))
            if self.known(message_id, self.next_number[MAIN] + len(new)) is None:
                new.append((ttl_ms, wait))
        try:
            self.driver.partition.send(MAIN, batch, self.now_ms)
        except EntityDisabled:
            assert not self.can_send()
            self.ids = ids
        else:
            assert self.can_send()
            for ttl_ms, wait in new:
                self.accept(ttl_ms, self.now_ms + wait if wait else 0)
        self.turn()

    @rule(wait=st.integers(0, 100), ttl_ms=TTLS, message_id=IDS)
    def schedule(self, wait, ttl_ms, message_id):
        if self.can_send():
            incoming = message(self.body(self.accepted + 1), ttl_ms=ttl_ms, scheduled_ms=self.now_ms + wait)
            if message_id is not None:
                incoming[3][Extra.MESSAGE_ID] = encode(message_id)
            numbers = self.driver.request("schedule", [incoming])
            known = self.known(message_id, self.next_number[MAIN])
            assert numbers == [self.accept(ttl_ms, self.now_ms + wait).number if known is None else known]
            self.turn()

    @some(Place.SCHEDULED)
    @rule(pick=PICK, stray=st.booleans())
    def cancel(self, pick, stray):
        waiting = [m for m in self.queues[MAIN] if m.place == Place.SCHEDULED]
        if not waiting:
            return
        m = waiting[pick % len(waiting)]
        try:
            self.driver.request("cancel-scheduled", [m.number] + [STRAY] * stray)
        except MessageNotFound:
            assert stray or m.delayed
        else:
            assert not stray
            assert not m.delayed
            self.leave(MAIN, m, "cancelled")
        self.turn()

    @rule(
        name=RECEIVERS,
        queue=QUEUES,
        receive_and_delete=st.sampled_from([False, False, False, True]),
        count=st.integers(0, 6),
    )
    def receive(self, name, queue, receive_and_delete, count):
        if name in self.receivers:
            self.grant(name, count)
            return
        try:
            self.driver.partition.open_receiver(name, queue, receive_and_delete, self.now_ms)
        except EntityDisabled:
            assert not self.can_receive()
            return
        assert self.can_receive()
        self.receivers[name] = Receiver(queue, receive_and_delete)
        self.grant(name, count)

    @some_receiver
    @rule(name=RECEIVERS, count=st.integers(-4, 6))
    def grant(self, name, count):
        if r := self.receivers.get(name):
            r.limit = max(0, r.limit + count)
            self.driver.partition.grant(name, r.limit)
            self.turn()

    @some_receiver
    @rule(name=RECEIVERS, count=st.integers(0, 6))
    def drain(self, name, count):
        if r := self.receivers.get(name):
            r.limit = r.delivered + count
            r.draining = True
            self.driver.partition.drain(name, r.limit)
            self.turn()

    @some_receiver
    @rule(name=RECEIVERS, broken=st.booleans())
    def close(self, name, broken):
        if self.receivers.pop(name, None) is None:
            return
        self.driver.partition.close_receiver(name, broken, self.now_ms)
        for queue, m in self.locked():
            if m.owner == name:
                if broken and not self.keep_locks:
                    self.fail(queue, m)
                else:
                    m.owner = None
        self.turn()

    @some_locked
    @rule(
        picks=st.lists(PICK, min_size=1, max_size=5, unique=True),
        outcome=st.sampled_from(Outcome),
        late_ms=st.sampled_from([0] * 16 + [1, 35, LOCK_MS - 1, LOCK_MS]),
        properties=st.sampled_from([None, None, {"a": "1"}, {"b": "2"}]),
        delay=MAYBE_DELAYS,
        by_request=st.booleans(),
    )
    def settle(self, picks, outcome, late_ms, properties, delay, by_request):
        self.driver.now_ms += late_ms  # and no timer came by
        properties = self.with_delay(properties, delay)
        known = self.candidates()
        if not known:
            return
        chosen = list(dict.fromkeys(known[pick % len(known)] for pick in picks))
        for queue in (MAIN, DEAD):
            tokens = [token for q, token in chosen if q == queue]
            found = [self.find(queue, token) for token in tokens]
            errors = [self.refusal(queue, m, outcome, properties) for m in found]
            if by_request:
                refused = next((error for error in errors if error), None)
                with pytest.raises(refused) if refused else nullcontext():
                    self.driver.request("settle", tokens, outcome, properties, queue=queue)
                if refused:
                    continue
            else:
                results = self.driver.partition.settle(queue, ranges_of(tokens), outcome, properties, self.now_ms)
                assert [type(result) if result else None for result in results] == errors
            for m, error in zip(found, errors, strict=True):
                if error is None:
                    self.settled(queue, m, outcome, properties)
        self.turn()

    @some_locked
    @rule(pick=PICK, outcome=st.sampled_from(Outcome))
    def settle_one(self, pick, outcome):
        self.settle([pick % len(self.locked())], outcome, 0, None, None, False)

    @some(Place.AVAILABLE)
    @rule(name=RECEIVERS, queue=QUEUES, pick=PICK, delay=st.sampled_from([encode(each) for each in DELAYS]))
    def abandon_for_a_while(self, name, queue, pick, delay):
        self.receive(name, queue, False, 1)
        if locked := self.locked():
            self.settle([pick % len(locked)], Outcome.ABANDONED, 0, None, delay, False)

    def with_delay(self, properties, delay):
        return properties if delay is None else {**(properties or {}), DELAY: delay}

    def refusal(self, queue, m, outcome, properties):
        if m is None:
            return LockLost
        if self.transaction and self.transaction.settles(m.token):
            return NotAllowed
        if outcome == Outcome.DEAD_LETTERED and queue == DEAD:
            return NotAllowed
        if not (self.delays and properties and DELAY in properties):
            return None
        if outcome in (Outcome.DEFERRED, Outcome.DEAD_LETTERED):
            return NotAllowed
        if outcome != Outcome.ABANDONED:
            return None
        return NotAllowed if m.place == Place.DEFERRED else WRONG_DELAYS.get(properties[DELAY])

    def settled(self, queue, m, outcome, properties):
        match outcome:
            case Outcome.ACCEPTED:
                self.leave(queue, m, "completed")
            case Outcome.ABANDONED:
                self.fail(queue, m, properties)
            case Outcome.RELEASED:
                self.unlock(m)
            case Outcome.DEFERRED:
                if self.stays(queue, m, properties):
                    m.place = Place.DEFERRED
            case Outcome.DEAD_LETTERED:
                self.move(m, properties)

    def rolled_back(self, transaction: Transaction) -> None:
        """What the client has forgotten comes again."""
        for kind, *operation in transaction.operations:
            if kind == "settle":
                queue, token, _, _, quiet = operation
                m = next((m for m in self.queues[queue] if m.token == token), None)
                if m is not None and quiet:
                    self.fail(queue, m)

    def in_transaction(self) -> tuple[str, bool]:
        """The key of the transaction under way, or of a new one, and whether it is."""
        begins = self.transaction is None
        if begins:
            self.transactions += 1
            self.transaction = Transaction(f"t{self.transactions}", self.now_ms + TRANSACTION_TIME_OUT_MS)
        return self.transaction.key, begins

    def transact(self, operation: Operation) -> list[list[str] | None] | None:
        """The result of the operation. Raises TransactionTimeout."""
        [result] = self.driver.partition.transact(*self.in_transaction(), [operation], self.now_ms)
        return result

    def request_in(self, name, *args) -> Any:
        """Its result. Raises BrokerError."""
        queue, *arguments = args
        asked: Any = requests.RECORDS.made(name, *arguments)
        return self.driver.partition.request_in(*self.in_transaction(), queue, asked, self.now_ms)

    @rule(ttl_ms=TTLS, wait=st.sampled_from([0, 0, 30]), message_id=IDS)
    def send_in_transaction(self, ttl_ms, wait, message_id):
        extra = {"scheduled_ms": self.now_ms + wait} if wait else {}
        if message_id is not None:
            extra["message_id"] = encode(message_id)
        body = f"{self.transactions}.{self.accepted}.{len(self.transaction.operations) if self.transaction else 0}"
        try:
            result = self.transact(SendOperation(MAIN, False, [[message(body, ttl_ms=ttl_ms, **extra)]]))
        except TransactionTimeout:
            assert self.transaction.timed_out
            return
        if self.transaction.sends == MAX_MESSAGES:
            assert [name for name, _ in result] == ["QuotaExceeded"]
            return
        assert result is None
        self.transaction.sends += 1
        self.transaction.operations.append(("send", body, ttl_ms, self.now_ms + wait if wait else 0, message_id, None))
        self.turn()

    @rule(scheduled=st.lists(st.tuples(TTLS, st.integers(0, 100), IDS), min_size=1, max_size=3))
    def schedule_in_transaction(self, scheduled):
        name = f"{self.transactions}.{self.accepted}.{len(self.transaction.operations) if self.transaction else 0}"
        batch, operations = [], []
        for at, (ttl_ms, wait, message_id) in enumerate(scheduled):
            incoming = message(f"{name}.{at}", ttl_ms=ttl_ms, scheduled_ms=self.now_ms + wait)
            if message_id is not None:
                incoming[3][Extra.MESSAGE_ID] = encode(message_id)
            batch.append(incoming)
            number = self.next_number[MAIN] + at
            operations.append(("send", f"{name}.{at}", ttl_ms, self.now_ms + wait, message_id, number))
        try:
            numbers = self.request_in("schedule", MAIN, batch)
        except TransactionTimeout:
            assert self.transaction.timed_out
            return
        except QuotaExceeded:
            assert self.transaction.sends + len(batch) > MAX_MESSAGES
            return
        self.transaction.sends += len(batch)
        assert self.transaction.sends <= MAX_MESSAGES
        assert numbers == [operation[-1] for operation in operations]
        self.next_number[MAIN] += len(batch)
        self.transaction.operations += operations
        self.turn()

    @some_locked
    @rule(
        pick=PICK,
        outcome=st.sampled_from(Outcome),
        properties=st.sampled_from([None, {"a": "1"}]),
        delay=MAYBE_DELAYS,
        quiet=st.booleans(),
        by_request=st.booleans(),
    )
    def settle_in_transaction(self, pick, outcome, properties, delay, quiet, by_request):
        properties = self.with_delay(properties, delay)
        known = self.candidates()
        if not known:
            return
        queue, token = known[pick % len(known)]
        error = self.refusal(queue, self.find(queue, token), outcome, properties)
        quiet = quiet and error is None and not by_request
        try:
            if by_request:
                result = None
                self.request_in("settle", queue, [token], outcome, properties)
            else:
                result = self.transact(SettleOperation(queue, quiet, [token], outcome, properties))
        except TransactionTimeout:
            assert self.transaction.timed_out
            return
        except BrokerError as refused:
            assert by_request
            result = [[type(refused).__name__, ""]]
        assert [each and each[0] for each in result or [None]] == [error and error.__name__]
        if error is None:
            self.transaction.operations.append(("settle", queue, token, outcome, properties, quiet))
        self.turn()

    @some(Place.SCHEDULED)
    @rule(pick=PICK, stray=st.booleans())
    def cancel_in_transaction(self, pick, stray):
        waiting = [m for m in self.queues[MAIN] if m.place == Place.SCHEDULED]
        if not waiting:
            return
        m = waiting[pick % len(waiting)]
        try:
            self.request_in("cancel-scheduled", MAIN, [m.number] + [STRAY] * stray)
        except TransactionTimeout:
            assert self.transaction.timed_out
        except MessageNotFound:
            assert stray or m.delayed or ("cancel", m.number) in self.transaction.operations
        else:
            assert not stray
            assert not m.delayed
            self.transaction.operations.append(("cancel", m.number))
        self.turn()

    def scheduled(self, number):
        waiting = (m for m in self.queues[MAIN] if m.place == Place.SCHEDULED)
        return next((m for m in waiting if m.number == number), None)

    @precondition(lambda self: self.transaction)
    @rule(
        commit=st.sampled_from([True, True, True, False]),
        late_ms=st.sampled_from([0, 0, 0, 1, LOCK_MS, TRANSACTION_TIME_OUT_MS]),
    )
    def discharge(self, commit, late_ms):
        transaction, self.transaction = self.transaction, None
        assert transaction is not None
        self.driver.now_ms += late_ms  # and no timer came by
        found = [
            self.find(operation[0], operation[1]) for kind, *operation in transaction.operations if kind == "settle"
        ]
        found += [self.scheduled(number) for kind, number, *_ in transaction.operations if kind == "cancel"]
        expected: type[BrokerError] | None = None
        if commit and (transaction.timed_out or transaction.deadline_ms <= self.now_ms):
            expected = TransactionTimeout
        elif commit and None in found:
            expected = TransactionRollback
        with pytest.raises(expected) if expected else nullcontext():
            self.driver.partition.discharge(transaction.key, commit, self.now_ms)
        if expected or not commit:
            if not transaction.timed_out:
                self.rolled_back(transaction)
        else:
            for kind, *operation in transaction.operations:
                if kind == "send":
                    body, ttl_ms, scheduled_ms, message_id, told = operation
                    if self.known(message_id, self.next_number[MAIN] if told is None else told) is None:
                        self.accept(ttl_ms, scheduled_ms, body, told)
                elif kind == "cancel":
                    self.leave(MAIN, self.scheduled(operation[0]), "cancelled")
                else:
                    queue, token, outcome, properties, _ = operation
                    self.settled(queue, self.find(queue, token), outcome, properties)
        self.turn()

    @some_locked
    @rule(picks=st.lists(PICK, min_size=1, max_size=3, unique=True))
    def renew(self, picks):
        known = self.candidates()
        if not known:
            return
        chosen = [known[pick % len(known)] for pick in picks]
        queue = chosen[0][0]
        tokens = list(dict.fromkeys(token for q, token in chosen if q == queue))
        found = [self.find(queue, token) for token in tokens]
        try:
            until = self.driver.request("renew-locks", tokens, queue=queue)
        except LockLost:
            assert None in found
        else:
            assert until == [self.now_ms + self.terms.lock_duration_ms] * len(tokens)
            for m in found:
                m.until_ms = until[0]
        self.turn()

    @some(Place.DEFERRED)
    @rule(
        queue=QUEUES,
        picks=st.lists(PICK, min_size=1, max_size=3),
        stray=st.sampled_from([0, 0, STRAY]),
        delete=st.booleans(),
    )
    def receive_deferred(self, queue, picks, stray, delete):
        deferred = [m for m in self.queues[queue] if m.place == Place.DEFERRED]
        if deferred:
            self.take_by_number(queue, [deferred[pick % len(deferred)] for pick in picks], stray, delete, False)

    @precondition(lambda self: any(self.queues.values()))
    @rule(
        queue=QUEUES,
        picks=st.lists(PICK, min_size=1, max_size=3),
        stray=st.sampled_from([0] * 8 + [STRAY, 1 << 63]),
        delete=st.booleans(),
        active=st.sampled_from([True, True, True, False]),
    )
    def receive_by_number(self, queue, picks, stray, delete, active):
        if there := sorted(self.queues[queue], key=lambda m: m.number):
            self.take_by_number(queue, [there[pick % len(there)] for pick in picks], stray, delete, active)

    def take_by_number(self, queue, wanted, stray, delete, active):
        """Some may be locked, expired or scheduled; without `active` only deferred ones can be had."""
        places = (Place.DEFERRED, Place.AVAILABLE) if active else (Place.DEFERRED,)
        chosen = list({m.number: m for m in wanted}.values())
        numbers = [m.number for m in chosen] + [stray] * bool(stray)
        free = [m for m in chosen if m.place in places and m.token is None]
        had = [m for m in free if not self.expired(queue, m)]
        try:
            until_ms, items, *active_ones = self.driver.request(
                "receive-deferred", numbers, delete, *([True] if active else []), queue=queue
            )
        except EntityDisabled:
            assert not self.can_receive()
        except MessageNotFound:
            assert len(had) < len(numbers)
            for m in free:
                if self.expired(queue, m):
                    self.expire_on_access(m)
        else:
            assert had == chosen
            assert active_ones == ([[m.number for m in chosen if m.place == Place.AVAILABLE]] if active else [])
            assert until_ms == (0 if delete else self.now_ms + self.terms.lock_duration_ms)
            for m, d in zip(chosen, deliveries(items), strict=True):
                assert (d.number, d.body.decode(), d.delivery_count) == (m.number, m.body, m.count)
                assert d.properties == m.properties
                if delete:
                    self.leave(queue, m, "received and deleted")
                    continue
                self.tokens.append((queue, d.token))
                m.token, m.until_ms = d.token, until_ms
        self.turn()

    @precondition(lambda self: len(self.queues[MAIN]) > 10)
    @rule(queue=QUEUES, count=st.integers(1, 4), age_ms=st.sampled_from([0, 0, 50]))
    def delete_batch(self, queue, count, age_ms):
        before_ms = self.now_ms + 1 - age_ms
        free = [m for m in self.queues[queue] if m.place == Place.AVAILABLE and m.token is None]
        old = sorted((m for m in free if m.enqueued_ms < before_ms), key=lambda m: m.number)[:count]
        assert self.driver.request("delete-batch", count, before_ms, queue=queue) == len(old)
        for m in old:
            self.leave(queue, m, "deleted")
        self.turn()

    @rule(queue=QUEUES, places=st.sampled_from([None, None, [Place.SCHEDULED], [Place.AVAILABLE, Place.DEFERRED]]))
    @rarely
    def purge(self, queue, places):
        while self.driver.request("purge", *([places] if places else []), queue=queue):
            pass
        for m in [m for m in self.queues[queue] if m.token is None and m.place in (places or Place)]:
            self.leave(queue, m, "purged")
        self.turn()

    @precondition(lambda self: self.removed)
    @rule(count=st.integers(1, 3))
    def restore(self, count):
        for queue, m, items in self.removed[-count:]:
            self.driver.partition.restore(queue, items, self.now_ms)
            del self.gone[m.body]
            self.queues[queue].append(m)
        self.removed.clear()
        self.turn()

    @rule(ms=st.sampled_from([1, 30, 40, 40, 100, 500]))
    def wait(self, ms):
        self.driver.now_ms += ms
        self.turn()

    @rule(ms=st.sampled_from([LOCK_MS - 1, LOCK_MS, TRANSACTION_TIME_OUT_MS]))
    @rarely
    def wait_long(self, ms):
        self.wait(ms)

    @rule(
        change=st.sampled_from(
            [
                {"lock_duration_ms": 5000},
                {"lock_duration_ms": LOCK_MS},
                {"max_delivery_count": 1},
                {"max_delivery_count": 3},
                {"dead_lettering_on_message_expiration": True},
                {"dead_lettering_on_message_expiration": False},
                {"default_message_time_to_live_ms": 1000},
                {"default_message_time_to_live_ms": None},
                {"status": "SendDisabled"},
                {"status": "ReceiveDisabled"},
            ]
        )
    )
    @rarely
    def change(self, change):
        before = self.terms.lock_duration_ms
        self.driver.change(**change)
        if self.terms.lock_duration_ms != before:
            for _, m in self.locked():
                self.unlock(m)
        if not self.can_receive():
            for _, m in self.locked():
                m.owner = None
            self.receivers.clear()
        self.turn()
        if self.terms.status != "Active":
            self.driver.change(status="Active")

    @rule(uncommitted=st.booleans())
    @rarely
    def restart(self, uncommitted):
        """The process ends, perhaps before a commit; what was not committed was never answered."""
        if uncommitted:
            self.driver.partition.send(MAIN, [message("lost"), message("lost", ttl_ms=5)], self.now_ms)
            for queue, m in self.locked()[::2]:
                assert m.token is not None
                self.driver.partition.settle(queue, [m.token], Outcome.ACCEPTED, None, self.now_ms)
            self.driver.partition.advance(self.now_ms)
            self.driver.store.abort()
        self.driver.restart()
        self.next_number[MAIN] = self.driver.stored_counts(MAIN).next_sequence_number
        self.transaction = None
        self.receivers.clear()
        self.removed.clear()
        for _, m in self.locked():
            self.unlock(m)
        self.turn()


PartitionModel.TestCase.settings = model_settings(examples=200, steps=60)
TestPartitionModel = PartitionModel.TestCase
