"""Threads on topics, scheduled messages and large ones, and their books: what `crash_ledger` has no load for."""

import random
import threading
import time
from collections.abc import Callable, Sequence

from broker.catalog.catalog import home_partition
from protocol.codec import Symbol, Timestamp
from tests.crash_ledger.books import Ids
from tests.crash_ledger.workers import IdReceiver, Worker, accepted_of, answers
from tests.end_to_end.raw_peer import RawPeer, message

PARTITIONS = 4
TOPIC, SCHEDULED = "news", "later"
# On the last partition, as it is its tables that find no room: the checkpoint is in those of the others by then.
LARGE = next(name for name in map("large-{}".format, range(99)) if home_partition(name, PARTITIONS) == PARTITIONS - 1)
SUBSCRIPTIONS = ("all", "red")
COLOURS = ("red", "blue")
ENQUEUE_TIME = Symbol("x-opt-scheduled-enqueue-time")
LARGE_BYTES = 30_000
AT_ONCE, LARGE_AT_ONCE = 10, 40
MOST_WAITING, MOST_LARGE_WAITING = 500, 5000  # messages above which a sender pauses
CONFIG = f"""
[[queues]]
name = "{SCHEDULED}"
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[queues]]
name = "{LARGE}"
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[topics]]
name = "{TOPIC}"

[[topics.subscriptions]]
name = "all"
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[topics.subscriptions]]
name = "red"
max_delivery_count = 2000000000
lock_duration_ms = 300000
[[topics.subscriptions.rules]]
name = "red"
filter = {{ kind = "sql", expression = "colour = 'red'" }}
"""


def news(message_id: str, chance: random.Random) -> bytes:
    return message(b"", properties=[message_id], application={"colour": colour_of(message_id)})


def colour_of(message_id: str) -> str:
    return COLOURS[int(message_id.rpartition("-")[2]) % 2]


def later(message_id: str, chance: random.Random) -> bytes:
    due_ms = int(time.time() * 1000) + chance.randint(1, 3000)
    return message(b"", properties=[message_id], annotations={ENQUEUE_TIME: Timestamp(due_ms)})


def large(message_id: str, chance: random.Random) -> bytes:
    return message(chance.randbytes(64) * (LARGE_BYTES // 64), properties=[message_id])


def waiting(book: Ids) -> int:
    return len(book.accepted) - len(book.completed)


class OnceSender(Worker):
    """Sends each message once. `books_of` has the books of those who are to get it."""

    def __init__(
        self,
        port: int,
        seed: int,
        lock: threading.Lock,
        address: str,
        made: Callable[[str, random.Random], bytes],
        books_of: Callable[[str], Sequence[Ids]],
        most_waiting: int = MOST_WAITING,
        at_once: int = AT_ONCE,
    ) -> None:
        super().__init__(port, seed, lock)
        self._address, self._made, self._books_of = address, made, books_of
        self._most_waiting, self._at_once = most_waiting, at_once
        self._first_id = f"{self.name}-0"
        self.sent = 0

    def work(self, peer: RawPeer) -> None:
        handle = peer.attach_sender(self._address)
        while not self.done():
            [first, *_] = self._books_of(self._first_id)
            if waiting(first) > self._most_waiting:
                time.sleep(0.02)
                continue
            sent = {}
            for _ in range(self._at_once):
                message_id = f"{self.name}-{self.sent}"
                self.sent += 1
                sent[peer.transfer(self._made(message_id, self.chance), handle)] = message_id
            for delivery in accepted_of(answers(peer, sends=sent)[0]):
                with self.lock:
                    for book in self._books_of(sent[delivery]):
                        book.accepted.add(sent[delivery])


class MoreLoad:
    """All of them on one broker, and their books."""

    def __init__(self, port: int, seed: int) -> None:
        seeds = random.Random(seed)
        self._port = port
        self.books = {name: Ids() for name in (*SUBSCRIPTIONS, SCHEDULED, LARGE)}

        def lock() -> threading.Lock:
            return threading.Lock()

        def subscribers(message_id: str) -> list[Ids]:
            return [self.books[name] for name in (SUBSCRIPTIONS if colour_of(message_id) == "red" else ("all",))]

        self._senders = [
            OnceSender(port, seeds.randrange(1 << 30), topic_lock := lock(), TOPIC, news, subscribers),
            OnceSender(
                port, seeds.randrange(1 << 30), scheduled_lock := lock(), SCHEDULED, later, self._book(SCHEDULED)
            ),
            OnceSender(
                port,
                seeds.randrange(1 << 30),
                large_lock := lock(),
                LARGE,
                large,
                self._book(LARGE),
                MOST_LARGE_WAITING,
            ),
        ]
        self.large = IdReceiver(port, seeds.randrange(1 << 30), large_lock, self.books[LARGE], LARGE)
        self._receivers = [
            *[
                IdReceiver(
                    port, seeds.randrange(1 << 30), topic_lock, self.books[name], f"{TOPIC}/Subscriptions/{name}"
                )
                for name in SUBSCRIPTIONS
            ],
            IdReceiver(port, seeds.randrange(1 << 30), scheduled_lock, self.books[SCHEDULED], SCHEDULED),
            self.large,
        ]

    @property
    def backlog(self) -> int:
        """Large messages that wait."""
        return waiting(self.books[LARGE])

    def _book(self, name: str) -> Callable[[str], list[Ids]]:
        return lambda _: [self.books[name]]

    def start(self) -> None:
        for worker in (*self._senders, *self._receivers):
            worker.start()

    def finish(self, timeout_s: float = 60.0) -> None:
        """Stop sending, receive all that is left, and judge. Raises TimeoutError, and what a worker failed of."""
        for sender in self._senders:
            sender.end(timeout_s)
        time.sleep(3.0)  # the last of the scheduled messages is due
        for worker in self._receivers:
            worker.end(timeout_s)
        for book in self.books.values():
            book.close()

    @property
    def breaches(self) -> list[str]:
        return [f"{name}: {breach}" for name, book in self.books.items() for breach in book.breaches]

    def __str__(self) -> str:
        counts = [
            f"{name}: accepted {len(book.accepted):,}, completed {len(book.completed):,}"
            for name, book in self.books.items()
        ]
        return "\n".join([*counts, *self.breaches[:20]])
