"""Says what a worker does before it serves, for readiness and its log: in a small file that is gone when it serves."""

from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from storage.data_dir import RUN


class Phase(StrEnum):
    OPENING = "its worker is starting: it opens its stores"
    REPLAYING = "its worker is starting: it brings its stores up to date from its log"
    LOADING = "its worker is starting: it loads its partitions"


def phase_file(worker: int) -> str:
    """The path of the worker's file in the data directory."""
    return f"{RUN}/worker-{worker}.starting"


class Starting:
    """The phases of one start of a worker, written to the file at `path`.

    A file that cannot be written is only missing: a worker starts on a full disk, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def enter(self, phase: Phase) -> None:
        with suppress(OSError):
            self._path.write_text(phase)

    def done(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def phase_of(path: Path) -> Phase | None:
    """The phase in which a worker is, or in which it ended; None if it serves or nothing is known."""
    with suppress(OSError, ValueError):
        return Phase(path.read_text())
    return None
