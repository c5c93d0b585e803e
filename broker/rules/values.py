"""The values that rules compute with: comparison and arithmetic as in C#, on values of AMQP's types.

    None                 null, or unknown: the two differ only for EXISTS
    bool, str, bytes, UUID
    int                  integers of any width; results fit 64 bits
    float                float, double, and decimal NaN and infinities
    Decimal              decimal32, decimal64, decimal128
    Instant, Duration    timestamp and the described types of .NET

Clients disagree on the widths of numbers, so numbers compare by value. Other values (lists, maps) equal
nothing. management.md 3.5, amqp.md 11.2.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, DecimalException
from types import NoneType
from typing import Any, Final
from uuid import UUID

from broker.rules.errors import FilterError
from broker.rules.texts import read_boolean, read_decimal, read_duration, read_guid, read_instant, read_integer, text_of
from protocol import codec
from protocol.codec import Described, Symbol, Timestamp
from protocol.decimals import CONTEXT, decode_decimal, encode_decimal
from protocol.symbols import DATETIME_OFFSET, EPOCH_TICKS, TICKS_PER_MS, TIMESPAN

MIN_INT: Final = -(1 << 63)
MAX_INT: Final = (1 << 63) - 1
MAX_STRING: Final = 32_768  # characters of a computed string, because an application property has no more bytes


@dataclass(frozen=True, slots=True, order=True)
class Instant:
    """A point in time: ticks of 100 ns since the year 1, UTC. Timestamps beyond the years 1 to 9999 are fine."""

    ticks: int

    @classmethod
    def from_ms(cls, ms: int) -> "Instant":
        """Make an instant from milliseconds since 1970."""
        return cls(EPOCH_TICKS + ms * TICKS_PER_MS)

    @property
    def ms(self) -> int:
        return (self.ticks - EPOCH_TICKS) // TICKS_PER_MS


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """Ticks of 100 ns."""

    ticks: int

    @classmethod
    def from_ms(cls, ms: int) -> "Duration":
        return cls(ms * TICKS_PER_MS)


# --- to and from AMQP -------------------------------------------------------------------------------------------------


def _described(value: Described) -> Any:
    inner = value.value
    if isinstance(inner, int) and not isinstance(inner, bool) and inner <= MAX_INT:
        if value.descriptor == TIMESPAN:
            return Duration(int(inner))
        if value.descriptor == DATETIME_OFFSET:
            return Instant(int(inner))
    return canonical(inner)


def _from_datetime(value: datetime) -> Instant:
    """A time without a zone is UTC."""
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return Instant(EPOCH_TICKS + _from_timedelta(since).ticks)


def _from_timedelta(value: timedelta) -> Duration:
    return Duration(value // timedelta(microseconds=1) * 10)


_CANONICAL: Final[dict[type, Callable[[Any], Any]]] = {
    **dict.fromkeys(
        (codec.UByte, codec.UShort, codec.UInt, codec.ULong, codec.Byte, codec.Short, codec.Int, codec.Long), int
    ),
    codec.Float: float,
    codec.Char: str,
    codec.Symbol: str,
    Timestamp: Instant.from_ms,
    **dict.fromkeys((codec.Decimal32, codec.Decimal64, codec.Decimal128), decode_decimal),
    Described: _described,
    datetime: _from_datetime,
    timedelta: _from_timedelta,
}


def canonical(value: Any) -> Any:
    """The canonical value of a decoded AMQP value (or a datetime, a timedelta)."""
    convert = _CANONICAL.get(type(value))
    return value if convert is None else convert(value)


def to_amqp(value: Any) -> Any:
    """A canonical value as `protocol.codec` encodes it: integers as long, decimals as decimal128."""
    match value:
        case bool():
            return value
        case int():
            return codec.Long(value) if value <= MAX_INT else codec.ULong(value)
        case Decimal():
            return encode_decimal(value)
        case Instant():
            return Timestamp(value.ms)
        case Duration():
            return Described(TIMESPAN, codec.Long(value.ticks))
    return value


_RANGES: Final[dict[type, tuple[int, int]]] = {
    codec.UByte: (0, 0xFF),
    codec.UShort: (0, 0xFFFF),
    codec.UInt: (0, 0xFFFF_FFFF),
    codec.ULong: (0, (1 << 64) - 1),
    codec.Byte: (-0x80, 0x7F),
    codec.Short: (-0x8000, 0x7FFF),
    codec.Int: (-(1 << 31), (1 << 31) - 1),
    codec.Long: (MIN_INT, MAX_INT),
}


def converted(value: Any, existing: Any) -> Any:
    """The AMQP value in the type of the existing value that it replaces, if that loses nothing; else unchanged.

    Text is read as the existing type, and a number or a guid becomes the text of an existing string.
    """
    wanted, plain = type(canonical(existing)), canonical(value)
    if type(plain) is str and wanted in _READ:
        read = _READ[wanted](plain)
        return value if read is None else _in_type(to_amqp(read), read, existing, value)
    if wanted is str and type(plain) in _WRITTEN:
        plain = text_of(plain)
        value = plain
    return _in_type(value, plain, existing, value)


def _in_type(value: Any, plain: Any, existing: Any, otherwise: Any) -> Any:
    """`value`, whose canonical value is `plain`, in the type of `existing`; `otherwise` if it does not fit."""
    kind = type(existing)
    if type(plain) is int:
        if kind in _RANGES and _RANGES[kind][0] <= plain <= _RANGES[kind][1]:
            return kind(plain)
        if kind in (float, codec.Float) and float(plain) == plain:
            return _float(plain, kind)
        if kind in _DECIMAL_TYPES:
            return encode_decimal(Decimal(plain))
        return otherwise
    if type(plain) is float and kind in (float, codec.Float):
        return _float(plain, kind)
    if type(plain) is str and (
        kind is str or (kind is Symbol and plain.isascii()) or (kind is codec.Char and len(plain) == 1)
    ):
        return kind(plain)
    if type(plain) is Instant and kind is Described:
        return Described(DATETIME_OFFSET, codec.Long(plain.ticks))
    return value


def _read_double(text: str) -> float | None:
    number = read_decimal(text)
    return None if number is None or not math.isfinite(double := float(number)) else double


def _read_decimal(text: str) -> Decimal | None:
    """The number if a decimal has all of its digits."""
    number = read_decimal(text)
    if number is None:
        return None
    try:
        return number if decode_decimal(encode_decimal(number)) == number else None
    except (DecimalException, ValueError, OverflowError):
        return None


def read_as_duration(text: str) -> Duration | None:
    ticks = read_duration(text)
    return None if ticks is None else Duration(ticks)


def read_as_instant(text: str) -> Instant | None:
    ticks = read_instant(text)
    return None if ticks is None else Instant(ticks)


# How text is read that replaces a value of this canonical type; None if the text is no such value.
_READ: Final[dict[type, Callable[[str], Any]]] = {
    bool: read_boolean,
    int: read_integer,
    float: _read_double,
    Decimal: _read_decimal,
    UUID: read_guid,
    Instant: read_as_instant,
    Duration: read_as_duration,
}
_WRITTEN: Final = frozenset((int, float, Decimal, UUID))  # what becomes text where a string is wanted
_DECIMAL_TYPES: Final = (codec.Decimal32, codec.Decimal64, codec.Decimal128)


def _float(number: float, kind: type) -> float:
    """The number as a Float, if it is in the range of 32 bits."""
    return kind(number) if kind is float or not math.isfinite(number) or abs(number) < 3.4e38 else float(number)


_NAMES: Final[dict[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a double",
    Decimal: "a decimal",
    str: "a string",
    bytes: "binary",
    UUID: "a guid",
    Instant: "a date",
    Duration: "a duration",
}


KINDS: Final = frozenset(_NAMES)


def kind_of(value: Any, kind: type | None = None) -> str:
    """The words for the type of a canonical value, or for the type itself."""
    kind = kind or type(value)
    return "null" if kind is NoneType else _NAMES.get(kind, "a list or map")


# --- comparison -------------------------------------------------------------------------------------------------------

Comparison = Callable[[Any, Any], Any]

COMPARISONS: Final[dict[str, Comparison]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ORDERED: Final = frozenset((int, float, Decimal, str, Instant, Duration))
_ONLY_EQUAL: Final = frozenset((bool, bytes, UUID))
_NUMBERS: Final = frozenset((int, float, Decimal))


def compare(comparison: Comparison, left: Any, right: Any) -> bool | None:
    """True, False, or None for unknown: an operand is null, or the types have no order.

    Values of types that do not compare are not equal.
    """
    if left is None or right is None:
        return None
    kind, other = type(left), type(right)
    if kind is other:
        if kind in ORDERED or (kind in _ONLY_EQUAL and comparison in (operator.eq, operator.ne)):
            return bool(comparison(left, right))
    elif kind in _NUMBERS and other in _NUMBERS:
        if kind is Decimal and other is float:
            left = _beside_double(left, right)
        elif kind is float and other is Decimal:
            right = _beside_double(right, left)
        return bool(comparison(left, right))
    if comparison is operator.eq:
        return False
    return True if comparison is operator.ne else None


def _beside_double(number: Decimal, double: float = 0.0) -> Decimal | float:
    """The decimal as a number to compare with a double: 0.1 must equal 0.1, which no double is exactly.

    For a NaN it is a double, because decimals have no order with NaN, and `decimal` raises.
    """
    return number if double == double and number == number.to_integral_value() else float(number)


def equality_key(value: Any) -> Any:
    """A hashable key that is equal for values that are `=`, except for decimals with more digits than a double.

    None for values that equal nothing: null, NaN, lists and maps.
    """
    kind = type(value)
    if kind is str or kind is int:
        return value
    if kind is bool:
        return (bool, value)  # True == 1 in Python
    if kind is float:
        return None if value != value else value
    if kind is Decimal:
        return _beside_double(value)
    return value if kind in ORDERED or kind in _ONLY_EQUAL else None


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _fitting(number: int) -> int:
    if not MIN_INT <= number <= MAX_INT:
        raise FilterError("a computed integer does not fit 64 bits")
    return number


def _divide(left: int, right: int) -> int:
    """Truncates towards zero, as C# does."""
    if right == 0:
        raise FilterError("division of an integer by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    """Has the sign of `left`, as in C#."""
    return left - right * _divide(left, right)


def _divide_floats(left: float, right: float) -> float:
    if right:
        return left / right
    if left == 0 or left != left or right != right:
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1, right)


def _remainder_floats(left: float, right: float) -> float:
    return math.fmod(left, right) if right and math.isfinite(left) else math.nan


_INTEGERS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _remainder,
}
_FLOATS: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide_floats,
    "%": _remainder_floats,
}
_DECIMALS: Final[dict[str, Callable[[Any, Any], Decimal]]] = {
    "+": CONTEXT.add,
    "-": CONTEXT.subtract,
    "*": CONTEXT.multiply,
    "/": CONTEXT.divide,
    "%": CONTEXT.remainder,
}
_TIMES: Final[dict[tuple[type, str, type], type[Instant] | type[Duration]]] = {
    (Instant, "-", Instant): Duration,
    (Instant, "+", Duration): Instant,
    (Instant, "-", Duration): Instant,
    (Duration, "+", Instant): Instant,
    (Duration, "+", Duration): Duration,
    (Duration, "-", Duration): Duration,
}


_APPENDED: Final = frozenset((str, bool, int, float, Decimal, UUID))  # what + appends to a string


def compute(symbol: str, left: Any, right: Any) -> Any:
    """`left` + - * / % `right`; None if either is. Raises FilterError if the types or the values have no result."""
    if left is None or right is None:
        return None
    kind, other = type(left), type(right)
    if kind is int and other is int:
        return _fitting(_INTEGERS[symbol](left, right))
    if kind in _NUMBERS and other in _NUMBERS:
        if kind is Decimal or other is Decimal:
            return _compute_decimals(symbol, left, right)
        return _FLOATS[symbol](float(left), float(right))
    if kind is str and symbol == "+" and other in _APPENDED:
        text = right if other is str else text_of(right)
        if len(left) + len(text) > MAX_STRING:
            raise FilterError(f"a computed string is longer than {MAX_STRING} characters")
        return left + text
    result = _TIMES.get((kind, symbol, other))
    if result is None:
        raise FilterError(f"{kind_of(left)} {symbol} {kind_of(right)} is not defined")
    return result(_fitting(_INTEGERS[symbol](left.ticks, right.ticks)))


def computed_kind(symbol: str, kind: type, other: type) -> type | None:
    """The type of what `compute` returns for canonical values of these types; None if it always raises."""
    if kind is NoneType or other is NoneType:
        return NoneType
    if kind in _NUMBERS and other in _NUMBERS:
        return int if kind is other is int else Decimal if Decimal in (kind, other) else float
    if kind is str and symbol == "+" and other in _APPENDED:
        return str
    return _TIMES.get((kind, symbol, other))


SIGNED: Final = _NUMBERS | {Duration, NoneType}  # what may have a sign


def _compute_decimals(symbol: str, left: Any, right: Any) -> Decimal | float:
    try:
        # A double counts as its decimal notation: 0.1 as 0.1.
        result = _DECIMALS[symbol](
            Decimal(repr(left)) if type(left) is float else left,
            Decimal(repr(right)) if type(right) is float else right,
        )
    except DecimalException:
        raise FilterError(f"{left} {symbol} {right} has no decimal result") from None
    return result if result.is_finite() else float(result)


def negate(value: Any) -> Any:
    """The negative value; None for None. Raises FilterError."""
    kind = type(value)
    if value is None:
        return None
    if kind is int:
        return _fitting(-value)
    if kind is Duration:
        return Duration(_fitting(-value.ticks))
    if kind is float:
        return -value
    if kind is Decimal:
        return CONTEXT.minus(value)
    raise FilterError(f"- {kind_of(value)} is not defined")


def unary_plus(value: Any) -> Any:
    """The number or duration itself; None for None. Raises FilterError."""
    if value is None or type(value) in _NUMBERS or type(value) is Duration:
        return value
    raise FilterError(f"+ {kind_of(value)} is not defined")
