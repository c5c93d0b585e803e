"""What uses an entity: for tests of entities that are deleted when nobody uses them."""

import pytest

from broker import requests
from broker.errors import BrokerError
from broker.partition.state.idleness import STEPS
from broker.wire import Outcome, SendOperation
from tests.partition.driver import DEAD, MAIN, Driver, message

INTERVAL_MS = 300_000
STEP_MS = INTERVAL_MS // STEPS
DAY_MS = 86_400_000


def is_there(driver: Driver, queue_id: int = MAIN) -> bool:
    return bool(driver.partition.request(0, requests.Counts([queue_id]), driver.now_ms))


def opened(queue: Driver) -> None:
    queue.open()
    queue.send("a", "b", "c")
    queue.delivery = queue.receive_one()  # type: ignore[attr-defined]


def refused(queue: Driver) -> None:
    with pytest.raises(BrokerError):
        queue.request("receive-deferred", [99], False)


USES = {
    "a send": lambda queue: queue.send("x"),
    "a ping": lambda queue: queue.send(message("x", ping=True)),
    "scheduling, and cancelling": lambda queue: queue.request(
        "cancel-scheduled", queue.request("schedule", [message("s", scheduled_ms=queue.now_ms + DAY_MS)])
    ),
    "a receive": lambda queue: queue.receive_one(),
    "a receive of nothing from the dead-letter queue": lambda queue: queue.receive(1, "d", DEAD),
    "opening a receiver": lambda queue: queue.open("other"),
    "closing a receiver": lambda queue: queue.close(),
    "a settlement": lambda queue: queue.settle(Outcome.ACCEPTED, queue.delivery),
    "a settlement by request": lambda queue: queue.request("settle", [queue.delivery.token], Outcome.RELEASED, None),
    "renewing a lock": lambda queue: queue.request("renew-locks", [queue.delivery.token]),
    "browsing": lambda queue: queue.peek(),
    "browsing the dead-letter queue": lambda queue: queue.peek(DEAD),
    "browsing by a link": lambda queue: queue.request("browse", 0, 10, 1 << 20, None),
    "a browser that waits for more": lambda queue: (
        queue.partition.await_more("browser", MAIN, 1 << 60, queue.now_ms),
        queue.close("browser"),
    ),
    "deleting": lambda queue: queue.request("purge"),
    "what is refused": refused,
    "a change of its properties": lambda queue: queue.change(max_delivery_count=7),
    "a send in a transaction": lambda queue: queue.partition.transact(
        "t", True, [SendOperation(MAIN, False, [[message("t")]])], queue.now_ms
    ),
    "scheduling in a transaction": lambda queue: queue.partition.request_in(
        "t", True, MAIN, requests.Schedule([message("t", scheduled_ms=queue.now_ms + DAY_MS)]), queue.now_ms
    ),
}
