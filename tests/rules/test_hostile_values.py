"""Whatever a message holds: rules match it, do not match it, or fail on it. Nothing else comes out of them."""

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.rules import (
    Action,
    ActionError,
    CorrelationFilter,
    FilterError,
    InvalidRule,
    MessageView,
    Rule,
    RuleSet,
    compile_action,
    compile_filter,
)
from broker.rules.message import SYSTEM_NAMES
from protocol.codec import (
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Symbol,
    Timestamp,
    UInt,
    ULong,
    encode,
)
from protocol.decimals import encode_decimal
from tests.examples import examples

NAN_DECIMAL = Decimal64(b"\x7c" + bytes(7))
TIMESPAN, DATE = Symbol("com.microsoft:timespan"), Symbol("com.microsoft:datetime-offset")
EDGES = [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]

# --- the messages -----------------------------------------------------------------------------------------------------

SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EDGES).map(Long),
    st.sampled_from([0, 2**63, 2**64 - 1]).map(ULong),
    st.sampled_from([0, 2**32 - 1]).map(UInt),
    st.floats(),
    st.floats(width=32).map(Float),
    st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, 1e308, -0.0]),
    st.binary(min_size=4, max_size=4).map(Decimal32),
    st.binary(min_size=8, max_size=8).map(Decimal64),
    st.binary(min_size=16, max_size=16).map(Decimal128),
    st.just(NAN_DECIMAL),
    st.decimals(allow_nan=False, allow_infinity=False).map(encode_decimal),
    st.characters().map(Char),
    st.sampled_from(["", "%", "a", "x" * 129, "y" * 32_768, "é", "\U0001f600" * 128]),
    st.text(max_size=3),
    st.sampled_from(["", "sym", "s" * 200]).map(Symbol),
    st.binary(max_size=3),
    st.just(UUID(int=7)),
    st.sampled_from([*EDGES, -62_135_596_800_000, 253_402_300_800_000]).map(Timestamp),
    st.builds(Described, st.sampled_from([TIMESPAN, DATE, Symbol("?"), ULong(3)]), st.sampled_from(EDGES).map(Long)),
    st.builds(Described, st.sampled_from([TIMESPAN, DATE]), st.just(ULong(2**64 - 1)) | st.booleans() | st.text()),
)
NESTED = SIMPLE | st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
NAMES = st.sampled_from(["a", "b", "c", "A"])
ANNOTATIONS = st.sampled_from(["x-opt-partition-key", "x-opt-scheduled-enqueue-time", "x-opt-message-state", "other"])
VIEWS = st.builds(
    MessageView,
    st.none() | st.lists(NESTED, max_size=13) | st.binary(max_size=5),
    st.none() | st.dictionaries(NAMES, NESTED) | st.binary(max_size=5),
    st.none() | st.dictionaries(ANNOTATIONS.map(Symbol), NESTED) | st.binary(max_size=5),
    st.none() | st.fixed_dictionaries({"SequenceNumber": SIMPLE, "TimeToLive": SIMPLE}),
)

# --- the rules --------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.sampled_from(
        [
            *("a", "b", "c", "NULL", "TRUE", "0", "-1", "9223372036854775807", "-9223372036854775808", "1e308", "0.1"),
            *("''", "'a%'", "'!'", "newid()", "@nan", "@decimal", "@char"),
            *(f"sys.{name}" for name in SYSTEM_NAMES.values()),
        ]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda value: f"(- {value})"),
        inner.map(lambda value: f"property({value})"),
    ),
    max_leaves=5,
)
PREDICATES = st.one_of(
    st.tuples(VALUES, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), VALUES).map(" ".join),
    st.builds("{} LIKE {}".format, VALUES, VALUES),
    st.builds("{} LIKE {} ESCAPE {}".format, VALUES, VALUES, VALUES),
    st.builds("{} NOT IN ({}, {})".format, VALUES, VALUES, VALUES),
)
TARGETS = st.sampled_from(["a", "new", "sys.Label", "sys.SessionId", "sys.TimeToLive", "sys.To", "sys.PartitionKey"])
ACTIONS = st.lists(st.builds("SET {} = {}".format, TARGETS, VALUES), min_size=1, max_size=4).map(";".join)
PARAMETERS = {"nan": math.nan, "decimal": Decimal128(b"\x30" + bytes(14) + b"\x07"), "char": Char("\U0010ffff")}


def rule_of(expression, action):
    """None if there is no such rule."""
    try:
        return Rule("r", compile_filter(expression, PARAMETERS), compile_action(action, PARAMETERS))
    except InvalidRule:
        return None


@settings(max_examples=examples(1000))
@given(PREDICATES, VIEWS)
@example("a < b", MessageView(None, {"a": math.nan, "b": Decimal32(b"\x32\x80\x00\x07")}))
@example("@nan < @decimal", MessageView())
def test_a_filter_matches_does_not_match_or_fails(expression, message):
    rule = rule_of(expression, "")
    if rule is None:
        return
    rules = RuleSet()
    rules.add("s", rule)
    for match in rules.match(message):
        assert match.is_plain != bool(match.errors)


@settings(max_examples=examples(1000))
@given(ACTIONS, VIEWS)
@example("SET a = + c", MessageView(None, {"c": Described(TIMESPAN, ULong(2**64 - 1))}))
def test_an_action_changes_the_message_to_what_can_be_stored_or_fails(action, message):
    rule = rule_of("a = a", action)
    if rule is None:
        return
    try:
        changes = rule.action.apply(message)
    except ActionError:
        return
    for name, value in changes.user.items():
        assert encode(name) + encode(value)
    for value in changes.system.values():
        assert not isinstance(value, str) or encode(value)


@settings(max_examples=examples(300))
@given(st.dictionaries(NAMES.map(str.lower), SIMPLE, min_size=1), VIEWS)
def test_a_correlation_filter_matches_does_not_match_or_fails(properties, message):
    try:
        rule = Rule("r", CorrelationFilter(properties=properties))
    except InvalidRule:
        return
    rules = RuleSet()
    rules.add("s", rule)
    for match in rules.match(message):
        assert match.is_plain != bool(match.errors)


@dataclass(frozen=True)
class Raising:
    error: Exception

    def matches(self, message):
        raise self.error


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), RecursionError("deep"), MemoryError(), AssertionError(), KeyError("\ud800")]
)
def test_any_exception_of_a_filter_is_its_failure_on_that_message_and_others_still_match(error):
    rules = RuleSet()
    rules.add("bad", Rule("r", Raising(error)))
    rules.add("good", Rule("r", compile_filter("a = 1")))
    bad, good = rules.match(MessageView(None, {"a": Int(1)}))
    [(_, failure)] = bad.errors
    assert type(failure) is FilterError
    assert type(error).__name__ in str(failure)
    assert str(failure).encode()
    assert good.is_plain


class RaisingView(MessageView):
    __slots__ = ()

    def __getattr__(self, name):
        raise OverflowError("too large")


def test_any_exception_of_an_action_is_its_failure_on_that_message():
    with pytest.raises(ActionError, match="OverflowError: too large"):
        Action("SET a = b").apply(RaisingView())


@pytest.mark.parametrize("number", ["1E+6144", "-1E+6144", "9.999E+6144", "1E-6176", "-1E-6143"])
def test_a_decimal_with_a_huge_exponent_costs_no_more_than_another(number):
    """Steps are counted for texts only; so the CPU of many evaluations is looked at, which a number of 6,000 digits for
    each would exceed by far.
    """
    properties = {"a": encode_decimal(Decimal(number)), "b": encode_decimal(Decimal("0.1"))}
    expressions = [
        *("a = 5", "a <> 5.5", "a > 9223372036854775807", "a = a", "a IN (1, 2.5, b)", "a < b", "a > @limit"),
        *("a + 1 > b", "a * 0.5 <> 3", "-a = 0", "a / 3 > 1", "a - a = 0", "'' + a LIKE '1%'", "a = '1'"),
    ]
    filters = [compile_filter(each, {"@limit": 1e308}) for each in expressions]
    begun_s = time.process_time()
    for _ in range(200):
        for each in filters:
            with suppress(FilterError):
                each.evaluate(MessageView(None, properties))
    assert time.process_time() - begun_s < 2


ORDER_WITH_NAN = [("a < b", False), ("a >= b", False), ("a = b", False), ("a <> b", True), ("b < a", False)]
ORDER_WITH_INFINITIES = [("b < c", True), ("b > d", True), ("b = c", False), ("c > b", True), ("b IN (a, b)", True)]


@pytest.mark.parametrize("number", ["7", "0", "-1E+6144", "1E+6144"])
def test_a_decimal_compares_with_nan_and_infinities_as_a_double_does(number):
    decimal = encode_decimal(Decimal(number))
    message = MessageView(None, {"a": math.nan, "b": decimal, "c": math.inf, "d": -math.inf})
    for expression, expected in ORDER_WITH_NAN + ORDER_WITH_INFINITIES:
        assert compile_filter(expression).evaluate(message) is expected, expression
