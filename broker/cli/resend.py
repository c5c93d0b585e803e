"""`peeklock resend`: messages out of the dead-letter queue, and sent again."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.messages import (
    DEAD_LETTER_SUFFIX,
    QueueArgument,
    corrected,
    counted,
    named,
    print_message,
    require_values,
)
from broker.cli.messaging import run
from broker.cli.output import JsonOption, print_json
from broker.cli.pairs import SetOption, UnsetOption, pairs
from broker.cli.taking.taken import Taken, run_taking
from broker.cli.taking.wishes import CountOption, SessionOption, WhereOption, wish_of
from broker.cli.target import BrokerOptions, connected

if TYPE_CHECKING:
    from broker.cli.progress import Bar
    from broker.cli.taking.selection import Wish
    from protocol.client.connection import Connection
    from protocol.client.links import Received, Receiver
    from protocol.client.messages import Message

app = typer.Typer()


@app.command()
@connected
def resend(
    broker: BrokerOptions,
    queue: QueueArgument,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="ENTITY",
            help="Where to send them; by default the queue that they come from.",
            callback=named,
        ),
    ] = None,
    count: CountOption = None,
    where: WhereOption = None,
    session: SessionOption = None,
    changes: SetOption = None,
    removals: UnsetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the messages as they would be sent, and leave them as they are.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Send dead-lettered messages to their queue again, the oldest first, with properties corrected.

    A message leaves the dead-letter queue once its copy is stored; if that fails in between, it is there twice, under
    the same message id. --where sees a message as it is in the dead-letter queue, with DeadLetterReason.
    """
    if to is None and "/subscriptions/" in queue.lower():
        fail(
            "nothing can be sent to a subscription: give --to, perhaps its topic, all of whose subscriptions get it",
            WRONG_USE,
        )
    target, source = to or queue, queue + DEAD_LETTER_SUFFIX
    values = pairs(changes, "--set")
    require_values(values)
    wish = wish_of(count, where, session)

    if dry_run:

        async def look(connection: "Connection") -> int:
            return await _print_those(connection, source, wish, values, removals or [])

        shown = run(broker, look, queue)
        typer.echo(f"{counted(shown)} would be sent to {target}", err=True)
        return

    async def work(connection: "Connection", done: Taken, bar: "Bar") -> None:
        from broker.cli.taking.work import Taking

        sender = await connection.sender(target)

        async def move(receiver: "Receiver", received: "Received", message: "Message") -> None:
            await sender.send(corrected(message, values, removals or []).encode())
            await receiver.accept(received)

        await Taking(connection, source, wish, done, bar, move).run()

    def report(handled: int) -> None:
        if as_json:
            print_json({"entity": queue, "to": target, "sent": handled})
        else:
            typer.echo(f"{counted(handled)} sent to {target} again")

    run_taking(broker, queue, f"sending to {target} again", work, report)


async def _print_those(
    connection: "Connection", source: str, wish: "Wish", changes: Mapping[str, Any], removals: Sequence[str]
) -> int:
    from contextlib import aclosing

    from broker.cli.taking.selection import matching
    from protocol.client.browsing import last_numbers

    management = await connection.management(source)
    shown = 0
    async with aclosing(matching(management, source, wish, await last_numbers(management), omit_body=False)) as found:
        async for message in found:
            print_message(corrected(message, changes, removals))
            shown += 1
            if shown == wish.count:
                break
    return shown
