"""A queue with sessions against the model: any order of what its users do, and of time, changes and restarts.

Sessions with duplicate detection, deferral, schedules and forwarding, inside and outside of up to two transactions.
"""

from contextlib import nullcontext, suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from broker import requests
from broker.errors import (
    BrokerError,
    EntityDisabled,
    MessageNotFound,
    NotAllowed,
    QuotaExceeded,
    SessionCannotBeLocked,
    SessionLockLost,
    TransactionRollback,
    TransactionTimeout,
)
from broker.partition.settings import PartitionSettings
from broker.partition.transactions import MAX_MESSAGES
from broker.wire import TRANSACTION_TIME_OUT_MS, Outcome, SendOperation, SettleOperation
from protocol.codec import encode
from protocol.symbols import DELAY
from storage.records import Place
from tests.models import STRAY, model_settings, rarely
from tests.partition.driver import DEAD, FEW_IDS, LOCK_MS, MAIN, deliveries, message
from tests.partition.session_model import INBOX, Lock, Orders, Receiver, Sent, SessionModel, Transaction
from tests.partition.turns import CountingStore

LONG_LOCK_MS = 300_000  # outlives a transaction
WINDOW_MS = 20_000
SESSIONS = st.sampled_from(["a", "a", "b", "b", "c", ""])
PERHAPS = st.none() | SESSIONS
RECEIVERS = st.sampled_from("wxyz")
TTLS = st.sampled_from([None] * 8 + [0, 40, 500, LOCK_MS + 100])
WAITS = st.sampled_from([0] * 6 + [30, 700])
IDS = st.sampled_from([None, "1", "2", "3"])
PICK = st.integers(0, 12)
LATE = st.sampled_from([0] * 16 + [1, 35, LOCK_MS - 1, LOCK_MS])
AT_END = st.sampled_from([None] * 6 + [-1, -1, 0])
DELAYS = st.sampled_from([{DELAY: encode(ms), **others} for ms in (1, 40, 700, LOCK_MS) for others in ({}, {"c": "3"})])
PROPERTIES = st.sampled_from([None, None, {"a": "1"}, {"b": "2"}]) | DELAYS
TO = st.sampled_from([MAIN, MAIN, INBOX])
KEYS = st.sampled_from("tu")
STATES = st.sampled_from([None, b"", b"half", b"x" * 300])


def some(place: Place, *queues: int):
    """A rule that wants messages in this place."""
    return precondition(lambda self: any(m.place == place for queue in queues for m in self.queues[queue]))


some_locked = precondition(lambda self: any(self.locked()))
some_session = precondition(lambda self: any(r.session is not None for r in self.receivers.values()))

PADDING = ["", "", "", "x" * 120, "x" * 160]  # so that turns end in the middle of what was read


class SessionQueue(SessionModel):
    store_class: type[CountingStore] = CountingStore

    @initialize(
        dead_letter_expired=st.booleans(),
        limit=st.integers(1, 4),
        session_window=st.sampled_from([1, 2, 128]),
        step=st.sampled_from([1, 2, 100]),
        turn_work=st.sampled_from([3, 10_000]),
        commit_bytes=st.sampled_from([0, 10, 1 << 20]),
        pump_bytes=st.sampled_from([1500, 1 << 20]),
        keep_locks=st.booleans(),
        detects_duplicates=st.booleans(),
        lock_ms=st.sampled_from([LOCK_MS, LONG_LOCK_MS]),
        ttl_ms=st.sampled_from([None] * 4 + [1000]),
    )
    def start(
        self,
        dead_letter_expired,
        limit,
        session_window,
        step,
        turn_work,
        commit_bytes,
        pump_bytes,
        keep_locks,
        detects_duplicates,
        lock_ms,
        ttl_ms,
    ):
        self.begin(
            Orders(
                store=self.store_class(),
                settings=PartitionSettings(
                    session_window=session_window,
                    window=4,
                    step=step,
                    turn_work=turn_work,
                    commit_bytes=commit_bytes,
                    pump_bytes=pump_bytes,
                    pump_bytes_per_receiver=pump_bytes // 2,
                    keep_locks_of_broken_connections=keep_locks,
                    abandon_delays=True,
                    seen_ids=FEW_IDS,
                ),
                dead_lettering_on_message_expiration=dead_letter_expired,
                max_delivery_count=limit,
                requires_duplicate_detection=detects_duplicates,
                duplicate_detection_history_time_window_ms=WINDOW_MS,
                lock_duration_ms=lock_ms,
                default_message_time_to_live_ms=ttl_ms,
            ),
            keep_locks,
        )

    def write(self, session, ttl_ms, wait, message_id, has_key) -> Sent:
        self.made += 1
        body = f"m{self.made}{PADDING[self.made % len(PADDING)]}"
        return Sent(body, session, ttl_ms, self.now_ms + wait if wait else 0, message_id, has_key)

    # -- senders

    @rule(
        queue=TO,
        written=st.lists(st.tuples(SESSIONS, TTLS, WAITS, IDS, st.booleans()), min_size=1, max_size=6),
        none_at=st.sampled_from([None, None, 0, 1]),
    )
    def send(self, queue, written, none_at):
        """One batch; perhaps with a message of no session, which only the inbox takes."""
        batch = [self.write(None if at == none_at else session, *rest) for at, (session, *rest) in enumerate(written)]
        refused = queue == MAIN and any(sent.session is None for sent in batch)
        with pytest.raises(NotAllowed) if refused else nullcontext():
            self.driver.partition.send(queue, [sent.incoming() for sent in batch], self.now_ms)
        if not refused:
            for sent in batch:
                self.accept(queue, sent)
        self.turn()

    @rule(queue=TO, session=SESSIONS, ttl_ms=TTLS, wait=st.integers(0, 100), message_id=IDS, has_key=st.booleans())
    def schedule(self, queue, session, ttl_ms, wait, message_id, has_key):
        sent = self.write(session, ttl_ms, wait, message_id, has_key)
        [number] = self.driver.request("schedule", [sent.incoming()], queue=queue)
        assert number == self.accept(queue, sent)
        self.turn()

    @some(Place.SCHEDULED, MAIN, INBOX)
    @rule(queue=TO, pick=PICK, stray=st.booleans())
    def cancel(self, queue, pick, stray):
        waiting = [m for m in self.queues[queue] if m.place == Place.SCHEDULED]
        if not waiting:
            return
        m = waiting[pick % len(waiting)]
        stray = stray or m.returns_ms is not None
        with pytest.raises(MessageNotFound) if stray else nullcontext():
            self.driver.request(
                "cancel-scheduled", [m.number] + [STRAY] * (m.returns_ms is None and stray), queue=queue
            )
        if not stray:
            self.leave(queue, m, "cancelled")
        self.turn()

    # -- receivers

    @rule(
        name=RECEIVERS,
        session=PERHAPS,
        wait_ms=st.sampled_from([0, 300, 65_000]),
        receive_and_delete=st.sampled_from([False, False, False, True]),
        late_ms=LATE,
        count=st.sampled_from([0, 1, 6, 6]),
    )
    def ask(self, name, session, wait_ms, receive_and_delete, late_ms, count):
        """For a session by its name, or for any; and for messages, if there is one at once."""
        if name in self.receivers:
            return
        self.driver.now_ms += late_ms  # and no timer came by
        lock = self.locks.get(session)
        refused = session is not None and lock is not None and lock.until_ms > self.now_ms
        with pytest.raises(SessionCannotBeLocked) if refused else nullcontext():
            self.driver.partition.open_receiver(name, MAIN, receive_and_delete, self.now_ms, [session, wait_ms])
        if not refused:
            self.receivers[name] = Receiver(receive_and_delete, deadline_ms=self.now_ms + wait_ms)
            if session is not None:
                if lock is not None:
                    self.lose(session)
                self.receivers[name].session = session
                self.locks[session] = Lock(name, self.now_ms + self.terms.lock_duration_ms)
                self.accepting.append((name, session))
        self.turn()
        if count and (r := self.receivers.get(name)) and r.session is not None:
            r.limit = count
            self.driver.partition.grant(name, r.limit)
            self.turn()

    @precondition(lambda self: self.to_be_had() and len(self.receivers) < 4)
    @rule(pick=PICK, any_session=st.booleans(), count=st.integers(1, 6))
    def receive(self, pick, any_session, count):
        """From a session that has something."""
        there = sorted(self.to_be_had())
        name = next(name for name in "wxyz" if name not in self.receivers)
        self.ask(name, None if any_session else there[pick % len(there)], 300, False, 0, count)

    def wait_for(self, end_ms, at_end):
        """Perhaps it is the last moment before that time, or this time; no timer comes by."""
        if at_end is not None:
            self.driver.now_ms = max(self.now_ms, end_ms + at_end)

    def one_with_session(self, pick):
        receivers = [(name, r) for name, r in self.receivers.items() if r.session is not None]
        return receivers[pick % len(receivers)]

    @some_session
    @rule(pick=PICK, count=st.integers(-4, 6))
    def grant(self, pick, count):
        name, r = self.one_with_session(pick)
        r.limit = max(0, r.limit + count)
        self.driver.partition.grant(name, r.limit)
        self.turn()

    @some_session
    @rule(pick=PICK, count=st.integers(0, 6))
    def drain(self, pick, count):
        name, r = self.one_with_session(pick)
        r.limit = r.delivered + count
        r.draining = True
        self.driver.partition.drain(name, r.limit)
        self.turn()

    @some(Place.AVAILABLE, DEAD)
    @rule(count=st.integers(1, 5), receive_and_delete=st.booleans())
    def receive_dead_letters(self, count, receive_and_delete):
        name = "dead, deleting" if receive_and_delete else "dead"
        if name not in self.receivers:
            self.driver.partition.open_receiver(name, DEAD, receive_and_delete, self.now_ms)
            self.receivers[name] = Receiver(receive_and_delete, DEAD)
        r = self.receivers[name]
        r.limit = r.delivered + count
        r.draining = True  # so that what comes later is not between two receivers
        self.driver.partition.drain(name, r.limit)
        self.turn()

    @precondition(lambda self: any(r.queue == MAIN for r in self.receivers.values()))
    @rule(pick=PICK, broken=st.booleans(), unsent=st.none() | st.integers(0, 4))
    def leave_session(self, pick, broken, unsent):
        """Perhaps so many of the deliveries, the last of them, never reached it."""
        names = [name for name, r in self.receivers.items() if r.queue == MAIN]
        name = names[pick % len(names)]
        r = self.receivers.pop(name)
        unsent_from = None
        if r.session is not None and unsent is not None:
            tokens = sorted(m.token for _, m in self.locked(MAIN) if m.session == r.session and m.token)
            unsent_from = tokens[-unsent] if 0 < unsent <= len(tokens) else bytes(16) if unsent else None
            self.locks[r.session].unsent_from = unsent_from
        self.driver.partition.close_receiver(name, broken, self.now_ms, unsent_from)
        if r.session is not None:
            if broken and self.keep_locks:
                self.locks[r.session].receiver = None
            else:
                self.release(r.session, failed=broken)
        self.turn()

    @some_locked
    @rule(
        picks=st.lists(PICK, min_size=1, max_size=5, unique=True),
        outcome=st.sampled_from(Outcome),
        late_ms=LATE,
        properties=PROPERTIES,
        by_request=st.booleans(),
        asker=st.none() | RECEIVERS,
    )
    def settle(self, picks, outcome, late_ms, properties, by_request, asker):
        """By those who received them, or by others; on links or by request."""
        self.driver.now_ms += late_ms  # and no timer came by
        known = self.candidates()
        chosen = list(dict.fromkeys(known[pick % len(known)] for pick in picks))
        for queue in (MAIN, DEAD):
            tokens = [token for q, token in chosen if q == queue]
            errors = [self.refusal(queue, token, outcome, properties, asker) for token in tokens]
            if by_request:
                refused = next((error for error in errors if error), None)
                with pytest.raises(refused) if refused else nullcontext():
                    self.driver.request("settle", tokens, outcome, properties, *([asker] if asker else []), queue=queue)
                if refused:
                    continue
            else:
                results = self.driver.partition.settle(queue, tokens, outcome, properties, self.now_ms)
                if asker:
                    results = self.driver.partition.as_told(queue, asker, results, self.now_ms)
                assert [type(result) if result else None for result in results] == errors
            for token, error in zip(tokens, errors, strict=True):
                if error is None:
                    found = self.find(queue, token)
                    assert found is not None
                    self.settled(queue, found, outcome, properties)
        self.turn()

    @some_locked
    @rule(pick=PICK, outcome=st.sampled_from(Outcome), at_end=AT_END)
    def settle_one(self, pick, outcome, at_end, properties=None):
        [*locked] = self.locked()
        queue, m = locked[pick % len(locked)]
        self.wait_for(self.lock_end(queue, m), at_end)
        refused = self.refusal(queue, m.token, outcome, properties, None)
        [result] = self.driver.partition.settle(queue, [m.token], outcome, properties, self.now_ms)
        assert (type(result) if result else None) == refused
        if refused is None:
            self.settled(queue, m, outcome, properties)
        self.turn()

    @some_locked
    @rule(pick=PICK, delay=DELAYS)
    def abandon_for_a_while(self, pick, delay):
        self.settle_one(pick, Outcome.ABANDONED, None, delay)

    # -- what is asked for by name

    def held(self, name, session):
        """What the request of who does not hold the lock meets with."""
        return nullcontext() if self.holds(name, session) else pytest.raises(SessionLockLost)

    def session_for(self, name, session):
        """The receiver's own, or this one."""
        r = self.receivers.get(name)
        return session if session is not None or r is None or r.session is None else r.session

    @some_session
    @rule(pick=PICK, other=st.sampled_from([None, None, None, "a", "c"]), at_end=AT_END)
    def renew(self, pick, other, at_end):
        name, r = self.one_with_session(pick)
        session = r.session if other is None else other
        self.wait_for(self.locks[r.session].until_ms, at_end)
        with self.held(name, session):
            until_ms = self.driver.of_session("renew-session-lock", session, receiver=name)
            assert until_ms == self.now_ms + self.terms.lock_duration_ms
            del self.locks[session]
            self.locks[session] = Lock(name, until_ms)  # behind the others, as its end is
        self.turn()

    @some_session
    @rule(name=RECEIVERS, session=PERHAPS, state=STATES)
    def set_state(self, name, session, state):
        session = self.session_for(name, session) or ""
        before = self.states.get(session, (None, 0))[0]
        with self.held(name, session):
            assert self.driver.of_session("get-session-state", session, receiver=name) == before
        with self.held(name, session):
            self.driver.of_session("set-session-state", session, state, receiver=name)
            self.keep_state(session, state)
        self.turn()

    @some(Place.DEFERRED, MAIN)
    @rule(
        name=RECEIVERS,
        session=PERHAPS,
        picks=st.lists(PICK, min_size=1, max_size=3),
        stray=st.sampled_from([0, 0, STRAY]),
        delete=st.booleans(),
        late_ms=LATE,
    )
    def receive_deferred(self, name, session, picks, stray, delete, late_ms):
        deferred = [m for m in self.queues[MAIN] if m.place == Place.DEFERRED]
        wanted = [deferred[pick % len(deferred)] for pick in picks]
        self.take_by_number(name, self.session_for(name, session) or "", wanted, stray, delete, late_ms, False)

    @some_session
    @rule(
        pick=PICK,
        session=st.sampled_from([None] * 6 + ["a", "b"]),
        picks=st.lists(PICK, min_size=1, max_size=3),
        strays=st.sampled_from([False, False, False, True]),
        delete=st.booleans(),
        late_ms=LATE,
    )
    def receive_by_number(self, pick, session, picks, strays, delete, late_ms):
        """Any of the session's, and perhaps some of another."""
        name, r = self.one_with_session(pick)
        session = r.session if session is None else session
        there = [m for m in self.queues[MAIN] if strays or m.session == session]
        if there:
            wanted = [there[pick % len(there)] for pick in picks]
            self.take_by_number(name, session, wanted, 0, delete, late_ms, True)

    def take_by_number(self, name, session, wanted, stray, delete, late_ms, active):
        """Some may be locked, expired or scheduled; without `active` only deferred ones can be had."""
        self.driver.now_ms += late_ms
        places = (Place.DEFERRED, Place.AVAILABLE) if active else (Place.DEFERRED,)
        chosen = list({m.number: m for m in wanted}.values())
        numbers = [m.number for m in chosen] + [stray] * bool(stray)
        mine = [m for m in chosen if m.session == session and m.place in places and m.token is None]
        had = [m for m in mine if not self.expired(MAIN, m)]
        holds, found = self.holds(name, session), len(had) == len(numbers)
        wrong = SessionLockLost if not holds else None if found else MessageNotFound
        with pytest.raises(wrong) if wrong else nullcontext():
            args = [session, numbers, delete, *([True] if active else [])]
            until_ms, items, *active_ones = self.driver.of_session("receive-session-deferred", *args, receiver=name)
            assert active_ones == ([[m.number for m in chosen if m.place == Place.AVAILABLE]] if active else [])
        if holds and not found:
            for m in mine:
                if self.expired(MAIN, m):
                    self.expire(m)
        elif holds:
            for at, (m, each) in enumerate(zip(chosen, deliveries(items), strict=True)):
                assert (each.number, each.delivery_count, each.properties) == (m.number, m.count, m.properties)
                if delete:
                    assert until_ms == 0
                    self.leave(MAIN, m, "received and deleted")
                    continue
                assert until_ms == self.locks[session].until_ms
                self.tokens.append((MAIN, items[at * 5]))
                m.token = each.token
        self.turn()

    @precondition(lambda self: len(self.queues[MAIN]) > 15)
    @rule(session=PERHAPS, count=st.integers(1, 4), all_of_it=st.sampled_from([False, False, True]))
    def delete(self, session, count, all_of_it):
        if all_of_it:
            while self.driver.request("purge"):
                pass
            chosen = [m for m in self.queues[MAIN] if m.token is None]
        else:
            free = [m for m in self.queues[MAIN] if m.place == Place.AVAILABLE and m.token is None]
            chosen = sorted((m for m in free if session in (None, m.session)), key=lambda m: m.number)[:count]
            args = [count, self.now_ms + 1, *([] if session is None else [session])]
            assert self.driver.request("delete-batch", *args) == len(chosen)
        for m in chosen:
            self.leave(MAIN, m, "deleted")
        self.turn()

    @precondition(lambda self: self.removed)
    @rule(count=st.integers(1, 3))
    def restore(self, count):
        for queue, m, items in self.removed[-count:]:
            self.driver.partition.restore(queue, items, self.now_ms)
            del self.gone[m.body]
            self.queues[queue].append(m)
            if queue == MAIN:
                self.come(m.session)
        self.removed.clear()
        self.turn()

    # -- transactions

    def transact(self, key, call):
        """What `call` with the transaction's key, and whether it begins, returns; None if it has timed out."""
        transaction = self.transactions.get(key)
        begins = transaction is None
        if begins:
            self.made += 1
            name = f"{key}{self.made}"
            transaction = self.transactions[key] = Transaction(name, self.now_ms + TRANSACTION_TIME_OUT_MS)
        if transaction.timed_out:
            with pytest.raises(TransactionTimeout):
                call(transaction.key, begins)
            return None
        call(transaction.key, begins)
        return transaction

    @rule(
        key=KEYS,
        queue=TO,
        session=PERHAPS,
        ttl_ms=TTLS,
        wait=WAITS,
        message_id=IDS,
        has_key=st.booleans(),
        quiet=st.booleans(),
    )
    def send_in(self, key, queue, session, ttl_ms, wait, message_id, has_key, quiet):
        sent = self.write(session, ttl_ms, wait, message_id, has_key)
        refused = queue == MAIN and session is None
        results = []

        def call(name, begins):
            operation = SendOperation(queue, quiet, [[sent.incoming()]])
            results.extend(self.driver.partition.transact(name, begins, [operation], self.now_ms))

        if transaction := self.transact(key, call):
            wrong = "NotAllowed" if refused else "QuotaExceeded" if transaction.sends == MAX_MESSAGES else None
            assert [each and each[0][0] for each in results] == [wrong]
            transaction.failed |= wrong is not None and quiet
            if wrong is None:
                transaction.sends += 1
                transaction.operations.append(("send", queue, sent))
        self.turn()

    @rule(
        key=KEYS,
        queue=TO,
        written=st.lists(st.tuples(SESSIONS, TTLS, st.integers(0, 100), IDS, st.booleans()), min_size=1, max_size=3),
    )
    def schedule_in(self, key, queue, written):
        batch = [self.write(*each) for each in written]
        numbers = []

        def call(name, begins):
            incoming = [sent.incoming() for sent in batch]
            with suppress(QuotaExceeded):
                found = self.driver.partition.request_in(name, begins, queue, requests.Schedule(incoming), self.now_ms)
                numbers.extend(found)

        if transaction := self.transact(key, call):
            transaction.sends += len(numbers)
            assert transaction.sends <= MAX_MESSAGES
            if not numbers:
                assert transaction.sends + len(batch) > MAX_MESSAGES
                return
            first = self.next_number[queue]
            self.next_number[queue] += len(batch)
            assert numbers == [*range(first, self.next_number[queue])]
            transaction.operations.append(("schedule", queue, numbers, batch))
        self.turn()

    @some_locked
    @rule(
        key=KEYS,
        picks=st.lists(PICK, min_size=1, max_size=3, unique=True),
        outcome=st.sampled_from(Outcome),
        properties=PROPERTIES,
        quiet=st.booleans(),
        by_request=st.booleans(),
        asker=st.none() | RECEIVERS,
        late_ms=LATE,
    )
    def settle_in(self, key, picks, outcome, properties, quiet, by_request, asker, late_ms):
        self.driver.now_ms += late_ms
        known = self.candidates()
        queue = known[picks[0] % len(known)][0]
        picked = dict.fromkeys(known[pick % len(known)] for pick in picks)
        tokens = [token for each, token in picked if each == queue]
        errors = [self.refusal(queue, token, outcome, properties, asker) for token in tokens]
        refused = next((error for error in errors if error), None)
        results = []

        def by_name(name, begins):
            args = [tokens, outcome, properties, *([asker] if asker else [])]
            with pytest.raises(refused) if refused else nullcontext():
                self.driver.partition.request_in(name, begins, queue, requests.Settle(*args), self.now_ms)

        def by_link(name, begins):
            operation = SettleOperation(queue, quiet, tokens, outcome, properties, asker)
            results.extend(self.driver.partition.transact(name, begins, [operation], self.now_ms))

        timed_out = key in self.transactions and self.transactions[key].timed_out
        transaction = None if by_request and timed_out else self.transact(key, by_name if by_request else by_link)
        if transaction is not None:
            if by_request:
                if refused is None:
                    transaction.operations.append(("settle", queue, tokens, outcome, properties, False))
            else:
                names = [error and error.__name__ for error in errors]
                assert [each and each[0] for each in results[0] or [None] * len(tokens)] == names
                done = [token for token, error in zip(tokens, errors, strict=True) if error is None]
                transaction.operations.append(("settle", queue, done, outcome, properties, quiet))
                transaction.failed |= quiet and refused is not None
        self.turn()

    @some_session
    @rule(key=KEYS, name=RECEIVERS, session=PERHAPS, state=STATES)
    def set_state_in(self, key, name, session, state):
        session = self.session_for(name, session) or ""
        args = [name, session, state]
        done = []

        def call(transaction, begins):
            with self.held(name, session):
                partition = self.driver.partition
                partition.request_in(transaction, begins, MAIN, requests.SetSessionState(*args), self.now_ms)
                done.append(True)

        if (transaction := self.transact(key, call)) and done:
            transaction.operations.append(("state", MAIN, *args))
        self.turn()

    @precondition(lambda self: self.transactions)
    @rule(
        key=KEYS,
        commit=st.sampled_from([True, True, True, False]),
        late_ms=st.sampled_from([0, 0, 0, 0, 1, LOCK_MS, TRANSACTION_TIME_OUT_MS]),
    )
    def discharge(self, key, commit, late_ms):
        key = key if key in self.transactions else next(iter(self.transactions))
        transaction = self.transactions.pop(key)
        self.driver.now_ms += late_ms  # and no timer came by
        lost = any(self.find(queue, each) is None for queue, tokens, *_ in transaction.settlements() for each in tokens)
        states = [operation[2:4] for operation in transaction.operations if operation[0] == "state"]
        lost = lost or not all(self.holds(name, session) for name, session in states)
        expected: type[BrokerError] | None = None
        if transaction.timed_out:
            expected = TransactionTimeout
        elif transaction.failed:
            expected = TransactionRollback
        elif transaction.deadline_ms <= self.now_ms:
            expected = TransactionTimeout
        elif lost:
            expected = TransactionRollback
        with pytest.raises(expected) if commit and expected else nullcontext():
            self.driver.partition.discharge(transaction.key, commit, self.now_ms)
        if commit and expected is None:
            self.commit(transaction)
        elif not transaction.timed_out:
            self.rolled_back(transaction)
        self.turn()

    @some_locked
    @rule(
        pick=PICK,
        outcome=st.sampled_from(Outcome),
        session=SESSIONS,
        wait=WAITS,
        message_id=IDS,
        commit=st.booleans(),
    )
    def answer(self, pick, outcome, session, wait, message_id, commit):
        """Settle one message and send another, all of it in one transaction, as most are."""
        self.settle_in("t", [pick], outcome, None, False, False, None, 0)
        self.send_in("t", MAIN, session, None, wait, message_id, False, False)
        self.discharge("t", commit, 0)

    @precondition(lambda self: self.forgotten)
    @rule(commit=st.booleans(), again=st.booleans())
    def go_on_with_one_lost_by_a_restart(self, commit, again):
        """The rest of it must not be taken for the whole."""
        key = self.forgotten.pop()
        if again:
            with pytest.raises(TransactionRollback):
                self.driver.partition.transact(
                    key, False, [SendOperation(INBOX, False, [[message("late")]])], self.now_ms
                )
        with pytest.raises(TransactionRollback) if commit else nullcontext():
            self.driver.partition.discharge(key, commit, self.now_ms)
        self.turn()

    # -- time, changes, restarts

    @rule(ms=st.sampled_from([1, 30, 40, 100, 500, 1000]))
    def wait(self, ms):
        self.driver.now_ms += ms
        self.turn()

    @rule(ms=st.sampled_from([WINDOW_MS, LOCK_MS - 1, LOCK_MS, TRANSACTION_TIME_OUT_MS]))
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
            for session, lock in [*self.locks.items()]:
                if lock.receiver is not None:
                    self.close(lock.receiver, SessionLockLost)
                self.release(session, failed=False)
            for _, m in self.locked(DEAD):
                m.token = None
        if not self.can_receive():
            for name in [*self.receivers]:
                self.close(name, EntityDisabled)
            for session in [*self.locks]:
                self.release(session, failed=False)
        self.turn()
        if self.terms.status != "Active":
            self.driver.change(status="Active")

    @rule(uncommitted=st.booleans())
    @rarely
    def restart(self, uncommitted):
        """The process ends, perhaps before a commit; what was not committed was never answered."""
        if uncommitted:
            for queue in (MAIN, INBOX):
                lost = Sent("lost", "a", message_id="1")
                self.driver.partition.send(queue, [lost.incoming()], self.now_ms)
            for queue, m in self.locked()[::2]:
                assert m.token is not None
                self.driver.partition.settle(queue, [m.token], Outcome.ACCEPTED, None, self.now_ms)
            for transaction in self.transactions.values():
                with suppress(TransactionRollback, TransactionTimeout):
                    self.driver.partition.discharge(transaction.key, True, self.now_ms)
            self.driver.partition.advance(self.now_ms)
            self.driver.store.abort()
        self.driver.restart()
        self.forgotten = [each.key for each in self.transactions.values()]
        self.transactions.clear()
        self.receivers.clear()
        self.removed.clear()
        self.locks.clear()
        for _, m in self.locked():
            m.token = None
        for queue in self.queues:
            self.next_number[queue] = self.driver.stored_counts(queue).next_sequence_number
        heads = sorted(self.to_be_had(), key=lambda session: self.available(session)[0].number)
        self.ranks.clear()
        self.latest.clear()
        for session in heads:
            self.come(session)
        self.turn()


SessionQueue.TestCase.settings = model_settings(examples=150, steps=50)
TestSessionModel = SessionQueue.TestCase
