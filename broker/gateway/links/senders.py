"""Links on which clients send: the messages of one read of the socket go to a partition as few commands."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from broker import wire
from broker.errors import BrokerError, EntityMoving, NotAllowed, OutcomeUnknown, ServerBusy
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.channel import LinkChannel
from broker.gateway.links.entity_link import EntityLink
from broker.gateway.links.intake import Intake
from broker.gateway.links.pending import Arrivals, NativeArrivals, PlainArrivals, TakenDeliveries
from broker.gateway.namespace import Entity
from broker.gateway.router import EARLY_BYTES
from broker.gateway.transactions import Answered, Transaction, addressed
from broker.namespace.entities import Right
from broker.wire import Extra, Send
from protocol import error_texts
from protocol.addresses import Address
from protocol.engine.deliveries import (
    ACCEPTED,
    TRANSACTIONAL,
    Delivery,
    forget,
    settle_in,
    transaction_of,
    transactional_state,
)
from protocol.engine.links import Link
from protocol.engine.proton.native import address_of, delivery_at, native
from protocol.errors import EmptyBatch, ProtocolError
from protocol.message.batches import unpack_batch
from protocol.message.intake import take_apart

_UNKNOWN = OutcomeUnknown(error_texts.OUTCOME_UNKNOWN)


class SenderChannel(LinkChannel):
    """A sender on one partition: messages that have gathered, and deliveries that wait for an answer.

    If the extension is there, usual messages gather in it, as a run. Python's messages that have gathered came before
    those of the run.
    """

    def __init__(self, sender: "ClientSender", partition: int) -> None:
        super().__init__(sender.connection, partition)
        self._sender = sender
        self.messages: list[Any] = []  # those that have gathered, each a delivery of its own
        self.gathered_bytes = 0  # of their deliveries
        link = sender.link
        self._incoming: Any = None
        if native is not None and sender.takes_usual:
            self._incoming = native.Incoming(
                address_of(link.pointer),
                self,
                link.max_message_bytes,
                gives_ids=not sender.wants_id,  # duplicates are detected by the client's ids alone
                needs_id=sender.wants_id,
                takes_sessions=sender.entity.kind != "topic",  # whose subscriptions may require sessions
                needs_session=sender.requires_session,
                takes_transactions=True,
            )
            link.engine.take_usual(link, self._incoming)
        self.pending: Arrivals = PlainArrivals() if self._incoming is None else NativeArrivals(self._incoming)
        self._sends: deque[tuple[float, int, int, int]] = deque()  # per command: time, deliveries, messages, bytes
        self.is_down = False  # a command of this turn could not be posted
        self.is_left = False  # the entity was moved; only answers come

    # -- what the extension calls

    def on_gathering(self) -> None:
        self._sender.link.known_credit = None
        self.connection.active[self._sender] = None

    def post_early(self) -> None:
        self.post_gathered()

    # -- commands

    @property
    def has_gathered(self) -> bool:
        return bool(self.messages or (self._incoming is not None and self._incoming.count))

    def post_gathered(self) -> None:
        if self.messages:
            self.post_messages()
        if self._incoming is not None and self._incoming.count:
            self._post_run()

    def take(self, delivery: Delivery | None, message: Any, size_bytes: int) -> None:
        """Gather a message that Python has taken apart."""
        if self._incoming is not None and self._incoming.count:
            self.post_gathered()
        self.pending.append(delivery)
        self.messages.append(message)
        self.gathered_bytes += size_bytes
        if self.gathered_bytes > EARLY_BYTES:
            self.post_messages()

    def leave(self) -> None:
        self.is_left = True
        self.post_gathered()
        if self.is_down:
            self.answer_unposted()
        elif not self.pending:
            self.forget()

    def send_batch(self, delivery: Delivery | None, messages: list[Any], size_bytes: int) -> None:
        """All messages are one delivery."""
        self.post_gathered()
        self.pending.append(delivery)
        self._post(wire.send_batch, messages, 1, size_bytes)

    def post_messages(self) -> None:
        messages, self.messages = self.messages, []
        size_bytes, self.gathered_bytes = self.gathered_bytes, 0
        self._post(wire.send, messages, len(messages), size_bytes)

    def away(self) -> ServerBusy:
        return ServerBusy(error_texts.partition_away(self.partition))

    def answer_unposted(self) -> None:
        """Answer all that waits: before this turn's output is written, and before the worker is back.

        If there was no room for the last, those before are refused, too: answers are in the order of the deliveries.
        """
        self.is_down = False
        self.worker.drop_waiting(self)
        self._answer_all(self.away())

    def _post_run(self) -> None:
        incoming = self._incoming
        count, size_bytes, transaction_id = incoming.count, incoming.message_bytes, incoming.transaction
        run = incoming.take_run()
        if transaction_id is not None:
            sender = self._sender
            sender.send_in(
                transaction_id,
                TakenDeliveries(incoming.take_pending(count)),
                count,
                size_bytes,
                lambda transaction, answered: transaction.send_run(sender, run, count, answered),
            )
            return
        if self.worker.is_stalled:
            for _ in range(count):
                self._sender.refuse_address(incoming.pop(), self.away())
            return
        self._sender.unanswered += count
        self._sends.append((time.perf_counter(), count, count, size_bytes))
        if not self.worker.post_run(self.partition, self.number, self._sender.queue, count, run):
            self._not_posted(count, len(run), lambda: self._post_run_now(run, count))

    def _post(self, command: Callable[..., Send], messages: list[Any], deliveries: int, size_bytes: int) -> None:
        self._sends.append((time.perf_counter(), deliveries, len(messages), size_bytes))
        if not self.worker.post(command(self.partition, self.number, self._sender.queue, messages)):
            self._not_posted(deliveries, size_bytes, lambda: self._post_now(command, messages))

    def _post_run_now(self, run: bytes, count: int) -> None:
        self.worker.post_run(self.partition, self.number, self._sender.queue, count, run)

    def _post_now(self, command: Callable[..., Send], messages: list[Any]) -> None:
        self.worker.post(command(self.partition, self.number, self._sender.queue, messages))

    def _not_posted(self, deliveries: int, size_bytes: int, post: Callable[[], None]) -> None:
        """The worker is away: it gets the deliveries when it is back, if they may wait. They are in `pending`."""
        if self.is_down or not self.let_wait(deliveries, size_bytes, post, partial(self.on_sent, deliveries)):
            self.is_down = True

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        pending, sender = self.pending, self._sender
        metrics, latency = sender.metrics, sender.latency
        metrics.incoming_requests += count
        if error is None:
            metrics.successful_requests += count
            sender.link.begin_outcomes()
            pending.accept(count)
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
        if self._incoming is not None and self._incoming.transaction is not None:
            self.post_gathered()  # the transaction may go on
        elif self._incoming is not None and (count := self._incoming.count):
            self.worker.post_run(self.partition, 0, self._sender.queue, count, self._incoming.take_run())
        self._sender.link.engine.forget_native(self._sender.link)
        self.pending.clear()
        self.forget()

    def forget(self) -> None:
        super().forget()
        self.pending, self._incoming = PlainArrivals(), None  # which refers to this channel


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
        self.requires_session = self._taker.requires_session
        self.wants_id = self._taker.detects_duplicates
        self._new_id = connection.gateway.new_message_id
        self.unanswered = 0  # deliveries on all channels that wait for an answer
        self._only = SenderChannel(self, entity.partition) if len(entity.partitions) == 1 else None
        self._left: list[SenderChannel] = []  # those of partitions that the entity has left, and that owe answers

    @property
    def takes_usual(self) -> bool:
        """True if a usual message needs nothing but to be stored."""
        return self.destination is None

    @property
    def waiting(self) -> int:
        return self.unanswered + self._in_transactions

    @property
    def owes_answers(self) -> bool:
        return self.waiting > 0

    def _spread(self, delivery: Delivery, messages: list[Any], size_bytes: int, batch: bool, settled: bool) -> None:
        """Send a delivery to one of several fragments."""
        raise NotImplementedError

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        if self.is_ending:
            forget(delivery)
            return
        try:
            if batch:
                messages = [take_apart(message, self.wants_id, self._new_id) for message in unpack_batch(payload)]
            else:
                messages = [take_apart(payload, self.wants_id, self._new_id)]
            if self.requires_session:
                for message in messages:
                    self._check(message)
            if self.destination is not None:
                messages = addressed(messages, self.destination)
        except EmptyBatch as error:
            self._end_after_empty_batch(delivery, settled, error)
            return
        except (ProtocolError, BrokerError) as error:
            self.refuse(delivery, settled, error)
            return
        channel = self._only
        if channel is not None and channel.worker.is_stalled:
            self.refuse(delivery, settled, channel.away())
            return
        if state == TRANSACTIONAL:
            if channel is not None:
                channel.post_gathered()  # of the same transaction, perhaps
            transaction_id, _ = transactional_state(delivery)
            if settled:
                forget(delivery)
            self.send_in(
                transaction_id,
                (None if settled else delivery,),
                len(messages),
                len(payload),
                lambda transaction, answered: transaction.send(self, [messages], answered),
            )
            return
        if channel is None:
            self._spread(delivery, messages, len(payload), batch, settled)
            return
        self.unanswered += 1
        if settled:
            forget(delivery)
        waiting = None if settled else delivery
        if batch:
            channel.send_batch(waiting, messages, len(payload))
        else:
            channel.take(waiting, messages[0], len(payload))

    def _end_after_empty_batch(self, delivery: Delivery, settled: bool, error: EmptyBatch) -> None:
        """Detach the link, as Service Bus does, after answering what came before. The batch gets no outcome."""
        self.connection.transactions.fail(transaction_of(delivery), error)
        if settled:
            forget(delivery)
        link = self.link
        text = error_texts.empty_batch(self.connection.client_name[:100], link.name[:100], link.channel_handle[1])
        self.detach(NotAllowed(text))

    def send_in(
        self,
        transaction_id: bytes,
        deliveries: Sequence[Delivery | None],
        messages: int,
        size_bytes: int,
        add: Callable[[Transaction, Answered], None],
    ) -> None:
        """Deliveries are a part of a transaction, to which `add` adds them. `messages` is the number of their messages.

        Their answers are transactional, too, unless they are refused.
        """
        count = len(deliveries)

        def answered(errors: Sequence[BrokerError | None] | None) -> None:
            self._in_transactions -= count
            self.connection.active[self] = None
            self.metrics.incoming_requests += count
            refused = [] if errors is None else [each for each in errors if each is not None]
            taken = count - len(refused)
            self.metrics.successful_requests += taken
            self.metrics.incoming_messages += messages * taken // count
            self.metrics.incoming_bytes += size_bytes * taken // count
            for each in refused:
                self.metrics.failed(type(each).__name__)
            if self.link.closed:
                return
            if not refused and isinstance(deliveries, TakenDeliveries):
                deliveries.accept_in(transaction_id)
                return
            for delivery, error in zip(deliveries, errors or [None] * count, strict=True):
                if delivery is None:
                    continue
                if error is None:
                    settle_in(transaction_id, delivery, ACCEPTED)
                else:
                    self.connection.reject(delivery, condition_of(error), str(error), self.tracker)

        try:
            if self._only is not None and self._only.worker.is_stalled:
                raise self._only.away()
            transaction = self.connection.transactions.find(transaction_id)
            add(transaction, answered)
        except BrokerError as error:
            for delivery in deliveries:
                if delivery is None or self.link.closed:
                    self.connection.transactions.fail(transaction_id, error)
                    self._count_refused(error)
                else:
                    self.refuse(delivery, False, error)
        else:
            self._in_transactions += count

    def _check(self, message: Any) -> None:
        extra = message[3]
        if self.requires_session and not (extra and (Extra.SESSION_ID in extra or Extra.PING in extra)):
            raise NotAllowed(error_texts.session_id_missing(self._taker.name))

    def refuse(self, delivery: Delivery, settled: bool, error: Exception) -> None:
        self._count_refused(error)
        super().refuse(delivery, settled, error)

    def _count_refused(self, error: Exception) -> None:
        self.metrics.incoming_requests += 1
        self.metrics.failed(type(error).__name__)

    def refuse_address(self, delivery: int, error: BrokerError) -> None:
        """Refuse a delivery of the extension, as `refuse` does; the address 0 is one that was sent settled."""
        if delivery:
            self.refuse(delivery_at(delivery), False, error)
        else:
            self._count_refused(error)

    def post_gathered(self) -> bool:
        channel = self._only
        if channel is None:
            return False  # the link has ended
        is_posted = channel.has_gathered
        if is_posted:
            channel.post_gathered()
        if channel.is_down:
            channel.answer_unposted()
            return False
        return is_posted

    def answered(self, count: int) -> None:
        """Note that so many deliveries that were on channels have their outcome."""
        self.unanswered -= count
        if self.is_ending or self.credit_due(self.waiting):
            self.connection.active[self] = None

    def wind_up(self, end: Callable[[], None]) -> None:
        if not self.is_ending:
            self.post_gathered()
        super().wind_up(end)

    def post(self) -> None:
        if self.is_ending:
            self.post_gathered()
            self.end_if_answered()
        else:
            super().post()

    def follow(self) -> None:
        """If the entity was moved to another partition, send to that one. The one before refuses what is on its way."""
        before = self._only
        if before is not None and not self.is_ending and before.partition != self.entity.partition:
            self._only = SenderChannel(self, self.entity.partition)
            self._left = [each for each in (*self._left, before) if each.pending or each is before]
            before.leave()

    def on_detach(self) -> None:
        """The client is gone."""
        if self._only is not None:
            for channel in (*self._left, self._only):
                channel.end()
        self._only, self._left = None, []
