"""Drains one backlog queue while we have its lease: waits for what happens, and does what `moving` decides.

    wait        until the locks of a syphon that did not give the lease back have ended     once
    survey      what has an earlier syphon deferred?                                        once
    drain       receive, send, complete                                     while the primary is there
    withdraw    take back the credit, release what is held                  when it goes, and in the end

A turn (`_step`) never waits. Whatever may have changed something wakes the next one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from broker.logging import get_logger
from broker.pairing.aliases import NotRestorable
from broker.pairing.costs import POLL_SECONDS
from broker.pairing.splicing import restore
from broker.pairing.syphon.blame import NOT_RESTORABLE, Blame, fault_of
from broker.pairing.syphon.budget import Budget, Limits
from broker.pairing.syphon.counters import Counters
from broker.pairing.syphon.destinations import Held
from broker.pairing.syphon.leases import Deferred, LeaseLost
from broker.pairing.syphon.moving import Batch, DeadLetter, Fetch, Mover
from broker.pairing.syphon.rate import Rate
from broker.pairing.syphon.survey import ACTIVE, DEFERRED, Seen, seen
from protocol import conditions
from protocol.client.errors import ClientError, ConnectionLost, RequestFailed, SettlementRefused
from protocol.message.batches import pack_batch

log = get_logger("syphon")

STOP_SECONDS: Final = 5.0  # for sends and settlements that are under way when the draining ends
LOCKED_SECONDS: Final = 1.0  # between two looks whether somebody else has locked messages
COUNT_SECONDS: Final = 10.0  # between two counts of the queue's messages, while it has some
RENEW_AT: Final = 0.4  # of the time that locks last
IDLE_SECONDS: Final = 0.2  # without a message, after which a queue may be empty
LOOK_SECONDS: Final = 1.0  # between two looks whether it is
REFETCH_SECONDS: Final = 2.0  # between two attempts to lock deferred messages that somebody else has locked
NUMBERS_AHEAD: Final = 100_000  # the note of what is deferred is made for so many more, so that it is rarely changed
RENEWED_AT_ONCE: Final = 500
MIN_WAIT_SECONDS: Final = 0.001
LAST_NUMBER: Final = (1 << 63) - 1
_NOT_THERE: Final = frozenset({conditions.MESSAGE_NOT_FOUND, conditions.NOT_FOUND, conditions.MESSAGE_LOCK_LOST})


class Received(Protocol):
    """A message that we have locked."""

    @property
    def payload(self) -> bytes: ...


class Backlog(Protocol):
    """A backlog queue; `broker.pairing.syphon.backlog_link` over the wire. Everything may raise ClientError.

    `complete`, `release` and `defer` give those that the backlog has not settled so, mostly because a lock was lost.
    """

    path: str

    @property
    def credit(self) -> int: ...
    def watch(self, changed: Callable[[], None]) -> None: ...
    def grant(self, count: int) -> None: ...
    def take_all(self) -> Sequence[Any]: ...
    async def withdraw(self) -> None: ...
    def complete(self, received: Sequence[Any]) -> "asyncio.Future[list[Any]]": ...
    def release(self, received: Sequence[Any]) -> "asyncio.Future[list[Any]]": ...
    def defer(self, received: Sequence[Any]) -> "asyncio.Future[list[Any]]": ...
    def dead_letter(self, received: Any, reason: str, text: str) -> "asyncio.Future[None]": ...
    async def renew(self, received: Sequence[Any]) -> None: ...
    async def peek(self, from_number: int) -> list[bytes]: ...
    async def lock(self, numbers: Sequence[int]) -> list[tuple[UUID, bytes]]: ...
    async def complete_locked(self, locks: Sequence[UUID]) -> None: ...
    async def put_back(self, locks: Sequence[UUID]) -> None: ...
    async def dead_letter_locked(self, lock: UUID, reason: str, text: str) -> None: ...
    async def counts(self) -> "Counts | None": ...


class Counts(NamedTuple):
    """The messages in a backlog queue, without scheduled ones, and those of them that are locked, and deferred."""

    messages: int
    locked: int
    deferred: int


class Way(Protocol):
    limit_bytes: int

    def send(self, message: bytes, *, is_batch: bool) -> "asyncio.Future[None]": ...


class Primary(Protocol):
    """`broker.pairing.syphon.primary` over the wire."""

    @property
    def is_up(self) -> bool: ...
    def way(self, path: str) -> Way | None: ...
    async def open(self, path: str) -> Way: ...
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]: ...


class Lease(Protocol):
    """`was_given_back`: who had it before has left no locks. `may_be_given_back`: nor do we."""

    deferred: Deferred | None
    was_given_back: bool
    may_be_given_back: bool

    @property
    def is_lost(self) -> bool: ...
    def watch(self, changed: Callable[[], None]) -> None: ...
    async def note(self, deferred: Deferred | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """`lock_s`: how long locks of the queue last. `once`: end when the queue is empty."""

    limits: Limits = field(default_factory=Limits)
    lock_s: float = 60.0
    once: bool = False


class Drain:
    """`taken` is that of `Mover`."""

    def __init__(
        self,
        backlog: Backlog,
        primary: Primary,
        lease: Lease,
        taken: dict[int, int],
        counters: Counters,
        rate: Rate,
        options: Options,
    ) -> None:
        self._backlog = backlog
        self._primary = primary
        self._lease = lease
        self._mover = Mover(taken)
        self._counters = counters
        self._queue = counters.queues[backlog.path]
        self._rate = rate
        self._options = options
        self._budget = Budget(options.limits)
        self._event = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._settling = 0  # settlements without an answer yet
        self._is_stopping = False
        self._fault: BaseException | None = None
        self._is_noting = False
        now_s = self._now_s
        self._poll_ends_s = now_s + POLL_SECONDS
        self._renew_s = now_s
        self._count_s = now_s
        self._look_s: float | None = None  # when to look whether the queue is empty, if nothing comes before
        self._counts = True  # the backlog tells how many messages it has
        self._locked: int | None = None
        self._lie_deferred: int | None = None

    # -- from outside

    def stop(self) -> None:
        """Let `run` end soon."""
        self._is_stopping = True
        self._event.set()

    async def run(self) -> None:
        """Drain until `stop`, or until the queue is empty with `once`.

        Raises what ends it otherwise: LeaseLost, ClientError or TimeoutError.
        """
        self._backlog.watch(self._event.set)
        self._lease.watch(self._event.set)
        unwatch = self._primary.watch(self._event.set)
        try:
            await self._wait_for_locks()
            await self._survey()
            while not self._is_over:
                if self._primary.is_up:
                    await self._drain()
                    if not self._is_over:
                        await self._withdraw(None)
                else:
                    await self._wait(None)
            self._check()
        except BaseException as error:
            self._fault = self._fault or error
            raise
        finally:
            unwatch()
            try:
                await self._end()
            finally:
                self._fault = None  # it refers to these calls

    @property
    def _is_over(self) -> bool:
        return self._is_stopping or self._fault is not None or self._lease.is_lost

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._lease.is_lost:
            raise LeaseLost

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _now_ms(self) -> int:
        return int(self._now_s * 1000)

    async def _wait(self, seconds: float | None) -> None:
        """Wait until something may have changed, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()

    # -- before the first message

    async def _wait_for_locks(self) -> None:
        """Wait until the locks of the syphon that had the lease before have ended, unless it has given them back.

        It was killed, paused or cut off. Its messages are before those that we can get, and may have been sent or not.
        """
        await self._count()
        wait_s = 0 if self._lease.was_given_back else self._options.lock_s
        ends_s = self._now_s + wait_s
        if wait_s and self._locked != 0:
            log.info("waiting for the end of another syphon's locks", queue=self._backlog.path, at_most_s=wait_s)
        while not self._is_over and self._locked != 0 and (left_s := ends_s - self._now_s) > 0:
            await self._wait(min(left_s, LOCKED_SECONDS if self._locked else left_s))
            await self._count()

    async def _survey(self) -> None:
        """Find what an earlier syphon has deferred, and not moved."""
        noted = self._lease.deferred
        if noted is not None:
            await self._look(noted.low, noted.high)

    async def _look(self, low: int, high: int) -> bool:
        """Put what is deferred with these numbers on its shelves, and note it. True if there are no messages."""
        is_empty = True
        deferred: list[int] = []
        async for each in self._peeked(low, high):
            is_empty = False
            if each.state == DEFERRED and each.path is not None:
                self._mover.put_on_shelf(each.path, [each.number], self._now_ms)
                deferred = [*deferred[:1], each.number]
            elif each.state == DEFERRED:
                await self._drop_deferred(each.number)
        if deferred and self._lease.deferred is None:
            await self._lease.note(Deferred(deferred[0], deferred[-1]))
        return is_empty

    async def _drop_deferred(self, number: int) -> None:
        """Dead-letter a message without a destination, which no syphon has deferred."""
        try:
            locked = await self._backlog.lock([number])
        except RequestFailed as error:
            log.warning("a deferred message has no destination", queue=self._backlog.path, reason=str(error))
            return
        for lock, _ in locked:
            await self._drop(lock, "The message has no destination.")

    async def _drop(self, lock: UUID, text: str) -> None:
        """Dead-letter a deferred message that cannot be restored. If that fails, it is found again later."""
        try:
            await self._backlog.dead_letter_locked(lock, NOT_RESTORABLE, text)
        except RequestFailed as error:
            log.warning("a deferred message cannot be restored", queue=self._backlog.path, reason=f"{text} {error}")
        else:
            self._counters.dead_lettered[NOT_RESTORABLE] += 1

    async def _peeked(self, low: int, high: int) -> AsyncIterator[Seen]:
        """Messages with numbers from low to high, but scheduled ones, in order."""
        while low <= high and not self._is_over:
            page = [found for found in map(seen, await self._backlog.peek(low)) if found is not None]
            for found in page:
                if found.number > high:
                    return
                if found.state in (ACTIVE, DEFERRED):
                    yield found
            if not page:
                return
            low = max(page[-1].number, low) + 1

    # -- drain

    async def _drain(self) -> None:
        """Move messages while the primary is there."""
        self._poll_ends_s = self._now_s + POLL_SECONDS
        self._look_s = self._now_s + IDLE_SECONDS
        while not self._is_over and self._primary.is_up:
            self._event.clear()
            self._step()
            if self._is_idle and self._look_s is not None and self._now_s >= self._look_s:
                if await self._is_empty():
                    self._is_stopping = True
                    return
            elif self._budget.is_exceeded(self._mover.held_bytes, self._backlog.credit):
                await self._backlog.withdraw()
            await self._wait(self._until_deadline_s())

    def _step(self) -> None:
        """Take what has come, and do what can be done now."""
        now_s, now_ms = self._now_s, self._now_ms
        for received in self._backlog.take_all():
            self._take(received)
        self._mover.tick(now_ms)
        self._send()
        aside = self._mover.aside - self._mover.shelved  # those on their way to shelves and from them
        for fetch in self._mover.fetches(self._options.limits.messages // 4 - aside):
            self._spawn(self._fetch(fetch))
        self._settle()
        self._grant()
        self._note_less()
        if now_s >= self._poll_ends_s:
            self._counters.polls += 1
            self._poll_ends_s = now_s + POLL_SECONDS
        if now_s >= self._renew_s:
            self._renew_s = now_s + self._options.lock_s * RENEW_AT / 2
            self._renew(now_ms)
        if now_s >= self._count_s and self._counts and (self._mover or self._queue.backlog):
            self._count_s = now_s + COUNT_SECONDS
            self._spawn(self._count())
        self._queue.deferred = self._mover.shelved
        for failed in self._mover.failures:
            if failed.is_first:
                log.warning("destination takes no messages for now", entity=failed.destination, reason=failed.text)
        self._mover.failures.clear()

    def _until_deadline_s(self) -> float:
        """The time until a step is due although nothing happens."""
        now_s = self._now_s
        due_s = [self._poll_ends_s]
        if self._mover or self._queue.backlog:
            due_s.append(self._renew_s)
            if self._counts:
                due_s.append(self._count_s)
        deadline_ms = self._mover.deadline_ms(self._now_ms)
        if deadline_ms is not None:
            due_s.append(deadline_ms / 1000)
        if self._mover.ready() is not None:
            due_s.append(now_s + self._rate.wait_s)
        if self._look_s is not None and self._is_idle:
            due_s.append(self._look_s)
        return max(MIN_WAIT_SECONDS, min(due_s) - now_s)

    def _take(self, received: Received) -> None:
        """A message came."""
        now_s = self._now_s
        self._poll_ends_s = now_s + POLL_SECONDS
        self._look_s = now_s + IDLE_SECONDS
        self._budget.came(len(received.payload))
        try:
            restored = restore(received.payload, self._backlog.path, int(time.time() * 1000))
        except NotRestorable as error:
            self._reject(received, NOT_RESTORABLE, str(error))
        else:
            self._mover.take(received, restored, int(now_s * 1000))

    def _reject(self, received: Received, reason: str, text: str) -> None:
        """Dead-letter a message that no lane knows. If that fails, it comes again."""

        def done(answer: "asyncio.Future[None]") -> None:
            if self._has_settled(answer):
                self._counters.dead_lettered[reason] += 1

        self._await(self._backlog.dead_letter(received, reason, text), done)

    # -- sending

    def _send(self) -> None:
        mover, rate = self._mover, self._rate
        now_s = self._now_s
        while (lane := mover.ready()) is not None:
            most = rate.available(now_s)
            if most <= 0:
                return
            path = lane.destination.name
            way = self._primary.way(path)
            if way is None:
                mover.hold(lane)
                if path not in self._opening:
                    self._opening[path] = self._spawn(self._open(path, lane.destination.era))
                continue
            batch = mover.next_batch(lane, way.limit_bytes, most)
            if batch is not None:
                rate.use(len(batch.held))
                self._post(way, batch)

    def _post(self, way: Way, batch: Batch) -> None:
        messages = [held.message for held in batch.held]
        is_batch = len(messages) > 1
        try:
            outcome = way.send(pack_batch(messages) if is_batch else messages[0], is_batch=is_batch)
        except ClientError as error:
            self._mover.failed(batch, fault_of(error), self._now_ms)
        else:
            outcome.add_done_callback(partial(self._sent, batch))

    def _sent(self, batch: Batch, outcome: "asyncio.Future[None]") -> None:
        error = None if outcome.cancelled() else outcome.exception()
        if error is None and not outcome.cancelled():
            self._mover.accepted(batch)
            self._counters.moved += len(batch.held)
            self._counters.moved_bytes += sum(held.size for held in batch.held)
        else:
            self._mover.failed(batch, fault_of(error or ConnectionLost("", "the send was given up")), self._now_ms)
        self._event.set()

    async def _open(self, path: str, era: int) -> None:
        try:
            await self._primary.open(path)
        except (ClientError, TimeoutError) as error:
            fault = fault_of(error)
            if fault.blame is Blame.PRIMARY:  # if it is there again, the way can be opened
                self._mover.opened(path)
            else:
                self._mover.unreachable(path, era, fault, self._now_ms)
        else:
            self._mover.opened(path)
        finally:
            del self._opening[path]
            self._event.set()

    # -- settling

    def _settle(self) -> None:
        """Tell the backlog what has become of messages."""
        mover, backlog = self._mover, self._backlog
        if mover.to_complete:
            done, mover.to_complete = mover.to_complete, []
            delivered = [held for held in done if not held.is_shelved]
            if delivered:
                sources = [held.source for held in delivered]
                self._await(backlog.complete(sources), partial(self._completed, delivered, sources))
            if len(delivered) < len(done):
                self._spawn(self._complete_locked([held for held in done if held.is_shelved]))
        if mover.to_put_back:
            held, mover.to_put_back = mover.to_put_back, []
            self._spawn(self._put_back(held))
        if mover.to_dead_letter:
            dead, mover.to_dead_letter = mover.to_dead_letter, []
            for each in dead:
                self._dead_letter(each)
        if mover.to_defer and not self._is_noting:
            numbers = [held.number for held in mover.to_defer]
            low, high = min(numbers), max(numbers)
            noted = self._lease.deferred
            if noted is not None and noted.low <= low and high <= noted.high:
                held, mover.to_defer = mover.to_defer, []
                sources = [each.source for each in held]
                self._await(backlog.defer(sources), partial(self._deferred, held, sources))
            else:
                if noted is not None:
                    low, high = min(low, noted.low), max(high, noted.high)
                self._is_noting = True
                self._spawn(self._note(Deferred(low, min(high + NUMBERS_AHEAD, LAST_NUMBER))))

    def _await(self, answer: "asyncio.Future[Any]", done: "Callable[[asyncio.Future[Any]], None]") -> None:
        self._settling += 1

        def answered(answer: "asyncio.Future[Any]") -> None:
            self._settling -= 1
            done(answer)
            self._event.set()

        answer.add_done_callback(answered)

    def _has_settled(self, answer: "asyncio.Future[Any]") -> bool:
        """True if the backlog has answered as it was asked."""
        error = None if answer.cancelled() else answer.exception()
        if error is not None and not isinstance(error, SettlementRefused):
            self._fail(error)  # the link has ended
        return error is None and not answer.cancelled()

    def _completed(self, held: list[Held], sources: list[Any], answer: "asyncio.Future[list[Any]]") -> None:
        if not self._has_settled(answer):
            return
        for each, source in self._refused(held, sources, answer.result()):
            self._mover.completion_lost(each, source)
        self._mover.settled(held)
        self._counters.completed += len(held)

    def _deferred(self, held: list[Held], sources: list[Any], answer: "asyncio.Future[list[Any]]") -> None:
        if not self._has_settled(answer):
            return
        for each, source in self._refused(held, sources, answer.result()):
            self._mover.deferral_lost(each, source)
        self._mover.deferred(held)
        self._counters.deferrals += len(held)

    @staticmethod
    def _refused(held: list[Held], sources: list[Any], refused: list[Any]) -> list[tuple[Held, Any]]:
        """The messages that were not settled, with the locks that were tried; `held` keeps the others."""
        if not refused:
            return []
        lost = {id(each) for each in refused}
        pairs = list(zip(held, sources, strict=True))
        held[:] = [each for each, source in pairs if id(source) not in lost]
        return [pair for pair in pairs if id(pair[1]) in lost]

    def _dead_letter(self, dead_letter: DeadLetter) -> None:
        held, reason, text = dead_letter
        if held.is_shelved:
            self._spawn(self._dead_letter_locked(dead_letter))
            return
        source = held.source

        def done(answer: "asyncio.Future[None]") -> None:
            if self._has_settled(answer):
                self._is_dead(dead_letter)
            else:
                self._mover.dead_letter_lost(dead_letter, source)

        self._await(self._backlog.dead_letter(source, reason, text), done)

    def _is_dead(self, dead_letter: DeadLetter) -> None:
        self._counters.dead_lettered[dead_letter.reason] += 1
        self._mover.settled([dead_letter.held])
        log.warning(
            "message dead-lettered",
            queue=self._backlog.path,
            number=dead_letter.held.number,
            destination=dead_letter.held.lane.destination.name,
            reason=dead_letter.reason,
            text=dead_letter.text,
        )

    # -- settling what was deferred

    async def _note(self, deferred: Deferred) -> None:
        await self._lease.note(deferred)
        self._is_noting = False

    def _note_less(self) -> None:
        """When nothing is deferred any more, the next holder of the lease need not look."""
        if self._lease.deferred is not None and not self._mover.aside and not self._is_noting:
            self._is_noting = True
            self._spawn(self._note_nothing())

    async def _note_nothing(self) -> None:
        # Nothing is deferred meanwhile, because that waits for the end of this note.
        await self._lease.note(None)
        self._is_noting = False

    async def _fetch(self, fetch: Fetch) -> None:
        """Lock deferred messages, and give them to the lanes."""
        numbers = fetch.numbers
        missing: list[int] = []
        unlocked: list[int] = []
        try:
            await self._lock(numbers, missing, unlocked)
            if len(unlocked) == len(numbers):
                await asyncio.sleep(REFETCH_SECONDS)
        finally:
            self._mover.fetched(fetch, missing, unlocked=unlocked)

    async def _lock(self, numbers: Sequence[int], missing: list[int], unlocked: list[int]) -> None:
        """Halve what the backlog refuses, until it is known which messages it cannot give, and why.

        After one that is locked by somebody else all others wait, too, so that they keep their order.
        """
        if unlocked:
            unlocked += numbers
            return
        try:
            found = await self._backlog.lock(numbers)
        except RequestFailed as error:
            if len(numbers) > 1:
                if error.condition not in _NOT_THERE:
                    self._mover.fetch_less()
                half = len(numbers) // 2
                await self._lock(numbers[:half], missing, unlocked)
                await self._lock(numbers[half:], missing, unlocked)
                return
            page = await self._backlog.peek(numbers[0])
            there = next(filter(None, map(seen, page)), None)
            is_there = there is not None and there.number == numbers[0] and there.state == DEFERRED
            (unlocked if is_there else missing).extend(numbers)
            return
        now_ms = self._now_ms
        gone = set(numbers)
        for lock, payload in found:
            try:
                restored = restore(payload, self._backlog.path, int(time.time() * 1000))
            except NotRestorable as error:
                await self._drop(lock, str(error))
                continue
            gone.discard(restored.number)
            self._mover.take(lock, restored, now_ms, shelved=True)
        missing += gone

    async def _complete_locked(self, held: list[Held]) -> None:
        sources = [each.source for each in held]
        try:
            await self._backlog.complete_locked(sources)
        except RequestFailed:
            for each, source in zip(held, sources, strict=True):
                self._mover.completion_lost(each, source)
        else:
            self._mover.settled(held)
            self._counters.completed += len(held)

    async def _put_back(self, held: list[Held]) -> None:
        with suppress(RequestFailed):  # their locks are lost: they are back already
            await self._backlog.put_back([each.source for each in held])
        self._mover.put_back(held)

    async def _dead_letter_locked(self, dead_letter: DeadLetter) -> None:
        held, reason, text = dead_letter
        source = held.source
        try:
            await self._backlog.dead_letter_locked(source, reason, text)
        except RequestFailed:
            self._mover.dead_letter_lost(dead_letter, source)
        else:
            self._is_dead(dead_letter)

    # -- credit, locks, counts

    def _grant(self) -> None:
        held = min(len(self._mover), self._options.limits.messages)
        credit = self._backlog.credit
        count = self._budget.credit_to_grant(held, self._mover.held_bytes, credit)
        if count > 0:
            self._backlog.grant(count)

    def _renew(self, now_ms: int) -> None:
        """Renew locks that will end before the next look."""
        aging = self._mover.aging(now_ms - int(self._options.lock_s * RENEW_AT * 1000))
        for start in range(0, len(aging), RENEWED_AT_ONCE):
            self._spawn(self._renew_some(aging[start : start + RENEWED_AT_ONCE]))

    async def _renew_some(self, held: list[Held]) -> None:
        """Locks that are lost do no harm: the messages come again."""
        now_ms = self._now_ms
        with suppress(RequestFailed):
            await self._backlog.renew([each.source for each in held])
            for each in held:
                each.locked_ms = now_ms

    async def _count(self) -> None:
        counts = await self._backlog.counts()
        self._counts = counts is not None
        self._queue.backlog, self._locked, self._lie_deferred = counts or (None, None, None)

    # -- the end of the messages

    @property
    def _is_idle(self) -> bool:
        """We hold nothing, and nothing is under way."""
        return not (self._mover or self._mover.aside or self._settling or self._is_noting)

    async def _is_empty(self) -> bool:
        """Look through what is left, for messages that are deferred although nobody has noted it.

        True if there is nothing, and that is what we wait for.
        """
        once = self._options.once
        self._look_s = self._now_s + LOOK_SECONDS if once else None
        if once:
            await self._backlog.withdraw()
        if self._counts:
            await self._count()
        # Looking through a queue costs as much as receiving it, so the counts are asked first.
        was_empty = self._queue.backlog == 0 if self._lie_deferred == 0 else await self._look(0, LAST_NUMBER)
        return once and was_empty and not self._take_rest() and self._is_idle

    def _take_rest(self) -> int:
        taken = self._backlog.take_all()
        for received in taken:
            self._take(received)
        return len(taken)

    # -- withdraw

    async def _withdraw(self, seconds: float | None) -> None:
        """Take the credit back, wait for what is under way, but no longer than that, and release the rest."""
        ends_s = None if seconds is None else self._now_s + seconds
        await self._backlog.withdraw()
        self._take_rest()
        await self._until(lambda: not self._mover.in_flight, ends_s)
        self._take_rest()
        self._settle()
        if not self._mover.in_flight:  # else the end of the link gives them back
            released = self._mover.release()
            self._counters.released += len(released)
            if released:
                log.info("messages released", queue=self._backlog.path, count=len(released))
                await self._backlog.release([held.source for held in released])
        await self._until(self._is_settled, ends_s)

    def _is_settled(self) -> bool:
        self._settle()
        return not (self._settling or self._is_noting or self._tasks)

    async def _until(self, is_so: Callable[[], bool], ends_s: float | None) -> None:
        while not is_so() and self._fault is None:
            left_s = None if ends_s is None else ends_s - self._now_s
            if left_s is not None and left_s <= 0:
                return
            await self._wait(left_s)

    async def _end(self) -> None:
        """Leave nothing under way. What the primary has taken is known to the next drain of the queue here."""
        try:
            if self._fault is None:
                await self._withdraw(STOP_SECONDS)
        except (ClientError, TimeoutError) as error:
            log.debug("the queue was not left in order", queue=self._backlog.path, reason=str(error))
        finally:
            for task in list(self._tasks):
                task.cancel()
            while self._mover.in_flight and not self._is_stopping:
                await self._wait(None)
            self._lease.may_be_given_back = not self._mover and self._fault is None

    # -- tasks

    def _fail(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._event.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._event.set()
