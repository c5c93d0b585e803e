"""The tree of an expression. `at` is where in the text a node begins, `depth` counts the nodes nested in one another.

A predicate has the result true, false or unknown, an expression a value; the language keeps them apart.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    at: int
    depth: int


class Value(Node):
    __slots__ = ()


class Predicate(Node):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Literal(Value):
    value: Any


@dataclass(frozen=True, slots=True)
class Parameter(Value):
    name: str  # with its @


@dataclass(frozen=True, slots=True)
class Property(Value):
    """`name` as written; for the system, as the service spells it."""

    is_system: bool
    name: str


@dataclass(frozen=True, slots=True)
class NamedProperty(Value):
    """property(name): a user property whose name is computed."""

    name: Value


@dataclass(frozen=True, slots=True)
class NewId(Value): ...


@dataclass(frozen=True, slots=True)
class Signed(Value):
    symbol: str
    operand: Value


@dataclass(frozen=True, slots=True)
class Arithmetic(Value):
    """`first`, then operators of one precedence with their right operands, from left to right."""

    first: Value
    rest: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Comparison(Predicate):
    symbol: str
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Like(Predicate):
    is_negated: bool
    text: Value
    pattern: Value
    escape: Value | None


@dataclass(frozen=True, slots=True)
class In(Predicate):
    is_negated: bool
    value: Value
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class IsNull(Predicate):
    is_negated: bool
    property: Property


@dataclass(frozen=True, slots=True)
class Truth(Predicate):
    """A value that is a condition by itself: true if it is TRUE. Only in selectors."""

    value: Value


@dataclass(frozen=True, slots=True)
class Exists(Predicate):
    property: Property


@dataclass(frozen=True, slots=True)
class Not(Predicate):
    operand: Predicate


@dataclass(frozen=True, slots=True)
class And(Predicate):
    terms: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Or(Predicate):
    terms: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Set(Node):
    property: Property
    value: Value


@dataclass(frozen=True, slots=True)
class Remove(Node):
    property: Property


Statement = Set | Remove
