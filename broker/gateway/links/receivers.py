"""Links on which clients receive: credit, deliveries, and their settlement (gathered by `router.Run`)."""

import time
from collections.abc import Sequence
from typing import Any

from broker import runs, wire
from broker.errors import BrokerError, EntityMoving, LockLost, OutcomeUnknown, SessionLockLost
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.channel import LinkChannel
from broker.gateway.links.delivery import render_delivery
from broker.gateway.links.entity_link import EntityLink
from broker.gateway.links.outcomes import STATE_OF, transactional_outcome
from broker.gateway.links.pending import NativeSettlements, PlainSettlements, Settlements, TakenDeliveries
from broker.gateway.links.properties import dead_letter_properties, encode_properties
from broker.gateway.namespace import Entity
from broker.namespace.entities import Right
from broker.runs import Part
from broker.wire import ENTRY, Outcome
from protocol import conditions, error_texts
from protocol.addresses import Address
from protocol.engine.deliveries import (
    ACCEPTED,
    MODIFIED,
    REJECTED,
    RELEASED,
    TRANSACTIONAL,
    Delivery,
    forget,
    modification,
    rejection,
    settle_in,
    transactional_state,
)
from protocol.engine.links import Link
from protocol.engine.native import address_of, native
from protocol.lock_tokens import COMMON_BYTES, uuid_bytes
from protocol.symbols import DELAY
from storage.records import message_enqueued_ms

MOVING_S = 0.1  # between two tries to receive from an entity that is being moved


class ReceiverChannel(LinkChannel):
    """A receiver on one partition: the grant that it has there, and settlements that wait for an answer.

    The grant is an absolute limit of deliveries since the receiver was opened.
    """

    def __init__(self, receiver: "ClientReceiver", partition: int) -> None:
        super().__init__(receiver.connection, partition)
        self._receiver = receiver
        self.delivered = 0
        self.limit = 0
        self.is_draining = False
        self.is_down = False  # a command of this turn could not be posted
        outgoing: Any = receiver.link.outgoing
        # These wait for the partition's answer.
        self.settling: Settlements = PlainSettlements()
        if outgoing is not None:
            self.settling = NativeSettlements(outgoing, partition if receiver.is_spread else 0)
        self._closing = False
        self._last = b""  # token of the last delivery given to the engine

    def open(self, session: Sequence[Any] | None = None) -> None:
        """`session`: see `broker.wire`."""
        self.delivered = self.limit = 0
        self._last = b""
        receiver = self._receiver
        command = wire.open_receiver(
            self.partition, self.number, receiver.queue, receiver.receives_and_deletes, session
        )
        if not self.worker.post(command):
            self.is_down = True

    def grant(self, limit: int) -> None:
        self.limit = limit
        self.worker.post(wire.grant(self.partition, self.number, limit))

    def drain(self, limit: int) -> None:
        self.limit = limit
        self.is_draining = True
        self.worker.post(wire.drain(self.partition, self.number, limit))

    def settle(self, token: bytes, outcome: Outcome, properties: dict[str, Any] | None) -> bool:
        """Post the settlement that was appended to `settling`. False if the worker is not connected."""
        if self._settle(self.number, token, outcome, properties):
            return True
        self.is_down = True
        return False

    def settle_quietly(self, token: bytes, outcome: Outcome, properties: dict[str, Any] | None) -> None:
        """There is no answer."""
        self._settle(0, token, outcome, properties)

    def _settle(self, number: int, token: bytes, outcome: Outcome, properties: dict[str, Any] | None) -> bool:
        queue = self._receiver.queue
        if not properties:
            return self.worker.settle(self.partition, queue, outcome, number, (token,))
        return self.worker.post(wire.settle(self.partition, queue, outcome, (number, 1), (token,), properties))

    def accept(self, tokens: Sequence[bytes], count: int, is_quiet: bool) -> None:
        """Post `count` accepted deliveries, which wait in `settling` unless the client has settled them.

        A token may stand for several: see `broker.runs`.
        """
        number = 0 if is_quiet else self.number
        if not self.worker.settle(self.partition, self._receiver.queue, Outcome.ACCEPTED, number, tokens, count):
            self.is_down = self.is_down or not is_quiet

    def give_back(self, entries: list[Any], outcome: Outcome = Outcome.RELEASED) -> None:
        """Give deliveries that were never written to the socket back; they do not count as failed.

        Deliveries that were handed out before the partition knew that the receiver is closed were taken back then.
        """
        receiver = self._receiver
        if not entries or (self._closing and not receiver.receives_and_deletes):
            return
        if receiver.receives_and_deletes:
            partition = receiver.entity.current(self.partition)
            worker = self.connection.gateway.router.worker(partition)
            worker.post(wire.restore(partition, receiver.queue, entries))
        else:
            tokens = entries[0::ENTRY]
            channels = (0, len(tokens))
            self.worker.post(wire.settle(self.partition, receiver.queue, outcome, channels, tokens, None))

    def close(self, broken: bool, unsent_from: bytes | None = None) -> None:
        """`unsent_from`: the token of the first delivery that never reached the client.

        Without it, these are only deliveries that are still on their way from the partition: their tokens are higher.
        """
        self._receiver.post_accepted()
        self.settling.clear()
        self._closing = True
        command = wire.close_receiver(self.partition, self.number, broken, unsent_from or self._last + b"\0")
        if not self.worker.post(command):
            self.forget()

    # -- answers

    def on_opened(self, session_id: str = "", locked_until_ms: int = 0) -> None:
        self._receiver.on_opened(self, session_id, locked_until_ms)

    def on_drained(self, delivered: int) -> None:
        is_used_up = delivered >= self.limit > 0
        self.is_draining = False
        self.limit = delivered  # the rest of the grant is void on the partition
        self._receiver.on_drained(self, is_used_up)

    def on_available(self) -> None:
        self._receiver.on_available(self)

    def on_deliver(self, locked_until_ms: int, entries: list[Any]) -> None:
        self.delivered += len(entries) // ENTRY
        self._receiver.on_deliver(self, locked_until_ms, entries)

    def on_deliver_run(self, locked_until_ms: int, part: Part) -> None:
        self.delivered += part[3]
        self._receiver.on_deliver_run(self, locked_until_ms, part)

    def sent(self, token: bytes) -> None:
        """The deliveries up to this one were given to the engine."""
        self._last = token

    def on_settled(self, count: int, error: BrokerError | None) -> None:
        if isinstance(error, EntityMoving):
            error = LockLost(error_texts.LOCK_LOST)
        if not self._closing:  # else the client and its deliveries are gone
            self._receiver.on_settled(self.settling, count, error)

    def answer_all(self, error: BrokerError) -> None:
        """Answer all settlements that wait."""
        self.on_settled(len(self.settling), error)

    def on_closed(self, error: BrokerError | None) -> None:
        self._receiver.on_closed(self, error)

    def on_worker_lost(self) -> None:
        self.is_draining = False
        if self._closing:
            self.forget()
            return
        if self.settling:
            self.answer_all(OutcomeUnknown(error_texts.OUTCOME_UNKNOWN))
        self._receiver.on_worker_lost(self)

    def on_worker_back(self) -> None:
        if not self._closing:
            self._receiver.on_worker_back(self)


class ClientReceiver(EntityLink):
    """A link on which the client receives from an entity.

    The gateway grants the partition an absolute limit of deliveries, never more than the client's credit. If the credit
    is withdrawn meanwhile, further deliveries go back to the partition and do not count as failed.
    """

    right = Right.LISTEN
    is_spread = False  # over several fragments of a partitioned entity

    def __init__(
        self, connection: Host, link: Link, entity: Entity, address: Address, partitions: Sequence[int]
    ) -> None:
        """`partitions`: those of the entity's that the link receives from."""
        super().__init__(connection, link, entity, address)
        amqp = connection.gateway.settings.amqp
        self._window = amqp.receiver_window
        self._max_unsettled = amqp.max_unsettled_per_link
        self._max_output_bytes = amqp.max_output_buffer_bytes
        self._directives = (DELAY,) if connection.gateway.settings.delivery.abandon_delays else ()  # see `properties`
        self._latency = connection.gateway.metrics.delivery_latency
        self.receives_and_deletes = link.settled_by_sender
        self._may_get_more = False  # something has changed, so perhaps the partition can be granted more
        self._is_held_back = False  # by the number of deliveries that the client has not settled
        self._closing = False
        if native is not None and not self.receives_and_deletes and (self.is_spread or len(partitions) == 1):
            link.outgoing = native.Outgoing(address_of(link.pointer), self, False, self.is_spread)
        self._channels = [ReceiverChannel(self, partition) for partition in partitions]
        self._only = self._channels[0] if len(self._channels) == 1 else None
        connection.unsent.expect_deliveries()
        for channel in self._channels:
            self._open(channel)

    def _open(self, channel: ReceiverChannel) -> None:
        channel.open()

    def _channel_of(self, token: bytes) -> ReceiverChannel:
        """The channel of the delivery with this lock token."""
        return self._channels[0]

    def on_opened(self, channel: ReceiverChannel, session_id: str, locked_until_ms: int) -> None: ...

    # -- credit

    def on_flow(self) -> None:
        self.ask()

    def ask(self) -> None:
        """Grant the partition soon what is possible now."""
        self._may_get_more = True
        self.connection.active[self] = None

    def grant(self) -> None:
        """Grant the partition as many deliveries as the client's credit and our windows allow now."""
        self._may_get_more = False
        link, [channel] = self.link, self._channels
        if link.closed or channel.is_draining:
            return
        credit = link.credit
        if self._is_blocked:
            self._wait_until_unblocked()
            if channel.limit > channel.delivered:
                channel.grant(channel.delivered)
            return
        room = self._room()
        limit = channel.delivered + room
        if link.drain and (limit == channel.delivered or credit > 0):
            channel.drain(limit)
        elif limit < channel.limit or (limit > channel.limit and channel.limit - channel.delivered <= room // 2):
            channel.grant(limit)

    def _room(self) -> int:
        """The number of deliveries that may come now, as far as the client reads."""
        room = min(self.link.credit, self._window)
        free = self._max_unsettled - self.link.unsettled
        self._is_held_back = room > free
        if self._is_held_back:
            room = free
        return max(room, 0)

    def _wait_until_unblocked(self) -> None:
        self._may_get_more = True
        self.connection.blocked.add(self)

    def on_available(self, channel: ReceiverChannel) -> None:
        raise AssertionError("only receivers on several fragments watch")

    def on_drained(self, channel: ReceiverChannel, is_used_up: bool) -> None:
        """`is_used_up`: as many deliveries came as were granted, so there may be more."""
        link = self.link
        if link.closed:
            return
        if link.drain and link.credit > 0 and is_used_up and not self._is_full:
            self.grant()  # the window was smaller than the credit: grant again
        elif link.drain:
            link.drained()
        else:
            self.grant()

    @property
    def _is_full(self) -> bool:
        return self.link.unsettled >= self._max_unsettled

    @property
    def _is_blocked(self) -> bool:
        """True if the client does not read or has closed its session's window; even a drain waits then."""
        return self.connection.is_stalled or self.link.session.holds_more_than(self._max_output_bytes)

    # -- deliveries

    def on_deliver(self, channel: ReceiverChannel, locked_until_ms: int, entries: list[Any]) -> None:
        """Deliveries of one partition."""
        count = len(entries) // ENTRY
        link = self.link
        credit = 0 if link.closed else link.credit
        usable = min(count, credit)
        if usable < count:
            channel.give_back(entries[usable * ENTRY :])
        if usable <= 0:
            return
        settled = self.receives_and_deletes
        if settled:
            self.connection.unsent.retain(link, entries[: usable * ENTRY])
        channel.sent(entries[(usable - 1) * ENTRY])
        send = link.send
        size_bytes = 0
        locked_until = token = None
        if not settled:
            locked_until, token_begin = locked_until_ms, uuid_bytes(entries[0])[:COMMON_BYTES]
        at = 0
        try:
            for _ in range(usable):
                tag, number, failed, record, overlay = entries[at : at + ENTRY]
                if not settled:
                    token = token_begin + tag[COMMON_BYTES:]
                prefix, offset = render_delivery(record, number, failed, locked_until, overlay, token)
                send(tag, prefix, record, offset, settled)
                size_bytes += len(record)
                at += ENTRY
        except Exception:
            # This message makes the connection fail, and may make the next fail. It counts as a failed delivery, so
            # that this ends.
            channel.give_back(entries[at : at + ENTRY], Outcome.ABANDONED)
            channel.give_back(entries[at + ENTRY : usable * ENTRY])
            raise
        self._sent(channel, usable, size_bytes, message_enqueued_ms(entries[3]), credit - usable)

    def on_deliver_run(self, channel: ReceiverChannel, locked_until_ms: int, part: Part) -> None:
        """As `on_deliver`, of a run."""
        if not self._deliver_run(channel, locked_until_ms, part):
            token, numbers, delivery_count, _, run = part
            self.on_deliver(channel, locked_until_ms, runs.entries_of(run, token, numbers, delivery_count))

    def _deliver_run(self, channel: ReceiverChannel, locked_until_ms: int, part: Part) -> bool:
        """False if the run cannot be delivered as one, and nothing was done."""
        token, numbers, delivery_count, count, run = part
        link = self.link
        credit = 0 if link.closed else link.credit
        if count > credit:
            return False
        enqueued_ms = link.send_run(run, count, token, numbers, delivery_count, locked_until_ms)
        if enqueued_ms is None:
            return False
        channel.sent(token if count == 1 else runs.token_ahead(token, count - 1))
        self._sent(channel, count, len(run) - count * runs.SIZE_BYTES, enqueued_ms, credit - count)
        return True

    def _sent(self, channel: ReceiverChannel, count: int, size_bytes: int, enqueued_ms: int, credit: int) -> None:
        """Deliveries were given to the engine; `credit` is left."""
        self.metrics.outgoing_messages += count
        self.metrics.outgoing_bytes += size_bytes
        self._latency.observe_many(max(0.0, time.time() - enqueued_ms / 1000), count)
        granted = channel.limit - channel.delivered
        if (granted < self._window // 2 and granted < credit) or self._is_blocked:
            self.ask()  # the client has more credit than the partition was granted

    # -- settlement

    # What the extension calls.

    def on_accepting(self) -> None:
        self.connection.active[self] = None

    def post_accepted(self) -> None:
        """Post the accepted deliveries that the extension has gathered."""
        outgoing: Any = self.link.outgoing
        if outgoing is None or not outgoing.count:
            return
        count, is_quiet, tokens, transaction_id, addresses = outgoing.take_accepted()
        if self._is_held_back:
            self._may_get_more = True
        if transaction_id is not None:
            deliveries = TakenDeliveries(addresses)
            self._settle_in(transaction_id, deliveries, runs.tokens_of(tokens), Outcome.ACCEPTED, None, is_quiet)
            return
        self._accept(tokens, count, is_quiet)
        if is_quiet:
            self._count_settled(Outcome.ACCEPTED, count)

    def _accept(self, tokens: list[bytes], count: int, is_quiet: bool) -> None:
        self._channels[0].accept(tokens, count, is_quiet)

    def _count_settled(self, outcome: Outcome, count: int) -> None:
        self.metrics.incoming_requests += count
        self.metrics.successful_requests += count
        self.metrics.settled[outcome] += count

    def on_outcome(self, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        self.post_accepted()
        if self._is_held_back:
            self._may_get_more = True
        properties = None
        if state == ACCEPTED:
            outcome = Outcome.ACCEPTED
        elif state == MODIFIED:
            undeliverable, annotations = modification(delivery)
            outcome = Outcome.DEFERRED if undeliverable else Outcome.ABANDONED
            properties = encode_properties(annotations, self._directives)
        elif state == REJECTED:
            outcome = Outcome.DEAD_LETTERED
            _, description, info = rejection(delivery)
            properties = dead_letter_properties(info, description)
        elif state == TRANSACTIONAL:
            self._settle_in_transaction(delivery, token, settled)
            return
        elif state == RELEASED or settled:
            outcome = Outcome.RELEASED
        else:
            # The message stays locked, because we do not know what the client wants.
            text = f"There is no outcome {state:#x}."
            self.connection.reject(delivery, conditions.NOT_IMPLEMENTED, text, self.tracker)
            return
        channel = self._only or self._channel_of(token)
        if settled:
            forget(delivery)
            self._settle_quietly(channel, token, outcome, properties)
            return
        channel.settling.append(delivery, outcome)
        run = channel.worker.run
        if run is not None and run.channel == channel.number and run.outcome is outcome and not properties:
            run.channels[-1] += 1  # the usual case: the same channel as the last settlement
            run.tokens.append(token)
        elif not channel.settle(token, outcome, properties):
            self.connection.active[self] = None
        if self._may_get_more:
            self.connection.active[self] = None

    def _settle_quietly(
        self, channel: ReceiverChannel, token: bytes, outcome: Outcome, properties: dict[str, Any] | None
    ) -> None:
        """The client has already settled the delivery, so it gets no answer."""
        channel.settle_quietly(token, outcome, properties)
        self._count_settled(outcome, 1)
        if self._may_get_more:
            self.connection.active[self] = None

    def _settle_in_transaction(self, delivery: Delivery, token: bytes, settled: bool) -> None:
        """The outcome is a part of a transaction."""
        transaction_id, value = transactional_state(delivery)
        try:
            outcome, properties = transactional_outcome(value, self._directives)
        except BrokerError as error:
            self._refuse_in(transaction_id, () if settled else (delivery,), error, 1)
        else:
            deliveries = () if settled else (delivery,)
            self._settle_in(transaction_id, deliveries, [token], outcome, properties, settled)
        if settled:
            forget(delivery)

    def _settle_in(
        self,
        transaction_id: bytes,
        deliveries: Sequence[Delivery | None],
        tokens: list[bytes],
        outcome: Outcome,
        properties: dict[str, Any] | None,
        is_quiet: bool,
    ) -> None:
        """Outcomes, all on one partition, are a part of a transaction.

        Their answers are transactional, too, unless they are refused. `is_quiet`: the client has settled them, and
        there are no deliveries.
        """
        connection, count = self.connection, len(tokens)
        connection.active[self] = None

        def answered(errors: Sequence[BrokerError | None] | None) -> None:
            metrics = self.metrics
            metrics.incoming_requests += count
            failed = [] if errors is None else [each for each in errors if each is not None]
            for error in failed:
                metrics.failed(type(error).__name__)
            metrics.successful_requests += count - len(failed)
            metrics.settled[outcome] += count - len(failed)
            if is_quiet or self.link.closed:
                return
            if not failed and isinstance(deliveries, TakenDeliveries):
                deliveries.accept_in(transaction_id)
                return
            for delivery, refused in zip(deliveries, errors or [None] * count, strict=True):
                assert delivery is not None
                if refused is None:
                    settle_in(transaction_id, delivery, STATE_OF[outcome])
                else:
                    connection.reject(delivery, condition_of(refused), str(refused), self.tracker)

        try:
            transaction = connection.transactions.find(transaction_id)
            channel = self._only or self._channel_of(tokens[0])
            transaction.settle(channel, self, is_quiet, tokens, outcome, properties, answered)
        except BrokerError as error:
            self._refuse_in(transaction_id, deliveries, error, count)

    def _refuse_in(
        self, transaction_id: bytes, deliveries: Sequence[Delivery | None], error: BrokerError, count: int
    ) -> None:
        """Outcomes cannot be a part of their transaction; `deliveries` are those whose client waits."""
        self.metrics.incoming_requests += count
        self.metrics.failed(type(error).__name__, count)
        if not deliveries:
            self.connection.transactions.fail(transaction_id, error)
        for delivery in deliveries if not self.link.closed else ():
            assert delivery is not None
            self.connection.reject(delivery, condition_of(error), str(error), self.tracker)

    def on_settled(self, settling: Settlements, count: int, error: BrokerError | None) -> None:
        """The first `count` of `settling` are answered."""
        metrics = self.metrics
        metrics.incoming_requests += count
        if error is None:
            for outcome, settled in zip(Outcome, settling.settle(count), strict=True):
                if settled:
                    metrics.settled[outcome] += settled
            metrics.successful_requests += count
            return
        condition, text = condition_of(error), str(error)
        if isinstance(error, LockLost | SessionLockLost):
            self.connection.gateway.metrics.lost_settlements += count
        metrics.failed(type(error).__name__, count)
        for _ in range(count):
            self.connection.reject(settling.popleft(), condition, text, self.tracker)

    # -- the end

    def post(self) -> None:
        """Do the work that has gathered in one read of the socket."""
        self.post_accepted()
        for channel in self._channels:
            if channel.is_down:
                channel.is_down = False
                self.answer_unposted(channel)
        if self._may_get_more:
            self.grant()

    def on_detach(self, broken: bool = False, unsent: int = 0) -> None:
        """`unsent`: the number of last deliveries that the client cannot have. They go back and do not count."""
        self._closing = True
        tags: list[bytes] = []
        if unsent and self.receives_and_deletes:
            entries = self.connection.unsent.retained(self.link)[-unsent * ENTRY :]
            for at in range(0, len(entries), ENTRY):
                self._channel_of(entries[at]).give_back(entries[at : at + ENTRY])
        elif unsent:
            tags = self.link.engine.last_tags(self.link, unsent)
        for channel in self._channels:
            channel.close(broken, next((tag for tag in tags if self._channel_of(tag) is channel), None))

    def on_closed(self, channel: ReceiverChannel, error: BrokerError | None) -> None:
        if isinstance(error, EntityMoving) and not self._closing:
            channel.answer_all(LockLost(error_texts.LOCK_LOST))
            channel.is_draining = False
            channel.move(self.entity.partition)
            self.connection.later(MOVING_S, lambda: self._open_again(channel))
        elif error is not None and not self.link.closed:
            self.detach(error)

    def _open_again(self, channel: ReceiverChannel) -> None:
        """The entity is being moved, and may be on another partition by now."""
        if self._closing:
            return
        if channel.partition != self.entity.partition:
            channel.move(self.entity.partition)
        self.on_worker_back(channel)

    def on_worker_lost(self, channel: ReceiverChannel) -> None: ...

    def answer_unposted(self, channel: ReceiverChannel) -> None:
        """Answer what could not be posted, before this turn's output is written, and before the worker is back.

        These settlements came after their locks had ended with the worker.
        """
        channel.answer_all(LockLost(error_texts.LOCK_LOST))

    def on_worker_back(self, channel: ReceiverChannel) -> None:
        self._open(channel)
        self.ask()
        self.connection.flush()
