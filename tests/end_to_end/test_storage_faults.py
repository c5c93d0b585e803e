"""Disks that are full, files that are damaged, directories that cannot be used: what clients and operators see."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from storage.data_dir import partition_path
from storage.lmdb_store import LmdbStore
from storage.records import MESSAGE_HEADER_BYTES
from storage.store import Table
from tests.brokers import REPOSITORY, Broker, BrokerFailed
from tests.end_to_end.health import metrics, process_ids, send_numbers, serves
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message, outcome
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

FULL = "amqp:resource-limit-exceeded"
ONE_PARTITION = 'partitions = 1\n[[queues]]\nname = "witness"\n[[queues]]\nname = "orders"\n'
BODY = bytes(60_000)  # one transfer each


@pytest.fixture
def start(tmp_path):
    @contextmanager
    def start(config: str = ONE_PARTITION, **options):
        broker = Broker(tmp_path, config, **options)
        try:
            broker.start()
            yield broker
            assert "Traceback" not in broker.log_file.read_text(), broker.log()
        finally:
            broker.kill()

    return start


# --- full -------------------------------------------------------------------------------------------------------------

OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
can_mount = (
    shutil.which("unshare") is not None
    and subprocess.run([*OWN_MOUNTS, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0
)


def send_until_refused(peer: RawPeer, handle: int, most: int = 1000) -> tuple[int, str]:
    """How many were accepted, and the condition of the first refusal."""
    for count in range(most):
        peer.transfer(message(BODY), handle)
        answer = peer.expect(DISPOSITION)
        if answer.fields[4] != outcome(ACCEPTED):
            return count, error_of(answer)[0]
    assert most < 1000, "never full"
    return most, ""


def takes_and_refuses_as_it_should(broker: Broker, what: str | None, times: int = 2) -> None:
    """Sends are refused when it is full, what was accepted is received and completed, and then there is room again.

    `what` is full besides the queue; None if nothing is.
    """
    before = process_ids(broker)
    with RawPeer.connect(broker.amqp_port) as peer:
        sender, receiver = peer.attach_sender("orders"), peer.attach_receiver("orders")
        received = 0
        for _ in range(times):
            count, condition = send_until_refused(peer, sender)
            deadline = time.monotonic() + PATIENCE_S
            while count <= 20:  # what was freed can be used after the next checkpoint but one
                assert time.monotonic() < deadline, broker.log()
                time.sleep(0.5)
                more, condition = send_until_refused(peer, sender)
                count += more
            assert condition == FULL
            if what:
                eventually(lambda: refuses_sends(broker) == {"0": f"the {what} is nearly full"}, "/readyz says so")
                assert metrics(broker)["peeklock_partition_refuses_sends", "0"] == 1
                assert f'"reason": "the {what} is nearly full"' in broker.log()
            peer.flow(receiver, count, delivery_count=received)
            ids = [peer.expect(TRANSFER).fields[1] for _ in range(count)]
            received += count
            peer.settle(ids[0], ids[-1])
            settled = 0
            while settled < count:
                answer = peer.expect(DISPOSITION)
                assert answer.fields[4] == outcome(ACCEPTED)
                settled += (answer.fields[2] or answer.fields[1]) - answer.fields[1] + 1
        while send_until_refused(peer, sender, 1) == (0, FULL):
            assert time.monotonic() < deadline + PATIENCE_S, broker.log()
            time.sleep(0.5)
        peer.flow(receiver, 1, delivery_count=received)
        last = peer.expect(TRANSFER).fields[1]
        peer.settle(last, last)
    serves(broker.amqp_port)
    assert process_ids(broker) == before, broker.log()
    eventually(lambda: refuses_sends(broker) is None, "/readyz is as before")
    assert ('"event": "messages are taken again"' in broker.log()) == bool(what)


def refuses_sends(broker: Broker) -> dict[str, str] | None:
    status, body = broker.get("/readyz")
    assert status == 200
    found: dict[str, str] | None = json.loads(body).get("refuse_sends")
    return found


@pytest.mark.skipif(not can_mount, reason="needs a user namespace to mount a small disk in")
def test_on_a_full_disk_nothing_is_taken_and_all_is_given(start, tmp_path):
    mount = ("sh", "-c", 'mount -t tmpfs -o size=24m tmpfs "$1" && shift && exec "$@"', "sh", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    config = ONE_PARTITION.replace("\n", "\n[store]\nmin_free_disk_bytes = 8388608\nlog_bytes = 8388608\n", 1)
    with start(config, prefix=(*OWN_MOUNTS, *mount)) as broker:
        takes_and_refuses_as_it_should(broker, "disk")


def test_in_a_full_store_nothing_is_taken_and_all_is_given(start):
    config = ONE_PARTITION.replace("\n", "\n[store]\nmap_size_bytes = 16777216\n", 1)
    with start(config) as broker:
        takes_and_refuses_as_it_should(broker, "store", times=5)


def test_in_a_full_queue_nothing_is_taken_and_all_is_given(start):
    with start(ONE_PARTITION + "max_size_mb = 4\n") as broker:
        takes_and_refuses_as_it_should(broker, None)


# --- damaged ----------------------------------------------------------------------------------------------------------


def test_a_damaged_record_is_set_aside_and_counted_and_the_rest_is_served(start):
    with start() as broker:
        send_numbers(broker, "orders", 10)
        broker.stop()
        path = partition_path(broker.data_dir, 0)
        with closing(LmdbStore(path, partition_id=0, map_size_bytes=1 << 26, create=False)) as store:
            for key, value in list(store.scan(Table.MESSAGES, b"", b"\xff" * 9, 100)):
                if b"number 3" in value:
                    damaged = bytearray(value)
                    damaged[MESSAGE_HEADER_BYTES + 5] ^= 0xFF
                    store.put(Table.MESSAGES, key, bytes(damaged))
            store.commit()
        broker.start()
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach_receiver("orders", credit=20)
            got = [body_of(peer.expect(TRANSFER).payload) for _ in range(9)]
            assert got == [b"number %d" % number for number in range(10) if number != 3]
            peer.nothing_more(TRANSFER)
        assert metrics(broker)["peeklock_quarantined_records", "0"] == 2  # its body and its entry
        serves(broker.amqp_port)
        broker.stop()
        verified = subprocess.run(
            [sys.executable, "-m", "broker.cli", "verify", "--data-dir", str(broker.data_dir)],
            cwd=REPOSITORY, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "quarantine" in verified.stdout + verified.stderr
        broker.start()
        broker.stop()


@pytest.mark.parametrize("damage", ["header", "cut", "text"])
def test_a_store_that_cannot_be_read_is_named_and_left_as_it_is(start, damage):
    with start() as broker:
        send_numbers(broker, "orders", 3)
        broker.stop()
        [file] = [each for each in partition_path(broker.data_dir, 0).rglob("*") if each.name.startswith("data")]
        content = file.read_bytes()
        damaged = {
            "header": bytes(8192) + content[8192:],
            "cut": content[:5000],
            "text": b"this is not a store\n" * 1000,
        }[damage]
        file.write_bytes(damaged)
        with pytest.raises(BrokerFailed):
            broker.start()
        log = broker.log_file.read_text()
        assert re.search(r"^peeklock: .*partition", log, re.MULTILINE), log[-3000:]
        assert str(file.parent) in log
        assert file.read_bytes() == damaged
        file.write_bytes(content)
        broker.start()
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach_receiver("orders", credit=3)
            assert [body_of(peer.expect(TRANSFER).payload)[-1:] for _ in range(3)] == [b"0", b"1", b"2"]
        broker.stop()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 99}', b"\xff\xfe"], ids=repr)
def test_a_description_of_the_directory_that_cannot_be_read_is_named(start, content):
    with start() as broker:
        broker.stop()
        description = broker.data_dir / "peeklock.json"
        whole = description.read_bytes()
        description.write_bytes(content)
        with pytest.raises(BrokerFailed):
            broker.start()
        assert str(description) in broker.log_file.read_text()
        assert description.read_bytes() == content
        description.write_bytes(whole)
        broker.start()
        broker.stop()


# --- never started ----------------------------------------------------------------------------------------------------


def serve(tmp_path: Path, *arguments: str, config: str = "", environment: dict[str, str] | None = None):
    """`peeklock serve` that is expected to end by itself: (exit code, what it wrote)."""
    (tmp_path / "config.toml").write_text(config)
    [ops_port] = free_ports(1)
    command = [sys.executable, "-m", "broker.cli", "serve", "--config", str(tmp_path / "config.toml")]
    command += ["--ops-port", str(ops_port), "--http-port", "off", *arguments]
    if "--data-dir" not in arguments:
        command += ["--data-dir", str(tmp_path / "data")]
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("config", "names", "fix"),
    [
        ("[amqp]\nport = 70000\n", "amqp.port", "65535"),
        ('[amqp]\nport = "many"\n', "amqp.port", ""),
        ("[amqp]\nmax_frame_size_bytes = 100\n", "amqp.max_frame_size_bytes", "512"),
        ("[amqp]\nprot = 5672\n", "amqp.prot", "did you mean port?"),
        ("[ampq]\nport = 5672\n", "ampq", "amqp"),
        ("partitions = 0\n", "partitions", "1"),
        ("partitions = 2\nworkers = 5\n", "workers", "2"),
        ('[[queues]]\nname = "bad name!"\n', "queues", "name"),
        ('[[queues]]\nname = "q"\nlock_duration_ms = 1\n', "lock_duration_ms", "5000"),
        ('[[queues]]\nname = "q"\n[[queues]]\nname = "Q"\n', "queues", "declared twice"),
        ("[amqp]\ntls_port = 5671\n", "tls_port", "tls.certificate"),
        ('[amqp]\nhost = "0.0.0.0"\n[security]\nallow_anonymous = true\n', "security.allow_anonymous", "127.0.0.1"),
        ('[log]\nlevel = "loud"\n', "log.level", "info"),
        ("[store]\nsend_watermark = 2\n", "store.send_watermark", "1"),
        ("this is not TOML", "config.toml", ""),
        ("[amqp", "config.toml", ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_setting_ends_with_code_78_its_name_and_the_fix(tmp_path, config, names, fix):
    code, written = serve(tmp_path, config=config)
    assert code == 78, written
    assert names in written
    assert fix in written
    assert "Traceback" not in written
    assert not (tmp_path / "data").exists()


def test_a_wrong_setting_in_the_environment_is_named_as_it_is_spelled_there(tmp_path):
    code, written = serve(tmp_path, environment={"PEEKLOCK_AMQP__PORT": "seventy"})
    assert code == 78
    assert "PEEKLOCK_AMQP__PORT" in written
    assert "Traceback" not in written


def test_a_configuration_that_is_missing_is_named(tmp_path):
    code, written = serve(tmp_path, "--config", str(tmp_path / "nowhere.toml"))
    assert code == 78
    assert "nowhere.toml" in written
    assert "Traceback" not in written


@pytest.mark.parametrize("where", ["/proc/peeklock", "/dev/null/data", "file/data"])
def test_a_data_directory_that_cannot_be_made_is_named(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    place = where if where.startswith("/") else str(tmp_path / where)
    code, written = serve(tmp_path, "--data-dir", place)
    assert code == 78, written
    assert place in written
    assert "Traceback" not in written


@pytest.mark.skipif(not can_mount, reason="needs a user namespace to mount a disk that cannot be written")
def test_a_data_directory_that_cannot_be_written_is_named(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    ports = free_ports(2)
    mount = ("sh", "-c", 'mount -t tmpfs -o ro tmpfs "$1" && shift && exec "$@"', "sh", str(data))
    command = [
        *OWN_MOUNTS,
        *mount,
        sys.executable,
        "-m",
        "broker.cli",
        "serve",
        "--data-dir",
        str(data),
        "--emulator",
    ]
    command += ["--amqp-port", str(ports[0]), "--ops-port", str(ports[1]), "--http-port", "off"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    written = ended.stdout + ended.stderr
    assert ended.returncode == 78, written
    assert str(data) in written
    assert "Read-only" in written or "read-only" in written
    assert "Traceback" not in written


def test_a_key_file_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path):
    (tmp_path / "data").mkdir()
    key = tmp_path / "data" / "root-key"
    key.write_text("secret\n")
    key.chmod(0o644)
    code, written = serve(tmp_path, "--amqp-port", "0")
    assert code == 78, written
    assert f"chmod 600 {key}" in written
    assert "secret" not in written
    assert "Traceback" not in written


def test_the_log_is_lines_of_json_whatever_peers_do(start):
    with start() as broker:
        with RawPeer(broker.amqp_port) as peer:
            peer.send(b'"}\n{"event": "forged"}\r\n' + bytes(100))
            peer.wait_closed()
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach(sender=True, address='x"}\n{"event": "forged"}')
            peer.refusal()
        eventually(lambda: "authentication failed" in broker.log_file.read_text(), "logged")
        events = [
            json.loads(line).get("event") for line in broker.log_file.read_text().splitlines() if line.startswith("{")
        ]
        assert "forged" not in events
        assert "connection opened" in events
        broker.stop()
