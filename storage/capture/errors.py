"""What can go wrong with a capture. The texts are for users."""

from typing import Any


class CaptureError(Exception):
    def __reduce__(self) -> tuple[Any, ...]:  # the constructors of some make the text
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[CaptureError], args: tuple[Any, ...], attributes: dict[str, Any]) -> CaptureError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class InvalidPlace(CaptureError):
    """The URL names no file system, or no folder in one."""


class InUse(CaptureError):
    """Another capture writes to the URL."""


class Superseded(CaptureError):
    """Another capture has taken over. What was written last may count or not; the other one has seen which."""


class AnotherNamespace(CaptureError):
    """The URL has the rows of another namespace."""


class AnotherBroker(CaptureError):
    """The URL has the rows of another broker, whose namespace has the same name."""


class DamagedManifest(CaptureError):
    """An entry of the manifest cannot be read, or does not fit to those before it."""


class DamagedFile(CaptureError):
    """A file that the manifest names is missing, torn, changed, or no file of a capture."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class MissingFile(DamagedFile):
    """It is not there. A reader's manifest may be older than a compaction that has replaced the file."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "is missing")


class NotCaptured(CaptureError):
    """Rows were asked for that are not there."""

    def __init__(self, partition: int, epoch: str, first: int, end: int) -> None:
        super().__init__(f"partition {partition}, epoch {epoch}: no rows of the offsets {first} to {end - 1}")
        self.partition, self.epoch, self.first, self.end = partition, epoch, first, end


class ForeignRows(CaptureError):
    """Rows that are not what the journal has next."""


class SourceFailed(CaptureError):
    """The journal could not be read now; a retry may help."""


class SourceRefused(CaptureError):
    """The journal does not let us read it, and will not until somebody changes something."""


class RowsLost(CaptureError):
    """Rows of the offsets first <= offset < end were not captured, and never can be."""

    def __init__(self, partition: int, epoch: str, first: int, end: int, what: str) -> None:
        super().__init__(f"partition {partition}, epoch {epoch}: {what}")
        self.partition, self.epoch, self.first, self.end = partition, epoch, first, end


class OutOfRetention(RowsLost):
    """The journal has dropped them."""

    def __init__(self, partition: int, epoch: str, first: int, low: int) -> None:
        what = f"the journal has dropped the offsets {first} to {low - 1} before they were captured"
        super().__init__(partition, epoch, first, low, what)


class DamagedRows(RowsLost):
    """The journal has them in a file that is damaged."""

    def __init__(self, partition: int, epoch: str, first: int, end: int, damage: str) -> None:
        what = f"the journal cannot read the offsets {first} to {end - 1}: {damage}"
        super().__init__(partition, epoch, first, end, what)
