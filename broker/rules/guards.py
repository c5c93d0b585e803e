"""Guards of a condition: equalities of which one must hold for the condition to be true.

`color = 'red' AND size > 3 OR sys.Label IN ('a', 'b')` is not true unless color is 'red' or the label is 'a' or 'b'. So
a topic looks up the values of a message, and tries only the filters whose guards it finds.

A filter that is not tried cannot fail. So a condition that may fail on some message has no guards. There are two
exceptions: steps of LIKE that are not spent (`MessageView.spend`) cannot be exceeded, and sections of the message that
cannot be decoded are the caller's business: see `sections`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from broker.rules import tree
from broker.rules.message import section_of
from broker.rules.tree import Node, Predicate, Value
from broker.rules.values import equality_key


class Condition(NamedTuple):
    """A condition on a property of the system or the user, by its name in lower case: which value it has; or, with
    `is_null`, that it has none, which is the value True of the condition.
    """

    is_system: bool
    name: str
    is_null: bool = False


Equalities = Mapping[Condition, Any]  # the values by `equality_key`; all must hold
Constant = Callable[[tree.Literal | tree.Parameter], Any]

MAX_GUARDS: Final = 32  # of one filter, because each is an entry in the index of the topic


class Guard(NamedTuple):
    """The properties in `shape` have the values in `key` (by `equality_key`)."""

    shape: tuple[Condition, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, equalities: Equalities) -> "Guard":
        shape = tuple(sorted(equalities))
        return cls(shape, tuple(equalities[condition] for condition in shape))


def guards_of(predicate: Predicate, constant: Constant) -> list[Guard] | None:
    """A message for which no guard holds cannot make the predicate true, nor make it fail. None if there are no guards.

    An empty list means that no message makes it true. `constant` returns the value of a literal or a parameter.
    """
    if any(map(_may_fail, _nodes(predicate))):
        return None
    alternatives = _alternatives(predicate, constant)
    if alternatives is None or len(alternatives) > MAX_GUARDS:
        return None
    return list(dict.fromkeys(map(Guard.of, alternatives)))


def sections(predicate: Predicate) -> frozenset[str]:
    """The sections that the predicate reads, as attributes of a `MessageView`."""
    return frozenset(
        section_of(node.is_system, node.name.lower()) for node in _nodes(predicate) if isinstance(node, tree.Property)
    )


def _may_fail(node: Node) -> bool:
    match node:
        case tree.Arithmetic() | tree.NamedProperty():
            return True
        case tree.Signed():
            return _negative_number(node) is None
        case tree.Like():
            return not all(
                isinstance(part, tree.Literal | tree.Parameter | None) for part in (node.pattern, node.escape)
            )
    return False


def _negative_number(node: Value) -> int | float | None:
    """The value of a number with a minus before it."""
    match node:
        case tree.Signed(symbol="-", operand=tree.Literal(value=int() | float() as number)) if number >= 0:
            return None if isinstance(number, bool) else -number
    return None


def _constants(nodes: Iterable[Value], constant: Constant) -> list[Any] | None:
    """The values of the nodes; None if not all of them are constants."""
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, tree.Literal | tree.Parameter):
            found.append(constant(node))
        elif (number := _negative_number(node)) is not None:
            found.append(number)
        else:
            return None
    return found


def _nodes(node: Node) -> Iterable[Node]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _children(node: Node) -> Iterable[Node]:
    match node:
        case tree.And() | tree.Or():
            return node.terms
        case tree.Not() | tree.Signed():
            return (node.operand,)
        case tree.Comparison():
            return node.left, node.right
        case tree.Like():
            return (node.text, node.pattern, *((node.escape,) if node.escape else ()))
        case tree.In():
            return node.value, *node.items
        case tree.IsNull() | tree.Exists():
            return (node.property,)
        case tree.Arithmetic():
            return node.first, *(operand for _, operand in node.rest)
        case tree.NamedProperty():
            return (node.name,)
    return ()


def _alternatives(node: Predicate, constant: Constant) -> list[Equalities] | None:
    """Equalities of which one must hold if the node is true; None if it can be true without any."""
    match node:
        case tree.Comparison(symbol="="):
            for property_, value in ((node.left, node.right), (node.right, node.left)):
                if isinstance(property_, tree.Property):
                    return _equal(property_, _constants([value], constant))
        case tree.In(is_negated=False, value=tree.Property() as property_):
            return _equal(property_, _constants(node.items, constant))
        case tree.Or():
            found: list[Equalities] = []
            for term in node.terms:
                alternatives = _alternatives(term, constant)
                if alternatives is None:
                    return None
                found += alternatives
            return found
        case tree.And():
            of_terms = [_alternatives(term, constant) for term in node.terms]
            return _all_of([each for each in of_terms if each is not None])
    return None


def _equal(property_: tree.Property, values: list[Any] | None) -> list[Equalities] | None:
    """The property equals one of the values; null and other values that equal nothing do not count."""
    if values is None:
        return None
    condition = Condition(property_.is_system, property_.name.lower())
    return [{condition: key} for key in map(equality_key, values) if key is not None]


def _all_of(terms: list[list[Equalities]]) -> list[Equalities] | None:
    """What must hold if several terms are true: those with a single alternative together, or else the fewest."""
    if not terms:
        return None
    fewest = min(terms, key=len)
    if len(fewest) != 1:
        return fewest
    together: dict[Condition, Any] = {}
    for alternatives in terms:
        if len(alternatives) == 1:
            for condition, key in alternatives[0].items():
                if together.setdefault(condition, key) != key:
                    return []  # two different values of one property
    return [together]
