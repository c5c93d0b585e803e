"""Views of messages: what they decode and when; values that are rare on the wire."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.rules import Duration, FilterError, Instant, MessageView, compile_filter
from broker.rules.like import MAX_PATTERN
from broker.rules.values import canonical
from protocol.codec import Decimal32, Decimal64, Decimal128, Described, Float, Long, Symbol, Timestamp, ULong, encode
from protocol.decimals import decode_decimal, encode_decimal

USER = encode(Described(0x74, {"color": "red", "a": 1}))
FIELDS = encode(Described(0x73, ["m-1", None, "orders"]))


def test_sections_are_taken_with_or_without_their_descriptors():
    for fields, user in ((FIELDS, USER), (FIELDS[3:], USER[3:]), (memoryview(FIELDS), bytearray(USER))):
        message = MessageView(fields, user)
        assert compile_filter("color = 'red' AND sys.To = 'orders' AND sys.Label IS NULL").matches(message)


@pytest.mark.parametrize("nothing", [None, b""])
def test_a_message_without_sections_has_no_properties(nothing):
    message = MessageView(nothing, nothing, nothing)
    assert compile_filter("a IS NULL AND sys.To IS NULL AND sys.PartitionKey IS NULL").matches(message)


def test_only_sections_that_are_asked_for_are_decoded():
    broken = b"\xff"
    message = MessageView(broken, USER, broken)
    assert compile_filter("color = 'red' OR sys.Label = 'x'").matches(message)
    with pytest.raises(FilterError, match="properties cannot be read: unknown constructor 0xff"):
        compile_filter("sys.Label = 'x'").matches(message)
    with pytest.raises(FilterError, match="annotations cannot be read"):
        compile_filter("sys.PartitionKey = 'x'").matches(message)
    with pytest.raises(FilterError, match="application properties are no map"):
        compile_filter("a = 1").matches(MessageView(None, encode([1])))
    with pytest.raises(AttributeError):
        _ = message.unheard_of


@pytest.mark.parametrize(
    ("message_id", "text"),
    [("x", "x"), (ULong(7), "7"), (UUID(int=7), "00000000-0000-0000-0000-000000000007")],
)
def test_ids_are_texts(message_id, text):
    message = MessageView([message_id, None, None, None, None, message_id])
    assert compile_filter(f"sys.MessageId = '{text}' AND sys.CorrelationId = '{text}'").matches(message)


def test_values_that_the_broker_knows_win_over_annotations():
    annotations = encode(Symbol("x-opt-sequence-number")) + encode(Long(1)) + encode(Symbol("x-opt-other")) + encode(2)
    assert compile_filter("sys.SequenceNumber = 1").matches(MessageView(None, None, annotations))
    given = {"SequenceNumber": 9, "TimeToLive": Duration.from_ms(5)}
    assert compile_filter("sys.SequenceNumber = 9").matches(MessageView(None, None, annotations, given))


def test_dates_of_all_clients_are_the_same_instant():
    noon = datetime(2024, 1, 1, 12, tzinfo=UTC)
    ms = int(noon.timestamp() * 1000)
    ticks = 638_397_072_000_000_000
    assert Instant.from_ms(ms).ms == ms
    assert {
        canonical(each)
        for each in (
            Timestamp(ms),
            noon,
            noon.replace(tzinfo=None),
            noon.astimezone(timezone(timedelta(hours=5))),
            Described(Symbol("com.microsoft:datetime-offset"), Long(ticks)),
        )
    } == {Instant(ticks)}
    assert canonical(timedelta(seconds=1, microseconds=1)) == Duration(10_000_010)


@pytest.mark.parametrize("ms", [-62_135_596_800_000, 253_402_300_800_000, 2**63 - 1, -(2**63)])
def test_dates_at_the_limits_compare(ms):
    message = MessageView(None, {"at": Timestamp(ms)})
    assert compile_filter("at = @at AND at <= @at", {"@at": Timestamp(ms)}).matches(message)


def test_values_that_are_no_property_compare_with_nothing():
    message = MessageView(None, {"a": [1], "b": {}, "c": Described(Symbol("x"), [1])})
    assert compile_filter("a <> 1 AND NOT b = 'x' AND a <> a AND EXISTS(c)").matches(message)
    assert compile_filter("a < 1").evaluate(message) is None
    assert compile_filter("a IN (1)").evaluate(message) is False
    with pytest.raises(FilterError, match="a list or map \\+ an integer is not defined"):
        compile_filter("a + 1 = 1").matches(message)


# --- decimals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("octets", "number"),
    [
        (Decimal32(bytes.fromhex("32800001")), Decimal(1)),
        (Decimal32(bytes.fromhex("b2800001")), Decimal(-1)),
        (Decimal32(bytes.fromhex("6cb8967f")), Decimal(9_999_999)),  # a coefficient of 24 bits: the second form
        (Decimal32(bytes.fromhex("77f8967f")), Decimal("9999999E90")),
        (Decimal32(bytes.fromhex("6cb89680")), Decimal(0)),  # ten million is one digit too many
        (Decimal64(bytes.fromhex("31c0000000000001")), Decimal(1)),
        (Decimal128(bytes.fromhex("30400000000000000000000000000001")), Decimal(1)),
        (Decimal128(bytes.fromhex("303e0000000000000000000000000001")), Decimal("0.1")),
        (Decimal128(bytes.fromhex("6c000000000000000000000000000001")), Decimal(0)),
        (Decimal32(bytes.fromhex("78000000")), float("inf")),
        (Decimal64(bytes.fromhex("f800000000000000")), float("-inf")),
    ],
)
def test_decimals_are_read(octets, number):
    assert decode_decimal(octets) == number


@pytest.mark.parametrize(
    ("octets", "number"),
    [
        ("0c400000000000000000000000000000", "0"),
        ("0c400000000000000000000000000001", "1"),
        ("0c3a0000000000000000000000003039", "12.345"),
        ("8c3e0000000000000000000000000001", "-0.1"),
        ("0c400000ffffffffffffffffffffffff", "79228162514264337593543950335"),
        ("0c080000000000000000000000000001", "1E-28"),
        ("0c3c0000000000000000000000000096", "1.50"),
        # Numbers of others: an exponent beyond those of .NET on either side, and a coefficient that is too long.
        ("0c060000000000000000000000000001", "1E-4637"),
        ("0c420000000000000000000000000001", "1E-4607"),
        ("0c400001000000000000000000000000", "79228162514264337593543950336E-4608"),
    ],
)
def test_decimals_of_dotnet_are_read_as_what_they_were(octets, number):
    """The octets that Azure.Messaging.ServiceBus 7.21.0 writes, whose exponents lie two bits too far to the right."""
    assert decode_decimal(Decimal128(bytes.fromhex(octets))) == Decimal(number)


@pytest.mark.parametrize("kind", [Decimal32, Decimal64, Decimal128])
def test_a_decimal_compares_by_value_with_parameters_of_all_types(kind):
    price = {
        Decimal32: (99 << 23 | 1250).to_bytes(4, "big"),
        Decimal64: (396 << 53 | 1250).to_bytes(8, "big"),
        Decimal128: bytes.fromhex("0c3c00000000000000000000000004e2"),  # of .NET
    }[kind]
    message = MessageView(None, {"price": kind(price)})
    for limit in (12, Long(12), ULong(12), 12.25, Float(12.25), Decimal64((397 << 53 | 124).to_bytes(8, "big"))):
        assert compile_filter("price > @limit", {"@limit": limit}).matches(message), limit
        assert not compile_filter("price <= @limit", {"@limit": limit}).matches(message), limit
    for same in (12.5, Float(12.5), Decimal32((100 << 23 | 125).to_bytes(4, "big"))):
        assert compile_filter("price = @limit", {"@limit": same}).matches(message), same


def test_a_decimal_that_is_no_number_equals_nothing():
    message = MessageView(None, {"a": Decimal128(b"\x7c" + bytes(15))})
    assert compile_filter("a <> a AND NOT a = 1 AND NOT a < 1").matches(message)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**20), max_value=10**20))
def test_a_decimal_is_written_as_it_was(number):
    assert decode_decimal(encode_decimal(number)) == number


# --- patterns ---------------------------------------------------------------------------------------------------------


def test_a_pattern_from_a_message_has_a_limit():
    message = MessageView(None, {"a": "%" * MAX_PATTERN, "b": "%" * (MAX_PATTERN + 1)})
    assert compile_filter("'x' LIKE a").matches(message)
    with pytest.raises(FilterError, match="at most 1024 characters, this one has 1025"):
        compile_filter("'x' LIKE b").matches(message)
