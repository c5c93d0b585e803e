"""Reads arguments of management requests leniently; errors name the wrong argument."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from protocol import bounds, conditions
from protocol.codec import Array, Symbol
from protocol.errors import ProtocolError
from protocol.nodes.request_message import text


class ManagementError(ProtocolError):
    """The request is invalid; `condition` is the condition of the answer."""

    condition: Symbol = conditions.ARGUMENT_ERROR


class ArgumentError(ManagementError):
    """An argument is missing or of the wrong type. The text names the field."""


class ArgumentOutOfRange(ManagementError):
    condition = conditions.ARGUMENT_OUT_OF_RANGE


class UnknownOperation(ManagementError):
    condition = conditions.NOT_IMPLEMENTED


class Fields:
    """Typed access to a map of arguments; each method raises an error that names the field."""

    def __init__(self, fields: Mapping[Any, Any]) -> None:
        self._fields = fields

    def optional_integer(self, name: str) -> int | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if not is_integer(value):
            raise ArgumentError(f"'{name}' is not an integer.")
        return int(value)

    def integer(self, name: str, minimum: int, maximum: int | None = None) -> int:
        value = self.optional_integer(name)
        if value is None:
            raise ArgumentError(f"'{name}' is missing.")
        if value < minimum:
            raise ArgumentOutOfRange(f"'{name}' is {value}; the least is {minimum}.")
        if maximum is not None and value > maximum:
            raise ArgumentOutOfRange(f"'{name}' is {value}; the most is {maximum}.")
        return value

    def count(self, name: str, minimum: int) -> int:
        """A count; a larger one than MAX_COUNT becomes MAX_COUNT."""
        return min(self.integer(name, minimum), bounds.MAX_COUNT)

    def time_ms(self, name: str) -> int:
        return bounds.time_ms(self.integer(name, -(1 << 63)))

    def optional_string(self, name: str) -> str | None:
        value = self._fields.get(name)
        result = text(value)
        if result is None and value is not None:
            raise ArgumentError(f"'{name}' is not a string.")
        return result

    def string(self, name: str) -> str:
        """A string that is not empty."""
        value = self.optional_string(name)
        if not value:
            raise ArgumentError(f"'{name}' is {'missing' if value is None else 'empty'}.")
        return value

    def optional_boolean(self, name: str) -> bool:
        value = self._fields.get(name)
        if not isinstance(value, bool | None):
            raise ArgumentError(f"'{name}' is not a boolean.")
        return bool(value)

    def value(self, name: str) -> Any:
        return self._fields.get(name)

    def optional_map(self, name: str) -> dict[Any, Any] | None:
        value = self._fields.get(name)
        if not isinstance(value, dict | None):
            raise ArgumentError(f"'{name}' is not a map.")
        return value

    def binary(self, name: str) -> bytes:
        value = self._fields.get(name)
        if not isinstance(value, bytes):
            raise ArgumentError(f"'{name}' is missing or not binary.")
        return value

    def collection(self, name: str, kind: str, is_kind: Callable[[Any], bool]) -> tuple[Any, ...]:
        """The items of a list or an array, at least one; `kind` names what they must be."""
        value = self._fields.get(name)
        if not isinstance(value, list | Array):
            raise ArgumentError(f"'{name}' is missing or not an array.")
        items = tuple(value)
        if not items:
            raise ArgumentError(f"'{name}' is empty.")
        if not all(map(is_kind, items)):
            raise ArgumentError(f"'{name}' contains something else than {kind}.")
        return items

    def lock_tokens(self) -> tuple[UUID, ...]:
        return self.collection("lock-tokens", "uuids", lambda item: isinstance(item, UUID))

    def sequence_numbers(self) -> tuple[int, ...]:
        numbers = self.collection("sequence-numbers", "integers", is_integer)
        if min(numbers) < 0:
            raise ArgumentOutOfRange(f"'sequence-numbers' contains {min(numbers)}; the least is 0.")
        if max(numbers) > bounds.MAX_NUMBER:
            raise ArgumentOutOfRange(f"'sequence-numbers' contains {max(numbers)}; the most is {bounds.MAX_NUMBER}.")
        return tuple(map(int, numbers))


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
