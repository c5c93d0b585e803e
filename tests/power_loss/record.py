"""Records a trace: a real broker under the shim, from its first start on, with everything that `workload.py` does.

It is killed under load once and recovers, and is restarted with another configuration in the end.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.brokers import Broker
from tests.power_loss.trace import Kind, Marker, Phase, Record, Trace
from tests.power_loss.workload import (
    ADDED,
    CONFIG,
    CONFIG_WITH_ADDED,
    PARTITIONS,
    WORKERS,
    Scribe,
    Workload,
)

CONFIG_FILE = "config.toml"
TRACE_FILE = "trace"
UNSYNCED = Path(__file__).with_name("unsynced")
INTERRUPTED = -4  # EINTR
LONGEST_SYNC_US = 2000  # what does not wait for a sync gets ahead of it


def record(directory: Path, shim: Path, *, seconds: float, seed: int, unsynced: bool = False) -> int:
    """Make `directory` with a trace and the configuration; returns the number of operations that were acknowledged.

    The broker is killed after half of the time, and restarted at the end. `unsynced`: it is not killed, and its LMDB is
    told not to sync.
    """
    directory.mkdir(parents=True)
    trace = directory / TRACE_FILE
    data = (directory / "broker" / "data").absolute()
    data.mkdir(parents=True, mode=0o700)
    environment = [
        f"LD_PRELOAD={shim}",
        f"POWER_LOSS_DIRECTORY={data.resolve()}",
        f"POWER_LOSS_TRACE={trace}",
        f"POWER_LOSS_SYNC_US={LONGEST_SYNC_US}",
        *([f"PYTHONPATH={UNSYNCED}"] if unsynced else []),
    ]
    broker = Broker(
        directory / "broker",
        CONFIG,
        arguments=("--emulator", "--partitions", str(PARTITIONS)),
        workers=WORKERS,
        prefix=("env", *environment),
    )
    (directory / CONFIG_FILE).write_text(CONFIG)
    marker = Marker(trace)
    scribe = Scribe(marker)
    marker.mark(root=data.stat().st_ino)
    try:
        broker.start()
        workload = Workload(broker.amqp_port, scribe, seed)
        workload.start()
        time.sleep(seconds / 2)  # it works meanwhile
        if not unsynced:
            broker.kill()
            resolve(trace, data, marker)
            broker.start()
        time.sleep(seconds / 2)
        workload.stop()
        broker.stop()
        if unsynced:
            return scribe.operations
        broker.config_file.write_text(CONFIG_WITH_ADDED)
        with scribe.operation(values={f"entity {ADDED}": True}):
            broker.start()
        workload = Workload(broker.amqp_port, scribe, seed + 1)
        workload.start()
        time.sleep(1)  # it works with the added entity, too
        workload.stop()
        broker.stop()
    finally:
        broker.kill()
        marker.close()
    return scribe.operations


def resolve(trace: Path, data: Path, marker: Marker) -> None:
    """Write the ends of operations whose processes were killed in them, as they are found to have ended."""
    unfinished: dict[int, Record] = {}
    for each in Trace(trace):
        if each.kind in (Kind.MARK, Kind.MAPPED):
            continue
        if each.phase == Phase.BEGIN:
            unfinished[each.operation] = each
        else:
            unfinished.pop(each.operation, None)
    for each in unfinished.values():
        for end in _ends(each, data):
            marker.add(end)


def _ends(begun: Record, data: Path) -> Iterator[Record]:
    end = begun._replace(phase=Phase.END, path="", target="", data=b"", flags=0)
    failed = end._replace(result=INTERRUPTED)
    match begun.kind:
        case Kind.WRITE:
            # Whatever it has left in the file was written, and is not durable.
            yield failed
            path = _path_of(data, begun.inode)
            content = path.read_bytes()[begun.offset : begun.offset + begun.size] if path else b""
            if content:
                again = end._replace(operation=begun.operation | 1 << 63, size=len(content), result=len(content))
                yield again._replace(phase=Phase.BEGIN, data=content)
                yield again
        case Kind.TRUNCATE:
            path = _path_of(data, begun.inode)
            yield end if path and path.stat().st_size == begun.size else failed
        case Kind.SYNC:
            yield failed
        case Kind.CREATE | Kind.MKDIR:
            there = data / begun.path
            yield end._replace(inode=there.stat().st_ino) if there.exists() else failed
        case Kind.UNLINK | Kind.RMDIR:
            yield failed if (data / begun.path).exists() else end
        case Kind.RENAME:
            yield failed if (data / begun.path).exists() else end


def _path_of(data: Path, inode: int) -> Path | None:
    for folder, _, names in os.walk(data):
        for name in names:
            path = Path(folder) / name
            if path.stat().st_ino == inode:
                return path
    return None
