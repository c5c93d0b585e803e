"""Subscriptions of clients of JMS: which one a link on a topic means, and which ones a client ends."""

import time
import uuid
from typing import Any, NamedTuple

from broker.errors import EntityNotFound, InvalidArgument, Unauthorized
from broker.gateway.host import Host
from broker.gateway.namespace import Entity
from broker.namespace.entities import MINUTE_MS, Right
from protocol import bounds, error_texts
from protocol.engine.links import Link
from protocol.subscribers import Subscriber, Wanted, subscriber_of
from protocol.symbols import SUBSCRIBER_IDLE_SECONDS

LEAST_IDLE_MS = 5 * MINUTE_MS  # as for any entity


class Missing(NamedTuple):
    """A subscription that is to be made, or held, for a link. `is_temporary`: it goes with its links."""

    topic: str
    name: str
    is_temporary: bool
    properties: dict[str, Any]

    @property
    def path(self) -> str:
        return f"{self.topic}/Subscriptions/{self.name}"


def subscription_of(host: Host, link: Link, topic: Entity) -> Entity | Missing | None:
    """The subscription that a receiver on the topic means; None if the link does not say that it is of a subscriber.

    One of the name that the client has chosen comes first: it was made by others. Raises Unauthorized if one is to be
    made, and the client may not.
    """
    subscriber = _subscriber(host, link)
    found = _at(host, topic, subscriber.name)
    if found is not None or subscriber.wanted is Wanted.EXISTING:
        return found
    if subscriber.wanted is Wanted.OWN:
        missing = Missing(topic.name, f"nondurable-{uuid.uuid4().hex}", True, {})
    else:
        missing = Missing(topic.name, subscriber.made_name, subscriber.wanted is Wanted.SHARED, {})
        found = _at(host, topic, missing.name)
        if found is not None:
            return missing if found.is_temporary else found
    _require_manage(host, topic.name, error_texts.subscription_to_make(topic.name, subscriber.name))
    return missing._replace(properties=_properties(host, missing))


def _at(host: Host, topic: Entity, name: str) -> Entity | None:
    """The subscription of the topic with this name, which is any text: with slashes it might lead to another entity, on
    which the client may have no right.
    """
    found = host.gateway.namespace.at(f"{topic.name}/Subscriptions/{name}")
    return found if found is not None and "/" not in name else None


def _properties(host: Host, missing: Missing) -> dict[str, Any]:
    seconds = host.client_properties.get(SUBSCRIBER_IDLE_SECONDS)
    if missing.is_temporary or not isinstance(seconds, int) or isinstance(seconds, bool) or seconds <= 0:
        return {}
    return {"auto_delete_on_idle_ms": max(LEAST_IDLE_MS, bounds.span_ms(1000 * seconds))}


def subscriptions_to_end(host: Host, link: Link) -> list[Entity]:
    """Find the subscriptions that `unsubscribe` means, by the name of the link, which names no topic.

    Those that were made for the client come first; else the only one with the name that the client has chosen. Raises
    EntityNotFound, InvalidArgument, Unauthorized.
    """
    found, _, suffix = link.name.partition("|")
    client_id = "" if suffix == "global" else host.client_name
    subscriber = Subscriber(Wanted.DURABLE, found, client_id)
    ended = _named(host, subscriber.made_name) or _named(host, subscriber.name)
    if not ended:
        raise EntityNotFound(error_texts.no_subscription_to_end(subscriber.name, client_id))
    if len(ended) > 1 and "$" not in _name_of(ended[0]):
        raise InvalidArgument(error_texts.subscriptions_of_one_name(subscriber.name, [each.name for each in ended]))
    for each in ended:
        topic, _, _ = each.name.rpartition("/Subscriptions/")
        _require_manage(host, topic, error_texts.subscription_to_end(each.name))
    return ended


def _subscriber(host: Host, link: Link) -> Subscriber:
    return subscriber_of(link.name, host.client_name, link.capabilities(), link.outlives_connection)


def _named(host: Host, name: str) -> list[Entity]:
    wanted = name.lower()
    return [
        each
        for each in host.gateway.namespace
        if each.kind == "subscription" and not each.is_temporary and _name_of(each).lower() == wanted
    ]


def _name_of(subscription: Entity) -> str:
    return subscription.name.rpartition("/")[2]


def _require_manage(host: Host, topic: str, text: str) -> None:
    """Check that the connection may manage the topic. Raises Unauthorized with this text."""
    if not host.rights.allows(topic.lower(), Right.MANAGE, time.time()):
        raise Unauthorized(text)
