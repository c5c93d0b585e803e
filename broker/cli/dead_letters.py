"""`peeklock dead-letter` and `peeklock resend`: messages into the dead-letter queue, and out of it again."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.messages import (
    DEAD_LETTER_SUFFIX,
    QueueArgument,
    browsed,
    corrected,
    counted,
    print_message,
    require_values,
)
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

_STATES = {1: "deferred", 2: "scheduled"}

WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="SQL",
        help="Only messages for which this condition of rules is true, such as \"level > 3 AND sys.Label LIKE 'a%'\".",
    ),
]


@app.command("dead-letter")
def dead_letter(
    queue: QueueArgument,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="N", help="At most N messages, the oldest first; 1 by default."),
    ] = None,
    numbers: Annotated[
        list[int] | None,
        typer.Option("--number", min=1, metavar="N", help="The message with this sequence number; may be repeated."),
    ] = None,
    where: WhereOption = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Its DeadLetterReason.")] = None,
    description: Annotated[
        str | None, typer.Option("--description", metavar="TEXT", help="Its DeadLetterErrorDescription.")
    ] = None,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
) -> None:
    """Move messages to the dead-letter queue of their queue or subscription. Needs the right Listen.

    Active messages are meant; with --number also deferred ones.
    """
    if numbers and (count is not None or where is not None):
        raise typer.BadParameter("does not go with --count or --where", param_hint="--number")
    require_values({"reason": reason, "description": description})
    wanted = None if where is None else _condition(where)
    most = len(set(numbers)) if numbers else count or 1

    with progress(f"dead-lettering of {queue}", most) as advance:

        async def work(connection: "Connection") -> "Taken":
            from broker.cli.taking import Taken, take

            deferred, active = await _by_state(connection, queue, numbers) if numbers else ([], None)
            done = Taken()
            if deferred:
                await _dead_letter_deferred(connection, queue, deferred, reason, description)
                done.handled = len(deferred)
                advance(done.handled)
            if active == set():
                return done
            receiver = await connection.receiver(queue, credit=0)

            async def reject(received: "Received", _: "Message") -> None:
                await receiver.reject(received, reason, description)

            chosen: Wanted | None = wanted if active is None else lambda message: message.sequence_number in active
            taken = await take(receiver, chosen, reject, most=most - done.handled, look_at=None, advance=advance)
            taken.handled += done.handled
            return taken

        done = run(connection_string, ca, work)
    if as_json:
        print_json({"entity": queue, "dead_lettered": done.handled})
    else:
        typer.echo(f"{counted(done.handled)} dead-lettered from {queue}")
    if done.failure is not None:
        fail(str(done.failure))
    if numbers and done.handled < most:
        fail(f"{counted(most - done.handled)} locked by another receiver, or gone")


async def _by_state(connection: "Connection", queue: str, numbers: Sequence[int]) -> tuple[list[int], set[int]]:
    """The numbers of deferred messages and of active ones. Ends the command if a number is no such message."""
    management = await connection.management(queue)
    deferred: list[int] = []
    active: set[int] = set()
    for number in sorted(set(numbers)):
        found = [message async for message in browsed(management, 1, number)]
        if not found or found[0].sequence_number != number:
            fail(f"{queue} has no message with the number {number}")
        match _STATES.get(found[0].annotations.get("x-opt-message-state", 0)):
            case "deferred":
                deferred.append(number)
            case "scheduled":
                fail(f"message {number} of {queue} is scheduled: it cannot be dead-lettered before its time")
            case _:
                active.add(number)
    return deferred, active


async def _dead_letter_deferred(
    connection: "Connection", queue: str, numbers: Sequence[int], reason: str | None, description: str | None
) -> None:
    management = await connection.management(queue)
    tokens = await management.lock_deferred(numbers)
    await management.dead_letter(tokens, reason, description)


@app.command()
def resend(
    queue: QueueArgument,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="ENTITY", help="Where to send them; by default the queue that they come from."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="N", help="At most N messages; by default all that are there now."),
    ] = None,
    where: WhereOption = None,
    changes: SetOption = None,
    removals: UnsetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the messages as they would be sent, and leave them as they are.")
    ] = False,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    ca: CaFileOption = None,
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
    target = to or queue
    values = pairs(changes, "--set")
    require_values(values)
    wanted = None if where is None else _condition(where)

    if dry_run:

        async def look(connection: "Connection") -> int:
            return await _print_those(connection, queue, count, wanted, values, removals or [])

        shown = run(connection_string, ca, look)
        typer.echo(f"{counted(shown)} would be sent to {target}", err=True)
        return

    async def work(connection: "Connection") -> "tuple[Taken, int]":
        return await _resend(connection, queue, target, count, wanted, values, removals or [])

    done, there = run(connection_string, ca, work)
    if as_json:
        print_json({"entity": queue, "to": target, "sent": done.handled})
    else:
        typer.echo(f"{counted(done.handled)} sent to {target} again")
    if done.failure is not None:
        fail(str(done.failure))
    if done.looked_at < there and (count is None or done.handled < count):
        typer.echo(f"peeklock: {counted(there - done.looked_at)} could not be looked at: others have them", err=True)


async def _print_those(
    connection: "Connection",
    queue: str,
    count: int | None,
    wanted: "Wanted | None",
    changes: Mapping[str, Any],
    removals: Sequence[str],
) -> int:
    there = (await (await connection.management(queue)).counts()).dead_lettered
    shown = 0
    async for message in browsed(await connection.management(queue + DEAD_LETTER_SUFFIX), there):
        if count is not None and shown == count:
            break
        if wanted is None or wanted(message):
            print_message(corrected(message, changes, removals))
            shown += 1
    return shown


async def _resend(
    connection: "Connection",
    queue: str,
    to: str,
    count: int | None,
    wanted: "Wanted | None",
    changes: Mapping[str, Any],
    removals: Sequence[str],
) -> "tuple[Taken, int]":
    """What was done, and the number of dead letters there were."""
    from broker.cli.taking import take

    # Messages that return to the dead-letter queue meanwhile must not be sent again and again.
    there = (await (await connection.management(queue)).counts()).dead_lettered
    sender = await connection.sender(to)
    receiver = await connection.receiver(queue + DEAD_LETTER_SUFFIX, credit=0)

    async def move(received: "Received", message: "Message") -> None:
        await sender.send(corrected(message, changes, removals).encode())
        await receiver.accept(received)

    most = there if count is None else min(there, count)
    with progress(f"sending to {to} again", most) as advance:
        return await take(receiver, wanted, move, most=most, look_at=there, advance=advance), there


def _condition(where: str) -> "Wanted":
    from broker.cli.filtering import condition

    return condition(where)
