"""Entities as settings declare them, and what contradicts itself in them."""

from pydantic import Field

from broker.namespace.entities import (
    QueueDescription,
    SubscriptionDescription,
    SubscriptionProperties,
    TopicDescription,
)
from broker.namespace.rule_descriptions import RuleDescription
from broker.settings.fields import inconsistent, refuse_duplicates

MAX_SUBSCRIPTIONS = 2000  # of one topic
MAX_RULES = 100_000  # of one topic, and so of one subscription
FORWARDING = ("forward_to", "forward_dead_lettered_messages_to")


class DeclaredSubscription(SubscriptionProperties):
    """A subscription as it is declared, below its topic."""

    rules: tuple[RuleDescription, ...] | None = Field(
        None,
        max_length=MAX_RULES,
        description="The rules of the subscription, and no others; unset keeps the stored rules. Without any, a new "
        "subscription takes every message.",
    )

    def description(self, topic: str) -> SubscriptionDescription:
        fields = {name: getattr(self, name) for name in SubscriptionProperties.model_fields}
        return SubscriptionDescription(topic=topic, **fields)


class DeclaredTopic(TopicDescription):
    """A topic as it is declared, with its subscriptions."""

    subscriptions: tuple[DeclaredSubscription, ...] = Field(
        (),
        max_length=MAX_SUBSCRIPTIONS,
        description="Subscriptions to create when missing and to update when they differ.",
    )

    def description(self) -> TopicDescription:
        return TopicDescription(
            **{name: getattr(self, name) for name in TopicDescription.model_fields if name in self.model_fields_set}
        )


def check_topic(place: str, topic: DeclaredTopic) -> None:
    check_entity(place, topic)
    names = [subscription.name.lower() for subscription in topic.subscriptions]
    refuse_duplicates("subscription", f"{place}.subscriptions", names)
    for index, subscription in enumerate(topic.subscriptions):
        at = f"{place}.subscriptions.{index}"
        check_entity(at, subscription)
        refuse_duplicates("rule", f"{at}.rules", [rule.name.lower() for rule in subscription.rules or ()])


def check_lock(place: str, entity: QueueDescription | DeclaredSubscription, most_ms: int) -> None:
    if entity.lock_duration_ms > most_ms:
        raise inconsistent(
            f"must be at most {most_ms}; lower it, or set delivery.max_lock_duration_ms higher",
            f"{place}.lock_duration_ms",
        )


def check_entity(place: str, entity: QueueDescription | DeclaredTopic | DeclaredSubscription) -> None:
    if not isinstance(entity, DeclaredSubscription):
        names = [rule.key_name for rule in entity.authorization_rules]
        refuse_duplicates("authorization rule", f"{place}.authorization_rules", names)
    if isinstance(entity, DeclaredTopic):
        return
    for field in FORWARDING if isinstance(entity, QueueDescription) else ():
        if (getattr(entity, field) or "").lower() == entity.name.lower():
            raise inconsistent("is the queue itself; name another", f"{place}.{field}")
