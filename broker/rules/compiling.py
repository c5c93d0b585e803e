"""Compiles trees to closures. That of a predicate maps a message to True, False or None (unknown), that of a value maps
it to a canonical value.

Terms of AND and OR are evaluated from left to right until the result is certain. So the remaining terms raise nothing.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import uuid4

from broker.rules import tree
from broker.rules.errors import FilterError, RuleSyntaxError
from broker.rules.like import FIND_STEPS, like
from broker.rules.message import Getter, MessageView, system_property, user_property
from broker.rules.tree import Predicate, Property, Value
from broker.rules.values import (
    COMPARISONS,
    ORDERED,
    canonical,
    compare,
    compute,
    equality_key,
    kind_of,
    negate,
    unary_plus,
)

Test = Callable[[MessageView], bool | None]
Parameters = Mapping[str, Any]

NODE_STEPS: Final = 32  # the cost of a property, constant or operator of an expression; see MessageView.spend

_SIGNS: Final = {"-": negate, "+": unary_plus}


class Compiler:
    """Compiles one expression. Its text gives the positions of errors; parameters may have their @ or not."""

    def __init__(self, expression: str, parameters: Parameters | None) -> None:
        self._expression = expression
        self._parameters = {
            name.lower() if name.startswith("@") else f"@{name.lower()}": canonical(value)
            for name, value in (parameters or {}).items()
        }
        self.nodes = 0  # the number of nodes compiled so far
        # True if the result is the same for every message, and each time.
        self.is_constant = True

    # --- values ---

    def value(self, node: Value) -> Getter:
        self.nodes += 1
        match node:
            case tree.Literal() | tree.Parameter():
                constant = self.constant(node)
                return lambda message: constant
            case Property():
                return self._property(node)
            case tree.NamedProperty():
                return self._named_property(node)
            case tree.NewId():
                self.is_constant = False
                return lambda message: uuid4()
            case tree.Signed():
                apply, operand = _SIGNS[node.symbol], self.value(node.operand)
                return lambda message: apply(operand(message))
            case tree.Arithmetic():
                return self._arithmetic(node)
        raise AssertionError(node)

    def constant(self, node: tree.Literal | tree.Parameter) -> Any:
        """Its value. Raises RuleSyntaxError for a parameter that has none."""
        if isinstance(node, tree.Literal):
            return node.value
        try:
            return self._parameters[node.name.lower()]
        except KeyError:
            known = ", ".join(sorted(self._parameters)) or "none"
            raise self._mistake(node, f"the parameter has no value; the rule's parameters: {known}") from None

    def _property(self, node: Property) -> Getter:
        self.is_constant = False
        return system_property(node.name) if node.is_system else user_property(node.name)

    def _named_property(self, node: tree.NamedProperty) -> Getter:
        self.is_constant = False
        name_of = self.property_name(node)

        def read(message: MessageView) -> Any:
            name = name_of(message)
            if name is None:
                return None
            message.spend(len(name))
            return message.user.get(name.lower())

        return read

    def property_name(self, node: tree.NamedProperty) -> Callable[[MessageView], str | None]:
        """A function that returns the name in property(name); it raises FilterError if the name is not a string."""
        name_of = self.value(node.name)

        def named(message: MessageView) -> str | None:
            name = name_of(message)
            if name is not None and type(name) is not str:
                raise FilterError(f"property() takes the name of a property, not {kind_of(name)}")
            return name

        return named

    def _arithmetic(self, node: tree.Arithmetic) -> Getter:
        first = self.value(node.first)
        rest = [(symbol, self.value(operand)) for symbol, operand in node.rest]

        def evaluate(message: MessageView) -> Any:
            result = first(message)
            for symbol, operand in rest:
                result = compute(symbol, result, operand(message))
                if type(result) is str:
                    message.spend(len(result))
            return result

        return evaluate

    # --- predicates ---

    def predicate(self, node: Predicate) -> Test:
        self.nodes += 1
        match node:
            case tree.Comparison():
                return self._comparison(node)
            case tree.Like():
                return self._like(node)
            case tree.In():
                return self._in(node)
            case tree.IsNull():
                value, is_negated = self._property(node.property), node.is_negated
                return lambda message: (value(message) is None) is not is_negated
            case tree.Exists():
                return self._exists(node.property)
            case tree.Not():
                return _not(self.predicate(node.operand))
            case tree.And():
                return _and([self.predicate(term) for term in node.terms])
            case tree.Or():
                return _or([self.predicate(term) for term in node.terms])
        raise AssertionError(node)

    def _comparison(self, node: tree.Comparison) -> Test:
        comparison = COMPARISONS[node.symbol]
        left = self.value(node.left)
        if not isinstance(node.right, tree.Literal | tree.Parameter):
            right = self.value(node.right)
            return lambda message: compare(comparison, left(message), right(message))
        constant = self.constant(node.right)
        kind = type(constant)
        if kind not in ORDERED:
            return lambda message: compare(comparison, left(message), constant)

        def test(message: MessageView) -> bool | None:
            value = left(message)
            if type(value) is kind:
                result: bool = comparison(value, constant)
                return result
            return None if value is None else compare(comparison, value, constant)

        return test

    def _like(self, node: tree.Like) -> Test:
        text_of, is_negated = self.value(node.text), node.is_negated
        if self._is_literal(node.pattern) and (node.escape is None or self._is_literal(node.escape)):
            return self._like_constant(node, text_of)
        pattern_of = self.value(node.pattern)
        escape_of = None if node.escape is None else self.value(node.escape)

        def test(message: MessageView) -> bool | None:
            text, pattern = text_of(message), pattern_of(message)
            escape = None if escape_of is None else escape_of(message)
            if type(text) is not str or type(pattern) is not str:
                return None
            if escape_of is not None and type(escape) is not str:
                return None
            message.spend(FIND_STEPS * len(pattern))
            return like(pattern, escape).matches(text, message) is not is_negated

        return test

    def _like_constant(self, node: tree.Like, text_of: Getter) -> Test:
        is_negated = node.is_negated
        pattern = self._constant_string(node.pattern, "the pattern of LIKE")
        escape = None if node.escape is None else self._constant_string(node.escape, "ESCAPE")
        if pattern is None or (node.escape is not None and escape is None):
            return lambda message: None
        try:
            matches = like(pattern, escape).matches
        except FilterError as error:
            raise self._mistake(node.escape or node.pattern, str(error)) from None

        def test(message: MessageView) -> bool | None:
            text = text_of(message)
            return None if type(text) is not str else matches(text, message) is not is_negated

        return test

    @staticmethod
    def _is_literal(node: Value) -> bool:
        return isinstance(node, tree.Literal | tree.Parameter)

    def _constant_string(self, node: Value, what: str) -> str | None:
        assert isinstance(node, tree.Literal | tree.Parameter)
        constant = self.constant(node)
        if constant is not None and not isinstance(constant, str):
            raise self._mistake(node, f"{what} is a string, not {kind_of(constant)}")
        return constant

    def _in(self, node: tree.In) -> Test:
        value_of, is_negated = self.value(node.value), node.is_negated
        if all(map(self._is_literal, node.items)):
            constants = [self.constant(item) for item in node.items if isinstance(item, tree.Literal | tree.Parameter)]
            keys = {equality_key(constant) for constant in constants if constant is not None}
            if None not in keys:
                return _among(value_of, keys, None in constants, is_negated)
        items = [self.value(item) for item in node.items]

        def test(message: MessageView) -> bool | None:
            value = value_of(message)
            if value is None:
                return None
            result: bool | None = False
            for item in items:
                equal = compare(operator.eq, value, item(message))
                if equal:
                    return not is_negated
                if equal is None:
                    result = None
            return result if result is None else result is not is_negated

        return test

    def _exists(self, node: Property) -> Test:
        if node.is_system:
            value = self._property(node)
            return lambda message: value(message) is not None
        self.is_constant = False
        lower = node.name.lower()
        return lambda message: lower in message.user

    def _mistake(self, node: tree.Node, details: str) -> RuleSyntaxError:
        return RuleSyntaxError(self._expression, node.at, details)


def _among(value_of: Getter, keys: set[Any], has_null: bool, is_negated: bool) -> Test:
    """IN with constants. As in SQL, null among them makes the result unknown unless another one equals the value."""
    found, not_found = not is_negated, None if has_null else is_negated

    def test(message: MessageView) -> bool | None:
        value = value_of(message)
        return None if value is None else found if equality_key(value) in keys else not_found

    return test


def _not(operand: Test) -> Test:
    def test(message: MessageView) -> bool | None:
        result = operand(message)
        return None if result is None else not result

    return test


def _and(terms: list[Test]) -> Test:
    def test(message: MessageView) -> bool | None:
        result: bool | None = True
        for term in terms:
            value = term(message)
            if not value:
                if value is False:
                    return False
                result = None
        return result

    return test


def _or(terms: list[Test]) -> Test:
    def test(message: MessageView) -> bool | None:
        result: bool | None = False
        for term in terms:
            value = term(message)
            if value:
                return True
            if value is None:
                result = None
        return result

    return test
