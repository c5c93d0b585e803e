"""The two namespaces of a pairing, as the commands that work on both take them as options."""

from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.needing import refuse
from broker.cli.target import http_address, parsed, trusted
from broker.pairing.options import MAX_BACKLOG_QUEUES
from broker.settings.log import Log, LogLevel

if TYPE_CHECKING:
    from broker.pairing.namespaces import Namespace

PRIMARY_VARIABLE = "PEEKLOCK_PRIMARY"
SECONDARY_VARIABLE = "PEEKLOCK_SECONDARY"
PRIMARY_HTTP_VARIABLE = "PEEKLOCK_PRIMARY_HTTP"
SECONDARY_HTTP_VARIABLE = "PEEKLOCK_SECONDARY_HTTP"
_HTTP_HELP = (
    "address for HTTP. By default http://HOST:5300 if its connection string is for plain AMQP, else https://HOST."
)

PrimaryOption = Annotated[
    str | None,
    typer.Option(
        "--primary",
        envvar=PRIMARY_VARIABLE,
        show_envvar=True,
        metavar="TEXT",
        help="The connection string of the primary namespace. On a command line other users of the machine see the "
        "key in it: better set the variable.",
    ),
]
SecondaryOption = Annotated[
    str | None,
    typer.Option(
        "--secondary",
        envvar=SECONDARY_VARIABLE,
        show_envvar=True,
        metavar="TEXT",
        help="The connection string of the secondary namespace, which has the backlog queues.",
    ),
]
PrimaryHttpOption = Annotated[
    str | None,
    typer.Option(
        "--primary-http",
        envvar=PRIMARY_HTTP_VARIABLE,
        show_envvar=True,
        metavar="URL",
        help=f"The primary's {_HTTP_HELP}",
    ),
]
SecondaryHttpOption = Annotated[
    str | None,
    typer.Option(
        "--secondary-http",
        envvar=SECONDARY_HTTP_VARIABLE,
        show_envvar=True,
        metavar="URL",
        help=f"The secondary's {_HTTP_HELP}",
    ),
]
PrimaryNameOption = Annotated[
    str | None,
    typer.Option(
        "--primary-name",
        metavar="NAME",
        help="The primary's name in the paths of the backlog queues; by default the first part of its host name.",
        show_default=False,
    ),
]
BacklogQueuesOption = Annotated[
    int,
    typer.Option(
        "--backlog-queues", min=1, max=MAX_BACKLOG_QUEUES, metavar="N", help="Backlog queues in the secondary."
    ),
]
OpsHostOption = Annotated[
    str, typer.Option("--ops-host", metavar="ADDRESS", help="Where --ops-port listens; 0.0.0.0 or :: for all.")
]
OpsPortOption = Annotated[
    int | None,
    typer.Option(
        "--ops-port",
        min=0,
        max=65535,
        metavar="PORT",
        help="Serve /metrics, /healthz and /readyz here; 0 takes any free port.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help=str(Log.model_fields["level"].description))]


def require_ops_port(context: typer.Context, ops_port: int | None) -> None:
    """End the command if it has --ops-host and no --ops-port."""
    if ops_port is None:
        refuse(context, "needs --ops-port", "ops_host")


def namespaces(
    primary: str | None, secondary: str | None, primary_http: str | None, secondary_http: str | None, ca: str | None
) -> "tuple[Namespace, Namespace]":
    """Return primary and secondary. Ends the command if an option is missing or makes no sense."""
    trust = trusted(ca)
    # Checked before the libraries load, so that a wrong command ends soon.
    first = parsed(primary, "--primary", PRIMARY_VARIABLE)
    second = parsed(secondary, "--secondary", SECONDARY_VARIABLE)
    addresses = (
        http_address(first, primary_http, "--primary-http"),
        http_address(second, secondary_http, "--secondary-http"),
    )
    from broker.pairing.namespaces import Namespace

    assert primary is not None
    assert secondary is not None
    return Namespace(primary, http=addresses[0], trust=trust), Namespace(secondary, http=addresses[1], trust=trust)
