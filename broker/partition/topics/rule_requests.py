"""Adds, removes and lists the rules of a subscription. A change holds for messages that are sent afterwards."""

from collections.abc import Sequence
from typing import Any

from broker.errors import EntityAlreadyExists, EntityNotFound, InvalidArgument, NotAllowed, QuotaExceeded
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.stored_rules import Document, compiled, write_rules
from broker.partition.state.topic import Topic
from storage.queue_ids import Part, queue_id_of
from storage.records import rule_key
from storage.store import Table

# The limits of one topic (amqp.md 13.1). True and false filters have no limit, because they cost nothing.
LIMITS = {"sql": 2000, "correlation": 100_000}


def add_rule(core: Core, queue: Queue, args: Sequence[Any], now_ms: int) -> None:
    """Raises EntityAlreadyExists, InvalidArgument with the position in a wrong expression, QuotaExceeded."""
    document: Document = {**args[0], "created_ms": now_ms}
    topic, entity_id = _topic(core, queue), queue.entity_id
    name = document["name"]
    if topic.rule(entity_id, name) is not None:
        raise EntityAlreadyExists(f"The rule '{name}' of '{queue.terms.name}' already exists.")
    stored = compiled(document)
    limit = LIMITS.get(stored.kind)
    if limit is not None and topic.filters[stored.kind] >= limit:
        raise QuotaExceeded(f"The topic of '{queue.terms.name}' has its maximum of {limit} {stored.kind} filters.")
    write_rules(core.store, entity_id, [stored])
    topic.add_rule(entity_id, stored)


def remove_rule(core: Core, queue: Queue, args: Sequence[Any], now_ms: int) -> None:
    """Raises EntityNotFound."""
    topic, entity_id = _topic(core, queue), queue.entity_id
    stored = topic.rule(entity_id, args[0])
    if stored is None:
        # A rule counts as an entity: by this text SDKs know that it does not exist.
        raise EntityNotFound(f"The messaging entity '{queue.terms.name}/Rules/{args[0]}' could not be found.")
    core.store.delete(Table.RULES, rule_key(entity_id, stored.rule.name))
    topic.remove_rule(entity_id, stored.rule.name)


def enumerate_rules(core: Core, queue: Queue, args: Sequence[Any], now_ms: int) -> list[Document]:
    """The rules in the order of their creation, without unreadable ones."""
    skip, top = args
    if skip < 0 or top < 1:
        raise InvalidArgument(f"skip must not be negative and top must be positive, not {skip} and {top}.")
    rules = _topic(core, queue).rules(queue.entity_id)
    return [stored.document for stored in rules if stored.document is not None][skip : skip + top]


def _topic(core: Core, queue: Queue) -> Topic:
    if queue.topic_id is None or queue.part != Part.MAIN:
        raise NotAllowed(f"'{queue.terms.name}' is not a subscription; only subscriptions have rules.")
    return core.topic(core.queue(queue_id_of(queue.topic_id)))
