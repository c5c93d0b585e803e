"""The commands of `peeklock` that are clients of a running broker: to send, peek, purge, and so on.

Each message is printed as one line of JSON. For a failure that the user can fix there is one message on standard error
and exit code 1; for a wrong command the exit code is 2.
"""

# The client and asyncio are imported inside the commands, so that others start faster.

import os
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import typer

from broker.cli.ending import WRONG_USE, fail, told
from broker.cli.listing import Columns, print_entities
from broker.cli.messages import DeadLetterOption, QueueArgument, StateOption, address_of, counted, named, print_message
from broker.cli.messaging import run
from broker.cli.output import JsonOption, print_json
from broker.cli.pairs import PAIR_HELP, pairs
from broker.cli.progress import progress
from broker.cli.taking.wishes import SessionOption
from broker.cli.target import BrokerOptions, ConnectionStringOption, connected, parsed
from broker.printable import printable
from storage import wording

if TYPE_CHECKING:
    from protocol.client.connection import Connection
    from protocol.client.requests import QueueCounts

app = typer.Typer()

_COLUMNS: Final[Columns] = {
    "ACTIVE": itemgetter("active"),
    "LOCKED": itemgetter("locked"),
    "DEFERRED": itemgetter("deferred"),
    "SCHEDULED": itemgetter("scheduled"),
    "DEAD-LETTERED": itemgetter("dead_lettered"),
    "TRANSFER": itemgetter("transfer"),
    "NOT-FORWARDED": itemgetter("transfer_dead_lettered"),
    "BYTES": itemgetter("size_bytes"),
}


@app.command()
@connected
def send(
    broker: BrokerOptions,
    entity: Annotated[str, typer.Argument(metavar="ENTITY", help="The name of a queue or topic.", callback=named)],
    body: Annotated[
        str, typer.Option("--body", metavar="TEXT", help="The body; - reads the body from standard input.")
    ],
    count: Annotated[int, typer.Option("--count", min=1, metavar="N", help="Send the message N times.")] = 1,
    message_id: Annotated[
        str | None,
        typer.Option("--message-id", metavar="ID", help="The id of all messages; by default each has a new id."),
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="The session that they belong to.")
    ] = None,
    subject: Annotated[str | None, typer.Option("--subject", metavar="TEXT")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="PAIR", help=f"An application property, {PAIR_HELP}")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send messages to a queue or topic.

    After the first message that is refused no more are sent. How many are stored is printed also then.
    """
    from protocol.client.errors import ClientError, ConnectionLost, LinkDetached
    from protocol.client.messages import Message

    values = pairs(properties, "--property")
    if body == "-" and sys.stdin is None:
        fail("--body: standard input is closed", WRONG_USE)
    data = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    given = stored = 0

    def message() -> bytes:
        identity = message_id or str(uuid.uuid4())
        fields = {"message_id": identity, "subject": subject, "group_id": session, "application_properties": values}
        return Message.of(data, **fields).encode()

    def messages() -> Iterator[bytes]:
        nonlocal given
        for _ in range(count):
            given += 1
            yield message()

    def report() -> None:
        if as_json:
            print_json({"entity": entity, "sent": stored})
        else:
            typer.echo(f"{counted(stored)} sent to {entity}" + (f", of {count}" if stored < count else ""))

    try:
        message()
    except (TypeError, ValueError) as error:
        fail(f"AMQP has no such value: {error}", WRONG_USE)

    def on_accepted() -> None:
        nonlocal stored
        stored += 1
        bar.advance()

    async def work(connection: "Connection") -> ClientError | None:
        sender = await connection.sender(entity)
        try:
            await sender.send_all(messages(), on_accepted)
        except ClientError as error:
            return error
        return None

    try:
        with progress(f"sending to {entity}", count) as bar:
            failure = run(broker, work)
    except KeyboardInterrupt:
        report()
        raise
    report()
    if failure is not None:
        is_open = isinstance(failure, ConnectionLost | LinkDetached) and given > stored
        fail(f"{told(failure)}{f'; up to {given - stored} more may be stored' if is_open else ''}")


@app.command()
@connected
def peek(
    broker: BrokerOptions,
    queue: QueueArgument,
    count: Annotated[int, typer.Option("--count", min=1, metavar="N", help="At most N messages.")] = 10,
    start: Annotated[
        int, typer.Option("--from", min=0, max=(1 << 63) - 1, metavar="NUMBER", help="The lowest sequence number.")
    ] = 0,
    state: StateOption = None,
    dead_letter: DeadLetterOption = False,
    session: SessionOption = None,
) -> None:
    """Print messages without taking them, in any state or in those that --state names."""
    address = address_of(queue, dead_letter)

    async def work(connection: "Connection") -> None:
        from broker.cli.taking.browsing import browse_some

        management = await connection.management(address)
        async for message in browse_some(management, address, count, start, state or (), session):
            print_message(message)

    run(broker, work, queue)


@app.command()
@connected
def purge(
    broker: BrokerOptions,
    queue: QueueArgument,
    state: StateOption = None,
    dead_letter: DeadLetterOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete all messages that are not locked, or only those in some states. Needs the right Manage."""
    address = address_of(queue, dead_letter)
    states = list(dict.fromkeys(state or ()))
    if not yes:
        which = f"all {' and '.join(states)} messages" if states else "all messages"
        typer.confirm(f"Delete {which} of {address}?", abort=True, err=True)

    async def work(connection: "Connection") -> int:
        return await (await connection.management(address)).purge([each.value for each in states])

    with progress(f"purging {address}"):
        deleted = run(broker, work, queue)
    if as_json:
        print_json({"entity": address, "deleted": deleted})
    else:
        typer.echo(f"{counted(deleted)} deleted from {address}")


@app.command()
@connected
def sessions(
    broker: BrokerOptions,
    queue: QueueArgument,
    as_json: JsonOption = False,
) -> None:
    """Print the ids of all sessions that have messages or a state, and their number."""

    async def work(connection: "Connection") -> list[str]:
        return [each async for each in (await connection.management(queue)).sessions()]

    found = run(broker, work, queue)
    if as_json:
        print_json(found)
    else:
        for each in found:
            typer.echo(printable(each))
        typer.echo(f"{wording.counted(len(found), 'session')} in {queue}", err=True)


@app.command()
@connected
def queues(broker: BrokerOptions, as_json: JsonOption = False) -> None:
    """Print all queues and subscriptions with the counts of their messages. Needs the right Manage on the namespace."""

    async def work(connection: "Connection") -> "dict[str, QueueCounts]":
        return await connection.counts()

    found = run(broker, work)
    print_entities("queue", [{"name": name, **asdict(of)} for name, of in found.items()], _COLUMNS, as_json)


@app.command()
@connected
def move(
    broker: BrokerOptions,
    path: Annotated[str, typer.Argument(metavar="ENTITY", help="The name of a queue or topic.", callback=named)],
    to: Annotated[
        int, typer.Option("--to", min=0, max=32_767, metavar="PARTITION", help="The number of the partition.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Move a queue, or a topic with its subscriptions, to another partition. Needs the right Manage on the namespace.

    Clients go on using it: in the end locks are lost, and it refuses everything as busy for a moment.
    """

    async def work(connection: "Connection") -> None:
        await connection.move(path, to)

    run(broker, work)
    if as_json:
        print_json({"entity": path, "partition": to})
    else:
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
