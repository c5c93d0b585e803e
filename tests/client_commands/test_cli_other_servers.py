"""Commands that need Peeklock, against a server that is none: one clear message, whatever that answers."""

import asyncio
from types import MappingProxyType

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from protocol.engine.deliveries import ACCEPTED, settle
from protocol.nodes import request_message
from tests.protocol_client.scripted_peer import ScriptedPeer

OF_PEEKLOCK = [
    (("purge", "q", "--yes"), "peeklock:purge"),
    (("queues",), "peeklock:list-counts"),
    (("move", "q", "--to", "1"), "peeklock:move-entity"),
    (("top", "--once"), "peeklock:list-counts"),
]
ANSWERS = [
    (501, "amqp:not-implemented"),
    (400, "com.microsoft:argument-error"),
    (404, "amqp:not-found"),
    (500, None),
]


def answering(status, condition, known=MappingProxyType({})):
    """A peer whose management nodes answer each request like this, except those for the `known` operations."""
    peer = ScriptedPeer()

    def answer(link, delivery):
        settle(delivery, ACCEPTED)
        request = request_message.parse(peer.messages[-1])
        operation = request.properties["operation"]
        given, why = known.get(operation, (status, condition))
        properties = {"statusCode": given, "statusDescription": f"No {operation} here."}
        if why:
            properties["errorCondition"] = why
        [responses] = [each for each in peer.links if each.is_sender and each.target_address == request.reply_to]
        responses.send(b"t", request_message.encode_response(request, properties, {}), b"", 0, True)

    peer.on_message = answer
    return peer


async def run(peer, *arguments):
    async with peer:
        given = "--connection-string", f"Endpoint=amqp://127.0.0.1:{peer.port}"
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *given])
    assert (result.exit_code, result.stdout) == (1, ""), result
    assert result.stderr.startswith("peeklock: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(("arguments", "operation"), OF_PEEKLOCK)
@pytest.mark.parametrize(("status", "condition"), ANSWERS)
async def test_a_server_that_does_not_know_the_operation(arguments, operation, status, condition):
    text = await run(answering(status, condition), *arguments)
    assert text.startswith(f"peeklock: this needs Peeklock; the server does not know {operation} and says: ")
    assert f"No {operation} here." in text


@pytest.mark.parametrize("arguments", [each for each, operation in OF_PEEKLOCK if operation != "peeklock:purge"])
async def test_a_server_without_a_node_for_the_namespace(arguments):
    peer = ScriptedPeer()
    peer.on_attach = lambda link: link.refuse("amqp:not-found", "There is no '$management'.")
    text = await run(peer, *arguments)
    assert "this needs Peeklock" in text
    assert "There is no '$management'." in text


@pytest.mark.parametrize(
    ("status", "condition"),
    [(404, "amqp:not-found"), (401, "amqp:unauthorized-access"), (503, "com.microsoft:server-busy")],
)
async def test_a_failure_of_an_operation_that_the_server_has_is_told_as_it_is(status, condition):
    known = {"peeklock:move-entity": (status, condition)}
    text = await run(answering(501, "amqp:not-implemented", known), "move", "q", "--to", "1")
    assert text == f"peeklock: No peeklock:move-entity here. ({condition})\n"
