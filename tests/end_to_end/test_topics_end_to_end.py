"""Topics, subscriptions and rules of a real broker, as a client meets them."""

import time
from typing import Any
from uuid import UUID

import pytest

from protocol.client.connection import Connection
from protocol.client.errors import AuthenticationFailed, LinkDetached, RequestFailed
from protocol.client.messages import Message
from protocol.client.requests import Management
from protocol.codec import Described, Int, Long, Symbol, Timestamp, UInt
from tests.brokers import Broker
from tests.clients import received, run
from tests.end_to_end.health import assert_unharmed, metrics, process_ids
from tests.patience import PATIENCE_S

CONFIG = """
partitions = 3

[[queues]]
name = "witness"

[[topics]]
name = "Prices"

  [[topics.authorization_rules]]
  key_name = "prices-only"
  primary_key = "key-of-prices"
  rights = ["Send", "Listen"]

  [[topics.subscriptions]]
  name = "Audit"
  max_delivery_count = 1

  [[topics.subscriptions]]
  name = "large"

  [[topics.subscriptions.rules]]
  name = "large"
  filter = { kind = "sql", expression = "amount > @limit", parameters = { "@limit" = 1000 } }
  action = { expression = "SET priority = 'high'; SET sys.Label = 'large'" }

  [[topics.subscriptions]]
  name = "green"

  [[topics.subscriptions.rules]]
  name = "green"
  filter = { kind = "correlation", label = "green", properties = { color = "green" } }

  [[topics.subscriptions]]
  name = "none"
  rules = []

  [[topics.subscriptions]]
  name = "disabled"
  status = "ReceiveDisabled"

[[topics]]
name = "rules"

  [[topics.subscriptions]]
  name = "s"

[[topics]]
name = "closed"
status = "SendDisabled"

  [[topics.subscriptions]]
  name = "s"
"""

RULE = 1335734829060
EMPTY_ACTION = 1335734829061
SQL_ACTION = 1335734829062
SQL_FILTER = 83483426822
TRUE_FILTER = 83483426823
CORRELATION_FILTER = 83483426825


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("topics"), CONFIG) as broker:
        yield broker


@pytest.fixture
def broker(module_broker):
    before = process_ids(module_broker)
    yield module_broker
    assert_unharmed(module_broker, before)


async def send(connection: Connection, topic: str, *messages: Message) -> None:
    async with await connection.sender(topic) as sender:
        for message in messages:
            await sender.send(message.encode())


def test_a_message_goes_to_the_subscriptions_whose_rules_select_it(broker):
    async def test(connection: Connection) -> None:
        await send(
            connection,
            "prices",
            Message.of(b"1", application_properties={"amount": Int(5)}),
            Message.of(b"2", subject="green", application_properties={"amount": 5000.0, "Color": "green"}),
        )
        audit = await received(connection, "Prices/Subscriptions/Audit", 2)
        assert [(each.content(), each.sequence_number) for each in audit] == [(b"1", 1), (b"2", 2)]
        [large] = await received(connection, "prices/subscriptions/LARGE", 1)
        assert (large.content(), large.subject, large.sequence_number) == (b"2", "large", 1)
        assert large.application_properties["priority"] == "high"
        assert large.application_properties["RuleName"] == "large"
        [green] = await received(connection, "/prices/Subscriptions/green", 1)
        assert (green.content(), green.subject) == (b"2", "green")
        assert green.application_properties == {"amount": 5000.0, "Color": "green"}
        assert await received(connection, "prices/subscriptions/none", 0) == []

    run(broker, test)


@pytest.mark.parametrize(
    "address",
    [
        "Prices/Subscriptions/Audit",
        "prices/subscriptions/audit",
        "/prices/subscriptions/audit",
        "/prices/Subscriptions/%61udit",
        "amqps://localhost:1234/prices/subscriptions/audit",
        "sb://somewhere/prices/subscriptions/audit/",
    ],
)
def test_a_subscription_has_the_spellings_of_any_address(broker, address):
    async def test(connection: Connection) -> None:
        await send(connection, "PRICES", Message.of(b"x"))
        await received(connection, address, 1)

    run(broker, test)


@pytest.mark.parametrize("suffix", ["$DeadLetterQueue", "$deadletterqueue"])
def test_a_subscription_has_a_dead_letter_queue(broker, suffix):
    async def test(connection: Connection) -> None:
        await send(connection, "prices", Message.of(b"dead"))
        async with await connection.receiver("prices/subscriptions/audit") as receiver:
            message = await receiver.receive(PATIENCE_S)
            assert message is not None
            await receiver.modify(message)
        [dead] = await received(connection, f"prices/Subscriptions/Audit/{suffix}", 1)
        assert dead.content() == b"dead"
        assert dead.application_properties["DeadLetterReason"] == "MaxDeliveryCountExceeded"

    run(broker, test)


@pytest.mark.parametrize(
    ("kind", "address", "condition", "text"),
    [
        ("sender", "prices/subscriptions/audit", "amqp:not-allowed", "A subscription cannot be sent to: send to the"),
        ("sender", "prices/subscriptions/audit/$deadletterqueue", "amqp:not-allowed", "A subscription cannot be sent"),
        ("receiver", "prices/$deadletterqueue", "amqp:not-found", "The messaging entity '"),
        (
            "receiver",
            "prices/subscriptions/other",
            "amqp:not-found",
            "The messaging entity 'sb://localhost/prices/subscriptions/other' could not be found.",
        ),
        ("receiver", "witness/subscriptions/audit", "amqp:not-found", "could not be found"),
        ("receiver", "other/subscriptions/audit", "amqp:not-found", "could not be found"),
        ("receiver", "prices/subscriptions/disabled", "com.microsoft:entity-disabled", "its status is ReceiveDisabled"),
        ("sender", "closed", "com.microsoft:entity-disabled", "its status is SendDisabled"),
    ],
)
def test_attaches_that_cannot_be_served_are_refused(broker, kind, address, condition, text):
    async def test(connection: Connection) -> LinkDetached:
        attach = connection.sender if kind == "sender" else connection.receiver
        with pytest.raises(LinkDetached) as raised:
            await attach(address)
        return raised.value

    error = run(broker, test)
    assert error.condition == condition
    assert text in error.description


def test_an_error_says_what_kind_of_entity_it_is_about(broker):
    async def test(connection: Connection) -> str:
        with pytest.raises(LinkDetached) as raised:
            await connection.receiver("prices/subscriptions/disabled")
        return raised.value.description

    assert "SystemTracker:peeklock:Subscription:prices/Subscriptions/disabled" in run(broker, test)


def test_scheduling_waits_at_the_topic_and_can_be_cancelled_there(broker):
    async def test(connection: Connection) -> None:
        node = await connection.management("rules")
        later = {"x-opt-scheduled-enqueue-time": Timestamp(int(time.time() * 1000) + 3_600_000)}
        soon = {"x-opt-scheduled-enqueue-time": Timestamp(int(time.time() * 1000) + 300)}
        first, _ = await node.schedule(
            [Message.of(b"never", annotations=later), Message.of(b"soon", annotations=dict(soon))]
        )
        await node.cancel_scheduled([first])
        with pytest.raises(RequestFailed) as raised:
            await node.cancel_scheduled([first])
        assert (raised.value.status, raised.value.condition) == (404, "com.microsoft:message-not-found")
        [message] = await received(connection, "rules/subscriptions/s", 1)
        assert message.content() == b"soon"

    run(broker, test)


DEAD_LETTER_QUEUE = "prices/subscriptions/audit/$deadletterqueue"
ENUMERATE = {"skip": Int(0), "top": Int(1)}


@pytest.mark.parametrize(
    ("address", "operation", "body"),
    [
        ("prices", "receive-by-sequence-number", {"sequence-numbers": [Long(1)], "receiver-settle-mode": UInt(1)}),
        ("prices", "enumerate-rules", ENUMERATE),
        ("witness", "enumerate-rules", ENUMERATE),
        (DEAD_LETTER_QUEUE, "enumerate-rules", ENUMERATE),
        ("prices", "remove-rule", {"rule-name": "x"}),
        ("witness", "remove-rule", {"rule-name": "x"}),
        ("witness", "add-rule", {"rule-name": "x", "rule-description": {}}),
    ],
)
def test_operations_that_an_entity_does_not_offer_are_not_allowed(broker, address, operation, body):
    error = failure(broker, address, operation, body)
    assert (error.status, error.condition) == (400, "amqp:not-allowed")


def failure(broker: Broker, address: str, operation: str, body: dict[str, Any]) -> RequestFailed:
    async def test(connection: Connection) -> RequestFailed:
        node = await connection.management(address)
        with pytest.raises(RequestFailed) as raised:
            await node.request(f"com.microsoft:{operation}", body)
        return raised.value

    error = run(broker, test)
    assert isinstance(error, RequestFailed)
    return error


async def rules_of(node: Management) -> dict[str, list[Any]]:
    """The described lists by name."""
    answer = await node.request("com.microsoft:enumerate-rules", {"skip": Int(0), "top": Int(100)})
    found = {}
    for item in answer.get("rules", []):
        described = item["rule-description"]
        assert isinstance(described, Described)
        assert described.descriptor == RULE
        found[described.value[2]] = described.value
    return found


async def add(node: Management, name: str, **description: Any) -> None:
    body = {"rule-name": name, "rule-description": {key.replace("_", "-"): value for key, value in description.items()}}
    assert await node.request("com.microsoft:add-rule", body) == {}


def test_rules_are_added_listed_and_removed(broker):
    async def test(connection: Connection) -> None:
        node = await connection.management("rules/Subscriptions/s")
        described = (await rules_of(node))["$Default"]
        assert described[0] == Described(TRUE_FILTER, [])
        assert described[1] == Described(EMPTY_ACTION, [])
        assert abs(described[3] / 1000 - time.time()) < 3600
        assert isinstance(described[3], Timestamp)

        await node.request("com.microsoft:remove-rule", {"rule-name": "$default"})
        answer = await node.request("com.microsoft:enumerate-rules", {"skip": Int(0), "top": Int(100)})
        assert answer == {}, "204: there is none"

        await add(node, "sql", sql_filter={"expression": "a = 1"}, sql_rule_action={"expression": "SET b = 2"})
        some_id, ticks = UUID(int=7), Described(Symbol("com.microsoft:timespan"), Long(5))
        properties = {
            "s": "x",
            "i": Int(1),
            "l": Long(2),
            "d": 0.5,
            "b": True,
            "t": Timestamp(7),
            "u": some_id,
            "p": ticks,
        }
        await add(node, "correlation", correlation_filter={"label": "x", "to": None, "properties": properties})
        await add(node, "blank", sql_filter={"expression": "1=1"}, sql_rule_action={"expression": " "})
        await add(node, "missing", sql_rule_action=None)
        rules = await rules_of(node)
        assert list(rules) == ["blank", "correlation", "missing", "sql"]
        assert rules["sql"][0] == Described(SQL_FILTER, ["a = 1", 20])
        assert rules["sql"][1] == Described(SQL_ACTION, ["SET b = 2", 20])
        fields = [None, None, None, None, "x", None, None, None]
        assert rules["correlation"][0] == Described(CORRELATION_FILTER, [*fields, properties])
        found = rules["correlation"][0].value[8]
        assert {name: type(value) for name, value in found.items()} == {
            name: type(value) for name, value in properties.items()
        }
        assert rules["blank"][:2] == [Described(SQL_FILTER, ["1=1", 20]), Described(EMPTY_ACTION, [])]
        assert rules["missing"][0] == Described(TRUE_FILTER, [])

        page = await node.request("com.microsoft:enumerate-rules", {"skip": Int(1), "top": Int(2)})
        assert [item["rule-description"].value[2] for item in page["rules"]] == ["correlation", "missing"]
        everything = await node.request("com.microsoft:enumerate-rules", {"skip": Int(0), "top": Int(2**31 - 1)})
        assert len(everything["rules"]) == 4

        for name in rules:
            await node.request("com.microsoft:remove-rule", {"rule-name": name})
        await send(connection, "rules", Message.of(b"for nobody"))
        await add(node, "$Default", sql_filter={"expression": "1=1"})
        await send(connection, "rules", Message.of(b"x"))
        [message] = await received(connection, "rules/subscriptions/s", 1)
        assert message.content() == b"x"

    run(broker, test)


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (
            {"sql-filter": {"expression": "a ="}},
            "There was an error parsing the SQL expression. [Token line=1, column=4, Token in error=end of ",
        ),
        ({"sql-filter": {"expression": "sys.Color = 1"}}, "[Token line=1, column=5, Token in error=Color"),
        ({"sql-filter": {"expression": "x" * 1025}}, "at most 1024 characters"),
        ({"sql-filter": {"expression": ""}}, "'expression' is empty"),
        ({"sql-filter": {}}, "'expression' is missing"),
        ({"sql-filter": "a = 1"}, "'sql-filter' is not a map"),
        ({"sql-rule-action": {"expression": "SET a"}}, "There was an error parsing the SQL expression. [Token line=1,"),
        (
            {"sql-rule-action": {"expression": "SET sys.TimeToLive = 'soon'"}},
            "[Token line=1, column=22, Token in error='soon",
        ),
        ({"sql-filter": {"expression": "1 / 0 = 1"}}, "division of an integer by zero"),
        ({"correlation-filter": {}}, "has no condition"),
        ({"correlation-filter": {"label": 5}}, "'label' is not a string"),
        ({"correlation-filter": {"properties": {"a": b"x"}}}, "properties.a: must be a string, int, long"),
        ({"correlation-filter": {"label": "x"}, "sql-filter": {"expression": "1=1"}}, "a rule has one filter"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_is_wrong(broker, description, text):
    error = failure(broker, "rules/subscriptions/s", "add-rule", {"rule-name": "r", "rule-description": description})
    assert (error.status, error.condition) == (400, "com.microsoft:argument-error")
    assert text in error.description


@pytest.mark.parametrize("name", ["", "x" * 51, "a/b", None])
def test_a_wrong_name_is_refused(broker, name):
    error = failure(broker, "rules/subscriptions/s", "add-rule", {"rule-name": name, "rule-description": {}})
    assert (error.status, error.condition) == (400, "com.microsoft:argument-error")


def test_a_rule_that_is_there_and_one_that_is_not_are_told(broker):
    there = {"rule-name": "$DEFAULT", "rule-description": {"sql-filter": {"expression": "1=1"}}}
    error = failure(broker, "rules/subscriptions/s", "add-rule", there)
    assert (error.status, error.condition) == (409, "com.microsoft:entity-already-exists")
    error = failure(broker, "rules/subscriptions/s", "remove-rule", {"rule-name": "other"})
    assert (error.status, error.condition) == (404, "amqp:not-found")
    assert "The messaging entity 'rules/Subscriptions/s/Rules/other' could not be found" in error.description


def test_rules_survive_a_restart_where_none_are_declared_and_declared_ones_come_back(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:

        async def change(connection: Connection) -> None:
            node = await connection.management("rules/subscriptions/s")
            await add(node, "mine", sql_filter={"expression": "a = 1"})
            await node.request("com.microsoft:remove-rule", {"rule-name": "$Default"})
            node = await connection.management("prices/subscriptions/large")
            await add(node, "mine", sql_filter={"expression": "a = 1"})
            await node.request("com.microsoft:remove-rule", {"rule-name": "large"})

        async def names(connection: Connection) -> list[list[str]]:
            paths = ("rules/subscriptions/s", "prices/subscriptions/large")
            return [list(await rules_of(await connection.management(path))) for path in paths]

        run(broker, change)
        assert run(broker, names) == [["mine"], ["mine"]]
        broker.restart()
        assert run(broker, names) == [["mine"], ["large"]]
        broker.kill()
        broker.start()
        assert run(broker, names) == [["mine"], ["large"]]


def test_a_topics_key_is_good_for_its_subscriptions_and_nothing_else(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "prices", Message.of(b"x"))
        await received(connection, "prices/subscriptions/audit", 1)
        node = await connection.management("prices/subscriptions/audit")
        assert list(await rules_of(node)) == ["$Default"], "Listen is enough"
        with pytest.raises(AuthenticationFailed) as raised:
            await connection.receiver("rules/subscriptions/s")
        assert raised.value.condition == "amqp:unauthorized-access"

    with_key = broker.connection_string_for("prices-only", "key-of-prices")
    run(broker, test, with_key)


def test_counts_and_requests_are_by_path_and_a_topic_has_no_messages(broker):
    async def test(connection: Connection) -> None:
        await send(connection, "prices", Message.of(b"counted"))
        found = metrics(broker)
        assert found["peeklock_active_messages", "prices/Subscriptions/Audit"] == 1
        assert found["peeklock_active_messages", "prices"] == 0
        assert found["peeklock_incoming_messages_total", "prices"] >= 1
        counts = await connection.counts()
        assert (counts["prices"].active, counts["prices/Subscriptions/Audit"].active) == (0, 1)
        await received(connection, "prices/subscriptions/audit", 1)

    run(broker, test)
