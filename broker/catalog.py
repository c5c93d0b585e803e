"""The namespace's entities as every partition stores them, and how they are brought in line with what is declared.

Partition 0 is the home: a change is committed there first, with the next catalog version, and then copied to the
others. So a copy's version is never above the home's, and a crash in between is mended at the next start by copying.

META      next-entity-id (home only), catalog-version
ENTITIES  entity id -> the description's fields, and kind, entity_id, created_ms, updated_ms
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from pydantic import ValidationError
from xxhash import xxh3_64_intdigest

from broker.config import ConfigurationError
from broker.entities import IMMUTABLE, QueueDescription
from storage.records import CorruptRecord, decode_document, encode_document, entity_key
from storage.store import Store, StoreError, Table

NEXT_ENTITY_ID_KEY = b"next-entity-id"
CATALOG_VERSION_KEY = b"catalog-version"
FIRST_ENTITY_ID = 1
_ALL = (b"", b"\xff" * 5)
_LIMIT = 1 << 29  # entity ids: a queue id has three bits more, in 32


class ImmutablePropertyChanged(ConfigurationError):
    """A declared entity differs from the stored one where it cannot change."""


class CatalogOutdated(StoreError):
    """The home's catalog is older than a copy: it was restored from an older backup than the rest."""


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
    """What was changed; `copied` are partitions that lagged behind the home."""

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
    found = []
    for key, value in store.scan(Table.ENTITIES, *_ALL, _LIMIT):
        try:
            found.append(Definition.from_document(decode_document(value)))
        except (CorruptRecord, ValueError) as error:
            raise StoreError(f"entity {int.from_bytes(key, 'big')}: {error}") from error
    return found


def reconcile(stores: Sequence[Store], declared: Iterable[QueueDescription], now_ms: int) -> Reconciled:
    """Create what is declared and missing, update what differs, and bring all copies in line. Others stay as they are.

    `stores` are those of all partitions, in order. Raises ImmutablePropertyChanged before anything is changed;
    CatalogOutdated, StoreError.
    """
    home = stores[0]
    version = catalog_version(home)
    for partition, store in enumerate(stores):
        if (copy_version := catalog_version(store)) > version:
            raise CatalogOutdated(
                f"partition 0 has catalog version {version}, partition {partition} has {copy_version}: partition 0 is "
                "from an older backup. Restore all partitions from one backup"
            )
    stored = {definition.description.name.lower(): definition for definition in definitions(home)}
    next_id = _number(home, NEXT_ENTITY_ID_KEY, FIRST_ENTITY_ID)
    changed, created, updated = [], [], []
    refused: list[str] = []
    for wanted in declared:
        known = stored.get(wanted.name.lower())
        if known is None:
            changed.append(Definition(next_id, wanted, now_ms, now_ms))
            created.append(wanted.name)
            next_id += 1
            continue
        wanted = wanted.model_copy(update={"name": known.description.name})
        names = [
            name for name in type(wanted).model_fields if getattr(wanted, name) != getattr(known.description, name)
        ]
        refused += [_refusal(known.description, wanted, name) for name in IMMUTABLE if name in names]
        if names:
            changed.append(known._replace(description=wanted, updated_ms=now_ms))
            updated.append(Update(wanted.name, tuple(names)))
    if refused:
        raise ImmutablePropertyChanged("\n".join(refused))
    if changed:
        version += 1
        _put(home, version, [(entity_key(item.entity_id), encode_document(item.document())) for item in changed])
        home.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(next_id))
        home.commit()
    copied = [partition for partition in range(1, len(stores)) if _copy(home, stores[partition], version)]
    return Reconciled(version, tuple(created), tuple(updated), tuple(copied))


def _copy(home: Store, store: Store, version: int) -> bool:
    """Make a store's entities those of the home. True if they were not."""
    wanted = dict(home.scan(Table.ENTITIES, *_ALL, _LIMIT))
    found = dict(store.scan(Table.ENTITIES, *_ALL, _LIMIT))
    if found == wanted and catalog_version(store) == version:
        return False
    store.delete_many(Table.ENTITIES, [key for key in found if key not in wanted])
    _put(store, version, [(key, value) for key, value in wanted.items() if found.get(key) != value])
    store.commit()
    return True


def _put(store: Store, version: int, items: Sequence[tuple[bytes, bytes]]) -> None:
    store.put_many(Table.ENTITIES, items)
    store.put(Table.META, CATALOG_VERSION_KEY, encode_document(version))


def _number(store: Store, key: bytes, default: int) -> int:
    value = store.get(Table.META, key)
    if value is None:
        return default
    try:
        return int(decode_document(value))
    except (CorruptRecord, ValueError, TypeError) as error:
        raise StoreError(f"META {key.decode()}: {error}") from error


def _refusal(stored: QueueDescription, wanted: QueueDescription, name: str) -> str:
    return (
        f"queue {stored.name!r}: {name} is {_word(getattr(stored, name))} since its creation and cannot become "
        f"{_word(getattr(wanted, name))}. Declare it as stored, or declare a queue of another name"
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
