"""Links on which clients send: the messages of one read of the socket go to a partition as few commands."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from broker import wire
from broker.errors import BrokerError, EntityMoving, NotAllowed, OutcomeUnknown, ServerBusy
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.channel import LinkChannel
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


class SenderChannel(LinkChannel):
    """A sender on one partition: messages that have gathered, and deliveries that wait for an answer."""

    def __init__(self, sender: "ClientSender", partition: int) -> None:
        super().__init__(sender.connection, partition)
        self._sender = sender
        self.messages: list[Any] = []  # those that have gathered, each a delivery of its own
        self.gathered_bytes = 0  # of their deliveries
        self.pending: deque[Delivery | None] = deque()  # in order of arrival; None for one that was sent settled
        self._sends: deque[tuple[float, int, int, int]] = deque()  # per command: time, deliveries, messages, bytes
        self.is_down = False  # a command of this turn could not be posted
        self.is_left = False  # the entity was moved; only answers come

    def leave(self) -> None:
        self.is_left = True
        if self.messages:
            self.post_messages()
        if self.is_down:
            self.answer_unposted()
        elif not self.pending:
            self.forget()

    def send_batch(self, messages: list[Any], size_bytes: int) -> None:
        """All messages are one delivery."""
        if self.messages:
            self.post_messages()
        self._post(wire.send_batch, messages, 1, size_bytes)

    def post_messages(self) -> None:
        messages, self.messages = self.messages, []
        size_bytes, self.gathered_bytes = self.gathered_bytes, 0
        self._post(wire.send, messages, len(messages), size_bytes)

    def answer_unposted(self) -> None:
        """Answer all that waits: before this turn's output is written, and before the worker is back."""
        self.is_down = False
        self._answer_all(_BUSY)

    def _post(self, command: Callable[..., Send], messages: list[Any], deliveries: int, size_bytes: int) -> None:
        self._sends.append((time.perf_counter(), deliveries, len(messages), size_bytes))
        if not self.worker.post(command(self.partition, self.number, self._sender.queue, messages)):
            self.is_down = True

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        pending, sender = self.pending, self._sender
        metrics, latency = sender.metrics, sender.latency
        metrics.incoming_requests += count
        if error is None:
            metrics.successful_requests += count
            for _ in range(count):
                delivery = pending.popleft()
                if delivery is not None:
                    settle(delivery, ACCEPTED)
        else:
            metrics.failed(type(error).__name__, count)
            condition, text = condition_of(error), str(error)
            for _ in range(count):
                delivery = pending.popleft()
                if delivery is not None:
                    self.connection.reject(delivery, condition, text, sender.tracker)
            if isinstance(error, EntityMoving):
                sender.follow()
        sender.answered(count)
        if self.is_left and not pending:
            self.forget()
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
            latency.observe_many(now - since, deliveries)
            if error is None:
                metrics.incoming_messages += messages
                metrics.incoming_bytes += size_bytes

    def on_worker_lost(self) -> None:
        """Answer that the outcome is unknown: the messages may have been stored."""
        self._answer_all(_UNKNOWN)

    def _answer_all(self, error: BrokerError) -> None:
        self.on_sent(len(self.pending), error)
        self._sends.clear()

    def end(self) -> None:
        """The client is gone. Its messages are still stored; nobody is told."""
        if self.messages:
            messages, self.messages = self.messages, []
            self.worker.post(wire.send(self.partition, 0, self._sender.queue, messages))
        self.forget()
        self.pending.clear()


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
        self.latency = connection.gateway.metrics.send_latency
        self._in_transactions = 0  # deliveries that wait for the answer to their transaction
        self._requires_session = self._taker.requires_session
        self._wants_id = self._taker.detects_duplicates
        self._new_id = connection.gateway.new_message_id
        self.unanswered = 0  # deliveries on all channels that wait for an answer
        self._only = SenderChannel(self, entity.partition) if len(entity.partitions) == 1 else None
        self._left: list[SenderChannel] = []  # those of partitions that the entity has left, and that owe answers

    @property
    def waiting(self) -> int:
        return self.unanswered + self._in_transactions

    def _spread(self, delivery: Delivery, messages: list[Any], size_bytes: int, batch: bool, settled: bool) -> None:
        """Send a delivery to one of several fragments."""
        raise NotImplementedError

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
        channel = self._only
        if channel is not None and channel.worker.is_stalled:
            self.refuse(delivery, settled, _BUSY)
            return
        if state == TRANSACTIONAL:
            self._send_in(transactional_state(delivery)[0], delivery, messages, len(payload), settled)
            return
        if channel is None:
            self._spread(delivery, messages, len(payload), batch, settled)
            return
        self.unanswered += 1
        if settled:
            forget(delivery)
            channel.pending.append(None)
        else:
            channel.pending.append(delivery)
        if batch:
            channel.send_batch(messages, len(payload))
        else:
            channel.messages += messages
            channel.gathered_bytes += len(payload)
            if channel.gathered_bytes > EARLY_BYTES:
                channel.post_messages()

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
            transaction.send(self, messages, answered)
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

    def post_gathered(self) -> bool:
        channel = self._only
        assert channel is not None
        is_posted = bool(channel.messages)
        if is_posted:
            channel.post_messages()
        if channel.is_down:
            channel.answer_unposted()
            return False
        return is_posted

    def answered(self, count: int) -> None:
        """So many deliveries that were on channels have their outcome."""
        self.unanswered -= count
        if self.credit_due(self.waiting):
            self.connection.active.add(self)

    def follow(self) -> None:
        """If the entity was moved to another partition, send to that one. The one before refuses what is on its way."""
        before = self._only
        if before is not None and before.partition != self.entity.partition:
            self._only = SenderChannel(self, self.entity.partition)
            self._left = [each for each in (*self._left, before) if each.pending or each is before]
            before.leave()

    def on_detach(self) -> None:
        """The client is gone."""
        if self._only is not None:
            for channel in (*self._left, self._only):
                channel.end()
