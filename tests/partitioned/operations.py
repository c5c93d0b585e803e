"""What clients do to entities of all kinds while a worker has a fault: the rows of the table in docs/failures.md.

An operation is a generator. Up to its `yield` it prepares: nothing has a fault yet. Behind that is what is measured. It
returns the condition of the first error that the client gets, or "" if all of it works.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from broker.catalog.catalog import home_partition
from broker.namespace.fragments import fragment_of
from protocol.codec import Array, Symbol, Timestamp
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    TRANSFER,
    Frame,
    RawPeer,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node, Response
from tests.end_to_end.raw_transactions import DISCHARGE, Coordinator, answer_of, within
from tests.patience import PATIENCE_S
from tests.sessions.raw_sessions import ask as ask_for_session
from tests.sessions.raw_sessions import in_session

PARTITIONS, WORKERS = 4, 2
SOUND, FAULTY = 2, 1  # partitions: that of a worker without a fault, and that of the worker that has it
SEVERAL = 12  # of what goes anywhere: more than one for each partition
KEY, SCHEDULED = Symbol("x-opt-partition-key"), Symbol("x-opt-scheduled-enqueue-time")
IN_2100_MS = 4_102_444_800_000
KEPT = "kept"  # what an operation returns that waited for an error, and none came
NOT_READY = "503"


class Kind(Enum):
    """Of the operation's own entity."""

    PLAIN_SOUND = "plain queue, on another worker"
    PLAIN_FAULTY = "plain queue, on this worker"
    QUEUE = "partitioned queue"
    SESSIONS = "partitioned queue with sessions"
    TOPIC = "partitioned topic"
    NAMESPACE = "namespace"


@dataclass
class Scene:
    """Where an operation runs: a connection of its own, and an entity of its own."""

    broker: Broker
    peer: RawPeer
    entity: str
    is_over: Callable[[], bool]  # the worker has no fault any more, or the others have ended


Run = Generator[None, None, str]


@dataclass(frozen=True)
class Operation:
    title: str
    kind: Kind
    run: Callable[[Scene], Run]


def key_of(partition: int) -> str:
    """A partition key, or session id, whose messages go to this partition."""
    keys = (f"key-{index}" for index in range(1000))
    return next(key for key in keys if fragment_of(key.encode(), range(PARTITIONS)) == partition)


def name_on(partition: int, stem: str) -> str:
    """The name of a plain queue that lives on this partition."""
    names = (f"{stem}-{index}" for index in range(1000))
    return next(name for name in names if home_partition(name, PARTITIONS) == partition)


# -- parts of operations


def keyed(partition: int | None, body: bytes = b"m") -> bytes:
    """A message for this partition; without a key if it is None."""
    return message(body, annotations=None if partition is None else {KEY: key_of(partition)})


def next_of(peer: RawPeer, *codes: int) -> Frame:
    while True:
        frame = peer.receive(PATIENCE_S)
        if frame.code in codes:
            return frame


def answered(peer: RawPeer, count: int) -> str:
    """The first error of so many deliveries that were sent, or settled; a link that is detached answers no more."""
    error = ""
    while count > 0:
        frame = next_of(peer, DISPOSITION, DETACH)
        if frame.code == DETACH:
            return error_of(frame)[0]
        first, last = frame.fields[1], frame.fields[2]
        count -= (first if last is None else last) - first + 1
        if frame.fields[4].descriptor != ACCEPTED:
            error = error or error_of(frame)[0]
    return error


def store(scene: Scene, *messages: bytes) -> None:
    handle = scene.peer.attach_sender(scene.entity)
    for each in messages:
        scene.peer.transfer(each, handle)
    assert answered(scene.peer, len(messages)) == ""


def locked(scene: Scene, address: str | None = None) -> Frame:
    """The entity's only message, received and not settled."""
    scene.peer.attach_receiver(address or scene.entity, credit=1)
    return scene.peer.expect(TRANSFER)


def in_the_session(scene: Scene, partition: int) -> Frame:
    """The only message of a session on this partition, received and not settled."""
    session_id = key_of(partition)
    store(scene, in_session(session_id))
    handle = ask_for_session(scene.peer, scene.entity, session_id)
    assert scene.peer.expect(ATTACH).fields[5] is not None
    scene.peer.flow(handle, 1)
    return scene.peer.expect(TRANSFER)


def condition(response: Response) -> str:
    return "" if response.status < 300 else response.condition


def asked(node: Node, operation: str, body: Any) -> str:
    return asked_several(node, [(operation, body)])


def asked_several(node: Node, requests: Iterable[tuple[str, Any]]) -> str:
    """The first error of requests that are made at once."""
    count = 0
    for operation, body in requests:
        node.say(operation, body)
        count += 1
    errors = []
    for _ in range(count):
        errors.append(condition(node.response(PATIENCE_S)))
    return next(filter(None, errors), "")


def token_of(delivery: Frame) -> UUID:
    """A delivery tag is the lock token, in the byte order of .NET."""
    return UUID(bytes_le=bytes(delivery.fields[2]))


def tokens_of(*deliveries: Frame) -> Array:
    return Array(UUID, tuple(map(token_of, deliveries)))


# -- operations


def sends(partition: int | None, count: int = 1) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        handle = scene.peer.attach_sender(scene.entity)
        yield
        for _ in range(count):
            scene.peer.transfer(keyed(partition), handle)
            if count > 1:
                scene.peer.wait_until_read()  # what is read at once goes to one fragment
        return answered(scene.peer, count)

    return run


def receives(partition: int | None, part: str = "") -> Callable[[Scene], Run]:
    """A receiver that is open gets a message that is there."""

    def run(scene: Scene) -> Run:
        store(scene, keyed(partition))
        handle = scene.peer.attach_receiver(scene.entity + part)
        yield
        scene.peer.flow(handle, SEVERAL)
        scene.peer.expect(TRANSFER, PATIENCE_S)
        return ""

    return run


def opens_a_receiver(partition: int | None) -> Callable[[Scene], Run]:
    """And gets a message that is there."""

    def run(scene: Scene) -> Run:
        store(scene, keyed(partition))
        yield
        handle = scene.peer.attach(sender=False, address=scene.entity)
        scene.peer.flow(handle, SEVERAL)
        attached = scene.peer.expect(ATTACH, PATIENCE_S)
        if attached.fields[5] is None:
            return error_of(scene.peer.expect(DETACH, PATIENCE_S))[0]
        scene.peer.expect(TRANSFER, PATIENCE_S)
        return ""

    return run


def completes(partition: int | None) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        store(scene, keyed(partition))
        delivery = locked(scene)
        yield
        scene.peer.settle(delivery.fields[1])
        return answered(scene.peer, 1)

    return run


def renews(partition: int) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        store(scene, keyed(partition))
        tokens = tokens_of(locked(scene))
        node = Node(scene.peer, f"{scene.entity}/$management")
        yield
        return asked(node, "com.microsoft:renew-lock", {"lock-tokens": tokens})

    return run


def completes_in_session(partition: int) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        delivery = in_the_session(scene, partition)
        yield
        scene.peer.settle(delivery.fields[1])
        return answered(scene.peer, 1)

    return run


def sets_a_state(partition: int) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        in_the_session(scene, partition)
        node = Node(scene.peer, f"{scene.entity}/$management")
        body = {"session-id": key_of(partition), "session-state": b"state"}
        yield
        return asked(node, "com.microsoft:set-session-state", body)

    return run


def holds_a_session(partition: int) -> Callable[[Scene], Run]:
    """Only waits: what becomes of its link?"""

    def run(scene: Scene) -> Run:
        in_the_session(scene, partition)
        yield
        while True:
            try:
                return error_of(scene.peer.expect(DETACH, 0.5))[0]
            except TimeoutError:
                if scene.is_over():
                    return KEPT

    return run


def accepts(partition: int, *, by_name: bool) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        store(scene, in_session(key_of(partition)))
        yield
        handle = ask_for_session(scene.peer, scene.entity, key_of(partition) if by_name else None)
        if scene.peer.expect(ATTACH, PATIENCE_S).fields[5] is None:
            return error_of(scene.peer.expect(DETACH, PATIENCE_S))[0]
        scene.peer.flow(handle, 1)
        scene.peer.expect(TRANSFER, PATIENCE_S)
        return ""

    return run


def does_a_transaction(partition: int) -> Callable[[Scene], Run]:
    """Begins one, with a send, and commits it."""

    def run(scene: Scene) -> Run:
        sender = scene.peer.attach_sender(scene.entity)
        coordinator = Coordinator(scene.peer)
        transaction = coordinator.declare()
        yield
        scene.peer.transfer(keyed(partition), sender, state=within(transaction))
        return in_transaction(scene.peer) or committed(scene.peer, coordinator, transaction)

    return run


def commits(partition: int) -> Callable[[Scene], Run]:
    """Commits a transaction with a send and a completion."""

    def run(scene: Scene) -> Run:
        store(scene, keyed(partition))
        delivery = locked(scene)
        sender = scene.peer.attach_sender(scene.entity)
        coordinator = Coordinator(scene.peer)
        transaction = coordinator.declare()
        scene.peer.transfer(keyed(partition), sender, state=within(transaction))
        assert in_transaction(scene.peer) == ""
        scene.peer.settle(delivery.fields[1], state=within(transaction, outcome(ACCEPTED)))
        assert in_transaction(scene.peer) == ""
        yield
        return committed(scene.peer, coordinator, transaction)

    return run


def in_transaction(peer: RawPeer) -> str:
    answer = answer_of(peer.expect(DISPOSITION, PATIENCE_S))
    return "" if answer == "in the transaction" else answer


def committed(peer: RawPeer, coordinator: Coordinator, transaction: bytes) -> str:
    coordinator.say(DISCHARGE, transaction, False)
    answer = answer_of(peer.expect(DISPOSITION, PATIENCE_S))
    return "" if answer == "accepted" else answer


def peeks(scene: Scene) -> Run:
    store(scene, *[keyed(partition) for partition in range(PARTITIONS)])
    node = Node(scene.peer, f"{scene.entity}/$management")
    yield
    return asked(node, "com.microsoft:peek-message", {"from-sequence-number": 0, "message-count": PARTITIONS})


def schedules(partition: int | None, count: int = 1) -> Callable[[Scene], Run]:
    def run(scene: Scene) -> Run:
        node = Node(scene.peer, f"{scene.entity}/$management")
        annotations: dict[Any, Any] = {SCHEDULED: Timestamp(IN_2100_MS)}
        if partition is not None:
            annotations[KEY] = key_of(partition)
        listed = {"messages": [{"message": message(b"m", annotations=annotations), "message-id": "id"}]}
        yield
        return asked_several(node, [("com.microsoft:schedule-message", listed)] * count)

    return run


def counts(scene: Scene) -> Run:
    node = Node(scene.peer, f"{scene.entity}/$management")
    yield
    return asked(node, "peeklock:get-counts", {})


def creates(scene: Scene) -> Run:
    node = Node(scene.peer, "$management")
    body = {"kind": "queue", "properties": {"name": f"{scene.entity}-new"}}
    yield
    return asked(node, "peeklock:create-entity", body)


def changes(scene: Scene) -> Run:
    node = Node(scene.peer, "$management")
    properties = {"name": f"{scene.entity}-old"}
    created = node.ask("peeklock:create-entity", {"kind": "queue", "properties": properties})
    assert created.status < 300, created
    yield
    body = {"path": properties["name"], "properties": {"max_delivery_count": 7}}
    return asked(node, "peeklock:update-entity", body)


def reads_metrics(scene: Scene) -> Run:
    yield
    status, _ = scene.broker.get("/metrics")
    return "" if status == 200 else str(status)


def asks_whether_it_is_ready(scene: Scene) -> Run:
    yield
    status, _ = scene.broker.get("/readyz")
    return "" if status == 200 else str(status)


ALL = (
    Operation("send", Kind.PLAIN_SOUND, sends(None)),
    Operation("receive", Kind.PLAIN_SOUND, receives(None)),
    Operation("complete", Kind.PLAIN_SOUND, completes(None)),
    Operation("send", Kind.PLAIN_FAULTY, sends(None)),
    Operation("receive", Kind.PLAIN_FAULTY, receives(None)),
    Operation("open a receiver, and receive", Kind.PLAIN_FAULTY, opens_a_receiver(None)),
    Operation("complete", Kind.PLAIN_FAULTY, completes(None)),
    Operation("send without a key", Kind.QUEUE, sends(None, SEVERAL)),
    Operation("send, key of another fragment", Kind.QUEUE, sends(SOUND)),
    Operation("send, key of this worker's fragment", Kind.QUEUE, sends(FAULTY)),
    Operation("receive, from another fragment", Kind.QUEUE, receives(SOUND)),
    Operation("receive, from this worker's fragment", Kind.QUEUE, receives(FAULTY)),
    Operation("open a receiver, and receive from another fragment", Kind.QUEUE, opens_a_receiver(SOUND)),
    Operation("complete, from another fragment", Kind.QUEUE, completes(SOUND)),
    Operation("complete, from this worker's fragment", Kind.QUEUE, completes(FAULTY)),
    Operation("renew a lock, on another fragment", Kind.QUEUE, renews(SOUND)),
    Operation("renew a lock, on this worker's fragment", Kind.QUEUE, renews(FAULTY)),
    Operation("peek", Kind.QUEUE, peeks),
    Operation("schedule without a key", Kind.QUEUE, schedules(None, SEVERAL)),
    Operation("schedule, key of another fragment", Kind.QUEUE, schedules(SOUND)),
    Operation("schedule, key of this worker's fragment", Kind.QUEUE, schedules(FAULTY)),
    Operation("read the counts", Kind.QUEUE, counts),
    Operation("a transaction, on another fragment", Kind.QUEUE, does_a_transaction(SOUND)),
    Operation("a transaction, on this worker's fragment", Kind.QUEUE, does_a_transaction(FAULTY)),
    Operation("commit a transaction, on another fragment", Kind.QUEUE, commits(SOUND)),
    Operation("commit a transaction, on this worker's fragment", Kind.QUEUE, commits(FAULTY)),
    Operation("complete in a session, on another fragment", Kind.SESSIONS, completes_in_session(SOUND)),
    Operation("complete in a session, on this worker's fragment", Kind.SESSIONS, completes_in_session(FAULTY)),
    Operation("set the state, on another fragment", Kind.SESSIONS, sets_a_state(SOUND)),
    Operation("set the state, on this worker's fragment", Kind.SESSIONS, sets_a_state(FAULTY)),
    Operation("hold a session, on another fragment", Kind.SESSIONS, holds_a_session(SOUND)),
    Operation("hold a session, on this worker's fragment", Kind.SESSIONS, holds_a_session(FAULTY)),
    Operation("accept a session by name, on another fragment", Kind.SESSIONS, accepts(SOUND, by_name=True)),
    Operation("accept a session by name, on this worker's fragment", Kind.SESSIONS, accepts(FAULTY, by_name=True)),
    Operation("accept the next session, on another fragment", Kind.SESSIONS, accepts(SOUND, by_name=False)),
    Operation("publish without a key", Kind.TOPIC, sends(None, SEVERAL)),
    Operation("publish, key of another fragment", Kind.TOPIC, sends(SOUND)),
    Operation("publish, key of this worker's fragment", Kind.TOPIC, sends(FAULTY)),
    Operation("receive from a subscription, another fragment", Kind.TOPIC, receives(SOUND, "/Subscriptions/all")),
    Operation("create an entity", Kind.NAMESPACE, creates),
    Operation("change an entity", Kind.NAMESPACE, changes),
    Operation("`GET /metrics`", Kind.NAMESPACE, reads_metrics),
    Operation("`GET /readyz`", Kind.NAMESPACE, asks_whether_it_is_ready),
)


def entity_of(operation: Operation, column: str) -> str:
    """The name of its own entity in this column of the table."""
    stem = f"entity-{ALL.index(operation)}-{column}"
    if operation.kind is Kind.PLAIN_SOUND:
        return name_on(SOUND, stem)
    return name_on(FAULTY, stem) if operation.kind is Kind.PLAIN_FAULTY else stem


def declared(columns: Iterable[str]) -> str:
    """The entities of all operations, in TOML."""
    found = []
    for column in columns:
        for operation in ALL:
            name, kind = entity_of(operation, column), operation.kind
            if kind is Kind.TOPIC:
                found.append(f'[[topics]]\nname = "{name}"\nenable_partitioning = true\n')
                found.append('[[topics.subscriptions]]\nname = "all"\n')
            elif kind is not Kind.NAMESPACE:
                partitioned = str(kind in (Kind.QUEUE, Kind.SESSIONS)).lower()
                sessions = str(kind is Kind.SESSIONS).lower()
                found.append(
                    f'[[queues]]\nname = "{name}"\nenable_partitioning = {partitioned}\nrequires_session = {sessions}\n'
                )
    return "\n".join(found)
