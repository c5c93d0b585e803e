"""Whatever a request is, its answer is one that is documented, and the broker goes on.

Requests are made of the parts of real ones, with hostile values in any of them.
"""

import gzip
import json
import re
import socket
import time
from contextlib import closing, suppress
from typing import NamedTuple
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.gateway.web.endpoint import BODY_SECONDS
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, Broker
from tests.examples import examples
from tests.operations.test_management_api import ENTRY
from tests.patience import PATIENCE_S, eventually

DOCUMENTED = {200, 201, 202, 204, 400, 401, 403, 404, 405, 408, 409, 410, 411, 412, 413, 414, 415, 417, 431, 501, 503}
OWN = "whole"  # a queue that no drawn request names, because these may delete it
WAITS = "/messages/head"  # of a request that may wait for a message
HOSTILE_TEXTS = [
    *(
        "",
        " ",
        "-1",
        "0",
        "1e308",
        "NaN",
        "Infinity",
        "true",
        "null",
        "9" * 30,
        "9" * 400,
        str(2**63 - 1),
        str(-(2**63)),
    ),
    *("P99999999999D", "PT0S", "-PT1S", "P1Y", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.9999999Z", "\x7f", "%00"),
    *("../../etc/passwd", "' OR 1=1 --", "a" * 3000, "ü" * 100, "\U0001f600", "$Default", "$deadletterqueue", "{}"),
]
HOSTILE_VALUES: list[object] = [
    *HOSTILE_TEXTS,
    None,
    True,
    [],
    {},
    -1,
    1.5,
    2**63,
    -(2**70),
    1e308,
    [[[[1]]]],
    {"a": {}},
]

tokens = st.one_of(
    st.just("valid"),
    st.sampled_from(
        ["", "Bearer x", "SharedAccessSignature", "SharedAccessSignature sr=x&sig=%ff&se=-1&skn=", "expired"]
    ),
)
segments = st.one_of(
    st.sampled_from(["orders", "news", "Subscriptions", "mine", "Rules", "$Default", "messages", "head", "$Resources"]),
    st.sampled_from(["queues", "$namespaceinfo", "$deadletterqueue", "$servicebus", "websocket", "health", "made"]),
    st.sampled_from(["..", ".", "", "%2e%2e", "%2F", "%ff", "%ed%a0%80", "%", "%zz", "a" * 300, "%0d%0aX:y", "\t"]),
)
real_paths = st.sampled_from(
    [
        *("orders", "news", "news/Subscriptions/mine", "news/Subscriptions/mine/Rules/$Default", "$Resources/queues"),
        *("news/Subscriptions/mine/Rules", "news/Subscriptions/mine/Rules/made", "news/Subscriptions/mine/Rules/made"),
        *("orders/messages", "orders/messages/head", "news/messages", "news/Subscriptions/mine/messages/head", "made"),
        *(
            "orders/messages/1/11111111-1111-1111-1111-111111111111",
            "orders/$deadletterqueue/messages/head",
            "made/Rules",
        ),
    ]
)
paths = st.one_of(real_paths, st.lists(segments, max_size=6).map("/".join))
queries = st.dictionaries(
    st.sampled_from(["api-version", "timeout", "delay", "$skip", "$top", "enrich", "sessionid", "x"]),
    st.sampled_from(HOSTILE_TEXTS),
    max_size=3,
)
broker_properties = st.dictionaries(
    st.sampled_from(["MessageId", "TimeToLive", "SessionId", "PartitionKey", "ScheduledEnqueueTimeUtc", "Label", "x"]),
    st.sampled_from(HOSTILE_VALUES),
    max_size=3,
).map(json.dumps)
headers = st.dictionaries(
    st.sampled_from(["If-Match", "BrokerProperties", "Content-Type", "x", "X-MS-RETRY", "Expect", "Upgrade", "Accept"]),
    st.one_of(
        st.sampled_from(
            ["*", '"1"', "application/vnd.microsoft.servicebus.json", "websocket", "'text'", "100-continue"]
        ),
        broker_properties,
        st.sampled_from(HOSTILE_TEXTS),
    ),
    max_size=4,
)
elements = st.dictionaries(
    st.sampled_from(
        [
            *("LockDuration", "MaxSizeInMegabytes", "RequiresSession", "DefaultMessageTimeToLive", "MaxDeliveryCount"),
            *("Status", "ForwardTo", "UserMetadata", "AutoDeleteOnIdle", "EnablePartitioning", "AuthorizationRules"),
            *(
                "MaxMessageSizeInKilobytes",
                "DuplicateDetectionHistoryTimeWindow",
                "Filter",
                "Action",
                "Name",
                "Unknown",
            ),
        ]
    ),
    st.sampled_from([*(text.replace("&", "&amp;") for text in HOSTILE_TEXTS), "<x/>", "<![CDATA[<]]>", "&none;"]),
    max_size=5,
)
entries = st.builds(
    lambda kind, inside: ENTRY.format(f"{kind}Description", "".join(f"<{n}>{v}</{n}>" for n, v in inside.items())),
    st.sampled_from(["Queue", "Topic", "Subscription", "Rule", "Odd"]),
    elements,
)
values = st.builds(
    lambda kind, text: ENTRY.format("RuleDescription", FILTER.format(kind, text)),
    st.sampled_from(["string", "int", "long", "double", "boolean", "dateTime", "duration", "guid", "odd"]),
    st.sampled_from([escape(text) for text in HOSTILE_TEXTS]),
)
batches = st.lists(
    st.dictionaries(st.sampled_from(["Body", "BrokerProperties", "UserProperties"]), st.sampled_from(HOSTILE_VALUES)),
    max_size=3,
).map(json.dumps)
bodies = st.one_of(entries.map(str.encode), values.map(str.encode), batches.map(str.encode), st.binary(max_size=100))


FILTER = (
    '<Filter i:type="CorrelationFilter"><Properties><KeyValueOfstringanyType><Key>x</Key>'
    '<Value i:type="d6p1:{}" xmlns:d6p1="http://www.w3.org/2001/XMLSchema">{}</Value></KeyValueOfstringanyType>'
    "</Properties></Filter>"
)


class Answer(NamedTuple):
    status: int
    body: bytes


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    names = "".join(f'[[queues]]\nname = "{name}"\n' for name in ("orders", OWN))
    config = f'{names}[[topics]]\nname = "news"\n[[topics.subscriptions]]\nname = "mine"\n'
    with Broker(tmp_path_factory.mktemp("broker"), config) as running:
        yield running
        assert "Traceback" not in running.log_file.read_text(), running.log()


def token(kind: str) -> str:
    seconds = {"valid": 60, "expired": -60}.get(kind)
    return kind if seconds is None else generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + seconds)


def asked(broker: Broker, request: bytes) -> bytes:
    with closing(socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def parsed(answer: bytes) -> Answer:
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    version, status, _ = head.split(b"\r\n")[0].split(b" ", 2)
    assert version in (b"HTTP/1.1", b"HTTP/1.0")  # the latter to what cannot be read
    return Answer(int(status), body)


@settings(max_examples=examples(400))
@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW"]),
    path=paths,
    query=queries,
    more=headers,
    kind=tokens,
    body=bodies,
)
@example("POST", "orders/messages", {}, {"BrokerProperties": '{"TimeToLive": 1e308}'}, "valid", b"x")
@example("PUT", "orders", {}, {"Expect": "100-continue"}, "valid", b"[]")
@example("PUT", "made", {}, {}, "valid", ENTRY.format("QueueDescription", "<LockDuration>P9D</LockDuration>").encode())
def test_every_request_has_an_answer_that_is_documented(broker, method, path, query, more, kind, body):
    if WAITS in f"/{path}".lower():
        query = query | {"timeout": "0"}
    target = f"/{path}" + ("?" + "&".join(f"{quote(n)}={quote(v)}" for n, v in query.items()) if query else "")
    given_headers = {"Host": "localhost", "Connection": "close", "Authorization": token(kind), **more}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given_headers.items() if value)]
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("utf-8", "surrogatepass") + body
    answer = parsed(asked(broker, request))
    assert answer.status in DOCUMENTED, answer
    if answer.status >= 400 and method != "HEAD" and answer.body:
        assert answer.body.startswith((b"<Error><Code>", b"400, message:", b"{")), answer
    assert b"Traceback" not in answer.body
    assert b'File "' not in answer.body
    health = parsed(asked(broker, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    assert health.status == 200


def test_a_delay_is_refused_where_it_would_have_no_effect(broker):
    lock = f"{OWN}/messages/1/11111111-1111-1111-1111-111111111111"
    head = f"Host: localhost\r\nConnection: close\r\nAuthorization: {token('valid')}\r\n\r\n"
    refused = parsed(asked(broker, f"PUT /{lock}?delay=5 HTTP/1.1\r\n{head}".encode()))
    assert refused.status == 400
    assert b"delivery.abandon_delays" in refused.body


@settings(max_examples=examples(100))
@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=5))
@example(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", [])
@example(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", [])
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [])
def test_bytes_that_are_no_request_end_their_connection_only(broker, content, pieces):
    connection = socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)
    with closing(connection), suppress(OSError):  # it may be closed before all is sent
        for size in pieces:
            connection.sendall(content[:size])
            content = content[size:]
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    health = parsed(asked(broker, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    assert health.status == 200


CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "rest", "statuses"),
    [
        # A trailer is no header of the next request.
        ("POST", f"{CHUNKED}1\r\na\r\n0\r\nX: 1\r\nAuthorization: none\r\n\r\n", [201]),
        ("POST", f"{CHUNKED}3;x=y\r\nabc\r\n0\r\n\r\n", [201]),
        ("POST", "Content-Length: 1\r\n\r\na", [201, 200]),
        ("GET", "Content-Length: 18\r\n\r\nGET / HTTP/1.1\r\n\r\n", [404, 200]),
        ("POST", "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", [400]),
        ("POST", "Transfer-Encoding: identity\r\n\r\n", [400]),
        ("POST", "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [400]),
        ("POST", "Content-Length: 1\r\nContent-Length: 1\r\n\r\na", [400]),
        ("POST", f"{CHUNKED}-1\r\n\r\n", [400]),
        ("POST", f"{CHUNKED}1\na\n0\n\n", [400]),
        ("POST", "X: a\r\n b\r\nContent-Length: 0\r\n\r\n", [400]),
        ("POST", "X: a\nContent-Length: 0\r\n\r\n", [400]),
        ("POST", f"X: {'a' * 70_000}\r\nContent-Length: 0\r\n\r\n", [431]),
        ("POST", "".join(f"H{n}: x\r\n" for n in range(200)) + "\r\n", [431]),
        ("POST", f"Content-Length: {1 << 24}\r\n\r\n", [403]),
        ("POST", CHUNKED + f"FFFF\r\n{'x' * 0xFFFF}\r\n" * 20 + "0\r\n\r\n", [403]),
        ("PATCH", "Content-Length: 1\r\n\r\na", [405, 200]),
        ("POST", "Expect: 100-continue\r\nContent-Length: 1\r\n\r\na", [100, 201, 200]),
        ("GET", "Expect: 100-continue\r\n\r\n", [404, 200]),
        ("HEAD", "\r\n", [404, 200]),
    ],
)
def test_the_end_of_a_request_is_no_part_of_another(broker, method, rest, statuses):
    """What follows on the same connection is answered as if it came alone, or the connection is closed."""
    head = f"Host: localhost\r\nAuthorization: {token('valid')}\r\n"
    path = f"{OWN}/messages" if method in ("POST", "PATCH") else "none"
    after = f"GET /$namespaceinfo HTTP/1.1\r\n{head}Connection: close\r\n\r\n"
    answer = asked(broker, f"{method} /{path} HTTP/1.1\r\n{head}{rest}{after}".encode())
    assert [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)] == statuses, answer
    assert b"bytearray" not in answer
    assert b"aiohttp" not in answer


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_other_versions_are_not_spoken(broker, version):
    answer = asked(broker, f"GET /health HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert b"Only HTTP/1.1 and HTTP/1.0 are spoken here." in answer


@pytest.mark.parametrize(
    ("target", "why"),
    [("http://[/x", "The target of the request is no URL."), ("x", "no URL"), ("/a b", "The request cannot be read: ")],
)
def test_what_cannot_be_read_is_said(broker, target, why):
    answer = parsed(asked(broker, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
    assert answer.status == 400
    assert why.encode() in answer.body


def test_a_client_that_waits_for_100_continue_gets_it_once_it_may_send(broker):
    head = f"POST /{OWN}/messages HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n"
    with closing(socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)) as connection:
        connection.sendall(f"{head}Authorization: {token('valid')}\r\n\r\n".encode())
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"a")
        assert parsed(connection.recv(65536)).status == 201
    with closing(socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)) as connection:
        connection.sendall(f"{head}\r\n".encode())
        assert parsed(connection.recv(65536)).status == 401


def test_a_head_without_end_is_refused(broker):
    """Each header is short, and there are few."""
    with closing(socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        answer = b""
        with suppress(ConnectionError):
            for number in range(100):
                connection.sendall(b"X%d: %s\r\n" % (number, b"x" * 8000))
                time.sleep(0.001)  # so that they come one by one
            while piece := connection.recv(65536):
                answer += piece
        assert not answer or parsed(answer).status == 431  # it may be lost with what was sent after it


def test_bodies_are_what_was_sent(broker):
    """With any Content-Encoding: the broker never converts a body."""
    packed = gzip.compress(b"text")
    head = f"Host: localhost\r\nAuthorization: {token('valid')}\r\nConnection: close\r\n"
    coded = f"Content-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    assert parsed(asked(broker, f"PUT /coded HTTP/1.1\r\n{head}{coded}".encode() + packed)).status == 415
    receive = f"DELETE /{OWN}/messages/head?timeout=0 HTTP/1.1\r\n{head}\r\n".encode()
    while parsed(asked(broker, receive)).status == 200:
        pass
    assert parsed(asked(broker, f"POST /{OWN}/messages HTTP/1.1\r\n{head}{coded}".encode() + packed)).status == 201
    assert parsed(asked(broker, receive.replace(b"timeout=0", b"timeout=5"))).body == packed


def test_a_method_that_is_not_allowed_names_those_that_are(broker):
    answer = asked(broker, b"PATCH /$Resources/queues HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert parsed(answer).status == 405
    assert b"\r\nAllow: GET\r\n" in answer


def test_pipelined_requests_are_answered_in_their_order(broker):
    authorization = f"Authorization: {token('valid')}\r\n"
    paths = ["$namespaceinfo", "nothing/here", "$Resources/queues", "$namespaceinfo?api-version=2021-05", "none"]
    requests = [f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n{authorization}" for path in paths]
    whole = "\r\n".join(requests) + "Connection: close\r\n\r\n"
    statuses = [int(each[:3]) for each in asked(broker, whole.encode()).decode().split("HTTP/1.1 ")[1:]]
    assert statuses == [200, 404, 200, 200, 404]


def test_a_body_that_comes_slowly_holds_up_nobody_and_is_not_waited_for_without_end(tmp_path):
    with Broker(tmp_path, '[[queues]]\nname = "orders"\n') as broker:
        head = f"POST /orders/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token('valid')}\r\n"
        slow = [socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S) for _ in range(20)]
        started = time.monotonic()
        for connection in slow:
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\nhalf a mess".encode())
        quick = f"{head}Connection: close\r\nContent-Length: 1\r\n\r\nx".encode()
        assert parsed(asked(broker, quick)).status == 201
        for connection in slow:
            with connection:
                assert parsed(connection.recv(65536)).status == 408
        assert time.monotonic() - started < BODY_SECONDS + 10


def test_the_limit_of_connections_leaves_websockets_out_and_lets_new_ones_replace_those_that_wait(tmp_path):
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    upgrade = (
        f"GET /$servicebus/websocket HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: amqp\r\n\r\n"
    ).encode()
    with Broker(tmp_path, '[http]\nmax_connections = 3\n[[queues]]\nname = "orders"\n') as broker:

        def opened(request: bytes, status: int | None) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)
            connection.sendall(request)
            if status is not None:
                assert parsed(connection.recv(65536)).status == status
            return connection

        begun = (
            f"POST /orders/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token('valid')}\r\n"
            "Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
        ).encode()
        for _ in range(3):  # what has ended counts no more
            tunnels = [opened(upgrade, 101) for _ in range(5)]
            waiting = [opened(health, 200) for _ in range(5)]
            busy = [opened(begun, None) for _ in range(3)]
            for connection in busy:  # until their requests are read, they count as waiting
                assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
            refused = socket.create_connection(("127.0.0.1", broker.http_port), PATIENCE_S)
            with suppress(ConnectionError):
                refused.sendall(health)
                assert refused.recv(65536) == b""
            for connection in (*tunnels, *waiting, *busy, refused):
                connection.close()
            eventually(lambda: _serves(broker, health), "it takes connections again")


def _serves(broker: Broker, health: bytes) -> bool:
    with suppress(ConnectionError, ValueError):
        return parsed(asked(broker, health.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).status == 200
    return False
