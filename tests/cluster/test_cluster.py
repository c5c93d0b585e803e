"""A namespace whose workers and gateways reach each other by TCP and TLS only."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.catalog.catalog import catalog_version, definitions, home_partition
from protocol.nodes.sas_tokens import generate
from storage.store import Table
from tests.brokers import KEY, KEY_NAME
from tests.cluster.machines import Certificates, Cluster, Machine
from tests.end_to_end.raw_peer import ACCEPTED, DETACH, DISPOSITION, TRANSFER, RawPeer, body_of, message
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.test_catalog_at_run_time import NODE, create, receive, send, update
from tests.logs import open_tables
from tests.patience import PATIENCE_S, eventually

PARTITIONS = 4
CONFIG = """
worker_stall_timeout_ms = 6000

[[queues]]
name = "witness"

[[queues]]
name = "wide"
enable_partitioning = true

[[queues]]
name = "moves"
forward_to = "wide"

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

  [[topics.subscriptions]]
  name = "some"
  rules = [{ name = "none", filter = { kind = "false" } }]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    certificates = Certificates(directory / "certificates")
    with Cluster(directory, CONFIG, gateways=2, certificates=certificates) as cluster:
        yield cluster
    for machine in cluster.machines:
        assert "Traceback" not in machine.log_file.read_text(), machine.log()


@pytest.fixture(params=[0, 1])
def peer(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[RawPeer]:
    with RawPeer.connect(cluster.gateways[request.param].amqp_port) as peer:
        yield peer


def test_all_kinds_of_entities_are_served_over_both_gateways(cluster, peer):
    candidates = [f"queue-{number}-{peer.socket.getsockname()[1]}" for number in range(60)]
    names = [next(each for each in candidates if home_partition(each, PARTITIONS) == at) for at in range(PARTITIONS)]
    node = Node(peer, NODE)
    for name in names:
        assert create(node, "queue", name=name).status == 200
        for gateway in cluster.gateways:
            with RawPeer.connect(gateway.amqp_port) as other:
                send(other, name, b"m")
        assert receive(peer, name, 2) == [b"m", b"m"]
    bodies = [b"%d" % number for number in range(8)]
    send(peer, "wide", *bodies)
    assert receive(peer, "wide", 8) == bodies
    send(peer, "moves", *bodies)
    assert receive(peer, "wide", 8) == bodies
    send(peer, "news", *bodies)
    assert receive(peer, "news/Subscriptions/all", 8) == bodies
    assert receive(peer, "news/Subscriptions/some", 0) == []


def request(gateway: Machine, method: str, path: str, body: str = "") -> tuple[int, str, str]:
    """Status, Location and body of the answer of this gateway."""
    headers = {"Authorization": generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}
    with closing(HTTPConnection("localhost", gateway.http_port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, urlsplit(answer.headers["Location"] or "").path, answer.read().decode()


@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_each_http_request_may_reach_another_gateway(cluster, kind):
    one, other = cluster.gateways
    entry = (
        '<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">'
        '<QueueDescription xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect">'
        f"<EnablePartitioning>{str(kind == 'partitioned').lower()}</EnablePartitioning></QueueDescription>"
        "</content></entry>"
    )
    for turn in range(5):
        name = f"/{kind}-{turn}"
        assert request(one, "PUT", name, entry)[0] == 201
        assert "<QueueDescription" in request(other, "GET", name)[2]
        assert request(other, "POST", f"{name}/messages", "m")[0] == 201
        status, location, body = request(one, "POST", f"{name}/messages/head?timeout=10")
        assert (status, body) == (201, "m")
        assert request(other, "POST", location)[0] == 200, "renewed"
        assert request(other, "DELETE", location)[0] == 200, "completed"
        assert request(other, "DELETE", name)[0] == 200
        assert "<QueueDescription" not in request(one, "GET", name)[2]


def test_much_at_once_passes_through(peer):
    bodies = [b"%03d" % number + bytes(60_000) for number in range(200)]
    handle = peer.attach_sender("wide")
    for body in bodies:
        peer.transfer(message(body), handle)
    accepted = 0
    while accepted < len(bodies):
        answer = peer.expect(DISPOSITION)
        assert answer.fields[4].descriptor == ACCEPTED
        accepted += (answer.fields[2] or answer.fields[1]) - answer.fields[1] + 1
    assert receive(peer, "wide", 200) == bodies


def test_each_worker_shows_its_own_partitions_and_a_gateway_all(cluster):
    for worker in cluster.workers:
        status, body = worker.get("/readyz")
        assert (status, json.loads(body)["partitions"]) == (200, len(worker.owned))
        text = worker.get("/metrics")[1]
        assert {int(each) for each in re.findall(r'peeklock_store_used_bytes\{partition="(\d+)"\}', text)} == {
            *worker.owned
        }
        assert "\npeeklock_worker_commits_total{" in text
    for gateway in cluster.gateways:
        assert json.loads(gateway.get("/readyz")[1])["partitions"] == PARTITIONS
        assert "\npeeklock_worker_commits_total{" not in gateway.get("/metrics")[1]


def test_several_gateways_of_a_machine_have_one_endpoint_and_its_workers_have_their_own(tmp_path: Path) -> None:
    with Cluster(tmp_path, f"gateways = 2\n{CONFIG}", workers=1) as cluster:
        [worker], [gateway] = cluster.workers, cluster.gateways
        assert len(gateway.gateways()) == 2
        assert json.loads(gateway.get("/readyz")[1]) == {"status": "ready", "partitions": PARTITIONS}
        text = gateway.get("/metrics")[1]
        assert re.findall(r"^peeklock_gateway_up(.*)$", text, re.M) == ['{gateway="0"} 1.0', '{gateway="1"} 1.0']
        assert "\npeeklock_worker_commits_total{" not in text
        assert worker.gateways() == []
        assert json.loads(worker.get("/readyz")[1]) == {"status": "ready", "partitions": PARTITIONS}
        text = worker.get("/metrics")[1]
        assert "\npeeklock_worker_commits_total{" in text
        assert "{gateway=" not in text
        hung = gateway.gateways()[1]
        hung.suspend()
        try:
            status, body = gateway.get("/readyz")
        finally:
            hung.resume()
        assert (status, set(json.loads(body)["gateways"])) in [(503, {"0"}), (503, {"1"})]
        eventually(lambda: gateway.get("/readyz")[0] == 200, "ready again")
        worker.kill()
        eventually(lambda: gateway.get("/readyz")[0] == 503, "the worker is missed")
        eventually(
            lambda: (
                [
                    text.startswith("partition 0 has no worker")
                    for text in json.loads(gateway.get("/readyz")[1]).get("gateways", {}).values()
                ]
                == [True, True]
            ),
            "both gateways miss it",
        )


def test_what_is_stored_is_there_after_all_were_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG) as cluster:
        bodies = [b"%d" % number for number in range(20)]
        with RawPeer.connect(cluster.gateways[0].amqp_port) as peer:
            send(peer, "wide", *bodies)
            assert create(Node(peer, NODE), "queue", name="made").status == 200
        for machine in cluster.machines:
            machine.kill()
        cluster.start()
        with RawPeer.connect(cluster.gateways[0].amqp_port) as peer:
            assert receive(peer, "wide", 20) == sorted(bodies)
            send(peer, "made", b"m")


def test_a_worker_that_is_away_is_missed_by_those_who_need_it_only(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG) as cluster:
        gateway = cluster.gateways[0]
        names = {home_partition(f"q{number}", PARTITIONS): f"q{number}" for number in range(40)}
        with RawPeer.connect(gateway.amqp_port) as peer:
            node = Node(peer, NODE)
            for name in names.values():
                assert create(node, "queue", name=name).status == 200
            away = cluster.of(1)
            away.kill()
            eventually(lambda: gateway.get("/readyz")[0] == 503, "the gateway knows it")
            assert "1" in json.loads(gateway.get("/readyz")[1])["partitions"]
            send(peer, names[0], b"m")
            send(peer, "wide", b"1", b"2", b"3", b"4")
            refused = create(node, "queue", name="new")
            assert (refused.status, "Partition 1 " in refused.description) == (503, True)
            handle = peer.attach_sender(names[1])
            peer.transfer(message(b"m"), handle)
            assert error_of_outcome(peer) == "com.microsoft:server-busy"
            away.start()
            eventually(lambda: gateway.get("/readyz")[0] == 200, "ready again")
            send(peer, names[1], b"m")
            eventually(lambda: create(node, "queue", name="new").status == 200, "changes are possible again")
            assert receive(peer, "wide", 4) == [b"1", b"2", b"3", b"4"]


def error_of_outcome(peer: RawPeer) -> str:
    outcome = peer.expect(DISPOSITION).fields[4]
    return str(outcome.value[0].value[0])


def test_a_gateway_that_starts_first_waits_and_says_for_what(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, CONFIG)
    [gateway] = cluster.gateways
    said_before = gateway.begin()
    try:
        eventually(lambda: is_waiting(gateway), "it answers")
        reason = json.loads(gateway.get("/readyz")[1])["reason"]
        assert reason.startswith("waiting for the workers: partition 0 has no worker")
        assert all(address in reason for address in cluster.addresses)
        with pytest.raises(ConnectionRefusedError):
            RawPeer.connect(gateway.amqp_port)
        begun = [(worker, worker.begin()) for worker in cluster.workers]
        for machine, said in [*begun, (gateway, said_before)]:
            machine.wait_until_ready(said)
        with RawPeer.connect(gateway.amqp_port) as peer:
            send(peer, "witness", b"m")
    finally:
        for machine in cluster.machines:
            machine.kill()


def test_a_gateway_that_starts_while_a_worker_is_away_serves_what_the_others_have(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG) as cluster:
        [gateway] = cluster.gateways
        away = cluster.of(1)
        gateway.stop()
        away.stop()
        said_before = gateway.begin()
        eventually(lambda: b" is ready." in gateway.log_file.read_bytes()[said_before:], "it takes clients")
        assert gateway.get("/readyz")[0] == 503
        with RawPeer.connect(gateway.amqp_port) as peer:
            send(peer, "wide", b"1", b"2", b"3", b"4")
            away.start()
            assert receive(peer, "wide", 4) == [b"1", b"2", b"3", b"4"]


def is_waiting(machine) -> bool:
    try:
        return bool(machine.get("/readyz")[0] == 503 and machine.get("/livez")[0] == 200)
    except OSError:
        return False


def test_declared_rules_reach_the_topic_on_another_machine(tmp_path: Path) -> None:
    topic = next(f"t{number}" for number in range(40) if home_partition(f"t{number}", PARTITIONS) == 1)
    config = f'[[topics]]\nname = "{topic}"\n[[topics.subscriptions]]\nname = "s"\n'
    cluster = Cluster(tmp_path, config)
    with cluster, RawPeer.connect(cluster.gateways[0].amqp_port) as peer:
        send(peer, topic, b"1")
        assert receive(peer, f"{topic}/Subscriptions/s", 1) == [b"1"]
    home = cluster.of(0)
    rules = '  rules = [{ name = "none", filter = { kind = "false" } }]\n'
    home.config_file.write_text(home.config_file.read_text().replace('name = "s"\n', f'name = "s"\n{rules}'))
    with cluster, RawPeer.connect(cluster.gateways[0].amqp_port) as peer:
        send(peer, topic, b"2")
        assert receive(peer, f"{topic}/Subscriptions/s", 0) == []
        assert update(Node(peer, NODE), topic, max_size_mb=2048).status == 200
    found = []
    for worker in cluster.workers:
        for partition in worker.owned:
            with open_tables(worker.data_dir, partition) as store:
                stored = dict(store.scan(Table.RULES, b"\0", b"\xff" * 300, 100))
                found.append((catalog_version(store), definitions(store), stored))
    assert all(each == found[0] for each in found)


# -- what is wrong


def test_only_certificates_of_the_namespaces_authority_are_taken(tmp_path: Path) -> None:
    ours, others = Certificates(tmp_path / "ours"), Certificates(tmp_path / "others")
    cluster = Cluster(tmp_path, CONFIG, workers=1, certificates=ours)
    [worker], [gateway] = cluster.workers, cluster.gateways
    stranger = gateway.config_file.read_text().partition("[cluster]")[0]
    gateway.config_file.write_text(f"{stranger}[cluster]\n{others.settings('gateway', ca=ours.ca)}")
    worker.start()
    gateway.begin()
    try:
        eventually(lambda: "connection of a gateway or worker failed" in worker.log_file.read_text(), "refused")
        eventually(lambda: is_waiting(gateway), "it answers")
        assert "certificate" in worker.log_file.read_text().lower()
        assert cluster.addresses[0] in json.loads(gateway.get("/readyz")[1])["reason"]
        assert worker.get("/readyz")[0] == 200
    finally:
        gateway.kill()
        worker.kill()


def test_a_worker_whose_certificate_has_another_name_is_not_used(tmp_path: Path) -> None:
    ours = Certificates(tmp_path / "ours")
    cluster = Cluster(tmp_path, CONFIG, workers=1, certificates=ours)
    [worker], [gateway] = cluster.workers, cluster.gateways
    named = worker.config_file.read_text().partition("[cluster]")[0]
    worker.config_file.write_text(f"{named}[cluster]\n{ours.settings('elsewhere.example')}")
    worker.begin()
    gateway.begin()
    try:
        eventually(lambda: is_waiting(gateway) and "mismatch" in gateway.get("/readyz")[1], "it says why")
    finally:
        gateway.kill()
        worker.kill()


def test_a_worker_of_another_namespace_is_not_used(tmp_path: Path) -> None:
    one, other = Cluster(tmp_path / "one", CONFIG), Cluster(tmp_path / "other", CONFIG)
    with one, other:
        pass
    mixed = one.workers[1]
    mixed.data_dir = other.workers[1].data_dir
    said = mixed.begin()
    one.workers[0].start()
    try:
        eventually(lambda: "belongs to another namespace" in mixed.log_file.read_bytes()[said:].decode(), "said")
    finally:
        mixed.kill()
        one.workers[0].kill()


def test_two_workers_that_claim_one_partition(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, CONFIG)
    second = cluster.workers[1]
    second.owned = [0, 1, 3]
    [gateway] = cluster.gateways
    machines = cluster.machines
    try:
        for machine in machines:
            machine.begin()
        eventually(lambda: is_waiting(gateway) and "claims partition 0" in gateway.get("/readyz")[1], "said")
        for worker in cluster.workers:
            eventually(lambda worker=worker: "claims partitions of this one" in worker.log_file.read_text(), "said")
    finally:
        for machine in machines:
            machine.kill()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"owned": [0]}, "has the partitions 0, 2, and 0 are configured"),
        ({"owned": [0, 4]}, "--partitions"),
        ({"owned": [0, 0]}, "--partitions"),
        ({"addresses": ["127.0.0.1:1", "127.0.0.1:1"]}, "--workers"),
        ({"addresses": ["127.0.0.1"]}, "must be host:port"),
        ({"addresses": ["worker-1.example:5680"]}, "cluster.certificate"),
        ({"listen": "0.0.0.0:5680"}, "cluster.certificate"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path: Path, change: dict, text: str) -> None:
    cluster = Cluster(tmp_path, CONFIG)
    worker = cluster.workers[0]
    worker.start()
    worker.stop()
    for name, value in change.items():
        setattr(worker, name, value)
    worker.begin()
    try:
        eventually(lambda: not worker.running, "it ends")
        assert text in worker.log(), worker.log()
    finally:
        worker.kill()


def test_links_end_when_the_worker_of_their_entity_is_gone_and_locks_with_it(cluster, peer):
    """As on one machine: what was locked is received again."""
    send(peer, "witness", b"m")
    handle = peer.attach_receiver("witness", credit=1)
    first = peer.expect(TRANSFER)
    assert body_of(first.payload) == b"m"
    worker = cluster.of(home_partition("witness", PARTITIONS))
    worker.worker().kill()
    eventually(
        lambda: worker.get("/readyz")[0] == 200 and all(g.get("/readyz")[0] == 200 for g in cluster.gateways),
        "ready again",
    )
    peer.settle(first.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor != ACCEPTED
    peer.detach(handle)
    peer.expect(DETACH)
    assert receive(peer, "witness", 1) == [b"m"]
