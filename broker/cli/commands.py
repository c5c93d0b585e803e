"""The commands of `peeklock` that work on this machine: to serve, and on settings and files.

Exit codes: 0 done; 1 the command failed, or data are damaged; 2 no such command or option; 75 (EX_TEMPFAIL of
sysexits.h) the disk is too full for the broker to start; 78 (EX_CONFIG) a flag's value, a variable or the file is
wrong, or the broker cannot start with these settings. A problem that the user can fix is one message on standard error,
never a traceback.
"""

# Modules that only one command needs are imported inside it, so that others start faster.

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from broker import __version__
from broker.cli.needing import refuse
from broker.cli.target import BrokerOptions, connected_by_http
from broker.printable import printable, printable_lines
from broker.settings.config import ConfigurationError, Settings
from broker.settings.sources import CLUSTER_FLAGS, FLAGS, Loaded, leaves, load
from storage.wording import counted

if TYPE_CHECKING:
    from storage.maintenance import Report

FAILED = 1
WRONG_CONFIGURATION = 78

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

app = typer.Typer(
    help="A standalone AMQP 1.0 broker with the semantics of Azure Service Bus.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check, show and explain the configuration.", no_args_is_help=True, rich_markup_mode=None)
key_app = typer.Typer(help="Change the keys of the namespace.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(key_app, name="key")


def _option(flag: str, metavar: str) -> Any:
    place = FLAGS[flag][0]
    return typer.Option(flag, metavar=metavar, help=leaves()[tuple(place.split("."))].description, show_default=False)


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as TOML, or the Service Bus emulator's Config.json."),
]
DataDirOption = Annotated[str | None, _option("--data-dir", "DIR")]
HostOption = Annotated[str | None, _option("--host", "ADDRESS")]
AmqpPortOption = Annotated[str | None, _option("--amqp-port", "PORT")]
HttpPortOption = Annotated[str | None, _option("--http-port", "PORT")]
OpsPortOption = Annotated[str | None, _option("--ops-port", "PORT")]
PartitionsOption = Annotated[str | None, _option("--partitions", "N")]
WorkersOption = Annotated[str | None, _option("--workers", "N")]
LogLevelOption = Annotated[str | None, _option("--log-level", "LEVEL")]
EmulatorOption = Annotated[
    bool | None,
    typer.Option("--emulator/--no-emulator", help=leaves()["emulator",].description, show_default=False),
]


@contextmanager
def _failures() -> Iterator[None]:
    """Turn expected errors into a message and an exit code."""
    from storage.data_dir import DataDirectoryError, FewerPartitions, OtherPartitions
    from storage.maintenance import MaintenanceError
    from storage.store import StoreError

    try:
        yield
    except ConfigurationError as error:
        _fail(str(error), WRONG_CONFIGURATION)
    except (FewerPartitions, OtherPartitions) as error:
        _fail(str(error), WRONG_CONFIGURATION)
    except (DataDirectoryError, MaintenanceError, StoreError) as error:
        _fail(str(error), FAILED)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), FAILED)


def _fail(text: str, code: int) -> None:
    lines = text.splitlines()
    if len(lines) > 1:
        text = "\n  ".join([f"{len(lines)} things are wrong:", *lines])
    typer.echo(f"peeklock: {printable_lines(text)}", err=True)
    raise typer.Exit(code)


def _load(config: Path | None, known: Mapping[str, tuple[str, ...]] = FLAGS, **flags: str | bool | None) -> Loaded:
    """Load the settings. `flags` are by name, with underscores; `known` says what they set."""
    texts = {
        "--" + name.replace("_", "-"): str(value).lower() if isinstance(value, bool) else value
        for name, value in flags.items()
    }
    return load(config, texts, os.environ, known)


def _serve(
    part: str, config: Path | None, known: Mapping[str, tuple[str, ...]], **flags: str | bool | None
) -> NoReturn:
    """Run a `Part` of a namespace (`broker.supervisor.supervisor`) to its end; other arguments are those of `_load`."""
    with _failures():

        def read() -> Settings:
            return _load(config, known, **flags).settings

        loaded = _load(config, known, **flags)
        from broker.supervisor.supervisor import Part, run

        code = run(loaded, Part(part), read)
    raise typer.Exit(code)


@app.command()
def serve(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    amqp_port: AmqpPortOption = None,
    http_port: HttpPortOption = None,
    ops_port: OpsPortOption = None,
    partitions: PartitionsOption = None,
    workers: WorkersOption = None,
    emulator: EmulatorOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run the broker until SIGTERM or Ctrl-C."""
    _serve(
        "serve",
        config,
        FLAGS,
        data_dir=data_dir,
        host=host,
        amqp_port=amqp_port,
        http_port=http_port,
        ops_port=ops_port,
        partitions=partitions,
        workers=workers,
        emulator=emulator,
        log_level=log_level,
    )


ClusterWorkersOption = Annotated[
    str | None,
    typer.Option("--workers", metavar="HOST:PORT,...", help="Addresses of all workers.", show_default=False),
]
JournalsOption = Annotated[
    str | None,
    typer.Option(
        "--journals",
        metavar="HOST:PORT,...",
        help="Addresses of all workers' journals, in the same order.",
        show_default=False,
    ),
]


@app.command()
def worker(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    partitions: Annotated[
        str | None,
        typer.Option("--partitions", metavar="N,...", help="The partitions of this worker.", show_default=False),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Where gateways and other workers reach it.", show_default=False
        ),
    ] = None,
    workers: ClusterWorkersOption = None,
    journal_listen: Annotated[
        str | None,
        typer.Option(
            "--journal-listen",
            metavar="HOST:PORT",
            help="Where gateways reach the journal of this worker.",
            show_default=False,
        ),
    ] = None,
    host: HostOption = None,
    ops_port: OpsPortOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run one worker of a namespace on several machines, with some of its partitions."""
    _serve(
        "worker",
        config,
        CLUSTER_FLAGS,
        data_dir=data_dir,
        partitions=partitions,
        listen=listen,
        workers=workers,
        journal_listen=journal_listen,
        host=host,
        ops_port=ops_port,
        log_level=log_level,
    )


@app.command()
def gateway(
    config: ConfigOption = None,
    workers: ClusterWorkersOption = None,
    journals: JournalsOption = None,
    host: HostOption = None,
    amqp_port: AmqpPortOption = None,
    http_port: HttpPortOption = None,
    ops_port: OpsPortOption = None,
    emulator: EmulatorOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run the gateways of a namespace on several machines: clients connect here. They keep no data."""
    _serve(
        "gateway",
        config,
        CLUSTER_FLAGS,
        workers=workers,
        journals=journals,
        host=host,
        amqp_port=amqp_port,
        http_port=http_port,
        ops_port=ops_port,
        emulator=emulator,
        log_level=log_level,
    )


@app.command("connection-string")
def print_connection_string(
    context: typer.Context,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    amqp_port: AmqpPortOption = None,
    emulator: EmulatorOption = None,
    key_name: Annotated[
        str, typer.Option("--key-name", metavar="NAME", help="An authorization rule of the namespace, or of --entity.")
    ] = "RootManageSharedAccessKey",
    entity: Annotated[
        str | None, typer.Option("--entity", metavar="NAME", help="A queue or topic: for it alone, with its own keys.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Make the string for the TLS port.")] = False,
) -> None:
    """Print what clients need to connect. It holds a key: treat it as one.

    If the broker runs, its ports are those that it really has.
    """
    from broker.cli.connection_strings import of_broker

    if tls:
        refuse(context, "is the port without TLS, and has no effect with --tls", "amqp_port")
    with _failures():
        settings = _load(config, data_dir=data_dir, host=host, amqp_port=amqp_port, emulator=emulator).settings
        typer.echo(of_broker(settings, key_name, entity, tls=tls))


@key_app.command("regenerate")
def regenerate_key(
    secondary: Annotated[
        bool, typer.Option("--secondary", help="Make a new secondary key; the primary one stays.")
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a new key of RootManageSharedAccessKey in the data directory. A running broker takes it at once.

    Clients with the old key lose their rights. So that none does, let them use the other key before.
    """
    from broker.keys import regenerate
    from storage.data_dir import pid_of_user

    with _failures():
        settings = _load(config, data_dir=data_dir).settings
        path = regenerate(settings, secondary=secondary)
        user = pid_of_user(settings.data_dir)
        if user is not None:
            os.kill(user, signal.SIGHUP)
    kind, when = "secondary" if secondary else "primary", "when it starts" if user is None else "now"
    typer.echo(f"{path} has a new {kind} key. The broker takes it {when}.")


_OF_BROKER = ("consumer", "connection_string", "http_endpoint", "ca")  # parameters of `verify`


@app.command()
@connected_by_http
def verify(
    context: typer.Context,
    broker: BrokerOptions,
    path: Annotated[Path | None, typer.Argument(metavar="DIR", help="A data directory or a backup.")] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    capture: Annotated[
        str | None, typer.Option("--capture", metavar="URL", help="In place of DIR: what `peeklock capture` wrote.")
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            "--keep", metavar="TIME", help="Of a capture: files that no entry names are normal for so long, as there."
        ),
    ] = "1d",
    ask_broker: Annotated[
        bool,
        typer.Option(
            "--ask-broker",
            help="Of a capture: ask the broker of the connection string how far it was told that rows are captured, so "
            "that missing entries at the manifest's end show. Needs Manage or Listen on the namespace.",
        ),
    ] = False,
    consumer: Annotated[
        str, typer.Option("--consumer", metavar="NAME", help="The name by which the capture tells the broker.")
    ] = "capture",
) -> None:
    """Read everything stored and report what is wrong. Changes nothing; the broker may be running.

    With --capture, check the manifest, each file's checksum, columns and rows, and name what is missing. A capture may
    be running. Exit code 1 if anything is damaged.
    """
    if capture is not None:
        if path is not None or config is not None or data_dir is not None:
            raise typer.BadParameter("takes the place of DIR, --config and --data-dir", param_hint="--capture")
        if not ask_broker:
            refuse(context, "needs --ask-broker", *_OF_BROKER)
        from broker.cli.capturing.verifying import asked, verify_capture

        told = asked(broker, consumer) if ask_broker else None
        verify_capture(capture, keep, told)
        return
    refuse(context, "is for --capture", "keep", "ask_broker", *_OF_BROKER)
    if path is not None:
        refuse(context, "has no effect where DIR is named", "config", "data_dir")
    from storage.maintenance import verify as verify_directory

    with _failures():
        if path is None:
            path = _load(config, data_dir=data_dir).settings.data_dir
        report = verify_directory(path)
    _print_report(path, report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _print_report(path: Path, report: "Report") -> None:
    from storage.store import Table

    for partition in report.partitions:
        records = partition.records
        typer.echo(
            f"partition {partition.partition}: {counted(records[Table.MESSAGES], 'message')}, "
            f"{counted(records[Table.QUEUE], 'entry', 'entries')} in queues, "
            f"{records[Table.QUARANTINE]} in quarantine, {counted(partition.problems.total(), 'problem')}"
        )
        for finding in partition.findings:
            typer.echo(f"  {finding.problem}: {finding.text}")
        if unlisted := partition.problems.total() - len(partition.findings):
            typer.echo(f"  and {unlisted} more")
    for torn in report.torn:
        typer.echo(f"note: {torn}")
    typer.echo(f"{path}: {'ok' if report.ok else counted(report.problem_count, 'problem')}")


@app.command()
def backup(
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A directory that does not exist yet.")],
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Copy the data directory, without the root key. The broker may be running."""
    from storage.maintenance import backup as back_up

    with _failures():
        source = _load(config, data_dir=data_dir).settings.data_dir
        copied_bytes = back_up(source, destination)
    typer.echo(f"{destination}: {counted(copied_bytes, 'byte')} backed up from {source}")


_OF_CAPTURE = ("until", "since", "entities", "allow_gaps", "partitions", "processes")  # parameters of `restore`


@app.command()
def restore(
    context: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(metavar="BACKUP", help="A directory that `peeklock backup` wrote.")
    ] = None,
    from_capture: Annotated[
        str | None,
        typer.Option("--from-capture", metavar="URL", help="In place of a backup: what `peeklock capture` wrote."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="TIME", help="Of a capture: as it was then (RFC 3339); else all that was captured."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Of a capture: only messages that were enqueued since."),
    ] = None,
    entities: Annotated[
        list[str] | None,
        typer.Option(
            "--entity",
            metavar="NAME",
            help="Of a capture: only this queue, or topic with its subscriptions and rules; may be repeated.",
            show_default=False,
        ),
    ] = None,
    allow_gaps: Annotated[
        bool,
        typer.Option("--allow-gaps", help="Restore what is known if the capture does not have everything."),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", min=1, max=1024, help="Of a capture: work with so many; else one for each processor."
        ),
    ] = None,
    partitions: Annotated[
        str | None,
        typer.Option(
            "--partitions",
            metavar="N,...",
            help="Of a capture: these only, for a worker of several machines.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Verify a backup and copy it to the data directory, which must be missing or empty.

    With --from-capture, rebuild it from the captured journal, which must have bodies.
    """
    if (source is None) == (from_capture is None):
        raise typer.BadParameter("name either a backup or --from-capture", param_hint="BACKUP")
    if from_capture is not None:
        from broker.cli.restoring import Asked, restore_capture

        with _failures():
            settings = _load(config, data_dir=data_dir).settings
            asked = Asked(until, since, entities or (), partitions, processes, allow_gaps)
            restore_capture(from_capture, settings, asked)
        return
    refuse(context, "is for --from-capture", *_OF_CAPTURE)
    assert source is not None
    from storage.maintenance import restore as restore_backup

    with _failures():
        target = _load(config, data_dir=data_dir).settings.data_dir
        copied_bytes = restore_backup(source, target)
    typer.echo(f"{target}: {copied_bytes} bytes restored from {source}")


@app.command()
def ca(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are made, or are already.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A host name or address of the broker; may be repeated."),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            "--client", metavar="NAME", help="Make a certificate for a client with this name, not a server's."
        ),
    ] = None,
) -> None:
    """Make a certificate authority for development, and a certificate by it; again later, a new certificate.

    Without --host the server's certificate is for localhost, 127.0.0.1, ::1 and the name of this machine.
    """
    from broker.cli.authority import Authority, NotAnAuthority, is_client, is_host

    if client is not None and host:
        raise typer.BadParameter("is for servers: leave it out, or leave out --client", param_hint="--host")
    if client is not None and not is_client(client):
        raise typer.BadParameter(f"{client!r} must be like a host name, and not ca, server or truststore")
    hosts = [client] if client is not None else host or list(dict.fromkeys([*LOOPBACK_NAMES, socket.gethostname()]))
    if wrong := [each for each in hosts if not is_host(each)]:
        raise typer.BadParameter(f"{wrong[0]!r} is no host name and no IP address", param_hint="--host")
    with _failures():
        try:
            authority = Authority(directory)
        except NotAnAuthority as error:
            raise ConfigurationError(str(error)) from error
        name = "server" if client is None else client
        certificate, key = authority.issue(name, hosts, is_server=client is None)
    typer.echo(f"{certificate} and {key} are for {', '.join(hosts)}.\n")
    if client is None:
        section = f'  [tls]\n  certificate = "{certificate.absolute()}"\n  key = "{key.absolute()}"\n'
        typer.echo(
            f"Settings of the broker:\n\n{section}\nClients trust it like this:\n\n{authority.advice()}", nl=False
        )
    else:
        section = f'  [tls]\n  client_ca = "{authority.certificate_file.absolute()}"\n\n'
        section += f'  [[security.certificates]]\n  name = "{client}"\n  rights = ["Send", "Listen"]'
        typer.echo(f"Settings of the broker, beside its own certificate:\n\n{section}")


@config_app.command()
def check(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Read file and environment as `serve` does, and report what it would refuse and what cannot work.

    A port in use is a warning.
    """
    from broker.catalog.rehearsal import rehearse
    from broker.tls import ServerTls

    with _failures():
        loaded = _load(config, data_dir=data_dir)
        settings = loaded.settings
        if settings.tls.certificate is not None:
            ServerTls(settings.tls)
        found = rehearse(settings, int(time.time() * 1000))
        ignored = (f"{place}: {text}; it has no effect" for place, text in loaded.ignored)
        going = (f"{place}: {text}" for place, text in loaded.going)
        for warning in (*ignored, *going, *found.ports_in_use):
            typer.echo(f"peeklock: warning: {printable(warning)}", err=True)
        if found.problems:
            raise ConfigurationError("\n".join(map(loaded.spelled, found.problems)))
    counts = {
        "queue": len(settings.queues),
        "topic": len(settings.topics),
        "subscription": sum(len(topic.subscriptions) for topic in settings.topics),
    }
    declared = ", ".join(counted(count, name) for name, count in counts.items())
    typer.echo(f"ok: {counted(len(loaded.origins), 'setting')} given; declared: {declared}")


@config_app.command()
def show(config: ConfigOption = None) -> None:
    """Print the settings in force as TOML, each with where it was set; keys are masked."""
    from broker.settings.reference import show as render

    with _failures():
        typer.echo(render(_load(config)), nl=False)


@config_app.command()
def reference() -> None:
    """Print the page of all settings, as Markdown."""
    from broker.settings.reference import document

    typer.echo(document(), nl=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """A standalone AMQP 1.0 broker with the semantics of Azure Service Bus."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    sys.exit(app())
