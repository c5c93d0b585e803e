"""`peeklock pair cost`: the operations that a pairing costs, in an outage and without one (PN11)."""

from typing import Annotated, Final

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.output import JsonOption, print_json, print_table
from broker.cli.pairing.intervals import FailoverIntervalOption, PingIntervalOption, milliseconds
from broker.cli.quantities import people_duration
from broker.namespace.durations import format_duration
from broker.pairing import costs
from broker.pairing.options import MAX_BACKLOG_QUEUES, InvalidPairing, PairingOptions
from storage.wording import counted

MAX_MESSAGES: Final = 10**15
MAX_NUMBER: Final = 10**6  # of entities, and of clients
MAX_DAYS: Final = 36_500
DAY_SECONDS: Final = 86_400

app = typer.Typer()


@app.command()
def cost(
    messages: Annotated[
        int, typer.Option("--messages", min=0, max=MAX_MESSAGES, metavar="N", help="Messages sent in the outage.")
    ],
    outage: Annotated[
        str, typer.Option("--outage", metavar="TIME", help="How long the primary is away, as 45m or 1h30m.")
    ],
    entities: Annotated[
        int,
        typer.Option("--entities", min=1, max=MAX_NUMBER, metavar="N", help="Queues and topics that are sent to."),
    ] = 1,
    clients: Annotated[
        int,
        typer.Option(
            "--clients", min=1, max=MAX_NUMBER, metavar="N", help="Sidecars or programs; each sends to all of these."
        ),
    ] = 1,
    ping_interval: PingIntervalOption = "1m",
    failover_interval: FailoverIntervalOption = "10s",
    backlog_queues: Annotated[
        int,
        typer.Option(
            "--backlog-queues", min=1, max=MAX_BACKLOG_QUEUES, metavar="N", help="Backlog queues in the secondary."
        ),
    ] = 10,
    days: Annotated[
        int, typer.Option("--days", min=1, max=MAX_DAYS, metavar="N", help="Also count the syphon's polls of N days.")
    ] = 30,
    as_json: JsonOption = False,
) -> None:
    """Print the operations that a pairing costs, as Service Bus bills them. Connects to nothing.

    An outage costs pings, and four operations for each message: send to the backlog, receive from it, send to the
    primary, receive there. While all is well a syphon polls: a receive of each backlog queue takes 15 minutes to find
    nothing.
    """
    outage_ms = milliseconds("--outage", outage)
    if outage_ms > MAX_DAYS * DAY_SECONDS * 1000:
        raise typer.BadParameter(f"{outage!r} is more than {MAX_DAYS}d", param_hint="--outage")
    try:
        options = PairingOptions(
            ping_interval_ms=milliseconds("--ping-interval", ping_interval),
            failover_interval_ms=milliseconds("--failover-interval", failover_interval),
        )
    except InvalidPairing as error:
        fail(str(error), WRONG_USE)
    of_outage = costs.outage(
        messages=messages,
        outage_ms=outage_ms,
        entities=entities,
        clients=clients,
        ping_interval_ms=options.ping_interval_ms,
        failover_interval_ms=options.failover_interval_ms,
    )
    hour, day, of_days = (
        costs.polls(backlog_queues, seconds) for seconds in (DAY_SECONDS // 24, DAY_SECONDS, days * DAY_SECONDS)
    )
    if as_json:
        print_json(
            {
                "outage": {"pings": of_outage.pings, "messages": of_outage.messages, "total": of_outage.total},
                "polls": {"per_hour": hour, "per_day": day, "days": days, "in_days": of_days},
            }
        )
        return
    in_outage = f"an outage of {people_duration(format_duration(outage_ms))}"
    print_table(
        ("IN", "WHAT", "OPERATIONS"),
        [
            (in_outage, "pings", of_outage.pings),
            (
                in_outage,
                f"{counted(messages, 'message')}, {costs.OPERATIONS_PER_MESSAGE} operations each",
                of_outage.messages,
            ),
            (in_outage, "all", of_outage.total),
            ("an hour", "polls of the syphon", hour),
            ("a day", "polls of the syphon", day),
            (counted(days, "day"), "polls of the syphon", of_days),
        ],
    )
