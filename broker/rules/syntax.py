"""Parses expressions to trees, and words the errors of wrong ones."""

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput

from broker.rules import tree
from broker.rules.errors import RuleSyntaxError
from broker.rules.message import SYSTEM_NAMES
from broker.rules.tree import Node, Predicate, Property, Statement, Value
from broker.rules.values import MAX_INT

Parser = Lark

MAX_CHARACTERS: Final = 1024
MAX_DEPTH: Final = 50  # operators within operators; the evaluation takes one or two Python frames for each
MAX_STATEMENTS: Final = 32

RESERVED: Final = frozenset(
    ("AND", "OR", "NOT", "LIKE", "ESCAPE", "IN", "IS", "NULL", "TRUE", "FALSE", "EXISTS", "SET", "REMOVE")
)


def parse_filter(expression: str) -> Predicate:
    """Parse a SQL filter. Raises RuleSyntaxError."""
    result = parse(_parser(), expression, "filter")
    assert isinstance(result, Predicate)
    return result


def parse_action(expression: str) -> tuple[Statement, ...]:
    """The statements; a blank expression has none. Raises RuleSyntaxError."""
    if not expression.strip() and len(expression) <= MAX_CHARACTERS:
        return ()
    result = parse(_parser(), expression, "action")
    assert isinstance(result, tuple)
    return result


def parse(parser: Parser, expression: str, start: str, most_characters: int = MAX_CHARACTERS) -> Any:
    """What the parser's builder makes of the expression. Raises RuleSyntaxError."""
    if len(expression) > most_characters:
        details = f"an expression has at most {most_characters} characters, this one has {len(expression)}"
        raise RuleSyntaxError(expression, most_characters, details)
    try:
        return parser.parse(expression, start=start)
    except Mistake as mistake:
        raise RuleSyntaxError(expression, mistake.at, mistake.details) from None
    except UnexpectedInput as error:
        at = error.pos_in_stream
        if at is None or (isinstance(getattr(error, "token", None), Token) and error.token.type == "$END"):
            at = len(expression)
        raise RuleSyntaxError(expression, at, _details(expression, at, error)) from None


def parser_of(grammar: str, start: Sequence[str], builder: "Builder") -> Parser:
    """A parser of the grammar in this file beside ours."""
    return Lark.open(
        grammar, rel_to=__file__, parser="lalr", lexer="contextual", start=list(start), transformer=builder
    )


@cache
def _parser() -> Parser:
    return parser_of("sql.lark", ["filter", "action"], Builder())


# --- trees ------------------------------------------------------------------------------------------------------------


class Mistake(Exception):
    """The expression fits the grammar, but is wrong."""

    def __init__(self, at: int, details: str) -> None:
        super().__init__(details)
        self.at = at
        self.details = details


TOO_LARGE: Final = "the integer does not fit 64 bits"


def begin_of(item: Node | Token) -> int:
    return item.at if isinstance(item, Node) else item.start_pos or 0


def depth_around(*children: Node) -> int:
    """The depth of a node around `children`."""
    deepest = max(children, key=lambda child: child.depth)
    if deepest.depth >= MAX_DEPTH:
        raise Mistake(deepest.at, f"operators are nested in more than {MAX_DEPTH} levels")
    return deepest.depth + 1


def value_of(node: Node) -> Value:
    if not isinstance(node, Value):
        raise Mistake(node.at, "a value is expected here, and this is a condition")
    if isinstance(node, tree.Literal) and type(node.value) is _Magnitude:
        raise Mistake(node.at, TOO_LARGE)
    return node


class Builder(Transformer[Token, Any]):
    """One method for each rule of sql.lark, called while the parser reduces: nothing recurses over a tree."""

    def predicate(self, node: Node) -> Predicate:
        if not isinstance(node, Predicate):
            text = "a condition is expected here, and this is a value; compare it, as in isUrgent = TRUE"
            raise Mistake(node.at, text)
        return node

    def filter(self, children: list[Any]) -> Predicate:
        return self.predicate(children[0])

    def action(self, children: list[Any]) -> tuple[Statement, ...]:
        if len(children) > MAX_STATEMENTS:
            raise Mistake(children[MAX_STATEMENTS].at, f"an action has at most {MAX_STATEMENTS} statements")
        return tuple(children)

    def set(self, children: list[Any]) -> tree.Set:
        keyword, target, _, value = children
        return tree.Set(begin_of(keyword), 1, target, value_of(value))

    def remove(self, children: list[Any]) -> tree.Remove:
        return tree.Remove(begin_of(children[0]), 1, children[1])

    def any_of(self, children: list[Any]) -> tree.Or:
        return tree.Or(children[0].at, depth_around(*children), tuple(map(self.predicate, children)))

    def all_of(self, children: list[Any]) -> tree.And:
        return tree.And(children[0].at, depth_around(*children), tuple(map(self.predicate, children)))

    def inverted(self, children: list[Any]) -> tree.Not:
        return tree.Not(begin_of(children[0]), depth_around(children[1]), self.predicate(children[1]))

    def comparison(self, children: list[Any]) -> tree.Comparison:
        left, symbol, right = children
        return tree.Comparison(left.at, depth_around(left, right), str(symbol), value_of(left), value_of(right))

    def like(self, children: list[Any]) -> tree.Like:
        is_negated, (text, pattern, *escape) = _negation(children)
        return tree.Like(
            text.at,
            depth_around(text, pattern, *escape),
            is_negated,
            value_of(text),
            value_of(pattern),
            value_of(escape[0]) if escape else None,
        )

    def among(self, children: list[Any]) -> tree.In:
        is_negated, (value, *items) = _negation(children)
        return tree.In(value.at, depth_around(value, *items), is_negated, value_of(value), tuple(map(value_of, items)))

    def is_null(self, children: list[Any]) -> tree.IsNull:
        is_negated, (of, _) = _negation(children)
        return tree.IsNull(of.at, 2, is_negated, of)

    def exists(self, children: list[Any]) -> tree.Exists:
        return tree.Exists(begin_of(children[0]), 2, children[1])

    def arithmetic(self, children: list[Any]) -> tree.Arithmetic:
        operands = [value_of(child) for child in children[::2]]
        rest = tuple((str(symbol), operand) for symbol, operand in zip(children[1::2], operands[1:], strict=True))
        return tree.Arithmetic(operands[0].at, depth_around(*operands), operands[0], rest)

    def signed(self, children: list[Any]) -> Value:
        symbol, operand = children
        at = begin_of(symbol)
        if symbol == "-" and isinstance(operand, tree.Literal) and type(operand.value) is _Magnitude:
            return tree.Literal(at, 1, -operand.value)
        return tree.Signed(at, depth_around(operand), str(symbol), value_of(operand))

    def string(self, children: list[Any]) -> tree.Literal:
        return tree.Literal(begin_of(children[0]), 1, children[0][1:-1].replace("''", "'"))

    def number(self, children: list[Any]) -> tree.Literal:
        token = children[0]
        at = begin_of(token)
        if token[:2] in ("0x", "0X"):
            return integer(at, int(token, 16))
        return integer(at, int(token)) if token.isdigit() else double(at, token)

    def true(self, children: list[Any]) -> tree.Literal:
        return tree.Literal(begin_of(children[0]), 1, True)

    def false(self, children: list[Any]) -> tree.Literal:
        return tree.Literal(begin_of(children[0]), 1, False)

    def null(self, children: list[Any]) -> tree.Literal:
        return tree.Literal(begin_of(children[0]), 1, None)

    def parameter(self, children: list[Any]) -> tree.Parameter:
        return tree.Parameter(begin_of(children[0]), 1, str(children[0]))

    def function(self, children: list[Any]) -> Value:
        name, *arguments = children
        at = begin_of(name)
        match name.lower(), arguments:
            case "newid", []:
                return tree.NewId(at, 1)
            case "newid", _:
                raise Mistake(begin_of(arguments[0]), "newid() takes no argument")
            case "property" | "p", [argument]:
                return tree.NamedProperty(at, depth_around(argument), value_of(argument))
            case "property" | "p", _:
                raise Mistake(at, f"{name}() takes the name of a property")
        raise Mistake(at, "there is no such function; there are newid(), property(name) and p(name)")

    def property(self, children: list[Any]) -> Property:
        scope, token = children if len(children) == 2 else (None, children[0])
        at = begin_of(children[0])
        if scope is not None and scope.lower() not in ("sys", "user"):
            raise Mistake(at, "there is no such scope; there are sys and user")
        name = unquoted(token)
        if not name:
            raise Mistake(begin_of(token), "the name of a property is not empty")
        if scope is None or scope.lower() == "user":
            return Property(at, 1, False, name)
        known = SYSTEM_NAMES.get(name.lower())
        if known is None:
            names = ", ".join(sorted(set(SYSTEM_NAMES.values())))
            raise Mistake(begin_of(token), f"there is no such system property; there are {names}")
        return Property(at, 1, True, known)


class _Magnitude(int):
    """9223372036854775808: only with a minus before it a 64-bit integer."""


def integer(at: int, number: int) -> tree.Literal:
    if number > MAX_INT + 1:
        raise Mistake(at, TOO_LARGE)
    return tree.Literal(at, 1, number if number <= MAX_INT else _Magnitude(number))


def double(at: int, digits: str) -> tree.Literal:
    number = float(digits)
    if math.isinf(number):
        raise Mistake(at, "the number is too large for a double")
    return tree.Literal(at, 1, number)


def _negation(children: list[Any]) -> tuple[bool, list[Any]]:
    """True if NOT is the second of `children`; and the other children."""
    if isinstance(children[1], Token) and children[1].type == "NOT":
        return True, [children[0], *children[2:]]
    return False, children


def unquoted(token: Token) -> str:
    if token.type == "BRACKETED":
        return token[1:-1].replace("]]", "]")
    if token.type == "QUOTED":
        return token[1:-1].replace('""', '"')
    return str(token)


# --- words for mistakes -----------------------------------------------------------------------------------------------

_CLOSINGS: Final = {"'": ("string", "'"), '"': ("name", '"'), "[": ("name", "]")}

# Sets of expected terminals, and the words for them. The first set that fits takes its terminals out.
_WORDS: Final[Sequence[tuple[frozenset[str], frozenset[str], str]]] = [
    # all of these expected: all of those are meant
    (
        frozenset({"NOT", "EXISTS", "STRING"}),
        frozenset({"NOT", "EXISTS", "STRING", "NUMBER", "TRUE", "FALSE", "NULL", "PARAMETER", "NAME", "BRACKETED",
                   "QUOTED", "LPAR", "SIGN"}),
        "a condition",
    ),
    (
        frozenset({"STRING", "PARAMETER"}),
        frozenset({"STRING", "NUMBER", "TRUE", "FALSE", "NULL", "PARAMETER", "NAME", "BRACKETED", "QUOTED", "LPAR",
                   "SIGN"}),
        "a value (a property, number, string, TRUE, FALSE, NULL, @parameter or function)",
    ),
    (  # in selectors
        frozenset({"STRING", "NUMBER"}),
        frozenset({"STRING", "NUMBER", "TRUE", "FALSE", "NAME", "QUOTED", "LPAR", "SIGN"}),
        "a value (a property, number, string, TRUE or FALSE)",
    ),
    (frozenset({"STRING"}), frozenset({"STRING"}), "a string"),
    (frozenset({"NAME"}), frozenset({"NAME", "BRACKETED", "QUOTED"}), "the name of a property"),
    (frozenset({"COMPARE"}), frozenset({"COMPARE", "EQUAL", "_LIKE", "_IN", "_IS", "NOT"}),
     "a comparison (=, <>, <, <=, >, >=, LIKE, IN, IS NULL)"),
    (frozenset({"_LIKE", "_IN"}), frozenset({"_LIKE", "_IN"}), "LIKE or IN"),
    (frozenset({"SIGN"}), frozenset({"SIGN", "TIMES"}), "an operator (+, -, *, /, %)"),
    (frozenset({"_AND"}), frozenset({"_AND", "_OR"}), "AND or OR"),
    (frozenset({"SET", "REMOVE"}), frozenset({"SET", "REMOVE"}), "SET or REMOVE"),
]  # fmt: skip
_SYMBOLS: Final = {
    "LPAR": "'('",
    "RPAR": "')'",
    "COMMA": "','",
    "DOT": "'.'",
    "SEMICOLON": "';'",
    "EQUAL": "'='",
    "$END": "the end of the expression",
}


def _details(expression: str, at: int, error: UnexpectedInput) -> str:
    first = expression[at : at + 1]
    if first in _CLOSINGS and first:
        kind, closing = _CLOSINGS[first]
        if not re.match(rf"(?:[^{re.escape(closing)}]|{re.escape(closing * 2)})*{re.escape(closing)}",
                        expression[at + 1 :]):  # fmt: skip
            return f"the {kind} that begins here has no closing {closing}"
    expected: set[str] = error.interactive_parser.accepts()  # type: ignore[no-untyped-call] # lark's
    details = "expected " + _listed(frozenset(expected))
    word = re.match(r"\w+", expression[at:])
    if word and word[0].upper() in RESERVED and "NAME" in expected:
        quoted = f"[{word[0]}]" if "BRACKETED" in expected else f'"{word[0]}"'
        details += f"; {word[0]} is a reserved word, as a name it is written {quoted}"
    return details


def _listed(expected: frozenset[str]) -> str:
    words = []
    for needed, meant, name in _WORDS:
        if needed <= expected:
            words.append(name)
            expected -= meant
    words += sorted(_SYMBOLS.get(terminal, terminal.strip("_")) for terminal in expected)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
