"""Adds, removes and lists the rules of a subscription. A change holds for messages that are sent afterwards."""

from collections.abc import Sequence

from broker import requests
from broker.errors import EntityAlreadyExists, EntityNotFound, InvalidArgument, NotAllowed, QuotaExceeded
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.stored_rules import Document, StoredRule, compiled, compiled_new, write_rules
from broker.partition.state.terms import Kind
from broker.partition.state.topic import Topic
from protocol import error_texts
from storage.queue_ids import Part
from storage.records import rule_key
from storage.store import Table

# The limits of one topic (amqp.md 13.1). True and false filters have no limit, because they cost nothing.
LIMITS = {"sql": 2000, "correlation": 100_000}


def add_rule(core: Core, queue: Queue, asked: requests.AddRule, now_ms: int) -> None:
    """Add a rule.

    Raises EntityAlreadyExists, InvalidArgument with the position in a wrong expression, QuotaExceeded.
    """
    document: Document = {**asked.rule, "created_ms": now_ms}
    topic, entity_id = _topic(core, queue), queue.entity_id
    name = document["name"]
    if topic.rule(entity_id, name) is not None:
        raise EntityAlreadyExists(error_texts.rule_exists(name, queue.terms.name))
    stored = compiled_new(document)
    _require_room(topic, queue, stored.kind)
    _add(core, topic, entity_id, stored)


def replace_rule(core: Core, queue: Queue, asked: requests.ReplaceRule, now_ms: int) -> None:
    """Let a rule that exists have another filter and action. Raises EntityNotFound, InvalidArgument, QuotaExceeded."""
    topic, entity_id = _topic(core, queue), queue.entity_id
    known = _existing(topic, queue, asked.rule["name"])
    document: Document = {
        **asked.rule,
        "created_ms": now_ms if known.document is None else known.document["created_ms"],
    }
    stored = compiled_new(document)
    if stored.kind != known.kind:
        _require_room(topic, queue, stored.kind)
    _remove(core, topic, entity_id, document["name"])
    _add(core, topic, entity_id, stored)


def get_rule(core: Core, queue: Queue, asked: requests.GetRule, now_ms: int) -> Document:
    """Return the document of a rule. Raises EntityNotFound, also if the rule cannot be read."""
    document = _existing(_topic(core, queue), queue, asked.name).document
    if document is None:
        raise EntityNotFound(error_texts.rule_not_found(asked.name, queue.terms.name))
    return document


def filter_counts(core: Core, asked: requests.FilterCounts, now_ms: int) -> dict[int, list[int]]:
    """For those of these entities that are topics here: the number of SQL and of correlation filters.

    True and false filters are SQL filters, as in the cloud: so is that of `$Default`.
    """
    filters = {each: core.topic(each).filters for each in asked.entity_ids if each in core.entities.subscription_ids}
    return {
        each: [found["sql"] + found["true"] + found["false"], found["correlation"]] for each, found in filters.items()
    }


def remove_rule(core: Core, queue: Queue, asked: requests.RemoveRule, now_ms: int) -> None:
    """Remove a rule. Raises EntityNotFound."""
    topic = _topic(core, queue)
    _existing(topic, queue, asked.name)
    _remove(core, topic, queue.entity_id, asked.name)


def _existing(topic: Topic, queue: Queue, name: str) -> StoredRule:
    stored = topic.rule(queue.entity_id, name)
    if stored is None:
        raise EntityNotFound(error_texts.rule_not_found(name, queue.terms.name))
    return stored


def _require_room(topic: Topic, queue: Queue, kind: str) -> None:
    """For one more filter of this kind. Raises QuotaExceeded."""
    limit = LIMITS.get(kind)
    if limit is not None and topic.filters[kind] >= limit:
        raise QuotaExceeded(error_texts.too_many(f"The topic of '{queue.terms.name}'", limit, f"{kind} filters"))


def set_rule(core: Core, entity_id: int, document: Document) -> None:
    """Add a rule to the subscription, in place of one of this name. Another partition has checked it."""
    topic = _topic_of(core, entity_id)
    if topic.rule(entity_id, document["name"]) is not None:
        _remove(core, topic, entity_id, document["name"])
    _add(core, topic, entity_id, compiled(document))


def drop_rule(core: Core, entity_id: int, name: str) -> None:
    """Remove the rule of this name if there is one."""
    topic = _topic_of(core, entity_id)
    if topic.rule(entity_id, name) is not None:
        _remove(core, topic, entity_id, name)


def set_rules(core: Core, entity_id: int, documents: Sequence[Document]) -> None:
    """Let the subscription have just these rules. Another partition has checked them."""
    topic = _topic_of(core, entity_id)
    wanted = {document["name"].lower(): document for document in documents}
    for stored in topic.rules(entity_id):
        if stored.document != wanted.get(stored.rule.name.lower()):
            _remove(core, topic, entity_id, stored.rule.name)
    for name, document in wanted.items():
        if topic.rule(entity_id, name) is None:
            _add(core, topic, entity_id, compiled(document))


def has_rule(core: Core, entity_id: int, name: str) -> bool:
    """Tell whether the subscription has a rule of this name. Raises EntityNotFound, NotAllowed if it is none."""
    return _topic_of(core, entity_id).rule(entity_id, name) is not None


def rule_of(core: Core, entity_id: int, name: str) -> Document | None:
    """The rule's document, if it can be read. Raises as `has_rule`."""
    stored = _topic_of(core, entity_id).rule(entity_id, name)
    return None if stored is None else stored.document


def rules_of(core: Core, entity_id: int) -> list[Document]:
    """All rules of the subscription that can be read."""
    topic = _topic_of(core, entity_id)
    return [stored.document for stored in topic.rules(entity_id) if stored.document is not None]


def _add(core: Core, topic: Topic, entity_id: int, stored: StoredRule) -> None:
    write_rules(core.store, entity_id, [stored])
    topic.add_rule(entity_id, stored)


def _remove(core: Core, topic: Topic, entity_id: int, name: str) -> None:
    stored = topic.rule(entity_id, name)
    assert stored is not None
    core.store.delete(Table.RULES, rule_key(entity_id, stored.rule.name))
    topic.remove_rule(entity_id, stored.rule.name)


def enumerate_rules(core: Core, queue: Queue, asked: requests.EnumerateRules, now_ms: int) -> list[Document]:
    """The rules in the order of their names, as the cloud lists them, without unreadable ones."""
    skip, top = asked
    if skip < 0 or top < 1:
        raise InvalidArgument(f"skip must not be negative and top must be positive, not {skip} and {top}.")
    rules = _topic(core, queue).rules_by_name(queue.entity_id)
    return [stored.document for stored in rules if stored.document is not None][skip : skip + top]


def _topic_of(core: Core, entity_id: int) -> Topic:
    """The topic of this subscription, which may live on other partitions. Raises EntityNotFound, NotAllowed."""
    terms = core.entities.terms.get(entity_id)
    if terms is None:
        raise EntityNotFound("The messaging entity could not be found.")
    if terms.kind != Kind.SUBSCRIPTION:
        raise NotAllowed(f"'{terms.name}' is not a subscription; only subscriptions have rules.")
    return core.topic(core.entities.topic_ids[terms.topic])


def _topic(core: Core, queue: Queue) -> Topic:
    if queue.topic_id is None or queue.part != Part.MAIN:
        raise NotAllowed(f"'{queue.terms.name}' is not a subscription; only subscriptions have rules.")
    return core.topic(queue.topic_id)
