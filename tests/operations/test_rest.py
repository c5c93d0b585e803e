"""Sending and receiving by plain HTTP requests, on a real broker."""

import json
import socket
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.client import HTTPConnection
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from broker.gateway.web.rest_messages import write_headers
from protocol.client.messages import Message
from protocol.codec import Described, Long, Symbol, Timestamp
from protocol.nodes.sas_tokens import generate
from protocol.symbols import TIMESPAN
from tests.brokers import KEY, KEY_NAME, Broker
from tests.end_to_end.health import metrics
from tests.patience import PATIENCE_S, eventually

CONFIG = """
[delivery]
abandon_delays = true
[[queues]]
name = "orders"
lock_duration_ms = 5000
authorization_rules = [
    {key_name = "sends", primary_key = "s", rights = ["Send"]},
    {key_name = "listens", primary_key = "l", rights = ["Listen"]},
]
[[queues]]
name = "deep/path/queue"
[[queues]]
name = "grouped"
requires_session = true
[[queues]]
name = "spread"
enable_partitioning = true
[[topics]]
name = "news"
authorization_rules = [{key_name = "of-news", primary_key = "n", rights = ["Manage"]}]
[[topics.subscriptions]]
name = "all"
[[queues]]
name = "news/subscriptions/all/eu"
[[queues]]
name = "tenant1.inbox"
[[security.authorization_rules]]
key_name = "app"
primary_key = "a"
rights = ["Manage"]
"""
BATCH = "application/vnd.microsoft.servicebus.json"


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), CONFIG) as running:
        yield running


class Answer:
    def __init__(self, answer):
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()
        text = self.headers["BrokerProperties"]
        self.properties = json.loads(text) if text else {}


@pytest.fixture
def call(broker):
    connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)

    def send(method, path, body=None, key=(KEY_NAME, KEY), **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers["Authorization"] = generate("http://localhost/", key[0], key[1], int(time.time()) + 60)
        connection.request(method, path, body, headers)
        return Answer(connection.getresponse())

    yield send
    connection.close()


@pytest.fixture
def empty(call):
    yield
    while call("DELETE", "/orders/messages/head?timeout=0").status == 200:
        pass


def test_a_message_is_sent_locked_and_completed(call, empty):
    properties = {"MessageId": "m1", "Label": "é", "CorrelationId": "c", "ReplyTo": "r", "To": "t", "TimeToLive": 60}
    sent = call(
        "POST",
        "/orders/messages",
        b"\0body",
        BrokerProperties=json.dumps(properties),
        Content_Type="a/b",
        Priority="High",
    )
    assert (sent.status, sent.body) == (201, b"")
    got = call("POST", "/orders/messages/head?timeout=5")
    assert (got.status, got.body, got.headers["Content-Type"]) == (201, b"\0body", "a/b")
    assert properties.items() <= got.properties.items()
    assert (got.properties["DeliveryCount"], got.properties["State"]) == (1, "Active")
    locked = parsedate_to_datetime(got.properties["LockedUntilUtc"])
    assert timedelta(seconds=2) < locked - datetime.now(UTC) <= timedelta(seconds=5)
    place = urlsplit(got.headers["Location"]).path
    assert place == f"/orders/messages/{got.properties['SequenceNumber']}/{got.properties['LockToken']}"
    assert call("DELETE", "/orders/messages/head?timeout=0").status == 204
    assert call("POST", place).status == 200
    assert call("DELETE", place).status == 200
    for method in ("DELETE", "PUT", "POST"):
        assert call(method, place).status == 404


def test_an_unlocked_message_comes_again(call, empty):
    call("POST", "/orders/messages", "again")
    got = call("POST", "/orders/messages/head?timeout=5")
    assert call("PUT", urlsplit(got.headers["Location"]).path).status == 200
    again = call("POST", "/orders/messages/head?timeout=5")
    assert (again.body, again.properties["DeliveryCount"]) == (b"again", 2)
    place = f"/Orders/messages/{again.properties.get('MessageId', 'x')}/{again.properties['LockToken']}"
    assert call("DELETE", place).status == 200


def test_a_lock_holds_until_its_end_and_no_longer(call, empty):
    call("POST", "/orders/messages", "one")
    first = call("POST", "/orders/messages/head?timeout=5")
    assert call("POST", "/orders/messages/head?timeout=2").status == 204
    again = call("POST", "/orders/messages/head?timeout=10")
    assert (again.status, again.properties["DeliveryCount"]) == (201, 2)
    assert call("DELETE", urlsplit(first.headers["Location"]).path).status == 404
    assert call("DELETE", urlsplit(again.headers["Location"]).path).status == 200


def test_custom_headers_are_properties_with_types(call, empty):
    given = {
        "Text": '"a b"',
        "Word": "High",
        "Whole": "-42",
        "Half": "0.5",
        "Yes": "true",
        "Big": "9" * 19,
        "Empty": '""',
    }
    given["Day"] = f'"{format_datetime(datetime(2044, 11, 6, tzinfo=UTC), usegmt=True)}"'
    given["First"] = '"Mon, 01 Jan 0001 00:00:00 GMT"'
    tracing = {"traceparent": "00-1-2-01", "Baggage": "a=b", "Correlation-Context": "a=b"}
    call("POST", "/orders/messages", "x", **given, **tracing, X_Ms_Foo="1")
    got = call("DELETE", "/orders/messages/head?timeout=5")
    shown = given | {"Word": '"High"', "Big": str(float("9" * 19))}
    assert {name: got.headers[name] for name in given} == shown
    assert not tracing.keys() & got.headers.keys()
    assert "X-Ms-Foo" not in got.headers
    assert "LockToken" not in got.properties
    assert got.status == 200


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Described(TIMESPAN, Long(905_000_000)), "90.5"),
        (Described(TIMESPAN, Long(-(2**63))), "-922337203685.4775808"),
        (Described(TIMESPAN, Long(0)), "0"),
        (Described(TIMESPAN, "none"), None),
        (Described(Symbol("com.microsoft:uri"), "sb://x"), None),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Timestamp(2**63 - 1), None),
        (float("nan"), None),
        ("a\r\nX: y", '"a  X: y"'),
        (b"bytes", None),
        (None, None),
    ],
)
def test_what_clients_of_amqp_have_sent_is_shown_if_http_has_a_form_for_it(value, shown):
    message = Message.of(b"", application_properties={"Given": value})
    assert write_headers(message, None).get("Given") == shown


def test_a_header_that_is_given_twice_is_one_property(broker, call, empty):
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    head = f"POST /orders/messages HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nContent-Length: 0\r\n"
    with socket.create_connection(("localhost", broker.http_port)) as connection:
        connection.sendall(f"{head}Color: red\r\ncolor: 2\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 201 ")
    assert call("DELETE", "/orders/messages/head?timeout=5").headers.get_all("Color") == ['"red, 2"']


def receivers(broker):
    return sum(value for (name, *_), value in metrics(broker).items() if name == "peeklock_receivers")


def test_messages_wait_for_receivers_and_receivers_for_messages(call, broker, empty):
    answers = []
    headers = {"Authorization": generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}

    def wait():
        with closing(HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)) as connection:
            connection.request("DELETE", "/orders/messages/head?timeout=20", headers=headers)
            answers.append(connection.getresponse().read())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: receivers(broker) == 3, "they wait")
    for body in (b"a", b"b", b"c"):
        call("POST", "/orders/messages", body)
    for thread in threads:
        thread.join()
    assert sorted(answers) == [b"a", b"b", b"c"]


def test_no_message_is_lost_to_a_client_that_has_gone(call, broker, empty):
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    request = f"DELETE /orders/messages/head?timeout=30 HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n"
    with socket.create_connection(("localhost", broker.http_port)) as connection:
        connection.sendall(request.encode())
        eventually(lambda: receivers(broker) == 1, "it waits")
    call("POST", "/orders/messages", "kept")
    got = call("DELETE", "/orders/messages/head?timeout=10")
    assert got.body == b"kept"


def test_a_batch_is_sent_whole_or_not_at_all(call, empty):
    items = [
        {"Body": "1", "BrokerProperties": {"Label": "L1", "TimeToLiveTimeSpan": "1.00:00:30"}},
        {"Body": "2", "UserProperties": {"Priority": "Low", "n": 5, "b": True}},
    ]
    assert call("POST", "/orders/messages", json.dumps(items), Content_Type=BATCH).status == 201
    one, two = (call("DELETE", "/orders/messages/head?timeout=5") for _ in range(2))
    assert (one.body, one.properties["Label"], one.properties["TimeToLive"]) == (b"1", "L1", 86430)
    assert (two.body, two.headers["n"], two.headers["b"], two.headers["Priority"]) == (b"2", "5", "true", '"Low"')
    items.append({"Body": "3", "BrokerProperties": {"SessionId": "a", "PartitionKey": "b"}})
    assert call("POST", "/orders/messages", json.dumps(items), Content_Type=BATCH).status == 400
    assert call("DELETE", "/orders/messages/head?timeout=0").status == 204


def test_topics_deep_paths_partitioned_queues_and_dead_letters(call):
    for target, source in (
        ("news", "news/Subscriptions/all"),
        ("deep/path/queue", "deep/path/queue"),
        ("deep%2Fpath%2Fqueue", "deep/path/queue"),
        ("spread", "spread"),
    ):
        assert call("POST", f"/{target}/messages", "x").status == 201
        got = call("POST", f"/{source}/messages/head?timeout=5")
        assert got.status == 201, (source, got.body)
        assert call("DELETE", urlsplit(got.headers["Location"]).path).status == 200
    call("POST", "/deep/path/queue/messages", "dead")
    for _ in range(10):
        got = call("POST", "/deep/path/queue/messages/head?timeout=5")
        call("PUT", urlsplit(got.headers["Location"]).path)
    assert call("DELETE", "/deep/path/queue/$DeadLetterQueue/messages/head?timeout=5").body == b"dead"


def test_a_scheduled_message_waits(call, empty):
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
    call("POST", "/orders/messages", "later", BrokerProperties=json.dumps({"ScheduledEnqueueTimeUtc": at}))
    assert call("DELETE", "/orders/messages/head?timeout=0").status == 204
    assert call("DELETE", "/orders/messages/head?timeout=10").body == b"later"


@pytest.mark.parametrize("source", ["orders", "spread", "news/subscriptions/all"])
def test_an_unlocked_message_comes_again_after_its_delay(call, empty, source):
    call("POST", f"/{source.partition('/')[0]}/messages", "later", Kept="yes")
    got = call("POST", f"/{source}/messages/head?timeout=5")
    place = urlsplit(got.headers["Location"]).path
    for delay in ("x", "-1", "", "1.5", "604801", "9" * 5000, "%C2%B2", "1%00"):
        refused = call("PUT", f"{place}?delay={delay}")
        assert (refused.status, b"'delay'" in refused.body, b"604800" in refused.body) == (400, True, True)
    for method in ("POST", "DELETE"):
        assert call(method, f"{place}?delay=1").status == 400
    assert call("PUT", f"{place}?delay=2").status == 200
    assert call("DELETE", f"/{source}/messages/head?timeout=0").status == 204
    again = call("DELETE", f"/{source}/messages/head?timeout=10")
    assert (again.body, again.properties["DeliveryCount"], again.headers["Kept"]) == (b"later", 2, '"yes"')
    assert not [name for name in again.headers if "delay" in name.lower()]


def test_rights(broker, call, empty):
    assert call("POST", "/orders/messages", "x", key=("sends", "s")).status == 201
    assert call("POST", "/orders/messages", "x", key=("listens", "l")).status == 401
    assert call("DELETE", "/orders/messages/head?timeout=0", key=("sends", "s")).status == 401
    assert call("POST", "/spread/messages", "x", key=("sends", "s")).status == 401
    got = call("POST", "/orders/messages/head?timeout=5", key=("listens", "l"))
    place = urlsplit(got.headers["Location"]).path
    assert call("DELETE", place, key=("sends", "s")).status == 401
    assert call("DELETE", place, key=("listens", "l")).status == 200
    assert call("POST", "/orders/messages", "x", key=(KEY_NAME, "wrong")).status == 401
    assert '"authentication failed"' in broker.log()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/nothing/messages", {}, 410),
        ("POST", "/nothing/messages/head?timeout=1", {}, 410),
        ("DELETE", "/nothing/messages/1/00000000-0000-0000-0000-000000000000", {}, 410),
        ("DELETE", "/orders/messages/1/00000000-0000-0000-0000-000000000000", {}, 404),
        ("POST", "/grouped/messages/head", {}, 400),
        ("POST", "/news/messages/head", {}, 400),
        ("POST", "/orders/messages/head?timeout=x", {}, 400),
        ("POST", "/orders/messages/head?timeout=-1", {}, 400),
        ("POST", "/$cbs/messages", {}, 400),
        ("POST", "/orders/$management/messages", {}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": "{"}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": "[]"}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"Label": 1}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"Label": "\\ud800"}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"Label": "a", "Label": "b"}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"TimeToLive": 0}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"TimeToLive": NaN}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"TimeToLive": 1e400}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"ScheduledEnqueueTimeUtc": "soon"}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"SessionId": "a", "PartitionKey": "b"}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"Label": "a", "LABEL": "b"}'}, 400),
        ("POST", "/orders/messages", {"BrokerProperties": '{"Label": "a"}', "Brokerproperties": "{}"}, 400),
        ("POST", "/orders/messages/head", {"Host": "a b"}, 400),
        ("POST", "/orders/messages", {"Content-Type": BATCH}, 400),
        ("GET", "/orders/messages", {}, 404),
    ],
)
def test_what_cannot_be_done_has_its_status(call, method, path, headers, status):
    answer = call(method, path, None, **headers)
    assert answer.status == status, answer.body
    assert b"Traceback" not in answer.body
    assert call("DELETE", "/orders/messages/head?timeout=0").status == 204


@pytest.mark.parametrize(
    "body",
    [
        *("[]", "{}", '[{"Body": 1}]', '[{"Body": "a", "UserProperties": {"a": [1]}}]', "[1", "null", "[" * 100_000),
        '[{"Body": "a", "UserProperties": {"\\ud800": 1}}]',
    ],
)
def test_batches_that_are_none(call, body):
    assert call("POST", "/orders/messages", body, Content_Type=BATCH).status == 400


def test_a_message_that_is_too_large_is_refused_and_the_connection_stays(call):
    for size in (1 << 20, 3 << 20):
        answer = call("POST", "/orders/messages", b"x" * size)
        assert (answer.status, b"SubCode=40300" in answer.body) == (403, True)
    assert call("DELETE", "/orders/messages/head?timeout=0").status == 204


def test_the_key_of_a_topic_is_none_of_a_queue_whose_name_goes_on_behind_a_subscription(call):
    key = ("of-news", "n")
    assert call("POST", "/news/messages", b"", key).status == 201
    assert call("DELETE", "/news/subscriptions/all/messages/head?timeout=0", key=key).status == 200
    for method, path in (
        ("POST", "/news/subscriptions/all/eu/messages"),
        ("DELETE", "/news/Subscriptions/all/eu/messages/head?timeout=0"),
        ("DELETE", "/NEWS/subscriptions/all/eu/$deadletterqueue/messages/head?timeout=0"),
        ("GET", "/news/subscriptions/all/eu"),
        ("DELETE", "/news%2Fsubscriptions%2Fall%2Feu"),
    ):
        assert call(method, path, b"", key).status == 401


def test_a_token_for_a_queue_stays_one_when_that_is_deleted_and_was_one_before_it_was_made(broker):
    """Its resource has no scheme, and looks like a host."""
    token = generate("tenant1.inbox", "app", "a", int(time.time()) + 60)
    connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)

    def status(method, path, **headers):
        connection.request(method, path, b"", {"Authorization": token, **headers})
        answer = connection.getresponse()
        answer.read()
        return answer.status

    others = [
        ("POST", "/orders/messages"),
        ("DELETE", "/orders"),
        ("GET", "/$Resources/queues"),
        ("GET", "/$namespaceinfo"),
    ]
    with closing(connection):
        assert status("POST", "/tenant1.inbox/messages") == 201
        assert [status(*each) for each in others] == [401] * len(others)
        assert status("DELETE", "/tenant1.inbox") == 200
        assert [status(*each) for each in others] == [401] * len(others)
        assert [status(*each, Host="tenant1.inbox") for each in others] == [401] * len(others)
        assert status("GET", "/tenant1.inbox") == 404
