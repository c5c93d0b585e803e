"""`peeklock top`: a live table of queues and subscriptions, with the rates of messages in and out."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.messaging import run
from broker.cli.output import JsonOption, print_json, print_table, rich_table
from broker.cli.target import BrokerOptions, connected, parsed

if TYPE_CHECKING:
    from broker.cli.watching.rates import Row, Sample
    from broker.cli.watching.traffic import MetricsPage
    from protocol.client.connection import Connection

    Show = Callable[[Sequence[Row]], None]

METRICS_URL_VARIABLE = "PEEKLOCK_METRICS_URL"
METRICS_PORT = 9464
LINES_AROUND = 6  # of a terminal: the table's head and frame

app = typer.Typer()


@app.command()
@connected
def top(
    broker: BrokerOptions,
    once: Annotated[bool, typer.Option("--once", help="Print one table, of one interval, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Time between two samples.")
    ] = 1.0,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            "--metrics-url",
            envvar=METRICS_URL_VARIABLE,
            show_envvar=True,
            metavar="URL",
            help="The broker's metrics, for the rates in and out; by default http://HOST:9464/metrics. "
            "Without them only the change of the counts is known.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show all queues and subscriptions with their counts and rates until Ctrl-C, the busiest first.

    Needs the right Manage on the namespace.
    """
    url = metrics_url or f"http://{_authority(parsed(broker.connection_string).host)}:{METRICS_PORT}/metrics"

    async def work(connection: "Connection") -> None:
        from broker.cli.watching.traffic import MetricsPage

        async with AsyncExitStack() as stack:
            tables = _tables(connection, await stack.enter_async_context(MetricsPage(url)), interval)
            show: Show = _print_json if as_json else _print
            if not once and not as_json and sys.stdout.isatty():
                show = stack.enter_context(_screen())
            async for rows in tables:
                show(rows)
                if once:
                    break

    try:
        run(broker, work)
    except KeyboardInterrupt:
        raise typer.Exit from None


@contextmanager
def _screen() -> "Iterator[Show]":
    """Return a function that shows a table in the place of the one before."""
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        yield lambda rows: live.update(rich_table(_HEAD, _fitting(rows, live.console.height)), refresh=True)


def _authority(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _tables(connection: "Connection", metrics: "MetricsPage", interval_s: float) -> "AsyncIterator[list[Row]]":
    """Yield the rows of the table after each interval."""
    import asyncio

    from broker.cli.watching.rates import rows

    before = await _sample(connection, metrics)
    while True:
        await asyncio.sleep(interval_s)
        now = await _sample(connection, metrics)
        yield rows(before, now)
        before = now


async def _sample(connection: "Connection", metrics: "MetricsPage") -> "Sample":
    import asyncio
    import time

    from broker.cli.watching.rates import Sample

    counts, traffic = await asyncio.gather(connection.counts(), metrics.read())
    return Sample(time.monotonic(), counts, traffic)


# --- what is printed --------------------------------------------------------------------------------------------------

_HEAD = ("ENTITY", "IN/S", "OUT/S", "CHANGE/S", "ACTIVE", "LOCKED", "SCHEDULED", "DEAD-LETTERED", "BYTES")


def _cells(rows: "Sequence[Row]") -> list[list[str | int | None]]:
    cells: list[list[str | int | None]] = []
    for name, incoming, outgoing, change, *counts in rows:
        rates = (None if rate is None else round(rate) for rate in (incoming, outgoing, change))
        cells.append([name, *rates, *counts])
    return cells


def _fitting(rows: "Sequence[Row]", height: int) -> list[list[str | int | None]]:
    return _cells(rows[: max(1, height - LINES_AROUND)])


def _print(rows: "Sequence[Row]") -> None:
    print_table(_HEAD, _cells(rows))


def _print_json(rows: "Sequence[Row]") -> None:
    print_json({"entities": [_document(row) for row in rows]}, is_line=True)


def _document(row: "Row") -> dict[str, Any]:
    """Return rates with two digits; those that are not known are left out."""
    rates = {"in_per_second": row.incoming, "out_per_second": row.outgoing, "change_per_second": row.change}
    shown = {name: round(rate, 2) for name, rate in rates.items() if rate is not None}
    counts = {name: getattr(row, name) for name in ("active", "locked", "scheduled", "dead_lettered", "size_bytes")}
    return {"name": row.name, **shown, **counts}
