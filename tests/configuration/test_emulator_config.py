import json
import pickle
from pathlib import Path

import pytest

from broker.catalog.catalog import CannotReconcile, reconcile
from broker.namespace.entities import (
    DAY_MS,
    MINUTE_MS,
    SECOND_MS,
    QueueDescription,
    Status,
    SubscriptionDescription,
    TopicDescription,
)
from broker.namespace.rule_descriptions import CorrelationFilter, RuleDescription, RuleValue, SqlAction, SqlFilter
from broker.settings.config import ConfigurationError
from broker.settings.emulator_config import (
    QUEUE_PROPERTIES,
    SUBSCRIPTION_PROPERTIES,
    TOPIC_PROPERTIES,
    parse,
    without_comments,
)
from broker.settings.sources import load
from protocol.codec import Long
from storage.memory import MemoryStore

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
    [namespace] = parse(EVERY_PROPERTY.read_text())["UserConfig"]["Namespaces"]
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
    clouds = {"auto_delete_on_idle_ms": 60 * MINUTE_MS, "enable_batched_operations": False, "user_metadata": "about it"}
    sizes = {"max_size_mb": 2048, "max_message_size_kb": 512}
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
            status=Status.SEND_DISABLED,
            **clouds,
            **sizes,
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
        status=Status.DISABLED,
        **clouds,
        **sizes,
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
        dead_lettering_on_filter_evaluation_exceptions=False,
        status=Status.RECEIVE_DISABLED,
        **clouds,
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
        ("MaxSizeInMegabytes", 0, "0 is out of range; it must be from 1 to 81920"),
        ("MaxMessageSizeInKilobytes", 2**63, "9223372036854775808 is out of range; it must be from 1 to 102400"),
        ("AutoDeleteOnIdle", "PT4M", '"PT4M" is out of range; it must be from 300000 to'),
        ("Status", "Asleep", "\"Asleep\" must be 'Active', 'Disabled', 'SendDisabled' or 'ReceiveDisabled'"),
        ("Status", 1, "1 must be a string"),
        ("UserMetadata", "x" * 1025, f'"{"x" * 98}… must have at most 1024 characters'),
        ("EnableBatchedOperations", 0, "0 must be true or false"),
        ("LockDurations", [{}], "unknown; known here: LockDuration, MaxDeliveryCount, "),
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
            with_namespace({"Name": "ns", "Que": [{"Name": "q"}]}),
            ["UserConfig.Namespaces[0].Que: unknown; known here: Name, Queues, Topics"],
        ),
        (
            with_namespace({"Name": "ns", "More": {"at": [{"queues": [1, {}]}]}}),
            ["UserConfig.Namespaces[0].More: unknown; known here: Name, Queues, Topics"],
        ),
        ({**with_queue({}), "Other": [{"Name": "q"}]}, ["Other: unknown; known here: UserConfig"]),
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
        (with_topic(Queues=[{}]), "UserConfig.Namespaces[0].Topics[0].Queues: unknown; known here: Name, Properties, "),
        (with_topic(Subscriptions={}), "UserConfig.Namespaces[0].Topics[0].Subscriptions: must be an array"),
        (with_topic(Subscriptions=[{}]), f"{AT_SUBSCRIPTION}.Name: is missing; add it"),
        (
            with_topic(Subscriptions=[{"Name": "a/b"}]),
            f'{AT_SUBSCRIPTION}.Name: "a/b" must be 1 to 50 letters, digits and . _ - ~, with',
        ),
        (
            with_topic(Properties={"Status": "ReceiveDisabled"}),
            "UserConfig.Namespaces[0].Topics[0].Properties.Status: \"ReceiveDisabled\" must be 'Active', 'Disabled' or",
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
    [found] = problems(config(document))
    assert found.startswith(expected), "one mistake is one line"


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


def ignored(path) -> dict[str, str]:
    prefix = f"{path}: "
    return {place.removeprefix(prefix): text for place, text in load(path).ignored}


AT_QUEUE = "UserConfig.Namespaces[0].Queues[0]"


@pytest.mark.parametrize("value", [1, "x", None, True, {}, {"Name": "x", "Rules": []}, [], [1, "x", [{}]]], ids=str)
def test_unknown_keys_are_ignored_at_every_level_and_named(config, value):
    unknown = {"Unknown": value}
    rule = {
        "Name": "r",
        "Properties": {
            "FilterType": "Correlation",
            "CorrelationFilter": {"Label": "a", **unknown},
            "SqlFilter": {"SqlExpression": "1=1", **unknown},
            "Action": {"SqlExpression": "SET a = 1", **unknown},
            **unknown,
        },
        **unknown,
    }
    subscription = {"Name": "s", "Properties": unknown, "Rules": [rule], **unknown}
    topic = {"Name": "t", "Properties": {"LockDuration": "PT1M", **unknown}, "Subscriptions": [subscription], **unknown}
    namespace = {
        "Name": "ns",
        "Queues": [{"Name": "q", "Properties": unknown, **unknown}],
        "Topics": [topic],
        **unknown,
    }
    document = {"UserConfig": {"Namespaces": [namespace], "Logging": {"Type": "File", **unknown}, **unknown}, **unknown}
    path = config(document)

    found = ignored(path)

    at_topic = "UserConfig.Namespaces[0].Topics[0]"
    places = {place.removesuffix(".Unknown") for place in found}
    assert places == {
        "Unknown", "UserConfig", "UserConfig.Logging", "UserConfig.Namespaces[0]", AT_QUEUE, f"{AT_QUEUE}.Properties",
        at_topic, f"{at_topic}.Properties", f"{at_topic}.Properties.LockDuration", AT_SUBSCRIPTION,
        f"{AT_SUBSCRIPTION}.Properties", f"{AT_SUBSCRIPTION}.Rules[0]", AT_RULE, f"{AT_RULE}.CorrelationFilter",
        f"{AT_RULE}.Action",
    }  # fmt: skip
    assert found["UserConfig.Unknown"] == "unknown; known here: Namespaces, Logging"
    settings = load(path).settings
    assert (len(settings.queues), len(settings.topics[0].subscriptions[0].rules or ())) == (1, 1)


def test_a_deep_unknown_value_does_no_harm(config):
    text = json.dumps({**with_queue({}), "Unknown": "HERE"}).replace('"HERE"', "[" * 300 + "]" * 300)
    assert list(ignored(config(text))) == ["Unknown"]


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("MaxSizeInMegabytes", "2048", "max_size_mb", 2048),
        ("MaxMessageSizeInKilobytes", 512, "max_message_size_kb", 512),
        ("AutoDeleteOnIdle", "PT1H", "auto_delete_on_idle_ms", 60 * MINUTE_MS),
        ("AutoDeleteOnIdle", "P10675199DT2H48M5.4775807S", "auto_delete_on_idle_ms", None),
        ("Status", "senddisabled", "status", "SendDisabled"),
        ("UserMetadata", "about it", "user_metadata", "about it"),
        ("EnableBatchedOperations", False, "enable_batched_operations", False),
    ],
)
def test_settings_of_the_cloud_are_honoured(config, name, value, field, expected):
    path = config(with_queue({name: value}))
    [queue] = load(path).settings.queues
    assert getattr(queue, field) == expected
    assert ignored(path) == {}


def test_dead_lettering_of_filter_failures_is_honoured(config):
    properties = {"DeadLetteringOnFilterEvaluationExceptions": "false"}
    [topic] = load(config(with_topic(Subscriptions=[{"Name": "s", "Properties": properties}]))).settings.topics
    assert topic.subscriptions[0].dead_lettering_on_filter_evaluation_exceptions is False


def test_trailing_commas_are_taken(config):
    text = json.dumps(with_queue({"UserMetadata": ",]", "MaxDeliveryCount": 5}), indent=1)
    path = config(text.replace("\n", " ,\n").replace("{ ,", "{").replace("[ ,", "[").replace(", ,", ",") + "  // end")
    assert ",\n" in path.read_text()
    [queue] = load(path).settings.queues
    assert (queue.user_metadata, queue.max_delivery_count) == (",]", 5)


@pytest.mark.parametrize(
    "text", ['{"UserConfig": [,]}', '{,"UserConfig": 1}', '{"UserConfig": 1,,}', '{"UserConfig":,}']
)
def test_a_comma_without_a_value_is_refused(config, text):
    path = config(text)
    with pytest.raises(ConfigurationError, match="is not valid JSON"):
        load(path)


@pytest.mark.parametrize("text", ["", "  \n", "\ufeff", "// nothing\n"])
def test_an_empty_file_is_refused(config, text):
    path = config(text)
    with pytest.raises(ConfigurationError, match=r"is empty; write the emulator's Config\.json into it"):
        load(path)


def test_a_file_whose_name_ends_in_json_is_no_toml(config):
    with pytest.raises(ConfigurationError, match="is JSON without UserConfig"):
        load(config("[1]"))


@pytest.mark.parametrize("second", ['"Queues": [{"Name": "b"}]', '"queues": []', '"QUEUES": null'])
def test_entities_under_a_key_that_is_there_twice_are_not_lost(config, second):
    first = '"Queues": [{"Name": "a"}]'
    path = config(f'{{"UserConfig": {{"Namespaces": [{{"Name": "ns", {first}, {second}}}]}}}}')
    with pytest.raises(ConfigurationError, match="is there twice in one object"):
        load(path)


def test_of_a_plain_value_that_is_there_twice_the_last_counts(config):
    text = json.dumps(with_queue({"MaxDeliveryCount": 5})).replace(
        '"MaxDeliveryCount"', '"MaxDeliveryCount": 4, "MaxDeliveryCount"'
    )
    assert load(config(text)).settings.queues[0].max_delivery_count == 5


def test_a_missing_forward_target_is_named_as_the_file_has_it(config, tmp_path):
    topic = {
        "Name": "t", "Subscriptions": [{"Name": "s", "Properties": {"ForwardDeadLetteredMessagesTo": "nowhere"}}],
    }  # fmt: skip
    queues = [{"Name": "q"}, {"Name": "Q2", "Properties": {"ForwardTo": "missing"}}]
    path = config(with_namespace({"Name": "ns", "Queues": queues, "Topics": [topic]}))
    loaded = load(path, {"--data-dir": str(tmp_path / "data")})
    at_namespace = f"{path}: UserConfig.Namespaces[0]"
    assert [loaded.spelled(each) for each in rehearsed(loaded)] == [
        f"{at_namespace}.Queues[1].Properties.ForwardTo: 'missing' is no queue or topic. Declare it, or name another",
        f"{at_namespace}.Topics[0].Subscriptions[0].Properties.ForwardDeadLetteredMessagesTo: "
        "'nowhere' is no queue or topic. Declare it, or name another",
    ]


def rehearsed(loaded) -> list:
    with pytest.raises(CannotReconcile) as raised:
        reconcile([MemoryStore()], loaded.settings.entities, 0)
    return list(pickle.loads(pickle.dumps(raised.value)).refusals)


def test_a_default_that_a_stored_queue_does_not_have_is_named_at_the_queue(config):
    loaded = load(config(with_queue({})))
    store = MemoryStore()
    reconcile([store], [QueueDescription(name="q", requires_session=True)], 0)
    with pytest.raises(CannotReconcile) as raised:
        reconcile([store], loaded.settings.entities, 0)
    [refusal] = raised.value.refusals
    assert loaded.spelled(refusal).startswith(
        f"{loaded.origins['queues', 0].spelling}: requires_session is true since its creation and cannot become false."
    )
