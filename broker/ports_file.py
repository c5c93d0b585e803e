"""The ports on which a running broker listens, in a file of its data directory, for commands on the same machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from storage.data_dir import RUN, pid_of_user
from storage.durable import write_in_place

_FILE = "ports.json"


class Ports(NamedTuple):
    """None is a port that it does not have."""

    amqp_port: int | None
    amqps_port: int | None
    http_port: int | None
    https_port: int | None


def write_ports(run_path: Path, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """`answers` are those of the processes when they serve. Raises OSError."""
    found = {name: answer[name] for answer in answers.values() for name in Ports._fields if name in answer}
    write_in_place(run_path / _FILE, json.dumps(found).encode())


def remove_ports(run_path: Path) -> None:
    """The broker starts: what an earlier one has written counts no more. Raises OSError.

    The file keeps its block, which a full disk would not give again.
    """
    if (run_path / _FILE).exists():
        write_in_place(run_path / _FILE, b"null")


def running_ports(data_dir: Path) -> Ports | None:
    """Return the ports of the broker that runs on the data directory; None if none runs, or it does not serve yet."""
    try:
        if pid_of_user(data_dir) is None:
            return None
        found = json.loads((data_dir / RUN / _FILE).read_text())
        return Ports(*(found.get(name) for name in Ports._fields))
    except (OSError, ValueError, AttributeError):
        return None
