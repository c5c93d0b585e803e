"""`peeklock queue`, `topic`, `subscription` and `rule`, against the real broker."""

import json
import os
import re

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from broker.cli.target import CONNECTION_STRING_VARIABLE, HTTP_ENDPOINT_VARIABLE
from tests.brokers import KEY_NAME, Broker

KEYED = """
[[queues]]
name = "keyed"
[[queues.authorization_rules]]
key_name = "own"
primary_key = "secret"
rights = ["Manage"]
"""
MANY = [f"many/{number:03}" for number in range(103)]  # a page has 100
CONFIG = KEYED + "".join(f'[[queues]]\nname = "{name}"\n' for name in MANY)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("entities"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peeklock(broker, monkeypatch):
    """Run a command with the broker's addresses in the environment."""
    for name in list(os.environ):
        if name.startswith("PEEKLOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, broker.connection_string)
    monkeypatch.setenv(HTTP_ENDPOINT_VARIABLE, f"http://localhost:{broker.http_port}")
    return lambda *arguments, **options: CliRunner().invoke(app, [str(each) for each in arguments], **options)


@pytest.fixture
def told(peeklock):
    """Run a command that must succeed; what it printed as JSON."""

    def run(*arguments):
        result = peeklock(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def error(peeklock):
    """Run a command that must fail with this exit code; its only message on standard error."""

    def run(code, *arguments, **options):
        result = peeklock(*arguments, **options)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert "Traceback" not in result.stderr
        return result.stderr

    return run


# --- queues -----------------------------------------------------------------------------------------------------------


def test_a_queue_from_creation_to_deletion(peeklock, told, error):
    result = peeklock(
        "queue", "create", "orders", "--lock-duration", "30s", "--max-delivery-count", 5, "--default-ttl", "1h30m",
        "--dead-letter-on-expiration", "--user-metadata", "a <b> & ü", "--set", "enablebatchedoperations=false",
    )  # fmt: skip
    assert (result.exit_code, result.stdout, result.stderr) == (0, "queue orders created\n", "")
    shown = told("queue", "show", "orders")
    assert shown["name"] == "orders"
    assert shown["counts"] == dict.fromkeys(
        ("active", "dead_lettered", "scheduled", "transfer", "transfer_dead_lettered"), 0
    )
    assert shown["size_bytes"] == 0
    settings = shown["settings"]
    assert settings["LockDuration"] == "PT30S"
    assert settings["MaxDeliveryCount"] == 5
    assert settings["DefaultMessageTimeToLive"] == "PT1H30M"
    assert settings["AutoDeleteOnIdle"] is None
    assert settings["DeadLetteringOnMessageExpiration"] is True
    assert settings["EnableBatchedOperations"] is False
    assert settings["UserMetadata"] == "a <b> & ü"
    changed = told("queue", "update", "orders", "--no-dead-letter-on-expiration", "--default-ttl", "unlimited")
    expected = settings | {"DeadLetteringOnMessageExpiration": False, "DefaultMessageTimeToLive": None}
    assert changed["settings"] == expected, "an update keeps what it does not name"
    assert "UserMetadata" not in told("queue", "update", "orders", "--user-metadata", "")["settings"]
    text = peeklock("queue", "show", "orders").stdout
    assert re.search(r"^LockDuration +30s$", text, re.MULTILINE)
    assert re.search(r"^Active messages +0$", text, re.MULTILINE)
    assert error(1, "queue", "create", "orders").startswith("peeklock: orders: The messaging entity")
    assert peeklock("queue", "delete", "orders", "--yes").stdout == "queue orders deleted\n"
    assert error(1, "queue", "show", "orders").startswith("peeklock: orders: ")


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_what_was_created_is_told_by_the_name_that_it_has(peeklock, told, kind):
    assert peeklock(kind, "create", f"Mixed/{kind}").stdout == f"{kind} mixed/{kind} created\n"
    assert told(kind, "show", f"MIXED/{kind}")["name"] == f"mixed/{kind}"
    assert f"mixed/{kind}" in [each["name"] for each in told(kind, "list")]
    if kind == "topic":
        made = peeklock("subscription", "create", "Mixed/topic/Mine").stdout
        assert made == "subscription Mixed/topic/Mine created\n"
        assert [each["name"] for each in told("subscription", "list", "mixed/topic")] == ["Mine"]
    assert peeklock(kind, "delete", f"Mixed/{kind}", "--yes").exit_code == 0


def test_deleting_asks_first(peeklock, told):
    peeklock("queue", "create", "asked")
    result = peeklock("queue", "delete", "asked", input="n\n")
    assert (result.exit_code, "Delete the queue asked and its messages?" in result.stderr) == (1, True)
    assert told("queue", "show", "asked")["name"] == "asked"
    assert peeklock("queue", "delete", "asked", input="y\n").stdout.endswith("queue asked deleted\n")


def test_every_setting_has_an_option(told, peeklock):
    peeklock("queue", "create", "elsewhere")
    settings = told(
        "queue", "create", "all", "--requires-session", "--duplicate-detection", "--duplicate-detection-window", "5m",
        "--partitioning", "--max-size", "2GB", "--max-message-size", "1MB", "--forward-dead-letters-to", "elsewhere",
        "--auto-delete", "P1D", "--status", "SendDisabled",
    )["settings"]  # fmt: skip
    assert {
        "RequiresSession": True,
        "RequiresDuplicateDetection": True,
        "DuplicateDetectionHistoryTimeWindow": "PT5M",
        "EnablePartitioning": True,
        "MaxSizeInMegabytes": 16 * 2048,
        "MaxMessageSizeInKilobytes": 1024,
        "AutoDeleteOnIdle": "P1D",
        "Status": "SendDisabled",
    }.items() <= settings.items()
    assert settings["ForwardDeadLetteredMessagesTo"].endswith("/elsewhere")
    assert told("queue", "update", "all", "--status", "Active")["settings"] == settings | {"Status": "Active"}


def test_forwarding_is_set_and_removed(told, peeklock):
    peeklock("queue", "create", "target/one")
    assert told("queue", "create", "source", "--forward-to", "target/one")["settings"]["ForwardTo"].endswith(
        "/target/one"
    )
    assert "ForwardTo" in told("queue", "update", "source", "--max-delivery-count", 3)["settings"]
    assert "ForwardTo" not in told("queue", "update", "source", "--forward-to", "")["settings"]


def test_lists_have_all_pages_and_the_counts(peeklock, told):
    peeklock("send", "many/007", "--body", "x", "--count", 3)
    listed = [each for each in told("queue", "list") if each["name"].startswith("many/")]
    assert [each["name"] for each in listed] == MANY
    assert listed[7]["counts"]["active"] == 3
    assert listed[7]["size_bytes"] > 3
    head, *rows = [line.split() for line in peeklock("queue", "list").stdout.splitlines()]
    assert head == ["QUEUE", "STATUS", "ACTIVE", "DEAD-LETTERED", "SCHEDULED", "TRANSFER", "BYTES"]
    assert ["many/007", "Active", "3", "0", "0", "0", str(listed[7]["size_bytes"])] in rows


def test_an_entitys_own_key_manages_the_entity_alone(broker, told, error):
    own = "--connection-string", broker.connection_string_for("own", "secret")
    assert told("queue", "show", "keyed", *own)["keys"] == [{"name": "own", "rights": ["Manage", "Send", "Listen"]}]
    assert told("queue", "update", "keyed", "--max-delivery-count", 3, *own)["settings"]["MaxDeliveryCount"] == 3
    assert "(status 401" in error(1, "queue", "list", *own)
    assert told("queue", "show", "keyed")["keys"], "an update keeps the keys"


# --- topics, subscriptions, rules -------------------------------------------------------------------------------------


def test_topics_and_subscriptions(peeklock, told, error):
    assert told("topic", "create", "news/all", "--max-size", 2048)["settings"]["MaxSizeInMegabytes"] == 2048
    assert peeklock("subscription", "create", "news/all/mine", "--max-delivery-count", 2).exit_code == 0
    assert peeklock("subscription", "create", "news/all/subscriptions/yours").exit_code == 0
    peeklock("send", "news/all", "--body", "x")
    assert told("topic", "show", "news/all")["subscription_count"] == 2
    shown = told("subscription", "show", "news/all/Subscriptions/mine")
    assert (shown["name"], shown["topic"], shown["counts"]["active"]) == ("mine", "news/all", 1)
    assert shown["settings"]["MaxDeliveryCount"] == 2
    assert told("subscription", "update", "news/all/mine", "--lock-duration", "5s")["settings"]["MaxDeliveryCount"] == 2
    head, *rows = [line.split() for line in peeklock("subscription", "list", "news/all").stdout.splitlines()]
    assert head[0] == "SUBSCRIPTION"
    assert [row[0] for row in rows] == ["mine", "yours"]
    head, *rows = [line.split() for line in peeklock("topic", "list").stdout.splitlines()]
    assert ["news/all", "Active", "2"] in [row[:3] for row in rows]
    assert "is a topic and no queue" in error(1, "queue", "delete", "news/all", "--yes")
    assert "is a topic and no queue" in error(1, "queue", "show", "news/all")
    assert peeklock("subscription", "delete", "news/all/yours", "--yes").exit_code == 0
    assert peeklock("topic", "delete", "news/all", "--yes").exit_code == 0
    assert error(1, "subscription", "list", "news/all").startswith("peeklock: news/all: ")


def test_rules(peeklock, told, error):
    peeklock("topic", "create", "ruled")
    peeklock("subscription", "create", "ruled/s")
    assert told("rule", "list", "ruled/s") == [{"name": "$Default", "filter": {"kind": "true"}}]
    sql = told(
        "rule", "create", "ruled/s/a rule", "--sql", "level > @low AND name <> '<&>'", "--parameter", "@low:=3",
        "--action", "SET x = 'y'",
    )  # fmt: skip
    assert sql["filter"]["expression"] == "level > @low AND name <> '<&>'"
    assert sql["filter"]["parameters"] == {"@low": {"type": "int", "value": 3}}
    assert sql["action"]["expression"] == "SET x = 'y'"
    given = ("--field", "Subject=s", "--field", "messageid=1", "--property", "b:=true", "--property", "t=x")
    correlated = told("rule", "create", "ruled/subscriptions/s/rules/two", *given)
    assert correlated["filter"] == {
        "kind": "correlation",
        "label": "s",
        "message_id": "1",
        "properties": {"b": {"type": "boolean", "value": True}, "t": {"type": "string", "value": "x"}},
    }
    assert told("rule", "update", "ruled/s/two", "--action", "REMOVE t")["filter"] == correlated["filter"]
    assert told("rule", "update", "ruled/s/two", "--none", "--action", "") == {
        "name": "two",
        "filter": {"kind": "false"},
    }
    lines = peeklock("rule", "list", "ruled/s").stdout.splitlines()
    assert [re.split(r" {2,}", line) for line in lines] == [
        ["RULE", "FILTER", "ACTION"],
        ["$Default", "all messages"],
        ["a rule", "level > @low AND name <> '<&>' (@low = 3)", "SET x = 'y'"],
        ["two", "no message"],
    ]
    assert "all messages" in peeklock("rule", "show", "ruled/s/$Default").stdout
    assert "There was an error parsing the SQL expression" in error(1, "rule", "create", "ruled/s/x", "--sql", "a = =")
    assert peeklock("rule", "delete", "ruled/s/$Default", "--yes").stdout == "rule ruled/s/$Default deleted\n"
    assert error(1, "rule", "show", "ruled/s/$Default")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ((), {"name": "$Default", "filter": {"kind": "true"}}),
        (("--rule-name", "all"), {"name": "all", "filter": {"kind": "true"}}),
        (("--none",), {"name": "$Default", "filter": {"kind": "false"}}),
        (("--field", "Label=<x>", "--property", "n:=3"),
         {"name": "$Default", "filter":
          {"kind": "correlation", "label": "<x>", "properties": {"n": {"type": "int", "value": 3}}}}),
        (("--sql", "a < @x", "--parameter", "@x:=1.5", "--action", "SET b = @y", "--parameter", "@y=é",
          "--rule-name", "r"),
         {"name": "r", "filter":
          {"kind": "sql", "expression": "a < @x", "parameters": {"@x": {"type": "double", "value": 1.5}}},
          "action": {"expression": "SET b = @y", "parameters": {"@y": {"type": "string", "value": "é"}}}}),
    ],
)  # fmt: skip
def test_the_first_rule_of_a_subscription(peeklock, told, options, rule):
    peeklock("topic", "create", "first")
    shown = told("subscription", "create", "first/s", *options, "--lock-duration", "30s", "--user-metadata", "<x/> \\1")
    assert (shown["settings"]["LockDuration"], shown["settings"]["UserMetadata"]) == ("PT30S", "<x/> \\1")
    assert told("rule", "list", "first/s") == [rule]
    assert peeklock("subscription", "delete", "first/s", "--yes").exit_code == 0


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("queue", "create", "q", "--lock-duration", "30x"), "'30x' is no duration such as 30s"),
        (("queue", "create", "q", "--default-ttl", "1s1h"), "is no duration"),
        (("queue", "create", "q", "--max-delivery-count", "many"), "must be a whole number"),
        (("queue", "create", "q", "--max-size", "1025KB"), "is no whole number of MB"),
        (("queue", "create", "q", "--set", "LockDuraton=PT30S"), "is not NAME=VALUE"),
        (("queue", "create", "q", "--set", "CreatedAt=now"), "is not NAME=VALUE"),
        (("queue", "create", "q", "--set", "RequiresSession=perhaps"), "must be true or false"),
        (("queue", "create", "q", "--user-metadata", "\x01"), "characters that XML cannot have"),
        (("queue", "create", "a//b"), "empty part"),
        (("queue", "show", "../x"), "one that is '.' or '..'"),
        (("queue", "delete", "--yes", "$Resources/queues"), "begins with a $"),
        (("queue", "show", "line\nfeed"), "characters that no name has"),
        (("queue", "show", "\udcff"), "characters that no name has"),
        (("queue", "update", "q"), "at least one setting"),
        (("queue", "update", "q", "--requires-session"), "No such option"),
        (("topic", "create", "t", "--lock-duration", "30s"), "No such option"),
        (("subscription", "show", "topic"), "is not TOPIC/SUBSCRIPTION"),
        (("rule", "show", "topic/s"), "is not TOPIC/SUBSCRIPTION/RULE"),
        (("rule", "create", "t/s/r", "--sql", "1=1", "--none"), "give one of"),
        (("rule", "create", "t/s/r", "--sql", "a = @low", "--parameter", "@lwo=1"), "'@lwo' is neither in --sql"),
        (("subscription", "create", "t/s", "--sql", "1=1", "--none"), "give one of"),
        (("subscription", "create", "t/s", "--rule-name", ""), "name"),
        (("subscription", "update", "t/s", "--sql", "1=1"), "No such option"),
        (("queue", "create", "q", "--sql", "1=1"), "No such option"),
        (("rule", "create", "t/s/r", "--field", "Nothing=1"), "NAME=TEXT"),
        (("rule", "create", "t/s/r", "--property", "x"), "--property"),
        (("rule", "create", "t/s/" + "r" * 51), "name"),
        (("queue", "list", "--http-endpoint", "localhost:5300"), "--http-endpoint"),
        (("queue", "list", "--http-endpoint", "http://u:p@localhost"), "--http-endpoint"),
        (("queue", "list", "--ca", "/nowhere.pem"), "--ca: /nowhere.pem: No such file"),
        (("queue", "list", "--ca", "/dev/null"), "--ca: /dev/null: has no certificates"),
        (("queue", "list", "--connection-string", "localhost"), "--connection-string"),
    ],
)  # fmt: skip
def test_wrong_use(error, arguments, words):
    assert words in " ".join(error(2, *arguments).split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("queue", "create", "q", "--lock-duration", "6m"), "LockDuration: must be at most PT5M"),
        (("queue", "create", "a?b#c%2e"), "name is not valid"),
        (("queue", "create", "<script>&\"'"), "name is not valid"),
        (("queue", "create", "x" * 261), "name is not valid"),
        (("queue", "create", "q", "--forward-to", "nowhere"), "nowhere"),
        (("queue", "create", "q", "--status", "Sleeping"), "Sleeping"),
        (("queue", "show", "%2e%2e/x"), "could not be found"),
        (("subscription", "create", "nowhere/s"), "could not be found"),
        (("rule", "create", "nowhere/s/r"), "could not be found"),
        (("queue", "delete", "nowhere", "--yes"), "could not be found"),
        (("queue", "update", "nowhere", "--lock-duration", "5s"), "could not be found"),
    ],
)  # fmt: skip
def test_what_the_broker_refuses_is_one_message(error, arguments, words):
    text = error(1, *arguments)
    assert words in text
    assert text.count("\n") == 1
    assert text.startswith("peeklock: ")
    assert not re.search(r"SubCode|TrackingId", text)


def test_a_wrong_key(error, broker):
    wrong = broker.connection_string_for(KEY_NAME, "wrong")
    text = error(1, "queue", "list", "--connection-string", wrong)
    assert text == "peeklock: InvalidSignature: The token has an invalid signature. (status 401, sub code 40103)\n"


def test_no_broker(error):
    text = error(1, "queue", "list", "--http-endpoint", "http://127.0.0.1:1")
    assert text == "peeklock: cannot connect to http://127.0.0.1:1: Connection refused\n"


def test_a_port_that_is_not_the_management_apis(error, broker):
    text = error(1, "queue", "list", "--http-endpoint", f"http://127.0.0.1:{broker.ops_port}")
    assert text.startswith("peeklock: ")
    text = error(1, "queue", "list", "--http-endpoint", f"http://127.0.0.1:{broker.amqp_port}")
    assert text.startswith(f"peeklock: no answer of HTTP from http://127.0.0.1:{broker.amqp_port}")
    assert text.count("\n") == 1


def test_tls_where_there_is_none(error, broker):
    text = error(1, "queue", "list", "--http-endpoint", f"https://127.0.0.1:{broker.http_port}")
    assert text.startswith(f"peeklock: cannot connect to https://127.0.0.1:{broker.http_port}: ")
    assert text.count("\n") == 1


def test_no_connection_string(error, monkeypatch):
    monkeypatch.delenv(CONNECTION_STRING_VARIABLE)
    assert CONNECTION_STRING_VARIABLE in error(2, "queue", "list")
