"""Filters: they decide whether a subscription takes a message (management.md 3.1 to 3.6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from broker.rules.errors import InvalidRule, RuleSyntaxError
from broker.rules.guards import Condition, Guard, guards_of, sections
from broker.rules.message import Getter, MessageView, section_of, system_property, user_property
from broker.rules.values import canonical, equality_key, kind_of

if TYPE_CHECKING:
    from broker.rules.compiling import Parameters

_NOT_CONSTANT: Final = object()


class Filter(Protocol):
    def matches(self, message: MessageView) -> bool:
        """True if the filter's result is true. Any exception means that the filter has no result."""


@dataclass(frozen=True, slots=True)
class TrueFilter:
    def matches(self, message: MessageView) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FalseFilter:
    def matches(self, message: MessageView) -> bool:
        return False


class SqlFilter:
    """An expression of management.md 3.3, compiled. Raises RuleSyntaxError, also for a parameter without a value."""

    def __init__(self, expression: str, parameters: "Parameters | None" = None) -> None:
        # A process that never compiles an expression need not load the language and the library of its grammar.
        from broker.rules.compiling import NODE_STEPS, Compiler
        from broker.rules.outcomes import Futile, require_chance
        from broker.rules.syntax import parse_filter

        self.expression = expression
        self.parameters = dict(parameters or {})
        compiler = Compiler(expression, parameters)
        predicate = parse_filter(expression)
        self.evaluate = compiler.predicate(predicate)
        """The result for a message; None is unknown. Any exception means that there is no result; see RuleSet.match."""
        self.steps = NODE_STEPS * compiler.nodes
        """The cost of the whole expression, without the part that depends on the message; see MessageView.spend."""
        self.guards = guards_of(predicate, compiler.constant)
        """Equalities of which a message must have one, or the filter need not be tried; None if it must be."""
        looked_at = {section_of(each.is_system, each.name) for guard in self.guards or () for each in guard.shape}
        self.other_sections = sections(predicate) - looked_at
        """The sections that the filter reads and its guards do not. If one is invalid, the filter must be tried."""
        self.flaw: RuleSyntaxError | None = None
        """Why the filter fails on every message; None if it may have a result for some."""
        try:
            require_chance(predicate, compiler.constant)
        except Futile as futile:
            self.flaw = RuleSyntaxError(expression, futile.at, futile.details)
        self._constant: Any = self._result() if compiler.is_constant else _NOT_CONSTANT

    def _result(self) -> Any:
        try:
            return self.evaluate(MessageView())
        except Exception:
            return _NOT_CONSTANT  # it raises for each message

    @property
    def is_always_true(self) -> bool:
        """True for an expression such as 1=1, which some clients send instead of a true filter."""
        return self._constant is True

    @property
    def is_never_true(self) -> bool:
        return self._constant is False or self._constant is None

    def matches(self, message: MessageView) -> bool:
        return self.evaluate(message) is True


@cache
def load_language() -> None:
    """Load the compiler of expressions. It takes 0.1 s: call this when nobody waits."""
    compile_filter("TRUE = TRUE")


def compile_filter(expression: str, parameters: "Parameters | None" = None) -> SqlFilter:
    """Compile a filter. Raises RuleSyntaxError."""
    return SqlFilter(expression, parameters)


_FIELDS: Final = {
    "correlation_id": "CorrelationId",
    "message_id": "MessageId",
    "to": "To",
    "reply_to": "ReplyTo",
    "label": "Label",
    "session_id": "SessionId",
    "reply_to_session_id": "ReplyToSessionId",
    "content_type": "ContentType",
}


@dataclass(frozen=True, slots=True)
class CorrelationFilter:
    """Takes messages that have all values that are set: strings in the same case, numbers by value, names in any case.

    `properties` have AMQP values (a datetime does too). A field that is None is not set; a property that is None takes
    messages in which it has no value or is null. Raises InvalidRule if nothing is set, or if a value equals nothing
    (NaN, a list).
    """

    correlation_id: str | None = None
    message_id: str | None = None
    to: str | None = None
    reply_to: str | None = None
    label: str | None = None
    session_id: str | None = None
    reply_to_session_id: str | None = None
    content_type: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    guard: Guard = field(init=False, compare=False, repr=False)  # it holds if and only if the filter matches
    _getters: tuple[Getter, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        conditions: dict[Condition, Any] = {}
        for attribute, name in _FIELDS.items():
            text = getattr(self, attribute)
            if text is not None:
                if not isinstance(text, str):
                    raise InvalidRule(f"{name} of a correlation filter is a string, not {kind_of(canonical(text))}")
                conditions[Condition(True, name.lower())] = str(text)
        for name, value in self.properties.items():
            condition, is_null = Condition(False, name.lower()), Condition(False, name.lower(), True)
            if condition in conditions or is_null in conditions:
                raise InvalidRule(f"the correlation filter has the property {name} twice")
            if value is None:
                conditions[is_null] = equality_key(True)
                continue
            conditions[condition] = equality_key(canonical(value))
            if conditions[condition] is None:
                raise InvalidRule(f"the correlation filter has a value for {name} that no value equals: {value!r}")
        if not conditions:
            raise InvalidRule("a correlation filter needs at least one condition")
        object.__setattr__(self, "guard", Guard.of(conditions))
        object.__setattr__(self, "_getters", getters(self.guard.shape))

    def matches(self, message: MessageView) -> bool:
        return key_of(message, self._getters) == self.guard.key


def getters(shape: tuple[Condition, ...]) -> tuple[Getter, ...]:
    """Functions that read the values of a shape's conditions."""
    return tuple(map(_getter, shape))


def _getter(condition: Condition) -> Getter:
    get = system_property(condition.name) if condition.is_system else user_property(condition.name)
    return (lambda message: True if get(message) is None else None) if condition.is_null else get


def key_of(message: MessageView, read: tuple[Getter, ...]) -> tuple[Any, ...] | None:
    """The key of filters that match the message by these properties; None if one of its values equals nothing."""
    key = tuple([equality_key(get(message)) for get in read])
    return None if None in key else key
