"""`peeklock verify --capture`: what it says, and its errors."""

import time
from typing import TYPE_CHECKING

import typer

from broker.cli.ending import FAILED, WRONG_USE, fail
from broker.cli.pairing.intervals import milliseconds
from broker.cli.progress import progress
from broker.cli.quantities import people_duration, people_size
from broker.cli.target import BrokerOptions, http_address, parsed, trusted
from broker.namespace.durations import format_duration
from storage.wording import counted

if TYPE_CHECKING:
    from storage.capture.checking import Checked
    from storage.capture.manifest import State
    from storage.capture.source import Told

MAX_LISTED = 1000  # of findings, and of notes


def verify_capture(url: str, keep: str, told: "Told | None") -> None:
    """Print what is found, and end the command with FAILED if it is damage."""
    from storage.capture.checking import check
    from storage.capture.errors import InvalidPlace
    from storage.capture.place import Place

    keep_ms = milliseconds("--keep", keep)
    try:
        place = Place.of(url)
    except InvalidPlace as error:
        fail(str(error), WRONG_USE)
    now_ms = time.time_ns() // 1_000_000
    with progress("files", in_logs=True) as bar:
        try:
            found = check(place, told, now_ms - keep_ms, expect=bar.expect, advance=bar.advance)
        except OSError as error:
            fail(f"{error.filename or place.url}: {error.strerror or error}")
    _print(place.url, found, now_ms, broker_asked=told is not None)
    if not found.ok:
        raise typer.Exit(FAILED)


def asked(broker: BrokerOptions, consumer: str) -> "Told":
    """Return what the broker says. Ends the command if it does not."""
    from broker.capture.journal import HttpJournal
    from storage.capture.errors import SourceFailed, SourceRefused

    target = parsed(broker.connection_string)
    source = HttpJournal(http_address(target, broker.http_endpoint), target.credentials, trusted(broker.ca), consumer)
    try:
        return source.told()
    except (SourceFailed, SourceRefused) as error:
        fail(str(error))
    finally:
        source.close()


def _print(url: str, found: "Checked", now_ms: int, *, broker_asked: bool) -> None:
    if found.state is not None:
        _print_manifest(found, found.state, now_ms, broker_asked=broker_asked)
    for problem, text in found.findings[:MAX_LISTED]:
        typer.echo(f"{problem}: {text}")
    for text in found.notes[:MAX_LISTED]:
        typer.echo(f"note: {text}")
    unlisted = max(0, len(found.findings) - MAX_LISTED) + max(0, len(found.notes) - MAX_LISTED)
    if unlisted:
        typer.echo(f"and {unlisted} more")
    typer.echo(f"{url}: {'ok' if found.ok else counted(len(found.findings), 'problem')}")


def _print_manifest(found: "Checked", state: "State", now_ms: int, *, broker_asked: bool) -> None:
    age = ""
    if state.written_ms:
        seconds = max(0, now_ms - state.written_ms) // 1000
        age = f", the newest {people_duration(format_duration(seconds * 1000))} old"
    told = "the broker was asked whether there were newer ones" if broker_asked else "the broker was not asked"
    typer.echo(
        f"namespace {state.namespace}, id {state.namespace_id or 'not known'}: "
        f"{counted(found.entries, 'entry', 'entries')} of the manifest{age}; {told}"
    )
    for each in found.expected:
        typer.echo(
            f"partition {each.partition}, epoch {each.epoch}: {counted(each.rows, 'row')}, offsets {each.first} to "
            f"{each.next - 1}"
        )
        for gap in each.gaps:
            typer.echo(f"  not captured, since they were lost before: {gap}")
    size_bytes = sum(file.bytes for file in state.files.values())
    typer.echo(f"{counted(len(state.files), 'file')} of {people_size(size_bytes)}")
