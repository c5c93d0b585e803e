"""No turn does much work at once, whatever one client asks for: records and bytes are counted, turn by turn."""

from collections.abc import Callable
from typing import Any

import pytest

from broker import requests, wire
from broker.catalog.changing import Limits
from broker.errors import OutOfRange, QuotaExceeded
from broker.namespace.entities import SubscriptionDescription
from broker.partition.settings import PartitionSettings
from broker.partition.state.stored_rules import default_rule
from broker.partition.state.timers import Due
from broker.wire import ENTRY, Op, Outcome, SendOperation, SettleOperation, pack_operations
from broker.worker.copies import Copies
from broker.worker.home import Home
from protocol.codec import encode
from protocol.message.batches import MAX_BATCH_MESSAGES
from storage.memory import MemoryStore
from storage.quarantine import quarantine_key
from storage.records import NEXT_ENTITY_ID_KEY, encode_document, entity_key
from storage.store import Table
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Driver, define, deliveries, message, run
from tests.partition.forwarding_driver import Partitions
from tests.partition.in_a_worker import PARTITION, through_a_worker
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC, TopicDriver, event, rule

MANY = 3000  # messages, sessions
SUBSCRIPTIONS = 100
FIRST = 100  # entity id of the first subscription
BODY_BYTES = 1000
NAMED = 100  # by one request
DUPLICATES_MS = 60_000
SETTINGS = PartitionSettings(
    turn_work=200,
    step=500,
    step_bytes=50_000,
    request_items=NAMED,
    request_bytes=NAMED * (BODY_BYTES + 100),
    pump_bytes=200_000,
    pump_bytes_per_receiver=50_000,
    forward_count=NAMED,
    forward_batch_bytes=50_000,
    properties_bytes=400,
    commit_bytes=50_000,
)


def records_max(settings: PartitionSettings) -> int:
    """A message in a step may be an entry, a record, a timer, a reference, a line of a session: read, and written."""
    return 12 * settings.turn_work


def bytes_max(settings: PartitionSettings) -> int:
    return 8 * settings.step_bytes


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

    def record_count(self, table):
        self._count(1, 8)
        return super().record_count(table)

    def turn_ended(self):
        self.most_records = max(self.most_records, self.records)
        self.most_bytes = max(self.most_bytes, self.bytes)
        self.records = self.bytes = 0

    def _count(self, records: int, size: int) -> None:
        self.records += records
        self.bytes += size


def fill(driver: Driver[MeteredStore], ttl_ms: int | None = None, **extra: Any) -> None:
    for at in range(0, MANY, 100):
        driver.send(*[message(bytes(BODY_BYTES), ttl_ms=ttl_ms, **extra) for _ in range(at, at + 100)])


def filled(ttl_ms: int | None = None, **extra: Any) -> Driver[MeteredStore]:
    driver = Driver(MeteredStore(), SETTINGS)
    fill(driver, ttl_ms, **extra)
    return driver


class WithTokens(Driver[MeteredStore]):
    tokens: list[bytes]  # of all that it has delivered


class SessionWithTokens(SessionDriver[MeteredStore]):
    tokens: list[bytes]


class WithRecord(Driver[MeteredStore]):
    record: bytes  # of one of its messages


def empty() -> Driver[MeteredStore]:
    return Driver(MeteredStore(), SETTINGS)


def fragment_with_interval() -> Driver[MeteredStore]:
    driver = filled()
    description = driver.description.model_copy(update={"auto_delete_on_idle_ms": 300_000})
    driver.partition.put_entity(1, description, driver.now_ms, partitions=(4, 5))
    driver.partition.commit()
    return driver


def with_sessions() -> SessionDriver[MeteredStore]:
    driver = SessionDriver(MeteredStore(), SETTINGS)
    for at in range(0, MANY, 100):
        driver.send(*[message("m", session_id=f"s{number}") for number in range(at, at + 100)])
    return driver


def wide(**rules: Any) -> TopicDriver[MeteredStore]:
    driver = TopicDriver(store=MeteredStore(), settings=SETTINGS)
    for number in range(SUBSCRIPTIONS):
        description = SubscriptionDescription(topic="news", name=f"s{number}")
        driver.partition.put_entity(FIRST + number, description, driver.now_ms, **rules)
        define(driver.store, FIRST + number, description)
    driver.partition.commit()
    return driver


# -- what clients can ask for; each checks its answer


def changing_entities(driver: TopicDriver[MeteredStore]) -> None:
    partitions, stores = {0: driver.partition}, {0: driver.store}
    home: Home[str] = Home(Copies(partitions, stores, lambda _: None), partitions, stores, 1, Limits())
    driver.store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(FIRST + SUBSCRIPTIONS))
    path = "news/Subscriptions/new"
    for change in (
        ["create", "queue", {"name": "new"}, None],
        ["create", "subscription", {"topic": "news", "name": "new"}, None],
        ["update", path, {"lock_duration_ms": 7000}],
        ["add-rule", path, default_rule(0) | {"name": "another"}],
        ["remove-rule", path, "$Default"],
        ["delete", path],
        ["delete", "new"],
    ):
        home.change("gateway", 1, change, driver.now_ms)
        driver.partition.commit()
    assert len(home.take_done()) == 7


def deleting_what_is_not_there(driver: Driver[MeteredStore]) -> None:
    assert driver.request("delete-batch", 4000, START_MS - 1) == 0


def deleting_a_batch(driver: Driver[MeteredStore]) -> None:
    assert driver.request("delete-batch", 2000, 2 * START_MS) == 2000
    assert driver.held() == [MANY - 2000, 0, 0, 0]


def purging(driver: Driver[MeteredStore]) -> None:
    while driver.request("purge"):
        pass
    assert driver.held() == [0, 0, 0, 0]


def purging_what_is_locked(driver: Driver[MeteredStore]) -> None:
    while driver.request("purge"):
        pass
    assert driver.held() == [MANY, 0, 0, MANY]


def browsing(driver: Driver[MeteredStore]) -> None:
    assert len(driver.peek(count=40)) == 40


def browsing_by_a_link(driver: Driver[MeteredStore]) -> None:
    found, number, is_end = 0, 0, False
    while not is_end:
        command = [Op.REQUEST, PARTITION, 1, "browse", MAIN, [number, 1 << 32, SETTINGS.step_bytes, None]]
        [[*_, (items, number, is_end)]] = through_a_worker(driver, command)
        found += len(items) // ENTRY
    assert found == MANY


def selecting(driver: Driver[MeteredStore]) -> None:
    command = [Op.OPEN_SELECTIVE, PARTITION, 1, MAIN, False, None, "color = 'red'"]
    answers = through_a_worker(driver, command, [Op.DRAIN, PARTITION, 1, 10])
    assert [answer.op for answer in answers] == [Op.OPENED, Op.DRAINED]


def waiting_for_more(driver: Driver[MeteredStore]) -> None:
    [answer] = through_a_worker(driver, [Op.AWAIT, PARTITION, 1, MAIN, MANY])
    assert answer.op == Op.AVAILABLE


def expiring(driver: Driver[MeteredStore]) -> None:
    driver.wait(2000)
    assert driver.held() == [0, 0, 0, 0]


def expiring_what_is_deferred(driver: Driver[MeteredStore]) -> None:
    driver.open("other")
    driver.grant(1, "other")
    driver.wait(LOCK_MS)
    assert driver.held() == [0, 0, 0, 0]
    assert driver.counts(DEAD)[0] == MANY


def activating(driver: Driver[MeteredStore]) -> None:
    driver.wait(2000)
    assert driver.held() == [MANY, 0, 0, 0]


def ending_locks(driver: Driver[MeteredStore]) -> None:
    driver.wait(2 * LOCK_MS)
    assert driver.held() == [MANY, 0, 0, 0]


def losing_the_connection(driver: Driver[MeteredStore]) -> None:
    driver.close("r", broken=True)
    assert driver.request("renew-locks", []) == []
    driver.wait(0)
    assert driver.held() == [MANY, 0, 0, 0]
    assert [delivery.delivery_count for delivery in driver.peek(count=100)] == [1] * 100
    assert [delivery.number for delivery in driver.receive(5, "s")] == [1, 2, 3, 4, 5]
    tally = driver.partition.tallies()[MAIN]
    assert (tally["locks_lost"], tally["locks_ended"]) == (MANY, 0)


def losing_the_connection_of_a_session(driver: SessionDriver[MeteredStore]) -> None:
    driver.close("r", broken=True)
    driver.ask("other", "s")
    driver.wait(0)
    assert driver.held() == [MANY, 0, 0, 0]
    assert driver.turn()[0].keys() == {"other"}
    received = driver.receive(MANY, "other")
    assert [(delivery.number, delivery.delivery_count) for delivery in received] == [(n + 1, 1) for n in range(MANY)]


def leaving_a_session_with_what_was_not_sent(driver: SessionWithTokens) -> None:
    sent = MANY - 200
    driver.close("r", broken=True, unsent_from=driver.tokens[sent])
    driver.wait(0)
    around = driver.peek(start=sent - 1, count=4)
    assert [delivery.delivery_count for delivery in around] == [1, 1, 0, 0]
    tally = driver.partition.tallies()[MAIN]
    assert (tally["locks_lost"], tally["released"]) == (sent, MANY - sent)


def leaving_a_session_whose_messages_have_expired(driver: SessionDriver[MeteredStore]) -> None:
    driver.now_ms += LOCK_MS - 1
    driver.close("r")
    driver.wait(0)
    assert driver.held() == [0, 0, 0, 0]


def ending_the_lock_of_a_session(driver: SessionDriver[MeteredStore]) -> None:
    driver.wait(2 * LOCK_MS)
    assert driver.held() == [MANY, 0, 0, 0]


def accepting_a_session_whose_lock_ran_out(driver: SessionDriver[MeteredStore]) -> None:
    driver.now_ms += LOCK_MS  # and no timer came by
    driver.ask("other", "s")
    driver.partition.commit()
    driver.wait(0)
    assert driver.turn()[0].keys() == {"other"}
    assert driver.receive_one("other").delivery_count == 1


def taking_back_what_has_expired(driver: Driver[MeteredStore]) -> None:
    driver.now_ms += LOCK_MS - 1
    driver.close("r", unsent_from=bytes(16))
    driver.wait(0)
    assert driver.held() == [0, 0, 0, 0]


def remembering_ids(driver: Driver[MeteredStore]) -> None:
    for at in range(0, MANY, NAMED):
        driver.send(*[message(message_id=encode(f"id{number}")) for number in range(at, at + NAMED)])
    driver.wait(DUPLICATES_MS + 60_000)


def timing_out(driver: WithTokens) -> None:
    for number, at in enumerate(range(0, MANY, NAMED)):
        tokens = driver.tokens[at : at + NAMED]
        operation = SettleOperation(MAIN, True, tokens, Outcome.ACCEPTED)
        driver.partition.transact(number, True, [operation], driver.now_ms, "c")
    driver.wait(200_000)
    assert driver.held()[3] == 0


def deleting_the_entity(driver: Driver[MeteredStore]) -> None:
    driver.partition.delete_entity(1, driver.now_ms)
    driver.store.delete(Table.ENTITIES, entity_key(1))
    driver.partition.commit()
    driver.wait(1)
    assert driver.store.scan(Table.MESSAGES, b"", b"\xff" * 9, 1) == []


def agreeing_to_the_deletion(driver: Driver[MeteredStore]) -> None:
    driver.wait(300_000)
    assert driver.partition.take_unused() == [1]
    assert driver.partition.agree(1, driver.now_ms)
    driver.partition.commit()
    driver.partition.keep(1, driver.now_ms)
    driver.partition.commit()


def publishing_a_batch(driver: TopicDriver[MeteredStore]) -> None:
    driver.publish(*[event("m")] * 50)
    driver.wait(1)
    assert driver.held(FIRST + SUBSCRIPTIONS - 1 << 3) == [50, 0, 0, 0]


def publishing_in_a_transaction(driver: TopicDriver[MeteredStore]) -> None:
    driver.partition.transact("t", True, [SendOperation(TOPIC, False, [[event("m")] * 50])], driver.now_ms)
    driver.partition.discharge("t", True, driver.now_ms)
    driver.partition.commit()
    driver.wait(1)
    assert driver.held(FIRST << 3) == [50, 0, 0, 0]


def publishing_what_is_due(driver: TopicDriver[MeteredStore]) -> None:
    driver.publish(*[event("m", scheduled_ms=START_MS + 10)] * 50)
    driver.wait(20)
    assert driver.held(FIRST << 3) == [50, 0, 0, 0]


def publishing_what_is_forwarded(driver: TopicDriver[MeteredStore]) -> None:
    driver.send(*[event("m")] * 50)
    driver.change(forward_to="news")
    driver.pump()
    driver.wait(1)
    assert driver.held(FIRST << 3) == [50, 0, 0, 0]


def listing_sessions_changed_since(driver: SessionDriver[MeteredStore]) -> None:
    assert driver.request("get-message-sessions", START_MS + 1, 0, 100) == []


def listing_the_last_sessions(driver: SessionDriver[MeteredStore]) -> None:
    assert len(driver.request("get-message-sessions", None, MANY - 10, 100)) == 10


def listing_a_page_of_sessions(driver: SessionDriver[MeteredStore]) -> None:
    skipped, page = driver.request("page-message-sessions", None, MANY - 10, 100)
    assert (skipped, len(page)) == (MANY - 10, 10)


def listing_sessions_behind_one(driver: SessionDriver[MeteredStore]) -> None:
    assert driver.request("message-sessions-behind", START_MS + 1, "s0", 100) == []


def browsing_a_session_after_a_start(driver: SessionDriver[MeteredStore]) -> None:
    assert len(driver.request("peek-session", "s7", 0, 10, 1 << 20)) == ENTRY


def accepting_a_session_after_a_start(driver: SessionDriver[MeteredStore]) -> None:
    assert driver.accept() == "s0"


def sending_to_a_session_after_a_start(driver: SessionDriver[MeteredStore]) -> None:
    driver.put("s7", "more")


def sending_many(driver: Driver[MeteredStore]) -> None:
    through_a_worker(driver, [Op.SEND, PARTITION, 1, MAIN, [message(ttl_ms=10**6) for _ in range(MANY)]])
    assert driver.held() == [2 * MANY, 0, 0, 0]


def sending_a_run(driver: Driver[MeteredStore]) -> None:
    through_a_worker(driver, [Op.SEND_RUN, PARTITION, 1, MAIN, MANY, run([message() for _ in range(MANY)])])
    assert driver.held() == [2 * MANY, 0, 0, 0]


def sending_the_largest_batch(driver: SessionDriver[MeteredStore]) -> None:
    messages = [message(session_id=f"s{number}", ttl_ms=10**6) for number in range(MAX_BATCH_MESSAGES)]
    through_a_worker(driver, [Op.SEND_BATCH, PARTITION, 1, MAIN, messages])
    assert driver.held() == [MAX_BATCH_MESSAGES, 0, 0, 0]


def handing_out(driver: Driver[MeteredStore]) -> None:
    driver.open("r")
    driver.grant(MANY)
    assert len(driver.pump()["r"]) == MANY


def handing_out_and_deleting(driver: Driver[MeteredStore]) -> None:
    driver.open("r", receive_and_delete=True)
    driver.partition.drain("r", MANY)
    assert len(driver.pump()["r"]) == MANY


def watching(driver: Driver[MeteredStore]) -> None:
    for receiver in ("a", "b"):
        driver.open(receiver)
        driver.partition.watch(receiver)
    assert driver.partition.pump(driver.now_ms).available == ["a", "b"]
    driver.partition.passes("a")
    driver.grant(MANY, "b")
    assert len(driver.pump()["b"]) == MANY


def settling(outcome: Outcome) -> Callable[[WithTokens], None]:
    def settle(driver: WithTokens) -> None:
        tokens = list(driver.tokens)
        through_a_worker(driver, [Op.SETTLE, PARTITION, MAIN, outcome, [0, 10, 0, len(tokens) - 10], tokens, None])
        assert driver.held()[3] == 0

    settle.__name__ = f"settling_{outcome.name.lower()}"
    return settle


def settling_with_large_properties(driver: WithTokens) -> None:
    properties = {"p": "x" * 390}
    commands = [[Op.SETTLE, PARTITION, MAIN, Outcome.ABANDONED, [0, 1], [token], properties] for token in driver.tokens]
    through_a_worker(driver, *commands)
    driver.grant(MANY)
    tokens = [delivery.token for delivery in driver.pump()["r"]]
    through_a_worker(driver, [Op.SETTLE, PARTITION, MAIN, Outcome.DEFERRED, [0, MANY], tokens, None])
    assert driver.held() == [0, MANY, 0, 0]


def restoring(driver: Driver[MeteredStore]) -> None:
    driver.open("d", receive_and_delete=True)
    driver.grant(MANY, "d")
    received = driver.pump()["d"]
    driver.store.forget()
    entries = [value for each in received for value in (each.token, each.number, 0, each.record, None)]
    through_a_worker(driver, [Op.RESTORE, PARTITION, MAIN, entries])
    assert driver.held() == [MANY, 0, 0, 0]


def taking_back_what_was_not_sent(driver: Driver[MeteredStore]) -> None:
    driver.close("r", unsent_from=bytes(16))
    assert driver.held() == [MANY, 0, 0, 0]


def taking_over(driver: WithRecord) -> None:
    source = driver.add_queue(2)
    driver.store.forget()
    entries = [value for number in range(1, NAMED + 1) for value in (number, driver.record, {})]
    through_a_worker(driver, [Op.FORWARD, PARTITION, bytes(8), PARTITION, source, 1, entries])
    assert driver.held() == [MANY + NAMED, 0, 0, 0]


def renewing(driver: WithTokens) -> None:
    assert len(driver.request("renew-locks", driver.tokens[:NAMED])) == NAMED


def settling_by_request(driver: WithTokens) -> None:
    tokens = driver.tokens
    for at, outcome in enumerate(Outcome):
        driver.request("settle", tokens[at * NAMED : (at + 1) * NAMED], outcome, {"p": "x" * 300})


def receiving_deferred(driver: Driver[MeteredStore]) -> None:
    _, items = driver.request("receive-deferred", list(range(1, NAMED + 1)), False)
    assert len(deliveries(items)) == NAMED
    driver.request("receive-deferred", list(range(NAMED + 1, 2 * NAMED + 1)), True)


def receiving_deferred_of_a_session(driver: SessionDriver[MeteredStore]) -> None:
    driver.accept("r", "s")
    _, items = driver.of_session("receive-session-deferred", "s", list(range(1, NAMED + 1)), True)
    assert len(deliveries(items)) == NAMED


def scheduling(driver: Driver[MeteredStore]) -> None:
    messages = [message(bytes(BODY_BYTES), scheduled_ms=START_MS + 10**6, ttl_ms=10) for _ in range(NAMED)]
    numbers = driver.request("schedule", messages)
    driver.store.forget()
    driver.request("cancel-scheduled", numbers)


def changing_rules(driver: TopicDriver[MeteredStore]) -> None:
    driver.request("add-rule", rule("more", "p = 1"), queue=FIRST << 3)
    assert len(driver.request("enumerate-rules", 0, 10, queue=FIRST << 3)) == 2
    driver.request("replace-rule", rule("more", "p = 2"), queue=FIRST << 3)
    found = driver.request("get-rule", "MORE", queue=FIRST << 3)
    assert found["filter"]["expression"] == "p = 2"
    driver.request("remove-rule", "more", queue=FIRST << 3)


def using_a_session(driver: SessionDriver[MeteredStore]) -> None:
    driver.accept("r", "s1")
    driver.of_session("set-session-state", "s1", bytes(100_000))
    driver.store.turn_ended()
    assert len(driver.of_session("get-session-state", "s1")) == 100_000
    driver.of_session("renew-session-lock", "s1")


def counting(driver: TopicDriver[MeteredStore]) -> None:
    driver.publish("m")
    driver.store.forget()
    counts = driver.request("counts", queue=0)
    assert len(counts) >= SUBSCRIPTIONS
    ids = [queue_id >> 3 for queue_id in counts]
    assert driver.request("accessed", *ids, queue=0)
    assert driver.request("filter-counts", *ids, queue=0)
    driver.request("probe", queue=0)


def measuring(driver: Driver[MeteredStore]) -> None:
    assert driver.partition.gauges()["quarantined"] == MANY


def settling_in_a_transaction(driver: WithTokens) -> None:
    tokens = driver.tokens
    for transaction, commit in ((b"a", True), (b"b", False)):
        taken, tokens = tokens[: NAMED // 2], tokens[NAMED // 2 :]
        by_request, tokens = tokens[: NAMED // 2], tokens[NAMED // 2 :]
        operation = SettleOperation(MAIN, True, taken, Outcome.DEAD_LETTERED)
        arguments = [transaction, False, "settle", [by_request, Outcome.ABANDONED, {"p": "x" * 300}]]
        through_a_worker(
            driver,
            [Op.REQUEST, PARTITION, 1, "transact", 0, [transaction, True, pack_operations([operation])]],
            [Op.REQUEST, PARTITION, 2, "transact-request", MAIN, arguments],
            [Op.REQUEST, PARTITION, 3, "discharge", 0, [transaction, commit]],
        )
    assert driver.held(DEAD) == [NAMED // 2, 0, 0, 0]


LARGE_BYTES = 10_000  # so much in each of the 100 messages of a transaction
LARGE_BODIES = [number.to_bytes(2, "big") * (LARGE_BYTES // 2) for number in range(100)]


def send_large_messages(driver: Driver[MeteredStore], queue: int, commit: bool, **extra: Any) -> None:
    """In one transaction, one by one as they come."""
    sends = [SendOperation(queue, False, [[message(body, **extra)]]) for body in LARGE_BODIES]
    commands: list[Any] = [
        [Op.REQUEST, PARTITION, 1, "transact", 0, [b"t", True, pack_operations([send])]] for send in sends
    ]
    through_a_worker(driver, *commands, [Op.REQUEST, PARTITION, 2, "discharge", 0, [b"t", commit]])


def committing_large_messages(driver: Driver[MeteredStore]) -> None:
    send_large_messages(driver, MAIN, True)
    assert driver.held() == [100, 0, 0, 0]
    driver.store.turn_ended()
    driver.store.records, driver.store.bytes = -(10**9), -(10**9)  # what follows is the test's own reading
    assert [delivery.body for delivery in driver.receive(100)] == LARGE_BODIES


def committing_large_scheduled_messages(driver: Driver[MeteredStore]) -> None:
    send_large_messages(driver, MAIN, True, scheduled_ms=START_MS + 10**6)
    assert driver.held() == [0, 0, 100, 0]


def rolling_back_large_messages(driver: Driver[MeteredStore]) -> None:
    send_large_messages(driver, MAIN, False)
    driver.wait(0)
    assert driver.store.scan(Table.MESSAGES, b"", b"\xff" * 9, 1) == []


def publishing_large_messages_in_a_transaction(driver: TopicDriver[MeteredStore]) -> None:
    send_large_messages(driver, TOPIC, True)
    driver.wait(1)
    assert driver.held(FIRST << 3) == [100, 0, 0, 0]


def locked(ttl_ms: int | None = None) -> Driver[MeteredStore]:
    driver = filled(ttl_ms=ttl_ms)
    driver.open("r")
    driver.grant(MANY)
    assert len(driver.pump()["r"]) == MANY
    return driver


def deferred_and_expiring() -> Driver[MeteredStore]:
    driver = filled(ttl_ms=LOCK_MS // 2)
    driver.change(dead_lettering_on_message_expiration=True)
    driver.settle(Outcome.DEFERRED, *driver.receive(MANY))
    return driver


def one_session_locked(ttl_ms: int | None = None) -> SessionWithTokens:
    driver = SessionWithTokens(MeteredStore(), SETTINGS)
    for _ in range(0, MANY, 100):
        driver.put("s", *["m"] * 100, ttl_ms=ttl_ms)
    driver.accept("r", "s")
    driver.tokens = [delivery.token for delivery in driver.receive(MANY)]
    assert len(driver.tokens) == MANY
    return driver


def with_states() -> SessionDriver[MeteredStore]:
    driver = with_sessions()
    for number in range(MANY):
        driver.accept("r", f"s{number}")
        driver.request("set-session-state", "r", f"s{number}", b"state")
        driver.close("r")
    return driver


def restarted() -> SessionDriver[MeteredStore]:
    driver = with_sessions()
    driver.restart()
    return driver


def with_tokens() -> WithTokens:
    driver = WithTokens(MeteredStore(), SETTINGS)
    fill(driver)
    driver.change(lock_duration_ms=300_000)
    driver.open("r")
    driver.grant(MANY)
    driver.tokens = [delivery.token for delivery in driver.pump()["r"]]
    return driver


def with_a_record() -> WithRecord:
    driver = WithRecord(MeteredStore(), SETTINGS)
    fill(driver)
    [delivery] = driver.peek(count=1)
    driver.record = delivery.record
    return driver


def deferred() -> Driver[MeteredStore]:
    driver = filled()
    driver.settle(Outcome.DEFERRED, *driver.receive(MANY))
    return driver


def deferred_in_a_session() -> SessionDriver[MeteredStore]:
    driver = SessionDriver(MeteredStore(), SETTINGS)
    driver.put("s", *["m" * BODY_BYTES] * NAMED)
    driver.accept("r", "s")
    driver.settle(Outcome.DEFERRED, *driver.receive(NAMED))
    driver.close("r")
    return driver


def of_default_settings() -> SessionDriver[MeteredStore]:
    return SessionDriver(MeteredStore(), PartitionSettings())


def with_ids() -> Driver[MeteredStore]:
    return Driver(
        MeteredStore(),
        SETTINGS,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window_ms=DUPLICATES_MS,
    )


def damaged() -> Driver[MeteredStore]:
    driver = Driver(MeteredStore(), SETTINGS)
    for number in range(MANY):
        driver.store.put(Table.QUARANTINE, quarantine_key(Table.MESSAGES, number.to_bytes(8, "big")), bytes(BODY_BYTES))
    driver.store.commit()
    return driver


# What the rows are of: commands, names of requests, timers. Each row is the most that one of these may be.
ROWS: list[tuple[tuple[Op | Due | str, ...], Callable[[], Driver[MeteredStore]], Callable[[Any], None]]] = [
    (("delete-batch",), filled, deleting_what_is_not_there),
    (("delete-batch",), filled, deleting_a_batch),
    (("purge",), filled, purging),
    (("purge",), locked, purging_what_is_locked),
    (("peek",), filled, browsing),
    (("browse",), filled, browsing_by_a_link),
    ((Op.AWAIT,), filled, waiting_for_more),
    ((Op.OPEN_SELECTIVE, Op.DRAIN), filled, selecting),
    ((Due.EXPIRY,), lambda: filled(ttl_ms=1000), expiring),
    ((Due.EXPIRY,), deferred_and_expiring, expiring_what_is_deferred),
    ((Due.SCHEDULED,), lambda: filled(scheduled_ms=START_MS + 1000), activating),
    ((Due.LOCKS,), locked, ending_locks),
    ((Op.CLOSE_RECEIVER,), locked, losing_the_connection),
    ((Op.CLOSE_RECEIVER,), locked, taking_back_what_was_not_sent),
    ((Op.CLOSE_RECEIVER,), lambda: locked(ttl_ms=LOCK_MS // 2), taking_back_what_has_expired),
    ((Op.CLOSE_RECEIVER,), one_session_locked, losing_the_connection_of_a_session),
    ((Op.CLOSE_RECEIVER,), one_session_locked, leaving_a_session_with_what_was_not_sent),
    (
        (Op.CLOSE_RECEIVER,),
        lambda: one_session_locked(ttl_ms=LOCK_MS // 2),
        leaving_a_session_whose_messages_have_expired,
    ),
    ((Due.LOCKS,), one_session_locked, ending_the_lock_of_a_session),
    ((Op.OPEN_RECEIVER,), one_session_locked, accepting_a_session_whose_lock_ran_out),
    (("change-catalog", Op.CHANGED, Op.FOLLOWED), wide, changing_entities),
    ((Op.REMOVE, Op.DELETED, Due.DELETION, Due.IDLE), filled, deleting_the_entity),
    ((Op.UNUSED, Op.ASK, Op.ANSWER, Op.KEEP, Due.IDLE), fragment_with_interval, agreeing_to_the_deletion),
    ((Op.SEND_BATCH,), wide, publishing_a_batch),
    (("transact", "discharge"), wide, publishing_in_a_transaction),
    ((Due.PUBLISHING,), wide, publishing_what_is_due),
    ((Op.FORWARD,), wide, publishing_what_is_forwarded),
    (("get-message-sessions",), with_states, listing_sessions_changed_since),
    (("get-message-sessions",), with_sessions, listing_the_last_sessions),
    (("page-message-sessions",), with_sessions, listing_a_page_of_sessions),
    (("message-sessions-behind",), with_states, listing_sessions_behind_one),
    (("peek-session",), restarted, browsing_a_session_after_a_start),
    ((Op.OPEN_RECEIVER, Due.SESSION_WAITS), restarted, accepting_a_session_after_a_start),
    ((Op.SEND,), restarted, sending_to_a_session_after_a_start),
    ((Op.SEND,), filled, sending_many),
    ((Op.SEND_RUN,), filled, sending_a_run),
    ((Op.SEND_BATCH,), of_default_settings, sending_the_largest_batch),
    ((Op.GRANT,), filled, handing_out),
    ((Op.DRAIN,), filled, handing_out_and_deleting),
    ((Op.WATCH, Op.PASS), filled, watching),
    *(((Op.SETTLE,), with_tokens, settling(outcome)) for outcome in Outcome),
    ((Op.SETTLE,), with_tokens, settling_with_large_properties),
    ((Op.RESTORE,), filled, restoring),
    ((Op.FORWARD,), with_a_record, taking_over),
    ((Op.REQUEST, "renew-locks"), with_tokens, renewing),
    (("settle",), with_tokens, settling_by_request),
    (("receive-deferred",), deferred, receiving_deferred),
    (("receive-session-deferred",), deferred_in_a_session, receiving_deferred_of_a_session),
    (("schedule", "cancel-scheduled"), filled, scheduling),
    (("add-rule", "replace-rule", "get-rule", "remove-rule", "enumerate-rules"), wide, changing_rules),
    (("set-session-state", "get-session-state", "renew-session-lock"), with_sessions, using_a_session),
    (("counts", "accessed", "filter-counts", "probe"), wide, counting),
    (("metrics",), damaged, measuring),
    ((Due.DUPLICATES,), with_ids, remembering_ids),
    ((Due.TRANSACTIONS,), with_tokens, timing_out),
    (("transact", "transact-request", "discharge"), with_tokens, settling_in_a_transaction),
    (("transact", "discharge"), empty, committing_large_messages),
    (("transact", "discharge"), empty, committing_large_scheduled_messages),
    (("transact", "discharge"), empty, rolling_back_large_messages),
    (("transact", "discharge"), wide, publishing_large_messages_in_a_transaction),
]


@pytest.mark.parametrize(("operations", "given", "ask"), ROWS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_turn_reads_and_writes_little(
    operations: Any, given: Callable[[], Driver[MeteredStore]], ask: Callable[[Any], None]
):
    driver = given()
    store = driver.store
    store.forget()
    ask(driver)
    store.turn_ended()
    assert store.most_records <= records_max(driver.settings)
    assert store.most_bytes <= bytes_max(driver.settings)


def test_forwarding_to_another_partition_is_done_in_steps():
    """FORWARD there and FORWARDED back, and the timer of the queue that forwards."""
    stores = {number: MeteredStore() for number in range(2)}
    net = Partitions(2, SETTINGS, stores)
    net.queue("there", 1)
    source = net.queue("here", 0)
    for _ in range(0, MANY, 100):
        net.send(source, *[message(bytes(BODY_BYTES)) for _ in range(100)])
    for store in stores.values():
        store.forget()
    net.queue("here", 0, forward_to="there")
    net.run()
    assert net.counts(net.entities["there"].queue)[0] == MANY
    for store in stores.values():
        assert store.most_records <= records_max(SETTINGS)
        assert store.most_bytes <= bytes_max(SETTINGS)


def test_a_move_to_another_partition_is_done_in_steps():
    """The requests of a move, and what is deleted afterwards."""
    stores = {number: MeteredStore() for number in range(2)}
    net = Partitions(2, SETTINGS, stores)
    queue = net.queue("moved", 0)
    for _ in range(0, MANY, 100):
        net.send(queue, *[message(bytes(BODY_BYTES), scheduled_ms=START_MS + 1000 * (at % 2)) for at in range(100)])
    for store in stores.values():
        store.forget()
    net.begin_move("moved", 1)
    while not net.rows("moved", 1):
        pass
    net.freeze("moved")
    net.finish_move("moved", 1)
    net.run()
    assert net.counts(queue)[0] == MANY
    assert stores[0].record_count(Table.MESSAGES) == 0
    for store in stores.values():
        assert store.most_records <= records_max(SETTINGS)
        assert store.most_bytes <= bytes_max(SETTINGS)


# What a worker only says, and nobody does work for in a partition.
ANSWERS = {Op.HELLO, Op.SENT, Op.REFUSED, Op.OPENED, Op.CLOSED, Op.DRAINED, Op.SETTLED, Op.UNSETTLED, Op.DELIVER}
ANSWERS |= {Op.REPLY, Op.FAILED, Op.CATALOG, Op.AVAILABLE, Op.DELIVER_RUN, Op.DELIVER_RUNS, Op.TAKES_RUNS}
# Once for each connection between two workers: the whole catalog is compared.
ANSWERS |= {Op.JOIN, Op.RULES}
# No partition does anything for them; the ids of all stores are told and compared once for each connection.
ANSWERS |= {Op.BEAT, Op.STORES, Op.REPLACED}
# Counted by tests of their own, above; marks are a few numbers for each gateway (`test_stored_marks`).
ELSEWHERE = (
    Op.FORWARDED,
    Op.MARK,
    "stored",
    Due.FORWARDING,
    "arrive",
    "depart",
    "rows",
    "store-rows",
    "hold",
    "freeze",
)


def test_each_operation_of_the_protocol_has_a_row():
    counted = [*ELSEWHERE, *(operation for operations, _, _ in ROWS for operation in operations)]
    assert {each for each in counted if isinstance(each, str)} == set(requests.RECORDS.classes)
    assert {each for each in counted if isinstance(each, Op)} == set(Op) - ANSWERS
    assert {each for each in counted if isinstance(each, Due)} == set(Due)


TOO_MANY = PartitionSettings().request_items + 1


@pytest.mark.parametrize(
    ("name", "field", "args"),
    [
        ("renew-locks", "lock-tokens", [[bytes(16)] * TOO_MANY]),
        ("settle", "lock-tokens", [[number.to_bytes(16, "big") for number in range(TOO_MANY)], Outcome.ACCEPTED, None]),
        ("schedule", "messages", [[message(scheduled_ms=START_MS + 1)] * TOO_MANY]),
        ("cancel-scheduled", "sequence-numbers", [list(range(TOO_MANY))]),
        ("receive-deferred", "sequence-numbers", [list(range(TOO_MANY)), False]),
        ("receive-session-deferred", "sequence-numbers", [1, "s", list(range(TOO_MANY)), False]),
    ],
)
def test_a_request_that_names_too_many_is_refused(name: str, field: str, args: list[Any]):
    driver = SessionDriver() if "session" in name else Driver()
    with pytest.raises(OutOfRange, match=f"'{field}' has {TOO_MANY} items; a request may have {TOO_MANY - 1}"):
        driver.request(name, *args)
    assert driver.held() == [0, 0, 0, 0]


def test_scheduled_messages_cancelled_at_once_have_bounded_bytes():
    driver = Driver(settings=PartitionSettings(request_bytes=2500))
    driver.send(*[message(bytes(2000), scheduled_ms=START_MS + 1000) for _ in range(2)])
    with pytest.raises(OutOfRange, match="'sequence-numbers'"):
        driver.request("cancel-scheduled", [1, 2])
    assert driver.held() == [0, 0, 2, 0]
    driver.request("cancel-scheduled", [1])


def test_settlements_by_request_write_bounded_bytes():
    driver = Driver(settings=PartitionSettings(request_bytes=2500))
    driver.send("a", "b")
    tokens = [delivery.token for delivery in driver.receive(2)]
    with pytest.raises(OutOfRange, match="'lock-tokens'"):
        driver.request("settle", tokens, Outcome.ABANDONED, {"p": "x" * 2000})
    assert driver.held() == [2, 0, 0, 2]
    driver.request("settle", tokens[:1], Outcome.ABANDONED, {"p": "x" * 3000})
    driver.request("settle", tokens[1:], Outcome.ABANDONED, {"p": "x" * 2000})


def test_a_transaction_settles_so_many_messages():
    driver = Driver(settings=PartitionSettings(request_items=3, request_bytes=2500))
    driver.send(*"abcd", "e")
    tokens = [delivery.token for delivery in driver.receive(5)]
    operations = [SettleOperation(MAIN, False, tokens[:4], Outcome.ACCEPTED)]
    [errors] = driver.partition.transact("t", True, operations, driver.now_ms, "c")
    assert errors == [
        None,
        None,
        None,
        ["QuotaExceeded", "Cannot settle more than 3 messages in a single transaction."],
    ]
    with pytest.raises(QuotaExceeded):
        driver.partition.request_in(
            "t", False, MAIN, requests.Settle(tokens[4:], Outcome.ACCEPTED, None), driver.now_ms, "c"
        )
    driver.partition.discharge("t", True, driver.now_ms)
    assert driver.held() == [2, 0, 0, 2]
    large = SettleOperation(MAIN, False, tokens[3:], Outcome.ABANDONED, {"p": "x" * 2000})
    [errors] = driver.partition.transact("u", True, [large], driver.now_ms, "c")
    assert errors is not None
    assert [error and error[0] for error in errors] == [None, "QuotaExceeded"]


def test_a_command_is_cut_between_the_tokens_of_a_channel():
    tokens = [number.to_bytes(16, "big") for number in range(600)]
    rest: Any = wire.settle(1, 2, Outcome.ACCEPTED, [7, 100, 8, 300, 0, 200], tokens, None)
    parts = []
    while rest is not None:
        first, rest = wire.cut(rest)
        assert isinstance(first, wire.Settle)
        parts.append((first.channels, len(first.tokens)))
    assert parts == [([7, 100, 8, 156], 256), ([8, 144, 0, 112], 256), ([0, 88], 88)]
