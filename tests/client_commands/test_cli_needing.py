"""An option that has no effect where it is given is refused by name; a variable, which is for all commands, is not."""

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["capture", "x", "--ops-host", "0.0.0.0"], "--ops-host: needs --ops-port"),
        (["syphon", "--ops-host", "0.0.0.0"], "--ops-host: needs --ops-port"),
        (["pair", "--ops-host", "0.0.0.0"], "--ops-host: needs --ops-port"),
        (
            ["pair", "--backlog-queues", "3", "cost", "--messages", "1", "--outage", "1h"],
            "--backlog-queues: has no effect before `cost`",
        ),
        (["connection-string", "--tls", "--amqp-port", "5673"], "--amqp-port: is the port without TLS"),
    ],
)
def test_an_option_without_effect_is_refused(arguments, text):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())


def test_variables_may_be_set_for_other_commands(tmp_path):
    variables = {"PEEKLOCK_CONNECTION_STRING": "x", "PEEKLOCK_PRIMARY": "x", "PEEKLOCK_CA_FILE": "ca.pem"}
    assert CliRunner().invoke(app, ["verify", "--capture", str(tmp_path)], env=variables).exit_code == 1
    arguments = ["pair", "cost", "--messages", "1", "--outage", "1h"]
    assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0
