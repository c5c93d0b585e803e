"""Opens a data directory after a loss of power as a broker does at its start, and says what is in it.

A place is named by the path of its entity, with `/$dlq` for the dead-letter queue, and `:deferred` or `:scheduled` for
messages that are not available.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker import requests
from broker.catalog.catalog import home_partition
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.settings.config import Settings
from broker.supervisor.definitions import bring_in_line
from broker.wire import Extra
from protocol.codec import Described, decode, encode
from protocol.message.intake import take_apart
from protocol.message.layout import unpack_layout
from storage import maintenance
from storage.apart import apart
from storage.data_dir import DataDirectory, partition_path
from storage.findings import PartitionReport
from storage.lmdb_store import LmdbStore
from storage.log.commit_log import CommitLog
from storage.log.recovery import log_directory
from storage.queue_ids import Part, entity_of, part_of, queue_id_of
from storage.records import (
    STORE_ID_KEY,
    Place,
    check_message,
    decode_document,
    decode_entry,
    decode_mark,
    decode_state,
    mark_key,
    message_key,
    message_parts,
    unpack_queue_key,
    unpack_session_key,
)
from storage.store import Store, Table
from tests.power_loss.books import IDS, Found, key_of

EVERYTHING = 1 << 30
END = b"\xff" * 64
DATA = 0x75
PROBE = 0  # the queue id of requests that are for a partition as a whole
PARTS = {Part.MAIN: "", Part.DEAD_LETTER: "/$dlq", Part.TRANSFER: "/$transfer", Part.TRANSFER_DEAD_LETTER: "/$tdlq"}
PLACES = {Place.AVAILABLE: "", Place.DEFERRED: ":deferred", Place.SCHEDULED: ":scheduled"}


@dataclass
class Opened:
    """The partitions and stores of a data directory, by partition."""

    partitions: dict[int, Partition]
    stores: dict[int, Store]


@contextlib.contextmanager
def open_after_loss(settings: Settings) -> Iterator[Opened]:
    """Open `settings.data_dir` in the steps of a broker's start: directory, definitions, then each worker's partitions.

    The only place here that knows how stores are opened and recovered. Raises what the start would fail with.
    """
    with DataDirectory(settings.data_dir, partitions=settings.partitions):
        aligned = bring_in_line(settings)
        if aligned.damaged:
            raise AssertionError(f"damaged partitions: {aligned.damaged}")
        opened = Opened({}, {})
        logs: list[CommitLog] = []
        try:
            for worker in range(settings.worker_count):
                tables = {
                    number: LmdbStore(
                        partition_path(settings.data_dir, number),
                        partition_id=number,
                        map_size_bytes=settings.store.map_size_bytes,
                        create=False,
                        attached=True,
                    )
                    for number in range(worker, settings.partitions, settings.worker_count)
                }
                directory = log_directory(settings.data_dir, worker)
                logs.append(CommitLog(directory, worker, tables, map_size_bytes=settings.store.map_size_bytes))
                opened.stores.update(logs[-1].stores)
            for number in range(settings.partitions):
                opened.partitions[number] = Partition(
                    number,
                    opened.stores[number],
                    now_ms=_now_ms(),
                    incarnation=os.urandom(6),
                    settings=PartitionSettings.of(settings),
                    home=lambda name: home_partition(name, settings.partitions),
                )
            yield opened
        finally:
            for log in logs:
                log.close()


def look(settings: Settings, ids: list[str]) -> Found:
    """Open the directory, read all of it, use each partition, close it again and verify it.

    `ids` are ids of messages that the queue with duplicate detection has accepted and must know.
    """
    found = Found()
    with open_after_loss(settings) as opened:
        marks = {
            key: decode_mark(value)
            for store in opened.stores.values()
            for key, value in store.scan(Table.MARKS, b"", END, EVERYTHING)
        }
        for store in opened.stores.values():
            _read(store, marks, found)
        for number, partition in opened.partitions.items():
            partition.request(PROBE, requests.Probe(), _now_ms())
            partition.commit()
            if home_partition(IDS, settings.partitions) == number:
                _send_again(partition, opened.stores[number], ids, found)
    found.faults += verify(settings.data_dir)
    return found


def look_at_backup(settings: Settings, folder: Path) -> Found:
    """Verify the directory as it is, back it up, restore the backup, and look at what was restored.

    Nothing has opened the directory since the loss.
    """
    faults = verify(settings.data_dir)
    maintenance.backup(settings.data_dir, folder / "backup")
    maintenance.restore(folder / "backup", folder / "restored")
    found = look(settings.model_copy(update={"data_dir": folder / "restored"}), [])
    found.faults += faults
    found.is_copy = True
    return found


def read_in_this_process() -> None:
    """From now on do here what the broker does in processes of their own, because damaged pages may kill them.

    For a process that may be killed itself: to fork takes several times as long as all the rest.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "apart", None) is apart:
            module.apart = _here  # type: ignore[attr-defined]


def _here(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def verify(directory: Path) -> list[str]:
    """What `peeklock verify` finds, as text."""
    report = maintenance.verify(directory)
    return [f"verify: partition {each.partition}: {text}" for each in report.partitions for text in _problems(each)]


def _problems(report: PartitionReport) -> list[str]:
    if report.ok:
        return []
    return [str(finding) for finding in report.findings] or [str(report.problems)]


def _read(store: Store, marks: dict[bytes, int], found: Found) -> None:
    """`marks`: of messages that another partition has taken over; the source deletes them when it hears of that."""
    store_id = decode_document(store.get(Table.META, STORE_ID_KEY) or b"")
    names: dict[int, str] = {}
    for key, value in store.scan(Table.ENTITIES, b"", END, EVERYTHING):
        document = decode_document(value)
        path = document["name"].lower()
        if document["kind"] == "subscription":
            path = f"{document['topic'].lower()}/{path}"
        names[int.from_bytes(key, "big")] = path
        found.values[f"entity {path}"] = True
    rules: dict[str, list[str]] = {}
    for key, _ in store.scan(Table.RULES, b"", END, EVERYTHING):
        rules.setdefault(names[int.from_bytes(key[:4], "big")], []).append(key[4:].decode())
    found.values |= {f"rules {path}": sorted(each) for path, each in rules.items()}
    for key, value in store.scan(Table.SESSION_STATES, b"", END, EVERYTHING):
        queue_id, session = unpack_session_key(key)
        found.values[f"state {names[entity_of(queue_id)]} {session.decode()}"] = decode_state(value).decode()
    for key, value in store.scan(Table.QUEUE, b"", END, EVERYTHING):
        queue_id, place, number = unpack_queue_key(key)
        if number <= marks.get(mark_key(store_id, queue_id), 0):
            continue
        named = names[entity_of(queue_id)] + PARTS[Part(part_of(queue_id))] + PLACES[Place(place)]
        record = store.get(Table.MESSAGES, message_key(decode_entry(value).message_id))
        if record is None:
            found.faults.append(f"{named}: entry {number} without a message")
            continue
        check_message(record)
        message = key_of(_data_of(record))
        if message is None:
            found.faults.append(f"{named}: message {number} has a body that nobody sent")
        else:
            found.units[named, message] += 1
    if found.units and store.last_key(Table.QUARANTINE) is not None:
        found.faults.append("something is in quarantine")


def _data_of(record: bytes) -> bytes:
    layout, stored = message_parts(record)
    at = unpack_layout(layout).annotation_bytes
    while at < len(stored):
        section, at = decode(stored, at)
        if section.descriptor == DATA:
            return bytes(section.value)
    return b""


def _send_again(partition: Partition, store: Store, ids: list[str], found: Found) -> None:
    """What was accepted once is a duplicate, whether it is still there or not."""
    queue_id = next(
        queue_id_of(int.from_bytes(key, "big"))
        for key, value in store.scan(Table.ENTITIES, b"", END, EVERYTHING)
        if decode_document(value)["name"] == IDS
    )
    for message_id in ids:
        before = store.record_count(Table.QUEUE)
        layout, body, _, _ = take_apart(encode(Described(DATA, b"again")))
        partition.send(queue_id, [[layout, body, None, {Extra.MESSAGE_ID: encode(message_id)}]], _now_ms())
        if store.record_count(Table.QUEUE) != before:
            found.faults.append(f"forgotten: id {message_id} was accepted, and is not known as a duplicate")
    partition.commit()


def _now_ms() -> int:
    return int(time.time() * 1000)
