"""One link on one partition: it posts the link's commands, and takes the partition's answers."""

from collections.abc import Callable
from typing import Any

from broker.errors import BrokerError
from broker.gateway.host import Host
from broker.gateway.waiting_room import Waiting
from broker.runs import Part


class LinkChannel:
    """The common part of a sender's and a receiver's channel (`router.Channel`)."""

    def __init__(self, connection: Host, partition: int) -> None:
        self.connection = connection
        self._join(partition)

    def _join(self, partition: int) -> None:
        router = self.connection.gateway.router
        self.partition = partition
        self.worker = router.worker(partition)
        self.number = router.next_number()
        self.worker.channels[self.number] = self

    def move(self, partition: int) -> None:
        """The entity lives on this partition now. Answers to earlier commands are not heard."""
        self.forget()
        self._join(partition)

    def let_wait(
        self, operations: int, size_bytes: int, begin: Callable[[], object], refuse: Callable[[BrokerError], None]
    ) -> bool:
        """See `WorkerConnection.wait`."""
        if not self.worker.is_awaited:
            return False
        askers = (self, self.connection)
        return self.worker.wait(Waiting(self.partition, self.connection, askers, operations, size_bytes, begin, refuse))

    def forget(self) -> None:
        """No answer is awaited any more, and what waits for the worker is not done."""
        self.worker.channels.pop(self.number, None)
        self.worker.drop_waiting(self)

    # Answers that only senders or only receivers get.

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        raise AssertionError("no sends on this channel")

    def on_opened(self, session_id: str = "", locked_until_ms: int = 0) -> None:
        raise AssertionError("no receiver on this channel")

    def on_drained(self, delivered: int) -> None:
        raise AssertionError("no receiver on this channel")

    def on_available(self) -> None:
        raise AssertionError("no receiver on this channel")

    def on_settled(self, count: int, error: BrokerError | None) -> None:
        raise AssertionError("no receiver on this channel")

    def on_deliver(self, locked_until_ms: int, entries: list[Any]) -> None:
        raise AssertionError("no receiver on this channel")

    def on_deliver_run(self, locked_until_ms: int, part: Part) -> None:
        raise AssertionError("no receiver on this channel")

    def on_closed(self, error: BrokerError | None) -> None:
        raise AssertionError("no receiver on this channel")

    def on_worker_lost(self) -> None:
        raise NotImplementedError

    def on_worker_back(self) -> None: ...

    def on_worker_stalled(self) -> None: ...
