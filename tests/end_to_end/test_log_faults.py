"""Commit logs whose disk fails or hangs, or that are damaged: what clients and operators see."""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from storage.log.frames import BLOCK_BYTES
from storage.log.recovery import log_directory
from storage.log.segments import segment_numbers, segment_path
from tests.brokers import Broker, BrokerFailed
from tests.end_to_end.health import elsewhere, is_ready, logged, metrics, serves
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, Closed, RawPeer, body_of, error_of, message
from tests.patience import PATIENCE_S, eventually
from tests.without_calls import OPENAT, without

FAULTY_DISK = Path(__file__).with_name("faulty_disk")
needs_filters = pytest.mark.skipif(OPENAT == -1, reason="the numbers of system calls are not known here")
STALL_MS = 3000
CONFIG = f"""
partitions = 1
worker_stall_timeout_ms = {STALL_MS}
[[queues]]
name = "witness"
[[queues]]
name = "orders"
"""


OTHER = elsewhere("witness")
TWO_PARTITIONS = f"""
partitions = 2
[[queues]]
name = "witness"
[[queues]]
name = "{OTHER}"
"""


def send(broker: Broker, count: int, queue: str = "orders") -> list[bytes]:
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(queue)
        bodies = [f"{time.monotonic()} {number}".encode() for number in range(count)]
        for body in bodies:
            peer.transfer(message(body), handle)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    return bodies


def received(broker: Broker, most: int, queue: str = "orders") -> list[bytes]:
    found = []
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(queue, credit=most)
        try:
            while len(found) < most:
                found.append(body_of(peer.expect(TRANSFER, 2).payload))
        except TimeoutError:
            pass
    return found


@pytest.fixture
def faulty(tmp_path):
    """Starts a broker without the system calls that are named, and gives the file that makes its disk fail."""
    with ExitStack() as stack:

        def start(*calls, workers):
            fault = tmp_path / "fault"
            prefix = ("env", f"PYTHONPATH={FAULTY_DISK}", f"FAULT={fault}", *without(*calls))
            broker = stack.enter_context(Broker(tmp_path / "broker", CONFIG, prefix=prefix, workers=workers))
            stack.callback(lambda: no_traceback(broker))
            return broker, fault

        yield start


def no_traceback(broker: Broker) -> None:
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def said(fault: Path, what: str) -> None:
    """Let the disk do so from now on."""
    fault.with_suffix(".new").write_text(what)
    fault.with_suffix(".new").rename(fault)


def hears_nothing_for_sure(peer: RawPeer, workers: int) -> None:
    """The client of a send that the worker has not answered; its connection ends with the process that has it."""
    if workers:
        assert "timeout" in error_of(peer.expect(DISPOSITION, PATIENCE_S))[0]
    else:
        with pytest.raises(Closed):
            peer.expect(DISPOSITION, PATIENCE_S)


CALLS = [("pwrite", ("aio",)), ("fdatasync", ("aio", "direct"))]
EACH_FORM = pytest.mark.parametrize("workers", [1, 0])


@needs_filters
@pytest.mark.parametrize(("call", "missing", "workers"), [(*CALLS[0], 1), (*CALLS[1], 1), (*CALLS[0], 0)])
def test_a_worker_whose_disk_hangs_is_replaced_and_nothing_accepted_is_lost(faulty, call, missing, workers):
    broker, fault = faulty(*missing, workers=workers)
    bodies = send(broker, 20)
    before = broker.worker()
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("orders")
        said(fault, f"{call} wait")
        peer.transfer(message(b"in doubt"), handle)
        eventually(lambda: logged(broker, "process stalled"), "noticed")
        before.wait(PATIENCE_S)
        fault.unlink()
        hears_nothing_for_sure(peer, workers)
    eventually(lambda: is_ready(broker), "it serves")
    serves(broker.amqp_port)
    bodies += send(broker, 3)
    found = received(broker, 24)
    assert [body for body in found if body != b"in doubt"] == bodies


@needs_filters
@EACH_FORM
@pytest.mark.parametrize("number", ["EIO", "EROFS"])
@pytest.mark.parametrize(("call", "missing"), CALLS)
def test_a_worker_whose_disk_fails_ends_and_nothing_accepted_is_lost(faulty, call, missing, number, workers):
    broker, fault = faulty(*missing, workers=workers)
    bodies = send(broker, 20)
    before = broker.worker()
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("orders")
        said(fault, f"{call} {number}")
        peer.transfer(message(b"in doubt"), handle)
        before.wait(PATIENCE_S)
        fault.unlink()
        hears_nothing_for_sure(peer, workers)
    assert "store failed" in broker.log_file.read_text()
    eventually(lambda: is_ready(broker), "it serves")
    bodies += send(broker, 3)
    found = received(broker, 24)
    assert [body for body in found if body != b"in doubt"] == bodies


def segment_flags(broker: Broker) -> list[int]:
    """How the worker has opened the segments of its log."""
    descriptors = Path(f"/proc/{broker.worker().pid}/fd")
    segments = [each.name for each in descriptors.iterdir() if "/segment-" in str(each.readlink())]
    texts = [(descriptors.with_name("fdinfo") / name).read_text() for name in segments]
    return [int(re.search(r"^flags:\s*(\d+)$", text, re.MULTILINE)[1], 8) for text in texts]


@needs_filters
@pytest.mark.parametrize("missing", [("direct",), ("aio",), ("direct", "aio")])
def test_a_log_without_direct_writes_or_aio_holds_what_was_accepted(tmp_path, missing):
    with Broker(tmp_path, CONFIG, prefix=without(*missing)) as broker:
        bodies = send(broker, 20)
        if "direct" in missing:
            flags = segment_flags(broker)
            assert flags
            assert not any(each & os.O_DIRECT for each in flags)
        for _ in range(2):
            broker.kill()
            broker.start()
            bodies += send(broker, 3)
        assert received(broker, 50) == bodies


@EACH_FORM
def test_a_checkpointer_that_is_killed_is_started_again_and_nobody_notices(tmp_path, workers):
    with Broker(tmp_path, CONFIG, workers=workers) as broker:
        bodies = send(broker, 5)
        worker = broker.worker().pid
        for _ in range(3):
            before = broker.checkpointer().pid
            os.kill(before, signal.SIGKILL)
            bodies += send(broker, 5)
            eventually(lambda before=before: running(broker, before), "it is started again")
        assert broker.worker().pid == worker
        broker.kill()
        broker.start()
        assert received(broker, len(bodies)) == bodies


def running(broker, before):
    found = [each.pid for each in broker.processes() if "storage.log.checkpointer" in each.cmdline()]
    return found not in ([], [before])


def test_a_damaged_log_that_nobody_needs_is_put_aside(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        bodies = send(broker, 5)
        broker.stop()
        directory = log_directory(broker.data_dir, 0)
        for number in segment_numbers(directory):
            segment_path(directory, number).write_bytes(b"garbage" * 1000)
        broker.start()
        assert received(broker, 5) == bodies
        assert logged(broker, "a damaged log, which no partition needs, was put aside")
        assert (directory.with_name("0.damaged-1") / "segment-0").exists()
        broker.kill()
        broker.start()
        assert received(broker, 5) == bodies


def flip(directory: Path) -> None:
    """A bit of the first frame of the segment that was written last; it has more than one."""
    paths = [segment_path(directory, number) for number in segment_numbers(directory)]
    used = [path for path in paths if path.read_bytes()[BLOCK_BYTES:].startswith(b"TurN")]
    path = max(used, key=lambda each: each.stat().st_mtime_ns)
    content = bytearray(path.read_bytes())
    content[BLOCK_BYTES + 20] ^= 1
    path.write_bytes(content)


def test_partitions_of_a_damaged_log_are_parked_and_the_others_are_served(tmp_path):
    assert home_partition(OTHER, 2) == 1, "the catalog is on the other partition"
    with Broker(tmp_path, TWO_PARTITIONS, workers=2) as broker:
        send(broker, 10, OTHER)
        send(broker, 10, "witness")
        broker.kill()
        directory = log_directory(broker.data_dir, 1)
        whole = {path: path.read_bytes() for path in directory.iterdir()}
        flip(directory)
        broker.start()
        eventually(lambda: metrics(broker).get(("peeklock_partition_parked", "1")) == 1, "it is parked")
        assert "is damaged or missing" in broker.log_file.read_text()
        assert len(received(broker, 10, "witness")) == 10
        # The log was kept for it. When that is mended, everything is there.
        broker.stop()
        for path, content in whole.items():
            (broker.data_dir / "partitions" / "1" / "logs" / "1" / path.name).write_bytes(content)
        broker.start()
        assert len(received(broker, 10, OTHER)) == 10


def test_a_damaged_log_of_the_catalog_is_named_and_nothing_is_started(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        send(broker, 10)
        broker.kill()
        directory = log_directory(broker.data_dir, 0)
        whole = {path: path.read_bytes() for path in directory.iterdir()}
        flip(directory)
        damaged = {path: path.read_bytes() for path in directory.iterdir()}
        with pytest.raises(BrokerFailed, match=r"logs/0/segment-\d+.* is damaged or missing"):
            broker.start()
        assert {path: path.read_bytes() for path in directory.iterdir()} == damaged
        for path, content in whole.items():
            path.write_bytes(content)
        broker.start()
        assert len(received(broker, 10)) == 10
