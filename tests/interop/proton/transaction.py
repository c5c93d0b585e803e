"""The library's own transactions."""

from typing import Any

from proton import Delivery, Message
from proton.handlers import MessagingHandler
from scene import TIMEOUT_S, Failed, Scene, Sender, equal


class Transaction(MessagingHandler):
    """A transaction whose steps are waited for."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._connection = scene.connection
        self._keyed = scene.keyed
        self._ended: str | None = None
        self._is_declared = False
        self.transaction = scene.connection.container.declare_transaction(scene.connection.conn, self)
        scene.connection.wait(lambda: self._is_declared, timeout=TIMEOUT_S)

    def on_transaction_declared(self, event: Any) -> None:
        self._is_declared = True

    def on_transaction_committed(self, event: Any) -> None:
        self._ended = "committed"

    def on_transaction_aborted(self, event: Any) -> None:
        self._ended = "aborted"

    def on_transaction_commit_failed(self, event: Any) -> None:
        self._ended = "failed"

    def send(self, sender: Sender, text: str) -> None:
        self.post(sender, Message(body=text, **self._keyed))

    def post(self, sender: Sender, message: Message) -> None:
        """Send and wait; raises Failed if the broker refuses."""
        delivery = self.transaction.send(sender.blocking.link, message)
        self._connection.wait(lambda: delivery.remote_state, timeout=TIMEOUT_S)
        if delivery.remote_state == Delivery.REJECTED:
            condition = delivery.remote.condition
            raise Failed(condition.name, condition.description)
        equal(delivery.remote_state, 0x34, "state of the answer")

    def commit(self) -> None:
        self.transaction.commit()
        self._end("committed")

    def fail_to_commit(self) -> None:
        self.transaction.commit()
        self._end("failed")

    def abort(self) -> None:
        self.transaction.abort()
        self._end("aborted")

    def _end(self, expected: str) -> None:
        self._connection.wait(lambda: self._ended is not None, timeout=TIMEOUT_S)
        equal(self._ended, expected, "end of the transaction")
