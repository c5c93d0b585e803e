"""`peeklock dead-letter`: messages into the dead-letter queue."""

from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.messages import QueueArgument, counted, is_dead_letter, require_values
from broker.cli.output import JsonOption, print_json
from broker.cli.taking.taken import Taken, run_taking
from broker.cli.taking.wishes import SessionOption, WhereOption, wish_of
from broker.cli.target import BrokerOptions, connected

if TYPE_CHECKING:
    from broker.cli.progress import Bar
    from protocol.client.connection import Connection
    from protocol.client.links import Received, Receiver
    from protocol.client.messages import Message
    from protocol.client.requests import Management

app = typer.Typer()


@app.command("dead-letter")
@connected
def dead_letter(
    broker: BrokerOptions,
    queue: QueueArgument,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, metavar="N", help="At most N messages, the oldest; by default 1, or with --where all."
        ),
    ] = None,
    numbers: Annotated[
        list[int] | None,
        typer.Option(
            "--number",
            min=1,
            max=(1 << 63) - 1,
            metavar="N",
            help="The message with this sequence number; may be repeated.",
        ),
    ] = None,
    where: WhereOption = None,
    session: SessionOption = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Its DeadLetterReason.")] = None,
    description: Annotated[
        str | None, typer.Option("--description", metavar="TEXT", help="Its DeadLetterErrorDescription.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Move messages to the dead-letter queue of their queue or subscription. Needs the right Listen.

    Active messages are meant; with --number also deferred ones.
    """
    if is_dead_letter(queue):
        raise typer.BadParameter("is a dead-letter queue", param_hint="QUEUE")
    if numbers and (count is not None or where is not None or session is not None):
        raise typer.BadParameter("does not go with --count, --where or --session", param_hint="--number")
    require_values({"reason": reason, "description": description})
    wish = wish_of(count or (1 if where is None else None), where, session)

    async def work(connection: "Connection", done: Taken, bar: "Bar") -> None:
        from broker.cli.taking.selection import Wish
        from broker.cli.taking.work import Taking

        async def reject(receiver: "Receiver", received: "Received", _: "Message") -> None:
            await receiver.reject(received, reason, description)

        async def reject_deferred(management: "Management", number: int, session_id: str | None) -> None:
            tokens = await management.lock_deferred([number], session_id)
            await management.dead_letter(tokens, reason, description, session_id)

        meant = Wish(numbers=numbers) if numbers else wish
        await Taking(connection, queue, meant, done, bar, reject, reject_deferred).run()

    def report(handled: int) -> None:
        if as_json:
            print_json({"entity": queue, "dead_lettered": handled})
        else:
            typer.echo(f"{counted(handled)} dead-lettered from {queue}")

    run_taking(broker, queue, f"dead-lettering of {queue}", work, report)
