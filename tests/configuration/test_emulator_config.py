import json
from pathlib import Path

import pytest

from broker.config import ConfigurationError
from broker.config_sources import load
from broker.emulator_config import QUEUE_PROPERTIES
from broker.entities import DAY_MS, MINUTE_MS, SECOND_MS, QueueDescription

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


def test_a_file_with_every_property_set_is_read_in_full():
    document = json.loads(EVERY_PROPERTY.read_text())
    properties = document["UserConfig"]["Namespaces"][0]["Queues"][0]["Properties"]
    assert set(properties) == {item.name for item in QUEUE_PROPERTIES}, "the file must set every property"

    settings = load(EVERY_PROPERTY).settings

    assert settings.namespace == "sbemulatorns"
    every, emulator_sample = settings.queues
    assert every == QueueDescription(
        name="every.property",
        lock_duration_ms=2 * MINUTE_MS,
        max_delivery_count=7,
        default_message_time_to_live_ms=2 * DAY_MS + 500,
        dead_lettering_on_message_expiration=True,
        requires_session=True,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window_ms=5 * MINUTE_MS,
        forward_to="queue.1",
        forward_dead_lettered_messages_to="queue.1",
    )
    assert emulator_sample == QueueDescription(
        name="queue.1",
        lock_duration_ms=MINUTE_MS,
        max_delivery_count=3,
        default_message_time_to_live_ms=60 * MINUTE_MS,
        duplicate_detection_history_time_window_ms=20 * SECOND_MS,
    )


@pytest.mark.parametrize(
    "properties", [None, {}, {"ForwardTo": "", "LockDuration": "", "MaxDeliveryCount": None}], ids=str
)
def test_what_is_absent_or_empty_has_the_emulators_default(config, properties):
    [queue] = load(config(with_queue(properties))).settings.queues
    assert queue == QueueDescription(
        name="q",
        lock_duration_ms=MINUTE_MS,
        max_delivery_count=3,
        default_message_time_to_live_ms=60 * MINUTE_MS,
        duplicate_detection_history_time_window_ms=20 * SECOND_MS,
    )


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
        ("LockDuration", "PT10M", '"PT10M" is out of range; it must be from 5000 to 300000 ms (from PT5S to PT5M)'),
        ("LockDuration", "1 minute", '"1 minute" must be an ISO 8601 duration'),
        ("LockDuration", 60, "60 must be a string"),
        ("MaxDeliveryCount", 0, "0 is out of range; it must be from 1 to 2147483647"),
        ("MaxDeliveryCount", "three", '"three" must be a whole number'),
        ("MaxDeliveryCount", 1.5, "1.5 must be a whole number"),
        ("MaxDeliveryCount", True, "true must be a whole number"),
        ("DefaultMessageTimeToLive", "PT0.5S", '"PT0.5S" is out of range; it must be at least 1000 ms (at least PT1S)'),
        ("DefaultMessageTimeToLive", "P1Y", '"P1Y" must be an ISO 8601 duration'),
        ("DeadLetteringOnMessageExpiration", "yes", '"yes" must be true or false'),
        ("RequiresSession", 1, "1 must be true or false"),
        ("RequiresDuplicateDetection", [], "[] must be true or false"),
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


def test_topics_are_refused_by_name(config):
    topics = [{"Name": "orders", "Properties": {}, "Subscriptions": []}, {"Name": "bills"}]
    assert problems(config(with_namespace({"Name": "ns", "Topics": topics}))) == [
        f"UserConfig.Namespaces[0].Topics[{index}]: topic {name!r}: "
        "this version serves queues and no topics yet; remove it"
        for index, name in enumerate(["orders", "bills"])
    ]


def test_queues_whose_names_differ_in_case_only_are_one_queue(config):
    queues = [{"Name": "Orders"}, {"Name": "orders"}]
    [problem] = problems(config(with_namespace({"Name": "ns", "Queues": queues})))
    assert "queue 'orders' is declared twice; remove one" in problem


def test_all_mistakes_are_told_at_once(config):
    found = problems(config(with_queue({"LockDuration": "PT1H", "MaxDeliveryCount": "x", "ForwardTo": 1})))
    assert len(found) == 3
