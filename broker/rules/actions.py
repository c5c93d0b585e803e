"""Actions: changes that a rule makes to its own copy of a message (management.md 3.7)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from broker.rules.errors import ActionError, RuleSyntaxError, failure_of
from broker.rules.message import Draft, MessageView
from broker.rules.values import MAX_STRING, Duration, Instant, canonical, converted, kind_of, to_amqp

if TYPE_CHECKING:
    from broker.rules.compiling import Compiler, Parameters
    from broker.rules.tree import Statement, Value

MAX_ID_CHARACTERS: Final = 128  # amqp.md 11


@dataclass(slots=True)
class Changes:
    """The changes of a message by an action, each part in the order of the statements.

    `user` are application properties to set, with values that `protocol.codec` encodes, under the names that the
    message has for them; `removed` are names of the message's application properties to leave out; `system` are
    system properties to set, by their names in SYSTEM_NAMES: str, Duration or Instant, None to clear.
    """

    user: dict[str, Any] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    system: dict[str, str | Duration | Instant | None] = field(default_factory=dict)


def _text(value: Any, name: str, max_characters: int = MAX_STRING) -> str | None:
    if isinstance(value, UUID) or type(value) is int:
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise ActionError(f"sys.{name} is a string, not {kind_of(value)}")
    if value is not None and len(value) > max_characters:
        raise ActionError(f"sys.{name} has at most {max_characters} characters, not {len(value)}")
    return value


def _id(value: Any, name: str) -> str | None:
    return _text(value, name, MAX_ID_CHARACTERS)


def _duration(value: Any, name: str) -> Duration | None:
    if value is not None and (type(value) is not Duration or value.ticks < 0):
        raise ActionError(f"sys.{name} is a duration of at least 0, not {kind_of(value)}")
    return value


def _instant(value: Any, name: str) -> Instant | None:
    if value is not None and type(value) is not Instant:
        raise ActionError(f"sys.{name} is a date, not {kind_of(value)}")
    return value


_WRITABLE: Final[dict[str, Callable[[Any, str], Any]]] = {
    "ContentType": _text,
    "CorrelationId": _text,
    "Label": _text,
    "MessageId": _id,
    "PartitionKey": _id,
    "ReplyTo": _text,
    "ReplyToSessionId": _id,
    "ScheduledEnqueueTimeUtc": _instant,
    "SessionId": _id,
    "TimeToLive": _duration,
    "To": _text,
}

_Step = Callable[[Draft, Changes], None]


class Action:
    """Statements of management.md 3.7, compiled. Raises RuleSyntaxError, also for a read-only system property."""

    def __init__(self, expression: str, parameters: "Parameters | None" = None) -> None:
        # As in filters: a process that never compiles an expression need not load the language.
        from broker.rules.compiling import NODE_STEPS, Compiler
        from broker.rules.syntax import parse_action

        self.expression = expression
        self.parameters = dict(parameters or {})
        compiler = Compiler(expression, parameters)
        self._statements = [_step(statement, compiler, expression) for statement in parse_action(expression)]
        self._cost = NODE_STEPS * compiler.nodes

    @property
    def is_empty(self) -> bool:
        """True if the expression is blank; such an action counts as none."""
        return not self._statements

    def apply(self, message: MessageView) -> Changes:
        """The changes of the copy; a statement sees the changes of those before it. Raises ActionError."""
        changes = Changes()
        try:
            message.spend(self._cost)
            draft = Draft(message)
            for change in self._statements:
                change(draft, changes)
        except Exception as error:
            raise failure_of(ActionError, error) from None
        return changes


def compile_action(expression: str, parameters: "Parameters | None" = None) -> Action:
    """Raises RuleSyntaxError."""
    return Action(expression, parameters)


def _step(statement: "Statement", compiler: "Compiler", expression: str) -> _Step:
    from broker.rules import tree

    target = statement.property
    if target.is_system:
        if target.name not in _WRITABLE:
            details = f"sys.{target.name} is read-only; an action may change {', '.join(f'sys.{n}' for n in _WRITABLE)}"
            raise RuleSyntaxError(expression, target.at, details)
        return _set_system(target.name, None if isinstance(statement, tree.Remove) else compiler.value(statement.value))
    if isinstance(statement, tree.Remove):
        return _remove_user(target.name)
    return _set_user(target.name, _encoded(statement.value, compiler))


def _encoded(node: "Value", compiler: "Compiler") -> Callable[[Draft], Any]:
    """The AMQP value of an expression; if the expression is just a property, its type is kept."""
    from broker.rules import tree

    match node:
        case tree.Property(is_system=False, name=name):
            return lambda draft: draft.encoded_value(name)
        case tree.NamedProperty():
            name_of = compiler.property_name(node)

            def read(draft: Draft) -> Any:
                name = name_of(draft)
                return None if name is None else draft.encoded_value(name)

            return read
    value_of = compiler.value(node)
    return lambda draft: to_amqp(value_of(draft))


def _set_user(name: str, encoded: Callable[[Draft], Any]) -> _Step:
    def set_it(draft: Draft, changes: Changes) -> None:
        value = encoded(draft)
        spelled = next(iter(draft.spelled(name)), name)
        value = converted(value, draft.encoded.get(spelled))
        draft.set_user(spelled, value)
        changes.user[spelled] = value
        if spelled in changes.removed:
            changes.removed.remove(spelled)

    return set_it


def _remove_user(name: str) -> _Step:
    def remove(draft: Draft, changes: Changes) -> None:
        names = draft.spelled(name)
        draft.remove_user(names)
        for each in names:
            changes.user.pop(each, None)
            if each in draft.original:
                changes.removed.append(each)

    return remove


def _set_system(name: str, value_of: Callable[[MessageView], Any] | None) -> _Step:
    """Set a system property; if `value_of` is None, clear it."""
    check = _WRITABLE[name]

    def set_it(draft: Draft, changes: Changes) -> None:
        value = None if value_of is None else check(canonical(value_of(draft)), name)
        draft.set_system(name, value)
        changes.system[name] = value

    return set_it
