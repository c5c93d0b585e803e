"""A client's receiver of one session, which it holds until its link ends (amqp.md 7)."""

from protocol.client.errors import LinkDetached
from protocol.client.link_end import LinkConnection
from protocol.client.links import Receiver
from protocol.codec import Described
from protocol.symbols import SESSION_FILTER


class SessionReceiver(Receiver):
    """Receives the messages of one session, in their order. All are under the session's lock, whose end ends the link.

    `Management.renew_session_lock` renews it. Closing the link gives back the session with the messages that are not
    settled.
    """

    session_id: str

    def __init__(self, connection: LinkConnection, address: str) -> None:
        super().__init__(connection, address, credit=0, receive_and_delete=False)

    def on_attached(self) -> None:
        found = self.link.source_filter().get(SESSION_FILTER)
        if isinstance(found, Described):
            found = found.value
        if isinstance(found, str):
            self.session_id = str(found)
            super().on_attached()
        else:
            self.fail(LinkDetached("", f"the peer has given no session of {self.address}"))
            self.link.detach()
            self.connection.flush_soon()
