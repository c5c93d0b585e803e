"""What a broker does while it is traced: threads that use all that changes its stores, and mark what they are answered.

Each lane has entities of its own and its own connections. It marks an operation before it asks for it and when it was
answered. When its connection is lost, what was not answered stays in doubt.
"""

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from protocol.codec import Array, Long, Symbol, Timestamp, UInt
from tests.crash_ledger.workers import answers
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    BATCH_FORMAT,
    DETACH,
    MODIFIED,
    REJECTED,
    TRANSFER,
    Closed,
    Frame,
    RawPeer,
    batch,
    body_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import TRANSACTIONAL, Coordinator, within
from tests.power_loss.books import RELAY, SOON, SOURCE, TARGET, Unit, key_of
from tests.power_loss.books import body_of as body_for
from tests.power_loss.trace import Marker
from tests.sessions.raw_sessions import accept, annotations_of

ENTITIES = ["one", "many", "large", "sessions", "later", "ids", "moves", "moved", "restless", SOURCE, TARGET]
PARTITIONS, WORKERS = 3, 2
CONFIG = (
    """
[store]
map_size_bytes = 268435456
log_bytes = 8388608
"""
    + "".join(
        f"""
[[queues]]
name = "{name}"
max_delivery_count = 2000000000
lock_duration_ms = 300000
requires_session = {str(name == "sessions").lower()}
requires_duplicate_detection = {str(name == "ids").lower()}
duplicate_detection_history_time_window_ms = 86400000
{f'forward_to = "{TARGET}"' if name == SOURCE else ""}
"""
        for name in ENTITIES
    )
    + """
[[topics]]
name = "news"

[[topics.subscriptions]]
name = "all"
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[topics.subscriptions]]
name = "even"
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[topics.subscriptions.rules]]
name = "even"
filter = { kind = "sql", expression = "even = TRUE" }

[[topics]]
name = "ruled"

[[topics.subscriptions]]
name = "by-many"
"""
)
ADDED = "added"  # a queue that a later configuration declares
CONFIG_WITH_ADDED = f"""{CONFIG}
[[queues]]
name = "{ADDED}"
"""

MOST_WAITING = 24  # messages of a lane above which it only receives
FRAME_BYTES = 1 << 15
QUIET_S = 0.15  # after so long without a message there is none
PATIENCE_S = 10.0
RECONNECT_AFTER_S = 0.1
END_S = 30.0
DEAD = "/$dlq"
SCHEDULE_AT = Symbol("x-opt-scheduled-enqueue-time")
SEQUENCE_NUMBER = Symbol("x-opt-sequence-number")
COMPLETE = outcome(ACCEPTED)
ABANDON = outcome(MODIFIED, True, False)
DEFER = outcome(MODIFIED, False, True)
DEAD_LETTER = outcome(REJECTED)


class Wrong(Exception):
    """The broker refused what it must not refuse, or delivered what nobody sent."""


BUSY = "com.microsoft:server-busy"  # nothing was done; the lane tries something else a little later
UNKNOWN = "it is not known whether"


class Scribe:
    """Writes marks, and numbers operations and keys."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._numbers = itertools.count(1)
        self._keys = itertools.count(1)
        self.operations = 0

    def key(self, prefix: str = "m-") -> str:
        return f"{prefix}{next(self._keys)}"

    @contextmanager
    def operation(
        self, adds: Iterable[Unit] = (), removes: Iterable[Unit] = (), values: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """The body asks for it and has its answer. If it raises, the operation stays in doubt."""
        number = next(self._numbers)
        self._marker.mark(begin=number, adds=list(adds), removes=list(removes), values=values or {})
        try:
            yield
        except BaseException:
            self._marker.mark(doubtful=number)
            raise
        self._marker.mark(done=number)
        self.operations += 1


class Connection:
    """One connection with a sender to any entity, or a receiver of one."""

    def __init__(self, port: int) -> None:
        self.peer = RawPeer.connect(port)
        self._senders: dict[str, int] = {}
        self._receivers: dict[str, list[int]] = {}  # handle, deliveries so far

    def close(self) -> None:
        self.peer.socket.close()

    def send(self, address: str, *payloads: bytes, format_: int = 0, state: Any = None) -> None:
        """Returns when all were accepted."""
        if address not in self._senders:
            self._senders[address] = self.peer.attach_sender(address)
        sent = [self._transfer(self._senders[address], payload, format_, state) for payload in payloads]
        _check(answers(self.peer, sends=sent)[0].values())

    def _transfer(self, handle: int, payload: bytes, format_: int, state: Any) -> int:
        parts = [payload[at : at + FRAME_BYTES] for at in range(0, len(payload), FRAME_BYTES)]
        delivery = 0
        for number, part in enumerate(parts):
            more = number < len(parts) - 1
            first = number == 0
            delivery = self.peer.transfer(
                part, handle, message_format=format_, more=more, first=first, state=state if first else None
            )
        return delivery

    def take(self, address: str, most: int) -> list[tuple[int, str, bytes]]:
        """Delivery id, key, payload of up to `most` messages. The connection receives from this address alone."""
        if address not in self._receivers:
            self._receivers[address] = [self.peer.attach_receiver(address), 0]
        return self.take_from(self._receivers[address], most)

    def take_from(self, link: list[int], most: int) -> list[tuple[int, str, bytes]]:
        self.peer.flow(link[0], most, delivery_count=link[1])
        taken: list[tuple[int, str, bytes]] = []
        with suppress(TimeoutError):
            while len(taken) < most:
                frames = [self.peer.expect(TRANSFER, QUIET_S)]
                while _has_more(frames[-1]):
                    frames.append(self.peer.expect(TRANSFER, PATIENCE_S))
                link[1] += 1
                payload = b"".join(frame.payload for frame in frames)
                key = key_of(body_of(payload))
                if key is None:
                    raise Wrong("a body that nobody sent was delivered")
                taken.append((frames[0].fields[1], key, payload))
        return taken

    def settle(self, deliveries: Sequence[int], state: Any = COMPLETE, within_: bytes | None = None) -> None:
        """Returns when the settlement is confirmed."""
        for delivery in deliveries:
            self.peer.settle(delivery, state=state if within_ is None else within(within_, state))
        expected = state.descriptor if within_ is None else TRANSACTIONAL
        _check(answers(self.peer, settlements=deliveries)[1].values(), expected)


def _has_more(frame: Frame) -> bool:
    return len(frame.fields) > 5 and frame.fields[5] is True


def _check(states: Iterable[Any], expected: int = ACCEPTED) -> None:
    for state in states:
        if BUSY in str(state):
            raise TimeoutError(BUSY)
        if UNKNOWN in str(state):  # of a gateway that outlived the worker by a moment
            raise TimeoutError(UNKNOWN)
        if state is None or state.descriptor not in (expected, TRANSACTIONAL):
            raise Wrong(f"refused: {state}")


class Lane(threading.Thread):
    """Makes its steps in turn until it is stopped, and connects again when it has lost its connection."""

    def __init__(self, port: int, scribe: Scribe, seed: int) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.port, self.scribe, self.chance = port, scribe, random.Random(seed)
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.refusal: AssertionError | None = None
        self.steps = 0
        self._connections: dict[str, Connection] = {}

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                try:
                    self.connection("send")  # first of all, so that nothing is asked of a broker that does not run
                    self.begin()
                    while not self.stopping.is_set():
                        self.step()
                        self.steps += 1
                except (OSError, Closed, TimeoutError):
                    pass
                except AssertionError as refusal:  # of a link, while the broker starts
                    self.refusal = refusal
                self._disconnect()
                time.sleep(RECONNECT_AFTER_S)
        except BaseException as failure:  # whatever it is, the run must tell it
            self.failure = failure
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def connection(self, name: str) -> Connection:
        if name not in self._connections:
            self._connections[name] = Connection(self.port)
        return self._connections[name]

    def begin(self) -> None:
        """Called when it is connected anew."""

    def step(self) -> None:
        raise NotImplementedError

    # -- steps that several lanes make

    def encoded(self, key: str, size: int = 200, **sections: Any) -> bytes:
        return message(body_for(key, size), properties=sections.pop("properties", [key]), **sections)

    def send(self, address: str, count: int = 1, size: int = 200, **sections: Any) -> None:
        """Send messages one delivery each, all at once; each is an operation of its own."""
        keys = [self.scribe.key() for _ in range(count)]
        payloads = [self.encoded(key, size, **sections) for key in keys]
        self._all([([(address, key)], []) for key in keys], lambda: self.connection("send").send(address, *payloads))

    def send_batch(self, address: str, count: int) -> None:
        keys = [self.scribe.key() for _ in range(count)]
        payload = batch(*[self.encoded(key) for key in keys])
        with self.scribe.operation(adds=[(address, key) for key in keys]):
            self.connection("send").send(address, payload, format_=BATCH_FORMAT)

    def take_and_settle(
        self, address: str, most: int, state: Any = COMPLETE, to: str | None = None, place: str | None = None
    ) -> list[tuple[int, str, bytes]]:
        """Settle up to `most` messages. `place` is where the address receives from, `to` where they come to be."""
        connection = self.connection(f"receive from {address}")
        taken = connection.take(address, most)
        if taken:
            moves = [
                ([] if to is None else [(to, key)], [(place or address, key)] if to != (place or address) else [])
                for _, key, _ in taken
            ]
            self._all(moves, lambda: connection.settle([delivery for delivery, _, _ in taken], state))
        return taken

    def _all(self, operations: list[tuple[list[Unit], list[Unit]]], do: Callable[[], None]) -> None:
        if not operations:
            do()
            return
        (adds, removes), *others = operations
        with self.scribe.operation(adds, removes):
            self._all(others, do)


class OneByOne(Lane):
    """Messages sent, received and completed one at a time."""

    def step(self) -> None:
        for _ in range(self.chance.randrange(1, 8)):
            self.send("one", size=self.chance.choice((24, 200, 1000, 5000)))
        for _ in range(7):
            if not self.take_and_settle("one", 1):
                break


class Many(Lane):
    """Many at a time and in batches; completed, abandoned, dead-lettered, completed as dead letters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count = 0

    def step(self) -> None:
        if self.count < MOST_WAITING:
            self.send("many", self.chance.randrange(1, 40))
            self.send_batch("many", self.chance.randrange(2, 20))
            self.count += 30
        match self.chance.randrange(6):
            case 0:
                self.take_and_settle("many", 5, ABANDON, "many")
            case 1:
                self.take_and_settle("many", 7, DEAD_LETTER, "many/$dlq")
            case 2:
                self.take_and_settle(f"many{DEAD_ADDRESS}", 4, COMPLETE, None, "many/$dlq")
            case _:
                self.count -= len(self.take_and_settle("many", self.chance.randrange(1, 40)))


DEAD_ADDRESS = "/$deadletterqueue"


class Large(Lane):
    """Messages of up to 1 MiB."""

    def step(self) -> None:
        for _ in range(2):
            self.send("large", 1, self.chance.choice((100_000, 300_000, 1_000_000)))
            self.take_and_settle("large", 1)
        time.sleep(0.3)  # or the trace would have little but large messages


class InSessions(Lane):
    """Sessions: messages, locks, states."""

    def step(self) -> None:
        session = f"s{self.chance.randrange(4)}"
        keys = [self.scribe.key() for _ in range(self.chance.randrange(1, 6))]
        payloads = [self.encoded(key, properties=[key, *[None] * 9, session]) for key in keys]
        self._all(
            [([("sessions", key)], []) for key in keys], lambda: self.connection("send").send("sessions", *payloads)
        )
        connection = self.connection("receive")
        handle, _ = accept(connection.peer, "sessions", session)
        node = Node(connection.peer, "sessions/$management")
        taken = connection.take_from([handle, 0], len(keys))
        self._all(
            [([], [("sessions", key)]) for _, key, _ in taken],
            lambda: connection.settle([delivery for delivery, _, _ in taken]),
        )
        state = self.scribe.key("state-")
        with self.scribe.operation(values={f"state sessions {session}": state}):
            body = {"session-id": session, "session-state": state.encode()}
            _succeeded(node.ask("com.microsoft:set-session-state", body))
        for link in (handle, node.receiver, node.sender):
            connection.peer.detach(link)
            connection.peer.expect(DETACH)
        connection.peer.drop(TRANSFER)  # too late for us; they are in their session again


class Later(Lane):
    """Scheduled messages, some for soon and some for another day; cancelled; deferred and received by their numbers."""

    def begin(self) -> None:
        self.node = Node(self.connection("manage").peer, "later/$management")
        self.deferred: deque[tuple[str, int]] = deque()

    def step(self) -> None:
        cancelled = [self._schedule("far-", 86_400) for _ in range(2)]
        self._schedule("far-", 86_400)
        for _ in range(3):
            self._schedule(SOON, 0.2)
        for key, number in cancelled:
            with self.scribe.operation(removes=[("later:scheduled", key)]):
                body = {"sequence-numbers": Array(Long, (Long(number),))}
                _succeeded(self.node.ask("com.microsoft:cancel-scheduled-message", body))
        self.take_and_settle("later", 4)
        for _, key, payload in self.take_and_settle("later", 2, DEFER, "later:deferred"):
            self.deferred.append((key, annotations_of(payload)[SEQUENCE_NUMBER]))
        while len(self.deferred) > 3:
            key, number = self.deferred.popleft()
            numbers = Array(Long, (Long(number),))
            asked: dict[str, Any] = {"sequence-numbers": numbers, "receiver-settle-mode": UInt(1)}
            [received] = _succeeded(self.node.ask("com.microsoft:receive-by-sequence-number", asked))["messages"]
            with self.scribe.operation(removes=[("later:deferred", key)]):
                tokens = {"disposition-status": "completed", "lock-tokens": Array(UUID, (received["lock-token"],))}
                _succeeded(self.node.ask("com.microsoft:update-disposition", tokens))

    def _schedule(self, prefix: str, after_s: float) -> tuple[str, int]:
        key = self.scribe.key(prefix)
        payload = self.encoded(key, annotations={SCHEDULE_AT: Timestamp(int((time.time() + after_s) * 1000))})
        with self.scribe.operation(adds=[("later" if prefix == SOON else "later:scheduled", key)]):
            body = {"messages": [{"message-id": key, "message": payload}]}
            answer = _succeeded(self.node.ask("com.microsoft:schedule-message", body))
        [number] = answer["sequence-numbers"]
        return key, number


class Topics(Lane):
    """Two subscriptions that share bodies; rules that come and go."""

    def begin(self) -> None:
        self.node = Node(self.connection("manage").peer, "ruled/subscriptions/by-many/$management")

    def step(self) -> None:
        for even in (True, False, True):
            key = self.scribe.key()
            payload = self.encoded(key, self.chance.choice((100, 3000)), application={"even": even})
            adds = [("news/all", key)] + [("news/even", key)] * even
            with self.scribe.operation(adds):
                self.connection("send").send("news", payload)
        for name in ("all", "even"):
            self.take_and_settle(f"news/subscriptions/{name}", 3, COMPLETE, None, f"news/{name}")
        if self.chance.random() < 0.3:
            self._change_rules()

    def _change_rules(self) -> None:
        rules = self._rules()
        rule: dict[str, Any]
        if len(rules) > 4:
            name = self.chance.choice(rules)
            rules.remove(name)
            operation, rule = "remove-rule", {"rule-name": name}
        else:
            name = self.scribe.key("rule-")
            rules.append(name)
            operation, rule = "add-rule", {"rule-name": name, "rule-description": {"sql-filter": {"expression": "a=1"}}}
        with self.scribe.operation(values={"rules ruled/by-many": sorted(rules)}):
            _succeeded(self.node.ask(f"com.microsoft:{operation}", rule))

    def _rules(self) -> list[str]:
        answer = self.node.ask("com.microsoft:enumerate-rules", {"skip": UInt(0), "top": UInt(100)})
        found = _succeeded(answer) or {}
        return [item["rule-description"].value[2] for item in found.get("rules", [])]


class Ids(Lane):
    """Duplicate detection: some messages are sent again, before and after they were completed."""

    def begin(self) -> None:
        self.sent: deque[str] = deque(maxlen=20)

    def step(self) -> None:
        for _ in range(4):
            key = self.scribe.key("id-")
            with self.scribe.operation(adds=[("ids", key)]):
                self.connection("send").send("ids", self.encoded(key))
            self.sent.append(key)
        for key in self.chance.sample(self.sent, 2):
            with self.scribe.operation():
                self.connection("send").send("ids", self.encoded(key))
        self.take_and_settle("ids", 4)


class Moves(Lane):
    """Transactions that take messages of one queue and send others to it, to another, or that are rolled back."""

    def begin(self) -> None:
        self.coordinator: Coordinator | None = None

    def step(self) -> None:
        self.send("moves", 4)
        connection = self.connection("transact")
        if self.coordinator is None:
            self.coordinator = Coordinator(connection.peer)
        taken = connection.take("moves", self.chance.randrange(1, 4))
        sent = [self.scribe.key("t-") for _ in range(self.chance.randrange(1, 4))]
        transaction = self.coordinator.declare()
        size = self.chance.choice((100, 100, 400_000))
        for key in sent:
            connection.send("moves", self.encoded(key, size), state=within(transaction))
        connection.settle([delivery for delivery, _, _ in taken], COMPLETE, transaction)
        if self.chance.random() < 0.2:
            assert self.coordinator.discharge(transaction, True) == "accepted"
        else:
            with self.scribe.operation([("moves", key) for key in sent], [("moves", key) for _, key, _ in taken]):
                answer = self.coordinator.discharge(transaction)
                if answer != "accepted":
                    raise Wrong(f"commit: {answer}")
            taken = []
        leftover = [delivery for delivery, _, _ in taken]
        if leftover:
            connection.settle(leftover, ABANDON)
        self.take_and_settle("moves", 4)


class Relays(Lane):
    """Messages that are forwarded to a queue, perhaps in another partition of another worker."""

    def step(self) -> None:
        keys = [self.scribe.key("r-") for _ in range(6)]
        payloads = [self.encoded(key) for key in keys]
        self._all([([(RELAY, key)], []) for key in keys], lambda: self.connection("send").send(SOURCE, *payloads))
        self.take_and_settle(TARGET, 6, COMPLETE, None, RELAY)


def _succeeded(answer: Any) -> Any:
    if answer.status not in (200, 204):
        if answer.condition == BUSY:
            raise TimeoutError(BUSY)
        raise Wrong(f"{answer.status} {answer.condition}: {answer.description}")
    return answer.body


LANES: tuple[type[Lane], ...] = (OneByOne, Many, Large, InSessions, Later, Topics, Ids, Moves, Relays)


class Workload:
    """All lanes on the broker at `port`."""

    def __init__(self, port: int, scribe: Scribe, seed: int) -> None:
        self.lanes = [kind(port, scribe, seed * 100 + number) for number, kind in enumerate(LANES)]

    def start(self) -> None:
        for lane in self.lanes:
            lane.start()

    def stop(self) -> None:
        """Raises what a lane failed of."""
        for lane in self.lanes:
            lane.stopping.set()
        for lane in self.lanes:
            lane.join(END_S)
            if lane.is_alive():
                raise TimeoutError(f"{lane.name} does not end")
            failure = lane.failure or (None if lane.steps else lane.refusal)
            if failure is not None:
                raise failure
