"""Session filters as SDKs send them, and the answers that they can read (amqp.md 7.1 to 7.3)."""

import pytest

from protocol.codec import Described, Int, Long, Symbol, UInt, ULong, encode
from protocol.errors import InvalidField, LimitExceeded
from protocol.session_filter import (
    DEFAULT_WAIT_MS,
    MAX_WAIT_MS,
    SessionRequest,
    accepted_filters,
    accepted_properties,
    read,
)

FILTER = Symbol("com.microsoft:session-filter")
TIMEOUT = Symbol("com.microsoft:timeout")
GO = ULong(0x000000137000000C)


@pytest.mark.parametrize(
    ("value", "session_id"),
    [
        ("a", "a"),
        ("", ""),
        (None, None),
        (Described(GO, "a"), "a"),
        (Described(GO, None), None),
        (Described(Symbol("com.microsoft:session-filter"), "a"), "a"),
        (Symbol("a"), "a"),
        ("x" * 128, "x" * 128),
    ],
)
def test_what_is_asked_for(value, session_id):
    request = read({FILTER: value}, {})
    assert request is not None
    assert request.session_id == session_id
    assert request.wait_ms == DEFAULT_WAIT_MS == 65_000


def test_without_the_filter_no_session_is_asked_for():
    assert read({}, {TIMEOUT: UInt(5)}) is None
    assert read({Symbol("apache.org:selector-filter:string"): "a = 1"}, {}) is None


@pytest.mark.parametrize("value", [Int(1), b"a", True, ["a"], Described(GO, Int(1))])
def test_a_filter_of_another_type_is_refused(value):
    with pytest.raises(InvalidField, match="session-filter"):
        read({FILTER: value}, {})


def test_an_id_that_is_too_long_is_refused():
    with pytest.raises(LimitExceeded, match="session id exceeds the limit of 128 characters"):
        read({FILTER: "x" * 129}, {})


@pytest.mark.parametrize(
    ("timeout", "wait_ms"),
    [
        (UInt(1500), 1500),
        (Long(1500), 1500),
        (Int(0), 0),
        (Int(-1), 0),
        (1500.5, 1500),
        (float("nan"), DEFAULT_WAIT_MS),
        (float("inf"), MAX_WAIT_MS),
        (Long(1 << 60), MAX_WAIT_MS),
        ("1500", DEFAULT_WAIT_MS),
        (True, DEFAULT_WAIT_MS),
        (None, DEFAULT_WAIT_MS),
    ],
)
def test_the_time_to_wait_may_be_any_number(timeout, wait_ms):
    assert read({FILTER: None}, {TIMEOUT: timeout}) == SessionRequest(None, wait_ms, {FILTER: None})


def answered(value, session_id="a"):
    request = read({FILTER: value, Symbol("other"): "left out"}, {})
    assert request is not None
    return accepted_filters(request, session_id)


@pytest.mark.parametrize("asked", ["a", None])
def test_the_answer_to_a_plain_filter_is_a_plain_string(asked):
    assert encode(answered(asked)[FILTER]) == encode("a")
    assert [*answered(asked)] == [FILTER], "only what is in place here"


@pytest.mark.parametrize("asked", ["a", None])
def test_the_answer_to_a_described_filter_is_described_alike(asked):
    assert answered(Described(GO, asked))[FILTER] == Described(GO, "a")


def test_the_end_of_the_lock_is_told_in_ticks_of_eight_bytes():
    properties = accepted_properties(1_704_067_200_000)  # 2024-01-01
    assert properties == {Symbol("com.microsoft:locked-until-utc"): 638_396_640_000_000_000}
    [value] = properties.values()
    assert encode(value) == b"\x81" + (638_396_640_000_000_000).to_bytes(8, "big")
