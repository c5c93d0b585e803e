"""Links on which clients receive one session: the attach is answered when the link has the session."""

import math
import time
from collections.abc import Iterable, Sequence
from uuid import UUID, uuid4

from broker.errors import (
    BrokerError,
    EntityMoving,
    OperationTimeout,
    PartitionParked,
    ServerBusy,
    SessionCannotBeLocked,
    SessionLockLost,
    SessionTakenOver,
)
from broker.gateway.host import Host
from broker.gateway.links.filters import SourceFilters
from broker.gateway.links.outcomes import STATE_OF
from broker.gateway.links.receivers import ClientReceiver, ReceiverChannel
from broker.gateway.namespace import Entity
from broker.wire import Outcome
from protocol import error_texts, session_filter
from protocol.addresses import Address
from protocol.engine.links import Link
from protocol.session_filter import SessionRequest

# When an SDK waits for messages as long as the lock lasts, its wait begins a little after the lock. The wait must end
# before the SDK is told that the lock has ended.
LOST_QUIETLY_S = 5.0
# If the fragment that is asked first for the next session does not answer for this long, it is slow: all are asked.
FIRST_ANSWER_S = 0.2


class SessionReceiver(ClientReceiver):
    """A receiver of a named session, or of the next one. Its attach is answered when it has got the session.

    If the worker dies before, the next one is asked for what is left of the client's time: an answer that was lost gave
    it a lock that has ended with the worker.

    When the lock ends, the partition closes the receiver at once. The client is told by the detach of the link. This
    happens at once if the client holds messages, whose locks are lost, or does not wait; else LOST_QUIETLY_S later.

    If another receiver takes the session over, the link has no session any more, and is detached LOST_QUIETLY_S later:
    what the client asks for until then is refused with the reason, which .NET's SDK does not know after the detach.
    Of a session that is not exclusive clients settle messages by requests ($management), so the deliveries are settled
    here then; the extension, which knows no delivery by its token, does not send them.
    """

    def __init__(
        self,
        connection: Host,
        link: Link,
        entity: Entity,
        address: Address,
        partition: int,
        request: SessionRequest,
        filters: SourceFilters,
    ) -> None:
        """`filters` are the others that are in place."""
        self._request = request
        self._until = time.monotonic() + request.wait_ms / 1000  # that a session is waited for
        self._filters = filters
        self._lost: BrokerError | None = None  # the lock has ended and the client is not told yet
        self.is_exclusive = request.is_exclusive
        self._token: UUID | None = None if request.is_exclusive else request.lock_token or uuid4()
        self.session_id: str | None = None  # of the session that this link has the lock of
        super().__init__(connection, link, entity, address, [partition], filters.selector)

    @property
    def channel(self) -> int:
        """The number by which the session's partition knows the receiver."""
        return self._channels[0].number

    def open_waited(self, channel: ReceiverChannel) -> None:
        """The worker is back, and the receiver has waited for it to be opened."""
        self._open(channel)

    def on_worker_back(self, channel: ReceiverChannel) -> None:
        """A receiver that waited is being opened; any other has ended with the worker."""

    def _open(self, channel: ReceiverChannel) -> None:
        self._open_for(channel, self._request.session_id, self._wait_ms)

    def _open_for(self, channel: ReceiverChannel, session_id: str | None, wait_ms: int) -> None:
        lock = () if self._token is None else (self._token.bytes, self._request.lock_token is not None)
        channel.open([session_id, wait_ms, *lock])
        if channel.is_down:
            self.connection.active[self] = None

    def on_opened(self, channel: ReceiverChannel, session_id: str, locked_until_ms: int) -> None:
        if self.link.closed:
            return
        self.session_id = session_id
        self.connection.sessions[self.queue, session_id] = self
        self.link.accept(
            filters=session_filter.accepted_filters(self._request, session_id, self._token) | self._filters.in_place,
            properties=dict(session_filter.accepted_properties(locked_until_ms)),
        )
        self.ask()

    def ask(self) -> None:
        if self.session_id is not None:
            super().ask()

    def on_detach(self, broken: bool = False, unsent: int = 0) -> None:
        if self.session_id is not None and self.connection.sessions.get((self.queue, self.session_id)) is self:
            del self.connection.sessions[self.queue, self.session_id]
        super().on_detach(broken, unsent)

    def on_closed(self, channel: ReceiverChannel, error: BrokerError | None) -> None:
        if isinstance(error, SessionTakenOver) and not self.link.closed:
            self._lost = error
            self.grant()
            self.connection.let_go(self.link, error, self.tracker, LOST_QUIETLY_S)
            return
        if isinstance(error, SessionLockLost) and self._waits_for_messages:
            self._lost = error
            self.grant()  # answers a drain that the partition did not answer
            self.connection.later(LOST_QUIETLY_S, self._tell_lost)
            return
        if isinstance(error, EntityMoving):
            self._lose()
            return
        super().on_closed(channel, None if error is None else self._as_clients_know_it(error))

    @property
    def _waits_for_messages(self) -> bool:
        """True if the client waits and holds no messages, so that nothing is lost with the lock."""
        return not self.link.closed and not self.link.unsettled and self.link.credit > 0

    def _tell_lost(self) -> None:
        if not self._closing:
            super().on_closed(self._channels[0], self._lost)

    def grant(self) -> None:
        if self._lost is None:
            super().grant()
            return
        self._may_get_more = False
        if self.link.drain and not self.link.closed:
            self.link.drained()

    def has_settled(self, tokens: Sequence[bytes], outcome: Outcome) -> None:
        """The client has settled these messages by a request; some may be of other links."""
        if not self.is_exclusive:
            self.link.settle_sent(tokens, STATE_OF[outcome])
            self.ask()

    @property
    def _wait_ms(self) -> int:
        """What is left of the client's time."""
        return max(0, math.ceil((self._until - time.monotonic()) * 1000))

    def _as_clients_know_it(self, error: BrokerError) -> BrokerError:
        if isinstance(error, SessionCannotBeLocked):
            return SessionCannotBeLocked(error_texts.session_cannot_be_locked(self._request.session_id or ""))
        if isinstance(error, OperationTimeout):
            return OperationTimeout(error_texts.timed_out(self._request.wait_ms))
        return error

    def on_worker_lost(self, channel: ReceiverChannel) -> None:
        """The lock ended with the worker. A receiver without one asks the next worker, or is told that it cannot."""
        if self.session_id is None:
            self._open(channel)
        else:
            self._lose()

    def answer_unposted(self, channel: ReceiverChannel) -> None:
        channel.answer_all(SessionLockLost(error_texts.SESSION_LOCK_LOST))
        self._lose()

    def _lose(self) -> None:
        if self.session_id is None:
            self.detach(ServerBusy(error_texts.SERVER_BUSY))
        else:
            self.detach(SessionLockLost(error_texts.SESSION_LOCK_LOST))


class NextSessionReceiver(SessionReceiver):
    """A receiver of the next session of a partitioned entity, on whichever fragment there is one.

    First one fragment is asked for a session that is available now. If it has none, or is slow, all of them wait for
    one. The first that gets one wins, and the others give theirs back.
    """

    def __init__(
        self,
        connection: Host,
        link: Link,
        entity: Entity,
        address: Address,
        request: SessionRequest,
        filters: SourceFilters,
    ) -> None:
        self._asks_all = False
        self._first: ReceiverChannel | None = None
        partition = connection.gateway.router.any_of(entity.partitions)
        super().__init__(connection, link, entity, address, partition, request, filters)
        self._first = self._channels[0]  # it does not wait for a session
        connection.later(FIRST_ANSWER_S, self._wait_on_others)

    def on_detach(self, broken: bool = False, unsent: int = 0) -> None:
        super().on_detach(broken, unsent)
        self._first = None

    def _wait_on_others(self) -> None:
        """The first fragment, if it has not answered yet, still may."""
        if self._first is not None and not self._asks_all and self.session_id is None:
            self._wait_on([each for each in self.entity.partitions if each != self._first.partition])

    def _wait_on(self, partitions: Iterable[int]) -> None:
        self._asks_all = True
        channels = [ReceiverChannel(self, partition) for partition in partitions]
        self._channels = [*self._channels, *channels]
        for each in channels:
            self._open(each)

    def _open(self, channel: ReceiverChannel) -> None:
        waits = self._asks_all and channel is not self._first
        self._open_for(channel, None, self._wait_ms if waits else 0)

    def on_opened(self, channel: ReceiverChannel, session_id: str, locked_until_ms: int) -> None:
        if self.session_id is not None:
            channel.close(broken=False)
            return
        losers = [each for each in self._channels if each is not channel]
        self._channels, self._only = [channel], channel
        for loser in losers:
            loser.close(broken=False)
        super().on_opened(channel, session_id, locked_until_ms)

    def on_closed(self, channel: ReceiverChannel, error: BrokerError | None) -> None:
        if self.session_id is None and error is not None:
            self._without(channel, error)
        elif channel in self._channels:
            super().on_closed(channel, error)

    def on_worker_lost(self, channel: ReceiverChannel) -> None:
        if self.session_id is None and self._asks_all:
            if channel is self._first:
                self._first = None  # the next one may let it wait for a session
            self._open(channel)
            return
        channel.forget()
        if self.session_id is None:
            self._without(channel, ServerBusy(error_texts.SERVER_BUSY))
        elif channel in self._channels:
            super().on_worker_lost(channel)

    def answer_unposted(self, channel: ReceiverChannel) -> None:
        channel.forget()
        if self.session_id is None:
            self._without(channel, ServerBusy(error_texts.SERVER_BUSY))
        else:
            super().answer_unposted(channel)

    def _without(self, channel: ReceiverChannel, error: BrokerError) -> None:
        """This fragment has no session for the client. Ask all; if it was the last of all, the client is told."""
        if self._closing or channel not in self._channels:
            return
        self._channels = [each for each in self._channels if each is not channel]
        is_passing = isinstance(error, OperationTimeout | ServerBusy | PartitionParked)
        if not self._asks_all and is_passing:
            self._wait_on(self.entity.partitions)
        elif self._channels and channel is self._first and is_passing:
            self._wait_on([channel.partition])  # while others wait, too
        elif not self._channels or not is_passing:
            self._only = channel
            super().on_closed(channel, error)
