"""A client's transactions: the work that it does in each of them.

A transaction belongs to the link that declared it, and can be used on every link of the connection. All its operations
go to the partition of the first one, which keeps them until the discharge. The operations of one read of the socket go
as one request. The transaction ends with its discharge, or is rolled back when its coordinator link, session or
connection ends.

A transaction is on one queue or topic, with its subscriptions. A client may want to receive from one and send to others
in one transaction, wherever these live (amqp.md 10.4). If its session crosses entities (`broker.gateway.crossing`), the
messages to others go to the transfer queue of the entity that the session is pinned to, or else of the one that the
transaction began with, and go on from there after the commit.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from broker import requests
from broker.errors import (
    BrokerError,
    NotAllowed,
    OutcomeUnknown,
    ServerBusy,
    TransactionRollback,
    TransactionTimeout,
    TransactionUnknown,
)
from broker.gateway.namespace import Entity
from broker.gateway.router import Reply, Router, error_named
from broker.gateway.turn import Turn
from broker.namespace.fragments import common_key, fragment_of
from broker.runs import messages_of
from broker.wire import (
    TRANSACTION_OWNER_BYTES,
    TRANSACTION_TIME_OUT_MS,
    Extra,
    Operation,
    Outcome,
    SendOperation,
    SendRunOperation,
    SettleOperation,
    pack_operations,
)
from protocol import error_texts
from protocol.codec import decode_exactly
from protocol.engine.links import Link
from protocol.message.layout import unpack_layout
from protocol.message.stored import annotation
from protocol.symbols import VIA_PARTITION_KEY

ID_BYTES = 16
NOWHERE = -1  # no partition
_VIA_PARTITION_KEY = VIA_PARTITION_KEY.encode()

# Called with the error of each of some deliveries, None for one that was taken; or with None if all were.
Answered = Callable[[Sequence[BrokerError | None] | None], None]


class Receiving(Protocol):
    """The link on which a message was handed out."""

    entity: Entity
    queue: int


class Received(Protocol):
    """The channel on which a message was handed out."""

    partition: int
    number: int


class Sending(Protocol):
    """The link on which a message came; `destination` is set if messages go through the entity to another."""

    link: Link
    entity: Entity
    queue: int
    destination: Entity | None


class Declaring(Protocol):
    """The link that declared a transaction."""

    def crosses_entities(self, link: Link) -> bool: ...

    def pinned(self) -> Entity | None: ...


class Transaction:
    """One transaction of a connection; `coordinator` is the link that declared it."""

    def __init__(self, transaction_id: bytes, turn: Turn, router: Router, coordinator: Declaring) -> None:
        self.id = transaction_id
        self.coordinator = coordinator
        self._turn = turn
        self._router = router
        self._entity: Entity | None = None  # that its session is pinned to, else that of its first operation
        self._partition = NOWHERE  # that of all operations, when there is one
        self._key: bytes | None = None  # of all messages sent to partitioned entities
        self._begins = True
        self._losses: int | None = None  # those of its worker when it began there
        self._failure: BrokerError | None = None
        self._operations: list[Operation] = []
        self._answered: list[list[tuple[int, Answered]]] = []  # by operation: numbers of deliveries, and whom to tell

    def join(self, entity: Entity, partition: int) -> None:
        """Check that operations on this partition of this entity may join the transaction. Raises NotAllowed.

        Whether two entities happen to lie on one partition does not matter: users do not know where they lie.
        """
        if self._entity is not None and self._entity.top_level != entity.top_level:
            crosses = self.coordinator.pinned() is not None
            raise NotAllowed(error_texts.SEVERAL_TOP_LEVEL_ENTITIES if crosses else error_texts.SEVERAL_ENTITIES)
        if self._partition not in (NOWHERE, partition):
            raise NotAllowed(error_texts.SEVERAL_ENTITIES)
        self._entity, self._partition = self._entity or entity, partition

    def send(self, sender: Sending, deliveries: Sequence[list[Any]], answered: Answered) -> None:
        """The messages of each delivery. On a partitioned entity all of them have the same key. Raises NotAllowed.

        The transaction cannot be committed if one is refused, whether or not the client is told: the SDK for Java tells
        its user of every send in a transaction that it was done.
        """
        entity, queue = sender.entity, sender.queue
        through = self._through(sender)
        if through is not None:
            deliveries = [addressed(messages, entity) for messages in deliveries]
            entity, queue = through, through.transfer_queue
        if through is None and sender.destination is None:
            self.join(entity, self.partition_of(entity, deliveries[0]))
        elif not entity.is_partitioned:
            self.join(entity, entity.partition)
        else:
            for messages in deliveries:
                self.join(entity, self._fragment_for(entity, messages))
        last = self._operations[-1] if self._operations else None
        if isinstance(last, SendOperation) and last.queue == queue:
            last.deliveries.extend(deliveries)
            self._answered[-1].append((len(deliveries), answered))
        else:
            self._append(SendOperation(queue, True, [*deliveries]), len(deliveries), answered)

    def send_run(self, sender: Sending, run: bytes, count: int, answered: Answered) -> None:
        """Send a run, as `send` does, to an entity that is not partitioned; each message is a delivery of its own."""
        entity = sender.entity
        if self._through(sender) is None:
            self.join(entity, entity.partition)
            self._append(SendRunOperation(sender.queue, True, count, run), count, answered)
        else:
            self.send(sender, _deliveries_of(run), answered)

    def partition_of(self, entity: Entity, messages: list[Any]) -> int:
        """The partition for messages to this entity. Raises NotAllowed.

        On a partitioned entity every message needs a key, and all of them the same (PE8 of Service Bus).
        """
        if not entity.is_partitioned:
            return entity.partition
        key = common_key(messages)
        if key is None:
            raise NotAllowed(error_texts.PARTITION_KEY_MISSING)
        if self._key not in (None, key):
            raise NotAllowed(error_texts.SEVERAL_PARTITION_KEYS)
        self._key = key
        return fragment_of(key, entity.partitions)

    def _through(self, sender: Sending) -> Entity | None:
        """The entity through which this sender's messages go to another; None if they go directly."""
        if sender.destination is not None or not self.coordinator.crosses_entities(sender.link):
            return None
        if self._entity is None:
            self._entity = self.coordinator.pinned()
        base = self._entity
        return None if base is None or base.top_level == sender.entity.top_level else base

    def _fragment_for(self, entity: Entity, messages: list[Any]) -> int:
        """The fragment on which messages wait that go through this entity: any will do, but the first may name one."""
        named = _via_key(messages[0])
        if named is None and self._partition in entity.partitions:
            return self._partition
        return fragment_of(named or common_key(messages) or b"", entity.partitions)

    def settle(
        self,
        channel: Received,
        receiver: Receiving,
        quiet: bool,
        tokens: list[bytes],
        outcome: Outcome,
        properties: dict[str, Any] | None,
        answered: Answered,
    ) -> None:
        """Add settlements of messages that this receiver got on this channel. Raises NotAllowed."""
        self.join(receiver.entity, channel.partition)
        operation = SettleOperation(receiver.queue, quiet, tokens, outcome, properties, channel.number)
        last = self._operations[-1] if self._operations else None
        if isinstance(last, SettleOperation) and not properties and operation == last._replace(tokens=tokens):
            last.tokens.extend(tokens)
            self._answered[-1].append((len(tokens), answered))
        else:
            self._append(operation, len(tokens), answered)

    def request(self, entity: Entity, partition: int, queue: int, asked: requests.InTransaction, reply: Reply) -> None:
        """Ask the partition for an operation that is a part of the transaction. Raises NotAllowed."""
        self.join(entity, partition)
        self.post()
        begins, self._begins = self._begins, False
        self._ask(queue, requests.TransactRequest(self.id, begins, *requests.packed(asked)), reply)

    def _append(self, operation: Operation, count: int, answered: Answered) -> None:
        self._operations.append(operation)
        self._answered.append([(count, answered)])
        self._turn.active[self] = None

    def post(self) -> None:
        """Send what has gathered to the partition."""
        if not self._operations:
            return
        operations, self._operations = self._operations, []
        answered, self._answered = self._answered, []
        begins, self._begins = self._begins, False
        worker = self._router.worker(self._partition)
        operations = [
            _without_run(each)
            if isinstance(each, SendRunOperation) and not worker.takes_run_in_transaction(each.run)
            else each
            for each in operations
        ]

        def reply(results: Any, error: BrokerError | None) -> None:
            for index, told in enumerate(answered):
                named = None if results is None else results[index]
                at = 0
                for count, tell in told:
                    if named is None:
                        tell(None if error is None else [error] * count)
                    else:
                        tell([None if each is None else error_named(*each) for each in named[at : at + count]])
                    at += count
            self._turn.flush()

        self._ask(0, requests.Transact(self.id, begins, pack_operations(operations)), reply)

    def _ask(self, queue: int, asked: requests.Request, reply: Reply) -> None:
        def answer(result: Any, error: BrokerError | None) -> None:
            if isinstance(error, TransactionTimeout):  # the partition does not know the id
                error = TransactionTimeout(error_texts.transaction_timed_out(self.id, TRANSACTION_TIME_OUT_MS))
            reply(result, error)

        losses = self._router.worker(self._partition).losses
        if self._losses is None:
            self._losses = losses
        # What began before the worker was lost is rolled back, so nothing that belongs to it waits for the worker.
        waits = self._losses == losses
        self._router.request(self._partition, queue, asked, answer, self._turn, waits=waits)

    def fail(self, error: Exception) -> None:
        """Note the error: the transaction cannot be committed any more."""
        self._failure = self._failure or TransactionRollback(f"An operation of the transaction failed: {error}")

    def discharge(self, commit: bool, reply: Reply) -> None:
        self._turn.active.pop(self, None)
        self.post()
        failure = self._failure if commit else None
        if failure is not None:
            self.discharge(False, lambda result, error: reply(None, failure))
        elif self._partition == NOWHERE:
            reply(None, None)  # the transaction has no operations
        else:
            answer = _after_commit(reply) if commit else _after_rollback(reply)
            self._ask(0, requests.Discharge(self.id, commit), answer)


# When a worker dies, its open transactions are rolled back. So a rollback has succeeded, and a commit that was not sent
# has failed. If the worker got a commit and did not answer, the outcome is unknown.


def _after_commit(reply: Reply) -> Reply:
    def answer(result: Any, error: BrokerError | None) -> None:
        if isinstance(error, ServerBusy):
            error = TransactionRollback("The transaction was rolled back: its partition is restarting.")
        reply(result, error)

    return answer


def _after_rollback(reply: Reply) -> Reply:
    def answer(result: Any, error: BrokerError | None) -> None:
        reply(result, None if isinstance(error, ServerBusy | OutcomeUnknown) else error)

    return answer


def _via_key(message: Sequence[Any]) -> bytes | None:
    """Return the key for the fragment of the partitioned entity that this message is sent via, if it has one."""
    layout, body, _, _ = message
    value = annotation(body[: unpack_layout(layout).annotation_bytes], _VIA_PARTITION_KEY)
    return None if value is None else str(decode_exactly(value)).encode()


def _deliveries_of(run: bytes) -> list[list[Any]]:
    return [[message] for message in messages_of(run, with_extra=True)]


def _without_run(operation: SendRunOperation) -> SendOperation:
    return SendOperation(operation.queue, operation.quiet, _deliveries_of(operation.run))


def addressed(messages: list[Any], destination: Entity) -> list[Any]:
    """Incoming messages (`broker.wire`) with their destination, as transfer queues take them."""
    name = destination.name.lower()
    return [
        (layout, body, ttl_ms, {**(extra or {}), Extra.DESTINATION: name}) for layout, body, ttl_ms, extra in messages
    ]


class Transactions:
    """The transactions of one connection that are declared and not discharged."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Transaction] = {}
        self._owner = os.urandom(TRANSACTION_OWNER_BYTES)

    def __len__(self) -> int:
        return len(self._by_id)

    def new_id(self) -> bytes:
        return self._owner + os.urandom(ID_BYTES - TRANSACTION_OWNER_BYTES)

    def add(self, transaction: Transaction) -> None:
        self._by_id[transaction.id] = transaction

    def find(self, transaction_id: bytes) -> Transaction:
        """Return the open transaction with this id. Raises TransactionUnknown."""
        transaction = self._by_id.get(transaction_id)
        if transaction is None:
            raise TransactionUnknown(error_texts.TRANSACTION_UNKNOWN)
        return transaction

    def take(self, transaction_id: bytes) -> Transaction:
        """Remove the transaction for its discharge: nothing can join it any more. Raises TransactionUnknown."""
        transaction = self.find(transaction_id)
        del self._by_id[transaction_id]
        return transaction

    def fail(self, transaction_id: bytes | None, error: Exception) -> None:
        """An operation of the transaction was refused, so the transaction must fail."""
        transaction = self._by_id.get(transaction_id or b"")
        if transaction is not None:
            transaction.fail(error)

    def roll_back(self, coordinator: object) -> None:
        """Roll back the transactions declared on this link."""
        for transaction in [each for each in self._by_id.values() if each.coordinator is coordinator]:
            del self._by_id[transaction.id]
            transaction.discharge(False, lambda result, error: None)
