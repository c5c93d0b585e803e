"""What a command that takes messages out of an entity has done; it is said also if the rest failed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from broker.cli.ending import fail, told
from broker.cli.messaging import run
from broker.cli.progress import Bar, progress
from broker.cli.target import BrokerOptions

if TYPE_CHECKING:
    from protocol.client.connection import Connection


@dataclass(slots=True)
class Taken:
    """`handled` messages. `failure` ended the work. `left` says what else was meant and not handled."""

    handled: int = 0
    failure: Exception | None = None
    left: list[str] = field(default_factory=list)


def run_taking(
    broker: BrokerOptions,
    queue: str,
    title: str,
    work: Callable[["Connection", Taken, Bar], Awaitable[None]],
    report: Callable[[int], None],
) -> None:
    """Do `work` on a queue, which keeps what it is given up to date; then `report` the number.

    Ends with exit code 1 if anything is left.
    """
    done = Taken()
    try:
        with progress(title) as bar:
            run(broker, lambda connection: work(connection, done, bar), queue)
    except KeyboardInterrupt:
        report(done.handled)
        raise
    except typer.Exit:  # what failed is said already
        if done.handled:
            report(done.handled)
        raise
    report(done.handled)
    texts = [] if done.failure is None else [told(done.failure)]
    if texts or done.left:
        fail("; ".join(texts + done.left))
