"""One wording for the rule of each kind of name, wherever it is refused."""

import json
from xml.etree.ElementTree import fromstring

import pytest
from typer.testing import CliRunner

from broker.atom import entities, rules, xml
from broker.catalog.changing import described
from broker.cli.all_commands import app
from broker.errors import InvalidArgument
from broker.gateway.nodes.rules import rule_document
from broker.namespace.names import RULES
from broker.pairing.backlog import check_name
from broker.pairing.options import InvalidPairing
from broker.settings import sources
from broker.settings.config import ConfigurationError
from protocol.nodes.rule_operations import Rule

WRONG = ["", "a b", "-a", "_a", ".a", ".", "..", "a.", "a~", "a*b", "x" * 261]
RIGHT = ["a", "1", "a-", "a--", "a_", "a~b", "a.b-c_d~e", "b-"]
SERVICES_TEXT = "Entity segments can contain only letters, numbers, periods (.), hyphens (-), and underscores (_)."
OTHERS = {"queue": "", "topic": "", "subscription": "topic"}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", OTHERS)
def test_over_amqp_and_http(kind, name):
    fields = {"name": name} | ({"topic": "t"} if kind == "subscription" else {})
    with pytest.raises(InvalidArgument) as raised:
        described(kind, fields)
    assert f"name: must be {RULES[kind]}." in str(raised.value)
    with pytest.raises(InvalidArgument) as raised:
        entities.validated(kind, fields)
    assert str(raised.value) == f"The {kind}'s name is not valid: it must be {RULES[kind]}. {SERVICES_TEXT}"


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_may_be_a_name_may_be_one_everywhere(kind, name):
    fields = {"name": name} | ({"topic": "t-"} if kind == "subscription" else {})
    assert described(kind, fields).name == entities.validated(kind, fields).name == name
    assert check_name(name) == name
    if kind != "topic":
        assert entities.validated(kind, {**fields, "forward_to": f"{name}/{name}"}).forward_to == f"{name}/{name}"
    topics = [{"name": f"a/{name}", "subscriptions": [{"name": name, "forward_to": name}]}]
    queues = [{"name": name, "forward_to": f"a/{name}"}]
    loaded = sources.load(None, {}, {"PEEKLOCK_QUEUES": json.dumps(queues), "PEEKLOCK_TOPICS": json.dumps(topics)})
    assert loaded.settings.queues[0].name == loaded.settings.topics[0].subscriptions[0].name == name


@pytest.mark.parametrize("name", ["MassTransit/Fault--My.App/Order--", "a/_b", "a./b", "a/./b", "größe"])
def test_names_of_several_parts_and_all_that_were_taken_before(name):
    assert described("queue", {"name": name}).name == entities.validated("topic", {"name": name}).name == name


def test_the_name_of_a_topic_in_that_of_a_subscription():
    with pytest.raises(InvalidArgument, match="The topic's name is not valid: it must be 1 to 260 letters"):
        entities.validated("subscription", {"name": "s", "topic": "a b"})


@pytest.mark.parametrize("name", ["a//b", "t/subscriptions/s"])
def test_a_name_without_an_address_says_so(name):
    for refuse in (described, entities.validated):
        with pytest.raises(InvalidArgument, match="must not hold // or end in /Subscriptions/ and a name"):
            refuse("queue", {"name": name})


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", OTHERS)
def test_in_the_configuration(kind, name):
    queues, topics = [], []
    if kind == "queue":
        queues.append({"name": name})
    elif kind == "topic":
        topics.append({"name": name})
    else:
        topics.append({"name": "t", "subscriptions": [{"name": name}]})
    with pytest.raises(ConfigurationError) as raised:
        sources.load(None, {}, {"PEEKLOCK_QUEUES": json.dumps(queues), "PEEKLOCK_TOPICS": json.dumps(topics)})
    assert str(raised.value).endswith(f" must be {RULES[kind]}")


@pytest.mark.parametrize("name", ["", "a/b", " a", "x" * 51])
def test_of_a_rule(name):
    wanted = f"The rule's name is not valid: it must be {RULES['rule']}."
    with pytest.raises(InvalidArgument) as raised:
        rule_document(Rule(name))
    assert str(raised.value) == wanted
    with pytest.raises(InvalidArgument) as raised:
        rules.read(name, fromstring(f'<RuleDescription xmlns="{xml.SERVICE_BUS}"/>'))
    assert str(raised.value) == wanted
    topics = [{"name": "t", "subscriptions": [{"name": "s", "rules": [{"name": name}]}]}]
    with pytest.raises(ConfigurationError) as raisedd:
        sources.load(None, {}, {"PEEKLOCK_TOPICS": json.dumps(topics)})
    assert str(raisedd.value).endswith(f" must be {RULES['rule']}")


def test_of_a_rule_in_a_command():
    arguments = ["subscription", "create", "t/s", "--rule-name", "a/b", "--sql", "1=1"]
    result = CliRunner().invoke(
        app, [*arguments, "--connection-string", "Endpoint=sb://x;SharedAccessKeyName=n;SharedAccessKey=k"]
    )
    assert f"name: must be {RULES['rule']}" in result.output


def test_of_the_namespace_of_a_pairing():
    with pytest.raises(InvalidPairing) as raised:
        check_name("-")
    assert str(raised.value).endswith(f" must be {sources._PATTERNS['primary_name']}")
