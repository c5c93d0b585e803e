"""All commands with a connection string as Azure's: TLS for AMQP and for HTTP, and an authority of one's own."""

import json

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from tests.brokers import KEY, KEY_NAME, Broker
from tests.ports import free_ports

TALKS = "[[queues]]\nname = 'talks'\nrequires_session = true\n"


@pytest.fixture(scope="module")
def peeklock(tmp_path_factory):
    """Run a command with the addresses of a broker's ports with TLS."""
    directory = tmp_path_factory.mktemp("tls")
    assert CliRunner().invoke(app, ["ca", str(directory / "ca"), "--host", "localhost"]).exit_code == 0
    amqps, https = free_ports(2)
    files = f"certificate = '{directory}/ca/server.pem'\nkey = '{directory}/ca/server.key'\n"
    ports = f"[amqp]\ntls_port = {amqps}\n[http]\ntls_port = {https}\n[tls]\n{files}"
    environment = {
        "PEEKLOCK_CONNECTION_STRING": f"Endpoint=sb://localhost:{amqps};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY}",
        "PEEKLOCK_HTTP_ENDPOINT": f"https://localhost:{https}",
        "PEEKLOCK_CA_FILE": f"{directory}/ca/ca.pem",
    }
    with Broker(directory / "broker", ports + TALKS):

        def run(*arguments, **others):
            return CliRunner().invoke(app, list(arguments), env=environment | others)

        yield run


def done(result):
    assert result.exit_code == 0, result.output
    return result.stdout


def bodies(result):
    return [json.loads(line)["body"] for line in done(result).splitlines()]


def test_entities_and_messages(peeklock):
    done(peeklock("queue", "create", "orders"))
    done(peeklock("topic", "create", "news"))
    done(peeklock("subscription", "create", "news/red", "--sql", "color = @c", "--parameter", "@c=red"))
    assert [each["name"] for each in json.loads(done(peeklock("rule", "list", "news/red", "--json")))] == ["$Default"]
    for color in ("red", "blue"):
        done(peeklock("send", "news", "--body", color, "--property", f"color={color}"))
    assert bodies(peeklock("receive", "news/subscriptions/red", "--count", "9")) == ["red"]
    done(peeklock("send", "orders", "--body", "x", "--count", "5", "--property", "n:=1"))
    assert bodies(peeklock("peek", "orders")) == ["x"] * 5
    assert done(peeklock("dead-letter", "orders", "--where", "n = 1", "--count", "3")).startswith("3 messages")
    assert done(peeklock("resend", "orders", "--count", "1")).startswith("1 message ")
    assert done(peeklock("transfer", "orders", "news")).startswith("3 messages")
    assert done(peeklock("transfer", "orders", "orders", "--dead-letter")).startswith("2 messages")
    done(peeklock("queue", "update", "orders", "--forward-to", "news"))
    assert json.loads(done(peeklock("queue", "show", "orders", "--json")))["settings"]["ForwardTo"].endswith("/news")
    assert "orders" in done(peeklock("queues"))
    assert done(peeklock("sessions", "talks")) == ""
    assert done(peeklock("receive", "talks")) == ""
    for kind, name in (("subscription", "news/red"), ("topic", "news"), ("queue", "orders")):
        done(peeklock(kind, "delete", name, "--yes"))


@pytest.mark.parametrize("arguments", [("peek", "talks"), ("queue", "list")])
def test_an_authority_that_is_not_trusted(peeklock, arguments):
    result = peeklock(*arguments, PEEKLOCK_CA_FILE="")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "certificate verify failed" in result.stderr
    assert result.stderr.endswith("; --ca names the authority to trust\n")
    assert result.stderr.count("\n") == 1
