import json
from pathlib import Path

import pytest

from broker.namespace.entities import (
    DAY_MS,
    MINUTE_MS,
    SECOND_MS,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from broker.namespace.rule_descriptions import CorrelationFilter, RuleDescription, RuleValue, SqlAction, SqlFilter
from broker.settings.config import ConfigurationError
from broker.settings.emulator_config import (
    QUEUE_PROPERTIES,
    SUBSCRIPTION_PROPERTIES,
    TOPIC_PROPERTIES,
    without_comments,
)
from broker.settings.sources import load
from protocol.codec import Long

EVERY_PROPERTY = Path(__file__).parent / "Config.json"


@pytest.fixture
def config(tmp_path):
    def write(document):
        path = tmp_path / "Config.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
        return path

    return write


def with_queue(properties, name="q") -> dict:
    return with_namespace({"Name": "sbemulatorns", "Queues": [{"Name": name, "Properties": properties}]})


def with_namespace(*namespaces) -> dict:
    return {"UserConfig": {"Namespaces": list(namespaces), "Logging": {"Type": "File"}}}


def problems(path) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load(path)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def properties_set(entities, known) -> bool:
    """Whether the entities set every property that there is, together."""
    return {name for entity in entities for name in entity["Properties"]} == {item.name for item in known}


def test_a_file_with_every_property_set_is_read_in_full():
    [namespace] = json.loads(without_comments(EVERY_PROPERTY.read_text()))["UserConfig"]["Namespaces"]
    [topic] = namespace["Topics"]
    assert properties_set(namespace["Queues"], QUEUE_PROPERTIES)
    assert properties_set([topic], TOPIC_PROPERTIES)
    assert properties_set(topic["Subscriptions"], SUBSCRIPTION_PROPERTIES)

    settings = load(EVERY_PROPERTY).settings

    assert settings.namespace == "sbemulatorns"
    emulators = {
        "lock_duration_ms": MINUTE_MS,
        "max_delivery_count": 3,
        "default_message_time_to_live_ms": 60 * MINUTE_MS,
    }
    window = {"duplicate_detection_history_time_window_ms": 20 * SECOND_MS}
    assert settings.queues == (
        QueueDescription(
            name="every.property",
            lock_duration_ms=2 * MINUTE_MS,
            max_delivery_count=7,
            default_message_time_to_live_ms=2 * DAY_MS + 500,
            dead_lettering_on_message_expiration=True,
            requires_session=True,
            requires_duplicate_detection=True,
            duplicate_detection_history_time_window_ms=5 * MINUTE_MS,
            forward_dead_lettered_messages_to="queue.1",
        ),
        QueueDescription(name="forwarding", forward_to="queue.1", **emulators, **window),
        QueueDescription(name="queue.1", **emulators, **window),
    )
    [topic] = settings.topics
    assert topic.description() == TopicDescription(
        name="topic.1",
        default_message_time_to_live_ms=120 * MINUTE_MS,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window_ms=5 * MINUTE_MS,
    )
    filtered, changed, forwarding = topic.subscriptions
    assert filtered.description("topic.1") == SubscriptionDescription(
        topic="topic.1",
        name="subscription.1",
        lock_duration_ms=2 * MINUTE_MS,
        max_delivery_count=7,
        default_message_time_to_live_ms=30 * MINUTE_MS,
        dead_lettering_on_message_expiration=True,
        requires_session=True,
        forward_dead_lettered_messages_to="queue.1",
    )
    assert changed.description("topic.1") == SubscriptionDescription(
        topic="topic.1", name="subscription.2", **emulators
    )
    assert forwarding.description("topic.1") == SubscriptionDescription(
        topic="topic.1", name="subscription.3", forward_to="queue.1", **emulators
    )


def test_rules_of_a_file_with_every_property_are_read_in_full():
    filtered, changed, forwarding = load(EVERY_PROPERTY).settings.topics[0].subscriptions
    [correlation] = filtered.rules
    assert correlation == RuleDescription(
        name="correlation",
        filter=CorrelationFilter(
            content_type="application/text",
            correlation_id="id1",
            label="subject1",
            message_id="msgid1",
            reply_to="someQueue",
            reply_to_session_id="sessionId",
            session_id="session1",
            to="xyz",
            properties={"prop1": RuleValue.of_amqp("value1"), "prop2": RuleValue.of_amqp(Long(2))},
        ),
    )
    [sql] = changed.rules
    assert sql == RuleDescription(
        name="sql",
        filter=SqlFilter(expression="sys.MessageId = '123456' AND userProp1 = 'value1'"),
        action=SqlAction(expression="SET sys.To = 'Entity'"),
    )
    assert forwarding.rules is None, "takes every message, and what clients make of its rules stays"


@pytest.mark.parametrize(
    "properties", [None, {}, {"ForwardTo": "", "LockDuration": "", "MaxDeliveryCount": None}], ids=str
)
def test_absent_and_empty_properties_have_the_emulators_default(config, properties):
    [queue] = load(config(with_queue(properties))).settings.queues
    assert queue == QueueDescription(
        name="q",
        lock_duration_ms=MINUTE_MS,
        max_delivery_count=3,
        default_message_time_to_live_ms=60 * MINUTE_MS,
        duplicate_detection_history_time_window_ms=20 * SECOND_MS,
    )


@pytest.mark.parametrize(("said", "partitioned"), [({"EnablePartitioning": True}, True), ({}, None)])
def test_partitioning_is_read_and_else_left_to_the_settings(config, said, partitioned):
    [queue] = load(config(with_queue(said))).settings.queues
    assert queue.enable_partitioning is bool(partitioned)
    assert ("enable_partitioning" in queue.model_fields_set) is (partitioned is not None)


def test_a_namespace_without_queues_is_fine(config):
    assert load(config(with_namespace({"Name": "sbemulatorns"}))).settings.queues == ()


def test_an_empty_list_of_topics_is_fine(config):
    load(config(with_namespace({"Name": "sbemulatorns", "Topics": []})))


def test_keys_in_other_case_and_values_as_text_are_read_as_the_emulator_does(config):
    properties = {"maxdeliverycount": "5", "RequiresSession": "True"}
    [queue] = load(config(with_queue(properties))).settings.queues
    assert (queue.max_delivery_count, queue.requires_session) == (5, True)


def test_a_schema_reference_and_a_byte_order_mark_do_no_harm(config):
    document = {"$schema": "https://example.com/schema.json", **with_queue({})}
    assert len(load(config("\ufeff" + json.dumps(document))).settings.queues) == 1


def test_the_longest_time_span_is_no_time_to_live(config):
    properties = {"DefaultMessageTimeToLive": "P10675199DT2H48M5.4775807S"}
    [queue] = load(config(with_queue(properties))).settings.queues
    assert queue.default_message_time_to_live_ms is None


def test_flags_and_environment_go_over_the_file(config):
    settings = load(config(with_queue({})), {"--partitions": "2"}, {"PEEKLOCK_NAMESPACE": "other"}).settings
    assert (settings.partitions, settings.namespace, len(settings.queues)) == (2, "other", 1)


def test_queues_of_the_environment_replace_those_of_the_file(config):
    environment = {"PEEKLOCK_QUEUES": '[{"name": "a", "lock_duration_ms": 1}]'}
    with pytest.raises(ConfigurationError, match=r"PEEKLOCK_QUEUES\[0\]\.lock_duration_ms: 1 is out of range"):
        load(config(with_queue({"LockDuration": "PT30S"})), {}, environment)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LockDuration", "PT10M", '"PT10M" must be at most 300000; lower it, or set delivery.max_lock_duration_ms'),
        ("LockDuration", "1 minute", '"1 minute" must be an ISO 8601 duration'),
        ("LockDuration", 60, "60 must be a string"),
        ("MaxDeliveryCount", 0, "0 is out of range; it must be from 1 to 2147483647"),
        ("MaxDeliveryCount", "three", '"three" must be a whole number'),
        ("MaxDeliveryCount", 1.5, "1.5 must be a whole number"),
        ("MaxDeliveryCount", True, "true must be a whole number"),
        (
            "DefaultMessageTimeToLive",
            "PT0.5S",
            '"PT0.5S" is out of range; it must be from 1000 to',
        ),
        ("DefaultMessageTimeToLive", "P1Y", '"P1Y" must be an ISO 8601 duration'),
        ("DeadLetteringOnMessageExpiration", "yes", '"yes" must be true or false'),
        ("RequiresSession", 1, "1 must be true or false"),
        ("RequiresDuplicateDetection", [], "[] must be true or false"),
        ("EnablePartitioning", "all", '"all" must be true or false'),
        ("DuplicateDetectionHistoryTimeWindow", "PT1S", '"PT1S" is out of range; it must be from 5000 to 604800000 ms'),
        ("ForwardTo", "a b", '"a b" must be the name of a queue'),
        ("ForwardDeadLetteredMessagesTo", 7, "7 must be a string"),
        ("LockDurations", "PT1M", "unknown; known here: LockDuration, MaxDeliveryCount, "),
    ],
)
def test_a_wrong_property_is_named_by_its_path(config, name, value, text):
    first = {"Name": "first"}
    document = with_namespace({"Name": "sbemulatorns", "Queues": [first, {"Name": "q", "Properties": {name: value}}]})
    [problem] = problems(config(document))
    assert problem.startswith(f"UserConfig.Namespaces[0].Queues[1].Properties.{name}: {text}")


def test_every_property_has_a_wrong_value_in_these_tests():
    marks = test_a_wrong_property_is_named_by_its_path.pytestmark[0]
    assert {item.name for item in QUEUE_PROPERTIES} < {name for name, *_ in marks.args[1]}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"UserConfig": None}, ["UserConfig: is missing"]),
        ({"UserConfig": []}, ["UserConfig: must be an object"]),
        ({"UserConfig": {}}, ["UserConfig.Namespaces: is missing"]),
        ({"UserConfig": {"Namespaces": {}}}, ["UserConfig.Namespaces: must be an array"]),
        (with_namespace(), ["UserConfig.Namespaces: has 0 namespaces; must have exactly one"]),
        (with_namespace({}, {}), ["UserConfig.Namespaces: has 2 namespaces; must have exactly one"]),
        (with_namespace("x"), ["UserConfig.Namespaces[0]: must be an object"]),
        (
            with_namespace({"Name": "x"}),
            ['UserConfig.Namespaces[0].Name: "x" must be 2 to 50 letters, digits and -, beginning with a letter and '
             "ending with a letter or digit"],
        ),
        (with_namespace({"Name": "ns", "Queues": {}}), ["UserConfig.Namespaces[0].Queues: must be an array"]),
        (
            with_namespace({"Name": "ns", "Queues": [{}]}),
            ["UserConfig.Namespaces[0].Queues[0].Name: is missing; add it"],
        ),
        (
            with_namespace({"Name": "ns", "Queues": [{"Name": "q", "Properties": []}]}),
            ["UserConfig.Namespaces[0].Queues[0].Properties: must be an object"],
        ),
        (
            with_namespace({"Name": "ns", "Que": []}),
            ["UserConfig.Namespaces[0].Que: unknown; known here: Name, Queues, Topics"],
        ),
        ({**with_queue({}), "Other": 1}, ["Other: unknown; known here: UserConfig"]),
        ({"UserConfig": {"Namespaces": [{"Name": "ns"}], "Logging": 1}}, ["UserConfig.Logging: must be an object"]),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_named_by_its_path(config, document, expected):
    assert problems(config(document)) == expected


def with_topic(**members) -> dict:
    return with_namespace({"Name": "ns", "Topics": [{"Name": "t", **members}]})


def with_rule(properties) -> dict:
    return with_topic(Subscriptions=[{"Name": "s", "Rules": [{"Name": "r", "Properties": properties}]}])


def test_a_topic_without_properties_and_subscriptions_has_the_emulators_defaults(config):
    [topic] = load(config(with_topic())).settings.topics
    assert topic.default_message_time_to_live_ms == 60 * MINUTE_MS
    assert topic.duplicate_detection_history_time_window_ms == 20 * SECOND_MS
    assert topic.subscriptions == ()


@pytest.mark.parametrize("rules", [[], None])
def test_a_subscription_with_an_empty_list_of_rules_has_none_declared(config, rules):
    [topic] = load(config(with_topic(Subscriptions=[{"Name": "s", "Rules": rules}]))).settings.topics
    assert topic.subscriptions[0].rules is None


def test_a_property_of_a_correlation_filter_may_be_null(config):
    document = with_rule({"FilterType": "Correlation", "CorrelationFilter": {"Properties": {"a": None}}})
    [rule] = load(config(document)).settings.topics[0].subscriptions[0].rules
    assert (rule.filter.properties["a"].type, rule.filter.properties["a"].value) == ("null", None)


@pytest.mark.parametrize("action", [None, {}, {"SqlExpression": ""}])
def test_an_action_without_expression_is_none(config, action):
    document = with_rule({"FilterType": "Sql", "SqlFilter": {"SqlExpression": "1=1"}, "Action": action})
    [rule] = load(config(document)).settings.topics[0].subscriptions[0].rules
    assert rule.action is None


AT_SUBSCRIPTION = "UserConfig.Namespaces[0].Topics[0].Subscriptions[0]"
AT_RULE = f"{AT_SUBSCRIPTION}.Rules[0].Properties"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (with_topic(Queues=[]), "UserConfig.Namespaces[0].Topics[0].Queues: unknown; known here: Name, Properties, "),
        (with_topic(Subscriptions={}), "UserConfig.Namespaces[0].Topics[0].Subscriptions: must be an array"),
        (with_topic(Subscriptions=[{}]), f"{AT_SUBSCRIPTION}.Name: is missing; add it"),
        (
            with_topic(Subscriptions=[{"Name": "a/b"}]),
            f'{AT_SUBSCRIPTION}.Name: "a/b" must be 1 to 50 letters, digits and . _ - ~, with',
        ),
        (
            with_topic(Properties={"LockDuration": "PT1M"}),
            "UserConfig.Namespaces[0].Topics[0].Properties.LockDuration: unknown; known here: DefaultMessageTimeToLive",
        ),
        (
            with_topic(Subscriptions=[{"Name": "s", "Properties": {"LockDuration": "PT1H"}}]),
            f'{AT_SUBSCRIPTION}.Properties.LockDuration: "PT1H" must be at most 300000; lower it, or',
        ),
        (
            with_topic(Subscriptions=[{"Name": "s"}, {"Name": "S"}]),
            "UserConfig.Namespaces[0].Topics[0].Subscriptions: subscription 's' is declared twice; remove one",
        ),
        (
            with_topic(Subscriptions=[{"Name": "s", "Rules": [{"Name": "r"}]}]),
            f"{AT_RULE}: is missing",
        ),
        (with_rule({"FilterType": "Regex"}), f'{AT_RULE}.FilterType: "Regex" must be Correlation or Sql'),
        (with_rule({"SqlFilter": {"SqlExpression": "1=1"}}), f"{AT_RULE}.FilterType: must be Correlation or Sql"),
        (with_rule({"FilterType": "Sql"}), f"{AT_RULE}.SqlFilter: is missing"),
        (
            with_rule({"FilterType": "Sql", "SqlFilter": {"SqlExpression": 1}}),
            f"{AT_RULE}.SqlFilter.SqlExpression: 1 must be a string",
        ),
        (with_rule({"FilterType": "Correlation"}), f"{AT_RULE}.CorrelationFilter: is missing"),
        (
            with_rule({"FilterType": "Correlation", "CorrelationFilter": {"Label": ""}}),
            f"{AT_RULE}.CorrelationFilter: has no condition; ",
        ),
        (
            with_rule({"FilterType": "Correlation", "CorrelationFilter": {"Label": 7}}),
            f"{AT_RULE}.CorrelationFilter.Label: 7 must be a string",
        ),
        (
            with_rule({"FilterType": "Correlation", "CorrelationFilter": {"Properties": {"a": [1]}}}),
            f"{AT_RULE}.CorrelationFilter.Properties.a: must be a string, a number, ",
        ),
        (
            with_rule({"FilterType": "Correlation", "CorrelationFilter": {"Properties": 3}}),
            f"{AT_RULE}.CorrelationFilter.Properties: 3 must be a table",
        ),
        (
            with_rule({"FilterType": "Sql", "SqlFilter": {"SqlExpression": "1=1"}, "Action": "SET a = 1"}),
            f"{AT_RULE}.Action: must be an object",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_a_topic_are_named_by_their_paths(config, document, expected):
    [found, *_] = problems(config(document))
    assert found.startswith(expected)


def test_a_wrong_expression_is_named_by_its_path(config):
    action = {"SqlExpression": "SET = 1"}
    document = with_rule({"FilterType": "Sql", "SqlFilter": {"SqlExpression": "a > > 1"}, "Action": action})
    wrong_filter, wrong_action = problems(config(document))
    assert wrong_filter.startswith(
        f"{AT_RULE}.SqlFilter.SqlExpression: There was an error parsing the SQL expression. "
    )
    assert "[Token line=1, column=5, Token in error=>, " in wrong_filter
    assert wrong_action.startswith(f"{AT_RULE}.Action.SqlExpression: There was an error parsing the SQL expression. ")


def test_comments_are_blanks(config):
    text = json.dumps(with_queue({"ForwardTo": ""}, name="q"), indent=1).replace(
        '"Queues"', '// "no"\n/* x */ "Queues"'
    )
    assert [queue.name for queue in load(config("// first\n" + text)).settings.queues] == ["q"]
    assert without_comments('{"a": "http://b" // c\n}') == '{"a": "http://b"     \n}'


def test_queues_whose_names_differ_in_case_only_are_one_queue(config):
    queues = [{"Name": "Orders"}, {"Name": "orders"}]
    [problem] = problems(config(with_namespace({"Name": "ns", "Queues": queues})))
    assert "queue 'orders' is declared twice; remove one" in problem


def test_all_mistakes_are_told_at_once(config):
    found = problems(config(with_queue({"LockDuration": "PT1H", "MaxDeliveryCount": "x", "ForwardTo": 1})))
    assert len(found) == 3
