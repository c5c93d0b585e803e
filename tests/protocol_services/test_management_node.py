"""Requests as azure-servicebus 7.14.3 encodes them, and as the contract says of the others."""

from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import conditions
from protocol.codec import (
    Array,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    array,
    decode,
    decode_exactly,
    encode,
)
from protocol.errors import ProtocolError
from protocol.nodes import management, request_message
from protocol.nodes.management import (
    ArgumentError,
    ArgumentOutOfRange,
    CancelScheduled,
    DeleteMessages,
    Disposition,
    PeekMessages,
    ReceiveDeferred,
    RenewLocks,
    ScheduledMessage,
    ScheduleMessages,
    UnknownOperation,
    UpdateDisposition,
)
from protocol.nodes.request_message import Request
from tests.examples import examples

TOKEN = UUID("00112233-4455-6677-8899-aabbccddeeff")
OTHER = UUID("ffeeddcc-bbaa-9988-7766-554433221100")

PYTHON_HEAD = "a1146173736f6369617465642d6c696e6b2d6e616d65a1066c696e6b2d31a1096f7065726174696f6e"
PYTHON_TYPE = "a10474797065a00b656e746974792d6d676d74"
PYTHON_RENEW = bytes.fromhex(
    "005373c02d0d98167e724b948f4d7584464fa70d63e8b7404040a10e71312f246d616e6167656d656e744040404040404040005374c15706"
    + PYTHON_HEAD
    + "a018636f6d2e6d6963726f736f66743a72656e65772d6c6f636b"
    + PYTHON_TYPE
    + "005377c13202a10b6c6f636b2d746f6b656e73e022029800112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
)
PYTHON_RECEIVE = bytes.fromhex(
    "005373c02d0d987acc4783449a46bfa11114b0f7e2bd27404040a10e71312f246d616e6167656d656e744040404040404040005374c16706"
    + PYTHON_HEAD
    + "a028636f6d2e6d6963726f736f66743a726563656976652d62792d73657175656e63652d6e756d626572"
    + PYTHON_TYPE
    + "005377c13704a11073657175656e63652d6e756d62657273e00a01810000000000000005a11472656365697665722d736574746c652d"
    "6d6f64655201"
)


def request(operation: object, body: object = None, **properties: object) -> Request:
    """A request that went over the wire: its body has the types that decoding gives."""
    decoded = decode_exactly(encode({"operation": operation, **properties}))
    return Request("id-1", "reply", decoded, decode_exactly(encode(body)))


def arguments(operation: str, body: object) -> management.Arguments:
    return management.parse(request("com.microsoft:" + operation, body)).arguments


def response(message: bytes) -> tuple[dict, dict]:
    """Application properties and body; the correlation id is checked."""
    found, at = {}, 0
    while at < len(message):
        section, at = decode(message, at)
        found[section.descriptor] = section.value
    assert found[0x73][5] == "id-1"
    assert type(found[0x74]["statusCode"]) is Int
    assert type(found[0x74]["statusDescription"]) is str
    assert isinstance(found[0x77], dict)
    return found[0x74], found[0x77]


# --- the envelope -----------------------------------------------------------------------------------------------------


def test_a_python_client_sends_its_operation_as_binary():
    call = management.parse(request_message.parse(PYTHON_RENEW))
    assert call.operation == "com.microsoft:renew-lock"
    assert call.arguments == RenewLocks((TOKEN, TOKEN))
    assert call.associated_link_name == "link-1"
    call = management.parse(request_message.parse(PYTHON_RECEIVE))
    assert call.arguments == ReceiveDeferred((5,), False, None)


@pytest.mark.parametrize("key", ["com.microsoft:server-timeout", "server-timeout"])
@pytest.mark.parametrize("value", [UInt(60_000), ULong(60_000), Long(60_000), Int(60_000)])
def test_the_server_timeout_is_any_integer_under_both_names(key, value):
    body = {"lock-tokens": [TOKEN]}
    call = management.parse(request("com.microsoft:renew-lock", body, **{key: value}))
    assert call.server_timeout_ms == 60_000


def test_the_envelopes_other_keys_are_optional():
    call = management.parse(request(Symbol("com.microsoft:Renew-Lock"), {Symbol("lock-tokens"): [TOKEN], "more": 1}))
    assert (call.server_timeout_ms, call.associated_link_name, call.tracking_id) == (None, None, None)
    assert call.arguments == RenewLocks((TOKEN,))


def test_a_timeout_that_has_passed_is_none_left():
    body = {"lock-tokens": [TOKEN]}
    call = management.parse(request("com.microsoft:renew-lock", body, **{"com.microsoft:server-timeout": Long(-200)}))
    assert call.server_timeout_ms == 0


@pytest.mark.parametrize(
    ("operation", "body", "expected"),
    [
        ("peeklock:purge", {}, management.Purge(tuple(management.MessageState))),
        ("peeklock:purge", None, management.Purge(tuple(management.MessageState))),
        ("peeklock:purge", {"states": "scheduled"}, management.Purge((management.MessageState.SCHEDULED,))),
        (
            "peeklock:purge",
            {"states": "deferred,active"},
            management.Purge((management.MessageState.DEFERRED, management.MessageState.ACTIVE)),
        ),
        ("peeklock:get-counts", {}, management.GetCounts()),
        ("peeklock:list-counts", {"count": 10}, management.ListCounts("", 10)),
        ("peeklock:list-counts", {"count": UInt(1), "after": Symbol("q")}, management.ListCounts("q", 1)),
    ],
)
def test_our_own_operations(operation, body, expected):
    assert management.parse(request(operation, body)).arguments == expected


def test_counts_are_longs():
    asked = Request("1", None, {}, None)
    for response in (
        management.encode_counts(asked, {"active": 3}),
        management.encode_counts_of_all(asked, {"q": {"active": 3}}),
        management.encode_purged(asked, 3),
    ):
        assert encode(Long(3)) in response


@pytest.mark.parametrize("operation", ["com.microsoft:renew-sessions", "READ", "", "renew-lock", "x" * 10_000])
def test_an_unknown_operation_is_not_implemented(operation):
    with pytest.raises(UnknownOperation) as error:
        management.parse(request(operation, {}))
    assert error.value.condition == conditions.NOT_IMPLEMENTED
    assert len(str(error.value)) < 200


# --- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [array(UUID, [TOKEN, OTHER]), [TOKEN, OTHER]])
def test_renew_lock(tokens):
    assert arguments("renew-lock", {"lock-tokens": tokens}) == RenewLocks((TOKEN, OTHER))


@pytest.mark.parametrize("kind", [Short, Int, Long, UInt, ULong])
def test_peek_message(kind):
    body = {"from-sequence-number": kind(7), "message-count": kind(3)}
    assert arguments("peek-message", body) == PeekMessages(7, 3, None, False)
    body |= {"session-id": "s", "omit-message-body": True}
    assert arguments("peek-message", body) == PeekMessages(7, 3, "s", True)


def test_peeking_from_below_the_first_number_is_peeking_from_the_first():
    body = {"from-sequence-number": Long(-(2**63)), "message-count": Int(1)}
    assert arguments("peek-message", body).from_sequence_number == 0


def test_schedule_message():
    items = [
        {"message-id": "m", "message": b"one", "session-id": "s", "partition-key": "p", "via-partition-key": "v"},
        {"message-id": ULong(2), "message": b"two", "session-id": None},
    ]
    assert arguments("schedule-message", {"messages": items}) == ScheduleMessages(
        (ScheduledMessage(b"one", "m", "s", "p", "v"), ScheduledMessage(b"two", 2, None, None, None))
    )


@pytest.mark.parametrize("numbers", [array(Long, [1, 2**40]), array(ULong, [1, 2**40]), [Int(1), Long(2**40)]])
def test_cancel_scheduled_message(numbers):
    assert arguments("cancel-scheduled-message", {"sequence-numbers": numbers}) == CancelScheduled((1, 2**40))


@pytest.mark.parametrize("kind", [UInt, UByte, Int])
def test_receive_by_sequence_number(kind):
    body = {"sequence-numbers": array(Long, [9]), "receiver-settle-mode": kind(1), "session-id": "s"}
    assert arguments("receive-by-sequence-number", body) == ReceiveDeferred((9,), False, "s")
    body["receiver-settle-mode"] = kind(0)
    assert arguments("receive-by-sequence-number", body).receive_and_delete is True


@pytest.mark.parametrize("active", [True, False, None])
def test_receive_by_sequence_number_of_active_messages(active):
    body = {"sequence-numbers": array(Long, [9]), "receiver-settle-mode": UInt(1), "peeklock:active": active}
    assert arguments("receive-by-sequence-number", body) == ReceiveDeferred((9,), False, None, active)
    for wrong in (1, "true", [True]):
        with pytest.raises(ArgumentError, match="'peeklock:active' is not a boolean"):
            arguments("receive-by-sequence-number", body | {"peeklock:active": wrong})


@pytest.mark.parametrize(
    ("status", "disposition"),
    [
        ("completed", Disposition.COMPLETED),
        ("abandoned", Disposition.ABANDONED),
        ("suspended", Disposition.DEAD_LETTERED),
        ("defered", Disposition.DEFERRED),
        ("deferred", Disposition.DEFERRED),
        ("Completed", Disposition.COMPLETED),
    ],
)
def test_update_disposition(status, disposition):
    body = {"disposition-status": status, "lock-tokens": array(UUID, [TOKEN])}
    assert arguments("update-disposition", body) == UpdateDisposition(disposition, (TOKEN,), None, None, {}, None)


def test_update_disposition_with_reason_and_properties_whose_types_are_kept():
    values = {
        "int": Int(1),
        "float": Float(0.5),
        "none": None,
        "uuid": TOKEN,
        Symbol("described"): Described(Symbol("d"), 1),
    }
    body = {
        "disposition-status": "suspended",
        "lock-tokens": [TOKEN],
        "deadletter-reason": "",
        "deadletter-description": "why",
        "properties-to-modify": values,
        "session-id": "s",
    }
    update = arguments("update-disposition", body)
    assert (update.dead_letter_reason, update.dead_letter_description, update.session_id) == (None, "why", "s")
    assert update.properties_to_modify == {
        "int": b"\x54\x01",
        "float": b"\x72\x3f\x00\x00\x00",
        "none": b"\x40",
        "uuid": b"\x98" + TOKEN.bytes,
        "described": b"\x00\xa3\x01d\x55\x01",
    }
    assert all(type(name) is str for name in update.properties_to_modify)


def test_batch_delete_messages():
    body = {"message-count": Int(500), "enqueued-time-utc": Timestamp(1_700_000_000_000)}
    assert arguments("batch-delete-messages", body) == DeleteMessages(500, 1_700_000_000_000, None)


@pytest.mark.parametrize(
    ("operation", "body", "field", "error"),
    [
        ("renew-lock", {}, "lock-tokens", ArgumentError),
        ("renew-lock", {"lock-tokens": []}, "lock-tokens", ArgumentError),
        ("renew-lock", {"lock-tokens": TOKEN}, "lock-tokens", ArgumentError),
        ("renew-lock", {"lock-tokens": ["text"]}, "lock-tokens", ArgumentError),
        ("renew-lock", ["lock-tokens"], "body", ArgumentError),
        ("renew-lock", None, "lock-tokens", ArgumentError),
        ("peek-message", {"message-count": Int(1)}, "from-sequence-number", ArgumentError),
        ("peek-message", {"from-sequence-number": Long(1)}, "message-count", ArgumentError),
        ("peek-message", {"from-sequence-number": "1", "message-count": Int(1)}, "from-sequence-number", ArgumentError),
        (
            "peek-message",
            {"from-sequence-number": True, "message-count": Int(1)},
            "from-sequence-number",
            ArgumentError,
        ),
        ("peek-message", {"from-sequence-number": 1, "message-count": Int(0)}, "message-count", ArgumentOutOfRange),
        ("peek-message", {"from-sequence-number": 1, "message-count": Int(-1)}, "message-count", ArgumentOutOfRange),
        ("peek-message", {"from-sequence-number": 1, "message-count": 1, "session-id": 1}, "session-id", ArgumentError),
        (
            "peek-message",
            {"from-sequence-number": 1, "message-count": 1, "omit-message-body": "yes"},
            "omit-message-body",
            ArgumentError,
        ),
        ("schedule-message", {"messages": []}, "messages", ArgumentError),
        ("schedule-message", {"messages": [b"bare"]}, "messages", ArgumentError),
        ("schedule-message", {"messages": [{"message-id": "m"}]}, "message", ArgumentError),
        ("schedule-message", {"messages": [{"message": b"", "partition-key": 1}]}, "partition-key", ArgumentError),
        ("cancel-scheduled-message", {"sequence-numbers": ["1"]}, "sequence-numbers", ArgumentError),
        ("cancel-scheduled-message", {"sequence-numbers": [True]}, "sequence-numbers", ArgumentError),
        ("cancel-scheduled-message", {"sequence-numbers": [-1]}, "sequence-numbers", ArgumentOutOfRange),
        ("receive-by-sequence-number", {"sequence-numbers": [1]}, "receiver-settle-mode", ArgumentError),
        (
            "receive-by-sequence-number",
            {"sequence-numbers": [1], "receiver-settle-mode": UInt(2)},
            "receiver-settle-mode",
            ArgumentOutOfRange,
        ),
        ("update-disposition", {"lock-tokens": [TOKEN]}, "disposition-status", ArgumentError),
        (
            "update-disposition",
            {"lock-tokens": [TOKEN], "disposition-status": "renewed"},
            "disposition-status",
            ArgumentError,
        ),
        ("update-disposition", {"disposition-status": "completed"}, "lock-tokens", ArgumentError),
        (
            "update-disposition",
            {"lock-tokens": [TOKEN], "disposition-status": "abandoned", "properties-to-modify": [1]},
            "properties-to-modify",
            ArgumentError,
        ),
        (
            "update-disposition",
            {"lock-tokens": [TOKEN], "disposition-status": "abandoned", "properties-to-modify": {1: 1}},
            "properties-to-modify",
            ArgumentError,
        ),
        (
            "update-disposition",
            {"lock-tokens": [TOKEN], "disposition-status": "abandoned", "properties-to-modify": {"a": [1]}},
            "properties-to-modify",
            ArgumentError,
        ),
        ("batch-delete-messages", {"message-count": Int(1)}, "enqueued-time-utc", ArgumentError),
        ("batch-delete-messages", {"enqueued-time-utc": Timestamp(1)}, "message-count", ArgumentError),
    ],
)
def test_a_missing_or_wrong_argument_is_named(operation, body, field, error):
    with pytest.raises(error, match=field) as raised:
        arguments(operation, body)
    assert management.STATUS[raised.value.condition] == 400


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.just(TOKEN),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "message-id", "session-id", "x"]) | st.integers(0, 3), inner, max_size=3
        )
        | st.lists(st.integers(0, 9), max_size=3).map(lambda items: array(Long, items))
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "lock-tokens",
        "from-sequence-number",
        "message-count",
        "session-id",
        "omit-message-body",
        "messages",
        "sequence-numbers",
        "receiver-settle-mode",
        "disposition-status",
        "deadletter-reason",
        "properties-to-modify",
        "enqueued-time-utc",
    ]
)
OPERATIONS = st.sampled_from(
    [
        "renew-lock",
        "peek-message",
        "schedule-message",
        "cancel-scheduled-message",
        "receive-by-sequence-number",
        "update-disposition",
        "batch-delete-messages",
        "other",
    ]
)


@settings(max_examples=examples(300))
@given(OPERATIONS, st.one_of(VALUES, st.dictionaries(KEYS, VALUES)))
def test_hostile_arguments_raise_typed_errors_only(operation, body):
    with suppress(management.ManagementError):
        management.parse(request("com.microsoft:" + operation, body))


@settings(max_examples=examples(200))
@given(st.binary(max_size=40), st.integers(0, len(PYTHON_RECEIVE)), st.integers(0, 3))
def test_hostile_bytes_raise_typed_errors_only(data, position, removed):
    hostile = PYTHON_RECEIVE[:position] + data + PYTHON_RECEIVE[position + removed :]
    with suppress(ProtocolError):
        management.parse(request_message.parse(hostile))


# --- responses --------------------------------------------------------------------------------------------------------

ASKED = Request("id-1", None, {}, None)


def test_success_has_exactly_200_and_a_map():
    properties, body = response(management.encode_success(ASKED))
    assert properties == {"statusCode": 200, "statusDescription": "OK"}
    assert body == {}


def test_numbers_and_times_are_arrays_of_their_type():
    _, body = response(management.encode_expirations(ASKED, [1, 2]))
    assert body == {"expirations": Array(Timestamp, (1, 2))}
    _, body = response(management.encode_sequence_numbers(ASKED, [1, 2**50]))
    assert body == {"sequence-numbers": Array(Long, (1, 2**50))}


def test_the_number_deleted_is_an_int_and_nothing_deleted_is_no_content():
    properties, body = response(management.encode_deleted(ASKED, 3))
    assert (properties["statusCode"], body) == (200, {"message-count": 3})
    assert type(body["message-count"]) is Int
    properties, body = response(management.encode_deleted(ASKED, 0))
    assert (properties["statusCode"], body) == (204, {})
    assert "errorCondition" not in properties


def test_a_failure_has_a_symbol_condition_and_still_a_map():
    message = management.encode_failure(ASKED, conditions.MESSAGE_LOCK_LOST, "gone")
    properties, body = response(message)
    assert properties == {
        "statusCode": 410,
        "statusDescription": "gone",
        "errorCondition": "com.microsoft:message-lock-lost",
    }
    assert type(properties["errorCondition"]) is Symbol
    assert body == {}


def test_nothing_there_may_have_a_condition():
    properties, _ = response(management.encode_no_content(ASKED, conditions.SESSION_NOT_FOUND))
    assert (properties["statusCode"], properties["errorCondition"]) == (204, "com.microsoft:session-not-found")


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        (conditions.ARGUMENT_ERROR, 400),
        (conditions.ENTITY_DISABLED, 400),
        (conditions.UNAUTHORIZED_ACCESS, 401),
        (conditions.RESOURCE_LIMIT_EXCEEDED, 403),
        (conditions.MESSAGE_NOT_FOUND, 404),
        (conditions.TIMEOUT, 408),
        (conditions.ENTITY_ALREADY_EXISTS, 409),
        (conditions.SESSION_LOCK_LOST, 410),
        (conditions.INTERNAL_ERROR, 500),
        (conditions.NOT_IMPLEMENTED, 501),
        (conditions.SERVER_BUSY, 503),
        (conditions.ILLEGAL_STATE, 500),
    ],
)
def test_each_condition_has_its_status(condition, status):
    assert response(management.encode_failure(ASKED, condition, "x"))[0]["statusCode"] == status


def test_peeked_messages_are_a_list_of_maps():
    properties, body = response(management.encode_peeked(ASKED, [b"one", b"two"]))
    assert (properties["statusCode"], body) == (200, {"messages": [{"message": b"one"}, {"message": b"two"}]})


def test_nothing_to_peek_is_no_content_without_a_condition():
    properties, body = response(management.encode_peeked(ASKED, []))
    assert (properties, body) == ({"statusCode": 204, "statusDescription": "No Content"}, {})


@pytest.mark.parametrize("limit", [400, 1000, 5000, 70_000, 100_000])
@pytest.mark.parametrize("size", [10, 200, 300, 60_000])
def test_peeking_returns_as_many_as_fit_the_answer_and_one_at_least(limit, size):
    messages = [bytes(size)] * 1000
    fitting = management.peeked_that_fit(ASKED, messages, limit)
    message = management.encode_peeked(ASKED, fitting)
    properties, body = response(message)
    assert (properties["statusCode"], len(body["messages"])) == (200, len(fitting))
    assert len(message) <= limit or len(fitting) == 1
    one_more = management.encode_peeked(ASKED, messages[: len(fitting) + 1])
    assert len(fitting) == len(messages) or len(one_more) > limit - 16


def test_a_first_message_that_is_too_large_for_an_answer_comes_alone():
    assert management.peeked_that_fit(ASKED, [bytes(1000), b""], 900) == [bytes(1000)]
    assert management.peeked_that_fit(ASKED, [], 0) == []


def test_deferred_messages_have_lock_tokens_unless_they_were_deleted():
    _, body = response(management.encode_deferred(ASKED, [(TOKEN, b"one"), (OTHER, b"two")]))
    assert body == {"messages": [{"lock-token": TOKEN, "message": b"one"}, {"lock-token": OTHER, "message": b"two"}]}
    _, body = response(management.encode_deferred(ASKED, [(None, b"one")]))
    assert body == {"messages": [{"message": b"one"}]}


def test_deferred_messages_that_do_not_fit_are_a_failure():
    properties, body = response(management.encode_deferred(ASKED, [(TOKEN, bytes(1000))], 500))
    assert (properties["statusCode"], properties["errorCondition"]) == (403, "amqp:link:message-size-exceeded")
    assert "limit of the link is 500 bytes" in properties["statusDescription"]
    assert body == {}
