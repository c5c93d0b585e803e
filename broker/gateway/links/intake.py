"""Links on which clients send, to entities, nodes or the coordinator: the credit that they hold.

A client's credit is computed from the state of the link: the window less the deliveries that wait for an answer. This
happens at the end of each turn in which a delivery came or was answered. So it makes no difference how a delivery ends
(stored, refused, malformed, too large, aborted), and its credit always comes back.
"""

from broker.errors import MessageTooLarge, ServerBusy
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from protocol import error_texts
from protocol.engine.deliveries import Delivery, forget, transaction_of
from protocol.engine.links import Link

# The gateway stops reading from a client with this many times its credit in flight, until the broker has caught up.
OVERRUN = 4


class Intake:
    """A link on which a client sends. Its connection posts it in turns in which a delivery came or it asked."""

    connection: Host
    link: Link
    window: int  # deliveries that the client may have in flight

    @property
    def waiting(self) -> int:
        """The number of deliveries that came and are not answered yet."""
        raise NotImplementedError

    @property
    def tracker(self) -> str:
        return "NoSystemTracker"

    @property
    def is_overrun(self) -> bool:
        return self.waiting > OVERRUN * self.window

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        """`state` is that of `protocol.engine.engine.Handler.on_message`."""
        raise NotImplementedError

    def on_oversized(self, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        text = error_texts.message_too_large(0, size_bytes, self.link.max_message_bytes)
        self.refuse(delivery, settled, MessageTooLarge(text))

    def on_crowded(self, delivery: Delivery, settled: bool) -> None:
        self.refuse(delivery, settled, ServerBusy(error_texts.UNFINISHED_TOO_MUCH))

    def refuse(self, delivery: Delivery, settled: bool, error: Exception) -> None:
        """`error` is a BrokerError or a ProtocolError. A transaction is not done without this delivery."""
        self.connection.transactions.fail(transaction_of(delivery), error)
        if settled:
            forget(delivery)
        else:
            self.connection.reject(delivery, condition_of(error), str(error), self.tracker)

    def on_flow(self) -> None: ...

    def post(self) -> None:
        """End the turn: post what has gathered, then give the client credit again."""
        is_posted = self.post_gathered()
        waiting = self.waiting
        # What was posted waits now, and its answer looks at the credit again.
        if not is_posted and (free := self.credit_due(waiting)) and not self.link.closed:
            self.link.grant(free)
        if self.is_overrun and not self.link.closed:
            self.connection.overrun.add(self)

    def credit_due(self, waiting: int) -> int:
        """The credit to grant while so many deliveries wait: half of the window at least, so that flows stay few."""
        window = self.window
        free = window - self.link.credit - waiting
        return free if free > 0 and 2 * free >= window - 1 else 0

    def post_gathered(self) -> bool:
        """True if deliveries were posted that will be answered."""
        return False
