"""How far those that read the journal have come: for some of them, files are kept until they have read them.

`journal/consumers` under the data directory: msgpack of [epoch, offset] by partition, by name. It may be older than
what was told: then files are kept for longer.
"""

import threading
from collections.abc import Iterable, Mapping
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Final, NamedTuple

import msgpack

from storage.data_dir import JOURNAL
from storage.durable import write_file

MAX_CONSUMERS: Final = 64


class Progress(NamedTuple):
    """All rows before `offset` were read. Epochs are ordered by their bytes."""

    epoch: bytes
    offset: int


class TooManyConsumers(Exception):
    """There are MAX_CONSUMERS already."""


class Consumers:
    """Names are those of `broker.journal_requests.Consumer`. Other threads may call all methods."""

    def __init__(self, directory: Path, held_for: Iterable[str]) -> None:
        """`held_for` are the names of those for whom files are kept. Raises OSError."""
        self._path = directory / JOURNAL / "consumers"
        self._held_for = tuple(held_for)
        self._lock = threading.Lock()
        self._is_changed = False
        self._progress: dict[str, dict[int, Progress]] = _read(self._path)

    def tell(self, name: str, progress: Mapping[int, Progress]) -> None:
        """Take how far a consumer is in some partitions; nobody goes back. Raises TooManyConsumers."""
        with self._lock:
            known = self._progress.get(name)
            if known is None:
                if len(self._progress) >= MAX_CONSUMERS:
                    raise TooManyConsumers
                known = self._progress[name] = {}
            for partition, each in progress.items():
                if each > known.get(partition, Progress(b"", 0)):
                    known[partition] = each
            self._is_changed = True

    def forget(self, name: str) -> bool:
        """False if nothing is known of it."""
        with self._lock:
            found = self._progress.pop(name, None) is not None
            self._is_changed |= found
            return found

    def all(self) -> dict[str, dict[int, Progress]]:
        """Return the progress of all consumers that have told any, or for which files are kept."""
        with self._lock:
            return {name: dict(self._progress.get(name, {})) for name in sorted({*self._progress, *self._held_for})}

    def is_needed(self, partition: int, end: Progress) -> bool:
        """True if one for whom files are kept has not read all before `end`."""
        with self._lock:
            return any(self._progress.get(name, {}).get(partition, Progress(b"", 0)) < end for name in self._held_for)

    def save(self) -> None:
        """Write what was told since; on a full disk that waits for the next call. Raises other OSErrors."""
        with self._lock:
            if not self._is_changed:
                return
            content = msgpack.packb(self._progress)
            self._is_changed = False
        try:
            write_file(self._path, content)
        except OSError as error:
            with self._lock:
                self._is_changed = True
            if error.errno not in (ENOSPC, EDQUOT):
                raise


def _read(path: Path) -> dict[str, dict[int, Progress]]:
    """Read the progress of all consumers; empty if unreadable: then files are kept for longer. Raises OSError."""
    try:
        found = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
        return {
            str(name): {
                int(partition): Progress(bytes(epoch), int(offset)) for partition, (epoch, offset) in each.items()
            }
            for name, each in found.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return {}
