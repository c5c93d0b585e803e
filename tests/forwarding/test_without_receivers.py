"""What waits, expires or cannot move on in a real broker moves by itself, where nobody receives."""

import time

import pytest

from protocol.client.connection import Connection
from protocol.client.messages import Message
from protocol.symbols import SCHEDULED_ENQUEUE_TIME
from storage.data_dir import partition_path
from storage.lmdb_store import LmdbStore
from storage.maintenance import verify
from storage.records import decode_document, encode_document
from storage.store import Table
from tests.brokers import Broker
from tests.clients import received, run, send
from tests.patience import PATIENCE_S

TOPIC = """
[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "later"
  forward_to = "work"

  [[topics.subscriptions.rules]]
  name = "later"
  filter = { kind = "sql", expression = "sys.Label LIKE 'wait' + number" }
  action = { expression = "ACTION", parameters = { "@delay" = { type = "duration", value = "PT1S" } } }
"""
ACTION = (
    "SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + @delay; SET sys.TimeToLive = '00:10:00'; "
    "SET sys.CorrelationId = 'n-' + number"
)
CONFIG = f"""
partitions = 3

[forwarding]
failures = "dead_letter"

[[queues]]
name = "work"

[[queues]]
name = "retry"
default_message_time_to_live_ms = 1000
dead_lettering_on_message_expiration = true
forward_dead_lettered_messages_to = "work"

[[queues]]
name = "to-closed"
forward_to = "closed"

[[queues]]
name = "closed"
status = "SendDisabled"
{TOPIC.replace("ACTION", ACTION)}

  [[topics.subscriptions]]
  name = "far"

  [[topics.subscriptions.rules]]
  name = "far"
  action = {{ expression = "SET sys.ScheduledEnqueueTimeUtc = '2999-12-31T00:00:00Z'" }}
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("without-receivers"), CONFIG) as broker:
        yield broker
    assert verify(broker.data_dir).ok


def test_a_retry_queue_gives_back_what_has_waited(broker):
    async def test(connection: Connection) -> None:
        began = time.monotonic()
        await send(connection, "retry", Message.of(b"again"))
        [found] = await received(connection, "work", 1)
        assert time.monotonic() - began >= 1
        assert found.application_properties["DeadLetterReason"] == "TTLExpiredException"

    run(broker, test)


def test_a_rules_action_delays_its_copy_and_converts_what_it_sets(broker):
    async def test(connection: Connection) -> None:
        began, began_ms = time.monotonic(), int(time.time() * 1000)
        await send(connection, "news", Message.of(b"m", subject="wait7", application_properties={"number": 7}))
        [found] = await received(connection, "work", 1)
        assert time.monotonic() - began >= 1
        assert found.correlation_id == "n-7"
        assert 590_000 < (found.ttl_ms or 0) <= 600_000
        assert began_ms + 1000 <= found.annotations[SCHEDULED_ENQUEUE_TIME] <= time.time() * 1000
        counts = (await connection.counts())["news/Subscriptions/far"]
        assert (counts.active, counts.scheduled) == (0, 1)

    run(broker, test)


def test_what_cannot_move_on_is_dead_lettered_at_its_source(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "to-closed", Message.of(b"m"))
        [found] = await received(connection, "to-closed/$deadletterqueue", 1)
        assert found.application_properties["DeadLetterReason"] == "EntityDisabled"

    run(broker, test)


def test_a_stored_rule_that_fails_on_every_message_goes_on_with_a_warning(tmp_path):
    queue = '[[queues]]\nname = "work"\n'
    with Broker(tmp_path, queue + TOPIC.replace("ACTION", "SET a = 1")) as broker:
        broker.stop()
        path = partition_path(broker.data_dir, 0)
        with LmdbStore(path, partition_id=0, map_size_bytes=1 << 30, create=False) as store:
            [(key, value)] = store.scan(Table.RULES, b"", b"\xff" * 64, 10)
            document = decode_document(value)
            document["action"]["expression"] = "SET sys.TimeToLive = 'soon'"
            store.put(Table.RULES, key, encode_document(document))
            store.commit()
        declared = broker.config_file.read_text()
        broker.config_file.write_text(declared.replace("SET a = 1", "SET sys.TimeToLive = 'soon'"))
        broker.start()
        assert "a declared entity is kept as it is stored" in broker.log()

        async def test(connection: Connection) -> None:
            await send(connection, "news", Message.of(b"m", subject="wait7", application_properties={"number": 7}))
            [found] = await received(connection, "news/Subscriptions/later/$deadletterqueue", 1)
            assert found.application_properties["DeadLetterReason"] == "RuleActionException"

        run(broker, test)
        deadline = time.monotonic() + PATIENCE_S
        while "a stored rule fails on every message" not in broker.log():
            assert time.monotonic() < deadline
            time.sleep(0.1)
