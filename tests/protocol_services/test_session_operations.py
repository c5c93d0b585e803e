"""Operations on sessions as SDKs write and read them (amqp.md 8.4)."""

import pytest

from protocol import conditions
from protocol.codec import Described, Int, Long, Symbol, Timestamp, UInt, decode, encode
from protocol.errors import LimitExceeded
from protocol.nodes import management
from protocol.nodes.management import (
    ArgumentError,
    ArgumentOutOfRange,
    GetMessageSessions,
    GetSessionState,
    RenewSessionLock,
    SetSessionState,
)
from protocol.nodes.request_message import Request


def request(operation="renew-session-lock", body=None):
    return Request(message_id="1", reply_to="me", properties={"operation": f"com.microsoft:{operation}"}, body=body)


def parsed(operation, body):
    return management.parse(request(operation, body)).arguments


@pytest.mark.parametrize(
    ("operation", "body", "arguments"),
    [
        ("renew-session-lock", {"session-id": "a"}, RenewSessionLock("a")),
        ("renew-session-lock", {Symbol("session-id"): Symbol("a")}, RenewSessionLock("a")),
        ("renew-session-lock", {"session-id": ""}, RenewSessionLock("")),
        ("get-session-state", {"session-id": "a", "more": 1}, GetSessionState("a")),
        ("set-session-state", {"session-id": "a", "session-state": b"x"}, SetSessionState("a", b"x")),
        ("set-session-state", {"session-id": "a", "session-state": b""}, SetSessionState("a", b"")),
        ("set-session-state", {"session-id": "a", "session-state": None}, SetSessionState("a", None)),
        ("set-session-state", {"session-id": "a"}, SetSessionState("a", None)),
        (
            "get-message-sessions",
            {"last-updated-time": Timestamp(253_402_300_800_000), "skip": Int(0), "top": Int(100)},
            GetMessageSessions(None, 0, 100),
        ),
        (
            "get-message-sessions",
            {"last-updated-time": Timestamp(253_402_300_799_999), "skip": UInt(7), "top": Long(1)},
            GetMessageSessions(None, 7, 1),
        ),
        (
            "get-message-sessions",
            {"last-updated-time": Timestamp(1_700_000_000_000), "skip": Int(0), "top": Int(10_000)},
            GetMessageSessions(1_700_000_000_000, 0, 10_000),
        ),
        ("get-message-sessions", {"skip": Int(0), "top": Int(5)}, GetMessageSessions(None, 0, 5)),
        (
            "get-message-sessions",
            {"skip": Int(5), "top": Int(5), "last-session-id": "é" * 128},
            GetMessageSessions(None, 5, 5, "é" * 128),
        ),
        (
            "get-message-sessions",
            {"skip": Int(1), "top": Int(5), "last-session-id": ""},
            GetMessageSessions(None, 1, 5),
        ),
        (
            "get-message-sessions",
            {"last-updated-time": Timestamp(-62_135_596_800_000), "skip": Long((1 << 63) - 1), "top": Int(5)},
            GetMessageSessions(0, (1 << 31) - 1, 5),
        ),
    ],
)
def test_requests_are_understood(operation, body, arguments):
    assert parsed(operation, body) == arguments


@pytest.mark.parametrize(
    ("operation", "body", "error", "text"),
    [
        ("renew-session-lock", {}, ArgumentError, "'session-id' is missing"),
        ("get-session-state", {"session-id": Int(1)}, ArgumentError, "'session-id' is not a string"),
        ("set-session-state", {"session-id": "a", "session-state": "text"}, ArgumentError, "'session-state'"),
        ("get-message-sessions", {"skip": Int(0)}, ArgumentError, "'top' is missing"),
        ("get-message-sessions", {"skip": Int(-1), "top": Int(1)}, ArgumentOutOfRange, "'skip' is -1"),
        ("get-message-sessions", {"skip": Int(0), "top": Int(0)}, ArgumentOutOfRange, "'top' is 0"),
        ("get-message-sessions", {"skip": Int(0), "top": Int(10_001)}, ArgumentOutOfRange, "the most is 10000"),
        ("get-message-sessions", {"last-updated-time": "x", "skip": Int(0), "top": Int(1)}, ArgumentError, "integer"),
        ("renew-session-lock", {"session-id": "x" * 129}, LimitExceeded, "128 characters"),
    ],
)
def test_errors_of_a_request_name_the_field(operation, body, error, text):
    with pytest.raises(error, match=text):
        parsed(operation, body)


def sections(response):
    found, at = {}, 0
    while at < len(response):
        section, at = decode(response, at)
        assert isinstance(section, Described)
        found[int(section.descriptor)] = section.value
    assert found[0x73][5] == "1"
    return found[0x74], found[0x77]


def test_a_renewed_lock_is_told_as_one_timestamp():
    properties, body = sections(management.encode_session_renewed(request(), 1_700_000_000_000))
    assert (properties["statusCode"], body) == (200, {"expiration": 1_700_000_000_000})
    assert type(properties["statusCode"]) is Int
    assert type(body["expiration"]) is Timestamp


@pytest.mark.parametrize("state", [b"half", b"", None])
def test_a_state_is_told_with_its_key_also_if_there_is_none(state):
    properties, body = sections(management.encode_session_state(request(), state))
    assert (properties["statusCode"], body) == (200, {"session-state": state})


def test_sessions_are_told_as_an_array_of_strings():
    response = management.encode_sessions(request(), 3, ["a", "", "ü"])
    properties, body = sections(response)
    assert properties["statusCode"] == 200
    assert type(body["skip"]) is Int
    assert (body["skip"], body["sessions-ids"].kind, list(body["sessions-ids"])) == (3, str, ["a", "", "ü"])


def test_no_sessions_are_no_content_and_no_failure():
    properties, body = sections(management.encode_sessions(request(), 0, []))
    assert (properties["statusCode"], body) == (204, {})
    assert properties["errorCondition"] == conditions.SESSION_NOT_FOUND
    assert type(properties["errorCondition"]) is Symbol


def test_a_page_that_does_not_fit_is_a_failure_since_a_short_one_would_be_the_last():
    many = ["x" * 100] * 50
    properties, _ = sections(management.encode_sessions(request(), 0, many, 1000))
    assert properties["statusCode"] == 403
    assert sections(management.encode_sessions(request(), 0, many, 10_000))[0]["statusCode"] == 200
    assert len(encode(many)) > 1000
