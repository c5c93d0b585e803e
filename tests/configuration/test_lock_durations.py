"""The lock duration of an entity of which nothing is said: 30 seconds (ST5), or what its way of creation documents."""

import json
from xml.etree.ElementTree import fromstring

import pytest

from broker.atom import xml
from broker.atom.entities import ELEMENT, read
from broker.catalog.changing import described
from broker.cli.managing.entity_settings import SETTINGS
from broker.namespace.entities import QueueDescription, SubscriptionDescription
from broker.pairing import backlog
from broker.settings.sources import load

TOML = '[[queues]]\nname = "q"\n[[topics]]\nname = "t"\n[[topics.subscriptions]]\nname = "s"\n'
EMULATORS = {"Queues": [{"Name": "q"}], "Topics": [{"Name": "t", "Subscriptions": [{"Name": "s"}]}]}


def durations(settings) -> tuple[int, int]:
    return settings.queues[0].lock_duration_ms, settings.topics[0].subscriptions[0].lock_duration_ms


def test_a_description_has_half_a_minute():
    assert QueueDescription(name="q").lock_duration_ms == 30_000
    assert SubscriptionDescription(topic="t", name="s").lock_duration_ms == 30_000


def test_an_entity_of_the_configuration_has_half_a_minute(tmp_path):
    path = tmp_path / "peeklock.toml"
    path.write_text(TOML)
    assert durations(load(path).settings) == (30_000, 30_000)


def test_an_entity_of_a_variable_has_half_a_minute():
    topics = [{"name": "t", "subscriptions": [{"name": "s"}]}]
    variables = {"PEEKLOCK_QUEUES": '[{"name": "q"}]', "PEEKLOCK_TOPICS": json.dumps(topics)}
    assert durations(load(None, {}, variables).settings) == (30_000, 30_000)


@pytest.mark.parametrize("named", [{"name": "q"}, {"topic": "t", "name": "s"}], ids=["queue", "subscription"])
def test_an_entity_that_is_created_over_amqp_has_half_a_minute(named):
    kind = "subscription" if "topic" in named else "queue"
    created = described(kind, named)
    assert created.model_dump()["lock_duration_ms"] == 30_000


@pytest.mark.parametrize("kind", ["queue", "subscription"])
def test_the_administration_api_has_its_own_default_of_a_minute(kind):
    empty = fromstring(f'<{ELEMENT[kind]} xmlns="{xml.SERVICE_BUS}"/>')
    assert read(kind, empty)["lock_duration_ms"] == 60_000


def test_the_emulators_file_has_its_own_default_of_a_minute(tmp_path):
    path = tmp_path / "Config.json"
    path.write_text(json.dumps({"UserConfig": {"Namespaces": [{"Name": "ns", **EMULATORS}]}}))
    assert durations(load(path).settings) == (60_000, 60_000)


def test_queues_of_a_pairing_say_their_minute():
    assert backlog.BACKLOG_SETTINGS["LockDuration"] == backlog.LEASE_SETTINGS["LockDuration"] == "PT1M"


def test_the_commands_say_the_default_of_the_api_that_they_use():
    [lock] = [setting for setting in SETTINGS if setting.option == "--lock-duration"]
    assert "one minute" in lock.help
