from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import Described, Int, Symbol, Timestamp, ULong, decode, encode
from protocol.errors import DecodeError, InvalidField, ProtocolError
from protocol.nodes import request_message
from protocol.nodes.cbs import (
    BadCbsRequest,
    EntityMissing,
    PutToken,
    UnsupportedToken,
    encode_accepted,
    encode_refused,
    parse_put_token,
)
from protocol.nodes.request_message import Request
from protocol.nodes.sas_tokens import ExpiredToken, MalformedToken
from tests.examples import examples

# As azure-servicebus 7.14.3 encodes it; it declares the type jwt.
PYTHON = bytes.fromhex(
    "005373c01e0d98768f93f8f0ee4c37925fc305e860057f404040404040404040404040005374c15108a1046e616d65a11673623a2f2f6c6f"
    "63616c686f73743a353637322f7131a10a65787069726174696f6e716553f100a1096f7065726174696f6ea1097075742d746f6b656ea104"
    "74797065a1036a7774005377a11a5368617265644163636573735369676e61747572652073723d78"
)
TOKEN = "SharedAccessSignature sr=x"


def sections(message: bytes) -> dict[int, object]:
    found, at = {}, 0
    while at < len(message):
        section, at = decode(message, at)
        found[section.descriptor] = section.value
    return found


def message(message_id: object = "1", body: object = TOKEN, reply_to: object = None, **properties: object) -> bytes:
    fields = [message_id, None, None, None, reply_to]
    everything = {
        "operation": "put-token",
        "type": "servicebus.windows.net:sastoken",
        "name": "sb://host/q",
    } | properties
    return b"".join(
        encode(Described(code, value)) for code, value in ((0x73, fields), (0x74, everything), (0x77, body))
    )


def put(**arguments: object) -> PutToken:
    return parse_put_token(request_message.parse(message(**arguments)))


def test_a_python_clients_request_is_taken_although_it_says_jwt():
    request = request_message.parse(PYTHON)
    assert request.message_id == UUID("768f93f8-f0ee-4c37-925f-c305e860057f")
    assert parse_put_token(request) == PutToken("sb://localhost:5672/q1", TOKEN)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"type": "jwt"},
        {"type": Symbol("amqp:jwt")},
        {"expiration": Timestamp(1)},
        {"expiration": "soon"},
        {"operation": b"put-token", "body": TOKEN.encode()},
        {"operation": Symbol("put-token")},
    ],
)
def test_the_kind_of_a_token_is_seen_in_its_text(arguments):
    assert put(**arguments) == PutToken("sb://host/q", TOKEN)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"body": "eyJhbGciOi.eyJpc3M.c2ln"}, UnsupportedToken, "use a shared access signature"),
        ({"body": "eyJhbGciOi.eyJpc3M.c2ln", "type": "servicebus.windows.net:sastoken"}, UnsupportedToken, "JWT"),
        ({"body": "nonsense"}, MalformedToken, "not a shared access signature"),
        ({"body": None}, MalformedToken, "not a string"),
        ({"body": b"\xff"}, MalformedToken, "not a string"),
        ({"operation": "delete-token"}, BadCbsRequest, "'delete-token' is not offered"),
        ({"operation": None}, BadCbsRequest, "'put-token' is"),
        ({"name": ""}, BadCbsRequest, "'name'"),
        ({"name": ULong(1)}, BadCbsRequest, "'name'"),
    ],
)
def test_refused_tokens_tell_the_reason(arguments, error, text):
    with pytest.raises(error, match=text):
        put(**arguments)


@pytest.mark.parametrize(
    "message_id", [UUID("768f93f8-f0ee-4c37-925f-c305e860057f"), ULong(7), "seven", b"\x07", Symbol("seven"), None]
)
def test_the_answer_has_the_requests_id_with_its_type_and_no_condition(message_id):
    request = request_message.parse(message(message_id=message_id))
    answer = sections(encode_accepted(request))
    correlation_id = answer[0x73][5]
    assert (type(correlation_id), correlation_id) == (type(message_id), message_id)
    assert answer[0x74] == {"status-code": 202, "status-description": "Accepted"}
    assert [type(value) for value in answer[0x74].values()] == [Int, str]
    assert answer[0x77] is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ExpiredToken(0), 401),
        (EntityMissing("The messaging entity could not be found."), 404),
        (MalformedToken("x"), 401),
        (UnsupportedToken("x"), 401),
        (BadCbsRequest("x"), 400),
    ],
)
def test_a_refusal_has_a_status_and_the_text_of_the_error(error, status):
    request = request_message.parse(message())
    properties = sections(encode_refused(request, error))[0x74]
    assert properties == {"status-code": status, "status-description": str(error)}
    assert isinstance(properties["status-code"], Int)
    tracked = sections(encode_refused(request, error, f"{error} TrackingId:1"))[0x74]
    assert tracked["status-description"].endswith("TrackingId:1")


def test_a_request_without_message_id_is_answered_to_its_correlation_id():
    fields = [None, None, None, None, None, "correlation"]
    assert request_message.parse(encode(Described(0x73, fields))).message_id == "correlation"


def test_sections_come_in_any_order_with_others_between():
    shuffled = b"".join(
        encode(Described(code, value))
        for code, value in ((0x77, "body"), (0x70, []), (Symbol("amqp:application-properties:map"), {"a": "b"}))
    )
    assert request_message.parse(shuffled) == Request(None, None, {"a": "b"}, "body")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (encode("no section"), DecodeError),
        (PYTHON[:-1], DecodeError),
        (encode(Described(0x73, {"a": 1})), InvalidField),
        (encode(Described(0x74, ["a"])), InvalidField),
        (message(message_id=[1]), InvalidField),
        (message(reply_to=ULong(1)), InvalidField),
    ],
)
def test_a_message_that_is_no_request_raises_a_typed_error(bad, error):
    with pytest.raises(error):
        request_message.parse(bad)


@settings(max_examples=examples(200))
@given(st.binary(max_size=64), st.integers(0, len(PYTHON)), st.integers(0, 3))
def test_hostile_bytes_raise_typed_errors_only(data, position, removed):
    hostile = PYTHON[:position] + data + PYTHON[position + removed :]
    with suppress(ProtocolError):
        request = request_message.parse(hostile)
        encode_accepted(request)
        parse_put_token(request)
