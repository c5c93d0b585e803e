"""A slow interpreter of the rule language, to hold the compiled one to: no classes, no sharing, one rule after another.

An expression is a tuple of its kind and its parts; `text` writes it, `evaluate` computes it. Numbers are compared as
fractions and patterns matched by a table of all their ends. Values of messages are plain Python ones here: None, bool,
int, float, str.
"""

from fractions import Fraction
from math import copysign, fmod, inf, isinf, isnan, nan

PRECEDENCE = {"or": 1, "and": 2, "not": 3, "compare": 4, "like": 4, "in": 4, "isnull": 4, "exists": 8}


class NoResult(Exception):
    """The language defines no result: an evaluation error."""


# --- writing ----------------------------------------------------------------------------------------------------------


def text(expression, least=0, space=" "):
    """With the fewest parentheses, so that precedence decides."""
    kind, *parts = expression
    level = PRECEDENCE.get(kind) or (5 if kind == "+-" else 6 if kind == "*/%" else 7 if kind == "sign" else 8)
    written = _text(kind, parts, level, space)
    return f"({written})" if level < least else written


def _text(kind, parts, level, space):
    if kind == "literal":
        value = parts[0]
        if value is None or isinstance(value, bool):
            return str(value).upper() if value is not None else "NULL"
        return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)
    if kind == "property":
        return parts[0]
    if kind == "sign":
        return parts[0] + text(parts[1], level, space)
    if kind in ("+-", "*/%"):
        symbol, left, right = parts
        return text(left, level, space) + space + symbol + space + text(right, level + 1, space)
    if kind in ("and", "or"):
        return f"{text(parts[0], level, space)} {kind} {text(parts[1], level + 1, space)}"
    if kind == "not":
        return "Not " + text(parts[0], level, space)
    if kind == "compare":
        symbol, left, right = parts
        return text(left, 5, space) + space + symbol + space + text(right, 5, space)
    negation = "NOT " if parts[0] else ""
    if kind == "like":
        _, left, pattern, escape = parts
        end = "" if escape is None else f" ESCAPE {text(escape, 5, space)}"
        return f"{text(left, 5, space)} {negation}LIKE {text(pattern, 5, space)}{end}"
    if kind == "in":
        _, value, items = parts
        return f"{text(value, 5, space)} {negation}IN ({f',{space}'.join(text(item, 5, space) for item in items)})"
    if kind == "isnull":
        return f"{text(parts[1])} IS {negation}NULL"
    assert kind == "exists"
    return f"EXISTS({text(parts[0])})"


# --- computing --------------------------------------------------------------------------------------------------------


def evaluate(expression, message):
    """`message` has values by the names that properties are written with, in lower case."""
    kind, *parts = expression
    if kind == "literal":
        return parts[0]
    if kind == "property":
        return message.get(parts[0].lower())
    if kind == "exists":
        return parts[0][1].lower() in message
    if kind == "isnull":
        return (evaluate(parts[1], message) is None) != parts[0]
    if kind == "sign":
        return sign(parts[0], evaluate(parts[1], message))
    if kind in ("+-", "*/%"):
        symbol, left, right = parts
        return arithmetic(symbol, evaluate(left, message), evaluate(right, message))
    if kind == "compare":
        symbol, left, right = parts
        return compare(symbol, evaluate(left, message), evaluate(right, message))
    if kind == "not":
        return invert(evaluate(parts[0], message))
    if kind in ("and", "or"):
        decides = kind == "or"
        left = evaluate(parts[0], message)
        if left is decides:
            return left
        right = evaluate(parts[1], message)
        if right is decides or left is not None:
            return right
        return None
    if kind == "in":
        negated, value, items = parts
        result = one_of(evaluate(value, message), items, message)
        return invert(result) if negated else result
    assert kind == "like"
    negated, left, pattern, escape = parts
    operands = [evaluate(each, message) for each in (left, pattern, escape) if each is not None]
    if not all(isinstance(each, str) for each in operands):
        return None
    result = like(*operands)
    return invert(result) if negated else result


def invert(value):
    return None if value is None else not value


def one_of(value, items, message):
    if value is None:
        return None
    unknown = False
    for item in items:
        equal = compare("=", value, evaluate(item, message))
        if equal:
            return True
        unknown = unknown or equal is None
    return None if unknown else False


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(symbol, left, right):
    if left is None or right is None:
        return None
    if is_number(left) and is_number(right):
        order = order_of_numbers(left, right)
        if order is None:  # a NaN: nothing but unequal
            return symbol in ("<>", "!=")
    elif type(left) is type(right) is str:
        order = (left > right) - (left < right)
    elif type(left) is type(right) is bool and symbol in ("=", "<>", "!="):
        order = int(left != right)
    else:
        return {"=": False, "<>": True, "!=": True}.get(symbol)
    return (
        order in {"=": (0,), "<>": (-1, 1), "!=": (-1, 1), "<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}[symbol]
    )


def order_of_numbers(left, right):
    if isnan(left) or isnan(right):
        return None
    sizes = [(copysign(1, each) if isinf(each) else 0, 0 if isinf(each) else Fraction(each)) for each in (left, right)]
    return (sizes[0] > sizes[1]) - (sizes[0] < sizes[1])


def sign(symbol, value):
    if value is None:
        return None
    if not is_number(value):
        raise NoResult
    return within(-value if symbol == "-" else value)


def within(value):
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise NoResult
    return value


def arithmetic(symbol, left, right):
    if left is None or right is None:
        return None
    if isinstance(left, str) and symbol == "+":
        return left + (right if isinstance(right, str) else text_of(right))
    if not is_number(left) or not is_number(right):
        raise NoResult
    if isinstance(left, int) and isinstance(right, int):
        if symbol in "/%":
            if right == 0:
                raise NoResult
            quotient = int(Fraction(left, right))  # towards zero
            return within(quotient if symbol == "/" else left - quotient * right)
        return within({"+": left + right, "-": left - right, "*": left * right}[symbol])
    left, right = float(left), float(right)
    if symbol == "+":
        return left + right
    if symbol == "-":
        return left - right
    if symbol == "*":
        return left * right
    if symbol == "%":
        return nan if right == 0 or isinf(left) or isnan(left) or isnan(right) else fmod(left, right)
    if right == 0:
        return nan if left == 0 or isnan(left) else copysign(inf, left) * copysign(1, right)
    return left / right


def text_of(value):
    """As .NET writes it."""
    if isinstance(value, bool | int):
        return str(value)
    if isnan(value) or isinf(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    for precision in range(1, 18):  # the fewest digits that give the number
        digits, _, exponent = format(value, f".{precision - 1}e").partition("e")
        if float(f"{digits}e{exponent}") == value:
            break
    sign, digits, power = "-" if digits.startswith("-") else "", digits.lstrip("-").replace(".", ""), int(exponent)
    if value == 0:
        return sign + "0"
    if power >= 15 or power <= -5:
        mantissa = digits[0] + ("." + digits[1:] if digits[1:] else "")
        return f"{sign}{mantissa}E{power:+03}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    whole = digits[: power + 1].ljust(power + 1, "0")
    return sign + whole + ("." + digits[power + 1 :] if digits[power + 1 :] else "")


def like(value, pattern, escape=None):
    """By the set of places in `value` at which what was read of the pattern can end."""
    if escape is not None and len(escape) != 1:
        raise NoResult
    ends = {0}
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == escape:
            if at == len(pattern):
                raise NoResult
            ends = {end + 1 for end in ends if value[end : end + 1] == pattern[at]}
            at += 1
        elif character == "%":
            ends = set(range(min(ends), len(value) + 1)) if ends else ends
        elif character == "_":
            ends = {end + 1 for end in ends if end < len(value)}
        else:
            ends = {end + 1 for end in ends if value[end : end + 1] == character}
    return len(value) in ends
