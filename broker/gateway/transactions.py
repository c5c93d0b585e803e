"""A client's transactions: the work that it does in each of them.

A transaction belongs to the link that declared it, and can be used on every link of the connection. All its operations
go to the partition of the first one, which keeps them until the discharge. The operations of one read of the socket go
as one request. The transaction ends with its discharge, or is rolled back when its coordinator link, session or
connection ends.

A client may want to receive from one entity and send to others in one transaction, wherever these live (amqp.md 10.4).
Then messages for other partitions go to the transfer queue of the entity that the transaction began with. If it began
with a send, they go to the transfer queue of the entity that the client receives from.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from broker.errors import (
    BrokerError,
    NotAllowed,
    OutcomeUnknown,
    ServerBusy,
    TransactionRollback,
    TransactionUnknown,
)
from broker.gateway.namespace import Entity
from broker.gateway.router import Reply, Router, error_named
from broker.gateway.turn import Turn
from broker.namespace.fragments import common_key, fragment_of
from broker.runs import messages_of
from broker.wire import (
    TRANSACTION_OWNER_BYTES,
    Extra,
    Operation,
    Outcome,
    SendOperation,
    SendRunOperation,
    SettleOperation,
    pack_operations,
)
from protocol import error_texts
from protocol.engine.links import Link

ID_BYTES = 16

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

    def first_received(self) -> Entity | None: ...


class Transaction:
    """One transaction of a connection; `coordinator` is the link that declared it."""

    def __init__(self, transaction_id: bytes, turn: Turn, router: Router, coordinator: Declaring) -> None:
        self.id = transaction_id
        self.coordinator = coordinator
        self._turn = turn
        self._router = router
        self._entity: Entity | None = None  # the entity of its first operation
        self._partition = -1  # that of all operations, when there is one
        self._key: bytes | None = None  # of all messages sent to partitioned entities
        self._begins = True
        self._failure: BrokerError | None = None
        self._operations: list[Operation] = []
        self._answered: list[list[tuple[int, Answered]]] = []  # by operation: numbers of deliveries, and whom to tell

    def join(self, entity: Entity, partition: int) -> None:
        """Check that operations on this partition of this entity may join the transaction. Raises NotAllowed."""
        if self._entity is None:
            self._entity, self._partition = entity, partition
        elif self._partition != partition:
            raise NotAllowed(error_texts.SEVERAL_PARTITIONS)

    def send(self, sender: Sending, deliveries: Sequence[list[Any]], answered: Answered) -> None:
        """The messages of each delivery. On a partitioned entity all of them have the same key. Raises NotAllowed.

        The transaction cannot be committed if one is refused, whether or not the client is told: the SDK for Java tells
        its user of every send in a transaction that it was done.
        """
        queue = sender.queue
        if sender.destination is None:
            partition = self.partition_of(sender.entity, deliveries[0])
        elif self._partition in sender.entity.partitions:
            partition = self._partition  # any will do: the message waits there to be moved on
        else:
            partition = fragment_of(common_key(deliveries[0]) or b"", sender.entity.partitions)
        through = self._through(sender, partition)
        if through is not None:
            queue = through.transfer_queue
            deliveries = [addressed(messages, sender.entity) for messages in deliveries]
        else:
            self.join(sender.entity, partition)
        last = self._operations[-1] if self._operations else None
        if isinstance(last, SendOperation) and last.queue == queue:
            last.deliveries.extend(deliveries)
            self._answered[-1].append((len(deliveries), answered))
        else:
            self._append(SendOperation(queue, True, [*deliveries]), len(deliveries), answered)

    def send_run(self, sender: Sending, run: bytes, count: int, answered: Answered) -> None:
        """As `send`, of a run to an entity that is not partitioned, whose messages are a delivery each."""
        entity = sender.entity
        if self._through(sender, entity.partition) is None:
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

    def _through(self, sender: Sending, partition: int) -> Entity | None:
        """The entity through which this sender's messages go to another partition; None if they go directly."""
        if sender.destination is not None or not self.coordinator.crosses_entities(sender.link):
            return None
        if self._entity is None and (received := self.coordinator.first_received()) is not None:
            key = self._key
            if received.is_partitioned and key is None:
                raise NotAllowed(error_texts.PARTITION_KEY_MISSING)
            self._entity, self._partition = received, fragment_of(key or b"", received.partitions)
        return None if self._partition == partition else self._entity

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

    def request(
        self, entity: Entity, partition: int, name: str, queue: int, arguments: list[Any], reply: Reply
    ) -> None:
        """Raises NotAllowed."""
        self.join(entity, partition)
        self.post()
        begins, self._begins = self._begins, False
        self._ask("transact-request", queue, [self.id, begins, name, arguments], reply)

    def _append(self, operation: Operation, count: int, answered: Answered) -> None:
        self._operations.append(operation)
        self._answered.append([(count, answered)])
        self._turn.active[self] = None

    def post(self) -> None:
        """Send what has gathered to the partition."""
        if not self._operations or self._entity is None:
            return
        operations, self._operations = self._operations, []
        answered, self._answered = self._answered, []
        begins, self._begins = self._begins, False
        if not self._router.worker(self._partition).knows_runs_in_transactions:
            operations = [*map(_without_run, operations)]

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

        self._ask("transact", 0, [self.id, begins, pack_operations(operations)], reply)

    def _ask(self, name: str, queue: int, arguments: list[Any], reply: Reply) -> None:
        self._router.request(self._partition, name, queue, arguments, reply, self._turn)

    def fail(self, error: Exception) -> None:
        """Note the error: the transaction cannot be committed any more."""
        self._failure = self._failure or TransactionRollback(f"An operation of the transaction failed: {error}")

    def discharge(self, commit: bool, reply: Reply) -> None:
        self._turn.active.pop(self, None)
        self.post()
        failure = self._failure if commit else None
        if failure is not None:
            self.discharge(False, lambda result, error: reply(None, failure))
        elif self._entity is None:
            reply(None, None)  # the transaction has no operations
        else:
            answer = _after_commit(reply) if commit else _after_rollback(reply)
            self._ask("discharge", 0, [self.id, commit], answer)


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


def _deliveries_of(run: bytes) -> list[list[Any]]:
    return [[message] for message in messages_of(run, with_extra=True)]


def _without_run(operation: Operation) -> Operation:
    if isinstance(operation, SendRunOperation):
        return SendOperation(operation.queue, operation.quiet, _deliveries_of(operation.run))
    return operation


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
        """Raises TransactionUnknown."""
        transaction = self._by_id.get(transaction_id)
        if transaction is None:
            raise TransactionUnknown("The transaction was not declared on this connection, or has ended.")
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
