"""The journal over the HTTP endpoint of a real broker, which passes requests on to its journal."""

import html
import json
import os
import re
import socket
import subprocess
import sys
import time
from base64 import b64decode
from http.client import HTTPConnection, HTTPResponse, IncompleteRead

import msgpack
import psutil
import pyarrow as pa
import pytest

from broker.catalog.catalog import Definition
from broker.gateway.web.journal import PIECE_BYTES
from protocol.nodes.sas_tokens import generate
from storage.journal.files import PartitionJournal
from storage.journal.frames import Made
from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.journal.journaled import plain_rows
from tests.patience import PATIENCE_S, eventually

CONFIG = """
[journal]
mode = "bodies"
[[queues]]
name = "orders"
authorization_rules = [
    {key_name = "sends", primary_key = "s", rights = ["Send"]},
    {key_name = "listens", primary_key = "l", rights = ["Listen"]},
    {key_name = "manages", primary_key = "m", rights = ["Manage"]},
]
[[queues]]
name = "other"
[security]
authorization_rules = [
    {key_name = "listens-all", primary_key = "la", rights = ["Listen"]},
    {key_name = "sends-all", primary_key = "sa", rights = ["Send"]},
    {key_name = "manages-all", primary_key = "ma", rights = ["Manage"]},
]
"""


def write(path, first_kept, *batches):
    journal = PartitionJournal(path, roll_bytes=1 << 20)
    journal.begin_epoch(time.time())
    for count, size, entity in batches:
        first = journal.end
        made = Made(b"store-id", b"log-id----------", first + count)
        journal.append(plain_rows(first, count, size, entity), first, first + count - 1, made, time.time())
        journal.sync(time.time())
    while journal.low < first_kept:
        journal.drop_oldest()
    journal.close()
    return journal


@pytest.fixture(scope="module", params=[0, 1], ids=["one process", "two processes"])
def served(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("broker")
    top = directory / "data" / "journal"
    journals = {
        0: write(top / "0", 0, (100, 10, "orders"), (50, 10, "other"), (300, 2000, "orders")),
        3: write(top / "3", 1, *[(400, 2000, "orders")] * 40),
    }
    with Broker(directory, CONFIG, workers=request.param) as broker:
        yield broker, journals


@pytest.fixture
def call(served):
    broker, _ = served
    connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)

    def send(path, key=(KEY_NAME, KEY), at="", method="GET", content=None):
        headers = (
            {"Authorization": generate(f"http://localhost/{at}", key[0], key[1], int(time.time()) + 60)} if key else {}
        )
        connection.request(method, path, body=content, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    yield send
    connection.close()


def path_of(journal, partition, first, end, more=""):
    return f"/$journal/{partition}?epoch={journal.epoch.hex()}&from={first}&to={end}{more}"


def offsets(body):
    return pa.ipc.open_stream(body).read_all().column("journalOffset").to_pylist()


def test_the_overview(call, served):
    _, journals = served
    status, headers, body = call("/$journal")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "application/json")
    shown = json.loads(body)
    assert shown["namespace"] == "peeklock"
    assert re.fullmatch("[0-9a-f]{32}", shown["namespaceId"])
    assert [each["partition"] for each in shown["partitions"]] == [0, 3]
    first = shown["partitions"][0]
    assert (first["epoch"], first["low"], first["stable"]) == (journals[0].epoch.hex(), 0, 450)
    assert (first["lowTime"], first["stableTime"]) == ("1970-01-01T00:00:00.000Z", "1970-01-01T00:00:00.449Z")
    assert first["bytes"] == journals[0].bytes


def test_a_range_is_a_stream_of_arrow(call, served):
    _, journals = served
    status, headers, body = call(path_of(journals[0], 0, 90, 160))
    assert status == 200
    assert headers["Content-Type"] == "application/vnd.apache.arrow.stream"
    assert headers["X-Peeklock-Next-Offset"] == "160"
    table = pa.ipc.open_stream(body).read_all()
    assert table.column("journalOffset").to_pylist() == [*range(90, 160)]
    assert table.column("record").to_pylist()[0].startswith(b"90:")
    status, headers, body = call(path_of(journals[0], 0, 0, 10**6, "&maxBytes=1"))
    assert headers["X-Peeklock-Next-Offset"] == "100"
    assert offsets(body) == [*range(100)]
    assert offsets(call(path_of(journals[0], 0, 450, 450))[2]) == []


def test_one_entity_and_no_bodies(call, served):
    _, journals = served
    _, headers, body = call(path_of(journals[0], 0, 0, 450, "&entity=OTH*&records=0"))
    assert headers["X-Peeklock-Next-Offset"] == "450"
    table = pa.ipc.open_stream(body).read_all()
    assert table.column("journalOffset").to_pylist() == [*range(100, 150)]
    assert "record" not in table.column_names


def test_a_large_range_piece_by_piece(call, served):
    _, journals = served
    at, found = journals[3].low, []
    while at < journals[3].stable:
        status, headers, body = call(path_of(journals[3], 3, at, 10**9, f"&maxBytes={8 << 20}"))
        assert status == 200
        found += offsets(body)
        at = int(headers["X-Peeklock-Next-Offset"])
    assert found == [*range(journals[3].low, journals[3].stable)]


def test_pieces_are_large_enough_to_cost_little(served):
    broker, journals = served
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    target = path_of(journals[3], 3, journals[3].low, 10**9, f"&maxBytes={8 << 20}")
    with socket.create_connection(("localhost", broker.http_port), PATIENCE_S) as client, client.makefile("rb") as file:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n".encode())
        while file.readline().strip():
            continue
        sizes = []
        while size := int(file.readline(), 16):
            sizes.append(size)
            file.read(size + 2)
    assert sum(sizes) > 4 << 20
    assert 64 << 10 < max(sizes) <= PIECE_BYTES


@pytest.mark.parametrize(("first", "status"), [("low - 1", 416), ("stable + 1", 416), ("low", 200)])
def test_what_is_not_kept_is_said(call, served, first, status):
    _, journals = served
    low, stable = journals[3].low, journals[3].stable
    assert low > 0
    first = {"low - 1": low - 1, "stable + 1": stable + 1, "low": low}[first]
    got, headers, body = call(path_of(journals[3], 3, first, first + 1))
    assert got == status
    if status == 416:
        assert headers["Content-Type"].startswith("application/json")
        assert json.loads(body) == {"error": "out of retention", "low": low, "stable": stable}


def test_another_epoch(call, served):
    _, journals = served
    status, _, body = call("/$journal/0?epoch=0123456789abcdef&from=0&to=1")
    assert (status, json.loads(body)) == (409, {"error": "another epoch", "epoch": journals[0].epoch.hex()})


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/$journal/1?epoch=0123456789abcdef&from=0&to=1", 404, b"no journal of a partition"),
        ("/$journal/x", 404, b"no journal of a partition"),
        ("/$journal/99999999999999999999", 404, b"no journal of a partition"),
        ("/$journal/0", 400, b"epoch"),
        ("/$journal/0?epoch=E&to=1", 400, b"from"),
        ("/$journal/0?epoch=E&from=-1&to=1", 400, b"from"),
        ("/$journal/0?epoch=E&from=0&to=9223372036854775808", 400, b"to"),
        ("/$journal/0?epoch=E&from=5&to=1", 400, b"must not be below"),
        ("/$journal/0?epoch=E&from=0&to=1&records=2", 400, b"records"),
        ("/$journal?current=2", 400, b"current"),
        ("/$journal/0?epoch=E&from=0&to=1&maxBytes=0", 400, b"maxBytes"),
        ("/$journal/0?epoch=E&from=0&to=1&maxBytes=" + "9" * 5000, 400, b"maxBytes"),
        ("/$journal/0?epoch=E&from=%C2%B2&to=1", 400, b"from"),
        ("/$journal/0?epoch=E&from=0&to=1&entity=", 400, b"entity"),
    ],
)  # fmt: skip
def test_bad_requests_are_answered_as_all_others(call, served, path, status, text):
    got, headers, body = call(path.replace("epoch=E", f"epoch={served[1][0].epoch.hex()}"))
    assert (got, text in body, headers["Content-Type"].split(";")[0]) == (status, True, "application/xml")


def test_only_get(call):
    status, headers, _ = call("/$journal", method="POST")
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("key", "at", "entity", "status"),
    [
        (("listens-all", "la"), "", None, 200),
        (("listens-all", "la"), "$journal", None, 200),
        (("listens-all", "la"), "orders", "orders", 200),
        (("listens-all", "la"), "orders", None, 401),
        (("sends-all", "sa"), "", None, 401),
        (("sends-all", "sa"), "", "orders", 401),
        (("listens", "l"), "orders", "orders", 200),
        (("listens", "l"), "orders", "ORDERS", 200),
        (("listens", "l"), "orders", "orders/subscriptions/*", 200),
        (("listens", "l"), "orders", "order*", 401),
        (("listens", "l"), "orders", "other", 401),
        (("listens", "l"), "orders", None, 401),
        (("sends", "s"), "orders", "orders", 401),
        (("listens", "wrong"), "orders", "orders", 401),
        (None, "", None, 401),
    ],
)  # fmt: skip
def test_rights(call, served, key, at, entity, status):
    more = "" if entity is None else f"&entity={entity}"
    got, _, body = call(path_of(served[1][0], 0, 0, 450, more), key, at)
    assert got == status
    if entity == "orders" and status == 200:
        assert 120 not in offsets(body)


ATTACKS = [
    "/$journal/0%3Fentity=*?entity=orders&",
    "/$journal/0%3fentity=other?entity=orders&",
    "/$journal/0%3Fentity=*%26x=?entity=orders&",
    "/$journal/0%253Fentity=*?entity=orders&",
    "/$journal/0%23?entity=orders&",
    "/$journal/0%3Fentity=*%23?entity=orders&",
    "/$journal/0;entity=*?entity=orders&",
    "/$journal/0%26entity=*?entity=orders&",
    "/$journal/0%2F?entity=orders&",
    "/$journal/0%2f..%2f0?entity=orders&",
    "/$journal/%2e%2e/$journal/0?entity=orders&",
    "/$journal/%2e%2e%2f%24journal%2f0?entity=orders&",
    "/$journal/x%2F..%2F0?entity=orders&",
    "/$journal/0%0d%0aHost:x?entity=orders&",
    "/$journal/0%0d%0a%0d%0aGET%20/$journal/0?entity=orders&",
    "/$journal/0%00?entity=orders&",
    "/$journal/0%5c?entity=orders&",
    "/$journal/0\\?entity=orders&",
    "/$journal/0%ED%A0%80?entity=orders&",
    "/$journal/0\xff?entity=orders&",
    "/$JOURNAL/0%3FENTITY=*?entity=orders&",
    "/%24journal%2F0%3Fentity%3D*?entity=orders&",
    "http://localhost/$journal/0%3Fentity=*?entity=orders&",
    "http://other@localhost/$journal/0?entity=*#?entity=orders&",
    "/$journal/0?entity=orders&entity=*&",
    "/$journal/0?entity=*&entity=orders&",
    "/$journal/0?entity=orders%26entity=*&",
    "/$journal/0?entity=orders;entity=*&",
    "/$journal/0?entity=orders&%65ntity=*&",
    "/$journal/0?Entity=*&entity=orders&",
    "/$journal/0?entity=orders%23&entity=*&",
    "/$journal/0?entity=orders&owner=other&",
    "/$journal/0?entity=other&owner=orders&",
    "/$journal/0?entity=*&owner=orders&",
    "/$journal/0?entity=orders/subscriptions/../../other&",
    "/$journal/0?entity=orders/subscriptions/%5Ba-z%5D*&",
    "/$journal/0?entity=%2Forders&",
    "/$journal/0?entity=sb://x/orders/subscriptions/*&",
    "/$journal/0?entity=%5Bo%5Drders&",
    "/$journal/0?entity=orders%00other&",
    "/$journal/0?entity=orders%ED%A0%80&",
    "/$journal/0?entity=orders%0aother&",
    "/$journal/0?entity=orders%2F*&",
    "/$journal/0?entity=**&",
    "/$journal/0?entity=oth%65r&",
    "/$journal/0?entity=&",
    "/$journal?entity=orders&",
    "/$journal/entities?entity=orders&",
    "/$journal/%3Fentity=orders?entity=orders&",
    "/$journal%3Fcurrent=1?entity=orders&",
]  # fmt: skip


def answer_to(broker, head):
    """Status, body; whatever the bytes of the request are."""
    with socket.create_connection(("localhost", broker.http_port), timeout=PATIENCE_S) as client:
        client.sendall(head.encode("latin-1"))
        answer = HTTPResponse(client)
        answer.begin()
        return answer.status, answer.read()


@pytest.mark.parametrize("target", ATTACKS)
def test_the_key_of_one_entity_reads_no_other_however_it_asks(served, target):
    broker, journals = served
    token = generate("http://localhost/orders", "listens", "l", int(time.time()) + 60)
    target += f"epoch={journals[0].epoch.hex()}&from=0&to=450"
    status, body = answer_to(
        broker, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\nConnection: close\r\n\r\n"
    )
    if status == 200:
        assert not set(offsets(body)) & {*range(100, 150)}
    else:
        assert status in (400, 401, 404)
        assert body.startswith(b"<Error>")


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "consumers/mine",
        "consumers/mine?entity=orders",
        "consumers/%2e%2e%2f0?entity=orders",
        "consumers/mine%3Fentity=orders?entity=orders",
        "consumers/mine%23?entity=orders",
        "CONSUMERS/mine%2F..%2Fother?entity=orders",
    ],
)
@pytest.mark.parametrize("key", [("listens", "l"), ("manages", "m")])
def test_the_key_of_one_entity_has_no_say_about_consumers(call, method, path, key):
    for at in ("", "orders", "$journal", "$journal/consumers/mine"):
        assert call(f"/$journal/{path}", key, at, method, b'{"partitions": []}')[0] in (400, 401)


def test_who_reads_tells_how_far_he_is_and_who_manages_forgets_him(call):
    target, nothing = "/$journal/consumers/reader", b'{"partitions": []}'
    assert call(target, ("listens-all", "la"), method="PUT", content=nothing)[0] == 200
    assert call(target, ("listens-all", "la"), method="DELETE")[0] == 401
    assert call(target, ("manages-all", "ma"), method="DELETE")[0] == 200


@pytest.mark.parametrize(
    "name", ["a%3Fb", "a%23b", "a%26b", "a%2Fb", "%2e%2e", "%2E", "a%0db", "a%252e", "a%5cb", "a;b"]
)
def test_a_consumer_has_a_plain_name(call, name):
    for method in ("PUT", "DELETE"):
        status, _, body = call(f"/$journal/consumers/{name}", method=method, content=b'{"partitions": []}')
        assert (status, b"<Code>400</Code>" in body) == (400, True)


def metrics(broker):
    lines = broker.get("/metrics")[1].splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line.startswith("peeklock_journal"))


def test_metrics(served):
    broker, journals = served
    eventually(lambda: metrics(broker).get("peeklock_journal_up") == "1.0", "it is up")
    shown = metrics(broker)
    assert shown['peeklock_journal_low_offset{partition="3"}'] == str(float(journals[3].low))
    assert shown['peeklock_journal_stable_offset{partition="0"}'] == "450.0"
    assert shown['peeklock_journal_bytes{partition="0"}'] == str(float(journals[0].bytes))
    assert shown["peeklock_journal_disk_full"] == shown["peeklock_journal_gaps_total"] == "0.0"
    assert 'peeklock_process_resident_memory_bytes{process="journal"}' in broker.get("/metrics")[1]


def journal_process(broker) -> psutil.Process:
    [found] = broker.running_as("broker.journal")
    return found


def test_a_client_that_goes_is_noticed_and_one_that_does_not_read_takes_no_memory(served):
    broker, journals = served
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    processes = [journal_process(broker), broker.gateway()]
    before = [process.memory_info().rss for process in processes]
    clients = []
    for _ in range(8):
        client = socket.create_connection(("localhost", broker.http_port))
        target = path_of(journals[3], 3, journals[3].low, 10**9, f"&maxBytes={256 << 20}")
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        clients.append(client)
    eventually(lambda: metrics(broker)["peeklock_journal_readers"] == "8.0", "all read")
    after = [process.memory_info().rss for process in processes]
    assert journals[3].bytes > 25 << 20
    assert all(now - then < 60 << 20 for then, now in zip(before, after, strict=True)), "not whole answers"
    files = journal_process(broker).num_fds()
    for client in clients:
        client.close()
    eventually(lambda: metrics(broker)["peeklock_journal_readers"] == "0.0", "none reads")
    eventually(lambda: journal_process(broker).num_fds() < files - 8, "files are closed")


def test_a_journal_that_is_killed_is_started_again_and_a_cut_answer_is_no_whole_one(call, served):
    broker, journals = served
    process = journal_process(broker)
    connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    target = path_of(journals[3], 3, journals[3].low, 10**9, f"&maxBytes={256 << 20}")
    connection.request("GET", target, headers={"Authorization": token})
    answer = connection.getresponse()
    assert answer.status == 200
    process.kill()
    with pytest.raises((IncompleteRead, ConnectionError)):
        answer.read()
    connection.close()

    def is_back():
        status, _, body = call("/$journal")
        assert status == 200 or (status == 503 and b"journal does not answer" in body), (status, body)
        return status == 200

    eventually(is_back, "it is back")
    assert journal_process(broker).pid != process.pid
    assert offsets(call(path_of(journals[0], 0, 0, 10))[2]) == [*range(10)]


def test_without_a_journal_there_is_none(tmp_path):
    with Broker(tmp_path, "", workers=0) as broker:
        connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)
        headers = {"Authorization": generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}
        connection.request("GET", "/$journal", headers=headers)
        assert connection.getresponse().status in (400, 404)
        connection.close()
        assert broker.running_as("broker.journal") == []
        assert "peeklock_journal" not in broker.get("/metrics")[1]
        assert not (broker.data_dir / "journal").exists()


@pytest.mark.parametrize("part", ["worker", "gateway"])
def test_parts_of_a_namespace_on_several_machines_ask_where_their_journals_are(tmp_path, part):
    arguments = ["--partitions", "0", "--listen", "127.0.0.1:1"] if part == "worker" else []
    done = subprocess.run(
        [sys.executable, "-m", "broker.cli", part, "--workers", "127.0.0.1:1", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PEEKLOCK_JOURNAL__MODE": "events", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    name = "cluster.journal_listen (--journal-listen)" if part == "worker" else "cluster.journals (--journals)"
    assert f"{name} is missing" in done.stderr


def consumers_of(body):
    return {each["name"]: each for each in json.loads(body)["consumers"]}


def test_a_consumer_tells_how_far_it_is(call, served):
    _, journals = served
    epoch = journals[0].epoch.hex()
    target = "/$journal/consumers/Nightly.audit-1"

    def tell(document, path=target, key=(KEY_NAME, KEY), method="PUT", at=""):
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        status, _, body = call(path, key, at, method, content)
        return status, html.unescape(body.decode())

    def position(partition=0, offset: object = 100, epoch: object = epoch):
        return {"partitions": [{"partition": partition, "epoch": epoch, "offset": offset}]}

    assert tell(position(), key=("listens-all", "la"))[0] == 200
    assert tell(position(), key=("sends-all", "sa"))[0] == 401
    assert tell(position(), path=f"{target}?entity=orders", key=("listens", "l"), at="orders")[0] == 401
    shown = consumers_of(call("/$journal")[2])["Nightly.audit-1"]
    assert shown["partitions"] == [{"partition": 0, "epoch": epoch, "offset": 100}]
    ends = {partition: journal.stable - journal.low for partition, journal in journals.items()}
    assert shown["behind"] == ends[0] - 100 + ends[3]
    assert tell(position(offset=50))[0] == 200
    assert consumers_of(call("/$journal")[2])["Nightly.audit-1"]["partitions"][0]["offset"] == 100, "nobody goes back"
    for document, complaint in (
        (position(partition=7777), "no journal of a partition '7777'"),
        (position(partition="0"), "no journal of a partition '0'"),
        (position(partition=2**70), "no journal of a partition"),
        (position(partition=True), "no journal of a partition 'True'"),
        (position(offset=451), "has no row before offset 451"),
        (position(offset=-1), "'offset' of partition 0 must be a number"),
        (position(offset=2**63), "'offset' of partition 0 must be a number"),
        (position(offset=1.5), "'offset' of partition 0 must be a number"),
        (position(offset=float("nan")), "'offset' of partition 0 must be a number"),
        (position(epoch="ff" * 8), "has no row before offset 100 of epoch ffff"),
        (position(epoch="\ud800"), "A consumer tells"),
        (position(epoch=5), "A consumer tells"),
        ([], "A consumer tells"),
        ({"partitions": 7}, "A consumer tells"),
        (b"", "A consumer tells"),
        (b"[" * 50_000, "A consumer tells"),
        (b"\xff\xfe", "A consumer tells"),
    ):
        status, told = tell(document)
        assert status == 400
        assert complaint in told
    assert tell(b" " * (70 << 10))[0] == 413
    assert tell(position(), path="/$journal/consumers/" + "a" * 101)[0] == 400
    assert tell(position(), path="/$journal/consumers/a%2Fb")[0] == 400
    assert tell(position(), path="/$journal/consumers/")[0] == 405
    assert tell(b"", path=target, method="GET")[0] == 405
    assert tell(position(), path="/$journal")[0] == 405
    assert tell(b"", method="DELETE")[0] == 200
    assert tell(b"", method="DELETE")[0] == 404
    assert "Nightly.audit-1" not in consumers_of(call("/$journal")[2])


def test_consumers_are_not_without_number(call, served):
    _, journals = served
    document = {"partitions": [{"partition": 0, "epoch": journals[0].epoch.hex(), "offset": 1}]}
    names = [f"consumer-{number}" for number in range(65)]
    content = json.dumps(document).encode()
    answers = [call(f"/$journal/consumers/{name}", method="PUT", content=content)[0] for name in names]
    assert answers == [200] * 64 + [400]
    for name in names[:64]:
        assert call(f"/$journal/consumers/{name}", method="DELETE")[0] == 200


def test_all_entities_and_rules(tmp_path):
    config = """
    partitions = 3
    [journal]
    mode = "events"
    [[queues]]
    name = "orders"
    max_delivery_count = 4
    authorization_rules = [{key_name = "sends", primary_key = "hidden-1", rights = ["Send"]}]
    [[queues]]
    name = "wide"
    enable_partitioning = true
    [[topics]]
    name = "news"
    [[topics.subscriptions]]
    name = "all"
    [[topics.subscriptions]]
    name = "red"
    [[topics.subscriptions.rules]]
    name = "only"
    filter = {kind = "sql", expression = "color = @wanted", parameters = {"@wanted" = "red"}}
    [security]
    authorization_rules = [
        {key_name = "listens-all", primary_key = "la", rights = ["Listen"]},
        {key_name = "sends-all", primary_key = "sa", rights = ["Send"]},
    ]
    """
    with Broker(tmp_path, config) as broker:
        connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)

        def get(key, at=""):
            until = int(time.time()) + 60
            headers = {"Authorization": generate(f"http://localhost/{at}", key[0], key[1], until)} if key else {}
            connection.request("GET", "/$journal/entities", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert [get(key)[0] for key in (None, ("sends-all", "sa"), (KEY_NAME, "wrong"))] == [401] * 3
        assert get(("listens-all", "la"), "orders")[0] == 401
        status, body = get(("listens-all", "la"))
        connection.close()
    assert status == 200
    assert b"hidden" not in body, "who may read everything may not send everywhere"
    told = json.loads(body)
    assert (told["namespace"], told["partitions"]) == ("peeklock", 3)
    found = {Definition.from_document(each).description.path.lower(): each for each in told["entities"]}
    assert set(found) == {"orders", "wide", "news", "news/subscriptions/all", "news/subscriptions/red"}
    assert found["orders"]["max_delivery_count"] == 4
    assert (len(found["orders"]["partitions"]), found["wide"]["partitions"]) == (1, [0, 1, 2])
    rules = {path.lower(): [msgpack.unpackb(b64decode(each)) for each in each] for path, each in told["rules"].items()}
    assert [each["name"] for each in rules["news/subscriptions/all"]] == ["$Default"]
    [rule] = rules["news/subscriptions/red"]
    assert rule["filter"] == {"kind": "sql", "expression": "color = @wanted", "parameters": {"@wanted": b"\xa1\x03red"}}
