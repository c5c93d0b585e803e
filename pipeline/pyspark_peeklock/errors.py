"""Typed exceptions of the data source. Their texts name the option, the column and row, or the range of offsets."""


class PeeklockSourceError(Exception):
    """Something that the user, or the operator of the broker, can mend."""


class InvalidOption(PeeklockSourceError, ValueError):
    """An option is missing, unknown, or makes no sense."""


class UnfitSchema(PeeklockSourceError, ValueError):
    """A column is missing, unknown, or of a type that it cannot have."""


class UnfitRow(PeeklockSourceError, ValueError):
    """A row cannot become a message. `row` counts the rows of the task from 0."""

    def __init__(self, row: int, column: str, reason: str) -> None:
        super().__init__(f"row {row} of this task: column '{column}' {reason}")
        self.row, self.column, self.reason = row, column, reason


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


class AnotherEpoch(PeeklockSourceError):
    """The partition's store was replaced, for example restored from a backup: its offsets began anew."""

    def __init__(self, partition: int, wanted: str, found: str) -> None:
        what = f"the query has offsets of epoch {wanted}, and the journal now has epoch {found}"
        hint = "with failOnDataLoss=false it goes on at the beginning of that epoch"
        super().__init__(f"partition {partition}: {what}; {hint}")
        self.found = found


class JournalRefused(PeeklockSourceError):
    """The endpoint answers with a status that a repetition would not change."""


class JournalUnreachable(PeeklockSourceError):
    """The endpoint is away, is silent, or cuts its answers off, for longer than it may."""
