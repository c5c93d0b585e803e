"""Peeklock's operations that create, change and delete entities, on the node of the namespace.

Service Bus has them over HTTP only. Properties have the names of the configuration file; their values are strings,
numbers, booleans, null, and lists and maps of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.codec import Array, Long
from protocol.nodes.management_fields import ArgumentError, Fields


@dataclass(frozen=True, slots=True)
class CreateEntity:
    """`kind` is queue, topic or subscription. Without `rules` a subscription takes every message."""

    kind: str
    properties: Mapping[str, Any]
    rules: tuple[Mapping[str, Any], ...] | None


@dataclass(frozen=True, slots=True)
class UpdateEntity:
    """The other properties stay as they are."""

    path: str
    properties: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteEntity:
    """A topic with its subscriptions."""

    path: str


@dataclass(frozen=True, slots=True)
class MoveEntity:
    """A move of a queue or topic to another partition; a topic moves with its subscriptions."""

    path: str
    partition: int


def read_create_entity(fields: Fields) -> CreateEntity:
    rules = fields.value("rules")
    if rules is not None:
        rules = tuple(plain("rules", each) for each in fields.collection("rules", "maps", _is_map))
    return CreateEntity(fields.string("kind"), _properties(fields), rules)


def read_update_entity(fields: Fields) -> UpdateEntity:
    return UpdateEntity(fields.string("path"), _properties(fields))


def read_delete_entity(fields: Fields) -> DeleteEntity:
    return DeleteEntity(fields.string("path"))


def read_move_entity(fields: Fields) -> MoveEntity:
    return MoveEntity(fields.string("path"), fields.integer("partition", 0))


def entity_body(properties: Mapping[str, Any]) -> dict[str, Any]:
    """All properties of the entity, as it is now."""
    return {"properties": _amqp(properties)}


def _properties(fields: Fields) -> Mapping[str, Any]:
    found = fields.optional_map("properties")
    if found is None:
        raise ArgumentError("'properties' is missing.")
    properties: Mapping[str, Any] = plain("properties", found)
    return properties


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def plain(name: str, value: Any) -> Any:
    """The value without its AMQP types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | Array):
        return [plain(name, each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str(key): plain(name, each) for key, each in value.items()}
    raise ArgumentError(f"'{name}' contains something else than strings, numbers, booleans, lists and maps.")


def _amqp(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return Long(value)
    if isinstance(value, list):
        return [_amqp(each) for each in value]
    if isinstance(value, dict):
        return {key: _amqp(each) for key, each in value.items()}
    return value
