"""Typed exceptions for wrong rules, and for rules that fail on a message."""

import re
from typing import Final

_TOKEN = re.compile(r"\w+|'(?:[^']|'')*'?|[<>!]=|<>|.", re.DOTALL)
MAX_QUOTED_CHARACTERS: Final = 40  # of a wrong expression, in a message


class InvalidRule(ValueError):
    """A rule that cannot be. The text is shown to the user who would create it."""


class RuleSyntaxError(InvalidRule):
    """An expression that is none. `line` and `column` count from 1; `found` is "" at the end of the expression.

    `details` says in words what is wrong or was expected. The text has the form of the service's own.
    """

    def __init__(self, expression: str, at: int, details: str) -> None:
        self.line = expression.count("\n", 0, at) + 1
        self.column = at - expression.rfind("\n", 0, at)
        token = _TOKEN.match(expression, at)
        self.found = token[0][:MAX_QUOTED_CHARACTERS] if token else ""
        self.details = details
        super().__init__(
            f"There was an error parsing the SQL expression. [Token line={self.line}, column={self.column}, "
            f"Token in error={self.found or 'end of expression'}, Additional details={details}]"
        )


class FilterError(Exception):
    """A filter has no result for this message; that is not the result unknown. `reason` is that of its dead letter."""

    reason = "FilterException"


class ActionError(FilterError):
    """An action cannot be done on this message."""

    reason = "RuleActionException"


def failure_of(kind: type[FilterError], error: Exception) -> FilterError:
    """What a rule raised, as a failure of `kind`.

    Rules are pure, so nothing but this message and this rule has to do with it, whatever it is: a limit of a type, of
    Python, or a mistake of ours. The text always has an encoding.
    """
    if isinstance(error, kind):
        return error
    text = str(error) if isinstance(error, FilterError) else f"{type(error).__name__}: {error}"
    return kind(text.encode(errors="backslashreplace").decode())
