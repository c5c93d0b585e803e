"""Links on which clients receive: credit, deliveries, and their settlement (gathered by `router.Run`)."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from broker import runs, wire
from broker.errors import BrokerError, EntityMoving, LockLost, OutcomeUnknown, ServerBusy, SessionLockLost
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
from protocol.engine.proton.native import address_of, native
from protocol.lock_tokens import COMMON_BYTES, uuid_bytes
from protocol.symbols import DELAY
from storage.records import message_enqueued_ms

OPEN_BYTES = 500  # that a receiver takes which waits to be opened
MOVING_S = 0.1  # between two tries to receive from an entity that is being moved
GIVEN_UP_S = (
    0.5  # before the end of its lock, a message is given up that has begun and whose client takes no more of it
)


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
        self.gives_back = False  # all that comes, until the drain is answered: see `ClientReceiver.on_deliver`
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
        self.is_draining = self.gives_back = False
        self._last = b""
        receiver = self._receiver
        what = (self.partition, self.number, receiver.queue, receiver.receives_and_deletes, session)
        command: wire.OpenReceiver | wire.OpenSelective
        knows_session = receiver.is_exclusive or self.worker.knows_non_exclusive_sessions
        if knows_session and receiver.selector is None:
            command = wire.open_receiver(*what)
        elif knows_session and receiver.selector is not None and self.worker.knows_selectors:
            command = wire.open_selective(*what, receiver.selector)
        else:  # it is of an older version, and will be replaced
            self.connection.later(0, lambda: receiver.on_closed(self, ServerBusy(error_texts.SERVER_BUSY)))
            return
        if not self.worker.post(command) and not (session is not None and self._let_open_wait()):
            self.is_down = True

    def _let_open_wait(self) -> bool:
        """Let a session's receiver wait to open, as `let_wait` does. Any other opens again when its worker is back."""
        receiver = self._receiver
        return self.let_wait(
            1, OPEN_BYTES, lambda: receiver.open_waited(self), lambda error: receiver.answer_unposted(self)
        )

    def grant(self, limit: int) -> None:
        self.limit = limit
        self.worker.post(wire.grant(self.partition, self.number, limit))

    def drain(self, limit: int) -> bool:
        """False if the worker is not connected, so that there will be no answer."""
        self.limit = limit
        self.is_draining = self.worker.post(wire.drain(self.partition, self.number, limit))
        return self.is_draining

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
            self.connection.gateway.returning.put_back(receiver.entity, receiver.queue, self.partition, entries)
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
        self.is_draining = self.gives_back = False
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

    def wind_up(self) -> None:
        """Take back the grants that are left, so that nothing more comes but answers."""
        if self.limit > self.delivered:
            self.grant(self.delivered)

    def answer_all(self, error: BrokerError) -> None:
        """Answer all settlements that wait."""
        self.on_settled(len(self.settling), error)

    def on_closed(self, error: BrokerError | None) -> None:
        if self.settling and not self._closing:
            self.worker.channels[self.number] = self  # the answers come behind this
        self._receiver.on_closed(self, error)

    def on_worker_lost(self) -> None:
        self.is_draining = self.gives_back = False
        if self._closing:
            self.forget()
            return
        if self.settling:
            self.answer_all(OutcomeUnknown(error_texts.OUTCOME_UNKNOWN))
        self._receiver.on_worker_lost(self)

    def on_worker_back(self) -> None:
        if not self._closing:
            self._receiver.on_worker_back(self)

    def on_worker_stalled(self) -> None:
        if self._receiver.is_ending and self.settling:
            self.answer_all(OutcomeUnknown(error_texts.OUTCOME_UNKNOWN))


class ClientReceiver(EntityLink):
    """A link on which the client receives from an entity.

    The gateway grants the partition an absolute limit of deliveries: as many as could be written to the client at once,
    by its credit, the window of its session, and what it has not read yet. A lock begins when the partition hands a
    message out, so none waits here. A message that cannot be written when it comes, because credit or window
    have changed meanwhile, goes back to the partition and does not count as failed.
    """

    right = Right.LISTEN
    is_spread = False  # over several fragments of a partitioned entity
    is_exclusive = True  # nobody can take the messages over

    def __init__(
        self,
        connection: Host,
        link: Link,
        entity: Entity,
        address: Address,
        partitions: Sequence[int],
        selector: str | None = None,
    ) -> None:
        """`partitions`: those of the entity's that the link receives from. `selector`: it wants only messages that this
        selects.
        """
        super().__init__(connection, link, entity, address)
        self.selector = selector
        amqp = connection.gateway.settings.amqp
        self._window = amqp.receiver_window
        self._max_unsettled = amqp.max_unsettled_per_link
        self._directives = (DELAY,) if connection.gateway.settings.delivery.abandon_delays else ()  # see `properties`
        self._keys = connection.gateway.namespace.keys_of(entity)
        self._is_copy = entity.kind == "subscription"
        self._latency = connection.gateway.metrics.delivery_latency
        self.receives_and_deletes = link.settled_by_sender
        self._may_get_more = False  # something has changed, so perhaps the partition can be granted more
        self._is_held_back = False  # by the number of deliveries that the client has not settled
        self._size_bytes = 0  # of a message on average, among the last ones
        # The last delivery of which the window did not take all, with its token and the end of its lock.
        self._begun: tuple[ReceiverChannel, bytes, int] | None = None
        self._is_watching = False  # a timer for that runs
        self._in_transactions = 0  # outcomes that wait for the answer to their transaction
        self._closing = False
        is_usual = self.is_exclusive and (self.is_spread or len(partitions) == 1)
        if native is not None and not self.receives_and_deletes and is_usual:
            link.outgoing = native.Outgoing(
                address_of(link.pointer), self, False, self.is_spread, self._keys, self._is_copy
            )
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
        """Grant the partition as many deliveries as can be written now."""
        self._may_get_more = False
        link = self.link
        if link.closed or self.is_ending:
            return
        [channel] = self._channels
        if channel.is_draining:
            return
        granted, transfers = channel.limit - channel.delivered, link.session.room
        if self._must_wait(transfers):
            if granted > 0:
                channel.grant(channel.delivered)
            return
        room = self._room(granted, transfers)
        limit = channel.delivered + room
        if link.drain and (not room or link.credit > 0):
            if not channel.drain(limit):
                link.drained()  # nothing can come now
        elif limit < channel.limit or (limit > channel.limit and granted <= room // 2):
            channel.grant(limit)

    def _must_wait(self, transfers: int) -> bool:
        """True if nothing can be written now, so that the link waits until something can. The session has room for so
        many transfers.

        A drain does not wait for the window of the session: what can be sent at the moment has been sent (2.6.7).
        """
        connection, link = self.connection, self.link
        if connection.is_stalled:
            return True  # all links are asked again when the client reads
        if transfers > 0 or link.credit <= 0:
            return False
        self._may_get_more = True
        if link.session.window:
            connection.blocked.add(self)
            return True
        connection.shut.add(self)
        if link.drain:
            link.drained()
        return True

    def _room(self, granted: int, transfers: int) -> int:
        """The number of deliveries that may come now, those that were `granted` already among them.

        The session has room for so many transfers.
        """
        link = self.link
        room = min(link.credit, self._window)
        free = self._max_unsettled - link.unsettled
        self._is_held_back = room > free
        if self._is_held_back:
            room = free
        if room <= 0:
            return 0
        size_bytes = self._size_bytes
        if transfers < room * len(link.session.links) * link.transfers(size_bytes):
            room = min(room, self._share(transfers))
        if size_bytes:
            unread = 1 + self.connection.output_room_bytes // size_bytes
            if not unread < granted <= 2 * unread:  # an estimate, for which a grant is not changed by a little
                room = min(room, unread)
        return room

    def _share(self, transfers: int) -> int:
        """This link's part of the messages that so many transfers are for. The others may use them up before."""
        each = self.link.transfers(self._size_bytes)
        receiving = sum(link.is_sender and link.credit > 0 for link in self.link.session.links)
        return max(1, -(-transfers // each) // receiving)

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

    # -- deliveries

    def on_deliver(self, channel: ReceiverChannel, locked_until_ms: int, entries: list[Any]) -> None:
        """Deliveries of one partition. Those that cannot be written now go back.

        What is on its way behind them goes back, too, so that it does not overtake them: it comes before the partition
        answers a drain.
        """
        sent = self._deliver(channel, locked_until_ms, entries)
        if sent == len(entries):
            return
        channel.give_back(entries[sent:])
        if not (self.link.closed or self.is_ending or channel.gives_back):
            channel.gives_back = True
            self._recall(channel)

    def _recall(self, channel: ReceiverChannel) -> None:
        """The partition is to say when nothing more is on its way."""
        if not channel.is_draining:
            channel.drain(channel.delivered)

    def _writable(self, channel: ReceiverChannel) -> int:
        """How many of the channel's deliveries may be given to the engine, if each takes one transfer."""
        link = self.link
        if link.closed or channel.gives_back or self.connection.is_stalled or self.is_ending:
            return 0
        return min(link.credit, link.session.room)

    def _deliver(self, channel: ReceiverChannel, locked_until_ms: int, entries: list[Any]) -> int:
        """Give the engine those of the deliveries that can be written; the number of their items.

        One that takes several transfers begins as long as there is room for one: some clients open their window only
        when it is used up.
        """
        end = min(len(entries), self._writable(channel) * ENTRY)
        if end <= 0:
            return 0
        link, session = self.link, self.link.session
        settled, keys, is_copy = self.receives_and_deletes, self._keys, self._is_copy
        send, window = link.send, session.window
        size_bytes = at = 0
        locked_until = token = None
        if not settled:
            locked_until, token_begin = locked_until_ms, uuid_bytes(entries[0])[:COMMON_BYTES]
        try:
            while at < end and session.given < window:
                tag, number, failed, record, overlay = entries[at : at + ENTRY]
                if not settled:
                    token = token_begin + tag[COMMON_BYTES:]
                prefix, offset = render_delivery(record, number, failed, locked_until, overlay, token, keys, is_copy)
                send(tag, prefix, record, offset, settled)
                size_bytes += len(record)
                at += ENTRY
        except Exception:
            # This message makes the connection fail, and may make the next fail. It counts as a failed delivery, so
            # that this ends.
            channel.give_back(entries[at : at + ENTRY], Outcome.ABANDONED)
            channel.give_back(entries[at + ENTRY :])
            raise
        if settled:
            self.connection.unsent.retain(link, entries[:at])
        channel.sent(entries[at - ENTRY])
        if session.given > window and not settled:
            self._begun = channel, entries[at - ENTRY], locked_until_ms
            self._watch_begun()
        left = min(link.credit, window - session.given)
        self._sent(channel, at // ENTRY, size_bytes, message_enqueued_ms(entries[3]), left)
        return at

    def _watch_begun(self) -> None:
        """A delivery has begun, and goes on when the client opens its window. If that is not before its lock ends, the
        message goes back and does not count as delivered.
        """
        if self._is_watching or self._begun is None:
            return
        _, _, locked_until_ms = self._begun
        self._is_watching = True
        self.connection.later(max(0.0, locked_until_ms / 1000 - GIVEN_UP_S - time.time()), self._look_at_begun)

    def _look_at_begun(self) -> None:
        self._is_watching = False
        if self._begun is None or self._closing or self.link.closed:
            return
        channel, token, locked_until_ms = self._begun
        if not self.link.queued or self.link.last_tags(1) != [token]:
            self._begun = None  # it is complete
        elif locked_until_ms / 1000 - GIVEN_UP_S > time.time():
            self._watch_begun()  # another one than when this look was planned
        else:
            self._begun = None
            channel.settle_quietly(token, Outcome.RELEASED, None)

    def on_deliver_run(self, channel: ReceiverChannel, locked_until_ms: int, part: Part) -> None:
        """Deliver the messages of a run, as `on_deliver` does."""
        if not self._deliver_run(channel, locked_until_ms, part):
            token, numbers, delivery_count, _, run = part
            self.on_deliver(channel, locked_until_ms, runs.entries_of(run, token, numbers, delivery_count))

    def _deliver_run(self, channel: ReceiverChannel, locked_until_ms: int, part: Part) -> bool:
        """False if the run cannot be delivered as one, and nothing was done."""
        token, numbers, delivery_count, count, run = part
        writable = self._writable(channel)
        if count > writable:
            return False
        enqueued_ms = self.link.send_run(run, count, token, numbers, delivery_count, locked_until_ms)
        if enqueued_ms is None:
            return False
        channel.sent(token if count == 1 else runs.token_ahead(token, count - 1))
        self._sent(channel, count, len(run) - count * runs.SIZE_BYTES, enqueued_ms, writable - count)
        return True

    def _sent(self, channel: ReceiverChannel, count: int, size_bytes: int, enqueued_ms: int, left: int) -> None:
        """Deliveries were given to the engine; so many more could be."""
        self.metrics.outgoing_messages += count
        self.metrics.outgoing_bytes += size_bytes
        self._size_bytes = size_bytes // count
        self._latency.observe_many(max(0.0, time.time() - enqueued_ms / 1000), count)
        granted = channel.limit - channel.delivered
        if granted > left or (granted < left and granted < self._window // 2) or (left <= 0 and self.link.credit > 0):
            self.ask()  # the partition may get another grant, or the link waits for the session's window

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
        if self.is_ending:
            if settled:
                forget(delivery)
            return
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
            self._in_transactions -= count
            connection.active[self] = None
            tell(errors)

        def tell(errors: Sequence[BrokerError | None] | None) -> None:
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
            self._in_transactions += count
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
        if self.is_ending:
            self.connection.active[self] = None
        metrics = self.metrics
        metrics.incoming_requests += count
        if error is None:
            self.link.begin_outcomes()
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

    @property
    def owes_answers(self) -> bool:
        return self._in_transactions > 0 or any(channel.settling for channel in self._channels)

    def wind_up(self, end: Callable[[], None]) -> None:
        if not self.is_ending:
            self.post_accepted()
            for channel in self._channels:
                channel.wind_up()
        super().wind_up(end)

    def post(self) -> None:
        """Do the work that has gathered in one read of the socket."""
        self.post_accepted()
        for channel in self._channels:
            if channel.is_down:
                channel.is_down = False
                self.answer_unposted(channel)
        if self._may_get_more:
            self.grant()
        if self.is_ending:
            self.end_if_answered()

    def on_detach(self, broken: bool = False, unsent: int = 0) -> None:
        """`unsent`: the number of last deliveries that the client cannot have. They go back and do not count."""
        self._closing = True
        tags: list[bytes] = []
        if unsent and self.receives_and_deletes:
            of_channels: dict[ReceiverChannel, list[Any]] = {}
            entries = self.connection.unsent.retained(self.link)[-unsent * ENTRY :]
            for at in range(0, len(entries), ENTRY):
                of_channels.setdefault(self._channel_of(entries[at]), []).extend(entries[at : at + ENTRY])
            for channel, of_channel in of_channels.items():
                channel.give_back(of_channel)
        elif unsent:
            tags = self.link.last_tags(unsent)
        for channel in self._channels:
            channel.close(broken, next((tag for tag in tags if self._channel_of(tag) is channel), None))
        self._channels, self._only = [], None  # they refer to this link until the partition has closed them

    def on_closed(self, channel: ReceiverChannel, error: BrokerError | None) -> None:
        if isinstance(error, EntityMoving) and not self._closing:
            channel.answer_all(LockLost(error_texts.LOCK_LOST))
            channel.move(self.entity.partition)
            self.connection.later(MOVING_S, lambda: self._open_again(channel))
        elif error is not None and not (self.link.closed or self.is_ending):
            self.detach(error)

    def _open_again(self, channel: ReceiverChannel) -> None:
        """The entity is being moved, and may be on another partition by now."""
        if self._closing:
            return
        if channel.partition != self.entity.partition:
            channel.move(self.entity.partition)
        self.on_worker_back(channel)

    def on_worker_lost(self, channel: ReceiverChannel) -> None:
        if self.link.drain and not self.link.closed:
            self.link.drained()  # it may be long until the worker is back

    def answer_unposted(self, channel: ReceiverChannel) -> None:
        """Answer what could not be posted, before this turn's output is written, and before the worker is back.

        These settlements came after their locks had ended with the worker.
        """
        channel.answer_all(LockLost(error_texts.LOCK_LOST))

    def open_waited(self, channel: ReceiverChannel) -> None:
        """Open a receiver of a session that has waited for the worker."""
        raise NotImplementedError

    def on_worker_back(self, channel: ReceiverChannel) -> None:
        self._open(channel)
        self.ask()
        self.connection.flush()
