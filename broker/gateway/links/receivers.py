"""Links on which clients receive: credit, deliveries, and their settlement (gathered by `router.Run`)."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from broker import wire
from broker.errors import BrokerError, LockLost, OutcomeUnknown, SessionLockLost
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.delivery import render_delivery
from broker.gateway.links.entity_link import EntityLink
from broker.gateway.links.outcomes import STATE_OF, transactional_outcome
from broker.gateway.links.properties import dead_letter_properties, encode_properties
from broker.gateway.namespace import Entity
from broker.namespace.entities import Right
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
    settle,
    settle_in,
    transactional_state,
)
from protocol.engine.links import Link
from protocol.lock_tokens import COMMON_BYTES, uuid_bytes


class ClientReceiver(EntityLink):
    """A link on which the client receives from an entity.

    The gateway grants the partition an absolute limit of deliveries, never more than the client's credit. If the credit
    is withdrawn meanwhile, further deliveries go back to the partition and do not count as failed.
    """

    right = Right.LISTEN

    def __init__(self, connection: Host, link: Link, entity: Entity, address: Address) -> None:
        super().__init__(connection, link, entity, address)
        amqp = connection.gateway.settings.amqp
        self._window = amqp.receiver_window
        self._max_unsettled = amqp.max_unsettled_per_link
        self._max_output_bytes = amqp.max_output_buffer_bytes
        self._latency = connection.gateway.metrics.delivery_latency
        self._receive_and_delete = link.settled_by_sender
        self._delivered = 0  # since the receiver was opened on the partition
        self._limit = 0
        self._may_get_more = False  # something has changed, so perhaps the partition can be granted more
        self._is_held_back = False  # by the number of deliveries that the client has not settled
        self._draining = False
        self._unsettled = 0
        self._settling: deque[tuple[Delivery, Outcome]] = deque()  # these wait for the partition's answer
        self._closing = False
        self._last = b""  # token of the last delivery given to the engine
        connection.unsent.expect_deliveries()
        self._open()

    def _open(self) -> None:
        self._delivered = 0
        self._limit = 0
        self._last = b""
        self.worker.post(self._open_command(None))

    def _open_command(self, session: Sequence[Any] | None) -> wire.OpenReceiver:
        return wire.open_receiver(self.partition, self.channel, self.queue, self._receive_and_delete, session)

    # -- credit

    def on_flow(self) -> None:
        self.ask()

    def ask(self) -> None:
        """Grant the partition soon what is possible now."""
        self._may_get_more = True
        self.connection.active.add(self)

    def grant(self) -> None:
        """Grant the partition as many deliveries as the client's credit and our windows allow now."""
        self._may_get_more = False
        link = self.link
        if link.closed or self._draining:
            return
        credit = link.credit
        if self._is_blocked:
            self._may_get_more = True
            self.connection.blocked.add(self)
            if self._limit > self._delivered:
                self._limit = self._delivered
                self.worker.post(wire.grant(self.partition, self.channel, self._limit))
            return
        room = min(credit, self._window)
        self._is_held_back = room > self._max_unsettled - self._unsettled
        if self._is_held_back:
            room = self._max_unsettled - self._unsettled
        limit = self._delivered + max(room, 0)
        if link.drain and (limit == self._delivered or credit > 0):
            self._draining = True
            self.worker.post(wire.drain(self.partition, self.channel, limit))
            self._limit = limit
        elif limit < self._limit or (limit > self._limit and self._limit - self._delivered <= room // 2):
            self.worker.post(wire.grant(self.partition, self.channel, limit))
            self._limit = limit

    def on_drained(self, delivered: int) -> None:
        self._draining = False
        link = self.link
        is_used_up = delivered >= self._limit > 0
        self._limit = delivered  # the rest of the grant is void on the partition
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
        return self._unsettled >= self._max_unsettled

    @property
    def _is_blocked(self) -> bool:
        """True if the client does not read or has closed its session's window; even a drain waits then."""
        return self.connection.is_stalled or self.link.session.holds_more_than(self._max_output_bytes)

    # -- deliveries

    def on_deliver(self, locked_until_ms: int, entries: list[Any]) -> None:
        count = len(entries) // ENTRY
        self._delivered += count
        link = self.link
        credit = 0 if link.closed else link.credit
        usable = min(count, credit)
        if usable < count:
            self._return(entries[usable * ENTRY :])
        if usable <= 0:
            return
        settled = self._receive_and_delete
        if settled:
            self.connection.unsent.retain(link, entries[: usable * ENTRY])
        self._last = entries[(usable - 1) * ENTRY]
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
            self._return(entries[at : at + ENTRY], Outcome.ABANDONED)
            self._return(entries[at + ENTRY : usable * ENTRY])
            raise
        if not settled:
            self._unsettled += usable
        self.metrics.outgoing_messages += usable
        self.metrics.outgoing_bytes += size_bytes
        enqueued_ms = int.from_bytes(entries[3][8:16], "big")
        self._latency.observe_many(max(0.0, time.time() - enqueued_ms / 1000), usable)
        granted = self._limit - self._delivered
        if (granted < self._window // 2 and granted < credit - usable) or self._is_blocked:
            self.ask()  # the client has more credit than the partition was granted

    def _return(self, entries: list[Any], outcome: Outcome = Outcome.RELEASED) -> None:
        """Give deliveries that were never written to the socket back; they do not count as failed.

        Deliveries that were handed out before the partition knew that the receiver is closed were taken back then.
        """
        if not entries or (self._closing and not self._receive_and_delete):
            return
        if self._receive_and_delete:
            self.worker.post(wire.restore(self.partition, self.queue, entries))
        else:
            tokens = entries[0::ENTRY]
            channels = (0, len(tokens))
            self.worker.post(wire.settle(self.partition, self.queue, outcome, channels, tokens, None))

    # -- settlement

    def on_outcome(self, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        self._unsettled -= 1
        if self._is_held_back:
            self._may_get_more = True
        properties = None
        if state == ACCEPTED:
            outcome = Outcome.ACCEPTED
        elif state == MODIFIED:
            undeliverable, annotations = modification(delivery)
            outcome = Outcome.DEFERRED if undeliverable else Outcome.ABANDONED
            properties = encode_properties(annotations)
        elif state == REJECTED:
            outcome = Outcome.DEAD_LETTERED
            _, description, info = rejection(delivery)
            properties = dead_letter_properties(info, description)
        elif state == TRANSACTIONAL:
            self._settle_in(delivery, token, settled)
            return
        elif state == RELEASED or settled:
            outcome = Outcome.RELEASED
        else:
            # The message stays locked, because we do not know what the client wants.
            text = f"There is no outcome {state:#x}."
            self.connection.reject(delivery, conditions.NOT_IMPLEMENTED, text, self.tracker)
            return
        if settled:
            forget(delivery)
            self._settle_quietly(token, outcome, properties)
            return
        self._settling.append((delivery, outcome))
        run, channel = self.worker.run, self.channel
        if run is not None and run.channel == channel and run.outcome is outcome and not properties:
            run.channels[-1] += 1  # the usual case: the same channel as the last settlement
            run.tokens.append(token)
        elif not self._settle(channel, token, outcome, properties):
            self._worker_is_down = True
            self.connection.active.add(self)
        if self._may_get_more:
            self.connection.active.add(self)

    def _settle(self, channel: int, token: bytes, outcome: Outcome, properties: dict[str, Any] | None) -> bool:
        if not properties:
            return self.worker.settle(self.partition, self.queue, outcome, channel, token)
        return self.worker.post(wire.settle(self.partition, self.queue, outcome, (channel, 1), (token,), properties))

    def _settle_quietly(self, token: bytes, outcome: Outcome, properties: dict[str, Any] | None) -> None:
        """The client has already settled the delivery, so it gets no answer."""
        self._settle(0, token, outcome, properties)
        self.metrics.incoming_requests += 1
        self.metrics.successful_requests += 1
        self.metrics.settled[outcome] += 1
        if self._may_get_more:
            self.connection.active.add(self)

    def _settle_in(self, delivery: Delivery, token: bytes, settled: bool) -> None:
        """The outcome is a part of a transaction. Its answer is transactional too, unless the outcome is refused."""
        connection = self.connection
        self.connection.active.add(self)
        transaction_id, value = transactional_state(delivery)

        def answered(error: BrokerError | None) -> None:
            waits = not settled and not self.link.closed
            self.metrics.incoming_requests += 1
            if error is not None:
                self.metrics.failed(type(error).__name__)
                if waits:
                    connection.reject(delivery, condition_of(error), str(error), self.tracker)
                return
            self.metrics.successful_requests += 1
            self.metrics.settled[outcome] += 1
            if waits:
                settle_in(transaction_id, delivery, STATE_OF[outcome])

        try:
            outcome, properties = transactional_outcome(value)
            transaction = connection.transactions.find(transaction_id)
            transaction.settle(self, settled, token, outcome, properties, answered)
        except BrokerError as error:
            self.metrics.incoming_requests += 1
            self.metrics.failed(type(error).__name__)
            if settled:
                connection.transactions.fail(transaction_id, error)
            else:
                connection.reject(delivery, condition_of(error), str(error), self.tracker)
        if settled:
            forget(delivery)

    def on_settled(self, count: int, error: BrokerError | None) -> None:
        if self._closing:
            return  # the client and its deliveries are gone
        settling = self._settling
        metrics = self.metrics
        metrics.incoming_requests += count
        if error is None:
            for _ in range(count):
                delivery, outcome = settling.popleft()
                settle(delivery, STATE_OF[outcome])
                metrics.settled[outcome] += 1
            metrics.successful_requests += count
            return
        condition, text = condition_of(error), str(error)
        if isinstance(error, LockLost | SessionLockLost):
            self.connection.gateway.metrics.lost_settlements += count
        metrics.failed(type(error).__name__, count)
        for _ in range(count):
            delivery, _ = settling.popleft()
            self.connection.reject(delivery, condition, text, self.tracker)

    # -- the end

    def post(self) -> None:
        """Do the work that has gathered in one read of the socket."""
        self.answer_if_down()
        if self._may_get_more:
            self.grant()

    def on_detach(self, broken: bool = False, unsent: int = 0) -> None:
        """`unsent`: the number of last deliveries that the client cannot have. They go back and do not count."""
        self._settling.clear()
        unsent_from = self._last + b"\0"  # deliveries still on their way from the partition have higher tokens
        if unsent and self._receive_and_delete:
            self._return(self.connection.unsent.retained(self.link)[-unsent * ENTRY :])
        elif unsent:
            unsent_from = self.link.engine.first_of_last(self.link, unsent) or unsent_from
        self._closing = True
        if not self.worker.post(wire.close_receiver(self.partition, self.channel, broken, unsent_from)):
            self.worker.channels.pop(self.channel, None)

    def on_closed(self, error: BrokerError | None) -> None:
        if error is not None and not self.link.closed:
            self.detach(error)

    def on_worker_lost(self) -> None:
        self._draining = False
        if self._closing:
            self.worker.channels.pop(self.channel, None)
        elif self._settling:  # the outcome is unknown
            self.on_settled(len(self._settling), OutcomeUnknown(error_texts.OUTCOME_UNKNOWN))

    def answer_unposted(self) -> None:
        """These settlements came after their locks had ended with the worker."""
        self.on_settled(len(self._settling), LockLost(error_texts.LOCK_LOST))

    def on_worker_back(self) -> None:
        if not self._closing:
            self._open()
            self.ask()
            self.connection.flush()
