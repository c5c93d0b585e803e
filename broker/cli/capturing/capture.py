"""`peeklock capture`: writes the journal of a broker as Parquet files."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.output import JsonOption, print_json
from broker.cli.pairing.intervals import milliseconds
from broker.cli.pairing.options import LogLevelOption, OpsHostOption, OpsPortOption, require_ops_port
from broker.cli.quantities import people_size, size_in
from broker.cli.target import BrokerOptions, connected_by_http, http_address, parsed, trusted
from broker.settings.log import LogLevel
from storage.wording import counted

if TYPE_CHECKING:
    from storage.capture.writing import CaptureOptions

MIN_BYTES = 1 << 20
MAX_BYTES = 1 << 30  # columns of Arrow hold 2 GiB, and a message may come on top

app = typer.Typer()


@app.command()
@connected_by_http
def capture(
    context: typer.Context,
    broker: BrokerOptions,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Where the files are: a folder, or s3://, gs:// or abfs:// with a bucket or container and a path.",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Capture what the journal has now, and end, instead of waiting for more.")
    ] = False,
    skip_lost: Annotated[
        bool,
        typer.Option(
            "--skip-lost",
            help="Go on behind rows that the journal has dropped or cannot read. The manifest names the gap.",
        ),
    ] = False,
    file_size: Annotated[
        str, typer.Option("--file-size", metavar="SIZE", help="Write files when one would have about this size.")
    ] = "128MB",
    roll_time: Annotated[
        str,
        typer.Option("--roll-time", metavar="TIME", help="Write files so long after their first row."),
    ] = "5m",
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Write files when the waiting rows take so much; about three times this is used.",
        ),
    ] = "256MB",
    compact_after: Annotated[
        str,
        typer.Option("--compact-after", metavar="TIME", help="Merge the files of an hour so long after its end."),
    ] = "15m",
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="TIME",
            help="How long merged files, and those of a capture that was killed, stay until they are removed.",
        ),
    ] = "1d",
    consumer: Annotated[
        str,
        typer.Option(
            "--consumer",
            metavar="NAME",
            help="The name by which the broker is told what is captured. With it in journal.hold_for, the broker keeps "
            "what is not captured yet.",
        ),
    ] = "capture",
    ops_host: OpsHostOption = "127.0.0.1",
    ops_port: OpsPortOption = None,
    log_level: LogLevelOption = LogLevel.INFO,
    as_json: JsonOption = False,
) -> None:
    """Write the broker's journal as Parquet files under a URL, until SIGTERM or Ctrl-C.

    Each row of the journal is captured exactly once, whatever ends this command: it goes on from what the manifest
    beside the files says. One capture writes to a URL at a time; a second one is refused. Needs Manage or Listen on the
    namespace, and a broker whose journal.mode is not off. Credentials of an object store are those that its own tools
    find, such as AWS_ACCESS_KEY_ID.
    """
    require_ops_port(context, ops_port)
    target = parsed(broker.connection_string)
    address = http_address(target, broker.http_endpoint)
    if not re.fullmatch("[A-Za-z0-9._-]{1,100}", consumer):
        raise typer.BadParameter(
            "must have 1 to 100 letters, digits, dots, underscores and hyphens", param_hint="--consumer"
        )
    options = _options(file_size, memory, roll_time, compact_after, keep)
    trust = trusted(broker.ca)

    from broker.capture.journal import HttpJournal
    from broker.capture.service import CaptureService, Wishes
    from broker.cli.capturing.standing import stand
    from storage.capture.errors import CaptureError, InvalidPlace
    from storage.capture.place import Place

    try:
        place = Place.of(url)
    except InvalidPlace as error:
        fail(str(error), WRONG_USE)
    source = HttpJournal(address, target.credentials, trust, consumer)
    wishes = Wishes(once=once, skips_lost=skip_lost)
    service = CaptureService(source, place, options, wishes, definitions=source.definitions)
    try:
        stand(service, log_level, ops_host, ops_port)
    except (CaptureError, OSError) as error:
        fail(f"{place.url}: {error.strerror or error}" if isinstance(error, OSError) else str(error))
    finally:
        source.close()
    told = service.counters
    if as_json:
        print_json({"rows": told.rows, "files": told.files, "bytes": told.bytes, "lost": told.lost_rows})
    else:
        lost = f", {told.lost_rows} lost" if told.lost_rows else ""
        typer.echo(
            f"{counted(told.rows, 'row')} captured in {counted(told.files, 'file')} of {people_size(told.bytes)}{lost}"
        )


def _options(file_size: str, memory: str, roll_time: str, compact_after: str, keep: str) -> "CaptureOptions":
    from storage.capture.writing import CaptureOptions

    return CaptureOptions(
        file_bytes=_bytes("--file-size", file_size),
        memory_bytes=_bytes("--memory", memory),
        roll_seconds=milliseconds("--roll-time", roll_time) / 1000,
        compact_after_seconds=milliseconds("--compact-after", compact_after) / 1000,
        keep_seconds=milliseconds("--keep", keep) / 1000,
    )


def _bytes(option: str, text: str) -> int:
    """Ends the command with wrong use if the text is no size within the limits."""
    try:
        size = int(size_in("B", text))
        if not MIN_BYTES <= size <= MAX_BYTES:
            raise ValueError("is not from 1MB to 1GB")
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint=option) from None
    return size
