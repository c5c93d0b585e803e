"""Several machines: their journals are read as one, and a machine that is gone comes back from the capture."""

import asyncio
import json
import shutil
import socket
import ssl
import time
from http.client import HTTPConnection

import pytest

from protocol.nodes.sas_tokens import generate
from storage.data_dir import read_description
from storage.maintenance import verify
from tests.brokers import KEY, KEY_NAME
from tests.cluster.machines import Certificates, Cluster, Machine
from tests.patience import PATIENCE_S, eventually
from tests.restoring.capture_and_restore import as_it_was, capture_all, restore
from tests.restoring.everything import CONFIG, load, names_in, seen, settled


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    certificates = Certificates(directory / "certificates")
    settings = CONFIG.replace("partitions = 4\n", "").replace("[journal]\n", '[journal]\nhold_for = ["nightly"]\n')
    with Cluster(directory, settings, gateways=2, certificates=certificates, has_journals=True) as cluster:
        accepted, _ = asyncio.run(load(cluster.gateways[0]))
        assert names_in(asyncio.run(settled(cluster.gateways[0]))) == accepted
        yield cluster
    for machine in cluster.machines:
        assert "Traceback" not in machine.log_file.read_text(), machine.log()


def asked(gateway: Machine, path: str, method: str = "GET", content: object = None) -> tuple[int, str]:
    connection = HTTPConnection("localhost", gateway.http_port, timeout=PATIENCE_S)
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    body = None if content is None else json.dumps(content)
    connection.request(method, path, body=body, headers={"Authorization": token})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(errors="replace")
    connection.close()
    return found


def overview(gateway: Machine, path: str = "/$journal?current=1") -> dict:
    status, text = asked(gateway, path)
    assert status == 200, text
    return json.loads(text)


def test_journals_of_all_machines_are_read_as_one(cluster):
    for gateway in cluster.gateways:
        found = overview(gateway)
        assert [each["partition"] for each in found["partitions"]] == [0, 1, 2, 3]
        for each in found["partitions"]:
            at = f"/$journal/{each['partition']}?epoch={each['epoch']}&from=0&to={each['stable']}&records=0"
            status, rows = asked(gateway, at)
            assert (status, each["stable"] > 20) == (200, True)
            assert "journalOffset" in rows
    assert asked(gateway, f"/$journal/4?epoch={found['partitions'][0]['epoch']}&from=0&to=1")[0] == 404
    assert asked(gateway, "/$journal/x")[0] == 404
    for worker in cluster.workers:
        assert "peeklock_journal_rows_total" in worker.get("/metrics")[1]
    assert "peeklock_journal" not in gateway.get("/metrics")[1]


def test_a_consumer_of_all_tells_each_journal_its_own(cluster):
    one, other = cluster.gateways
    before = overview(one)
    [held] = before["consumers"]
    assert held["name"] == "nightly"
    assert held["behind"] == sum(each["stable"] for each in before["partitions"])
    told = [
        {"partition": each["partition"], "epoch": each["epoch"], "offset": each["stable"] - each["partition"]}
        for each in before["partitions"]
    ]
    assert asked(one, "/$journal/consumers/nightly", "PUT", {"partitions": told}) == (200, "{}")
    [held] = overview(other)["consumers"]
    assert (held["behind"], held["partitions"]) == (0 + 1 + 2 + 3, told)
    for wrong in ({"partition": 7, "epoch": "00", "offset": 0}, {"partition": 3}, [], None, {"partition": True}):
        assert asked(one, "/$journal/consumers/nightly", "PUT", {"partitions": [told[0], wrong]})[0] == 400
    assert asked(one, "/$journal/consumers/nightly", "PUT", told)[0] == 400
    assert asked(one, "/$journal/consumers/new", "PUT", {"partitions": told[1:2]})[0] == 200
    assert {each["name"]: each["behind"] for each in overview(other)["consumers"]} == {
        "nightly": 6,
        "new": 1 + sum(each["stable"] for each in before["partitions"] if each["partition"] != 1),
    }
    assert asked(other, "/$journal/consumers/new", "DELETE")[0] == 200
    assert asked(one, "/$journal/consumers/new", "DELETE")[0] == 404


def test_a_journal_that_is_away_is_named_and_no_part_is_taken_for_all(cluster):
    gateway, away = cluster.gateways[0], cluster.workers[1]
    before = overview(gateway)
    away.kill()
    status, text = asked(gateway, "/$journal")
    assert status == 503
    assert f"The journal of {away.listen} does not answer now" in text
    told = {"partitions": []}
    assert asked(gateway, "/$journal/consumers/nightly", "PUT", told)[0] == 503
    assert asked(gateway, "/$journal/consumers/nightly", "DELETE")[0] == 503
    [zero] = [each for each in before["partitions"] if each["partition"] == 0]
    at = f"/$journal/0?epoch={zero['epoch']}&from=0&to={zero['stable']}"
    assert asked(gateway, at)[0] == 200  # rows of the others are there
    assert asked(gateway, at.replace("/0?", "/1?"))[0] == 503
    away.start()
    eventually(lambda: asked(gateway, "/$journal")[0] == 200, "the journal is there again")
    for each in cluster.gateways:
        eventually(lambda each=each: each.get("/readyz")[0] == 200, "all partitions are there")


def test_a_machine_that_is_gone_comes_back_with_what_was_captured(cluster, tmp_path):
    gateway, lost = cluster.gateways[0], cluster.workers[1]
    capture_all(gateway, tmp_path, "mark")
    before = asyncio.run(seen(gateway))
    lost.kill()
    shutil.rmtree(lost.data_dir)
    told = restore(lost, tmp_path, "--partitions", "1,3")
    assert "restored to 2 partitions" in told
    description = read_description(lost.data_dir)
    assert (description.partitions, description.owned) == (4, (1, 3))
    assert verify(lost.data_dir).ok
    lost.start()
    eventually(lambda: gateway.get("/readyz")[0] == 200, "all partitions are there")
    after = asyncio.run(settled(gateway))
    for place, messages in before.items():
        assert {number: as_it_was(each) for number, each in after[place].items()} == {
            number: as_it_was(each) for number, each in messages.items()
        }, (place, told)


def test_only_certificates_of_the_namespace_read_the_journal(cluster):
    host, _, port = cluster.journals[0].rpartition(":")
    certificates = cluster.workers[0].directory.parent / "certificates"
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
        assert answer_to_nobody(plain, context, host) == b""


def answer_to_nobody(plain: socket.socket, context: ssl.SSLContext, host: str) -> bytes:
    """What a client without a certificate gets."""
    try:
        with context.wrap_socket(plain, server_hostname=host) as tls:
            tls.sendall(b"GET /$journal HTTP/1.1\r\nHost: journal\r\n\r\n")
            return tls.recv(100)
    except (ssl.SSLError, ConnectionError):
        return b""
