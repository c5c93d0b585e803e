"""The options that all clients of a broker have are in one place."""

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from broker.cli.target import BrokerOptions, connected, connected_by_http

VARIABLES = ("PEEKLOCK_CONNECTION_STRING", "PEEKLOCK_HTTP_ENDPOINT", "PEEKLOCK_CA_FILE")


def run(decorate, *arguments, environment=None) -> tuple[list[tuple[str, BrokerOptions]], str]:
    got: list[tuple[str, BrokerOptions]] = []
    app = typer.Typer()

    @app.command()
    @decorate
    def look(broker: BrokerOptions, name: Annotated[str, typer.Argument()]) -> None:
        """Look at it."""
        got.append((name, broker))

    @app.command()
    def other() -> None:
        """Make `look` one of several commands, so that its name is part of the command line."""

    variables: dict[str, str | None] = dict.fromkeys(VARIABLES)
    result = CliRunner().invoke(app, ["look", *arguments], env=variables | (environment or {}))
    return got, result.output


def test_a_command_gets_what_its_options_say():
    got, _ = run(connected, "a", "--connection-string", "text", "--ca", "file")
    assert got == [("a", BrokerOptions("text", "file"))]
    got, _ = run(connected_by_http, "a", "--connection-string", "text", "--http-endpoint", "url", "--ca", "file")
    assert got == [("a", BrokerOptions("text", "file", "url"))]


def test_a_command_gets_what_the_variables_say():
    got, _ = run(connected_by_http, "a", environment=dict(zip(VARIABLES, ("text", "url", "file"), strict=True)))
    assert got == [("a", BrokerOptions("text", "file", "url"))]


def test_without_options_nothing_is_said():
    assert run(connected, "a")[0] == [("a", BrokerOptions(None, None))]


@pytest.mark.parametrize(("decorate", "has_http"), [(connected, False), (connected_by_http, True)])
def test_the_help_is_that_of_the_command_with_the_options(decorate, has_http):
    _, text = run(decorate, "--help")
    assert "Look at it." in text
    assert "--connection-string" in text
    assert "--ca" in text
    assert ("--http-endpoint" in text) is has_http
    assert "broker" not in text.split("--", 1)[0].lower()
