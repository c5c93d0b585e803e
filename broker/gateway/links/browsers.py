"""Links on which clients look at messages and leave them where they are: those with the distribution mode copy.

A browser asks its partitions, one after the other, for messages from a number on, as the requests to peek do. So it
shows them in all places, in the order of their sequence numbers, without a lock and without a count, and settling them
has no effect. It asks for a step whenever the client has credit and reads. Behind the last message, a drain has ended;
credit that is left then waits for messages that come later.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from broker import requests, wire
from broker.errors import BrokerError, EntityMoving, OutcomeUnknown, PartitionParked, ServerBusy
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.channel import LinkChannel
from broker.gateway.links.delivery import embed
from broker.gateway.links.entity_link import EntityLink
from broker.gateway.links.outcomes import STATE_OF, transactional_outcome
from broker.gateway.namespace import Entity
from broker.namespace.entities import Right
from broker.wire import ENTRY
from protocol import conditions
from protocol.addresses import Address
from protocol.engine.deliveries import (
    ACCEPTED,
    MODIFIED,
    REJECTED,
    RELEASED,
    TRANSACTIONAL,
    Delivery,
    forget,
    settle,
    settle_in,
    transactional_state,
)
from protocol.engine.links import Link

STEP_BYTES = 256 * 1024  # of the records that come at once, unless a single one has more
AGAIN_S = 0.25  # between two tries to look at a partition that is moved, restarted or busy
_OUTCOMES = frozenset((ACCEPTED, MODIFIED, REJECTED, RELEASED))
_NO_ENDS: Final[Mapping[int, int]] = MappingProxyType({})  # an older worker does not tell them
_PASSING = EntityMoving | ServerBusy | OutcomeUnknown  # errors that a retry may help against


class BrowserChannel(LinkChannel):
    """A browser on one partition. `number` of a message from which on it has to look there."""

    def __init__(self, browser: "Browser", partition: int) -> None:
        super().__init__(browser.connection, partition)
        self._browser = browser
        self.from_number = 0
        self.waits = False  # the partition is to tell when there are more
        self._is_known = False  # the partition has been asked to, and perhaps still is

    def await_more(self) -> None:
        if self.waits:
            return
        self.worker.channels[self.number] = self  # not there if the partition has closed it
        command = wire.await_more(self.partition, self.number, self._browser.queue, self.from_number)
        self.waits = self._is_known = self.worker.post(command)

    def await_no_more(self) -> None:
        """The answer to that is not waited for."""
        self.waits = False
        if self._is_known:
            self._is_known = False
            self.worker.post(wire.close_receiver(self.partition, self.number, False, None))

    def move(self, partition: int) -> None:
        self.await_no_more()
        super().move(partition)

    def close(self) -> None:
        self.await_no_more()
        self.forget()

    def on_available(self) -> None:
        if self.waits:
            self.waits = False
            self._browser.look_again(self)

    def on_closed(self, error: BrokerError | None) -> None:
        """`error` is None in answer to `await_no_more`, after which the browser may wait again."""
        if error is not None:
            self.waits = self._is_known = False
            self._browser.on_error(self, error)
        elif self.waits:
            self.worker.channels[self.number] = self

    def on_worker_lost(self) -> None:
        self.waits = self._is_known = False

    def on_worker_back(self) -> None:
        self._browser.look_again(self)


class Browser(EntityLink):
    """A link with the distribution mode copy (3.5.7)."""

    right = Right.LISTEN

    def __init__(
        self,
        connection: Host,
        link: Link,
        entity: Entity,
        address: Address,
        session_id: str | None,
        selector: str | None,
    ) -> None:
        """`session_id`: of the session to browse; None to browse all messages. `selector`: only what it selects."""
        super().__init__(connection, link, entity, address)
        amqp = connection.gateway.settings.amqp
        self._window = amqp.receiver_window
        self._max_unsettled = amqp.max_unsettled_per_link
        self._session_id = session_id
        self._keys = connection.gateway.namespace.keys_of(entity)
        self._is_copy = entity.kind == "subscription"
        self._selector = selector
        partitions = entity.partitions if session_id is None else [entity.partition_of_session(session_id)]
        self._channels = [BrowserChannel(self, partition) for partition in partitions]
        # Those that may have more messages, and the first is looked at. Those that cannot be looked at now are in none.
        self._ahead = dict.fromkeys(self._channels)
        self._is_asking = False
        self._is_draining = False  # all partitions have been or are to be looked at since the client has asked to drain
        self._sent = 0
        self._closing = False

    # -- credit

    def on_flow(self) -> None:
        self.ask()

    def ask(self) -> None:
        """Look soon for what the client has credit for."""
        self.connection.active[self] = None

    def look_again(self, channel: BrowserChannel) -> None:
        """There may be more messages on this partition."""
        self._ahead[channel] = None
        self.ask()

    def begin_postponed(self) -> None:
        self.post()

    def post(self) -> None:
        link = self.link
        if link.closed or self._closing or self._is_asking:
            return
        large_answers = self.connection.large_answers
        transfers = link.session.room
        if self.connection.is_stalled or (link.credit > 0 and transfers <= 0):
            large_answers.forget(self)
            self._wait()
            return
        room = min(link.credit, self._window, self._max_unsettled - link.unsettled, max(transfers, 0))
        if not link.drain:
            self._is_draining = False
        elif room > 0 and not self._is_draining:
            self._is_draining = True
            self._ahead = dict.fromkeys(self._channels)  # what has come meanwhile may not be known here
        if room > 0 and self._ahead:
            if large_answers.begin(self, self.connection.is_stalled):
                self._look(next(iter(self._ahead)), room)
            return
        large_answers.forget(self)
        if link.drain:
            self._is_draining = False
            link.drained()
        for channel in self._channels:
            if link.credit <= 0:
                channel.await_no_more()
            elif room > 0 and channel not in self._ahead:
                channel.await_more()

    def _wait(self) -> None:
        """Go on when the client reads, or opens the window of its session: nothing can be written now.

        A drain does not wait for the window: what can be sent at the moment has been sent (2.6.7).
        """
        connection, link = self.connection, self.link
        if connection.is_stalled or link.session.window:
            connection.blocked.add(self)
            return
        connection.shut.add(self)
        if link.drain:
            self._is_draining = False
            link.drained()

    def _look(self, channel: BrowserChannel, count: int) -> None:
        """Ask for the next messages of the partition."""
        if not self.entity.is_partitioned and channel.partition != self.entity.partition:
            channel.move(self.entity.partition)
        self._is_asking = True
        asked = requests.Browse(
            channel.from_number,
            count,
            STEP_BYTES,
            self._session_id,
            self._selector,
            with_lock_ends=channel.worker.tells_lock_ends,
        )
        reply = partial(self._looked, channel)
        router = self.connection.gateway.router
        # If its worker is away, other partitions are looked at meanwhile, and this one later.
        router.request(channel.partition, self.queue, asked, reply, self.connection, waits=False)

    def _looked(self, channel: BrowserChannel, result: Any, error: BrokerError | None) -> None:
        self._is_asking = False
        large_answers = self.connection.large_answers
        large_answers.end()
        if not (self._closing or self.link.closed):
            if error is None:
                entries, next_number, is_end, *lock_ends = result
                if self._show(channel, entries, *lock_ends):
                    channel.from_number = next_number
                    if is_end:
                        self._ahead.pop(channel, None)
                self.ask()
            else:
                self.on_error(channel, error)
        large_answers.go_on(self)
        self.connection.flush()

    def on_error(self, channel: BrowserChannel, error: BrokerError) -> None:
        if self._closing or self.link.closed:
            return
        is_one_of_several = len(self._channels) > 1
        if not isinstance(error, _PASSING) and not (is_one_of_several and isinstance(error, PartitionParked)):
            self.detach(error)
            return
        if is_one_of_several:  # the others are looked at meanwhile, and a drain does not wait for this one
            self._ahead.pop(channel, None)
        self.connection.later(AGAIN_S, partial(self.look_again, channel))

    # -- deliveries, and their settlement

    def _show(self, channel: BrowserChannel, entries: list[Any], lock_ends: Mapping[int, int] = _NO_ENDS) -> bool:
        """Send the messages. False if credit or window do not last: then those that are left are looked at again."""
        link, is_settled = self.link, self.link.settled_by_sender
        for at in range(0, len(entries), ENTRY):
            place, number, delivery_count, record, overlay = entries[at : at + ENTRY]
            if link.credit <= 0 or link.session.room <= 0:
                channel.from_number = number
                return False
            self._sent += 1
            payload = embed(
                record,
                number,
                delivery_count,
                lock_ends.get(number),
                overlay,
                place=place,
                keys=self._keys,
                is_copy=self._is_copy,
            )
            link.send(self._sent.to_bytes(16, "big"), payload, b"", 0, is_settled)
            self.metrics.outgoing_messages += 1
            self.metrics.outgoing_bytes += len(payload)
        return True

    def on_outcome(self, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        """The client is told that its outcome holds; the message is where it was."""
        self.ask()  # it may have waited for this: see `_max_unsettled`
        if settled:
            forget(delivery)
        elif state in _OUTCOMES:
            self.link.begin_outcomes()
            settle(delivery, state)
        elif state == TRANSACTIONAL:
            transaction_id, value = transactional_state(delivery)
            try:
                self.connection.transactions.find(transaction_id)
                outcome, _ = transactional_outcome(value)
            except BrokerError as error:
                self.connection.reject(delivery, condition_of(error), str(error), self.tracker)
            else:
                settle_in(transaction_id, delivery, STATE_OF[outcome])
        else:
            text = f"There is no outcome {state:#x}."
            self.connection.reject(delivery, conditions.NOT_IMPLEMENTED, text, self.tracker)

    # -- the end

    def on_detach(self) -> None:
        self._closing = True
        self.connection.large_answers.forget(self)
        for channel in self._channels:
            channel.close()
