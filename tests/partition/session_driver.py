"""A partition with one queue that requires sessions, driven as `driver.Driver` drives a plain one."""

from typing import Any

from broker.errors import BrokerError
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import unpack_session_entry_key
from storage.store import Table
from tests.partition.driver import MAIN, Delivery, Driver, StoreClass, deliveries, message

WAIT_MS = 65_000


class SessionDriver(Driver[StoreClass]):
    """A receiver's name is any; of it and its session the tests are about. `closed` has those the partition closed."""

    def __init__(
        self, store: StoreClass | None = None, settings: PartitionSettings | None = None, **properties: Any
    ) -> None:
        super().__init__(store, settings, requires_session=True, **properties)

    def start(self) -> None:
        super().start()
        self.closed: dict[Any, BrokerError] = {}

    def put(self, session: str, *bodies: str, **given: Any) -> None:
        """Send to one session; `given` is of `driver.message`."""
        self.send(*[message(body, session_id=session, **given) for body in bodies])

    def turn(self) -> tuple[dict[Any, tuple[str, int]], dict[Any, list[Delivery]]]:
        """Accepted sessions with the ends of their locks, and deliveries, by receiver; `closed` is up to date then."""
        accepted: dict[Any, tuple[str, int]] = {}
        found: dict[Any, list[Delivery]] = {}
        more = True
        while more:
            pumped = self.partition.pump(self.now_ms)
            self.partition.commit()
            accepted |= {receiver: (session, until_ms) for receiver, session, until_ms in pumped.accepted}
            for receiver, _, items in pumped.deliveries:
                found.setdefault(receiver, []).extend(deliveries(items))
            for receiver, error in pumped.closed:
                self.closed[receiver] = error
                self._limits.pop(receiver, None)
            more = pumped.more
        return accepted, found

    def pump(self) -> dict[Any, list[Delivery]]:
        return self.turn()[1]

    def ask(
        self,
        receiver: Any = "r",
        session: str | None = None,
        wait_ms: int = WAIT_MS,
        queue: int = MAIN,
        receive_and_delete: bool = False,
        token: bytes | None = None,
        takes_over: bool = False,
    ) -> None:
        """For this session, or for any, as a worker does: the next turn tells. With a token it is not exclusive."""
        lock = () if token is None and not takes_over else (token, takes_over)
        self.partition.open_receiver(receiver, queue, receive_and_delete, self.now_ms, [session, wait_ms, *lock])
        self._limits[receiver] = 0

    def accept(self, receiver: Any = "r", session: str | None = None, **given: Any) -> str | None:
        """The session that it got in this turn; None if it waits."""
        self.ask(receiver, session, **given)
        accepted, _ = self.turn()
        if receiver not in accepted:
            return None
        found, until_ms = accepted.pop(receiver)
        assert not accepted
        assert until_ms == self.now_ms + self.description.lock_duration_ms
        return found

    def bodies_for(self, receiver: Any, count: int = 100) -> list[str]:
        return [delivery.body.decode() for delivery in self.receive(count, receiver)]

    def of_session(self, name: str, *args: Any, receiver: Any = "r") -> Any:
        """A request that is only for who holds the lock; `args` begin with the session."""
        return self.request(name, receiver, *args)

    def settle_as(self, receiver: Any, outcome: Outcome, *received: Delivery) -> list[BrokerError | None]:
        """What this receiver is told."""
        return self.partition.as_told(MAIN, receiver, self.settle(outcome, *received), self.now_ms)

    def offered(self) -> list[str]:
        """The sessions there are to be had, in the order in which they are; none is left locked."""
        found = []
        while (session := self.accept(f"taker {len(found)}")) is not None:
            found.append(session)
        for number in range(len(found) + 1):
            self.close(f"taker {number}")
        return found

    def listed(self) -> list[tuple[int, str, int]]:
        """(place, session, sequence number) of all entries as they are listed by session."""
        keys = [key for key, _ in self.store.scan(Table.SESSION_ENTRIES, b"\0", b"\xff" * 400, 10_000)]
        found = [unpack_session_entry_key(key) for key in keys]
        return sorted((place, session.decode(), number) for _, place, session, number in found)


def accepted_by(partition: Partition, now_ms: int) -> dict[Any, str]:
    """One turn without deliveries: the sessions that receivers have got."""
    pumped = partition.pump(now_ms)
    partition.commit()
    assert not pumped.deliveries
    return {receiver: session for receiver, session, _ in pumped.accepted}
