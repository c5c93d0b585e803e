"""Links on which clients receive one session: the attach is answered when the session is theirs."""

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


class SessionReceiver(ClientReceiver):
    """A receiver of the session it names, or of any. Its attach is answered when the partition has given it one."""

    def __init__(self, connection: Host, link: Link, entity: Entity, address: Address, request: SessionRequest) -> None:
        self._request = request
        self.session_id: str | None = None  # of the session whose lock it has
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

    def on_detach(self, broken: bool = False) -> None:
        if self.session_id is not None and self.connection.sessions.get((self.queue, self.session_id)) is self:
            del self.connection.sessions[self.queue, self.session_id]
        super().on_detach(broken)

    def on_closed(self, error: BrokerError | None) -> None:
        super().on_closed(None if error is None else self._as_clients_know_it(error))

    def _as_clients_know_it(self, error: BrokerError) -> BrokerError:
        if isinstance(error, SessionCannotBeLocked):
            return SessionCannotBeLocked(error_texts.session_cannot_be_locked(self._request.session_id or ""))
        if isinstance(error, OperationTimeout):
            return OperationTimeout(error_texts.timed_out(self._request.wait_ms))
        return error

    def on_worker_lost(self) -> None:
        """The lock is gone with it. Who waited may try again."""
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
