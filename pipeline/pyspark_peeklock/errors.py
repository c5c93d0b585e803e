"""Typed exceptions of the data source. Their texts name the option, the column and row, or the range of offsets."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


class PeeklockSourceError(Exception):
    """Something that the user, or the operator of the broker, can mend."""


class InvalidOption(PeeklockSourceError, ValueError):
    """An option is missing, unknown, or makes no sense."""


class BehindEnd(InvalidOption):
    """An option has an offset that the journal has not written."""

    def __init__(self, option: str, partition: int, offset: int, stable: int) -> None:
        what = f"partition {partition} ends at offset {stable}, and {offset} is behind it"
        super().__init__(f"option '{option}': {what}")


class UnfitSchema(PeeklockSourceError, ValueError):
    """A column is missing, unknown, or of a type that it cannot have."""


class UnfitRow(PeeklockSourceError, ValueError):
    """A row cannot become a message. `row` counts the rows of the task from 0; `place` is where it came from."""

    def __init__(self, row: int, column: str, reason: str, place: str = "") -> None:
        of = f", {place}" if place else ""
        super().__init__(f"row {row} of this task{of}: column '{column}' {reason}")


class SendFailed(PeeklockSourceError):
    """The broker has refused rows, or was away for too long. Rows that it had accepted stay sent."""


class BrowseFailed(PeeklockSourceError):
    """The broker does not show the messages, or was away for too long."""


class OutOfRetention(PeeklockSourceError):
    """The journal does not keep these offsets any more, or has not written them."""

    def __init__(self, partition: int, first: int, low: int, stable: int) -> None:
        what = f"the query needs offset {first}, and the journal has {low} to {stable}"
        super().__init__(f"partition {partition}: {what}; with failOnDataLoss=false the gap is reported and skipped")
        self.first, self.low, self.stable = first, low, stable


class JournalTooShort(PeeklockSourceError):
    """A checkpoint has an offset that the journal has not written: it is of another one, or that has lost its end."""

    def __init__(self, partition: int, offset: int, stable: int) -> None:
        what = f"the checkpoint has offset {offset}, and the journal ends at {stable}"
        super().__init__(f"partition {partition}: {what}: begin with a new checkpoint")


class AnotherEpoch(PeeklockSourceError):
    """The partition's store was replaced, for example restored from a backup: its offsets began anew.

    `first`: the first offset that was wanted and is not there.
    """

    def __init__(self, partition: int, wanted: str, found: str, first: int = 0) -> None:
        what = f"the query has offsets of epoch {wanted}, and the journal now has epoch {found}"
        hint = "with failOnDataLoss=false it goes on at the beginning of that epoch"
        super().__init__(f"partition {partition}: {what}; {hint}")
        self.found, self.first = found, first


class JournalDamaged(PeeklockSourceError):
    """The journal has a file that is damaged. The rows from `first` to before `end` cannot be read.

    `row` is the row `truncated` that the journal has in their place.
    """

    def __init__(self, partition: int, first: int, end: int, row: "pa.RecordBatch", why: str) -> None:
        what = f"the journal cannot read the offsets {first} to {end - 1}: {why[:500]}"
        super().__init__(f"partition {partition}: {what}; with failOnDataLoss=false they are reported and skipped")
        self.first, self.end, self.row = first, end, row


class CaptureFailed(PeeklockSourceError):
    """The capture cannot be read: a file is torn or missing, the manifest is damaged, or its store refuses or is away.

    The text names the file.
    """


class CaptureChanged(CaptureFailed):
    """The capture has no rows from offset `first` on, which it had before: another one has taken over its place."""

    def __init__(self, first: int, reason: str) -> None:
        super().__init__(reason)
        self.first = first


class JournalRefused(PeeklockSourceError):
    """The endpoint answers with a status that a repetition would not change."""


class JournalUnreachable(PeeklockSourceError):
    """The endpoint is away, is silent, or cuts its answers off, for longer than it may."""
