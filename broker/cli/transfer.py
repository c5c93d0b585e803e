"""`peeklock transfer`: messages from one entity to another, each in a transaction of its own."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.dead_letters import WhereOption
from broker.cli.ending import fail
from broker.cli.messages import QueueArgument, address_of, corrected, counted, require_values
from broker.cli.messaging import run
from broker.cli.output import JsonOption, print_json
from broker.cli.pairs import SetOption, UnsetOption, pairs
from broker.cli.progress import progress
from broker.cli.target import CaFileOption, ConnectionStringOption

if TYPE_CHECKING:
    from broker.cli.taking import Taken, Wanted
    from protocol.client.connection import Connection
    from protocol.client.links import Received
    from protocol.client.messages import Message

app = typer.Typer()


@app.command()
def transfer(
    queue: QueueArgument,
    to: Annotated[str, typer.Argument(metavar="ENTITY", help="The queue or topic that gets them.")],
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="N", help="At most N messages; by default all active ones."),
    ] = None,
    where: WhereOption = None,
    changes: SetOption = None,
    removals: UnsetOption = None,
    dead_letter: Annotated[bool, typer.Option("--dead-letter", help="Take them from its dead-letter queue.")] = False,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Move active messages to another entity, the oldest first. Needs Listen and Send there, and Send here.

    Each is completed and sent in one transaction, through the entity that it leaves: it is lost at no time, and never
    there twice. What the other entity cannot take is in the transfer dead-letter queue of the first.
    """
    values = pairs(changes, "--set")
    require_values(values)
    source = address_of(queue, dead_letter)

    async def work(connection: "Connection") -> "Taken":
        return await _transfer(connection, queue, source, to, count, _condition(where), values, removals or [])

    done = run(connection_string, ca, work)
    if as_json:
        print_json({"entity": source, "to": to, "moved": done.handled})
    else:
        typer.echo(f"{counted(done.handled)} moved from {source} to {to}")
    if done.failure is not None:
        fail(str(done.failure))


async def _transfer(
    connection: "Connection",
    queue: str,
    source: str,
    to: str,
    count: int | None,
    wanted: "Wanted | None",
    changes: Mapping[str, Any],
    removals: Sequence[str],
) -> "Taken":
    import asyncio

    from broker.cli.taking import take
    from protocol.client.errors import ClientError

    counts = await (await connection.management(queue)).counts()
    # Messages that come back meanwhile, as from a topic that forwards here, must not go round and round.
    there = counts.active if source == queue else counts.dead_lettered
    # A transaction is on the partitions of one entity. A subscription is where its topic is, which can be sent to.
    through = re.split(r"/subscriptions/", queue, maxsplit=1, flags=re.IGNORECASE)[0]
    sender = await connection.sender(to, through=through)
    receiver = await connection.receiver(source, credit=0)
    coordinator = await connection.coordinator()

    in_turn = asyncio.Lock()  # so that they keep their order

    async def move(received: "Received", message: "Message") -> None:
        async with in_turn:
            transaction = await coordinator.declare()
            try:
                await sender.send(corrected(message, changes, removals).encode(), transaction)
                await receiver.accept(received, transaction)
            except ClientError:
                await coordinator.roll_back(transaction)
                raise
            await coordinator.commit(transaction)

    most = there if count is None else min(there, count)
    with progress(f"moving to {to}", most) as advance:
        return await take(receiver, wanted, move, most=most, look_at=there, advance=advance)


def _condition(where: str | None) -> "Wanted | None":
    from broker.cli.filtering import condition

    return None if where is None else condition(where)
