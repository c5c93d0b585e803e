"""Two namespaces in memory, and time that passes when everybody waits: what a syphon does in hours is seen in moments.

The backlog queue locks, redelivers, defers and dead-letters as Service Bus does. Faults are switched on and off; how
long an answer takes is drawn.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar
from uuid import UUID

from broker.pairing.aliases import to_backlog
from broker.pairing.syphon.draining import Counts
from broker.pairing.syphon.leases import Deferred, LeaseLost
from protocol import conditions
from protocol.client.errors import ClientError, ConnectionLost, LinkDetached, MessageRefused, RequestFailed
from protocol.client.messages import Message
from protocol.codec import Int, Long, Timestamp
from protocol.message.batches import unpack_batch
from protocol.symbols import ENQUEUED_TIME, MESSAGE_STATE, SEQUENCE_NUMBER

T = TypeVar("T")

QUEUE = "contoso/x-servicebus-transfer/0"
MOMENT_S = 1e-6  # timers of one time have no order


class _Selector(selectors.DefaultSelector):
    """Where others would wait, the time passes."""

    loop: "SimulatedLoop"

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, f"everybody waits, and nothing will happen: {asyncio.all_tasks(self.loop)}"
            self.loop.passed_s += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    passed_s: float = 0.0

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.passed_s


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """Run it in simulated time. What it leaves to the loop's log is an error."""
    faults: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        result = runner.run(work)
    assert not faults, faults
    return result


def now_s() -> float:
    return asyncio.get_running_loop().time()


# --- the secondary ----------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    message: bytes
    number: int
    state: int = 0
    holder: "MemoryBacklog | None" = None
    lock: UUID | None = None
    locked_until_s: float = 0.0
    deliveries: int = 0

    @property
    def is_locked(self) -> bool:
        return self.lock is not None and now_s() < self.locked_until_s

    def rendered(self) -> bytes:
        parsed = Message.decode(self.message)
        parsed.annotations = {
            **parsed.annotations,
            SEQUENCE_NUMBER: Long(self.number),
            ENQUEUED_TIME: Timestamp(1_000_000 + self.number),
            MESSAGE_STATE: Int(self.state),
        }
        return parsed.encode()


@dataclass
class MemoryQueue:
    """A backlog queue. In the cloud it `keeps_locks`, which outlive the connection, and does not `tells_counts`."""

    chance: Random
    path: str = QUEUE
    lock_s: float = 60.0
    keeps_locks: bool = False
    tells_counts: bool = True
    entries: dict[int, Entry] = field(default_factory=dict)
    dead: list[tuple[bytes, str]] = field(default_factory=list)
    links: "list[MemoryBacklog]" = field(default_factory=list)
    last: int = 0
    locks: int = 0
    # of the lease
    holder: "MemoryLease | None" = None
    state: Deferred | None = None
    is_given_back: bool = True

    def put(self, message: bytes, path: str | None) -> int:
        """Store a message; its sequence number."""
        self.last += 1
        self.entries[self.last] = Entry(message if path is None else to_backlog(message, path), self.last)
        self.push()
        return self.last

    def push(self) -> None:
        """Give what is free to who has credit, the lowest number first."""
        for link in self.links:
            if link.is_reachable and link.allowed > 0:
                for number in sorted(self.entries):
                    entry = self.entries[number]
                    if link.allowed > 0 and entry.state == 0 and not entry.is_locked:
                        self.lock(entry, link)
                        link.allowed -= 1
                        link.deliver(entry)

    def lock(self, entry: Entry, link: "MemoryBacklog") -> UUID:
        self.locks += 1
        entry.lock, entry.holder = UUID(int=self.locks), link
        entry.locked_until_s = now_s() + self.lock_s
        entry.deliveries += 1
        lock = entry.lock

        def end() -> None:
            if entry.lock == lock and not entry.is_locked:
                entry.lock = None
                self.push()
            elif entry.lock == lock:
                asyncio.get_running_loop().call_at(entry.locked_until_s + 0.001, end)

        asyncio.get_running_loop().call_at(entry.locked_until_s + 0.001, end)
        return lock

    def locked(self, lock: UUID) -> Entry | None:
        return next((each for each in self.entries.values() if each.lock == lock and each.is_locked), None)

    def settle(self, lock: UUID, what: str, reason: str = "") -> bool:
        entry = self.locked(lock)
        if entry is None:
            return False
        entry.lock = None
        if what in ("complete", "dead"):
            del self.entries[entry.number]
        if what == "dead":
            self.dead.append((entry.message, reason))
        if what == "defer":
            entry.state = 1
        asyncio.get_running_loop().call_soon(self.push)
        return True

    def lose_locks(self) -> None:
        """All locks end, as if the broker were started anew."""
        for entry in self.entries.values():
            entry.lock = None
        self.push()


@dataclass
class Given:
    """A delivery."""

    payload: bytes
    lock: UUID


class MemoryBacklog:
    """A syphon's link to the queue."""

    def __init__(self, queue: MemoryQueue, wire: "Wire") -> None:
        self.path = queue.path
        self.queue = queue
        self.wire = wire
        self.credit = self.allowed = 0  # as we know it, and as the queue does
        self.buffer: deque[Given] = deque()
        self.changed: Callable[[], None] = lambda: None
        self.most_held = 0
        queue.links.append(self)
        wire.links.append(self)

    @property
    def is_reachable(self) -> bool:
        return self.wire.is_up

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def deliver(self, entry: Entry) -> None:
        assert entry.lock is not None
        given = Given(entry.rendered(), entry.lock)
        held = sum(each.holder is self and each.is_locked for each in self.queue.entries.values())
        self.most_held = max(self.most_held, held)
        self.wire.later(lambda: self._came(given))

    def _came(self, given: Given) -> None:
        self.buffer.append(given)
        self.credit -= 1
        self.changed()

    def grant(self, count: int) -> None:
        self.wire.check()
        self.credit += count
        self.wire.later(lambda: self._granted(count))

    def _granted(self, count: int) -> None:
        self.allowed += count
        self.queue.push()

    def take_all(self) -> list[Given]:
        self.wire.check()
        taken = list(self.buffer)
        self.buffer.clear()
        return taken

    async def withdraw(self) -> None:
        def drained() -> int:
            allowed, self.allowed = self.allowed, 0
            return allowed

        unused = await self.wire.ask(drained)
        self.credit -= unused

    def _settle(self, given: Sequence[Given], what: str) -> "asyncio.Future[list[Given]]":
        self.wire.check()
        assert len({each.lock for each in given}) == len(given)

        def done() -> list[Given]:
            return [each for each in given if not self.queue.settle(each.lock, what)]

        return self.wire.ask(done)

    def complete(self, received: Sequence[Given]) -> "asyncio.Future[list[Given]]":
        return self._settle(received, "complete")

    def release(self, received: Sequence[Given]) -> "asyncio.Future[list[Given]]":
        return self._settle(received, "release")

    def defer(self, received: Sequence[Given]) -> "asyncio.Future[list[Given]]":
        return self._settle(received, "defer")

    def dead_letter(self, received: Given, reason: str, text: str) -> "asyncio.Future[None]":
        from protocol.client.errors import SettlementRefused

        def done() -> None:
            if not self.queue.settle(received.lock, "dead", reason):
                raise SettlementRefused(conditions.MESSAGE_LOCK_LOST, "the lock is lost")

        return self.wire.ask(done)

    async def renew(self, received: Sequence[Given]) -> None:
        def done() -> None:
            entries = [self.queue.locked(each if isinstance(each, UUID) else each.lock) for each in received]
            if None in entries:
                raise RequestFailed(conditions.MESSAGE_LOCK_LOST, "the lock is lost", 410)
            for entry in entries:
                entry.locked_until_s = now_s() + self.queue.lock_s

        await self.wire.ask(done)

    async def peek(self, from_number: int) -> list[bytes]:
        def done() -> list[bytes]:
            numbers = [number for number in sorted(self.queue.entries) if number >= from_number]
            return [self.queue.entries[number].rendered() for number in numbers[:7]]

        return await self.wire.ask(done)

    async def lock(self, numbers: Sequence[int]) -> list[tuple[UUID, bytes]]:
        def done() -> list[tuple[UUID, bytes]]:
            entries = [self.queue.entries.get(number) for number in numbers]
            found = [each for each in entries if each is not None and each.state == 1 and not each.is_locked]
            if len(found) < len(entries):
                raise RequestFailed(conditions.MESSAGE_NOT_FOUND, "not there", 404)
            return [(self.queue.lock(each, self), each.rendered()) for each in found]

        return await self.wire.ask(done)

    async def _by_locks(self, locks: Sequence[UUID], what: str, reason: str = "") -> None:
        def done() -> None:
            if any(self.queue.locked(lock) is None for lock in locks):
                raise RequestFailed(conditions.MESSAGE_LOCK_LOST, "the lock is lost", 410)
            for lock in locks:
                self.queue.settle(lock, what, reason)

        await self.wire.ask(done)

    async def complete_locked(self, locks: Sequence[UUID]) -> None:
        await self._by_locks(locks, "complete")

    async def put_back(self, locks: Sequence[UUID]) -> None:
        await self._by_locks(locks, "release")

    async def dead_letter_locked(self, lock: UUID, reason: str, text: str) -> None:
        await self._by_locks([lock], "dead", reason)

    async def counts(self) -> Counts | None:
        def done() -> Counts | None:
            if not self.queue.tells_counts:
                return None
            entries = self.queue.entries.values()
            locked, deferred = sum(each.is_locked for each in entries), sum(each.state == 1 for each in entries)
            return Counts(len(entries), locked, deferred)

        return await self.wire.ask(done)

    async def close(self) -> None:
        self.ended(broken=False)

    def ended(self, broken: bool) -> None:
        """The queue learns that the link is gone."""
        if self in self.queue.links:
            self.queue.links.remove(self)
        for entry in self.queue.entries.values():
            if entry.holder is self and not (broken and self.queue.keeps_locks):
                entry.lock = None
        self.queue.push()


class MemoryLease:
    def __init__(self, queue: MemoryQueue, wire: "Wire", seconds: float) -> None:
        self.queue = queue
        self.wire = wire
        self.seconds = seconds
        self.deferred = queue.state
        self.was_given_back, queue.is_given_back = queue.is_given_back, False
        self.may_be_given_back = True
        self.changed: Callable[[], None] = lambda: None
        self.since_s = self.until_s = now_s()
        self.is_given_back = False
        queue.holder = self
        wire.links.append(self)
        self.until_s = now_s() + seconds
        self._renewing = asyncio.create_task(self._renew())

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    @property
    def is_held(self) -> bool:
        """As the queue sees it."""
        return self.queue.holder is self and now_s() < self.until_s

    @property
    def is_lost(self) -> bool:
        """As the syphon sees it."""
        return self.is_given_back or not self.wire.is_known_up or now_s() >= self.since_s + 0.9 * self.seconds

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.seconds / 2)
            since_s = now_s()
            try:
                async with asyncio.timeout(self.seconds / 2):
                    await self.wire.ask(self._renewed)
                self.since_s = since_s
            except (ClientError, TimeoutError, LeaseLost):
                self.changed()
                return

    def _renewed(self) -> None:
        if not self.is_held:
            raise LeaseLost
        self.until_s = now_s() + self.seconds

    async def note(self, deferred: Deferred | None) -> None:
        def done() -> None:
            if not self.is_held:
                raise RequestFailed(conditions.SESSION_LOCK_LOST, "lost", 410)
            self.queue.state = deferred

        if self.is_lost:
            raise LeaseLost
        await self.wire.ask(done)
        self.deferred = deferred

    async def give_back(self) -> None:
        self.is_given_back = True
        self._renewing.cancel()
        if self.wire.is_up and not self.wire.is_stalled:
            self.queue.is_given_back = self.is_held and self.may_be_given_back
            self.ended(broken=False)

    def ended(self, broken: bool) -> None:
        if self.queue.holder is self:
            self.queue.holder = None


class Wire:
    """The connection of one syphon to the secondary. `is_stalled`: nothing passes, and nobody knows."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.is_up = True
        self.is_known_up = True
        self.is_stalled = False
        self.links: list[Any] = []
        self._stalled: list[Callable[[], None]] = []
        self._answers: set[asyncio.Future[Any]] = set()
        self._last_s = 0.0

    def check(self) -> None:
        if not self.is_known_up:
            raise ConnectionLost("", "the secondary is away")

    def later(self, act: Callable[[], None]) -> None:
        """Do it a little later, in order."""
        self._last_s = max(self._last_s + MOMENT_S, now_s() + self.chance.choice((0.0, 0.001, 0.02)))
        asyncio.get_running_loop().call_at(self._last_s, self._pass, act)

    def _pass(self, act: Callable[[], None]) -> None:
        if self.is_stalled:
            self._stalled.append(act)
        elif self.is_up:
            act()

    def ask(self, act: Callable[[], T]) -> "asyncio.Future[T]":
        """The answer of the secondary."""
        self.check()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

        def asked() -> None:
            try:
                result = act()
            except (ClientError, LeaseLost) as error:
                self.later(partial(fail, error))
            else:
                self.later(partial(succeed, result))

        def succeed(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def fail(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        self.later(asked)
        return answer

    async def trip(self) -> None:
        await self.ask(lambda: None)

    def stall(self) -> None:
        self.is_stalled = True

    def resume(self) -> None:
        self.is_stalled = False
        stalled, self._stalled = self._stalled, []
        for act in stalled:
            self.later(act)

    def cut(self, told: bool = True) -> None:
        """The connection breaks. Unless the queue is `told`, it learns of it when locks end."""
        if self.is_up:
            self.is_up = False
            for link in self.links:
                if told:
                    link.ended(broken=True)
        if self.is_known_up:
            self.is_known_up = False
            for answer in list(self._answers):
                if not answer.done():
                    answer.set_exception(ConnectionLost("", "the secondary is away"))
                    answer.exception()
            for link in self.links:
                link.changed()


# --- the primary ------------------------------------------------------------------------------------------------------


@dataclass
class Entity:
    """`fault` is what sends are refused with."""

    detects_duplicates: bool = True
    requires_session: bool = False
    limit_bytes: int = 1 << 20
    fault: str | None = None
    messages: list[tuple[Any, str | None, bytes]] = field(default_factory=list)
    ids: set[Any] = field(default_factory=set)

    def store(self, payloads: Sequence[bytes]) -> None:
        messages = [Message.decode(each) for each in payloads]
        if any(len(each) > self.limit_bytes for each in payloads):
            raise MessageRefused(conditions.LINK_MESSAGE_SIZE_EXCEEDED, "too large")
        if self.requires_session and any(each.group_id is None for each in messages):
            raise MessageRefused(conditions.NOT_ALLOWED, "no session id")
        if any(each.content_type == "poison" for each in messages):
            raise MessageRefused(conditions.ARGUMENT_ERROR, "poison")
        for each in messages:
            if not self.detects_duplicates or each.message_id not in self.ids:
                self.messages.append((each.message_id, each.group_id, each.content()))
            self.ids.add(each.message_id)


class MemoryWay:
    def __init__(self, primary: "MemoryPrimary", path: str, limit_bytes: int) -> None:
        self.primary = primary
        self.path = path
        self.limit_bytes = limit_bytes
        self.is_open = True
        self._last_s = self._answered_s = 0.0

    def send(self, message: bytes, *, is_batch: bool) -> "asyncio.Future[None]":
        primary = self.primary
        if not self.is_open:
            raise LinkDetached("", "ended")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[None] = loop.create_future()
        primary.outcomes.add(outcome)
        outcome.add_done_callback(primary.outcomes.discard)
        payloads = unpack_batch(message) if is_batch else [message]
        primary.batches.append((self.path, len(payloads)))

        def arrived() -> None:
            entity = primary.entities.get(self.path)
            error: ClientError | None = None
            if entity is None:
                error = LinkDetached(conditions.NOT_FOUND, "no such entity")
                self.is_open = False
            elif entity.fault is not None:
                error = MessageRefused(entity.fault, "not now")
            else:
                try:
                    entity.store(payloads)
                except MessageRefused as refused:
                    error = refused
            self._answered_s = max(self._answered_s + MOMENT_S, now_s() + primary.delay())
            loop.call_at(self._answered_s, answered, error)

        def answered(error: ClientError | None) -> None:
            if outcome.done():
                return
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(error)

        self._last_s = max(self._last_s + MOMENT_S, now_s() + primary.delay())
        if primary.is_up:
            loop.call_at(self._last_s, lambda: arrived() if primary.is_up or primary.stores_late else None)
        return outcome


class MemoryPrimary:
    """`stores_late`: what was sent before the connection broke arrives all the same."""

    def __init__(self, chance: Random, **entities: Entity) -> None:
        self.chance = chance
        self.entities = dict(entities)
        self.is_up = True
        self.stores_late = False
        self.slowness_s = 0.0
        self.ways: dict[str, MemoryWay] = {}
        self.outcomes: set[asyncio.Future[None]] = set()
        self.batches: list[tuple[str, int]] = []
        self.watchers: list[Callable[[], None]] = []

    def delay(self) -> float:
        return self.chance.choice((0.0, 0.001, 0.01, 0.05)) + self.slowness_s

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.watchers.append(changed)
        return lambda: self.watchers.remove(changed)

    def way(self, path: str) -> MemoryWay | None:
        way = self.ways.get(path)
        return way if way is not None and way.is_open else None

    async def open(self, path: str) -> MemoryWay:
        await asyncio.sleep(self.delay())
        if not self.is_up:
            raise ConnectionLost("", "the primary is away")
        entity = self.entities.get(path)
        if entity is None:
            raise LinkDetached(conditions.NOT_FOUND, "no such entity")
        self.ways[path] = MemoryWay(self, path, entity.limit_bytes)
        return self.ways[path]

    def go(self) -> None:
        """The connection breaks."""
        self.is_up = False
        for way in self.ways.values():
            way.is_open = False
        self.ways.clear()
        for outcome in list(self.outcomes):
            if not outcome.done():
                outcome.set_exception(ConnectionLost("", "the primary is away"))
                outcome.exception()
        self._tell()

    def come(self) -> None:
        self.is_up = True
        self._tell()

    def _tell(self) -> None:
        for changed in list(self.watchers):
            changed()
