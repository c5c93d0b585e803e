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
