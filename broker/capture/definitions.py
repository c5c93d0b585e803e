"""The definitions of a namespace's entities, as a capture keeps them beside the rows."""

from collections.abc import Iterable, Mapping
from typing import Any

from storage.capture.rebuilding import Entity


def entities_of(documents: Iterable[Mapping[str, Any]]) -> dict[str, Entity]:
    """By path in lower case, of the documents of definitions (`broker.catalog.catalog.Definition`)."""
    documents = list(documents)
    topics = {each["name"].lower(): each["entity_id"] for each in documents if each["kind"] == "topic"}
    found = {}
    for each in documents:
        of_topic = each["kind"] == "subscription"
        path = f"{each['topic']}/subscriptions/{each['name']}" if of_topic else each["name"]
        found[path.lower()] = Entity(
            each["entity_id"],
            is_topic=each["kind"] == "topic",
            topic_id=topics[each["topic"].lower()] if of_topic else None,
            requires_session=bool(each.get("requires_session")),
            partitions=tuple(each["partitions"]),
        )
    return found
