"""Messages and requests that a sender may not send, and odd ones that it may, on a real broker."""

import random
import struct
from uuid import UUID

import pytest

from protocol.codec import Array, Described, Int, Long, Symbol, Timestamp, UInt, ULong, decode, encode
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    BATCH_FORMAT,
    DISPOSITION,
    FLOW,
    REJECTED,
    TRANSFER,
    RawPeer,
    batch,
    body_of,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node
from tests.patience import eventually

ARGUMENT = "com.microsoft:argument-error"
NOT_ALLOWED = "amqp:not-allowed"
DECODE = "amqp:decode-error"
TOO_LARGE = "amqp:link:message-size-exceeded"
LIMIT = 1 << 20


@pytest.fixture
def peer(broker):
    """A peer with a sender on handle 0."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_sender("orders")
        yield peer
        drain(broker, "orders")


def drain(broker, queue: str) -> list[bytes]:
    """Take all there is; the payloads."""
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_receiver(queue, settled=True)
        peer.flow(handle, 100_000, drain=True)
        payloads = []
        partial = b""
        while True:
            frame = peer.receive()
            if frame.code == TRANSFER:
                partial += frame.payload
                if not (len(frame.fields) > 5 and frame.fields[5]):
                    payloads.append(partial)
                    partial = b""
            elif frame.code == FLOW and len(frame.fields) > 4 and frame.fields[4] == handle:
                return payloads


def refusal(peer: RawPeer, payload: bytes, **options) -> tuple[str, str]:
    delivery_id = peer.transfer(payload, **options)
    answer = peer.expect(DISPOSITION)
    assert answer.fields[1] == delivery_id
    assert answer.fields[3] is True
    error = answer.fields[4].value[0]
    assert len(error.value) == 3  # Python reads all three
    return error_of(answer)


def accepted(peer: RawPeer, payload: bytes, **options) -> None:
    peer.transfer(payload, **options)
    assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)


def send_in_parts(peer: RawPeer, payload: bytes, handle: int = 0, part: int = 60_000, **options) -> int:
    for at in range(0, len(payload), part):
        more = at + part < len(payload)
        delivery_id = peer.transfer(payload[at : at + part], handle, more=more, first=at == 0, **options)
    return delivery_id


# --- size -------------------------------------------------------------------------------------------------------------


def test_a_message_above_the_limit_in_one_frame_is_refused_and_the_link_stays(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("small")
        condition, description = refusal(peer, message(bytes(1100)), handle=handle)
        assert condition == TOO_LARGE
        assert "size:1108 bytes) exceeds the limit (1024 bytes)" in description
        accepted(peer, message(bytes(1000)), handle=handle)
    assert len(drain(broker, "small")) == 1


def test_a_message_above_the_limit_in_many_frames_is_refused_and_the_link_stays(peer):
    send_in_parts(peer, message(bytes(3 * LIMIT)))
    condition, description = error_of(peer.expect(DISPOSITION))
    assert condition == TOO_LARGE
    assert f"({LIMIT} bytes)" in description
    accepted(peer, message(b"next"))


def test_a_message_of_exactly_the_limit_is_taken_and_comes_back_whole(broker, peer):
    payload = message(random.Random(1).randbytes(LIMIT - 8))
    assert len(payload) == LIMIT
    send_in_parts(peer, payload)
    assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)
    [received] = drain(broker, "orders")
    assert body_of(received) == body_of(payload)


def test_a_link_may_ask_for_a_smaller_limit_than_the_entitys(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("orders", max_message_bytes=100)
        assert refusal(peer, message(bytes(200)), handle=handle)[0] == TOO_LARGE


def test_an_aborted_transfer_leaves_nothing(broker, peer):
    peer.transfer(bytes(1000), more=True)
    fields = [UInt(0), None, None, None, False, False, None, None, None, True]
    peer.say(TRANSFER, *fields)
    accepted(peer, message(b"after"))
    assert [body_of(each) for each in drain(broker, "orders")] == [b"after"]


def test_an_aborted_oversized_transfer_leaves_nothing(peer):
    for at in range(20):
        peer.transfer(bytes(60_000), more=True, first=at == 0)
    peer.say(TRANSFER, UInt(0), None, None, None, False, False, None, None, None, True)
    accepted(peer, message(b"after"))


# --- headers, properties, ids -----------------------------------------------------------------------------------------

LONG = "x" * 129
TEXT = "y" * 33_000


@pytest.mark.parametrize(
    ("payload", "condition", "names"),
    [
        (message(application={"p": TEXT}), ARGUMENT, "32768"),
        (message(application={"p": TEXT.encode()}), ARGUMENT, "32768"),
        (message(application={f"p{n}": "z" * 20_000 for n in range(4)}), ARGUMENT, "65536"),
        (message(annotations={Symbol("a"): "z" * 70_000}), ARGUMENT, "65536"),
        (message(properties=[None, None, "z" * 70_000]), ARGUMENT, "65536"),
        (message(properties=[LONG]), ARGUMENT, "128"),
        (message(properties=[None] * 10 + [LONG]), ARGUMENT, "128"),
        (message(annotations={Symbol("x-opt-partition-key"): LONG}), ARGUMENT, "128"),
        (message(properties=[5.5]), ARGUMENT, "message-id"),
        (message(properties=[None] * 10 + [7]), ARGUMENT, "group-id"),
        (
            message(annotations={Symbol("x-opt-partition-key"): "a"}, properties=[None] * 10 + ["b"]),
            "amqp:not-allowed",
            "key",
        ),
        (message(annotations={Symbol("x-opt-scheduled-enqueue-time"): "soon"}), ARGUMENT, "x-opt-scheduled"),
        (message(application={"p": [1, 2]}), "", "p"),
        (message(application={"p": {"q": 1}}), "", "p"),
        (message(application=[1]), DECODE, ""),
        (message(annotations=[1]), DECODE, ""),
        (message(header=["durable"]), "", ""),
        (message(header=[True, 700]), "", ""),
    ],
)
def test_fields_too_large_or_of_a_wrong_type_are_refused_by_name(peer, payload, condition, names):
    if len(payload) > 60_000:
        send_in_parts(peer, payload)
        found, description = error_of(peer.expect(DISPOSITION))
    else:
        found, description = refusal(peer, payload)
    assert found in ((condition,) if condition else (ARGUMENT, DECODE))
    assert names in description
    accepted(peer, message(b"next"))


NESTED = b"\x40"
for _ in range(5000):
    NESTED = b"\xd0" + struct.pack(">II", len(NESTED) + 4, 1) + NESTED
TRUES = b"\xf0" + struct.pack(">II", 5, 0x7FFFFFFF) + b"\x41"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"nonsense",
        b"\x00\x53\x75",
        b"\x00\x53\x75\xa0\x05ab",
        b"\x00\x53\x75\xb0\xff\xff\xff\xff",
        b"\x00\x53\x75\x45",
        b"\x00\x53\x99\x45",
        b"\x00\x53\x73\x45",
        b"\x00\x53\x73\xc0\x00\x00\x00\x53\x75\xa0\x00",
        b"\x00\x53\x74\xd1\xff\xff\xff\xf0\x00\x00\x00\x02" + b"\x00\x53\x75\xa0\x00",
        b"\x00\x53\x74\xc1\x03\x02\x41\x41" + b"\x00\x53\x75\xa0\x00",
        b"\x00\x53\x72\xc1\x02\x01\x40" + b"\x00\x53\x75\xa0\x00",
        b"\x00\x53\x74" + TRUES + message(),
        b"\x00\x53\x74\xd1" + struct.pack(">II", len(TRUES) + 7, 2) + b"\xa1\x01p" + TRUES + message(),
        b"\x00\x53\x73\xd0" + struct.pack(">II", len(NESTED) + 4, 1) + NESTED + message(),
        b"\x00\x53\x72\xd1" + struct.pack(">II", len(NESTED) + 7, 2) + b"\xa3\x01a" + NESTED + message(),
        message(b"a") + message(b"b", properties=["twice"]),
        encode(Described(ULong(0x73), ["a"])) * 2 + message(b"x"),
        b"\x00" * 30_000,
    ],
    ids=lambda payload: payload[:12].hex() or "empty",
)
def test_nonsense_is_refused_or_kept_and_never_kills_a_receiver(broker, peer, payload):
    """Whatever was accepted comes out as it went in, before and after a message that follows."""
    peer.transfer(payload)
    answer = peer.expect(DISPOSITION).fields[4]
    if answer.descriptor == REJECTED:
        assert answer.value[0].value[0] in (DECODE, ARGUMENT)
    accepted(peer, message(b"next"))
    kept = drain(broker, "orders")
    assert len(kept) == (2 if answer.descriptor == ACCEPTED else 1)
    assert body_of(kept[-1]) == b"next"


def test_random_bytes_do_no_harm(broker, peer):
    rng = random.Random(20)
    good = message(b"body", properties=["id", None, "to"], application={"a": 1}, annotations={Symbol("b"): "c"})
    for number in range(300):
        payload = bytearray(good if number % 2 else rng.randbytes(rng.randrange(80)))
        for _ in range(rng.randrange(1, 4)):
            if payload:
                payload[rng.randrange(len(payload))] = rng.randrange(256)
        peer.transfer(bytes(payload))
    for _ in range(300):
        peer.expect(DISPOSITION)
        if peer.next_delivery_id == 300:
            break
    for stored in drain(broker, "orders"):
        at = 0
        while at < len(stored):  # any client can decode all of it
            section, at = decode(stored, at)
            assert 0x70 <= section.descriptor <= 0x78


EXTREMES = [-(1 << 63), -1, 0, 1, (1 << 63) - 1, 253402300800000]


@pytest.mark.parametrize("number", EXTREMES)
def test_times_at_the_ends_of_their_range_are_taken(broker, peer, number):
    """Scheduled, created and expiry times are any 64 bits."""
    times = [None] * 8 + [Timestamp(number), Timestamp(number)]
    accepted(peer, message(b"t", properties=times))
    accepted(peer, message(b"s", annotations={Symbol("x-opt-scheduled-enqueue-time"): Timestamp(number)}))
    node = Node(peer, "orders/$management")
    peeked = node.ask("com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(100)})
    assert peeked.status in (200, 204)
    numbers = [Long(n) for n in range(1, 2000)]
    node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": Array(Long, tuple(numbers))})


@pytest.mark.parametrize("ttl", [0, 1, 0xFFFFFFFF], ids=hex)
def test_times_to_live_at_the_ends_of_their_range_are_taken(broker, peer, ttl):
    accepted(peer, message(b"ttl", header=[True, None, UInt(ttl)]))
    kept = drain(broker, "orders")
    assert len(kept) == (1 if ttl == 0xFFFFFFFF else len(kept))


# --- presettled, batches ----------------------------------------------------------------------------------------------


def test_presettled_messages_are_stored_and_bad_ones_dropped_in_silence(broker, peer):
    for number in range(10):
        peer.transfer(message(f"{number}".encode()) if number % 2 else b"nonsense", settled=True)
    accepted(peer, message(b"last"))
    assert [body_of(each) for each in drain(broker, "orders")] == [b"1", b"3", b"5", b"7", b"9", b"last"]


def test_a_batch_is_stored_as_its_messages_in_order(broker, peer):
    accepted(peer, batch(*(message(f"{n}".encode()) for n in range(100))), message_format=BATCH_FORMAT)
    assert [body_of(each) for each in drain(broker, "orders")] == [f"{n}".encode() for n in range(100)]


@pytest.mark.parametrize(
    ("payload", "condition"),
    [
        (batch(message(b"good"), b"nonsense", message(b"good")), DECODE),
        (batch(message(b"good"), message(application={"p": TEXT})), ARGUMENT),
        (batch(message(b"good"), message(properties=[LONG])), ARGUMENT),
        (encode(Described(ULong(0x77), "a value")), DECODE),
        (batch(message(b"good"))[:-1], DECODE),
        (b"\x00" * 10, DECODE),
    ],
    ids=["nonsense within", "large property", "long id", "value", "cut", "zeros"],
)
def test_a_batch_with_anything_wrong_is_refused_whole(broker, peer, payload, condition):
    assert refusal(peer, payload, message_format=BATCH_FORMAT)[0] == condition
    assert drain(broker, "orders") == []


def test_a_batch_above_the_size_is_refused_whole(broker, peer):
    payload = batch(*(message(bytes(100_000)) for _ in range(12)))
    send_in_parts(peer, payload, message_format=BATCH_FORMAT)
    assert error_of(peer.expect(DISPOSITION))[0] == TOO_LARGE
    assert drain(broker, "orders") == []


def test_a_batch_of_very_many_messages_is_refused_whole(broker, peer):
    send_in_parts(peer, batch(message()) * 20_000, message_format=BATCH_FORMAT)
    assert error_of(peer.expect(DISPOSITION))[0] == ARGUMENT
    assert drain(broker, "orders") == []


def expect_accepted(peer: RawPeer, count: int) -> None:
    """So many deliveries are accepted: one disposition may speak for several."""
    settled = 0
    while settled < count:
        answer = peer.expect(DISPOSITION)
        first, last = answer.fields[1], answer.fields[2]
        assert answer.fields[4] == outcome(ACCEPTED)
        settled += (first if last is None else last) - first + 1
    assert settled == count


def test_batches_in_several_frames_on_two_links_do_not_mix(broker, peer):
    other = peer.attach_sender("invoices")
    first = batch(*(message(bytes(10_000)) for _ in range(10)))
    second = message(bytes(50_000))
    peer.say(TRANSFER, UInt(0), UInt(0), b"t", UInt(BATCH_FORMAT), False, True, payload=first[:60_000])
    peer.say(TRANSFER, UInt(other), UInt(1), b"t", UInt(0), False, True, payload=second[:20_000])
    peer.say(TRANSFER, UInt(0), None, None, None, False, False, payload=first[60_000:])
    peer.say(TRANSFER, UInt(other), None, None, None, False, False, payload=second[20_000:])
    expect_accepted(peer, 2)
    assert (len(drain(broker, "orders")), len(drain(broker, "invoices"))) == (10, 1)


def test_a_sender_that_ignores_its_credit_is_served_all_the_same(broker):
    """As the Python SDK does (amqp.md 4.1)."""
    count = 8000
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("orders")
        frames: list[bytes] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer, "send", frames.append)
            for _ in range(count):
                peer.transfer(message(b"greedy"), handle)
        peer.send(b"".join(frames))
        expect_accepted(peer, count)
    assert len(drain(broker, "orders")) == count


def test_a_session_queue_refuses_messages_without_a_session(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("sessions")
        condition, description = refusal(peer, message(b"none"), handle=handle)
        assert condition == "amqp:not-allowed"
        assert "session id" in description
        mixed = batch(message(b"with", properties=[None] * 10 + ["s"]), message(b"without"))
        assert refusal(peer, mixed, handle=handle, message_format=BATCH_FORMAT)[0] == "amqp:not-allowed"
        node = Node(peer, "sessions/$management")
        response = node.ask("com.microsoft:schedule-message", {"messages": [{"message": message(b"none")}]})
        assert (response.status, response.condition) == (400, "amqp:not-allowed")


# --- requests ---------------------------------------------------------------------------------------------------------

PEEK = "com.microsoft:peek-message"
RENEW = "com.microsoft:renew-lock"
DEFERRED = "com.microsoft:receive-by-sequence-number"
CANCEL = "com.microsoft:cancel-scheduled-message"
SCHEDULE = "com.microsoft:schedule-message"
SETTLE = "com.microsoft:update-disposition"
DELETE = "com.microsoft:batch-delete-messages"
NOBODYS = Array(UUID, (UUID(int=7),))


@pytest.mark.parametrize(
    ("operation", "body", "status"),
    [
        (None, {}, 400),
        ("", {}, 501),
        ("com.microsoft:nothing", {}, 501),
        ("x" * 10_000, {}, 501),
        (PEEK, None, 400),
        (PEEK, "text", 400),
        (PEEK, {}, 400),
        (PEEK, {"from-sequence-number": "1", "message-count": Int(1)}, 400),
        (PEEK, {"from-sequence-number": Long(0), "message-count": Int(0)}, 400),
        (PEEK, {"from-sequence-number": Long(0), "message-count": Int(-5)}, 400),
        (PEEK, {"from-sequence-number": Long(-(1 << 63)), "message-count": Int(0x7FFFFFFF)}, 204),
        (PEEK, {"from-sequence-number": Long((1 << 63) - 1), "message-count": Int(1)}, 204),
        (PEEK, {"from-sequence-number": ULong((1 << 64) - 1), "message-count": ULong((1 << 64) - 1)}, 400),
        (RENEW, {"lock-tokens": []}, 400),
        (RENEW, {"lock-tokens": ["text"]}, 400),
        (RENEW, {"lock-tokens": NOBODYS}, 410),
        (RENEW, {"lock-tokens": Array(UUID, (UUID(int=0), UUID(int=(1 << 128) - 1)))}, 410),
        (DEFERRED, {"sequence-numbers": Array(Long, (Long(99),)), "receiver-settle-mode": UInt(1)}, 404),
        (DEFERRED, {"sequence-numbers": Array(Long, (Long(-1),)), "receiver-settle-mode": UInt(1)}, 400),
        (DEFERRED, {"sequence-numbers": Array(ULong, (ULong((1 << 64) - 1),)), "receiver-settle-mode": UInt(1)}, 400),
        (DEFERRED, {"sequence-numbers": Array(Long, (Long(1),)), "receiver-settle-mode": UInt(9)}, 400),
        (CANCEL, {"sequence-numbers": Array(Long, (Long((1 << 63) - 1),))}, 404),
        (SETTLE, {"disposition-status": "completed", "lock-tokens": NOBODYS}, 410),
        (SETTLE, {"disposition-status": "eaten", "lock-tokens": NOBODYS}, 400),
        (SETTLE, {"disposition-status": "defered", "lock-tokens": NOBODYS, "properties-to-modify": [1]}, 400),
        (DELETE, {"message-count": Int(0), "enqueued-time-utc": Timestamp(0)}, 400),
        (DELETE, {"message-count": Int(1), "enqueued-time-utc": Timestamp(-(1 << 63))}, 204),
        (DELETE, {"message-count": ULong((1 << 64) - 1), "enqueued-time-utc": Timestamp((1 << 63) - 1)}, 204),
        (SCHEDULE, {"messages": []}, 400),
        (SCHEDULE, {"messages": [{"message": b"nonsense"}]}, 400),
        (SCHEDULE, {"messages": [{"message": message(b"good")}, {"message": b"\x00"}]}, 400),
        (SCHEDULE, {"messages": [{"message": message(properties=[LONG])}]}, 400),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_request_that_cannot_be_done_is_answered_with_its_status(broker, operation, body, status):
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, "send-disabled/$management" if operation == PEEK else "invoices/$management")
        response = node.ask(operation, body)
        assert response.status == status, response
        if status >= 400:
            assert response.condition.startswith(("amqp:", "com.microsoft:"))
        assert node.ask(RENEW, {"lock-tokens": NOBODYS}).status == 410


def test_a_message_that_is_scheduled_above_the_queues_size_is_refused(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, "small/$management")
        response = node.ask(SCHEDULE, {"messages": [{"message": message(bytes(2000))}]})
        assert (response.status, response.condition) == (403, TOO_LARGE)


def test_more_lock_tokens_than_a_value_may_hold_are_refused(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, "invoices/$management")
        many = encode({"lock-tokens": Array(UUID, tuple(UUID(int=n) for n in range(70_000)))})
        request = encode(Described(ULong(0x74), {"operation": RENEW})) + b"\x00\x53\x77" + many
        send_in_parts(peer, request, node.sender)
        assert error_of(peer.expect(DISPOSITION))[0] in (ARGUMENT, DECODE, TOO_LARGE)
        assert node.ask(RENEW, {"lock-tokens": NOBODYS}).status == 410


def test_requests_whose_responses_find_no_credit_do_not_pile_up(broker):
    def requests() -> float:
        return metrics(broker).get(("peeklock_incoming_requests_total", "invoices"), 0)

    before = requests()
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, "invoices/$management", credit=0)
        for _ in range(3000):
            node.say(RENEW, {"lock-tokens": NOBODYS})
        eventually(lambda: requests() == before + 3000, "all are done")
        peer.nothing_more(TRANSFER)
        peer.flow(node.receiver, 5000)
        for _ in range(1000):
            assert node.response().status == 410
        peer.nothing_more(TRANSFER)


def test_oversized_requests_that_say_nothing_of_themselves_are_refused_on_their_delivery(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        for address, size in (("$cbs", 200_000), ("invoices/$management", 3 << 20)):
            handle = peer.attach_sender(address)
            send_in_parts(peer, bytes(size), handle)
            assert error_of(peer.expect(DISPOSITION))[0] == TOO_LARGE


@pytest.mark.parametrize("number", [253402300800000, (1 << 62), (1 << 63) - 1])
def test_a_message_scheduled_for_the_end_of_time_stops_nothing(start_broker, number):
    """When its time is the next that a worker waits for."""
    with start_broker('[[queues]]\nname = "witness"\n') as broker, RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_sender("witness")
        accepted(peer, message(b"far", annotations={Symbol("x-opt-scheduled-enqueue-time"): Timestamp(number)}))
        peer.nothing_more(TRANSFER, 0.6)  # until nothing sooner is waited for
