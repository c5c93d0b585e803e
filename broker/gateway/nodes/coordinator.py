"""The node that declares and discharges transactions: AMQP 1.0, 4.3."""

from typing import Any

from broker.errors import BrokerError, NotAllowed, QuotaExceeded
from broker.gateway.conditions import condition_of
from broker.gateway.crossing import Crossing
from broker.gateway.host import Host
from broker.gateway.links.intake import Intake
from broker.gateway.namespace import Entity
from broker.gateway.transactions import Transaction
from protocol.engine.deliveries import ACCEPTED, Delivery, declare, forget, settle
from protocol.engine.links import Link
from protocol.errors import ProtocolError
from protocol.nodes.coordinator import Declare, parse

COORDINATOR_CREDIT = 100
MAX_OPEN = 1000  # transactions of one connection
# The largest message: a declare and a discharge are short.
MAX_REQUEST_BYTES = 4096


class Coordinator(Intake):
    """A client's link to the coordinator."""

    window = COORDINATOR_CREDIT

    def __init__(self, connection: Host, link: Link) -> None:
        self.connection = connection
        self.link = link
        self._discharging = 0  # discharges that wait for the partition
        self._crossing = Crossing.of(link, connection.pinning)

    @property
    def waiting(self) -> int:
        return self._discharging

    def crosses_entities(self, link: Link) -> bool:
        """True if sends on this link may go through the entity of their transaction."""
        return self._crossing.crosses and link.session is self.link.session

    def pinned(self) -> Entity | None:
        """The entity that the session is pinned to, if it crosses entities: see `Crossing`."""
        entity = self._crossing.pinned(self.link.session)
        # One that was deleted and created again is another object.
        return entity and (self.connection.gateway.namespace.at(entity.name) or entity)

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        try:
            asked = parse(payload)
            if isinstance(asked, Declare):
                self._declare(delivery, settled)
            else:
                self._discharge(delivery, asked.transaction, not asked.fail, settled)
        except (BrokerError, ProtocolError) as error:
            self.refuse(delivery, settled, error)

    def _declare(self, delivery: Delivery, settled: bool) -> None:
        transactions = self.connection.transactions
        if settled:
            raise NotAllowed("A declare must not be sent settled: its answer carries the transaction's id.")
        if len(transactions) >= MAX_OPEN:
            raise QuotaExceeded(f"The connection has {MAX_OPEN} open transactions, which is the limit; end one first.")
        transaction = Transaction(transactions.new_id(), self.connection, self.connection.gateway.router, self)
        transactions.add(transaction)
        declare(delivery, transaction.id)

    def _discharge(self, delivery: Delivery, transaction_id: bytes, commit: bool, settled: bool) -> None:
        connection = self.connection
        connection.post_gathered()  # what has gathered may be a part of the transaction
        transaction = connection.transactions.take(transaction_id)
        if settled:
            forget(delivery)
        self._discharging += 1

        def reply(result: Any, error: BrokerError | None) -> None:
            self._discharging -= 1
            connection.active[self] = None
            if not settled and not self.link.closed:
                if error is None:
                    self.link.begin_outcomes()
                    settle(delivery, ACCEPTED)
                else:
                    connection.reject(delivery, condition_of(error), str(error))
            connection.flush()

        transaction.discharge(commit, reply)

    def on_detach(self) -> None:
        """Roll back the transactions that were declared here and not discharged."""
        self.connection.post_gathered()
        self.connection.transactions.roll_back(self)
