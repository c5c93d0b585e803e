"""The namespace's entities as every partition stores them, and how they are brought in line with what is declared.

Partition 0 is the home: a change is committed there first, with the next catalog version, and then on the others. A
crash in between is mended at the next start: the catalog with the highest version is the latest, and goes to all. That
is the home's, unless partitions were restored from copies of different moments.

META      next-entity-id, catalog-version
ENTITIES  entity id -> the description's fields, and kind, entity_id, created_ms, updated_ms
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from pydantic import ValidationError
from xxhash import xxh3_64_intdigest

from broker.config import ConfigurationError
from broker.entities import QueueDescription
from storage.records import CorruptRecord, decode_document, encode_document, entity_key
from storage.store import Store, StoreError, Table

NEXT_ENTITY_ID_KEY = b"next-entity-id"
CATALOG_VERSION_KEY = b"catalog-version"
FIRST_ENTITY_ID = 1
_ALL = (b"", b"\xff" * 5)
_LIMIT = 1 << 29  # entity ids: a queue id has three bits more, in 32


class ImmutablePropertyChanged(ConfigurationError):
    """A declared entity differs from the stored one where it cannot change."""


class Definition(NamedTuple):
    """One entity as it is stored."""

    entity_id: int
    description: QueueDescription
    created_ms: int
    updated_ms: int

    def document(self) -> dict[str, Any]:
        return {
            "kind": "queue",
            "entity_id": self.entity_id,
            "created_ms": self.created_ms,
            "updated_ms": self.updated_ms,
            **self.description.model_dump(mode="json"),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Raises ValueError if `document` is no definition that this version knows."""
        fields = dict(document)
        try:
            if fields.pop("kind") != "queue":
                raise ValueError(f"kind {document['kind']!r} is unknown")
            entity_id, created_ms, updated_ms = (fields.pop(name) for name in ("entity_id", "created_ms", "updated_ms"))
            return cls(entity_id, QueueDescription.model_validate(fields), created_ms, updated_ms)
        except (KeyError, ValidationError) as error:
            raise ValueError(f"not a definition: {error}") from error


class Update(NamedTuple):
    name: str
    properties: tuple[str, ...]  # that changed


class Reconciled(NamedTuple):
    """What was changed; `copied` are partitions that had not got the latest version."""

    version: int
    created: tuple[str, ...]
    updated: tuple[Update, ...]
    copied: tuple[int, ...]


def home_partition(name: str, partitions: int) -> int:
    """The partition that an entity of this name lives on, unless it is partitioned.

    Must never change: messages are where it said.
    """
    return xxh3_64_intdigest(name.lower().encode()) % partitions


def catalog_version(store: Store) -> int:
    """0 before the first change. Raises StoreError."""
    return _number(store, CATALOG_VERSION_KEY, 0)


def definitions(store: Store) -> list[Definition]:
    """All entities, in the order of their creation. Raises StoreError."""
    return [_definition(key, value) for key, value in store.scan(Table.ENTITIES, *_ALL, _LIMIT)]


def reconcile(stores: Sequence[Store], declared: Iterable[QueueDescription], now_ms: int) -> Reconciled:
    """Create what is declared and missing, update what differs, and bring all partitions in line. Others stay.

    `stores` are those of all partitions, in order. Raises ImmutablePropertyChanged before anything is changed;
    StoreError.
    """
    versions = [catalog_version(store) for store in stores]
    version = max(versions)
    latest = stores[versions.index(version)]
    entities = dict(latest.scan(Table.ENTITIES, *_ALL, _LIMIT))
    next_id = _number(latest, NEXT_ENTITY_ID_KEY, FIRST_ENTITY_ID)
    stored = {item.description.name.lower(): item for item in (_definition(*entity) for entity in entities.items())}
    changed, created, updated, refused = [], [], [], []
    for wanted in declared:
        known = stored.get(wanted.name.lower())
        if known is None:
            changed.append(Definition(next_id, wanted, now_ms, now_ms))
            created.append(wanted.name)
            next_id += 1
            continue
        wanted = wanted.model_copy(update={"name": known.description.name})
        names = [name for name in QueueDescription.model_fields if _differ(name, known.description, wanted)]
        refused += [_refusal(name, known.description, wanted) for name in wanted.immutable if name in names]
        if names:
            changed.append(known._replace(description=wanted, updated_ms=now_ms))
            updated.append(Update(wanted.name, tuple(names)))
    if refused:
        raise ImmutablePropertyChanged("\n".join(refused))
    copied = tuple(partition for partition, found in enumerate(versions) if found < version)
    entities.update((entity_key(item.entity_id), encode_document(item.document())) for item in changed)
    for store in stores:
        _write(store, entities, next_id, version + 1 if changed else version)
    return Reconciled(catalog_version(stores[0]), tuple(created), tuple(updated), copied)


def _write(store: Store, entities: dict[bytes, bytes], next_id: int, version: int) -> None:
    """Make the catalog of one partition this one, in one commit; none if it is."""
    found = dict(store.scan(Table.ENTITIES, *_ALL, _LIMIT))
    if found == entities and catalog_version(store) == version:
        return
    store.delete_many(Table.ENTITIES, [key for key in found if key not in entities])
    store.put_many(Table.ENTITIES, [(key, value) for key, value in entities.items() if found.get(key) != value])
    store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(next_id))
    store.put(Table.META, CATALOG_VERSION_KEY, encode_document(version))
    store.commit()


def _definition(key: bytes, value: bytes) -> Definition:
    try:
        return Definition.from_document(decode_document(value))
    except (CorruptRecord, ValueError) as error:
        raise StoreError(f"entity {int.from_bytes(key, 'big')}: {error}") from error


def _differ(name: str, one: QueueDescription, other: QueueDescription) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _number(store: Store, key: bytes, default: int) -> int:
    value = store.get(Table.META, key)
    if value is None:
        return default
    try:
        return int(decode_document(value))
    except (CorruptRecord, ValueError, TypeError) as error:
        raise StoreError(f"META {key.decode()}: {error}") from error


def _refusal(name: str, stored: QueueDescription, wanted: QueueDescription) -> str:
    return (
        f"queue {stored.name!r}: {name} is {_word(getattr(stored, name))} since its creation and cannot become "
        f"{_word(getattr(wanted, name))}. Declare it as stored, or declare a queue of another name"
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
