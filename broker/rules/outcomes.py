"""What an expression can result in, whatever the message is.

So an expression that fails on every message is found when its rule is made, and not by the messages. An outcome is the
value itself, where it is the same for every message, or else the types of canonical values that it can have.

Only what is certain counts: an expression that has a result for some messages, be it null, can work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final
from uuid import UUID

from broker.rules import tree
from broker.rules.errors import FilterError
from broker.rules.tree import Node, Predicate, Value
from broker.rules.values import KINDS, SIGNED, Instant, compute, computed_kind, kind_of, negate, unary_plus

Constant = Callable[[tree.Literal | tree.Parameter], Any]

_ANY: Final = KINDS | {NoneType, object}  # lists and maps are objects
# The system properties that each published message has.
_GIVEN: Final[dict[str, type]] = {"EnqueuedTimeUtc": Instant, "SequenceNumber": int, "Size": int}


class Futile(Exception):
    """Evaluating this node fails on every message; the text says why."""

    def __init__(self, node: Node, details: str) -> None:
        super().__init__(details)
        self.at = node.at
        self.details = details


@dataclass(frozen=True, slots=True)
class Known:
    """An outcome that is the same for every message."""

    value: Any


Outcome = Known | frozenset[type]


def outcome(node: Value, constant: Constant) -> Outcome:
    """What evaluating the expression can result in. Raises Futile."""
    match node:
        case tree.Literal() | tree.Parameter():
            return Known(constant(node))
        case tree.NewId():
            return frozenset((UUID,))
        case tree.Property(is_system=True, name=name) if name in _GIVEN:
            return frozenset((_GIVEN[name],))
        case tree.NamedProperty():
            name_of = outcome(node.name, constant)
            if not types_of(name_of) & {str, NoneType}:
                raise Futile(node.name, f"property() takes the name of a property, not {words(name_of)}")
        case tree.Signed():
            return _signed(node, outcome(node.operand, constant))
        case tree.Arithmetic():
            result = outcome(node.first, constant)
            for symbol, operand in node.rest:
                result = _computed(node, symbol, result, outcome(operand, constant))
            return result
    return _ANY


def types_of(found: Outcome) -> frozenset[type]:
    return frozenset((type(found.value),)) if isinstance(found, Known) else found


def words(found: Outcome) -> str:
    """The outcome in the text of a mistake: "a string"."""
    if isinstance(found, Known):
        return kind_of(found.value)
    return " or ".join(sorted(kind_of(None, each) for each in found))


def _signed(node: tree.Signed, operand: Outcome) -> Outcome:
    if isinstance(operand, Known):
        try:
            return Known((negate if node.symbol == "-" else unary_plus)(operand.value))
        except FilterError as error:
            raise Futile(node, str(error)) from None
    if not (found := operand & SIGNED):
        raise Futile(node, f"{node.symbol} {words(operand)} is not defined")
    return found


def _computed(node: tree.Arithmetic, symbol: str, left: Outcome, right: Outcome) -> Outcome:
    if isinstance(left, Known) and isinstance(right, Known):
        try:
            return Known(compute(symbol, left.value, right.value))
        except FilterError as error:
            raise Futile(node, str(error)) from None
    pairs = ((one, other) for one in types_of(left) for other in types_of(right))
    found = frozenset(kind for one, other in pairs if (kind := computed_kind(symbol, one, other)) is not None)
    if not found:
        raise Futile(node, f"{words(left)} {symbol} {words(right)} is not defined")
    return found


def require_chance(node: Predicate, constant: Constant) -> None:
    """Raises Futile if evaluating the condition fails on every message.

    What may be left out for some messages counts as if it was: the terms of AND and OR after the first, the list of IN.
    """
    match node:
        case tree.Comparison():
            outcome(node.left, constant)
            outcome(node.right, constant)
        case tree.Like():
            for part in (node.text, node.pattern, node.escape):
                if part is not None:
                    outcome(part, constant)
        case tree.In():
            outcome(node.value, constant)
        case tree.Not():
            require_chance(node.operand, constant)
        case tree.And() | tree.Or():
            require_chance(node.terms[0], constant)
