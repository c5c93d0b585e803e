"""No turn does much work at once, whatever one client asks for: records and bytes are counted, turn by turn."""

from collections.abc import Callable
from typing import Any

import pytest
from driver import LOCK_MS, MAIN, START_MS, Driver, define, message
from session_driver import SessionDriver
from topic_driver import TOPIC, TopicDriver, event

from broker.namespace.entities import SubscriptionDescription
from broker.partition.settings import PartitionSettings
from broker.wire import ENTRY, SendOperation
from storage.memory import MemoryStore
from storage.records import entity_key
from storage.store import Table

MANY = 3000  # messages, sessions
SUBSCRIPTIONS = 100
FIRST = 100  # entity id of the first subscription
BODY_BYTES = 1000
SETTINGS = PartitionSettings(turn_work=200, step=500, step_bytes=50_000)
# A message in a step may be an entry, a record, a timer, a reference and a line of a session: read, and written.
RECORDS_MAX = 12 * SETTINGS.turn_work
BYTES_MAX = 8 * SETTINGS.step_bytes


class MeteredStore(MemoryStore):
    """Counts the records read and written between two commits, and the bytes of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.records = self.bytes = 0
        self.most_records = self.most_bytes = 0

    def forget(self) -> None:
        self.records = self.bytes = self.most_records = self.most_bytes = 0

    def get(self, table, key):
        value = super().get(table, key)
        self._count(1, len(value or b""))
        return value

    def scan(self, table, start, end, limit, reverse=False):
        found = super().scan(table, start, end, limit, reverse)
        self._count(len(found) + 1, sum(len(value) for _, value in found))
        return found

    def put(self, table, key, value):
        super().put(table, key, value)
        self._count(1, len(value))

    def delete(self, table, key):
        self._count(1, 0)
        return super().delete(table, key)

    def commit(self):
        super().commit()
        self.turn_ended()

    def turn_ended(self):
        self.most_records = max(self.most_records, self.records)
        self.most_bytes = max(self.most_bytes, self.bytes)
        self.records = self.bytes = 0

    def _count(self, records: int, size: int) -> None:
        self.records += records
        self.bytes += size


def filled(ttl_ms: int | None = None, **extra: Any) -> Driver:
    driver = Driver(MeteredStore(), SETTINGS)
    for at in range(0, MANY, 100):
        driver.send(*[message(bytes(BODY_BYTES), ttl_ms=ttl_ms, **extra) for _ in range(at, at + 100)])
    return driver


def with_sessions() -> SessionDriver:
    driver = SessionDriver(MeteredStore(), SETTINGS)
    for at in range(0, MANY, 100):
        driver.send(*[message("m", session_id=f"s{number}") for number in range(at, at + 100)])
    return driver


def wide(**rules: Any) -> TopicDriver:
    driver = TopicDriver(store=MeteredStore(), settings=SETTINGS)
    for number in range(SUBSCRIPTIONS):
        description = SubscriptionDescription(topic="news", name=f"s{number}")
        driver.partition.put_entity(FIRST + number, description, driver.now_ms, **rules)
        define(driver.store, FIRST + number, description)
    driver.partition.commit()
    return driver


# -- what clients can ask for; each checks its answer


def deleting_what_is_not_there(driver: Driver) -> None:
    assert driver.request("delete-batch", 4000, START_MS - 1) == 0


def deleting_a_batch(driver: Driver) -> None:
    assert driver.request("delete-batch", 2000, 2 * START_MS) == 2000
    assert driver.held() == [MANY - 2000, 0, 0, 0]


def purging(driver: Driver) -> None:
    while driver.request("purge"):
        pass
    assert driver.held() == [0, 0, 0, 0]


def purging_what_is_locked(driver: Driver) -> None:
    while driver.request("purge"):
        pass
    assert driver.held() == [MANY, 0, 0, MANY]


def browsing(driver: Driver) -> None:
    assert len(driver.peek(count=40)) == 40


def expiring(driver: Driver) -> None:
    driver.wait(2000)
    assert driver.held() == [0, 0, 0, 0]


def activating(driver: Driver) -> None:
    driver.wait(2000)
    assert driver.held() == [MANY, 0, 0, 0]


def ending_locks(driver: Driver) -> None:
    driver.wait(2 * LOCK_MS)
    assert driver.held() == [MANY, 0, 0, 0]


def losing_the_connection(driver: Driver) -> None:
    driver.close("r", broken=True)
    assert driver.request("renew-locks", []) == []
    driver.wait(0)
    assert driver.held() == [MANY, 0, 0, 0]
    assert [delivery.delivery_count for delivery in driver.peek(count=100)] == [1] * 100
    assert [delivery.number for delivery in driver.receive(5, "s")] == [1, 2, 3, 4, 5]
    tally = driver.partition.tallies()[MAIN]
    assert (tally["locks_lost"], tally["locks_ended"]) == (MANY, 0)


def deleting_the_entity(driver: Driver) -> None:
    driver.partition.delete_entity(1, driver.now_ms)
    driver.store.delete(Table.ENTITIES, entity_key(1))
    driver.partition.commit()
    driver.wait(1)
    assert driver.store.scan(Table.MESSAGES, b"", b"\xff" * 9, 1) == []


def publishing_a_batch(driver: TopicDriver) -> None:
    driver.publish(*[event("m")] * 50)
    driver.wait(1)
    assert driver.held(FIRST + SUBSCRIPTIONS - 1 << 3) == [50, 0, 0, 0]


def publishing_in_a_transaction(driver: TopicDriver) -> None:
    driver.partition.transact("t", True, [SendOperation(TOPIC, False, [[event("m")] * 50])], driver.now_ms)
    driver.partition.discharge("t", True, driver.now_ms)
    driver.partition.commit()
    driver.wait(1)
    assert driver.held(FIRST << 3) == [50, 0, 0, 0]


def publishing_what_is_due(driver: TopicDriver) -> None:
    driver.publish(*[event("m", scheduled_ms=START_MS + 10)] * 50)
    driver.wait(20)
    assert driver.held(FIRST << 3) == [50, 0, 0, 0]


def publishing_what_is_forwarded(driver: TopicDriver) -> None:
    driver.send(*[event("m")] * 50)
    driver.change(forward_to="news")
    driver.pump()
    driver.wait(1)
    assert driver.held(FIRST << 3) == [50, 0, 0, 0]


def listing_sessions_changed_since(driver: SessionDriver) -> None:
    assert driver.request("get-message-sessions", START_MS + 1, 0, 100) == []


def listing_the_last_sessions(driver: SessionDriver) -> None:
    assert len(driver.request("get-message-sessions", None, MANY - 10, 100)) == 10


def browsing_a_session_after_a_start(driver: SessionDriver) -> None:
    assert len(driver.request("peek-session", "s7", 0, 10, 1 << 20)) == ENTRY


def accepting_a_session_after_a_start(driver: SessionDriver) -> None:
    assert driver.accept() == "s0"


def sending_to_a_session_after_a_start(driver: SessionDriver) -> None:
    driver.put("s7", "more")


def locked() -> Driver:
    driver = filled()
    driver.open("r")
    driver.grant(MANY)
    assert len(driver.pump()["r"]) == MANY
    return driver


def with_states() -> SessionDriver:
    driver = with_sessions()
    for number in range(MANY):
        driver.accept("r", f"s{number}")
        driver.request("set-session-state", "r", f"s{number}", b"state")
        driver.close("r")
    return driver


def restarted() -> SessionDriver:
    driver = with_sessions()
    driver.restart()
    return driver


@pytest.mark.parametrize(
    ("given", "ask"),
    [
        (filled, deleting_what_is_not_there),
        (filled, deleting_a_batch),
        (filled, purging),
        (locked, purging_what_is_locked),
        (filled, browsing),
        (lambda: filled(ttl_ms=1000), expiring),
        (lambda: filled(scheduled_ms=START_MS + 1000), activating),
        (locked, ending_locks),
        (locked, losing_the_connection),
        (filled, deleting_the_entity),
        (wide, publishing_a_batch),
        (wide, publishing_in_a_transaction),
        (wide, publishing_what_is_due),
        (wide, publishing_what_is_forwarded),
        (with_states, listing_sessions_changed_since),
        (with_sessions, listing_the_last_sessions),
        (restarted, browsing_a_session_after_a_start),
        (restarted, accepting_a_session_after_a_start),
        (restarted, sending_to_a_session_after_a_start),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_turn_reads_and_writes_little(given: Callable[[], Driver], ask: Callable[[Any], None]):
    driver = given()
    store = driver.store
    assert isinstance(store, MeteredStore)
    store.forget()
    ask(driver)
    store.turn_ended()
    assert store.most_records <= RECORDS_MAX
    assert store.most_bytes <= BYTES_MAX
