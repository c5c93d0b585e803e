from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import Described, Symbol, ULong, encode
from protocol.engine.sasl import (
    SASL_HEADER,
    Identity,
    IdentityKind,
    SaslClient,
    SaslError,
    SaslRefused,
    SaslServer,
    plain_response,
)
from protocol.errors import ProtocolError
from protocol.symbols import AMQP_HEADER
from tests.examples import examples

ANONYMOUS = Identity(IdentityKind.ANONYMOUS)
ROOT = Identity(IdentityKind.KEY, "root", frozenset({"Send", "Listen"}))

# sasl-mechanisms with MSSBCBS, PLAIN, ANONYMOUS, EXTERNAL; the outcomes ok and auth.
MECHANISMS = (
    bytes.fromhex("0000003f 02010000 005340 c0 32 01 e0 2f 04 b3")
    + b"\0\0\0\x07MSSBCBS\0\0\0\x05PLAIN\0\0\0\x09ANONYMOUS\0\0\0\x08EXTERNAL"
)
OK = bytes.fromhex("00000011 02010000 005344 c0 04 02 5000 40")
REFUSED = bytes.fromhex("00000011 02010000 005344 c0 04 02 5001 40")


def verify_plain(name: str, key: str) -> Identity | None:
    return ROOT if (name, key) == ("root", "s3cret") else None


def init(mechanism: str, response: bytes | None = b"", descriptor: object = 0x41) -> bytes:
    body = encode(Described(descriptor, [Symbol(mechanism), response, "host"]))
    return (len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body


def server(**arguments: Any) -> SaslServer:
    return SaslServer(verify_plain, **arguments)


def test_the_headers_are_byte_exact():
    assert bytes.fromhex("414d515003010000") == SASL_HEADER
    assert bytes.fromhex("414d515000010000") == AMQP_HEADER


def test_a_client_is_greeted_and_let_in_byte_by_byte():
    sasl = server()
    stream = SASL_HEADER + init("ANONYMOUS")
    written = b"".join(sasl.feed(stream[at : at + 1]) for at in range(len(stream)))
    assert written == SASL_HEADER + MECHANISMS + OK
    assert sasl.identity == ANONYMOUS
    assert sasl.rest == b""


@pytest.mark.parametrize(
    ("mechanism", "response", "identity"),
    [
        ("ANONYMOUS", b"", ANONYMOUS),
        ("ANONYMOUS", None, ANONYMOUS),
        ("ANONYMOUS", b"trace", ANONYMOUS),
        ("MSSBCBS", b"", ANONYMOUS),
        ("PLAIN", b"\0root\0s3cret", ROOT),
        ("PLAIN", b"root\0root\0s3cret", ROOT),
    ],
)
def test_bytes_pipelined_behind_the_layer_are_left_over(mechanism, response, identity):
    sasl = server()
    behind = AMQP_HEADER + b"open and begin"
    assert sasl.feed(SASL_HEADER + init(mechanism, response) + behind) == SASL_HEADER + MECHANISMS + OK
    assert (sasl.finished, sasl.identity, sasl.rest) == (True, identity, behind)


def test_a_client_without_sasl_is_anonymous_and_its_header_is_left_over():
    sasl = server()
    assert sasl.feed(AMQP_HEADER[:5]) == b""
    assert not sasl.finished
    assert sasl.feed(AMQP_HEADER[5:] + b"open") == b""
    assert (sasl.finished, sasl.identity, sasl.rest) == (True, ANONYMOUS, AMQP_HEADER + b"open")


@pytest.mark.parametrize(
    "header",
    [b"AMQP\x02\x01\x00\x00", b"AMQP\x00\x00\x09\x01", b"AMQP\x03\x01\x00\x01", b"GET / HTTP/1.1", b"\x16\x03"],
)
def test_an_unknown_header_is_answered_with_the_supported_one(header):
    sasl = server()
    assert sasl.feed(header) == SASL_HEADER
    assert (sasl.finished, sasl.identity, sasl.rest) == (True, None, b"")


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [
        ("PLAIN", b"\0root\0wrong"),
        ("PLAIN", b"\0nobody\0s3cret"),
        ("PLAIN", b"other\0root\0s3cret"),
        ("PLAIN", b"\0root\0s3cret\0"),
        ("PLAIN", b"root"),
        ("PLAIN", b"\0\xff\0s3cret"),
        ("PLAIN", b""),
        ("PLAIN", None),
        ("EXTERNAL", b""),
        ("EXTERNAL", b"someone"),
        ("SCRAM-SHA-256", b""),
        ("", b""),
    ],
)
def test_wrong_credentials_are_refused_with_outcome_1_and_nothing_is_left_over(mechanism, response):
    sasl = server()
    assert sasl.feed(SASL_HEADER + init(mechanism, response) + AMQP_HEADER) == SASL_HEADER + MECHANISMS + REFUSED
    assert (sasl.finished, sasl.identity, sasl.rest) == (True, None, b"")


def test_external_is_the_subject_that_tls_verified_and_not_the_clients_claim():
    sasl = server(external="CN=client")
    sasl.feed(SASL_HEADER + init("EXTERNAL", b"admin"))
    assert sasl.identity == Identity(IdentityKind.EXTERNAL, "CN=client")


def test_a_mechanism_that_is_not_offered_is_refused():
    sasl = server(mechanisms=("PLAIN",))
    sasl.feed(SASL_HEADER + init("ANONYMOUS"))
    assert (sasl.finished, sasl.identity) == (True, None)


def test_performatives_are_known_by_name_too():
    sasl = server()
    sasl.feed(SASL_HEADER + init("ANONYMOUS", descriptor=Symbol("amqp:sasl-init:list")))
    assert sasl.identity == ANONYMOUS


def frame(body: bytes, size: int | None = None, offset: int = 2, kind: int = 1) -> bytes:
    return (len(body) + 8 if size is None else size).to_bytes(4, "big") + bytes((offset, kind, 0, 0)) + body


@pytest.mark.parametrize(
    "bad",
    [
        frame(b"", size=7),
        frame(b"", size=4097),
        frame(b"", size=0xFFFFFFFF),
        frame(b""),
        frame(b"\x40"),
        frame(b"", offset=1),
        frame(b"", offset=3),
        frame(encode(Described(0x41, [Symbol("ANONYMOUS")])), kind=0),
        frame(encode(Described(0x44, [Symbol("ANONYMOUS")]))),
        frame(encode(Described(0x41, []))),
        frame(encode(Described(0x41, {}))),
        frame(encode(Described(0x41, [ULong(1)]))),
        frame(encode(Described(0x41, [Symbol("PLAIN"), "text"]))),
        frame(encode(Described([], [Symbol("PLAIN")]))),
        frame(encode(Described(0x41, [Symbol("ANONYMOUS")])) + b"\x40"),
        frame(b"\x00\x53\x41\xc0\xff"),
    ],
    ids=bytes.hex,
)
def test_malformed_frames_raise_typed_errors(bad):
    with pytest.raises(ProtocolError):
        server().feed(SASL_HEADER + bad)


def test_an_extended_frame_header_is_skipped():
    sasl = server()
    sasl.feed(SASL_HEADER + frame(b"more" + encode(Described(0x41, [Symbol("ANONYMOUS")])), offset=3))
    assert sasl.identity == ANONYMOUS


@settings(max_examples=examples(200))
@given(st.binary(max_size=80), st.integers(0, 255), st.booleans())
def test_hostile_bytes_raise_typed_errors_only(data, position, in_frame):
    stream = SASL_HEADER + (frame(data) if in_frame else data) + init("PLAIN", b"\0root\0wrong")
    stream = stream[:position] + data + stream[position:]
    sasl = server()
    try:
        sasl.feed(stream)
    except ProtocolError:
        assert sasl.identity is None


def exchange(client: SaslClient, sasl: SaslServer) -> None:
    to_server = client.start()
    for _ in range(4):
        to_client = sasl.feed(to_server) if to_server and not sasl.finished else b""
        if client.finished or not to_client:
            return
        to_server = client.feed(to_client)


@pytest.mark.parametrize(
    ("client", "identity"),
    [
        (SaslClient("ANONYMOUS"), ANONYMOUS),
        (SaslClient("MSSBCBS", hostname="host"), ANONYMOUS),
        (SaslClient("PLAIN", plain_response("root", "s3cret")), ROOT),
    ],
)
def test_our_client_gets_into_our_server(client, identity):
    sasl = server()
    exchange(client, sasl)
    assert client.finished
    assert sasl.identity == identity


def test_our_client_learns_that_it_is_refused():
    with pytest.raises(SaslRefused, match="refuses the credentials") as refused:
        exchange(SaslClient("PLAIN", plain_response("root", "wrong")), server())
    assert refused.value.code == 1


def test_our_client_sends_no_credentials_to_a_server_that_does_not_take_them():
    with pytest.raises(SaslRefused, match="does not offer PLAIN but ANONYMOUS") as refused:
        exchange(SaslClient("PLAIN", plain_response("root", "s3cret")), server(mechanisms=("ANONYMOUS",)))
    assert refused.value.code is None


def test_the_client_reads_byte_by_byte_and_leaves_over_what_is_behind():
    client = SaslClient("ANONYMOUS")
    stream = SASL_HEADER + MECHANISMS + OK
    written = b"".join(client.feed(stream[at : at + 1]) for at in range(len(stream) - 1))
    assert client.feed(stream[-1:] + AMQP_HEADER) == b""
    init_frame = bytes.fromhex("0000001c 02010000 005341 c0 0f 03 a309") + b"ANONYMOUS" + bytes.fromhex("a000 40")
    assert written == init_frame
    assert (client.finished, client.rest) == (True, AMQP_HEADER)


def test_one_mechanism_may_stand_without_an_array():
    client = SaslClient("ANONYMOUS")
    assert client.feed(SASL_HEADER + frame(encode(Described(0x40, [Symbol("ANONYMOUS")])))) != b""


@pytest.mark.parametrize(
    "answer",
    [
        AMQP_HEADER,
        b"HTTP/1.1",
        SASL_HEADER + frame(encode(Described(0x40, []))),
        SASL_HEADER + frame(encode(Described(0x44, [ULong(0)]))),
        SASL_HEADER + MECHANISMS + frame(encode(Described(0x44, []))),
        SASL_HEADER + MECHANISMS + frame(encode(Described(0x42, [b"challenge"]))),
    ],
)
def test_a_server_that_says_something_else_is_an_error(answer):
    with pytest.raises(SaslError):
        SaslClient("ANONYMOUS").feed(answer)


@settings(max_examples=examples(100))
@given(st.binary(max_size=60), st.sampled_from([b"", SASL_HEADER, SASL_HEADER + MECHANISMS]))
def test_a_hostile_server_raises_typed_errors_only(data, before):
    client = SaslClient("ANONYMOUS")
    try:
        client.feed(before + data)
    except ProtocolError:
        assert not client.finished
