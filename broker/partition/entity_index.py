"""What is asked about the namespace's entities before they are changed. Every partition knows all of them."""

from collections.abc import Sequence
from typing import Any

from broker.errors import QuotaExceeded
from broker.partition.state.core import Core
from broker.partition.state.stored_rules import compiled_new
from broker.partition.topics.rule_requests import LIMITS, has_rule, rule_of
from protocol import error_texts


class EntityIndex:
    """Paths are compared without regard to case."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def find(self, path: str) -> int | None:
        """The entity id; None if there is no such entity."""
        core, wanted = self._core, path.lower()
        if (found := core.entities.destination_ids.get(wanted)) is not None:
            return found
        topic_id = core.entities.topic_ids.get(wanted.rpartition("/subscriptions/")[0])
        subscriptions = () if topic_id is None else core.entities.subscription_ids[topic_id]
        return next((each for each in subscriptions if core.entities.terms[each].name.lower() == wanted), None)

    def is_destination(self, name: str) -> bool:
        """True if messages can be sent to it: it is a queue or topic."""
        return name.lower() in self._core.entities.destination_ids

    def is_being_deleted(self, path: str) -> bool:
        """Nobody used it, so it was deleted, but the catalog may still have it."""
        return path.lower() in (name.lower() for name in self._core.idle_times.auto_deleted.values())

    def count_destinations(self) -> int:
        """Queues and topics."""
        return len(self._core.entities.destination_ids)

    def count_partitioned(self) -> int:
        """Queues and topics on several partitions."""
        terms = self._core.entities.terms
        return sum(len(terms[each].partitions) > 1 for each in self._core.entities.destination_ids.values())

    def count_subscriptions(self, topic: str) -> int:
        topic_id = self._core.entities.topic_ids.get(topic.lower())
        return 0 if topic_id is None else len(self._core.entities.subscription_ids[topic_id])

    def has_rule(self, entity_id: int, name: str) -> bool:
        """Tell whether the subscription has a rule of this name. Raises EntityNotFound, NotAllowed if it is none."""
        return has_rule(self._core, entity_id, name)

    def rule(self, entity_id: int, name: str) -> dict[str, Any] | None:
        """The document of a rule of this subscription. Raises EntityNotFound, NotAllowed if there is no such one."""
        return rule_of(self._core, entity_id, name)

    def check_rules(
        self, topic: str, documents: Sequence[dict[str, Any]], replaced: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Check rules that are to be added, and others of the topic `replaced`.

        Raises InvalidArgument with the position in a wrong expression, QuotaExceeded.
        """
        core = self._core
        filters = core.topic(core.entities.topic_ids[topic.lower()]).filters.copy()
        filters.subtract(document["filter"]["kind"] for document in replaced)
        for document in documents:
            kind = compiled_new(document).kind
            filters[kind] += 1
            if filters[kind] > (limit := LIMITS.get(kind, filters[kind])):
                raise QuotaExceeded(error_texts.too_many(f"The topic '{topic}'", limit, f"{kind} filters"))
