"""Typed exceptions for invalid rules, and for rules that fail on a message."""

import re
from typing import Final

_TOKEN = re.compile(r"\w+|'(?:[^']|'')*'?|[<>!]=|<>|.", re.DOTALL)
MAX_QUOTED_CHARACTERS: Final = 40  # of a wrong expression, in a message


class InvalidRule(ValueError):
    """The rule is invalid. The text is shown to the user who tries to create it."""


class RuleSyntaxError(InvalidRule):
    """The expression is invalid. `line` and `column` count from 1; `found` is "" at the end of the expression.

    `details` says in words what is wrong or was expected. The text has the form of Service Bus's text.
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


class SelectorNotSupported(InvalidRule):
    """The text is a selector, but cannot be evaluated here."""


class FilterError(Exception):
    """A filter has no result for this message (which is not the result unknown). `reason` is used to dead-letter it."""

    reason = "FilterException"


class ActionError(FilterError):
    """An action cannot be done on this message."""

    reason = "RuleActionException"


def failure_of(kind: type[FilterError], error: Exception) -> FilterError:
    """The exception of a rule as a failure of `kind`.

    Rules are pure, so whatever the exception is (a limit of a type, of Python, or a bug of ours), it concerns only this
    message and this rule. The text can always be encoded.
    """
    if isinstance(error, kind):
        return error
    text = str(error) if isinstance(error, FilterError) else f"{type(error).__name__}: {error}"
    return kind(text.encode(errors="backslashreplace").decode())
