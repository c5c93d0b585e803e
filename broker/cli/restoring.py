"""`peeklock restore --from-capture`: what it says, and its errors."""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import typer

from broker.cli.progress import progress
from broker.settings.config import Settings
from storage.maintenance import WORK, MaintenanceError, is_made
from storage.wording import counted

MAX_LISTED = 50


class CannotRead(MaintenanceError):
    """The capture cannot be read."""


class Asked(NamedTuple):
    """The options of the command, as they were given."""

    until: str | None = None
    since: str | None = None
    entities: Sequence[str] = ()
    partitions: str | None = None
    processes: int | None = None
    allow_gaps: bool = False


def restore_capture(url: str, settings: Settings, asked: Asked) -> None:
    """Make a data directory of a capture, and say how far it is.

    Raises MaintenanceError, DataDirectoryError, ConfigurationError, StoreError, OSError.
    """
    from broker.restoring.from_capture import Wishes, restore
    from storage.capture.errors import CaptureError

    until, since = _time(asked.until, "--until"), _time(asked.since, "--since")
    if until is not None and since is not None and since > until:
        raise typer.BadParameter("is later than --until", param_hint="--since")
    owned = settings.cluster.owned if asked.partitions is None else _partitions(asked.partitions)
    wishes = Wishes(until, asked.allow_gaps, owned, since, tuple(asked.entities))
    if is_made(settings.data_dir):
        typer.echo(f"{settings.data_dir}: was restored before; the command was killed at its very end")
        return
    with progress("rows", in_logs=True) as bar:
        try:
            found = restore(
                url,
                settings.data_dir,
                settings,
                wishes,
                time.time_ns() // 1_000_000,
                processes=asked.processes,
                expect=bar.expect,
                advance=bar.advance,
            )
        except CaptureError as error:
            raise CannotRead(str(error)) from error
        finally:
            if (work := settings.data_dir / WORK).exists():
                typer.echo(f"What was done so far is in {work}; the same command goes on from there.", err=True)
    last = "" if found.until is None else f", the last of {found.until.isoformat(timespec='milliseconds')}"
    typer.echo(f"namespace {found.namespace}, captured from the broker with the id {found.namespace_id or 'not known'}")
    entities = counted(found.entities, "entity", "entities")
    typer.echo(f"{counted(found.rows, 'row')}{last}; definitions of {entities} from {found.definitions}")
    for (path, place), count in sorted(found.messages.items()):
        typer.echo(f"  {path}, {place}: {count}")
    if found.taken_over or found.put_back:
        typer.echo(
            f"under way between partitions: {found.taken_over} restored at their destination only, {found.put_back} "
            "where they came from"
        )
    states = counted(found.states, "state of a session", "states of sessions")
    typer.echo(f"{states} and {counted(found.duplicate_ids, 'id')} for duplicate detection restored")
    for text in found.missing[:MAX_LISTED]:
        typer.echo(f"not known: {text}")
    if len(found.missing) > MAX_LISTED:
        typer.echo(f"not known: and {len(found.missing) - MAX_LISTED} more")
    total = found.messages.total()
    typer.echo(
        f"{settings.data_dir}: {counted(total, 'message')} of {counted(found.bytes, 'byte')} restored to "
        f"{counted(found.partitions, 'partition')}"
    )


def _time(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise typer.BadParameter(
            f"{text!r} is no time with a time zone, such as 2026-01-31T07:30:00Z", param_hint=option
        )
    return found


def _partitions(text: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise typer.BadParameter(f"{text!r} is no list of partitions, such as 0,1,2", param_hint="--partitions")
    return found
