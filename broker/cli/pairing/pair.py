"""`peeklock pair`: the sidecar, an endpoint beside an application whose sends fail over; and what a pairing costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.needing import refuse
from broker.cli.pairing.cost import app as cost_app
from broker.cli.pairing.intervals import FailoverIntervalOption, PingIntervalOption, milliseconds
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
from protocol.host_names import DEFAULT_HOST_NAMES, is_pattern

if TYPE_CHECKING:
    from broker.tls import ServerTls

MAX_PORT = 65_535

pair_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
pair_app.add_typer(cost_app)


@pair_app.callback()
def pair(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients connect; port 0 takes any free port.")
    ] = "127.0.0.1:5672",
    primary: PrimaryOption = None,
    secondary: SecondaryOption = None,
    primary_http: PrimaryHttpOption = None,
    secondary_http: SecondaryHttpOption = None,
    primary_name: PrimaryNameOption = None,
    backlog_queues: BacklogQueuesOption = 10,
    failover_interval: FailoverIntervalOption = "10s",
    ping_interval: PingIntervalOption = "1m",
    attempt_timeout: Annotated[
        str,
        typer.Option("--attempt-timeout", metavar="TIME", help="How long the primary may leave a send unanswered."),
    ] = "10s",
    syphon: Annotated[
        bool, typer.Option("--syphon", help="Also bring the backlog to the primary, as `peeklock syphon` does.")
    ] = False,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            metavar="FILE",
            help="For TLS with clients: PEM, with its chain; read again on SIGHUP.",
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of that, PEM.")] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            "--host-name",
            metavar="NAME",
            help="A name of the primary or the sidecar, such as queues.example.com or *.example.com, with which tokens "
            "without a scheme may begin; may be repeated. Known are that of the primary's connection string, those of "
            f"--tls-certificate and --listen, and {', '.join(DEFAULT_HOST_NAMES)}.",
            show_default=False,
        ),
    ] = None,
    ops_host: OpsHostOption = "127.0.0.1",
    ops_port: OpsPortOption = None,
    log_level: LogLevelOption = LogLevel.INFO,
    ca: CaFileOption = None,
) -> None:
    """Be an AMQP endpoint beside an application: what it sends goes to a backlog while the primary is away.

    Clients connect here with the credentials that they have for the primary. Everything but sends is the primary's.
    Needs Send on the primary and on the backlog queues, with --syphon also Listen there, and Manage on the secondary
    if they are to be made.
    """
    if context.invoked_subcommand is not None:
        refuse(context, f"has no effect before `{context.invoked_subcommand}`", *context.params)
        return
    require_ops_port(context, ops_port)
    host, port = _address(listen)
    names = tuple(host_name or ())
    if wrong := [each for each in names if not is_pattern(each)]:
        fail(f"--host-name: {wrong[0]!r} is no name of a host, nor one with *. before it", WRONG_USE)
    first, second = namespaces(primary, secondary, primary_http, secondary_http, ca)
    from broker.pairing.namespaces import name_of
    from broker.pairing.options import InvalidPairing, PairingOptions

    try:
        options = PairingOptions(
            backlog_queue_count=backlog_queues,
            failover_interval_ms=milliseconds("--failover-interval", failover_interval),
            ping_interval_ms=milliseconds("--ping-interval", ping_interval),
            attempt_timeout_ms=milliseconds("--attempt-timeout", attempt_timeout),
            runs_syphon=syphon,
        )
        name = name_of(first, second, primary_name)
    except InvalidPairing as error:
        fail(str(error), WRONG_USE)
    tls = _server_tls(tls_certificate, tls_key)

    from broker.cli.pairing.standing import stand
    from broker.pairing.sidecar.service import Setup

    try:
        setup = Setup(host, port, first, second, options, name, tls, (*DEFAULT_HOST_NAMES, *names))
        stand(setup, log_level, ops_host, ops_port)
    except InvalidPairing as error:
        fail(str(error))
    except OSError as error:
        fail(f"--listen: cannot listen on {listen}: {error.strerror or error}")


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        fail(f"--listen: {listen!r} is no address such as 127.0.0.1:5672", WRONG_USE)
    return host, int(port)


def _server_tls(certificate: Path | None, key: Path | None) -> "ServerTls | None":
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        fail("give both --tls-certificate and --tls-key, or neither", WRONG_USE)
    from broker.settings.config import ConfigurationError
    from broker.settings.listeners import Tls
    from broker.tls import ServerTls

    try:
        return ServerTls(Tls(certificate=certificate, key=key))
    except ConfigurationError as error:
        fail(str(error).replace("tls.certificate", "--tls-certificate").replace("tls.key", "--tls-key"), WRONG_USE)
