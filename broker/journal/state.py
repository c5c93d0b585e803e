"""Small files beside the journal, under the data directory.

journal/names  msgpack of the paths of entities, by id
journal/ends   msgpack of [epoch, offset, store id, log id, LSN], by partition: so far each journal is synced, at least;
               so a start knows that files are missing, or are shorter than they were
"""

from pathlib import Path

import msgpack

from storage.data_dir import JOURNAL
from storage.durable import write_file
from storage.journal.files import Reached
from storage.journal.frames import Made


def read_names(data_directory: Path) -> dict[int, str]:
    """Read the names, by entity id. Raises OSError.

    Empty if there are none, or they cannot be read: entities are then named by their ids.
    """
    try:
        content = (data_directory / JOURNAL / "names").read_bytes()
        found = msgpack.unpackb(content, strict_map_key=False)
        return {int(entity_id): str(path) for entity_id, path in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return {}


def write_names(data_directory: Path, names: dict[int, str]) -> None:
    """Write the file of names, by entity id. Raises OSError."""
    write_file(data_directory / JOURNAL / "names", msgpack.packb(names))


def read_ends(data_directory: Path) -> dict[int, Reached]:
    """Read the ends, by partition. Raises OSError.

    Empty if there are none, or they cannot be read: then nothing is known to be missing.
    """
    try:
        found = msgpack.unpackb((data_directory / JOURNAL / "ends").read_bytes(), strict_map_key=False)
        return {
            int(partition): Reached(bytes(epoch), int(offset), Made(bytes(store_id), bytes(log_id), int(lsn)))
            for partition, (epoch, offset, store_id, log_id, lsn) in found.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return {}


def write_ends(data_directory: Path, ends: dict[int, Reached]) -> None:
    """Write the file of ends, by partition. Raises OSError."""
    packed = {partition: [each.epoch, each.offset, *each.made] for partition, each in ends.items()}
    write_file(data_directory / JOURNAL / "ends", msgpack.packb(packed))
