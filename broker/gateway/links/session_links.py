"""Links on which clients receive one session: the attach is answered when the link has the session."""

from broker.errors import (
    BrokerError,
    OperationTimeout,
    ServerBusy,
    SessionCannotBeLocked,
    SessionLockLost,
)
from broker.gateway.host import Host
from broker.gateway.links.receivers import ClientReceiver
from broker.gateway.namespace import Entity
from protocol import error_texts, session_filter
from protocol.addresses import Address
from protocol.engine.links import Link
from protocol.session_filter import SessionRequest

# When an SDK waits for messages as long as the lock lasts, its wait begins a little after the lock. The wait must end
# before the SDK is told that the lock has ended.
LOST_QUIETLY_S = 5.0


class SessionReceiver(ClientReceiver):
    """A receiver of a named session, or of the next one. Its attach is answered when it has got the session.

    When the lock ends, the partition closes the receiver at once. The client is told by the detach of the link. This
    happens at once if the client holds messages, whose locks are lost, or does not wait; else LOST_QUIETLY_S later.
    """

    def __init__(self, connection: Host, link: Link, entity: Entity, address: Address, request: SessionRequest) -> None:
        self._request = request
        self._lost: BrokerError | None = None  # the lock has ended and the client is not told yet
        self.session_id: str | None = None  # of the session that this link has the lock of
        super().__init__(connection, link, entity, address)

    def _open(self) -> None:
        session = [self._request.session_id, self._request.wait_ms]
        if not self.worker.post(self._open_command(session)):
            self._worker_is_down = True
            self.connection.active.add(self)

    def on_opened(self, session_id: str = "", locked_until_ms: int = 0) -> None:
        if self.link.closed:
            return
        self.session_id = session_id
        self.connection.sessions[self.queue, session_id] = self
        self.link.accept(
            self.entity.max_message_bytes(self.connection.gateway.settings.amqp.max_message_size_bytes),
            filters=session_filter.accepted_filters(self._request, session_id),
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

    def on_closed(self, error: BrokerError | None) -> None:
        if isinstance(error, SessionLockLost) and self._waits_for_messages:
            self._lost = error
            self.grant()  # answers a drain that the partition did not answer
            self.connection.later(LOST_QUIETLY_S, self._tell_lost)
            return
        super().on_closed(None if error is None else self._as_clients_know_it(error))

    @property
    def _waits_for_messages(self) -> bool:
        """True if the client waits and holds no messages, so that nothing is lost with the lock."""
        return not self.link.closed and not self._unsettled and self.link.credit > 0

    def _tell_lost(self) -> None:
        if not self._closing:
            super().on_closed(self._lost)

    def grant(self) -> None:
        if self._lost is None:
            super().grant()
            return
        self._may_get_more = False
        if self.link.drain and not self.link.closed:
            self.link.drained()

    def _as_clients_know_it(self, error: BrokerError) -> BrokerError:
        if isinstance(error, SessionCannotBeLocked):
            return SessionCannotBeLocked(error_texts.session_cannot_be_locked(self._request.session_id or ""))
        if isinstance(error, OperationTimeout):
            return OperationTimeout(error_texts.timed_out(self._request.wait_ms))
        return error

    def on_worker_lost(self) -> None:
        """The lock ended with the worker. A client that waited for a session may try again."""
        is_attached = not self._closing
        super().on_worker_lost()
        if is_attached:
            self._lose()

    def answer_unposted(self) -> None:
        self.on_settled(len(self._settling), SessionLockLost(error_texts.SESSION_LOCK_LOST))
        self._lose()

    def _lose(self) -> None:
        if self.session_id is None:
            self.detach(ServerBusy(error_texts.SERVER_BUSY))
        else:
            self.detach(SessionLockLost(error_texts.SESSION_LOCK_LOST))
