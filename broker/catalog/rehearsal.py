"""Finds, without changing anything, what `serve` would refuse: declared entities that cannot be or work, and ports.

A port in use is a warning: beside a running broker, settings with another data directory can be checked. If there is a
data directory, its definitions are copied into memory and reconciled there as at a start (`broker.catalog.catalog`). A
running broker may be using it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from broker.catalog.catalog import CannotReconcile, reconcile
from broker.listening import Unusable, unusable
from broker.namespace.entities import MAX_HOPS, Description, SubscriptionDescription
from broker.settings.config import Refusal, Settings
from storage.apart import read_apart
from storage.data_dir import LOCK_FILE, DataDirectoryUnwritable, partition_path, pid_of_user, read_description
from storage.data_dir import Description as Directory
from storage.lmdb_store import DATA_FILE
from storage.log.snapshot import Snapshot
from storage.memory import MemoryStore
from storage.store import Table

_COPIED = (Table.META, Table.ENTITIES, Table.RULES)


class Findings(NamedTuple):
    """`problems` end a start, each with the entity and the field, or the port; `ports_in_use` may be free by then."""

    problems: list[Refusal | str]
    ports_in_use: list[str]


def rehearse(settings: Settings, now_ms: int) -> Findings:
    """Find what would keep a broker with these settings from starting. Raises DataDirectoryError, StoreError."""
    ports = _of_ports(settings)
    problems = [*_of_entities(settings, now_ms), *(text for text, is_in_use in ports if not is_in_use)]
    return Findings(problems, [text for text, is_in_use in ports if is_in_use])


def _of_ports(settings: Settings) -> list[Unusable]:
    """Ports that cannot be listened at. A broker that runs has its own: it is known by the lock of its data directory,
    and gateways of a namespace on several machines have none."""
    lock = settings.data_dir / LOCK_FILE
    if settings.cluster.workers or (lock.exists() and pid_of_user(settings.data_dir)):
        return []
    return list(unusable(settings.listeners))


def _of_entities(settings: Settings, now_ms: int) -> list[Refusal | str]:
    wanted = Directory(settings.partitions, owned=settings.cluster.owned)
    try:
        found = read_description(settings.data_dir) or wanted
    except (NotADirectoryError, PermissionError) as error:
        return [str(DataDirectoryUnwritable(settings.data_dir, error))]
    found.require_growth(settings.data_dir, wanted)
    known = found.stores or ()
    stores = [_copy(settings, partition, partition in known) for partition in range(settings.partitions)]
    try:
        if found.partitions < settings.partitions:
            reconcile(stores[: found.partitions], (), now_ms)  # entities stay where they are
        keep_case = settings.keep_case_of_names
        reconcile(stores, settings.entities, now_ms, settings.rules, settings.partitioning, keep_case=keep_case)
    except CannotReconcile as error:
        return [*error.refusals, *forwarding_problems(settings.entities)]
    return list(forwarding_problems(settings.entities))


def _copy(settings: Settings, partition: int, is_known: bool) -> MemoryStore:
    path = partition_path(settings.data_dir, partition)
    return read_apart(path, _read, path) if is_known or (path / DATA_FILE).exists() else MemoryStore()


def _read(path: Path) -> MemoryStore:
    store = MemoryStore()
    with Snapshot(path) as snapshot:
        for table in _COPIED:
            store.put_many(table, list(snapshot.items(table)))
    store.commit()
    return store


def forwarding_problems(entities: Iterable[Description]) -> Iterator[Refusal]:
    """Chains of `forward_to` that lead back to their start, or have more hops than a message may make.

    Messages in such a chain end in a transfer dead-letter queue. Forwarding of dead-lettered messages back to their
    queue is not reported, because some applications try again in this way.
    """
    entities = list(entities)
    destinations: dict[str, set[str]] = {}  # by queue, topic or subscription; a topic has those of its subscriptions
    for entity in entities:
        target = getattr(entity, "forward_to", None)
        if target:
            destinations.setdefault(entity.path.lower(), set()).add(target.lower())
            if isinstance(entity, SubscriptionDescription):
                destinations.setdefault(entity.topic.lower(), set()).add(target.lower())
    for entity in entities:
        target = getattr(entity, "forward_to", None)
        if not target:
            continue
        starts = {entity.path.lower()}
        if isinstance(entity, SubscriptionDescription):
            starts.add(entity.topic.lower())
        reached = {target.lower()}
        for _ in range(MAX_HOPS):
            if reached & starts:
                text = f"{target!r} leads back to it. Forward elsewhere"
                yield Refusal(entity.kind, entity.path, "forward_to", text)
                break
            reached = set().union(*(destinations.get(name, ()) for name in reached))
        else:
            if reached:
                text = f"{target!r} begins a chain of more than {MAX_HOPS} hops, and messages take no more. Shorten it"
                yield Refusal(entity.kind, entity.path, "forward_to", text)
