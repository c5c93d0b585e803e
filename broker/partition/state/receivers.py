"""Receivers of one queue, and the sessions whose locks they hold."""

from collections.abc import Hashable
from typing import TYPE_CHECKING

from broker.errors import InvalidArgument
from broker.partition.state.locks import Holder
from broker.partition.state.window import Window
from storage.records import MAX_SESSION_ID_BYTES, Place, session_entry_key

if TYPE_CHECKING:
    from broker.rules.selectors import Selector

ALL = 1 << 63  # above every sequence number: cursor of a window with all messages of its session


class Receiver(Holder):
    """`limit` and `delivered` count deliveries since it was opened. Locks of a session's messages are the session's.

    `watches`: it has credit elsewhere, and wants to know when there are messages here (see `Line`). `selector`: it
    wants only messages that this selects. `session_token`: it wants a session that is not exclusive, with this lock
    token; see `broker.partition.sessions.locks`.
    """

    __slots__ = (
        "delivered",
        "key",
        "limit",
        "queue_id",
        "receive_and_delete",
        "selector",
        "session",
        "session_token",
        "watches",
    )

    def __init__(
        self, key: Hashable, queue_id: int, receive_and_delete: bool, selector: "Selector | None" = None
    ) -> None:
        super().__init__()
        self.selector = selector
        self.session_token: bytes | None = None
        self.key = key
        self.queue_id = queue_id
        self.receive_and_delete = receive_and_delete
        self.limit = 0
        self.delivered = 0
        self.watches = False
        self.session: Session | None = None  # it holds the lock of this session, and receives only its messages


def encoded(session_id: str) -> bytes:
    """The session id as in keys. Raises InvalidArgument if it is too long."""
    key = session_id.encode()
    if len(key) > MAX_SESSION_ID_BYTES:
        raise InvalidArgument(f"The session id has {len(key)} bytes; 128 characters are the limit.")
    return key


class Session(Holder):
    """A locked session. `receiver` is None if its connection broke and the lock is kept.

    The locks of its messages end with its own. `unsent_from`: as in `Ending`, for when the lock ends. `token`: who
    names it takes the session over; None if nobody can. `successor`: the receiver that has done so, and gets the
    session when the one that has it has left; it may be closed meanwhile.
    """

    __slots__ = ("id", "key", "prefix", "receiver", "successor", "token", "unsent_from", "window")

    def __init__(self, queue_id: int, session_id: str, receiver: Receiver, until_ms: int) -> None:
        super().__init__()
        self.id = session_id
        self.key = encoded(session_id)
        self.prefix = session_entry_key(queue_id, Place.AVAILABLE, self.key, 0)[:-8]  # of keys of available entries
        self.receiver: Receiver | None = receiver
        self.token = receiver.session_token
        self.successor: Receiver | None = None
        self.unsent_from: bytes | None = None
        self.until_ms = until_ms
        self.window = Window()

    @property
    def may_have_more(self) -> bool:
        """True if the session may have messages that are not handed out. These may be expired or unreadable."""
        window = self.window
        return window.cursor < ALL or window.head < len(window.entries) or bool(window.returned)
