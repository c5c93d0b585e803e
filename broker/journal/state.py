"""Small files beside the journal: up to where each log was journaled, and the names of entities.

Under the data directory:

    journal/worker-<n>.position    first 8 bytes of the log's id, LSN big-endian: frames up to it need not be kept
    journal/names                  msgpack: paths by entity id
    run/worker-<n>.lsn             LSN little-endian of the last frame that is on disk; written by the worker
"""

import os
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Final

import msgpack

from storage.data_dir import RUN
from storage.durable import write_file
from storage.log.tail import Position

JOURNAL: Final = "journal"
_POSITION_BYTES: Final = 16


def position_path(data_directory: Path, worker: int) -> Path:
    return data_directory / JOURNAL / f"worker-{worker}.position"


def read_position(path: Path) -> Position | None:
    """None if it is not there, or was torn: then what journal files say counts. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != _POSITION_BYTES:
        return None
    return Position(content[:8], int.from_bytes(content[8:], "big"))


def write_position(path: Path, position: Position) -> None:
    """Raises OSError."""
    content = position.log_id[:8] + position.lsn.to_bytes(8, "big")
    try:
        write_file(path, content)
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        # Its block is there already, and a disk writes as much at once.
        with path.open("r+b", buffering=0) as file:
            file.write(content)
            os.fdatasync(file.fileno())


def published_lsn(data_directory: Path, worker: int) -> int:
    """0 if the worker has not said it yet."""
    with suppress(OSError):
        content = (data_directory / RUN / f"worker-{worker}.lsn").read_bytes()
        if len(content) >= 8:
            return int.from_bytes(content[:8], "little")
    return 0


def read_names(data_directory: Path) -> dict[int, str]:
    """Empty if there are none, or they cannot be read: entities are then named by their ids. Raises OSError."""
    try:
        content = (data_directory / JOURNAL / "names").read_bytes()
        found = msgpack.unpackb(content, strict_map_key=False)
        return {int(entity_id): str(path) for entity_id, path in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return {}


def write_names(data_directory: Path, names: dict[int, str]) -> None:
    """Raises OSError."""
    write_file(data_directory / JOURNAL / "names", msgpack.packb(names))
