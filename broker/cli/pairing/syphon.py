"""`peeklock syphon`: brings messages from the backlog of a pairing to their destinations in the primary."""

from typing import Annotated

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.messages import counted
from broker.cli.output import JsonOption, print_json
from broker.cli.pairing.options import (
    BacklogQueuesOption,
    LogLevelOption,
    OpsHostOption,
    OpsPortOption,
    PrimaryHttpOption,
    PrimaryNameOption,
    PrimaryOption,
    SecondaryHttpOption,
    SecondaryOption,
    namespaces,
    require_ops_port,
)
from broker.cli.target import CaFileOption
from broker.settings.log import LogLevel

app = typer.Typer()


@app.command()
def syphon(
    context: typer.Context,
    primary: PrimaryOption = None,
    secondary: SecondaryOption = None,
    primary_http: PrimaryHttpOption = None,
    secondary_http: SecondaryHttpOption = None,
    primary_name: PrimaryNameOption = None,
    backlog_queues: BacklogQueuesOption = 10,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", help="At most N messages per second, of all queues together."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="End when all backlog queues are empty, instead of waiting for more.")
    ] = False,
    ops_host: OpsHostOption = "127.0.0.1",
    ops_port: OpsPortOption = None,
    log_level: LogLevelOption = LogLevel.INFO,
    as_json: JsonOption = False,
    ca: CaFileOption = None,
) -> None:
    """Bring messages from the backlog in the secondary to their destinations in the primary, until SIGTERM or Ctrl-C.

    Needs Listen on the backlog queues, and Manage on the secondary if they are to be made; Send on the primary.

    Several may run: each backlog queue is drained by one of them. It waits for a primary that is away, and for a
    secondary, unless --once is given.
    """
    from broker.pairing.namespaces import name_of
    from broker.pairing.options import InvalidPairing
    from broker.pairing.syphon.options import SyphonOptions

    require_ops_port(context, ops_port)
    first, second = namespaces(primary, secondary, primary_http, secondary_http, ca)
    try:
        options = SyphonOptions(backlog_queues, rate, once)
        name = name_of(first, second, primary_name)
    except InvalidPairing as error:
        fail(str(error), WRONG_USE)

    from broker.cli.pairing.draining import drain
    from broker.pairing.syphon.service import Service

    service = Service(first, second, name, options)
    try:
        drain(service, f"draining the backlog of {name}", log_level, ops_host, ops_port)
    except InvalidPairing as error:
        fail(str(error))
    moved, dead = service.counters.completed, service.counters.dead_lettered
    if as_json:
        print_json({"moved": moved, "dead_lettered": dict(dead)})
    else:
        typer.echo(f"{counted(moved)} moved to {name}" + (f", {dead.total()} dead-lettered" if dead else ""))
