"""What partitions do while their time is ahead of the wall clock, because that was set back."""

import pytest

from broker.errors import TransactionTimeout
from broker.partition.settings import PartitionSettings
from broker.wire import TRANSACTION_TIME_OUT_MS, Outcome, SendOperation
from broker.worker.clock import SLOWNESS, Clock
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from storage.records import Field
from tests.partition.driver import LOCK_MS, MAIN, START_MS, Driver, message
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC, A, TopicDriver, event

HOUR_MS = 3_600_000


class Clocks:
    """A driver's time as a worker tells it; `wall_ms` is what the wall clock shows."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.wall_ms, self._monotonic_ms = driver.now_ms, 0
        self._clock = Clock(self.wall_ms, 0)

    def set(self, by_ms: int) -> None:
        self.wall_ms += by_ms
        self._tell()

    def wait(self, ms: int, step_ms: int = 1000) -> None:
        while ms > 0:
            passed_ms = min(ms, step_ms)
            ms -= passed_ms
            self.wall_ms += passed_ms
            self._monotonic_ms += passed_ms
            self._tell()

    def _tell(self) -> None:
        driver = self.driver
        driver.now_ms = self._clock.read(self.wall_ms, self._monotonic_ms)
        driver.partition.ahead_ms = self._clock.ahead_ms
        for _ in range(10):
            due_ms = driver.partition.next_timer_ms()
            if due_ms is None or due_ms > driver.now_ms:
                return
            driver.partition.advance(driver.now_ms)
            driver.partition.commit()
        raise AssertionError("its timers are due for ever")


@pytest.fixture
def clocks(queue: Driver) -> Clocks:
    return Clocks(queue)


SLOWER = SLOWNESS / (SLOWNESS - 1)


def test_times_to_live_end(clocks):
    clocks.driver.send(message("before", ttl_ms=10_000))
    clocks.set(-HOUR_MS)
    clocks.driver.send(message("after", ttl_ms=20_000))
    clocks.wait(int(10_000 * SLOWER) + 1000)
    assert clocks.driver.bodies() == ["after"]
    clocks.wait(int(10_000 * SLOWER) + 1000)
    assert clocks.driver.bodies() == []


def test_locks_end_and_not_before_the_time_that_was_told(clocks):
    clocks.set(-HOUR_MS)
    queue = clocks.driver
    queue.send("a")
    queue.open()
    queue.grant(1)
    [(_, until_ms, _)] = queue.partition.pump(queue.now_ms).deliveries
    assert until_ms == clocks.wall_ms + LOCK_MS
    clocks.wait(LOCK_MS - 1000)
    assert queue.held() == [1, 0, 0, 1]
    clocks.wait(int(LOCK_MS * (SLOWER - 1)) + 2000)
    assert queue.held() == [1, 0, 0, 0]


def test_a_renewed_lock_is_told_by_the_wall_clock(clocks):
    queue = clocks.driver
    queue.send("a", "b")
    a, b = queue.receive(2)
    clocks.set(-HOUR_MS)
    clocks.wait(1000)
    assert queue.request("renew-locks", [a.token]) == [clocks.wall_ms + LOCK_MS]
    queue.settle(Outcome.DEFERRED, b)
    assert queue.request("receive-deferred", [2], False)[0] == clocks.wall_ms + LOCK_MS


def test_the_lock_of_a_session_is_told_by_the_wall_clock():
    queue = SessionDriver()
    clocks = Clocks(queue)
    queue.put("a", "1")
    clocks.set(-HOUR_MS)
    queue.partition.open_receiver("r", MAIN, False, queue.now_ms, ["a", 0])
    assert queue.partition.pump(queue.now_ms).accepted == [("r", "a", clocks.wall_ms + LOCK_MS)]
    assert queue.request("renew-session-lock", "r", "a") == clocks.wall_ms + LOCK_MS


def test_transactions_end(clocks):
    clocks.set(-HOUR_MS)
    queue = clocks.driver
    queue.partition.transact("t", True, [SendOperation(MAIN, False, [[message("a")]])], queue.now_ms)
    clocks.wait(int(TRANSACTION_TIME_OUT_MS * SLOWER) + 2000)
    with pytest.raises(TransactionTimeout):
        queue.partition.discharge("t", True, queue.now_ms)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("of", ["queue", "topic"])
def test_a_scheduled_message_waits_for_the_wall_clock(of, when):
    driver = TopicDriver(A) if of == "topic" else Driver()
    to, at = (TOPIC, A) if of == "topic" else (MAIN, MAIN)
    clocks = Clocks(driver)
    due_ms = START_MS - HOUR_MS + 60_000 if when == "after" else START_MS + 60_000
    if when == "after":
        clocks.set(-HOUR_MS)
    driver.send(event("m", scheduled_ms=due_ms), queue=to)
    if when == "before":
        clocks.set(-HOUR_MS)
    clocks.wait(due_ms - clocks.wall_ms - 1000)
    assert driver.held(at)[0] == 0
    clocks.wait(7000)
    assert driver.held(at)[0] == 1


def test_a_scheduled_message_is_due_when_the_wall_clock_is_set_right_again(clocks):
    queue = clocks.driver
    clocks.set(-HOUR_MS)
    queue.send(message("m", scheduled_ms=START_MS + 10_000))
    clocks.wait(1000)
    clocks.set(HOUR_MS)
    clocks.wait(15_000)
    assert queue.held() == [1, 0, 0, 0]


def test_a_message_abandoned_with_a_delay_waits_for_the_wall_clock():
    queue = Driver(settings=PartitionSettings(abandon_delays=True))
    clocks = Clocks(queue)
    clocks.set(-1000)
    queue.send("a", message("b", ttl_ms=3000))
    queue.settle(Outcome.ABANDONED, *queue.receive(2), properties={DELAY: encode(Long(1000))})
    assert [each.overlay[Field.RETURNS_MS] for each in queue.peek()] == [clocks.wall_ms + 1000] * 2
    clocks.wait(900)
    assert queue.held() == [0, 0, 2, 0]
    clocks.wait(300)
    assert queue.held() == [2, 0, 0, 0]


def test_deleting_up_to_now_deletes_messages_sent_by_now(clocks):
    queue = clocks.driver
    queue.send("before")
    clocks.set(-HOUR_MS)
    clocks.wait(10)
    queue.send("after")
    clocks.wait(10)
    assert queue.request("delete-batch", 10, clocks.wall_ms) == 2
