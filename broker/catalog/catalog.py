"""The namespace's entities as every partition stores them, and how they are brought in line with what is declared.

Partition 0 is the home: a change is committed there first, with the next catalog version, and then on the others. If a
crash comes in between, the next start copies the catalog with the highest version to all partitions. That is the
home's, unless partitions were restored from copies of different moments.

An entity that nobody used for its interval is deleted by the partition that it lives on, which tells the home to remove
it from the catalog (`broker.worker.copies`). If the broker ends before that, the next start removes it. So the next
start creates a declared entity again, empty and with another id.

Clients change entities while the broker runs (`broker.worker.home`), and rules. Only the partition of a plain topic
stores the changes of its rules; each start copies them to the other partitions. If that partition does not have a new
subscription yet, the start takes the rules of the subscription from the store with the latest catalog. Rules of a
partitioned topic are changed like entities, and are always taken from there.

META      next-entity-id, catalog-version
ENTITIES  entity id -> the description's fields, and kind, entity_id, created_ms, updated_ms, partitions
RULES     entity id of a subscription, name -> rule document (`broker.namespace.rule_descriptions`)
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from pydantic import ValidationError
from xxhash import xxh3_64_intdigest

from broker.namespace.entities import (
    DESCRIPTIONS,
    KEPT_FOR_CLIENTS,
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
    in_lower_case,
)
from broker.namespace.rule_descriptions import DEFAULT_RULE, FILTER_KINDS, RuleDescription
from broker.settings.behaviour import Partitioning
from broker.settings.config import ConfigurationError, Refusal
from broker.settings.declared import FORWARDING, MAX_RULES, MAX_SUBSCRIPTIONS
from broker.settings.rule_expressions import futile_expressions
from storage.records import (
    IDLE_PREFIX,
    NEXT_ENTITY_ID_KEY,
    CorruptRecord,
    auto_deleted_key,
    decode_document,
    deleted_entity_key,
    encode_document,
    entity_key,
    rule_key,
)
from storage.store import Store, StoreDamaged, Table

HOME = 0  # the partition that has the catalog first
CATALOG_VERSION_KEY = b"catalog-version"
FIRST_ENTITY_ID = 1
MAX_ENTITIES = 10_000  # queues and topics of a namespace
MAX_OF_TOPIC = {"subscriptions": MAX_SUBSCRIPTIONS, "sql filters": 2000, "correlation filters": MAX_RULES}
_ALL = (b"", b"\xff" * 256)
_LIMIT = 1 << 29  # entity ids: a queue id has three bits more, in 32


_PARTITIONING = Partitioning()


class CannotReconcile(ConfigurationError):
    """The declared entities contradict the stored ones; nothing was changed.

    A text among the refusals is about no entity of its own. The error's text has a line for each.
    """

    def __init__(self, refusals: Sequence[Refusal | str]) -> None:
        super().__init__(refusals)
        self.refusals = refusals

    def __str__(self) -> str:
        return "\n".join(map(str, self.refusals))


class Definition(NamedTuple):
    """One entity as it is stored. `partitions` are those that it lives on, ascending: several if it is partitioned.

    They are chosen when the entity is created. Earlier versions did not store them: then the tuple is empty, until
    `reconcile` has recorded the only one. `rules_ms` is when a declaration changed the rules of a subscription, so that
    a partition on another machine notices it. A temporary entity exists as long as clients hold it, and not after a
    restart (`broker.worker.temporary`).
    """

    entity_id: int
    description: Description
    created_ms: int
    updated_ms: int
    partitions: tuple[int, ...] = ()
    rules_ms: int = 0
    temporary: bool = False

    def document(self) -> dict[str, Any]:
        fields = self.description.model_dump(mode="json")
        for name in KEPT_FOR_CLIENTS:
            if name in fields and getattr(self.description, name) == type(self.description).model_fields[name].default:
                del fields[name]
        return {
            "kind": self.description.kind,
            "entity_id": self.entity_id,
            "created_ms": self.created_ms,
            "updated_ms": self.updated_ms,
            "partitions": list(self.partitions),
            **({"rules_ms": self.rules_ms} if self.rules_ms else {}),
            **({"temporary": True} if self.temporary else {}),
            **fields,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Read a definition. Raises ValueError if `document` is none that this version knows."""
        fields = dict(document)
        try:
            kind = fields.pop("kind")
            if kind not in DESCRIPTIONS:
                raise ValueError(f"kind {kind!r} is unknown")
            entity_id, created_ms, updated_ms = (fields.pop(name) for name in ("entity_id", "created_ms", "updated_ms"))
            partitions, rules_ms = tuple(fields.pop("partitions", ())), fields.pop("rules_ms", 0)
            temporary = fields.pop("temporary", False)
            described = DESCRIPTIONS[kind].model_validate(fields)
            return cls(entity_id, described, created_ms, updated_ms, partitions, rules_ms, temporary)
        except (KeyError, TypeError, ValidationError) as error:
            raise ValueError(f"not a definition: {error}") from error


class Update(NamedTuple):
    path: str
    properties: tuple[str, ...]  # those that changed; "rules" may be one of them


class Reconciled(NamedTuple):
    """What was changed; `copied` are the partitions that did not have the latest version."""

    version: int
    created: tuple[str, ...]  # paths
    updated: tuple[Update, ...]
    copied: tuple[int, ...]
    deleted: tuple[str, ...] = ()  # paths of entities that nobody used
    warnings: tuple[str, ...] = ()  # what would be refused if it was not stored already


def home_partition(name: str, partitions: int) -> int:
    """The partition that a new entity of this name will live on, unless it is partitioned.

    Must never change, because data directories of earlier versions have messages where it said.
    """
    return xxh3_64_intdigest(name.lower().encode()) % partitions


def place(new: Description, partitions: int) -> tuple[int, ...]:
    """The partitions that a new queue or topic will live on, of so many that the namespace has."""
    if isinstance(new, QueueDescription | TopicDescription) and new.enable_partitioning:
        return tuple(range(partitions))
    return (home_partition(new.home_name, partitions),)


def with_partitioning(wanted: Description, stored: Description | None, partitioning: Partitioning) -> Description:
    """A description that does not say whether the entity is partitioned leaves a stored one as it is."""
    if "enable_partitioning" not in type(wanted).model_fields or "enable_partitioning" in wanted.model_fields_set:
        return wanted
    as_stored = getattr(stored, "enable_partitioning", partitioning.default)
    return wanted.model_copy(update={"enable_partitioning": as_stored})


def differences(stored: Description, wanted: Description) -> list[str]:
    """Names of the properties that have another value. Both describe an entity of the same kind."""
    return [name for name in type(wanted).model_fields if getattr(stored, name) != getattr(wanted, name)]


def immutable(name: str, stored: Description, wanted: Description) -> str:
    """Says that this property, which differs, cannot be changed."""
    return (
        f"{name} is {_word(getattr(stored, name))} since its creation and cannot become {_word(getattr(wanted, name))}"
    )


def catalog_version(store: Store) -> int:
    """0 before the first change. Raises StoreError."""
    return _number(store, CATALOG_VERSION_KEY, 0)


def next_entity_id(store: Store) -> int:
    """Greater than the ids of all entities that there ever were. Raises StoreError."""
    return _number(store, NEXT_ENTITY_ID_KEY, FIRST_ENTITY_ID)


def definition(store: Store, entity_id: int) -> Definition:
    """The stored definition of an entity that exists. Raises StoreError."""
    key = entity_key(entity_id)
    value = store.get(Table.ENTITIES, key)
    if value is None:
        raise StoreDamaged(f"entity {entity_id}: its definition is missing")
    return _definition(key, value)


def definitions(store: Store) -> list[Definition]:
    """All entities, in the order of their creation. Raises StoreError."""
    return [_definition(key, value) for key, value in store.scan(Table.ENTITIES, *_ALL, _LIMIT)]


def reconcile(
    stores: Sequence[Store] | Mapping[int, Store],
    declared: Iterable[Description],
    now_ms: int,
    declared_rules: Mapping[str, Sequence[RuleDescription]] | None = None,
    partitioning: Partitioning = _PARTITIONING,
    partitions: int | None = None,
    *,
    keep_case: bool = False,
) -> Reconciled:
    """Create declared entities that are missing, update those that differ, and copy the catalog to all partitions.

    Entities that are not declared stay. New queues and topics are named in lower case, unless they `keep_case`; those
    that exist keep their names.

    `stores` are those of all partitions, in order; or, on one of several machines, by partition, those that are there,
    the home's among them, of so many `partitions`: the others follow the home. A topic is declared before its
    subscriptions. `declared_rules` are by the path of their subscription, in lower case: it gets these and no others.
    Without an entry its rules stay, or are the default rule if it is new. Raises CannotReconcile before anything is
    changed; StoreError.
    """
    here = stores if isinstance(stores, Mapping) else dict(enumerate(stores))
    versions = {partition: catalog_version(store) for partition, store in here.items()}
    version = max(versions.values())
    latest = next(here[partition] for partition, found in versions.items() if found == version)
    catalog = _Catalog(latest, partitions or len(here), now_ms, partitioning, keep_case=keep_case)
    catalog.delete_unused(here)
    for wanted in declared:
        catalog.declare(wanted)
    all_rules = _StoredRules(here, latest)
    for definition in list(catalog.subscriptions()):
        declared_here = (declared_rules or {}).get(definition.description.path.lower())
        if catalog.set_rules(definition, all_rules.of(definition), declared_here):
            catalog.tell_others(definition, here)
    catalog.check()
    copied = tuple(partition for partition, found in versions.items() if found < version)
    for store in here.values():
        _write(store, catalog, version + 1 if catalog.changed else version, now_ms)
    return Reconciled(
        catalog_version(here[HOME]),
        tuple(catalog.created),
        catalog.updates(),
        copied,
        tuple(catalog.deleted),
        tuple(catalog.warnings),
    )


def put(store: Store, document: dict[str, Any]) -> None:
    """Stage a definition. `set_version` is to be called, too."""
    entity_id = document["entity_id"]
    store.put(Table.ENTITIES, entity_key(entity_id), encode_document(document))
    if entity_id >= next_entity_id(store):
        store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(entity_id + 1))


def remove(store: Store, entity_ids: Iterable[int]) -> None:
    """Stage the removal of these entities from the catalog. Their messages are not touched: the partition deletes them.

    `set_version` is to be called, too.
    """
    store.delete_many(Table.ENTITIES, map(entity_key, entity_ids))


def set_version(store: Store, version: int) -> None:
    """Stage the version of the catalog after a change."""
    store.put(Table.META, CATALOG_VERSION_KEY, encode_document(version))


class _Catalog:
    """The entities and rules that all partitions are to have."""

    def __init__(
        self, store: Store, partitions: int, now_ms: int, partitioning: Partitioning, *, keep_case: bool
    ) -> None:
        """`partitions` is the number of partitions of the namespace."""
        self.changed = False
        self.created: dict[str, None] = {}  # paths
        self.entities = dict(store.scan(Table.ENTITIES, *_ALL, _LIMIT))
        self.rules: dict[bytes, bytes] = {}
        self.next_id = next_entity_id(store)
        self._partitions = partitions
        self._partitioning = partitioning
        self._keep_case = keep_case
        self._now_ms = now_ms
        stored = (_definition(*entity) for entity in self.entities.items())
        self._by_path = {item.description.path.lower(): item for item in stored}
        self._updated: dict[str, list[str]] = {}
        self._declared: list[Description] = []
        self._refused: list[Refusal | str] = []
        self.deleted: list[str] = []  # paths
        self.warnings: list[str] = []
        for item in list(self._by_path.values()):
            if not item.partitions:
                self._put(item._replace(partitions=(home_partition(item.description.home_name, partitions),)))

    def delete_unused(self, stores: Mapping[int, Store]) -> None:
        """Remove the entities that their partitions have deleted because nobody used them."""
        for path, found in list(self._by_path.items()):
            home = stores.get(found.partitions[0])
            if home is not None and home.get(Table.META, auto_deleted_key(found.entity_id)) is not None:
                del self._by_path[path], self.entities[entity_key(found.entity_id)]
                self.deleted.append(found.description.path)
                self.changed = True

    def declare(self, wanted: Description) -> None:
        topic = None
        if isinstance(wanted, SubscriptionDescription):
            topic = self._by_path.get(wanted.topic.lower())
            if topic is None or topic.description.kind != "topic":
                self._refuse(wanted, None, f"there is no topic {wanted.topic!r}. Declare it, too")
                return
            wanted = wanted.model_copy(update={"topic": topic.description.name})
        known = self._by_path.get(wanted.path.lower())
        wanted = with_partitioning(wanted, None if known is None else known.description, self._partitioning)
        if known is None:
            if not self._keep_case:
                wanted = in_lower_case(wanted)
            partitions = place(wanted, self._partitions) if topic is None else topic.partitions
            self._put(Definition(self.next_id, wanted, self._now_ms, self._now_ms, partitions))
            self.created[wanted.path] = None
            self.next_id += 1
        elif known.description.kind != wanted.kind:
            self._refuse(
                wanted, None, f"a {known.description.kind} of this name exists. Declare a {wanted.kind} of another name"
            )
        else:
            wanted = wanted.model_copy(update={"name": known.description.name})
            names = differences(known.description, wanted)
            for name in wanted.immutable:
                if name in names:
                    text = immutable(name, known.description, wanted)
                    fix = f"Declare it as stored, or declare a {wanted.kind} of another name"
                    self._refuse(wanted, name, f"{text.removeprefix(name).lstrip()}. {fix}")
            if names:
                self._put(known._replace(description=wanted, updated_ms=self._now_ms))
                self._updated[wanted.path] = names
        self._declared.append(wanted)

    def _put(self, definition: Definition) -> None:
        self.changed = True
        self._by_path[definition.description.path.lower()] = definition
        self.entities[entity_key(definition.entity_id)] = encode_document(definition.document())

    def subscriptions(self) -> Iterator[Definition]:
        return (item for item in self._by_path.values() if item.description.kind == "subscription")

    def set_rules(self, of: Definition, stored: dict[bytes, bytes], declared: Sequence[RuleDescription] | None) -> bool:
        """`stored` are the rules as they are now. True if they are changed."""
        is_new = of.description.path in self.created
        if declared is None and not is_new:
            self.rules |= stored
            return False
        known = {rule["name"].lower(): rule for rule in map(_rule, stored.values()) if rule is not None}
        found = {}
        for rule in (DEFAULT_RULE,) if declared is None else declared:
            before = known.get(rule.name.lower())
            document = rule.document(before["created_ms"] if before else self._now_ms)
            key, value = rule_key(of.entity_id, rule.name), encode_document(document)
            found[key] = value
            self._check_rule(of.description, rule, is_stored=stored.get(key) == value)
        if found != stored and not is_new:
            self._updated.setdefault(of.description.path, []).append("rules")
        self.rules |= found
        return found != stored and not is_new

    def _check_rule(self, of: Description, rule: RuleDescription, *, is_stored: bool) -> None:
        """A declared rule that fails on every message is refused, but goes on if it is stored as it is declared."""
        for _, flaw in futile_expressions(rule):
            text = f"rule {rule.name!r} fails on every message: {flaw}"
            if is_stored:
                self.warnings.append(f"{of.kind} {of.path!r}: {text}")
            else:
                self._refuse(of, None, text)

    def tell_others(self, of: Definition, here: Mapping[int, Store]) -> None:
        """Let partitions on other machines notice that the rules of this subscription are others."""
        if not set(of.partitions) <= here.keys():
            self._put(of._replace(rules_ms=self._now_ms))

    def updates(self) -> tuple[Update, ...]:
        return tuple(Update(path, tuple(names)) for path, names in self._updated.items())

    # -- checks

    def check(self) -> None:
        """Check that the whole can be reconciled. Raises CannotReconcile with one line for each problem."""
        for description in self._declared:
            for field in FORWARDING:
                if to := getattr(description, field, None):
                    self._check_destination(description, field, to)
        self._check_numbers()
        if self._refused:
            raise CannotReconcile(self._refused)

    def _check_destination(self, description: Description, field: str, to: str) -> None:
        destination = self._by_path.get(to.lower())
        if destination is None or destination.description.kind == "subscription":
            self._refuse(description, field, f"{to!r} is no queue or topic. Declare it, or name another")

    def _check_numbers(self) -> None:
        topics = {entity_key(item.entity_id): item.description.home_name for item in self.subscriptions()}
        partitioned = [item for item in self._by_path.values() if len(item.partitions) > 1]
        count = sum(item.description.kind != "subscription" for item in partitioned)
        limit = self._partitioning.max_entities
        if count > limit and any(item.description.path in self.created for item in partitioned):
            self._refused.append(
                f"{count} partitioned queues and topics are more than the {limit} that partitioning.max_entities allows"
            )
        entities = len(self._by_path) - len(topics)
        if entities > MAX_ENTITIES:
            self._refused.append(f"{entities} queues and topics are more than the {MAX_ENTITIES} a namespace may have")
        counts = Counter((topic, "subscriptions") for topic in topics.values())
        for key, value in self.rules.items():
            if rule := _rule(value):
                counts[topics[key[:4]], f"{rule['filter']['kind']} filters"] += 1
        for (topic, what), count in counts.items():
            if count > (limit := MAX_OF_TOPIC.get(what, count)):
                self._refused.append(f"topic {topic!r}: {count} {what} are more than the {limit} it may have")

    def _refuse(self, description: Description, field: str | None, text: str) -> None:
        self._refused.append(Refusal(description.kind, description.path, field, text))


class _StoredRules:
    """The rules of each subscription, from the store that has them up to date."""

    def __init__(self, stores: Mapping[int, Store], latest: Store) -> None:
        self._latest = latest
        self._stores = stores

    def of(self, definition: Definition) -> dict[bytes, bytes]:
        key, end = entity_key(definition.entity_id), entity_key(definition.entity_id + 1)
        store = self._latest
        if len(definition.partitions) == 1:
            home = self._stores.get(definition.partitions[0])
            if home is not None and home.get(Table.ENTITIES, key) is not None:
                store = home
        return dict(store.scan(Table.RULES, key, end, _LIMIT))


def _write(store: Store, catalog: _Catalog, version: int, now_ms: int) -> None:
    """Write this catalog to one partition, in one commit; no commit if nothing differs."""
    before = dict(store.scan(Table.ENTITIES, *_ALL, _LIMIT))
    changed = _bring_in_line(store, Table.ENTITIES, catalog.entities)
    _delete_contents(store, before, catalog, now_ms)
    changed += _bring_in_line(store, Table.RULES, catalog.rules)
    if changed:  # a change is a use, so these entities are not idle any more
        store.delete_many(Table.META, {IDLE_PREFIX + key[:4] for key in changed})
    if changed or catalog_version(store) != version:
        store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(catalog.next_id))
        store.put(Table.META, CATALOG_VERSION_KEY, encode_document(version))
        store.commit()


def _delete_contents(store: Store, before: Mapping[bytes, bytes], catalog: _Catalog, now_ms: int) -> None:
    """Note entities that the catalog does not have any more: the partition deletes their messages when it starts.

    `before` are the definitions that were stored. They are decoded only if some of them are gone.
    """
    gone = before.keys() - catalog.entities.keys()
    if not gone:
        return
    stored = [_definition(key, value) for key, value in before.items()]
    topic_ids = {item.description.path.lower(): item.entity_id for item in stored}
    for item in stored:
        if entity_key(item.entity_id) not in gone:
            continue
        of = item.description
        topic_id = topic_ids.get(of.topic.lower()) if isinstance(of, SubscriptionDescription) else None
        document = encode_document({"deleted_ms": now_ms, "topic_id": topic_id})
        store.put(Table.META, deleted_entity_key(item.entity_id), document)
        store.delete(Table.META, auto_deleted_key(item.entity_id))


def _bring_in_line(store: Store, table: Table, wanted: dict[bytes, bytes]) -> list[bytes]:
    """Stage changes so that `table` holds exactly `wanted`; returns the changed keys."""
    found = dict(store.scan(table, *_ALL, _LIMIT))
    removed = [key for key in found if key not in wanted]
    put = [(key, value) for key, value in wanted.items() if found.get(key) != value]
    if removed or put:
        store.delete_many(table, removed)
        store.put_many(table, put)
    return removed + [key for key, _ in put]


def _rule(value: bytes) -> dict[str, Any] | None:
    """A rule document; None if it cannot be read. Its partition deals with unreadable rules."""
    try:
        document: dict[str, Any] = decode_document(value)
        return document if document["name"] and document["filter"]["kind"] in FILTER_KINDS else None
    except (CorruptRecord, KeyError, TypeError):
        return None


def _definition(key: bytes, value: bytes) -> Definition:
    try:
        return Definition.from_document(decode_document(value))
    except (CorruptRecord, ValueError) as error:
        raise StoreDamaged(f"entity {int.from_bytes(key, 'big')}: {error}") from error


def _number(store: Store, key: bytes, default: int) -> int:
    value = store.get(Table.META, key)
    if value is None:
        return default
    try:
        return int(decode_document(value))
    except (CorruptRecord, ValueError, TypeError) as error:
        raise StoreDamaged(f"META {key.decode()}: {error}") from error


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
