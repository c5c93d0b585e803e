"""The names of entities beside the journal: `journal/names` under the data directory, msgpack of paths by entity id."""

from pathlib import Path

import msgpack

from storage.data_dir import JOURNAL
from storage.durable import write_file


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
