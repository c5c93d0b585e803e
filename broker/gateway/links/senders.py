"""Links on which clients send: the messages of one read of the socket go to the partition as few commands."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from broker import wire
from broker.errors import BrokerError, NotAllowed, OutcomeUnknown, ServerBusy
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.entity_link import EntityLink
from broker.gateway.links.intake import Intake
from broker.gateway.namespace import Entity
from broker.gateway.router import EARLY_BYTES
from broker.gateway.transactions import addressed
from broker.namespace.entities import Right
from broker.wire import Extra, Send
from protocol import error_texts
from protocol.addresses import Address
from protocol.engine.deliveries import ACCEPTED, TRANSACTIONAL, Delivery, forget, settle, settle_in, transactional_state
from protocol.engine.links import Link
from protocol.errors import ProtocolError
from protocol.message.batches import unpack_batch
from protocol.message.intake import take_apart

_BUSY = ServerBusy(error_texts.SERVER_BUSY)
_UNKNOWN = OutcomeUnknown(error_texts.OUTCOME_UNKNOWN)


class ClientSender(EntityLink, Intake):
    """A link on which the client sends to an entity, or through it to another."""

    right = Right.SEND

    def __init__(
        self, connection: Host, link: Link, entity: Entity, address: Address, destination: Entity | None = None
    ) -> None:
        super().__init__(connection, link, entity, address)
        self.destination = destination
        self._taker = destination or entity
        if destination is not None:
            self.queue = entity.transfer_queue
            self.paths.append(destination.name.lower())
        self.window = connection.gateway.settings.amqp.sender_credit
        self._messages: list[Any] = []
        self._gathered_bytes = 0  # of their deliveries
        self._pending: deque[Delivery | None] = deque()  # in order of arrival; None for one that was sent settled
        self._in_transactions = 0  # deliveries that wait for the answer to their transaction
        self._sends: deque[tuple[float, int, int, int]] = deque()  # per command: time, deliveries, messages, bytes
        self._requires_session = self._taker.requires_session
        self._wants_id = self._taker.detects_duplicates
        self._new_id = connection.gateway.new_message_id
        self._latency = connection.gateway.metrics.send_latency

    @property
    def waiting(self) -> int:
        return len(self._pending) + self._in_transactions

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        try:
            if batch:
                messages = [take_apart(message, self._wants_id, self._new_id) for message in unpack_batch(payload)]
            else:
                messages = [take_apart(payload, self._wants_id, self._new_id)]
            if self._requires_session:
                for message in messages:
                    self._check(message)
            if self.destination is not None:
                messages = addressed(messages, self.destination)
        except (ProtocolError, BrokerError) as error:
            self.refuse(delivery, settled, error)
            return
        if self.worker.is_stalled:
            self.refuse(delivery, settled, _BUSY)
            return
        if state == TRANSACTIONAL:
            self._send_in(transactional_state(delivery)[0], delivery, messages, len(payload), settled)
            return
        if settled:
            forget(delivery)
            self._pending.append(None)
        else:
            self._pending.append(delivery)
        if batch:
            self._post_gathered()
            self._post(wire.send_batch, messages, 1, len(payload))
        else:
            self._messages += messages
            self._gathered_bytes += len(payload)
            if self._gathered_bytes > EARLY_BYTES:
                self._post_gathered()

    def _send_in(
        self, transaction_id: bytes, delivery: Delivery, messages: list[Any], size_bytes: int, settled: bool
    ) -> None:
        """The delivery is a part of a transaction. Its answer is transactional too, unless the delivery is refused."""

        def answered(error: BrokerError | None) -> None:
            self._in_transactions -= 1
            self.connection.active.add(self)
            waits = not settled and not self.link.closed
            self.metrics.incoming_requests += 1
            if error is not None:
                self.metrics.failed(type(error).__name__)
                if waits:
                    self.connection.reject(delivery, condition_of(error), str(error), self.tracker)
                return
            self.metrics.successful_requests += 1
            self.metrics.incoming_messages += len(messages)
            self.metrics.incoming_bytes += size_bytes
            if waits:
                settle_in(transaction_id, delivery, ACCEPTED)

        try:
            transaction = self.connection.transactions.find(transaction_id)
            transaction.send(self, settled, messages, answered)
        except BrokerError as error:
            self.refuse(delivery, settled, error)
        else:
            self._in_transactions += 1
            if settled:
                forget(delivery)

    def _check(self, message: Any) -> None:
        extra = message[3]
        if self._requires_session and not (extra and (Extra.SESSION_ID in extra or Extra.PING in extra)):
            raise NotAllowed(error_texts.session_id_missing(self._taker.name))

    def refuse(self, delivery: Delivery, settled: bool, error: Exception) -> None:
        self.metrics.incoming_requests += 1
        self.metrics.failed(type(error).__name__)
        super().refuse(delivery, settled, error)

    def post_gathered(self) -> None:
        self._post_gathered()
        if self._worker_is_down:
            self.answer_if_down()

    def _post_gathered(self) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            size_bytes, self._gathered_bytes = self._gathered_bytes, 0
            self._post(wire.send, messages, len(messages), size_bytes)

    def _post(self, command: Callable[..., Send], messages: list[Any], deliveries: int, size_bytes: int) -> None:
        self._sends.append((time.perf_counter(), deliveries, len(messages), size_bytes))
        if not self.worker.post(command(self.partition, self.channel, self.queue, messages)):
            self._worker_is_down = True

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        pending = self._pending
        if error is None:
            for _ in range(count):
                delivery = pending.popleft()
                if delivery is not None:
                    settle(delivery, ACCEPTED)
        else:
            condition, text = condition_of(error), str(error)
            for _ in range(count):
                delivery = pending.popleft()
                if delivery is not None:
                    self.connection.reject(delivery, condition, text, self.tracker)
        self._count(count, error)
        if self.credit_due(len(pending) + self._in_transactions):
            self.connection.active.add(self)

    def _count(self, count: int, error: BrokerError | None) -> None:
        metrics = self.metrics
        metrics.incoming_requests += count
        if error is None:
            metrics.successful_requests += count
        else:
            metrics.failed(type(error).__name__, count)
        now = time.perf_counter()
        sends = self._sends
        while count and sends:
            since, deliveries, messages, size_bytes = sends.popleft()
            if count < deliveries:
                left = deliveries - count
                sends.appendleft((since, left, messages * left // deliveries, size_bytes * left // deliveries))
                messages = messages * count // deliveries
                size_bytes = size_bytes * count // deliveries
                deliveries = count
            count -= deliveries
            self._latency.observe_many(now - since, deliveries)
            if error is None:
                metrics.incoming_messages += messages
                metrics.incoming_bytes += size_bytes

    def on_worker_lost(self) -> None:
        """Answer that the outcome is unknown: the messages may have been stored."""
        self._answer_all(_UNKNOWN)

    def answer_unposted(self) -> None:
        self._answer_all(_BUSY)

    def _answer_all(self, error: BrokerError) -> None:
        self.on_sent(len(self._pending), error)
        self._sends.clear()

    def on_detach(self) -> None:
        """The client is gone. Its messages are still stored; nobody is told."""
        self.post_rest()
        self.worker.channels.pop(self.channel, None)
        self._pending.clear()

    def post_rest(self) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            self.worker.post(wire.send(self.partition, 0, self.queue, messages))
