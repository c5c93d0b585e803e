"""`peeklock receive`: prints messages and completes them."""

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from broker.cli.delaying import DelayOption, put_off
from broker.cli.messages import DeadLetterOption, QueueArgument, address_of, print_message
from broker.cli.messaging import run
from broker.cli.target import BrokerOptions, connected

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from protocol.client.connection import Connection
    from protocol.client.links import Received, Receiver
    from protocol.client.requests import Management

BATCH: Final = 100  # messages received at once. They must be settled before their locks expire.
NEXT_SESSION_SECONDS: Final = 0.5  # a server says that there is no other session only when a wait has ended

app = typer.Typer()


@app.command()
@connected
def receive(
    broker: BrokerOptions,
    queue: QueueArgument,
    count: Annotated[int, typer.Option("--count", min=1, metavar="N", help="At most N messages.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Give the messages back instead of completing them.")] = False,
    delay: DelayOption = None,
    dead_letter: DeadLetterOption = False,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="ID",
            help="Of an entity that requires sessions: from this one; by default from all that are free, in turn.",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for a first message.")
    ] = 0.0,
) -> None:
    """Print messages, and complete each once it is printed."""
    if dead_letter and session is not None:
        raise typer.BadParameter("dead-letter queues have no sessions", param_hint="--session")
    if delay is not None and not keep:
        raise typer.BadParameter("needs --keep", param_hint="--delay")
    address = address_of(queue, dead_letter)

    async def work(connection: "Connection") -> int:
        from contextlib import AsyncExitStack

        from broker.cli.taking.work import ordinary_receiver

        management = await connection.management(address)
        async with AsyncExitStack() as kept:
            if session is not None:
                receiver: Receiver | None = await connection.accept_session(address, session)
            else:
                receiver = await ordinary_receiver(connection, address)
            if receiver is not None:
                return await _receive(receiver, management, count, wait, kept if keep else None, delay)
            done = 0
            while done < count:
                patience = max(NEXT_SESSION_SECONDS, 0 if done else wait)
                following = await connection.accept_next_session(address, patience)
                if following is None:
                    break
                more = await _receive(following, management, count - done, patience, kept if keep else None, delay)
                done += more
                if not keep:
                    await following.close()
                if not more:
                    break
            return done

    if not run(broker, work, queue):
        typer.echo(f"peeklock: nothing to receive from {address}", err=True)


async def _receive(
    receiver: "Receiver",
    management: "Management",
    count: int,
    wait_s: float,
    kept: "AsyncExitStack | None",
    delay_ms: int | None,
) -> int:
    """Print messages and complete them; or keep them until `kept` ends, else they would come again.

    With `delay_ms` those that are kept are put off at once.
    """
    import asyncio
    from contextlib import AsyncExitStack

    from broker.cli.taking.held import Held

    done = first_number = 0
    printed: list[Received] = []
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(Held(receiver, management))  # what cannot be printed is given back
        while done < count and held.room > 0:
            taken = await receiver.fetch(min(BATCH, count - done, held.room), 0 if done else wait_s)
            if not taken:
                break
            messages = [received.message() for received in taken]
            for received in taken:
                held.add(received)
            for message in messages:
                print_message(message)
            sys.stdout.flush()
            if kept is None:
                await held.take(taken)
                await asyncio.gather(*map(receiver.accept, taken))
            elif delay_ms is not None:
                printed += taken
                first_number = first_number or messages[0].sequence_number or 0
            done += len(taken)
        if delay_ms is not None:
            await held.take(printed)
            await put_off(management, receiver, printed, first_number, delay_ms)
        if kept is not None:
            kept.push_async_exit(stack.pop_all())
            if held.room <= 0 and done < count:
                typer.echo(f"peeklock: no more than {Held.MOST} messages can be kept at once", err=True)
    return done
