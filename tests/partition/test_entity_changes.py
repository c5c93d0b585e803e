"""Status, quotas, and entities that change or go while they are used."""

import pytest

from broker.errors import EntityDisabled, EntityNotFound, LockLost, NotAllowed, QuotaExceeded, ServerBusy
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.store import StoreError, Table
from tests.partition.driver import DEAD, ENTITY, LOCK_MS, MAIN, Driver, define, describe, message
from tests.partition.hinted_store import HintedStore

MIB = 1 << 20
MESSAGE_TABLES = (Table.QUEUE, Table.MESSAGES, Table.DUE, Table.COUNTS)


@pytest.mark.parametrize("status", ["Disabled", "SendDisabled"])
def test_no_sending_to_a_disabled_queue(status):
    queue = Driver(status=status)
    for sent in (message("a"), message("a", ping=True)):
        with pytest.raises(EntityDisabled):
            queue.send(sent)
    with pytest.raises(EntityDisabled):
        queue.request("schedule", [message("a")])


@pytest.mark.parametrize("status", ["Active", "ReceiveDisabled"])
def test_sending_where_only_receiving_is_disabled(status):
    queue = Driver(status=status)
    queue.send("a")
    assert queue.bodies() == ["a"]


def test_sending_to_what_does_not_exist(queue):
    with pytest.raises(EntityNotFound):
        queue.send("a", queue=99 << 3)


def test_nothing_is_sent_to_a_dead_letter_queue(queue):
    with pytest.raises(NotAllowed):
        queue.send("a", queue=DEAD)


def test_a_ping_is_accepted_and_never_seen(queue):
    queue.open()
    queue.grant(5)
    queue.send(message("ping", ping=True), "a", message("ping", ping=True))
    assert [(d.number, d.body) for d in queue.pump()["r"]] == [(1, b"a")]
    assert queue.bodies() == ["a"]
    assert queue.partition.tallies()[MAIN]["pings"] == 2


def test_a_disabled_queue_closes_its_receivers_and_keeps_their_locks(queue):
    queue.send("a", "b")
    queue.open("d", DEAD)
    a = queue.receive_one()
    queue.grant(1)
    queue.change(status="ReceiveDisabled")
    pumped = queue.partition.pump(queue.now_ms)
    assert {receiver: type(error) for receiver, error in pumped.closed} == {"r": EntityDisabled, "d": EntityDisabled}
    assert not pumped.deliveries
    assert not queue.partition.pump(queue.now_ms).closed
    assert queue.settle(Outcome.ACCEPTED, a) == [None]
    queue.close("r", broken=True)
    queue.change(status="Active")
    assert queue.receive_one("again").body == b"b"


def test_a_send_beyond_the_size_of_the_queue_is_refused_whole():
    queue = Driver(max_size_mb=1)
    queue.send(message(bytes(600_000)))
    with pytest.raises(QuotaExceeded):
        queue.send("small", message(bytes(500_000)))
    queue.send(message(bytes(MIB - 600_000 - 2 * 40)))
    assert queue.counts()[:4] == [2, 0, 0, MIB]
    with pytest.raises(QuotaExceeded):
        queue.send(message("p", ping=True))


def test_dead_lettered_messages_count_for_the_size_of_the_queue():
    queue = Driver(max_size_mb=1)
    queue.send(message(bytes(600_000)))
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    with pytest.raises(QuotaExceeded):
        queue.send(message(bytes(600_000)))
    queue.settle(Outcome.ACCEPTED, queue.receive_one("d", DEAD), queue=DEAD)
    queue.send(message(bytes(600_000)))


def test_a_full_queue_can_be_received_settled_and_dead_lettered():
    queue = Driver(max_size_mb=1)
    queue.send(message(bytes(MIB - 40)))
    with pytest.raises(QuotaExceeded):
        queue.send("b")
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    assert queue.counts(DEAD)[3] == MIB


@pytest.mark.parametrize(
    "settings", [PartitionSettings(store_watermark=0.5), PartitionSettings(store_watermark=1, min_free_bytes=50_000)]
)
def test_above_the_watermark_sends_are_refused_and_all_else_goes_on(settings):
    queue = Driver(HintedStore(capacity_bytes=100_000), settings)
    queue.send(message(bytes(30_000)), message(bytes(30_000)))
    with pytest.raises(QuotaExceeded):
        queue.send("a")
    first, second = queue.receive(2)
    queue.settle(Outcome.DEAD_LETTERED, first)
    queue.settle(Outcome.ABANDONED, second, properties={"a": "b"})
    queue.settle(Outcome.ACCEPTED, queue.receive_one())
    queue.send("a")


def test_a_change_of_the_lock_duration_loses_the_locks_and_counts_no_failure(queue):
    queue.send("a", "b")
    a, b = queue.receive(2)
    queue.change(lock_duration_ms=5000)
    assert all(isinstance(result, LockLost) for result in queue.settle(Outcome.ACCEPTED, a, b))
    assert [(d.number, d.delivery_count) for d in queue.receive(2)] == [(1, 0), (2, 0)]
    queue.wait(5000)
    assert queue.held() == [2, 0, 0, 0]


def test_a_change_of_something_else_keeps_the_locks(queue):
    queue.send("a")
    a = queue.receive_one()
    queue.change(max_delivery_count=3)
    assert queue.settle(Outcome.ACCEPTED, a) == [None]


def test_a_lower_delivery_limit_holds_from_the_next_failure_on(queue):
    queue.send("a")
    for _ in range(3):
        queue.settle(Outcome.ABANDONED, queue.receive_one())
    queue.change(max_delivery_count=2)
    assert queue.held() == [1, 0, 0, 0]
    queue.settle(Outcome.ABANDONED, queue.receive_one())
    assert (queue.held(), queue.held(DEAD)) == ([0, 0, 0, 0], [1, 0, 0, 0])


def test_without_dead_lettering_what_has_expired_is_dropped(queue):
    queue.change(dead_lettering_on_message_expiration=True)
    queue.send(message("a", ttl_ms=100))
    queue.wait(100)
    assert queue.bodies() == ["a"]
    queue.change(dead_lettering_on_message_expiration=False)
    queue.wait(0)
    assert (queue.bodies(), queue.bodies(DEAD)) == ([], [])


def test_a_deleted_queue_is_gone_at_once_and_freed_step_by_step():
    queue = Driver(settings=PartitionSettings(step=4))
    queue.partition.put_entity(ENTITY + 1, describe(), queue.now_ms)
    queue.send(*[message(b"m", ttl_ms=10**9) for _ in range(9)], message("s", scheduled_ms=queue.now_ms + 10**6))
    queue.send("other", queue=ENTITY + 1 << 3)
    a, b = queue.receive(2)
    queue.settle(Outcome.DEAD_LETTERED, a)
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    pumped = queue.partition.pump(queue.now_ms)
    assert [(receiver, type(error)) for receiver, error in pumped.closed] == [("r", EntityNotFound)]
    for use in (lambda: queue.send("a"), queue.peek, lambda: queue.open("s")):
        with pytest.raises(EntityNotFound):
            use()
    assert isinstance(queue.settle(Outcome.ACCEPTED, b)[0], EntityNotFound)
    with pytest.raises(ServerBusy):
        queue.partition.put_entity(ENTITY, describe(), queue.now_ms)
    queue.partition.advance(queue.now_ms)
    assert len(queue.store.scan(Table.QUEUE, b"\0", b"\xff" * 14, 100)) == 11 - 4
    queue.wait(0)
    assert [len(queue.store.scan(table, b"\0", b"\xff" * 32, 100)) for table in MESSAGE_TABLES] == [1, 1, 0, 1]
    queue.wait(LOCK_MS + 10**7)
    queue.partition.put_entity(ENTITY, describe(), queue.now_ms)
    assert queue.held() == [0, 0, 0, 0]


def test_a_turn_frees_little_of_a_deleted_queue():
    """What is sent to others on the partition waits for the turn."""
    queue = Driver()
    queue.send(*[message(b"m") for _ in range(500)])
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    left = [500]
    while queue.store.scan(Table.QUEUE, b"\0", b"\xff" * 14, 1):
        queue.partition.advance(queue.now_ms)
        queue.partition.commit()
        left.append(len(queue.store.scan(Table.QUEUE, b"\0", b"\xff" * 14, 1000)))
    assert left == [500, 372, 244, 116, 0]


def test_each_turn_goes_on_behind_what_the_last_one_freed(monkeypatch):
    """Until a checkpoint, a scan from the first key passes all keys that were deleted."""
    queue = Driver()
    queue.send(*[message(b"m") for _ in range(500)])
    starts = []
    scan = queue.store.scan

    def noted(table, start, *rest):
        if table is Table.QUEUE:
            starts.append(start)
        return scan(table, start, *rest)

    queue.partition.delete_entity(ENTITY, queue.now_ms)
    monkeypatch.setattr(queue.store, "scan", noted)
    for _ in range(4):
        queue.partition.advance(queue.now_ms)
        queue.partition.commit()
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    queue.partition.advance(queue.now_ms)
    assert starts[5] == starts[0]  # nothing was left behind the last one: once more from the first


def test_freeing_a_deleted_queue_goes_on_after_a_restart():
    queue = Driver(settings=PartitionSettings(step=2))
    queue.send(*"abcdefg")
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    queue.store.delete(Table.ENTITIES, ENTITY.to_bytes(4, "big"))
    queue.partition.commit()
    queue.restart()
    queue.wait(0)
    for table in MESSAGE_TABLES:
        assert queue.store.last_key(table) is None
    queue.restart()
    assert queue.partition.next_timer_ms() is None


def test_deleting_what_does_not_exist(queue):
    with pytest.raises(EntityNotFound):
        queue.partition.delete_entity(99, queue.now_ms)


def test_a_definition_that_cannot_be_read_stops_the_partition(queue):
    queue.store.put(Table.ENTITIES, ENTITY.to_bytes(4, "big"), b"nonsense")
    with pytest.raises(StoreError, match="entity 1"):
        queue.restart()


def test_entities_are_known_after_a_restart(queue):
    define(queue.store, 7, describe(max_delivery_count=1))
    queue.restart()
    queue.send("a", queue=7 << 3)
    queue.settle(Outcome.ABANDONED, queue.receive_one("x", 7 << 3), queue=7 << 3)
    assert queue.held(7 << 3 | 1) == [1, 0, 0, 0]
    assert queue.held(MAIN) == [0, 0, 0, 0]
