"""`peeklock transfer`: messages from one entity to another, each in a transaction of its own."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.messages import DeadLetterOption, QueueArgument, address_of, corrected, counted, named, require_values
from broker.cli.output import JsonOption, print_json
from broker.cli.pairs import SetOption, UnsetOption, pairs
from broker.cli.taking.taken import Taken, run_taking
from broker.cli.taking.wishes import CountOption, SessionOption, WhereOption, wish_of
from broker.cli.target import BrokerOptions, connected

if TYPE_CHECKING:
    from broker.cli.progress import Bar
    from protocol.client.connection import Connection
    from protocol.client.links import Received, Receiver
    from protocol.client.messages import Message

app = typer.Typer()


@app.command()
@connected
def transfer(
    broker: BrokerOptions,
    queue: QueueArgument,
    to: Annotated[str, typer.Argument(metavar="ENTITY", help="The queue or topic that gets them.", callback=named)],
    count: CountOption = None,
    where: WhereOption = None,
    session: SessionOption = None,
    changes: SetOption = None,
    removals: UnsetOption = None,
    dead_letter: DeadLetterOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move active messages to another entity, the oldest first.

    Needs Listen and Send on the first, and Send on the other.

    Each is completed and sent in one transaction, through the entity that it leaves: it is lost at no time, and never
    there twice. What the other entity cannot take is in the transfer dead-letter queue of the first.
    """
    values = pairs(changes, "--set")
    require_values(values)
    source = address_of(queue, dead_letter)
    wish = wish_of(count, where, session)

    async def work(connection: "Connection", done: Taken, bar: "Bar") -> None:
        from broker.cli.taking.moving import Mover
        from broker.cli.taking.work import Taking

        # A transaction is on the partitions of one entity. A subscription is where its topic is, which can be sent to.
        through = re.split(r"/subscriptions/", queue, maxsplit=1, flags=re.IGNORECASE)[0]
        mover = await Mover.attach(connection, through, to)

        async def move(receiver: "Receiver", received: "Received", message: "Message") -> None:
            await mover.move(receiver, received, corrected(message, values, removals or []).encode())

        await Taking(connection, source, wish, done, bar, move).run()

    def report(handled: int) -> None:
        if as_json:
            print_json({"entity": source, "to": to, "moved": handled})
        else:
            typer.echo(f"{counted(handled)} moved from {source} to {to}")

    run_taking(broker, queue, f"moving to {to}", work, report)
