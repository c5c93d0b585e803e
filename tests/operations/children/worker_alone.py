"""A worker with one partition and one queue. Arguments: directory of the store, path of the socket.

Two requests fail as if the broker had a mistake: `peek` before it has changed anything, `purge` after. The wall clock
is set back by an hour as soon as there is a file `back` beside the store.
"""

import select
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from broker import requests
from broker.idle_polling import IdlePolling
from broker.logging import configure_logging
from broker.namespace.entities import QueueDescription
from broker.partition import requests as handlers
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.settings.config import Settings
from broker.touched_partition import TouchedPartition
from broker.worker.clock import Clock
from broker.worker.dialling import UnixDialler
from broker.worker.listening import UnixListener
from broker.worker.process import make_turns
from broker.worker.worker import Worker
from storage.records import encode_document, entity_key
from storage.store import Store, Table
from tests.logs import open_log


def fail_before(core: Any, queue: Any, asked: Any, now_ms: int) -> NoReturn:
    raise ValueError("a mistake in the code")


def fail_after(core: Any, queue: Any, asked: Any, now_ms: int) -> NoReturn:
    core.store.put(Table.META, b"half done", b"")
    raise ValueError("a mistake in the code")


def main() -> None:
    directory, path = sys.argv[1:]
    configure_logging(Settings().log)
    set_back, wall = Path(directory).with_name("back"), time.time
    time.time = lambda: wall() - (3600 if set_back.exists() else 0)
    handlers._OF_QUEUE |= {requests.Peek: fail_before, requests.Purge: fail_after}
    new = not Path(directory).exists()
    turns = open_log(Path(directory), map_size_bytes=1 << 30)
    store = turns.stores[0]
    if new:
        document = {"kind": "queue", "entity_id": 1, "created_ms": 0, "updated_ms": 0}
        document |= QueueDescription(name="orders", lock_duration_ms=5000).model_dump(mode="json")
        store.put(Table.ENTITIES, entity_key(1), encode_document(document))
        store.commit()
    clock = Clock(int(time.time() * 1000), int(time.monotonic() * 1000))
    partition = Partition(0, store, now_ms=clock.now_ms, incarnation=bytes(6), settings=PartitionSettings())
    touching = TouchedPartition(Path(directory) / "touched")
    stores: dict[int, Store] = {0: store}
    listener = UnixListener(path)
    dialler = partial(_dialler, path)
    make_turns(Worker(0, 0, {0: partition}, stores, listener, dialler, 1, clock, touching, turns), IdlePolling(0))


def _dialler(path: str, poll: select.epoll) -> UnixDialler:
    return UnixDialler([path])


if __name__ == "__main__":
    main()
