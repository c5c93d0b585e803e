"""A client's transactions: its links to the coordinator, and the work that it does in each transaction.

A transaction belongs to the link that declared it, and can be used on every link of the connection. Its work goes to
one partition, that of the first of it, which keeps it until the discharge; what one read of the socket holds goes as
one request. It ends with its discharge, or is rolled back with its coordinator link, session or connection.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker.errors import BrokerError, NotAllowed, NotImplementedByBroker, QuotaExceeded, TransactionRollback
from broker.gateway.conditions import condition_of
from broker.gateway.properties import dead_letter_properties, encode_properties
from broker.gateway.router import Reply, error_named
from broker.wire import Outcome
from protocol import conditions, tracking
from protocol.codec import Described
from protocol.deliveries import ACCEPTED, MODIFIED, REJECTED, RELEASED, Delivery, declare, forget, settle
from protocol.errors import ProtocolError
from protocol.links import Link
from protocol.transactions import Declare, outcome_of, parse

if TYPE_CHECKING:
    from broker.gateway.connection import ClientConnection
    from broker.gateway.links import ClientReceiver

COORDINATOR_CREDIT = 100
MAX_OPEN = 1000  # transactions of one connection
# A declare and a discharge are short.
MAX_REQUEST_BYTES = 4096
ID_BYTES = 16

# Called with the error of one delivery, or None if it was taken.
Answered = Callable[[BrokerError | None], None]


class Transaction:
    """One transaction of a connection."""

    def __init__(self, connection: "ClientConnection", coordinator: "Coordinator") -> None:
        self.id = os.urandom(ID_BYTES)
        self.coordinator = coordinator
        self._connection = connection
        self._router = connection.gateway.router
        self._partition: int | None = None
        self._begins = True
        self._failure: BrokerError | None = None
        self._operations: list[list[Any]] = []
        self._answered: list[list[Answered]] = []  # of each operation, for each of its deliveries

    def join(self, partition: int) -> None:
        """Work on this partition is to be a part of it. Raises NotAllowed."""
        if self._partition is None:
            self._partition = partition
        elif self._partition != partition:
            raise NotAllowed(
                "A transaction cannot span entities of several partitions; send to them through an entity of the first."
            )

    def send(self, partition: int, queue: int, quiet: bool, messages: list[Any], answered: Answered) -> None:
        """One delivery; `quiet`: the client does not wait for its outcome. Raises NotAllowed."""
        self.join(partition)
        last = self._last("send", queue, quiet)
        if last is None:
            self._append(["send", queue, quiet, [messages]], answered)
        else:
            last[3].append(messages)
            self._answered[-1].append(answered)

    def settle(
        self,
        receiver: "ClientReceiver",
        quiet: bool,
        token: bytes,
        outcome: Outcome,
        properties: dict[str, Any] | None,
        answered: Answered,
    ) -> None:
        """Of a message that this receiver got. Raises NotAllowed."""
        self.join(receiver.partition)
        last = self._last("settle", receiver.queue, quiet)
        channel = receiver.channel
        if last is None or last[4] is not outcome or last[5] or properties or last[6] != channel:
            operation = ["settle", receiver.queue, quiet, [token], outcome, properties, channel]
            self._append(operation, answered)
        else:
            last[3].append(token)
            self._answered[-1].append(answered)

    def request(self, partition: int, name: str, queue: int, arguments: list[Any], reply: Reply) -> None:
        """Raises NotAllowed."""
        self.join(partition)
        self.post()
        begins, self._begins = self._begins, False
        self._router.request(partition, "transact-request", queue, [self.id, begins, name, arguments], reply)

    def _last(self, kind: str, queue: int, quiet: bool) -> list[Any] | None:
        if self._operations and self._operations[-1][:3] == [kind, queue, quiet]:
            return self._operations[-1]
        return None

    def _append(self, operation: list[Any], answered: Answered) -> None:
        self._operations.append(operation)
        self._answered.append([answered])
        self._connection.active.add(self)

    def post(self) -> None:
        """Send what has gathered to the partition."""
        if not self._operations or self._partition is None:
            return
        operations, self._operations = self._operations, []
        answered, self._answered = self._answered, []
        begins, self._begins = self._begins, False

        def reply(results: Any, error: BrokerError | None) -> None:
            for index, each in enumerate(answered):
                errors = None if results is None else results[index]
                for place, tell in enumerate(each):
                    named = None if errors is None else errors[place]
                    tell(error if named is None else error_named(*named))
            self._connection.flush()

        self._router.request(self._partition, "transact", 0, [self.id, begins, operations], reply)

    def fail(self, error: Exception) -> None:
        """It is not to be committed any more."""
        self._failure = self._failure or TransactionRollback(f"Something in it failed: {error}")

    def discharge(self, commit: bool, reply: Reply) -> None:
        self._connection.active.discard(self)
        self.post()
        failure = self._failure if commit else None
        if failure is not None:
            self.discharge(False, lambda result, error: reply(None, failure))
        elif self._partition is None:
            reply(None, None)  # nothing was done in it
        else:
            self._router.request(self._partition, "discharge", 0, [self.id, commit], reply)


class Coordinator:
    """A client's link to the coordinator."""

    def __init__(self, connection: "ClientConnection", link: Link) -> None:
        self.connection = connection
        self.link = link

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool) -> None:
        connection = self.connection
        if self.link.credit < COORDINATOR_CREDIT // 2:
            self.link.grant(COORDINATOR_CREDIT - self.link.credit)
        try:
            asked = parse(payload)
            if isinstance(asked, Declare):
                self._declare(delivery, settled)
            else:
                self._discharge(delivery, asked.transaction, not asked.fail, settled)
        except (BrokerError, ProtocolError) as error:
            if settled:
                forget(delivery)
            else:
                connection.reject(delivery, condition_of(error), str(error))

    def _declare(self, delivery: Delivery, settled: bool) -> None:
        transactions = self.connection.transactions
        if settled:
            raise NotAllowed("A declare must not be settled: its answer is the transaction's id.")
        if len(transactions) >= MAX_OPEN:
            raise QuotaExceeded(f"The connection has {MAX_OPEN} transactions that have not ended.")
        transaction = Transaction(self.connection, self)
        transactions[transaction.id] = transaction
        declare(delivery, transaction.id)

    def _discharge(self, delivery: Delivery, transaction_id: bytes, commit: bool, settled: bool) -> None:
        connection = self.connection
        transaction = connection.transaction(transaction_id)
        del connection.transactions[transaction_id]
        if settled:
            forget(delivery)

        def reply(result: Any, error: BrokerError | None) -> None:
            if settled or self.link.closed:
                return
            if error is None:
                settle(delivery, ACCEPTED)
            else:
                connection.reject(delivery, condition_of(error), str(error))
            connection.flush()

        transaction.discharge(commit, reply)

    def on_oversized(self, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        text = tracking.message_too_large(0, size_bytes, self.link.max_message_bytes)
        self.connection.reject(delivery, conditions.LINK_MESSAGE_SIZE_EXCEEDED, text)

    def on_flow(self) -> None: ...

    def on_detach(self) -> None:
        """What was declared here and not discharged is rolled back."""
        transactions = self.connection.transactions
        for transaction in [each for each in transactions.values() if each.coordinator is self]:
            del transactions[transaction.id]
            transaction.discharge(False, lambda result, error: None)


def transactional_outcome(value: Described | None) -> tuple[Outcome, dict[str, Any] | None]:
    """The outcome in a transactional-state, and the properties that it sets. Raises NotImplementedByBroker."""
    found = outcome_of(value)
    if found is None:
        raise NotImplementedByBroker("A transactional-state without an outcome that is known.")
    fields = [*found.fields, None, None, None]
    if found.state == MODIFIED:
        outcome = Outcome.DEFERRED if fields[1] else Outcome.ABANDONED
        return outcome, encode_properties(fields[2]) if isinstance(fields[2], dict) else None
    if found.state == REJECTED:
        error = fields[0].value if isinstance(fields[0], Described) else None
        _, description, info = (*error, None, None, None)[:3] if isinstance(error, list) else (None, None, None)
        return Outcome.DEAD_LETTERED, dead_letter_properties(
            info if isinstance(info, dict) else {}, description if isinstance(description, str) else ""
        )
    return Outcome.RELEASED if found.state == RELEASED else Outcome.ACCEPTED, None
