"""Actions: changes that a rule makes to its own copy of a message (management.md 3.7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from broker.rules.errors import MAX_QUOTED_CHARACTERS, ActionError, RuleSyntaxError, failure_of
from broker.rules.message import Draft, MessageView
from broker.rules.texts import text_of
from broker.rules.values import (
    MAX_STRING,
    Duration,
    Instant,
    canonical,
    converted,
    kind_of,
    read_as_duration,
    read_as_instant,
    to_amqp,
)

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
    if type(value) in _AS_TEXT:
        value = text_of(value)
    if value is not None and not isinstance(value, str):
        raise ActionError(f"sys.{name} is a string, not {kind_of(value)}")
    if value is not None and len(value) > max_characters:
        raise ActionError(f"sys.{name} has at most {max_characters} characters, not {len(value)}")
    return value


def _id(value: Any, name: str) -> str | None:
    return _text(value, name, MAX_ID_CHARACTERS)


def _duration(value: Any, name: str) -> Duration | None:
    read = read_as_duration(value) if isinstance(value, str) else value
    if value is not None and (type(read) is not Duration or read.ticks < 0):
        raise ActionError(
            f"sys.{name} is a duration of at least 0, such as '00:10:00' or 'PT10M', not {_quoted(value)}"
        )
    return read


def _instant(value: Any, name: str) -> Instant | None:
    read = read_as_instant(value) if isinstance(value, str) else value
    if value is not None and type(read) is not Instant:
        raise ActionError(f"sys.{name} is a date, such as '2030-01-01T00:00:00Z', not {_quoted(value)}")
    return read


def _quoted(value: Any) -> str:
    """The words for a value of a wrong type, or the wrong text itself."""
    return f"'{value[:MAX_QUOTED_CHARACTERS]}'" if isinstance(value, str) else kind_of(value)


_AS_TEXT: Final = frozenset((int, float, Decimal, UUID))  # what becomes text where a string is wanted


class _Writable(NamedTuple):
    """A system property that actions may set: `read` makes its value of one of these types, or raises ActionError."""

    read: Callable[[Any, str], Any]
    types: frozenset[type]


_TEXT: Final = _Writable(_text, _AS_TEXT | {str, NoneType})
_ID: Final = _TEXT._replace(read=_id)

_WRITABLE: Final[dict[str, _Writable]] = {
    "ContentType": _TEXT,
    "CorrelationId": _TEXT,
    "Label": _TEXT,
    "MessageId": _ID,
    "PartitionKey": _ID,
    "ReplyTo": _TEXT,
    "ReplyToSessionId": _ID,
    "ScheduledEnqueueTimeUtc": _Writable(_instant, frozenset((Instant, str, NoneType))),
    "SessionId": _ID,
    "TimeToLive": _Writable(_duration, frozenset((Duration, str, NoneType))),
    "To": _TEXT,
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
        statements = parse_action(expression)
        self._statements = [_step(statement, compiler, expression) for statement in statements]
        self._cost = NODE_STEPS * compiler.nodes
        self.flaw = _flaw(statements, compiler, expression)
        """Why the action fails on every message; None if it may succeed on some."""

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
    """Compile an action. Raises RuleSyntaxError."""
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


def _flaw(statements: Sequence["Statement"], compiler: "Compiler", expression: str) -> RuleSyntaxError | None:
    from broker.rules.outcomes import Futile

    try:
        for statement in statements:
            _require_chance(statement, compiler)
    except Futile as futile:
        return RuleSyntaxError(expression, futile.at, futile.details)
    return None


def _require_chance(statement: "Statement", compiler: "Compiler") -> None:
    """Raise Futile if the statement fails on every message."""
    from broker.rules import tree
    from broker.rules.outcomes import Futile, Known, outcome, types_of, words

    if isinstance(statement, tree.Remove):
        return
    found, target = outcome(statement.value, compiler.constant), statement.property
    if not target.is_system:
        return
    writable = _WRITABLE[target.name]
    try:
        if isinstance(found, Known):
            writable.read(found.value, target.name)
        elif not types_of(found) & writable.types:
            wanted = " or ".join(sorted(kind_of(None, each) for each in writable.types - {NoneType}))
            raise ActionError(f"sys.{target.name} is set to {wanted}, not to {words(found)}")
    except ActionError as error:
        raise Futile(statement.value, str(error)) from None


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
    read = _WRITABLE[name].read

    def set_it(draft: Draft, changes: Changes) -> None:
        value = None if value_of is None else read(canonical(value_of(draft)), name)
        draft.set_system(name, value)
        changes.system[name] = value

    return set_it
