"""The commands of `peeklock` that are clients of a running broker: to send, receive, peek, purge, resend, and so on.

Each message is printed as one line of JSON. For a failure that the user can fix there is one message on standard error
and exit code 1; for a wrong command the exit code is 2.
"""

# The client and asyncio are imported inside the commands, so that others start faster.

import base64
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.messaging import run
from broker.cli.output import JsonOption, print_json
from broker.cli.pairs import PAIR_HELP, pairs
from broker.cli.progress import progress
from broker.cli.target import CaFileOption, ConnectionStringOption, parsed

if TYPE_CHECKING:
    from protocol.client.connection import Connection
    from protocol.client.links import Received, Receiver, Sender
    from protocol.client.messages import Message

DEAD_LETTER_SUFFIX = "/$deadletterqueue"
# Messages received at once. They must be settled before their locks expire.
BATCH = 100

app = typer.Typer()

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
DeadLetterOption = Annotated[bool, typer.Option("--dead-letter", help="Use the queue's dead-letter queue.")]


@app.command()
def send(
    entity: Annotated[str, typer.Argument(metavar="ENTITY", help="The name of a queue or topic.")],
    body: Annotated[
        str, typer.Option("--body", metavar="TEXT", help="The body; - reads the body from standard input.")
    ],
    count: Annotated[int, typer.Option("--count", min=1, metavar="N", help="Send the message N times.")] = 1,
    message_id: Annotated[
        str | None,
        typer.Option("--message-id", metavar="ID", help="The id of all messages; by default each has a new id."),
    ] = None,
    subject: Annotated[str | None, typer.Option("--subject", metavar="TEXT")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="PAIR", help=f"An application property, {PAIR_HELP}")
    ] = None,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Send messages to a queue or topic.

    After the first message that is refused no more are sent. How many are stored is printed also then.
    """
    from protocol.client.errors import ClientError, ConnectionLost, LinkDetached
    from protocol.client.messages import Message

    values = pairs(properties, "--property")
    data = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    given = stored = 0

    def message() -> bytes:
        identity = message_id or str(uuid.uuid4())
        return Message.of(data, message_id=identity, subject=subject, application_properties=values).encode()

    def messages() -> Iterator[bytes]:
        nonlocal given
        for _ in range(count):
            given += 1
            yield message()

    def report() -> None:
        if as_json:
            print_json({"entity": entity, "sent": stored})
        else:
            typer.echo(f"{_counted(stored)} sent to {entity}" + (f", of {count}" if stored < count else ""))

    try:
        message()
    except (TypeError, ValueError) as error:
        fail(f"AMQP has no such value: {error}", WRONG_USE)
    with progress(f"sending to {entity}", count) as advance:

        def on_accepted() -> None:
            nonlocal stored
            stored += 1
            advance(1)

        async def work(connection: "Connection") -> ClientError | None:
            sender = await connection.sender(entity)
            try:
                await sender.send_all(messages(), on_accepted)
            except ClientError as error:
                return error
            return None

        try:
            failure = run(connection_string, ca, work)
        except KeyboardInterrupt:
            report()
            raise
    report()
    if failure is not None:
        is_open = isinstance(failure, ConnectionLost | LinkDetached) and given > stored
        fail(f"{failure}{f'; up to {given - stored} more may be stored' if is_open else ''}")


@app.command()
def receive(
    queue: QueueArgument,
    count: Annotated[int, typer.Option("--count", min=1, metavar="N", help="At most N messages.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Give the messages back instead of completing them.")] = False,
    dead_letter: DeadLetterOption = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for a first message.")
    ] = 0.0,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Print messages, and complete each once it is printed."""
    import asyncio

    async def work(connection: "Connection") -> int:
        receiver = await connection.receiver(_address(queue, dead_letter), credit=0)
        kept: list[Received] = []
        done = 0
        while done < count:
            taken = await receiver.fetch(min(BATCH, count - done), wait if not done else 0)
            if not taken:
                break
            for received in taken:
                _print_message(received.message())
            sys.stdout.flush()
            if keep:
                kept += taken  # kept locked until the end, else they would be received again
            else:
                await asyncio.gather(*map(receiver.accept, taken))
            done += len(taken)
        await asyncio.gather(*map(receiver.release, kept))
        return done

    if not run(connection_string, ca, work):
        typer.echo(f"peeklock: nothing to receive from {_address(queue, dead_letter)}", err=True)


@app.command()
def peek(
    queue: QueueArgument,
    count: Annotated[int, typer.Option("--count", min=1, metavar="N", help="At most N messages.")] = 10,
    start: Annotated[int, typer.Option("--from", min=0, metavar="NUMBER", help="The lowest sequence number.")] = 0,
    dead_letter: DeadLetterOption = False,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Print messages in any state without taking them."""
    from protocol.client.messages import Message

    async def work(connection: "Connection") -> None:
        management = await connection.management(_address(queue, dead_letter))
        left, number = count, start
        while left > 0 and (found := await management.peek(left, number)):
            for each in found:
                message = Message.decode(each)
                _print_message(message)
                number = (message.sequence_number or 0) + 1
            left -= len(found)

    run(connection_string, ca, work)


@app.command()
def purge(
    queue: QueueArgument,
    dead_letter: DeadLetterOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Delete all messages that are not locked, deferred and scheduled ones as well. Needs the right Manage."""
    address = _address(queue, dead_letter)
    if not yes:
        typer.confirm(f"Delete all messages of {address}?", abort=True, err=True)

    async def work(connection: "Connection") -> int:
        return await (await connection.management(address)).purge()

    typer.echo(f"{_counted(run(connection_string, ca, work))} deleted from {address}")


@app.command()
def queues(connection_string: ConnectionStringOption = None, ca: CaFileOption = None) -> None:
    """Print all queues with the counts of their messages. Needs the right Manage on the namespace."""

    async def work(connection: "Connection") -> list[list[str]]:
        rows = []
        for name, of in (await connection.counts()).items():
            here = (of.active, of.locked, of.deferred, of.scheduled, of.dead_lettered)
            rows.append([name, *map(str, (*here, of.transfer, of.transfer_dead_lettered, of.size_bytes))])
        return rows

    head = ["QUEUE", "ACTIVE", "LOCKED", "DEFERRED", "SCHEDULED", "DEAD-LETTERED", "TRANSFER", "NOT-FORWARDED", "BYTES"]
    rows = [head, *run(connection_string, ca, work)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for name, *values in rows:
        cells = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
        typer.echo("  ".join([name.ljust(widths[0]), *cells]))


@app.command()
def move(
    path: Annotated[str, typer.Argument(metavar="ENTITY", help="The name of a queue or topic.")],
    to: Annotated[int, typer.Option("--to", min=0, metavar="PARTITION", help="The number of the partition.")],
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Move a queue, or a topic with its subscriptions, to another partition. Needs the right Manage on the namespace.

    Clients go on using it: in the end locks are lost, and it refuses everything as busy for a moment.
    """

    async def work(connection: "Connection") -> None:
        await connection.move(path, to)

    run(connection_string, ca, work)
    typer.echo(f"{path} is on partition {to}")


@app.command()
def token(
    entity: Annotated[str, typer.Argument(metavar="ENTITY", help="Queue or topic; by default the namespace.")] = "",
    minutes: Annotated[int, typer.Option("--minutes", min=1, max=60 * 24 * 366, metavar="N", help="How long.")] = 60,
    connection_string: ConnectionStringOption = None,
) -> None:
    """Print a token for the Authorization header of HTTP requests."""
    from protocol.client.connection_string import SharedAccessKey
    from protocol.nodes.sas_tokens import generate

    target = parsed(connection_string)
    key = target.credentials
    if not isinstance(key, SharedAccessKey):
        fail("the connection string has no SharedAccessKey to sign with", WRONG_USE)
    resource = f"https://{target.host}/{quote(entity.strip('/'))}"
    typer.echo(generate(resource, key.name, key.key, int(time.time()) + 60 * minutes))


@app.command()
def resend(
    queue: QueueArgument,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="N", help="At most N messages; by default all that are there now."),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PAIR", help=f"Set an application property, {PAIR_HELP}")
    ] = None,
    removals: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="NAME", help="Remove an application property; may be repeated."),
    ] = None,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Send dead-lettered messages to their queue again, the oldest first, with properties corrected.

    A message leaves the dead-letter queue once its copy is stored; if that fails in between, it is there twice, under
    the same message id.
    """
    values = pairs(changes, "--set")

    async def work(connection: "Connection") -> int:
        return await _resend(connection, queue, count, values, removals or [])

    typer.echo(f"{_counted(run(connection_string, ca, work))} sent to {queue} again")


async def _resend(
    connection: "Connection", queue: str, count: int | None, changes: Mapping[str, Any], removals: Sequence[str]
) -> int:
    import asyncio

    # Messages that return to the dead-letter queue meanwhile must not be sent again and again.
    left = (await (await connection.management(queue)).counts()).dead_lettered
    if count is not None:
        left = min(left, count)
    sender = await connection.sender(queue)
    receiver = await connection.receiver(queue + DEAD_LETTER_SUFFIX, credit=0)
    done = 0
    while left > 0 and (taken := await receiver.fetch(min(left, BATCH))):
        moves = (_move(receiver, sender, received, changes, removals) for received in taken)
        failures = [each for each in await asyncio.gather(*moves, return_exceptions=True) if each is not None]
        done += len(taken) - len(failures)
        left -= len(taken)
        if failures:
            typer.echo(f"{_counted(done)} sent to {queue} again", err=True)
            raise failures[0]
    return done


async def _move(
    receiver: "Receiver", sender: "Sender", received: "Received", changes: Mapping[str, Any], removals: Sequence[str]
) -> None:
    from protocol.client.errors import ClientError

    try:
        await sender.send(corrected(received.message(), changes, removals).encode())
    except BaseException:
        with suppress(ClientError):
            await receiver.release(received)
        raise
    await receiver.accept(received)


def corrected(message: "Message", changes: Mapping[str, Any], removals: Sequence[str] = ()) -> "Message":
    """A dead-lettered message as a message to send again: without the broker's annotations, with changed properties.

    Its time to live starts again.
    """
    from protocol import symbols

    for annotation in (
        symbols.SEQUENCE_NUMBER,
        symbols.ENQUEUED_TIME,
        symbols.LOCKED_UNTIL,
        symbols.ENQUEUE_SEQUENCE_NUMBER,
        symbols.DEADLETTER_SOURCE,
        symbols.MESSAGE_STATE,
        symbols.SCHEDULED_ENQUEUE_TIME,
    ):
        message.annotations.pop(annotation, None)
    for name in (symbols.DEAD_LETTER_REASON, symbols.DEAD_LETTER_ERROR_DESCRIPTION, *removals):
        message.application_properties.pop(name, None)
    message.application_properties.update(changes)
    message.delivery_count = None
    if message.ttl_ms is not None:
        # If there is a time to live, the broker has set these, from the time to live that has ended.
        message.absolute_expiry_ms = message.creation_ms = None
    return message


# --- shared by the commands -------------------------------------------------------------------------------------------


def _address(queue: str, dead_letter: bool) -> str:
    return queue + DEAD_LETTER_SUFFIX if dead_letter else queue


def _counted(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"


def _print_message(message: "Message") -> None:
    """One line of JSON; what the message does not have is left out."""
    annotations = message.annotations
    times = {
        name: datetime.fromtimestamp(annotations[key] / 1000, UTC).isoformat(timespec="milliseconds")
        for name, key in (("enqueued", "x-opt-enqueued-time"), ("scheduled", "x-opt-scheduled-enqueue-time"))
        if key in annotations
    }
    state = annotations.get("x-opt-message-state")
    fields = {
        "sequence_number": message.sequence_number,
        "message_id": message.message_id,
        "subject": message.subject,
        "content_type": message.content_type,
        "correlation_id": message.correlation_id,
        "session_id": message.group_id,
        "delivery_count": message.delivery_count,
        "state": None if state is None else ("active", "deferred", "scheduled")[state],
        **times,
        "properties": message.application_properties or None,
    }
    shown = {name: _plain(value) for name, value in fields.items() if value is not None}
    typer.echo(json.dumps(shown | {"body": _plain(message.content())}, ensure_ascii=False))


def _plain(value: Any) -> Any:
    """An AMQP value as a JSON value; bytes that are not text become {"base64": ...}."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, str | int | float | None):
        return value
    try:
        return [_plain(item) for item in value]
    except TypeError:
        return str(value)
