"""Threads that do transactions, sessions and messages with ids on a broker that is killed under them, and keep books.

Each has a connection of its own, of nothing but sockets and frames, and makes another whenever it is lost.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from protocol.codec import Symbol, UInt, decode
from tests.crash_ledger.books import Book, Chains, Copies, Ending, Ids, Link, Order
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    FLOW,
    MODIFIED,
    TRANSFER,
    Closed,
    Frame,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_transactions import TRANSACTIONAL, Coordinator, within
from tests.sessions.raw_sessions import FILTER, TIMEOUT, session_of

CHAINS, SESSIONS, IDS, COPIES = "chains", "sessions", "ids", "copies"
CONFIG = f"""
[[queues]]
name = "{CHAINS}"
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[queues]]
name = "{SESSIONS}"
requires_session = true
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[queues]]
name = "{IDS}"
max_delivery_count = 2000000000
lock_duration_ms = 300000
requires_duplicate_detection = true
duplicate_detection_history_time_window_ms = 86400000

[[queues]]
name = "{COPIES}"
max_delivery_count = 2000000000
lock_duration_ms = 300000
"""
CHAIN_COUNT = 100
IN_ONE = 10  # chains that a transaction moves
KEYS = 8  # partition keys that chains have on partitioned queues
SESSION_COUNT = 16
MOST_WAITING = 1000  # messages of sessions, and with ids, above which senders pause
PATIENCE_S = 5.0
QUIET_S = 1.5  # after so long without a message there may be none
EVERYTHING = 1 << 20
DRAIN_S = 30.0  # for the answer to a drain
REFUSED_S = 0.05  # a sender that was refused pauses, as clients do that are told to come back later
# The second is the answer if it took too long.
UNDONE = ("amqp:transaction:rollback", "amqp:not-allowed", "amqp:transaction:unknown-id")
SEQUENCE_NUMBER = Symbol("x-opt-sequence-number")
PARTITION_KEY = Symbol("x-opt-partition-key")


def answers(
    peer: RawPeer, sends: Iterable[int] = (), settlements: Iterable[int] = ()
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The states that answer these deliveries, which have numbers of their own in each direction.

    Raises Closed, TimeoutError.
    """
    missing = {True: set(sends), False: set(settlements)}
    found: dict[bool, dict[int, Any]] = {True: {}, False: {}}
    while missing[True] or missing[False]:
        is_receiver, first, last, _, state, *_ = [*peer.expect(DISPOSITION, PATIENCE_S).fields, None, None, None]
        for delivery in range(int(first), int(first if last is None else last) + 1):
            if delivery in missing[is_receiver]:
                found[is_receiver][delivery] = state
                missing[is_receiver].discard(delivery)
    return found[True], found[False]


def accepted_of(states: dict[int, Any]) -> list[int]:
    """The deliveries that were accepted. After a refusal it waits a little."""
    accepted = [delivery for delivery, state in states.items() if state.descriptor == ACCEPTED]
    if len(accepted) < len(states):
        time.sleep(REFUSED_S)
    return accepted


def annotations_of(payload: bytes) -> dict[Any, Any]:
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        if section.descriptor == 0x72:
            return dict(section.value)
    return {}


class Inbox:
    """A receiver's link: frames that came, and credit that is kept up."""

    def __init__(self, peer: RawPeer, handle: int) -> None:
        self._peer = peer
        self.handle = handle
        self.count = 0

    def take(self, most: int, wait_s: float) -> list[Frame]:
        """Up to `most` messages, as many as come without a pause of `wait_s`."""
        self._peer.flow(self.handle, most, delivery_count=self.count)
        frames: list[Frame] = []
        with suppress(TimeoutError):
            while len(frames) < most:
                frames.append(self._peer.expect(TRANSFER, wait_s))
                self.count += 1
        return frames

    def rest(self) -> list[Frame]:
        """All that there are, until the broker says so. Silence may be a disk that takes seconds for a write."""
        self._peer.flow(self.handle, EVERYTHING, delivery_count=self.count, drain=True)
        while (answer := self._peer.expect(FLOW, DRAIN_S)).fields[4] != self.handle:
            pass
        self.count = answer.fields[5]
        return list(iter(partial(self._peer.take_kept, TRANSFER), None))


class Worker(threading.Thread):
    """`turn` is done again and again until `stop` is set; then as often as there is something left to do."""

    def __init__(self, port: int, seed: int, lock: threading.Lock) -> None:
        super().__init__(name=f"{type(self).__name__}-{seed}", daemon=True)
        self.port = port
        self.chance = random.Random(seed)
        self.lock = lock  # of the book, which others write, too
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.lost = 0

    def run(self) -> None:
        try:
            while not self.done():
                with suppress(OSError, Closed, TimeoutError, AssertionError), RawPeer.connect(self.port) as peer:
                    peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self.work(peer)
                self.lost += 1
                time.sleep(0.05)
        except BaseException as failure:  # whatever it is, it must be seen in the report
            self.failure = failure

    def done(self) -> bool:
        """There is nothing left to do."""
        return self.stopping.is_set()

    def work(self, peer: RawPeer) -> None:
        """Until done. Raises what a lost connection or a link that is refused brings about."""
        raise NotImplementedError

    def end(self, timeout_s: float) -> None:
        """Stop, and wait until all is done. Raises TimeoutError, and what it failed of."""
        self.stopping.set()
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError(f"{self.name} did not come to its end in {timeout_s:.0f} s")
        if self.failure is not None:
            raise self.failure


class Mover(Worker):
    """Moves chains on, some of them at a time, in transactions of which some are rolled back or left behind."""

    def __init__(
        self, port: int, seed: int, lock: threading.Lock, book: Chains, number: Callable[[], int], has_keys: bool
    ) -> None:
        """`has_keys`: each transaction is of chains with one partition key."""
        super().__init__(port, seed, lock)
        self._book = book
        self._number = number
        self._has_keys = has_keys

    def work(self, peer: RawPeer) -> None:
        sender = peer.attach_sender(CHAINS)
        inbox = Inbox(peer, peer.attach_receiver(CHAINS))
        coordinator = Coordinator(peer)
        while not self.done():
            frames = inbox.take(IN_ONE, 0.3)
            if not frames:
                continue
            groups: dict[str | None, list[tuple[Frame, Link]]] = {}
            for frame in frames:
                link = read(body_of(frame.payload))
                groups.setdefault(key_of(link) if self._has_keys else None, []).append((frame, link))
            with self.lock:
                for group in groups.values():
                    for _, link in group:
                        self._book.delivered(link)
            for group in groups.values():
                ending = self._do(peer, sender, coordinator, group)
                if ending is not Ending.COMMITTED:
                    return  # the messages stay locked for this connection, until their lock ends or it does

    def _do(self, peer: RawPeer, sender: int, coordinator: Coordinator, taken: list[tuple[Frame, Link]]) -> Ending:
        with self.lock:
            number = self._number()
            moves = self._book.begun(number, [link for _, link in taken])
        ending = Ending.UNKNOWN
        try:
            ending = self._move(peer, sender, coordinator, [frame for frame, _ in taken], moves)
        finally:
            with self.lock:
                self._book.ended(number, ending)
        return ending

    def _move(
        self, peer: RawPeer, sender: int, coordinator: Coordinator, frames: list[Frame], moves: list[Link]
    ) -> Ending:
        transaction = coordinator.declare()
        sends = [peer.transfer(encoded(link, self._has_keys), sender, state=within(transaction)) for link in moves]
        for frame in frames:
            peer.settle(frame.fields[1], state=within(transaction, outcome(ACCEPTED)))
        sent, settled = answers(peer, sends, [frame.fields[1] for frame in frames])
        fails = any(state.descriptor != TRANSACTIONAL for state in [*sent.values(), *settled.values()])
        throw = self.chance.random()
        if throw < 0.05 and not fails:
            peer.detach(coordinator.handle)
            peer.expect(DETACH, PATIENCE_S)
            return Ending.UNDONE
        fails = fails or throw < 0.15
        answer = coordinator.discharge(transaction, fails)
        if fails or answer in UNDONE:
            return Ending.UNDONE
        return Ending.COMMITTED if answer == "accepted" else Ending.UNKNOWN


def key_of(link: Link) -> str:
    return f"key-{link.chain % KEYS}"


def encoded(link: Link, has_key: bool) -> bytes:
    return message(write(link), annotations={PARTITION_KEY: key_of(link)} if has_key else None)


def write(link: Link) -> bytes:
    return json.dumps([link.chain, link.generation, link.transaction]).encode()


def read(body: bytes) -> Link:
    return Link(*json.loads(body))


class SessionSender(Worker):
    def __init__(self, port: int, seed: int, lock: threading.Lock, book: Order) -> None:
        super().__init__(port, seed, lock)
        self._book = book
        self._next = dict.fromkeys((f"s{number}" for number in range(SESSION_COUNT)), 0)

    def work(self, peer: RawPeer) -> None:
        handle = peer.attach_sender(SESSIONS)
        while not self.done():
            if self._book.accepted_count - self._book.completed_count > MOST_WAITING:
                time.sleep(0.02)
                continue
            keys = {}
            for _ in range(20):
                session = self.chance.choice([*self._next])
                number = self._next[session] = self._next[session] + 1
                encoded = message(b"%d" % number, properties=[None] * 10 + [session])
                keys[peer.transfer(encoded, handle)] = (session, number)
            for delivery in accepted_of(answers(peer, sends=keys)[0]):
                with self.lock:
                    self._book.accepted(keys[delivery])


class SessionReceiver(Worker):
    """Accepts one session after the other; once stopped, until there is none."""

    def __init__(
        self, port: int, seed: int, lock: threading.Lock, book: Order, epoch: Callable[[], int | None]
    ) -> None:
        super().__init__(port, seed, lock)
        self._book = book
        self._epoch = epoch
        self._drained = False
        self._links = 0

    def done(self) -> bool:
        return self.stopping.is_set() and self._drained

    def work(self, peer: RawPeer) -> None:
        while not self.done():
            self._links += 1
            wait_ms = int(QUIET_S * 1000) if self.stopping.is_set() else 300
            handle = peer.attach(
                sender=False,
                name=f"session-{self._links}",
                handle=7,
                source_=source(SESSIONS, filters={FILTER: None}),
                properties={TIMEOUT: UInt(wait_ms)},
            )
            attached = peer.expect(ATTACH, PATIENCE_S)
            if attached.fields[5] is None:
                condition, _ = error_of(peer.expect(DETACH, PATIENCE_S))
                self._drained = self.stopping.is_set() and condition == "com.microsoft:timeout"
                peer.detach(handle)
                continue
            session = session_of(attached)
            with self.lock:
                self._book.locked(session)
            self._receive(peer, Inbox(peer, handle), session)
            peer.detach(handle)
            peer.expect(DETACH, PATIENCE_S)
            peer.drop(TRANSFER)  # too late for us; they are in their session again

    def _receive(self, peer: RawPeer, inbox: Inbox, session: str) -> None:
        keys = {}
        for frame in inbox.take(self.chance.randint(1, 20), 0.1):
            keys[frame.fields[1]] = key = (session, int(body_of(frame.payload)))
            with self.lock:
                self._book.delivered(key)
        kept = list(keys)
        if kept and self.chance.random() < 0.2 and not self.stopping.is_set():
            peer.settle(kept.pop(), state=outcome(MODIFIED, True, False), settled=True)
        epoch = self._epoch()
        for delivery in kept:
            with self.lock:
                self._book.completing(keys[delivery])
            peer.settle(delivery)
        for delivery, state in answers(peer, settlements=kept)[1].items():
            with self.lock:
                if state.descriptor == ACCEPTED:
                    self._book.completed(keys[delivery])
                elif epoch is not None and epoch == self._epoch():  # else it may have been done
                    self._book.not_completed(keys[delivery])


class IdSender(Worker):
    def __init__(self, port: int, seed: int, lock: threading.Lock, book: Ids) -> None:
        super().__init__(port, seed, lock)
        self._book = book
        self._made = 0
        self._unanswered: set[str] = set()
        self.repeated = 0

    def done(self) -> bool:
        return self.stopping.is_set() and not self._unanswered

    def work(self, peer: RawPeer) -> None:
        handle = peer.attach_sender(IDS)
        while not self.done():
            if len(self._book.accepted) - len(self._book.completed) > MOST_WAITING:
                time.sleep(0.02)
                continue
            again = sorted(self._unanswered)
            old = sorted(self._book.accepted)[-200:]
            again += self.chance.sample(old, min(5, len(old)))
            self.repeated += len(again)
            fresh = []
            if not self.stopping.is_set():
                fresh = [f"{self.name}-{self._made + at}" for at in range(15)]
                self._made += len(fresh)
            self._unanswered.update(again, fresh)
            sent = {peer.transfer(message(b"", properties=[each]), handle): each for each in [*again, *fresh]}
            for delivery in accepted_of(answers(peer, sends=sent)[0]):
                with self.lock:
                    self._book.accepted.add(sent[delivery])
                self._unanswered.discard(sent[delivery])


class Draining(Worker):
    """Completes all that comes to `address`; once stopped, until nothing does."""

    address: str

    def __init__(self, port: int, seed: int, lock: threading.Lock) -> None:
        super().__init__(port, seed, lock)
        self._drained = False
        self.receives = threading.Event()  # it pauses while this is not set
        self.receives.set()

    def done(self) -> bool:
        return self.stopping.is_set() and self._drained

    def delivered(self, frame: Frame, number: int) -> Any:
        """Write a message with this sequence number into the book. Returns what `completed` gets. It has the lock."""
        raise NotImplementedError

    def completed(self, item: Any) -> None:
        """The broker has confirmed it. It has the lock."""
        raise NotImplementedError

    def work(self, peer: RawPeer) -> None:
        inbox = Inbox(peer, peer.attach_receiver(self.address))
        while not self.done():
            stopping = self.stopping.is_set()
            if not stopping and not self.receives.wait(0.05):
                continue
            frames = inbox.take(50, QUIET_S if stopping else 0.1)
            if stopping and not frames:
                frames = inbox.rest()
                self._drained = not frames
            items = {}
            for frame in frames:
                with self.lock:
                    number = int(annotations_of(frame.payload)[SEQUENCE_NUMBER])
                    items[frame.fields[1]] = self.delivered(frame, number)
                peer.settle(frame.fields[1])
            for delivery, state in answers(peer, settlements=items)[1].items():
                if state.descriptor == ACCEPTED:
                    with self.lock:
                        self.completed(items[delivery])


class IdReceiver(Draining):
    def __init__(self, port: int, seed: int, lock: threading.Lock, book: Ids, address: str = IDS) -> None:
        super().__init__(port, seed, lock)
        self._book = book
        self.address = address

    def delivered(self, frame: Frame, number: int) -> str:
        message_id = id_of(frame.payload)
        self._book.delivered(message_id, number)
        return message_id

    def completed(self, item: str) -> None:
        self._book.completed.add(item)


class CopySender(Worker):
    """Sends without a key."""

    def __init__(
        self, port: int, seed: int, lock: threading.Lock, book: Copies, epoch: Callable[[], int | None]
    ) -> None:
        super().__init__(port, seed, lock)
        self._book = book
        self._epoch = epoch
        self._next = 0

    def work(self, peer: RawPeer) -> None:
        handle = peer.attach_sender(COPIES)
        while not self.done():
            if self._book.accepted_count - self._book.completed_count > MOST_WAITING:
                time.sleep(0.02)
                continue
            sent = {}
            for _ in range(20):
                self._next += 1
                with self.lock:
                    self._book.sent(self._next, self._epoch())
                sent[peer.transfer(message(b"%d" % self._next), handle)] = self._next
            for delivery in accepted_of(answers(peer, sends=sent)[0]):
                with self.lock:
                    self._book.accepted(sent[delivery], self._epoch())


class CopyReceiver(Draining):
    address = COPIES

    def __init__(self, port: int, seed: int, lock: threading.Lock, book: Copies) -> None:
        super().__init__(port, seed, lock)
        self._book = book

    def delivered(self, frame: Frame, number: int) -> int:
        self._book.delivered(int(body_of(frame.payload)), number)
        return number

    def completed(self, item: int) -> None:
        self._book.completed(item)


def id_of(payload: bytes) -> str:
    at = 0
    while True:
        section, at = decode(payload, at)
        if section.descriptor == 0x73:
            return str(section.value[0])


class Workers:
    """All of them on one broker, and their books. `epoch` changes with each kill, and is None around it.

    `has_keys`: the queues are partitioned, so chains have partition keys.
    """

    def __init__(self, port: int, seed: int, epoch: Callable[[], int | None], has_keys: bool) -> None:
        self._port = port
        self._has_keys = has_keys
        self.chains, self.order, self.ids, self.copies = Chains(CHAIN_COUNT), Order(), Ids(), Copies()
        chains_lock, order_lock, ids_lock, copies_lock = (threading.Lock() for _ in range(4))
        self._last = 0
        seeds = random.Random(seed)
        movers = [
            Mover(port, seeds.randrange(1 << 30), chains_lock, self.chains, self._number, has_keys) for _ in range(2)
        ]
        self._senders: list[Worker] = [
            *movers,
            SessionSender(port, seeds.randrange(1 << 30), order_lock, self.order),
            IdSender(port, seeds.randrange(1 << 30), ids_lock, self.ids),
            CopySender(port, seeds.randrange(1 << 30), copies_lock, self.copies, epoch),
        ]
        self._receivers: list[Worker] = [
            *[SessionReceiver(port, seeds.randrange(1 << 30), order_lock, self.order, epoch) for _ in range(2)],
            IdReceiver(port, seeds.randrange(1 << 30), ids_lock, self.ids),
            CopyReceiver(port, seeds.randrange(1 << 30), copies_lock, self.copies),
        ]

    def _number(self) -> int:
        self._last += 1
        return self._last

    def start(self) -> None:
        """Needs a broker that serves."""
        with RawPeer.connect(self._port) as peer:
            handle = peer.attach_sender(CHAINS)
            links = [Link(chain, 0, 0) for chain in range(CHAIN_COUNT)]
            sent = [peer.transfer(encoded(link, self._has_keys), handle) for link in links]
            assert all(state.descriptor == ACCEPTED for state in answers(peer, sends=sent)[0].values())
        for worker in [*self._senders, *self._receivers]:
            worker.start()

    def finish(self, timeout_s: float = 60.0) -> None:
        """Stop sending, receive all that is left, and judge. Raises TimeoutError, and what a worker failed of."""
        for workers in (self._senders, self._receivers):
            for worker in workers:
                worker.stopping.set()
            for worker in workers:
                worker.end(timeout_s)
        self.chains.close(self._left())
        self.order.close()
        self.ids.close()
        self.copies.close()

    def _left(self) -> list[Link]:
        with RawPeer.connect(self._port) as peer:
            inbox = Inbox(peer, peer.attach_receiver(CHAINS))
            found: list[Link] = []
            while frames := inbox.take(CHAIN_COUNT, QUIET_S) or inbox.rest():
                found += [read(body_of(frame.payload)) for frame in frames]
            return found

    @property
    def breaches(self) -> list[str]:
        books: tuple[Book, ...] = (self.chains, self.order, self.ids, self.copies)
        return [breach for book in books for breach in book.breaches]

    def __str__(self) -> str:
        repeated = sum(worker.repeated for worker in self._senders if isinstance(worker, IdSender))
        lines = [
            f"transactions begun {self._last:,}, committed {self.chains.committed:,}",
            f"in sessions: accepted {self.order.accepted_count:,}, completed {self.order.completed_count:,}",
            f"with ids: accepted {len(self.ids.accepted):,}, completed {len(self.ids.completed):,}, "
            f"repeated {repeated:,}",
            f"without a key: accepted {self.copies.accepted_count:,}, completed {self.copies.completed_count:,}, "
            f"there twice {self.copies.doubled_count:,}",
            f"breaches in these: {len(self.breaches):,}",
            *self.breaches[:20],
        ]
        return "\n".join(lines)
