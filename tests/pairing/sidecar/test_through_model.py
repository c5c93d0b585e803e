"""Three real engines around a `Through`: a client, the primary and the engine here; bytes arrive in any pieces.

Entities fail over and come back, links share sessions, messages take several frames. In the end each message of the
client is in one place and has the outcome that this place gave, those of the primary have come once and in order, and
nobody has seen a fault. What is written to the primary is checked to the letter: proton would forgive gaps in ids.
"""

from collections import deque
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from broker.pairing.sidecar.through import Through
from protocol import codec
from protocol.client.errors import ClientError
from protocol.engine.deliveries import ACCEPTED, REJECTED, RELEASED, forget, reject, settle
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from protocol.symbols import Descriptor
from tests.models import model_settings

ENTITIES = ("one", "two", "three")
CREDIT = 40
FRAME = 512
STATES = st.sampled_from([ACCEPTED, ACCEPTED, REJECTED, RELEASED])


class End:
    """A handler with an engine, for any of the three."""

    def __init__(self, *, server: bool) -> None:
        self.server = server
        self.engine = Engine(self, server=server, container_id="x", max_frame_size=FRAME, idle_time_out_ms=0)
        self.faults: list[str] = []
        self.ended: list[Link] = []
        self.messages: list[tuple[Link, Any, bytes, bool]] = []  # that wait for an outcome
        self.all: list[bytes] = []
        self.outcomes: list[tuple[bytes, int]] = []
        self.receivers: list[Link] = []  # of the other side

    def on_open(self, container_id: str, hostname: str) -> None:
        if self.server:
            self.engine.open()

    def on_session(self, session: Session) -> None: ...

    def on_session_end(self, session: Session) -> None: ...

    def on_attach(self, link: Link) -> None:
        if self.server:
            link.accept(0, 0 if link.is_sender else CREDIT)
            if link.is_sender:
                self.receivers.append(link)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        self.ended.append(link)
        self.messages = [each for each in self.messages if each[0] is not link]

    def on_flow(self, link: Link) -> None: ...

    def on_message(self, link: Link, delivery: Any, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        self.all.append(payload)
        if settled:
            forget(delivery)
        else:
            self.messages.append((link, delivery, payload, settled))
        if self.server and link.credit < CREDIT // 2:
            link.grant(CREDIT - link.credit)

    def on_oversized(self, *_: Any) -> None: ...

    def on_crowded(self, *_: Any) -> None: ...

    def on_aborted(self, link: Link) -> None: ...

    def on_outcome(self, link: Link, delivery: Any, token: bytes, state: int, settled: bool) -> None:
        self.outcomes.append((token, state))
        forget(delivery)

    def on_close(self, condition: str, description: str) -> None:
        self.faults.append(f"{condition} {description}")


class Strict:
    """Reads what is written to the primary, as the specification counts it (2.5.6, 2.6.12)."""

    def __init__(self) -> None:
        self.rest = b""
        self.next_id: dict[int, int] = {}
        self.transfers: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.is_open: set[tuple[int, int]] = set()

    def read(self, data: bytes) -> None:
        data = self.rest + data
        while len(data) >= 8:
            if data.startswith(b"AMQP"):
                data = data[8:]
                continue
            size = int.from_bytes(data[:4], "big")
            if len(data) < size:
                break
            if size > 8:
                self._frame(int.from_bytes(data[6:8], "big"), data[8:size])
            data = data[size:]
        self.rest = data

    def _frame(self, channel: int, body: bytes) -> None:
        value, _ = codec.decode(body)
        code, fields = value.descriptor, value.value
        if code == Descriptor.BEGIN:
            self.first[channel], self.transfers[channel] = fields[1], 0
        elif code == Descriptor.TRANSFER:
            self.transfers[channel] += 1
            handle, number = fields[0], fields[1] if len(fields) > 1 else None
            if (channel, handle) not in self.is_open:
                assert number is not None
                assert number == self.next_id.get(channel, number), "a delivery id was left out"
                self.next_id[channel] = number + 1
                self.is_open.add((channel, handle))
            if len(fields) <= 5 or not fields[5]:
                self.is_open.discard((channel, handle))
        elif code == Descriptor.DETACH:
            self.is_open.discard((channel, fields[0]))
        elif code == Descriptor.FLOW:
            assert fields[2] == self.first[channel] + self.transfers[channel], "a flow counts what was not sent"


class ThroughModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.client, self.primary, self.here = End(server=False), End(server=True), End(server=True)
        self.through = Through(self, "primary")
        self.up, self.down, self.local_down = deque[bytes](), deque[bytes](), deque[bytes]()
        self.strict = Strict()
        self.failed_over: set[str] = set()
        self.count = 0
        self.sent: dict[bytes, tuple[Link, bytes, bool]] = {}  # by tag: link, body, settled
        self.told: dict[bytes, int] = {}  # body: the outcome that its place gave
        self.pushed: dict[str, list[bytes]] = {}  # by link name: bodies that the primary has sent
        self.taken: dict[str, int] = {}
        self.client.engine.open()
        self.sessions = [self.client.engine.begin() for _ in range(2)]
        self.senders: list[Link] = []
        self.pump_all()

    def teardown(self) -> None:
        self.pump_all()
        self.check()
        for end in (self.client, self.primary, self.here):
            end.engine.free()

    # -- the owner of the through

    def is_here(self, path: str) -> bool:
        return path in self.failed_over

    def to_local(self, data: bytes) -> None:
        self.here.engine.push(data)

    def on_key(self, *_: Any, **__: Any) -> None: ...

    def on_token(self, *_: Any) -> None: ...

    def on_unread_token(self) -> None: ...

    def on_sender(self, path: str, error: ClientError | None, began_ms: int) -> None:
        assert error is None

    def on_taken(self, path: str, count: int) -> None:
        self.taken[path] = self.taken.get(path, 0) + count

    def on_refused(self, path: str, error: ClientError, began_ms: int) -> None: ...

    # -- bytes

    def pull(self) -> None:
        for engine, queue in ((self.client, self.up), (self.primary, self.down), (self.here, self.local_down)):
            if output := engine.engine.pull():
                queue.append(output)

    def step(self, queue: deque[bytes], size: int | None) -> None:
        if not queue:
            return
        data = queue.popleft()
        if size is not None and size < len(data):
            queue.appendleft(data[size:])
            data = data[:size]
        if queue is self.up:
            output = self.through.from_client(data, 0)
            self.strict.read(output)
            if output:
                self.primary.engine.push(output)
        else:
            output = self.through.from_primary(data) if queue is self.down else self.through.from_local(data)
            if output:
                self.client.engine.push(output)

    def pump_all(self) -> None:
        self.pull()
        while self.up or self.down or self.local_down:
            for queue in (self.up, self.down, self.local_down):
                self.step(queue, None)
            self.pull()

    @rule(sizes=st.lists(st.sampled_from([1, 7, 20, 100, 1000, None]), min_size=3, max_size=6))
    def pump(self, sizes):
        for number, size in enumerate(sizes):
            self.pull()
            self.step((self.up, self.down, self.local_down)[number % 3], size)

    @rule()
    def pump_to_the_end(self):
        self.pump_all()

    # -- the client

    @rule(entity=st.sampled_from(ENTITIES), session=st.integers(0, 1))
    def attach_sender(self, entity, session):
        if len(self.senders) < 8:
            self.count += 1
            name = f"s{self.count}"
            link = self.client.engine.attach(self.sessions[session], name, sender=True, source=name, target=entity)
            self.senders.append(link)

    @rule(entity=st.sampled_from(ENTITIES), session=st.integers(0, 1), credit=st.integers(1, 30))
    def attach_receiver(self, entity, session, credit):
        if len(self.pushed) < 5:
            self.count += 1
            name = f"r{self.count}"
            self.pushed[name] = []
            self.client.engine.attach(
                self.sessions[session], name, sender=False, source=entity, target=name, credit=credit
            )

    @precondition(lambda self: self.senders)
    @rule(
        pick=st.integers(0, 20),
        count=st.integers(1, 6),
        size=st.sampled_from([1, 1, 30, 700, 2000]),
        settled=st.booleans(),
    )
    def send(self, pick, count, size, settled):
        link = self.senders[pick % len(self.senders)]
        for _ in range(min(count, link.credit if not link.closed else 0)):
            self.count += 1
            body = b"%d " % self.count + b"x" * size
            tag = b"%d" % self.count
            link.send(tag, b"", body, 0, settled)
            self.sent[tag] = link, body, settled

    @precondition(lambda self: self.senders)
    @rule(pick=st.integers(0, 20))
    def detach(self, pick):
        link = self.senders.pop(pick % len(self.senders))
        link.detach()

    @precondition(lambda self: self.client.messages)
    @rule(picks=st.lists(st.integers(0, 20), max_size=4))
    def settle_received(self, picks):
        for pick in picks:
            if self.client.messages:
                _, delivery, _, _ = self.client.messages.pop(pick % len(self.client.messages))
                settle(delivery, ACCEPTED)

    # -- the two places

    @rule(
        place=st.booleans(),
        picks=st.lists(st.integers(0, 20), min_size=1, max_size=8),
        state=STATES,
    )
    def decide(self, place, picks, state):
        end = self.primary if place else self.here
        for pick in picks:
            if end.messages:
                _, delivery, body, _ = end.messages.pop(0 if state == ACCEPTED else pick % len(end.messages))
                self.told[body] = state
                if state == REJECTED:
                    reject(delivery, "amqp:not-allowed", "no")
                else:
                    settle(delivery, state)

    @precondition(lambda self: self.primary.receivers)
    @rule(pick=st.integers(0, 20), count=st.integers(1, 5), size=st.sampled_from([1, 600]))
    def push(self, pick, count, size):
        link = self.primary.receivers[pick % len(self.primary.receivers)]
        for _ in range(min(count, 0 if link.closed else link.credit)):
            self.count += 1
            body = b"p%d " % self.count + b"y" * size
            link.send(b"p%d" % self.count, b"", body, 0, False)
            self.pushed[link.name].append(body)

    # -- failing over

    @rule(entity=st.sampled_from(ENTITIES))
    def fail_over(self, entity):
        self.failed_over.add(entity)
        moved = self.through.move(entity, "failed over")
        self.strict.read(moved.to_primary)
        if moved.to_client:
            self.client.engine.push(moved.to_client)
        if moved.to_primary:
            self.primary.engine.push(moved.to_primary)

    @precondition(lambda self: self.failed_over)
    @rule(pick=st.integers(0, 5))
    def come_back(self, pick):
        entity = sorted(self.failed_over)[pick % len(self.failed_over)]
        self.failed_over.discard(entity)
        for link in self.here.engine.links.values():
            if link.target_address == entity:
                self.here.messages = [each for each in self.here.messages if each[0] is not link]
                link.detach("amqp:link:detach-forced", "back")

    # -- what must hold

    def check(self) -> None:
        for end in (self.client, self.primary, self.here):
            assert not end.faults
            assert end.engine.fault() == ("", "")
        stored = self.primary.all + self.here.all
        assert len(stored) == len(set(stored)), "a message is in two places"
        outcomes = dict(self.client.outcomes)
        assert len(outcomes) == len(self.client.outcomes), "two outcomes for one delivery"
        for tag, (link, body, settled) in self.sent.items():
            if link.closed or link in self.client.ended:
                if tag in outcomes and body in self.told:
                    assert outcomes[tag] in (self.told[body], 0)
                continue
            assert body in stored, "a message was lost on a link that is there"
            if not settled and body in self.told:
                assert outcomes[tag] == self.told[body]
            else:
                assert tag not in outcomes
        received = list(self.client.all)
        assert sorted(received) == sorted(body for bodies in self.pushed.values() for body in bodies)
        for bodies in self.pushed.values():
            of_link = [body for body in received if body in set(bodies)]
            assert of_link == bodies
        for end in (self.primary, self.here):  # all in the order in which each link has sent it
            for link in {link for link, _, _ in self.sent.values()}:
                mine = [body for each, body, _ in self.sent.values() if each is link]
                there = [body for body in end.all if body in set(mine)]
                assert there == [body for body in mine if body in set(there)]


ThroughModel.TestCase.settings = model_settings(examples=150, steps=50)
TestThroughModel = ThroughModel.TestCase
