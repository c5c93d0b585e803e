"""Checks the changes of entities that clients ask for while the broker runs, and makes the definitions they lead to.

What a start declares is checked by `broker.catalog.catalog`, which can look at all definitions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from broker.catalog.catalog import (
    MAX_ENTITIES,
    MAX_OF_TOPIC,
    Definition,
    differences,
    immutable,
    place,
    with_partitioning,
)
from broker.errors import (
    DestinationNotFound,
    EntityAlreadyExists,
    EntityNotFound,
    InvalidArgument,
    NotAllowed,
    QuotaExceeded,
    ServerBusy,
)
from broker.namespace import names
from broker.namespace.entities import (
    DESCRIPTIONS,
    MINUTE_MS,
    Description,
    SubscriptionDescription,
    TopicDescription,
    in_lower_case,
)
from broker.namespace.tiers import Sku, refusals
from broker.settings.behaviour import Partitioning
from broker.settings.declared import FORWARDING
from protocol import error_texts


class Index(Protocol):
    """What is known of all entities without reading their definitions; see `broker.partition.entity_index`."""

    def find(self, path: str) -> int | None: ...

    def is_destination(self, name: str) -> bool: ...

    def is_being_deleted(self, path: str) -> bool: ...

    def count_destinations(self) -> int: ...

    def count_partitioned(self) -> int: ...

    def count_subscriptions(self, topic: str) -> int: ...

    def has_rule(self, entity_id: int, name: str) -> bool: ...

    def rule(self, entity_id: int, name: str) -> dict[str, Any] | None: ...

    def check_rules(
        self, topic: str, documents: Sequence[dict[str, Any]], replaced: Sequence[dict[str, Any]] = ()
    ) -> None: ...


class Limits(NamedTuple):
    """The settings that changes depend on. `lock_ms` is the longest duration of a lock. New queues and topics are named
    in lower case, unless the broker `keeps_case`.
    """

    partitioning: Partitioning = Partitioning()
    lock_ms: int = 5 * MINUTE_MS
    sku: Sku | None = None
    keeps_case: bool = False


class Changing:
    """`partitions` is the number of the namespace's partitions."""

    def __init__(self, index: Index, partitions: int, limits: Limits) -> None:
        self._index = index
        self._partitions = partitions
        self._partitioning = limits.partitioning
        self._lock_ms = limits.lock_ms
        self._sku = limits.sku
        self._keeps_case = limits.keeps_case

    def created(self, wanted: Description, topic: Definition | None, entity_id: int, now_ms: int) -> Definition:
        """The definition of a new entity with this id. `topic` is that of a subscription.

        Raises InvalidArgument, EntityAlreadyExists, QuotaExceeded, ServerBusy.
        """
        if topic is not None:
            wanted = wanted.model_copy(update={"topic": topic.description.name})
        if self._index.is_being_deleted(wanted.path):
            raise ServerBusy(f"'{wanted.path}' is being deleted, because nobody used it. Please try again.")
        if self._index.find(wanted.path) is not None:
            raise EntityAlreadyExists(f"The messaging entity '{wanted.path}' already exists.")
        if not self._keeps_case:
            wanted = in_lower_case(wanted)
        if not {".", ".."}.isdisjoint(wanted.name.split("/")):  # no URL has them; what is stored or declared stays
            raise InvalidArgument(f"{wanted.kind} '{wanted.path}': a segment is . or .. alone. {names.OF_SEGMENTS}")
        wanted = with_partitioning(wanted, None, self._partitioning)
        for field in FORWARDING:
            if (getattr(wanted, field, None) or "").lower() == wanted.path.lower():
                raise InvalidArgument(f"{wanted.kind} '{wanted.path}': {field} names the entity itself.")
        self._check_destinations(wanted)
        self._check_lock(wanted)
        self._check_sizes(wanted)
        partitions = place(wanted, self._partitions) if topic is None else topic.partitions
        self._check_numbers(wanted, len(partitions) > 1)
        return Definition(entity_id, wanted, now_ms, now_ms, partitions)

    def check_first_rules(self, of: Definition, documents: Sequence[dict[str, Any]]) -> None:
        """Check the first rules of a new subscription.

        Raises InvalidArgument, NotAllowed, EntityAlreadyExists, QuotaExceeded.
        """
        description = of.description
        if not isinstance(description, SubscriptionDescription):
            raise NotAllowed(f"'{description.path}' is not a subscription; only subscriptions have rules.")
        names = set()
        for document in documents:
            name = document["name"].lower()
            if name in names:
                raise EntityAlreadyExists(error_texts.rule_exists(document["name"], description.path))
            names.add(name)
        self._index.check_rules(description.topic, documents)

    def check_rule(self, of: Definition, document: dict[str, Any]) -> None:
        """A further rule. Raises as `check_first_rules`."""
        description = of.description
        if self._index.has_rule(of.entity_id, document["name"]):
            raise EntityAlreadyExists(error_texts.rule_exists(document["name"], description.path))
        self._index.check_rules(description.home_name, [document])

    def replaced_rule(self, of: Definition, document: dict[str, Any]) -> dict[str, Any]:
        """The document that takes the place of the rule of this name.

        Raises EntityNotFound, NotAllowed, InvalidArgument, QuotaExceeded.
        """
        known = self._index.rule(of.entity_id, document["name"])
        if known is None:
            raise EntityNotFound(error_texts.rule_not_found(document["name"], of.description.path))
        self._index.check_rules(of.description.home_name, [document], [known])
        return {**document, "name": known["name"], "created_ms": known["created_ms"]}

    def check_has_rule(self, of: Definition, name: str) -> None:
        """Check that the subscription has a rule of this name. Raises EntityNotFound, NotAllowed."""
        if not self._index.has_rule(of.entity_id, name):
            raise EntityNotFound(error_texts.rule_not_found(name, of.description.path))

    def updated(self, known: Definition, fields: Any, now_ms: int) -> Definition:
        """The definition with other values of these properties; all others stay.

        Raises InvalidArgument, also for a property that never changes.
        """
        stored = known.description
        if not isinstance(fields, Mapping):
            raise InvalidArgument("The properties are not a map.")
        own = {"name": stored.name} | ({"topic": stored.topic} if isinstance(stored, SubscriptionDescription) else {})
        for name, value in own.items():
            if str(fields.get(name, value)).lower() != value.lower():
                raise InvalidArgument(f"{stored.kind} '{stored.path}': {name} cannot be changed.")
        wanted = described(stored.kind, {**stored.model_dump(mode="json"), **fields, **own})
        changed = differences(stored, wanted)
        for name in stored.immutable:
            if name in changed:
                raise InvalidArgument(
                    f"The value for the {name} property of an existing {stored.kind.capitalize()} cannot be changed. "
                    f"{stored.kind} '{stored.path}': {immutable(name, stored, wanted)}."
                )
        self._check_destinations(wanted)
        if "lock_duration_ms" in changed:
            self._check_lock(wanted)
        self._check_sizes(wanted, stored)
        return known._replace(description=wanted, updated_ms=now_ms)

    def entity(self, path: Any) -> int:
        """Return the id of the entity at `path`. Raises InvalidArgument, EntityNotFound."""
        if not isinstance(path, str):
            raise InvalidArgument("The path of an entity is not a string.")
        found = self._index.find(path)
        if found is None:
            raise EntityNotFound(f"The messaging entity '{path}' could not be found.")
        return found

    def _check_destinations(self, description: Description) -> None:
        """Entities forward to queues and topics that exist. One that forwards to itself by a change is taken, as in the
        cloud: the limit of hops ends it.

        Raises InvalidArgument, DestinationNotFound.
        """
        for field in FORWARDING:
            to = getattr(description, field, None)
            if not to:
                continue
            if not self._index.is_destination(to):
                raise DestinationNotFound(
                    f"{description.kind} '{description.path}': {field}: there is no queue or topic '{to}'."
                )

    def _check_lock(self, wanted: Description) -> None:
        if not isinstance(wanted, TopicDescription) and wanted.lock_duration_ms > self._lock_ms:
            raise InvalidArgument(
                f"{wanted.kind} '{wanted.path}': lock_duration_ms is {wanted.lock_duration_ms}; it must be at most "
                f"{self._lock_ms} (delivery.max_lock_duration_ms)."
            )

    def _check_sizes(self, wanted: Description, before: Description | None = None) -> None:
        for _, text in refusals(self._sku, wanted, before):
            raise InvalidArgument(text)

    def _check_numbers(self, new: Description, is_partitioned: bool) -> None:
        index = self._index
        if isinstance(new, SubscriptionDescription):
            limit = MAX_OF_TOPIC["subscriptions"]
            if index.count_subscriptions(new.topic) >= limit:
                raise QuotaExceeded(error_texts.too_many(f"The topic '{new.topic}'", limit, "subscriptions"))
            return
        if index.count_destinations() >= MAX_ENTITIES:
            raise QuotaExceeded(error_texts.too_many("The namespace", MAX_ENTITIES, "queues and topics"))
        limit = self._partitioning.max_entities
        if is_partitioned and index.count_partitioned() >= limit:
            raise QuotaExceeded(
                error_texts.too_many(
                    "The namespace", limit, "partitioned queues and topics (partitioning.max_entities)"
                )
            )


def described(kind: Any, fields: Any) -> Description:
    """An entity with these properties, whatever they are. Raises InvalidArgument, which names each that is wrong."""
    model = DESCRIPTIONS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidArgument(f"The kind of the entity is not one of {', '.join(DESCRIPTIONS)}.")
    if not isinstance(fields, Mapping):
        raise InvalidArgument("The properties are not a map.")
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        problems = [_problem(model.kind, each) for each in error.errors(include_url=False, include_input=False)]
        raise InvalidArgument(f"The {kind} is not valid: {'; '.join(problems[:10])}.") from None


def _problem(kind: str, error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    if place in ("name", "topic") and error["type"] != "missing":
        return f"{place}: {names.problem('topic' if place == 'topic' else kind, error)}"
    return f"{place or 'properties'}: {error['msg']}"
