"""Whether a broker took harm: its processes, its log, and what another client gets from it."""

import re
import time

import psutil
from prometheus_client.parser import text_string_to_metric_families

from broker.catalog.catalog import home_partition
from storage.data_dir import partition_path
from tests.brokers import Broker
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, message

WITNESS = "witness"


def process_ids(broker: Broker) -> list[int]:
    return sorted(process.pid for process in broker.processes())


def assert_unharmed(broker: Broker, before: list[int]) -> None:
    """Another client sends, receives and completes; no process was replaced; nothing unforeseen is in the log."""
    serves(broker.amqp_port)
    assert_undisturbed(broker, before)


def assert_undisturbed(broker: Broker, before: list[int]) -> None:
    """No process was replaced; nothing unforeseen is in the log."""
    assert process_ids(broker) == before, f"a process has died\n{broker.log()}"
    log = broker.log_file.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:5000]


def serves(port: int, queue: str = WITNESS) -> None:
    """A well-behaved client sends a message to its own queue, gets it, and completes it."""
    body = f"witness at {time.monotonic()}".encode()
    with RawPeer.connect(port) as peer:
        sender = peer.attach_sender(queue)
        peer.transfer(message(body), sender)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        receiver = peer.attach_receiver(queue, credit=1)
        delivery = peer.expect(TRANSFER)
        assert delivery.fields[0] == receiver
        assert body_of(delivery.payload) == body
        peer.settle(delivery.fields[1])
        answer = peer.expect(DISPOSITION)
        assert answer.fields[0] is False
        assert answer.fields[3] is True
        assert answer.fields[4].descriptor == ACCEPTED
        peer.close()


def metrics(broker: Broker) -> dict[tuple[str, ...], float]:
    """Samples by (name, label value, ...); those of all gateways together."""
    status, text = broker.get("/metrics")
    assert status == 200
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, *(value for label, value in sample.labels.items() if label != "gateway")
            found[key] = found.get(key, 0) + sample.value
    return found


def is_ready(broker: Broker) -> bool:
    try:
        return broker.get("/readyz", timeout_s=2.0)[0] == 200  # who answers late is not ready
    except OSError:  # nobody listens
        return False


def logged(broker: Broker, pattern: str) -> bool:
    return re.search(pattern, broker.log_file.read_text(errors="replace")) is not None


def worker_of(broker: Broker, partition: int) -> psutil.Process:
    """The worker that has this partition."""
    store = str(partition_path(broker.data_dir, partition))
    return next(each for each in broker.worker_processes() if any(store in file.path for file in each.open_files()))


def elsewhere(queue: str) -> str:
    """The name of a queue that lives on the other of two partitions."""
    names = map("queue-{}".format, range(99))
    return next(name for name in names if home_partition(name, 2) != home_partition(queue, 2))


def send_numbers(broker: Broker, queue: str, count: int, padding: int = 0) -> None:
    """Send `number 0`, `number 1` and so on, each when the one before was accepted."""
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(queue)
        for number in range(count):
            peer.transfer(message(b"number %d" % number + bytes(padding)), handle)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
